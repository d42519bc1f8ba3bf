"""Gated DeltaNet: token by token, transformers' layer, a cache as the whole in parts."""

import numpy as np
import pytest
from delta import naive

from minimha.explain import Trace
from minimha.layers import DeltaCache, GatedDeltaNet

RNG = np.random.default_rng(0)
E, H, HK, D, DV, K = 12, 4, 2, 3, 5, 4
CHANNELS = 2 * HK * D + H * DV
SHAPES = {
    "W_qkv": (E, CHANNELS), "conv": (CHANNELS, K), "W_z": (E, H * DV), "W_b": (E, H), "W_a": (E, H),
    "A_log": (H,), "dt_bias": (H,), "g_o": (DV,), "W_o": (H * DV, 7),
}  # fmt: skip
WEIGHTS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
X = RNG.normal(size=(2, 9, E))


def layer(**changes):
    return GatedDeltaNet(WEIGHTS | changes, num_heads=H, num_key_heads=HK)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_tokens(x):
    """One sequence (L, E), with the convolution as a loop over tokens and the naive rule."""
    W, mixed = WEIGHTS, []
    rows = x @ W["W_qkv"]
    for t in range(len(x)):
        total = sum(W["conv"][:, K - 1 - n] * rows[t - n] for n in range(min(K, t + 1)))
        mixed.append(total * sigmoid(total))
    q, k, v = np.split(np.array(mixed), [HK * D, 2 * HK * D], axis=1)
    heads = [y.reshape(len(x), n, -1).swapaxes(0, 1) for y, n in ((q, HK), (k, HK), (v, H))]
    g = -np.exp(W["A_log"]) * np.log(1 + np.exp(x @ W["W_a"] + W["dt_bias"]))
    O, S = naive(*(y[None] for y in (*heads, g.T, sigmoid(x @ W["W_b"]).T)))
    O = O[0].swapaxes(0, 1)
    normed = O / np.sqrt((O**2).mean(-1, keepdims=True) + 1e-6) * W["g_o"]
    z = (x @ W["W_z"]).reshape(O.shape)
    return (normed * z * sigmoid(z)).reshape(len(x), -1) @ W["W_o"], S[0]


@pytest.mark.parametrize("backend", ["recurrent", "chunked", "cpu"])
def test_the_layer_is_its_equations(backend):
    got = layer()(X, backend=backend)
    np.testing.assert_allclose(got, [by_tokens(x)[0] for x in X], rtol=0, atol=1e-11)
    np.testing.assert_allclose(layer()(X[0], backend=backend), got[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[3], [1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 8]])
def test_a_cache_is_the_whole_in_parts(cuts):
    cache, whole = layer().new_cache(2), layer()(X)
    parts = [layer()(X[:, i:j], cache=cache) for i, j in zip([0, *cuts], [*cuts, 9], strict=True)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-11)
    np.testing.assert_allclose(cache.state, [by_tokens(x)[1] for x in X], rtol=0, atol=1e-11)


def test_padding_reaches_neither_outputs_nor_the_cache():
    spoilt, cache = X.copy(), layer().new_cache(2)
    spoilt[0, 2:] = np.nan
    first = layer()(spoilt[:, :6], cache=cache, lengths=[2, 6])
    assert not first[0, 2:].any()
    second = layer()(np.stack([X[0, 2:5], X[1, 6:9]]), cache=cache)
    for b, n in enumerate([2, 6]):
        got = np.concatenate([first[b, :n], second[b]])
        np.testing.assert_allclose(got, by_tokens(X[b, : n + 3])[0], rtol=0, atol=1e-11)


def test_packed_sequences_share_neither_memory_nor_convolution():
    got = layer()(X[0], cu_seqlens=[0, 2, 2, 9])
    alone = [by_tokens(X[0, :2])[0], by_tokens(X[0, 2:])[0]]
    np.testing.assert_allclose(got, np.concatenate(alone), rtol=0, atol=1e-11)


def test_transformers_computes_the_same():
    torch = pytest.importorskip("torch", reason="transformers computes with torch")
    name = "transformers.models.qwen3_next"
    models = pytest.importorskip(f"{name}.modeling_qwen3_next", reason="no qwen3_next")
    settings = pytest.importorskip(f"{name}.configuration_qwen3_next", reason="no qwen3_next")
    config = settings.Qwen3NextConfig(
        hidden_size=E, linear_num_value_heads=H, linear_num_key_heads=HK, linear_key_head_dim=D,
        linear_value_head_dim=DV, linear_conv_kernel_dim=K, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = models.Qwen3NextGatedDeltaNet(config, 0)
    given = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    group = H // HK
    rows = given["in_proj_qkvz.weight"].reshape(HK, -1, E)  # per key head: q, k, its v, its z
    ends = np.cumsum([D, D, group * DV])
    q, k, v, z = (part.reshape(-1, E).T for part in np.split(rows, ends, axis=1))
    b, a = np.split(given["in_proj_ba.weight"].reshape(HK, -1, E), 2, axis=1)
    weights = {
        "W_qkv": np.concatenate([q, k, v], axis=1), "conv": given["conv1d.weight"][:, 0],
        "W_z": z, "W_b": b.reshape(H, E).T, "W_a": a.reshape(H, E).T, "A_log": given["A_log"],
        "dt_bias": given["dt_bias"], "g_o": given["norm.weight"], "W_o": given["out_proj.weight"].T,
    }  # fmt: skip
    x = RNG.normal(size=(2, 70, E)).astype(np.float32)
    got = GatedDeltaNet(weights, num_heads=H, num_key_heads=HK)(x)
    with torch.no_grad():
        right = theirs(torch.from_numpy(x)).numpy()
    # The norm magnifies the rounding of small outputs.
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-5 * abs(right).max())


def test_a_tap_gets_every_step():
    trace = Trace()
    got = layer()(X, tap=trace)
    names = [name for name in trace if "[" not in name]
    assert names == [
        "x", "qkv", "convolved", "g", "q", "k", "v", "beta", "decay", "head_output", "gate",
        "gated", "W_o", "output",
    ]  # fmt: skip
    np.testing.assert_array_equal(trace["output"], got)


def test_16_bits_are_rounded_once():
    narrow = {name: value.astype(np.float16) for name, value in WEIGHTS.items()}
    wide = {name: value.astype(np.float32) for name, value in narrow.items()}
    x = X.astype(np.float16)
    got, right = layer(**narrow)(x), layer(**wide)(x.astype(np.float32))
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, right.astype(np.float16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W_b": np.ones((E, H + 1))}, r"W_b has shape \(12, 5\): expected \(12, 4\)"),
        ({"conv": np.ones(CHANNELS)}, r"conv has shape \(32,\): expected 2 axes"),
        ({"b_o": np.ones(3)}, r"b_o has shape \(3,\): expected one of W_qkv, conv"),
        ({"W_qkv": np.ones((E, CHANNELS + 1))}, r"W_qkv has shape .*: expected \(12, 32\)"),
    ],
)
def test_weights_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        layer(**changes)


def test_errors_leave_the_cache_as_it_was():
    cache = layer().new_cache(2)
    layer()(X[:, :4], cache=cache)
    before = DeltaCache(cache.state.copy(), cache.window.copy(), cache.lengths)
    for call in ({"x": X[:, 4:], "lengths": 7}, {"x": X[:1]}, {"x": X[..., 1:]}):
        with pytest.raises(ValueError, match=r"lengths is 7|has B=1 but the c|x has shape"):
            layer()(**call, cache=cache)
    with pytest.raises(ValueError, match="cu_seqlens is given with a cache"):
        layer()(X[:1], cache=cache, cu_seqlens=[0, 9])
    np.testing.assert_array_equal(cache.state, before.state)
    np.testing.assert_array_equal(cache.window, before.window)
    assert cache.lengths.tolist() == [4, 4]
    few = layer().new_cache(2, capacity=5)
    layer()(X[:, :4], cache=few)
    with pytest.raises(ValueError, match="x has 2 tokens after 4 cached ones: together they exc"):
        layer()(X[:, 4:6], cache=few)
    assert few.lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="W_z is missing"):
        GatedDeltaNet({n: WEIGHTS[n] for n in ("W_qkv", "conv")}, num_heads=H, num_key_heads=HK)
    with pytest.raises(ValueError, match="num_heads is 4: expected a multiple of num_key_heads=3"):
        GatedDeltaNet(WEIGHTS, num_heads=4, num_key_heads=3)
