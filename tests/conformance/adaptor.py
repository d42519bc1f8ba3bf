"""minimha as the stored conformance cases call it: one thin function per kind of case."""

import numpy as np

from minimha.api import attention
from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

BACKEND = "auto"

SCORES = {
    "none": lambda p: None,
    "softcap": lambda p: lambda s, b, h, i, j: np.tanh(s / p["cap"]) * p["cap"],
    "rel": lambda p: lambda s, b, h, i, j: s + p["w"] * (j - i),
    "alibi": lambda p: lambda s, b, h, i, j: s - 2.0 ** (-(h + 1) * p["c"]) * abs(i - j),
    "headscale": lambda p: lambda s, b, h, i, j: s * (1 + h) * p["w"],
}
MASKS = {
    "none": lambda p: None,
    "causal": lambda p: lambda b, h, i, j: i >= j,
    "causal_off": lambda p: lambda b, h, i, j: i + p["off"] >= j,
    "window": lambda p: lambda b, h, i, j: abs(i - j) <= p["w"],
    "swa": lambda p: lambda b, h, i, j: (i >= j) & (i - j < p["w"]),
    "prefix": lambda p: lambda b, h, i, j: (i >= j) | (j < p["n"]),
    "docs": lambda p: lambda b, h, i, j: i // p["n"] == j // p["n"],
    "dead": lambda p: lambda b, h, i, j: (i % 3 != 1) & (j <= i + 2),
}


def sdpa(q, k, v, mask, is_causal, scale, enable_gqa):
    return torch.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        backend=BACKEND,
    )


def mha(params, cfg, query, key, value, key_padding_mask, attn_mask):
    known = ("num_heads", "batch_first", "add_zero_attn", "need_weights", "average_attn_weights")
    return torch.multihead_attention(
        params,
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=cfg.get("is_causal", False) and attn_mask is not None,
        backend=BACKEND,
        **{name: cfg[name] for name in known if name in cfg},
    )


def flex(q, k, v, score, mask, scale, enable_gqa):
    (score_name, score_params), (mask_name, mask_params) = score, mask
    return torch.flex_attention(
        q,
        k,
        v,
        score_mod=SCORES[score_name](score_params),
        mask_mod=MASKS[mask_name](mask_params),
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=True,
        backend=BACKEND,
    )


def fa(inputs, attrs):
    return flash_attention.flash_attn_func(**inputs, **attrs, backend=BACKEND)


def dpa(q, k, v, bias, mask, scale, is_causal, q_len, kv_len, window):
    return jax.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=q_len,
        key_value_seq_lengths=kv_len,
        local_window_size=window,
        backend=BACKEND,
    )


def keras_layer(meta, params, inputs):
    cfg, call = meta["cfg"], meta.get("call", {})
    asks = call.get("return_attention_scores", False)
    sizes = {"num_heads", "key_dim", "value_dim", "output_shape", "attention_axes"}
    layer = keras.multi_head_attention
    if "head_dim" in cfg:
        sizes = {"head_dim", "num_query_heads", "num_key_value_heads"}
        layer = keras.grouped_query_attention
    known = sizes | {"use_bias", "use_gate", "sliding_window"}
    arrays = ("query", "value", "key", "query_mask", "value_mask", "key_mask", "attention_mask")
    result = layer(
        params,
        **{name: inputs[name] for name in arrays if name in inputs},
        **{name: cfg[name] for name in known if name in cfg},
        use_causal_mask=call.get("use_causal_mask", False),
        return_attention_scores=asks,
        # With scores or dropout Keras computes differently: a query that sees no key gets 0.
        empty_rows="zero" if asks or cfg.get("dropout") else None,
        backend=BACKEND,
    )
    return result if asks else (result, None)


def hf_attention(q, k, v, bias, scale, softcap, sinks):
    return attention(
        q,
        k,
        v,
        attn_bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        backend=BACKEND,
    )


def hf_module(meta, inputs):
    if meta["cls"] not in transformers.CLASSES:
        return None
    name = meta["module"]  # such as decoder.block.0.layer.1.EncDecAttention
    module = transformers.AttentionModule(
        meta["cls"],
        {key[2:]: value for key, value in inputs.items() if key.startswith("w.")},
        {"is_decoder": "decoder" in name.split(".")} | meta["config"],
        layer_idx=next((int(part) for part in name.split(".") if part.isdecimal()), 0),
    )
    past = transformers.DynamicCache() if meta["steps"] > 1 and not meta["cross"] else None
    context, results = {}, {}
    for step in range(meta["steps"]):
        start = f"s{step}."
        given = {key[len(start) :]: x for key, x in inputs.items() if key.startswith(start)}
        tables = [given.pop(f"position_embeddings.{i}", None) for i in (0, 1)]
        context |= {key: x for key, x in given.items() if key == module.convention.context}
        known = {key: x for key, x in given.items() if key in module.convention.takes}
        if "position_embeddings" in module.convention.takes:
            known["position_embeddings"] = tables
        results[f"s{step}.y"], results[f"s{step}.weights"] = module(
            given["hidden_states"],
            past_key_values=past,
            output_attentions=True,
            backend=BACKEND,
            **known | context,
        )
    return results


def onnx_attention(inputs, attrs):
    outputs = onnx.attention(**inputs, **attrs, return_qk_matmul_output=True, backend=BACKEND)
    return outputs._asdict()


def onnx_rotary(inputs, attrs):
    return {"Y": onnx.rotary_embedding(**inputs, **attrs)}


def onnx_tensor_scatter(inputs, attrs):
    return {"present_cache": onnx.tensor_scatter(**inputs, **attrs)}
