"""Load mixtures of experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, gpt-oss.

Jiang et al., "Mixtral of Experts", 2024; Qwen Team, "Qwen2", 2024, and "Qwen3", 2025; Muennighoff
et al., "OLMoE", 2024. OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025: biases everywhere,
gates that are limited, and matrices in bfloat16 or in MXFP4.
"""

from __future__ import annotations

import numpy as np

from minimha.layers.feed_forward import FeedForward
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Array, Tensors
from minimha.models.config import Config
from minimha.models.experts import Experts

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
MOST = 1 << 12  # experts of a layer
GATED = ("gate_proj", "up_proj", "down_proj")  # the names of a gated feed-forward's matrices


def is_mixture(settings: Settings, n: int) -> bool:
    """Return whether layer n has experts; in Qwen some layers may have none."""
    dense, every = settings.get("mlp_only_layers") or [], settings.count("decoder_sparse_step", 1)
    if not isinstance(dense, list | tuple):
        named = f"{settings.name}'s mlp_only_layers is {dense!r}"
        raise ValueError(f"{named}: expected the numbers of layers")
    return settings.text("model_type") in MIXTURES and n not in dense and (n + 1) % every == 0


def experts(settings: Settings, config: Config, tensors: Tensors, n: int) -> Experts:
    """Return the mixture of layer n."""
    kind, E = config.architecture, config.d_model
    if kind == "gpt_oss":
        return _of_gpt_oss(settings, config, tensors, f"model.layers.{n}.mlp")
    number = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    N, width = settings.count(number, high=MOST), "moe_intermediate_size"
    F = settings.count(width) if kind.startswith("qwen") else config.d_ff
    part, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", GATED)
    at, shared = f"model.layers.{n}.{part}", None
    if kind == "qwen2_moe":
        width = "shared_expert_intermediate_size"
        shared = gated(config, tensors, f"{at}.shared_expert", settings.count(width))
    return Experts(
        tensors.linear("r", f"{at}.gate", E, N)["W_r"],
        [gated(config, tensors, f"{at}.experts.{e}", F, names) for e in range(N)],
        settings.count("num_experts_per_tok", 8, high=N),
        settings.flag("norm_topk_prob", False),
        shared=shared,
        W_shared=tensors.linear("s", f"{at}.shared_expert_gate", E, 1)["W_s"] if shared else None,
    )


def _of_gpt_oss(settings: Settings, config: Config, tensors: Tensors, at: str) -> Experts:
    E, F, N = config.d_model, config.d_ff, settings.count("num_local_experts", 128, high=MOST)
    settings.expect("swiglu_alpha", 1.702)  # of quick_gelu
    router = tensors.linear("r", f"{at}.router", E, N, has_bias=True)
    W, b = _matrices(tensors, f"{at}.experts.gate_up_proj", N, E, 2 * F)
    W_out, b_out = _matrices(tensors, f"{at}.experts.down_proj", N, F, E)
    (W_gate, W_in), (b_gate, b_in) = (
        [np.ascontiguousarray(both[..., first::2]) for first in (0, 1)] for both in (W, b)
    )
    limit = settings.number("swiglu_limit", 7.0, 0)
    parts = zip(W_in, W_out, b_in, b_out, W_gate, b_gate, strict=True)
    experts = [
        FeedForward(w_in, w_out, "quick_gelu", bias, b_last, w_gate, b_first, limit)
        for w_in, w_out, bias, b_last, w_gate, b_first in parts
    ]
    top_k = settings.count("num_experts_per_tok", 4, high=N)
    return Experts(router["W_r"], experts, top_k, b_router=router["b_r"])


def _matrices(tensors: Tensors, name: str, N: int, rows: int, columns: int) -> tuple[Array, Array]:
    """Return gpt-oss's N matrices (N, rows, columns), from MXFP4 if they are, and their biases."""
    bias = tensors.take(f"{name}_bias", N, columns)
    if f"{name}_blocks" in tensors:
        return tensors.take_mxfp4(name, N, columns, rows).swapaxes(1, 2), bias
    return tensors.take(name, N, rows, columns), bias


def gated(
    config: Config, tensors: Tensors, at: str, F: int, names: tuple[str, ...] = GATED,
    has_biases: bool = False,
) -> FeedForward:  # fmt: skip
    """Return the gated feed-forward of width F under ``at``; ``names``: of gate, up and down."""
    gate, up, down = names
    return FeedForward(
        activation=config.activation,
        **tensors.linear("gate", f"{at}.{gate}", config.d_model, F, has_biases),
        **tensors.linear("in", f"{at}.{up}", config.d_model, F, has_biases),
        **tensors.linear("out", f"{at}.{down}", F, config.d_model, has_biases),
    )
