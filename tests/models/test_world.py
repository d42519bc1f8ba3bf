"""The model that ships: its grammar's exact probabilities, and how near its weights come."""

import json
import math
import re
from collections import Counter
from random import Random

import numpy as np
import pytest

from minimha.models import world
from minimha.models.world import grammar
from minimha.models.world.questions import HELD_OUT, RELATIONS, held_out, questions, score
from minimha.models.world.words import Words


class Oracle:
    """GPT-2's equations in plain NumPy, one word's row at a time where rows meet."""

    def __init__(self):
        with np.load(world.WEIGHTS) as stored:
            self.weights = {name: stored[name] for name in stored.files}
        self.tokenizer = Words(self.weights.pop("vocabulary").tolist())
        self.config = json.loads(str(self.weights.pop("config")))
        self.weights = {name: w.astype(np.float64) for name, w in self.weights.items()}

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, x, name):
        heads = []
        q, k, v = np.split(self.linear(x, f"{name}.c_attn"), 3, axis=1)
        for columns in np.split(np.arange(x.shape[1]), self.config["n_head"]):
            scores = q[:, columns] @ k[:, columns].T / math.sqrt(len(columns))
            scores[np.triu_indices(len(x), 1)] = -np.inf
            heads.append(softmax(scores) @ v[:, columns])
        return self.linear(np.hstack(heads), f"{name}.c_proj")

    def encode(self, text):
        return self.tokenizer.encode(text)

    def logits(self, text):
        w, ids = self.weights, self.encode(text)
        x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
        for layer in range(self.config["n_layer"]):
            x = x + self.attention(self.norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn")
            hidden = self.linear(self.norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            gelu = hidden / (1 + np.exp(-1.5957691216057308 * (hidden + 0.044715 * hidden**3)))
            x = x + self.linear(gelu, f"h.{layer}.mlp.c_proj")
        return self.norm(x, "ln_f") @ w["wte.weight"].T


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture(scope="module")
def model():
    return world.load()


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("the cat sat on the", {"mat": 0.5, "sofa": 0.3, "chair": 0.2}),
        ("the cat that saw the dogs", {"was": 1}),
        ("anna took the key from tom . now", {"anna": 1}),
        ("the dogs did not cross the street because it was too", {"wide": 0.5, "busy": 0.5}),
        ("tom saw a big dog , a wet cat and a grey horse . the grey horse liked the",
         {"big": 0.5, "wet": 0.5}),
        ("tom needed a loan . the bank was closed . tom sat", {"on": 1}),
        # "The bank" begins 0.7 · 0.6 of the passages about banks, which are 0.1 of all.
        ("", {"the": 0.2 + 0.15 + 0.1 + 0.1 * 0.7} | dict.fromkeys(grammar.PEOPLE, 0.03)),
    ],
)  # fmt: skip
def test_exact_next_words(text, answers):
    assert grammar.next_words(text.split()) == pytest.approx(answers, abs=1e-4)


def test_exact_next_words_are_how_often_each_is_drawn():
    draw = Random(3)
    passages = [grammar.passage(grammar.any_kind(draw), draw) for _ in range(40_000)]
    for text in ("the", "anna", "the cat", "tom gave", "the black dog"):
        begun = text.split()
        drawn = Counter(p[len(begun)] for p in passages if p[: len(begun)] == begun)
        for word, p in grammar.next_words(begun).items():
            deviation = math.sqrt(p * (1 - p) / drawn.total())
            assert abs(drawn[word] / drawn.total() - p) < 5 * deviation + 1e-9, (text, word)


def test_a_text_that_the_grammar_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no text that begins 'the mat sat'"):
        grammar.next_words(["the", "mat", "sat"])


def test_no_passage_that_is_asked_about_is_trained_on():
    asked = {q.words for relation in HELD_OUT for q in questions(relation)}
    assert held_out() == asked
    assert len(asked) == 200 * len(HELD_OUT)


def test_questions_are_the_same_after_other_passages():
    for alone, after in zip(questions("seat", 20), questions("seat", 20, before=2), strict=True):
        assert after.words[-len(alone.words) :] == alone.words
        assert after.words.count(".") >= 2
    with pytest.raises(ValueError, match="relation is 'chair': expected one of seat, "):
        questions("chair")


TABLE = {
    cells[0]: [float(cell) for cell in cells[1:]]
    for line in world.__doc__.splitlines()
    if (cells := re.split(" {2,}", line.strip()))[0] in RELATIONS
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("before", [0, 1])
def test_the_weights_answer_as_the_table_says(oracle, relation, before):
    found = score(oracle, questions(relation, before=before))
    right, largest = TABLE[relation][2 * before : 2 * before + 2]
    assert found.right == pytest.approx(right, abs=0.005)
    assert found.largest == pytest.approx(largest, abs=0.005)


def test_the_model_is_what_its_equations_say(oracle, model):
    text = "anna gave tom the key . now tom has the key . the cat sat on the"
    expected = oracle.logits(text)
    np.testing.assert_allclose(model.logits(text), expected, atol=1e-4 * np.abs(expected).max())


def test_the_file_is_small_and_is_half_precision(oracle):
    assert world.WEIGHTS.stat().st_size <= 400_000
    with np.load(world.WEIGHTS) as stored:
        weights = [stored[name] for name in stored.files if "." in name]
    assert {w.dtype for w in weights} == {np.dtype(np.float16)}
    assert oracle.tokenizer.vocabulary == tuple(grammar.vocabulary())


def test_words():
    words = Words(["cat", "sat", ".", "the", "kitchen"])
    assert words.encode(" The  cat sat.") == [3, 0, 1, 2]
    assert words.decode([3, 0, 1, 2]) == "the cat sat."
    assert words.label(4) == "kitchen"
    unknown = "vocabulary of 5 words: 'kitten' \\(nearest: kitchen, the, sat\\); 'bat' \\(nearest: "
    with pytest.raises(ValueError, match=unknown):
        words.encode("the kitten. The bat")
    with pytest.raises(TypeError, match="text is 3: expected a string"):
        words.encode(3)
    for id in (-1, 5):
        with pytest.raises(ValueError, match=f"id is {id} but the vocabulary has 5 words"):
            words.label(id)
