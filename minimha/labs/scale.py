"""Show why scores are divided by √d_k: wide vectors have large scores, which saturate a softmax."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.dense import softmax
from minimha.explain.chart import Axis, Lines
from minimha.explain.result import Result, Table

WIDTHS = tuple(2**n for n in range(2, 11))
NUM_QUERIES, NUM_KEYS = 256, 16
STEADY = 1.1  # a slope that changes by a smaller factor counts as unchanged
TITLE = "why scores are divided by √d_k"
ABOUT = (
    f"{NUM_QUERIES} queries with {NUM_KEYS} keys each, every entry drawn from N(0, 1). Slope: "
    f"Σ p(1 − p) over the weights p of a query, the trace of the softmax's derivative; a softmax "
    f"without slope passes no gradient on (Vaswani et al. 2017, section 3.2.1)."
)


class Row(NamedTuple):
    """Statistics of scores q·k for vectors of width ``D``, and of their softmax.

    ``std`` is the scores' standard deviation, and ``root`` is √D. ``scaled_…`` is for q·k / √D.
    """

    D: int
    std: float
    root: float
    largest: float
    entropy: float
    slope: float
    scaled_largest: float
    scaled_entropy: float
    scaled_slope: float


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: weigh random queries and keys, with and without division by √d_k."""
    rows = tuple(_row(D, np.random.default_rng((seed, D))) for D in WIDTHS)
    two, three = "{:.2f}".format, "{:.3f}".format
    columns = {"D": "{}".format, "std q·k": two, "√D": two} | {
        f"{scaled}{name}": three
        for scaled in ("", "scaled ")
        for name in ("largest p", "entropy", "slope")
    }
    across = Axis("width D of queries and keys", base=2)
    spread = {
        "q·k": tuple(row.std for row in rows),
        "q·k / √D": tuple(row.std / row.root for row in rows),
    }
    slope = {
        "q·k": tuple(row.slope for row in rows),
        "q·k / √D": tuple(row.scaled_slope for row in rows),
    }
    figures = (
        Lines("spread of the scores", across, Axis("standard deviation", 10), WIDTHS, spread),
        Lines("slope of the softmax", across, Axis("Σ p(1 − p)"), WIDTHS, slope),
    )
    table = Table(f"entropy in bits, {np.log2(NUM_KEYS):g} at most; scaled: by 1/√D", columns, rows)
    return Result("scale", TITLE, ABOUT, seed, (table,), figures, conclude(rows))


def conclude(rows: Sequence[Row]) -> str:
    """Return a sentence on how scores' spread and the softmax's slope change with the width."""
    first, last = rows[0], rows[-1]
    return (
        f"From D = {first.D} to {last.D} the standard deviation of q·k is multiplied by "
        f"{last.std / first.std:.3g}, and √D by {last.root / first.root:.3g}; the softmax's slope "
        f"{_change(first.slope, last.slope)} without the division and "
        f"{_change(first.scaled_slope, last.scaled_slope)} with it."
    )


def _change(first: float, last: float) -> str:
    if max(first, last) < STEADY * min(first, last):
        return f"stays near {last:.2f}"
    return f"{'falls' if last < first else 'rises'} from {first:.2f} to {last:.2f}"


def _row(D: int, rng: np.random.Generator) -> Row:
    q, k = rng.standard_normal((NUM_QUERIES, D)), rng.standard_normal((NUM_QUERIES, NUM_KEYS, D))
    S = np.einsum("nd,nkd->nk", q, k)
    return Row(D, float(S.std()), D**0.5, *_weights(S), *_weights(S / D**0.5))


def _weights(S: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return means over the queries: the largest weight, the entropy in bits, Σ p(1 − p)."""
    p = softmax(S)[0]
    entropy = (p * -np.log2(np.where(p > 0, p, 1))).sum(axis=-1)
    return float(p.max(axis=-1).mean()), float(entropy.mean()), float((p * (1 - p)).sum(-1).mean())
