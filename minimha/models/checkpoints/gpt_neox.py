"""Load GPT-NeoX and Pythia: attention parallel to the feed-forward, and partial RoPE.

Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023. One matrix has the queries,
keys and values of the first head, then those of the second, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minimha.equations.stored import Stored
from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.models.checkpoints.settings import DEEPEST, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """Build a GPT-NeoX model from its settings and tensors."""
    config = read_config(settings)
    tensors.add_prefix("gpt_neox.", "embed_in.weight")
    tensors.rename({"embed_out.": "lm_head."})
    tokens = tensors.matrix("gpt_neox.embed_in.weight", config.vocabulary, config.d_model)
    return Transformer(
        config,
        Embeddings(tokens),
        [
            _block(settings, config, tensors, f"gpt_neox.layers.{n}")
            for n in range(config.num_layers)
        ],
        tensors.layer_norm("gpt_neox.final_layer_norm", config.d_model, config.epsilon),
        tensors.unembedding(tokens, config.is_tied),
        tokenizer,
    )


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a GPT-NeoX model from its config.json."""
    H, layers = (
        settings.count("num_attention_heads"),
        settings.count("num_hidden_layers", high=DEEPEST),
    )
    D = settings.quotient("hidden_size", "num_attention_heads")
    base, part = settings.number("rotary_emb_base", 1e4), settings.number("rotary_pct", 0.25)
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=settings.count("hidden_size"), num_heads=H, num_kv_heads=H,
        head_dim=D,
        d_ff=settings.count("intermediate_size"),
        max_length=settings.longest(),
        epsilon=settings.number("layer_norm_eps", 1e-5, 0),
        activation=settings.activation("hidden_act", "gelu"),
        is_tied=settings.flag("tie_word_embeddings", False),
        ropes=(settings.rope(D, base=base, partial=part),) * layers, windows=(None,) * layers,
    )  # fmt: skip


def _block(settings: Settings, config: Config, tensors: Tensors, at: str) -> Layer:
    E, F = config.d_model, config.d_ff
    first, second = (
        tensors.layer_norm(f"{at}.{name}_layernorm", E, config.epsilon)
        for name in ("input", "post_attention")
    )
    feed_forward = FeedForward(
        activation=config.activation,
        **tensors.linear("in", f"{at}.mlp.dense_h_to_4h", E, F, has_bias=True),
        **tensors.linear("out", f"{at}.mlp.dense_4h_to_h", F, E, has_bias=True),
    )
    attention = _attention(
        config, tensors, f"{at}.attention", settings.flag("attention_bias", True)
    )
    is_parallel = settings.flag("use_parallel_residual", True)
    return Layer(first, attention, second, feed_forward, is_parallel=is_parallel)


def _attention(config: Config, tensors: Tensors, at: str, has_bias: bool) -> MultiHeadAttention:
    E, H = config.d_model, config.num_heads
    given: dict[str, Any] = tensors.linear("o", f"{at}.dense", E, E, has_bias)
    for name, W in tensors.linear("", f"{at}.query_key_value", E, 3 * E, has_bias).items():
        by_head = np.arange(3 * E).reshape(H, 3, config.head_dim)
        for number, letter in enumerate("qkv"):
            own = by_head[:, number].ravel()
            part = W.T.reordered(own).T if isinstance(W, Stored) else W[..., own]
            given[f"{name}{letter}"] = part
    return MultiHeadAttention.from_combined(**given, num_heads=H, rope=config.ropes[0])
