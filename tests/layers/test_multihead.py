"""Multi-head attention is attention, head by head."""

import math

import numpy as np
import pytest
from problems import spoiling

from minimha import attention
from minimha.explain import Trace
from minimha.layers.cache import KVCache
from minimha.layers.multihead import MultiHeadAttention, attention_weights
from minimha.layers.rope import RoPE
from minimha.layers.scalings import DynamicNTKScaling, LongRoPEScaling

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 6))
CONTEXT = RNG.normal(size=(2, 7, 4))
W_Q, W_O = RNG.normal(size=(4, 6, 3)), RNG.normal(size=(4 * 2, 6))
W_K, W_V = RNG.normal(size=(2, 6, 3)), RNG.normal(size=(2, 6, 2))
B_Q, B_K, B_V = RNG.normal(size=(4, 3)), RNG.normal(size=(2, 3)), RNG.normal(size=(2, 2))
B_O = RNG.normal(size=6)
LAYER = MultiHeadAttention.from_heads(W_Q, W_K, W_V, W_O)
EVERYTHING = {
    "num_kv_heads": 2,
    "value_dim": 2,
    "head_dim": 4,
    "qk_norm": "full",
    "gate": "elementwise",
    "rope": RoPE(4),
    "dtype": np.float64,
}


def side_by_side(W):
    """The heads' matrices in one, head by head."""
    return np.concatenate(list(W), axis=-1)


def rms(x, epsilon=1e-6):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def test_heads_one_by_one():
    layer = MultiHeadAttention.from_heads(
        W_Q, W_K, W_V, W_O, b_q=B_Q, b_k=B_K, b_v=B_V.ravel(), b_o=B_O
    )
    output = layer(X, is_causal=True)
    for x, y in zip(X, output, strict=True):
        heads = [
            attention(
                x @ W_Q[h] + B_Q[h],
                x @ W_K[h // 2] + B_K[h // 2],
                x @ W_V[h // 2] + B_V[h // 2],
                is_causal=True,
            )
            for h in range(4)
        ]
        np.testing.assert_allclose(y, np.hstack(heads) @ W_O + B_O, rtol=1e-12)


def test_matrices_by_head_and_combined_make_one_layer():
    combined = MultiHeadAttention.from_combined(
        side_by_side(W_Q), side_by_side(W_K), side_by_side(W_V), W_O,
        num_heads=4, num_kv_heads=2, b_q=B_Q.ravel(),
    )  # fmt: skip
    by_head = MultiHeadAttention.from_heads(W_Q, W_K, W_V, W_O, b_q=B_Q)
    for name in by_head.shapes:
        np.testing.assert_array_equal(getattr(by_head, name), getattr(combined, name))
    np.testing.assert_array_equal(by_head(X), combined(X))


def test_cross_attention_reads_the_context_alone():
    layer = MultiHeadAttention(6, 2, value_dim=5, context_dim=4, output_dim=3, dtype=np.float64)
    W_q, W_k, W_v = (np.split(W, 2, axis=1) for W in (layer.W_q, layer.W_k, layer.W_v))
    heads = [attention(X @ W_q[h], CONTEXT @ W_k[h], CONTEXT @ W_v[h]) for h in range(2)]
    wanted = np.concatenate(heads, axis=-1) @ layer.W_o
    np.testing.assert_allclose(layer(X, CONTEXT), wanted, rtol=1e-12)
    assert wanted.shape == (2, 5, 3)


@pytest.mark.parametrize("epsilon", [0, 1e-6, 0.5])
@pytest.mark.parametrize("kind", ["head", "full"])
def test_queries_and_keys_are_normalised_by_head_or_together(kind, epsilon):
    layer = MultiHeadAttention(6, 2, qk_norm=kind, epsilon=epsilon, dtype=np.float64)
    layer.g_q, layer.g_k = RNG.normal(size=(2, len(layer.g_q)))
    q, k = X @ layer.W_q, X @ layer.W_k
    if kind == "full":
        q, k = rms(q, epsilon) * layer.g_q, rms(k, epsilon) * layer.g_k
    q, k, v = (np.stack(np.split(a, 2, axis=-1), 1) for a in (q, k, X @ layer.W_v))
    if kind == "head":
        q, k = rms(q, epsilon) * layer.g_q, rms(k, epsilon) * layer.g_k
    wanted = np.concatenate(list(attention(q, k, v).swapaxes(0, 1)), axis=-1) @ layer.W_o
    np.testing.assert_allclose(layer(X), wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", ["elementwise", "headwise"])
def test_gates_weaken_what_the_heads_found(kind):
    layer = MultiHeadAttention(6, 2, gate=kind, dtype=np.float64)
    layer.b_g = RNG.normal(size=layer.b_g.shape)
    steps = {}
    output = layer(X, tap=lambda name, value: steps.setdefault(name, value))
    gates = sigmoid(X @ layer.W_g + layer.b_g)
    if kind == "headwise":
        gates = np.stack([gates[..., h // 3] for h in range(6)], axis=-1)
    np.testing.assert_allclose(output, steps["concat"] * gates @ layer.W_o, rtol=1e-12)


def test_a_gate_far_from_zero_does_not_overflow():
    layer = MultiHeadAttention(2, 1, gate="headwise")
    layer.b_g = [-1e30]
    assert not layer(np.ones((3, 2), np.float32)).any()


@pytest.mark.parametrize("positions", [None, [3, 4, 5, 6, 7], [[0, 1, 2, 3, 4], [9, 8, 7, 1, 0]]])
def test_rope_rotates_queries_and_keys_after_normalisation(positions):
    rope = RoPE(6)
    layer = MultiHeadAttention(6, 1, qk_norm="head", rope=rope, dtype=np.float64)
    at = np.arange(5) if positions is None else np.array(positions)
    q, k = (rope.rotate(rms(X @ W)[:, None], at) for W in (layer.W_q, layer.W_k))
    wanted = attention(q, k, (X @ layer.W_v)[:, None])[:, 0] @ layer.W_o
    np.testing.assert_allclose(layer(X, positions=positions), wanted, rtol=1e-12)


def test_rope_in_cross_attention_has_positions_for_each_side():
    layer = MultiHeadAttention(6, 1, context_dim=4, rope=RoPE(6), dtype=np.float64)
    here, there = [5, 6, 7, 8, 9], [6, 5, 4, 3, 2, 1, 0]
    q = layer.rope.rotate((X @ layer.W_q)[:, None], here)
    k = layer.rope.rotate((CONTEXT @ layer.W_k)[:, None], there)
    wanted = attention(q, k, (CONTEXT @ layer.W_v)[:, None])[:, 0] @ layer.W_o
    output = layer(X, CONTEXT, positions=here, context_positions=there)
    np.testing.assert_allclose(output, wanted, rtol=1e-12)


@pytest.mark.parametrize("chunks", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_a_cache_gives_what_the_whole_forward_gives(chunks):
    layer = MultiHeadAttention(6, 3, 1, head_dim=4, qk_norm="head", rope=RoPE(4), dtype=np.float64)
    cache, parts, start = KVCache(2, 1, 5, 4, dtype=np.float64), [], 0
    for length in chunks:
        parts.append(layer(X[:, start : start + length], cache=cache))
        start += length
    np.testing.assert_allclose(np.concatenate(parts, axis=1), layer(X, is_causal=True), rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"attn_mask": np.ones((3, 3), bool)}, ValueError),
        ({"backend": "fast"}, ValueError),
        ({"q_offset": 0}, TypeError),
    ],
)
def test_what_attention_refuses_is_not_cached(options, error):
    layer = MultiHeadAttention(6, 2, rope=RoPE(2), head_dim=2, dtype=np.float64)
    cache = KVCache(2, 2, 5, 2, dtype=np.float64)
    first = layer(X[:, :3], cache=cache)
    with pytest.raises(error):
        layer(X[:, 3:], cache=cache, **options)
    output = np.concatenate([first, layer(X[:, 3:], cache=cache)], axis=1)
    np.testing.assert_allclose(output, layer(X, is_causal=True), rtol=1e-12)


@pytest.mark.parametrize(
    "scaling", [DynamicNTKScaling(4, 4), LongRoPEScaling([1.0, 2.0], [3.0, 4.0], 4)]
)
def test_dynamic_scaling_changes_no_angle_that_a_cached_key_has(scaling):
    rope = RoPE(4, scaling=scaling)
    layer = MultiHeadAttention(6, 1, head_dim=4, rope=rope, dtype=np.float64)
    whole = layer(X, is_causal=True)
    with pytest.raises(ValueError, match="rope with a context: the angles of its dynamic scaling"):
        layer(X, X)
    cache = KVCache(2, 1, 5, 4, dtype=np.float64)
    np.testing.assert_allclose(layer(X, cache=cache), whole, rtol=1e-12)
    cache = KVCache(2, 1, 5, 4, dtype=np.float64)
    short = [layer(X[:, n : n + 2], cache=cache) for n in (0, 2)]
    expected = layer(X[:, :4], is_causal=True)
    np.testing.assert_allclose(np.concatenate(short, axis=1), expected, rtol=1e-12)
    assert abs(expected - whole[:, :4]).max() > 1e-3
    with pytest.raises(ValueError, match="change from 4 tokens to 5, but cached keys keep theirs"):
        layer(X[:, 4:], cache=cache)
    assert cache.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
def test_asking_for_weights_changes_no_bit_of_the_output(backend):
    layer = MultiHeadAttention(6, 2, **EVERYTHING)
    options = {"is_causal": True, "sinks": [0.5, -1.0], "backend": backend}
    output, weights = layer(X, return_weights=True, **options)
    assert output.tobytes() == layer(X, **options).tobytes()
    trace = Trace()
    layer(X, tap=trace, is_causal=True, sinks=[0.5, -1.0])
    np.testing.assert_allclose(weights, trace["weights"], rtol=1e-6, atol=1e-12)


def test_weights_are_the_softmax_of_the_scores():
    q, k = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(1, 5, 4))
    scores = np.exp(q @ k.swapaxes(-1, -2) / 2)
    wanted = scores / scores.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(attention_weights(q, k), wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_rounded_once(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes has bfloat16")
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    layer = MultiHeadAttention(6, 2, qk_norm="head", dtype=dtype)
    x = X.astype(dtype)
    wide = MultiHeadAttention(
        6, 2, qk_norm="head",
        parameters={name: getattr(layer, name).astype(np.float32) for name in layer.shapes},
    )  # fmt: skip
    output = layer(x)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, wide(x.astype(np.float32)).astype(dtype))


def test_a_single_sequence_is_a_batch_of_one():
    np.testing.assert_allclose(LAYER(X[0]), LAYER(X)[0])


@pytest.mark.parametrize("x", [X, X[0]])
def test_every_step_is_traced_under_its_name(x):
    trace = Trace()
    output = LAYER(x, tap=trace)
    assert list(trace) == [
        "x", "W_q", "W_k", "W_v", "q", "k", "v", "scores", "scaled", "row_max", "exponentials",
        "row_sum", "weights", "head_output", "concat", "W_o", "output",
    ]  # fmt: skip
    np.testing.assert_array_equal(trace["output"], output)
    np.testing.assert_array_equal(trace["W_q"], W_Q)
    assert trace["concat"].shape == (*x.shape[:-1], 8)
    last = trace.steps[-1]
    assert (last.symbol, last.axes) == ("Y", ("L", "E"))


def test_every_step_of_a_layer_that_has_everything():
    trace = Trace()
    MultiHeadAttention(6, 2, context_dim=4, **EVERYTHING)(X, CONTEXT, tap=trace)
    assert list(trace) == [
        "x", "context", "W_q", "b_q", "q_combined", "W_k", "b_k", "k_combined", "W_v", "b_v",
        "v_combined", "q", "g_q", "k", "g_k", "q_normed", "cos[q]", "sin[q]", "k_normed", "cos[k]",
        "sin[k]", "q_rotated", "k_rotated", "v", "scores", "scaled", "row_max", "exponentials",
        "row_sum", "weights", "head_output", "concat", "W_g", "b_g", "gate", "gated", "W_o", "b_o",
        "output",
    ]  # fmt: skip
    formulas = {step.name: step.formula for step in trace.steps}
    assert formulas["q"] == "Q = X W_q + b_q"
    assert formulas["k"] == "K = X_enc W_k + b_k"
    assert formulas["k_combined"] == "[K of head 0, K of head 1, …] = X_enc W_k + b_k"
    np.testing.assert_array_equal(
        trace["q_combined"], np.concatenate(trace["q"].swapaxes(0, 1), -1)
    )
    assert formulas["gate"] == "G = sigmoid(X W_g + b_g)"
    assert formulas["output"] == "Y = C W_o + b_o"


@pytest.mark.parametrize("settings", [{}, EVERYTHING])
def test_what_a_tap_returns_is_what_goes_on(settings):
    layer, names = MultiHeadAttention(6, 2, **settings), []
    layer(X, tap=lambda name, x: names.append(name) or x)
    for name in names:
        assert np.isnan(layer(X, tap=spoiling(name))).any(), name


def test_without_a_tap_any_backend_may_compute(monkeypatch):
    from minimha import BackendUnavailable, api
    from minimha.kernels import auto

    monkeypatch.setattr(auto, "choose", lambda problem: "cpu")
    monkeypatch.setitem(api.BACKENDS, "cpu", "minimha.no_such_kernel")
    with pytest.raises(BackendUnavailable, match="no_such_kernel"):
        LAYER(X)


def test_an_empty_batch():
    assert LAYER(X[:0]).shape == (0, 5, 6)


def test_drawn_weights_are_glorot_s_and_biases_zero():
    layer = MultiHeadAttention(64, 4, 2, seed=3)
    assert layer.W_k.dtype == np.float32
    limit = math.sqrt(6 / (64 + 32))
    assert 0.98 * limit < abs(layer.W_k).max() <= limit
    assert not layer.b_q.any()
    np.testing.assert_array_equal(layer.W_k, MultiHeadAttention(64, 4, 2, seed=3).W_k)
    assert "num_kv_heads=2, head_dim=16" in repr(layer)


@pytest.mark.parametrize("seed", [0, 1])
def test_torch_s_module_with_the_documents_sizes(seed):
    torch = pytest.importorskip("torch", reason="torch, to compare with, is not installed")
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(512, 8, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 10, 512)
    with torch.inference_mode():
        wanted, wanted_weights = module(x, x, x, average_attn_weights=False)
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    matrices = np.split(state["in_proj_weight"], 3)
    b_q, b_k, b_v = np.split(state["in_proj_bias"], 3)
    layer = MultiHeadAttention.from_combined(
        *(W.T for W in matrices), state["out_proj.weight"].T, num_heads=8,
        b_q=b_q, b_k=b_k, b_v=b_v, b_o=state["out_proj.bias"],
    )  # fmt: skip
    for backend in ("dense", "cpu"):
        output, weights = layer(x.numpy(), return_weights=True, backend=backend)
        assert (output.shape, weights.shape) == ((2, 10, 512), (2, 8, 10, 10))
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(weights, wanted_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MultiHeadAttention(10, 4), "d_model is 10 and num_heads is 4: .* a multiple of"),
        (lambda: MultiHeadAttention(8, 4, 3), "num_kv_heads is 3 but num_heads is 4"),
        (lambda: MultiHeadAttention(8, 0), "num_heads is 0: expected an integer of at least 1"),
        (
            lambda: MultiHeadAttention(8, 2, epsilon=-1),
            "epsilon is -1: expected a number of at least 0",
        ),
        (lambda: MultiHeadAttention(8, 2, qk_norm="rms"), "qk_norm is 'rms': expected one of None"),
        (lambda: MultiHeadAttention(8, 2, gate=True), "gate is True: expected one of None, 'elem"),
        (lambda: MultiHeadAttention(8, 2, rope=RoPE(8)), "rope is for head_dim=8 but .* has 4"),
        (lambda: MultiHeadAttention(8, 2, parameters={}), r"W_q is missing: expected shape \(8, 8"),
        (
            lambda: MultiHeadAttention(8, 2, bias=False, parameters={"b_q": np.zeros(8)}),
            "b_q is no weight of this layer, which has W_q, W_k, W_v, W_o",
        ),
        (lambda: MultiHeadAttention.from_heads(W_Q[0], W_K, W_V, W_O), "one .E, D. matrix per"),
        (lambda: MultiHeadAttention.from_heads(W_Q, W_K, W_V[:1], W_O), "W_v has 1 matrices but W"),
        (lambda: MultiHeadAttention.from_heads(W_Q[:3], W_K, W_V, W_O), "num_kv_heads is 2 but"),
        (
            lambda: MultiHeadAttention.from_heads(W_Q, W_K, W_V, W_O.T),
            r"W_o has shape \(6, 8\): expected \(H · Dv, Eo\) = \(8, 6\); it looks transposed",
        ),
        (
            lambda: MultiHeadAttention.from_combined(W_Q, W_K, W_V, W_O, num_heads=4),
            r"W_q has shape \(4, 6, 3\): .*; from_heads takes one matrix per head",
        ),
        (
            lambda: MultiHeadAttention.from_combined(
                np.eye(8), np.ones((4, 8)), np.ones((8, 4)), np.eye(8), num_heads=2, num_kv_heads=1
            ),
            r"W_k has shape \(4, 8\): expected \(Ec, Hkv · D\) = \(8, 4\); it looks transposed",
        ),
        (
            lambda: MultiHeadAttention.from_combined(*[np.ones((6, 5))] * 4, num_heads=2),
            r"W_q has shape \(6, 5\): expected columns for 2 heads of one width",
        ),
        (lambda: setattr(MultiHeadAttention(8, 2), "W_o", np.ones((8, 9))), "W_o has shape"),
    ],
)
def test_weights_that_do_not_fit(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ((X[0, 0],), {}, ValueError, r"x has shape \(6,\): expected \(L, E\) or \(B, L, E\)"),
        ((X[..., :5],), {}, ValueError, r"x has shape \(2, 5, 5\): .* with E=6"),
        (([["a"]],), {}, TypeError, "x has dtype <U1: expected integers"),
        (([[1], [1, 2]],), {}, ValueError, "x is not a rectangular array of numbers"),
        ((X,), {"return_lse": True}, TypeError, "return_lse is no option of a layer"),
        ((X,), {"positions": [0, 1]}, ValueError, "positions are given but the layer has no rope"),
        ((X,), {"return_weights": 1}, TypeError, "return_weights is 1: expected True or False"),
        ((X, CONTEXT), {}, ValueError, r"context has shape \(2, 7, 4\).* width Ec=6"),
        ((X, X[0]), {}, ValueError, "expected 3 axes as in x"),
        ((X, X[:1]), {}, ValueError, "context has B=1 but x has B=2"),
        ((X[0],), {"cache": KVCache(1, 2, 5, 3, 2)}, ValueError, "with a cache it must be"),
        ((X, X), {"cache": KVCache(1, 2, 5, 3, 2)}, ValueError, "cache and context are both given"),
        (
            (X,),
            {"cache": KVCache(2, 2, 5, 3, 2), "return_weights": True},
            ValueError,
            "return_weights with a cache: let a tap receive the weights",
        ),
        ((X,), {"cache": KVCache(2, 2, 5, 3, 2)}, TypeError, "k has dtype float64 but the cache"),
        ((X,), {"cache": KVCache(2, 4, 5, 3, 2)}, ValueError, "k has Hkv=2 but the cache has"),
    ],
)
def test_what_is_no_problem_for_a_layer(arguments, options, error, sentence):
    with pytest.raises(error, match=sentence):
        LAYER(*arguments, **options)


def test_keys_and_values_may_have_a_source_each():
    layer = MultiHeadAttention(6, 2, context_dim=4, value_source_dim=3, dtype=np.float64)
    source = RNG.normal(size=(2, 7, 3))
    q, k, v = layer.project(X, CONTEXT, source)
    W_q, W_k, W_v = (np.split(W, 2, axis=1) for W in (layer.W_q, layer.W_k, layer.W_v))
    heads = [attention(X @ W_q[h], CONTEXT @ W_k[h], source @ W_v[h]) for h in range(2)]
    wanted = np.concatenate(heads, axis=-1) @ layer.W_o
    np.testing.assert_allclose(layer.combine(attention(q, k, v), X), wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="width Ec=4, values from Ev=3: project takes a source"):
        layer(X, CONTEXT)


def test_what_cannot_rotate_is_no_rope():
    with pytest.raises(TypeError, match="rope is 10000: expected a"):
        MultiHeadAttention(6, 2, rope=10000)


def test_another_width_of_the_context_makes_it_necessary():
    with pytest.raises(ValueError, match=r"context is missing: .* width Ec=4, x has E=6"):
        MultiHeadAttention(6, 2, context_dim=4)(X)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_layer_norm_of_queries_and_keys_head_by_head_then_clipping(num_kv_heads):
    rng, D = np.random.default_rng(5), 4
    W = {f"W_{n}": rng.normal(size=(8, D * (num_kv_heads if n in "kv" else 2))) for n in "qkv"}
    W["W_o"] = rng.normal(size=(8, 8))
    norm = {n + c: rng.normal(size=W[f"W_{c}"].shape[1]) for n in ("g_", "s_") for c in "qk"}
    layer = MultiHeadAttention.from_combined(
        **W, **norm, num_heads=2, num_kv_heads=num_kv_heads, qk_norm="layer", epsilon=0.1, clip=0.7
    )
    x, outputs = rng.normal(size=(5, 8)), []

    def made(letter, h):
        columns = slice(h * D, (h + 1) * D)
        y = x @ W[f"W_{letter}"][:, columns]
        if letter != "v":
            y = np.array([(row - np.mean(row)) / math.sqrt(np.var(row) + 0.1) for row in y])
            y = y * norm[f"g_{letter}"][columns] + norm[f"s_{letter}"][columns]
        return np.minimum(np.maximum(y, -0.7), 0.7)

    for h in range(2):
        g = h * num_kv_heads // 2
        weights = np.exp(made("q", h) @ made("k", g).T / 2)
        outputs.append(weights @ made("v", g) / weights.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(layer(x), np.concatenate(outputs, axis=1) @ W["W_o"])
    trace = Trace()
    np.testing.assert_array_equal(layer(x, tap=trace), layer(x))
    steps = ["gains_q", "s_q", "q_layer_normed", "v", "q_clipped", "v_clipped", "scores"]
    assert [name for name in trace if name in steps] == steps


def test_clipping_needs_a_positive_number():
    with pytest.raises(ValueError, match="clip is 0: expected a positive number, or None"):
        MultiHeadAttention(8, 2, clip=0)


def test_a_matrix_assigned_after_a_call_is_used():
    layer, x = MultiHeadAttention(8, 2, bias=False), np.random.default_rng(0).normal(size=(3, 8))
    layer(x)
    for name in ("W_q", "W_k", "W_v"):
        setattr(layer, name, 2 * getattr(layer, name)[::-1])
        given = {key: getattr(layer, key) for key in ("W_q", "W_k", "W_v", "W_o")}
        fresh = MultiHeadAttention.from_combined(**given, num_heads=2)
        np.testing.assert_array_equal(layer(x), fresh(x))
