"""Problems at the sizes that models have, most of them beside a multiple of a block.

They show whether, and at which sizes, a function is wrong that is right at small ones. No deviation
is searched for in them. Their numbers and magnitudes are drawn anew in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np

from minimha.check.problems import Graded, _Draw, _kept

WIDTHS = ((64, 64), (128, 128), (80, 80), (256, 256), (72, 72), (192, 128), (96, 96))  # D, Dv
LENGTHS = (
    (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127), (257, 257), (1, 4097),
    (65, 1025), (1025, 64), (33, 4095), (4097, 33),
)  # fmt: skip
HEADS = ((2, 32, 4), (8, 4, 4), (1, 64, 8))  # B, H, Hkv
SHOWS = "whether it is right at the sizes of models"
MAGNITUDES = {  # the spread of queries and keys, and of values, and what is added to values
    "normal": (1.0, 1.75, 0.0),
    "large": (6.0, 256.0, 0.0),
    "far from zero": (0.5, 1.0, 12.0),
}


@lru_cache(maxsize=4)
def sized(seed: int = 0) -> tuple[Graded, ...]:
    """Return each width, length and number of heads: plain, and causal with grouped heads."""
    return tuple(_kept(problem) for problem in _problems(seed))


def _problems(seed: int) -> Iterator[Graded]:
    rng, widths = np.random.default_rng(seed), cycle(WIDTHS)
    for Lq, Lk in LENGTHS:
        D, Dv = next(widths)
        yield _problem(rng, (1, 2, 2, Lq, Lk, D, Dv))
        D, Dv = next(widths)
        yield _problem(rng, (1, 8, 1, Lq, Lk, D, Dv), is_causal=True)
    for B, H, Hkv in HEADS:
        yield _problem(rng, (B, H, Hkv, 17, 65, 64, 64))
        yield _problem(rng, (B, H, Hkv, 1, 129, 128, 128), is_causal=True)
    for name in ("all equal", "one hot"):
        yield _problem(rng, (1, 2, 2, 65, 65, 64, 64), name)


def _problem(
    rng: np.random.Generator, shape: tuple[int, ...], numbers: str = "", **options: Any
) -> Graded:
    B, H, Hkv, Lq, Lk, D, Dv = shape
    numbers = numbers or str(rng.choice(list(MAGNITUDES), p=[0.6, 0.2, 0.2]))
    name = f"B = {B}, H = {H} over {Hkv}, Lq = {Lq}, Lk = {Lk}, D = {D}"
    name += f", Dv = {Dv}" * (Dv != D) + ", causal" * bool(options)
    draw = _Draw(f"{name} {rng.integers(2**32)}")
    spread, of_values, added = MAGNITUDES.get(numbers, (1.0, 1.0, 0.0))
    given: dict[str, Any] = draw.qkv(B, H, Lq, Lk, D, Dv, Hkv)
    given["q"] = given["q"] * np.float32(spread)
    given["v"] = given["v"] * np.float32(of_values) + np.float32(added)
    if numbers == "all equal":
        given = {n: np.full_like(x, x[0, 0, 0, 0]) for n, x in given.items()}
    if numbers == "one hot":
        given["k"] = 4 * np.eye(D, dtype=np.float32)[rng.integers(D, size=(B, Hkv, Lk))]
    if options and Lk != Lq:
        options["q_offset"] = max(Lk - Lq, 0)
    return Graded(f"{name}; {numbers} numbers", {**given, **options}, SHOWS, family="sized")
