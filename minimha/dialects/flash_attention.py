"""flash-attention's functions: arrays (B, L, H, D), and causality aligned at the bottom right."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention, check_backend
from minimha.dialects.flash_attention_cache import cache_lengths, cache_of, new_tokens
from minimha.dialects.inputs import check_within, heads_first, integers, with_axes
from minimha.dialects.masks import boolean, owner_by_axes
from minimha.dialects.results import like_argument
from minimha.equations.arguments import (
    argument_names,
    as_floating,
    as_integers,
    flag,
    integer,
)
from minimha.equations.merge import merge
from minimha.equations.option_types import Backend
from minimha.equations.problem import Problem
from minimha.layers.rope import rotate_by_table

Array = NDArray[Any]
NAMES = {"scale": "softmax_scale", "sinks": "learnable_sink"}


@like_argument("q")
def flash_attn_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    learnable_sink: ArrayLike | None = None,
    query_padding_mask: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    key_leftpad: ArrayLike | None = None,
    attention_chunk: int = 0,
    sink_token_length: int = 0,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Return softmax(scale · Q Kᵀ) V and its log-sum-exp, like flash-attention's function.

    Differences from ``minimha.attention``:

    - Arrays are (B, L, H, D), and the log-sum-exp is (B, H, Lq).
    - ``causal`` and windows are aligned at the bottom right: the last unpadded query is at the
      position of the last unpadded key. Query i is thus at i + number of keys - number of queries.
    - A window side of -1 or None is unbounded, and ``softcap=0`` means no cap.
    - In padding masks, True means **keep**. The output of a padded query is 0.
    - ``alibi_slopes`` may differ between batch entries. This function adds -slope · distance to the
      scores, as ``minimha.attention`` does. In causal attention, flash-attention adds slope · j for
      key j, so its log-sum-exp differs from this function's by a constant per row.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width.

    Parameters
    ----------
    q : array_like of shape (B, Lq, H, D)
    k : array_like of shape (B, Lk, Hkv, D)
    v : array_like of shape (B, Lk, Hkv, Dv)
    softmax_scale : float, optional
        Default is 1/√D.
    causal : bool, default False
        Whether to hide keys after the query; the right side of a window is then 0.
    window_size : pair of int or None, default (-1, -1)
        The numbers of visible keys before and after the query's position.
    softcap : float, default 0.0
        A positive number c caps scores: c · tanh(score / c).
    alibi_slopes : array_like of shape (H,) or (B, H), optional
        Adds -slope · distance to the scores. Default is none.
    learnable_sink : array_like of shape (H,), optional
        One score per head that is added to the denominator of the softmax, without a value.
    query_padding_mask : array_like of shape (B, Lq), bool, optional
        True for the queries to keep. Default is all.
    key_padding_mask : array_like of shape (B, Lk), bool, optional
        True for the keys to keep. Default is all.
    key_leftpad : array_like of shape (B,), int, optional
        The number of padding keys at the start of each batch entry. Default is 0.
    attention_chunk : int, default 0
        A positive number c limits a query to the keys of its own chunk of c positions.
    sink_token_length : int, default 0
        The number of keys at the start that no window hides.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    output : array of q's library, shape (B, Lq, H, Dv), the inputs' common dtype
        0 for a query without visible keys.
    lse : array of shape (B, H, Lq), float32 or float64
        -inf for a query without visible keys and without a sink.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023;
    flash-attention's tests, ``attention_ref``.

    Examples
    --------
    With two queries and three keys, the first query is at the position of the second key.

    >>> q, k, v = np.zeros((1, 2, 1, 1)), np.zeros((1, 3, 1, 1)), np.array([2.0, 4.0, 9.0])
    >>> flash_attn_func(q, k, v.reshape(1, 3, 1, 1), causal=True)[0].ravel()
    array([3., 5.])
    """
    given = {"q": q, "k": k, "v": v}
    q4, k4, v4 = (heads_first(name, array) for name, array in given.items())
    B, H, Lq, _ = q4.shape
    Lk = k4.shape[2]
    leftpad = _leftpad("key_leftpad", key_leftpad, B, Lk)
    scores = (B, H, Lq, Lk)
    queries = _padding("query_padding_mask", query_padding_mask, (B, Lq), scores)
    keys = _padding("key_padding_mask", key_padding_mask, (B, Lk), scores)
    # Positions count from the first key after the left padding.
    entries = {"q_offset": keys.sum(axis=1) - queries.sum(axis=1) + leftpad}
    entries |= _kept(keys & (np.arange(Lk) >= leftpad[:, None]))
    options = _options(softmax_scale, causal, window_size, softcap, backend)
    own = _Own(
        _slopes(alibi_slopes, B, H), leftpad, integer("attention_chunk", attention_chunk, 0),
        integer("sink_token_length", sink_token_length, 0),
    )  # fmt: skip
    with argument_names(**NAMES):
        output, lse = _attend(q4, k4, v4, entries, own, {**options, "sinks": learnable_sink})
    output, lse = output.swapaxes(1, 2), lse.swapaxes(1, 2)  # (B, Lq, H, Dv), (B, Lq, H)
    output[~queries] = 0
    lse[~queries] = -np.inf if learnable_sink is None else as_floating("sinks", learnable_sink)
    return output, lse.swapaxes(1, 2)


@like_argument("q")
def flash_attn_varlen_func(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Return attention of packed sequences and its log-sum-exp, like flash-attention's function.

    Axes: ``n`` sequences, ``Lq`` queries and ``Lk`` keys of all sequences together, ``H`` query
    heads, ``Hkv`` key/value heads, ``D`` head width, ``Dv`` value width. Causality and windows are
    aligned at the bottom right in each sequence.

    Parameters
    ----------
    q : array_like of shape (Lq, H, D)
    k : array_like of shape (Lk, Hkv, D), or (num_pages, page_size, Hkv, D) with ``block_table``
    v : array_like of shape (Lk, Hkv, Dv), or (num_pages, page_size, Hkv, Dv)
    cu_seqlens_q, cu_seqlens_k : array_like of shape (n + 1,), int
        The start of each sequence in q or k, followed by the end of the last one. With
        ``block_table``, only the differences of ``cu_seqlens_k`` matter: they are the numbers of
        keys.
    max_seqlen_q, max_seqlen_k : int, optional
        The largest numbers of queries and keys in a sequence. This function only checks them.
    softmax_scale, causal, window_size, softcap, backend
        As in ``flash_attn_func``.
    alibi_slopes : array_like of shape (H,) or (n, H), optional
        As in ``flash_attn_func``.
    block_table : array_like of shape (n, pages), int, optional
        The page numbers of each sequence's keys. This function allows any page size, while
        flash-attention requires a multiple of 256.

    Returns
    -------
    output : array of q's library, shape (Lq, H, Dv), the inputs' common dtype
    lse : array of shape (H, Lq), float32 or float64

    Examples
    --------
    >>> q, v = np.zeros((3, 1, 1)), np.array([2.0, 4.0, 9.0]).reshape(3, 1, 1)
    >>> flash_attn_varlen_func(q, q, v, [0, 2, 3], [0, 2, 3], causal=True)[0].ravel()
    array([2., 3., 9.])
    """
    starts = {"q": as_integers("cu_seqlens_q", cu_seqlens_q)}
    starts |= {"k": as_integers("cu_seqlens_k", cu_seqlens_k)}
    is_paged = block_table is not None
    q4 = with_axes("q", q, "(Lq, H, D)")[None].swapaxes(1, 2)
    if is_paged:
        k4, v4 = heads_first("k", k), heads_first("v", v)
    else:
        k4, v4 = (
            with_axes(x, y, "(L, H, D)")[None].swapaxes(1, 2) for x, y in (("k", k), ("v", v))
        )
    n, H = max(0, len(starts["q"].ravel()) - 1), q4.shape[1]
    options = _options(softmax_scale, causal, window_size, softcap, backend)
    lengths = {name: np.diff(x.ravel()) for name, x in starts.items()}
    for name, longest in (("q", max_seqlen_q), ("k", max_seqlen_k)):
        if longest is not None and lengths[name].max(initial=0) > integer("max_seqlen", longest, 0):
            raise ValueError(
                f"max_seqlen_{name} is {longest} but a sequence of cu_seqlens_{name} has length "
                f"{lengths[name].max()}"
            )
    entries: dict[str, Any] = {"cu_seqlens_q": starts["q"]}
    if is_paged:
        entries |= {"block_table": block_table, "kv_lengths": lengths["k"]}
    else:
        entries |= {"cu_seqlens_k": starts["k"]}
    if len(lengths["q"]) == len(lengths["k"]):
        entries["q_offset"] = lengths["k"] - lengths["q"]
    with argument_names(**NAMES):
        output, lse = _attend_packed(q4, k4, v4, entries, _slopes(alibi_slopes, n, H), options)
    return np.asarray(output[0].swapaxes(0, 1)), lse[0]


@like_argument("q")
def flash_attn_with_kvcache(
    q: ArrayLike,
    k_cache: Any,
    v_cache: Any,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    cache_seqlens: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: ArrayLike | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    backend: Backend = "auto",
) -> Any:
    """Write new keys and values to a cache, then attend to it, like flash-attention's function.

    Causality and windows are aligned at the bottom right: the last query is at the position of the
    last key, new keys included. Nothing is written if an argument is invalid.

    Axes: ``B`` batch, ``Bc`` cache entries of up to ``Lk`` keys, ``Lq`` queries, ``L`` new keys,
    ``H`` query heads, ``Hkv`` key/value heads, ``D`` head width, ``Dv`` value width.

    Parameters
    ----------
    q : array_like of shape (B, Lq, H, D)
    k_cache : array of shape (Bc, Lk, Hkv, D), or (num_pages, page_size, Hkv, D)
        The cached keys. If ``k`` is given, the call modifies them. If ``block_table`` is given,
        they are in pages. This function allows any page size; flash-attention requires a multiple
        of 256.
    v_cache : array of shape (Bc, Lk, Hkv, Dv), or (num_pages, page_size, Hkv, Dv)
    k : array_like of shape (B, L, Hkv, D), the cache's dtype, optional
        New keys, written from ``cache_seqlens`` on.
    v : array_like of shape (B, L, Hkv, Dv), the cache's dtype, optional
    rotary_cos, rotary_sin : array_like of shape (positions, R/2), optional
        Tables that rotate the first R numbers of queries and new keys; they require ``k``. The
        positions of new keys start at ``cache_seqlens``. Those of queries do too, if ``causal`` is
        True or a window is shorter than the cache. Otherwise, all queries are at position
        ``cache_seqlens``.
    cache_seqlens : int or array_like of shape (B,), int, optional
        The number of keys in the cache before the call, left padding included. It is required with
        ``k``. Without ``k``, the default is a full cache.
    cache_batch_idx : array_like of shape (B,), int, optional
        The cache entry of each batch entry. Default is 0 to B - 1.
    cache_leftpad : array_like of shape (B,), int, optional
        The number of padding keys at the start of each batch entry's cache; default 0. Not allowed
        with ``block_table``.
    block_table : array_like of shape (B, pages), int, optional
        The page numbers of each batch entry.
    softmax_scale, causal, window_size, softcap, backend
        As in ``flash_attn_func``.
    rotary_interleaved : bool, default True
        Whether rotated pairs are (2i, 2i + 1) instead of (i, i + R/2).
    alibi_slopes : array_like of shape (H,) or (B, H), optional
        As in ``flash_attn_func``.
    num_splits : int
        Ignored: the backend decides how to split keys.
    return_softmax_lse : bool, default False
        Whether to return the log-sum-exp too.

    Returns
    -------
    output : array of q's library, shape (B, Lq, H, Dv), the inputs' common dtype
    lse : array of shape (B, H, Lq), float32 or float64, if ``return_softmax_lse``

    Examples
    --------
    >>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 1))
    >>> x = np.array([[[[2.0]], [[6.0]]]])
    >>> flash_attn_with_kvcache(x * 0, k_cache, v_cache, x, x, cache_seqlens=0, causal=True).ravel()
    array([2., 4.])
    >>> v_cache.ravel()
    array([2., 6., 0., 0.])
    """
    q4, k4, v4 = (heads_first(*x) for x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)))
    B, H, Lq, _ = q4.shape
    cache = cache_of(k4, B, cache_batch_idx, block_table)
    new = new_tokens(k, v, k_cache, v_cache, B)
    num_new = 0 if new is None else new[0].shape[2]
    lengths = cache_lengths(cache_seqlens, B, cache.room, num_new, new is not None)
    leftpad = _leftpad("cache_leftpad", cache_leftpad, B, cache.room)
    if cache_leftpad is not None and block_table is not None:
        raise ValueError("cache_leftpad is given with block_table: keys in pages have no padding")
    check_backend(backend)  # before any write
    options = _options(softmax_scale, causal, window_size, softcap, backend)
    if rotary_cos is not None or rotary_sin is not None:
        if new is None or rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary_cos and rotary_sin go together, and need k and v")
        is_local = any(side is not None and side < cache.room for side in options["window_size"])
        rows = lengths[:, None] + np.arange(Lq) * is_local
        tables = rotary_cos, rotary_sin, flag("rotary_interleaved", rotary_interleaved)
        q4 = _rotated(q4, *tables, rows)
        new = _rotated(new[0], *tables, lengths[:, None] + np.arange(num_new)), new[1]
    total = lengths + num_new
    entries: dict[str, Any] = {"q_offset": total - Lq, "kv_lengths": total}
    entries["block_table"] = cache.table
    own = _Own(_slopes(alibi_slopes, B, H), leftpad)
    with argument_names(**NAMES, kv_lengths="cache_seqlens", k="k_cache", v="v_cache"):
        given = {name: options[name] for name in ("window_size", "scale", "softcap")}
        Problem.of(q4, k4, v4, **entries, **given)  # raises before any write
        if new is not None:
            cache.write(k4, new[0], lengths)
            cache.write(v4, new[1], lengths)
        if cache_leftpad is not None:
            k4, v4 = (x[entries["block_table"][:, 0]] for x in (k4, v4))
            visible = np.arange(cache.room) >= leftpad[:, None]
            entries |= {"block_table": None, "attn_mask": visible[:, None, None]}
        output, lse = _attend(q4, k4, v4, entries, own, options)
    output = np.asarray(output.swapaxes(1, 2))
    return (output, lse) if flag("return_softmax_lse", return_softmax_lse) else output


def _rotated(
    x: Array, cos: ArrayLike, sin: ArrayLike, interleaved: bool, positions: NDArray[np.int64]
) -> Array:
    with argument_names(cos="rotary_cos", sin="rotary_sin", positions="positions after the cache"):
        return np.asarray(rotate_by_table(x, cos, sin, positions, interleaved=interleaved))


class _Own(NamedTuple):
    """Options of each batch entry that ``attention`` accepts only for the whole batch."""

    slopes: Array | None  # (H,) or (B, H)
    leftpad: NDArray[np.int64]  # (B,)
    chunk: int = 0
    num_first: int = 0  # keys after the padding that no window hides


def _options(
    softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, backend: Backend
) -> dict[str, Any]:
    left, right = _window(window_size)
    right = 0 if flag("causal", causal) else right
    return {
        "window_size": (left, right), "scale": softmax_scale, "softcap": softcap or None,
        "return_lse": True, "backend": backend,
    }  # fmt: skip


def _attend(
    q: Array, k: Array, v: Array, entries: dict[str, Any], own: _Own, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Return output (B, H, Lq, Dv) and log-sum-exp; ``entries`` are options per batch entry."""
    slopes = own.slopes if len(q) else None
    each = slopes if slopes is not None and slopes.ndim == 2 else None
    if not (each is not None or own.chunk or own.num_first) or not len(q):
        output, lse = attention(q, k, v, **entries, alibi_slopes=slopes, **options)
        return output, lse
    is_paged = entries.get("block_table") is not None
    if not is_paged:
        Problem.of(q, k, v)  # raises for shapes that slices could hide
    parts = []
    for b in range(len(q)):
        one = slice(b, b + 1)
        entry = {name: x if x is None else x[one] for name, x in entries.items()}
        k_b, v_b = (k, v) if is_paged else (k[one], v[one])
        mine = _Own(None, own.leftpad[one], own.chunk, own.num_first)
        given = {**options, "alibi_slopes": slopes if each is None else each[b]}
        parts.append(_attend_in_chunks(q[one], k_b, v_b, entry, mine, given))
    return _joined(parts, axis=0)


def _attend_in_chunks(
    q: Array, k: Array, v: Array, entry: dict[str, Any], own: _Own, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Compute attention of one batch entry; a query sees only keys of its chunk of positions."""
    (leftpad,), Lq = own.leftpad.tolist(), q.shape[2]
    if not own.chunk or not Lq:
        return _attend_with_first(q, k, v, entry, leftpad + own.num_first, options)
    first_position = int(entry["q_offset"][0]) - leftpad
    parts, row = [], 0
    while row < Lq:
        begin = (first_position + row) // own.chunk * own.chunk
        stop = min(Lq, begin + own.chunk - first_position)
        start, end = (max(0, x + leftpad) for x in (begin, begin + own.chunk))
        near = _of_keys(entry, start, min(end, k.shape[2]))
        near["q_offset"] = near["q_offset"] + row
        k_j, v_j = (x[:, :, start:end] for x in (k, v))
        num_first = leftpad + own.num_first - start
        rows = q[:, :, row:stop]
        parts.append(_attend_with_first(rows, k_j, v_j, near, num_first, options))
        row = stop
    return _joined(parts, axis=2)


def _attend_with_first(
    q: Array, k: Array, v: Array, entry: dict[str, Any], num_first: int, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Merge attention over the first keys, without a left window, and over the other keys."""
    left, right = options["window_size"]
    n, Lk = min(max(num_first, 0), k.shape[2]), k.shape[2]
    if left is None or not n:
        output, lse = attention(q, k, v, **entry, **options)
        return output, lse
    first = {**options, "window_size": (None, right), "sinks": None}
    parts = [
        attention(q, k[:, :, keys], v[:, :, keys], **_of_keys(entry, keys.start, keys.stop), **o)
        for keys, o in ((slice(0, n), first), (slice(n, Lk), options))
    ]
    output, lse = merge(parts)
    return output, lse


def _attend_packed(
    q: Array, k: Array, v: Array, entries: dict[str, Any], slopes: Array | None,
    options: dict[str, Any],
) -> tuple[Array, Array]:  # fmt: skip
    """Return output (1, H, Lq, Dv) and log-sum-exp, with one call per sequence if slopes differ."""
    if slopes is None or slopes.ndim == 1:
        output, lse = attention(q, k, v, **entries, alibi_slopes=slopes, **options)
        return output, lse
    names = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "kv_lengths")
    sequences = Problem.of(
        q, k, v, **{x: entries[x] for x in names if x in entries}
    ).each_sequence()
    parts = [
        attention(x.q, x.k, x.v, q_offset=offset, alibi_slopes=slope, **options)
        for (_, x), slope, offset in zip(sequences, slopes, entries["q_offset"], strict=True)
    ]
    return _joined(parts, axis=2) if parts else attention(q, k, v, **options)


def _of_keys(entry: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    mask = entry["attn_mask"]
    return {
        "q_offset": entry["q_offset"] - start,
        "kv_lengths": np.clip(entry["kv_lengths"] - start, 0, max(0, stop - start)),
        "attn_mask": None if mask is None else mask[..., start:stop],
    }


def _joined(parts: list[Any], axis: int) -> tuple[Array, Array]:
    outputs, lses = zip(*parts, strict=True)
    return np.concatenate(outputs, axis), np.concatenate(lses, axis)


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """Return (left, right), with None for an unbounded side."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}: expected a pair (left, right) of counts of keys, -1 "
            f"for a side without a limit"
        )
    left, right = (
        None if side is None or integer("a side of window_size", side, -1) == -1 else side
        for side in window_size
    )
    return left, right


def _leftpad(name: str, value: ArrayLike | None, B: int, Lk: int) -> NDArray[np.int64]:
    if value is None:
        return np.zeros(B, np.int64)
    array = integers(name, value, {"B": B})
    check_within(name, array, 0, Lk, f"there are {Lk} keys")
    return array


def _kept(keys: NDArray[np.bool_]) -> dict[str, Any]:
    """Return unpadded keys (B, Lk) as ``kv_lengths``, and as a mask if there are gaps."""
    ends = (keys * np.arange(1, keys.shape[1] + 1)).max(axis=1, initial=0)
    has_gaps = (keys.sum(axis=1) != ends).any()
    return {"kv_lengths": ends, "attn_mask": keys[:, None, None] if has_gaps else None}


def _padding(
    name: str, value: ArrayLike | None, shape: tuple[int, int], scores: tuple[int, ...]
) -> NDArray[np.bool_]:
    if value is None:
        return np.ones(shape, np.bool_)
    array = boolean(name, value, "bool, True = keep")
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}: expected (B, L) = {shape}"
            f"{owner_by_axes(array, scores)}"
        )
    return array


def _slopes(value: ArrayLike | None, B: int, H: int) -> Array | None:
    if value is None:
        return None
    array = as_floating("alibi_slopes", value)
    if array.shape not in ((B, H), (H,)):
        raise ValueError(
            f"alibi_slopes has shape {array.shape}: expected (H,) = ({H},) or (B, H) = ({B}, {H})"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"alibi_slopes is {value!r}: expected finite numbers")
    return array
