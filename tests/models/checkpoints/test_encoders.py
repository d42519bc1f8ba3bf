"""BERT's and T5's checkpoints that transformers writes: the same rows and logits."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from models.plain import Letters

from minimha.explain import Trace
from minimha.models import load
from minimha.models.checkpoints import modernbert
from minimha.models.checkpoints.settings import Settings

torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

IDS = [3, 17, 42, 8, 90, 5, 11, 60, 22, 96, 0, 33]
TYPES = [0] * 5 + [1] * 7
TARGET = [0, 42, 7, 7, 31, 64, 2]
BERT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "initializer_factor": 1.5,
    "relative_attention_max_distance": 9, "decoder_start_token_id": 0,
}  # fmt: skip
T5S = {
    "T5": {},
    "T5 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def written(kind, config, folder):
    """A model of transformers, written to ``folder``."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # transformers' own
        model = kind(config).eval()
        for tensor in model.parameters():
            if tensor.ndim == 1:  # gains and biases begin as ones and zeros
                tensor += 0.3 * torch.randn(tensor.shape)
        model.save_pretrained(folder)
    return model


def close(got, wanted):
    wanted = wanted[0].detach().numpy()
    return np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def bert(kind, folder):
    return written(kind, transformers.BertConfig(**BERT, attn_implementation="eager"), folder)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_a_masked_language_models_logits_are_transformers(name, tmp_path):
    theirs, model = bert(getattr(transformers, name), tmp_path), load(tmp_path)
    for types in (None, TYPES):
        given = None if types is None else torch.tensor([types])
        with torch.no_grad():
            outputs = theirs(torch.tensor([IDS]), token_type_ids=given)
        got = model.logits(IDS, types)
        assert got.dtype == np.float32
        assert close(got, outputs[0])
    trace = Trace()
    np.testing.assert_array_equal(model.logits(IDS, TYPES, tap=trace), got)
    assert {"embedded_normed", "weights[layer 2]", "post_residual_normed[layer 2]"} <= set(trace)


@pytest.mark.parametrize("name", ["Roberta", "XLMRoberta", "Camembert"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "Model"])
def test_robertas_rows_and_logits_are_transformers(name, head, tmp_path):
    settings = BERT | {"type_vocab_size": 1, "pad_token_id": 2, "layer_norm_eps": 1e-5}
    config = getattr(transformers, f"{name}Config")(**settings, attn_implementation="eager")
    theirs = written(getattr(transformers, f"{name}{head}"), config, tmp_path)
    model = load(tmp_path)
    assert model.config.max_length == 61
    ids = (IDS * 6)[:61]
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids]))[0]
    assert close((model.hidden if head == "Model" else model.logits)(ids), wanted)
    with pytest.raises(ValueError, match="ids has 62 tokens: the model has only 61 positions"):
        model.hidden([1] * 62)


MODERN = {
    "ModernBERT": {},
    "ModernBERT, biases": {
        "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
        "decoder_bias": False, "tie_word_embeddings": False, "local_attention": 7,
    },
    "ModernBERT, layer types": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", MODERN)
@pytest.mark.parametrize("head", ["ForMaskedLM", "Model"])
def test_modernberts_rows_and_logits_are_transformers(variant, head, tmp_path):
    settings = BERT | {"local_attention": 4, "pad_token_id": 0}
    config = transformers.ModernBertConfig(
        **settings | {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
        | MODERN[variant], attn_implementation="eager",
    )  # fmt: skip
    theirs = written(getattr(transformers, f"ModernBert{head}"), config, tmp_path)
    model = replace(load(tmp_path), tokenizer=Letters())
    call = model.hidden if head == "Model" else model.logits
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS]))[0]
        texts = ["abcdefghij", "klm", "nopqrstuvwxyz"]
        given = torch.zeros((3, 13), dtype=int)
        for row, text in zip(given, texts, strict=True):
            row[: len(text)] = torch.tensor(Letters().encode(text))
        mask = torch.arange(13) < torch.tensor([[len(text)] for text in texts])
        batch = theirs(given, attention_mask=mask.long())[0]
    trace = Trace()
    got = call(IDS, tap=trace)
    assert close(got, wanted)
    assert {"final_normed", "weights[layer 2]", "gated_product[layer 1]"} <= set(trace)
    assert "normed[layer 1]" in trace
    assert "normed[layer 0]" not in trace
    assert all(step.note for step in trace.steps)
    for text, found, row in zip(texts, call(texts), batch, strict=True):
        assert close(found, row[None, : len(text)])


def test_modernbert_as_it_is_published_has_two_bases():
    config = modernbert.read_config(Settings(BERT | {
        "model_type": "modernbert", "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "global_attn_every_n_layers": 2, "local_attention": 128,
    }))  # fmt: skip
    assert [rope.base for rope in config.ropes] == [160000.0, 10000.0, 160000.0]
    assert config.windows == (None, 129, None)
    with pytest.raises(ValueError, match="classifier_activation is not its hidden_activation"):
        modernbert.read_config(Settings(BERT | {"classifier_activation": "relu"}))


def test_several_texts_are_encoded_as_each_alone(tmp_path):
    bert(transformers.BertForMaskedLM, tmp_path)
    model = replace(load(tmp_path), tokenizer=Letters())
    texts = ["abcde", "fg", "hijklmn"]

    def check(got, wanted):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())

    for call in (model.hidden, model.logits):
        for found, text in zip(call(texts), texts, strict=True):
            check(found, call(text))
    together = model.hidden([IDS, IDS[::-1]], [TYPES, TYPES])
    check(together[1], model.hidden(IDS[::-1], TYPES))
    check(model.embed(texts), np.array([model.hidden(text).mean(axis=0) for text in texts]))
    check(model.embed("fg", "first"), model.hidden("fg")[0])


def test_an_untied_head_has_a_bias_of_its_own(tmp_path):
    config = transformers.BertConfig(**BERT, attn_implementation="eager", tie_word_embeddings=False)
    theirs = written(transformers.BertForMaskedLM, config, tmp_path)
    biases = theirs.cls.predictions.decoder.bias, theirs.cls.predictions.bias
    assert not torch.equal(*biases)
    with torch.no_grad():
        assert close(load(tmp_path).logits(IDS), theirs(torch.tensor([IDS])).logits)


def test_without_a_head_there_are_rows_and_no_logits(tmp_path):
    theirs, model = bert(transformers.BertModel, tmp_path), load(tmp_path)
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS]), token_type_ids=torch.tensor([TYPES]))
    assert close(model.hidden(IDS, TYPES), wanted.last_hidden_state)
    with pytest.raises(ValueError, match="the checkpoint has no head of a masked language model"):
        model.logits(IDS)
    for types in ([0] * 11, [2] * 12):
        with pytest.raises(ValueError, match=r"types is \[.*: expected one number from 0 to 1 for"):
            model.hidden(IDS, types)
    with pytest.raises(ValueError, match="ids has 65 tokens: the model has only 64 positions"):
        model.hidden([1] * 65)


@pytest.fixture(params=T5S)
def t5(request, tmp_path):
    config = transformers.T5Config(**T5, **T5S[request.param])
    theirs = written(transformers.T5ForConditionalGeneration, config, tmp_path)
    return theirs, load(tmp_path)


def test_t5s_logits_are_transformers_at_once_and_token_by_token(t5):
    theirs, model = t5
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS]), decoder_input_ids=torch.tensor([TARGET]))
    memory = model.memory(IDS)
    assert close(memory, wanted.encoder_last_hidden_state)
    got = model.logits(memory, TARGET)
    assert got.dtype == np.float32
    assert close(got, wanted.logits)
    cache = model.new_cache(memory)
    steps = [model.logits(memory, [token], cache=cache) for token in TARGET]
    assert close(np.concatenate(steps), wanted.logits)
    trace = Trace()
    np.testing.assert_array_equal(model.logits(memory, TARGET, tap=trace), got)
    assert trace["weights[cross 1]"].shape[-2:] == (len(TARGET), len(IDS))


def test_t5_writes_what_is_likeliest(t5):
    theirs, model = t5
    target = [0]
    for got in model.generate(IDS, 6, top_k=1):
        with torch.no_grad():
            logits = theirs(torch.tensor([IDS]), decoder_input_ids=torch.tensor([target])).logits
        assert got == int(logits[0, -1].argmax())
        target.append(got)
    assert len(target) == 7
    with pytest.raises(ValueError, match=r"memory has shape \(12, 31\): expected \(Ls, E\)"):
        model.logits(np.zeros((12, 31)), [0])
    with pytest.raises(ValueError, match=r"target\[0\] is 97: expected 0 to 96"):
        model.logits(np.zeros((12, 32)), [97])
