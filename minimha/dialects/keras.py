"""Keras's attention layers in inference: MultiHeadAttention and GroupQueryAttention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.inputs import check_mapping, of_one_rank, parameter, refuse_dropout
from minimha.dialects.masks import boolean_or_floating, broadcasts
from minimha.dialects.results import like_argument
from minimha.equations.arguments import (
    choice,
    common_dtype,
    compute_dtype,
    flag,
    integer,
    rectangular,
)
from minimha.equations.option_types import Backend
from minimha.layers.multihead import MultiHeadAttention, attention_weights

Array = NDArray[Any]

LETTERS = {"query": "q", "key": "k", "value": "v", "gate": "g", "attention_output": "o"}
MASKS = ("attention_mask", "query_mask", "key_mask", "value_mask")  # in the order of ``masks``


@like_argument("query")
def multi_head_attention(
    params: Mapping[str, ArrayLike],
    query: ArrayLike,
    value: ArrayLike,
    key: ArrayLike | None = None,
    *,
    num_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    dropout: float = 0.0,
    use_bias: bool = True,
    output_shape: int | Sequence[int] | None = None,
    attention_axes: int | Sequence[int] | None = None,
    sliding_window: int | None = None,
    use_gate: bool = False,
    query_mask: ArrayLike | None = None,
    value_mask: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    attention_mask: ArrayLike | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
    empty_rows: str | None = None,
    backend: Backend = "auto",
) -> Any:
    """Return concat(head_0, …) W_o + b_o, like ``keras.layers.MultiHeadAttention`` in inference.

    With ``use_gate``, the heads are multiplied by sigmoid(query W_g + b_g) before W_o.

    Differences from ``minimha.attention``:

    - ``value`` comes before ``key``, whose default is ``value``.
    - In every mask, True or 1 means that a query may attend; no mask is added to the scores.
    - ``use_causal_mask`` and ``sliding_window`` are aligned at the top left, ``q_offset=0``, even
      if Lq ≠ Lk. A window w hides keys j with |i - j| ≥ w: ``window_size=(w - 1, w - 1)``.
    - Tokens may have several axes. Attention runs over ``attention_axes``; all other axes are
      batch axes.
    - The output of a query without visible keys depends on ``empty_rows``. In Keras, the output is
      the mean of all values if inputs have 3 axes, dropout is 0 and scores are not requested. In
      all other cases it is 0.

    Differences from Keras:

    - A NaN in a hidden value does not reach the output; in Keras it does.
    - The output has the inputs' dtype (Keras: the layer's); 16-bit results are rounded once.
    - ``query_mask`` has an effect. Keras ignores this argument and reads the mask attached to the
      query, for example by a ``Masking`` layer.
    - The first axis of every mask is the batch. Keras broadcasts a padding mask's first axis
      against the heads of an ``attention_mask`` of four axes.

    ``flash_attention``, and arguments that matter only in training, are not accepted.

    Axes: ``B`` batch, ``H`` heads, ``Lq`` queries, ``Lk`` keys, ``D`` = key_dim, ``Dv`` =
    value_dim, and ``E``, ``Ek``, ``Ev`` the widths of query, key and value.

    Parameters
    ----------
    params : mapping of str to array_like
        The layer's weights by path, ``{w.path: w.numpy() for w in layer.weights}``. Only the last
        two names of a path matter: query/kernel (E, H, D), key/kernel (Ek, H, D), value/kernel
        (Ev, H, Dv), attention_output/kernel (H, Dv, E). ``use_bias`` adds query/bias (H, D),
        key/bias (H, D), value/bias (H, Dv) and attention_output/bias (E,). ``use_gate`` adds
        gate/kernel (E, H, Dv) and gate/bias (H, Dv).
    query : array_like of shape (B, Lq, E), or with more axes of tokens
    value : array_like of shape (B, Lk, Ev), or with more axes of tokens
    key : array_like of shape (B, Lk, Ek), or with more axes of tokens, optional
        Default is ``value``.
    num_heads, key_dim : int
        H and D.
    value_dim : int, optional
        Dv. Default is D.
    dropout : float, default 0.0
        Must be 0; minimha computes inference.
    use_bias : bool, default True
        Whether the layer has biases.
    output_shape : int or sequence of int, optional
        The output sizes of attention_output. Default is E.
    attention_axes : int or sequence of int, optional
        Axes of query between the first and the last. Default is all of them.
    sliding_window : int, optional
        The window w, at least 1. With 1, every query attends only to its own key.
    use_gate : bool, default False
        Whether the layer has gates.
    query_mask : array_like of shape (B, Lq), bool, optional
        False hides all keys from the query.
    value_mask, key_mask : array_like of shape (B, Lk), bool, optional
        False in either mask hides the key from all queries.
    attention_mask : array_like of shape (Lq, Lk), (B, Lq, Lk) or (B, H, Lq, Lk), bool, optional
        False hides the key from the query. Each size may be 1. With more axes of tokens, Lq and Lk
        are the ``attention_axes`` in their order, and all other axes follow B.
    return_attention_scores : bool, default False
        Whether to return the attention weights too.
    use_causal_mask : bool, default False
        Whether query i attends only to keys j ≤ i.
    empty_rows : {None, "mean", "zero"}, default None
        The heads' output for a query without visible keys: the mean of all values, or 0. None is
        what Keras does if scores are not requested: "mean" if query has 3 axes, else "zero".
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    output : array of query's library and shape, with ``output_shape`` in place of E
    scores : array of shape (B, H, Lq, Lk), if ``return_attention_scores``
        With more axes of tokens: B, the other axes, H, Lq, Lk.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; Qiu et al., "Gated Attention
    for Large Language Models", 2025; Keras 3.15, keras.layers.MultiHeadAttention.

    Examples
    --------
    One token attends to itself: identity projections return it.

    >>> into, out = np.eye(2).reshape(2, 2, 1), np.eye(2).reshape(2, 1, 2)
    >>> params = {f"{name}/kernel": into for name in ("query", "key", "value")}
    >>> params["attention_output/kernel"] = out
    >>> x = np.array([[[3.0, 4.0]]])
    >>> multi_head_attention(params, x, x, num_heads=2, key_dim=1, use_bias=False)
    array([[[3., 4.]]])
    """
    H, D = integer("num_heads", num_heads), integer("key_dim", key_dim)
    Dv = D if value_dim is None else integer("value_dim", value_dim)
    inputs, dtype = _inputs(query, value, key)
    q = inputs["query"]
    output_sizes = _output_shape(output_shape, q.shape[-1])
    axes = _attention_axes(attention_axes, q.ndim)
    refuse_dropout("dropout", dropout)
    layer = _layer(params, inputs, (H, H), (D, Dv), output_sizes, use_bias, use_gate)
    return _attended(
        layer, inputs, dtype, output_sizes, axes, sliding_window=sliding_window,
        masks=(attention_mask, query_mask, key_mask, value_mask), use_causal_mask=use_causal_mask,
        return_attention_scores=return_attention_scores, empty_rows=empty_rows, backend=backend,
    )  # fmt: skip


@like_argument("query")
def grouped_query_attention(
    params: Mapping[str, ArrayLike],
    query: ArrayLike,
    value: ArrayLike,
    key: ArrayLike | None = None,
    *,
    head_dim: int,
    num_query_heads: int,
    num_key_value_heads: int,
    dropout: float = 0.0,
    use_bias: bool = True,
    sliding_window: int | None = None,
    use_gate: bool = False,
    query_mask: ArrayLike | None = None,
    value_mask: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    attention_mask: ArrayLike | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
    empty_rows: str | None = None,
    backend: Backend = "auto",
) -> Any:
    """Return attention with shared key/value heads, like ``keras.layers.GroupQueryAttention``.

    The conventions are those of ``multi_head_attention``, but inputs have 3 axes and Dv = D =
    head_dim. ``query_mask`` has an effect in both functions. In Keras, it has an effect in
    GroupQueryAttention, but not in MultiHeadAttention.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` = head_dim, and ``E``, ``Ek``, ``Ev`` the widths of query, key and value.

    Parameters
    ----------
    params : mapping of str to array_like
        The layer's weights by path: query/kernel (E, H, D), key/kernel (Ek, Hkv, D), value/kernel
        (Ev, Hkv, D), attention_output/kernel (H, D, E). ``use_bias`` adds query/bias (H, D),
        key/bias and value/bias (Hkv, D), and attention_output/bias (E,). ``use_gate`` adds
        gate/kernel (E, H, D) and gate/bias (H, D).
    query : array_like of shape (B, Lq, E)
    value : array_like of shape (B, Lk, Ev)
    key : array_like of shape (B, Lk, Ek), optional
        Default is ``value``.
    head_dim, num_query_heads, num_key_value_heads : int
        D, H and Hkv. H must be a multiple of Hkv: query head h reads key/value head
        h // (H // Hkv).
    dropout, use_bias, sliding_window, use_gate : optional
        As in ``multi_head_attention``.
    query_mask, value_mask, key_mask, attention_mask, use_causal_mask : optional
        As in ``multi_head_attention``.
    return_attention_scores, empty_rows, backend : optional
        As in ``multi_head_attention``; ``empty_rows=None`` is "mean".

    Returns
    -------
    output : array of query's library, shape (B, Lq, E)
    scores : array of shape (B, H, Lq, Lk), if ``return_attention_scores``

    References
    ----------
    Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
    Checkpoints", 2023; Keras 3.15, keras.layers.GroupQueryAttention.

    Examples
    --------
    Two query heads read one head of keys and values; the output is the sum of both heads.

    >>> one = np.ones((1, 1, 1))
    >>> params = {"key/kernel": one, "value/kernel": one, "query/kernel": np.ones((1, 2, 1))}
    >>> params["attention_output/kernel"] = np.ones((2, 1, 1))
    >>> sizes = {"head_dim": 1, "num_query_heads": 2, "num_key_value_heads": 1}
    >>> grouped_query_attention(params, one, 3 * one, **sizes, use_bias=False)
    array([[[6.]]])
    """
    H = integer("num_query_heads", num_query_heads)
    Hkv = integer("num_key_value_heads", num_key_value_heads)
    if H % Hkv:
        raise ValueError(
            f"num_query_heads is {H} and num_key_value_heads is {Hkv}: H must be a multiple of Hkv"
        )
    D = integer("head_dim", head_dim)
    inputs, dtype = _inputs(query, value, key)
    q = inputs["query"]
    if q.ndim != 3:
        raise ValueError(f"query has shape {q.shape}: expected 3 axes (B, L, E), one of lengths")
    refuse_dropout("dropout", dropout)
    layer = _layer(params, inputs, (H, Hkv), (D, D), q.shape[-1:], use_bias, use_gate)
    return _attended(
        layer, inputs, dtype, q.shape[-1:], (1,), sliding_window=sliding_window,
        masks=(attention_mask, query_mask, key_mask, value_mask), use_causal_mask=use_causal_mask,
        return_attention_scores=return_attention_scores, empty_rows=empty_rows, backend=backend,
    )  # fmt: skip


def _layer(
    params: Mapping[str, ArrayLike], inputs: dict[str, Array], heads: tuple[int, int],
    widths: tuple[int, int], output_shape: tuple[int, ...], use_bias: bool, use_gate: bool,
) -> MultiHeadAttention:  # fmt: skip
    """Return the layer with Keras's weights, ``heads`` (H, Hkv) and ``widths`` (D, Dv)."""
    (H, Hkv), (D, Dv) = heads, widths
    projections = {"query": ("query", H, D), "key": ("key", Hkv, D), "value": ("value", Hkv, Dv)}
    if flag("use_gate", use_gate):
        projections["gate"] = ("query", H, Dv)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (of, n, width) in projections.items():
        shapes[f"{name}/kernel"] = (integer(f"the width of {of}", inputs[of].shape[-1]), n, width)
        shapes[f"{name}/bias"] = (n, width)
    shapes["attention_output/kernel"] = (H, Dv, *output_shape)
    shapes["attention_output/bias"] = output_shape
    if not flag("use_bias", use_bias):
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("/bias")}
    combined: dict[str, Any] = {}
    for path, array in _weights(params, shapes, inputs["query"].dtype).items():
        name, kind = path.split("/")
        if kind == "bias":
            combined[f"b_{LETTERS[name]}"] = array.ravel()
        else:
            rows = array.shape[: 2 if name == "attention_output" else 1]
            combined[f"W_{LETTERS[name]}"] = array.reshape(math.prod(rows), -1)
    return MultiHeadAttention.from_combined(
        num_heads=H, num_kv_heads=Hkv, value_source_dim=inputs["value"].shape[-1],
        gate="elementwise" if use_gate else None, **combined,
    )  # fmt: skip


def _attended(
    layer: MultiHeadAttention, inputs: dict[str, Array], dtype: np.dtype[Any],
    output_shape: tuple[int, ...], axes: tuple[int, ...], *, sliding_window: int | None,
    masks: tuple[ArrayLike | None, ...], return_attention_scores: bool, use_causal_mask: bool,
    empty_rows: str | None, backend: Backend,
) -> Any:  # fmt: skip
    """Attend over ``axes``; return the output and the scores, if requested."""
    wants_scores = flag("return_attention_scores", return_attention_scores)
    _check_lengths(inputs, axes)
    rank = inputs["query"].ndim
    chosen = choice("empty_rows", empty_rows, (None, "mean", "zero"))
    gives_mean = rank == 3 if chosen is None else chosen == "mean"
    # (B, L, …, E) → (B, …, L, …, E) → (B · …, L · …, E): attention is over one axis.
    free = [axis for axis in range(rank - 1) if axis not in axes]
    order = (*free, *axes, rank - 1)
    moved = {name: array.transpose(order) for name, array in inputs.items()}
    rows = moved["query"].shape[:-1]
    over = (*rows[: len(free)], layer.num_heads, *rows[len(free) :])
    over += moved["key"].shape[len(free) : -1]  # the shape of the scores
    options = _positions(use_causal_mask, sliding_window, axes)
    options |= {"attn_mask": _visible(masks, over, len(axes)), "backend": backend}
    batch = math.prod(rows[: len(free)])
    x, key_source, value_source = (
        array.reshape(batch, math.prod(array.shape[len(free) : -1]), array.shape[-1])
        for array in (moved["query"], moved["key"], moved["value"])
    )
    q, k, v = layer.project(x, key_source, value_source)
    heads, scores = _heads(q, k, v, gives_mean, wants_scores, options)
    output = layer.combine(heads, x).astype(dtype, copy=False)
    output = output.reshape(*rows, output.shape[-1]).transpose(np.argsort(order))
    output = output.reshape(*output.shape[:-1], *output_shape)
    if scores is None:
        return output
    return output, scores.reshape(over).astype(dtype, copy=False)


def _heads(
    q: Array, k: Array, v: Array, gives_mean: bool, wants_scores: bool, options: dict[str, Any]
) -> tuple[Array, Array | None]:
    heads, lse = attention(q, k, v, return_lse=True, **options)
    scores = attention_weights(q, k, **options) if wants_scores else None
    is_empty = np.isneginf(lse)[..., None]
    Lk = k.shape[2]
    if gives_mean and Lk and is_empty.any():
        mean = v.mean(axis=2, keepdims=True).repeat(q.shape[1] // v.shape[1], axis=1)
        heads = np.where(is_empty, mean, heads)
        scores = None if scores is None else np.where(is_empty, v.dtype.type(1 / Lk), scores)
    return heads, scores


def _inputs(
    query: ArrayLike, value: ArrayLike, key: ArrayLike | None
) -> tuple[dict[str, Array], np.dtype[Any]]:
    """Return query, value and key by name, in the compute dtype, and the result's dtype."""
    arrays = of_one_rank(
        {"query": query, "value": value, "key": value if key is None else key}, range(3, 65),
        "(B, L, E) in all three, or more axes of lengths in all three",
    )  # fmt: skip
    dtype = common_dtype({name: array.dtype for name, array in arrays.items()})
    compute = compute_dtype(dtype)
    return {name: array.astype(compute, copy=False) for name, array in arrays.items()}, dtype


def _output_shape(output_shape: Any, E: int) -> tuple[int, ...]:
    if output_shape is None:
        return (E,)
    sizes = output_shape if isinstance(output_shape, Sequence) else (output_shape,)
    if len(sizes) == 0:
        raise ValueError(f"output_shape is {output_shape!r}: expected one size at least, or None")
    return tuple(integer("output_shape", size) for size in sizes)


def _attention_axes(attention_axes: Any, rank: int) -> tuple[int, ...]:
    """Return the axes for attention as numbers from 0; by default all axes of tokens."""
    if attention_axes is None:
        return tuple(range(1, rank - 1))
    given = attention_axes if isinstance(attention_axes, Sequence) else (attention_axes,)
    axes = tuple(
        axis + rank if axis < 0 else axis
        for axis in (integer("attention_axes", axis, -rank) for axis in given)
    )
    if not axes or len(set(axes)) < len(axes) or not all(0 < axis < rank - 1 for axis in axes):
        raise ValueError(
            f"attention_axes is {attention_axes!r}: expected different axes of query's {rank} "
            f"that are lengths, from 1 to {rank - 2}, one at least"
        )
    return axes


def _check_lengths(inputs: dict[str, Array], axes: tuple[int, ...]) -> None:
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"key and value have shapes {k.shape} and {v.shape}: all sizes but the last must be "
            f"equal, every key needs one value"
        )
    for axis in range(q.ndim - 1):
        if axis not in axes and q.shape[axis] != v.shape[axis]:
            raise ValueError(
                f"value has size {v.shape[axis]} in axis {axis} but query has {q.shape[axis]}: "
                f"axes that are not attended over must be equal"
            )


def _weights(
    params: Mapping[str, ArrayLike], shapes: dict[str, tuple[int, ...]], compute: np.dtype[Any]
) -> dict[str, Array]:
    """Return the weights by the last two names of their paths; ValueError unless they fit."""
    check_mapping(params)
    paths: dict[str, str] = {}
    for path in params:
        name = "/".join(str(path).split("/")[-2:])
        if name in paths:
            raise ValueError(
                f"params has {paths[name]} and {path}: expected the weights of one layer"
            )
        paths[name] = path
    for name, path in paths.items():
        if name not in shapes:
            raise ValueError(
                f"params has {path}, which this layer does not have: expected {', '.join(shapes)}; "
                f"use_bias and use_gate decide which it has"
            )
    weights = {}
    for name, shape in shapes.items():
        if name not in paths:
            raise ValueError(
                f"params has no {name}: expected one of shape {shape}, got {list(params)}; "
                f"use_bias and use_gate decide which it has"
            )
        axes = "(heads, width, out)" if name[0] == "a" else "(in, heads, width)"
        weights[name] = parameter(name, params[paths[name]], shape, compute, f"Keras has {axes}")
    return weights


def _positions(
    use_causal_mask: bool, sliding_window: int | None, axes: tuple[int, ...]
) -> dict[str, Any]:
    is_causal = flag("use_causal_mask", use_causal_mask)
    window = None if sliding_window is None else integer("sliding_window", sliding_window) - 1
    if (is_causal or window is not None) and axes != (1,):
        name = "use_causal_mask" if is_causal else "sliding_window"
        raise ValueError(
            f"{name} with attention over the axes {axes}: expected axis 1 alone, along which Keras "
            f"counts positions"
        )
    sides = None if window is None else (window, window)
    return {"is_causal": is_causal, "window_size": sides, "q_offset": 0}


def _visible(
    masks: tuple[ArrayLike | None, ...], over: tuple[int, ...], attended: int
) -> NDArray[np.bool_] | None:
    """Return the conjunction of all masks, (B · …, H, Lq, Lk), for scores of shape ``over``."""
    batch, lengths = over[: -1 - 2 * attended], over[-2 * attended :]
    queries, keys = lengths[:attended], lengths[attended:]
    visible: NDArray[np.bool_] | None = None
    for name, given in zip(MASKS, masks, strict=True):
        if given is None:
            continue
        mask = _mask(name, given)
        if name == "attention_mask":
            mask = _over_scores(mask, over, 2 * attended)
        else:
            mask = _padding(name, mask, batch, queries if name == "query_mask" else keys)
        visible = mask if visible is None else visible & mask
    if visible is None:
        return None
    H = over[-1 - 2 * attended]
    whole_mask = np.broadcast_to(visible, over)
    return whole_mask.reshape(math.prod(batch), H, math.prod(queries), math.prod(keys))


def _mask(name: str, value: ArrayLike) -> NDArray[np.bool_]:
    """Return ``value`` as bool; TypeError for numbers other than 0 and 1."""
    mask = boolean_or_floating(name, value)
    if not ((mask == 0) | (mask == 1)).all():
        dtype = rectangular(name, value).dtype
        raise TypeError(
            f"{name} has dtype {dtype} and values other than 0 and 1: expected "
            f"bool, True where a query may attend to a key; Keras adds no mask to the scores"
        )
    return np.asarray(mask == 1)


def _over_scores(mask: NDArray[np.bool_], over: tuple[int, ...], lengths: int) -> NDArray[np.bool_]:
    """Return ``mask`` with all axes of the scores; the first axes or the heads may be missing."""
    missing = len(over) - mask.ndim
    split = mask.ndim - lengths
    if split >= 0 and missing >= 0:
        whole_mask = mask.reshape(*mask.shape[:split], *(1,) * missing, *mask.shape[split:])
        if broadcasts(whole_mask, over):
            return whole_mask
    raise ValueError(
        f"attention_mask has shape {mask.shape}: expected {over[-lengths:]}, "
        f"{(*over[: -1 - lengths], *over[-lengths:])} or {over}, or 1 in place of a size"
    )


def _padding(
    name: str, mask: NDArray[np.bool_], batch: tuple[int, ...], lengths: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return a mask of queries or keys with all axes of the scores over ``lengths``."""
    if len(lengths) > 1:
        raise ValueError(
            f"{name} with attention over {len(lengths)} axes: expected one, use "
            f"attention_mask for several"
        )
    if mask.shape != (*batch[:1], *lengths) and mask.shape != (*batch, *lengths):
        raise ValueError(f"{name} has shape {mask.shape}: expected (B, L) = {batch[:1] + lengths}")
    leading = mask.shape[:-1] + (1,) * (len(batch) + 2 - mask.ndim)
    return mask.reshape(*leading, *((*lengths, 1) if name == "query_mask" else (1, *lengths)))
