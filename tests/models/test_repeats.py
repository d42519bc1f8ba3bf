"""The second model that ships: induction heads, what they read, and what goes without them."""

import numpy as np
import pytest

from minimha.models import repeats
from minimha.models.attribution import attribution
from minimha.models.interpretability import Head, behaviours, without_heads


@pytest.fixture(scope="module")
def model():
    return repeats.load()


def blocks(seed):
    rng = np.random.default_rng(seed)
    return [np.tile(rng.integers(0, 36, rng.integers(5, 31)), 2) for _ in range(20)]


def right(model, prompts):
    """The share of letters of the second block, after its first, that are the likeliest."""
    shares = []
    for ids in prompts:
        half = len(ids) // 2
        shares.append(model.logits(ids)[half:-1].argmax(axis=-1) == ids[half + 1 :])
    return np.concatenate(shares).mean()


def test_random_letters_that_repeat_are_predicted_by_induction_heads(model):
    prompts = blocks(0)
    found = behaviours(model, prompts)
    scores = dict(zip(found.names, np.moveaxis(found.scores, -1, 0), strict=True))
    assert (scores["induction"][1] > 0.8).all()
    assert scores["previous"][0, 2] > 0.8
    assert (scores["induction"][0] < 0.2).all()
    assert right(model, prompts) > 0.95


def test_without_the_head_that_looks_back_there_is_no_induction(model):
    prompts = blocks(1)
    assert right(without_heads(model, [Head(0, 2)]), prompts) < 0.5
    assert repeats.score(model) == right(model, map(model.encode, repeats.texts())) > 0.95
    assert right(without_heads(model, [Head(1, 0)]), prompts) > 0.9  # others do the same


def test_the_induction_heads_write_the_letter(model):
    found = attribution(model, "k f t a k f", "t")
    assert {name for name, _ in found.largest(4)} & {f"L1H{n}" for n in range(4)}
    assert sum(share for name, share in found.largest(20) if name.startswith("L1H")) > 5


def test_texts_are_blocks_that_are_written_twice():
    for text in repeats.texts(5, seed=3):
        letters = text.split()
        assert letters[: len(letters) // 2] == letters[len(letters) // 2 :]
    assert repeats.texts(5) == repeats.texts(5) != repeats.texts(5, seed=1)
