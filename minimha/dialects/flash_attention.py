"""flash-attention's ``flash_attn_func``: lengths before heads, causal from the bottom right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import Backend, attention
from minimha.dialects.masks import boolean, owner_by_axes
from minimha.equations.arguments import argument_names, as_floating, as_integers, flag, integer

Array = NDArray[Any]


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
) -> tuple[Array, Array]:
    """softmax(scale · Q Kᵀ) V in the conventions of the flash-attention package and its reference.

    Where it differs from ``minimha.attention``:

    - Arrays are (B, L, H, D), the log-sum-exp is (B, H, Lq).
    - ``causal`` and windows are aligned bottom-right: the last query that is not padding is at the
      position of the last key that is not, so query i of batch entry b is at
      i + (keys - queries)[b].
    - A window side of -1 or None is unbounded; ``softcap=0`` is no cap.
    - In padding masks True = **keep**. A padded query gets 0.
    - ``alibi_slopes`` may differ between batch entries. The package's causal kernels add slope · j
      alone, which shifts their log-sum-exp by one constant per row; here it follows the formula.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq``, ``Lk``, ``D``, ``Dv``.

    Parameters
    ----------
    q : array_like of shape (B, Lq, H, D)
    k : array_like of shape (B, Lk, Hkv, D)
    v : array_like of shape (B, Lk, Hkv, Dv)
    softmax_scale : float, optional
        Default is 1/√D.
    causal : bool, default False
        Hide the keys after the query; the right side of a window becomes 0.
    window_size : pair of int or None, default (-1, -1)
        (left, right), both inclusive.
    softcap : float, default 0.0
        Positive c: scores become c · tanh(score / c).
    alibi_slopes : array_like of shape (H,) or (B, H), optional
    learnable_sink : array_like of shape (H,), optional
        One score per head that joins the denominator and has no value.
    query_padding_mask : array_like of shape (B, Lq), bool, optional
    key_padding_mask : array_like of shape (B, Lk), bool, optional
    key_leftpad : array_like of shape (B,), int, optional
        How many of the first keys of each batch entry are padding. Default is 0.
    attention_chunk : int, default 0
        Positive c: positions are divided into chunks of c, and a query sees its own chunk only.
    sink_token_length : int, default 0
        This many first tokens are visible even where the window begins after them.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    output : ndarray of shape (B, Lq, H, Dv), the inputs' common dtype
        A query that sees no key gets 0.
    lse : ndarray of shape (B, H, Lq), float32 or float64
        -inf for a query that sees no key and has no sink.

    Raises
    ------
    TypeError, ValueError
        An argument that does not fit, named in a sentence.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023;
    flash-attention's tests, ``attention_ref``.

    Examples
    --------
    Two queries, three keys: the first query is at the position of the second key.

    >>> q, k, v = np.zeros((1, 2, 1, 1)), np.zeros((1, 3, 1, 1)), np.array([2.0, 4.0, 9.0])
    >>> flash_attn_func(q, k, v.reshape(1, 3, 1, 1), causal=True)[0].ravel()
    array([3., 5.])
    """
    given = {"q": q, "k": k, "v": v}
    q4, k4, v4 = (_heads_first(name, array) for name, array in given.items())
    B, H, Lq, _ = q4.shape
    Lk = k4.shape[2]
    left, right = _window(window_size)
    right = 0 if flag("causal", causal) else right
    leftpad = _leftpad(key_leftpad, B, Lk)
    scores = (B, H, Lq, Lk)
    queries = _padding("query_padding_mask", query_padding_mask, (B, Lq), scores)
    keys = _padding("key_padding_mask", key_padding_mask, (B, Lk), scores)
    # Positions of keys count from the first key after the padding on the left.
    offset = keys.sum(axis=1) - queries.sum(axis=1)
    i = np.arange(Lq)[:, None] + offset[:, None, None]  # (B, Lq, 1)
    j = np.arange(Lk) - leftpad[:, None, None]  # (B, 1, Lk)
    visible = queries[:, :, None] & keys[:, None, :] & (j >= 0)
    if integer("sink_token_length", sink_token_length, 0) and left is not None:
        visible &= (j >= i - left) | (j < sink_token_length)
        left = None
    if integer("attention_chunk", attention_chunk, 0):
        visible &= j // attention_chunk == i // attention_chunk
    output: Array
    lse: Array
    bias = _alibi(alibi_slopes, (B, H), abs(i - j))
    with argument_names(scale="softmax_scale", sinks="learnable_sink"):
        output, lse = attention(
            q4, k4, v4, window_size=(left, right), q_offset=offset + leftpad,
            attn_mask=visible[:, None], attn_bias=bias, scale=softmax_scale,
            softcap=softcap or None, sinks=learnable_sink, return_lse=True, backend=backend,
        )  # fmt: skip
    return np.asarray(output.swapaxes(1, 2)), lse


def _heads_first(name: str, value: ArrayLike) -> Array:
    array = as_floating(name, value)
    if array.ndim != 4:
        raise ValueError(f"{name} has shape {array.shape}: expected 4 axes (B, L, H, D)")
    return np.asarray(array.swapaxes(1, 2))


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right), with None for a side without a limit, which flash-attention writes as -1."""
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


def _leftpad(value: ArrayLike | None, B: int, Lk: int) -> NDArray[np.int64]:
    if value is None:
        return np.zeros(B, np.int64)
    array = as_integers("key_leftpad", value)
    if array.shape != (B,):
        raise ValueError(f"key_leftpad has shape {array.shape}: expected (B,) = ({B},)")
    if ((array < 0) | (array > Lk)).any():
        raise ValueError(f"key_leftpad is {value!r}: expected integers from 0 to Lk={Lk}")
    return array


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


def _alibi(
    slopes: ArrayLike | None, shape: tuple[int, int], distance: NDArray[np.int64]
) -> Array | None:
    """The bias (B, H, Lq, Lk) of one slope per head, or per batch entry and head."""
    if slopes is None:
        return None
    array = as_floating("alibi_slopes", slopes)
    if array.shape not in (shape, shape[1:]):
        raise ValueError(
            f"alibi_slopes has shape {array.shape}: expected (H,) = {shape[1:]} or (B, H) = {shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"alibi_slopes is {slopes!r}: expected finite numbers")
    return np.asarray(-np.broadcast_to(array, shape)[:, :, None, None] * distance[:, None])
