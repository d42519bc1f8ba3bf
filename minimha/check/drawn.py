"""Draw problems of any shape and with any options: nobody chose what meets in them.

The other problems cover what somebody thought of: sizes of models, and options two by two. Here
shapes, options and their values are random in each run. A function gets them last, and only if it
was right so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from minimha.check.conditions import OPTIONS, POSITIONAL
from minimha.check.crossed import (
    AMID,
    AT_LENGTHS,
    AT_START,
    HEADS,
    Sizes,
    Switches,
    mask_showing,
)
from minimha.check.problems import Draw, Graded, kept, visibility

MORE_HEADS = ((8, 8), (5, 5), (12, 4), (32, 8), (28, 4), (32, 1), (40, 8), (24, 2))  # H, Hkv
WIDTHS = (16, 24, 40, 64, 80, 96, 128, 160, 256, 256)
LEAST, MOST_KEYS, MOST_QUERIES, FEW_QUERIES = 4, 700, 230, 80
MOST_SCORES = 1 << 15
BLOCK = 64  # keys that kernels take at once
EACH = 3  # problems of a shape
SHOWS = "whether it is right in random problems"


@lru_cache(maxsize=2)
def drawn(
    taken: Switches, needed: Switches, some: Sizes, seed: int, shapes: int,
    widths: tuple[int, ...] = (),
) -> tuple[Graded, ...]:  # fmt: skip
    """Return problems of random ``shapes``, with switches among those ``taken``.

    Each problem has the switches that are ``needed``. No query lacks a visible key. Heads have one
    of the ``widths``, or any width.
    """
    rng = np.random.default_rng(seed)
    found: list[Graded] = []
    for _ in range(shapes):
        shape = _shape(rng, taken | needed, needed, some, widths)
        for _ in range(EACH):
            given = _arguments(rng, shape, taken, needed)
            if visibility(given).any(-1).all():
                found.append(kept(_named(f"drawn {len(found) + 1}", given)))
    return tuple(found)


def _named(name: str, given: Mapping[str, Any]) -> Graded:
    (B, H, Lq, D), (_, Hkv, Lk, Dv) = given["q"].shape, given["v"].shape
    name += f": B = {B}, H = {H} over {Hkv}, Lq = {Lq}, Lk = {Lk}, D = {D}"
    name += f", Dv = {Dv}" * (Dv != D) + "".join(f", {n}" for n in OPTIONS if n in given)
    return Graded(name, given, SHOWS, family="sized")


@lru_cache(maxsize=256)
def fewer(problem: Graded, options: Switches) -> Graded:
    """Return the problem with only these ``options``."""
    given = {n: x for n, x in problem.arguments.items() if n not in OPTIONS or n in options}
    if not POSITIONAL & options:
        given.pop("q_offset", None)
    return _named(problem.name.partition(":")[0] + ", fewer options", given)


def _shape(
    rng: np.random.Generator, on: Switches, needed: Switches, some: Sizes, widths: tuple[int, ...]
) -> tuple[int, ...]:
    """Return B, H, Hkv, Lq, Lk, D and Dv."""
    D = int(rng.choice(widths or [some.D, some.D, some.D, *WIDTHS]))
    Dv = int(rng.choice([D // 2, D + 8])) if "wide values" in on and rng.random() < 0.3 else D
    kinds = [kind for kind in ("one query", "fewer queries", "more queries") if kind in on]
    kind = "one query" if "one query" in needed else str(rng.choice([*kinds, "as many queries"]))
    unit = int(np.lcm(some.unit, rng.choice([1, 1, 16, 64])))  # mostly of a kernel's blocks
    most = MOST_KEYS if kind in ("one query", "fewer queries") else MOST_QUERIES
    Lk = unit * -(-int(np.exp(rng.uniform(*np.log((LEAST, most))))) // unit)
    few = some.unit * (1 + int(rng.integers(min(Lk, FEW_QUERIES))) // some.unit)
    lengths = {
        "one query": 1, "fewer queries": min(few, Lk), "more queries": Lk + few,
        "as many queries": Lk,
    }  # fmt: skip
    Lq = lengths[kind]
    heads = [pair for name, pair in HEADS.items() if name in on]
    if heads:
        grouped = any(Hkv != H for H, Hkv in heads)
        heads += [(H, Hkv) for H, Hkv in MORE_HEADS if grouped or Hkv == H]
    heads = [pair for pair in heads if pair[0] * Lq * Lk <= MOST_SCORES]
    H, Hkv = (HEADS["one head"], *heads)[rng.integers(len(heads) + 1)]
    most = max(1, min(4, MOST_SCORES // (H * Lq * Lk)))
    B = int(rng.integers(most)) + 1 if "batch" in on else 1
    return B, H, Hkv, Lq, Lk, D, Dv


def _arguments(
    rng: np.random.Generator, shape: tuple[int, ...], taken: Switches, needed: Switches
) -> dict[str, Any]:
    B, H, Hkv, Lq, Lk, D, Dv = shape
    draw = Draw(f"{shape} {rng.integers(2**32)}")
    given: dict[str, Any] = draw.qkv(
        B, H, Lq, Lk, D, Dv, Hkv, spread=float(rng.choice([0.5, 1, 1.5]))
    )
    share = rng.choice([0.15, 0.35, 0.6])
    on = {n for n in OPTIONS if n in needed or (n in taken and rng.random() < share)}
    lengths = np.maximum(rng.integers(1, Lk + 1, B), Lk * (rng.random(B) < 0.3))
    if "kv_lengths" in on:
        given["kv_lengths"] = lengths = np.maximum(lengths, min(Lk, 4))
    else:
        lengths = np.full(B, Lk)
    if POSITIONAL & on and Lq != Lk:
        given["q_offset"] = _first(rng, taken, needed, Lq, Lk, lengths)
    if "window_size" in on:
        sides = [None, 0, int(rng.integers(1, 9)), int(rng.integers(1, Lk + 2))]
        given["window_size"] = tuple(sides[n] for n in rng.integers(len(sides), size=2))
        if given["window_size"] == (None, None):
            given["window_size"] = (int(rng.integers(1, Lk + 2)), None)
    if "is_causal" in on:
        given["is_causal"] = True
    rows = (B, H) if "by head" in taken and rng.random() < 0.6 else (1, 1)
    if "attn_bias" in on:
        given["attn_bias"] = draw.numbers(*rows, Lq, Lk, spread=float(rng.choice([0.5, 2])))
    if "attn_mask" in on:
        given["attn_mask"] = _mask(float(rng.choice([0.2, 0.6, 0.9])), given, rows, draw.rng)
    if "alibi_slopes" in on:
        given["alibi_slopes"] = np.exp2(-rng.integers(0, 9, H)).astype(np.float32)
    if "softcap" in on:
        given["softcap"] = float(rng.choice([0.75, 2, 15]))
    if "sinks" in on:
        given["sinks"] = draw.numbers(H, spread=2) + np.float32(rng.choice([0, 2]))
    if "scale" in on:
        given["scale"] = float(rng.choice([0.4, 0.7, 1.6, -0.5]) / np.sqrt(D))
    if "return_lse" in on:
        given["return_lse"] = True
    return given


def _mask(
    share: float, given: Mapping[str, Any], rows: tuple[int, int], rng: np.random.Generator
) -> Any:
    """Return a mask that hides whole blocks for some rows, but not all keys that a query sees."""
    mask = mask_showing(share, given, rows, rng)
    if rng.random() < 0.5:
        return mask
    Lk = mask.shape[-1]
    hidden = rng.random((*rows, 1, -(-Lk // BLOCK))) < 0.5
    fewer = mask & ~hidden.repeat(BLOCK, -1)[..., :Lk]
    sees: Any = (fewer & visibility(given)).any(-1, keepdims=True)
    if rows == (1, 1):
        sees = sees.all((0, 1), keepdims=True)
    return np.where(sees, fewer, mask)


def _first(
    rng: np.random.Generator, taken: Switches, needed: Switches, Lq: int, Lk: int, lengths: Any
) -> Any:
    """Return where the queries stand, at one of the places that the function takes."""
    if AT_START in needed:
        return 0
    end = max(Lk - Lq, 0)
    places: list[Any] = [end]
    if AT_START in taken:
        places.append(0)
    if AMID in taken:
        places.append(int(rng.integers(end + 1)))
    if "by entry" in taken:
        places.append(rng.integers(end + 1, size=len(lengths)))
    if AT_LENGTHS in taken:
        places.append(np.maximum(lengths - Lq, 0))
    return places[rng.integers(len(places))]
