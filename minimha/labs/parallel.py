"""Compare the times of heads that are computed together and one by one."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minimha.api import attention
from minimha.explain.chart import Axis, Lines
from minimha.explain.result import Result, Table

WIDTH, LENGTH = 512, 256  # E, and tokens
HEADS = (1, 2, 4, 8, 16, 32)
NUM_RUNS = 15
WAYS = "one product", "H products", "heads together", "one by one"
TITLE = "heads in parallel: one product against a product for each head"
ABOUT = (
    f"x has {LENGTH} tokens of width E = {WIDTH}, in float32. The queries of H heads are either "
    f"one product with W_q (E, E), whose columns are then divided among the heads, or H products "
    f"with matrices (E, E/H). The attention of all heads is one call, or one call for each head. "
    f"Both ways multiply the same numbers. The fastest of {NUM_RUNS} runs on this machine, "
    f"with NumPy."
)


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: time 1 to 32 heads, computed together and one by one."""
    x, W_q = (np.random.default_rng((seed, n)).standard_normal((n, WIDTH), np.float32)
              for n in (LENGTH, WIDTH))  # fmt: skip
    rows = []
    for heads in HEADS:
        progress(f"H = {heads}")
        rows.append((heads, *_measured(heads, x, W_q / np.float32(WIDTH**0.5))))
    columns: dict[str, Callable[[Any], str]]
    columns = {"H": str, **dict.fromkeys(WAYS, "{:.3f}".format), "differ by": "{:.1g}".format}
    series = {name: tuple(row[n] for row in rows) for n, name in enumerate(WAYS, 1)}
    figure = Lines("time for all heads", Axis("heads", 2), Axis("ms", 10), HEADS, series)
    table = Table("milliseconds: queries by products, then attention", columns, tuple(rows))
    return Result("parallel", TITLE, ABOUT, seed, (table,), (figure,), conclude(rows))


def conclude(rows: Sequence[tuple[float, ...]]) -> str:
    """Return a sentence on the times of the largest number of heads, one by one and together."""
    H, one, several, together, one_by_one, _ = rows[-1]
    worst = max(row[-1] for row in rows)
    same = f"differ by {worst:.1g} at most" if worst else "are equal to the last bit"
    return (
        f"With {H} heads, {H} products take {several / one:.2f} times as long as one, and "
        f"attention head by head {one_by_one / together:.2f} times as long as all heads together; "
        f"the results {same}."
    )


def _measured(heads: int, x: Any, W_q: Any) -> list[float]:
    """Return the ms of each of ``WAYS``, timed alternately, and the largest difference."""
    parts = np.ascontiguousarray(W_q.reshape(WIDTH, heads, -1).swapaxes(0, 1))
    q = np.ascontiguousarray((x @ W_q).reshape(LENGTH, heads, -1).swapaxes(0, 1))
    ways: tuple[Callable[[], Any], ...] = (
        lambda: x @ W_q,
        lambda: np.concatenate([x @ part for part in parts], axis=1),
        lambda: attention(q, q, q, backend="dense"),
        lambda: np.stack([attention(head, head, head, backend="dense") for head in q]),
    )
    one, several, together, one_by_one = (way() for way in ways)
    found = [math.inf] * len(ways)
    for _ in range(NUM_RUNS):
        for n, way in enumerate(ways):
            start = time.perf_counter()
            way()
            found[n] = min(found[n], 1e3 * (time.perf_counter() - start))
    return [*found, float(max(abs(one - several).max(), abs(together - one_by_one).max()))]
