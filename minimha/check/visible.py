"""Find the visible keys, by positions, lengths and the mask, in attention with bugs.

``x`` is a problem, and ``d`` maps the names of bugs to their values. Booleans broadcast to (B, H,
Lq, Lk).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.catalogue import BLOCKS, EMPTY_TOO, EQUAL_SPLITS, HALVES
from minimha.check.prepared import Prepared
from minimha.equations.visibility import UNBOUNDED

Array = NDArray[np.bool_]

KINDS = {  # the options that hide keys, by their name in deviations of hiding
    "mask": ("attn_mask",),
    "positions": ("is_causal", "window_size"),
    "lengths": ("kv_lengths",),
}
ALL = np.ones((1, 1, 1, 1), bool)


def parts(x: Prepared, split: tuple[str, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first key of each part, and the index of the part to which each key belongs.

    ``split`` is ("parts", 4) for 4 parts, of which the last may be shorter, ("floors", 4) for 4
    parts, of which the last may be longer, or ("keys", 64) for parts of 64 keys. ("at most 8", 64)
    is as many equal parts as there are blocks of 64 keys, up to 8, and ("at most 8 whole", 64) as
    many as there are whole blocks, but one at least. ("at least 64", 8) is 8 equal
    parts, or parts of 64 keys if these are longer. ("first", 64) is the first 64 keys, and the
    rest. ("every", 2) is each second key, from the first and from the second on. A kind that ends
    with ``EMPTY_TOO`` has the same parts.
    """
    kind, n = split
    kind = kind.removesuffix(EMPTY_TOO)
    if kind == "every":
        return x.j[:n], x.j % n
    if kind.startswith("at most"):
        blocks = max(x.Lk // n, 1) if kind.endswith("whole") else -(-x.Lk // n)
        kind, n = "parts", min(blocks, int(kind.split()[2]))
    whole = -(-x.Lk // n)
    sizes = {"parts": whole, "floors": max(x.Lk // n, 1), "at least 64": max(whole, 64)}
    size = sizes.get(kind, n)
    starts = x.j[::size][: {"floors": n, "first": 2}.get(kind)]
    return starts, np.minimum(x.j // size, len(starts) - 1)


def by_positions(x: Prepared, d: Mapping[str, Any]) -> Array:
    """Return whether causality and the window let query i see key j."""
    window, causality = _by_window(x, d), _by_causality(x, d)
    is_either = d.get("hides_only_together") == ("causal", "window")
    if is_either and window is not ALL and causality is not ALL:
        return window | causality
    return window & causality


def _by_causality(x: Prepared, d: Mapping[str, Any]) -> Array:
    is_given = bool(x.given.get("is_causal"))
    if not is_given and "causal_always" not in d:
        return ALL
    window, how = x.given.get("window_size"), d.get("causal_ignored_by_window")
    if how and window is not None:
        is_without = window[1] is None
        if how == "always" or is_without == (how == "without a right side"):
            return ALL
    first = offset(x, d, "causal")
    if not is_given and d["causal_always"] == "to the last key":
        first = np.full_like(x.offset, x.Lk - x.Lq)
    p = rows(x, d, "causal") + first
    if "causal_reversed" in d:
        return np.asarray(x.j >= p + d["causal_reversed"])
    way, size = d.get("causal_in_blocks", ("", 1))
    if way == "rows":  # of a block, all see what the last one sees
        p = _last_row(x, size) + first
    j = x.j // size * size if way == "keys" else x.j
    if way == "none":  # of the keys in the block where the query stands
        return np.asarray(x.j // size < p // size)
    ahead = d.get("causal_sees_one_ahead", 0) - d.get("causal_excludes_self", 0)
    seen = j <= p + ahead
    if "causal_loop_ignores_offset" in d:
        value = d["causal_loop_ignores_offset"]
        block, most = (value[0], x.Lq) if isinstance(value, tuple) else (value, x.Lk)
        seen = seen & (x.j < np.minimum((x.i // block + 1) * block, most))
    if "causal_masked_in_last_block" in d:
        B_r, B_c, masked = (*d["causal_masked_in_last_block"], 1)[:3]
        last_block = np.minimum(_last_row(x, B_r) + first, x.Lk - 1) // B_c
        seen = seen | (x.j // B_c <= last_block - masked)
    if "causal_ignored_in_block_of_first_row" in d:
        B_r, B_c = d["causal_ignored_in_block_of_first_row"]
        seen = seen | (x.j < -(-(x.i // B_r * B_r + first) // B_c) * B_c)
    if "causal_ignored_in_tail" in d:  # of at least one whole tile
        whole = x.Lq // d["causal_ignored_in_tail"] * d["causal_ignored_in_tail"]
        seen = seen | ((x.i >= whole) & (whole > 0))
    if "causal_loop_one_short" in d:
        B_r, B_c = d["causal_loop_one_short"]
        seen = seen & (x.j < -(-(_last_row(x, B_r) + first) // B_c) * B_c)
    if "causal_loop_of_entry_0" in d:
        B_r, B_c = d["causal_loop_of_entry_0"]
        end = _last_row(x, B_r) + 1 + first[:1]
        seen = seen & (x.j < -(-end // B_c) * B_c)
    if "causal_loop_packed_short" in d:
        size, G = d["causal_loop_packed_short"], x.H // x.Hkv
        seen = seen & (x.j < (packed_rows(x) // size + 1) * size // G + first)
    if "causal_loop_rounded_down" in d:
        B_r, B_c, *is_clipped = d["causal_loop_rounded_down"]
        end = _last_row(x, B_r) + 1 if is_clipped else (x.i // B_r + 1) * B_r
        seen = seen & (x.j < (end + first) // B_c * B_c)
    if "causal_loop_ends_early" in d:
        B_r, B_c = d["causal_loop_ends_early"]
        seen = seen & (x.j // B_c <= (x.i // B_r * B_r + first) // B_c)
    return np.asarray(seen)


def _last_row(x: Prepared, B_r: int) -> NDArray[Any]:
    """Return the last row of the tile of ``B_r`` rows to which each row belongs."""
    return np.asarray(np.minimum((x.i // B_r + 1) * B_r, x.Lq) - 1)


def _by_window(x: Prepared, d: Mapping[str, Any]) -> Array:
    window = x.given.get("window_size")
    if window is None:
        return ALL
    if "window_right_none_is_0" in d and window[0] is not None:
        window = window[0], window[1] or 0
    left, right = (UNBOUNDED if side is None else side for side in window)
    left += d.get("window_left_long", 0) - d.get("window_left_short", 0)
    right += d.get("window_right_long", 0) - d.get("window_right_short", 0)
    left = UNBOUNDED if "window_left_ignored" in d else left
    is_ignored = {"always": True, "if the left side is None": window[0] is None}
    right = UNBOUNDED if is_ignored.get(d.get("window_right_ignored", "")) else right
    p = rows(x, d, "window") + offset(x, d, "window")
    p_left = p - x.offset + x.offset[:1] if "window_left_of_entry_0" in d else p
    p_left = p_left - x.offset if "window_left_ignores_offset" in d else p_left
    if "window_left_from_end" in d:
        end = x.Lk if d["window_left_from_end"] == "Lk" else x.lengths
        p_left = p_left - x.offset + end - x.Lq
    B_r, B_c = d.get("window_left_in_blocks", (1, 1))
    first = (p_left - left - x.i % B_r) // B_c * B_c
    if "window_starts_from_last_row" in d:
        *is_whole, B_r, B_c = d["window_starts_from_last_row"]
        start = (p + _last_row(x, B_r) - x.i - left) // B_c
        if is_whole:  # at the first whole block that the first row of a tile sees
            start = -((x.i % B_r + left - p) // B_c)
        first = np.maximum(first, start * B_c)
    if "window_left_of_tile" in d:
        first = first - x.i // d["window_left_of_tile"] * d["window_left_of_tile"]
    if "window_slides_at_end" in d and UNBOUNDED not in (left, right):
        first = np.minimum(first, x.lengths - 1 - right - left)
    seen = (first <= x.j) & (x.j <= p + right)
    if "window_left_wraps" in d and left != UNBOUNDED:
        seen = seen & (first >= 0)
    if "window_left_masked_in_first_block" in d:
        B_r, B_c = d["window_left_masked_in_first_block"]
        start = np.maximum(p - x.i % B_r - left, 0) // B_c
        seen = seen | ((x.j // B_c > start) & (x.j <= p + right))
    if "window_ends_from_first_row" in d:
        B_r, B_c = d["window_ends_from_first_row"]
        seen = seen & (x.j // B_c <= (p - x.i % B_r + right) // B_c)
    if "window_loop_ignores_offset" in d and right != UNBOUNDED:
        seen = seen & (x.j <= _last_row(x, d["window_loop_ignores_offset"]) + right)
    if "window_left_seen_in_whole_blocks" in d:
        B_r, B_c = d["window_left_seen_in_whole_blocks"]
        last = x.j // B_c * B_c + B_c - 1  # key of its block
        p_first = p - x.i % B_r
        is_whole = (last <= p_first + right) & (last < x.lengths) & (last >= p_first - left)
        seen = seen | is_whole
    return np.asarray(seen)


def from_window(
    x: Prepared, given: Prepared, d: Mapping[str, Any]
) -> tuple[Prepared, Prepared, Array]:
    """Return x as positions and as lengths see its keys, and which keys are read.

    Positions may count from the number of a key's page. They and lengths also differ if positions
    count from the window's first page, whose first key is at position 0, or at that of the window's
    left side; then lengths count so, too. ``given`` has the pages; else all keys are one page.
    """
    left, _ = given.given.get("window_size") or (None, None)
    table = given.arguments.get("block_table")
    if "positions_by_page_number" in d and table is not None:
        size, moved = np.shape(given.arguments["k"])[2], copy(x)
        pages = np.asarray(table)[:, np.minimum(x.j // size, np.shape(table)[1] - 1)]
        moved.j = (pages * size + x.j % size)[:, None, None]
        return moved, x, ALL
    way = d.get("pages_from_window") if table is not None else None
    way = "left side" if "keys_count_from_window" in d else way
    if way is None or left is None:
        return x, x, ALL
    size = x.Lk if table is None else np.shape(given.arguments["k"])[2]
    start = np.clip(x.offset - left, 0, x.lengths)
    first = start // size * size
    is_read, moved = np.asarray(x.j >= first), copy(x)
    if way == "0":
        moved.j = x.j - first
        return moved, x, is_read
    moved.j = x.j - first + start
    return moved, moved, is_read


def last_for_none(x: Prepared, indices: Any) -> Array:
    """Return the last key, for queries one of whose ``indices`` is -1, as (B, H or 1, Lq, Lk)."""
    has_none = np.asarray((np.asarray(indices) < 0).any(-1))
    heads = x.heads if has_none.shape[1] > 1 else [0]
    return np.asarray(has_none[:, heads, :, None] & (x.j == x.Lk - 1))


def offset(x: Prepared, d: Mapping[str, Any], of: str) -> NDArray[Any]:
    """Return the first query's position, (B, 1, 1, 1), for ``of``: causality, window or ALiBi."""
    for deviation, first in (
        ("causal_top_left", np.zeros_like(x.offset)),
        ("causal_bottom_right", np.full_like(x.offset, x.Lk - x.Lq)),
        ("causal_by_length", x.lengths - x.Lq),
        ("default_by_length", x.offset if "q_offset" in x.given else x.lengths - x.Lq),
        ("offset_batch_0_for_all", x.offset[:1]),
        ("offset_of_0_ignored", _unless_0(x)),
        ("offset_subtracted", -x.offset),
        ("offset_below_0_is_0", np.maximum(x.offset, 0)),
        ("offset_added_twice", 2 * x.offset),
        ("offset_added_to_last", x.offset + x.Lk - x.Lq),
        ("window_ignores_offset", np.zeros_like(x.offset)),
        ("alibi_ignores_offset", np.zeros_like(x.offset)),
    ):
        if of in d.get(deviation, ()):
            return np.asarray(first)
    how, places = d.get("sequences_share_offset", ("", ()))
    if of in places and (starts := x.arguments.get("cu_seqlens_q")) is not None:
        both = [np.diff(s) for s in (x.arguments.get("cu_seqlens_k", starts), starts)]
        keys, queries = (n.max() if how == "longest" else n.sum() for n in both)
        return np.full_like(x.offset, keys - queries)
    if of == "alibi" and "alibi_from_first_row" in d:
        queries, keys = first_rows(x, x.arguments)
        moved = queries * (d["alibi_from_first_row"] == "both") - keys
        return np.asarray(x.offset + moved.reshape(-1, 1, 1, 1))
    return np.asarray(x.offset + d.get("offset_moved", 0))


def first_rows(x: Prepared, arguments: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first row of each entry, or sequence, among all queries and among all keys."""
    starts, b = arguments.get("cu_seqlens_q"), np.arange(x.B)
    if starts is None:
        return b * x.Lq, b * x.Lk
    return np.asarray(starts)[:-1], np.asarray(arguments.get("cu_seqlens_k", starts))[:-1]


def _unless_0(x: Prepared) -> NDArray[Any]:
    """Return the offset; where 0 is given for all entries, that which puts queries last."""
    is_0 = "q_offset" in x.given and not np.any(x.given["q_offset"])
    return np.full_like(x.offset, x.Lk - x.Lq) if is_0 else x.offset


def before_diagonal(x: Prepared, tile: tuple[int, int]) -> Array:
    """Return which keys are in a block that causality leaves whole for a tile of rows."""
    if not x.given.get("is_causal"):
        return np.zeros((1, 1, 1, 1), bool)
    B_r, B_c = tile
    last = (x.j // B_c + 1) * B_c - 1  # key of its block
    return np.asarray((last <= x.i // B_r * B_r + x.offset) & (last < x.Lk))


def first_of_tile(x: Prepared, tile: tuple[int, int]) -> Array:
    """Return which keys are in the first block that a tile of rows visits, by its window."""
    B_r, B_c = tile
    left, _ = x.given.get("window_size") or (None, None)
    start = x.i // B_r * B_r + x.offset - left if left is not None else 0 * x.offset
    return np.asarray(x.j // B_c == np.maximum(start, 0) // B_c)


def rows(x: Prepared, d: Mapping[str, Any], of: str) -> NDArray[Any]:
    """Return the index of each query for ``of``, (Lq, 1), or (H, Lq, 1) of confused grouped rows.

    ``of`` is "causal", "window" or "alibi".
    """
    if "last_rows_moved_back" in d:
        tile = d["last_rows_moved_back"]
        is_moved = (x.i >= x.Lq - tile) & (x.Lq > tile)
        return np.asarray(x.i + np.where(is_moved, -x.Lq % tile, 0))
    if "rows_by_other_tile" in d:
        B_r, other = d["rows_by_other_tile"]
        return np.asarray(x.i // B_r * other + x.i % B_r)
    value, G = d.get("packed_rows_confused", ""), x.H // x.Hkv
    way, places = value if isinstance(value, tuple) else (value, (of,))
    if not way or of not in places:
        return x.i
    alternating = packed_rows(x)
    followed = alternating % G * x.Lq + x.i
    ways = {
        "row // G": followed // G, "row mod Lq": alternating % x.Lq, "g · Lq + i": followed,
        "i · G + g": alternating,
    }  # fmt: skip
    ways["r >> ceil log2 G"] = alternating >> (G - 1).bit_length()
    ways["r >> log2 G"] = alternating >> (G.bit_length() - 1)
    for n in BLOCKS[:4]:
        start = alternating // n * n
        ways[f"r // G in tiles of {n}"] = start // G + (alternating - start) // G
    return np.asarray(ways[way])


def packed_rows(x: Prepared) -> NDArray[Any]:
    """Return the row i G + g of each query in its group, whose heads alternate, (H, Lq, 1)."""
    G = x.H // x.Hkv
    return np.asarray(x.i * G + np.arange(x.H)[:, None, None] % G)


def by_lengths(x: Prepared, d: Mapping[str, Any]) -> Array:
    """Return whether key j is within the length, and not skipped by a deviation.

    The array broadcasts to (B, H, Lq, Lk).
    """
    visible: Array = ALL
    if x.given.get("kv_lengths") is not None:
        lengths = x.lengths
        if "lengths_by_head" in d:
            b, h = np.arange(x.B)[:, None], np.arange(x.H)
            by_rows = (b * x.Hkv + x.heads) // x.H
            ways = {
                "(b · Hkv + h // G) // H": by_rows, "(b · H + h) // Hkv": (b * x.H + h) // x.Hkv,
                "(b · H + h) mod B": (b * x.H + h) % x.B, "b mod 4": b % 4, "b mod 2": b % 2,
            }  # fmt: skip
            lengths = lengths[np.minimum(ways[d["lengths_by_head"]], x.B - 1), 0]
        visible = x.j < lengths
        if "lengths_ignored_before_diagonal" in d:
            visible = visible | before_diagonal(x, d["lengths_ignored_before_diagonal"])
        if "lengths_seen_in_last_block" in d:
            of, block = d["lengths_seen_in_last_block"]
            end = int(x.lengths.max()) if of == "longest" else x.Lk
            visible = visible | (x.j < (end - 1) // block * block)
    B_c = d.get("online_last_block_dropped", 1)
    axis, N = d.get("only_first_computed", ("", 0))
    end = min(x.Lk // B_c * B_c, first_of(x.Lk, N) if axis == "keys" else x.Lk)
    if (block := d.get("all_but_first_whole_dropped", x.Lk + 1)) <= x.Lk:
        end = min(end, x.Lk // block * block)
    if axis in EQUAL_SPLITS:
        splits = -(-x.Lk // N)
        splits = min(splits, 8) if axis == EQUAL_SPLITS[1] else splits
        end = x.Lk // splits * splits
    if axis == "keys but a last block of one":
        is_lost = (x.j == x.lengths - 1) & (x.lengths % N == 1) & (x.lengths > 1)
        visible = visible & ~is_lost
    if "last_whole_block_dropped" in d:
        block = d["last_whole_block_dropped"]
        visible = visible & ((x.lengths % block > 0) | (x.j < x.lengths - block))
    start = N if axis == "keys but the first" else 0
    if axis in HALVES:
        visible = visible & (x.j % (2 * N) < N)
    return np.asarray(visible & (x.j < end) & (x.j >= start))


def first_of(size: int, N: int) -> int:
    """Return how many of ``size`` are the first N or, if N is negative, all but the last -N."""
    return N if N > 0 else max(size + N, 0)


def is_given(x: Prepared, option: str) -> bool:
    """Whether a problem uses an option that hides keys."""
    return x.given.get(option) is not None and x.given[option] is not False


def joined(x: Prepared, kinds: dict[str, Array], d: Mapping[str, Any]) -> dict[str, Array]:
    """Return ``kinds``, the visible keys by kind of hiding, with the deviation of ``d`` applied.

    With ``hides_only_together``, two kinds hide only the keys that both hide.
    """
    pair = d.get("hides_only_together", ())
    if not all(any(is_given(x, option) for option in KINDS.get(name, ())) for name in pair):
        return kinds
    return kinds | {name: np.logical_or(*(kinds[of] for of in pair)) for name in pair}
