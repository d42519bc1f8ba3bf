"""Additive attention scores pairs one by one as the formula says, and the rest is attention."""

import os
from math import fsum, tanh

import numpy as np
import pytest
from problems import naive_attention, spoiling

from minimha import attention
from minimha.api import BackendUnavailable
from minimha.explain import Trace
from minimha.layers.additive import additive_attention

RNG = np.random.default_rng(0)
B, H, HKV, LQ, LK, DQ, DK, DV, A = 2, 4, 2, 3, 5, 6, 7, 2, 8
Q, K = RNG.normal(size=(B, H, LQ, DQ)), RNG.normal(size=(B, HKV, LK, DK))
V = RNG.normal(size=(B, HKV, LK, DV))
W_Q, W_K = RNG.normal(size=(DQ, A)), RNG.normal(size=(DK, A))
W, BIAS = RNG.normal(size=A), RNG.normal(size=A)
GIVEN = (Q, K, V, W_Q, W_K, W)
BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
HIDING = np.where(RNG.random((B, H, LQ, LK)) < 0.3, -np.inf, RNG.normal(size=(B, H, LQ, LK)))
OPTIONS = [
    {},
    {"is_causal": True, "q_offset": 2},
    {"q_offset": [0, 2], "window_size": (1, 0)},
    {"attn_mask": RNG.random((1, H, LQ, LK)) < 0.6, "sinks": RNG.normal(size=H)},
    {"kv_lengths": np.array([0, 3])},
    {"attn_bias": HIDING, "alibi_slopes": RNG.random(H), "q_offset": 1},
]


def energies(q, k, W_q, W_k, w, b=None):
    """w · tanh(q_i W_q + k_j W_k + b), number by number."""
    B, H, Lq, Dq = q.shape
    group, Dk = H // k.shape[1], k.shape[3]
    S = np.empty((B, H, Lq, k.shape[2]))
    for n, h, i, j in np.ndindex(S.shape):
        key = k[n, h // group, j]
        hidden = [
            fsum(
                [q[n, h, i, d] * W_q[d, a] for d in range(Dq)]
                + [key[d] * W_k[d, a] for d in range(Dk)]
                + [0 if b is None else b[a]]
            )
            for a in range(len(w))
        ]
        S[n, h, i, j] = fsum(weight * tanh(z) for weight, z in zip(w, hidden, strict=True))
    return S


def traced(*given, **options):
    trace = Trace()
    output = additive_attention(*given, tap=trace, **options)
    return trace, output


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("b", [None, BIAS], ids=["", "b"])
@BACKENDS
def test_pairs_one_by_one(options, b, backend):
    options = dict(options)
    got, lse = additive_attention(*GIVEN, b=b, return_lse=True, backend=backend, **options)
    S = energies(Q, K, W_Q, W_K, W, b) + options.pop("attn_bias", 0)
    expected, expected_lse = naive_attention(
        np.zeros((B, H, LQ, 1)), np.zeros((B, HKV, LK, 1)), V, attn_bias=S, **options
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("at", [(), (0,), (0, 1)])
def test_fewer_axes_come_back_as_they_came(at):
    q, k, v = (x[:, :HKV][at] for x in (Q, K, V))
    whole = additive_attention(Q[:, :HKV], K, V, W_Q, W_K, W)
    np.testing.assert_allclose(additive_attention(q, k, v, W_Q, W_K, W), whole[at], rtol=1e-12)


def test_luongs_concat_is_one_matrix_on_both_side_by_side():
    q, k, v = Q[0, 0], K[0, 0], V[0, 0]
    stacked = np.concatenate([W_Q, W_K])
    S = [[np.tanh(np.concatenate([x, y]) @ stacked) @ W for y in k] for x in q]
    weights = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(additive_attention(q, k, v, W_Q, W_K, W), weights @ v, rtol=1e-12)


def test_what_leaves_the_scores_as_they_are():
    S = traced(*GIVEN, b=BIAS)[0]["energies"]
    order, shift = RNG.permutation(A), RNG.normal(size=A)
    same = {
        "hidden numbers in another order": traced(
            Q, K, V, W_Q[:, order], W_K[:, order], W[order], b=BIAS[order]
        ),
        "all signs turned, for tanh is odd": traced(Q, K, V, -W_Q, -W_K, -W, b=-BIAS),
        "b as one more input that is always 1": traced(
            np.concatenate([Q, np.ones((B, H, LQ, 1))], -1), K, V, np.vstack([W_Q, BIAS]), W_K, W
        ),
        "a shift of the keys taken back by b": traced(
            Q, np.concatenate([K, np.ones((B, HKV, LK, 1))], -1), V, W_Q, np.vstack([W_K, shift]),
            W, b=BIAS - shift,
        ),
    }  # fmt: skip
    for why, (trace, _) in same.items():
        np.testing.assert_allclose(trace["energies"], S, rtol=0, atol=1e-13, err_msg=why)


def test_queries_and_keys_may_change_roles():
    S = traced(Q, K.repeat(2, axis=1), Q[:, :, :1].repeat(LK, 2), W_Q, W_K, W)[0]["energies"]
    turned = traced(K.repeat(2, axis=1), Q, Q, W_K, W_Q, W)[0]["energies"]
    np.testing.assert_allclose(turned, S.swapaxes(-1, -2), rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [1e3, 1e150])
def test_no_score_leaves_the_sum_of_w(size):
    trace, output = traced(size * Q, size * K, V, W_Q, W_K, W)
    assert abs(trace["energies"]).max() <= fsum(abs(W)) * (1 + 1e-15)
    assert np.isfinite(output).all()


def test_a_key_that_is_seen_shows_its_nan():
    k = K.copy()
    k[0, 0, 0, 0] = np.nan
    output = additive_attention(Q, k, V, W_Q, W_K, W)
    assert np.isnan(output[0, :2]).all()
    assert np.isfinite(output[0, 2:]).all()
    assert np.isfinite(output[1]).all()


STEPS = [
    "q", "k", "W_q_hidden", "q_hidden", "W_k_hidden", "k_hidden", "hidden", "w", "energies", "v",
    "row_max", "exponentials", "row_sum", "weights", "output",
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({}, {}),
        ({"b": BIAS}, {"b_hidden": "hidden"}),
        ({"kv_lengths": 2}, {"masked": "row_max"}),
        ({"attn_bias": np.zeros((LQ, LK))}, {"biased": "row_max"}),
        ({"alibi_slopes": np.ones(H), "q_offset": 0}, {"biased": "row_max"}),
        ({"return_lse": True}, {"lse": None}),
    ],
)
def test_every_step_is_received_and_none_of_the_zeros(options, added):
    trace, output = traced(*GIVEN, **options)
    expected = list(STEPS)
    for name, before in added.items():
        expected.insert(len(expected) if before is None else expected.index(before), name)
    assert list(trace) == expected
    np.testing.assert_array_equal(trace["q"], Q)
    assert trace["hidden"].shape == (B, H, LQ * LK, A)
    np.testing.assert_allclose(
        trace["hidden"].reshape(B, H, LQ, LK, A)[1, 3, 2, 4],
        np.tanh(Q[1, 3, 2] @ W_Q + K[1, 1, 4] @ W_K + options.get("b", 0)),
        rtol=1e-12,
    )
    np.testing.assert_array_equal(trace["output"], output[0] if "return_lse" in options else output)


def test_tiles_have_blocks_of_the_energies_and_none_of_the_zeros():
    trace, _ = traced(*GIVEN, backend="tiled")
    block = "[i=0,j=0]"
    assert list(trace) == [
        *STEPS[:9], f"V{block}", f"energies_ij{block}", f"m{block}", f"P{block}", f"factor{block}",
        f"l{block}", f"O{block}", "output",
    ]  # fmt: skip
    np.testing.assert_array_equal(trace[f"energies_ij{block}"], trace["energies"])


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_what_a_tap_returns_is_what_goes_on(backend):
    how = {"b": BIAS, "attn_bias": HIDING, "kv_lengths": 4, "backend": backend}
    names = []
    additive_attention(*GIVEN, **how, tap=lambda name, x: names.append(name) or x)
    for name in names:
        assert np.isnan(additive_attention(*GIVEN, **how, tap=spoiling(name))).any(), name


def test_a_trace_shows_each_pair_and_each_head():
    trace, _ = traced(*(x[:1, :2] for x in (Q, K, V)), W_Q, W_K, W)
    shown = {(step.name, step.head): step for step in trace.steps}
    assert shown["hidden", 1].axes == ("Lq·Lk", "A")
    assert shown["hidden", 1].value.shape == (LQ * LK, A)
    assert shown["energies", 0].axes == ("Lq", "Lk")
    assert shown["energies", 0].formula == "S_ij = w · Z_ij"
    assert all(step.source for step in shown.values())


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((np.float32,) * 6, np.float32),
        ((np.int64,) * 6, np.float64),
        ((np.float32,) * 5 + (np.float64,), np.float64),
        ((np.float16,) * 3 + (np.float32,) * 3, np.float32),
    ],
)
def test_the_output_has_the_common_dtype(dtypes, expected):
    given = [x.astype(dtype) for x, dtype in zip(GIVEN, dtypes, strict=True)]
    assert additive_attention(*given).dtype == expected


def test_float32_is_as_near_as_its_rounding():
    exact = additive_attention(*GIVEN)
    near = additive_attention(*(x.astype(np.float32) for x in GIVEN))
    size = fsum(abs(W))
    assert abs(near - exact).max() <= 8 * np.finfo(np.float32).eps * size * abs(V).max()


def test_inputs_are_not_written_to():
    given = [x.copy() for x in (*GIVEN, BIAS, HIDING)]
    for x in given:
        x.flags.writeable = False
    additive_attention(*given[:6], b=given[6], attn_bias=given[7])


def test_any_backend_computes_without_a_tap():
    with pytest.raises(BackendUnavailable, match="it keeps no steps to tap"):
        additive_attention(*GIVEN, backend="cpu", tap=Trace())


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis")  # of a single key
@pytest.mark.parametrize("seed", range(20))
def test_keras_without_weights_of_its_own_is_the_same_with_identities(seed):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="keras is not installed")
    rng = np.random.default_rng(seed)
    B, Lq, Lk, D, Dv = rng.integers(1, 6, 5)
    causal = bool(rng.integers(2))
    q, k, v, w = (
        rng.normal(size=s).astype(np.float32) for s in ((B, Lq, D), (B, Lk, D), (B, Lk, Dv), D)
    )
    lengths = rng.integers(1, Lk + 1, B)
    layer = keras.layers.AdditiveAttention()
    layer.build([q.shape, v.shape, k.shape])
    layer.scale.assign(w)
    found = layer(
        [q, v, k],
        mask=[np.ones((B, Lq), bool), np.arange(Lk) < lengths[:, None]],
        return_attention_scores=True,
        use_causal_mask=causal,
    )
    theirs, weights = map(keras.ops.convert_to_numpy, found)  # of any of Keras's backends
    identity, trace = np.eye(D, dtype=np.float32), Trace()
    ours = additive_attention(
        q[:, None], k[:, None], v[:, None], identity, identity, w, tap=trace,
        kv_lengths=lengths, is_causal=causal, q_offset=0,
    )  # fmt: skip
    np.testing.assert_allclose(ours[:, 0], np.asarray(theirs), rtol=0, atol=1e-5)
    got = np.reshape(trace["weights"], (B, Lq, Lk))
    np.testing.assert_allclose(got, np.asarray(weights), rtol=0, atol=1e-5)


def test_scores_of_zero_are_plain_averages():
    zero = additive_attention(Q, K, V, W_Q, W_K, 0 * W)
    mean = attention(Q[..., :1], K[..., :1], V, scale=0)
    np.testing.assert_allclose(zero, mean, rtol=1e-14)
    np.testing.assert_allclose(zero[1, 3, 0], V[1, 1].mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize(
    ("changed", "options", "error", "sentence"),
    [
        ({"W_q": W_Q.T}, {}, ValueError,
         "W_q has shape (8, 6): expected (Dq, A) with q's width Dq=6; it looks transposed, weights "
         "are applied as x @ W"),
        ({"W_q": W_Q[:5]}, {}, ValueError, "W_q has shape (5, 8): expected (Dq, A) with q's width"),
        ({"W_q": W_Q[:, 0]}, {}, ValueError, "W_q has shape (6,): expected (Dq, A)"),
        ({"W_q": W_Q[None]}, {}, ValueError, "W_q has shape (1, 6, 8): expected (Dq, A)"),
        ({"W_k": W_K.T}, {}, ValueError,
         "W_k has shape (8, 7): expected (Dk, A) = (7, 8), with A=8 columns as W_q has; it looks "
         "transposed"),
        ({"W_k": W_K[:, :3]}, {}, ValueError, "W_k has shape (7, 3): expected (Dk, A) = (7, 8)"),
        ({"w": W[:, None]}, {}, ValueError, "w has shape (8, 1): expected (A,) = (8,), with A=8"),
        ({"w": W[:3]}, {}, ValueError, "w has shape (3,): expected (A,) = (8,)"),
        ({}, {"b": 1.0}, ValueError, "b has shape (): expected (A,) = (8,)"),
        ({"q": Q[0, 0, 0]}, {}, ValueError, "q has shape (6,), q (6,): q, k and v must all be (L"),
        ({"k": K[0]}, {}, ValueError, "k has shape (2, 5, 7), q (2, 4, 3, 6): q, k and v must all"),
        ({"v": V[:, :, :4]}, {}, ValueError, "v has Lk=4 but k has Lk=5: every key needs one valu"),
        ({"q": Q[:1]}, {}, ValueError, "k has B=2 but q has B=1: batches must be equal"),
        ({"q": Q[:, :3]}, {}, ValueError, "k has 2 heads but q has 3: H must be a multiple of Hkv"),
        ({"w": ["a"] * A}, {}, TypeError, "w has dtype <U1: expected integers, float16"),
        ({"W_k": [[1], [1, 2]]}, {}, ValueError, "W_k is not a rectangular array of numbers"),
        ({}, {"scale": 1.0}, TypeError,
         "scale is no option of additive_attention: w scales the scores, which stay within ±Σ|w|"),
        ({}, {"softcap": 1.0}, TypeError, "softcap is no option of additive_attention"),
        ({}, {"attn_mask": np.ones((LK, LQ), bool)}, ValueError,
         "attn_mask has shape (5, 3): expected (Lq, Lk)"),
        ({}, {"attn_bias": np.ones((LK, LQ))}, ValueError,
         "attn_bias has shape (5, 3): expected (Lq, Lk)"),
        ({}, {"attn_bias": np.ones((LQ, LK), bool)}, TypeError, "attn_bias has dtype bool"),
        ({}, {"is_causal": True}, ValueError, "is_causal with Lq=3 and Lk=5 needs q_offset"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(changed, options, error, sentence):
    given = dict(zip(("q", "k", "v", "W_q", "W_k", "w"), GIVEN, strict=True)) | changed
    with pytest.raises(error) as caught:
        additive_attention(**given, **options)
    assert sentence in str(caught.value)


def test_dtypes_without_a_common_one_are_named():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = [x.astype(np.float16) for x in GIVEN]
    given[-1] = given[-1].astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"W_q is float16.* w is bfloat16: no common dtype holds"):
        additive_attention(*given)
