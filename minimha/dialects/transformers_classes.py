"""Conventions of transformers' attention classes: names of weights, rotation, scale and masks.

``CONVENTIONS`` has one row per kind of module, with the names of its classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minimha.layers.projections import Norm

Config = Mapping[str, Any]

MASKS = ("attention_mask", "mask", "encoder_attention_mask")
CONTEXTS = ("encoder_hidden_states", "key_value_states")


@dataclass(frozen=True)
class Rotary:
    """How a class rotates: its pairs of numbers, and how ``position_embeddings`` store angles."""

    is_interleaved: bool = False  # pairs (2i, 2i + 1) rather than (i, i + R/2)
    stored: str = "halves"  # angles 0 1 0 1, or "pairs" 0 0 1 1, or "once" 0 1


@dataclass(frozen=True)
class Convention:
    """The properties in which the kinds of transformers' attention modules differ."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str | None = "o_proj"  # None if another module mixes the heads
    qkv: str | None = None  # one weight instead of q, k and v
    groups: Callable[[Config, int], int] | None = None  # groups of heads in qkv
    is_conv1d: bool = False  # weights are (in, out)
    is_gated: bool = False  # q has queries and gate of head 0, of head 1, …
    qk_norm: Norm | None = None
    layer_norm: str | None = None  # the name of the layer norms of queries and keys, if any
    epsilon: float = 1e-6  # if the config has no rms_norm_eps
    has_unit_offset: bool = False  # gains are 1 + w
    rotary: Rotary | None = None
    is_rotated: Callable[[Config, int], bool] = lambda config, layer_idx: True  # by layer
    scale: Callable[[Config, int, int], float | None] = lambda config, head_dim, layer_idx: None
    softcap: float | None = None  # the config's default; None if the class has no cap
    hides_where_true: bool = False  # whether True in a mask hides a key
    scales_alibi: bool = False  # ALiBi is scaled like the scores
    is_cross: bool = False  # whether the module attends only to a context
    # Whether the module is causal without a mask; None if the config does not say.
    is_causal: Callable[[Config], bool | None] = lambda config: True
    takes: tuple[str, ...] = ("attention_mask",)  # arguments of forward that only some classes have

    @property
    def mask(self) -> str:
        """The name of the mask argument of ``forward``."""
        return next(name for name in MASKS if name in self.takes)

    @property
    def context(self) -> str:
        """The name of the argument of ``forward`` for cross-attention; "context" if it has none."""
        return next((name for name in CONTEXTS if name in self.takes), "context")


def _gemma_scale(config: Config, head_dim: int, layer_idx: int) -> float:
    return 1 / math.sqrt(config.get("query_pre_attn_scalar", 256))


def _gpt2_scale(config: Config, head_dim: int, layer_idx: int) -> float:
    scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer_idx + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale


def _mpt_scale(config: Config, head_dim: int, layer_idx: int) -> float | None:
    scale = (config.get("attn_config") or {}).get("softmax_scale")
    return None if scale is None else float(scale)


def _bigcode_groups(config: Config, H: int) -> int:
    return 1 if config.get("multi_query", True) else H


def _falcon_groups(config: Config, H: int) -> int:
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or H)
    return _bigcode_groups(config, H)


def _cohere2_is_rotated(config: Config, layer_idx: int) -> bool:
    if config.get("sliding_window", 4096) is None:
        return False
    if config.get("layer_types") is not None:
        return bool(config["layer_types"][layer_idx] == "sliding_attention")
    return bool((layer_idx + 1) % 4)


def _smollm3_is_rotated(config: Config, layer_idx: int) -> bool:
    if config.get("no_rope_layers") is not None:
        return bool(config["no_rope_layers"][layer_idx])
    return bool((layer_idx + 1) % config.get("no_rope_layer_interval", 4))


def _never(config: Config) -> bool:
    return False


def _in_decoder(config: Config) -> bool:
    return bool(config.get("is_decoder", False))


def _seq2seq_decoder(config: Config) -> bool | None:
    return True if config.get("is_decoder") else None  # False for encoder and decoder alike


def _gemma3_is_causal(config: Config) -> bool:
    return not config.get("use_bidirectional_attention", False)


LLAMA = Convention(rotary=Rotary(), takes=("attention_mask", "position_embeddings"))
GEMMA2 = replace(LLAMA, scale=_gemma_scale, softcap=50.0)
COHERE = replace(LLAMA, layer_norm="{}_norm", rotary=Rotary(is_interleaved=True, stored="pairs"))
NEOX = replace(LLAMA, qkv="query_key_value", groups=lambda config, H: H, o="dense")
FALCON = replace(NEOX, groups=_falcon_groups)
FALCON_ALIBI = replace(FALCON, rotary=None, scales_alibi=True, takes=("attention_mask", "alibi"))
GPT2 = Convention(qkv="c_attn", o="c_proj", is_conv1d=True, scale=_gpt2_scale)
GPT2_CROSS = replace(
    GPT2, q="q_attn", is_cross=True, is_causal=_never,
    takes=("encoder_attention_mask", "encoder_hidden_states"),
)  # fmt: skip
BART = Convention(
    o="out_proj", is_causal=_seq2seq_decoder, takes=("attention_mask", "key_value_states")
)
BERT = Convention(q="query", k="key", v="value", o=None, is_causal=_in_decoder)
CLIP = Convention(o="out_proj")
T5 = Convention(
    q="q", k="k", v="v", o="o", scale=lambda *_: 1.0,
    is_causal=lambda config: config.get("is_decoder"),
)  # fmt: skip

CONVENTIONS: list[tuple[Convention, str]] = [
    (
        LLAMA,
        "LlamaAttention AriaTextAttention ArceeAttention CsmAttention Emu3Attention "
        "GemmaAttention MinistralAttention MistralAttention MixtralAttention NemotronAttention "
        "OlmoAttention PhimoeAttention Qwen2Attention Qwen2MoeAttention StableLmAttention "
        "Starcoder2Attention",
    ),
    (replace(LLAMA, is_causal=_never), "EuroBertAttention"),
    (replace(LLAMA, scale=lambda config, *_: float(config.get("attention_multiplier", 1.0))),
     "GraniteAttention GraniteMoeAttention GraniteMoeSharedAttention"),
    (replace(LLAMA, o="dense", layer_norm="{}_layernorm"), "PhiAttention"),
    (replace(LLAMA, qkv="qkv_proj"), "Phi3Attention"),
    (replace(LLAMA, qkv="Wqkv", o="Wo", is_causal=_never), "ModernBertAttention"),
    (replace(LLAMA, is_rotated=_smollm3_is_rotated), "SmolLM3Attention"),
    (COHERE, "CohereAttention"),
    (replace(COHERE, is_rotated=_cohere2_is_rotated), "Cohere2Attention"),
    (replace(LLAMA, rotary=Rotary(is_interleaved=True)),
     "Ernie4_5Attention Ernie4_5_MoeAttention GlmAttention Glm4Attention HeliumAttention"),
    (replace(LLAMA, rotary=Rotary(stored="once")), "GptOssAttention"),
    (replace(LLAMA, qk_norm="head"), "Qwen3Attention Qwen3MoeAttention"),
    (replace(LLAMA, qk_norm="full", epsilon=1e-5),
     "Olmo2Attention Olmo3Attention OlmoeAttention"),
    (replace(LLAMA, qk_norm="full"), "FlexOlmoAttention"),
    (GEMMA2, "Gemma2Attention VaultGemmaAttention"),
    (replace(GEMMA2, is_causal=T5.is_causal), "T5GemmaSelfAttention"),
    (replace(GEMMA2, softcap=None, qk_norm="head", has_unit_offset=True,
             is_causal=_gemma3_is_causal),
     "Gemma3Attention"),
    (replace(LLAMA, qk_norm="head", has_unit_offset=True, is_gated=True),
     "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention"),
    (NEOX, "GPTNeoXAttention"),
    (replace(NEOX, layer_norm="{}_layernorm"), "PersimmonAttention"),
    (replace(LLAMA, qkv="Wqkv", o="out_proj"), "DbrxAttention"),
    (FALCON, "FalconAttention"),
    (replace(NEOX, rotary=None, takes=("attention_mask", "alibi", "residual")), "BloomAttention"),
    (Convention(
        qkv="Wqkv", o="out_proj", scale=_mpt_scale, hides_where_true=True,
        takes=("attention_mask", "position_bias")),
     "MptAttention"),
    (GPT2, "GPT2Attention DecisionTransformerGPT2Attention"),
    (Convention(qkv="c_attn", groups=_bigcode_groups, o="c_proj", scale=_gpt2_scale),
     "GPTBigCodeAttention"),
    (Convention(o="out_proj", takes=("attention_mask", "position_ids")), "GPTJAttention"),
    (BERT,
     "BertSelfAttention BertGenerationSelfAttention CamembertSelfAttention "
     "Data2VecTextSelfAttention ElectraSelfAttention ErnieSelfAttention RoCBertSelfAttention "
     "RobertaSelfAttention RobertaPreLayerNormSelfAttention XLMRobertaSelfAttention "
     "XLMRobertaXLSelfAttention XmodSelfAttention"),
    (replace(BERT, is_causal=_never),
     "AlignTextSelfAttention AltRobertaSelfAttention ChineseCLIPTextSelfAttention "
     "ClapTextSelfAttention LayoutLMSelfAttention MarkupLMSelfAttention SplinterSelfAttention"),
    (replace(
        BERT, is_cross=True, is_causal=_never, takes=("attention_mask", "encoder_hidden_states")),
     "BertCrossAttention BertGenerationCrossAttention CamembertCrossAttention "
     "Data2VecTextCrossAttention ElectraCrossAttention ErnieCrossAttention RoCBertCrossAttention "
     "RobertaCrossAttention RobertaPreLayerNormCrossAttention XLMRobertaCrossAttention "
     "XLMRobertaXLCrossAttention XmodCrossAttention"),
    (Convention(q="q_lin", k="k_lin", v="v_lin", o="out_lin", is_causal=_never),
     "DistilBertSelfAttention"),
    (Convention(is_causal=_never),
     "ViTAttention ASTAttention DeiTAttention Dinov2Attention Dinov2WithRegistersAttention "
     "IJepaAttention ViTMAEAttention ViTMSNAttention VivitAttention"),
    (CLIP, "OPTAttention"),
    (replace(CLIP, is_causal=lambda config: None),  # causal for text, not for images
     "CLIPAttention CLIPSegAttention MetaClip2Attention"),
    (replace(CLIP, is_causal=_never),
     "AltCLIPAttention ChineseCLIPVisionAttention SiglipAttention Siglip2Attention"),
    (BART,
     "BartAttention BlenderbotAttention BlenderbotSmallAttention M2M100Attention MBartAttention "
     "MarianAttention PLBartAttention PegasusAttention PegasusXAttention Speech2TextAttention "
     "WhisperAttention"),
    (replace(BART, is_causal=Convention.is_causal), "BioGptAttention MusicgenAttention"),
    (replace(BART, is_causal=_never),
     "Data2VecAudioAttention HubertAttention SEWAttention UniSpeechAttention Wav2Vec2Attention"),
    (replace(T5, takes=("mask", "key_value_states", "position_bias")),
     "T5Attention LongT5Attention MT5Attention Pop2PianoAttention SwitchTransformersAttention "
     "UdopAttention"),
    (replace(T5, takes=("attention_mask", "encoder_hidden_states")), "UMT5Attention"),
]  # fmt: skip
CLASSES = {name: convention for convention, names in CONVENTIONS for name in names.split()}


def convention_of(cls: str, params: Mapping[str, Any], config: Config) -> Convention:
    """Return the ``Convention`` of the transformers class ``cls``.

    GPT-2 and Falcon have two conventions; ``params`` and ``config`` decide between them.
    """
    if CLASSES[cls] is GPT2 and f"{GPT2_CROSS.q}.weight" in params:
        return GPT2_CROSS
    if CLASSES[cls] is FALCON and config.get("alibi"):
        return FALCON_ALIBI
    return CLASSES[cls]
