"""Embeddings and sampling, against loops over numbers."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimha.models.embeddings import Embeddings, sinusoidal
from minimha.models.sampling import probabilities, sampler


def test_sinusoidal_positions():
    for p, row in enumerate(sinusoidal(7, 6)):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert row[2 * i : 2 * i + 2] == pytest.approx([math.sin(angle), math.cos(angle)])
    with pytest.raises(ValueError, match="d_model is 5: sines and cosines are in pairs"):
        sinusoidal(3, 5)


def test_embeddings_are_rows_scaled_and_moved_by_positions():
    rng = np.random.default_rng(0)
    tokens, positions = rng.normal(size=(4, 3)), rng.normal(size=(9, 3))
    got = Embeddings(tokens, positions, scale=2.0)(np.array([3, 3, 0]), start=5)
    np.testing.assert_allclose(
        got, [2 * tokens[n] + positions[p] for n, p in ((3, 5), (3, 6), (0, 7))]
    )


LOGITS = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


@given(LOGITS, st.floats(0.1, 10))
def test_probabilities_are_a_softmax(logits, temperature):
    p = probabilities(logits, temperature)
    assert math.fsum(p) == pytest.approx(1)
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    np.testing.assert_allclose(p, np.array(weights) / math.fsum(weights), rtol=1e-9)


@given(LOGITS, st.integers(1, 12), st.floats(0, 1))
def test_what_is_cut_is_the_least_likely_and_the_rest_keeps_its_proportions(logits, k, top_p):
    whole, kept = probabilities(logits), probabilities(logits, top_k=k, top_p=top_p)
    assert math.fsum(kept) == pytest.approx(1)
    order = sorted(range(len(logits)), key=lambda n: -whole[n])  # stable: the first of equals
    count = sum(kept > 0)
    chosen = order[:count]
    assert set(np.flatnonzero(kept)) == set(chosen)
    assert 1 <= count <= k
    np.testing.assert_allclose(kept[chosen] / kept[chosen[0]], whole[chosen] / whole[chosen[0]])
    among = [whole[n] for n in order[:k]]
    share = math.fsum(among[:count]) / math.fsum(among)
    before = math.fsum(among[: count - 1]) / math.fsum(among)
    assert share >= top_p - 1e-9
    assert count == 1 or before < top_p + 1e-9


def test_greedy_takes_the_first_of_equals():
    np.testing.assert_array_equal(probabilities([1.0, 3.0, 3.0], top_k=1), [0, 1, 0])
    np.testing.assert_array_equal(
        probabilities([[0.0, 9.0], [9.0, 0.0]], top_p=0), [[0, 1], [1, 0]]
    )


def test_the_smallest_temperature_is_greedy():
    np.testing.assert_array_equal(probabilities([1.0, 3.0, 2.0], temperature=1e-310), [0, 1, 0])


def test_draws_have_their_probabilities():
    sample, p = sampler(seed=0), np.array([0.5, 0.0, 0.3, 0.2])
    logits = [math.log(x) if x else -math.inf for x in p]
    counts = Counter(sample(logits) for _ in range(2000))
    for token, probability in enumerate(p):
        assert counts[token] == pytest.approx(2000 * probability, abs=4 * math.sqrt(500))
    assert counts[1] == 0


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"temperature": 0}, ValueError, "temperature is 0: expected a positive number"),
        ({"temperature": -1.0}, ValueError, "temperature is -1.0: expected a positive number"),
        ({"temperature": math.nan}, ValueError, "temperature is nan: expected a finite number"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot': expected a number"),
        ({"top_k": 0}, ValueError, "top_k is 0: expected an integer of at least 1"),
        ({"top_k": 1.5}, TypeError, "top_k is 1.5: expected an integer"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5: expected a number from 0 to 1"),
        ({"top_p": -0.1}, ValueError, "top_p is -0.1: expected a number of at least 0"),
    ],
)
def test_options_outside_their_range_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        probabilities([0.0, 1.0], **options)
