"""8-bit keys and values: what a scale means, in every shape, and what is refused."""

import math

import ml_dtypes
import naive
import numpy as np
import pytest
from problems import naive_attention

from minimha import BackendUnavailable, attention, merge
from minimha.equations import parts
from minimha.equations.eight_bits import quantized
from minimha.explain import Trace

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = pytest.mark.parametrize("dtype", [np.dtype(np.int8), FLOAT8], ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled"])
B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 3, 7, 5, 4
EVERY_FLOAT8 = np.arange(256, dtype=np.uint8).view(FLOAT8)


def problem(dtype, shape=None, seed=0):
    """Random q, and k and v of ``dtype`` with scales: a number, per head, or per token and head."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, H, LQ, D)).astype(np.float32)
    k, v = (rng.integers(-100, 100, (B, HKV, LK, width)).astype(dtype) for width in (D, DV))
    scales = {name: rng.uniform(0.005, 0.02, shape or ()) for name in ("k_scale", "v_scale")}
    return (q, k, v), {name: x if shape else float(x) for name, x in scales.items()}


def exact(q, k, v, **options):
    """Output and log-sum-exp of the oracle, from the bits of k and v."""
    if k.dtype == FLOAT8:
        k, v = (np.vectorize(naive.float8, [float])(x.view(np.uint8)) for x in (k, v))
    return naive_attention(q, k, v, **options)


def test_all_float8_numbers_are_what_the_oracle_says():
    expected = np.array([naive.float8(bits) for bits in range(256)])
    np.testing.assert_array_equal(EVERY_FLOAT8.astype(np.float64), expected)
    assert np.isnan(expected).sum() == 2
    assert np.nanmax(expected) == 448


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [None, (HKV,), (B, HKV, LK)], ids=["tensor", "head", "token"])
def test_a_key_is_its_numbers_times_its_scale(shape, dtype, backend):
    arrays, scales = problem(dtype, shape)
    result = attention(*arrays, **scales, return_lse=True, backend=backend)
    options = {"kv_lengths": [LK, 4], "is_causal": True, "q_offset": 2}
    with_options = attention(*arrays, **scales, **options, return_lse=True, backend=backend)
    for got, given in ((result, {}), (with_options, options)):
        for x, wanted in zip(got, exact(*arrays, **scales, **given), strict=True):
            np.testing.assert_allclose(x, wanted, rtol=0, atol=2e-6)


@DTYPES
def test_scales_of_arrays_with_fewer_dimensions_have_the_shape_of_k_without_D(dtype):
    (q, k, v), scales = problem(dtype, (B, HKV, LK))
    whole = attention(q, k, v, **scales)
    first = {name: x[0] for name, x in scales.items()}
    np.testing.assert_array_equal(attention(q[0], k[0], v[0], **first), whole[0])
    one = {name: x[0, 0] for name, x in scales.items()}
    np.testing.assert_array_equal(attention(q[0, 0], k[0, 0], v[0, 0], **one), whole[0, 0])


@DTYPES
def test_queries_decide_the_dtype_of_the_computation_and_of_the_output(dtype):
    (q, k, v), scales = problem(dtype)
    for given in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        trace = Trace()
        output = attention(q.astype(given), k, v, **scales, tap=trace)
        assert output.dtype == given
        compute = np.float64 if given == np.float64 else np.float32
        assert trace["k"].dtype == trace["v"].dtype == compute
        np.testing.assert_array_equal(trace["k"], k.astype(compute) * compute(scales["k_scale"]))
    assert attention([[1] * D], k[0, 0], v[0, 0], **scales).dtype == np.float64


def test_int8_numbers_without_scales_are_integers_if_the_queries_are():
    (q, k, v), _ = problem(np.int8)
    q = (q * 3).astype(np.int8)
    plain = [x.astype(float) for x in (q, k, v)]
    np.testing.assert_array_equal(attention(q, k, v), attention(*plain))
    output = attention(q, k, v.astype(np.float32))
    np.testing.assert_array_equal(output, attention(*plain))
    with pytest.raises(TypeError, match="k has dtype int8 but k_scale is None"):
        attention(q.astype(np.float32), k, v)


@BACKENDS
def test_a_nan_of_a_float8_reaches_whoever_sees_it(backend):
    (q, k, v), scales = problem(FLOAT8)
    v[0, 0, 6, 2] = np.nan
    output = attention(q, k, v, **scales, backend=backend)
    assert np.isnan(output[0, :2, :, 2]).all()
    assert np.isnan(output).sum() == 2 * LQ
    hidden = attention(q, k, v, **scales, kv_lengths=6, backend=backend)
    assert np.isfinite(hidden).all()


SHAPES = r"expected one number, \(2,\) for one per head, or \(2, 2, 7\) for one per token and head"
BOUNDS = "expected numbers above 0 and at most 2\\^64"
REFUSED = {
    "a scale is missing": (FLOAT8, {"k_scale": 1.0}, TypeError, "v has dtype float8_e4m3fn but v_"),
    "both are": (FLOAT8, {}, TypeError, "k has dtype float8_e4m3fn but k_scale is None: expected"),
    "shape": (np.int8, {"k_scale": 1.0, "v_scale": np.ones(3)}, ValueError, f"v_scale .*{SHAPES}"),
    "query heads": (np.int8, {"k_scale": np.ones(4), "v_scale": 1.0}, ValueError, SHAPES),
    "zero": (np.int8, {"k_scale": 0.0, "v_scale": 1.0}, ValueError, f"k_scale .* 0.0: {BOUNDS}"),
    "too small": (np.int8, {"k_scale": 1e-60, "v_scale": 1.0}, ValueError, BOUNDS),
    "negative": (np.int8, {"k_scale": 1.0, "v_scale": [1, -2]}, ValueError, f"-2.0: {BOUNDS}"),
    "NaN": (np.int8, {"k_scale": math.nan, "v_scale": 1.0}, ValueError, f"nan: {BOUNDS}"),
    "infinite": (np.int8, {"k_scale": math.inf, "v_scale": 1.0}, ValueError, f"inf: {BOUNDS}"),
    "text": (np.int8, {"k_scale": "1", "v_scale": 1.0}, TypeError, "k_scale has dtype <U1"),
    "floats": (np.float32, {"v_scale": 1.0}, TypeError, "v_scale is given but v has dtype float32"),
    "uint8": (np.uint8, {"k_scale": 1.0, "v_scale": 1.0}, TypeError, "k has dtype uint8: scales"),
}


@pytest.mark.parametrize(("dtype", "scales", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(dtype, scales, kind, message):
    (q, k, v), _ = problem(np.int8)
    k, v = (abs(x).astype(dtype) if dtype == np.uint8 else x.astype(dtype) for x in (k, v))
    with pytest.raises(kind, match=message):
        attention(q, k, v, **scales)


def test_two_dtypes_of_8_bits_and_queries_of_8_bits_are_refused():
    (q, k, v), scales = problem(np.int8)
    with pytest.raises(TypeError, match="k is int8 and v is float8_e4m3fn: if one has 8 bits"):
        attention(q, k, v.astype(FLOAT8), **scales)
    with pytest.raises(TypeError, match="q has dtype int8: queries have no scale"):
        attention(q.astype(np.int8), k, v, **scales)


def row(x):
    """Both batch entries one after the other."""
    return np.concatenate(list(x), axis=1)[None]


def pages(x):
    """The 7 keys of each entry in pages of 4, the second ones first."""
    full = np.concatenate([x, x[:, :, :1]], axis=2)
    return np.concatenate([full[:, :, at : at + 4] for at in (4, 0)])


@BACKENDS
@DTYPES
def test_packed_and_paged_keys_have_their_scales_beside_them(dtype, backend):
    (q, k, v), scales = problem(dtype, (B, HKV, LK))
    whole = attention(q, k, v, **scales, backend=backend)
    starts = {"cu_seqlens_q": [0, LQ, 2 * LQ], "cu_seqlens_k": [0, LK, 2 * LK]}
    packed_scales = {name: row(x) for name, x in scales.items()}
    packed = attention(row(q), row(k), row(v), **starts, **packed_scales, backend=backend)
    np.testing.assert_allclose(packed, row(whole), atol=1e-6)
    table = {"block_table": [[2, 0], [3, 1]], "kv_lengths": LK}
    paged_scales = {name: pages(x) for name, x in scales.items()}
    paged = attention(q, pages(k), pages(v), **table, **paged_scales, backend=backend)
    np.testing.assert_allclose(paged, whole, atol=1e-6)


@DTYPES
def test_parts_of_the_keys_are_merged(dtype):
    (q, k, v), scales = problem(dtype, (B, HKV, LK))
    some = [
        attention(
            q, k[:, :, part], v[:, :, part], return_lse=True,
            **{name: x[:, :, part] for name, x in scales.items()},
        )
        for part in (slice(0, 3), slice(3, None))
    ]  # fmt: skip
    np.testing.assert_allclose(merge(some)[0], attention(q, k, v, **scales), atol=1e-6)


@DTYPES
@pytest.mark.parametrize("shape", [None, (HKV,), (B, HKV, LK)], ids=["tensor", "head", "token"])
@pytest.mark.parametrize("rank", [4, 3])
def test_keys_in_files_are_widened_block_by_block(rank, shape, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 2 * B * HKV * (D + DV) * 4)  # two keys
    arrays, scales = problem(dtype, shape)
    if rank == 3:
        arrays = [x[0] for x in arrays]
        scales = {n: x[0] if shape == (B, HKV, LK) else x for n, x in scales.items()}
    maps = []
    for name, x in zip("kv", arrays[1:], strict=True):
        maps.append(np.memmap(tmp_path / name, dtype, "w+", shape=x.shape))
        maps[-1][...] = x
    options = {"is_causal": True, "q_offset": 4}
    output = attention(arrays[0], *maps, **scales, **options)
    np.testing.assert_allclose(output, attention(*arrays, **scales, **options), atol=1e-6)
    with pytest.raises(TypeError, match="k_scale is None"):
        attention(arrays[0], *maps)


@DTYPES
def test_arrays_of_torch(dtype):
    torch = pytest.importorskip("torch")
    (q, k, v), scales = problem(dtype, (HKV,))
    kind = torch.int8 if dtype.kind == "i" else torch.float8_e4m3fn
    of_torch = [torch.from_numpy(x.view(np.uint8)).view(kind) for x in (k, v)]
    output = attention(torch.from_numpy(q), *of_torch, **{
        name: torch.from_numpy(x) for name, x in scales.items()
    })  # fmt: skip
    np.testing.assert_array_equal(output.numpy(), attention(q, k, v, **scales))
    with pytest.raises(TypeError, match="k_scale is None"):
        attention(torch.from_numpy(q), *of_torch)


def test_the_backend_cuda_reads_none():
    pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
    from minimha.equations.problem import Problem
    from minimha.kernels.cuda import backend as cuda

    arrays, scales = problem(np.int8)
    assert "no 8-bit keys and values" in cuda.unsupported(Problem.of(*arrays, **scales))
    with pytest.raises(BackendUnavailable):
        attention(*arrays, **scales, backend="cuda")


def test_quotients_are_rounded_to_nearest_and_ties_to_even():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -2.5], [0, 0, 0, 0, 0], [-254, 1, 3, 5, 2]], np.float32)
    numbers, scales = quantized("k", x, np.dtype(np.int8))
    assert scales.tolist() == [1, 1, 2]
    assert numbers.tolist() == [[127, 0, 2, 2, -2], [0] * 5, [-127, 0, 2, 2, 1]]
    y = np.array([[448.0, 17, 19, 1.0625, -1.1875, 2.0**-10, 1.01 * 2.0**-10]], np.float32)
    numbers, scales = quantized("k", y, FLOAT8)
    assert scales.tolist() == [1]
    assert numbers.astype(float).tolist() == [[448, 16, 20, 1, -1.25, 0, 2.0**-9]]


@DTYPES
def test_the_error_of_a_number_is_at_most_half_a_step(dtype):
    x = np.random.default_rng(0).normal(size=(50, 33)) * np.logspace(-30, 15, 50)[:, None]
    numbers, scales = quantized("v", x, dtype)
    assert scales.dtype == np.float32
    largest, half = (127, 0.5) if dtype.kind == "i" else (448, None)
    np.testing.assert_allclose(scales, abs(x).max(-1) / largest, rtol=1e-6)
    widened = numbers.astype(np.float64)
    step = half if half else np.maximum(abs(widened) / 16, 2.0**-10)
    assert (abs(widened - x / scales[:, None]) <= step + 1e-4).all()


def test_the_smallest_rows_and_what_cannot_be_quantized():
    numbers, scales = quantized("k", np.full((1, 2), 1e-44, np.float32), np.dtype(np.int8))
    assert scales[0] == np.finfo(np.float32).tiny
    assert not numbers.any()
    for bad in (np.nan, -np.inf, 1e20):
        with pytest.raises(ValueError, match="v has numbers that are NaN, infinite or above"):
            quantized("v", np.array([1.0, bad]), FLOAT8)
