"""GPT-2 and LLaMA in plain NumPy, from their papers alone, and checkpoints of random numbers."""

import json
import struct
from pathlib import Path

import numpy as np

GPT2 = {
    "model_type": "gpt2", "vocab_size": 23, "n_positions": 12, "n_embd": 8, "n_layer": 2,
    "n_head": 2, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 23, "max_position_embeddings": 12, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 100.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def gpt2_tensors(rng):
    E, V, P = GPT2["n_embd"], GPT2["vocab_size"], GPT2["n_positions"]
    shapes = {"wte.weight": (V, E), "wpe.weight": (P, E), "ln_f.weight": (E,), "ln_f.bias": (E,)}
    for n in range(GPT2["n_layer"]):
        shapes |= {f"h.{n}.ln_{i}.{part}": (E,) for i in (1, 2) for part in ("weight", "bias")}
        linear = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}
        for name, times in linear.items():
            shapes |= {f"h.{n}.{name}.weight": (E, times * E), f"h.{n}.{name}.bias": (times * E,)}
        shapes |= {f"h.{n}.mlp.c_proj.weight": (4 * E, E), f"h.{n}.mlp.c_proj.bias": (E,)}
    return _drawn(rng, shapes)


def llama_tensors(rng):
    E, F, V = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
    shapes = {
        "lm_head.weight": (V, E),
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
    }
    for n in range(LLAMA["num_hidden_layers"]):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.{name}_layernorm.weight": (E,) for name in ("input", "post_attention")}
        for name, rows in (("q", E), ("k", E // 2), ("v", E // 2), ("o", E)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, E)
        for name, shape in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F))):
            shapes[f"{at}.mlp.{name}_proj.weight"] = shape
    return _drawn(rng, shapes)


def gpt2_logits(W, ids):
    x = W["wte.weight"][ids] + W["wpe.weight"][: len(ids)]
    for n in range(GPT2["n_layer"]):
        w = {name[4:]: W[name] for name in W if name.startswith(f"h.{n}.")}
        y = _layer_norm(x, w, "ln_1") @ w["attn.c_attn.weight"] + w["attn.c_attn.bias"]
        q, k, v = (_heads(part, 2) for part in np.split(y, 3, axis=1))
        y = _attention(q, k, v) @ w["attn.c_proj.weight"] + w["attn.c_proj.bias"]
        x = x + y
        y = _layer_norm(x, w, "ln_2") @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"]
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"]
    return _layer_norm(x, W, "ln_f") @ W["wte.weight"].T


def llama_logits(W, ids):
    x = W["model.embed_tokens.weight"][ids]
    for n in range(LLAMA["num_hidden_layers"]):
        at = f"model.layers.{n}."
        w = {name.removeprefix(at): W[name] for name in W if name.startswith(at)}
        y = _rms_norm(x, w["input_layernorm.weight"])
        q, k, v = (
            _heads(y @ w[f"self_attn.{name}_proj.weight"].T, heads)
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        q, k = _rotated(q), np.repeat(_rotated(k), 2, axis=0)
        x = x + _attention(q, k, np.repeat(v, 2, axis=0)) @ w["self_attn.o_proj.weight"].T
        y = _rms_norm(x, w["post_attention_layernorm.weight"])
        gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    return _rms_norm(x, W["model.norm.weight"]) @ W["lm_head.weight"].T


def write(folder: Path, config, tensors, name="model.safetensors"):
    """A checkpoint as the format's page describes it; ``tensors`` have a dtype and numbers each."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for key, array in tensors.items():
        dtype = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int64": "I64"}
        dtype["uint8"] = "U8"
        offsets = [len(data), len(data) + array.nbytes]
        header[key] = {
            "dtype": dtype[array.dtype.name], "shape": array.shape, "data_offsets": offsets
        }  # fmt: skip
        data += array.tobytes()
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def _drawn(rng, shapes):
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _layer_norm(x, W, name):
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return y * W[f"{name}.weight"] + W[f"{name}.bias"]


def _rms_norm(x, gain):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain


def _heads(y, heads):
    return y.reshape(len(y), heads, -1).transpose(1, 0, 2)


def _attention(q, k, v):
    S = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    S = np.where(np.tri(len(S[0]), dtype=bool), S, -np.inf)
    A = np.exp(S - S.max(-1, keepdims=True))
    O = A / A.sum(-1, keepdims=True) @ v
    return O.transpose(1, 0, 2).reshape(len(S[0]), -1)


def _rotated(x):
    """The pair (i, i + D/2) as a complex number, turned by position · 100^(-2i/D)."""
    _, L, D = x.shape
    turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(
        1j * np.arange(L)[:, None] * 100.0 ** (-np.arange(0, D, 2) / D)
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


class Letters:
    """A tokenizer with one token per letter."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]
