"""Compare a function's answer with the answer that a set of known bugs predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import Answer
from minimha.check.rounding import FORMATS, rounded
from minimha.check.wrong_attention import Deviated

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Fit:
    """The comparison of an answer with the prediction of a hypothesis."""

    is_explained: bool
    # A pair for the output, and one for the log-sum-exp if compared: where the answer differs from
    # the prediction, and where the prediction allows any number. Empty if the shapes differ.
    wrong: tuple[tuple[Array, Array], ...] = ()
    error: float = np.inf  # the largest difference
    bound: float = 0.0  # the largest difference that rounding explains

    @property
    def is_mute(self) -> bool:
        """Return whether the prediction allows any answer."""
        return all(bool(is_free.all()) for _, is_free in self.wrong)

    def tells_more_than(self, other: Fit) -> bool:
        """Return whether this fit predicts a number that ``other`` gets wrong.

        A prediction that allows any number does not count.
        """
        if not other.wrong or not self.wrong:
            return self.is_explained and not self.is_mute
        pairs = zip(self.wrong, other.wrong, strict=False)
        return self.is_explained and any(
            there.shape != is_free.shape or bool((there & ~is_free).any())
            for (_, is_free), (there, _) in pairs
        )


def compare(
    answer: Answer, prediction: Deviated | None, asks_lse: bool, rounded_to: str | None = None,
    *, measures: bool = True,
) -> Fit:  # fmt: skip
    """Compare an answer with a prediction, within the bounds of rounding.

    ``rounded_to`` is the format to which the output was rounded, if coarser than its dtype. Unless
    it ``measures``, the fit has no error and no bound.
    """
    if prediction is None or answer.output is None:
        return Fit(False)
    p, got = prediction, np.asarray(answer.output, np.float64)
    if got.shape != p.output.shape:
        return Fit(False)
    with np.errstate(all="ignore"):
        bound = p.bound
        if rounded_to is not None:
            bits, exponent = FORMATS[rounded_to]
            size = np.where(np.isfinite(p.output), abs(p.output), 0)
            bound = bound + 2.0**-bits * size + 2.0 ** (2 - exponent - bits)
        near = _near(got, p.output, bound) | p.is_free
        for other in p.others:
            near |= _near(got, other, bound)
        if rounded_to is not None:  # numbers beyond its range became infinite
            near |= np.isinf(got) & (got == rounded(p.output, bits, exponent))
        wrong, pairs = [(~near, p.is_free)], [(got, p.output)]
        if asks_lse and answer.lse is not None:
            L = np.asarray(answer.lse, np.float64)
            if L.shape != p.lse.shape:
                return Fit(False)
            wrong.append((~(_near(L, p.lse, p.lse_bound) | p.is_lse_free), p.is_lse_free))
            pairs.append((L, p.lse))
        is_explained = not any(where.any() for where, _ in wrong)
        if not measures:
            return Fit(is_explained, tuple(wrong))
        error = max(_distance(*pair) for pair in pairs)
    largest = float(np.nan_to_num(p.bound).max(initial=0))
    return Fit(is_explained, tuple(wrong), error, largest)


def _near(got: Array, wanted: Array, bound: Array) -> Array:
    near = (abs(got - wanted) <= bound) | (got == wanted)
    return np.asarray(near | (np.isnan(got) & np.isnan(wanted)))


def _distance(got: Array, wanted: Array) -> float:
    """Return the largest difference, infinite if only one of two numbers is finite."""
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    difference = np.where(same, 0, abs(got - wanted))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))
