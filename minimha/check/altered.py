"""Define the deviations that compute attention rightly, but of altered arguments.

For example, the sinks are reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.catalogue import (
    DEVIATIONS,
    LAST_READ,
    LONGEST,
    OR_ONE_PAGE,
    UNLESS_WHOLE,
    WHATEVER_HIDES,
)
from minimha.check.expanded import (
    INDICES,
    PACKING,
    RANGES,
    READ,
    Place,
    expanded,
    indices,
    laid_out,
)
from minimha.check.prepared import Impossible, Prepared
from minimha.check.rounding import rounded
from minimha.check.visible import first_rows, packed_rows
from minimha.equations.arrays import FLOAT8, extension
from minimha.equations.eight_bits import SCALES, scales_of

Array = NDArray[Any]
Alter = Callable[[Prepared, Mapping[str, Any], Any], Mapping[str, Any]]

IGNORED = {
    "sinks_ignored": "sinks", "alibi_ignored": "alibi_slopes", "bias_ignored": "attn_bias",
    "mask_ignored": "attn_mask", "window_ignored": "window_size", "lengths_ignored": "kv_lengths",
    "softcap_ignored": "softcap", "scale_argument_ignored": "scale",
    "score_mod_ignored": "score_mod", "mask_mod_ignored": "mask_mod",
    "key_indices_ignored": "key_indices",
}  # fmt: skip
INPUT_BITS = {
    "inputs_in_bfloat16": (8, 128), "inputs_in_tf32": (11, 128), "inputs_in_float16": (11, 16),
}  # fmt: skip


def altered(x: Prepared, d: Mapping[str, Any]) -> Prepared:
    """Return the problem that a function with deviations ``d`` computes in place of ``x``."""
    given, place, done = dict(x.given), x.place, set()
    if x.arguments is not x.given:
        done = {*IGNORED, *ARRANGED, *PICKED, "causal_ignored"} & set(d)
        if done:
            arranged, place = _arranged_otherwise(x, d)
            given = dict(arranged)
    for name, alter in ALTERATIONS.items():
        if name in d and name not in done and not _is_of_another_mask(x, name):
            given |= alter(x, given, d[name])
    if all(given.get(n) is value for n, value in x.given.items()) and len(given) == len(x.given):
        return x
    other = Prepared(given, x.dtype, x.is_exact, x.is_likely)
    other.extra, other.place = x.extra, place
    if other.shape[:3] == x.shape[:3]:
        other.sees_nothing = x.sees_nothing
    if given["q"] is x.given["q"] and given["k"] is x.given["k"]:
        vars(other)["products"] = x.products
    return other


def _is_of_another_mask(x: Prepared, name: str) -> bool:
    """Whether a bug of the caller's mask cannot show, since the mask comes from other options."""
    return DEVIATIONS[name].needs == ("attn_mask",) and x.arguments.get("attn_mask") is None


def _arranged_otherwise(
    x: Prepared, d: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Place | None]:
    """The plain form of what a function reads that finds sequences, pages or indices wrongly."""
    given = dict(x.arguments)
    for name, option in {**IGNORED, "causal_ignored": "is_causal"}.items():
        if name in d:
            given.pop(option, None)
    for name, alter in ARRANGED.items():
        if name in d:
            given |= alter(x, given, d[name])
    if given.get(INDICES) is None or not {*PICKED} & set(d):
        return expanded(given)
    given, place = laid_out(given)
    for name, alter in PICKED.items():
        if name in d:
            given |= alter(x, given, d[name])
    return expanded(given)[0], place


def heads_by(x: Prepared, way: str) -> Array:
    """Return the index of the key/value head that each query head uses, (H,), by ``way``.

    The way "h // G" is right, with G = H / Hkv; the others are wrong.
    """
    h, G = np.arange(x.H), x.H // x.Hkv
    ways = {
        "h // G": h // G, "h mod Hkv": h % x.Hkv, "0": 0 * h, "reversed": x.Hkv - 1 - h // G,
        "h >> log2 G": np.minimum(h >> (G.bit_length() - 1), x.Hkv - 1),
        "h >> ceil log2 G": h >> (G - 1).bit_length(),
        "(h mod G) · Hkv + h // G": h % G * x.Hkv + h // G, "h mod 16": h % 16, "h mod 8": h % 8,
        "h // G + h mod G": h // G + h % G, "h - h mod G": h - h % G,
        "(h mod 16) // G": h % 16 // G,
        "h // 16 · 16 // G + (h mod 16) // G": h // 16 * 16 // G + h % 16 // G,
        "block of 4 heads, mod Hkv": (h // G * -(-G // 4) + h % G // 4) % x.Hkv,
        "h // Hkv": np.minimum(h // x.Hkv, x.Hkv - 1), "at most Hkv - 1": np.minimum(h, x.Hkv - 1),
    }  # fmt: skip
    return np.asarray(ways[way])


def first_for_all(a: Array, axis: int) -> Array:
    """Return ``a`` with its first part along an axis in place of all parts."""
    return np.repeat(a.take([0], axis), a.shape[axis], axis)


def order_by_lengths(x: Prepared, way: str) -> Array:
    """Return the batch entries in the order of their lengths, "longest first" or the other way."""
    lengths = x.lengths.ravel()
    return np.argsort(-lengths if way == "longest first" else lengths, kind="stable")


def _option(name: str, change: Callable[[Prepared, Any, Any], Any]) -> Alter:
    """Alter one option by ``change(x, array, value)``, if it is given."""

    def alter(x: Prepared, given: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
        a = given.get(name)
        a = a if a is None or name == "window_size" else np.asarray(a)
        return {} if a is None else {name: change(x, a, value)}

    return alter


def _first_in_group(x: Prepared, number: int) -> Array:
    """Return one of the first ``number`` heads of its group for each head, in turn, (H,)."""
    g = _in_group(x)
    return np.asarray(np.arange(x.H) - g + g % number)


def _in_group(x: Prepared) -> Array:
    """Return the number of each query head in its group, (H,)."""
    return np.asarray(np.arange(x.H) % (x.H // x.Hkv))


def _in_first_row(x: Prepared, bias: Array, tile: int) -> Array:
    """Add a bias of one row to the first of ``tile`` rows only."""
    if bias.shape[-2] > 1:
        return bias
    return np.where(np.arange(x.Lq)[:, None] % tile == 0, bias, bias.dtype.type(0))


def _in_first_tile(x: Prepared, array: Array, tile: int) -> Array:
    """Let a mask or bias of one row count for the first ``tile`` rows only."""
    if array.shape[-2] > 1:
        return array
    return _only(array, np.arange(x.Lq)[:, None] < tile)


def _from_window(x: Prepared, bias: Array, tile: int) -> Array:
    """Read columns as if they counted from the first key that the first of ``tile`` rows sees."""
    left = (x.given.get("window_size") or (None, None))[0]
    if left is None or bias.shape[-1] == 1:
        return bias
    first = np.maximum(x.i // tile * tile + x.offset - left, 0)
    columns = np.maximum(x.j - first, 0)
    shape = np.broadcast_shapes(bias.shape, columns.shape)
    columns, bias = (np.broadcast_to(a, shape) for a in (columns, bias))
    return np.take_along_axis(bias, columns, 3)


def _moved(size: int, block: int) -> Array:
    """Return the indices that are read if the last block begins at ``size - block``."""
    i = np.arange(size)
    end = size // block * block
    return np.where((i < end) | (end == 0), i, i - end + size - block)


def _ignored_in_tail(x: Prepared, a: Array, block: int) -> Array:
    """Let a mask or bias count only for the keys of whole blocks."""
    return _only(a, x.j < x.Lk // block * block)


def _only(array: Array, where: Array) -> Array:
    """Let a mask or bias count only for some pairs."""
    return np.where(where, array, array.dtype.type(array.dtype == bool))


def _axes(name: str) -> dict[str, Alter]:
    """What goes wrong with the indices of the mask, or of the bias."""

    def over_heads(x: Prepared, a: Array, heads: Array) -> Array:
        return a[:, heads] if a.shape[1] > 1 else a

    def transposed(x: Prepared, a: Array, way: str) -> Array:
        if way == "with zeros around":
            square = np.zeros((*a.shape[:2], max(x.Lq, x.Lk), max(x.Lq, x.Lk)), a.dtype)
            square[..., : x.Lq, : x.Lk] = a
            return np.asarray(square.swapaxes(-1, -2)[..., : x.Lq, : x.Lk])
        if x.Lq != x.Lk:
            raise Impossible(f"the {name} is transposed but Lq is not Lk")
        return a.swapaxes(-1, -2)

    def flattened(x: Prepared, a: Array, _: Any) -> Array:
        matrices: Array = a.reshape(-1, *a.shape[2:])
        return np.asarray(matrices[np.arange(x.B * x.H).reshape(x.B, x.H) % len(matrices)])

    def packed(x: Prepared, a: Array, _: Any) -> Array:
        if a.shape[2] == 1:
            return a
        rows = packed_rows(x) % x.Lq
        whole = np.broadcast_to(a, (len(a), x.H, *a.shape[2:]))
        return np.take_along_axis(whole, np.broadcast_to(rows, (len(a), *rows.shape)), 2)

    def moved(x: Prepared, a: Array, value: tuple[str, int]) -> Array:
        of, block = value
        axis = 3 if of == "columns" else 2
        return a if a.shape[axis] == 1 else a.take(_moved(a.shape[axis], block), axis)

    def sorted_otherwise(x: Prepared, a: Array, way: str) -> Array:
        is_sorted = x.given.get("kv_lengths") is not None and len(a) > 1
        return a[order_by_lengths(x, way).argsort()] if is_sorted else a

    def of_entry_0(x: Prepared, a: Array, when: str) -> Array:
        if when == UNLESS_WHOLE:
            return a if a.shape[:2] == (x.B, x.H) else a[:1, :1]
        return a[:1] if when == "always" or a.shape[1] == 1 else a

    changes: dict[str, Callable[[Prepared, Array, Any], Any]] = {
        "by_kv_head": lambda x, a, way: over_heads(x, a, heads_by(x, way)),
        "head_0_for_all": lambda x, a, _: a[:, :1],
        "of_first_in_group": lambda x, a, n: over_heads(x, a, _first_in_group(x, n)),
        "batch_0_for_all": of_entry_0,
        "row_0_for_all": lambda x, a, _: a[:, :, :1],
        "row_of_tile": lambda x, a, size: a[:, :, np.arange(x.Lq) % size % a.shape[2]],
        "row_mod_length": packed,
        "block_0_for_all": lambda x, a, size: a if a.shape[3] == 1 else a[..., x.j % size],
        "last_block_moved": moved,
        "ignored_in_tail": _ignored_in_tail,
        "flattened": flattened,
        "by_order_of_lengths": sorted_otherwise,
        "transposed": transposed,
    }

    def whole(change: Callable[[Prepared, Array, Any], Any]) -> Alter:
        return _option(
            f"attn_{name}", lambda x, a, v: change(x, a.reshape((1,) * (4 - a.ndim) + a.shape), v)
        )

    return {f"{name}_{suffix}": whole(change) for suffix, change in changes.items()}


def _by_stride(x: Prepared, mask: Array, stride: int, *, repeats_last: bool) -> Array:
    """Read a flat mask as if its rows began ``stride`` numbers apart.

    Beyond its end, the mask repeats its last number, or is False.
    """
    flat = np.broadcast_to(mask, (*mask.shape[:-2], x.Lq, x.Lk)).reshape(*mask.shape[:-2], -1)
    at, last = x.i * stride + x.j, x.Lq * x.Lk - 1
    return np.asarray(flat[..., np.minimum(at, last)] & ((at <= last) | repeats_last))


def _in_bytes(x: Prepared, mask: Array, way: str) -> Array:
    """Read a mask of bits with another stride than that with which it was written."""
    whole = -(-x.Lk // 8) * 8
    if way == "read closely":
        rows = np.broadcast_to(mask, (*mask.shape[:-2], x.Lq, x.Lk))
        rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, whole - x.Lk)])
        flat = rows.reshape(*rows.shape[:-2], -1)
        return np.asarray(flat[..., x.i * x.Lk + x.j])
    stride = whole if way == "packed closely" else x.Lk // 8 * 8
    return _by_stride(x, mask, stride, repeats_last=False)


def _at_corners(x: Prepared, mask: Array, tile: tuple[int, int]) -> Array:
    """Show a whole tile if the mask shows its four corners."""
    mask = np.broadcast_to(mask, (*mask.shape[:-2], x.Lq, x.Lk))
    ends = []
    for size, B in zip((x.Lq, x.Lk), tile, strict=True):
        first = np.arange(size) // B * B
        ends.append((first, np.minimum(first + B, size) - 1))
    whole = np.ones((1, 1), bool)
    for rows in ends[0]:
        for columns in ends[1]:
            whole = whole & mask[..., rows[:, None], columns]
    return np.asarray(mask | whole)


def _by_corners(x: Prepared, mask: Array, tile: tuple[int, int]) -> Array:
    """Show a whole tile if mask_mod shows its four corners, for all entries and heads."""
    if x.arguments.get("mask_mod") is None:
        return mask
    mask = np.broadcast_to(mask, (*mask.shape[:-2], x.Lq, x.Lk))
    return mask | _at_corners(x, np.asarray(mask.all((0, 1), keepdims=True)), tile)


def _lengths(change: Callable[[Prepared, Array, Any], Any]) -> Alter:
    return _option(
        "kv_lengths",
        lambda x, L, v: np.clip(np.broadcast_to(change(x, L, v), (x.B,)), 0, x.Lk).astype(int),
    )


def _rounded_up(x: Prepared, L: Array, value: Any) -> Any:
    """Return lengths in whole blocks or pages; some blocks must divide the number of keys.

    With ``LONGEST``, none is longer than the longest was; without pages, all keys are one page.
    """
    if value == LONGEST:
        page = _size(x, "page", x.Lk)
        return np.minimum(-(-L // page) * page, L.max())
    must_divide = isinstance(value, tuple)
    block = value[1] if must_divide else _size(x, value)
    return L if must_divide and x.Lk % block else -(-L // block) * block


def _from_first_sequence(x: Prepared, L: Array, _: Any) -> Any:
    starts, lengths = (x.arguments.get(name) for name in ("cu_seqlens_k", "kv_lengths"))
    if starts is None or lengths is None:
        return L
    return np.minimum(L, lengths - np.asarray(starts)[:-1])


def _size(x: Prepared, block: Any, otherwise: int = 1) -> int:
    """Return the size of a block, or of the problem's pages, which is ``otherwise`` without any."""
    if block != "page":
        return int(block)
    is_paged = x.arguments.get("block_table") is not None
    return np.shape(x.arguments["k"])[2] if is_paged else otherwise


def _masked(x: Prepared, given: Mapping[str, Any], seen: Array) -> dict[str, Any]:
    mask = given.get("attn_mask")
    seen = np.broadcast_to(seen, (x.B, 1, x.Lq, x.Lk))
    return {"attn_mask": seen if mask is None else seen & mask}


def _from_left(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    if given.get("kv_lengths") is None:
        return {}
    return {"kv_lengths": None} | _masked(x, given, x.j >= x.Lk - x.lengths)


def _hide_queries(x: Prepared, given: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    if given.get("kv_lengths") is None:
        return {}
    kept = {"kv_lengths": None} if way == "instead" else {}
    return kept | _masked(x, given, x.i < x.lengths)


def _lose_whole_page(x: Prepared, L: Array, page: Any) -> Array:
    """Lose a last page that is full; with ``LAST_READ``, of the keys that some query may see."""
    if page == LAST_READ:
        right = 0 if x.given.get("is_causal") else (x.given.get("window_size") or (None, None))[1]
        if right is not None:
            L = np.minimum(L, np.maximum(x.offset.ravel() + x.Lq + right, 0))
    size = _size(x, "page" if page == LAST_READ else page, otherwise=x.Lk + 1)
    return np.where(L % size, L, L - size)


def _kept_from_before(x: Prepared, L: Array, _: Any) -> Array:
    """Give an entry that uses all keys the length of the last entry that does not."""
    found, last = [], x.Lk
    for length in np.broadcast_to(L, (x.B,)):
        last = length if length < x.Lk else last
        found.append(last)
    return np.array(found)


def _inputs(change: Callable[[Prepared, Array, Any], Any], names: str = "qkv") -> Alter:
    return lambda x, given, value: {n: change(x, np.asarray(given[n]), value) for n in names}


def _rounded(bits: int, exponent: int) -> Alter:
    return _inputs(lambda x, a, _: rounded(a.astype(np.float64), bits, exponent))


def _swap(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    if x.Dv != x.D:
        raise Impossible("K and V are swapped but D is not Dv")
    return {"k": given["v"], "v": given["k"]}


def _of_entry_0(x: Prepared, given: Mapping[str, Any], names: str) -> Mapping[str, Any]:
    return {n: np.broadcast_to(given[n][:1], np.shape(given[n])) for n in names}


def _zeroed(x: Prepared, a: Array, block: int) -> Array:
    return np.where(x.j[:, None] < x.Lk // block * block, a, 0)


def _of_later_block(x: Prepared, a: Array, value: tuple[int, int, str]) -> Array:
    """Give blocks of keys the values of one that is so many blocks ahead, if there is one.

    These are all blocks, "each", or only the "even" ones.
    """
    block, ahead, of = value
    later = x.j + block * ahead
    found = np.where((later < x.Lk)[:, None], a[:, :, np.minimum(later, x.Lk - 1)], 0)
    has_later = x.j // block + ahead <= (x.Lk - 1) // block
    has_later = has_later & ((of == "each") | (x.j // block % 2 == 0))
    return np.where(has_later[:, None], found, a)


def _pad(x: Prepared, given: Mapping[str, Any], value: tuple[str, int]) -> Mapping[str, Any]:
    """Zero keys up to a whole block, which a mask hides if value is ("masked", block)."""
    hidden_by = [name for name in ("is_causal", *HIDING) if given.get(name) is not None]
    more = -x.Lk % value[1]
    if not more or (value[0] == "plain" and hidden_by):
        return {}
    found = {n: np.pad(given[n], [(0, 0), (0, 0), (0, more), (0, 0)]) for n in "kv"}
    found["q_offset"] = x.problem.q_offset
    for name, filled in (("attn_mask", value[0] != "masked"), ("attn_bias", 0)):
        a = given.get(name)
        if a is not None and np.shape(a)[-1] > 1:
            sides = [(0, 0)] * (np.ndim(a) - 1) + [(0, more)]
            found[name] = np.pad(a, sides, constant_values=filled)
    return found


def _among_all(x: Prepared, b: Any, i: Any, j: Any) -> tuple[Any, Any]:
    """Return positions in entry, or sequence, b as rows among all queries and among all keys."""
    if x.arguments.get("block_table") is not None:
        return i, j
    queries, keys = first_rows(x, x.arguments)
    return queries[b] + i, keys[b] + j


def _from_first_of_all(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    if given.get("block_table") is not None:
        return {}
    return {"q_offset": given.get("q_offset", 0) + np.subtract(*first_rows(x, given))}


def confused(a: Array, way: str) -> Array:
    """Return ``a`` (B, H, L, D) with heads and tokens confused by a reshape without a transpose.

    ``way`` "back" reads an array in the order (B, L, H, D) as (B, H, L, D). Any other ``way`` reads
    one in the order (B, H, L, D) as (B, L, H, D), and then transposes it.
    """
    B, H, L, D = a.shape
    if way == "back":
        return np.asarray(a.swapaxes(1, 2).reshape(a.shape))
    return np.asarray(a.reshape(B, L, H, D).swapaxes(1, 2))


HIDING = ("window_size", "kv_lengths", "attn_mask")
# In the order in which they apply.
ALTERATIONS: dict[str, Alter] = {
    **{name: _option(o, lambda x, a, _: None) for name, o in IGNORED.items()},
    "causal_ignored": lambda x, given, _: {"is_causal": False},
    **{name: _rounded(*bits) for name, bits in INPUT_BITS.items()},
    "heads_not_split": _inputs(lambda x, a, way: confused(a, way)),
    "kv_batch_0_for_all": _of_entry_0,
    "k_v_swapped": _swap,
    "scale_of_0_ignored": _option("scale", lambda x, scale, _: scale if scale else None),
    "last_block_zeroed": _inputs(_zeroed, "kv"),
    "last_block_read_earlier": _inputs(lambda x, a, block: a[:, :, _moved(x.Lk, block)], "kv"),
    "values_of_other_block": _inputs(_of_later_block, "v"),
    **_axes("mask"),
    **_axes("bias"),
    "mask_bits_misread": _option("attn_mask", _in_bytes),
    "mask_stride_of_queries": _option(
        "attn_mask", lambda x, a, _: _by_stride(x, a, x.Lq, repeats_last=True)
    ),
    "mask_read_at_corners": _option("attn_mask", _at_corners),
    "mask_row_in_first_tile": _option("attn_mask", _in_first_tile),
    "mask_mod_read_at_corners": _option("attn_mask", _by_corners),
    "positions_from_first_of_all": _from_first_of_all,
    "mask_inverted": _option("attn_mask", lambda x, a, _: ~a),
    "alibi_slope_0_for_all": _option("alibi_slopes", lambda x, a, _: a[0 * a.astype(int)]),
    "alibi_by_kv_head": _option("alibi_slopes", lambda x, a, way: a[heads_by(x, way)]),
    "alibi_of_first_in_group": _option("alibi_slopes", lambda x, a, n: a[_first_in_group(x, n)]),
    "alibi_sign": _option("alibi_slopes", lambda x, a, _: -a),
    "sink_0_for_all": _option("sinks", lambda x, a, _: np.repeat(a[:1], x.H)),
    "sinks_by_kv_head": _option("sinks", lambda x, a, way: a[heads_by(x, way)]),
    "bias_row_in_first_only": _option("attn_bias", _in_first_row),
    "bias_row_in_first_tile": _option("attn_bias", _in_first_tile),
    "bias_counts_from_window": _option("attn_bias", _from_window),
    "sinks_by_head_in_group": _option("sinks", lambda x, a, _: a[_in_group(x)]),
    "sinks_of_first_in_group": _option("sinks", lambda x, a, n: a[_first_in_group(x, n)]),
    "sink_exponentiated": _option("sinks", lambda x, a, _: np.exp(np.minimum(a, 80))),
    "lengths_one_too_long": _lengths(lambda x, L, more: L + more),
    "lengths_one_too_short": _lengths(lambda x, L, _: L - 1),
    "lengths_rounded_up": _lengths(_rounded_up),
    "lengths_rounded_down": _lengths(lambda x, L, page: L // _size(x, page) * _size(x, page)),
    "lengths_lose_whole_page": _lengths(_lose_whole_page),
    "lengths_of_0_ignored": _lengths(lambda x, L, _: np.where(L == 0, x.Lk, L)),
    "whole_lengths_hide_all": _lengths(lambda x, L, _: L * (x.Lk > L)),
    "lengths_kept_from_before": _lengths(_kept_from_before),
    "lengths_batch_0_for_all": _lengths(lambda x, L, _: L[:1]),
    "lengths_shared": _lengths(
        lambda x, L, of: np.minimum.accumulate(L) if of == "least so far" else getattr(L, of)()
    ),
    "lengths_end_in_block_of_entry_0": _lengths(
        lambda x, L, n: np.minimum(L, -(-L[:1] // n) * n)
    ),
    "lengths_from_first_sequence": _lengths(_from_first_sequence),
    "lengths_hide_queries": _hide_queries,
    "lengths_from_left": _from_left,
    "window_sides_swapped": _option("window_size", lambda x, w, _: (w[1], w[0])),
    "window_halved": _option(
        "window_size", lambda x, w, _: tuple(None if side is None else side // 2 for side in w)
    ),
    "window_of_0_ignored": _option(
        "window_size", lambda x, w, of: tuple(
            side or None if of in ("both", which) else side
            for which, side in zip(("left", "right"), w, strict=True)
        )
    ),
    "window_symmetric": _option("window_size", lambda x, w, side: (w[side], w[side])),
    "window_hides_future": _option("window_size", lambda x, w, _: (w[0], 0)),
    "padding_seen": _pad,
}  # fmt: skip


# What goes wrong before sequences and pages are laid out as a batch.


def _one_sequence(x: Prepared, given: Mapping[str, Any], way: str) -> Mapping[str, Any]:
    starts = given.get("cu_seqlens_q")
    if starts is None or (way != "all" and given.get("block_table") is not None):
        return {}
    if way == "keys":  # of all sequences, from the first one on
        n = len(starts) - 1
        return {RANGES: (np.zeros(n, int), np.full(n, np.shape(given["k"])[2]))}
    if way == "k as q":
        return {"cu_seqlens_k": np.minimum(starts, np.shape(given["k"])[2])}
    if given.get("block_table") is not None:
        return {"block_table": given["block_table"][:1]} | _first_alone(starts, given)
    ends = np.array([0, np.shape(given["k"])[2]])
    return {"cu_seqlens_k": ends, "kv_lengths": None} | _first_alone(starts, given)


def _first_alone(starts: Array, given: Mapping[str, Any]) -> dict[str, Any]:
    """One sequence of all queries, with the first one's offset and length."""
    one = {n: np.ravel(given[n])[:1] for n in ("q_offset", "kv_lengths") if n in given}
    return {"cu_seqlens_q": np.array([0, starts[-1]])} | one


def _from_first_row(x: Prepared, given: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Positions that count from the first of all packed queries, or from the first key too."""
    if given.get("cu_seqlens_q") is None:
        return {}
    queries, keys = first_rows(x, given)
    return {"q_offset": given.get("q_offset", 0) + queries - keys * (which == "both")}


def _moved_borders(x: Prepared, given: Mapping[str, Any], more: Any) -> Mapping[str, Any]:
    """Move the borders between packed sequences, of queries and of keys.

    Or change them in one of the ``OTHER_BORDERS``.
    """
    if isinstance(more, str):
        return OTHER_BORDERS[more](x, given, more)
    changed: dict[str, Any] = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if given.get(name) is not None:
            moved = np.array(given[name])
            moved[1:-1] = np.clip(moved[1:-1] + more, 0, moved[-1])
            changed[name] = moved
    return changed


def _ranges(change: Callable[[Array, Array, Any], tuple[Array, Array]]) -> Alter:
    """Give packed sequences other keys: ``change(queries, keys, value)`` returns first and end.

    ``queries`` and ``keys`` are where the sequences start, and the last one's end.
    """

    def alter(x: Prepared, given: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
        queries = given.get("cu_seqlens_q")
        if queries is None or given.get("block_table") is not None:
            return {}
        keys = np.asarray(given.get("cu_seqlens_k", queries))
        first, end = change(np.asarray(queries), keys, value)
        return {RANGES: (first, np.minimum(end, keys[-1]))}

    return alter


def _first_query_before(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    """Give each sequence's first query to the sequence before; positions stay those of rows."""
    starts = given.get("cu_seqlens_q")
    if starts is None:
        return {}
    moved = np.array(starts)
    moved[1:-1] = np.minimum(moved[1:-1] + 1, moved[-1])
    return {"cu_seqlens_q": moved, "q_offset": given.get("q_offset", 0) + (moved - starts)[:-1]}


OTHER_BORDERS = {
    "first query before": _first_query_before,
    "as queries": _ranges(lambda q, k, _: (q[:-1], q[:-1] + np.diff(k))),
    "as long as queries": _ranges(lambda q, k, _: (k[:-1], k[:-1] + np.diff(q))),
}


def _in_whole_blocks(queries: Array, keys: Array, block: int) -> tuple[Array, Array]:
    """The keys of whole blocks, of which the last one may be the next sequence's."""
    return keys[:-1], keys[:-1] + -(-np.diff(keys) // block) * block


def _of_first_sequences(queries: Array, keys: Array, value: tuple[str, int]) -> tuple[Array, Array]:
    """For sequences after the first n, the keys of one of these, or as many from its first on."""
    what, n = value
    lengths, s = np.diff(keys), np.arange(len(keys) - 1) % n
    return keys[s], keys[s] + (lengths[s] if what == "all" else lengths)


def _unnumbered(x: Prepared, given: Mapping[str, Any], of: str) -> Mapping[str, Any]:
    """Number only sequences that are not empty, for their borders or for offsets and lengths."""
    starts = given.get("cu_seqlens_q")
    if starts is None:
        return {}
    if of == "offsets and lengths":
        number = np.maximum(np.cumsum(np.diff(starts) > 0) - 1, 0)
        names = [n for n in ("q_offset", "kv_lengths") if np.size(given.get(n, 0)) > 1]
        return {n: np.asarray(given[n])[number] for n in names}
    names = [n for n in ("cu_seqlens_q", "cu_seqlens_k") if given.get(n) is not None]
    borders = {n: np.unique(given[n]) for n in names}
    changed = {n: np.pad(x, (0, len(starts) - len(x)), "edge") for n, x in borders.items()}
    if of == "positions too":  # they count from the start of the sequence that had the number
        moved = {n: (x - given[n])[:-1] for n, x in changed.items()}
        of_keys = moved.get("cu_seqlens_k", 0)
        changed["q_offset"] = given.get("q_offset", 0) + moved["cu_seqlens_q"] - of_keys
        if given.get("kv_lengths") is not None:
            changed["kv_lengths"] = np.maximum(given["kv_lengths"] - of_keys, 0)
    return changed


def _until_empty(queries: Array, keys: Array, _: Any) -> tuple[Array, Array]:
    """No keys for all sequences from the first one without queries or keys on."""
    is_over = np.logical_or.accumulate((np.diff(queries) == 0) | (np.diff(keys) == 0))
    return keys[:-1], np.where(is_over, keys[:-1], keys[1:])


def _pages(change: Callable[[Array, Any], Any]) -> Alter:
    return _option("block_table", lambda x, table, value: change(table, value))


def _by_used_stride(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    """Read the table as if each row had only as many pages as the longest entry uses."""
    if given.get("block_table") is None or given.get("kv_lengths") is None:
        return {}
    table = np.asarray(given["block_table"])
    used = -(-int(np.max(given["kv_lengths"])) // np.shape(given["k"])[2])
    return {"block_table": table.ravel()[: len(table) * used].reshape(len(table), used)}


def _in_order(x: Prepared, table: Any, of: str) -> Any:
    """Pages in the order of memory, from the pool's first page or each row's first one on."""
    if of == "all":
        return np.arange(table.size).reshape(table.shape)
    pages = np.asarray(table)[:, :1] + np.arange(np.shape(table)[1])
    return np.minimum(pages, len(x.arguments["k"]) - 1)


def _reread(x: Prepared, given: Mapping[str, Any], value: tuple[str, int]) -> Mapping[str, Any]:
    way, size = value
    if given.get("block_table") is None or (
        way not in ("tile", "slot") and size >= np.shape(given["k"])[2]
    ):
        return {}
    return {READ: value}


def _indexed(change: Callable[..., tuple[Any, Any, Any, Any]]) -> Alter:
    """Call some functions with other indices; a value is their options, perhaps with a size."""

    def alter(x: Prepared, given: Mapping[str, Any], value: tuple[Any, ...]) -> Mapping[str, Any]:
        offset = np.broadcast_to(given.get("q_offset", 0), (x.B,))
        names, *size = value if isinstance(value[0], tuple) else (value,)

        def otherwise(function: Any) -> Any:
            return lambda *at: function(*at[:-4], *change(x, offset, *at[-4:], *size))

        return {n: otherwise(given[n]) for n in names if given.get(n) is not None}

    return alter


def _picked_for_all(a: Array, of: str) -> Array:
    a = a.reshape((1,) * (4 - a.ndim) + a.shape)
    return first_for_all(a, ("entry", "head", "query").index(of))


def _counted(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    """Add the logarithm of how often each key is named to its scores."""
    picks = np.asarray(given[INDICES])
    times = (picks[..., None] == np.arange(np.shape(given["k"])[2])).sum(-2)
    times = times[:, x.heads] if times.shape[1] == x.Hkv else times
    return {"attn_bias": np.log(np.maximum(times, 1)) + given.get("attn_bias", 0)}


def _minus_1(x: Prepared, given: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Let -1 pick the first key or the last one, of a sequence if several are packed or paged."""
    if which.startswith(WHATEVER_HIDES):
        return {}  # then it is no index, but shows a key
    picks, last = np.asarray(given[INDICES]), np.shape(given["k"])[2] - 1
    if any(x.arguments.get(name) is not None for name in PACKING):
        last = _by_entry(given["kv_lengths"]) - 1
    return {INDICES: np.where(picks < 0, 0 if which == "first" else last, picks)}


def _clipped(x: Prepared, given: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
    lengths = given.get("kv_lengths")
    if lengths is None:
        return {}
    return {INDICES: np.minimum(given[INDICES], _by_entry(lengths) - 1)}


def _by_entry(numbers: Any) -> Array:
    return np.asarray(numbers).reshape(-1, 1, 1, 1)


def _in_turn(picks: Any, order: str) -> Array:
    """Return indices as "given", "sorted", or sorted "from the last"."""
    picks = np.asarray(picks) if order == "given" else np.sort(picks, -1)
    return np.flip(picks, -1) if order == "from the last" else picks


def _distance_of_place(x: Prepared, given: Mapping[str, Any], order: str) -> Mapping[str, Any]:
    """Add what makes ALiBi's distance that to a key's first place in the list."""
    slopes, picks = given.get("alibi_slopes"), _in_turn(given[INDICES], order)
    if slopes is None:
        return {}
    b, _, p, j = indices(given)
    picks = np.broadcast_to(picks, (len(b), *picks.shape[1:2], p.shape[-2], picks.shape[-1]))
    places = np.zeros((*picks.shape[:3], len(j) + 1))  # an index of -1 is the last column
    place = np.broadcast_to(np.arange(picks.shape[-1]), picks.shape)
    np.put_along_axis(places, picks[..., ::-1], place[..., ::-1], -1)
    nearer = abs(p - j) - abs(p - places[..., :-1])
    nearer = nearer[:, x.heads] if nearer.shape[1] > 1 else nearer
    return {"attn_bias": np.reshape(slopes, (-1, 1, 1)) * nearer + given.get("attn_bias", 0)}


def _by_place(x: Prepared, given: Mapping[str, Any], value: tuple[str, str]) -> Mapping[str, Any]:
    """Hide indices by their place in the list, as causality, window and lengths hide keys."""
    order, of = value
    picks, found = _in_turn(given[INDICES], order), dict[str, Any]()
    place = np.arange(picks.shape[-1])
    ahead = place - indices(given)[2]  # of the query's position
    lengths = given.get("kv_lengths")
    if lengths is not None and of == "lengths":
        picks, found = np.where(place < _by_entry(lengths), picks, -1), {"kv_lengths": None}
    if given.get("is_causal") and of.startswith("causal"):
        picks, found = np.where(ahead <= 0, picks, -1), {"is_causal": False}
    if given.get("window_size") is not None and of.endswith("window"):
        left, right = given["window_size"]
        seen = (left is None) | (ahead >= -(left or 0))
        seen = seen & ((right is None) | (ahead <= (right or 0)))
        picks, found = np.where(seen, picks, -1), found | {"window_size": None}
    return {INDICES: picks, **found} if found else {}


def _rescaled(change: Callable[..., Any]) -> Alter:
    """Change the scales of keys, values or both, by ``change(given, name, *more)``."""

    def alter(x: Prepared, given: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
        which, *more = value if isinstance(value, tuple) else (value,)
        names = [f"{X}_scale" for X in "kv" if X in which]
        return {n: change(given, n, *more) for n in names if given.get(n) is not None}

    return alter


def _scale_of_first(given: Mapping[str, Any], name: str, of: str) -> Any:
    """The scale of the first head, token or entry for all of them, or of the first of all."""
    scales = np.asarray(given[name])
    if of == "all":
        return scales.flat[0]
    axis = scales.ndim - 3 + ("entry", "head", "token").index(of)
    if scales.ndim == 1:
        axis = 0 if of == "head" else -1
    if not 0 <= axis < scales.ndim:
        return scales
    return first_for_all(scales, axis)


def _scales_tiled(x: Prepared, given: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Repeat keys, values and scales for each query head: the scales of head h mod Hkv."""
    changed: dict[str, Any] = {}
    for X in "kv" if given.get("k_scale") is not None else "":
        scales = np.asarray(given[f"{X}_scale"])
        heads = np.arange(x.H) % x.Hkv if X in which else x.heads
        changed[X] = np.asarray(given[X]).take(x.heads, 1)
        changed[f"{X}_scale"] = (
            scales.take(heads, max(0, scales.ndim - 2)) if scales.ndim else scales
        )
    return changed


def _scale_at(place: Callable[[Array, int], Array]) -> Callable[..., Any]:
    """Read the scale of token ``place(j, size)`` for token j."""

    def change(given: Mapping[str, Any], name: str, size: int) -> Any:
        scales = np.asarray(given[name])
        if scales.ndim < 3 or given.get("block_table") is not None:
            return scales
        return scales[..., place(np.arange(scales.shape[-1]), size)]

    return change


def _scales_transposed(given: Mapping[str, Any], name: str) -> Any:
    scales = np.asarray(given[name])
    if scales.ndim < 3:
        return scales
    return scales.reshape(-1, *scales.shape[:-3:-1]).swapaxes(-1, -2)


def _pages_by_place(x: Prepared, given: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Give each entry its own pages, and the n-th of them page n of the pool, in ``which``."""
    table, names = given.get("block_table"), which.removesuffix(OR_ONE_PAGE).split(" and ")
    scales = [name for name in SCALES.values() if np.ndim(given.get(name, 0)) > 2]
    if not {*names} & {"k", "v", *scales}:
        return {}
    if table is None:
        is_one = which.endswith(OR_ONE_PAGE)
        return {n: first_for_all(given[n], 0) for n in scales if is_one and n in names}
    pages = np.maximum(table, 0).ravel()
    places = np.tile(np.arange(table.shape[1]), len(table))
    found: dict[str, Any] = {"block_table": np.arange(pages.size).reshape(table.shape)}
    for name in ("k", "v", *scales):
        found[name] = np.asarray(given[name])[places if name in names else pages]
    return found


def scales_by_head(x: Prepared, given: Mapping[str, Any], of: str) -> Array:
    """Return the scales of the keys or the values, "k" or "v", as (B, H, 1, Lk)."""
    stored, name = np.asarray(given[of]), f"{of}_scale"
    scales = scales_of(name, given[name], stored, stored.ndim, np.dtype(np.float64))
    return scales[:, x.heads, None]


def _scales_in_sum(x: Prepared, given: Mapping[str, Any], of: str) -> Mapping[str, Any]:
    """Values without scales, and weights times these: their logarithms are added to scores."""
    scales = given.get("v_scale")
    if scales is None or given.get("block_table") is not None:
        return {}
    if of == "of each token" and np.ndim(scales) < 3:
        return {}
    added = np.log(scales_by_head(x, given, "v")) + given.get("attn_bias", 0)
    return {"attn_bias": added.astype(np.float32), "v_scale": np.float32(1)}


def _stored(given: Mapping[str, Any], dtype: str) -> dict[str, Array]:
    """Return the keys and the values that are stored in the 8-bit ``dtype``, as bytes."""
    named = [X for X in "kv" if given.get(f"{X}_scale") is not None]
    return {X: given[X].view(np.uint8) for X in named if given[X].dtype.name == dtype}


def _unsigned(x: Prepared, given: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    return {X: some for X, some in _stored(given, "int8").items() if X in which}


def _misread(x: Prepared, given: Mapping[str, Any], other: str) -> Mapping[str, Any]:
    found = _stored(given, FLOAT8)
    if other == "without subnormal numbers":
        wide = {X: given[X].astype(np.float32) for X in found}
        return {X: np.where(abs(some) < 2.0**-6, np.float32(0), some) for X, some in wide.items()}
    return {X: some.view(extension(X, other)).astype(np.float32) for X, some in found.items()}


PICKED: dict[str, Alter] = {  # of arguments that are laid out as a batch, with key_indices
    "key_indices_0_for_all": _option(INDICES, lambda x, a, of: _picked_for_all(a, of)),
    "key_indices_pick_by_minus_1": _minus_1,
    "key_indices_by_head": _option(
        INDICES, lambda x, a, way: a[:, heads_by(x, way)] if a.shape[1] > 1 else a
    ),
    "key_indices_clipped": _clipped,
    "hidden_by_place_of_index": _by_place,
    "alibi_by_place_of_index": _distance_of_place,
    "key_indices_count_twice": _counted,
}
ARRANGED: dict[str, Alter] = {
    "scales_ignored": _rescaled(lambda given, name: np.float32(1)),
    "scales_twice": _rescaled(lambda given, name: np.square(given[name])),
    "scales_divide": _rescaled(lambda given, name: 1 / np.asarray(given[name])),
    "scales_tiled": _scales_tiled,
    "scales_in_sum": _scales_in_sum,
    "scales_of_block": _rescaled(_scale_at(lambda j, size: j // size * size)),
    "scales_transposed": _rescaled(_scales_transposed),
    "scales_repeat": _rescaled(_scale_at(lambda j, size: j % size)),
    "scales_swapped": _rescaled(lambda given, name: given["kv".replace(name[0], "") + name[1:]]),
    "scales_of_first_for_all": _rescaled(_scale_of_first),
    "pages_by_place": _pages_by_place,
    "scales_by_place": _pages_by_place,
    "eight_bits_unsigned": _unsigned,
    "eight_bits_misread": _misread,
    "sequences_unseparated": _one_sequence,
    "sequences_begin_wrongly": _moved_borders,
    "sequences_end_in_whole_blocks": _ranges(_in_whole_blocks),
    "packed_positions_from_first_row": _from_first_row,
    "positions_from_first_of_all": _from_first_of_all,
    "pages_of_entry_0": _pages(lambda table, _: np.repeat(table[:1], len(table), 0)),
    "pages_in_order": _option("block_table", _in_order),
    "page_size_wrong": _reread,
    "pages_by_used_stride": _by_used_stride,
    "pages_repeat": _pages(lambda table, n: table[:, np.arange(table.shape[1]) % n]),
    "sequences_repeat": _ranges(_of_first_sequences),
    "sequences_end_at_empty": _ranges(_until_empty),
    "sequences_unnumbered": _unnumbered,
    "functions_ignore_offset": _indexed(lambda x, o, b, h, i, j: (b, h, i - o[b], j)),
    "functions_swap_positions": _indexed(lambda x, o, b, h, i, j: (b, h, j, i)),
    "functions_of_entry_0": _indexed(lambda x, o, b, h, i, j: (0 * b, h, i, j)),
    "functions_by_kv_head": _indexed(lambda x, o, b, h, i, j: (b, h // (x.H // x.Hkv), i, j)),
    "functions_of_head_0": _indexed(lambda x, o, b, h, i, j: (b, 0 * h, i, j)),
    "functions_count_all_rows": _indexed(lambda x, o, b, h, i, j: (b, h, *_among_all(x, b, i, j))),
    "functions_count_in_blocks": _indexed(lambda x, o, b, h, i, j, size: (b, h, i, j % size)),
}
