"""Load the latent attention of DeepSeek: one short vector per token gives all keys and values.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, "DeepSeek-V3", 2024, and "DeepSeek-V3.2", 2025. In
the last, an indexer picks the keys. The module ``mixtures`` loads their mixtures of experts. The
rest of a layer is as in LLaMA.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minimha.layers.indexer import LightningIndexer
from minimha.layers.latent import LatentAttention
from minimha.layers.rope import RoPE
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config

LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32")


def head_dim(settings: Settings) -> int:
    """Return the width of a query: the sum of its unrotated and its rotated part."""
    settings.expect("num_key_value_heads", None, settings.get("num_attention_heads"))
    return settings.count("qk_nope_head_dim", 128) + settings.count("qk_rope_head_dim", 64)


def rope(settings: Settings) -> RoPE:
    """Return the rotary embedding of the rotated part of queries and keys."""
    found = settings.rope(settings.count("qk_rope_head_dim", 64))
    is_second = settings.text("model_type") == "deepseek_v2"
    return replace(found, interleaved=is_second or settings.flag("rope_interleave", True))


def scale(settings: Settings) -> float:
    """Return the scale of the scores.

    It is 1/√(query width). If RoPE is scaled and the setting mscale_all_dim is a number m, it is
    (1 + 0.1 m ln(factor))² / √(query width), with RoPE's scaling ``factor``.
    """
    rules = settings.section("rope_parameters") or settings.section("rope_scaling")
    given = Settings(rules, f"{settings.name}'s rope")
    magnitude, is_scaled = (
        1.0,
        (given.get("rope_type") or given.get("type")) not in (None, "default"),
    )
    if is_scaled and given.get("mscale_all_dim"):
        logarithm = math.log(given.number("factor", low=1))
        magnitude += 0.1 * given.number("mscale_all_dim", low=0) * logarithm
    return magnitude**2 / math.sqrt(head_dim(settings))


def attention(
    settings: Settings, config: Config, tensors: Tensors, n: int, has_biases: bool
) -> LatentAttention:
    """Return the attention of layer n."""
    at, E, H = f"model.layers.{n}.self_attn", config.d_model, config.num_heads
    C, R = settings.count("kv_lora_rank", 512), settings.count("qk_rope_head_dim", 64)
    unrotated, values = config.head_dim - R, settings.count("v_head_dim", 128)
    shapes = {
        "dkv": ("kv_a_proj_with_mqa", E, C + R),
        "ukv": ("kv_b_proj", C, H * (unrotated + values)), "o": ("o_proj", H * values, E),
    }  # fmt: skip
    gains = {"g_kv": ("kv_a_layernorm", C)}
    if settings.get("q_lora_rank") is None:
        shapes["q"] = "q_proj", E, H * config.head_dim
    else:
        Cq = settings.count("q_lora_rank")
        shapes |= {"dq": ("q_a_proj", E, Cq), "uq": ("q_b_proj", Cq, H * config.head_dim)}
        gains["g_q"] = "q_a_layernorm", Cq
    given = {ours: tensors.take(f"{at}.{name}.weight", C) for ours, (name, C) in gains.items()}
    for ours, (name, rows, columns) in shapes.items():
        has_bias = has_biases and ours in ("dq", "dkv", "o")
        given |= tensors.linear(ours, f"{at}.{name}", rows, columns, has_bias)
    picking = None
    if config.architecture == "deepseek_v32":
        picking = indexer(settings, tensors, f"{at}.indexer", E)
    return LatentAttention(
        given, num_heads=H, rope=rope(settings), scale=config.scale, indexer=picking
    )


def indexer(settings: Settings, tensors: Tensors, at: str, E: int) -> LightningIndexer:
    """Return the indexer whose tensors are below ``at``, for tokens of width E.

    It rotates half-split pairs, unlike the attention, which rotates interleaved ones by default.
    """
    Cq, found = settings.count("q_lora_rank"), rope(settings)
    Hi, Di = settings.count("index_n_heads", 64), settings.count("index_head_dim", 128)
    norm = tensors.layer_norm(f"{at}.k_norm", Di, 1e-6)
    weights = {"g_ik": norm.gain, "b_ik": norm.bias}
    weights |= tensors.linear("iq", f"{at}.wq_b", Cq, Hi * Di)
    weights |= tensors.linear("ik", f"{at}.wk", E, Di)
    weights |= tensors.linear("iw", f"{at}.weights_proj", E, Hi)
    halves = RoPE(Di, found.base, rotary_dim=found.width, scaling=found.scaling)
    return LightningIndexer(
        weights, num_heads=Hi, top_k=settings.count("index_topk", 2048), rope=halves
    )
