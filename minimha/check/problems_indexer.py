"""Generate the problems for a lightning indexer: few tokens, of which each query picks some."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from minimha.check.problems import Draw, Graded, kept

FAMILY = "indexer"


@cache
def indexer_problems(seed: int) -> tuple[Graded, ...]:
    """Return the problems, from simple to hard, with numbers drawn by ``seed``."""
    return tuple(map(kept, _problems(seed)))


def _problems(seed: int) -> Iterator[Graded]:
    yield _problem(seed, "one head", "scores, and ties of scores that are 0", L=8, top_k=5)
    yield _problem(seed, "one head, few keys", "scores", L=8, top_k=2)
    shows = "how heads are weighed and added"
    yield _problem(seed, "three heads", shows, B=2, Hi=3)
    yield _problem(seed, "eight heads", shows, Hi=8, L=24, top_k=6)
    causal: dict[str, Any] = {"is_causal": True}
    yield _problem(seed, "causal", "keys that are hidden before some are picked", Hi=2, **causal)
    shows = "queries that see fewer keys than they may pick"
    yield _problem(seed, "more picks than tokens", shows, L=5, top_k=8, Hi=2, **causal)
    shows = "which pairs are rotated"
    for name, is_interleaved in (("halves", False), ("neighbours", True)):
        yield _problem(seed, f"rotated {name}", shows, Hi=2, L=16, rope_interleaved=is_interleaved)
    yield _problem(seed, "rotated slowly", "the base of the rotation", L=16, base=64.0)
    yield _problem(
        seed, "140 tokens", "blocks of queries and keys", Hi=4, L=140, top_k=20, **causal
    )
    yield _problem(seed, "everything", "all of it together", B=2, Hi=4, L=32, top_k=4,
                   rope_interleaved=True, **causal)  # fmt: skip


def _problem(
    seed: int, name: str, shows: str, B: int = 1, L: int = 12, E: int = 6, Cq: int = 5, Hi: int = 1,
    Di: int = 8, top_k: int = 3, rope_interleaved: bool = False, base: float = 10000.0,
    **call: Any,
) -> Graded:  # fmt: skip
    """Return a problem for an indexer that rotates the first half of its heads' numbers."""
    draw = Draw(f"indexer {name} {seed}")
    shapes = {"W_iq": (Cq, Hi * Di), "W_ik": (E, Di), "W_iw": (E, Hi)}
    layer: dict[str, Any] = {n: draw.numbers(*s, spread=s[0] ** -0.5) for n, s in shapes.items()}
    layer |= {"g_ik": 1 + draw.numbers(Di, spread=0.25), "b_ik": draw.numbers(Di, spread=0.5)}
    layer |= {"num_heads": Hi, "top_k": top_k, "rope_base": base, "rope_dim": Di // 2}
    layer |= {"rope_interleaved": rope_interleaved}
    layer = {n: np.float32(x) if isinstance(x, np.ndarray) else x for n, x in layer.items()}
    given = {"x": draw.numbers(B, L, E), "latents": draw.numbers(B, L, Cq), **call}
    return Graded(name, given, shows, layer=layer, family=FAMILY)
