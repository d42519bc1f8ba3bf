"""Heads removed, what is predicted on the way, and what heads do, all against plain NumPy."""

import numpy as np
import pytest
from models import plain

from minimha.models import interpretability
from minimha.models.checkpoints import from_tensors
from minimha.models.interpretability import Head
from minimha.models.world.questions import passages, subjects

IDS = np.array([1, 5, 2, 9, 1, 5])
RNG = np.random.default_rng(0)
GPT2, LLAMA = plain.gpt2_tensors(RNG), plain.llama_tensors(RNG)
D = plain.GPT2["n_embd"] // plain.GPT2["n_head"]


@pytest.fixture
def model():
    return from_tensors(plain.GPT2, GPT2)


def logits_of_gpt2(changed):
    return plain.gpt2_logits({name: W.astype(float) for name, W in (GPT2 | changed).items()}, IDS)


@pytest.mark.parametrize("head", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_without_a_head_its_rows_of_w_o_are_zero(model, head):
    layer, number = head
    name = f"h.{layer}.attn.c_proj.weight"
    W_o = GPT2[name].copy()
    W_o[number * D : (number + 1) * D] = 0
    before = model.logits(IDS)
    found = interpretability.without_heads(model, [Head(*head)]).logits(IDS)
    np.testing.assert_allclose(found, logits_of_gpt2({name: W_o}), atol=5e-5)
    np.testing.assert_array_equal(model.logits(IDS), before)


def test_without_several_heads(model):
    names = [f"h.{layer}.attn.c_proj.weight" for layer in (0, 1)]
    found = interpretability.without_heads(
        model, [Head(*place) for place in np.ndindex(2, 2)]
    ).logits(IDS)
    expected = logits_of_gpt2({name: np.zeros_like(GPT2[name]) for name in names})
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_removed_head_gives_its_mean_where_means_are_given(family):
    config, tensors = (plain.GPT2, GPT2) if family == "gpt2" else (plain.LLAMA, LLAMA)
    model, head = from_tensors(config, tensors), Head(1, 1)
    means = RNG.normal(size=(2, model.config.num_heads, model.config.head_dim))

    def tap(name, value):
        if name == "head_output[layer 1]":
            value = value.copy()
            value[0, 1] = means[1, 1]
        return value

    expected = model.logits(IDS, backend="dense", tap=tap)
    found = interpretability.without_heads(model, [head], means).logits(IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-5)


def test_mean_outputs_are_over_all_tokens(model):
    outputs = []

    def tap(name, value):
        if name.startswith("head_output"):
            outputs.append(value[0])
        return value

    for prompt in (IDS, IDS[:2]):
        model.logits(prompt, backend="dense", tap=tap)
    by_layer = [np.concatenate(outputs[layer::2], axis=1) for layer in (0, 1)]
    found = interpretability.mean_outputs(model, [IDS, IDS[:2]])
    np.testing.assert_allclose(found, [o.mean(axis=1) for o in by_layer], rtol=1e-5)


def test_the_lens_is_the_unembedded_stream_and_ends_in_the_logits(model):
    found = interpretability.lens(model, IDS, range(6))
    assert found.shape == (3, 6, 23)
    np.testing.assert_allclose(found[-1], logits_of_gpt2({}), atol=5e-5)
    none = {name: np.zeros_like(W) for name, W in GPT2.items() if "c_proj" in name}
    np.testing.assert_allclose(found[0], logits_of_gpt2(none), atol=5e-5)
    half = {name: W for name, W in none.items() if name.startswith("h.1.")}
    np.testing.assert_allclose(found[1], logits_of_gpt2(half), atol=5e-5)


def test_the_lens_is_of_the_positions_and_layers_that_are_chosen(model):
    whole = interpretability.lens(model, IDS, range(6))
    chosen = interpretability.lens(model, IDS)
    assert chosen.shape == (3, 1, 23)
    np.testing.assert_allclose(chosen, whole[:, -1:], rtol=1e-5)
    np.testing.assert_allclose(
        interpretability.lens(model, IDS, [0, -2], [2, 1]), whole[[2, 1]][:, [0, 4]], rtol=1e-5
    )
    zeros = interpretability.lens(model, IDS, replace={"residual[layer 1]": np.zeros((6, 8))})
    np.testing.assert_allclose(zeros[2, 0], GPT2["wte.weight"] @ GPT2["ln_f.bias"], rtol=1e-4)
    for given, sentence in (
        ({"positions": 6}, "positions is 6: expected -6 to 5"),
        ({"layers": [0, 3]}, r"layers is \[0, 3\]: expected -3 to 2"),
        ({"replace": {"residual[1]": 0}}, r"no such step \(nearest: residual\[layer 1\]\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            interpretability.lens(model, IDS, **given)


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        ("previous", {(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)}),
        ("first", {(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)}),
        ("itself", {(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)}),
        ("matching", {(4, 0), (5, 1)}),
        ("induction", {(4, 1), (5, 2)}),
    ],
)
def test_patterns_mark_the_keys_that_their_names_say(pattern, pairs):
    assert {
        tuple(pair) for pair in np.argwhere(interpretability.PATTERNS[pattern](IDS)).tolist()
    } == pairs


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("the cat that saw the dogs was wet .", [(5, 1)]),
        ("it was wet . the cats near the dog were wet .", [(8, 5)]),
        ("the cat was wet .", []),
        ("anna saw the cat . the dog was wet .", []),
    ],
)
def test_subjects(words, pairs):
    assert [tuple(pair) for pair in np.argwhere(subjects(words.split())).tolist()] == pairs


def test_scores_are_mean_shares_of_attention(model):
    kept = {}

    def tap(name, value):
        kept[name] = value
        return value

    model.logits(IDS, backend="dense", tap=tap)
    found = interpretability.behaviours(model, [IDS])
    assert found.names == tuple(interpretability.PATTERNS)
    assert found.counts.tolist() == [5, 5, 5, 2, 2]
    for layer, number in np.ndindex(2, 2):
        A = kept[f"weights[layer {layer}]"][0, number]
        expected = [
            np.mean([A[i, i - 1] for i in range(1, 6)]),
            A[1:, 0].mean(),
            np.mean([A[i, i] for i in range(1, 6)]),
            (A[4, 0] + A[5, 1]) / 2,
            (A[4, 1] + A[5, 2]) / 2,
        ]
        np.testing.assert_allclose(found.scores[layer, number], expected, rtol=1e-6)
    row = np.mean([1 / n for n in range(2, 7)])
    alike = [row, row, row, (1 / 5 + 1 / 6) / 2, (1 / 5 + 1 / 6) / 2]
    np.testing.assert_allclose(found.uniform, alike)


def test_a_pattern_without_a_query_is_left_out(model):
    found = interpretability.behaviours(model, [[1, 2, 3]])
    assert found.names == ("previous", "first", "itself")
    assert found.scores.shape == (2, 2, 3)


def test_heads_have_names(model):
    for text in ("1.0", "L1H0", "l1h0"):
        assert Head.parse(text, model.config) == Head(1, 0)
    assert str(Head(1, 0)) == "L1H0"
    for text in (
        "2.0",
        "0.2",
        "L2H0",
        "LH",
        "1",
        "1.0.0",
        "-1.0",
        "a.b",
        "",
        "1.٠",
        "9" * 5000 + ".0",
    ):
        with pytest.raises(ValueError, match=r"no head .*: expected layer and head, from L0H0"):
            Head.parse(text, model.config)


def test_passages_are_of_every_kind_and_always_the_same():
    assert passages(2) == passages(2)
    assert len(passages(2)) == 16
