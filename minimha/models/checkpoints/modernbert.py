"""Load ModernBERT: an encoder with rotary embedding, local layers and gated feed-forwards.

Warner et al., "Smarter, Better, Faster, Longer", 2024 (ModernBERT). Layers are pre-norm, and norms
have no biases by default. The first layer's attention has no norm, since the embeddings are
normalised.
"""

from __future__ import annotations

import numpy as np

from minimha.layers.norms import LayerNorm
from minimha.models.checkpoints.mixtures import gated
from minimha.models.checkpoints.settings import DEEPEST, GLOBAL, LOCAL, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.encoder import Encoder, MaskedHead
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer

# Names of the bases of RoPE before transformers 5, and those that other families have.
BASES = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Encoder:
    """Build a ModernBERT from its settings and tensors."""
    config = read_config(settings)
    V, E, F = config.vocabulary, config.d_model, config.d_ff
    tensors.add_prefix("model.", "embeddings.tok_embeddings.weight")
    tokens = tensors.matrix("model.embeddings.tok_embeddings.weight", V, E)
    has_bias, has_mlp_bias, has_norm_bias, has_head_bias = (
        settings.flag(f"{part}_bias", False) for part in ("attention", "mlp", "norm", "classifier")
    )

    def norm(name: str) -> LayerNorm:
        gain = tensors.take(f"{name}.weight", E)
        bias = tensors.take(f"{name}.bias", E) if has_norm_bias else np.zeros_like(gain)
        return LayerNorm(gain, bias, config.epsilon)

    def layer(n: int) -> Layer:
        at = f"model.layers.{n}"
        for part in ("weight", "bias")[: 1 + has_bias]:
            tensors.split(f"{at}.attn", f"Wqkv.{part}", dict.fromkeys("qkv", E))
        for part in ("weight", "bias")[: 1 + has_mlp_bias]:
            tensors.split(f"{at}.mlp", f"Wi.{part}", {"gate": F, "up": F})
        names = [f"{at}.attn.{name}" for name in ("q", "k", "v", "Wo")]
        return Layer(
            norm(f"{at}.attn_norm") if n else None,
            tensors.attention(config, names, "qkvo" if has_bias else "", rope=config.ropes[n]),
            norm(f"{at}.mlp_norm"),
            gated(config, tensors, f"{at}.mlp", F, ("gate", "up", "Wo"), has_mlp_bias),
            window=config.windows[n],
        )

    def head() -> MaskedHead:
        own = tensors.linear("in", "head.dense", E, E, has_head_bias)
        has_own = settings.flag("decoder_bias", True)
        return MaskedHead(
            own["W_in"], own.get("b_in", np.zeros(E, np.float32)), norm("head.norm"),
            tensors.tied("decoder.weight", tokens, config.is_tied).T,
            tensors.take("decoder.bias", V) if has_own else np.zeros(V, np.float32),
        )  # fmt: skip

    return Encoder(
        config, Embeddings(tokens), norm("model.embeddings.norm"),
        [layer(n) for n in range(config.num_layers)],
        head() if "head.dense.weight" in tensors else None, tokenizer, norm("model.final_norm"),
    )  # fmt: skip


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a ModernBERT from its config.json."""
    given = {ours: settings.get(theirs) for theirs, ours in BASES.items()}
    settings = Settings({**given, **settings.values}, settings.name)
    settings.expect("rope_scaling", None)
    activation = settings.activation("hidden_activation", "gelu")
    if settings.activation("classifier_activation", "gelu") != activation:
        raise ValueError(
            f"{settings.name}'s classifier_activation is not its hidden_activation: only one for "
            f"the head and all layers is implemented"
        )
    layers = settings.count("num_hidden_layers", high=DEEPEST)
    H, D = (
        settings.count("num_attention_heads"),
        settings.quotient("hidden_size", "num_attention_heads"),
    )
    every = settings.count("global_attn_every_n_layers", 3)
    local = settings.is_local([n % every > 0 for n in range(layers)])
    ropes = settings.rope(D, GLOBAL, 160000.0), settings.rope(D, LOCAL)
    window = 2 * (settings.count("local_attention", 128, low=0) // 2) + 1
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=settings.count("hidden_size"), num_heads=H, num_kv_heads=H,
        head_dim=D,
        d_ff=settings.count("intermediate_size"),
        max_length=settings.count("max_position_embeddings"),
        epsilon=settings.number("norm_eps", 1e-5, 0),
        activation=activation,
        is_tied=settings.flag("tie_word_embeddings", True),
        ropes=tuple(ropes[is_local] for is_local in local),
        windows=tuple(window if is_local else None for is_local in local),
    )  # fmt: skip
