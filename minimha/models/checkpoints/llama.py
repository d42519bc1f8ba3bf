"""Load LLaMA and its successors: RMSNorm, RoPE, grouped heads, a gated feed-forward.

Touvron et al., "LLaMA", 2023; Llama Team, "The Llama 3 Herd of Models", 2024; Jiang et al.,
"Mistral 7B", 2023 (a sliding window); Qwen Team, "Qwen2", 2024 (biases of queries, keys and
values), and "Qwen3", 2025 (normalised queries and keys). SmolLM is a LLaMA. Abdin et al., "Phi-3
Technical Report", 2024 (one matrix for queries, keys and values, one for gates and inputs). Team
OLMo, "2 OLMo 2 Furious", 2024, and "OLMo 3", 2025 (norms of outputs; scaled RoPE in global layers).
SmolLM 3 has layers without RoPE (Yang et al., "Rope to Nope and Back Again", 2025). DeepSeek's
attention is in ``latent``, and the gated delta nets of Qwen3-Next are in ``delta``.
"""

from __future__ import annotations

from typing import Any, Literal

from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import RMSNorm
from minimha.layers.rope import RoPE
from minimha.models.checkpoints import delta, latent
from minimha.models.checkpoints.delta import DELTA
from minimha.models.checkpoints.latent import LATENT
from minimha.models.checkpoints.mixtures import GATED, experts, gated, groups, is_mixture
from minimha.models.checkpoints.settings import DEEPEST, KINDS, LOCAL, Settings
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.layer import Layer
from minimha.models.tokens import Tokenizer
from minimha.models.transformer import Transformer

# Families that normalise queries and keys: each head, or all heads together.
NORMED: dict[str, Literal["head", "full"]] = {"qwen3": "head", "olmo2": "full", "olmo3": "full"}
NORMED |= {"qwen3_moe": "head", "olmoe": "full", **dict.fromkeys(DELTA, "head")}
BIASED = ("qwen2", "qwen2_moe")  # families whose queries, keys and values have biases
NORMED_AFTER = ("olmo2", "olmo3")  # families that normalise the parts' outputs, not their inputs
ONE_WINDOW = ("mistral", "phi3", "mixtral")  # families in which all layers have the same window
WINDOWED = (*ONE_WINDOW, "olmo3", "gpt_oss")  # families whose windows need no further setting
FUSED = ("phi3",)  # families that store several matrices as one
MOST_FURTHER = 16  # layers that predict words after the next one, which are not loaded
# What a setting means that is missing, where this is not LLaMA's default.
DEFAULTS: dict[str, dict[str, Any]] = {
    **{kind: {"rms_norm_eps": 1e-5} for kind in ("phi3", "olmo2", "olmoe")},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {"num_experts_per_tok": 4},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
    },
    "smollm3": {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True,
        "num_experts_per_tok": 10,
    },
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "deepseek_v2": {
        "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
        "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip
DEFAULTS["deepseek_v32"] = DEFAULTS["deepseek_v3"] | {"q_lora_rank": 1536}


def transformer(
    settings: Settings, tensors: Tensors, tokenizer: Tokenizer | None = None
) -> Transformer:
    """Build a LLaMA-like model from its settings and tensors."""
    if settings.text("model_type") in ("qwen3_5", *DELTA):
        tensors.rename(delta.PREFIXES)
    settings = _filled(settings)
    config = read_config(settings)
    kind, has_mlp_biases = config.architecture, settings.flag("mlp_bias", False)
    tensors.add_prefix("model.", "embed_tokens.weight")
    tokens = tensors.matrix("model.embed_tokens.weight", config.vocabulary, config.d_model)

    if kind in FUSED:
        _split(config, tensors)
    further = settings.count("num_nextn_predict_layers", 0, 0, MOST_FURTHER)
    first = config.num_layers
    tensors.rename({f"model.layers.{n}.": None for n in range(first, first + further)})

    def norm(name: str) -> RMSNorm:
        found = tensors.rms_norm(f"model.{name}", config.d_model, config.epsilon)
        return RMSNorm(1 + found.gain, found.epsilon) if kind in DELTA else found

    def block(n: int) -> Layer:
        at = f"layers.{n}"
        is_after = kind in NORMED_AFTER
        names = ("post_attention", "post_feedforward" if is_after else "input")
        second, other = (norm(f"{at}.{name}_layernorm") for name in names)
        return Layer(
            None if is_after else other,
            _attention(settings, config, tensors, n),
            None if is_after else second,
            experts(settings, config, tensors, n)
            if is_mixture(settings, n)
            else feed_forward(config, tensors, n, has_mlp_biases),
            second if is_after else None,
            other if is_after else None,
            window=config.windows[n],
            sinks=tensors.take(f"model.{at}.self_attn.sinks", config.num_heads)
            if kind == "gpt_oss"
            else None,
        )

    return Transformer(
        config,
        Embeddings(tokens),
        [block(n) for n in range(config.num_layers)],
        norm("norm"),
        tensors.unembedding(tokens, config.is_tied),
        tokenizer,
    )


def _attention(settings: Settings, config: Config, tensors: Tensors, n: int) -> Any:
    """Return the attention of layer n, or what this family has in its place."""
    kind, has_biases = config.architecture, settings.flag("attention_bias", False)
    if delta.is_delta(settings)[n]:
        return delta.layer(settings, config, tensors, n)
    if kind in LATENT:
        return latent.attention(settings, config, tensors, n, has_biases)
    has_own = kind in BIASED and settings.flag("qkv_bias", True)
    with_bias = "qkvo" if has_biases else "qkv" if has_own else ""
    others: dict[str, Any] = {"clip": settings.optional("clip_qkv") if kind == "olmoe" else None}
    if kind in DELTA:
        others |= delta.gate(config, tensors, n, has_biases)
    return attention(config, tensors, n, with_bias, NORMED.get(kind), kind in DELTA, **others)


def read_config(settings: Settings) -> Config:
    """Return the sizes and settings of a LLaMA-like model from its config.json."""
    settings = _filled(settings)
    E, H, scale = settings.count("hidden_size"), settings.count("num_attention_heads"), None
    if settings.text("model_type") in LATENT:
        D, scale, _ = latent.head_dim(settings), latent.scale(settings), groups(settings)
        settings.expect("mlp_bias", False)
        is_mixture(settings, 0)  # checks mlp_layer_types
    elif settings.get("head_dim") is None:
        D = settings.quotient("hidden_size", "num_attention_heads")
    else:
        D = settings.count("head_dim")
    layers = settings.count("num_hidden_layers", high=DEEPEST)
    windows = _windows(settings, layers)
    return Config(
        architecture=settings.text("model_type"),
        vocabulary=settings.count("vocab_size"),
        num_layers=layers, d_model=E, num_heads=H,
        num_kv_heads=settings.count("num_key_value_heads", H),
        head_dim=D, scale=scale,
        d_ff=settings.count("intermediate_size"),
        max_length=settings.longest(),
        epsilon=settings.number("rms_norm_eps", 1e-6, 0),
        activation=settings.activation("hidden_act", "silu"),
        is_tied=settings.flag("tie_word_embeddings", False),
        ropes=_ropes(settings, D, windows),
        windows=windows,
    )  # fmt: skip


def _may_be_local(settings: Settings, layers: int) -> list[bool]:
    """Return which layers have a window, if the model has one; in SmolLM 3, those without RoPE."""
    kind, first = settings.text("model_type"), settings.count("max_window_layers", 28, low=0)
    if kind == "smollm3":
        return [not has_rope for has_rope in _has_rope(settings, layers)]
    every = {"gpt_oss": 2, "olmo3": 4, "qwen2_moe": 2, "qwen3_moe": layers + 1}.get(kind, 1)
    last = first if kind == "qwen2_moe" else layers
    return [(n + 1) % every > 0 and n < last if every > 1 else n >= first for n in range(layers)]


def _has_rope(settings: Settings, layers: int) -> list[bool]:
    """Return which layers have RoPE: SmolLM 3's no_rope_layers, where 0 means no RoPE."""
    every = settings.count("no_rope_layer_interval", 4)
    given = settings.get("no_rope_layers")
    if given is None:
        return [(n + 1) % every > 0 for n in range(layers)]
    is_listed = isinstance(given, list | tuple) and all(has in (0, 1) for has in given)
    if not is_listed or len(given) != layers:
        named = f"{settings.name}'s no_rope_layers is {given!r}"
        raise ValueError(f"{named}: expected 0 or 1 for each of {layers} layers")
    return [has == 1 for has in given]


def _ropes(settings: Settings, D: int, windows: tuple[int | None, ...]) -> tuple[RoPE | None, ...]:
    """Return each layer's rotary embedding; OLMo 3's differs in layers with a window."""
    kind = settings.text("model_type")
    if kind in LATENT:
        return (latent.rope(settings),) * len(windows)
    rope = settings.rope(D, partial=0.25 if kind in DELTA else 1.0)
    if kind == "smollm3":
        return tuple(rope if has else None for has in _has_rope(settings, len(windows)))
    if kind != "olmo3":
        return tuple(None if other else rope for other in delta.is_delta(settings))
    local = settings.rope(D, LOCAL, base=settings.number("rope_theta"))
    return tuple(rope if window is None else local for window in windows)


def _split(config: Config, tensors: Tensors) -> None:
    """Split fused matrices, and give the parts the names of LLaMA's matrices."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for n in range(config.num_layers):
        at = f"model.layers.{n}"
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        tensors.split(f"{at}.self_attn", "qkv_proj.weight", rows)
        tensors.split(f"{at}.mlp", "gate_up_proj.weight", dict.fromkeys(GATED[:2], config.d_ff))


def _filled(settings: Settings) -> Settings:
    if settings.text("model_type") == "qwen3_5":
        settings = settings.of_text("qwen3_5_text")
    return settings.with_defaults(DEFAULTS.get(settings.text("model_type"), {}))


def _windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: Mistral has one for all layers, Qwen in later layers."""
    kind, window = settings.text("model_type"), None
    if kind in DELTA:
        return (None,) * layers
    is_used = kind in WINDOWED or settings.flag("use_sliding_window", False)
    if is_used and settings.get("sliding_window") is not None:
        window = settings.count("sliding_window")
    if kind == "deepseek_v32":
        settings.expect("layer_types", None, ["indexed_attention"] * layers)
        return (None,) * layers
    if kind in ONE_WINDOW:
        settings.expect("layer_types", None, [KINDS[window is None]] * layers)
        return (window,) * layers
    may_be_local = _may_be_local(settings, layers)
    is_local = settings.is_local([window is not None and local for local in may_be_local])
    if window is None and any(is_local):
        why = "but use_sliding_window is not true, or there is no sliding_window"
        raise ValueError(f"{settings.name}'s layer_types has {LOCAL}, {why}")
    return tuple(window if local else None for local in is_local)


def attention(
    config: Config, tensors: Tensors, n: int, with_bias: str = "",
    qk_norm: Literal["head", "full"] | None = None, added_gain: float = 0.0, **others: Any,
) -> MultiHeadAttention:  # fmt: skip
    """Build the attention of layer n from its tensors.

    ``with_bias`` lists the matrices with a bias, such as "qkv". ``added_gain`` is added to the
    gains of the query and key norms. Other arguments are those of ``MultiHeadAttention``.
    """
    at = f"model.layers.{n}.self_attn"
    others["rope"] = config.ropes[n]
    if qk_norm is not None:
        others |= {"qk_norm": qk_norm, "epsilon": config.epsilon}
        for letter, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            width = config.head_dim * (heads if qk_norm == "full" else 1)
            gain = tensors.take(f"{at}.{letter}_norm.weight", width)
            others[f"g_{letter}"] = added_gain + gain
    names = [f"{at}.{letter}_proj" for letter in "qkvo"]
    return tensors.attention(config, names, with_bias, **others)


def feed_forward(config: Config, tensors: Tensors, n: int, has_biases: bool = False) -> FeedForward:
    """Build the gated feed-forward of layer n from its tensors."""
    return gated(config, tensors, f"model.layers.{n}.mlp", config.d_ff, has_biases=has_biases)
