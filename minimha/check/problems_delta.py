"""Generate the problems for a gated delta rule, from one head to packed sequences.

Shapes are the same in each run, and numbers are drawn by the seed. q, k and v are multiples of
small powers of 2, which 16 bits hold exactly. g and beta are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.problems import Draw, Graded, kept

Array = NDArray[Any]
Made = Callable[[Draw, dict[str, Array]], Array]  # one argument, made from those drawn before

FAMILY = "delta rule"
SQUARE: dict[str, Any] = {"D": 4, "Dv": 4}
SIXTEEN: dict[str, Any] = {"D": 16, "Dv": 16}
WIDE: dict[str, Any] = {"D": 64, "Dv": 64, "forgets": 0.02}


@cache
def delta_problems(seed: int) -> tuple[Graded, ...]:
    """Return the problems, from simple to hard, with numbers drawn by ``seed``."""
    parts = (_plain, _norms, _states, _sequences, _chunks, _extremes)
    return tuple(kept(problem) for part in parts for problem in part(seed))


def _problem(
    seed: int, name: str, shows: str, B: int = 1, H: int = 1, L: int = 6, D: int = 4, Dv: int = 3,
    Hk: int | None = None, chunks: tuple[int, ...] = (), forgets: float = 0.3, **given: Any,
) -> Graded:  # fmt: skip
    """Return a problem; ``given`` are options, or arrays and functions that replace drawn arrays.

    ``forgets`` is the mean of -g.
    """
    draw, keys = Draw(f"{name} {seed}"), H if Hk is None else Hk
    x: dict[str, Any] = {n: draw.numbers(B, keys, L, D) for n in "qk"}
    x["v"] = draw.numbers(B, H, L, Dv)
    x["g"] = -_between(draw, 0.2 * forgets, 1.8 * forgets, B, H, L)
    x["beta"] = _between(draw, 0.2, 0.9, B, H, L)
    made = {n: value(draw, x) if callable(value) else value for n, value in given.items()}
    return Graded(name, {**x, **made}, shows, chunks=chunks, family=FAMILY)


def _between(draw: Draw, low: float, high: float, *shape: int) -> Array:
    return draw.rng.uniform(low, high, shape).astype(np.float32)


def _plain(seed: int) -> Iterator[Graded]:
    yield _problem(seed, "one head", "the rule itself")
    yield _problem(seed, "one head, square state", "the rule, where D = Dv", **SQUARE)
    shows = "their axes"
    yield _problem(seed, "two batch entries of three heads", shows, B=2, H=3)
    yield _problem(seed, "several heads, square state", shows, B=2, H=2, **SQUARE)
    shows = "which key head is read"
    yield _problem(seed, "grouped heads", shows, H=4, Hk=2)
    yield _problem(seed, "grouped heads, square state", shows, H=6, Hk=2, **SQUARE)
    yield _problem(
        seed, "no decay", "the correction alone", g=np.zeros((1, 1, 6), np.float32), **SQUARE
    )
    yield _problem(seed, "beta up to 2", "a beta above 1", beta=_above_1, **SQUARE)
    yield _problem(seed, "scale", "a scale that is given", scale=0.625, **SQUARE)
    shows = "which axis decays"
    yield _problem(seed, "decay per channel", shows, H=2, g=_per_channel)
    yield _problem(seed, "decay per channel, square state", shows, g=_per_channel, **SQUARE)
    given: dict[str, Any] = {"H": 4, "Hk": 2, "scale": 0.75, "g": _per_channel}
    yield _problem(seed, "decay per channel, grouped heads, scale", shows, **given, **SQUARE)


def _above_1(draw: Draw, x: dict[str, Array]) -> Array:
    return _between(draw, 1.2, 1.9, *x["beta"].shape)


def _per_channel(draw: Draw, x: dict[str, Array]) -> Array:
    return -_between(draw, 0.05, 1.5, *x["g"].shape, x["k"].shape[-1])


def _slowly_per_channel(draw: Draw, x: dict[str, Array]) -> Array:
    return _per_channel(draw, x) / 40


def _norms(seed: int) -> Iterator[Graded]:
    shows = "the epsilon of the norm"
    yield _problem(seed, "short keys", shows, q=_smaller("q"), k=_smaller("k"), **SQUARE)
    shows, eighth = "queries and keys as they are", 0.125
    given: dict[str, Any] = {
        "normalize": False,
        "q": _smaller("q", eighth),
        "k": _smaller("k", eighth),
    }
    yield _problem(seed, "no norm", shows, **given, **SQUARE)


def _smaller(name: str, factor: float = 2.0**-9) -> Made:
    return lambda draw, x: x[name] * np.float32(factor)


def _states(seed: int) -> Iterator[Graded]:
    shows = "where it starts"
    yield _problem(seed, "initial state", shows, B=2, H=2, initial_state=_state)
    yield _problem(seed, "initial state, square", shows, H=2, initial_state=_state, **SQUARE)
    shows = "what earlier calls leave"
    yield _problem(seed, "two calls", shows, H=2, L=7, chunks=(4, 3))
    yield _problem(seed, "two calls, square state", shows, H=2, L=7, chunks=(3, 4), **SQUARE)
    yield _problem(seed, "one token a call", shows, H=2, L=5, chunks=(1,) * 5, **SQUARE)


def _state(draw: Draw, x: dict[str, Array], sequences: int | None = None) -> Array:
    (B, H, _, Dv), D = x["v"].shape, x["k"].shape[-1]
    return draw.numbers(sequences or B, H, D, Dv)


_three = partial(_state, sequences=3)


def _sequences(seed: int) -> Iterator[Graded]:
    lengths, starts = np.array([4, 6, 2]), np.array([0, 5, 6, 14], np.int32)
    yield _problem(seed, "lengths", "padded tokens", B=3, kv_lengths=lengths, **SQUARE)
    yield _problem(
        seed, "lengths, then more tokens", "padded tokens and what they leave", B=3, L=9,
        chunks=(6, 3), kv_lengths=lengths, **SQUARE,
    )  # fmt: skip
    shows = "where sequences begin"
    packed: dict[str, Any] = {"H": 2, "L": 14, "cu_seqlens": starts, **SQUARE}
    yield _problem(seed, "packed sequences", shows, **packed)
    shows = "where each sequence starts"
    yield _problem(seed, "packed sequences, initial states", shows, **packed, initial_state=_three)
    yield _problem(
        seed, "lengths, initial states", shows, B=3, kv_lengths=lengths, initial_state=_state,
        **SQUARE,
    )  # fmt: skip
    shows = "which axis decays where sequences begin and end"
    yield _problem(seed, "packed sequences, decay per channel", shows, g=_per_channel, **packed)
    yield _problem(
        seed, "lengths, decay per channel", shows, B=3, L=9, chunks=(6, 3), g=_per_channel,
        kv_lengths=lengths, **SQUARE,
    )  # fmt: skip


def _chunks(seed: int) -> Iterator[Graded]:
    shows = "where chunks of tokens begin and end"
    yield _problem(seed, "64 tokens", shows, H=2, L=64, forgets=0.03, **SIXTEEN)
    yield _problem(seed, "150 tokens", shows, L=150, D=16, Dv=8, forgets=0.01)
    yield _problem(seed, "64 tokens, 64 wide", "sizes that suit tiles", H=2, L=64, **WIDE)
    yield _problem(seed, "150 tokens, 64 wide", shows, L=150, **WIDE)
    shows = "which key head is read"
    yield _problem(seed, "grouped heads, 64 wide", shows, H=4, Hk=2, L=64, **WIDE)
    shows = "where it starts"
    yield _problem(seed, "initial state, 64 wide", shows, L=64, initial_state=_state, **WIDE)
    shows = "what earlier calls leave"
    yield _problem(seed, "two calls, 64 wide", shows, L=128, chunks=(64, 64), **WIDE)
    shows = "what the state keeps"
    yield _problem(seed, "200 tokens, slow decay", shows, L=200, forgets=0.002, **SIXTEEN)
    shows = "which axis decays, in chunks"
    slow: dict[str, Any] = {"g": _slowly_per_channel}
    yield _problem(seed, "decay per channel, 150 tokens", shows, L=150, **slow, **SIXTEEN)
    yield _problem(seed, "decay per channel, 64 wide", shows, L=128, **WIDE | slow)
    shows = "chunks of tokens where sequences begin and end"
    starts = np.array([0, 70, 71, 150], np.int32)
    yield _problem(seed, "packed sequences, 64 wide", shows, L=150, cu_seqlens=starts, **WIDE)
    yield _problem(
        seed, "packed sequences, 64 wide, initial states", shows, L=150, cu_seqlens=starts,
        initial_state=_three, **WIDE,
    )  # fmt: skip
    lengths = np.array([70, 128])
    yield _problem(
        seed, "lengths, then more tokens, 64 wide", shows, B=2, L=192, chunks=(128, 64),
        kv_lengths=lengths, **WIDE,
    )  # fmt: skip


def _extremes(seed: int) -> Iterator[Graded]:
    shows = "exponentials of large differences"
    yield _problem(seed, "strong decay", shows, L=24, g=_strong, **SQUARE)
    yield _problem(seed, "strong decay per channel", shows, L=60, g=_strong_per_channel, **SIXTEEN)
    yield _problem(seed, "cleared state", "a decay of 0", L=20, g=_clearing, **SQUARE)
    for name, what in (("v", "value"), ("k", "key"), ("q", "query")):
        given: dict[str, Any] = {name: _spoiled(name), **SQUARE}
        yield _problem(seed, f"NaN in a {what}", "where a NaN goes", H=2, L=8, **given)


def _strong(draw: Draw, x: dict[str, Array]) -> Array:
    """Most tokens decay by e^-3 to e^-9, some by e^-50."""
    g = -_between(draw, 3, 9, *x["g"].shape)
    g[..., 5::7] = -50
    return g


def _strong_per_channel(draw: Draw, x: dict[str, Array]) -> Array:
    """Some channels decay by e^-2 at each token, others hardly."""
    g = -_between(draw, 0.01, 0.1, *x["g"].shape, x["k"].shape[-1])
    g[..., ::3] *= 20
    return g


def _clearing(draw: Draw, x: dict[str, Array]) -> Array:
    g = x["g"].copy()
    g[..., 7] = -np.inf
    return g


def _spoiled(name: str) -> Made:
    def made(draw: Draw, x: dict[str, Array]) -> Array:
        copy = x[name].copy()
        copy[0, 0, 5, 1] = np.nan
        return copy

    return made
