"""Checkpoints that transformers writes: the same logits, at once and token by token."""

import json
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from minimha.equations.stored import Stored
from minimha.explain import Trace
from minimha.layers import decoding
from minimha.models import load
from minimha.models.attribution import attribution, rollout
from minimha.models.checkpoints import from_tensors, safetensors
from minimha.models.files import read_json
from minimha.models.interpretability import Head, behaviours, without_heads

# Wide enough that the logits depend on every part, and random norms are set below.
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
MAGNITUDES = {"mscale": 0.8, "mscale_all_dim": 1.3}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.2, 3.0, 8.0, 9.0],
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA = SMALL | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24}
QWEN_MOE = SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
OSS = SMALL | {
    "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
LINEAR = "linear_attention"
NEXT = SMALL | {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "num_experts": 6,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "initializer_range": 0.1,  # with 0.2, a query at a right angle to its key loses two digits
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
INDEXED = DEEPSEEK | {
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 24,
    "pad_token_id": None,  # its embedding is 0, so all its index scores are: torch picks any keys
}
CASES = {
    "GPT-2": ("gpt2", {
        "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "GPT-NeoX": ("gpt_neox", SMALL),
    "GPT-NeoX, in turn": ("gpt_neox", SMALL | {
        "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
        "rotary_pct": 1.0, "rotary_emb_base": 500, "tie_word_embeddings": True,
    }),
    "LLaMA 2": ("llama", SMALL),
    "LLaMA 3": ("llama", SMALL | {"rope_parameters": LLAMA3}),
    "LLaMA, tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "LLaMA, biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "LLaMA, quick GELU": ("llama", SMALL | {"hidden_act": "quick_gelu"}),
    "LLaMA, squared ReLU": ("llama", SMALL | {"hidden_act": "relu2"}),
    "LLaMA, mscale": ("llama", SMALL | {"rope_parameters": YARN | MAGNITUDES}),
    "Phi 3": ("phi3", SMALL | {"sliding_window": 7}),
    "Phi 3, long": ("phi3", SMALL | {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 16,
    }),
    "Phi 4 mini": ("phi3", SMALL | {
        "tie_word_embeddings": True, "rope_parameters": LONGROPE | {
            "partial_rotary_factor": 0.75, "attention_factor": 1.2, "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [1.0, 7.0, 4.0],
        },
    }),
    "Mistral": ("mistral", SMALL | {"sliding_window": 5}),
    "Qwen 2": ("qwen2", SMALL | {"rope_parameters": YARN}),
    "Qwen 2, window": ("qwen2", SMALL | {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    }),
    "Qwen 2, layer types": ("qwen2", SMALL | {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": [LOCAL, GLOBAL, LOCAL],
    }),
    "Qwen 3, layer types": ("qwen3", SMALL | {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 4,
        "layer_types": [GLOBAL, LOCAL, GLOBAL],
    }),
    "Qwen 3, window": ("qwen3", SMALL | {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
    }),
    "Qwen 3": ("qwen3", SMALL | {"head_dim": 16}),
    "OLMo 2": ("olmo2", SMALL),
    "OLMo 2, biases": ("olmo2", SMALL | {"attention_bias": True, "rope_parameters": LLAMA3}),
    "OLMo 3": ("olmo3", SMALL | {
        "sliding_window": 5, "num_hidden_layers": 4,
        "rope_parameters": {GLOBAL: YARN, LOCAL: {"rope_type": "default", "rope_theta": 1e4}},
    }),
    "OLMo 3, layer types": ("olmo3", SMALL | {
        "sliding_window": 4, "layer_types": [GLOBAL, LOCAL, GLOBAL],
    }),
    "SmolLM 3": ("smollm3", SMALL | {"num_hidden_layers": 4}),
    "SmolLM 3, layers": ("smollm3", SMALL | {
        "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 5,
        "attention_bias": True, "tie_word_embeddings": False,
    }),
    "Mixtral": ("mixtral", SMALL | {"num_local_experts": 4}),
    "Mixtral, window": ("mixtral", SMALL | {
        "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5, "head_dim": 16,
    }),
    "Qwen 2 MoE": ("qwen2_moe", QWEN_MOE | {"shared_expert_intermediate_size": 20}),
    "Qwen 2 MoE, layers": ("qwen2_moe", QWEN_MOE | {
        "shared_expert_intermediate_size": 20, "norm_topk_prob": True, "mlp_only_layers": [0],
        "use_sliding_window": True, "sliding_window": 5, "qkv_bias": False,
    }),
    "Qwen 3 MoE": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True, "head_dim": 16}),
    "Qwen 3 MoE, layers": ("qwen3_moe", QWEN_MOE | {
        "decoder_sparse_step": 2, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 5,
    }),
    "OLMoE": ("olmoe", SMALL | {"num_experts": 6, "num_experts_per_tok": 2}),
    "OLMoE, clipped": ("olmoe", SMALL | {
        "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.8, "norm_topk_prob": True,
    }),
    "gpt-oss": ("gpt_oss", OSS),
    "gpt-oss, limited": ("gpt_oss", OSS | {
        "swiglu_limit": 0.5, "sliding_window": 3, "layer_types": [GLOBAL, LOCAL, LOCAL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "DeepSeek V3": ("deepseek_v3", DEEPSEEK),
    "DeepSeek V3, YaRN": ("deepseek_v3", DEEPSEEK | {
        "rope_parameters": YARN | MAGNITUDES | {"beta_fast": 32, "beta_slow": 1},
        "q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False,
        "rope_interleave": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
    }),
    "DeepSeek V3.2": ("deepseek_v32", INDEXED),
    "DeepSeek V3.2, YaRN": ("deepseek_v32", INDEXED | {
        "rope_parameters": YARN | MAGNITUDES,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "norm_topk_prob": False,
        "attention_bias": True, "n_shared_experts": 2,
    }),
    "DeepSeek V2": ("deepseek_v2", DEEPSEEK | {
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0,
        "n_shared_experts": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    }),
    "DeepSeek V2, lite": ("deepseek_v2", DEEPSEEK | {
        "topk_method": "greedy", "q_lora_rank": None, "n_group": None, "topk_group": None,
    }),
    "Qwen3-Next": ("qwen3_next", NEXT),
    "Qwen3-Next, layers": ("qwen3_next", NEXT | {
        "layer_types": [GLOBAL, LINEAR, GLOBAL], "num_hidden_layers": 3, "mlp_only_layers": [1],
        "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
        "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    }),
    "Qwen3.5": ("qwen3_5_text", {name: NEXT[name] for name in NEXT if "exp" not in name}),
    "Gemma": ("gemma", SMALL | {"head_dim": 16}),
    "Gemma, gelu": ("gemma", SMALL | {"head_dim": 16, "hidden_act": "gelu"}),
    "Gemma 2": ("gemma2", GEMMA | {
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    }),
    "Gemma 3": ("gemma3_text", GEMMA | {"layer_types": [LOCAL, GLOBAL, LOCAL]}),
}  # fmt: skip
CLOSE = 4e-6  # two float32 computations in another order: 2e-6 on the machines that were tried
IDS = [3, 17, 42, 8, 90, 5, 11, 60, 22, 96, 0, 33]


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A folder that transformers wrote, the logits that it computes, and the words it adds."""
    pytest.importorskip("transformers", reason="transformers, which is compared with, is missing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return tmp_path, *written(*CASES[request.param], tmp_path)


def written(architecture, settings, folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:  # gains and biases begin as ones and zeros
                tensor += 0.3 * torch.randn(tensor.shape)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor += 0.3 * torch.randn(tensor.shape)
        model.save_pretrained(folder)
        logits = model(torch.tensor([IDS])).logits[0].numpy()
        model.generation_config.eos_token_id = None
        words = model.generate(
            torch.tensor([IDS]), attention_mask=torch.ones((1, len(IDS))), max_new_tokens=50,
            do_sample=False,
        )  # fmt: skip
        return logits, words[0, len(IDS) :].tolist()


@pytest.mark.parametrize("has_head", [True, False])
def test_gemma_3_as_it_is_published_is_loaded_without_what_it_sees_with(has_head, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
    text = GEMMA | {
        "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95,
        boi_token_index=94, eoi_token_index=93, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    kind = "Gemma3ForConditionalGeneration" if has_head else "Gemma3Model"
    theirs = getattr(transformers, kind)(config).eval()
    theirs.save_pretrained(tmp_path)
    published = json.loads((tmp_path / "config.json").read_text())
    published["text_config"] = text | {"model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = load(tmp_path)
    assert model.config.windows == (5, None, 5)
    ids = torch.tensor([[i for i in IDS if i < 93]])
    with torch.no_grad():
        theirs = theirs(ids)
    wanted = theirs.logits if has_head else theirs.last_hidden_state
    got = (model.logits if has_head else model.hidden)(ids[0].tolist())
    assert relative(got, wanted[0].numpy()) < CLOSE


def test_qwen_3_5_as_it_is_published_is_loaded_without_what_it_sees_with(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config=CASES["Qwen3.5"][1], vision_config=vision, attn_implementation="eager",
        image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.tensor([[i for i in IDS if i < 92]])
    with torch.no_grad():
        wanted = theirs(ids).logits[0].numpy()
    assert relative(load(tmp_path).logits(ids[0].tolist()), wanted) < CLOSE


@pytest.mark.parametrize("architecture", ["DeepSeek V3", "Qwen3-Next"])
def test_models_whose_layers_differ(architecture, tmp_path):
    pytest.importorskip("transformers", reason="transformers, which is compared with, is missing")
    kind, settings = CASES[architecture]
    written(kind, settings, tmp_path)
    model, texts = load(tmp_path), [IDS[:5], IDS[:5][::-1]]
    cache = model.new_cache(capacity=7, num_texts=2)
    together = [model.logits(texts, cache=cache), model.logits([[7, 8], [9, 4]], cache=cache)]
    for text, more, row in zip(texts, ([7, 8], [9, 4]), np.hstack(together), strict=True):
        assert relative(row, model.logits([*text, *more])) < CLOSE
    with pytest.raises(ValueError, match="exceed capacity=7"):
        model.logits([[1], [1]], cache=cache)
    assert {tuple(own.lengths) for own in cache} == {(7, 7)}
    word = "LatentAttention" if kind == "deepseek_v3" else "GatedDeltaNet"
    refused = [
        lambda: without_heads(model, [Head(0, 0)]),
        lambda: attribution(model, IDS, 3),
    ]
    if word == "GatedDeltaNet":
        refused += [lambda: rollout(model, IDS), lambda: behaviours(model, [IDS])]
    for call in refused:
        with pytest.raises(ValueError, match=f"layer 0 of this {kind} .*{word}"):
            call()
    more = {"model.layers.4.eh_proj.weight": np.ones(3), "mtp.norm.weight": np.ones(3)}
    tensors = safetensors.read_folder(tmp_path) | dict([list(more.items())[kind == "qwen3_next"]])
    config = read_json(tmp_path / "config.json") | {"num_nextn_predict_layers": 1}
    np.testing.assert_array_equal(from_tensors(config, tensors).logits(IDS), model.logits(IDS))


@pytest.mark.parametrize("architecture", ["LLaMA 2", "Qwen 3", "Gemma 2", "GPT-2"])
def test_a_model_without_a_head_has_its_rows(architecture, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
    kind, settings = CASES[architecture]
    is_tied = kind in ("gpt2", "gemma2")
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS])).last_hidden_state[0].numpy()
    model = load(tmp_path)
    assert relative(model.hidden(IDS), wanted) < 1e-5
    for call in (
        () if is_tied else (model.logits, lambda ids: model.generate(ids, 1), model.unembed)
    ):
        with pytest.raises(ValueError, match=r"has no head, so no logits: hidden\(ids\)"):
            call(IDS)


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE | {"original_max_position_embeddings": 10}])
def test_angles_that_depend_on_the_length(rope, tmp_path):
    pytest.importorskip("transformers", reason="transformers, which is compared with, is missing")
    settings = SMALL | {"rope_parameters": rope, "max_position_embeddings": 10}
    wanted, _ = written("llama", settings, tmp_path)
    model = load(tmp_path)
    assert model.config.max_length == (20 if rope is DYNAMIC else 10)
    if rope is not DYNAMIC:
        model = replace(model, config=replace(model.config, max_length=20))
    assert relative(model.logits(IDS), wanted) < CLOSE
    cache = model.new_cache()
    model.logits(IDS[:10], cache=cache)
    with pytest.raises(ValueError, match=r"change from 10 tokens to 12, .* read all tokens again"):
        model.logits(IDS[10:], cache=cache)
    assert int(cache[0].lengths[0]) == 10
    tokens = IDS[:8]
    for token in model.generate(tokens, 10, top_k=1, eos=()):
        assert token == model.logits(tokens)[-1].argmax()
        tokens = [*tokens, token]


def relative(got, wanted):
    return np.abs(got - wanted).max() / np.abs(wanted).max()


def test_logits_are_transformers(case):
    folder, wanted, words = case
    model = load(folder)
    assert wanted.std() > 0.5
    got = model.logits(IDS)
    assert got.dtype == np.float32
    assert relative(got, wanted) < CLOSE
    cache = model.new_cache()
    steps = np.concatenate([model.logits([token], cache=cache) for token in IDS])
    assert relative(steps, wanted) < CLOSE
    assert list(model.generate(IDS, 50, top_k=1, eos=())) == words
    trace, exact = Trace(), model.logits(IDS, backend="dense")
    np.testing.assert_array_equal(model.logits(IDS, backend="dense", tap=trace), exact)
    has_states = any(name.startswith("state[") for name in trace)  # computed in chunks otherwise
    assert has_states or np.array_equal(got, exact)
    first = {"wte", "wpe", "W_q", "W_k", "W_v", "b_q", "b_k", "b_v", "x", "embedded"}
    traced = {step.base for step in trace.steps}
    for step in trace.steps:  # what a step says it is made from gives its numbers
        operation, *operands = step.made or ("formula",)
        is_exact = step.base not in first and operation not in ("rms", "formula")  # rms has no ε
        is_traced = all(traced & {*names.split("|")} for names in operands)
        assert not (is_exact and is_traced) or trace.origins[step], step.title


def arrays(thing, seen=None):
    """Yield the arrays that an object holds, at any depth, but none of a ``Stored``."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        yield thing
    elif not isinstance(thing, (str, Stored)):
        parts = thing.values() if isinstance(thing, dict) else thing
        if not isinstance(thing, (dict, list, tuple)):
            parts = getattr(thing, "__dict__", {}).values()
        for part in parts:
            yield from arrays(part, seen)


def test_weights_of_16_bits_are_read_as_they_are_and_give_the_same_logits(case):
    folder, _, _ = case
    config, tensors = read_json(folder / "config.json"), safetensors.read_folder(folder)
    narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    wide = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    model, expected = from_tensors(config, narrow), from_tensors(config, wide)
    small = ("conv1d.weight", "wpe.weight")  # of convolutions and positions
    wide_shapes = {x[:, 0].shape if x.ndim == 3 else x.shape for n, x in wide.items()
                   if n.endswith(small)}  # fmt: skip
    assert {x.shape for x in arrays(model) if x.ndim > 1} <= wide_shapes
    got = model.logits(IDS)
    assert relative(got, expected.logits(IDS)) < CLOSE
    trace, other = Trace(), Trace()
    assert relative(model.logits(IDS, tap=trace), got) < CLOSE
    expected.logits(IDS, tap=other)
    for step, wanted in zip(trace.steps, other.steps, strict=True):  # a tap gets arrays
        assert (step.name, type(step.value)) == (wanted.name, type(wanted.value))
        np.testing.assert_allclose(step.value, wanted.value, rtol=1e-3, atol=1e-3)


# Families whose layers decode in compiled code, whatever their configs say.
DECODED = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox",
    "olmo2", "olmo3", "smollm3",
)  # fmt: skip


@pytest.mark.usefixtures("compiled_decoding")
def test_decoding_in_compiled_code_gives_the_same_logits(case, monkeypatch):
    folder, _, _ = case
    config, tensors = read_json(folder / "config.json"), safetensors.read_folder(folder)
    model = from_tensors(config, {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()})
    calls = {"attended": [], "fed": []}

    def decoded():
        cache = model.new_cache(len(IDS))
        return np.concatenate([model.logits([n], cache=cache) for n in IDS])

    for name, found in calls.items():
        function = getattr(decoding, name)
        monkeypatch.setattr(decoding, name, lambda *_, **__: None)
        calls[name] = function, found
    expected = decoded()
    for name, (function, found) in calls.items():

        def counted(*given, function=function, found=found, **options):
            y = function(*given, **options)
            found.append(y is not None)
            return y

        monkeypatch.setattr(decoding, name, counted)
    got = decoded()
    assert relative(got, expected) < CLOSE
    if config["model_type"] in DECODED:
        assert all(all(found) for _, found in calls.values())
