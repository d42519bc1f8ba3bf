"""Cosine attention looks at directions only, of vectors of any length."""

from math import fsum, hypot

import numpy as np
import pytest
from problems import naive_attention, spoiling

from minimha import attention
from minimha.explain import Trace
from minimha.layers.cosine import cosine_attention

RNG = np.random.default_rng(0)
B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 3, 5, 6, 2
Q, K = RNG.normal(size=(B, H, LQ, D)), RNG.normal(size=(B, HKV, LK, D))
V = RNG.normal(size=(B, HKV, LK, DV))
BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
HIDING = np.where(RNG.random((B, H, LQ, LK)) < 0.3, -np.inf, RNG.normal(size=(B, H, LQ, LK)))
OPTIONS = [
    {},
    {"is_causal": True, "q_offset": 2},
    {"q_offset": [0, 2], "window_size": (1, 0)},
    {"attn_mask": RNG.random((1, H, LQ, LK)) < 0.6, "sinks": RNG.normal(size=H)},
    {"kv_lengths": np.array([0, 3]), "softcap": 0.7},
    {"attn_bias": HIDING, "alibi_slopes": RNG.random(H), "q_offset": 1},
]
# Document 004's queries and keys, and the cosines that it offers to compare with.
DOCUMENT = np.array([[1, 0], [0, 1], [1, 1]]), np.array([[1, 0], [1, 1], [0, 1]])
COSINES = [[1, 0.707107, 0], [0, 0.707107, 1], [0.707107, 1, 0.707107]]


def cosines(q, k):
    """q_i · k_j / (|q_i| |k_j|), number by number."""
    group = q.shape[1] // k.shape[1]
    S = np.empty((*q.shape[:3], k.shape[2]))
    for b, h, i, j in np.ndindex(S.shape):
        x, y = q[b, h, i].tolist(), k[b, h // group, j].tolist()
        product = fsum(m * n for m, n in zip(x, y, strict=True))
        S[b, h, i, j] = product / (hypot(*x) * hypot(*y))
    return S


def traced(*given, **options):
    trace = Trace()
    output = cosine_attention(*given, tap=trace, **options)
    return trace, output


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("scale", [1.0, 20, 0, -3.0, [1.0, 2.5, 0.0, 100.0]], ids=str)
@BACKENDS
def test_pairs_one_by_one(options, scale, backend):
    got, lse = cosine_attention(
        Q, K, V, scale=scale, return_lse=True, backend=backend, **options
    )  # fmt: skip
    # The oracle multiplies queries with keys: the rows of S with those of the identity.
    S = cosines(Q, K) * np.reshape(scale, (-1, 1, 1))
    rows = np.broadcast_to(np.eye(LK), (B, HKV, LK, LK))
    expected, expected_lse = naive_attention(S, rows, V, scale=1, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-14, atol=1e-13)


def test_the_cosines_of_document_004():
    trace, _ = traced(*DOCUMENT, np.eye(3))
    np.testing.assert_allclose(trace["cosine"], COSINES, rtol=0, atol=5e-7)
    shares = np.exp(COSINES) / np.exp(COSINES).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(trace["weights"], shares, rtol=0, atol=5e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lengths_do_not_count(dtype):
    tiny, huge = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    expected = cosine_attention(*(x.astype(dtype) for x in (Q, K, V)), scale=5)
    near = 32 * np.finfo(dtype).eps
    for q_length, k_length in [(3, 0.25), (huge / 8, huge / 8), (tiny * 64, huge / 8)]:
        q = (Q * np.asarray(q_length)).astype(dtype)
        k = (K * np.asarray(k_length)).astype(dtype)
        assert np.isfinite(q).all()
        got = cosine_attention(q, k, V.astype(dtype), scale=5)
        np.testing.assert_allclose(got, expected, rtol=0, atol=near)


@pytest.mark.parametrize("x", [1e200, 1e-200, 5e-324, 1.7e308])
def test_a_vector_of_any_length_has_a_direction(x):
    trace, _ = traced([[x, 0.0], [x, x], [0.0, -x]], [[x, x], [-x, 0.0]], np.eye(2))
    half = 0.5**0.5
    np.testing.assert_allclose(trace["cosine"], [[half, -1], [1, -half], [-half, 0]], rtol=1e-15)


def test_turning_all_vectors_alike_changes_nothing():
    turn, _ = np.linalg.qr(RNG.normal(size=(D, D)))
    expected = cosine_attention(Q, K, V, scale=10)
    np.testing.assert_allclose(
        cosine_attention(Q @ turn, K @ turn, V, scale=10), expected, rtol=0, atol=1e-13
    )


@BACKENDS
def test_a_vector_of_zeros_has_cosine_0_with_all(backend):
    q, k = Q.copy(), K.copy()
    q[0, 0, 0] = 0
    k[1, 1, 2] = 0
    got = cosine_attention(q, k, V, scale=50, backend=backend)
    np.testing.assert_allclose(got[0, 0, 0], V[0, 0].mean(axis=0), rtol=1e-12)
    S = 50 * np.einsum("hqd,kd->hqk", q[1, 2:], k[1, 1])
    S /= np.linalg.norm(q[1, 2:], axis=-1)[..., None] * [
        1 if j == 2 else hypot(*k[1, 1, j]) for j in range(LK)
    ]
    weights = np.exp(S) / np.exp(S).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(got[1, 2:], weights @ V[1, 1], rtol=1e-12)


def test_a_plain_cosine_hardly_chooses():
    weights = traced(RNG.normal(size=(50, 2)), RNG.normal(size=(50, 2)), np.zeros((50, 1)))[0][
        "weights"
    ]
    ratios = weights.max(axis=1) / weights.min(axis=1)
    assert 6 < ratios.max() <= np.exp(2)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_shows(spoilt):
    q = Q.copy()
    q[0, 1, 2, 3] = spoilt
    output = cosine_attention(q, K, V)
    assert np.isnan(output[0, 1, 2]).all()
    assert np.isnan(output).sum() == DV


WEIGHTS = "row_max exponentials row_sum weights"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"q q_unit k k_unit v cosine {WEIGHTS} output"),
        ({"scale": 4}, f"q q_unit k k_unit v cosine scaled_cosine {WEIGHTS} output"),
        ({"scale": [4.0] * H}, f"q q_unit k k_unit v scaled_cosine {WEIGHTS} output"),
        ({"kv_lengths": 2}, f"q q_unit k k_unit v cosine masked {WEIGHTS} output"),
        ({"return_lse": True}, f"q q_unit k k_unit v cosine {WEIGHTS} output lse"),
        ({"backend": "tiled"}, "q q_unit k k_unit Q K V S m P factor l O output"),
    ],
)
def test_every_step_is_received(options, expected):
    trace, _ = traced(Q, K, V, **options)
    assert [name.partition("[")[0] for name in trace] == expected.split()
    np.testing.assert_array_equal(trace["q"], Q)
    np.testing.assert_allclose(np.linalg.norm(trace["k_unit"], axis=-1), 1, rtol=1e-15)
    assert all(step.source for step in trace.steps)


def test_a_scale_a_head_is_received_as_scaled_cosines():
    scale = [1.0, 2.0, 3.0, -4.0]
    scaled = traced(Q, K, V, scale=scale)[0]["scaled_cosine"]
    np.testing.assert_allclose(scaled, cosines(Q, K) * np.reshape(scale, (4, 1, 1)), rtol=1e-12)


@pytest.mark.parametrize("scale", [2.0, [2.0] * H])
@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_what_a_tap_returns_is_what_goes_on(scale, backend):
    how = {"scale": scale, "kv_lengths": 4, "softcap": 3.0, "attn_bias": HIDING, "backend": backend}
    names = []
    cosine_attention(Q, K, V, **how, tap=lambda name, x: names.append(name) or x)
    for name in names:
        assert np.isnan(cosine_attention(Q, K, V, **how, tap=spoiling(name))).any(), name


@pytest.mark.parametrize("at", [(), (0,), (0, 1)])
@pytest.mark.parametrize("scale", [3.0, "per head"])
def test_fewer_axes_come_back_as_they_came(at, scale):
    q, k, v = (x[:, :HKV][at] for x in (Q, K, V))
    scale = [3.0] * (HKV if len(at) < 2 else 1) if scale == "per head" else scale
    got, lse = cosine_attention(q, k, v, scale=scale, return_lse=True)
    whole, whole_lse = cosine_attention(Q[:, :HKV], K, V, scale=3, return_lse=True)
    np.testing.assert_allclose(got, whole[at], rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse[at], rtol=1e-12)


def test_integers_are_computed_in_float64():
    got = cosine_attention(*DOCUMENT, [[1], [0], [2]])
    assert got.dtype == np.float64
    np.testing.assert_array_equal(
        got, cosine_attention(*(x.astype(float) for x in DOCUMENT), [[1.0], [0], [2]])
    )


def test_float32_is_as_near_as_its_rounding():
    exact = cosine_attention(Q, K, V, scale=10)
    near = cosine_attention(*(x.astype(np.float32) for x in (Q, K, V)), scale=10)
    assert near.dtype == np.float32
    assert abs(near - exact).max() <= 8 * 10 * np.finfo(np.float32).eps * abs(V).max()


def test_unit_vectors_are_attention_as_it_is():
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (Q, K))
    np.testing.assert_allclose(
        cosine_attention(Q, K, V, scale=D**-0.5), attention(q, k, V), rtol=1e-13
    )


def test_inputs_are_not_written_to():
    given = [x.copy() for x in (Q, K, V, np.ones(H))]
    for x in given:
        x.flags.writeable = False
    cosine_attention(*given[:3], scale=given[3])


@pytest.mark.parametrize("seed", range(20))
def test_torchs_cosine_similarity_gives_the_same_scores(seed):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(seed)
    H, Lq, Lk, D, Dv = (int(n) for n in rng.integers(1, 6, 5))
    q, k, v = (rng.normal(size=s) for s in ((H, Lq, D), (H, Lk, D), (H, Lk, Dv)))
    scale = float(rng.uniform(0, 100))
    there = [torch.from_numpy(x) for x in (q, k, v)]
    cos = torch.nn.functional.cosine_similarity(there[0][:, :, None], there[1][:, None], dim=-1)
    trace, output = traced(q, k, v, scale=scale)
    np.testing.assert_allclose(trace["cosine"].reshape(cos.shape), cos, rtol=0, atol=1e-14)
    expected = torch.softmax(scale * cos, -1) @ there[2]
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "options", "error", "sentence"),
    [
        ((Q, K[..., :4], V), {}, ValueError, "k has D=4 but q has D=6: a score is a product over"),
        ((Q[..., :0], K[..., :0], V), {}, ValueError, "q has D=0: the head width D must be at"),
        ((Q, K, V[:, :, :4]), {}, ValueError, "v has Lk=4 but k has Lk=5"),
        ((Q, K, [["a"]]), {}, TypeError, "v has dtype <U1: expected integers"),
        ((Q, K, V), {"scale": [1.0] * HKV}, ValueError,
         "scale has shape (2,): expected one number, or (H,) = (4,), one per query head"),
        ((Q, K, V), {"scale": np.ones((H, 1, 1))}, ValueError, "scale has shape (4, 1, 1): expec"),
        ((Q, K, V), {"scale": None}, TypeError, "scale has dtype object: expected integers"),
        ((Q, K, V), {"scale": "big"}, TypeError, "scale has dtype <U3: expected integers"),
        ((Q, K, V), {"scale": True}, TypeError, "scale has dtype bool"),
        ((Q, K, V), {"scale": np.inf}, ValueError, "scale is inf: expected finite numbers"),
        ((Q, K, V), {"scale": [1, 2, 3, np.nan]}, ValueError, "expected finite numbers, in float"),
        ((Q.astype("f4"), K.astype("f4"), V.astype("f4")), {"scale": 1e39}, ValueError,
         "scale is 1e+39: expected finite numbers, in float32 too"),
        ((Q, K, V), {"is_causal": True}, ValueError, "is_causal with Lq=3 and Lk=5 needs q_offset"),
        ((Q, K, V), {"return_lse": 1}, TypeError, "return_lse is 1: expected True or False"),
        ((Q, K, V), {"attn_mask": np.ones((LK, LQ), bool)}, ValueError, "attn_mask has shape (5, "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(given, options, error, sentence):
    with pytest.raises(error) as caught:
        cosine_attention(*given, **options)
    assert sentence in str(caught.value)
