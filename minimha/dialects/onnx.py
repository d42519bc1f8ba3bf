"""ONNX's operators Attention, RotaryEmbedding and TensorScatter.

Names, layouts and defaults follow the specification, https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention as minimha_attention
from minimha.dialects.inputs import check_within, integers, of_one_rank
from minimha.dialects.masks import boolean_or_floating, broadcasts
from minimha.dialects.results import like_argument
from minimha.equations.arguments import (
    argument_names,
    as_floating,
    flag,
    integer,
    number,
    rectangular,
)
from minimha.equations.option_types import Backend
from minimha.layers.rope import rotate_by_table

Array = NDArray[Any]

DOUBLE = 11  # ONNX's numbers for the types of ``softmax_precision``
PRECISIONS = {1: "float", 10: "float16", DOUBLE: "double", 16: "bfloat16"}
# The steps that each qk_matmul_output_mode adds to the previous mode.
STEPS = (("scores", "scaled"), ("capped",), ("biased", "masked"), ("weights",))
WORDS = {
    "q": "Q", "k": "K", "v": "V", "attn_bias": "attn_mask", "kv_lengths": "nonpad_kv_seqlen",
}  # fmt: skip


class AttentionOutputs(NamedTuple):
    """The outputs of ONNX's Attention; ``qk_matmul_output`` is None unless requested."""

    Y: Any
    present_key: Any
    present_value: Any
    qk_matmul_output: Any


@like_argument("Q")
def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    return_qk_matmul_output: bool = False,
    backend: Backend = "auto",
) -> AttentionOutputs:
    """Return softmax(scale · Q Kᵀ + mask) V, like ONNX's Attention in opsets 23 to 25.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``P`` past keys,
    ``L`` new keys, ``Lk`` = P + L, ``D`` head width, ``Dv`` value width.

    Differences from ``minimha.attention``:

    - With a past, query i is at the position of key i + P. With ``nonpad_kv_seqlen``, it is at the
      position of key i + nonpad_kv_seqlen - Lq, else at that of key i. There is no ``q_offset``.
    - A 3-D array is (B, L, heads · width), not (H, L, D).
    - ``attn_mask`` is bool (True where a query may attend), or numbers, even integers, which are
      added to the scores. A mask with three axes is (H, Lq, Lk).
    - ``softcap=0`` means no cap, and a window side of -1 is unbounded. Flags are 0 or 1.
    - ONNX rounds to the inputs' type after every step. This function computes 16-bit inputs in
      float32 and rounds once, so results may differ by one unit in the last place.

    Parameters
    ----------
    Q : array_like of shape (B, H, Lq, D) or (B, Lq, H * D)
    K : array_like of shape (B, Hkv, L, D) or (B, L, Hkv * D), the dtype of Q
    V : array_like of shape (B, Hkv, L, Dv) or (B, L, Hkv * Dv)
    attn_mask : array_like that broadcasts to (B, H, Lq, Lk), bool or numbers, optional
        A last axis shorter than Lk hides later keys, as in opsets 24 and 25 and in ONNX's
        reference for 23. It must not be shorter than the largest ``nonpad_kv_seqlen``.
    past_key : array_like of shape (B, Hkv, P, D), the dtype of K, optional
    past_value : array_like of shape (B, Hkv, P, Dv), the dtype of V, optional
    nonpad_kv_seqlen : array_like of shape (B,), int, optional
        The number of unpadded keys in each batch entry. Not allowed with a past. Default is Lk.
    is_causal : {0, 1}, default 0
        Whether (1) or not (0) to hide the keys after a query's position.
    kv_num_heads, q_num_heads : int, optional
        Hkv and H, required with 3-D inputs. With 4-D inputs, they must equal the numbers of heads
        in the shapes; opset 25 forbids them there.
    left_window_size, right_window_size : int, default -1
        The numbers of visible keys before and after a query's position; -1 means no limit.
    qk_matmul_output_mode : {0, 1, 2, 3}, default 0
        The content of ``qk_matmul_output``: scores that are scaled (0), then capped (1), then
        masked (2), or weights (3). In mode 0 scores are not capped, as in the specification;
        ONNX's reference implementation caps them.
    scale : float, optional
        Default is 1/√D. Not negative, because ONNX multiplies both Q and K by √scale.
    softcap : float, default 0.0
        A positive number c caps scores: c · tanh(score / c).
    softmax_precision : {1, 10, 11, 16}, optional
        The least precision: float (1), float16 (10), double (11) or bfloat16 (16). Only double has
        an effect here: the whole attention is computed in float64. By default, inputs of float32 or
        16 bits are computed in float32, others in float64.
    return_qk_matmul_output : bool, default False
        Whether to return ``qk_matmul_output``, which is computed separately from Y.
    backend : str, default "auto"
        The backend for Y, as in ``minimha.attention``.

    Returns
    -------
    AttentionOutputs
        ``Y`` of shape (B, H, Lq, Dv) or (B, Lq, H * Dv), ``present_key`` (B, Hkv, Lk, D),
        ``present_value`` (B, Hkv, Lk, Dv), ``qk_matmul_output`` (B, H, Lq, Lk) or None, as arrays
        of Q's library. Y and qk_matmul_output have the dtype of Q. Y is 0 for a query without
        visible keys. Without a past, present_key and present_value are views of K and V.

    Raises
    ------
    TypeError, ValueError
        An attribute is out of range, 3-D inputs have no number of heads, or shapes do not fit.

    References
    ----------
    ONNX operators, Attention, versions 23, 24 and 25.

    Examples
    --------
    >>> x = [[[1, 0, 0, 1], [0, 1, 1, 1]]]
    >>> attention(x, x, x, q_num_heads=2, kv_num_heads=2, is_causal=1).Y.round(3)
    array([[[1.  , 0.  , 0.  , 1.  ],
            [0.33, 0.67, 0.67, 1.  ]]])
    """
    expected = "(B, H, L, D) in all three or (B, L, H · D) in all three"
    arrays = of_one_rank({"Q": Q, "K": K, "V": V}, (3, 4), expected)
    rank = arrays["Q"].ndim
    heads = {"Q": "q_num_heads", "K": "kv_num_heads", "V": "kv_num_heads"}
    counts = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    q, k, v = (_by_head(n, a, heads[n], counts[heads[n]]) for n, a in arrays.items())
    if q.dtype != k.dtype:
        raise TypeError(f"K has dtype {k.dtype} but Q has {q.dtype}: they must be equal")
    past = _past_length(past_key, past_value, nonpad_kv_seqlen)
    k = _with_past("past_key", past_key, "K", k, past)
    v = _with_past("past_value", past_value, "V", v, past)
    shape = (*q.shape[:3], k.shape[2])
    lengths = _lengths(nonpad_kv_seqlen, shape)
    mask = {} if attn_mask is None else _mask(attn_mask, shape, lengths)
    if softmax_precision not in (None, *PRECISIONS):
        known = ", ".join(f"{number} ({name})" for number, name in PRECISIONS.items())
        raise ValueError(f"softmax_precision is {softmax_precision!r}: expected {known}")
    is_double = softmax_precision == DOUBLE or np.float64 in (q.dtype, v.dtype)
    compute = np.dtype(np.float64 if is_double else np.float32)
    options: dict[str, Any] = {
        "is_causal": bool(_integer("is_causal", is_causal, 0, 1)),
        "window_size": _window(left_window_size, right_window_size),
        "q_offset": past if lengths is None else lengths - shape[2],
        "kv_lengths": lengths,
        "scale": None if scale is None else number("scale", scale, compute, low=0),
        "softcap": number("softcap", softcap, compute, low=0) or None,
        **mask,
    }
    mode = _integer("qk_matmul_output_mode", qk_matmul_output_mode, 0, 3)
    is_debugged = flag("return_qk_matmul_output", return_qk_matmul_output)
    wide = [array.astype(compute, copy=False) for array in (q, k, v)]
    with argument_names(**WORDS):
        Y = minimha_attention(*wide, backend=backend, **options).astype(q.dtype, copy=False)
        debug = _debug_output(wide, options, mode).astype(q.dtype) if is_debugged else None
    return AttentionOutputs(Y if rank == 4 else _joined(Y), k, v, debug)


@like_argument("X")
def rotary_embedding(
    X: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Any:
    """Apply rotary position embedding to X, like ONNX's RotaryEmbedding in opset 23.

    A pair (x1, x2) becomes (x1 cos - x2 sin, x1 sin + x2 cos). 16-bit inputs are computed in
    float32 and rounded once, while ONNX rounds every product. Axes: ``B`` batch, ``H`` heads, ``L``
    tokens, ``D`` head width, ``R`` rotated width.

    Parameters
    ----------
    X : array_like of shape (B, H, L, D) or (B, L, H * D)
    cos_cache, sin_cache : array_like of shape (positions, R / 2), or (B, L, R / 2)
        One row per position with ``position_ids``, else one row per token.
    position_ids : array_like of shape (B, L), int, optional
        From 0 to positions - 1.
    interleaved : {0, 1}, default 0
        0 pairs entry i with entry i + R / 2; 1 pairs entry 2 i with entry 2 i + 1.
    num_heads : int, optional
        H, required with a 3-D X.
    rotary_embedding_dim : int, default 0
        R, an even number; entries after the first R are not rotated. 0 means D.

    Returns
    -------
    array of the library, shape and dtype of X

    Raises
    ------
    TypeError, ValueError
        An attribute is out of range, a 3-D X has no ``num_heads``, or tables do not fit.

    References
    ----------
    Su et al., "RoFormer", 2021, equation 34; ONNX operators, RotaryEmbedding, version 23.

    Examples
    --------
    A quarter turn:

    >>> rotary_embedding([[[[3, 4]]]], [[0]], [[1]], [[0]])
    array([[[[-4.,  3.]]]])
    """
    x = as_floating("X", X)
    if x.ndim not in (3, 4):
        raise ValueError(f"X has shape {x.shape}: expected (B, H, L, D) or (B, L, H · D)")
    is_flat = x.ndim == 3
    x = _by_head("X", x, "num_heads", num_heads)
    B, _, L, D = x.shape
    R = _integer("rotary_embedding_dim", rotary_embedding_dim, 0, D) or D
    if R % 2:
        raise ValueError(
            f"X would be rotated in R={R} of its D={D} entries, set by rotary_embedding_dim="
            f"{rotary_embedding_dim}: R must be even, a rotation turns pairs"
        )
    cos, sin = (
        _angles(name, cache, position_ids, (B, L, R // 2))
        for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache))
    )
    is_interleaved = bool(_integer("interleaved", interleaved, 0, 1))
    with argument_names(x="X", cos="cos_cache", sin="sin_cache"):
        Y = rotate_by_table(x, cos, sin, interleaved=is_interleaved)
    return _joined(Y) if is_flat else Y


@like_argument("past_cache")
def tensor_scatter(
    past_cache: ArrayLike,
    update: ArrayLike,
    write_indices: ArrayLike | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Any:
    """Return a copy of a cache with ``update`` written into it, like ONNX's TensorScatter.

    Parameters
    ----------
    past_cache : array_like of shape (B, …, Lmax, …)
    update : array_like of shape (B, …, L, …), the dtype of ``past_cache``
        L ≤ Lmax; all other axes are as in ``past_cache``.
    write_indices : array_like of shape (B,), int, optional
        The index in each batch entry at which the update starts. Default is 0.
    axis : int, default -2
        The axis of Lmax and L, which cannot be the batch axis.
    mode : {"linear", "circular"}, default "linear"
        A "linear" update must end within the cache; a "circular" update continues at index 0.

    Returns
    -------
    array of the library, shape and dtype of ``past_cache``

    Raises
    ------
    TypeError, ValueError
        An attribute is out of range, shapes differ in axes other than ``axis``, or a linear update
        does not fit into the cache.

    References
    ----------
    ONNX operators, TensorScatter, version 24.

    Examples
    --------
    >>> tensor_scatter([[[0], [1], [2]]], [[[8], [9]]], [2], mode="circular").tolist()
    [[[9], [1], [8]]]
    """
    cache = np.array(rectangular("past_cache", past_cache))
    new = rectangular("update", update)
    if mode not in ("linear", "circular"):
        raise ValueError(f"mode is {mode!r}: expected 'linear' or 'circular'")
    if cache.ndim < 2:
        raise ValueError(f"past_cache has shape {cache.shape}: expected a batch and a sequence")
    axis = _integer("axis", axis, -cache.ndim, cache.ndim - 1) % cache.ndim
    if axis == 0:
        raise ValueError("axis is the batch's: expected the axis of the sequence")
    fits = new.ndim == cache.ndim and all(
        a == b or (i == axis and a < b)
        for i, (a, b) in enumerate(zip(new.shape, cache.shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"update has shape {new.shape} but past_cache has {cache.shape}: they may differ in "
            f"axis {axis} only, where update must not be longer"
        )
    if new.dtype != cache.dtype:
        raise TypeError(f"update has dtype {new.dtype} but past_cache has {cache.dtype}")
    B, Lmax, L = cache.shape[0], cache.shape[axis], new.shape[axis]
    start = np.zeros(B, np.int64)
    if write_indices is not None:
        start = integers("write_indices", write_indices, {"B": B})
    if mode == "linear":
        check_within("write_indices", start, 0, Lmax - L, f"{L} entries must fit into {Lmax}")
    slots = (start[:, None] + np.arange(L)) % max(Lmax, 1)
    np.moveaxis(cache, axis, 1)[np.arange(B)[:, None], slots] = np.moveaxis(new, axis, 1)
    return cache


def _by_head(name: str, array: Array, attribute: str, count: int | None) -> Array:
    """Return a view (B, H, L, D) of ``array``; a 3-D array's last axis is split into heads."""
    if count is not None:
        count = _integer(attribute, count, 1)
    if array.ndim == 4:
        if count not in (None, array.shape[1]):
            raise ValueError(
                f"{attribute} is {count} but {name} has {array.shape[1]} heads, shape {array.shape}"
            )
        return array
    if count is None:
        raise ValueError(
            f"{attribute} is missing: {name} has shape {array.shape}, (B, L, H · D), whose number "
            f"of heads is unknown"
        )
    B, L, width = array.shape
    if width % count:
        raise ValueError(
            f"{name} has a last axis of {width}, shape {array.shape}: expected a multiple of "
            f"{attribute}={count}"
        )
    return np.asarray(array.reshape(B, L, count, width // count).swapaxes(1, 2))


def _joined(array: Array) -> Array:
    """Return ``array`` (B, H, L, D) as (B, L, H · D)."""
    B, H, L, D = array.shape
    return np.asarray(array.swapaxes(1, 2).reshape(B, L, H * D))


def _past_length(
    past_key: ArrayLike | None, past_value: ArrayLike | None, nonpad_kv_seqlen: ArrayLike | None
) -> int:
    """Return P, the number of past keys; 0 without a past."""
    if past_key is None and past_value is None:
        return 0
    if past_key is None or past_value is None:
        missing = "past_key" if past_key is None else "past_value"
        raise ValueError(f"{missing} is missing: past_key and past_value go together")
    if nonpad_kv_seqlen is not None:
        raise ValueError(
            "nonpad_kv_seqlen is given with past_key: with the former K and V are the whole cache, "
            "with the latter they continue one"
        )
    shape = as_floating("past_key", past_key).shape
    if len(shape) != 4:
        raise ValueError(f"past_key has shape {shape}: expected (B, Hkv, P, D)")
    return int(shape[2])


def _with_past(name: str, past: ArrayLike | None, new_name: str, new: Array, length: int) -> Array:
    if past is None:
        return new
    old = as_floating(name, past)
    B, Hkv, _, D = new.shape
    if old.shape != (B, Hkv, length, D):
        raise ValueError(
            f"{name} has shape {old.shape}: expected (B, Hkv, P, width) = {(B, Hkv, length, D)}, "
            f"with the P of past_key and the rest of {new_name}"
        )
    if old.dtype != new.dtype:
        raise TypeError(f"{name} has dtype {old.dtype} but {new_name} has {new.dtype}")
    return np.concatenate([old, new], axis=2)


def _lengths(
    nonpad_kv_seqlen: ArrayLike | None, shape: tuple[int, ...]
) -> NDArray[np.int64] | None:
    if nonpad_kv_seqlen is None:
        return None
    lengths = integers("nonpad_kv_seqlen", nonpad_kv_seqlen, {"B": shape[0]})
    check_within("nonpad_kv_seqlen", lengths, 0, shape[3], f"K has {shape[3]} keys")
    return lengths


def _mask(
    attn_mask: ArrayLike, shape: tuple[int, ...], lengths: NDArray[np.int64] | None
) -> dict[str, Array]:
    array = boolean_or_floating("attn_mask", attn_mask)
    is_boolean, size = array.dtype == np.bool_, array.shape
    # The last axis may be shorter; the others must broadcast.
    if not size or size[-1] > shape[-1] or not broadcasts(array[..., :0], (*shape[:-1], 0)):
        raise ValueError(
            f"attn_mask has shape {size}: expected 1 to 4 axes that broadcast to (B, H, Lq, Lk) = "
            f"{shape}, the last one at most Lk; booleans are True where a query may attend, "
            f"numbers are added to the scores"
        )
    if lengths is not None and size[-1] < max(lengths, default=0):
        raise ValueError(
            f"attn_mask has shape {size}, a last axis of {size[-1]}: expected at least "
            f"{max(lengths)}, the largest nonpad_kv_seqlen"
        )
    beyond = (*size[:-1], shape[-1] - size[-1])
    hidden = np.full(beyond, False if is_boolean else -np.inf, array.dtype)
    whole = np.concatenate([array, hidden], axis=-1)
    name = "attn_mask" if is_boolean else "attn_bias"
    return {name: whole[(None,) * (4 - whole.ndim)]}


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    left = _integer("left_window_size", left, -1)
    right = _integer("right_window_size", right, -1)
    return None if left < 0 else left, None if right < 0 else right


def _debug_output(arrays: list[Array], options: dict[str, Any], mode: int) -> Array:
    """Return the last intermediate that belongs to one of the modes 0 to ``mode``."""
    wanted = [name for steps in STEPS[: mode + 1] for name in steps]
    last: list[Array] = []

    def keep_last(name: str, value: Any) -> Any:
        if name in wanted:
            last[:] = [value]
        return value

    minimha_attention(*arrays, backend="dense", tap=keep_last, **options)
    return last[0]


def _angles(
    name: str, cache: ArrayLike, position_ids: ArrayLike | None, shape: tuple[int, int, int]
) -> Array:
    """Return the row of ``cache`` for each token, (B, L, R / 2)."""
    table = as_floating(name, cache)
    B, L, half = shape
    if position_ids is None:
        if table.shape != shape:
            raise ValueError(
                f"{name} has shape {table.shape}: expected (B, L, R / 2) = {shape}, one row per "
                f"token, because there are no position_ids"
            )
        return table
    if table.ndim != 2 or table.shape[1] != half:
        raise ValueError(
            f"{name} has shape {table.shape}: expected (positions, R / 2) with R / 2 = {half}, "
            f"the rows that position_ids choose from"
        )
    rows = integers("position_ids", position_ids, {"B": B, "L": L})
    check_within("position_ids", rows, 0, len(table) - 1, f"{name} has {len(table)} rows")
    return np.asarray(table[rows])


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a checked integer attribute; booleans count as ONNX's flags 0 and 1."""
    whole = integer(name, int(value) if isinstance(value, (bool, np.bool_)) else value, low)
    if high is not None and whole > high:
        raise ValueError(f"{name} is {value!r}: expected an integer from {low} to {high}")
    return whole
