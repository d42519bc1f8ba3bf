"""Load Gemma 1 to 3, whose files store the gains of norms minus 1.

Gemma Team, "Gemma", 2024; "Gemma 2", 2024 (caps of scores and logits, more norms, local layers);
"Gemma 3", 2025 (normalised queries and keys, another RoPE base in local layers). Gemma 3's image
encoder is not loaded.
"""

from __future__ import annotations

import math
from typing import Any

from minimha.layers.norms import RMSNorm
from minimha.models.checkpoints.llama import attention, feed_forward
from minimha.models.checkpoints.settings import DEEPEST, GLOBAL, LOCAL, POSITIVE, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer

# Defaults of missing settings; Gemma 3 is published with few.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"vocab_size": 256000},
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "rope_theta": 1e6,
    },
}  # fmt: skip
# New prefixes of names in a folder with an image encoder; None drops the image tensors.
PREFIXES = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.", "language_model.": "model.",
    "vision_tower.": None, "model.vision_tower.": None,
    "multi_modal_projector.": None, "model.multi_modal_projector.": None,
}  # fmt: skip


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """Build a Gemma model from its settings and tensors."""
    if settings.text("model_type") == "gemma3":
        tensors.rename(PREFIXES)
    settings = _of_text(settings)
    config = read_config(settings)
    with_bias = "qkvo" if settings.flag("attention_bias", False) else ""
    tensors.add_prefix("model.", "embed_tokens.weight")
    tokens = tensors.matrix("model.embed_tokens.weight", config.vocabulary, config.d_model)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(1 + tensors.take(f"{name}.weight", config.d_model), config.epsilon)

    def block(n: int) -> Layer:
        names = ["input", "pre_feedforward", "post_attention", "post_feedforward"]
        if config.architecture == "gemma":
            names = ["input", "post_attention"]
        first, second, *after = (norm(f"model.layers.{n}.{name}_layernorm") for name in names)
        after_attention, after_feed_forward = after or (None, None)
        return Layer(
            first,
            attention(config, tensors, n, with_bias, "head" if _is_third(settings) else None, 1),
            second,
            feed_forward(config, tensors, n),
            after_attention,
            after_feed_forward,
            config.windows[n], config.scale, config.softcap,
        )  # fmt: skip

    return Transformer(
        config,
        Embeddings(tokens, scale=math.sqrt(config.d_model)),
        [block(n) for n in range(config.num_layers)],
        norm("model.norm"),
        tensors.unembedding(tokens, config.is_tied),
        tokenizer,
    )


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a Gemma model from its config.json."""
    settings = _of_text(settings)
    settings.expect("use_bidirectional_attention", None, False)
    D, layers = settings.count("head_dim", 256), settings.count("num_hidden_layers", high=DEEPEST)
    every = settings.count("sliding_window_pattern", 6 if _is_third(settings) else 2)
    is_first = settings.text("model_type") == "gemma"
    local = settings.is_local([(n + 1) % every > 0 and not is_first for n in range(layers)])
    key = "hidden_act" if is_first else "hidden_activation"
    activation = settings.activation(key, "gelu_pytorch_tanh")
    if is_first and activation == "gelu":
        activation = "gelu_tanh"  # which the first Gemma's gelu means
    ropes = [settings.rope(D, k if _is_third(settings) else GLOBAL) for k in (GLOBAL, LOCAL)]
    window = settings.count("sliding_window", 4096)
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=settings.count("hidden_size"),
        num_heads=settings.count("num_attention_heads"),
        num_kv_heads=settings.count("num_key_value_heads"),
        head_dim=D,
        d_ff=settings.count("intermediate_size"),
        max_length=settings.count("max_position_embeddings"),
        epsilon=settings.number("rms_norm_eps", 1e-6, 0),
        activation=activation,
        is_tied=settings.flag("tie_word_embeddings", True),
        ropes=tuple(ropes[is_local] for is_local in local),
        windows=tuple(window if is_local else None for is_local in local),
        scale=(D if is_first else settings.number("query_pre_attn_scalar", 256, POSITIVE)) ** -0.5,
        softcap=settings.optional("attn_logit_softcapping"),
        logit_softcap=settings.optional("final_logit_softcapping"),
    )  # fmt: skip


def _of_text(settings: Settings) -> Settings:
    """Return the settings of the text model, with defaults for missing ones."""
    if settings.text("model_type") == "gemma3":
        settings = settings.of_text("gemma3_text")
    return settings.with_defaults(DEFAULTS.get(settings.text("model_type"), {}))


def _is_third(settings: Settings) -> bool:
    return settings.text("model_type") == "gemma3_text"
