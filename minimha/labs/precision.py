"""Show the errors of casting weights P, block by block in two orders, and values V to 8 bits."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.eight_bits import LARGEST
from minimha.explain.chart import Axis, Lines
from minimha.explain.result import Result, Table

NUM_QUERIES, NUM_KEYS, D, B_c, NUM_SINKS = 64, 1024, 64, 128, 4
GAPS = tuple(range(0, 17, 2))
FACTORS = (1.0, 256.0)
SHOWN_GAP = 10
OUTLIER = 100.0  # the factor of one value's numbers
SMALLEST = 2.0**-9  # the smallest positive float8_e4m3fn; half of it is rounded to 0
TITLE = "what 8 bits do to weights and values"
ABOUT = (
    f"{NUM_QUERIES} queries, {NUM_KEYS} keys in blocks of {B_c}. Scores are drawn from N(0, 1); "
    f"those of the first {NUM_SINKS} keys, the sinks, are higher by a gap. Values are drawn from "
    f"N(0, 1), and those of sinks are 0. An online softmax casts P = exp(S − m), times a factor, "
    f"to float8_e4m3fn before it multiplies V; the maximum m is that of the blocks so far (after "
    f"Lau, arXiv 2606.06521, 2026)."
)


class Row(NamedTuple):
    """Statistics of casting P at one ``gap``, with blocks in forward and in backward order.

    ``lost`` is the share of weights that become 0, among the weights of keys that are not sinks.
    ``error`` is the relative error of outputs. ``256`` in a field's name means that P is multiplied
    by 256 before the cast.
    """

    gap: int
    forward_lost: float
    forward_error: float
    forward_256_lost: float
    forward_256_error: float
    backward_lost: float
    backward_error: float
    backward_256_lost: float
    backward_256_error: float


class Step(NamedTuple):
    """One block of query 0, in which P is cast.

    ``m`` is the maximum so far. ``largest`` is the largest weight of keys that are not sinks, and
    ``cast`` its value after the cast. ``lost`` is the share of these keys' weights that become 0.
    """

    order: str
    keys: str
    m: float
    largest: float
    cast: float
    lost: float


class OfValues(NamedTuple):
    """Relative errors of an output whose values V are cast to ``dtype``.

    There is one scale for each ``per`` ("tensor" or "token"). ``error_with_outlier`` is the error
    if a token that queries do not see has large values.
    """

    dtype: str
    per: str
    error: float
    error_with_outlier: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: cast P for gaps from 0 to 16 and both orders, then cast V."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((NUM_QUERIES, NUM_KEYS))
    V = rng.standard_normal((NUM_KEYS, D))
    V[:NUM_SINKS] = 0
    rows = tuple(_row(gap, noise, V) for gap in GAPS)
    steps = tuple(
        step
        for order in ("forward", "backward")
        for step in attend(_scores(noise[:1], SHOWN_GAP), V, order == "backward")[2]
    )
    values = _of_values(noise, V)
    lost, error = "{:.1%}".format, "{:.2g}".format
    columns = {"gap": "{}".format}
    for name in ("forward", "forward, × 256", "backward", "backward, × 256"):
        columns |= {f"{name}: lost": lost, f"{name}: error": error}
    step_columns = {
        "order": "{}".format, "keys": "{}".format, "m": "{:.2f}".format, "largest P": error,
        "largest P, cast": error, "lost": lost,
    }  # fmt: skip
    of_values = dict.fromkeys(("V", "scales"), "{}".format)
    of_values |= dict.fromkeys(("error", "with an outlier"), error)
    gap = Axis("gap between sinks and other scores")
    errors = {
        "forward": tuple(row.forward_error for row in rows),
        "forward, × 256": tuple(row.forward_256_error for row in rows),
        "backward": tuple(row.backward_error for row in rows),
    }
    return Result(
        "precision", TITLE, ABOUT, seed,
        (
            Table("weights cast to 8 bits: weights lost, and relative error", columns, rows),
            Table(f"one query, gap {SHOWN_GAP}, step by step", step_columns, steps),
            Table(f"values cast to 8 bits; outlier: one value × {OUTLIER:g}", of_values, values),
        ),
        (Lines("relative error of the output", gap, Axis("error", 10), GAPS, errors),),
        conclude(rows, values),
    )  # fmt: skip


def conclude(rows: Sequence[Row], values: Sequence[OfValues]) -> str:
    """Return a sentence on the gaps from which most weights become 0, and on V's scales."""
    collapses = {
        name: next((r.gap for r in rows if getattr(r, f"{name}_lost") > 0.5), None)
        for name in ("forward", "forward_256", "backward", "backward_256")
    }
    spoiled = {
        per: max(x.error_with_outlier / x.error for x in values if x.per == per)
        for per in dict.fromkeys(x.per for x in values)
    }
    grown = ", ".join(f"{factor:.3g} with scales per {per}" for per, factor in spoiled.items())
    return (
        f"Sinks first, half of the other weights become 0 {_from(collapses['forward'])}, and with "
        f"P × 256 {_from(collapses['forward_256'])}; sinks last, "
        f"{_from(collapses['backward'])} and {_from(collapses['backward_256'])}; one large value "
        f"multiplies the error of cast values by up to {grown}."
    )


def _from(gap: int | None) -> str:
    return "at no gap" if gap is None else f"from a gap of {gap} on"


def attend(
    S: NDArray[np.float64], V: NDArray[np.float64], is_backward: bool, factor: float = 1.0
) -> tuple[NDArray[np.float64], float, list[Step]]:
    """Return outputs, the share of lost weights, and the steps of query 0, with P cast to 8 bits.

    P is multiplied by ``factor`` before the cast and divided by it after. The blocks of keys come
    in order or, if ``is_backward``, in reverse. The sum l is that of uncast weights, as in
    FlashAttention. A weight is lost if its cast is 0; weights of sinks do not count.
    """
    starts = range(0, NUM_KEYS, B_c)
    m = np.full((len(S), 1), -np.inf)
    l, O, lost, steps = np.zeros_like(m), np.zeros((len(S), D)), 0, []
    for start in reversed(starts) if is_backward else starts:
        keys = slice(start, start + B_c)
        m_old, m = m, np.maximum(m, S[:, keys].max(axis=1, keepdims=True))
        P = np.exp(S[:, keys] - m)
        cast = rounded(factor * P) / factor
        correction = np.exp(m_old - m)
        l, O = correction * l + P.sum(axis=1, keepdims=True), correction * O + cast @ V[keys]
        others = slice(max(0, NUM_SINKS - start), None)
        is_lost = cast[:, others] == 0
        lost += is_lost.sum()
        largest = P[0, others].argmax()
        steps.append(
            Step(
                "backward" if is_backward else "forward", f"{start} to {start + B_c - 1}",
                float(m[0, 0]), float(P[0, others][largest]), float(cast[0, others][largest]),
                float(is_lost[0].mean()),
            )
        )  # fmt: skip
    return O / l, float(lost / (len(S) * (NUM_KEYS - NUM_SINKS))), steps


def rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``x`` rounded to the nearest float8_e4m3fn, ties to even, at most ±448.

    The results have four significant binary digits, and are multiples of ``SMALLEST``.
    """
    _, exponent = np.frexp(x)
    step = np.maximum(np.ldexp(1.0, exponent - 4), SMALLEST)
    largest = LARGEST["float8_e4m3fn"]
    return np.asarray(np.clip(np.rint(x / step) * step, -largest, largest))


def _scores(noise: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    S = noise.copy()
    S[:, :NUM_SINKS] += gap
    return S


def _row(gap: int, noise: NDArray[np.float64], V: NDArray[np.float64]) -> Row:
    S, found = _scores(noise, gap), []
    exact = _exact(S, V)
    for is_backward in (False, True):
        for factor in FACTORS:
            O, lost, _ = attend(S, V, is_backward, factor)
            found += [lost, _error(O, exact)]
    return Row(gap, *found)


def _of_values(noise: NDArray[np.float64], V: NDArray[np.float64]) -> tuple[OfValues, ...]:
    """Return errors of V cast to int8 and float8 with one scale, and with one scale per token."""
    spoiled = V.copy()
    spoiled[NUM_KEYS // 2] *= OUTLIER
    rows = []
    for dtype in LARGEST:
        for per, axis in (("tensor", None), ("token", 1)):
            errors = []
            for X in (V, spoiled):
                top = abs(X).max(axis=axis, keepdims=True)
                scale = np.where(top == 0, 1, top / LARGEST[dtype])
                cast = (np.rint(X / scale) if dtype == "int8" else rounded(X / scale)) * scale
                is_shown = np.arange(NUM_KEYS) != NUM_KEYS // 2  # the outlier would hide the others
                seen = np.where(is_shown, noise, -np.inf)
                errors.append(_error(_exact(seen, cast), _exact(seen, X)))
            rows.append(OfValues(dtype, per, *errors))
    return tuple(rows)


def _exact(S: NDArray[np.float64], V: NDArray[np.float64]) -> NDArray[np.float64]:
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return np.asarray(P @ V / P.sum(axis=1, keepdims=True))


def _error(O: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    return math.sqrt(float(((O - exact) ** 2).mean() / (exact**2).mean()))
