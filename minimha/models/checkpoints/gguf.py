"""Read GGUF, llama.cpp's format for metadata and tensors, which are usually quantised.

Metadata are converted to settings as in config.json. Tensors regain the names and values that they
had before the conversion to GGUF. Matrices stay in the file and are widened when they are used.
Other tensors, and matrices of a type without a kernel, become float32 at loading. The package gguf
reads the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the conversion is llama.cpp's
convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.stored import FORMATS, Stored
from minimha.models.checkpoints.settings import Settings
from minimha.models.files import advise_large_pages, check_file

Array = NDArray[Any]

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = NORMS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# The prefix of a layer's tensors in a folder, and the names of its parts there.
LLAMA = (
    "model.layers.{}.{}",
    {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "token_embd": "model.embed_tokens",
        "output_norm": "model.norm", "output": "lm_head",
    },
)  # fmt: skip
GPT2 = (
    "h.{}.{}",
    {
        "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj", "attn_norm": "ln_1", "ffn_norm": "ln_2", "token_embd": "wte",
        "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head",
    },
)  # fmt: skip
# For each general.architecture: model_type in config.json, and the names of tensors.
ARCHITECTURES = {
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", (LLAMA[0], LLAMA[1] | NORMS)),
    "qwen2": ("qwen2", (LLAMA[0], LLAMA[1] | NORMS)),
    "qwen3": ("qwen3", (LLAMA[0], LLAMA[1] | NORMS)),
    "gemma2": ("gemma2", (LLAMA[0], LLAMA[1] | FOUR_NORMS)),
    "gemma3": ("gemma3_text", (LLAMA[0], LLAMA[1] | FOUR_NORMS)),
}
STORED = {"F16": "float16", "BF16": "bfloat16"}  # what GGUF calls the formats of 16 bits
ENDS = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"
# The largest models of Gemma 2 and 3 scale scores by 1/√(E/H), others by 1/√D. The file has no
# such setting: llama.cpp recognises these models by their number of layers.
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def read(path: Path) -> tuple[Settings, dict[str, Array], Settings]:
    """Return a GGUF file's settings as in config.json, its tensors by name, and its metadata."""
    stored, tensors = _contents(path)
    metadata = Settings(stored, str(path))
    architecture = metadata.text("general.architecture")
    name = f"{path}'s {architecture}"
    values = {
        key.removeprefix(f"{architecture}."): value
        for key, value in stored.items()
        if key.startswith(f"{architecture}.")
    }
    given = Settings(values, name)
    given.expect("expert_count", None, 0)
    config = _gpt2(given) if architecture == "gpt2" else _llama(given, architecture, tensors)
    config |= {
        "model_type": ARCHITECTURES[architecture][0],
        "vocab_size": len(tensors.get("token_embd.weight", ())) or given.count("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": [number for key in ENDS if (number := stored.get(key)) is not None],
    }
    if config["model_type"] == "llama" and config.get("sliding_window"):
        config["model_type"] = "mistral"
    restored = _restored(architecture, config, tensors)
    return Settings(config, str(path)), restored, metadata


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of a file, and its tensors: float32 arrays and ``Stored`` matrices."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise ValueError(
            f"{path} is read by the package gguf, which is not installed: "
            f"pip install 'minimha[gguf]'"
        ) from None
    check_file(path)
    try:
        reader = GGUFReader(path)
        advise_large_pages(reader.data)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        if sum(int(tensor.n_bytes) for tensor in reader.tensors) > path.stat().st_size:
            raise ValueError
    except MemoryError:
        raise
    except Exception:  # a damaged file may raise anything
        why = "the package gguf cannot read it, or its tensors overlap"
        raise ValueError(f"{path} is no GGUF file, or damaged: {why}") from None
    architecture = Settings(metadata, str(path)).text("general.architecture")
    tensors: dict[str, Any] = {}
    if architecture not in ARCHITECTURES:  # refused before anything is widened
        raise ValueError(
            f"{path}'s general.architecture is {architecture!r}: expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    for tensor in reader.tensors:
        kind = STORED.get(tensor.tensor_type.name, tensor.tensor_type.name)
        if len(tensor.shape) == 2 and kind in FORMATS and kind != "float32":
            data = np.ascontiguousarray(tensor.data).view(np.uint8)
            tensors[tensor.name] = Stored.of_rows(kind, data)
            continue
        try:
            tensors[tensor.name] = np.asarray(dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError:
            raise ValueError(
                f"{path}'s tensor {tensor.name} is {kind}, which the package gguf cannot widen"
            ) from None
    return metadata, tensors


def _gpt2(given: Settings) -> dict[str, Any]:
    """Return the config.json of a GPT-2."""
    return {
        "n_embd": given.count("embedding_length"), "n_head": given.count("attention.head_count"),
        "n_layer": given.count("block_count"), "n_inner": given.count("feed_forward_length"),
        "n_positions": given.count("context_length"),
        "layer_norm_epsilon": given.number("attention.layer_norm_epsilon"),
    }  # fmt: skip


def _llama(given: Settings, architecture: str, tensors: dict[str, Array]) -> dict[str, Any]:
    """Return the config.json of a LLaMA or one of its successors."""
    E, H = given.count("embedding_length"), given.count("attention.head_count")
    D, layers = given.count("attention.key_length", E // H), given.count("block_count")
    given.expect("attention.value_length", D, None)
    given.expect("rope.dimension_count", D, None)
    config = {
        "hidden_size": E, "num_attention_heads": H, "head_dim": D, "num_hidden_layers": layers,
        "num_key_value_heads": given.count("attention.head_count_kv", H),
        "intermediate_size": given.count("feed_forward_length"),
        "max_position_embeddings": given.count("context_length"),
        "rms_norm_eps": given.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(given, D, tensors),
        "sliding_window": given.get("attention.sliding_window"),
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }  # fmt: skip
    if architecture not in SCALED_BY_WIDTH:
        return config
    if architecture == "gemma3":
        local = {"rope_theta": given.number("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"], "sliding_attention": local
        }  # fmt: skip
    return config | {
        "query_pre_attn_scalar": E / H if layers == SCALED_BY_WIDTH[architecture] else D,
        "sliding_window_pattern": given.get("attention.sliding_window_pattern"),
        "attn_logit_softcapping": given.optional("attn_logit_softcapping"),
        "final_logit_softcapping": given.optional("final_logit_softcapping"),
    }


def _rope(given: Settings, D: int, tensors: dict[str, Array]) -> dict[str, Any]:
    """Return rope_parameters; Llama 3's scaling is a tensor with one factor per pair."""
    base = given.number("rope.freq_base", 1e6 if "gemma3" in given.name else 10000.0)
    given.expect("rope.scaling.attn_factor", None, 1.0)
    kind = given.get("rope.scaling.type") or "none"
    factors = tensors.pop("rope_freqs.weight", None)
    rope: dict[str, Any] = {"rope_theta": base}
    if factors is not None:
        if factors.shape != (D // 2,):
            raise ValueError(
                f"{given.name}: tensor rope_freqs.weight has shape {factors.shape}: expected "
                f"{(D // 2,)}"
            )
        rope |= {"rope_type": "factors", "factors": factors.tolist()}
    elif kind != "none":
        rope |= {"rope_type": kind, "factor": given.number("rope.scaling.factor")}
        if kind == "yarn":
            length = given.count("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = length
    return rope


def _restored(
    architecture: str, config: dict[str, Any], tensors: dict[str, Array]
) -> dict[str, Array]:
    """Return the tensors with their names and values from before the conversion to GGUF."""
    at, names = ARCHITECTURES[architecture][1]
    restored = {}
    for name in list(tensors):
        tensor, match = tensors.pop(name), LAYER.fullmatch(name)
        part, kind = (match[2], match[3]) if match else name.partition(".")[::2]
        if part in names:
            tensor = _changed_back(architecture, part, tensor, config)
            where = names[part]
            name = f"{at.format(match[1], where) if match else where}.{kind}"
        restored[name] = tensor
    return restored


def _changed_back(architecture: str, part: str, tensor: Any, config: dict[str, Any]) -> Any:
    """Return one tensor as it was before the conversion to GGUF."""
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if len(tensor) % (2 * heads):
            return tensor  # refused later, for its shape
        if isinstance(tensor, Stored):
            return tensor.reordered(half_split(np.arange(len(tensor)), heads))
        return half_split(tensor, heads)
    embeddings = ("token_embd", "position_embd", "output")
    if architecture == "gpt2" and tensor.ndim == 2 and part not in embeddings:
        return tensor.T  # the conversion transposes it
    if architecture in SCALED_BY_WIDTH and part.endswith("norm"):
        return np.asarray(tensor - tensor.dtype.type(1))  # the conversion adds Gemma's 1
    return tensor


def half_split(W: Array, heads: int) -> Array:
    """Reorder the rows of W for each of ``heads`` heads, from interleaved to half-split RoPE.

    Rows (2i, 2i + 1) of a head become rows (i, i + D/2).

    >>> half_split(np.array([0, 2, 1, 3]), 1)
    array([0, 1, 2, 3])
    """
    pairs = W.reshape(heads, -1, 2, *W.shape[1:])
    return np.asarray(np.moveaxis(pairs, 2, 1)).reshape(W.shape)
