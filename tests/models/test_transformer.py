"""Whole transformers against plain NumPy, token by token, traced, and their errors."""

from dataclasses import replace

import numpy as np
import pytest
from models import plain

from minimha.explain import Trace
from minimha.models.checkpoints import from_tensors

IDS = [3, 17, 22, 8, 0, 5, 11]
RNG = np.random.default_rng(0)
MODELS = {
    "gpt2": (plain.GPT2, plain.gpt2_tensors(RNG), plain.gpt2_logits),
    "llama": (plain.LLAMA, plain.llama_tensors(RNG), plain.llama_logits),
}


@pytest.fixture(params=MODELS)
def case(request):
    """A model, and the logits that it should have."""
    config, tensors, logits = MODELS[request.param]
    exact = {name: tensor.astype(float) for name, tensor in tensors.items()}
    return from_tensors(config, tensors), lambda ids: logits(exact, np.array(ids))


@pytest.fixture
def model():
    return from_tensors(*MODELS["gpt2"][:2])


def close(got, wanted):
    return np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_logits_are_those_of_the_papers(case):
    model, logits = case
    got = model.logits(IDS)
    assert got.dtype == np.float32
    assert got.shape == (len(IDS), 23)
    assert close(got, logits(IDS))


def test_a_cache_gives_the_same_logits_token_by_token_and_in_chunks(case):
    model, logits = case
    for sizes in ([1] * 7, [3, 1, 3], [7]):
        cache = model.new_cache()
        chunks = np.split(np.array(IDS), np.cumsum(sizes)[:-1])
        got = np.concatenate([model.logits(chunk, cache=cache) for chunk in chunks])
        assert close(got, logits(IDS)), sizes


def test_several_texts_at_once_give_the_logits_of_each(case):
    model, logits = case
    others = IDS[::-1]
    got = model.logits([IDS, others])
    assert got.shape == (2, len(IDS), 23)
    for each, ids in zip(got, (IDS, others), strict=True):
        assert close(each, logits(ids))
    cache = model.new_cache(num_texts=2)
    steps = [model.logits([[i], [j]], cache=cache) for i, j in zip(IDS, others, strict=True)]
    assert close(np.concatenate(steps, axis=1), got)
    with pytest.raises(ValueError, match="cache is for 2 texts but ids has 1"):
        model.logits(IDS, cache=cache)
    assert model.logits([IDS]).shape == (1, len(IDS), 23)


def test_texts_of_different_lengths_are_computed_together(case):
    model, logits = case
    model = replace(model, tokenizer=plain.Letters())
    texts = "abc", "dcbabc", "f"
    for got, text in zip(model.logits(texts), texts, strict=True):
        assert got.shape == (len(text), 23)
        assert close(got, logits(model.encode(text)))
    rows = model.hidden(list(texts))
    for pooling, wanted in (
        ("last", [row[-1] for row in rows]),
        ("first", [row[0] for row in rows]),
        ("mean", [row.mean(axis=0) for row in rows]),
    ):
        assert close(model.embed(texts, pooling), np.array(wanted)), pooling
        assert close(model.embed(texts[1], pooling), wanted[1]), pooling
    with pytest.raises(ValueError, match="pooling is 'max': expected"):
        model.embed(texts, "max")
    with pytest.raises(ValueError, match="texts of 1 to 6 tokens: with a cache, all must have"):
        model.logits(texts, cache=model.new_cache(num_texts=3))
    with pytest.raises(ValueError, match=r"ids\[1\] has shape \(0,\): expected"):
        model.logits(["a", ""])


def test_rotary_positions_go_on_where_the_caller_wants_it():
    model = from_tensors(*MODELS["llama"][:2])
    limit = model.config.max_length
    with pytest.raises(
        ValueError, match=f"has only {limit} positions, and computes more, untrained"
    ):
        model.logits([1] * (limit + 1))
    longer = replace(model, config=replace(model.config, max_length=limit + 1))
    exact = {name: tensor.astype(float) for name, tensor in MODELS["llama"][1].items()}
    assert close(
        longer.logits([1] * (limit + 1)), plain.llama_logits(exact, np.ones(limit + 1, int))
    )


@pytest.mark.parametrize("backend", ["tiled", "cpu"])
def test_every_backend_gives_the_same_logits(case, backend):
    model, logits = case
    assert close(model.logits(IDS, backend=backend), logits(IDS))


def test_a_traced_run_returns_the_same_bits_and_names_every_layer(case):
    model, _ = case
    trace = Trace()
    got = model.logits(IDS, tap=trace)
    np.testing.assert_array_equal(got, model.logits(IDS))
    np.testing.assert_array_equal(trace["logits"], got)
    for n in (0, 1):
        for name in ("x", "normed", "weights", "added", "activated", "feed_forward", "residual"):
            assert f"{name}[layer {n}]" in trace
    np.testing.assert_allclose(trace["weights[layer 1]"].sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(trace["x[layer 1]"], trace["residual[layer 0]"])


def test_the_residual_stream_can_be_unembedded_after_any_layer(model):
    trace = Trace()
    model.logits(IDS, tap=trace)
    last = model.unembed(trace["residual[layer 1]"])
    np.testing.assert_allclose(last, trace["logits"], rtol=1e-5, atol=1e-5)
    assert model.unembed(trace["residual[layer 0]"]).shape == (len(IDS), 23)


def test_steps_are_replaced_by_what_a_trace_shows_and_the_rest_follows(case):
    model, logits = case
    theirs, trace = [4, 9, 1, 7, 2, 6, 3], Trace()
    model.logits(theirs, tap=trace)
    for step in ("embedded", "residual[layer 0]", "residual[layer 1]", "final_normed"):
        replaced = Trace()
        got = model.logits(IDS, tap=replaced, replace={step: trace[step]})
        assert close(got, logits(theirs)), step
        np.testing.assert_array_equal(replaced[step], trace[step])
    none = [[[0, 0]] * 7] * model.config.num_heads  # in integers, where no head finds anything
    given = {"head_output[layer 1]": np.repeat(none, model.config.head_dim // 2, axis=2).tolist()}
    zeros = {"concat[layer 1]": np.zeros((7, 8))}
    assert close(model.logits(IDS, replace=given), model.logits(IDS, replace=zeros))
    greedy = model.generate(
        IDS, 1, top_k=1, replace={"residual[layer 1]": trace["residual[layer 1]"]}
    )
    assert list(greedy) == [logits(theirs)[-1].argmax()]
    greedy = model.generate(IDS, 3, top_k=1, replace={"logits": trace["logits"]})
    assert next(greedy) == trace["logits"][-1].argmax()
    assert len(list(greedy)) == 2


@pytest.mark.parametrize("method", ["logits", "hidden", "generate"])
@pytest.mark.parametrize(
    ("replace", "sentence"),
    [
        (
            {"residual[layer 1]": np.zeros((6, 8))},
            r"replace's 'residual\[layer 1\]' has shape \(6, 8",
        ),
        ({"residual[layer 1]": np.zeros((8, 7))}, r"expected shape \(1, 7, 8\) and float32"),
        ({"embedded": [[1, 2], [3]]}, "replace's 'embedded' is a list: expected shape"),
        ({"embedded": np.ones((7, 8), complex)}, "has shape \\(7, 8\\) and complex128: expected"),
        ({"embedded": None}, "replace's 'embedded' is a NoneType: expected shape"),
        ({"resdual[layer 1]": 0}, r"no such step \(nearest: residual\[layer 1\]\)"),
        ([1], r"replace is \[1\]: expected a dict from names of steps to arrays"),
    ],
)
def test_what_cannot_replace_a_step_is_named(model, method, replace, sentence):
    count = (1,) if method == "generate" else ()
    with pytest.raises((TypeError, ValueError), match=sentence):
        list(getattr(model, method)(IDS, *count, replace=replace))


def test_hidden_rows_are_those_after_the_final_norm(case):
    model, _ = case
    trace = Trace()
    got = model.hidden(IDS, tap=trace)
    np.testing.assert_array_equal(got, trace["final_normed"])
    np.testing.assert_allclose(got @ model.W_vocab, model.logits(IDS), rtol=1e-4, atol=1e-4)
    cache = model.new_cache()
    steps = [model.hidden([id], cache=cache) for id in IDS]
    np.testing.assert_allclose(np.concatenate(steps), got, rtol=1e-4, atol=1e-4)


def test_generation_ends_after_a_token_that_ends_a_text(case):
    model, _ = case
    drawn = list(model.generate([4, 9], 8, top_k=1, eos=()))
    assert len(drawn) == 8
    until = drawn[: drawn.index(drawn[3]) + 1]
    for eos in (drawn[3], [drawn[3], 1], np.array([drawn[3]])):
        assert list(model.generate([4, 9], 8, top_k=1, eos=eos)) == until
    ending = replace(model, config=replace(model.config, eos=(drawn[3],)))
    assert list(ending.generate([4, 9], 8, top_k=1)) == until
    assert list(ending.generate([4, 9], 8, top_k=1, eos=())) == drawn
    for eos, sentence in ((1.5, "eos has dtype float64: expected integers"), ("</s>", "eos has")):
        with pytest.raises(TypeError, match=sentence):
            model.generate([4], 1, eos=eos)


def test_greedy_generation_takes_the_likeliest_token_after_all_before(case):
    model, logits = case
    ids = [4, 9]
    for got in model.generate(ids, 10, top_k=1):
        assert got == logits(ids)[-1].argmax()
        ids.append(got)
    assert len(ids) == 12


def test_generation_is_seeded_and_draws_with_the_models_probabilities(model):
    drawn = [list(model.generate(IDS, 3, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    logits = plain.gpt2_logits(MODELS["gpt2"][1], np.array(IDS))[-1]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    first = [next(model.generate(IDS, 1, seed=seed)) for seed in range(400)]
    counts = np.bincount(first, minlength=23)
    assert np.abs(counts - 400 * p).max() <= 4 * np.sqrt(400 * (p * (1 - p)).max())


def test_weights_are_used_where_they_are(case):
    """A view of the given arrays: a checkpoint takes its memory once."""
    model, _ = case
    block = model.blocks[0]
    attention, feed_forward = block.attention, block.feed_forward
    given = next(tensors for _, tensors, _ in MODELS.values() if np.shares_memory(
        model.embeddings.tokens, tensors.get("wte.weight", tensors.get("model.embed_tokens.weight"))
    ))  # fmt: skip
    for W in (attention.W_q, attention.W_o, feed_forward.W_in, feed_forward.W_out, model.W_vocab):
        assert any(np.shares_memory(W, tensor) for tensor in given.values())


class Words:
    """A tokenizer that splits at spaces."""

    words = ("the", "cat", "sat")

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(self.words[n] for n in ids)

    def label(self, id):
        return self.words[id]


def test_text_goes_through_the_tokenizer():
    model = from_tensors(*MODELS["gpt2"][:2], Words())
    np.testing.assert_array_equal(model.logits("the cat sat"), model.logits([0, 1, 2]))


@pytest.mark.parametrize(
    ("ids", "error", "sentence"),
    [
        ("the cat", ValueError, "ids is text, but the model has no tokenizer: give the tokens'"),
        ([], ValueError, r"ids has shape \(0,\): expected \(L,\) with at least 1 token"),
        ([[[1, 2]]], ValueError, r"ids has shape \(1, 1, 2\): expected \(L,\)"),
        (np.zeros((2, 0), int), ValueError, r"ids\[0\] has shape \(0,\): expected \(L,\)"),
        ([[1, 2], [3, 23]], ValueError, r"ids\[1\]\[1\] is 23: expected 0 to 22"),
        ([1, 23], ValueError, r"ids\[1\] is 23: expected 0 to 22, the vocabulary's tokens"),
        ([-1], ValueError, r"ids\[0\] is -1: expected 0 to 22"),
        ([1.0], TypeError, "ids has dtype float64: expected integers"),
        ([1] * 13, ValueError, "ids has 13 tokens: the model has only 12 positions"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(model, ids, error, sentence):
    with pytest.raises(error, match=sentence):
        model.logits(ids)


def test_a_text_longer_than_the_positions_is_refused_before_it_is_computed(model):
    with pytest.raises(ValueError, match="num_tokens is 7 after 7 tokens: the model has only 12"):
        model.generate(IDS, 7)
    assert len(list(model.generate(IDS, 6))) == 6
    cache = model.new_cache()
    model.logits(IDS, cache=cache)
    with pytest.raises(ValueError, match="ids has 6 tokens after 7 earlier ones: the model has"):
        model.logits([1] * 6, cache=cache)
    cache = model.new_cache(8)
    model.logits(IDS, cache=cache)
    with pytest.raises(ValueError, match="together they exceed capacity=8"):
        model.logits([1, 2], cache=cache)


def test_bad_options_of_generation_are_refused_at_the_call(model):
    with pytest.raises(ValueError, match="temperature is 0: expected a positive number"):
        model.generate(IDS, 2, temperature=0)
    with pytest.raises(ValueError, match="num_tokens is 0: expected an integer of at least 1"):
        model.generate(IDS, 0)
    with pytest.raises(TypeError, match="seed is 'x': expected an integer"):
        model.generate(IDS, 1, seed="x")
