"""Adapt functions with other interfaces, so that all can be called with q, k, v and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from minimha.check.problems import spans

Function = Callable[..., Any]


def results(returned: Any) -> tuple[Any, Any]:
    """Return the output and the second result in a function's return value.

    If it returned only one array, the second result is None.
    """
    if isinstance(returned, tuple):
        return (*returned, None, None)[:2]
    return returned, None


def packed(function: Function) -> Function:
    """Adapt ``flash_attn_varlen_func`` to q (B, Lq, H, D) and packed k (1, Lk, Hkv, D).

    The log-sum-exp (H, B · Lq) is converted to (B, H, Lq).
    """

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        rows = q.reshape(-1, *q.shape[2:])
        output, lse = results(function(rows, k[0], v[0], **options))
        output = output.reshape(*q.shape[:2], *output.shape[1:])
        if lse is None:
            return output
        return output, lse.reshape(-1, *q.shape[:2]).swapaxes(0, 1)

    return call


def flexible(function: Function) -> Function:
    """Adapt ``flex_attention``, which takes functions, to masks and biases that are arrays."""

    def call(
        q: Any, k: Any, v: Any, *, is_causal: bool = False, q_offset: Any = 0,
        window_size: Any = (None, None), kv_lengths: Any = None, attn_mask: Any = None,
        attn_bias: Any = None, alibi_slopes: Any = None, softcap: float | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        shape = (*q.shape[:3], k.shape[2])
        offset = torch.zeros(shape[0], dtype=torch.int64, device=q.device) + q_offset
        mask, bias = (None if x is None else x.expand(shape) for x in (attn_mask, attn_bias))
        left, right = window_size

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                s = s + bias[b, h, i, j]
            if alibi_slopes is not None:
                s = s - alibi_slopes[h] * abs(i + offset[b] - j)
            return s

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = j >= 0
            if is_causal:
                seen = seen & (j <= i + offset[b])
            if left is not None:
                seen = seen & (j >= i + offset[b] - left)
            if right is not None:
                seen = seen & (j <= i + offset[b] + right)
            if kv_lengths is not None:
                seen = seen & (j < kv_lengths[b])
            return seen if mask is None else seen & mask[b, h, i, j]

        if softcap is not None or bias is not None or alibi_slopes is not None:
            options["score_mod"] = score
        hides = [x is not None for x in (left, right, kv_lengths, mask)]
        if is_causal or any(hides):
            options["block_mask"] = create_block_mask(visible, *shape, device=q.device)
        return function(q, k, v, **options)

    return call


def hooked(function: Function) -> Function:
    """Adapt an attention function of transformers to take q, k, v and return (B, H, Lq, Dv)."""

    def call(q: Any, k: Any, v: Any, attention_mask: Any = None, **options: Any) -> Any:
        module = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1], is_causal=False, training=False,
            layer_idx=0,
        )  # fmt: skip
        output, _ = results(function(module, q, k, v, attention_mask, dropout=0.0, **options))
        return output.swapaxes(1, 2)

    return call


def called_in_turn(asks_state: str, axis: int = 2) -> Callable[[Function], Function]:
    """Adapt a delta rule to ``chunks``: each call after the first gets the state of the one before.

    ``asks_state`` is the argument with which the rule returns its state too. Tokens are along
    ``axis`` of q, k, v, g and beta.
    """

    def adapted(function: Function) -> Function:
        def call(
            q: Any, k: Any, v: Any, g: Any, beta: Any, chunks: Sequence[int] = (), **options: Any
        ) -> Any:
            if not chunks:
                return results(function(q, k, v, g=g, beta=beta, **options))[0]
            outputs: list[Any] = []
            for start, end in spans(chunks):
                tokens = (slice(None),) * axis + (slice(start, end),)
                part = [x[tokens] for x in (q, k, v, g, beta)]
                asked = {**options, asks_state: True}
                output, state = results(function(*part[:3], g=part[3], beta=part[4], **asked))
                options["initial_state"] = state
                options.pop("kv_lengths", None)  # of the tokens of the first call
                outputs.append(output)
            if hasattr(outputs[0], "detach"):
                import torch

                return torch.cat(outputs, axis)
            return np.concatenate(outputs, axis)

        return call

    return adapted
