"""Test relations between answers that hold for any attention, in all conventions.

A relation compares a function's answers with each other, and needs no list of known bugs. The
weights of a row sum to 1. The output is linear in V. Neither the order of the keys nor a constant
added to a row's scores matters. Parts merged by their log-sum-exp equal the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import Answer

Array = NDArray[Any]


def broken(answers: Mapping[str, Answer], tolerance: float) -> dict[str, str]:
    """Return the relations that the answers break, each with a sentence of evidence.

    ``answers`` are keyed by the names of problems. ``tolerance`` is the largest difference,
    relative to the largest output, that rounding explains.
    """
    outputs = {name: a.output for name, a in answers.items() if a.output is not None}
    whole = outputs.get("one head")
    if whole is None or not np.isfinite(whole).all():
        return {}
    size = float(abs(whole).max(initial=0))
    found = {}
    for name, sentence in (
        ("keys permuted", "the order of the keys, values with them, changes the output by {:.2g}"),
        ("keys shifted", "a constant added to a row's scores changes the output by {:.2g}"),
    ):
        difference = _difference(outputs.get(name), whole)
        if difference > tolerance * size:
            found[name] = sentence.format(difference)
    difference = _difference(outputs.get("values doubled"), 2 * whole)
    if difference > 2 * tolerance * size:
        found["values doubled"] = (
            f"with V doubled, the output differs by {difference:.2g} from twice"
        )
    ones = outputs.get("values of 1")
    if ones is not None and np.isfinite(ones).all() and abs(ones - 1).max() > tolerance:
        found["weights sum to 1"] = (
            f"rows of weights sum to {ones.min():.3g} up to {ones.max():.3g}"
        )
    difference = _difference(_merged(answers), whole)
    if difference > tolerance * size:
        found["keys split"] = (
            f"two parts merged by their log-sum-exp differ by {difference:.2g} from the whole"
        )
    return found


def _difference(got: Array | None, wanted: Array) -> float:
    """Return the largest absolute difference, or 0 if an answer is missing or has another shape."""
    if got is None or got.shape != wanted.shape:
        return 0.0
    difference = abs(got - wanted)
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def _merged(answers: Mapping[str, Answer]) -> Array | None:
    """Return the output for all keys, merged from those for the first three and the last four."""
    pairs = [
        (np.asarray(answer.lse, np.float64), np.asarray(answer.output, np.float64))
        for answer in map(answers.get, ("first three keys", "last four keys"))
        if answer is not None and answer.output is not None and answer.lse is not None
    ]
    shapes = {(lse.shape, output.shape[:-1]) for lse, output in pairs}
    if len(pairs) < 2 or len(shapes) > 1 or len(set(*shapes)) > 1:
        return None
    L, O = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    with np.errstate(all="ignore"):
        weights = np.exp(L - L.max(0))
        return np.asarray((weights[..., None] * O).sum(0) / weights.sum(0)[..., None])
