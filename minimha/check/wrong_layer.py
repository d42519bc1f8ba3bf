"""Compute a whole multi-head layer with any set of known bugs (deviations), in float64.

x → q, k, v → rotated → attention → concat → output. ``wrong_attention`` computes the attention,
with the deviations that concern it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.altered import confused
from minimha.check.prepared import UNITS, Impossible, Prepared
from minimha.check.problems import Graded
from minimha.check.wrong_attention import Deviated, deviate
from minimha.layers import RoPE

Array = NDArray[Any]

OUTSIDE = ("residual_added", "heads_not_split")  # deviations of the layer, not of its attention


class PreparedLayer:
    """A layer's problem in float64: its tokens, matrices and options."""

    def __init__(self, problem: Graded, dtype: str = "float32") -> None:
        layer = problem.layer or {}
        self.problem, self.dtype, self.unit = problem, dtype, UNITS[dtype]
        self.given = layer
        self.x = np.asarray(problem.arguments["x"], np.float64)
        self.H = int(layer["num_heads"])
        self.Hkv = int(layer.get("num_kv_heads", self.H))
        self.W = {name: np.asarray(layer[f"W_{name}"], np.float64) for name in "qkvo"}
        self.b = {
            name: np.asarray(layer[f"b_{name}"], np.float64)
            for name in "qkvo"
            if f"b_{name}" in layer
        }
        self.options = {name: x for name, x in problem.arguments.items() if name != "x"}

    @cached_property
    def starts(self) -> Array:
        """Return, for each token, the index of the first token that was passed with it, (L,)."""
        chunks = self.problem.chunks or (self.x.shape[1],)
        return np.repeat(np.cumsum((0, *chunks[:-1])), chunks)


def deviate_layer(prepared: PreparedLayer, deviations: Mapping[str, Any]) -> Deviated:
    """Return a layer's answer (B, L, E); ``deviations`` maps the name of a bug to its value."""
    q, k, v = _projected(prepared, deviations)
    q, k, v = _rotated(prepared, deviations, q, k, v)
    options: dict[str, Any] = {**prepared.options, "q": q, "k": k, "v": v}
    if "cache_written_one_late" in deviations:
        options = _late(prepared, options)
    inner = {name: value for name, value in deviations.items() if name not in OUTSIDE}
    inside = Prepared(options, prepared.dtype)
    inside.extra = 2 * prepared.unit + 2.0**-24 * prepared.x.shape[-1]  # of rounded projections
    if "cache_written_one_late" in deviations:
        inside.sees_nothing &= False
    return _combined(prepared, deviations, deviate(inside, inner))


def _projected(p: PreparedLayer, d: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    W, b = dict(p.W), dict(p.b)
    for name in "qkv":
        if name in d.get("w_q_transposed", "") or (f"w_{name}_transposed" in d and name != "q"):
            W[name] = _transposed(W[name])
    for name in d.get("bias_q_ignored", ""):
        b.pop(name, None)
    if "bias_v_ignored" in d:
        b.pop("v", None)
    heads = []
    for name, count in (("q", p.H), ("k", p.Hkv), ("v", p.Hkv)):
        y = p.x @ W[name] + b.get(name, 0)
        heads.append(_split(y, count, d))
    return heads[0], heads[1], heads[2]


def _transposed(W: Array) -> Array:
    if W.shape[0] != W.shape[1]:
        raise Impossible("the matrix is transposed but not square")
    return np.asarray(W.T)


def _split(y: Array, heads: int, d: Mapping[str, Any]) -> Array:
    """Return y (B, L, heads · D) as (B, heads, L, D)."""
    B, L, width = y.shape
    if "heads_interleaved" in d:
        return np.asarray(y.reshape(B, L, width // heads, heads).transpose(0, 3, 1, 2))
    split = y.reshape(B, L, heads, width // heads).swapaxes(1, 2)
    return confused(split, d["heads_not_split"]) if "heads_not_split" in d else split


def _rotated(
    p: PreparedLayer, d: Mapping[str, Any], q: Array, k: Array, v: Array
) -> tuple[Array, Array, Array]:
    base = p.given.get("rope_base")
    if base is None or "rope_ignored" in d:
        return q, k, v
    is_interleaved = bool(p.given["rope_interleaved"])
    if "rope_interleaved" in d or "rope_half" in d:
        is_interleaved = "rope_interleaved" in d
    rope = RoPE(q.shape[-1], float(d.get("rope_base", base)), interleaved=is_interleaved)
    at = np.arange(p.x.shape[1])
    if "rope_ignores_offset" in d:
        at = at - p.starts
    at = -at if "rope_sign" in d else at

    def turned(x: Array) -> Array:
        if "rope_over_heads" in d:
            at_heads = np.arange(x.shape[1])
            return np.asarray(rope.rotate(x.swapaxes(1, 2), at_heads).swapaxes(1, 2))
        return np.asarray(rope.rotate(x, at))

    v = turned(v) if "rope_on_values" in d else v
    return turned(q), k if "rope_on_queries_only" in d else turned(k), v


def _late(p: PreparedLayer, options: dict[str, Any]) -> dict[str, Any]:
    """Hide each query's own key after the first call: it is not yet in the cache."""
    i, j = np.indices((p.x.shape[1],) * 2)
    mask = (j < i) | (p.starts[:, None] == 0)
    given = options.get("attn_mask")
    return {**options, "attn_mask": mask if given is None else mask & given}


def _combined(p: PreparedLayer, d: Mapping[str, Any], heads: Deviated) -> Deviated:
    """Return the concatenated heads times W_o."""
    W = _transposed(p.W["o"]) if "w_o_transposed" in d else p.W["o"]
    b = 0 if "bias_o_ignored" in d else p.b.get("o", 0)
    if "w_o_ignored" in d:
        if W.shape[0] != W.shape[1]:
            raise Impossible("W_o is left out but not square")
        W = np.eye(len(W))

    def joined(O: Array) -> Array:
        O = np.broadcast_to(O, heads.output.shape)
        O = O[:, ::-1] if "concat_heads_reversed" in d else O
        if "concat_heads_interleaved" in d:
            return np.asarray(O.transpose(0, 2, 3, 1).reshape(O.shape[0], O.shape[2], -1))
        return np.asarray(O.swapaxes(1, 2).reshape(O.shape[0], O.shape[2], -1))

    added = b + (p.x if "residual_added" in d else 0)
    if np.shape(added) and np.shape(added)[-1] != W.shape[1]:
        raise Impossible("the input is added but is not as wide as the output")
    concat = joined(heads.output)
    sizes = (abs(np.nan_to_num(concat)) @ abs(W)) + abs(added)
    rounding = (4 * p.unit + 2.0**-24 * (W.shape[0] + 8)) * sizes
    free = joined(heads.is_free).any(-1, keepdims=True)
    output = concat @ W + added
    return Deviated(
        output, joined(heads.bound) @ abs(W) + rounding, heads.lse, heads.lse_bound,
        tuple(joined(o) @ W + added for o in heads.others),
        np.broadcast_to(free, output.shape), np.ones(heads.lse.shape, bool),
    )  # fmt: skip
