"""Measure how much weight hidden keys get if a large negative number replaces −∞."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.explain.chart import Axis, Lines
from minimha.explain.numbers import cells
from minimha.explain.result import Result, Table

NUM_KEYS, NUM_HIDDEN = 8, 4
FILLS = (-np.inf, -1e9, -65504.0, -1e4)
LEVELS = tuple(10.0**n for n in range(1, 12))  # distance of the visible scores below 0
OURS = "minimha"
TITLE = "masking: −∞ against a large negative number"
ABOUT = (
    f"One query and {NUM_KEYS} keys, {NUM_HIDDEN} of them hidden: the weight that reaches the "
    "hidden ones. minimha hides with −∞, and a query that sees no key gets 0; the other columns "
    "write a number over the hidden scores (or add it, in the case named so) and compute "
    "exp(s − max) / Σ in the same dtype. −65504 is float16's lowest number."
)
Scores = NDArray[Any]


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: hide keys by −∞ and by large negative numbers, in float32 and float16."""
    s = np.random.default_rng(seed).standard_normal(NUM_KEYS)
    cases: dict[str, tuple[Scores, str, int, bool]] = {
        "float32, scores near 0": (s, "float32", NUM_HIDDEN, False),
        "float32, visible near −2e4": (s - 2e4, "float32", NUM_HIDDEN, False),
        "float32, visible near −2e9": (s - 2e9, "float32", NUM_HIDDEN, False),
        "float32, every key hidden": (s, "float32", NUM_KEYS, False),
        "float16, scores near 0": (s, "float16", NUM_HIDDEN, False),
        "float16, visible near −2e4": (s - 2e4, "float16", NUM_HIDDEN, False),
        "float16, every key hidden": (s, "float16", NUM_KEYS, False),
        "float16, added, every key hidden": (s - 40, "float16", NUM_KEYS, True),
    }
    rows = tuple((name, *_leaks(*case)) for name, case in cases.items())
    columns = {"case": str} | dict.fromkeys((OURS, *map(_named, FILLS)), written)
    swept = {
        _named(fill): tuple(_leak((s - n).astype(np.float32), fill) for n in LEVELS)
        for fill in FILLS
    }
    across = Axis("visible scores are near −x", 10, _short)
    figure = Lines("weight of the hidden keys, float32", across, Axis("weight"), LEVELS, swept)
    table = Table("weight of the hidden keys; NaN is a row lost", columns, rows)
    return Result("masking", TITLE, ABOUT, seed, (table,), (figure,), conclude(rows))


def conclude(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a sentence on how often each way of masking gives NaN or leaks.

    A way leaks if it gives hidden keys a weight above 0. A row of ``rows`` is a case: its name, and
    the weight of hidden keys for each way.
    """
    parts = []
    for n, name in enumerate((OURS, *map(_named, FILLS)), 1):
        leaks = [row[n] for row in rows]
        lost = sum(map(np.isnan, leaks))
        kept = sum(leak > 0 for leak in leaks)
        faults = [f"leaks in {kept}"] * bool(kept) + [f"gives NaN in {lost}"] * bool(lost)
        parts.append(f"{name} {' and '.join(faults) or 'hides every key'}")
    return f"Of {len(rows)} cases: {'; '.join(parts)}."


def written(leak: float) -> str:
    """Format ``leak``, the weight of hidden keys, with three digits; 0 and 1 have no decimals."""
    return cells(np.array(leak), 3)[0][0] if leak in (0, 1) or np.isnan(leak) else f"{leak:.3g}"


def _named(fill: float) -> str:
    return "−∞" if np.isneginf(fill) else f"−{_short(-fill)}"


def _short(number: float) -> str:
    """Return a power of 10 as ``1e9``, and any other number in full."""
    exponent = np.log10(number)
    return f"1e{exponent:.0f}" if exponent % 1 == 0 else f"{number:.0f}"


def _leaks(s: Scores, dtype: str, num_hidden: int, is_added: bool) -> tuple[float, ...]:
    """Return the weight of the first ``num_hidden`` keys in minimha and with each of ``FILLS``."""
    s = s.astype(dtype)
    seen = np.arange(NUM_KEYS) >= num_hidden
    one = np.ones((1, 1), dtype)  # a query of 1, so that q·k is k, the scores
    V = np.eye(NUM_KEYS, dtype=dtype)
    ours = attention(one, s[:, None], V, scale=1, attn_mask=seen[None], backend="dense")
    return float(ours[0, ~seen].sum()), *(_leak(s, fill, num_hidden, is_added) for fill in FILLS)


def _leak(s: Scores, fill: float, num_hidden: int = NUM_HIDDEN, is_added: bool = False) -> float:
    """Return the weight of hidden keys with ``fill`` for −∞, computed in the dtype of ``s``."""
    hidden = np.arange(NUM_KEYS) < num_hidden
    with np.errstate(all="ignore"):
        number = np.array(fill).astype(s.dtype)
        s = np.where(hidden, s + number if is_added else number, s)
        P = np.exp(s - s.max())
        return float((P / P.sum())[hidden].sum())
