"""Whole models of transformers that call minimha: they say what they say with "eager"."""

import pytest
from whole_models import DECODERS, ENCODER_DECODERS, whole_model

from minimha.dialects import transformers_interface
from minimha.dialects.transformers import register

torch = pytest.importorskip("torch", reason="torch, in which the models are, is missing")
pytest.importorskip("transformers", reason="transformers is missing")

STEPS = 6


def prompt(name):
    """Nine tokens, more than a window, and seven after padding."""
    if name == "Whisper":
        features = torch.randn(2, 8, 16)
        return {"input_features": features, "decoder_input_ids": torch.ones(2, 9).long()}
    ids, mask = torch.randint(3, 64, (2, 9)), torch.ones(2, 9).long()
    ids[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, **given):
    """The tokens that greedy decoding adds, and the logits that chose each."""
    done = model.generate(
        **given, do_sample=False, max_new_tokens=STEPS, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return done.sequences, torch.stack(done.logits)


@pytest.fixture
def received(monkeypatch):
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
def test_a_whole_model_decodes_as_with_eager(name, received):
    model, given = whole_model(name), prompt(name)
    model.set_attn_implementation("eager")
    tokens, logits = generated(model, **given)
    assert not received
    model.set_attn_implementation("minimha")
    our_tokens, our_logits = generated(model, **given)
    # Two layers in each step; the other side encodes once and is attended to in each layer.
    assert len(received) == (2 * STEPS if name in DECODERS else 2 + 4 * STEPS)
    assert_logits_close(our_logits, logits)
    assert torch.equal(our_tokens, tokens)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
@torch.no_grad()
def test_a_prompt_without_padding_is_causal_without_a_mask(name, received):
    model, given = whole_model(name), prompt(name) | {"use_cache": False}
    if name != "Whisper":
        given["attention_mask"] = None
    if name in ENCODER_DECODERS:
        given["decoder_input_ids"] = torch.randint(3, 64, (2, 9))
    model.set_attn_implementation("eager")
    logits = model(**given).logits
    model.set_attn_implementation("minimha")
    assert_logits_close(model(**given).logits, logits)
    assert received


def llama(**settings):
    register()
    return whole_model("Llama", attn_implementation="minimha", **settings)


IDS = torch.arange(3, 12)[None]


@torch.no_grad()
def test_bfloat16_errs_at_most_twice_as_much_as_eager(received):
    model = llama()
    exact = model(IDS).logits
    model.bfloat16()
    ours = model(IDS).logits
    assert received[-1].dtype == ours.dtype == torch.bfloat16
    model.set_attn_implementation("eager")
    error, eager_error = ((x - exact).abs().mean() for x in (ours, model(IDS).logits))
    assert error <= 2 * eager_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_where_they_are(dtype, received):
    x = torch.randn(2, 5, 4, 8, dtype=dtype).transpose(1, 2)
    output, weights = transformers_interface.attention_forward(None, x, x, x)
    assert received[0].data_ptr() == x.data_ptr()
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
    ours, _ = generated(model, inputs=IDS, cache_implementation="static", disable_compile=True)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, generated(model, inputs=IDS)[0])


@torch.no_grad()
def test_a_compiled_model_calls_minimha(received):
    model = llama()
    wanted = model(IDS).logits
    received.clear()
    torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, wanted)
    assert len(received) == 2


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
    ours = generated(model, inputs=IDS)[1]
    model.set_attn_implementation("eager")
    assert_logits_close(ours, generated(model, inputs=IDS)[1])
    model.set_attn_implementation("minimha-none")
    with pytest.raises(ValueError, match="backend is 'none': expected auto, dense"):
        generated(model, inputs=IDS)


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
