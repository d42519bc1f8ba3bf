"""Compare naive and tiled attention by the bytes that they move, and caches by their size."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minimha.api import attention, backends
from minimha.equations.option_types import Backend
from minimha.equations.tiled import BLOCK_ROWS
from minimha.explain.chart import Axis, Bars, Lines, Written
from minimha.explain.numbers import in_units
from minimha.explain.result import Result, Table
from minimha.models.sizes import PRESETS, kv_cache_bytes

WIDTH, ITEM = 64, 4  # D, and bytes of a float32
LENGTHS = tuple(2**n for n in range(8, 17))
NAMED = 10_000  # too long to fit, says document 004; shown in the table only
TIMED_LENGTHS, TIMED_HEADS, NUM_RUNS = (256, 512, 1024, 2048), 4, 7
TIMED: tuple[Backend, ...] = ("dense", "cpu")
MODEL, CACHED = PRESETS["Llama-3-8B"], 8192
Rows = Sequence[tuple[Any, ...]]
TITLE = "memory: naive and tiled attention, and the cache of keys and values"
ABOUT = (
    f"Numbers that one head of width D = {WIDTH} reads and writes in float32. Naive attention "
    "writes S and reads it, writes P and reads it: 4n² + 4nD in all (Dao et al. 2022, Algorithm "
    f"0). Tiled attention keeps a block of {BLOCK_ROWS} queries while it reads every key and "
    f"value, and writes O and L alone: 2nD⌈n/{BLOCK_ROWS}⌉ + 2nD + n (Dao 2023, Algorithm 1)."
)


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: count the bytes moved and the bytes of a cache, and time two backends."""
    traffic = tuple(map(_traffic, LENGTHS))
    cache, timed = _cache(), _timed(seed, progress)
    names: list[str] = [*_available()]
    count: Written = "{:,}".format
    byte_counts = dict.fromkeys(("naive", "tiled", "scores held"), _bytes)
    times: dict[str, Written] = dict.fromkeys(names, "{:.2f}".format)
    kept = f"cache of {MODEL.name} at {CACHED} tokens in float16; it has {MODEL.num_kv_heads} heads"
    tables = (
        Table("bytes moved by one head, and held as scores by naive attention",
              {"n": count} | byte_counts, tuple(sorted((*traffic, _traffic(NAMED))))),
        Table(kept, {"key/value heads": str, "bytes": _bytes}, cache),
        Table(f"milliseconds here, {TIMED_HEADS} heads, medians of {NUM_RUNS} calls",
              {"n": count} | times, timed),
    )  # fmt: skip
    across = Axis("n, tokens", 2, _short)
    moved = {"naive": _column(traffic, 1), "tiled": _column(traffic, 2)}
    took = {name: _column(timed, n) for n, name in enumerate(names, 1)}
    groups = tuple(str(row[0]) for row in cache)
    figures = (
        Lines("bytes moved by one head", across, Axis("bytes", 2, _bytes), LENGTHS, moved),
        Bars("cache by key/value heads", groups, {"bytes": _column(cache, 1)}, _bytes),
        Lines("time of a call here", across, Axis("ms", 10), TIMED_LENGTHS, took),
    )
    conclusion = conclude(traffic, cache, timed)
    return Result("memory", TITLE, ABOUT, seed, tables, figures, conclusion)


def _traffic(n: int) -> tuple[int, int, int, int]:
    """Return n, the bytes that naive and tiled attention move, and the bytes of the scores."""
    return n, naive_bytes(n), tiled_bytes(n), ITEM * n * n


def _cache() -> tuple[tuple[int, int], ...]:
    """Return (key/value heads, bytes of the model's cache), from H heads down to 1."""
    groups = [2**n for n in reversed(range(MODEL.num_heads.bit_length()))]
    return tuple((g, kv_cache_bytes(replace(MODEL, num_kv_heads=g), CACHED)) for g in groups)


def naive_bytes(n: int) -> int:
    """Return the bytes that naive attention over n tokens reads and writes.

    Besides Q, K, V and O, they include scores and weights, each of which is written and read.
    """
    return ITEM * (4 * n * n + 4 * n * WIDTH)


def tiled_bytes(n: int) -> int:
    """Return the bytes that tiled attention over n tokens reads and writes.

    It reads Q once, and K and V once for each block of queries. It writes O and the log-sum-exp.
    """
    num_blocks = -(-n // BLOCK_ROWS)
    return ITEM * (2 * n * WIDTH + 2 * n * WIDTH * num_blocks + n)


def conclude(traffic: Rows, cache: Sequence[tuple[int, int]], timed: Rows) -> str:
    """Return a sentence on the bytes moved, the cache of grouped heads, and two backends' times."""
    n, naive, tiled, _ = traffic[-1]
    part = dict(cache)[MODEL.num_kv_heads] / cache[0][1]
    words = (
        f"At n = {n:,} naive attention moves {_bytes(naive)} and tiled attention {_bytes(tiled)}; "
        f"{MODEL.num_kv_heads} key/value heads in place of {cache[0][0]} need {part:.0%} of the "
        f"cache"
    )
    length, *times = timed[-1]
    if len(times) < len(TIMED):
        return f"{words}; the backend cpu cannot run here, so nothing is compared in time."
    return (
        f"{words}; here cpu takes {times[1] / times[0]:.0%} of dense's time at {length:,} tokens."
    )


def _timed(seed: int, progress: Callable[[str], None]) -> tuple[tuple[float, ...], ...]:
    """Return rows (n, ms of each backend), measured after a first call, which may compile."""
    rng, rows = np.random.default_rng(seed), []
    for n in TIMED_LENGTHS:
        q, k, v = rng.standard_normal((3, 1, TIMED_HEADS, n, WIDTH), np.float32)
        times: dict[Backend, list[float]] = {name: [] for name in _available()}
        for name in times:
            progress(f"{name}, {n} tokens")
            attention(q, k, v, backend=name)
        for _ in range(NUM_RUNS):  # alternating, so that a busy moment slows both
            for name, found in times.items():
                start = time.perf_counter()
                attention(q, k, v, backend=name)
                found.append(1e3 * (time.perf_counter() - start))
        rows.append((n, *map(statistics.median, times.values())))
    return tuple(rows)


def _available() -> list[Backend]:
    reasons = backends()
    return [name for name in TIMED if reasons[name] is None]


def _bytes(number: float) -> str:
    return in_units(round(number), "B")


def _short(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def _column(rows: Rows, n: int) -> tuple[float, ...]:
    return tuple(row[n] for row in rows)
