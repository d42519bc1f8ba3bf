"""Load Qwen3-Next and Qwen3.5: gated delta nets, and in some layers attention with a gate.

Qwen Team, "Qwen3-Next", 2025. Qwen3.5 (2026) stores its matrices one by one, and is published with
a part for images, which is not loaded. The rest of a layer is as in LLaMA, but the files store the
gains of norms minus 1.
"""

from __future__ import annotations

import numpy as np

from minimha.layers.delta import GatedDeltaNet
from minimha.models.checkpoints.settings import DEEPEST, GLOBAL, Settings
from minimha.models.checkpoints.tensors import Tensors, parts_of_rows, rows_of
from minimha.models.config import Config

DELTA = ("qwen3_next", "qwen3_5_text")
LINEAR = "linear_attention"
SIZES = 32, 16, 128, 128, 4  # where config.json has none
# What prefixes become in a folder of Qwen3.5; None is for what no text needs.
PREFIXES = {"model.language_model.": "model.", "model.visual.": None, "mtp.": None}


def is_delta(settings: Settings) -> list[bool]:
    """Return a bool for each layer: True for a gated delta net, False for attention."""
    layers = settings.count("num_hidden_layers", high=DEEPEST)
    if settings.text("model_type") not in DELTA:
        return [False] * layers
    settings.expect("hidden_act", "silu")
    _sizes(settings)
    every = settings.count("full_attention_interval", 4)
    return settings.is_local([(n + 1) % every > 0 for n in range(layers)], (LINEAR, GLOBAL))


def _sizes(settings: Settings) -> tuple[int, ...]:
    """Return H, Hk, D, Dv and K of the gated delta nets."""
    keys = "num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    settings = settings.with_defaults(dict(zip(map("linear_{}".format, keys), SIZES, strict=True)))
    settings.quotient("linear_num_value_heads", "linear_num_key_heads")
    return tuple(settings.count(f"linear_{key}") for key in keys)


def layer(settings: Settings, config: Config, tensors: Tensors, n: int) -> GatedDeltaNet:
    """Return the gated delta net of layer n."""
    at, E = f"model.layers.{n}.linear_attn", config.d_model
    H, Hk, D, Dv, K = _sizes(settings)
    channels, F, G = 2 * Hk * D + H * Dv, H * Dv, H // Hk
    if config.architecture == "qwen3_next":  # all of a key's head, then all of the next one's
        whole = tensors.matrix(f"{at}.in_proj_qkvz.weight", channels + F, E)
        *qkv, z = parts_of_rows(Hk, D, D, G * Dv, G * Dv)
        b, a = parts_of_rows(Hk, G, G)
        both = tensors.matrix(f"{at}.in_proj_ba.weight", 2 * H, E)
        projections = {
            "W_qkv": rows_of(whole, np.concatenate(qkv)).T, "W_z": rows_of(whole, z).T,
            "W_b": rows_of(both, b).T, "W_a": rows_of(both, a).T,
        }  # fmt: skip
    else:
        projections = {}
        for letter, count in (("qkv", channels), ("z", F), ("b", H), ("a", H)):
            projections |= tensors.linear(letter, f"{at}.in_proj_{letter}", E, count)
    weights = {
        "conv": tensors.take(f"{at}.conv1d.weight", channels, 1, K)[:, 0],
        "g_o": tensors.take(f"{at}.norm.weight", Dv),
    } | {name: tensors.take(f"{at}.{name}", H) for name in ("A_log", "dt_bias")}
    weights |= projections | tensors.linear("o", f"{at}.out_proj", F, E)
    return GatedDeltaNet(weights, num_heads=H, num_key_heads=Hk, epsilon=config.epsilon)


def gate(config: Config, tensors: Tensors, n: int, has_biases: bool) -> dict[str, object]:
    """Return the arguments of ``from_combined`` for the attention's gate in layer n.

    The checkpoint stores it with the queries; its tensors are split first.
    """
    at, H, D = f"model.layers.{n}.self_attn", config.num_heads, config.head_dim
    for part in ("weight", "bias")[: 1 + has_biases]:
        tensors.split(at, f"q_proj.{part}", {"q_proj": D, "gate": D}, groups=H)
    return {"gate": "elementwise"} | tensors.linear(
        "g", f"{at}.gate", config.d_model, H * D, has_biases
    )
