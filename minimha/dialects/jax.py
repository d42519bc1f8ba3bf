"""JAX's ``jax.nn.dot_product_attention``: lengths before heads, a mean where nothing is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.masks import owner_by_axes, owner_by_values
from minimha.equations.arguments import argument_names, as_floating, flag, rectangular

Array = NDArray[Any]


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
    backend: str = "auto",
) -> Array:
    """softmax(scale · Q Kᵀ + bias) V, as ``jax.nn.dot_product_attention``.

    Where it differs from ``minimha.attention``:

    - Arrays are (B, L, H, D), or (L, H, D) without a batch.
    - ``is_causal`` and windows are aligned top-left, ``q_offset=0``, also where Lq ≠ Lk.
    - A query from which masks hide every key gets the mean of all values, because JAX's masked
      score is a finite number and the same for all. (Where only a bias of -inf hides them it gets
      0 here, NaN in JAX.)
    - Queries from ``query_seq_lengths`` on get 0.

    Where it differs from JAX: the width Dv of the values may differ from D.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq``, ``Lk``, ``D``, ``Dv``;
    JAX's names for them are B, N, K, T, S, H, H.

    Parameters
    ----------
    query : array_like of shape (B, Lq, H, D) or (Lq, H, D)
    key : array_like of shape (B, Lk, Hkv, D) or (Lk, Hkv, D)
    value : array_like of shape (B, Lk, Hkv, Dv) or (Lk, Hkv, Dv)
    bias : array_like broadcastable to (B, H, Lq, Lk)
        Added to the scores, before the mask.
    mask : array_like broadcastable to (B, H, Lq, Lk), bool
        True = may attend.
    scale : float
        1/√D if not given.
    is_causal : bool
        Query i sees keys j ≤ i.
    query_seq_lengths, key_value_seq_lengths : array_like of shape (B,), int
        Only so many queries and keys exist.
    local_window_size : int or pair of int
        (left, right), both inclusive; one number stands for both.
    backend : str
        That of ``minimha.attention``.

    Returns
    -------
    ndarray of shape (B, Lq, H, Dv) or (Lq, H, Dv), the inputs' common dtype

    Raises
    ------
    TypeError, ValueError
        An argument that does not fit, named in a sentence.

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
    given = {"query": query, "key": key, "value": value}
    arrays = [as_floating(name, array) for name, array in given.items()]
    rank = arrays[0].ndim
    for name, array in zip(given, arrays, strict=True):
        if array.ndim not in (3, 4) or array.ndim != rank:
            raise ValueError(
                f"{name} has shape {array.shape}, query {arrays[0].shape}: expected (B, L, H, D) "
                f"in all three or (L, H, D) in all three"
            )
    q, k, v = (array[(None,) * (4 - rank)].swapaxes(1, 2) for array in arrays)
    _check_shapes(q, k, v)
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
        output = np.where(sees_nothing, _mean(v, q.shape[1]).astype(output.dtype), output)
    output = np.where(queries[:, None, :, None], output, output.dtype.type(0)).swapaxes(1, 2)
    return output if rank == 4 else output[0]


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    """Refuse what does not fit, by this dialect's names; arrays are (B, H, L, D) by now."""
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        batches = f"{q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
        raise ValueError(f"query, key and value have batches of {batches}: they must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"key has D={k.shape[3]} but query has D={q.shape[3]}: a score is a product over D"
        )
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"value has (Hkv, Lk) = {v.shape[1:3]} but key has {k.shape[1:3]}: every key needs one "
            f"value"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"key has {k.shape[1]} heads but query has {q.shape[1]}: "
            f"H must be a multiple of Hkv; axes are (B, L, H, D) here"
        )


def _over_scores(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """``array`` with 4 axes, which broadcast to ``shape``."""
    four = array[(None,) * (4 - array.ndim)]
    if array.ndim > 4 or any(a not in (1, b) for a, b in zip(four.shape, shape, strict=True)):
        raise ValueError(
            f"{name} has shape {array.shape}: expected one that broadcasts to (B, H, Lq, Lk) = "
            f"{shape}{owner_by_axes(array, shape)}"
        )
    return four


def _visible(
    mask: ArrayLike | None, is_causal: bool, window: Any, shape: tuple[int, int, int, int]
) -> Array:
    """What mask, causality and window together let through, with 4 axes."""
    Lq, Lk = shape[2:]
    visible = np.ones((1, 1, Lq, Lk), np.bool_)
    if mask is not None:
        given = rectangular("mask", mask)
        if given.dtype != np.bool_:
            raise TypeError(
                f"mask has dtype {given.dtype}: expected bool, True where a query may attend to a "
                f"key; numbers to be added to the scores go into bias{owner_by_values(given)}"
            )
        visible = visible & _over_scores("mask", given, shape)
    i, j = np.ogrid[:Lq, :Lk]
    if is_causal:
        visible = visible & (j <= i)
    if window is not None:
        left, right = _window(window)
        visible = visible & (i - left <= j) & (j <= i + right)
    return visible


def _window(window: Any) -> tuple[int, int]:
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    are_whole = all(type(side) is int or isinstance(side, np.integer) for side in pair)
    if len(pair) != 2 or not are_whole:
        raise TypeError(
            f"local_window_size is {window!r}: expected an integer or a pair (left, right) of them"
        )
    return int(pair[0]), int(pair[1])


def _exist(name: str, lengths: ArrayLike | None, B: int, L: int) -> NDArray[np.bool_]:
    """Which of L positions exist in each batch entry, (B, L)."""
    if lengths is None:
        return np.ones((B, L), np.bool_)
    array = rectangular(name, lengths)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    if array.shape != (B,):
        raise ValueError(f"{name} has shape {array.shape}: expected (B,) = ({B},)")
    return np.asarray(np.arange(L) < array[:, None])


def _mean(v: Array, H: int) -> Array:
    """The mean of all values, hidden ones too, once a query head: (B, H, 1, Dv)."""
    wide = v.astype(np.float64 if v.dtype == np.float64 else np.float32)
    return np.repeat(wide.mean(axis=2, keepdims=True), H // v.shape[1], axis=1)
