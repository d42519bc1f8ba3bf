"""Graded problems, easy to hard; each switches on as little as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minimha.equations.arguments import choice

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class Graded:
    """One graded problem: a name, the arguments of ``minimha.attention``, and what it shows."""

    name: str
    arguments: Mapping[str, Any]
    shows: str


def graded(dtype: str = "float32") -> list[Graded]:
    """The problems, always the same ones; every number is representable in ``dtype``."""
    choice("dtype", dtype, DTYPES)
    rng = np.random.default_rng(1)
    q, k, v = (rng.integers(-48, 49, (1, 1, n, 4)).astype(np.float32) / 16 for n in (5, 7, 7))
    return [Graded("one head", {"q": q, "k": k, "v": v}, "products, scale and softmax")]
