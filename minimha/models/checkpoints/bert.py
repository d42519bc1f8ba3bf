"""Load BERT and RoBERTa: encoders with learned positions, sentence types, and post-norm layers.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019. Liu et al., "RoBERTa",
2019, has the same layers; its first position is the padding token's id + 1. Conneau et al.,
"XLM-R", 2020, and Martin et al., "CamemBERT", 2020, have RoBERTa's architecture.
"""

from __future__ import annotations

from typing import Any

from minimha.layers.feed_forward import FeedForward
from minimha.models.checkpoints.settings import DEEPEST, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.encoder import Encoder, MaskedHead
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer

# Of BERT and of RoBERTa: the prefix of names in a checkpoint with a head, and the head's names.
PREFIX = "bert.", "roberta."
PREDICTIONS = "cls.predictions", "lm_head"
TRANSFORM = "transform.dense", "dense"
NORM = "transform.LayerNorm", "layer_norm"
OF_SENTENCES = ("pooler.dense", "cls.seq_relationship")  # heads of the first token alone


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Encoder:
    """Build a BERT or RoBERTa from its settings and tensors."""
    config = read_config(settings)
    V, E, P = config.vocabulary, config.d_model, settings.count("max_position_embeddings")
    kind = int(config.architecture != "bert")
    at = PREFIX[kind] if f"{PREFIX[kind]}embeddings.word_embeddings.weight" in tensors else ""
    tokens = tensors.matrix(f"{at}embeddings.word_embeddings.weight", V, E)
    types = settings.count("type_vocab_size", 2)
    for name in (f"{at}{OF_SENTENCES[0]}", OF_SENTENCES[1]):
        tensors.leave(f"{name}.weight", f"{name}.bias")
    tensors.leave(f"{at}embeddings.position_ids")
    return Encoder(
        config,
        Embeddings(
            tokens,
            tensors.take(f"{at}embeddings.position_embeddings.weight", P, E)[-config.max_length :],
            types=tensors.take(f"{at}embeddings.token_type_embeddings.weight", types, E),
        ),
        tensors.layer_norm(f"{at}embeddings.LayerNorm", config.d_model, config.epsilon),
        [_layer(config, tensors, f"{at}encoder.layer.{n}") for n in range(config.num_layers)],
        _head(config, tensors, tokens, kind) if f"{PREDICTIONS[kind]}.bias" in tensors else None,
        tokenizer,
    )  # fmt: skip


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a BERT or RoBERTa from its config.json."""
    settings.expect("position_embedding_type", "absolute", None)
    settings.expect("is_decoder", False)
    layers = settings.count("num_hidden_layers", high=DEEPEST)
    H = settings.count("num_attention_heads")
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=settings.count("hidden_size"), num_heads=H, num_kv_heads=H,
        head_dim=settings.quotient("hidden_size", "num_attention_heads"),
        d_ff=settings.count("intermediate_size"),
        max_length=_length(settings),
        epsilon=settings.number("layer_norm_eps", 1e-12, 0),
        activation=settings.activation("hidden_act", "gelu"),
        is_tied=settings.flag("tie_word_embeddings", True),
        ropes=(None,) * layers, windows=(None,) * layers,
    )  # fmt: skip


def _length(settings: Settings) -> int:
    """Return the number of positions for tokens; RoBERTa's start after the padding token's."""
    length = settings.count("max_position_embeddings")
    if settings.text("model_type") == "bert":
        return length
    return length - 1 - settings.count("pad_token_id", 1, low=0, high=length - 2)


def _layer(config: Config, tensors: Tensors, at: str) -> Layer:
    E, F = config.d_model, config.d_ff
    parts = ("self.query", "self.key", "self.value", "output.dense")
    return Layer(
        tensors.layer_norm(f"{at}.attention.output.LayerNorm", E, config.epsilon),
        tensors.attention(config, [f"{at}.attention.{part}" for part in parts], "qkvo"),
        tensors.layer_norm(f"{at}.output.LayerNorm", E, config.epsilon),
        FeedForward(
            activation=config.activation,
            **tensors.linear("in", f"{at}.intermediate.dense", E, F, has_bias=True),
            **tensors.linear("out", f"{at}.output.dense", F, E, has_bias=True),
        ),
        norm_first=False,
    )


def _head(config: Config, tensors: Tensors, tokens: Any, kind: int) -> MaskedHead:
    E, V, at = config.d_model, config.vocabulary, PREDICTIONS[kind]
    transform = tensors.linear("in", f"{at}.{TRANSFORM[kind]}", E, E, has_bias=True)
    bias, own = tensors.take(f"{at}.bias", V), f"{at}.decoder.bias"
    return MaskedHead(
        transform["W_in"],
        transform["b_in"],
        tensors.layer_norm(f"{at}.{NORM[kind]}", config.d_model, config.epsilon),
        tensors.tied(f"{at}.decoder.weight", tokens, config.is_tied).T,
        tensors.tied(own, bias, config.is_tied or own not in tensors),
    )
