"""What attention() refuses, in which words, and how it reads what it accepts."""

import numpy as np
import pytest

from minimha import attention
from minimha.equations.problem import Problem
from minimha.equations.visibility import UNBOUNDED

Q, K, V = np.ones((2, 4, 3, 5)), np.ones((2, 2, 6, 5)), np.ones((2, 2, 6, 7))

SHAPES = [
    (np.ones(3), K, V, "q has 1 dimension, shape (3,): expected 2 (L, D), 3 (H, L, D) or 4"),
    (np.ones((1,) * 5), K, V, "q has 5 dimensions"),
    (Q, K[0], V, "k has 3 dimensions, shape (2, 6, 5), but q has 4: q, k and v must all be"),
    (Q, K[:1], V, "k has B=1 but q has B=2"),
    (Q, K, V[:1], "v has B=1 but q has B=2"),
    (Q[..., :0], K[..., :0], V, "q has D=0: the head width D must be at least 1"),
    (Q, K[..., :4], V, "k has D=4 but q has D=5"),
    (Q, K, V[:, :, :5], "v has Lk=5 but k has Lk=6"),
    (Q, K, V[:, :1], "v has 1 head but k has 2"),
    (Q, np.ones((2, 6, 6, 5)), np.ones((2, 6, 6, 7)),
     "k has 6 heads but q has 4: H must be a multiple of Hkv (H=4, Hkv=6)"),
    (Q[:, :3], K, V, "k has 2 heads but q has 3"),
    (Q, K[:, :0], V[:, :0], "k has 0 heads but q has 4: 0 is too few"),
    (Q[:, :0], K, V, "k has 2 heads but q has 0: 0 is too few"),
]  # fmt: skip

OPTIONS = [
    ({"is_causal": 1}, TypeError, "is_causal is 1: expected True or False"),
    ({"is_causal": True}, ValueError, "is_causal with Lq=3 and Lk=6 needs q_offset: query i is "
     "at key position i + q_offset; q_offset=0 aligns the first query with the first key, "
     "q_offset=3 the last with the last"),
    ({"window_size": (1, 0)}, ValueError, "window_size with Lq=3 and Lk=6 needs q_offset"),
    ({"alibi_slopes": np.ones(4)}, ValueError, "alibi_slopes with Lq=3 and Lk=6 needs q_offset"),
    ({"q_offset": 1.5}, TypeError, "q_offset is 1.5: expected an integer, or B=2 integers"),
    ({"q_offset": [1, 2, 3]}, ValueError, "q_offset has shape (3,): expected one integer, or"),
    ({"q_offset": 2**31}, ValueError, "q_offset is 2147483648: expected integers from -2147483647"),
    ({"window_size": 3}, ValueError, "window_size is 3: expected a pair (left, right)"),
    ({"window_size": (1, 2, 3)}, ValueError, "window_size is (1, 2, 3): expected a pair"),
    ({"window_size": (-1, 0)}, ValueError, "None for a side without a limit, and none below 0"),
    ({"window_size": (1.0, 0)}, TypeError, "window_size is (1.0, 0): expected a pair"),
    ({"window_size": (True, 0)}, TypeError, "window_size is (True, 0): expected a pair"),
    ({"attn_mask": np.ones((3, 6))}, TypeError, "attn_mask has dtype float64: expected bool, True"),
    ({"attn_mask": np.ones((6, 3), bool)}, ValueError,
     "attn_mask has shape (6, 3): expected (Lq, Lk), or 4-D and broadcastable to (B, H, Lq, Lk), "
     "here (3, 6) or (2, 4, 3, 6)"),
    ({"attn_mask": np.ones((2, 3, 6), bool)}, ValueError, "attn_mask has shape (2, 3, 6)"),
    ({"attn_mask": np.ones((2, 2, 3, 6), bool)}, ValueError, "attn_mask has shape (2, 2, 3, 6)"),
    ({"attn_bias": np.ones((3, 6), bool)}, TypeError, "attn_bias has dtype bool: expected numbers"),
    ({"attn_bias": np.ones((1, 6))}, ValueError, "attn_bias has shape (1, 6): expected (Lq, Lk)"),
    ({"attn_bias": [[1], [1, 2]]}, ValueError, "attn_bias is not a rectangular array of numbers"),
    ({"key_indices": np.full((3, 2), 6)}, ValueError,
     "key_indices has 6 for query 0: expected -1 for no key, or a key from 0 to 5"),
    ({"key_indices": [[0], [1], [-2]]}, ValueError, "key_indices has -2 for query 2: expected -1"),
    ({"key_indices": np.array([[2**63]] * 3, np.uint64)}, ValueError, "has 9223372036854775808"),
    ({"key_indices": np.zeros((3, 2))}, TypeError,
     "key_indices has dtype float64: expected integers, the keys that each query picks"),
    ({"key_indices": np.zeros((3, 2), bool)}, TypeError, "key_indices has dtype bool"),
    ({"key_indices": [0, 1, 2]}, ValueError,
     "key_indices has shape (3,): expected (Lq, K), or 4-D and broadcastable to (B, Hkv, Lq, K), "
     "here (3, K) or (2, 2, 3, K)"),
    ({"key_indices": np.zeros((2, 4, 3, 1), int)}, ValueError, "shape (2, 4, 3, 1): expected (Lq"),
    ({"key_indices": np.zeros((2, 3, 1), int)}, ValueError, "key_indices has shape (2, 3, 1)"),
    ({"key_indices": [[0], [1, 2], [3]]}, ValueError, "key_indices is not a rectangular array"),
    ({"key_indices": np.broadcast_to(0, (3, 2**30))}, ValueError,
     "key_indices has 3221225472 indices: expected at most 2^31"),
    ({"kv_lengths": [1.0, 2.0]}, TypeError, "kv_lengths is [1.0, 2.0]: expected an integer"),
    ({"kv_lengths": [1]}, ValueError, "kv_lengths has shape (1,): expected one integer, or shape"),
    ({"kv_lengths": [1, 7]}, ValueError, "kv_lengths is [1, 7]: expected integers from 0 to 6"),
    ({"kv_lengths": [-1, 2]}, ValueError, "kv_lengths is [-1, 2]"),
    ({"alibi_slopes": np.ones(2), "q_offset": 0}, ValueError,
     "alibi_slopes has shape (2,): expected (H,) = (4,), one number per query head"),
    ({"sinks": np.ones((2, 4))}, ValueError, "sinks has shape (2, 4): expected (H,) = (4,)"),
    ({"sinks": ["a"] * 4}, TypeError, "sinks has dtype <U1: expected integers, float16"),
    ({"scale": "big"}, TypeError, "scale is 'big': expected a number"),
    ({"scale": np.ones(1)}, TypeError, "scale is array([1.]): expected a number"),
    ({"scale": np.array(True)}, TypeError, "scale is array(True): expected a number"),
    ({"softcap": np.array(-1.0)}, ValueError, "softcap is array(-1.): expected a positive number"),
    ({"scale": True}, TypeError, "scale is True: expected a number"),
    ({"scale": float("nan")}, ValueError, "scale is nan: expected a finite number"),
    ({"scale": 10**400}, ValueError, "expected a finite number"),
    ({"softcap": 0}, ValueError, "softcap is 0: expected a positive number, at least 2.2e-308"),
    ({"q_offset": 2**64 - 1}, ValueError, "q_offset is 18446744073709551615: expected integers"),
    ({"q_offset": -(2**63)}, ValueError, "q_offset is -9223372036854775808: expected integers"),
    ({"q_offset": [0, 2**70]}, ValueError, "q_offset is [0, 1180591620717411303424]: expected"),
    ({"q_offset": True}, TypeError, "q_offset is True: expected an integer"),
    ({"kv_lengths": 2**64 - 1}, ValueError, "kv_lengths is 18446744073709551615: expected"),
    ({"window_size": np.array(5)}, ValueError, "window_size is array(5): expected a pair"),
    ({"sinks": [0, 0, 0, np.nan]}, ValueError, "expected finite numbers, or -inf for no sink"),
    ({"sinks": [0, 0, 0, np.inf]}, ValueError, "expected finite numbers, or -inf for no sink"),
    ({"alibi_slopes": [0, 0, 0, np.inf], "q_offset": 0}, ValueError, "expected finite numbers"),
    ({"alibi_slopes": [0, 0, 0, np.nan], "q_offset": 0}, ValueError, "expected finite numbers"),
    ({"alibi_slopes": [1.0], "q_offset": 0}, ValueError, "alibi_slopes has shape (1,)"),
    ({"return_lse": "no"}, TypeError, "return_lse is 'no': expected True or False"),
    ({"backend": np.zeros(0)}, ValueError, "backend is array([], dtype=float64): expected auto"),
    ({"backend": ["dense"]}, ValueError, "backend is ['dense']: expected auto, dense"),
    ({"tap": None}, TypeError, "tap is None: expected a callable tap(name, value)"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0: expected a positive number"),
]  # fmt: skip

DTYPES = [
    ([["a"]], "q has dtype <U1: expected integers, float16, bfloat16, float32 or float64"),
    ([[True]], "q has dtype bool"),
    ([[1j]], "q has dtype complex128"),
    (np.ones((1, 1), np.longdouble), "q has dtype"),
    (np.array([[object()]]), "q has dtype object"),
    (np.array([["2020-01-01"]], "M8[D]"), "q has dtype datetime64"),
]


@pytest.mark.parametrize(("q", "k", "v", "sentence"), SHAPES, ids=[s[-1][:40] for s in SHAPES])
def test_shapes_that_do_not_match(q, k, v, sentence):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the sentence is compared below)
        attention(q, k, v)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "sentence"), OPTIONS, ids=[o[-1][:40] for o in OPTIONS]
)
def test_invalid_options(options, error, sentence):
    with pytest.raises(error) as caught:
        attention(Q, K, V, **options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("q", "sentence"), DTYPES, ids=[s for _, s in DTYPES])
def test_unsupported_dtypes(q, sentence):
    with pytest.raises(TypeError) as caught:
        attention(q, [[1.0]], [[1.0]])
    assert sentence in str(caught.value)


MASKED = {
    "v": np.ma.masked_array(V, V > 0),
    "attn_mask": np.ma.masked_array(np.ones((3, 6), bool), True),
    "attn_bias": np.ma.masked_array(np.ones((3, 6)), True),
    "key_indices": np.ma.masked_array(np.ones((3, 1), int), True),
    "kv_lengths": np.ma.masked_array([1, 2], [True, False]),
    "q_offset": np.ma.masked_array([1, 2], [True, False]),
    "alibi_slopes": np.ma.masked_array(np.ones(4), True),
    "sinks": np.ma.masked_array(np.ones(4), True),
    "scale": np.ma.masked_array(2.0, True),
    "softcap": np.ma.masked,
}


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_array_is_refused_since_its_mask_would_be_lost(name):
    given = {"q": Q, "k": K, "v": V, "q_offset": 0, name: MASKED[name]}
    with pytest.raises(TypeError, match=f"{name} is a masked array, whose mask would be lost"):
        attention(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v", [MASKED["v"][0], V[1]]),
        ("attn_mask", [[np.ma.masked] * 6] * 3),
        ("kv_lengths", (np.ma.masked, 2)),
        ("q_offset", [np.ma.masked_array(3, True), 2]),
        ("sinks", [np.ma.masked, 0.0, 1.0, 2.0]),
    ],
)
def test_so_is_a_list_that_holds_one(name, value):
    given = {"q": Q, "k": K, "v": V, name: value}
    with pytest.raises(TypeError, match=f"{name} holds a masked array, whose mask would be lost"):
        attention(**given)


@pytest.mark.parametrize("option", [{"softcap": 1e-50}, {"softcap": 1e39}, {"scale": 1e300}])
def test_options_must_be_representable_in_the_compute_dtype(option):
    q = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match="expected a"):
        attention(q, q, q, **option)
    assert np.isfinite(attention(*[q.astype(float)] * 3, **option)).all()


SIGNALLING = np.array([0x7F800001], np.uint32).view(np.float32)[0]  # a NaN that casts report
CASTS = {
    "to a narrower output": ([(np.arange(12.0).reshape(3, 4) * 6e-8).astype("f2")] * 3, {}),
    "to a common dtype": (
        [np.ones((3, 4)), np.ones((3, 4), "f4"), np.full((3, 4), SIGNALLING)],
        {},
    ),
    "of a bias": ([np.ones((3, 4), "f4")] * 3, {"attn_bias": np.full((3, 3), 1e-300)}),
    "of sinks": ([np.ones((3, 4), "f4")] * 3, {"sinks": [1e300]}),
    "of nothing": ([np.array([[1e300, np.inf, -np.inf, np.nan]] * 3)] * 3, {"softcap": 1.0}),
}


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@pytest.mark.parametrize(("qkv", "options"), CASTS.values(), ids=CASTS)
def test_no_errstate_of_the_caller_changes_the_result(qkv, options, backend):
    with np.errstate(all="ignore"):
        expected = attention(*qkv, **options, backend=backend)
    with np.errstate(all="raise"):
        output = attention(*qkv, **options, backend=backend)
    np.testing.assert_array_equal(output, expected)


def test_a_finite_bias_stays_finite_in_a_narrower_dtype():
    q, v = np.ones((1, 1), np.float32), np.array([[1.0], [3.0]], np.float32)
    bias = np.full((1, 2), np.finfo(float).min)  # some libraries use it instead of minus infinity
    output = attention(q, np.ones((2, 1), np.float32), v, attn_bias=bias)
    np.testing.assert_array_equal(output, [[2.0]])
    assert attention(q, v, v, sinks=[1e300]).tolist() == [[0.0]]


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError, match="k is not a rectangular array of numbers"):
        attention([[1, 2]], [[1], [1, 2]], [[1]])


def test_the_output_has_the_rank_of_the_input():
    for rank in (2, 3, 4):
        q, k, v = (x[(0,) * (4 - rank)] for x in (Q, Q, Q))
        output, lse = attention(q, k, v, return_lse=True)
        assert output.shape == q.shape
        assert lse.shape == q.shape[:-1]


def test_the_rank_does_not_change_the_numbers():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 4, 5))
    expected = attention(q, k, v)
    np.testing.assert_allclose(attention(q[1], k[1], v[1]), expected[1], rtol=1e-12)
    np.testing.assert_allclose(attention(q[1, 2], k[1, 2], v[1, 2]), expected[1, 2], rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
def test_integers_are_computed_in_float64(dtype):
    q = np.array([[1, 0], [0, 2]], dtype)
    assert attention(q, q, q).dtype == np.float64
    np.testing.assert_array_equal(attention(q, q, q), attention(*[q.astype(float)] * 3))


def test_nested_lists_are_accepted():
    assert attention([[1, 0]], [[1, 0]], [[0.5, 2]]).tolist() == [[0.5, 2.0]]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32_and_rounded_once(name):
    dtype = getattr(np, name, None) or getattr(pytest.importorskip("ml_dtypes"), name)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 2, 9, 8)).astype(dtype) for _ in range(3))
    for backend in ("dense", "tiled"):
        output, lse = attention(q, k, v, is_causal=True, backend=backend, return_lse=True)
        wide = (x.astype(np.float32) for x in (q, k, v))
        exact, exact_lse = attention(*wide, is_causal=True, backend=backend, return_lse=True)
        assert output.dtype == dtype
        assert lse.dtype == np.float32
        np.testing.assert_array_equal(output.astype(float), exact.astype(dtype).astype(float))
        np.testing.assert_array_equal(lse, exact_lse)


def test_mixed_dtypes_are_promoted_to_the_widest():
    half, single, integer = (np.ones((2, 2), t) for t in (np.float16, np.float32, np.int32))
    assert attention(half, single, single).dtype == np.float32
    assert attention(single, integer, single).dtype == np.float64


def test_float8_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = np.ones((1, 1), ml_dtypes.float8_e4m3fn)
    with pytest.raises(TypeError, match="q has dtype float8_e4m3fn"):
        attention(q, q, q)


def test_the_byte_order_does_not_matter():
    swapped = np.arange(4.0).reshape(2, 2).astype(">f4")
    native = swapped.astype(np.float32)
    output = attention(swapped, swapped, swapped)
    assert output.dtype == np.float32
    np.testing.assert_array_equal(output, attention(native, native, native))


def test_inputs_may_be_strided_and_are_never_written():
    rng = np.random.default_rng(0)
    big = rng.normal(size=(3, 2, 4, 12, 10))
    views = [x[..., ::2, ::-2] for x in big]
    mask = rng.random((6, 6)) < 0.5
    bias = rng.normal(size=(6, 6))
    before = [x.copy() for x in (big, mask, bias)]
    for x in (big, mask, bias):
        x.setflags(write=False)
    for backend in ("dense", "tiled"):
        options = {"attn_mask": mask, "attn_bias": bias, "backend": backend}
        expected = attention(*(np.ascontiguousarray(x) for x in views), **options)
        np.testing.assert_allclose(attention(*views, **options), expected, rtol=1e-12)
    for x, y in zip((big, mask, bias), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_defaults_are_filled_in():
    problem = Problem.of(Q, K, V)
    assert problem.scale == 1 / np.sqrt(5)
    assert (problem.left, problem.right) == (UNBOUNDED, UNBOUNDED)
    assert problem.kv_lengths.tolist() == [6, 6]
    assert problem.q_offset.tolist() == [0, 0]
    assert not problem.hides


def test_one_integer_applies_to_every_batch_entry():
    problem = Problem.of(Q, K, V, kv_lengths=4, q_offset=np.int32(-2))
    assert problem.kv_lengths.tolist() == [4, 4]
    assert problem.q_offset.tolist() == [-2, -2]


def test_a_window_wider_than_the_sequence_hides_nothing():
    output = attention(Q, K, V, window_size=(2**62, 2**62), q_offset=0)
    np.testing.assert_array_equal(output, attention(Q, K, V))


def test_numpy_scalars_are_accepted():
    output = attention(Q, K, V, scale=np.float32(0.5), softcap=np.array(2.0), is_causal=np.False_)
    np.testing.assert_array_equal(output, attention(Q, K, V, scale=0.5, softcap=2.0))


def test_an_unbounded_window_needs_no_q_offset():
    output = attention(Q, K, V, window_size=(None, None))
    np.testing.assert_array_equal(output, attention(Q, K, V))
