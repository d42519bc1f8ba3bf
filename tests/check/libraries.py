"""Other libraries' attentions in minimha's signature; what one cannot do, it raises.

Nothing is repaired: an argument goes to the parameter of the library that a user would take for it.
"""

from functools import cache

import numpy as np


def torch_multi_head_attention(q, k, v, attn_mask=None):
    """torch.nn.MultiheadAttention with projections of I; the mask is passed on as it is."""
    import torch

    B, H, Lq, D = q.shape
    if k.shape[1] != H or v.shape[-1] != D:
        raise NotImplementedError("heads are not shared, and values are as wide as keys")
    module = torch.nn.MultiheadAttention(H * D, H, bias=False, batch_first=True).eval()
    identity = torch.eye(H * D)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([identity] * 3))
        module.out_proj.weight.copy_(identity)
        rows = [torch.from_numpy(tokens(x)) for x in (q, k, v)]
        mask = None
        if attn_mask is not None:
            shape = (B, H, Lq, k.shape[2])
            mask = torch.from_numpy(np.broadcast_to(attn_mask, shape).reshape(B * H, *shape[2:]))
        output, _ = module(*rows, attn_mask=mask, need_weights=True)
    return heads(output.numpy(), H)


def flex_attention(
    q,
    k,
    v,
    is_causal=False,
    q_offset=0,
    window_size=None,
    attn_mask=None,
    attn_bias=None,
    alibi_slopes=None,
    scale=None,
    softcap=None,
    return_lse=False,
):
    """torch's flex_attention, with masks and biases as functions of indices."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, H, Lq, _ = q.shape
    Lk = k.shape[2]
    left, right = window_size or (None, None)
    if np.ndim(q_offset):
        raise NotImplementedError("one offset")
    whole = {
        name: None if x is None else torch.from_numpy(np.broadcast_to(x, (B, H, Lq, Lk)).copy())
        for name, x in (("mask", attn_mask), ("bias", attn_bias))
    }
    slopes = None if alibi_slopes is None else torch.from_numpy(alibi_slopes)

    def score(s, b, h, i, j):
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if whole["bias"] is not None:
            s = s + whole["bias"][b, h, i, j]
        return s if slopes is None else s - slopes[h] * (i + q_offset - j).abs()

    def visible(b, h, i, j):
        seen = (j <= i + q_offset) if is_causal else (j >= 0)
        if left is not None:
            seen = seen & (j >= i + q_offset - left)
        if right is not None:
            seen = seen & (j <= i + q_offset + right)
        return seen if whole["mask"] is None else seen & whole["mask"][b, h, i, j]

    mask = create_block_mask(visible, B, H, Lq, Lk, device="cpu")
    return flex_attention(
        *(torch.from_numpy(x) for x in (q, k, v)), score_mod=score, block_mask=mask, scale=scale,
        enable_gqa=k.shape[1] != H, return_lse=return_lse,
    )  # fmt: skip


def keras_multi_head_attention(q, k, v, is_causal=False, q_offset=0, attn_mask=None):
    """keras.layers.MultiHeadAttention with projections of I."""
    H, D = q.shape[1], q.shape[-1]
    if k.shape[1] != H:
        raise NotImplementedError("heads are not shared")
    layer = _keras_layer("MultiHeadAttention", (H, H), D, v.shape[-1], num_heads=H, key_dim=D,
                         value_dim=v.shape[-1])  # fmt: skip
    return _keras_output(layer, q, k, v, is_causal, attn_mask)


def keras_grouped_query_attention(q, k, v, is_causal=False, q_offset=0, attn_mask=None):
    """keras.layers.GroupQueryAttention with projections of I."""
    H, Hkv, D = q.shape[1], k.shape[1], q.shape[-1]
    if v.shape[-1] != D:
        raise NotImplementedError("values are as wide as keys")
    layer = _keras_layer("GroupQueryAttention", (H, Hkv), D, D, head_dim=D, num_query_heads=H,
                         num_key_value_heads=Hkv)  # fmt: skip
    return _keras_output(layer, q, k, v, is_causal, attn_mask)


def _keras_layer(name, counts, D, Dv, **sizes):
    import keras

    (H, Hkv), layer = counts, getattr(keras.layers, name)(use_bias=False, **sizes)
    widths = {"query": (H, D), "key": (Hkv, D), "value": (Hkv, Dv)}
    if name == "MultiHeadAttention":
        layer._output_shape = (H * Dv,)
    layer.build((1, 1, H * D), (1, 1, Hkv * Dv), (1, 1, Hkv * D))
    for weight in layer.weights:
        part = weight.path.split("/")[-2]
        H_or, width = widths.get(part, (H, Dv))
        weight.assign(np.eye(H_or * width).reshape(weight.shape))
    return layer


def _keras_output(layer, q, k, v, is_causal, attn_mask):
    import keras

    rows = [tokens(x) for x in (q, k, v)]
    mask = None
    if attn_mask is not None:
        mask = np.broadcast_to(attn_mask, (*q.shape[:3], k.shape[2])).copy()
    output = layer(rows[0], rows[2], rows[1], attention_mask=mask, use_causal_mask=is_causal)
    return heads(keras.ops.convert_to_numpy(output), q.shape[1])


def keras_dot_product_attention(q, k, v, **options):
    """keras.ops.dot_product_attention, which takes tensors of its backend."""
    import keras

    given = {
        name: keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in {"query": q, "key": k, "value": v, **options}.items()
    }
    return keras.ops.convert_to_numpy(keras.ops.dot_product_attention(**given))


def onnxruntime_attention(
    Q,
    K,
    V,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    scale=None,
    softcap=0.0,
):
    """onnxruntime's kernel of ONNX's Attention."""
    if nonpad_kv_seqlen is not None:
        raise NotImplementedError("of a later opset")
    attributes = {"is_causal": is_causal, "softcap": softcap, "scale": scale}
    return _attention_of_onnx(session, Q, K, V, attn_mask, past_key, past_value, **attributes)


def onnx_reference_attention(
    Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, scale=None, softcap=0.0,
):  # fmt: skip
    """Attention as the standard's own package computes it, in NumPy."""
    if nonpad_kv_seqlen is not None:
        raise NotImplementedError("of a later opset")
    attributes = {"is_causal": is_causal, "softcap": softcap, "scale": scale}
    return _attention_of_onnx(reference, Q, K, V, attn_mask, past_key, past_value, **attributes)


def _attention_of_onnx(kind, Q, K, V, attn_mask, past_key, past_value, **attributes):
    feeds = {"Q": Q, "K": K, "V": V, "M": attn_mask, "PK": past_key, "PV": past_value}
    outputs = ("Y", "present_key", "present_value") if past_key is not None else ("Y",)
    return run("Attention", "", feeds, outputs, attributes, kind)


def onnxruntime_multi_head_attention(q, k, v, is_causal=False, q_offset=0, attn_bias=None,
                                     scale=None):  # fmt: skip
    """onnxruntime's own MultiHeadAttention."""
    H = q.shape[1]
    if k.shape[1] != H:
        raise NotImplementedError("heads are not shared")
    bias = None if attn_bias is None else attn_bias[(None,) * (4 - attn_bias.ndim)]
    feeds = {"q": tokens(q), "k": tokens(k), "v": tokens(v), "": None, " ": None, "bias": bias}
    attributes = {"num_heads": H, "unidirectional": int(is_causal), "scale": scale}
    return heads(run("MultiHeadAttention", "com.microsoft", feeds, ("Y",), attributes), H)


def onnxruntime_grouped_query_attention(q, k, v, is_causal=False, window_size=None, softcap=None,
                                        scale=None):  # fmt: skip
    """onnxruntime's own GroupQueryAttention, which is causal whatever is asked."""
    (B, H, Lq, D), Lk = q.shape, k.shape[2]
    if Lq != Lk or not is_causal or v.shape[-1] != D or D % 8:
        raise NotImplementedError("a causal prompt, and heads of a multiple of 8")
    left, right = window_size or (None, 0)
    if right != 0:
        raise NotImplementedError("a window on the left")
    lengths = {"s": np.full(B, Lk - 1, np.int32), "t": np.array(Lk, np.int32)}
    feeds = {"q": tokens(q), "k": tokens(k), "v": tokens(v), "": None, " ": None, **lengths}
    attributes = {
        "num_heads": H, "kv_num_heads": k.shape[1], "softcap": softcap, "scale": scale,
        "local_window_size": -1 if left is None else left + 1,
    }  # fmt: skip
    outputs = ("Y", "present_k", "present_v")
    return heads(run("GroupQueryAttention", "com.microsoft", feeds, outputs, attributes), H)


def run(operator, domain, feeds, outputs, attributes, kind=None):
    """The first output of one operator; a feed of None is an absent input."""
    kind = session if kind is None else kind
    given = {name: np.ascontiguousarray(x) for name, x in feeds.items() if x is not None}
    inputs = tuple((name, x.dtype.str, x.ndim) for name, x in given.items())
    names = tuple(name if x is not None else "" for name, x in feeds.items())
    while names[-1] == "":
        names = names[:-1]
    chosen = tuple((name, x) for name, x in attributes.items() if x is not None)
    return kind(operator, domain, names, inputs, outputs, chosen).run(None, given)[0]


@cache
def session(*model):
    """onnxruntime's, for a model of one operator."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model_of(*model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@cache
def reference(*model):
    """The evaluator of the standard's own package, for a model of one operator."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model_of(*model))


def model_of(operator, domain, names, inputs, outputs, attributes):
    from onnx import TensorProto, helper

    described = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [None] * rank
        )
        for name, dtype, rank in inputs
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    node = helper.make_node(operator, names, list(outputs), domain=domain, **dict(attributes))
    return helper.make_model(
        helper.make_graph([node], operator, described, results),
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )


def transformers_eager(q, k, v, attn_mask=None, is_causal=False, q_offset=0, scale=None):
    """transformers' eager attention of LLaMA, with the mask that transformers makes."""
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = torch.nn.Module().eval()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    visible = np.ones((q.shape[2], k.shape[2]), bool)
    if is_causal:
        visible = np.tri(q.shape[2], k.shape[2], q_offset, dtype=bool)
    if attn_mask is not None:
        visible = visible & attn_mask
    added = np.where(visible, np.float32(0), np.finfo(np.float32).min)
    added = torch.from_numpy(added[(None,) * (4 - added.ndim)])
    given = [torch.from_numpy(x) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return eager_attention_forward(module, *given, added, scaling=scale)[0].transpose(1, 2)


def tokens(x):
    """(B, H, L, D) as (B, L, H · D)."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(x.shape[0], x.shape[2], -1)


def heads(x, H):
    """(B, L, H · D) as (B, H, L, D)."""
    return np.asarray(x).reshape(*x.shape[:2], H, -1).swapaxes(1, 2)
