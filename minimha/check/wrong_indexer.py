"""Compute the keys that a lightning indexer picks, with any set of known bugs, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.prepared import FLOAT32, UNITS
from minimha.check.problems import Graded
from minimha.check.rounding import OF_FLOAT8, rounded
from minimha.check.wrong_attention import Deviated
from minimha.equations.dense import softmax
from minimha.layers import RoPE
from minimha.layers.indexer import largest

Array = NDArray[Any]

EPSILON = 1e-6
IN_SUMS = 64  # roundings to float32 of a product
IN_INPUTS = 4  # roundings of its factors to the inputs' dtype


class PreparedIndexer:
    """A problem of an indexer in float64."""

    def __init__(self, graded: Graded, dtype: str = "float32") -> None:
        given = {**graded.arguments, **(graded.layer or {})}
        self.given = given
        self.error = IN_SUMS * FLOAT32 + IN_INPUTS * UNITS[dtype]  # relative, of a product
        self.arrays = {n: np.float64(x) for n, x in given.items() if isinstance(x, np.ndarray)}
        self.B, self.L, _ = given["x"].shape
        self.heads = int(given["num_heads"])
        self.width = given["W_ik"].shape[1]

    def __getattr__(self, name: str) -> Any:
        return self.arrays[name]


def deviate_indexer(p: PreparedIndexer, d: Mapping[str, Any]) -> Deviated:
    """Return the picks as 1 and 0, (B, L, L); ``d`` has the names of deviations."""
    products, sizes = _products(p, d)
    w = _weights(p, d)
    I, size = _scores(d, products, w), (abs(w) * sizes).sum(1)
    error = p.error * size.max(-1, keepdims=True)
    # Not exactly 0 for sure: another order of sums may move such a product across 0.
    is_unsure = np.asarray((abs(products) <= p.error * sizes).any(1))
    seen = np.ones(I.shape, bool)
    if p.given.get("is_causal"):
        seen = np.broadcast_to(np.tri(p.L, dtype=bool), I.shape)
    picked, is_free = _picked(p, d, I, seen, error, is_unsure)
    if "index_same_for_all" in d:
        picked, is_free = (np.broadcast_to(x[:, -1:], x.shape) for x in (picked, is_free))
    if "index_entry_0_for_all" in d:
        picked, is_free = (np.broadcast_to(x[:1], x.shape) for x in (picked, is_free))
    if "index_moved" in d:
        picked, is_free = (np.roll(x, d["index_moved"], -1) for x in (picked, is_free))
    nothing = np.zeros((p.B, 1, p.L))
    output = picked.astype(np.float64)
    return Deviated(output, np.zeros(output.shape), nothing, nothing, (), is_free, nothing == 0)


def _products(p: PreparedIndexer, d: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return the products of queries and keys and their sizes, (B, Hi, L, L) each."""
    q = p.latents @ p.W_iq
    if "index_heads_transposed" in d:
        q = q.reshape(p.B, p.L, p.width, p.heads).swapaxes(2, 3)
    q = q.reshape(p.B, p.L, p.heads, p.width).swapaxes(1, 2)
    k = (p.x @ p.W_ik)[:, None]
    q = _rotated(p, d, q, d.get("index_rope_by_row"))
    on_keys = "index_rope_on_queries_only" not in d
    if "index_norm_last" in d:
        k = _normalised(p, d, _rotated(p, d, k) if on_keys else k)
    else:
        k = _normalised(p, d, k)
        k = _rotated(p, d, k) if on_keys else k
    if "index_in_float8" in d:
        q, k = (rounded(x, *OF_FLOAT8) for x in (q, k))
    K = k.swapaxes(-1, -2)
    return q @ K * p.width**-0.5, abs(q) @ abs(K) * p.width**-0.5


def _normalised(p: PreparedIndexer, d: Mapping[str, Any], k: Array) -> Array:
    if "index_norm_missing" in d:
        return k
    R, of = int(p.given["rope_dim"]), d.get("index_norm_of_part")
    is_in = (np.arange(p.width) < R) == (of == "rotated") if of else np.ones(p.width, bool)
    some = k[..., is_in]
    mean = 0 if "index_norm_without_mean" in d else some.mean(-1, keepdims=True)
    spread = np.sqrt(np.square(some - mean).mean(-1, keepdims=True) + EPSILON)
    bias = 0 if "index_norm_bias_ignored" in d else p.b_ik
    gain = 1 if "index_norm_gain_ignored" in d else p.g_ik
    return np.where(is_in, (k - mean) / spread * gain + bias, k)


def _rotated(p: PreparedIndexer, d: Mapping[str, Any], x: Array, row: str | None = None) -> Array:
    """Rotate x, (B, 1 or Hi, L, Di). A ``row`` counts heads within tokens, perhaps modulo L."""
    if "index_rope_ignored" in d:
        return x
    is_interleaved = bool(p.given["rope_interleaved"])
    if "index_rope_half" in d or "index_rope_interleaved" in d:
        is_interleaved = "index_rope_interleaved" in d
    R = p.width if "index_rope_on_all" in d else int(p.given["rope_dim"])
    base = 10000.0 if "index_rope_base_ignored" in d else p.given["rope_base"]
    if "index_rope_by_width" in d:
        base = base ** (R / p.width)
    rope = RoPE(p.width, base, interleaved=is_interleaved, rotary_dim=R)
    shift = R if "index_rope_on_last" in d else 0
    positions = np.arange(p.L) * (-1 if "index_rope_backwards" in d else 1)
    x = np.roll(x, shift, -1)
    if "index_rope_tables_of_halves" in d and is_interleaved:
        angles = np.tile(positions[:, None] * base ** (-2 * np.arange(R // 2) / R), 2)
        pairs = x[..., :R].reshape(*x.shape[:-1], -1, 2)
        crossed = np.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(*x.shape[:-1], -1)
        turned = x[..., :R] * np.cos(angles) + crossed * np.sin(angles)
        turned = np.concatenate([turned, x[..., R:]], -1)
    elif row is None:
        turned = rope.rotate(x, positions)
    else:
        rows = positions[:, None] * p.heads + np.arange(p.heads)
        rows = rows % p.L if row == "row mod L" else rows
        turned = np.stack([rope.rotate(x[:, h], rows[:, h]) for h in range(p.heads)], axis=1)
    return np.asarray(np.roll(turned, -shift, -1))


def _weights(p: PreparedIndexer, d: Mapping[str, Any]) -> Array:
    """Return the weights of the heads, (B, Hi, L, 1), or of another shape that broadcasts."""
    w = (p.x @ p.W_iw).swapaxes(1, 2)[..., None] * p.heads**-0.5
    if "index_weights_ignored" in d:
        return np.ones_like(w)
    if "index_weights_softmax" in d:
        return np.asarray(np.exp(w) / np.exp(w).sum(1, keepdims=True))
    if "index_head_0_only" in d:
        return np.asarray(w * (np.arange(p.heads) == 0)[:, None, None])
    if "index_weights_of_keys" in d:
        return np.asarray(w.swapaxes(2, 3))
    return np.asarray(abs(w) if "index_weights_absolute" in d else w)


def _scores(d: Mapping[str, Any], products: Array, w: Array) -> Array:
    if "index_relu_missing" in d:
        return np.asarray((w * products).sum(1))
    if "index_relu_of_sum" in d:
        return np.asarray(np.maximum((w * products).sum(1), 0))
    if "index_weights_before_relu" in d:
        return np.asarray(np.maximum(w * products, 0).sum(1))
    if "index_heads_maximum" in d:
        return np.asarray((w * np.maximum(products, 0)).max(1))
    if "index_relu_otherwise" in d:
        return np.asarray((w * OTHERWISE[d["index_relu_otherwise"]](products)).sum(1))
    return np.asarray((w * np.maximum(products, 0)).sum(1))


OTHERWISE: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs, "square": np.square, "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": lambda x: softmax(x)[0],
}  # fmt: skip


def _turn(L: int, how: str | None) -> Array:
    """Return the keys in the order in which ties are picked."""
    if how == "any":
        return np.random.default_rng(0).permutation(L)
    return np.arange(L)[:: -1 if how == "higher first" else 1]


def _picked(
    p: PreparedIndexer, d: Mapping[str, Any], I: Array, seen: Array, error: Array, is_unsure: Array
) -> tuple[Array, Array]:
    """Return which keys are picked, and where rounding may decide it, (B, L, L) each."""
    top_k = int(p.given["top_k"]) - ("index_one_too_few" in d) + ("index_one_too_many" in d)
    I = -I if "index_smallest" in d else I
    if "index_negative_reversed" in d:
        I = np.where(I < 0, I.min() - I, I)
    if "index_causal_in_blocks" in d and p.given.get("is_causal"):
        block = np.arange(p.L) // d["index_causal_in_blocks"]
        seen = np.broadcast_to(block <= block[:, None], seen.shape)
    among = seen
    if "index_own_key_hidden" in d and p.given.get("is_causal"):
        among = seen = seen & ~np.eye(p.L, dtype=bool)
    if "index_hidden_score_0" in d:
        I, among = np.where(seen, I, 0), np.ones_like(seen)
    if {"index_picked_before_hidden", "index_causal_ignored"} & {*d}:
        among = np.ones_like(seen)
    turn = _turn(p.L, d.get("index_ties_otherwise"))  # in which equal scores are picked
    order = largest(I[..., turn], among[..., turn], top_k)
    if "index_threshold_fills_early" in d:
        ranked = np.sort(np.where(among, I, -np.inf), -1)[..., ::-1]
        reached = among & (ranked[..., min(top_k, p.L) - 1, None] <= I)
        order = largest(np.zeros_like(I), reached, top_k)
    picked = np.zeros((*I.shape[:-1], p.L + 1), bool)  # an index of -1 is the last column
    np.put_along_axis(picked, order, True, -1)
    picked = picked[..., :-1][..., np.argsort(turn)]
    last = np.where(picked, I, np.inf).min(-1, keepdims=True)
    near = (abs(I - last) <= 2 * error) & among
    is_tie = (np.where(near, I, last) == last).all(-1, keepdims=True)
    is_exact = is_tie & ~(near & is_unsure).any(-1, keepdims=True)
    is_all = among.sum(-1, keepdims=True) <= top_k
    is_exact &= d.get("index_ties_otherwise") != "any"
    is_free = near & ~is_exact & ~is_all & (near.sum(-1, keepdims=True) > 1)
    if "index_own_key_added" in d:
        picked = picked | np.eye(p.L, dtype=bool)
    keeps_hidden = d.get("index_hidden_score_0") == "picked" or "index_causal_ignored" in d
    if not keeps_hidden:
        picked = picked & seen
    return picked, is_free
