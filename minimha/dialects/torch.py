"""PyTorch's scaled_dot_product_attention, flex_attention and MultiheadAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.dialects.inputs import check_mapping, of_one_rank, parameter, refuse_dropout
from minimha.dialects.masks import boolean_or_floating, broadcasts, owner_by_axes, owner_by_values
from minimha.dialects.results import like_argument
from minimha.equations.arguments import (
    argument_names,
    as_floating,
    common_dtype,
    compute_dtype,
    flag,
    integer,
    rectangular,
)
from minimha.equations.block_mask import BlockMask
from minimha.equations.option_types import Backend
from minimha.layers.multihead import MultiHeadAttention, attention_weights

Array = NDArray[Any]
WORDS = {"q": "query", "k": "key", "v": "value"}


@like_argument("query")
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: Backend = "auto",
) -> Any:
    """Return softmax(scale · Q Kᵀ + mask) V, like torch's ``scaled_dot_product_attention``.

    Differences from ``minimha.attention``:

    - ``attn_mask`` is bool (True where a query may attend), or float and added to the scores.
    - ``is_causal`` is aligned at the top left, ``q_offset=0``, even if Lq ≠ Lk.
    - Arrays and masks may have any number of leading axes, which broadcast.
    - K and V may have fewer heads than Q, or differ in number of heads, only if ``enable_gqa``.

    The output of a query without visible keys is 0 in both libraries. In two cases, torch's output
    is NaN and minimha's is not: if a hidden key contains NaN, and if ``is_causal`` with a ``scale``
    of 0 or less, since torch's fused kernels multiply the -inf of hidden keys by the scale.

    Axes: ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys, ``D`` head width,
    ``Dv`` value width.

    Parameters
    ----------
    query : array_like of shape (..., H, Lq, D) or (Lq, D)
    key : array_like of shape (..., Hkv, Lk, D) or (Lk, D)
    value : array_like of shape (..., Hkv, Lk, Dv) or (Lk, Dv)
    attn_mask : array_like broadcastable to (..., H, Lq, Lk), bool or float, optional
        It must have at least 2 axes.
    dropout_p : float, default 0.0
        Must be 0; minimha computes inference.
    is_causal : bool, default False
        Whether query i attends only to keys j ≤ i. With ``attn_mask``, a key must be visible by
        both.
    scale : float, optional
        Default is 1/√D.
    enable_gqa : bool, default False
        Whether Hkv may be a divisor of H. Query head h then reads key/value head h // (H // Hkv).
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    array of query's library, shape (..., H, Lq, Dv), the inputs' common dtype

    References
    ----------
    PyTorch 2.13, torch.nn.functional.scaled_dot_product_attention.

    Examples
    --------
    With three queries and two keys, the causal mask begins at the top left.

    >>> q, k, v = np.zeros((3, 1)), np.zeros((2, 1)), np.array([[2.0], [4.0]])
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).ravel()
    array([2., 3., 3.])
    """
    refuse_dropout("dropout_p", dropout_p)
    q, k, v = _arrays(query, key, value, least=2)
    if flag("enable_gqa", enable_gqa):
        lead, (q, k, v) = _grouped(q, k, v)
    else:
        lead = _leading(q, k, v)
        q, k, v = (_four(array, (*lead, *array.shape[-2:])) for array in (q, k, v))
    mask = _sdpa_mask(attn_mask, (*lead, q.shape[-2], k.shape[-2]))
    with argument_names(**WORDS):
        output = attention(
            q, k, v, is_causal=is_causal, q_offset=0, scale=scale, backend=backend, **mask
        )
    return np.reshape(output, (*lead, *output.shape[-2:]))


@like_argument("query")
def flex_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    block_mask: Any = None,
    backend: Backend = "auto",
) -> Any:
    """Return softmax(score_mod(scale · Q Kᵀ)) V, like ``torch.nn.attention.flex_attention``.

    ``score_mod`` and ``mask_mod`` are compiled as described in the notes of ``minimha.attention``.
    They may use torch's tensors and elementwise functions. Queries and keys are both counted from
    0, ``q_offset=0``, even if Lq ≠ Lk.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width.

    Parameters
    ----------
    query : array_like of shape (B, H, Lq, D)
    key : array_like of shape (B, Hkv, Lk, D) or (1, Hkv, Lk, D)
    value : array_like of shape (B, Hkv, Lk, Dv) or (1, Hkv, Lk, Dv)
    score_mod : callable ``score_mod(score, b, h, q_idx, kv_idx) -> score``, optional
        Returns the new value of a scaled score, from the indices of batch, head, query and key.
    mask_mod : callable ``mask_mod(b, h, q_idx, kv_idx) -> bool``, optional
        Returns True if the query may attend to the key.
    scale : float, optional
        Default is 1/√D.
    enable_gqa : bool, default False
        Whether Hkv may be a divisor of H; otherwise Hkv must equal H.
    return_lse : bool, default False
        Whether to return the log-sum-exp too; it is -inf for a query without visible keys.
    block_mask : minimha.BlockMask or torch's BlockMask, optional
        Replaces ``mask_mod``. Only the function of torch's BlockMask is used.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    output : array of query's library, shape (B, H, Lq, Dv), the inputs' common dtype
    lse : array of shape (B, H, Lq), float32 or float64, if ``return_lse``

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
    2024.

    Examples
    --------
    >>> x = np.arange(4.0).reshape(1, 1, 4, 1)
    >>> flex_attention(x, x, x, mask_mod=lambda b, h, q, kv: q == kv).ravel()
    array([0., 1., 2., 3.])
    """
    q, k, v = _arrays(query, key, value, least=4)
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}: expected 4 axes (B, H, L, D)")
    if not flag("enable_gqa", enable_gqa) and not q.shape[1] == k.shape[1] == v.shape[1]:
        raise ValueError(_differing_heads(q, k, v))
    _, (q, k, v) = _grouped(q, k, v)
    with argument_names(**WORDS):
        return attention(
            q, k, v, q_offset=0, score_mod=score_mod, mask_mod=_mask_function(mask_mod, block_mask),
            scale=scale, return_lse=return_lse, backend=backend,
        )  # fmt: skip


@like_argument("query")
def multihead_attention(
    params: Mapping[str, ArrayLike],
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    num_heads: int,
    key_padding_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    is_causal: bool = False,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    add_zero_attn: bool = False,
    batch_first: bool = False,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Return concat(head_0, …) W_oᵀ + b_o and weights, like ``torch.nn.MultiheadAttention``.

    Differences from ``minimha.attention``:

    - In both masks, True means **ignore**; a float mask is added to the scores.
    - The batch is the second axis unless ``batch_first``.
    - Weight matrices are (out, in), applied as x @ W.T.
    - ``bias_k`` and ``bias_v``, then the zero key of ``add_zero_attn``, are appended as keys that
      no mask hides. The returned weights have columns for these keys.

    Differences from torch: for a query without visible keys, the output is b_o and the weights are
    0, while torch returns NaN in most modes. ``need_weights`` and ``is_causal`` do not change the
    output. In torch, ``is_causal`` with ``need_weights=False`` replaces ``attn_mask`` by a causal
    mask, which also hides appended keys.

    Axes: ``B`` batch, ``H`` heads, ``Lq`` queries, ``Lk`` keys, ``E`` model width, ``Ek`` and
    ``Ev`` the widths of key and value (torch's kdim, vdim).

    Parameters
    ----------
    params : mapping of str to array_like
        The module's ``state_dict()``: in_proj_weight (3E, E), or q_proj_weight (E, E),
        k_proj_weight (E, Ek) and v_proj_weight (E, Ev); out_proj.weight (E, E); optionally
        in_proj_bias (3E,), out_proj.bias (E,), bias_k and bias_v (1, 1, E).
    query : array_like of shape (Lq, B, E), (B, Lq, E) if ``batch_first``, or (Lq, E)
    key : array_like of shape (Lk, B, Ek), (B, Lk, Ek) or (Lk, Ek)
    value : array_like of shape (Lk, B, Ev), (B, Lk, Ev) or (Lk, Ev)
    num_heads : int
        H, a divisor of E.
    key_padding_mask : array_like of shape (B, Lk), (Lk,) without a batch, bool or float, optional
        True hides the key from all queries.
    attn_mask : array_like of shape (Lq, Lk) or (B * H, Lq, Lk), bool or float, optional
        True hides the key from the query.
    is_causal : bool, default False
        torch's hint that ``attn_mask`` is causal, which has no effect here.
    need_weights : bool, default True
        Whether to return the attention weights too.
    average_attn_weights : bool, default True
        Whether the returned weights are the mean over the heads, or those of each head.
    add_zero_attn, batch_first : bool, default False
        As in the module's constructor.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Returns
    -------
    output : array of query's library and shape
    weights : array of shape (B, Lq, Lk + appended keys), or None unless ``need_weights``
        (B, H, Lq, …) unless ``average_attn_weights``. Without B if query has no batch axis.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; PyTorch 2.13,
    torch.nn.MultiheadAttention.

    Examples
    --------
    One token attends to itself: identity projections return it.

    >>> I = np.eye(2)
    >>> params = {"in_proj_weight": np.concatenate([I, I, I]), "out_proj.weight": I}
    >>> x = np.array([[3.0, 4.0]])
    >>> multihead_attention(params, x, x, x, num_heads=2)
    (array([[3., 4.]]), array([[1.]]))
    """
    if flag("is_causal", is_causal) and attn_mask is None:
        raise ValueError("is_causal is True but attn_mask is None: torch's hint needs the mask")
    check_mapping(params)
    order = "(B, L, E)" if flag("batch_first", batch_first) else "(L, B, E)"
    arrays = of_one_rank(
        {"query": query, "key": key, "value": value}, (2, 3),
        f"(L, E) in all three or {order} in all three",
    )  # fmt: skip
    dtype = common_dtype({name: x.dtype for name, x in arrays.items()})
    compute = compute_dtype(dtype)
    inputs, is_batched = _batch_first(list(arrays.values()), batch_first)
    layer = _layer(params, [x.shape[-1] for x in inputs], num_heads, compute)
    x, key_source, value_source = (x.astype(compute, copy=False) for x in inputs)
    q, k, v = layer.project(x, key_source, value_source)
    shape = (*q.shape[:3], k.shape[2])
    k, v = _with_extra_keys(params, k, v, flag("add_zero_attn", add_zero_attn))
    masks = _mha_masks(key_padding_mask, attn_mask, shape, is_batched, k.shape[2], compute)
    with argument_names(**WORDS):
        heads = attention(q, k, v, backend=backend, **masks)
    output = layer.combine(heads, x).astype(dtype, copy=False)
    if not is_batched:
        output = output[0]
    elif not batch_first:
        output = output.swapaxes(0, 1)
    if not flag("need_weights", need_weights):
        return output, None
    weights = attention_weights(q, k, backend=backend, **masks)
    if flag("average_attn_weights", average_attn_weights):
        weights = weights.mean(axis=1)
    weights = weights.astype(dtype, copy=False)
    return output, weights if is_batched else weights[0]


def _arrays(query: ArrayLike, key: ArrayLike, value: ArrayLike, least: int) -> list[Array]:
    """Return query, key and value as floating arrays; raise ValueError if last axes do not fit."""
    given = {"query": query, "key": key, "value": value}
    q, k, v = arrays = [as_floating(name, array) for name, array in given.items()]
    for name, array in zip(given, arrays, strict=True):
        if array.ndim < least:
            raise ValueError(
                f"{name} has shape {array.shape}: expected {least} axes at least, (..., L, D)"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"key has D={k.shape[-1]} but query has D={q.shape[-1]}: a score is a product over D"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"value has Lk={v.shape[-2]} but key has Lk={k.shape[-2]}: every key needs one value"
        )
    return arrays


def _leading(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """Return the shape to which all axes before the last two broadcast."""
    try:
        return np.broadcast_shapes(*(array.shape[:-2] for array in (q, k, v)))
    except ValueError:
        raise ValueError(_differing_heads(q, k, v)) from None


def _differing_heads(q: Array, k: Array, v: Array) -> str:
    return (
        f"query, key and value have shapes {q.shape}, {k.shape} and {v.shape}: without enable_gqa "
        f"their batches and heads must be equal; enable_gqa=True lets query heads share key heads"
    )


def _grouped(q: Array, k: Array, v: Array) -> tuple[tuple[int, ...], list[Array]]:
    """Return the output's leading axes, and 4-D q, k, v; k and v may have fewer heads."""
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim < 3:
            raise ValueError(f"{name} has shape {array.shape}: enable_gqa needs heads, (H, L, D)")
    try:
        batch = np.broadcast_shapes(*(array.shape[:-3] for array in (q, k, v)))
    except ValueError:
        raise ValueError(
            f"query, key and value have shapes {q.shape}, {k.shape} and {v.shape}: their batches "
            f"must be equal"
        ) from None
    H = q.shape[-3]
    for name, array in (("key", k), ("value", v)):
        if 0 in (H, array.shape[-3]) or H % array.shape[-3]:
            raise ValueError(
                f"{name} has {array.shape[-3]} heads but query has {H}: "
                f"the heads of key and value must divide those of query, and none may be 0"
            )
    if k.shape[-3] != v.shape[-3]:  # torch repeats each separately
        k, v = (np.repeat(array, H // array.shape[-3], axis=-3) for array in (k, v))
    return (*batch, H), [_four(array, (*batch, *array.shape[-3:])) for array in (q, k, v)]


def _four(array: Array, shape: tuple[int, ...]) -> Array:
    """Return ``array`` broadcast to ``shape``, with all axes before the last three merged."""
    shape = (1,) * (4 - len(shape)) + shape
    whole = np.broadcast_to(array, shape)
    if shape[-3] == 0:  # attention needs a head, but the batch may be empty
        return whole.reshape(0, 1, *shape[-2:])
    return whole.reshape(math.prod(shape[:-3]), *shape[-3:])


def _sdpa_mask(attn_mask: ArrayLike | None, shape: tuple[int, ...]) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    mask = _mask("attn_mask", attn_mask, "True where a query may attend to a key")
    scores = (1,) * (4 - len(shape)) + shape[-4:]
    if mask.ndim < 2 or not broadcasts(mask, shape):
        raise ValueError(
            f"attn_mask has shape {mask.shape}: expected 2 axes at least, broadcastable to "
            f"(..., Lq, Lk), here {shape}{owner_by_axes(mask, scores)}"
        )
    return {"attn_mask" if mask.dtype == np.bool_ else "attn_bias": _four(mask, shape)}


def _mask(name: str, value: ArrayLike, meaning: str) -> Array:
    """Return ``value`` as an array of bool or of floats; raise TypeError for integers."""
    mask = rectangular(name, value)
    if mask.dtype.kind in "iu":
        raise TypeError(
            f"{name} has dtype {mask.dtype}: expected bool, {meaning}, or floating numbers, which "
            f"are added to the scores{owner_by_values(mask)}"
        )
    return boolean_or_floating(name, mask)


def _mask_function(mask_mod: Any, block_mask: Any) -> Any:
    """Return the given function, the given ``BlockMask``, or the function of torch's BlockMask."""
    if mask_mod is not None and block_mask is not None:
        raise ValueError("mask_mod and block_mask are both given: expected one of them")
    given = block_mask if mask_mod is None else mask_mod
    return given if isinstance(given, BlockMask) else getattr(given, "mask_mod", given)


def _batch_first(inputs: list[Array], batch_first: bool) -> tuple[list[Array], bool]:
    """Return query, key and value as (B, L, width), and whether they had a batch axis."""
    is_batched = inputs[0].ndim == 3
    if not is_batched:
        inputs = [array[None] for array in inputs]
    elif not batch_first:
        inputs = [array.swapaxes(0, 1) for array in inputs]
    q, k, v = inputs
    if k.shape[:2] != v.shape[:2] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"query, key and value have (B, L) = {q.shape[:2]}, {k.shape[:2]} and {v.shape[:2]}: "
            f"all must have one B, and every key needs one value"
        )
    return inputs, is_batched


def _layer(
    params: Mapping[str, ArrayLike], widths: list[int], num_heads: int, compute: np.dtype[Any]
) -> MultiHeadAttention:
    E = widths[0]
    if E % integer("num_heads", num_heads) or E == 0:
        raise ValueError(
            f"num_heads is {num_heads} and query has E={E}: E must be a multiple of it, not 0"
        )
    if "in_proj_weight" in params:
        for name, width in zip(("key", "value"), widths[1:], strict=True):
            if width != E:
                raise ValueError(
                    f"{name} has width {width} but in_proj_weight is for E={E}: another width "
                    f"needs k_proj_weight and v_proj_weight"
                )
        weights = np.split(_parameter(params, "in_proj_weight", (3 * E, E), compute), 3)
    else:
        weights = []
        for name, width in zip(WORDS.values(), widths, strict=True):
            shape = E, integer(f"the width of {name}", width)
            weights.append(_parameter(params, f"{name[0]}_proj_weight", shape, compute))
    weights.append(_parameter(params, "out_proj.weight", (E, E), compute))
    biases: dict[str, Any] = {}
    if "in_proj_bias" in params:
        parts = np.split(_parameter(params, "in_proj_bias", (3 * E,), compute), 3)
        biases = dict(zip(("b_q", "b_k", "b_v"), parts, strict=True))
    if "out_proj.bias" in params:
        biases["b_o"] = _parameter(params, "out_proj.bias", (E,), compute)
    return MultiHeadAttention.from_combined(
        *(W.T for W in weights), num_heads=num_heads, value_source_dim=widths[2], **biases
    )


def _parameter(
    params: Mapping[str, ArrayLike], name: str, shape: tuple[int, ...], compute: np.dtype[Any]
) -> Array:
    if name not in params:
        raise ValueError(f"params has no {name}: expected one of shape {shape}, got {list(params)}")
    return parameter(name, params[name], shape, compute, "torch's weights are (out, in)")


def _with_extra_keys(
    params: Mapping[str, ArrayLike], k: Array, v: Array, add_zero_attn: bool
) -> tuple[Array, Array]:
    """Return k and v with the keys of ``bias_k``, ``bias_v`` and ``add_zero_attn`` appended."""
    B, H, _, D = k.shape
    extra: list[tuple[Array, ...]] = [(k, v)]
    if "bias_k" in params or "bias_v" in params:
        learned = (_parameter(params, f"bias_{n}", (1, 1, H * D), k.dtype) for n in "kv")
        extra.append(tuple(np.broadcast_to(x.reshape(H, 1, D), (B, H, 1, D)) for x in learned))
    if add_zero_attn:
        extra.append((np.zeros((B, H, 1, D), k.dtype),) * 2)
    keys, values = zip(*extra, strict=True)
    return np.concatenate(keys, axis=2), np.concatenate(values, axis=2)


def _mha_masks(
    key_padding_mask: ArrayLike | None, attn_mask: ArrayLike | None,
    shape: tuple[int, int, int, int], is_batched: bool, num_keys: int, compute: np.dtype[Any],
) -> dict[str, Any]:  # fmt: skip
    """Return both masks (True = ignore) as options of ``attention`` over ``num_keys`` keys."""
    B, H, Lq, Lk = shape
    of_keys = ("(B, Lk)", (B, Lk)) if is_batched else ("(Lk,)", (Lk,))
    accepted: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {
        "key_padding_mask": [(*of_keys, (B, 1, 1, Lk))],
        "attn_mask": [
            ("(Lq, Lk)", (Lq, Lk), (1, 1, Lq, Lk)),
            ("(B * H, Lq, Lk)", (B * H, Lq, Lk), shape),
        ],
    }
    options: dict[str, Any] = {}
    for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if given is None:
            continue
        mask = _mask(name, given, "True where a key is ignored")
        fitting = [full for _, axes, full in accepted[name] if axes == mask.shape]
        if not fitting:
            shapes = " or ".join(f"{letters} = {axes}" for letters, axes, _ in accepted[name])
            raise ValueError(
                f"{name} has shape {mask.shape}: expected {shapes}{owner_by_axes(mask, shape)}"
            )
        mask = mask.reshape(fitting[0])
        if mask.dtype == np.bool_:
            options["attn_mask"] = ~mask & options.get("attn_mask", True)
        else:
            wide = mask.astype(np.promote_types(mask.dtype, compute), copy=False)
            with np.errstate(over="ignore"):  # twice the lowest number is -inf, as in torch
                options["attn_bias"] = wide + options.get("attn_bias", wide.dtype.type(0))
    beside = ((0, 0), (0, 0), (0, 0), (0, num_keys - Lk))
    unhidden = {"attn_mask": True, "attn_bias": 0}
    return {
        name: np.pad(mask, beside, constant_values=unhidden[name]) for name, mask in options.items()
    }
