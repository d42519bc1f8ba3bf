"""What a caller's tap may do: look at every step, and return another array like it."""

import re

import numpy as np
import pytest

from minimha import attention
from minimha.equations.tap import no_tap, safe_tap
from minimha.explain import Trace
from minimha.layers import (
    LatentAttention,
    MultiHeadAttention,
    RoPE,
    additive_attention,
    cosine_attention,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 3, 8))
Q = X[:, None]
LAYER = MultiHeadAttention(8, 2, rope=RoPE(4), dtype=np.float64)
W = RNG.normal(size=(8, 2))
LATENT = LatentAttention(  # C = 4, D = Dv = 3, R = 2
    {
        "W_q": RNG.normal(size=(8, 2 * (3 + 2))), "W_dkv": RNG.normal(size=(8, 4 + 2)),
        "g_kv": np.ones(4), "W_ukv": RNG.normal(size=(4, 2 * (3 + 3))),
        "W_o": RNG.normal(size=(2 * 3, 8)),
    },
    num_heads=2, rope=RoPE(2),
)  # fmt: skip
CALLS = {
    "attention": lambda tap: attention(Q, Q, Q, is_causal=True, tap=tap),
    "tiled": lambda tap: attention(Q, Q, Q, backend="tiled", tap=tap),
    "layer": lambda tap: LAYER(X, is_causal=True, tap=tap),
    "latent": lambda tap: LATENT(X, tap=tap),
    "project": lambda tap: LAYER.project(X, X, X, tap)[0],
    "combine": lambda tap: LAYER.combine(X.reshape(1, 2, 3, 4), X, tap),
    "rope": lambda tap: RoPE(8).rotate(X, [0, 1, 2], tap),
    "cosine": lambda tap: cosine_attention(Q, Q, Q, tap=tap),
    "additive": lambda tap: additive_attention(Q, Q, Q, W, W, W[0], tap=tap),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def test_arrays_that_are_heard_cannot_be_written_to(call):
    before = call(no_tap)

    def tap(name, value):
        value *= 0
        return value

    with pytest.raises(ValueError, match="read-only"):
        call(tap)
    np.testing.assert_array_equal(call(no_tap), before)


def test_what_is_returned_takes_the_steps_place_or_the_step_is_named(call):
    before = call(no_tap)
    np.testing.assert_array_equal(call(lambda name, value: value[...]), before)
    heard = []
    call(lambda name, value: heard.append(name) or value)
    for name in heard:
        for wrong, got in (
            (lambda value: value[..., :0], "has shape "),
            (lambda value: value.astype(np.float16), "has shape "),
            (lambda value: None, "is a NoneType"),
        ):

            def tap(step, value, name=name, wrong=wrong):
                return wrong(value) if step == name else value

            with pytest.raises(ValueError, match="tap's ") as raised:
                call(tap)
            assert str(raised.value).startswith(f"tap's {name!r} {got}")


def test_an_array_as_a_trace_shows_it_is_no_step_of_a_tap():
    trace = Trace()
    attention(Q, Q, Q, tap=trace)
    sentence = "'weights' has shape (3, 3) and float64: expected shape (1, 1, 3, 3) and float64"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attention(Q, Q, Q, tap=lambda n, v: trace[n] if n == "weights" else v)


def test_a_function_of_the_caller_is_heard_as_text():
    heard = {}
    attention(
        Q, Q, Q, score_mod=lambda s, b, h, i, j: s + j, tap=lambda n, v: heard.setdefault(n, v)
    )
    assert "s + j" in heard["score_mod"]


def test_what_is_no_function_is_no_tap():
    for call in CALLS.values():
        with pytest.raises(TypeError, match="tap is 3: expected a callable"):
            call(3)
    assert safe_tap(no_tap) is no_tap


def test_a_number_may_be_replaced_by_any_number():
    q, k, v = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
    expected = attention(q, k, v, softcap=0.5, backend="dense")
    for half in (0.5, np.float64(0.5), np.float32(0.5)):
        tap = lambda name, x, half=half: half if name == "softcap" else x  # noqa: E731
        np.testing.assert_array_equal(attention(q, k, v, softcap=2.0, tap=tap), expected)
