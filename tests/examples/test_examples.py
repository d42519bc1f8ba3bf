"""The examples that are made for any sentence."""

import numpy as np
import pytest

from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.examples import blocks, sentences

STEPS = [
    "x", "W_q", "W_k", "W_v", "q", "k", "v", "scores", "scaled", "masked", "row_max",
    "exponentials", "row_sum", "weights", "head_output", "concat", "W_o", "output",
]  # fmt: skip


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_every_matrix_of_every_head_is_there_and_follows_from_those_before(num_tokens):
    trace = sentences.of_length(num_tokens).trace()
    assert list(trace) == STEPS
    t = {name: trace[name] for name in trace}
    np.testing.assert_array_equal(t["q"], t["x"] @ t["W_q"])
    np.testing.assert_array_equal(t["scores"], t["q"] @ t["k"].swapaxes(-1, -2))
    np.testing.assert_allclose(t["scaled"], t["scores"] / np.sqrt(2))
    assert (np.isneginf(t["masked"]) == np.triu(np.ones((num_tokens,) * 2), 1)).all()
    np.testing.assert_array_equal(t["row_max"][..., 0], t["masked"].max(-1))
    np.testing.assert_array_equal(t["exponentials"], np.exp(t["masked"] - t["row_max"]))
    np.testing.assert_allclose(t["row_sum"][..., 0], t["exponentials"].sum(-1))
    np.testing.assert_allclose(t["weights"].sum(-1), 1)
    np.testing.assert_allclose(t["head_output"], t["weights"] @ t["v"])
    np.testing.assert_array_equal(t["concat"], np.hstack(list(t["head_output"])))
    np.testing.assert_allclose(t["output"], t["concat"] @ t["W_o"])
    for name in ("x", "W_q", "W_k", "W_v", "W_o"):
        assert np.isin(t[name], (-1, 0, 1)).all()


def test_a_word_has_one_embedding_whatever_its_place_and_case():
    x = sentences.embeddings(["The", "cat", "saw", "the", "cat"], 8, 0)
    np.testing.assert_array_equal(x[0], x[3])
    np.testing.assert_array_equal(x[1], x[4])
    assert (x[0] != x[1]).any()


def test_the_seed_changes_the_numbers_and_nothing_else_does():
    words = ["a", "b", "c"]
    first, again = (sentences.sentence(words).trace()["output"] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (sentences.sentence(words, seed=7).trace()["output"] != first).any()


def largest_weights(d_model, num_heads):
    """The largest weight of each row with two keys or more: 9 tokens, causal, 20 seeds."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    found = []
    for seed in range(1, 21):
        x = sentences.embeddings(words, d_model, seed)
        W_q, W_k, _, _ = sentences.draw_weights(d_model, num_heads, num_heads, seed)
        problem = Problem.of(x @ W_q, x @ W_k, x @ W_k, is_causal=True)
        weights = {}
        dense.forward(problem, weights.setdefault)
        found.append(weights["weights"].max(-1)[..., 1:])
    return np.array(found)


@pytest.mark.parametrize("d_model", range(3, 65))
def test_drawn_weights_can_be_read_at_any_width(d_model):
    """At width 2, nine tokens share nine embeddings, and the median is 0.39."""
    for num_heads in range(1, d_model // 2 + 1):
        if d_model % num_heads == 0:
            largest = largest_weights(d_model, num_heads)
            assert (largest > 0.95).mean() <= 0.1, num_heads
            assert 0.4 <= np.median(largest) <= 0.8, num_heads


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_the_smallest_model_is_drawn_as_it_was(num_heads):
    rng = np.random.default_rng([7, 4, num_heads, num_heads])
    for W in sentences.draw_weights(4, num_heads, num_heads, 7):
        wanted = rng.choice([-1.0, 0.0, 1.0], size=W.shape, p=[0.2, 0.4, 0.4])
        np.testing.assert_array_equal(W, wanted)


def test_grouped_heads_are_named_and_shared():
    trace = sentences.sentence(["a", "b"], num_heads=4, num_kv_heads=2, d_model=8).trace()
    keys = [step for step in trace.steps if step.name == "k"]
    assert [(step.head, step.kv_head) for step in keys] == [(None, 0), (None, 1)]
    assert "key/value head 1 serves heads 2 to 3" in keys[0].note
    queries = [step for step in trace.steps if step.name == "q"]
    assert [step.head for step in queries] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tokens": []}, "the sentence has no tokens"),
        ({"num_heads": 0}, "heads is 0: expected at least 1"),
        ({"num_kv_heads": 0}, "kv-heads is 0"),
        ({"d_model": 0}, "d-model is 0"),
        ({"num_heads": 3}, "d-model is 4 and heads is 3: the model width must be a multiple"),
        ({"num_heads": 4, "num_kv_heads": 3}, "heads is 4 and kv-heads is 3"),
        ({"seed": -1}, "seed is -1: expected 0 or more"),
    ],
)
def test_settings_that_make_no_example(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        sentences.sentence(**{"tokens": ["a"], **settings})


@pytest.mark.parametrize(("B_r", "B_c"), [(1, 1), (2, 2), (3, 2), (2, 5), (9, 9)])
def test_both_ways_end_in_the_same_output(B_r, B_c):
    trace = blocks.of_length(6, B_r=B_r, B_c=B_c).trace()
    np.testing.assert_allclose(trace["output[tiled]"], trace["output"], atol=1e-12)
    assert trace["difference"] == abs(trace["output[tiled]"] - trace["output"]).max()


def test_it_is_head_0_of_the_sentence():
    flash, heads = blocks.of_length(5).trace(), sentences.of_length(5).trace()
    for name in ("q", "k", "v", "scores", "weights"):
        np.testing.assert_array_equal(flash[name], heads[name][0])


def test_every_block_shows_what_is_loaded_and_what_comes_of_it():
    trace = blocks.of_length(6).trace()
    names = list(trace)
    at = names.index("K[i=2,j=1]")
    steps = ("K", "V", "S", "m", "P", "factor", "l", "O")
    assert names[at : at + 8] == [f"{letter}[i=2,j=1]" for letter in steps]
    S, m, before = (trace[name] for name in ("S[i=2,j=1]", "m[i=2,j=1]", "m[i=2,j=0]"))
    np.testing.assert_array_equal(trace["P[i=2,j=1]"], np.exp(S - m))
    np.testing.assert_array_equal(trace["factor[i=2,j=1]"], np.exp(before - m))
    assert "K[i=0,j=1]" not in trace
    assert trace["skipped"].tolist() == [[0, 1], [0, 2], [1, 2]]
    assert "skipped" not in blocks.of_length(6).trace(is_causal=False)
    np.testing.assert_array_equal(trace["K[i=2,j=1]"], trace["k"][2:4])
    labels = next(step for step in trace.steps if step.name == "S[i=2,j=1]")
    assert (labels.rows, labels.columns) == (("loan", "yesterday"), ("approved", "the"))


def test_blocks_of_unequal_sides_carry_their_own_labels():
    trace = blocks.of_length(6, B_r=3, B_c=2).trace()
    step = next(step for step in trace.steps if step.name == "S[i=1,j=2]")
    assert step.rows == ("the", "loan", "yesterday")
    assert step.columns == ("loan", "yesterday")


def test_numbers_kept_are_those_that_the_matrices_hold():
    trace = blocks.of_length(8, B_r=3, B_c=2, d_model=10).trace()
    assert trace["kept[naive]"] == trace["scores"].size + trace["weights"].size
    one_block = ("Q[i=0]", "K[i=1,j=0]", "V[i=1,j=0]", "S[i=1,j=0]", "m[i=1,j=0]", "l[i=1,j=0]")
    held = sum(trace[name].size for name in one_block) + trace["O[i=1,j=0]"].size
    assert trace["kept[tiled]"] == held


@pytest.mark.parametrize("size", [{"B_r": 0}, {"B_c": -2}])
def test_blocks_hold_at_least_one_row(size):
    with pytest.raises(ValueError, match="a block holds at least one row"):
        blocks.of_length(6, **size)
