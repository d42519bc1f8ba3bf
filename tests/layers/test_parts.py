"""Norms, feed-forward and products with matrices, against loops over numbers."""

import math

import numpy as np
import pytest

from minimha.explain import Trace
from minimha.layers import feed_forward, norms
from minimha.layers.feed_forward import FeedForward
from minimha.layers.linear import product

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
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x = np.linspace(-30, 30, 121)
    wanted = [ACTIVATIONS[name](float(value)) for value in x]
    got = feed_forward.ACTIVATIONS[name](x)
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)
    assert feed_forward.ACTIVATIONS[name](x.astype(np.float32)).dtype == np.float32
    far = feed_forward.ACTIVATIONS[name](np.array([-1e4, 1e4], np.float32))
    np.testing.assert_array_equal(far, [0, 1e8 if name == "relu_squared" else 1e4])


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
