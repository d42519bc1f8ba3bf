"""Whole models of transformers that call minimha: they say what they say with "eager"."""

import pytest

from minimha.dialects import transformers_interface
from minimha.dialects.transformers import register

torch = pytest.importorskip("torch", reason="torch, in which the models are, is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

DECODERS = [
    "Apertus", "Arcee", "BioGpt", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Ernie4_5",
    "Exaone4", "FlexOlmo", "GPT2", "GPTBigCode", "GPTNeoX", "Gemma", "Gemma2", "Gemma3Text",
    "Glm", "Glm4", "GptOss", "Granite", "GraniteMoe", "Helium", "Llama", "Mistral", "Mixtral",
    "ModernBertDecoder", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon",
    "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm",
    "Starcoder2",
]  # fmt: skip
ENCODER_DECODERS = ["Bart", "MBart", "Marian", "Pegasus", "T5", "UMT5", "Whisper"]
SIZES = {  # by the names that configs have for them
    name: size
    for size, names in {
        32: "hidden_size d_model n_embd word_embed_proj_dim",
        64: "intermediate_size d_ff n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim vocab_size "
        "moe_intermediate_size shared_expert_intermediate_size",
        4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts sliding_window",
        2: "num_hidden_layers n_layer num_layers num_decoder_layers encoder_layers decoder_layers "
        "num_key_value_heads num_experts_per_tok n_group topk_group",
        8: "head_dim d_kv relative_attention_num_buckets kv_lora_rank q_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim num_mel_bins max_source_positions",
        40: "max_position_embeddings n_positions max_target_positions",
    }.items()
    for name in names.split()
}
SETTINGS = {
    "Gemma2": {"attn_logit_softcapping": 2.0},
    "DeepseekV2": {"num_key_value_heads": 4},
    "DeepseekV3": {"num_key_value_heads": 4},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
STEPS = 6


def whole_model(name, **settings):
    """A small model with random weights, large enough for attention to matter."""
    Config = getattr(transformers, f"{name}Config")
    sizes = {key: size for key, size in SIZES.items() if hasattr(Config, key)}
    config = Config(**sizes | ENDS | SETTINGS.get(name, {}) | settings)
    kinds = [f"{name.removesuffix('Text')}ForCausalLM", f"{name}LMHeadModel"]
    if name in ENCODER_DECODERS:
        kinds = [f"{name}ForConditionalGeneration", f"{name}MTModel"]
    kind = next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


def prompt(name):
    """Nine tokens, more than a window, and seven after padding."""
    if name == "Whisper":
        features = torch.randn(2, 8, 16)
        return {"input_features": features, "decoder_input_ids": torch.ones(2, 9).long()}
    ids, mask = torch.randint(3, 64, (2, 9)), torch.ones(2, 9).long()
    ids[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def said(model, **given):
    """The tokens that greedy decoding adds, and the logits that chose each."""
    done = model.generate(
        **given, do_sample=False, max_new_tokens=STEPS, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return done.sequences, torch.stack(done.logits)


@pytest.fixture
def heard(monkeypatch):
    """The queries of every call of minimha."""
    queries, compute = [], transformers_interface.attention

    def hear(q, *others, **options):
        queries.append(q)
        return compute(q, *others, **options)

    monkeypatch.setattr(transformers_interface, "attention", hear)
    register()
    return queries


def assert_logits_close(ours, eager):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5 * eager.abs().max().item())


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_a_whole_model_decodes_as_with_eager(name, heard):
    model, given = whole_model(name), prompt(name)
    model.set_attn_implementation("eager")
    tokens, logits = said(model, **given)
    assert not heard
    model.set_attn_implementation("minimha")
    our_tokens, our_logits = said(model, **given)
    # Two layers in each step; the other side encodes once and is attended to in each layer.
    assert len(heard) == (2 * STEPS if name in DECODERS else 2 + 4 * STEPS)
    assert_logits_close(our_logits, logits)
    assert torch.equal(our_tokens, tokens)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
@torch.no_grad()
def test_a_prompt_without_padding_is_causal_without_a_mask(name, heard):
    model, given = whole_model(name), prompt(name) | {"use_cache": False}
    if name != "Whisper":
        given["attention_mask"] = None
    if name in ENCODER_DECODERS:
        given["decoder_input_ids"] = torch.randint(3, 64, (2, 9))
    model.set_attn_implementation("eager")
    logits = model(**given).logits
    model.set_attn_implementation("minimha")
    assert_logits_close(model(**given).logits, logits)
    assert heard


def llama(**settings):
    register()
    return whole_model("Llama", attn_implementation="minimha", **settings)


IDS = torch.arange(3, 12)[None]


@torch.no_grad()
def test_bfloat16_errs_at_most_twice_as_much_as_eager(heard):
    model = llama()
    exact = model(IDS).logits
    model.bfloat16()
    ours = model(IDS).logits
    assert heard[-1].dtype == ours.dtype == torch.bfloat16
    model.set_attn_implementation("eager")
    error, eager_error = ((x - exact).abs().mean() for x in (ours, model(IDS).logits))
    assert error <= 2 * eager_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_where_they_are(dtype, heard):
    x = torch.randn(2, 5, 4, 8, dtype=dtype).transpose(1, 2)
    output, weights = transformers_interface.attention_forward(None, x, x, x)
    assert heard[0].data_ptr() == x.data_ptr()
    assert (output.shape, output.dtype, weights) == ((2, 5, 4, 8), dtype, None)


@torch.no_grad()
def test_weights_on_request_are_those_of_eager():
    model = llama()
    ours = model(IDS, output_attentions=True).attentions
    model.set_attn_implementation("eager")
    for a, b in zip(ours, model(IDS, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(a, b)


def test_a_static_cache_has_keys_that_are_not_there_yet():
    model = llama()
    ours, _ = said(model, inputs=IDS, cache_implementation="static", disable_compile=True)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, said(model, inputs=IDS)[0])


@torch.no_grad()
def test_a_compiled_model_calls_minimha(heard):
    model = llama()
    wanted = model(IDS).logits
    heard.clear()
    torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, wanted)
    assert len(heard) == 2


@torch.no_grad()
def test_a_mask_of_ones_own_is_added():
    model, mask = llama(), torch.randn(1, 1, 9, 9)
    ours = model(IDS, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    assert_logits_close(ours, model(IDS, attention_mask=mask).logits)


def test_a_name_and_a_backend_can_be_chosen():
    register("minimha-tiled", backend="tiled")
    register("minimha-none", backend="none")
    model = whole_model("Llama", attn_implementation="minimha-tiled")
    ours = said(model, inputs=IDS)[1]
    model.set_attn_implementation("eager")
    assert_logits_close(ours, said(model, inputs=IDS)[1])
    model.set_attn_implementation("minimha-none")
    with pytest.raises(ValueError, match="backend is 'none': expected auto, dense"):
        said(model, inputs=IDS)


X = torch.randn(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda forward: llama()(IDS), TypeError,
         r"query, key or value requires grad, .* under torch.no_grad\(\)"),
        (lambda forward: llama(attention_dropout=0.1).train()(IDS), ValueError,
         "dropout is 0.1: expected 0, minimha computes inference: call model.eval"),
        (lambda forward: forward(None, X, X, X, indices=X), ValueError,
         "indices is given: minimha's function does not compute keys that are selected for each"),
        (lambda forward: forward(None, X, X, X, torch.ones(1, 3, dtype=int)), TypeError,
         "attention_mask has dtype int64: .*it looks like Hugging Face's attention_mask"),
        (lambda forward: forward(None, X, X, X, torch.ones(2, 3)), ValueError,
         r"attention_mask has shape \(2, 3\)"),
        (lambda forward: forward(None, X, X, X, position_bias=torch.ones(2, 3)), ValueError,
         r"position_bias has shape \(2, 3\)"),
        (lambda forward: forward(None, X, X, X[:, :, :2]), ValueError,
         "value has Lk=2 but key has Lk=3"),
        (lambda forward: forward(None, X, X, X, softcap=-1.0), ValueError, "softcap is -1.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(transformers_interface.attention_forward)
