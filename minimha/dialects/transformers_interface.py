"""Register minimha as an attention function for the models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from minimha.api import attention
from minimha.dialects.masks import owner_by_values, score_options
from minimha.equations.arguments import argument_names, as_floating, rectangular
from minimha.equations.option_types import Backend
from minimha.layers.multihead import attention_weights

# transformers' names for the arguments of ``attention``.
WORDS = {
    "q": "query", "k": "key", "v": "value", "attn_mask": "attention_mask", "scale": "scaling",
    "sinks": "s_aux",
}  # fmt: skip
REFUSED = {
    "cache": "a paged cache, as in continuous batching",
    "indices": "keys that are selected for each query",
    "block_indices": "blocks of keys that are selected for each query",
    "sinks": "sinks that differ between queries",
}


def register(name: str = "minimha", *, backend: Backend = "auto") -> None:
    """Add minimha to the choices of ``model.set_attn_implementation`` in transformers 5.

    Arrays on the CPU are read without a copy, and grouped heads are not repeated. Masks are those
    of "sdpa": boolean, including windows and padding, or None for a plain causal mask. Soft caps,
    sinks and T5's biases are applied.

    Differences from "eager":

    - 16-bit numbers are computed in float32 and rounded once.
    - The output of a query without visible keys, such as left padding, is 0, not the mean of all
      values.
    - A call of the model must not record gradients.

    BLOOM, Falcon, GPT-J and MPT have a fixed attention function: ``set_attn_implementation`` then
    warns and has no effect.

    Parameters
    ----------
    name : str, default "minimha"
        The name for ``set_attn_implementation``; an existing entry is replaced.
    backend : str, default "auto"
        As in ``minimha.attention``.

    Raises
    ------
    ImportError
        transformers 5 or torch is not installed.

    References
    ----------
    transformers 5, "Attention backends": AttentionInterface and AttentionMaskInterface.

    Examples
    --------
    >>> register()  # doctest: +SKIP
    >>> model.set_attn_implementation("minimha")  # doctest: +SKIP
    """
    try:
        import torch
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"register needs transformers 5 and torch: pip install 'minimha[peers]' ({error})"
        ) from None
    # torch.compile cannot trace code outside of torch.
    forward = torch.compiler.disable(attention_forward)
    AttentionInterface.register(name, partial(forward, backend=backend))
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    s_aux: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    output_attentions: bool = False,
    backend: Backend = "auto",
    **others: Any,
) -> tuple[Any, Any]:
    """Return attention's output (B, Lq, H, Dv), and the weights (B, H, Lq, Lk) or None.

    The weights are None unless ``output_attentions``. transformers' models pass query (B, H, Lq,
    D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv). ``attention_mask`` and ``position_bias``
    broadcast to (B, H, Lq, Lk). A mask of numbers is added to the scores; in a boolean mask, True
    means that a query may attend. ``s_aux`` (H,) are sinks. ``is_causal`` applies only to several
    queries without a mask. By default, it is the module's attribute, or True if there is none.
    ``dropout`` must be 0. ``others`` are further arguments of transformers, which are ignored as in
    "eager". Those that would change the result raise ValueError, unless they are None.
    """
    _check_inference(query, key, value, dropout)
    for name, what in REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(f"{name} is given: minimha's function does not compute {what}")
    q, k, v = query.detach(), key.detach(), value.detach()
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = _masks(attention_mask, position_bias) | {
        "is_causal": is_causal and attention_mask is None and q.shape[2] > 1, "q_offset": 0,
        "scale": scaling, "softcap": softcap, "backend": backend,
        "sinks": None if s_aux is None else s_aux.detach(),
    }  # fmt: skip
    added = "attention_mask" if position_bias is None else "position_bias"
    with argument_names(**WORDS, attn_bias=added):
        output = attention(q, k, v, **options)
        weights = attention_weights(q, k, **options) if output_attentions else None
    return output.transpose(1, 2).contiguous(), weights


def _masks(attention_mask: Any, position_bias: Any) -> dict[str, Any]:
    mask = bias = None
    if attention_mask is not None:
        mask = rectangular("attention_mask", attention_mask.detach())
        if mask.dtype.kind in "iu":
            raise TypeError(
                f"attention_mask has dtype {mask.dtype}: expected bool, True = may attend, or "
                f"floating, which is added{owner_by_values(mask)}"
            )
    if position_bias is not None:
        bias = as_floating("position_bias", position_bias.detach())
    return score_options(mask, bias)


def _check_inference(query: Any, key: Any, value: Any, dropout: float) -> None:
    import torch

    if dropout:
        raise ValueError(
            f"dropout is {dropout!r}: expected 0, minimha computes inference: call model.eval()"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise TypeError(
            "query, key or value requires grad, but minimha computes no gradients: call the model "
            "under torch.no_grad()"
        )
