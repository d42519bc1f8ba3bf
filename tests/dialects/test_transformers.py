"""transformers' attention modules: compared with the library itself and with loops over heads."""

import inspect
import math
import re
from copy import copy
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from whole_models import whole_model

from minimha.dialects.transformers import (
    CLASSES,
    AttentionModule,
    DynamicCache,
    latent_attention,
)
from minimha.explain import Trace
from minimha.layers.latent import LatentCache

RNG = np.random.default_rng(0)
SIZES = {
    name: size
    for size, names in {
        32: "hidden_size d_model n_embd dim",
        4: "rotary_dim num_attention_heads n_head num_heads n_heads encoder_attention_heads "
        "decoder_attention_heads",
        2: "num_key_value_heads num_hidden_layers",
        8: "head_dim d_kv relative_attention_num_buckets",
        10: "relative_attention_max_distance",
        64: "vocab_size intermediate_size",
        0: "pad_token_id",
    }.items()
    for name in names.split()
}
SETTINGS = {
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 2.0,
    "attention_multiplier": 0.3,
    "rms_norm_eps": 1e-3,
    "sliding_window": 4,
}
CONFIGS = {  # of classes that do not name their config, or name that of a larger model
    "AltRobertaSelfAttention": "AltCLIPTextConfig",
    "DecisionTransformerGPT2Attention": "DecisionTransformerConfig",
    "Emu3Attention": "Emu3TextConfig",
    "SiglipAttention": "SiglipVisionConfig",
    "Siglip2Attention": "Siglip2VisionConfig",
    "Qwen3_5Attention": "Qwen3_5TextConfig",
    "Qwen3_5MoeAttention": "Qwen3_5MoeTextConfig",
}
ENCODERS = {f"{n}Attention" for n in ("Data2VecAudio", "Hubert", "SEW", "UniSpeech", "Wav2Vec2")}
LOWEST = np.finfo(np.float32).min


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# The library itself.


@pytest.fixture
def torch():
    pytest.importorskip("transformers", reason="transformers, which is compared with, is missing")
    import torch

    with torch.no_grad():
        yield torch


@cache
def modeling():
    """The module in which transformers defines each class."""
    import transformers

    found = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        found |= dict.fromkeys(re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE), name)
    return found


def library_module(torch, cls, settings=SETTINGS, **arguments):
    """A module of transformers with random weights."""
    modules = import_module(modeling()[cls])
    kind = getattr(modules, cls)
    wanted = inspect.signature(kind.__init__).parameters
    annotation = re.search(r"\w+Config", str(wanted["config"].annotation))
    name = annotation[0] if annotation else re.sub("(Self|Cross)?Attention$", "Config", cls)
    name = CONFIGS.get(cls, name)
    configuration = import_module(modules.__name__.replace("modeling_", "configuration_"))
    Config = getattr(configuration, name)
    kept = {key for key in SIZES if not isinstance(getattr(Config, key, None), property)}
    if cls == "DbrxAttention":
        attn_config = {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0} | settings.get(
            "attn_config", {}
        )
        settings = settings | {"attn_config": attn_config}
    config = Config(**{key: SIZES[key] for key in kept}, **settings)
    config._attn_implementation = "eager"
    config.update({key: arguments.pop(key) for key in list(arguments) if key not in wanted})
    arguments = {"config": config, "layer_idx": 0, "embed_dim": 32, "num_heads": 4} | arguments
    module = kind(**{key: value for key, value in arguments.items() if key in wanted}).eval()
    module.config = config
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def ours(module, settings=None, **others):
    params = {name: weight.numpy() for name, weight in module.state_dict().items()}
    config = module.config.to_dict() if settings is None else settings
    return AttentionModule(type(module).__name__, params, config, **others)


def position_embeddings(torch, module, positions):
    """The tables that the module's model would make."""
    modules = import_module(type(module).__module__)
    prefix = type(module).__name__.removesuffix("Attention").removesuffix("Self")
    names = [f"{prefix}{kind}RotaryEmbedding" for kind in ("", "Text")]
    Rotary = next(getattr(modules, name) for name in names if hasattr(modules, name))
    more = {}
    if "layer_type" in inspect.signature(Rotary.forward).parameters:
        more = {"layer_type": module.config.layer_types[0]}
    like = torch.zeros(1, dtype=torch.float32)
    return [table.numpy() for table in Rotary(module.config)(like, torch.tensor(positions), **more)]


def causal(B, L, Lk, window=None, hidden=2):
    """The model's mask for the last L of Lk tokens; batch entry 0 begins with padding."""
    ahead = np.arange(Lk) - np.arange(Lk - L, Lk)[:, None]
    visible = np.broadcast_to((ahead <= 0) & (ahead > -(window or Lk)), (B, 1, L, Lk)).copy()
    visible[0, ..., : hidden + min(Lk - L, 0)] = False
    return np.where(visible, np.float32(0), LOWEST)


def further(torch, module, L, Lk=None, Lc=None, B=2):
    """Random values for what the class's forward takes besides hidden states."""
    takes = ours(module).convention.takes
    Lk = L if Lk is None else Lk
    given = {"attention_mask": causal(B, L, Lk)} | {"mask": causal(B, L, Lk)}
    if Lc is not None:
        mask = np.zeros((B, 1, L, Lc), np.float32)
        mask[0, ..., -2:] = LOWEST
        names = ("attention_mask", "mask", "encoder_attention_mask")
        given = dict.fromkeys(names, mask)
        given |= dict.fromkeys(("encoder_hidden_states", "key_value_states"), normal(B, Lc, 32))
    given |= {"alibi": normal(B * 4, 1, Lk), "residual": normal(B, L, 32)}
    given |= {"position_ids": np.arange(Lk - L, Lk)[None].repeat(B, axis=0)}
    if type(module).__name__ == "MptAttention":
        given |= {"position_bias": normal(4, 1, 15), "attention_mask": causal(B, L, Lk) < 0}
    if "position_embeddings" in takes:
        positions = np.arange(Lk - L, Lk)[None]
        given["position_embeddings"] = position_embeddings(torch, module, positions)
    return {name: value for name, value in given.items() if name in takes}


def library(torch, module, x, **given):
    """What the library computes, whichever name its forward has for the cache."""
    wanted = inspect.signature(module.forward).parameters
    required = {name for name in wanted if wanted[name].default is inspect.Parameter.empty}
    given |= dict.fromkeys(required - {"hidden_states", "kwargs"} - set(given))
    of_cache = next((name for name in ("layer_past", "cache") if name in wanted), None)
    if of_cache and "past_key_values" in given:
        given[of_cache] = given.pop("past_key_values")
    if "position_embeddings" in required and "position_ids" in given:  # GPT-J, since 5.24
        Rotary = import_module(type(module).__module__).GPTJRotaryEmbedding(module.config)
        tables = Rotary(torch.zeros(1), torch.tensor(given["position_ids"]))
        given["position_embeddings"] = [table.numpy() for table in tables]
    if "output_attentions" in wanted:
        given["output_attentions"] = True

    def tensor(value):
        if isinstance(value, list):
            return tuple(map(tensor, value))
        return torch.tensor(value) if isinstance(value, np.ndarray) else value

    result = module(torch.tensor(x), **{name: tensor(value) for name, value in given.items()})
    return result[0].numpy(), result[-1].numpy()


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_as_in_the_library(torch, cls):
    module = library_module(torch, cls)
    x = normal(2, 7, 32)
    given = further(torch, module, 7, Lc=9 if "Cross" in cls else None)
    got = ours(module)(x, output_attentions=True, **given)
    assert_equal(got, library(torch, module, x, **given))


@pytest.mark.parametrize(
    "cls",
    [
        "BartAttention", "BertSelfAttention", "BloomAttention", "FalconAttention", "GPT2Attention",
        "GPTJAttention", "GPTNeoXAttention", "Gemma2Attention", "Gemma3Attention", "GlmAttention",
        "GptOssAttention", "LlamaAttention", "MistralAttention", "MptAttention", "OPTAttention",
        "Olmo2Attention", "Phi3Attention", "Qwen3Attention", "Qwen3NextAttention", "T5Attention",
        "UMT5Attention",
    ],
)  # fmt: skip
def test_prompt_steps_and_chunk_with_a_cache_are_as_in_the_library(torch, cls):
    from transformers import DynamicCache as Theirs

    decodes = {"is_decoder": True, "has_relative_attention_bias": True}
    module = library_module(torch, cls, **decodes if "T5" in cls else {})
    is_windowed = getattr(module, "sliding_window", None) or cls == "MistralAttention"
    window = SETTINGS["sliding_window"] if is_windowed else None
    theirs, mine, copied = Theirs(config=module.config) if window else Theirs(), DynamicCache(), 0
    for L in (6, 1, 1, 4):
        Lk = L + copied
        x, given = normal(2, L, 32), further(torch, module, L, Lk)
        for name in {"attention_mask", "mask"} & set(given):
            kept = L + min(copied, window - 1) if window else Lk
            mask = causal(2, L, Lk, window)[..., Lk - kept :]
            given[name] = mask < 0 if given[name].dtype == bool else mask
        got = ours(module)(x, past_key_values=mine, output_attentions=True, **given)
        assert_equal(got, library(torch, module, x, past_key_values=theirs, **given))
        copied = Lk
    assert mine.get_seq_length() == copied == 12


@pytest.mark.parametrize(
    "cls", ["BartAttention", "GPT2Attention", "T5Attention", "UMT5Attention", "WhisperAttention"]
)
def test_cross_attention_is_as_in_the_library(torch, cls):
    module = library_module(torch, cls, is_cross_attention=True)
    x, given = normal(2, 5, 32), further(torch, module, 5, Lc=8)
    got = ours(module)(x, output_attentions=True, **given)
    assert_equal(got, library(torch, module, x, **given))


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        ("GPT2Attention", {"scale_attn_by_inverse_layer_idx": True}),
        ("GPT2Attention", {"scale_attn_weights": False}),
        ("Gemma2Attention", {"attn_logit_softcapping": None}),
        ("MistralAttention", {"head_dim": 6}),
        ("Phi3Attention", {"head_dim": 6, "num_key_value_heads": 1}),
        ("Qwen2Attention", {"num_key_value_heads": 4}),
        ("Starcoder2Attention", {"use_bias": False}),
        ("FalconAttention", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("FalconAttention", {"multi_query": False, "bias": True}),
        ("FalconAttention", {"alibi": True}),
        ("GPTBigCodeAttention", {"multi_query": False}),
        ("SmolLM3Attention", {"no_rope_layers": [1, 0]}),
        ("Cohere2Attention", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Cohere2Attention", {"sliding_window": None}),
        ("MptAttention", {"attn_config": {"softmax_scale": 0.3}}),
        ("ModernBertAttention", {"attention_bias": True}),
        ("PhiAttention", {"qk_layernorm": True, "layer_norm_eps": 1e-3}),
        ("PersimmonAttention", {"qk_layernorm": False}),
        ("CohereAttention", {"use_qk_norm": True, "layer_norm_eps": 1e-3}),
        ("OlmoAttention", {"clip_qkv": 1.5}),
        ("OlmoeAttention", {"clip_qkv": 1.5}),
        ("MptAttention", {"attn_config": {"clip_qkv": 1.5}}),
        ("DbrxAttention", {"attn_config": {"clip_qkv": 1.5}}),
        ("GPTNeoXAttention", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    ],
)
def test_settings_are_as_in_the_library(torch, cls, settings, monkeypatch):
    for name in set(settings) & set(SIZES):
        monkeypatch.setitem(SIZES, name, settings[name])
    others = {name: value for name, value in settings.items() if name not in SIZES}
    module = library_module(torch, cls, SETTINGS | others, layer_idx=1)
    x, given = normal(2, 6, 32), further(torch, module, 6)
    got = ours(module, layer_idx=1)(x, output_attentions=True, **given)
    assert_equal(got, library(torch, module, x, **given))


@pytest.mark.parametrize(
    "cls",
    [
        "Cohere2Attention", "FalconAttention", "FlexOlmoAttention", "GPT2Attention",
        "Gemma2Attention", "Gemma3Attention", "GraniteAttention", "Olmo2Attention",
        "Olmo3Attention", "OlmoeAttention", "Qwen3Attention", "Qwen3MoeAttention",
        "Qwen3NextAttention", "SmolLM3Attention", "T5Attention", "VaultGemmaAttention",
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_has_the_librarys_default(torch, cls):
    module = library_module(torch, cls, {})
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight *= 1e-2 if name[0] in "qk" and "norm" not in name else 1  # so epsilon matters
    x, given = normal(2, 6, 32), further(torch, module, 6)
    got = ours(module, {"num_attention_heads": 4})(x, output_attentions=True, **given)
    assert_equal(got, library(torch, module, x, **given))


@pytest.mark.parametrize("cls", sorted(set(CLASSES) - {"BloomAttention", "MptAttention"}))
@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_module_is_causal_if_the_librarys_is(torch, cls, is_decoder):
    module = library_module(torch, cls, SETTINGS | {"is_decoder": is_decoder})
    module.config.is_decoder = is_decoder
    if cls in ENCODERS or cls.endswith("CrossAttention"):
        wanted = {False}
    elif cls in ("BioGptAttention", "MusicgenAttention"):
        wanted = {True}
    elif cls in ("CLIPAttention", "CLIPSegAttention", "MetaClip2Attention"):
        wanted = {None}  # the model says it in every call
    elif "is_causal" in inspect.signature(type(module).__init__).parameters:
        wanted = {is_decoder, None}
    else:
        wanted = {getattr(module, "is_causal", False)}
    assert ours(module).is_causal in wanted


def seen_modules(torch, model, cls, **given):
    """What a whole model gives each module of its attention, and what that returns."""
    calls = []

    def hear(module, arguments, options, result):
        (x,) = arguments or (options["hidden_states"],)
        takes = ours(module).convention.takes if cls in CLASSES else ()
        given = {name: options[name] for name in takes if options.get(name) is not None}
        calls.append((module, x.numpy(), given, result[0].numpy()))

    for module in model.modules():
        if type(module).__name__ == cls:
            module.config = copy(model.config)
            module.register_forward_hook(hear, with_kwargs=True)
    model(**given)
    return calls


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_a_decoder_without_a_mask_is_causal(torch, name):
    model = whole_model(name, attn_implementation="sdpa")
    ids = torch.arange(3, 9)[None]
    given = {"input_features": torch.randn(1, 8, 16)} if name == "Whisper" else {"input_ids": ids}
    calls = seen_modules(torch, model, f"{name}Attention", decoder_input_ids=ids, **given)
    causal = 0
    for module, x, given, wanted in calls:
        assert not {"mask", "attention_mask"} & set(given)
        given = {key: value.numpy() for key, value in given.items()}
        module.config.is_decoder = module.is_causal
        got, _ = ours(module, is_causal=module.is_causal)(x, **given)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        if module.is_causal:
            causal += 1
            past, one = DynamicCache(), ours(module, is_causal=True)
            parts = [one(x[:, now], past_key_values=past)[0] for now in (slice(4), slice(4, 6))]
            if "position_bias" not in given:
                np.testing.assert_allclose(np.concatenate(parts, 1), wanted, rtol=1e-4, atol=1e-5)
    assert (causal, len(calls)) == (2, 6)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5s_buckets_are_the_librarys_at_every_distance(torch, is_decoder):
    settings = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    module = library_module(
        torch, "T5Attention", is_decoder=is_decoder, has_relative_attention_bias=True
    )
    module.config.update(settings)
    module.relative_attention_num_buckets, module.relative_attention_max_distance = 32, 128
    module.relative_attention_bias = torch.nn.Embedding(32, 4)
    wanted = module.compute_bias(150, 450, past_seen_tokens=150).numpy()
    np.testing.assert_array_equal(ours(module).compute_bias(150, 450, 150), wanted)


@pytest.mark.parametrize(("name", "heads"), [("bloom", 6), ("falcon", 6), ("falcon", 4)])
def test_alibi_is_what_the_librarys_model_makes(torch, name, heads, monkeypatch):
    monkeypatch.setitem(SIZES, "num_attention_heads", heads)
    monkeypatch.setitem(SIZES, "n_head", heads)
    monkeypatch.setitem(SIZES, "hidden_size", 24)
    module = library_module(torch, f"{name.capitalize()}Attention", SETTINGS | {"alibi": True})
    mask = torch.ones(2, 700, dtype=torch.long)
    mask[0, :5] = 0
    make = import_module(f"transformers.models.{name}.modeling_{name}").build_alibi_tensor
    wanted = make(mask, heads, torch.float32).numpy()
    np.testing.assert_allclose(ours(module).compute_alibi(mask), wanted, rtol=1e-6)


def test_falcon_in_its_model_adds_alibi_twice(torch):
    model = whole_model("Falcon", attn_implementation="eager", alibi=True)
    ids = torch.arange(3, 10)[None]
    for module, x, given, wanted in seen_modules(torch, model, "FalconAttention", input_ids=ids):
        mine, given = ours(module), {key: value.numpy() for key, value in given.items()}
        alibi = mine.compute_alibi(np.ones((1, 7), int))
        np.testing.assert_allclose(given["alibi"], alibi.reshape(1, 4, 1, 7), rtol=1e-6)
        scaled = alibi.reshape(1, 4, 1, 7) / math.sqrt(8)
        mask = np.where(np.tri(7), scaled, LOWEST).astype(np.float32)
        np.testing.assert_allclose(given["attention_mask"], mask, rtol=1e-6)
        np.testing.assert_allclose(mine(x, **given)[0], wanted, rtol=1e-4, atol=1e-5)


YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 1.3, "beta_fast": 4, "beta_slow": 1, "rope_theta": 100.0,
}  # fmt: skip


@pytest.mark.parametrize("is_absorbed", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_interleave": False, "attention_bias": True},
        {"q_lora_rank": None},
        {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": None}},
    ],
)
@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_deepseeks_latent_attention_is_the_librarys(torch, name, settings, is_absorbed):
    model = whole_model(name, attn_implementation="eager", max_position_embeddings=64, **settings)
    calls = seen_modules(torch, model, f"{name}Attention", input_ids=torch.arange(3, 23)[None])
    assert len(calls) == 2
    for module, x, _, wanted in calls:
        params, config = module.state_dict(), module.config.to_dict()
        layer = latent_attention(f"{name}Attention", params, config)
        got = layer(x, is_causal=True, is_absorbed=is_absorbed)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        cache = LatentCache(1, 20, layer.cached_width)
        parts = [
            layer(x[:, now], cache=cache, is_absorbed=is_absorbed)
            for now in (slice(18), slice(18, 19), slice(19, 20))
        ]
        np.testing.assert_allclose(np.concatenate(parts, 1), wanted, rtol=1e-4, atol=1e-5)


# Without the library.


def loops(q, k, v, bias, scale):
    """softmax(scale q·k + bias) v, one head and one query at a time; heads of one width."""
    rows = []
    for b, h, i in np.ndindex(q.shape[:3]):
        g = h * k.shape[1] // q.shape[1]
        scores = [scale * math.fsum(q[b, h, i] * key) for key in k[b, g]]
        weights = np.exp(np.array(scores) + bias[b, h, i] - max(scores))
        rows.append(weights @ v[b, g] / weights.sum())
    return np.reshape(rows, (*q.shape[:3], -1))


def heads(y, n):
    return np.moveaxis(y.reshape(*y.shape[:2], n, -1), 2, 1)


def joined(y):
    return np.moveaxis(y, 1, 2).reshape(len(y), y.shape[2], -1)


def rotated(x, angles):
    x_1, x_2 = np.split(x, 2, axis=-1)
    return np.concatenate(
        [x_1 * np.cos(angles) - x_2 * np.sin(angles), x_2 * np.cos(angles) + x_1 * np.sin(angles)],
        axis=-1,
    )


LLAMA = {f"{name}_proj.weight": RNG.normal(size=(8 if name in "kv" else 16, 16)) for name in "qkvo"}
ANGLES = np.arange(5)[:, None] * [1.0, 0.1]
TABLES = [np.tile(function(ANGLES), 2)[None] for function in (np.cos, np.sin)]
X = RNG.normal(size=(2, 5, 16))
MASK = np.where(np.tri(5, dtype=bool), 0, -np.inf)[None, None]
HEADS = {"num_attention_heads": 4}


def llama(**changes):
    return AttentionModule("LlamaAttention", LLAMA | changes, HEADS)


@pytest.mark.parametrize("mask", [MASK, MASK == 0])
def test_llama_projects_turns_attends_and_projects(mask):
    q, k, v = (heads(X @ LLAMA[f"{n}_proj.weight"].T, 4 if n == "q" else 2) for n in "qkv")
    bias = np.broadcast_to(MASK, (2, 4, 5, 5))
    wanted = joined(loops(rotated(q, ANGLES), rotated(k, ANGLES), v, bias, 0.5))
    output, weights = llama()(X, attention_mask=mask, position_embeddings=TABLES)
    np.testing.assert_allclose(output, wanted @ LLAMA["o_proj.weight"].T)
    assert weights is None


def test_bloom_fuses_by_head_and_adds_alibi_and_residual():
    W, b = RNG.normal(size=(4, 3, 4, 16)), RNG.normal(size=(4, 3, 4))
    D, d = RNG.normal(size=(16, 16)), RNG.normal(size=16)
    q, k, v = (heads(X @ W[:, i].reshape(16, 16).T + b[:, i].ravel(), 4) for i in range(3))
    alibi, residual = RNG.normal(size=(8, 1, 5)), RNG.normal(size=X.shape)
    bias = MASK + alibi.reshape(2, 4, 1, 5)
    params = {
        "query_key_value.weight": W.reshape(48, 16),
        "query_key_value.bias": b.ravel(),
        "dense.weight": D,
        "dense.bias": d,
    }
    module = AttentionModule("BloomAttention", params, {"n_head": 4})
    output, _ = module(X, attention_mask=MASK, alibi=alibi, residual=residual)
    np.testing.assert_allclose(output, joined(loops(q, k, v, bias, 0.5)) @ D.T + d + residual)


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values():
    params = {f"{name}.weight": np.eye(16, dtype=np.float32) for name in ("query", "key", "value")}
    mask = np.full((2, 1, 5, 5), LOWEST)
    x = X.astype(np.float32)
    output, _ = AttentionModule("BertSelfAttention", params, HEADS)(x, attention_mask=mask)
    np.testing.assert_allclose(output, np.repeat(x.mean(1, keepdims=True), 5, 1), atol=1e-6)


def test_weights_on_request_leave_the_output_as_it_was():
    given = {"attention_mask": MASK, "position_embeddings": TABLES}
    output, weights = llama()(X, output_attentions=True, **given)
    np.testing.assert_array_equal(output, llama()(X, **given)[0])
    np.testing.assert_allclose(weights.sum(-1), 1)
    assert weights.shape == (2, 4, 5, 5)
    assert (weights[..., MASK[0, 0] < 0] == 0).all()


def test_without_a_mask_later_tokens_are_hidden_where_the_class_is_causal():
    given = {"position_embeddings": TABLES}
    masked, _ = llama()(X, attention_mask=MASK, **given)
    np.testing.assert_array_equal(llama()(X, **given)[0], masked)
    seen, _ = AttentionModule("LlamaAttention", LLAMA, HEADS, is_causal=False)(X, **given)
    np.testing.assert_array_equal(seen[:, -1], masked[:, -1])
    assert not np.allclose(seen, masked)


@pytest.mark.parametrize("wants_weights", [False, True])
def test_steps_with_a_cache_are_the_whole_in_parts(wants_weights):
    whole, _ = llama()(X, attention_mask=MASK, position_embeddings=TABLES)
    past, parts = DynamicCache(), []
    for now in (slice(0, 3), slice(3, 4), slice(4, 5)):
        part, weights = llama()(
            X[:, now],
            attention_mask=MASK[..., now, : now.stop],
            position_embeddings=[table[:, now] for table in TABLES],
            past_key_values=past,
            output_attentions=wants_weights,
        )
        parts.append(part)
        assert (weights is not None) == wants_weights
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole)


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    past, given = DynamicCache(), {"position_embeddings": TABLES}
    llama()(X, attention_mask=MASK, past_key_values=past, **given)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 5, 11\): expected"):
        llama()(X, attention_mask=np.zeros((1, 1, 5, 11)), past_key_values=past, **given)
    with pytest.raises(
        ValueError, match=r"past_key_values has keys of shape \(2, 2, 5, 4\), these"
    ):
        llama()(X[:1], past_key_values=past, **given)
    assert past.get_seq_length() == 5


def test_a_tap_hears_every_step():
    trace = Trace()
    llama()(X, attention_mask=MASK, position_embeddings=TABLES, tap=trace)
    wanted = ["x", "q", "q_rotated", "scores", "scaled", "biased", "weights", "concat", "output"]
    assert [name for name in trace if name in wanted] == wanted


def test_the_layer_can_be_used_by_itself():
    module = AttentionModule("T5Attention", {f"{n}.weight": np.eye(4) for n in "qkvo"}, HEADS)
    output = module.layer(X[..., :4], is_causal=True, **module.options)
    mask = np.where(np.tri(5), 0, -np.inf)[None, None]
    np.testing.assert_array_equal(output, module(X[..., :4], mask=mask)[0])


def test_the_layer_by_itself_takes_the_modules_cache():
    layer = AttentionModule("T5Attention", {f"{n}.weight": np.eye(4) for n in "qkvo"}, HEADS).layer
    x, cache, mask = X[..., :4], DynamicCache(), np.tri(5, dtype=bool)
    parts = [layer(x[:, :3], cache=cache, attn_mask=mask[:3, :3])]
    with pytest.raises(ValueError, match="attn_mask has shape"):
        layer(x[:, 3:], cache=cache, attn_mask=mask)
    assert cache.lengths == 3
    parts.append(layer(x[:, 3:], cache=cache, attn_mask=mask[3:]))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), layer(x, attn_mask=mask))


def test_inputs_are_not_written_to():
    given = {"attention_mask": MASK, "position_embeddings": TABLES}
    kept = [array.copy() for array in (X, MASK, *TABLES, *LLAMA.values())]
    llama()(X, past_key_values=DynamicCache(), **given)
    for array, copied in zip((X, MASK, *TABLES, *LLAMA.values()), kept, strict=True):
        np.testing.assert_array_equal(array, copied)


BERT = {f"{name}.weight": np.eye(16) for name in ("query", "key", "value")}
FUSED = {"query_key_value.weight": np.zeros((47, 16)), "dense.weight": np.eye(16)}
GIVEN = {"position_embeddings": TABLES}
T5 = {f"{name}.weight": np.eye(16) for name in "qkvo"}


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: AttentionModule("DebertaAttention", {}, {}), ValueError,
         "cls is 'DebertaAttention': expected one of ASTAttention, .*LlamaAttention"),
        (lambda: AttentionModule("LlamaAttention", LLAMA, {}), ValueError,
         "config has no number of heads: expected one of num_attention_heads, "),
        (lambda: AttentionModule("LlamaAttention", LLAMA, {"num_attention_heads": 3}), ValueError,
         "queries have width 16: expected 3 heads of one width"),
        (lambda: AttentionModule("LlamaAttention", {}, HEADS), ValueError,
         "params has no o_proj.weight: it has nothing"),
        (lambda: llama(**{"o_proj.weight": np.ones((16, 8))}), ValueError,
         r"o_proj.weight.T has shape \(8, 16\): expected \(H · Dv, Eo\)"),
        (lambda: llama(**{"q_proj.bias": np.ones(3)}), ValueError, "q_proj.bias has shape"),
        (lambda: llama(**{"q_norm.weight": np.ones(4)}), ValueError,
         "params has q_norm.weight, which minimha's LlamaAttention does not use"),
        (lambda: AttentionModule("OlmoAttention", LLAMA, HEADS | {"clip_qkv": -8.0}), ValueError,
         "clip_qkv is -8.0: expected a number of at least 0"),
        (lambda: AttentionModule("BloomAttention", FUSED, HEADS), ValueError,
         "query_key_value projects to 47 numbers: expected queries, keys, values of 4 h"),
        (lambda: llama()(X[0], **GIVEN), ValueError,
         r"hidden_states has shape \(5, 16\): expected 3 axes \(B, L, E\)"),
        (lambda: llama()(X[..., :8], **GIVEN), ValueError, r"hidden_states has shape \(2, 5, 8\)"),
        (lambda: llama()(X), TypeError, "position_embeddings is missing"),
        (lambda: llama()(X, alibi=X, **GIVEN), TypeError,
         "alibi is no argument of LlamaAttention with these weights, which takes attention_mask"),
        (lambda: llama()(X, attention_mask=np.ones((2, 5), int), **GIVEN), ValueError,
         r"attention_mask has shape \(2, 5\) and dtype int64.*looks like Hugging Face's"),
        (lambda: llama()(X, attention_mask=np.zeros((2, 1, 5, 4)), **GIVEN), ValueError,
         r"attention_mask has shape \(2, 1, 5, 4\): expected"),
        (lambda: llama()(X, attention_mask=np.ma.zeros((2, 1, 5, 5)), **GIVEN), TypeError,
         "attention_mask is a masked array, whose mask would be lost"),
        (lambda: llama()(X, position_embeddings=[t[:, :4] for t in TABLES]), ValueError,
         r"cos in position_embeddings has shape \(4,\), before the angles, but q has shape"),
        (lambda: llama()(X, position_embeddings=[t[..., [0, 2, 1, 3]] for t in TABLES]), ValueError,
         "cos in position_embeddings does not hold every angle twice in the half-split layout"),
        (lambda: llama()(X, position_embeddings=[t[0] for t in TABLES]), ValueError,
         r"cos in position_embeddings has shape \(5, 4\): expected 3 axes \(B, L, R\)"),
        (lambda: AttentionModule("Qwen3NextAttention", LLAMA, {"n_head": 16}), ValueError,
         "queries and their gates have width 16: expected 16 heads"),
        (lambda: AttentionModule("BertCrossAttention", BERT, HEADS)(X), TypeError,
         "encoder_hidden_states is missing"),
        (lambda: AttentionModule("BertCrossAttention", BERT, HEADS)(X, encoder_hidden_states=X[0]),
         ValueError, r"encoder_hidden_states has shape \(5, 16\): expected 3 axes \(B, Lc, Ec\)"),
        (lambda: AttentionModule("T5Attention", T5, HEADS)(X), ValueError,
         "mask is missing, and the config does not say whether this T5Attention is causal: give"),
        (lambda: AttentionModule("T5Attention", T5, HEADS, is_causal=1), TypeError,
         "is_causal is 1: expected True or False"),
        (lambda: latent_attention("DeepseekV3Attention", {"q_norm.weight": X}, HEADS), ValueError,
         "params has q_norm.weight, which minimha's DeepseekV3Attention does not use"),
        (lambda: latent_attention("DeepseekV3Attention", {}, HEADS), ValueError,
         "kv_a_proj_with_mqa.weight.T is missing"),
        (lambda: llama().compute_alibi([[1, 1]]), ValueError, "this LlamaAttention takes no alibi"),
        (lambda: llama().compute_bias(5, 5), ValueError, "params has no relative_attention_bias"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
