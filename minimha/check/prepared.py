"""Convert a problem to float64, for computing attention with and without bugs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.expanded import expanded
from minimha.equations.problem import Problem

Array = NDArray[Any]

FLOAT32 = 2.0**-24  # half an eps: sums are accumulated in float32 in every dtype
UNITS = {"float32": FLOAT32, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}  # smallest above 0


class Impossible(ValueError):  # noqa: N818  (it states a fact about shapes)
    """Raised if a bug needs other shapes: with these, a function that has it would fail."""


def spread(a: Array, shape: tuple[int, ...]) -> Array:
    """Return ``a`` broadcast to ``shape``, or itself, since NumPy takes 6 µs even for that."""
    return a if a.shape == shape else np.broadcast_to(a, shape)


class Prepared:
    """A problem's arrays in float64, and the intermediate results that most bugs do not change."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        dtype: str = "float32",
        is_exact: bool = False,
        is_likely: bool = False,
    ) -> None:
        self.arguments, self.dtype = arguments, dtype
        self.given, self.place = expanded(arguments)
        options = {n: x for n, x in self.given.items() if n not in ("return_lse", "score_mod")}
        self.problem = Problem.of(**options)
        self.is_likely = is_likely  # bounds hold for independent roundings, not for any
        self.extra = 0.0  # relative error of q, k and v that were rounded before
        self.unit, self.smallest, self.is_exact = UNITS[dtype], SMALLEST[dtype], is_exact
        self.q, self.k, self.v = (getattr(self.problem, n).astype(np.float64) for n in "qkv")
        self.B, self.H, self.Lq, self.D = self.q.shape
        self.Hkv, self.Lk, self.Dv = self.v.shape[1:]
        self.shape = (self.B, self.H, self.Lq, self.Lk)
        self.i, self.j = np.arange(self.Lq)[:, None], np.arange(self.Lk)
        self.offset = self.problem.q_offset[:, None, None, None]
        self.lengths = self.problem.kv_lengths[:, None, None, None]
        self.visible = np.broadcast_to(
            self.problem.visible(slice(0, self.Lq), slice(0, self.Lk)), self.shape
        )
        self.has_nan = not (np.isfinite(self.k).all() and np.isfinite(self.v).all())
        self.sees_nothing = ~self.visible.any(-1)
        if self.problem.sinks is not None:
            self.sees_nothing &= False
        biases = self.problem.attn_bias
        self.bias = None if biases is None else biases.astype(np.float64)

    def summed(self, n: int, more: int) -> float:
        """Return a bound on the relative error of a float32 sum of n terms.

        It is the likely bound or the worst case, which includes ``more`` further roundings.
        """
        return FLOAT32 * (2 * n**0.5 + 8 if self.is_likely else n + more)

    @cached_property
    def heads(self) -> Array:
        """Return the index of the key/value head that each query head reads, (H,)."""
        return np.asarray(np.arange(self.H) // (self.H // self.Hkv))

    @cached_property
    def products(self) -> tuple[Array, Array]:
        """Return Q Kᵀ and |Q| |K|ᵀ, each of shape (B, H, Lq, Lk)."""
        K = self.k[:, self.heads].swapaxes(-1, -2)
        return np.asarray(self.q @ K), np.asarray(abs(self.q) @ abs(K))
