"""Load mixtures of experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, gpt-oss, DeepSeek V2 and V3.

Jiang et al., "Mixtral of Experts", 2024; Qwen Team, "Qwen2", 2024, and "Qwen3", 2025; Muennighoff
et al., "OLMoE", 2024. OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025: biases everywhere,
clipped gates, and matrices in bfloat16 or MXFP4. DeepSeek-AI, "DeepSeek-V2", 2024, and
"DeepSeek-V3", 2024: groups of experts, and experts that all tokens share.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minimha.equations.stored import Stored
from minimha.layers.feed_forward import FeedForward
from minimha.models.checkpoints.latent import LATENT
from minimha.models.checkpoints.settings import Settings
from minimha.models.checkpoints.tensors import Array, Tensors
from minimha.models.config import Config
from minimha.models.experts import Experts, Groups

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "gpt_oss", *LATENT)
SHARED = ("qwen2_moe", "qwen3_next")  # families with an expert for all tokens, which has a gate
MOST = 1 << 12  # experts of a layer
GATED = ("gate_proj", "up_proj", "down_proj")  # the names of a gated feed-forward's matrices


def is_mixture(settings: Settings, n: int) -> bool:
    """Return whether layer n is a mixture of experts.

    In Qwen and DeepSeek, some layers may have a plain feed-forward.
    """
    if settings.text("model_type") in LATENT:
        settings.expect("moe_layer_freq", 1)
        kinds = settings.get("mlp_layer_types")
        if kinds is not None:
            return n in _sparse(settings, kinds)
        return n >= settings.count("first_k_dense_replace", low=0)
    dense, every = settings.get("mlp_only_layers") or [], settings.count("decoder_sparse_step", 1)
    if not isinstance(dense, list | tuple):
        named = f"{settings.name}'s mlp_only_layers is {dense!r}"
        raise ValueError(f"{named}: expected the numbers of layers")
    return settings.text("model_type") in MIXTURES and n not in dense and (n + 1) % every == 0


def _sparse(settings: Settings, kinds: Any) -> list[int]:
    """Return the numbers of the layers with experts, by DeepSeek-V3.2's mlp_layer_types."""
    layers = settings.count("num_hidden_layers")
    is_listed = isinstance(kinds, list | tuple) and all(x in ("dense", "sparse") for x in kinds)
    if not is_listed or len(kinds) != layers:
        named = f"{settings.name}'s mlp_layer_types is {kinds!r}"
        raise ValueError(f"{named}: expected dense or sparse for each of {layers} layers")
    return [n for n, kind in enumerate(kinds) if kind == "sparse"]


def experts(settings: Settings, config: Config, tensors: Tensors, n: int) -> Experts:
    """Build the mixture of experts of layer n."""
    kind, E = config.architecture, config.d_model
    if kind == "gpt_oss":
        return _of_gpt_oss(settings, config, tensors, f"model.layers.{n}.mlp")
    if kind in LATENT:
        return _of_deepseek(settings, config, tensors, f"model.layers.{n}.mlp")
    number = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    N, width = settings.count(number, high=MOST), "moe_intermediate_size"
    F = settings.count(width) if kind.startswith("qwen") else config.d_ff
    part, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", GATED)
    at, shared = f"model.layers.{n}.{part}", None
    if kind in SHARED:
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


def groups(settings: Settings) -> Groups | None:
    """Return DeepSeek's groups of experts, or None if the model has no groups.

    Raises ValueError if the kept groups have fewer experts than a token needs.
    """
    is_second = settings.text("model_type") == "deepseek_v2"
    settings.expect("scoring_func", "softmax" if is_second else "sigmoid")
    kinds = ("greedy", "group_limited_greedy") if is_second else ("noaux_tc",)
    settings.expect("topk_method", *kinds)
    N = settings.count("n_routed_experts", high=MOST)
    top_k = settings.count("num_experts_per_tok", high=N)
    if settings.get("topk_method") in (None, "greedy") and is_second:
        return None
    number = settings.count("n_group")
    kept, best = settings.count("topk_group", high=number), 1 if is_second else 2
    size = settings.quotient("n_routed_experts", "n_group")
    if size < best or kept * size < top_k:
        raise ValueError(
            f"{settings.name}'s n_group is {number}, of which topk_group, {kept}, are kept: groups "
            f"of {size} experts are too small for num_experts_per_tok, {top_k}"
        )
    return Groups(number, kept, best)


def _of_deepseek(settings: Settings, config: Config, tensors: Tensors, at: str) -> Experts:
    E, F = config.d_model, settings.count("moe_intermediate_size")
    N, is_third = settings.count("n_routed_experts"), config.architecture != "deepseek_v2"
    return Experts(
        tensors.linear("r", f"{at}.gate", E, N)["W_r"],
        [gated(config, tensors, f"{at}.experts.{e}", F) for e in range(N)],
        settings.count("num_experts_per_tok"),
        is_third and settings.flag("norm_topk_prob", True),
        shared=gated(
            config, tensors, f"{at}.shared_experts", F * settings.count("n_shared_experts")
        ),
        scoring="sigmoid" if is_third else "softmax",
        b_choice=tensors.take(f"{at}.gate.e_score_correction_bias", N) if is_third else None,
        groups=groups(settings),
        scale=settings.number("routed_scaling_factor"),
    )


def _of_gpt_oss(settings: Settings, config: Config, tensors: Tensors, at: str) -> Experts:
    E, F, N = config.d_model, config.d_ff, settings.count("num_local_experts", 128, high=MOST)
    settings.expect("swiglu_alpha", 1.702)  # of quick_gelu
    router = tensors.linear("r", f"{at}.router", E, N, has_bias=True)
    W, b = _matrices(tensors, f"{at}.experts.gate_up_proj", N, E, 2 * F)
    W_out, b_out = _matrices(tensors, f"{at}.experts.down_proj", N, F, E)
    W_gate, W_in = ([_every_second(both, first) for both in W] for first in (0, 1))
    b_gate, b_in = (np.ascontiguousarray(b[:, first::2]) for first in (0, 1))
    limit = settings.number("swiglu_limit", 7.0, 0)
    parts = zip(W_in, W_out, b_in, b_out, W_gate, b_gate, strict=True)
    experts = [
        FeedForward(w_in, w_out, "quick_gelu", bias, b_last, w_gate, b_first, limit)
        for w_in, w_out, bias, b_last, w_gate, b_first in parts
    ]
    top_k = settings.count("num_experts_per_tok", 4, high=N)
    return Experts(router["W_r"], experts, top_k, b_router=router["b_r"])


def _every_second(W: Any, first: int) -> Any:
    """Return every second column of W, from the first or the second one on."""
    columns = W[:, first::2]
    return columns if isinstance(columns, Stored) else np.ascontiguousarray(columns)


def _matrices(tensors: Tensors, name: str, N: int, rows: int, columns: int) -> tuple[Any, Array]:
    """Return gpt-oss's N matrices (rows, columns) and their biases (N, columns).

    A file of 16 bits has the matrices for x @ W, and one in MXFP4 their transposes.
    """
    bias = tensors.take(f"{name}_bias", N, columns)
    if f"{name}_blocks" in tensors:
        return [W.T for W in tensors.take_mxfp4(name, N, columns, rows)], bias
    return tensors.matrices(name, N, rows, columns), bias


def gated(
    config: Config, tensors: Tensors, at: str, F: int, names: tuple[str, ...] = GATED,
    has_biases: bool = False,
) -> FeedForward:  # fmt: skip
    """Build a gated feed-forward of inner width F from the tensors below ``at``.

    ``names`` are those of the gate, up and down projections.
    """
    gate, up, down = names
    return FeedForward(
        activation=config.activation,
        **tensors.linear("gate", f"{at}.{gate}", config.d_model, F, has_biases),
        **tensors.linear("in", f"{at}.{up}", config.d_model, F, has_biases),
        **tensors.linear("out", f"{at}.{down}", F, config.d_model, has_biases),
    )
