"""Norms, feed-forward, embeddings and sampling, against loops over numbers."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimha.explain import Trace
from minimha.layers.linear import product
from minimha.models import feed_forward, norms
from minimha.models.embeddings import Embeddings, sinusoidal
from minimha.models.feed_forward import FeedForward
from minimha.models.sampling import draw, probabilities

RNG = np.random.default_rng(0)
X, GAIN, BIAS = RNG.normal(size=(2, 3, 6)), RNG.normal(size=6), RNG.normal(size=6)
EPSILON = 1e-2  # large enough to be seen


def test_layer_norm_of_every_row():
    got = norms.layer_norm(X, GAIN, BIAS, EPSILON)
    for row, normed in zip(X.reshape(-1, 6), got.reshape(-1, 6), strict=True):
        mean = math.fsum(row) / 6
        variance = math.fsum((x - mean) ** 2 for x in row) / 6
        wanted = [
            g * (x - mean) / math.sqrt(variance + EPSILON) + b
            for x, g, b in zip(row, GAIN, BIAS, strict=True)
        ]
        np.testing.assert_allclose(normed, wanted, rtol=1e-13)


def test_rms_norm_of_every_row():
    got = norms.rms_norm(X, GAIN, EPSILON)
    for row, normed in zip(X.reshape(-1, 6), got.reshape(-1, 6), strict=True):
        root = math.sqrt(math.fsum(x * x for x in row) / 6 + EPSILON)
        np.testing.assert_allclose(normed, [g * x / root for g, x in zip(GAIN, row, strict=True)])


ACTIVATIONS = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x = np.linspace(-30, 30, 121)
    wanted = [ACTIVATIONS[name](float(value)) for value in x]
    got = feed_forward.ACTIVATIONS[name](x)
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)
    assert feed_forward.ACTIVATIONS[name](x.astype(np.float32)).dtype == np.float32
    far = feed_forward.ACTIVATIONS[name](np.array([-1e4, 1e4], np.float32))
    np.testing.assert_array_equal(far, [0, 1e4])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_the_feed_forward_of_one_token(is_gated, has_biases):
    x, W_in, W_gate, W_out = (RNG.normal(size=shape) for shape in ((3,), (3, 4), (3, 4), (4, 3)))
    b_in, b_gate, b_out = (RNG.normal(size=width) if has_biases else None for width in (4, 4, 3))
    layer = FeedForward(W_in, W_out, "silu", b_in, b_out, *((W_gate, b_gate) if is_gated else ()))

    def linear(row, W, b):
        return [
            math.fsum(x * w for x, w in zip(row, column, strict=True)) + (0 if b is None else b[n])
            for n, column in enumerate(W.T)
        ]

    inner = linear(x, W_in, b_in)
    if is_gated:
        gates = map(ACTIVATIONS["silu"], linear(x, W_gate, b_gate))
        inner = [gate * value for gate, value in zip(gates, inner, strict=True)]
    else:
        inner = [ACTIVATIONS["silu"](value) for value in inner]
    trace = Trace()
    np.testing.assert_allclose(layer(x[None], trace)[0], linear(inner, W_out, b_out), rtol=1e-12)
    np.testing.assert_array_equal(trace["feed_forward"], layer(x[None]))


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 257])
def test_a_product_with_a_transposed_matrix_is_the_same(rows):
    x, W = RNG.normal(size=(rows, 5)), RNG.normal(size=(7, 5)).T
    got = product(x, W)
    assert got.flags.c_contiguous
    np.testing.assert_allclose(got, np.einsum("le,ef->lf", x, W), rtol=1e-12)
    np.testing.assert_allclose(product(x[None], W)[0], got, rtol=1e-12)


def test_sinusoidal_positions():
    for p, row in enumerate(sinusoidal(7, 6)):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert row[2 * i : 2 * i + 2] == pytest.approx([math.sin(angle), math.cos(angle)])
    with pytest.raises(ValueError, match="d_model is 5: sines and cosines are in pairs"):
        sinusoidal(3, 5)


def test_embeddings_are_rows_scaled_and_moved_by_positions():
    tokens, positions = RNG.normal(size=(4, 3)), RNG.normal(size=(9, 3))
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
    rng, p = np.random.default_rng(0), np.array([0.5, 0.0, 0.3, 0.2])
    counts = Counter(draw(p, rng) for _ in range(2000))
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
