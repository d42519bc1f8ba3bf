"""More cases of a test than everybody runs: ``pytest -m thorough`` runs them, as CI does."""

import pytest


def in_turn(cases):
    """Return every other case, then the rest, so that those which go first are of all kinds."""
    return [*cases[::2], *cases[1::2]]


def thorough_after(number, cases):
    """Return the cases for ``parametrize``, with those after the first ``number`` thorough."""
    more = (case if isinstance(case, tuple) else (case,) for case in cases[number:])
    return [*cases[:number], *(pytest.param(*case, marks=pytest.mark.thorough) for case in more)]
