"""Every way to compute attention against one oracle: each option alone, and combinations.

``dense`` and ``tiled`` are the equations, the others are the rungs of the ladder of kernels.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    MASK_MODS,
    SCORE_MODS,
    assert_as_good_as_plain,
    bounded,
    by_distance,
    naive_attention,
    naive_merge,
    near,
    of_parity,
    random_problems,
    rounding,
    run,
    spoiling,
    visible,
)

from minimha import attention
from minimha.equations import dense, tiled
from minimha.equations.problem import Problem
from minimha.kernels.ladder import LADDER

EQUATIONS = ("dense", "tiled")
BACKENDS = (*EQUATIONS, *LADDER)
inf = np.inf
SINKS = np.array([0.0, 1.0, -inf, 5.0])
KEYS = np.random.default_rng(2).integers(-1, 5, (2, 2, 5, 4))


def small(B=2, H=4, Hkv=2, Lq=5, Lk=5, D=3, Dv=2, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def random(shape, seed=1):
    return np.random.default_rng(seed).random(shape)


ALONE = {
    "nothing": {},
    "causal": {"is_causal": True},
    "causal, later": {"is_causal": True, "q_offset": 2},
    "causal, earlier": {"is_causal": True, "q_offset": -2},
    "causal, offset per batch entry": {"is_causal": True, "q_offset": np.array([-1, 3])},
    "window to the left": {"window_size": (1, None)},
    "window to the right": {"window_size": (None, 1)},
    "window": {"window_size": (2, 1)},
    "window of self": {"window_size": (0, 0)},
    "window, causal": {"window_size": (2, 2), "is_causal": True},
    "window, offset": {"window_size": (1, 0), "q_offset": 3},
    "mask 2-D": {"attn_mask": random((5, 5)) < 0.5},
    "mask 4-D": {"attn_mask": random((2, 4, 5, 5)) < 0.5},
    "mask per head": {"attn_mask": random((1, 4, 1, 5)) < 0.5},
    "mask of nothing": {"attn_mask": np.zeros((5, 5), bool)},
    "bias 2-D": {"attn_bias": random((5, 5))},
    "bias per batch entry": {"attn_bias": random((2, 1, 5, 5))},
    "bias of -inf": {"attn_bias": np.where(random((5, 5)) < 0.5, -inf, 1.0)},
    "lengths": {"kv_lengths": np.array([5, 2])},
    "lengths 0": {"kv_lengths": np.array([0, 1])},
    "keys": {"key_indices": [[0, 3], [4, 4], [-1, 2], [-1, -1], [4, 0]]},
    "keys per head": {"key_indices": KEYS},
    "keys of all heads": {"key_indices": KEYS[:, :1]},
    "the same keys of all queries": {"key_indices": KEYS[:, :, :1], "is_causal": True},
    "keys, window, lengths": {"key_indices": KEYS, "window_size": (2, 1), "kv_lengths": [4, 5]},
    "no keys": {"key_indices": np.empty((5, 0), int)},
    "keys, mask and bias": {
        "key_indices": KEYS,
        "attn_mask": random((5, 5)) < 0.7,
        "attn_bias": random((2, 4, 5, 5)),
    },
    "keys and functions": {"key_indices": KEYS, "score_mod": by_distance, "mask_mod": of_parity},
    "alibi": {"alibi_slopes": np.array([1.0, 0.5, 0.25, 0.0])},
    "alibi, keys": {"alibi_slopes": np.array([1.0, 0.5, 0.25, 0.0]), "key_indices": KEYS},
    "alibi, offset": {"alibi_slopes": np.array([1.0, 0.5, 0.25, 0.0]), "q_offset": -3},
    "scale": {"scale": 2.0},
    "scale 0": {"scale": 0.0},
    "scale negative": {"scale": -1.0},
    "softcap": {"softcap": 0.7},
    "softcap, causal": {"softcap": 0.7, "is_causal": True},
    "softcap, bias": {"softcap": 0.7, "attn_bias": 3 * random((5, 5))},
    "sinks": {"sinks": SINKS},
    "sinks, nothing seen": {"sinks": SINKS, "kv_lengths": np.array([0, 3])},
    **{f.__name__: {"score_mod": f} for f in SCORE_MODS},
    **{f.__name__: {"mask_mod": f} for f in MASK_MODS},
    "functions, offset": {"score_mod": by_distance, "mask_mod": near, "q_offset": [2, -3]},
    "functions, causal": {"score_mod": bounded, "mask_mod": of_parity, "is_causal": True},
    "functions, bias": {"score_mod": bounded, "softcap": 0.7, "attn_bias": 3 * random((5, 5))},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE.keys())
def test_each_option_alone(options, dtype, backend):
    q, k, v = small(dtype=dtype)
    output, lse = run(backend, q, k, v, **options)
    assert output.dtype == lse.dtype == dtype
    assert_as_good_as_plain(q, k, v, options, output, lse)


EIGHT_BITS = {
    "nothing": {}, "causal": {"is_causal": True}, "lengths": {"kv_lengths": np.array([5, 2])},
    "softcap, bias": {"softcap": 0.7, "attn_bias": 3 * random((5, 5))},
    "sinks, nothing seen": {"sinks": SINKS, "kv_lengths": np.array([0, 3])},
    "mask": {"attn_mask": random((2, 4, 5, 5)) < 0.5},
    "by_distance, near": {"score_mod": by_distance, "mask_mod": near},
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("options", EIGHT_BITS.values(), ids=EIGHT_BITS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=str)
def test_keys_and_values_of_8_bits(dtype, options, stored, backend):
    q, k, v = small()
    q, k, v = q.astype(dtype), (30 * k).astype(stored), (30 * v).astype(stored)
    scales = {"k_scale": 0.01 + 0.05 * random((2, 2, 5)), "v_scale": 0.01 + random(2)}
    O, L = run(backend, q, k, v, **scales, **options)
    exact_O, exact_L = naive_attention(q, k, v, **scales, **options)
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    np.testing.assert_allclose(L, exact_L, rtol=0, atol=300 * eps)
    rounded = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 0
    np.testing.assert_allclose(O.astype(float), exact_O, rtol=rounded, atol=5000 * eps)


@settings(max_examples=5 * settings.default.max_examples)
@given(problem=random_problems(), blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_random_combinations(problem, blocks):
    q, k, v, options = problem
    for backend in BACKENDS:
        output, lse = run(backend, q, k, v, **options)
        assert_as_good_as_plain(q, k, v, options, output, lse)
    B_r, B_c = blocks
    tiles = tiled.forward(Problem.of(q, k, v, **options), B_r=B_r, B_c=B_c)
    assert_as_good_as_plain(q, k, v, options, *tiles)


@given(problem=random_problems(np.float64), data=st.data())
def test_what_no_query_sees_may_be_anything(problem, data):
    q, k, v, options = problem
    expected, lse = attention(q, k, v, **options, return_lse=True)
    allowed, _ = rounding(q, k, v, options, lse)
    group = q.shape[1] // k.shape[1]
    seen = visible(q, k, options).any(axis=2).reshape(k.shape[0], k.shape[1], group, -1).any(axis=2)
    poison = data.draw(st.sampled_from([np.nan, inf, -inf]))
    k, v = k.copy(), v.copy()
    k[~seen], v[~seen] = poison, poison
    for backend in BACKENDS:
        output, _ = run(backend, q, k, v, **options)
        np.testing.assert_allclose(output, expected, rtol=0, atol=2 * allowed)


HIDING = {
    "causal": {"is_causal": True},
    "window": {"window_size": (None, 0)},
    "mask": {"attn_mask": np.tri(5, dtype=bool)},
    "bias": {"attn_bias": np.where(np.tri(5), 0.5, -inf)},
    "keys": {"key_indices": np.where(np.tri(5), np.arange(5), -1)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
def test_whatever_hides_a_key_hides_its_nan_too(options, poison, backend):
    q, k, v = small(dtype=np.float64)
    expected = attention(q, k, v, **options)
    k[:, 0, 4], v[:, 1, 4] = poison, poison
    output, _ = run(backend, q, k, v, **options)
    np.testing.assert_allclose(output[:, :, :4], expected[:, :, :4], rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
def test_a_row_depends_only_on_keys_that_it_sees(poison, backend):
    q, k, v = small(dtype=np.float64)
    expected = attention(q, k, v, is_causal=True)
    k[1, 0, 3], v[1, 1, 2, 0] = poison, poison
    output, _ = run(backend, q, k, v, is_causal=True)
    untouched = np.ones(output.shape, bool)
    untouched[1, :2, 3:] = False  # query heads 0 and 1 read key/value head 0
    untouched[1, 2:, 2:, 0] = False
    np.testing.assert_allclose(output[untouched], expected[untouched], rtol=1e-12)
    assert not np.isfinite(output[1, 2:, 2:, 0]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_of_several_nonfinite_values_reaches_its_own_column(backend):
    q, k, v = small()
    v[0, 0, 1, 0], v[0, 0, 3, 1] = np.nan, np.nan
    output, _ = run(backend, q, k, v, is_causal=True)
    expected = np.zeros((5, 2), bool)
    expected[1:, 0] = expected[3:, 1] = True
    np.testing.assert_array_equal(np.isnan(output[0, 0]), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_plus_infinity_spoils_its_own_row_alone(backend):
    q, k, v = small()
    bias = np.zeros((5, 5))
    bias[2, 1] = inf
    output, _ = run(backend, q, k, v, attn_bias=bias, is_causal=True)
    expected = np.zeros(output.shape, bool)
    expected[:, :, 2] = True
    np.testing.assert_array_equal(np.isnan(output), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finite_bias_beyond_the_dtype_stays_finite(backend):
    q, k, v = np.ones((1, 1), "f4"), np.ones((2, 1), "f4"), np.array([[1.0], [3.0]], "f4")
    output, _ = run(backend, q, k, v, attn_bias=[[0, -1e300]])
    assert output == [[1.0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_farthest_offsets_and_windows_are_no_limit(backend):
    q, k, v = small()
    whole, _ = run(backend, q, k, v)
    far = 2**31 - 1
    same = [{"is_causal": True, "q_offset": far}, {"window_size": (0, None), "q_offset": -far}]
    for options in same:
        output, _ = run(backend, q, k, v, **options)
        np.testing.assert_array_equal(output, whole)
    nothing, _ = run(backend, q, k, v, is_causal=True, q_offset=-far)
    assert (nothing == 0).all()
    huge, _ = run(backend, q, k, v, window_size=(2**64, 0))
    causal, _ = run(backend, q, k, v, is_causal=True)
    np.testing.assert_array_equal(huge, causal)


@pytest.mark.parametrize("backend", EQUATIONS)
def test_what_a_tap_returns_is_what_goes_on(backend):
    q, k, v = small()
    options = {"is_causal": True, "softcap": 2.0, "alibi_slopes": np.ones(4), "backend": backend}
    names = []
    attention(q, k, v, **options, return_lse=True, tap=lambda name, x: names.append(name) or x)
    for name in names:
        spoil = spoiling(name)
        output, lse = attention(q, k, v, **options, return_lse=True, tap=spoil)
        assert np.isnan(output).any() or np.isnan(lse).any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [{"Lk": 0}, {"Lq": 0}, {"B": 0}, {"Lq": 0, "Lk": 0}])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "q_offset": 0, "window_size": (1, 1)}])
def test_empty_axes(sizes, options, backend):
    q, k, v = small(**sizes)
    output, lse = run(backend, q, k, v, **options)
    assert output.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    assert (output == 0).all()
    assert (lse == -inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_zero_or_its_sink(backend):
    q, k, v = small()
    hidden = {"attn_mask": np.zeros((5, 5), bool)}
    output, lse = run(backend, q, k, v, **hidden)
    assert (output == 0).all()
    assert (lse == -inf).all()
    output, lse = run(backend, q, k, v, sinks=[1, 2, 3, 4], **hidden)
    assert (output == 0).all()
    np.testing.assert_allclose(lse[0, :, 0], [1, 2, 3, 4])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_number_is_too_large_for_the_softmax(backend):
    q, k, v = [[1e4]], [[1e4], [1e4], [-1e4]], [[1.0], [3.0], [99.0]]
    output, lse = run(backend, q, k, v)
    np.testing.assert_allclose(output, [[2.0]])
    np.testing.assert_allclose(lse, 1e8 + np.log(2))


def test_query_heads_share_key_value_heads_in_groups_not_interleaved():
    q, k, v = small(H=8, Hkv=2)
    output = attention(q, k, v)
    for h in range(8):
        alone = attention(q[:, h : h + 1], k[:, h // 4 : h // 4 + 1], v[:, h // 4 : h // 4 + 1])
        np.testing.assert_allclose(output[:, h : h + 1], alone, rtol=1e-6)


def test_scale_defaults_to_the_query_width():
    q, k, v = small(D=4, Dv=9)
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, scale=0.5))


@given(problem=random_problems(np.float64))
def test_weights_sum_to_one_where_a_key_is_seen(problem):
    q, k, v, options = problem
    heard = {}
    options["sinks"] = None
    dense.forward(Problem.of(q, k, v, **options), lambda n, x: heard.setdefault(n, x))
    seen = visible(q, k, options).any(axis=-1)
    np.testing.assert_allclose(heard["weights"].sum(axis=-1), seen, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=random_problems(np.float64), seed=st.integers(0, 1000))
def test_the_order_of_keys_does_not_matter(problem, seed, backend):
    q, k, v, options = problem
    bias = 0.0 if options["attn_bias"] is None else options["attn_bias"]
    order = np.random.default_rng(seed).permutation(k.shape[2])
    mask = visible(q, k, options)
    rest = {name: options[name] for name in ("scale", "softcap", "sinks")}
    bias4 = np.broadcast_to(bias, mask.shape)
    whole = {"attn_mask": mask, "attn_bias": bias4, **rest}
    expected, lse = attention(q, k, v, **whole, return_lse=True)
    moved = {"attn_mask": mask[..., order], "attn_bias": bias4[..., order]}
    output, _ = run(backend, q, k[:, :, order], v[:, :, order], **moved, **rest)
    allowed, _ = rounding(q, k, v, whole, lse)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2 * allowed)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=random_problems(np.float64), constant=st.floats(-30, 30))
def test_adding_a_constant_to_a_row_of_scores_changes_nothing(problem, constant, backend):
    q, k, v, options = problem
    options |= {"sinks": None, "score_mod": None, "attn_bias": np.zeros((1, 1, q.shape[2], 1))}
    expected, lse = attention(q, k, v, **options, return_lse=True)
    options["attn_bias"] = options["attn_bias"] + constant
    output, moved = run(backend, q, k, v, **options)
    allowed, of_lse = rounding(q, k, v, options, moved)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2 * allowed)
    np.testing.assert_allclose(moved, lse + constant, rtol=0, atol=2 * of_lse)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=random_problems(np.float64), data=st.data())
def test_keys_may_be_split_anywhere_and_merged_by_log_sum_exp(problem, data, backend):
    q, k, v, options = problem
    at = data.draw(st.integers(0, k.shape[2]))
    mask = visible(q, k, options)
    common = {"scale": options["scale"], "softcap": options["softcap"]}
    whole = run("dense", q, k, v, attn_mask=mask, **common)
    allowed = rounding(q, k, v, {"attn_mask": mask, **common}, whole[1], merges=1)
    parts = [
        run(backend, q, k[:, :, s], v[:, :, s], attn_mask=mask[..., s], **common)
        for s in (slice(0, at), slice(at, None))
    ]
    for merged, expected, error in zip(naive_merge(parts), whole, allowed, strict=True):
        np.testing.assert_allclose(
            np.reshape(merged, expected.shape), expected, rtol=0, atol=2 * error
        )


def test_a_tile_visits_only_blocks_that_some_query_sees():
    q, k, v = small(Lq=6, Lk=6)
    heard = []
    problem = Problem.of(q, k, v, window_size=(1, 0))
    tiled.forward(problem, lambda name, value: heard.append(name) or value, B_r=2, B_c=2)
    loaded = [name for name in heard if name.startswith("K")]
    assert loaded == ["K[i=0,j=0]", "K[i=1,j=0]", "K[i=1,j=1]", "K[i=2,j=1]", "K[i=2,j=2]"]


@pytest.mark.parametrize("sizes", [{"B_r": 0}, {"B_c": 0}, {"B_c": -1}])
def test_a_block_holds_at_least_one_row(sizes):
    with pytest.raises(ValueError, match="a block holds at least one row"):
        tiled.forward(Problem.of(*small()), **sizes)


def test_the_oracle_agrees_with_a_number_computed_by_hand():
    # scores 0 and ln 3: weights 1/4 and 3/4, sum of exponentials 4
    q, k, v = (np.array(x)[None, None] for x in ([[1.0]], [[0.0], [np.log(3)]], [[4.0], [8.0]]))
    output, lse = naive_attention(q, k, v)
    np.testing.assert_allclose(output, [[[[7.0]]]])
    np.testing.assert_allclose(lse, np.log(4))
