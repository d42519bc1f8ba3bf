"""Caches of 8 bits quantise what they are given: one scale per token and head, rounded by hand."""

import ml_dtypes
import naive
import numpy as np
import pytest

from minimha.layers.cache import KVCache
from minimha.layers.pages import PagedKVCache, PagePool

RNG = np.random.default_rng(0)
B, H, HKV, L, D, DV = 2, 4, 2, 12, 8, 6
Q, K, V = (
    RNG.normal(size=(B, heads, L, width)).astype(np.float32)
    for heads, width in ((H, D), (HKV, D), (HKV, DV))
)
K[0, 0, 3], V[1, 1, 5] = 0, 0  # rows of zeros
K[1, 0, 2, 4] = 300.0
DTYPES = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
FLOAT8 = sorted({naive.float8(bits) for bits in range(256) if bits & 0x7F != 0x7F})


def nearest(x, dtype):
    """The number of a dtype nearest to ``x``; of two, the one with an even last digit."""
    if dtype == "int8":
        return round(x)
    two = sorted(FLOAT8, key=lambda number: abs(number - x))[:2]
    if abs(two[0] - x) < abs(two[1] - x):
        return two[0]
    return next(y for y in two if ml_dtypes.float8_e4m3fn(y).view(np.uint8) % 2 == 0)


def quantised(x, dtype):
    """The rows of ``x`` as a cache of ``dtype`` gives them back."""
    rows = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        largest = np.float32(127 if dtype == "int8" else 448)
        scale = abs(x[index]).max() / largest or np.float32(1)
        rows[index] = [nearest(float(number / scale), dtype) * float(scale) for number in x[index]]
    return rows


def exact(dtype, window=None):
    k, v = quantised(K, dtype), quantised(V, dtype)
    sides = None if window is None else (window - 1, 0)
    arrays = (x.tolist() for x in (Q.astype(float), k, v))
    return np.array(naive.attention(*arrays, is_causal=True, window_size=sides)[0])


def caches(dtype):
    yield KVCache(B, HKV, L, D, DV, dtype=dtype)
    yield PagedKVCache(PagePool(8, HKV, 4, D, DV, dtype=dtype), B)


def in_chunks(cache, sizes):
    outputs, start = [], 0
    for size in sizes:
        part = np.s_[:, :, start : start + size]
        cache.append(K[part], V[part])
        outputs.append(cache.attend(Q[part]))
        start += size
    return np.concatenate(outputs, axis=2)


@DTYPES
@pytest.mark.parametrize("sizes", [[12], [5, 7], [0, 6, 0, 6], [1] * 12], ids=str)
def test_what_is_attended_to_was_rounded_once(sizes, dtype):
    expected = exact(dtype)
    for cache in caches(dtype):
        np.testing.assert_allclose(in_chunks(cache, sizes), expected, rtol=0, atol=1e-4)


@DTYPES
def test_a_window_slides_with_its_scales(dtype):
    cache = KVCache(B, HKV, 4, D, DV, dtype=dtype, window=4)
    output = in_chunks(cache, [1] * L)
    np.testing.assert_allclose(output, exact(dtype, window=4), rtol=0, atol=1e-4)


@DTYPES
def test_a_shared_page_is_copied_with_its_scales(dtype):
    pool = PagePool(8, HKV, 4, D, DV, dtype=dtype)
    cache, part = PagedKVCache(pool, B), np.s_[:, :, :6]
    cache.append(K[part], V[part])
    other = cache.fork()
    other.append(10 * K[:, :, 6:7], 10 * V[:, :, 6:7])
    rest = np.s_[:, :, 6:]
    cache.append(K[rest], V[rest])
    expected = exact(dtype)[rest]
    np.testing.assert_allclose(cache.attend(Q[rest]), expected, rtol=0, atol=1e-4)


@DTYPES
def test_the_dtype_of_queries_is_that_of_the_output(dtype):
    cache = KVCache(B, HKV, L, D, DV, dtype=dtype)
    assert cache.dtype.name == dtype
    assert cache.dtype.itemsize == 1
    cache.append(K, V)
    assert in_chunks(KVCache(B, HKV, L, D, DV, dtype=cache.dtype), [12]).dtype == np.float32
    assert cache.attend(Q.astype(np.float64)).dtype == np.float64


@DTYPES
def test_padding_may_be_anything_and_bad_numbers_change_nothing(dtype):
    for cache in caches(dtype):
        k = K.copy()
        k[1, :, 5:] = np.nan
        with pytest.raises(ValueError, match="k has numbers that are NaN, infinite or above"):
            cache.append(k, V)
        assert cache.lengths.tolist() == [0, 0]
        cache.append(k, V, lengths=[12, 5])
        expected = exact(dtype)
        output = cache.attend(Q)
        np.testing.assert_allclose(output[0], expected[0], rtol=0, atol=1e-4)
        np.testing.assert_allclose(output[1, :, :5], expected[1, :, :5], rtol=0, atol=1e-4)


def test_another_dtype_of_8_bits_is_refused():
    for dtype in ("uint8", ml_dtypes.float8_e5m2):
        with pytest.raises(TypeError, match=r"expected one of .* int8, float8_e4m3fn"):
            KVCache(B, HKV, L, D, dtype=dtype)
