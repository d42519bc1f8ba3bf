"""Sizes of known models: published numbers, and counting one by one."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from minimha.models.sizes import (
    PRESETS,
    decode_flops,
    find,
    kv_cache_bytes,
    parameters,
    prefill_flops,
    saved_by_groups,
    weight_bytes,
)

# Totals as papers and model cards print them, with the unit of the last printed digit.
PUBLISHED = {
    "BERT-Base": (110e6, 1e7), "BERT-Large": (340e6, 1e7), "GPT-2 Small": (124e6, 1e6),
    "GPT-2 Large": (774e6, 1e6), "GPT-3": (174.6e9, 1e8), "Llama-3-8B": (8.03e9, 1e7),
    "Llama-3-70B": (70.6e9, 1e8), "Mistral-7B": (7.24e9, 1e7), "GPT-NeoX-20B": (20.55e9, 1e7),
    "LLaMA-7B": (6.7e9, 1e8), "Llama-2-70B": (69e9, 1e9), "Mixtral-8x7B": (46.7e9, 1e8),
    "Phi-3-mini": (3.8e9, 1e8), "Gemma-2-9B": (9.24e9, 1e7), "OLMo-2-7B": (7.3e9, 1e8),
    "DeepSeek-V3": (671e9, 1e9), "Gemma-3-27B": (27.0e9, 1e8), "Qwen3-8B": (8.2e9, 1e8),
    "Qwen3-30B": (30.5e9, 1e8), "SmolLM3-3B": (3.08e9, 1e7), "gpt-oss-20b": (20.9e9, 1e8),
    "gpt-oss-120b": (116.8e9, 1e8), "Qwen3-Next": (80e9, 1e9), "GLM-5": (744e9, 1e9),
    "DeepSeek-V3.2": (672e9, 1e9),
}  # fmt: skip

# What the released checkpoints hold (GPT-3 has none).
RELEASED = {
    "BERT-Base": 109482240,
    "BERT-Large": 335141888,
    "GPT-2 Small": 124439808,
    "GPT-2 Large": 774030080,
    "Llama-3-8B": 8030261248,
    "Llama-3-70B": 70553706496,
    "Mistral-7B": 7241732096,
    "GPT-NeoX-20B": 20554567680,
    "LLaMA-7B": 6738415616,
    "Llama-2-70B": 68976648192,
    "Mixtral-8x7B": 46702792704,
    "Phi-3-mini": 3821079552,
    "Gemma-2-9B": 9241705984,
    "OLMo-2-7B": 7298617344,
    "Qwen3-8B": 8190735360,
    "Qwen3-30B": 30532122624,
    "SmolLM3-3B": 3075098624,
    "gpt-oss-20b": 20914757184,
    "gpt-oss-120b": 116829156672,
    "DeepSeek-V3": 671026419200,
}

# What transformers builds with these changes of its default settings, without the router's biases.
BUILT = {
    "DeepSeek-V3": ("deepseek_v3", {}), "DeepSeek-V3.2": ("deepseek_v32", {}),
    "GLM-5": ("glm_moe_dsa", {}), "Qwen3-Next": ("qwen3_next", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "Gemma-3-27B": ("gemma3_text", {
        "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504,
    }),
}  # fmt: skip

PLAIN = [p for p in PRESETS.values() if not (p.mixture or p.latent or p.delta or p.has_sinks)]
DECODERS = [name for name, preset in PRESETS.items() if preset.is_causal]
TINY = replace(
    PRESETS["Mistral-7B"], name="tiny", layers=2, d_model=6, num_heads=4, num_kv_heads=2,
    head_dim=3, d_ff=7, vocabulary=11, max_length=9, window=None,
)  # fmt: skip
VARIANTS = [
    TINY,
    replace(TINY, window=4, has_biases=True),
    replace(TINY, is_gated=False, has_biases=True, is_tied=True, positions="learned"),
    replace(TINY, is_causal=False, is_gated=False, has_biases=True, num_segments=2),
]


def shapes(preset):
    """Every array of a checkpoint, by the part that it belongs to."""
    E, F, V = preset.d_model, preset.d_ff, preset.vocabulary
    q, kv = preset.num_heads * preset.head_dim, preset.num_kv_heads * preset.head_dim
    pairs = {"attention": [(E, q), (E, kv), (E, kv), (q, E)], "feed_forward": [(E, F), (F, E)]}
    if preset.is_gated:
        pairs["feed_forward"].append((E, F))
    found = []
    widths = {None: (), "head": (preset.head_dim,) * 2, "full": (q, kv)}[preset.qk_norm]
    for _ in range(preset.layers):
        found += [("attention", (width,)) for width in widths]
        for part, matrices in pairs.items():
            found += [(part, shape) for shape in matrices]
            found += [(part, (out,)) for _, out in matrices if preset.has_biases]
    for _ in range(preset.norms_per_layer * preset.layers + 1):
        found += [("norms", (E,))] * (2 if preset.has_biases else 1)
    found.append(("embeddings", (V, E)))
    if preset.positions == "learned":
        found.append(("embeddings", (preset.max_length, E)))
    found.append(("embeddings", (preset.num_segments, E)))
    if not preset.is_causal:
        found += [("head", (E, E)), ("head", (E,) if preset.has_biases else (0,))]
    elif not preset.is_tied:
        found.append(("head", (V, E)))
    return found


def products(preset, tokens, keys_seen):
    """FLOPs of every matrix product, one by one; ``keys_seen`` of each of the queries."""
    count = dict.fromkeys(("projections", "feed_forward", "attention", "head"), 0)
    for part, shape in shapes(preset):
        where = {"attention": "projections", "feed_forward": "feed_forward"}.get(part)
        if where and len(shape) == 2:
            count[where] += 2 * tokens * shape[0] * shape[1]
    for _ in range(preset.layers * preset.num_heads):
        for keys in keys_seen:
            count["attention"] += 2 * keys * preset.head_dim  # q Kᵀ
            count["attention"] += 2 * keys * preset.head_dim  # p V
    last = preset.vocabulary if preset.is_causal else preset.d_model
    count["head"] = 2 * preset.d_model * last
    return count


def keys_seen(preset, length):
    """How many keys each query sees, by asking for every pair."""
    i, j = np.indices((length, length))
    sees = np.ones((length, length), bool)
    if preset.is_causal:
        sees &= j <= i
    if preset.window is not None:
        sees &= i - j < preset.window
    return [int(row.sum()) for row in sees]


@pytest.mark.parametrize("name", PRESETS)
def test_totals_are_the_published_ones(name):
    published, digit = PUBLISHED[name]
    assert abs(parameters(PRESETS[name]).total - published) <= digit / 2


@pytest.mark.parametrize("name", RELEASED)
def test_totals_are_those_of_the_released_weights(name):
    assert parameters(PRESETS[name]).total == RELEASED[name]


@pytest.mark.parametrize("name", BUILT)
def test_totals_are_those_of_models_that_transformers_builds(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    architecture, settings = BUILT[name]
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {architecture}")
    config, preset = transformers.AutoConfig.for_model(architecture, **settings), PRESETS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    mixture = preset.mixture
    biases = (preset.layers - mixture.dense_layers) * mixture.experts if mixture else 0
    biases *= mixture is not None and mixture.has_router_bias
    assert parameters(preset).total == sum(p.numel() for p in model.parameters()) + biases


@pytest.mark.parametrize("preset", [*PLAIN, *VARIANTS])
def test_parameters_are_those_of_every_array(preset):
    parts = dict.fromkeys(("attention", "feed_forward", "norms", "embeddings", "head"), 0)
    for part, shape in shapes(preset):
        size = 1
        for extent in shape:
            size *= extent
        parts[part] += size
    assert asdict(parameters(preset)) == parts


@pytest.mark.parametrize("name", ["BERT-Base", "GPT-2 Large"])
def test_a_layer_has_as_many_parameters_as_in_torch(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    preset = PRESETS[name]
    layer = torch.nn.TransformerEncoderLayer(
        preset.d_model, preset.num_heads, preset.d_ff, device="meta"
    )
    without = replace(preset, layers=preset.layers - 1)
    ours = parameters(preset).total - parameters(without).total
    assert ours == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("preset", VARIANTS)
def test_prefill_flops_are_those_of_every_product(preset, length):
    found = prefill_flops(preset, length)
    expected = products(preset, length, keys_seen(preset, length))
    assert asdict(found) == expected
    assert found.total == sum(expected.values())


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("preset", VARIANTS[:3])
def test_decode_flops_are_those_of_one_query(preset, length):
    expected = products(preset, 1, keys_seen(preset, length)[-1:])
    assert asdict(decode_flops(preset, length)) == expected


@pytest.mark.parametrize("name", DECODERS)
def test_a_prefill_is_its_decode_steps_but_for_their_heads(name):
    preset, length = PRESETS[name], min(PRESETS[name].max_length, 5000)
    steps = [asdict(decode_flops(preset, n)) for n in range(1, length + 1)]
    whole = asdict(prefill_flops(preset, length))
    for part in ("projections", "feed_forward", "attention"):
        assert whole[part] == sum(step[part] for step in steps), part
    assert whole["head"] == steps[0]["head"]


def test_a_mixture_computes_its_chosen_experts_only():
    preset = PRESETS["Mixtral-8x7B"]  # 13 B parameters compute a token, says its paper
    flops = decode_flops(preset, 1)
    computed = (flops.projections + flops.feed_forward + flops.head) / 2
    assert round((computed + preset.vocabulary * preset.d_model) / 1e9) == 13
    whole = decode_flops(replace(preset, mixture=None, d_ff=8 * 14336), 1)
    router = 2 * preset.layers * preset.d_model * 8
    assert (flops.feed_forward - router) * 4 == whole.feed_forward


def test_an_indexer_limits_the_keys_of_attention_and_not_its_own():
    with_indexer, without = PRESETS["DeepSeek-V3.2"], PRESETS["DeepSeek-V3"]
    for length in (100, 2048, 5000):
        found = decode_flops(with_indexer, length).attention
        scores = 61 * 64 * 2 * 128 * length
        assert found == decode_flops(without, min(length, 2048)).attention + scores


def test_a_layer_with_the_delta_rule_costs_the_same_at_every_length():
    preset = PRESETS["Qwen3-Next"]
    state = 36 * 3 * 2 * 32 * 128 * 128  # what the state gives, what is added, what is read
    for length in (1, 7, 3000):
        pairs = 12 * 16 * 4 * 256 * length
        assert decode_flops(preset, length).attention == state + pairs


def test_gpt3_takes_the_papers_two_flops_per_parameter():
    # Brown et al., table D.1: 3.14e23 for 300e9 tokens, three passes (forward and twice backward).
    flops = prefill_flops(PRESETS["GPT-3"], 2048)
    per_token = (flops.total - flops.attention) / 2048
    np.testing.assert_allclose(per_token, 3.14e23 / 300e9 / 3, rtol=0.01)


@pytest.mark.parametrize(
    ("name", "length", "dtype", "expected"),
    [
        ("Llama-3-8B", 1, "bfloat16", 131072),
        ("Llama-3-8B", 8192, "float16", 2**30),
        ("Llama-3-70B", 1, "float16", 327680),
        ("GPT-3", 1, "float16", 4718592),
        ("GPT-3", 2048, "float32", 18 * 2**30),
        ("GPT-2 Small", 1024, "float16", 36 * 2**20),
        ("Mistral-7B", 4096, "float16", 2**29),
        ("Mistral-7B", 8192, "float16", 2**29),
        ("DeepSeek-V3", 1, "bfloat16", 61 * (512 + 64) * 2),
        ("DeepSeek-V3.2", 1, "bfloat16", 61 * (512 + 64 + 128) * 2),
        ("gpt-oss-20b", 1000, "bfloat16", 12 * (1000 + 128) * 2 * 8 * 64 * 2),
        ("Gemma-3-27B", 2000, "bfloat16", (10 * 2000 + 52 * 1024) * 2 * 16 * 128 * 2),
        (
            "Qwen3-Next",
            100,
            "float32",
            12 * 100 * 2 * 2 * 256 * 4 + 36 * (32 * 128 * 128 + 8192 * 3) * 4,
        ),
    ],
)
def test_cache_bytes(name, length, dtype, expected):
    assert kv_cache_bytes(PRESETS[name], length, dtype) == expected


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_cache_is_as_large_as_its_arrays(dtype, size):
    arrays = [np.zeros((2, TINY.num_kv_heads, 5, TINY.head_dim)) for _ in range(TINY.layers)]
    assert kv_cache_bytes(TINY, 5, dtype) == size * sum(array.size for array in arrays)
    assert weight_bytes(PRESETS["GPT-2 Small"], dtype) == size * 124439808


@pytest.mark.parametrize(("name", "groups"), [("Llama-3-8B", 4), ("Llama-3-70B", 8)])
def test_groups_divide_the_cache(name, groups):
    preset = PRESETS[name]
    saved = saved_by_groups(preset, 1000)
    kept = kv_cache_bytes(preset, 1000)
    assert saved.kv_cache_bytes == (groups - 1) * kept
    # W_k and W_v of E × E instead of E × E / groups
    weights = 2 * preset.layers * preset.d_model * (preset.d_model - preset.d_model // groups)
    assert saved.parameters == weights
    assert saved.decode_flops == 2 * weights
    assert saved.prefill_flops == 2 * 1000 * weights


@pytest.mark.parametrize("name", ["GPT-2 Small", "GPT-3"])
def test_heads_that_are_not_grouped_save_nothing(name):
    assert set(asdict(saved_by_groups(PRESETS[name], 7)).values()) == {0}


@pytest.mark.parametrize("name", PRESETS)
def test_everything_is_an_integer(name):
    preset = PRESETS[name]
    found = [parameters(preset), prefill_flops(preset, 3)]
    found += [decode_flops(preset, 3), saved_by_groups(preset, 3)] if preset.is_causal else []
    assert {type(n) for part in found for n in asdict(part).values()} == {int}


def test_numpys_integers_do_not_wrap_around():
    wide = replace(PRESETS["GPT-3"], d_model=np.int32(12288), vocabulary=np.int32(50257))
    assert wide == PRESETS["GPT-3"]
    assert parameters(wide) == parameters(PRESETS["GPT-3"])
    assert prefill_flops(wide, np.int32(2048)) == prefill_flops(wide, 2048)


@pytest.mark.parametrize(
    ("written", "name"),
    [("gpt3", "GPT-3"), ("GPT-3", "GPT-3"), ("bert_base", "BERT-Base"),
     ("gpt2 small", "GPT-2 Small"), ("LLAMA3-70b", "Llama-3-70B"), ("mistral7b", "Mistral-7B")],
)  # fmt: skip
def test_names_are_found_however_they_are_written(written, name):
    assert find(written) is PRESETS[name]


def test_names_differ_in_more_than_punctuation():
    for name, preset in PRESETS.items():
        assert find(name) is preset
        assert preset.name == name


GPT3 = PRESETS["GPT-3"]
BERT = PRESETS["BERT-Base"]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: find("gpt5"), ValueError, "preset is 'gpt5': expected one of BERT-Base, BERT-L"),
        (lambda: find(3), TypeError, "preset is 3: expected a name, one of BERT-Base"),
        (lambda: prefill_flops(GPT3, 2049), ValueError,
         "length is 2049 but GPT-3 was made for at most 2048 tokens: expected 1 to 2048"),
        (lambda: decode_flops(GPT3, 0), ValueError, "length is 0: expected an integer of at least"),
        (lambda: kv_cache_bytes(GPT3, 1.0), TypeError, "length is 1.0: expected an integer"),
        (lambda: kv_cache_bytes(GPT3, True), TypeError, "length is True: expected an integer"),
        (lambda: kv_cache_bytes(GPT3, 1, "int8"), ValueError,
         "dtype is 'int8': expected one of 'float32', 'float16', 'bfloat16'"),
        (lambda: weight_bytes(GPT3, np.float16), ValueError, "expected one of 'float32'"),
        (lambda: decode_flops(PRESETS["BERT-Base"], 1), ValueError,
         "BERT-Base is an encoder, which sees all tokens at once: it has no decode step"),
        (lambda: kv_cache_bytes(PRESETS["BERT-Base"], 1), ValueError, "and no cache"),
        (lambda: replace(GPT3, num_kv_heads=7), ValueError,
         "num_kv_heads is 7 but num_heads is 96: H must be a multiple of Hkv"),
        (lambda: replace(GPT3, d_model=0), ValueError, "d_model is 0: expected an integer of at"),
        (lambda: replace(GPT3, layers=1.5), TypeError, "layers is 1.5: expected an integer"),
        (lambda: replace(GPT3, window=0), ValueError, "window is 0: expected an integer of at"),
        (lambda: replace(BERT, window=4), ValueError,
         "window is 4 but is_causal is False: only a decoder has a window"),
        (lambda: replace(GPT3, is_gated="no"), TypeError, "is_gated is 'no': expected True or F"),
        (lambda: replace(GPT3, is_causal=1), TypeError, "is_causal is 1: expected True or False"),
        (lambda: prefill_flops("gpt3", 1), TypeError, "preset is 'gpt3': expected a Preset, as fi"),
        (lambda: decode_flops("gpt3", 1), TypeError, "preset is 'gpt3': expected a Preset"),
        (lambda: kv_cache_bytes("gpt3", 1), TypeError, "preset is 'gpt3': expected a Preset"),
        (lambda: weight_bytes("gpt3"), TypeError, "preset is 'gpt3': expected a Preset"),
        (lambda: saved_by_groups("gpt3", 1), TypeError, "preset is 'gpt3': expected a Preset"),
    ],
)  # fmt: skip
def test_what_no_model_has(call, error, sentence):
    with pytest.raises(error) as caught:
        call()
    assert sentence in str(caught.value)
