"""Generate problems of the sizes that models have, most of them next to a multiple of a block.

They show at which sizes, if any, a function that is right at small sizes goes wrong. The search for
deviations does not use them. The numbers in the problems, and their magnitudes, are drawn from a
new seed in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np

from minimha.check.conditions import OPTIONS, POSITIONAL
from minimha.check.problems import Draw, Graded, kept

WIDTHS = ((64, 64), (128, 128), (80, 80), (256, 256), (72, 72), (192, 128), (96, 96))  # D, Dv
LENGTHS = (
    (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127), (257, 257), (1, 4097),
    (65, 1025), (1025, 64), (33, 4095), (4097, 33), (128, 150), (96, 160), (17, 701),
)  # fmt: skip
LONG = 1000  # tokens from which on groups have two heads, to save time
TAILS = ((130, 130), (190, 190))  # more than one row after the last whole 64 or 128
SINKS = ((33, 129), (1, 257), (1, 1025), (1, 8209))
HEADS = ((2, 32, 4), (10, 4, 4), (1, 64, 8), (1, 20, 4), (1, 32, 1))  # B, H, Hkv
TILED = 6, 210  # heads and tokens, in several tiles of 64 and of 128
AXIS_OF_HEADS = {"alibi_slopes": 0, "sinks": 0, "attn_bias": 1, "attn_mask": 1}
ALONE = ", entry 0 alone"
SHOWS = "whether it is right at the sizes of models"
MAGNITUDES = {  # the spread of queries and keys, and of values, and what is added to values
    "normal": (1.0, 1.75, 0.0),
    "large": (6.0, 256.0, 0.0),
    "far from zero": (0.5, 1.0, 12.0),
}


@lru_cache(maxsize=2)
def sized(seed: int = 0) -> tuple[Graded, ...]:
    """Return problems of each length, width and number of heads, plain and causal."""
    return tuple(kept(problem) for problem in _problems(seed))


def _problems(seed: int) -> Iterator[Graded]:
    rng, widths = np.random.default_rng(seed), cycle(WIDTHS)
    for Lq, Lk in LENGTHS:
        D, Dv = next(widths)
        yield _problem(rng, (1, 2, 2, Lq, Lk, D, Dv))
        D, Dv = next(widths)
        H = 8 if max(Lq, Lk) < LONG else 2
        yield _problem(rng, (1, H, 1, Lq, Lk, D, Dv), is_causal=True)
    for Lq, Lk in TAILS:
        yield _problem(rng, (1, 4, 2, Lq, Lk, 64, 64), "normal", is_causal=True)
    for Lq, Lk in SINKS:  # as heavy as the keys together
        sinks = np.round(np.log(Lk) + np.array([0.5, 0, 1, -0.5])).astype(np.float32)
        given = {"sinks": sinks, "return_lse": True}
        yield _problem(rng, (1, 4, 2, Lq, Lk, 64, 64), "normal", **given)
    whole = rng.standard_normal((1, 1, 257, 257)).astype(np.float32)  # more than 2^16 pairs
    for given in ({"attn_bias": whole}, {"attn_mask": whole > -1}):
        yield _problem(rng, (1, 2, 2, 257, 257, 64, 64), "normal", **given)
    for B, H, Hkv in HEADS:
        decoding = (B, H, Hkv, 1, 150, 64, 64)
        several = [
            _problem(rng, (B, H, Hkv, 17, 65, 64, 64), return_lse=True),
            _problem(rng, decoding), _problem(rng, decoding, is_causal=True),
        ]  # fmt: skip
        yield from several
        if B > 1:
            yield from map(_alone, several)
    for B, H, Hkv in ((1, 32, 8), (10, 4, 4)):
        for name, option in _options(rng, B, H, 17, 65).items():
            given = {name: option} | ({"q_offset": 48} if name in POSITIONAL else {})
            yield _problem(rng, (B, H, Hkv, 17, 65, 64, 64), "normal", **given)
            if name in POSITIONAL:  # for functions that put queries at the first keys
                yield _problem(rng, (B, H, Hkv, 65, 65, 64, 64), "normal", **{name: option})
    H, L = TILED
    for given in _in_several_tiles(rng, H, L):
        yield _problem(rng, (1, H, 2, L, L, 64, 64), "normal", **given)
    yield _problem(rng, (1, 2, 2, 33, 65, 18, 18))  # no whole vectors
    lengths = np.array([1025, 70, 600])  # of entries that decode together
    yield _problem(rng, (3, 4, 2, 1, 1025, 64, 64), "normal", kv_lengths=lengths)
    sinks = np.log(lengths.mean()) + rng.standard_normal(4).astype(np.float32)
    given = {"kv_lengths": lengths, "sinks": sinks.astype(np.float32), "return_lse": True}
    yield _problem(rng, (3, 4, 2, 1, 1025, 64, 64), "normal", **given)
    for name in ("all equal", "one hot"):
        yield _problem(rng, (1, 2, 2, 65, 65, 64, 64), name)


def _in_several_tiles(rng: np.random.Generator, H: int, L: int) -> Iterator[dict[str, Any]]:
    """Yield options that go another way in some tiles: at borders, in far ones, in whole ones."""
    seen = np.ones((1, 1, L, L), bool)
    seen[..., 128:] = rng.random((L, L - 128)) < 0.5
    steep = 2.0 ** -np.tile([1.0, 4.5, 8.0], H)[:H]
    yield {"is_causal": True}
    yield {"window_size": (40, 0)}
    yield {"window_size": (60, 9)}
    yield {"alibi_slopes": steep.astype(np.float32)}
    yield {"alibi_slopes": steep.astype(np.float32), "q_offset": 30}
    yield {"attn_mask": seen, "kv_lengths": np.array([100])}


def _options(rng: np.random.Generator, B: int, H: int, Lq: int, Lk: int) -> dict[str, Any]:
    """Return options; those that are arrays have other numbers for each batch entry or head."""
    bias = rng.standard_normal((B, 1 if B > 1 else H, Lq, Lk)).astype(np.float32)
    slopes, sinks = np.geomspace(1, 2.0**-8, H), np.log(Lk) + rng.standard_normal(H)
    return {
        "attn_bias": bias, "attn_mask": bias[..., ::-1].copy() > -0.5, "softcap": 1.25,
        "kv_lengths": rng.permutation(np.linspace(Lk // 8, Lk, B).astype(int)),
        "alibi_slopes": slopes.astype(np.float32), "sinks": sinks.astype(np.float32),
        "window_size": (Lk // 4, 0),
    }  # fmt: skip


CUT = ("H", "Lk", "Lq")


def cut(problem: Graded, name: str, size: int) -> Graded:
    """Return a problem with fewer query heads, keys or queries; each head gets its own keys."""
    given = dict(problem.arguments)
    if name == "H":
        groups = given["q"].shape[1] // given["k"].shape[1]
        given |= {n: np.repeat(given[n], groups, 1)[:, :size].copy() for n in "kv"}
        for n, axis in AXIS_OF_HEADS.items():
            if n in given and given[n].shape[axis] > 1:
                given[n] = given[n].take(np.arange(size), axis)
        given["q"] = given["q"][:, :size]
    for n in {"Lk": "kv", "Lq": "q"}.get(name, ""):
        given[n] = given[n][:, :, :size]
    for n in ("attn_bias", "attn_mask"):
        if n in given and name in ("Lk", "Lq"):
            given[n] = given[n][..., :size] if name == "Lk" else given[n][..., :size, :]
    if name == "Lk" and "kv_lengths" in given:
        given["kv_lengths"] = np.minimum(given["kv_lengths"], size)
    if {"q_offset", *POSITIONAL} & set(given):
        given["q_offset"] = max(given["k"].shape[2] - given["q"].shape[2], 0)
    return replace(problem, name=f"{problem.name}, cut to {name} = {size}", arguments=given)


def _alone(problem: Graded) -> Graded:
    """The first batch entry of a problem."""
    given = {n: x[:1] if n in "qkv" else x for n, x in problem.arguments.items()}
    return replace(problem, name=f"{problem.name}{ALONE}", arguments=given)


def _problem(
    rng: np.random.Generator, shape: tuple[int, ...], numbers: str = "", **options: Any
) -> Graded:
    B, H, Hkv, Lq, Lk, D, Dv = shape
    numbers = numbers or str(rng.choice(list(MAGNITUDES), p=[0.6, 0.2, 0.2]))
    name = f"B = {B}, H = {H} over {Hkv}, Lq = {Lq}, Lk = {Lk}, D = {D}"
    name += f", Dv = {Dv}" * (Dv != D) + ", causal" * ("is_causal" in options)
    draw = Draw(f"{name} {rng.integers(2**32)}")
    spread, of_values, added = MAGNITUDES.get(numbers, (1.0, 1.0, 0.0))
    given: dict[str, Any] = draw.qkv(B, H, Lq, Lk, D, Dv, Hkv)
    given["q"] = given["q"] * np.float32(spread)
    given["v"] = given["v"] * np.float32(of_values) + np.float32(added)
    if numbers == "all equal":
        given = {n: np.full_like(x, x[0, 0, 0, 0]) for n, x in given.items()}
    if numbers == "one hot":
        given["k"] = 4 * np.eye(D, dtype=np.float32)[rng.integers(D, size=(B, Hkv, Lk))]
    name += "".join(f", {n}" for n in OPTIONS if n in {*options} - {"is_causal", "return_lse"})
    if "is_causal" in options and Lk != Lq:
        options["q_offset"] = max(Lk - Lq, 0)
    return Graded(f"{name}; {numbers} numbers", {**given, **options}, SHOWS, family="sized")
