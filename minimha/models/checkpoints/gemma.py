"""Load Gemma 2 and 3: norms around each part, gains stored minus 1, local and global layers.

Gemma Team, "Gemma 2", 2024 (caps of scores and logits), and "Gemma 3", 2025 (normalised queries and
keys, another rotary base in local layers).
"""

from __future__ import annotations

import math

from minimha.layers.norms import RMSNorm
from minimha.models.checkpoints.llama import attention, feed_forward
from minimha.models.checkpoints.settings import DEEPEST, GLOBAL, LOCAL, POSITIVE, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """Return the model of these settings and tensors."""
    config = read_config(settings)
    with_bias = "qkvo" if settings.flag("attention_bias", False) else ""
    tensors.add_prefix("model.", "embed_tokens.weight")
    tokens = tensors.take("model.embed_tokens.weight", config.vocabulary, config.d_model)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(1 + tensors.take(f"{name}.weight", config.d_model), config.epsilon)

    def block(n: int) -> Layer:
        at = f"model.layers.{n}"
        return Layer(
            norm(f"{at}.input_layernorm"),
            attention(config, tensors, n, with_bias, "head" if _is_third(settings) else None, 1),
            norm(f"{at}.pre_feedforward_layernorm"),
            feed_forward(config, tensors, n),
            norm(f"{at}.post_attention_layernorm"),
            norm(f"{at}.post_feedforward_layernorm"),
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
    """Return the sizes and settings in a config.json."""
    settings.expect("use_bidirectional_attention", None, False)
    D, layers = settings.count("head_dim", 256), settings.count("num_hidden_layers", high=DEEPEST)
    every = settings.count("sliding_window_pattern", 6 if _is_third(settings) else 2)
    is_local = settings.is_local([(n + 1) % every > 0 for n in range(layers)])
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
        activation=settings.activation("hidden_activation", "gelu_pytorch_tanh"),
        is_tied=settings.flag("tie_word_embeddings", True),
        ropes=tuple(ropes[local] for local in is_local),
        windows=tuple(window if local else None for local in is_local),
        scale=settings.number("query_pre_attn_scalar", 256, POSITIVE) ** -0.5,
        softcap=settings.optional("attn_logit_softcapping"),
        logit_softcap=settings.optional("final_logit_softcapping"),
    )  # fmt: skip


def _is_third(settings: Settings) -> bool:
    return settings.text("model_type") == "gemma3_text"
