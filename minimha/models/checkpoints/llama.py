"""LLaMA and those that follow it: RMSNorm, rotary positions, grouped heads, a gated feed-forward.

Touvron et al., "LLaMA", 2023; Llama Team, "The Llama 3 Herd of Models", 2024; Jiang et al.,
"Mistral 7B", 2023 (a sliding window); Qwen Team, "Qwen2", 2024 (biases of queries, keys and
values), and "Qwen3", 2025 (normalised queries and keys). SmolLM is a LLaMA.
"""

from __future__ import annotations

from typing import Any

from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import RMSNorm
from minimha.models.checkpoints.settings import DEEPEST, KINDS, LOCAL, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer

NORMED = ("qwen3",)  # whose queries and keys are normalised


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """The model of these settings and tensors."""
    config = read_config(settings)
    has_biases, has_mlp_biases = (
        settings.flag(key, False) for key in ("attention_bias", "mlp_bias")
    )
    with_bias = "qkvo" if has_biases else "qkv" if config.architecture == "qwen2" else ""
    is_bare = tensors.with_prefix("model.", "embed_tokens.weight")
    tokens = tensors.take("model.embed_tokens.weight", config.vocabulary, config.d_model)

    def block(n: int) -> Layer:
        at = f"model.layers.{n}"
        return Layer(
            norm(config, tensors, f"{at}.input_layernorm"),
            attention(config, tensors, n, with_bias, 0 if config.architecture in NORMED else None),
            norm(config, tensors, f"{at}.post_attention_layernorm"),
            feed_forward(config, tensors, n, has_mlp_biases),
            window=config.windows[n],
        )

    return Transformer(
        config,
        Embeddings(tokens),
        [block(n) for n in range(config.num_layers)],
        norm(config, tensors, "model.norm"),
        None if is_bare and not config.is_tied
        else tensors.tied("lm_head.weight", tokens, config.is_tied).T,
        tokenizer,
    )  # fmt: skip


def read_config(settings: Settings) -> Config:
    """What the settings mean."""
    E, H = settings.count("hidden_size"), settings.count("num_attention_heads")
    if settings.get("head_dim") is None:
        D = settings.quotient("hidden_size", "num_attention_heads")
    else:
        D = settings.count("head_dim")
    layers = settings.count("num_hidden_layers", high=DEEPEST)
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=E, num_heads=H,
        num_kv_heads=settings.count("num_key_value_heads", H),
        head_dim=D,
        d_ff=settings.count("intermediate_size"),
        max_length=settings.count("max_position_embeddings"),
        epsilon=settings.number("rms_norm_eps", 1e-6, 0),
        activation=settings.activation("hidden_act", "silu"),
        is_tied=settings.flag("tie_word_embeddings", False),
        ropes=(settings.rope(D),) * layers,
        windows=_windows(settings, layers),
    )  # fmt: skip


def _windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    """Mistral's window is every layer's; Qwen's, if used, that of the layers above some."""
    window = None if settings.get("sliding_window") is None else settings.count("sliding_window")
    if settings.text("model_type") == "mistral":
        settings.expect("layer_types", None, [KINDS[window is None]] * layers)
        return (window,) * layers
    if not settings.flag("use_sliding_window", False):
        window = None
    first = settings.count("max_window_layers", 28, low=0)
    is_local = settings.is_local([window is not None and n >= first for n in range(layers)])
    if window is None and any(is_local):
        why = "but use_sliding_window is not true, or there is no sliding_window"
        raise ValueError(f"{settings.name}'s layer_types has {LOCAL}, {why}")
    return tuple(window if local else None for local in is_local)


def norm(config: Config, tensors: Tensors, name: str) -> RMSNorm:
    """The normalisation of that name."""
    return RMSNorm(tensors.take(f"{name}.weight", config.d_model), config.epsilon)


def attention(
    config: Config, tensors: Tensors, n: int, with_bias: str = "", added_gain: float | None = None
) -> MultiHeadAttention:
    """The attention of layer n.

    ``with_bias`` are the letters of the matrices that have a bias. If queries and keys are
    normalised, ``added_gain`` is what is added to the gains in the checkpoint.
    """
    at, E, D = f"model.layers.{n}.self_attn", config.d_model, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    others: dict[str, Any] = {}
    for letter, rows, columns in (
        ("q", E, queries), ("k", E, keys), ("v", E, keys), ("o", queries, E)
    ):  # fmt: skip
        name = f"{at}.{letter}_proj"
        others |= tensors.linear(letter, name, rows, columns, letter in with_bias)
    if added_gain is not None:
        others |= {"qk_norm": "head", "epsilon": config.epsilon}
        for letter in "qk":
            others[f"g_{letter}"] = added_gain + tensors.take(f"{at}.{letter}_norm.weight", D)
    return MultiHeadAttention.from_combined(
        **others, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        rope=config.ropes[n],
    )  # fmt: skip


def feed_forward(config: Config, tensors: Tensors, n: int, has_biases: bool = False) -> FeedForward:
    """The feed-forward of layer n."""
    at, E, F = f"model.layers.{n}.mlp", config.d_model, config.d_ff
    return FeedForward(
        activation=config.activation,
        **tensors.linear("gate", f"{at}.gate_proj", E, F, has_biases),
        **tensors.linear("in", f"{at}.up_proj", E, F, has_biases),
        **tensors.linear("out", f"{at}.down_proj", F, E, has_biases),
    )
