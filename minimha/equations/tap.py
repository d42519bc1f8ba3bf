"""A tap is an identity function that may record what passes through it.

The equations pass every intermediate through ``tap(name, value)`` and continue with the value that
it returns, so that a line with a tap still reads as mathematics. ``no_tap`` records nothing;
``explain.Trace`` records everything. A value is an array, or text: the source of a caller's
function, which is heard before the step that it makes.
"""

from collections.abc import Callable
from typing import Any

Tap = Callable[[str, Any], Any]


def no_tap(name: str, value: Any) -> Any:
    """Return ``value`` unchanged."""
    return value


def renamed(tap: Tap, **names: str | None) -> Tap:
    """Return a tap to which ``old`` is ``new`` for each ``old="new"``; None drops the name.

    A layer uses it where the result of one equation is one of its own intermediates.

    >>> heard = []
    >>> tap = renamed(lambda name, value: heard.append(name) or value, output="head_output", q=None)
    >>> tap("q", 2.0), tap("output", 1.0), tap("weights", 0.5), heard
    (2.0, 1.0, 0.5, ['head_output', 'weights'])
    """
    if tap is no_tap:  # returned as it is, since a backend that cannot be tapped accepts only this
        return no_tap

    def hear(name: str, value: Any) -> Any:
        new = names.get(name, name)
        return value if new is None else tap(new, value)

    return hear


def staged(tap: Tap, stage: str) -> Tap:
    """Return a tap to which every name is ``name[stage]``, so that several layers can share it.

    >>> heard = []
    >>> staged(lambda name, value: heard.append(name) or value, "decoder")("q", 2.0), heard
    (2.0, ['q[decoder]'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{name}[{stage}]", value)


def prefixed(tap: Tap, prefix: str) -> Tap:
    """Return a tap to which every name begins with ``prefix``, for an equation used twice.

    >>> heard = []
    >>> tap = prefixed(lambda name, value: heard.append(name) or value, "final_")
    >>> tap("normed", 2.0), heard
    (2.0, ['final_normed'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{prefix}{name}", value)
