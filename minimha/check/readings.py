"""Read facts, such as the scale, from answers that no known deviation explains.

With V = I the output is the weights. The logarithms of a row's weights are linear in its products q
· k, and the slope is the scale. Weights that are not 0 show which keys are visible. If some weights
are 0 and the others too large by one common factor, they show dropout. The median error shows how
many bits the arithmetic keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import Answer
from minimha.check.problems import MANY, Graded

Array = NDArray[Any]

FIT = 0.999  # the least R² of a line through log-weights
SHARED = 0.02  # relative difference of numbers that count as equal
LARGER = 1.005  # the least factor by which weights count as too large


@dataclass(frozen=True)
class Reading:
    """A number or a fact that the answers show; ``fit`` is R² of the fitted line, else 1."""

    name: str
    value: str
    fit: float = 1.0


class Weights:
    """The attention weights of a function, (B, H, Lq, Lk), on each problem with V = I."""

    def __init__(self, problems: Sequence[Graded], answers: Sequence[Answer]) -> None:
        self.found: dict[str, tuple[Graded, Array]] = {}
        for problem, answer in zip(problems, answers, strict=True):
            if "weights" not in problem.name or answer.output is None:
                continue
            v = problem.arguments["v"]
            if answer.output.shape == (*problem.arguments["q"].shape[:3], v.shape[3]):
                self.found[problem.name] = problem, np.asarray(answer.output, np.float64)

    def __getitem__(self, name: str) -> tuple[Graded, Array] | None:
        return self.found.get(name)


def read(problems: Sequence[Graded], answers: Sequence[Answer]) -> list[Reading]:
    """Return all facts that the answers show, most informative first."""
    weights = Weights(problems, answers)
    is_random = any("not_deterministic" in answer.faults for answer in answers)
    readings = [
        scale(weights), dropout(weights, is_random), lost_keys(weights),
        *visibility(weights),
    ]  # fmt: skip
    return [reading for reading in readings if reading is not None]


def scale(weights: Weights) -> Reading | None:
    """Return the scale, in a form that fits all problems with V = I, such as 1/sqrt(D).

    If no form fits, it is a multiple of 1/sqrt(D) that fits the first problem. Returns None if the
    log-weights of no problem lie on a line.
    """
    slopes = []
    for name in ("weights", "weights of two heads"):
        found = weights[name]
        fitting = line(*found) if found else None
        if found and fitting:
            slopes.append((found[0].arguments, *fitting))
    if not slopes:
        return None
    fit = min(r2 for _, _, r2 in slopes)
    forms: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "1/sqrt(D)": lambda a: 1 / sqrt(a["q"].shape[3]),
        "1/D": lambda a: 1 / a["q"].shape[3],
        "1": lambda a: 1.0,
        "1/sqrt(Lk)": lambda a: 1 / sqrt(a["k"].shape[2]),
        "1/sqrt(Lq)": lambda a: 1 / sqrt(a["q"].shape[2]),
        "1/sqrt(H)": lambda a: 1 / sqrt(a["q"].shape[1]),
        "1/sqrt(H · D)": lambda a: 1 / sqrt(a["q"].shape[1] * a["q"].shape[3]),
        "1/sqrt(Dv)": lambda a: 1 / sqrt(a["v"].shape[3]),
    }
    for form, value in forms.items():
        factors = [slope / value(arguments) for arguments, slope, _ in slopes]
        mean = sum(factors) / len(factors)
        if max(abs(f - mean) for f in factors) <= SHARED * abs(mean):
            return Reading("scale", _times(mean, form), fit)
    return Reading(
        "scale", _times(slopes[0][1] * sqrt(slopes[0][0]["q"].shape[3]), "1/sqrt(D)"), fit
    )


def _times(factor: float, form: str) -> str:
    if abs(factor - 1) < 5e-4:
        return form
    return f"{factor:.3f}{form[1:]}" if form != "1" else f"{factor:.3f}"


def line(problem: Graded, A: Array) -> tuple[float, float] | None:
    """Fit a line to log-weights over products q · k: return its slope and R², or None.

    None means that R² is small, or that a weight is 0 or not finite.
    """
    q, k = (np.asarray(problem.arguments[n], np.float64) for n in "qk")
    S = q @ k.swapaxes(-1, -2)
    if not ((A > 0) & np.isfinite(A)).all():
        return None
    y, x = (z - z.mean(-1, keepdims=True) for z in (np.log(A), S))
    slope = float((x * y).sum() / (x * x).sum())
    variation = float((y**2).sum())
    r2 = 1 - float(((y - slope * x) ** 2).sum()) / variation if variation else 0.0
    return (slope, r2) if r2 > FIT else None


def dropout(weights: Weights, is_random: bool) -> Reading | None:
    """Return the share of weights that dropout set to 0, or None if no zeros come from dropout.

    The other weights must be too large by one common factor. If that factor is about 1, zeros count
    as dropout only if two runs differed (``is_random``): zeros that stay the same may be lost keys.
    """
    found = weights["weights"], weights["weights of two heads"], weights[f"weights of {MANY} keys"]
    zeros = count = 0
    factors: list[float] = []
    for pair in found:
        if pair is None:
            continue
        problem, A = pair
        right = _right_weights(problem)
        is_zero = A == 0
        zeros, count = zeros + int(is_zero.sum()), count + A.size
        factors += list((A / right)[~is_zero])
    if not 0 < zeros < count or not factors or not np.isfinite(factors).all():
        return None
    mean = float(np.mean(factors))
    if np.ptp(factors) > SHARED * abs(mean) or mean <= 0:
        return None
    if mean < LARGER and not is_random:
        return None
    return Reading("dropout", f"{zeros / count:.0%} of the weights are 0, others × {mean:.3f}")


def _right_weights(problem: Graded) -> Array:
    from minimha.layers import attention_weights

    q, k = (np.asarray(problem.arguments[n], np.float64) for n in "qk")
    return np.asarray(attention_weights(q, k, backend="dense"))


def lost_keys(weights: Weights) -> Reading | None:
    """Return the keys that no query gives weight, as in a dropped last block; None without any."""
    found = weights[f"weights of {MANY} keys"]
    if found is None or not np.isfinite(found[1]).all():
        return None
    A = found[1]
    lost = np.flatnonzero((A == 0).all((0, 1, 2)))
    if not 0 < len(lost) < A.shape[-1]:
        return None
    return Reading("keys without weight", f"{_ranges(lost)} of {MANY}")


def _ranges(numbers: Array) -> str:
    """Return text such as ``0, 16-18`` for 0, 16, 17, 18, with at most six ranges."""
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    texts = [f"{g[0]}" if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups]
    return ", ".join(texts[:6]) + (" …" if len(texts) > 6 else "")


def visibility(weights: Weights) -> list[Reading]:
    """Return which keys query i sees under causality or a window, if one rule describes them."""
    readings = []
    for name, (problem, A) in weights.found.items():
        if not {"is_causal", "window_size"} & set(problem.options) or not np.isfinite(A).all():
            continue
        offset = int(problem.options.get("q_offset", 0))
        rule = _band(A[0, 0] > 1e-9)
        if rule is not None:
            at = f" (q_offset {offset})" if offset else ""
            readings.append(Reading(f"{name}{at}", f"query i sees keys {rule}"))
    return readings


def _band(visible: Array) -> str | None:
    """Return a rule for the visible keys such as ``i - 2 <= j <= i + 1``; None if no rule fits."""
    Lq, Lk = visible.shape
    i, j = np.indices(visible.shape)
    if not visible.any():
        return None
    distances = np.asarray(j - i)
    low, high = int(distances[visible].min()), int(distances[visible].max())
    if not np.array_equal(visible, (distances >= low) & (distances <= high)):
        return None
    left = "" if low <= 1 - Lq else f"{_shifted(low)} <= "
    right = "" if high >= Lk - 1 else f" <= {_shifted(high)}"
    return f"{left}j{right}" if left or right else "all"


def _shifted(by: int) -> str:
    return "i" if by == 0 else f"i {'+' if by > 0 else '-'} {abs(by)}"


def precision(errors: Sequence[tuple[float, float]]) -> tuple[Reading, ...]:
    """Return how many bits the median answer keeps, as a tuple of at most one reading.

    ``errors`` has pairs (error, size of output).
    """
    relative = [error / size for error, size in errors if size > 0 and 0 < error < 0.05 * size]
    if not relative or len(relative) < len(errors) / 2:
        return ()
    return (Reading("precision", f"about {-log2(float(np.median(relative))):.0f} bits are right"),)
