"""Each vector primitive against its twin in plain numba."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import naive
import numba
import numpy as np
import pytest
from kernels.cpu import plain_simd

from minimha.kernels.cpu.simd import bytes as bytes_
from minimha.kernels.cpu.simd import halves, vector
from minimha.kernels.cpu.simd.dot import ROWS_AHEAD, dot_products, weighted_rows
from minimha.kernels.cpu.simd.memory import fetch_add, flat, matrix
from minimha.kernels.cpu.simd.product import ROWS, tile_product, tile_product_add
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max, round_lanes, soft_cap
from minimha.kernels.cpu.simd.transpose import transpose

DTYPES = [np.float32, np.float64]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def numbers(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype).ravel()


@numba.njit
def product(adds, A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
    if adds:
        tile_product_add(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth)
    else:
        tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (8, 5), (11, 64), (16, 0), (0, 4), (23, 7)])
def test_tile_products(rows, depth, vectors, adds, dtype):
    lanes = vectors * vector.panel_width(np.dtype(dtype).itemsize) // vector.VECTORS
    a_row, b_k, c_row = depth + 3, lanes + 2, lanes + 1
    A, B = numbers(rows + 2, a_row, dtype=dtype), numbers(depth + 2, b_k, dtype=dtype)
    C, factor = numbers(rows + ROWS, c_row, dtype=dtype), numbers(lanes, dtype=dtype)
    expected = C.copy()
    at = (A, 2, a_row, 1, B, 1, b_k)
    product(adds, *at, C, 3, c_row, factor, rows, vectors, depth)
    plain_simd.tile_product(*at, expected, 3, c_row, factor, rows, lanes, depth, adds)
    end = 3 + rows * c_row  # whole register tiles are written, and what follows is not compared
    atol = max(50, 2 * depth) * np.finfo(dtype).eps  # sums in another order
    np.testing.assert_allclose(C[:end], expected[:end], atol=atol)


def test_a_tile_product_may_run_down_the_columns_of_A():
    rows, depth, lanes = 9, 4, vector.panel_width(4)
    A, B, factor = numbers(depth, rows), numbers(depth, lanes), np.ones(lanes, np.float32)
    C = np.zeros((rows + ROWS) * lanes, np.float32)
    product(False, A, 0, 1, rows, B, 0, lanes, C, 0, lanes, factor, rows, vector.VECTORS, depth)
    expected = A.reshape(depth, rows).T @ B.reshape(depth, lanes)
    np.testing.assert_allclose(C.reshape(-1, lanes)[:rows], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_the_largest_of_a_lane(n, vectors, dtype):
    lanes = vectors * vector.panel_width(np.dtype(dtype).itemsize) // vector.VECTORS
    S = numbers(n + 1, lanes, dtype=dtype)
    S[::5], S[1::7] = np.nan, -np.inf
    largest, expected = np.zeros(lanes, dtype), np.zeros(lanes, dtype)
    lanes_max(S, 3, n, vectors, largest)
    plain_simd.lanes_max(S, 3, n, lanes, expected)
    np.testing.assert_array_equal(largest, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("scale", [1, 0.125])
def test_the_exponential_of_a_lane(scale, vectors, dtype):
    lanes = vectors * vector.panel_width(np.dtype(dtype).itemsize) // vector.VECTORS
    n, limits = 400, np.finfo(dtype)
    S = np.linspace(np.log(limits.tiny) * 0.999, 0, n * lanes, dtype=dtype)
    S[: 4 * lanes] = np.tile([0, -np.inf, np.nan, -1e-30], lanes)
    # 1 / ln(2) is rounded, and where no multiply-add is fused so is x / ln(2): errors grow with x.
    bounds = (2.5 + 0.65 * abs(np.nan_to_num(S, neginf=0))) * limits.eps
    S /= dtype(scale)
    shift, expected = np.zeros(lanes, dtype), S.copy()
    sums, expected_sums = np.zeros(lanes, dtype), np.zeros(lanes, dtype)
    with np.errstate(invalid="ignore"):
        plain_simd.lanes_exp(expected, 0, n, lanes, scale, shift, expected_sums)
    lanes_exp(S, 0, n, vectors, scale, shift, sums)
    np.testing.assert_array_equal(np.isnan(S), np.isnan(expected))
    assert np.all((abs(S - expected) <= bounds * expected) | np.isnan(S))
    np.testing.assert_allclose(sums, expected_sums, rtol=100 * limits.eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_small_for_a_normal_number_becomes_0(dtype):
    lanes = vector.panel_width(np.dtype(dtype).itemsize)
    S = np.full(lanes, 1.01 * np.log(np.finfo(dtype).tiny), dtype)
    sums = np.zeros(lanes, dtype)
    lanes_exp(S, 0, 1, vector.VECTORS, 1, np.zeros(lanes, dtype), sums)
    assert (S == 0).all()
    assert (sums == 0).all()


@pytest.mark.parametrize("rows", [0, 1, 7, 16, 37])
def test_lanes_are_scaled_and_rounded_to_bfloat16(rows):
    lanes = vector.panel_width(4)
    X, factor = numbers(rows + 1, lanes), numbers(lanes)
    X[3:6], factor[:3] = (2.0**-130, -0.0, 3.3895e38), 1
    to = np.zeros(rows * lanes, np.uint16)

    @numba.njit
    def rounded(X, factor, to):
        return round_lanes(X, 3, rows, lanes, factor, to)

    exact = X[3 : 3 + rows * lanes].reshape(rows, lanes) * factor
    assert rounded(X, factor, to)
    np.testing.assert_array_equal(to, exact.astype(ml_dtypes.bfloat16).view(np.uint16).ravel())
    for poison in (np.inf, -np.inf, np.nan):
        for place in {3, 3 + rows * lanes - 1} if rows else ():
            poisoned = X.copy()
            poisoned[place] = poison
            assert not rounded(poisoned, factor, to)


def as_stored(X, stored):
    """X as K and V may be stored, and the same numbers as floats."""
    numbers = (X * 10 if stored == np.int8 else X).astype(stored)
    bits = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}.get(numbers.dtype.name, stored)
    floats = numbers.astype(X.dtype)
    return numbers.view(bits), floats / halves.UNIT_OF_FLOAT8 if bits == np.uint8 else floats


STORED = pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float32, np.float32), (np.float64, np.float64), (np.float32, ml_dtypes.bfloat16),
        (np.float32, np.int8), (np.float32, ml_dtypes.float8_e4m3fn),
    ],
    ids=["float32", "float64", "bfloat16", "int8", "float8"],
)  # fmt: skip


def scattered(rows, stride):
    """Where rows in no order begin, after two that are not meant, before those to prefetch."""
    return 1 + stride * np.r_[0, 0, RNG.permutation(rows), np.zeros(ROWS_AHEAD, int)]


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7])
@STORED
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (5, 64), (16, 13), (37, 80), (32, 5), (3, 0)])
def test_dot_products(rows, depth, queries, dtype, stored):
    A, B = (numbers(n + 1, depth + 2, dtype=dtype) for n in (rows, queries))
    A, floats = as_stored(A, stored)
    C = np.zeros((queries + 1, rows + 2), dtype)
    expected = C.copy()
    to = (2, rows + 2, rows, queries, depth, True)
    starts = scattered(rows, depth + 2)
    dot_products(A, starts, 2, B, 1, depth + 2, C.ravel(), *to)
    plain_simd.dot_products(floats, starts, 2, B, 1, depth + 2, expected.ravel(), *to)
    largest = max(1, abs(floats).max() / 5)
    np.testing.assert_allclose(C, expected, atol=200 * largest * np.finfo(dtype).eps)


@STORED
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("columns", [1, 5, 16, 80, 130])
@pytest.mark.parametrize("depth", [3, 6, 8])
def test_weighted_rows(depth, columns, rows, dtype, stored):
    P, V = numbers(rows + 1, depth + 1, dtype=dtype), numbers(depth + 1, columns + 3, dtype=dtype)
    O = numbers(rows + 1, columns + 2, dtype=dtype)
    expected = O.copy()
    V, floats = as_stored(V, stored)
    to = (1, columns + 2, rows, columns, depth, True)
    starts = scattered(depth, columns + 3)
    weighted_rows(P, 1, depth + 1, V, starts, 2, O, *to)
    plain_simd.weighted_rows(P, 1, depth + 1, floats, starts, 2, expected, *to)
    largest = max(1, abs(floats).max() / 5)
    np.testing.assert_allclose(O, expected, atol=50 * largest * np.finfo(dtype).eps)


@numba.njit
def are_multiplied(X, columns):
    return bytes_.are_multiplied(X, columns)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("rows", "depth"), [(1, 64), (5, 128), (16, 192), (37, 64), (256, 256)])
@pytest.mark.parametrize("stored", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "float8"])
def test_products_of_bytes_and_bfloat16(stored, rows, depth, queries):
    K, floats = as_stored(numbers(rows + 1, depth + 2), stored)
    if not are_multiplied(K, depth):
        pytest.skip("this CPU has no AVX-512 with BF16 and VBMI")
    if stored == np.int8:
        K[::7], floats[::7] = -128, -128
    Q, P = (numbers(queries, n).astype(ml_dtypes.bfloat16) for n in (depth, rows))
    Q, P = Q.astype(np.float32), P.astype(np.float32)
    starts = np.append(scattered(rows, depth + 2), np.zeros(15, np.int64))  # read by prefetches
    halves_ = np.zeros(queries * max(depth * bytes_.COPIES, bytes_.MOST_KEYS), np.uint16)
    S, expected = np.zeros((2, queries, rows + 15), np.float32)
    to = (0, rows + 15, rows, queries, depth, True)
    assert bytes_.round_queries(Q, queries, depth, halves_)
    bytes_.byte_products(K, starts, 2, halves_, S.ravel(), *to)
    plain_simd.dot_products(floats, starts, 2, Q, 0, depth, expected.ravel(), *to)
    atol = 1e-6 * depth * np.abs(floats).max()
    np.testing.assert_allclose(S[:, :rows], expected[:, :rows], rtol=1e-6, atol=atol)

    O = numbers(queries, depth + 1)
    wanted = O.copy()
    bytes_.round_weights(P, 0, rows, queries, rows, halves_)
    bytes_.weighted_bytes(halves_, K, starts, 2, O, depth + 1, rows, queries, depth, True)
    to = (0, depth + 1, queries, depth, rows, True)
    plain_simd.weighted_rows(P, 0, rows, floats, starts, 2, wanted, *to)
    atol = 1e-6 * rows * np.abs(floats).max()
    np.testing.assert_allclose(O, wanted, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("stored", [np.int8, np.uint8])
def test_every_byte_becomes_bfloat16_exactly(stored):
    V_, O = np.arange(256).astype(stored), np.zeros(256, np.float32)
    if not are_multiplied(V_, 256):
        pytest.skip("this CPU has no AVX-512 with BF16 and VBMI")
    one = np.array([1, 0], ml_dtypes.bfloat16).view(np.uint16)
    bytes_.weighted_bytes(one, V_, np.zeros(1 + ROWS_AHEAD, np.int64), 0, O, 256, 1, 1, 256, False)
    wanted = V_ if stored == np.int8 else [naive.float8(x) / 256 for x in range(256)]
    np.testing.assert_array_equal(O, np.array(wanted, np.float32))


def test_the_product_with_an_int8_key_of_zeros_is_exactly_zero():
    K = np.zeros((16, 64), np.int8)
    if not are_multiplied(K, 64):
        pytest.skip("this CPU has no AVX-512 with BF16 and VBMI")
    Q, S = numbers(1, 64).astype(ml_dtypes.bfloat16).astype(np.float32), np.ones(16, np.float32)
    halves_ = np.zeros(64 * bytes_.COPIES, np.uint16)
    bytes_.round_queries(Q, 1, 64, halves_)
    starts = np.arange(16 + ROWS_AHEAD) * 64 % 1024
    bytes_.byte_products(K.ravel(), starts, 0, halves_, S, 0, 16, 16, 1, 64, False)
    np.testing.assert_array_equal(S, 0)


def test_other_columns_and_dtypes_are_not_multiplied():
    for dtype, columns in ((np.int8, 80), (np.uint8, 63), (np.float32, 64), (np.uint16, 64)):
        assert not are_multiplied(np.zeros(64, dtype), columns)


@numba.njit
def one_float8(bits):
    return halves.of_float8(bits)


@pytest.mark.parametrize("columns", [256, 255, 3])
def test_every_float8_is_widened_exactly(columns):
    bits = np.arange(256, dtype=np.uint8)
    for first in range(0, 256 - columns + 1, columns):
        V, O = bits[first : first + columns], np.zeros(columns, np.float32)
        starts = np.zeros(1 + ROWS_AHEAD, np.int64)
        weighted_rows(
            np.ones(1, np.float32), 0, 1, V, starts, 0, O, 0, columns, 1, columns, 1, False
        )
        wanted = [naive.float8(int(x)) for x in V]
        np.testing.assert_array_equal(256 * O, np.array(wanted, np.float32))
    wanted = np.array([naive.float8(int(x)) for x in bits], np.float32)
    np.testing.assert_array_equal([256 * one_float8(x) for x in bits], wanted)


def test_memory_from_an_element_on():
    X = np.arange(6.0)
    pair = np.zeros(2)

    @numba.njit
    def copy(X, pair):
        line = flat(X, 2)
        pair[0], pair[1] = line[0], line[3]

    copy(X, pair)
    assert pair.tolist() == [2, 5]


def test_a_matrix_in_a_line():
    X = np.arange(20.0)

    @numba.njit
    def corner(X):
        return matrix(X, 2, 3, 4)[2, 3]

    assert corner(X) == 2 + 2 * 4 + 3


def test_fetch_add_returns_each_number_once():
    @numba.njit
    def count(counters, times):
        while True:
            number = fetch_add(counters, 1)
            if number >= times.size:
                return
            times[number] += 1

    counters, times = np.zeros(2, np.int64), np.zeros(100_000, np.int64)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: count(counters, times), range(4)))
    assert (times == 1).all()
    assert counters.tolist() == [0, times.size + 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_one_whatever_its_payload(dtype):
    """Filled memory, R's NA, signalling NaNs: their bits must not be taken for an exponent."""
    lanes = vector.panel_width(np.dtype(dtype).itemsize)
    bits = np.dtype(dtype).itemsize * 8
    first = int(np.array(np.inf, dtype).view(f"u{bits // 8}")) + 1
    payloads = np.random.default_rng(3).integers(first, 2 ** (bits - 1), lanes * 40, np.uint64)
    payloads[::2] |= np.uint64(1 << (bits - 1))
    payloads[:3] = first, 2 ** (bits - 1) - 1, 2**bits - 1
    S, sums = payloads.astype(f"u{bits // 8}").view(dtype), np.zeros(lanes, dtype)
    lanes_exp(S, 0, 40, vector.VECTORS, 1, np.zeros(lanes, dtype), sums)
    assert np.isnan(S).all()
    assert np.isnan(sums).all()


EXPONENTIALS = """
import numpy as np
from minimha.kernels.cpu.simd import vector
from minimha.kernels.cpu.simd.softmax import lanes_exp
lanes = vector.panel_width(4)
S = np.linspace(-80, 0, lanes * 40, dtype=np.float32)
expected, zeros = np.exp(S), np.zeros(lanes, np.float32)
lanes_exp(S, 0, 40, vector.VECTORS, 1, zeros, zeros.copy())
np.testing.assert_allclose(S, expected, rtol=1e-5)
"""


@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="they are forced already")
@pytest.mark.parametrize(
    "setting", [{"NUMBA_ENABLE_AVX": "0"}, {"NUMBA_CPU_NAME": "generic"}], ids=str
)
def test_vectors_are_those_that_numba_may_use(setting):
    """LLVM aborts the process where it has no instruction for what is asked of it."""
    done = subprocess.run(
        [sys.executable, "-c", EXPONENTIALS], env=os.environ | setting,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap(cap, dtype):
    sizes = np.geomspace(1e-30, 1e4, 501)
    S = np.concatenate([[0, np.inf, -np.inf, np.nan], sizes, -sizes]).astype(dtype)
    expected = cap * np.tanh(S.astype(float) / cap)
    twin = S.copy()
    soft_cap(S, 0, S.size, cap)
    plain_simd.soft_cap(twin, 0, twin.size, cap)
    for got in (S, twin):
        np.testing.assert_allclose(got, expected, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.bool_])
def test_a_transposition(dtype):
    rows, columns, x_row, y_row = 37, 41, 44, 39
    X = np.random.default_rng(4).integers(0, 2 if dtype == np.bool_ else 99, 3 + rows * x_row)
    X = X.astype(dtype)
    Y, expected = (np.zeros(2 + columns * y_row, dtype) for _ in range(2))
    transpose(X, 3, x_row, Y, 2, y_row, rows, columns)
    plain_simd.transpose(X, 3, x_row, expected, 2, y_row, rows, columns)
    np.testing.assert_array_equal(Y, expected)
    assert expected.any()
