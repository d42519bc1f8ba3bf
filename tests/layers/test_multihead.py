"""Multi-head attention is attention, a head at a time."""

import numpy as np
import pytest
from problems import spoiling

from minimha import attention
from minimha.explain import Trace
from minimha.layers.multihead import multi_head_attention

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 6))
W_Q, W_O = RNG.normal(size=(4, 6, 3)), RNG.normal(size=(4 * 2, 6))
W_K, W_V = RNG.normal(size=(2, 6, 3)), RNG.normal(size=(2, 6, 2))


def test_heads_one_by_one():
    output = multi_head_attention(X, W_Q, W_K, W_V, W_O, is_causal=True)
    for x, y in zip(X, output, strict=True):
        heads = [
            attention(x @ W_Q[h], x @ W_K[h // 2], x @ W_V[h // 2], is_causal=True)
            for h in range(4)
        ]
        np.testing.assert_allclose(y, np.hstack(heads) @ W_O, rtol=1e-12)


def test_a_single_sequence_is_a_batch_of_one():
    np.testing.assert_allclose(
        multi_head_attention(X[0], W_Q, W_K, W_V, W_O),
        multi_head_attention(X, W_Q, W_K, W_V, W_O)[0],
    )


@pytest.mark.parametrize("x", [X, X[0]])
def test_every_step_is_traced_under_its_name(x):
    trace = Trace()
    output = multi_head_attention(x, W_Q, W_K, W_V, W_O, tap=trace)
    assert list(trace) == [
        "x", "W_q", "W_k", "W_v", "q", "k", "v", "scores", "scaled", "weights", "head_output",
        "concat", "W_o", "output",
    ]  # fmt: skip
    np.testing.assert_array_equal(trace["output"], output)
    assert trace["concat"].shape == (*x.shape[:-1], 8)
    last = trace.steps[-1]
    assert (last.symbol, last.axes) == ("Y", ("L", "E"))


def test_what_a_tap_returns_is_what_goes_on():
    names = []
    multi_head_attention(X, W_Q, W_K, W_V, W_O, tap=lambda name, x: names.append(name) or x)
    for name in names:
        spoilt = multi_head_attention(X, W_Q, W_K, W_V, W_O, tap=spoiling(name))
        assert np.isnan(spoilt).any(), name


def test_an_empty_batch():
    assert multi_head_attention(X[:0], W_Q, W_K, W_V, W_O).shape == (0, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((X[0, 0], W_Q, W_K, W_V, W_O), r"x has shape \(6,\): expected \(L, E\) or \(B, L, E\)"),
        (
            (X, W_Q[0], W_K, W_V, W_O),
            r"W_q has shape \(6, 3\): expected one \(E, D\) matrix a head",
        ),
        ((X, W_Q, W_K[:, :5], W_V, W_O), r"W_k has shape \(2, 5, 3\).* width E=6"),
        ((X, W_Q, W_K, W_V, W_O[:5]), r"W_o has shape \(5, 6\): expected .* 4 · 2 = 8"),
        ((X, W_Q[:3], W_K, W_V, W_O[:6]), "k has 2 heads but q has 3"),
    ],
)
def test_shapes_that_do_not_fit(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        multi_head_attention(*arguments)


@pytest.mark.parametrize(
    ("x", "options", "error", "sentence"),
    [
        ([["a"]], {}, TypeError, "x has dtype <U1: expected integers"),
        ([[1], [1, 2]], {}, ValueError, "x is not a rectangular array of numbers"),
        (X, {"return_lse": True}, TypeError, "return_lse is no option of multi_head_attention"),
    ],
)
def test_what_is_no_problem_for_many_heads(x, options, error, sentence):
    with pytest.raises(error, match=sentence):
        multi_head_attention(x, W_Q, W_K, W_V, W_O, **options)
