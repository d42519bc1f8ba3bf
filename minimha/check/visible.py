"""Finds which keys are visible, under deviations, by position, by length and by the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.prepared import Impossible, Prepared
from minimha.equations.visibility import UNBOUNDED

Array = NDArray[np.bool_]

ALL = np.ones((1, 1, 1, 1), bool)


def part_size(x: Prepared, split: tuple[str, int]) -> int:
    """The number of keys in a part; a split is ("parts", 4), or by 64 keys each ("keys", 64)."""
    kind, n = split
    return -(-x.Lk // n) if kind == "parts" else n


def by_positions(x: Prepared, d: Mapping[str, Any]) -> Array:
    """Whether causality and the window let query i see key j."""
    return _by_window(x, d) & _by_causality(x, d)


def _by_causality(x: Prepared, d: Mapping[str, Any]) -> Array:
    is_given = bool(x.given.get("is_causal")) and "causal_ignored" not in d
    if not is_given and "causal_always" not in d:
        return ALL
    p = _position(x, d, "causal")
    if not is_given and d["causal_always"] == "to the last key":
        p = x.i + np.full_like(x.offset, x.Lk - x.Lq)
    if "causal_reversed" in d:
        return np.asarray(x.j >= p + d["causal_reversed"])
    ahead = d.get("causal_sees_one_ahead", 0) - d.get("causal_excludes_self", 0)
    block = d.get("causal_loop_ignores_offset", x.Lk)
    return np.asarray((x.j <= p + ahead) & (x.j < (x.i // block + 1) * block))


def _by_window(x: Prepared, d: Mapping[str, Any]) -> Array:
    window = x.given.get("window_size")
    if window is None or "window_ignored" in d:
        return ALL
    left, right = (UNBOUNDED if side is None else side for side in window)
    left += d.get("window_left_long", 0) - d.get("window_left_short", 0)
    right += d.get("window_right_long", 0) - d.get("window_right_short", 0)
    left = UNBOUNDED if "window_left_ignored" in d else left
    right = UNBOUNDED if "window_right_ignored" in d else right
    p = _position(x, d, "window")
    B_r, B_c = d.get("window_left_in_blocks", (1, 1))
    first = (p - left - x.i % B_r) // B_c * B_c
    block = d.get("window_starts_from_last_row", 1)
    first = np.maximum(first, (first - x.i % block + block - 1) // block * block)
    return np.asarray((first <= x.j) & (x.j <= p + right))


def _position(x: Prepared, d: Mapping[str, Any], name: str) -> NDArray[Any]:
    """The position of each query among the keys, for causality or for the window."""
    for deviation, offset in (("causal_top_left", 0), ("causal_bottom_right", x.Lk - x.Lq)):
        if name in d.get(deviation, ()):
            return np.asarray(rows(x, d) + np.full_like(x.offset, offset))
    if name == "window" and "window_ignores_offset" in d:
        return np.asarray(rows(x, d) + np.zeros_like(x.offset))
    return np.asarray(rows(x, d) + x.offset)


def rows(x: Prepared, d: Mapping[str, Any]) -> NDArray[Any]:
    """The number of each query, (Lq, 1); (H, Lq, 1) if the rows of grouped heads are confused."""
    way, G = d.get("packed_rows_confused"), x.H // x.Hkv
    g = np.arange(x.H)[:, None, None] % G
    if way == "row // G":
        return np.asarray((g * x.Lq + x.i) // G)
    return np.asarray((x.i * G + g) % x.Lq) if way == "row mod Lq" else x.i


def by_lengths(x: Prepared, d: Mapping[str, Any]) -> Array:
    """Whether key j is within the length, broadcastable to (B, 1, 1, Lk)."""
    visible: Array = ALL
    if x.given.get("kv_lengths") is not None and "lengths_ignored" not in d:
        lengths = x.lengths[:1] if "lengths_batch_0_for_all" in d else x.lengths
        lengths = lengths + d.get("lengths_one_too_long", 0) - d.get("lengths_one_too_short", 0)
        page = d.get("lengths_rounded_up", 1)
        visible = x.j < -(-lengths // page) * page
    B_c = d.get("online_last_block_dropped", 1)
    axis, N = d.get("only_first_computed", ("", 0))
    end = min(x.Lk // B_c * B_c, N if axis == "keys" else x.Lk)
    return np.asarray(visible & (x.j < end))


def by_mask(x: Prepared, d: Mapping[str, Any]) -> Array:
    """Whether the mask lets query i see key j, broadcastable to (B, H, Lq, Lk)."""
    mask = x.problem.attn_mask
    if mask is None or "mask_ignored" in d:
        return ALL
    mask = indexed(x, d, "mask", mask)
    return np.asarray(~mask if "mask_inverted" in d else mask)


def indexed(x: Prepared, d: Mapping[str, Any], name: str, a: NDArray[Any]) -> NDArray[Any]:
    """The mask or the bias ``a``, by the indices that the deviations of ``name`` give it."""
    if f"{name}_by_kv_head" in d and a.shape[1] > 1:
        a = a[:, x.heads]
    if f"{name}_head_0_for_all" in d:
        a = a[:, :1]
    if f"{name}_batch_0_for_all" in d:
        a = a[:1]
    if f"{name}_transposed" in d:
        if x.Lq != x.Lk:
            raise Impossible(f"the {name} is transposed but Lq is not Lk")
        a = a.swapaxes(-1, -2)
    return a
