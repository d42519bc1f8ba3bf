"""Build DeepSeek's latent attention from the weights and config of a transformers module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from minimha.equations.arguments import argument_names, as_floating, choice, integer
from minimha.layers.latent import LatentAttention
from minimha.layers.rope import RoPE
from minimha.layers.scalings import YaRNScaling

# minimha's name → the library's name, and whether x @ W needs a transpose.
NAMES = {
    "W_q": ("q_proj.weight", True), "W_dq": ("q_a_proj.weight", True),
    "b_dq": ("q_a_proj.bias", False), "g_q": ("q_a_layernorm.weight", False),
    "W_uq": ("q_b_proj.weight", True), "W_dkv": ("kv_a_proj_with_mqa.weight", True),
    "b_dkv": ("kv_a_proj_with_mqa.bias", False), "g_kv": ("kv_a_layernorm.weight", False),
    "W_ukv": ("kv_b_proj.weight", True), "W_o": ("o_proj.weight", True),
    "b_o": ("o_proj.bias", False),
}  # fmt: skip
CLASSES = ("DeepseekV2Attention", "DeepseekV3Attention")


def latent_attention(
    cls: str, params: Mapping[str, ArrayLike], config: Mapping[str, Any]
) -> LatentAttention:
    """Build the ``LatentAttention`` layer of one of DeepSeek's attention modules.

    Unlike ``AttentionModule``, the layer computes angles from positions and the config's
    rope_parameters. It is causal only with ``is_causal=True`` or a cache.

    - Rotated pairs are interleaved in V2, and in V3 unless ``rope_interleave`` is False.
    - With YaRN, scores are also scaled by m(mscale_all_dim)², and cos and sin by m(mscale) /
      m(mscale_all_dim), where m(x) = 0.1 · x · ln(factor) + 1.
    - The ε of the norms is 1e-6; rms_norm_eps is ignored.

    Parameters
    ----------
    cls : {"DeepseekV2Attention", "DeepseekV3Attention"}
    params : mapping of str to array_like
        The module's ``state_dict()`` as arrays.
    config : mapping of str to Any
        The module's ``config.to_dict()``.

    Returns
    -------
    LatentAttention
        Called as ``layer(x, is_causal=True)``, or with a ``LatentCache``.

    Raises
    ------
    TypeError, ValueError
        ``cls`` is another class, rope_type is not "default" or "yarn", or a weight is missing,
        unknown or of a wrong shape.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; transformers 5, DeepseekV3Attention.
    """
    choice("cls", cls, CLASSES)
    known = {theirs for theirs, _ in NAMES.values()}
    for name in params:
        if name not in known:
            raise ValueError(f"params has {name}, which minimha's {cls} does not use")
    weights = {}
    for ours, (theirs, is_transposed) in NAMES.items():
        if theirs in params:
            array = as_floating(theirs, params[theirs])
            weights[ours] = array.T if is_transposed else array
    R = integer("qk_rope_head_dim", config.get("qk_rope_head_dim", 64))
    rules = config.get("rope_parameters") or {}
    interleaved = cls == "DeepseekV2Attention" or config.get("rope_interleave", True)
    rope = RoPE(
        R, rules.get("rope_theta", 10000.0), interleaved=interleaved, scaling=_yarn(rules, config)
    )
    widths = R + integer("qk_nope_head_dim", config.get("qk_nope_head_dim", 128))
    words = {ours: f"{name}.T" if turned else name for ours, (name, turned) in NAMES.items()}
    with argument_names(**words):
        return LatentAttention(
            weights, num_heads=config["num_attention_heads"], rope=rope,
            scale=_magnitude(rules, "mscale_all_dim") ** 2 / math.sqrt(widths),
        )  # fmt: skip


def _yarn(rules: Mapping[str, Any], config: Mapping[str, Any]) -> YaRNScaling | None:
    kind = choice("rope_type", rules.get("rope_type", "default"), ("default", "yarn"))
    if kind == "default":
        return None
    original = rules["original_max_position_embeddings"]
    factor = rules.get("factor") or config["max_position_embeddings"] / original
    given = rules.get("attention_factor")
    if given is None and rules.get("mscale") and rules.get("mscale_all_dim"):
        given = _magnitude(rules, "mscale") / _magnitude(rules, "mscale_all_dim")
    return YaRNScaling(
        factor, original, rules.get("beta_fast") or 32.0, rules.get("beta_slow") or 1.0, given,
        rules.get("truncate", True),
    )  # fmt: skip


def _magnitude(rules: Mapping[str, Any], name: str) -> float:
    """Return 0.1 · m · ln(factor) + 1, where ``name`` is m in the config; 1 without YaRN or m."""
    if rules.get("rope_type", "default") == "default" or not rules.get(name):
        return 1.0
    return 0.1 * float(rules[name]) * math.log(max(rules["factor"], 1.0)) + 1.0
