"""Lay packed and paged sequences out as a batch, and evaluate functions of positions.

``Prepared`` and ``conditions`` see every problem in this plain form: a batch of sequences of equal
size, padded and with ``kv_lengths``. 8-bit keys and values are multiplied by their scales.
``mask_mod`` and ``key_indices`` become parts of ``attn_mask``; ``score_mod`` stays, because its
place among the operations on scores matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.eight_bits import SCALES, scales_of, widened
from minimha.equations.selection import picked

Array = NDArray[Any]
Place = tuple[Array, Array]  # the sequence of each packed query, and its row there

PACKING = ("cu_seqlens_q", "cu_seqlens_k", "block_table")
FUNCTIONS = ("score_mod", "mask_mod")
INDICES = "key_indices"
ARRANGING = (*PACKING, *FUNCTIONS, INDICES, *SCALES.values())
READ = "pages_read"  # how a deviation reads pages: a way and a size
RANGES = "key_ranges"  # first and last key of each sequence, where a deviation finds them otherwise


# The functions that problems use. They take numbers and arrays, and return a score or a bool.


def score_by_entry(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Add a number that depends on the batch entry and the key."""
    return s + 0.75 * ((j + b) % 3)


def score_by_head(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Add a number that depends on the head and the key."""
    return s + 0.75 * ((j + h) % 4)


def score_by_query(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Add a number that depends on the query's position and the key."""
    return s + 0.75 * ((j + 2 * i) % 3)


def score_by_key(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Halve the score, and add a number that depends on the key."""
    return 0.5 * s + 0.75 * (j % 3)


def score_by_all(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Halve the score, and add a number that depends on all indices."""
    return 0.5 * s + 0.75 * ((j + 2 * i + 3 * h + 5 * b) % 7) - 0.125 * abs(i - j)


def score_bounded(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Keep scores between -4 and 4, so that no score can hide a key."""
    return 4 * s / (4 + abs(s))


def mask_by_entry(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide a third of the keys, which depends on the batch entry, but never key 0."""
    return (j == 0) | ((j + b) % 3 > 0)


def mask_by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide a third of the keys, which depends on the head, but never key 0."""
    return (j == 0) | ((j + h) % 3 > 0)


def mask_by_query(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide a third of the keys, which depends on the query, but never key 0."""
    return (j == 0) | ((j + 2 * i) % 3 > 0)


def mask_by_key(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide a third of the keys."""
    return j % 3 < 2


def mask_by_all(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Hide a quarter of the keys, depending on all indices, but never the query's own."""
    return (j == i) | ((j + 2 * i + 3 * h + b) % 4 > 0)


NAMED: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        score_by_entry, score_by_head, score_by_query, score_by_key, score_by_all, score_bounded,
        mask_by_entry, mask_by_head, mask_by_query, mask_by_key, mask_by_all,
    )
}  # fmt: skip


def expanded(arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], Place | None]:
    """Return the plain form of a problem's arguments, and the place of its packed queries in it.

    Arguments with none of ``ARRANGING`` are returned unchanged.

    >>> x = np.zeros((1, 2, 5, 4))
    >>> starts = np.array([0, 2, 5])
    >>> plain, place = expanded({"q": x, "k": x, "v": x, "cu_seqlens_q": starts})
    >>> plain["q"].shape, plain["kv_lengths"].tolist()
    ((2, 2, 3, 4), [2, 3])
    """
    if all(arguments.get(name) is None for name in ARRANGING):
        return arguments, None
    plain, place = laid_out(arguments)
    _evaluate_mask(plain)
    _pick_keys(plain)
    return plain, place


def laid_out(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Place | None]:
    """Return a problem's arguments as a batch, with any function and indices that they have.

    Returns, too, the place of packed queries in it.
    """
    left_out = (*PACKING, READ, RANGES)
    plain = {n: x for n, x in arguments.items() if n not in left_out and x is not None}
    arguments = {**arguments, **_widen(plain)}
    place = None
    if arguments.get("cu_seqlens_q") is not None:
        place = _spread_queries(plain, np.asarray(arguments["cu_seqlens_q"]))
    if arguments.get("block_table") is not None:
        _gather_pages(plain, arguments)
    elif place is not None:
        _spread_keys(plain, arguments)
    plain.setdefault("q_offset", 0)
    return plain, place


def _widen(plain: dict[str, Any]) -> dict[str, Any]:
    """Multiply 8-bit keys and values by their scales."""
    found = {}
    for name, scale in SCALES.items():
        if (value := plain.pop(scale, None)) is not None:
            X = np.asarray(plain[name])
            real = np.dtype(np.float32)
            found[name] = widened(X, scales_of(scale, value, X, X.ndim, real), real)
    plain |= found
    return found


def _spread_queries(plain: dict[str, Any], starts: Array) -> Place:
    """Give each sequence a batch entry of its own, padded by repeated rows."""
    lengths = np.diff(starts)
    rows = starts[:-1, None] + np.arange(lengths.max())
    for name in ("q", INDICES):
        if name in plain:
            x = np.asarray(plain[name])[0]
            plain[name] = x[:, np.minimum(rows, x.shape[1] - 1)].swapaxes(0, 1)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    return sequences, np.arange(starts[-1]) - starts[sequences]


def _spread_keys(plain: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    starts = arguments.get("cu_seqlens_k")
    starts = np.asarray(arguments["cu_seqlens_q"] if starts is None else starts)
    first, end = arguments.get(RANGES) or (starts[:-1], starts[1:])
    room = np.maximum(end - first, 0)
    plain["kv_lengths"] = np.minimum(plain.get("kv_lengths", room), room)
    for name in "kv":
        X = np.asarray(plain[name])[0]
        rows = np.minimum(first[:, None] + np.arange(max(room.max(), 1)), X.shape[1] - 1)
        plain[name] = X[:, rows].swapaxes(0, 1)


def _gather_pages(plain: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    table = np.asarray(arguments["block_table"])
    size = np.asarray(plain["k"]).shape[2]
    way, P = arguments.get(READ, ("whole", size))
    j = np.arange(table.shape[1] * (P if way == "first" else size))
    pages = table[:, np.minimum(j // P, table.shape[1] - 1)]
    flat = pages * (P if way == "stride" else size) + np.minimum(j % P, size - 1)
    if way == "mask":  # as if the page size were a power of 2
        flat = table[:, j // size] * size + (j & (size - 1))
    if way == "shift":  # as if it were the next smaller power of 2
        bits = size.bit_length() - 1
        flat = table[:, np.minimum(j >> bits, table.shape[1] - 1)] * size + (j & ((1 << bits) - 1))
    if way == "tile":  # all keys of a tile follow its first one
        first = j // P * P
        flat = table[:, first // size] * size + first % size + j - first
    if way == "slot":  # all keys of a tile are in the page of its first one
        flat = table[:, j // P * P // size] * size + j % size
    for name in "kv":
        if way == "tokens first":  # (pages, Hkv, size, D) read as (pages · size, Hkv, D)
            X = np.asarray(plain[name])
            tokens = (table[:, j // size] * size + j % size)[:, None]
            rows = tokens * X.shape[1] + np.arange(X.shape[1])[:, None]
            plain[name] = X.reshape(-1, X.shape[3])[np.minimum(rows, X.size // X.shape[3] - 1)]
            continue
        if way == "untransposed":
            plain[name] = _untransposed(plain, name, table, of_used=P > 1)
            continue
        X = np.asarray(plain[name]).swapaxes(1, 2)  # (pages, page size, Hkv, D)
        X = X.reshape(-1, *X.shape[2:])
        plain[name] = X[np.minimum(flat, len(X) - 1)].swapaxes(1, 2)
    for name, filled in (("attn_mask", True), ("attn_bias", 0)):
        a = plain.get(name)
        if a is not None and 1 < np.shape(a)[-1] < len(j):  # without the rest of the last page
            sides = [(0, 0)] * (np.ndim(a) - 1) + [(0, len(j) - np.shape(a)[-1])]
            plain[name] = np.pad(a, sides, constant_values=filled)
    plain["kv_lengths"] = np.minimum(plain.get("kv_lengths", len(j)), len(j))
    plain["kv_lengths"] = np.broadcast_to(plain["kv_lengths"], (len(table),))


def _untransposed(plain: Mapping[str, Any], name: str, table: Array, *, of_used: bool) -> Array:
    """Read pages, all or those of the length, (pages, Hkv, size, D) as (Hkv, pages · size, D)."""
    X = np.asarray(plain[name])
    _, Hkv, size, D = X.shape
    lengths = np.broadcast_to(plain["kv_lengths"], (len(table),))
    found = np.zeros((len(table), Hkv, table.shape[1] * size, D), X.dtype)
    for b, pages in enumerate(table):
        own = pages[: -(-int(lengths[b]) // size)] if of_used else pages
        found[b, :, : len(own) * size] = X[own].reshape(Hkv, -1, D)
    return found


def indices(plain: Mapping[str, Any]) -> tuple[Array, Array, Array, Array]:
    """Return the arguments b, h, i and j of functions, as arrays that broadcast to the scores."""
    (B, H, Lq, _), Lk = np.shape(plain["q"]), np.shape(plain["k"])[2]
    offset = np.reshape(plain.get("q_offset", 0), (-1, 1, 1, 1))
    i = np.arange(Lq)[:, None] + offset
    return np.arange(B)[:, None, None, None], np.arange(H)[:, None, None], i, np.arange(Lk)


def _evaluate_mask(plain: dict[str, Any]) -> None:
    function = plain.pop("mask_mod", None)
    if function is None:
        return
    where = indices(plain)
    seen = np.broadcast_to(function(*where), np.broadcast_shapes(*map(np.shape, where)))
    plain["attn_mask"] = seen & plain.get("attn_mask", True)


def _pick_keys(plain: dict[str, Any]) -> None:
    given = plain.pop(INDICES, None)
    if given is None:
        return
    (B, H, Lq, _), (_, Hkv, Lk, _) = np.shape(plain["q"]), np.shape(plain["k"])
    heads = H if np.shape(given)[1] == H else Hkv  # H in a deviation
    given = np.broadcast_to(given, (B, heads, Lq, np.shape(given)[-1]))
    seen = picked(given, slice(0, Lk)).repeat(H // heads, axis=1)
    plain["attn_mask"] = seen & plain.get("attn_mask", True)
