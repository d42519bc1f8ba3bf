"""Load T5: an encoder and a decoder with pre-norm RMSNorm, relative biases and unscaled scores.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
2020. Version 1.1 has a gated feed-forward and a separate unembedding.
"""

from __future__ import annotations

from typing import Any

from minimha.layers.feed_forward import Activation, FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import RMSNorm
from minimha.models.checkpoints.settings import DEEPEST, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.encoder_decoder import EncoderDecoder, RelativeBias
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer

UNEMBEDDING = "lm_head.weight"
# One table of biases serves all layers. Old checkpoints have one for cross-attention too, unused.
BIAS = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# For each feed_forward_proj: whether it is gated, and the activation.
FEED_FORWARDS: dict[str, tuple[bool, Activation]] = {
    "relu": (False, "relu"), "gated-gelu": (True, "gelu_tanh"), "gated-silu": (True, "silu"),
}  # fmt: skip


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> EncoderDecoder:
    """Build a T5 from its settings and tensors."""
    config = read_config(settings, is_tied=UNEMBEDDING not in tensors)
    V, E, H = config.vocabulary, config.d_model, config.num_heads
    tokens = tensors.matrix("shared.weight", V, E)
    for side in ("encoder", "decoder"):
        tensors.tied(f"{side}.embed_tokens.weight", tokens)  # old checkpoints repeat it
    tensors.leave(UNUSED)
    buckets = settings.count("relative_attention_num_buckets", 32)
    distance = settings.count("relative_attention_max_distance", 128)

    def bias(side: str) -> RelativeBias:
        table = tensors.take(BIAS.format(side), buckets, H)
        return RelativeBias(table, distance, bidirectional=side == "encoder")

    def norm(name: str) -> RMSNorm:
        return tensors.rms_norm(name, E, config.epsilon)

    def attention(at: str) -> MultiHeadAttention:
        return tensors.attention(config, [f"{at}.{letter}" for letter in "qkvo"])

    def layer(at: str, last: int = 1, **cross: Any) -> Layer:
        return Layer(
            norm(f"{at}.layer.0.layer_norm"),
            attention(f"{at}.layer.0.SelfAttention"),
            norm(f"{at}.layer.{last}.layer_norm"),
            _feed_forward(config, tensors, f"{at}.layer.{last}.DenseReluDense", settings),
            scale=1.0, **cross,
        )  # fmt: skip

    def decoder(at: str) -> Layer:
        cross = attention(f"{at}.layer.1.EncDecAttention")
        return layer(at, 2, cross=cross, cross_norm=norm(f"{at}.layer.1.layer_norm"))

    is_scaled = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    decoders = settings.count("num_decoder_layers", config.num_layers, high=DEEPEST)
    embeddings = Embeddings(tokens)
    return EncoderDecoder(
        config, embeddings, embeddings,
        [layer(f"encoder.block.{n}") for n in range(config.num_layers)],
        [decoder(f"decoder.block.{n}") for n in range(decoders)],
        tokens.T if config.is_tied else tensors.matrix(UNEMBEDDING, V, E).T,
        norm("encoder.final_layer_norm"), norm("decoder.final_layer_norm"),
        bias("encoder"), bias("decoder"),
        output_scale=E**-0.5 if is_scaled else 1.0,
        start=settings.count("decoder_start_token_id", 0, 0, V - 1),
        tokenizer=tokenizer,
    )  # fmt: skip


def read_config(settings: Settings, is_tied: bool = True) -> Config:
    """Return the sizes and settings of a T5.

    In the result, ``num_layers`` is the number of the encoder's layers. ``is_tied`` states whether
    the unembedding is the transposed token embedding.
    """
    kind = settings.text("feed_forward_proj", "relu")
    layers = settings.count("num_layers", high=DEEPEST)
    if kind not in FEED_FORWARDS:
        raise ValueError(
            f"{settings.name}'s feed_forward_proj is {kind!r}: expected one of "
            f"{', '.join(FEED_FORWARDS)}"
        )
    H = settings.count("num_heads")
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=settings.count("d_model"), num_heads=H, num_kv_heads=H,
        head_dim=settings.count("d_kv"), d_ff=settings.count("d_ff"),
        max_length=settings.count("n_positions", 512),
        epsilon=settings.number("layer_norm_epsilon", 1e-6, 0),
        activation=FEED_FORWARDS[kind][1],
        is_tied=is_tied, ropes=(None,) * layers, windows=(None,) * layers,
    )  # fmt: skip


def _feed_forward(config: Config, tensors: Tensors, at: str, settings: Settings) -> FeedForward:
    E, F = config.d_model, config.d_ff
    is_gated, _ = FEED_FORWARDS[settings.text("feed_forward_proj", "relu")]
    weights = tensors.linear("out", f"{at}.wo", F, E)
    if is_gated:
        weights |= tensors.linear("gate", f"{at}.wi_0", E, F)
        weights |= tensors.linear("in", f"{at}.wi_1", E, F)
    else:
        weights |= tensors.linear("in", f"{at}.wi", E, F)
    return FeedForward(activation=config.activation, **weights)
