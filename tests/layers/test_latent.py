"""Latent attention: the absorbed form is the naive one, and a cache is the whole in parts."""

import math

import numpy as np
import pytest

from minimha.explain import Trace
from minimha.layers.latent import LatentAttention, LatentCache
from minimha.layers.rope import RoPE

RNG = np.random.default_rng(0)
E, H, C, CQ, D, R, DV = 12, 3, 5, 7, 4, 2, 6
SHAPES = {
    "W_dq": (E, CQ), "g_q": (CQ,), "W_uq": (CQ, H * (D + R)), "W_dkv": (E, C + R), "g_kv": (C,),
    "W_ukv": (C, H * (D + DV)), "W_o": (H * DV, E), "b_dkv": (C + R,), "b_o": (E,),
}  # fmt: skip
WEIGHTS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
X = RNG.normal(size=(2, 6, E))


def layer(**changes):
    return LatentAttention(WEIGHTS | changes, num_heads=H, rope=RoPE(R, interleaved=True))


def normed(x, gain):
    return x / math.sqrt(np.mean(x * x) + 1e-6) * gain


def turned(pair, position):
    z = complex(*pair) * complex(math.cos(position), math.sin(position))
    return [z.real, z.imag]


def by_loops(x):
    """Equations 37 to 47 of the paper's appendix, token by token and head by head."""
    W, rows, kept = WEIGHTS, [], []
    for t, token in enumerate(x):
        y = token @ W["W_dkv"] + W["b_dkv"]
        kept.append((normed(y[:C], W["g_kv"]), turned(y[C:], t)))
        q = (normed(token @ W["W_dq"], W["g_q"]) @ W["W_uq"]).reshape(H, D + R)
        heads = []
        for h in range(H):
            up = W["W_ukv"].reshape(C, H, D + DV)[:, h]
            query = [*q[h, :D], *turned(q[h, D:], t)]
            keys = [[*(c @ up[:, :D]), *k] for c, k in kept]
            scores = [math.fsum(np.multiply(query, key)) / math.sqrt(D + R) for key in keys]
            weights = np.exp(np.array(scores) - max(scores))
            values = np.array([c @ up[:, D:] for c, _ in kept])
            heads.append(weights @ values / weights.sum())
        rows.append(np.concatenate(heads) @ W["W_o"] + W["b_o"])
    return np.array(rows)


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_both_forms_are_the_papers_equations(is_absorbed):
    got = layer()(X, is_causal=True, is_absorbed=is_absorbed)
    np.testing.assert_allclose(got, [by_loops(x) for x in X], rtol=1e-9, atol=1e-12)
    alone = layer()(X[0], is_causal=True, is_absorbed=is_absorbed)
    np.testing.assert_allclose(alone, got[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_absorbed", [False, True, None])
def test_a_cache_of_latents_is_the_whole_in_parts(is_absorbed):
    whole, cache = layer()(X, is_causal=True), LatentCache(2, 6, C + R, np.float64)
    parts = [
        layer()(X[:, now], cache=cache, is_absorbed=is_absorbed)
        for now in (slice(3), slice(3, 4), slice(4, 6))
    ]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-12)
    assert cache.rows.shape == (2, 6, C + R)


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    cache = LatentCache(2, 6, C + R, np.float64)
    layer()(X[:, :4], cache=cache)
    with pytest.raises(ValueError, match="3 tokens after 4 exceed capacity=6; nothing was writt"):
        layer()(X[:, :3], cache=cache)
    with pytest.raises(ValueError, match="softcap is -1"):
        layer()(X[:, 4:], cache=cache, softcap=-1.0)
    with pytest.raises(TypeError, match="is_causal and q_offset are no options with a cache"):
        layer()(X[:, 4:], cache=cache, is_causal=True)
    with pytest.raises(TypeError, match="return_lse is no option of a layer"):
        layer()(X[:, 4:], cache=cache, return_lse=True)
    assert cache.length == 4


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_no_tokens_have_no_output(is_absorbed):
    assert layer()(X[:, :0], is_absorbed=is_absorbed).shape == (2, 0, E)
    assert layer()(X[0, :0], is_absorbed=is_absorbed).shape == (0, E)


def test_a_tap_receives_the_steps_of_each_form():
    for is_absorbed, name in ((False, "k_rotated"), (True, "q_absorbed"), (None, "k_rotated")):
        trace = Trace()
        output = layer()(X, is_absorbed=is_absorbed, tap=trace)
        np.testing.assert_array_equal(output, layer()(X, is_absorbed=is_absorbed))
        assert {"x", "latents_and_key", name, "weights", "head_output", "concat", "output"} <= set(
            trace
        )


@pytest.mark.parametrize(
    ("C", "seen", "L", "is_absorbed"),
    [
        (8, 0, 16, False),  # a prompt
        (8, 15, 1, True),  # 15 tokens to expand
        (8, 15, 16, False),
        (2, 0, 16, True),  # latents narrower than keys and values
    ],
)
def test_the_form_with_fewer_products_is_taken(C, seen, L, is_absorbed):
    shapes = {"W_q": (4, 2 * (3 + 2)), "W_dkv": (4, C + 2), "g_kv": (C,), "W_ukv": (C, 2 * (3 + 5))}
    weights = {name: np.ones(shape) for name, shape in (shapes | {"W_o": (10, 4)}).items()}
    mine = LatentAttention(weights, num_heads=2, rope=RoPE(2))
    cache, trace = LatentCache(1, 64, C + 2, np.float64), Trace()
    cache.append(np.ones((1, seen, C + 2)))
    mine(np.ones((L, 4)), cache=cache, tap=trace)
    assert ("q_absorbed" in set(trace)) == is_absorbed
    expanded = 2 * (seen + L) * C * (3 + 5) + 2 * L * (seen + L) * (3 + 2 + 5)
    absorbed = 2 * L * C * (3 + 5) + 2 * L * (seen + L) * (C + 2 + C)
    assert (absorbed < expanded) == is_absorbed


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_dtype_stays(dtype):
    small = LatentAttention(
        {name: W.astype(dtype) for name, W in WEIGHTS.items()}, num_heads=H, rope=RoPE(R)
    )
    assert small(X.astype(dtype), is_absorbed=True).dtype == dtype


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: layer(W_o=np.ones((H * DV + 1, E))), ValueError,
         r"W_o has shape \(19, 12\): expected \(18, 12\)"),
        (lambda: layer(W_q=np.ones((E, H * (D + R)))), ValueError, "W_dq is no weight of this lay"),
        (lambda: layer(W_x=np.ones(1)), ValueError, "W_x is no weight of this layer"),
        (lambda: LatentAttention({}, num_heads=H, rope=RoPE(R)), ValueError, "W_dkv is missing"),
        (lambda: layer()(X[..., 1:]), ValueError, r"x has shape \(2, 6, 11\): expected \(L, E\)"),
        (lambda: layer()(X, cache=LatentCache(2, 6, C + R)), TypeError,
         "rows have dtype float64 but the cache has float32"),
        (lambda: layer()(X, cache=LatentCache(1, 6, C + R, np.float64)), ValueError,
         r"rows have shape \(2, 6, 7\): expected \(1, L, 7\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()
