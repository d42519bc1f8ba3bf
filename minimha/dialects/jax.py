"""JAX's attention function ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.inputs import integers, of_one_rank
from minimha.dialects.masks import boolean, broadcasts, owner_by_axes
from minimha.dialects.results import like_argument
from minimha.equations.arguments import (
    LARGEST_INTEGER,
    argument_names,
    as_floating,
    compute_dtype,
    flag,
    integer,
)
from minimha.equations.option_types import Backend

Array = NDArray[Any]


@like_argument("query")
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    backend: Backend = "auto",
) -> Any:
    """Return softmax(scale · Q Kᵀ + bias) V, like ``jax.nn.dot_product_attention``.

    Differences from ``minimha.attention``:

    - Arrays are (B, L, H, D), or (L, H, D) without a batch.
    - ``is_causal`` and windows are aligned at the top left, ``q_offset=0``, even if Lq ≠ Lk.
    - If all keys of a query are masked, its output is the mean of all values, because JAX replaces
      masked scores by one finite number. If a bias of -inf hides all keys, its output is 0, while
      in JAX it is NaN.
    - The outputs of queries from index ``query_seq_lengths`` on are 0.

    Unlike in JAX, the width Dv of the values may differ from D.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width. JAX's letters for these axes are B, N, K, T, S, H and H.

    Parameters
    ----------
    query : array_like of shape (B, Lq, H, D) or (Lq, H, D)
    key : array_like of shape (B, Lk, Hkv, D) or (Lk, Hkv, D)
    value : array_like of shape (B, Lk, Hkv, Dv) or (Lk, Hkv, Dv)
    bias : array_like broadcastable to (B, H, Lq, Lk), optional
        Added to the scores, before the mask.
    mask : array_like broadcastable to (B, H, Lq, Lk), bool, optional
        True where a query may attend to a key.
    scale : float, optional
        Default is 1/√D.
    is_causal : bool, default False
        Whether query i attends only to keys j ≤ i.
    query_seq_lengths, key_value_seq_lengths : array_like of shape (B,), int, optional
        The numbers of queries and keys in each batch entry. Default is all.
    local_window_size : int or pair of int, optional
        The numbers of visible keys before and after a query's position, or one number for both.
        Default is no window.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    array of query's library, shape (B, Lq, H, Dv) or (Lq, H, Dv), the inputs' common dtype

    References
    ----------
    JAX, jax.nn.dot_product_attention, implementation "xla".

    Examples
    --------
    A mask that hides both keys gives the mean of their values.

    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((2, 1, 1)), np.array([2.0, 4.0]).reshape(2, 1, 1)
    >>> dot_product_attention(q, k, v, mask=np.zeros((1, 1, 1, 2), bool)).ravel()
    array([3.])
    """
    arrays = of_one_rank(
        {"query": query, "key": key, "value": value}, (3, 4),
        "(B, L, H, D) in all three or (L, H, D) in all three",
    )  # fmt: skip
    rank = arrays["query"].ndim
    q, k, v = (array[(None,) * (4 - rank)].swapaxes(1, 2) for array in arrays.values())
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    shape = (B, H, Lq, Lk)
    visible = _visible(mask, flag("is_causal", is_causal), local_window_size, shape)
    queries = _exist("query_seq_lengths", query_seq_lengths, B, Lq)
    keys = _exist("key_value_seq_lengths", key_value_seq_lengths, B, Lk)
    visible = visible & keys[:, None, None, :]
    added = None if bias is None else _over_scores("bias", as_floating("bias", bias), shape)
    with argument_names(q="query", k="key", v="value"):
        output: Array = attention(
            q, k, v, scale=scale, attn_mask=visible, attn_bias=added, backend=backend
        )
    if Lk:
        sees_nothing = ~visible.any(axis=-1, keepdims=True)
        mean = v.astype(compute_dtype(v.dtype)).mean(axis=2, keepdims=True).astype(output.dtype)
        output = np.where(sees_nothing, np.repeat(mean, H // v.shape[1], axis=1), output)
    output = np.where(queries[:, None, :, None], output, output.dtype.type(0)).swapaxes(1, 2)
    return output if rank == 4 else output[0]


def _over_scores(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """Return ``array`` with 4 axes; ValueError unless it broadcasts to ``shape``."""
    if not broadcasts(array, shape):
        raise ValueError(
            f"{name} has shape {array.shape}: expected one that broadcasts to (B, H, Lq, Lk) = "
            f"{shape}{owner_by_axes(array, shape)}"
        )
    return array[(None,) * (4 - array.ndim)]


def _visible(
    mask: ArrayLike | None, is_causal: bool, window: Any, shape: tuple[int, int, int, int]
) -> Array:
    Lq, Lk = shape[2:]
    visible = np.ones((1, 1, Lq, Lk), np.bool_)
    if mask is not None:
        expected = (
            "bool, True where a query may attend to a key; pass numbers to be added to the scores "
            "as bias"
        )
        visible = visible & _over_scores("mask", boolean("mask", mask, expected), shape)
    i, j = np.ogrid[:Lq, :Lk]
    if is_causal:
        visible = visible & (j <= i)
    if window is not None:
        left, right = _window(window)
        visible = visible & (i - left <= j) & (j <= i + right)
    return visible


def _window(window: Any) -> tuple[int, int]:
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2:
        raise TypeError(
            f"local_window_size is {window!r}: expected an integer or a pair (left, right) of them"
        )
    left, right = (integer("local_window_size", side, -LARGEST_INTEGER) for side in pair)
    return left, right


def _exist(name: str, lengths: ArrayLike | None, B: int, L: int) -> NDArray[np.bool_]:
    """Return whether each position is within the length of its batch entry, (B, L)."""
    if lengths is None:
        return np.ones((B, L), np.bool_)
    return np.asarray(np.arange(L) < integers(name, lengths, {"B": B})[:, None])
