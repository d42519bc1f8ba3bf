"""Load GPT-2: learned positions, layer norms, one matrix for queries, keys and values.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Files store W for
x @ W, whereas those of other models store its transpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.models.checkpoints.settings import DEEPEST, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer

PREFIX = "transformer."  # of the names in most checkpoints; early ones have none


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """Build a GPT-2 from its settings and tensors."""
    config = read_config(settings)
    V, E, P = config.vocabulary, config.d_model, config.max_length
    at = PREFIX if f"{PREFIX}wte.weight" in tensors else ""
    tokens = tensors.matrix(f"{at}wte.weight", V, E)
    positions = tensors.take(f"{at}wpe.weight", P, E)
    return Transformer(
        config,
        Embeddings(tokens, positions),
        [_block(config, tensors, f"{at}h.{n}.") for n in range(config.num_layers)],
        tensors.layer_norm(f"{at}ln_f", config.d_model, config.epsilon),
        tensors.unembedding(tokens, config.is_tied),
        tokenizer,
    )


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a GPT-2 from its config.json."""
    settings.expect("add_cross_attention", False)
    settings.expect("scale_attn_weights", True)
    settings.expect("scale_attn_by_inverse_layer_idx", False)
    E, H = settings.count("n_embd"), settings.count("n_head")
    layers = settings.count("n_layer", high=DEEPEST)
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=E, num_heads=H, num_kv_heads=H,
        head_dim=settings.quotient("n_embd", "n_head"),
        d_ff=settings.count("n_inner", 4 * E),
        max_length=settings.count("n_positions"),
        epsilon=settings.number("layer_norm_epsilon", 1e-5, 0),
        activation=settings.activation("activation_function", "gelu_new"),
        is_tied=settings.flag("tie_word_embeddings", True),
        ropes=(None,) * layers, windows=(None,) * layers,
    )  # fmt: skip


def _block(config: Config, tensors: Tensors, at: str) -> Layer:
    E, F = config.d_model, config.d_ff

    def matrix(name: str, rows: int, columns: int) -> Any:
        return tensors.matrix(f"{at}{name}.weight", rows, columns)

    whole = matrix("attn.c_attn", E, 3 * E)
    W_q, W_k, W_v = (whole[:, n * E : (n + 1) * E] for n in range(3))
    b_q, b_k, b_v = np.split(tensors.take(f"{at}attn.c_attn.bias", 3 * E), 3)
    attention = MultiHeadAttention.from_combined(
        W_q, W_k, W_v, matrix("attn.c_proj", E, E), num_heads=config.num_heads,
        b_q=b_q, b_k=b_k, b_v=b_v, b_o=tensors.take(f"{at}attn.c_proj.bias", E),
    )  # fmt: skip
    feed_forward = FeedForward(
        W_in=matrix("mlp.c_fc", E, F),
        b_in=tensors.take(f"{at}mlp.c_fc.bias", F),
        W_out=matrix("mlp.c_proj", F, E),
        b_out=tensors.take(f"{at}mlp.c_proj.bias", E),
        activation=config.activation,
    )
    norms = [tensors.layer_norm(f"{at}ln_{n}", E, config.epsilon) for n in (1, 2)]
    return Layer(norms[0], attention, norms[1], feed_forward)
