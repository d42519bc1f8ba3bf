"""The kernel that multiplies by matrices as files store them, beside sums in float64."""

import os
import signal

import numpy as np
import pytest
from stored_weights import ALL, PLAIN, columns_of, drawn
from thorough import in_turn, thorough_after

import minimha
from minimha.equations.stored import Stored
from minimha.kernels.cpu import weights
from minimha.kernels.cpu.simd import matrix_unit
from minimha.kernels.cpu.simd.vector import MULTIPLIES_PAIRS
from minimha.kernels.cpu.threads import get_num_threads

ROWS = (1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 128)
RNG = np.random.default_rng(0)
LIMIT = 60  # seconds for a child, whose death by SIGALRM fails its test


@pytest.fixture(autouse=True)
def memory_is_never_zero(monkeypatch):
    """What a kernel does not write must not be read."""
    new = weights.memory_of

    def spoilt(number):
        memory = new(number)
        memory[:] = 0xFF
        return memory

    monkeypatch.setattr(weights, "memory_of", spoilt)


@pytest.fixture(autouse=True)
def threads_as_before():
    before = get_num_threads()
    yield
    minimha.set_num_threads(before)


def check(got, x, numbers):
    """Every sum is off by at most one rounding per number, of 24 binary digits."""
    exact, size = x @ numbers.T, np.abs(x) @ np.abs(numbers).T
    assert (np.abs(got - exact) <= (8 + numbers.shape[1]) * 2.0**-24 * size).all()


def matrix(name, rows, columns):
    pytest.importorskip("gguf", reason="gguf, which reads the formats, is missing")
    data, scales, numbers = drawn(name, rows, columns_of(name, columns))
    return Stored.of_rows(name, data, scales), numbers


@pytest.mark.parametrize("name", thorough_after(3, in_turn(ALL)))
def test_products_are_those_of_widened_numbers(name):
    for N, K in ((131, 1056), (259, 530), (1, 32)):
        W, numbers = matrix(name, N, K)
        for workers in {1, min(2, get_num_threads())}:
            minimha.set_num_threads(workers)
            for rows in ROWS:
                x = RNG.normal(size=(rows, W.columns)).astype(np.float32)
                check(weights.product(x, W.T), x.astype(np.float64), numbers)
                if rows > weights.MANY:
                    got = weights.product(x, W.T, has_matrix_unit=False)
                    check(got, x.astype(np.float64), numbers)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("K", "N"), thorough_after(2, [(131, 1056), (1, 32), (33, 530), (70, 2304)])
)
def test_products_with_matrices_that_are_stored_for_x_W(name, K, N):
    W, numbers = matrix(name, K, N)
    for rows in (1, 3, 4, 9, 65, weights.AT_ONCE + 3):
        x = RNG.normal(size=(rows, K)).astype(np.float32)
        check(weights.product(x, W), x.astype(np.float64), numbers.T)


@pytest.mark.skipif(
    not (matrix_unit.is_usable() or MULTIPLIES_PAIRS),
    reason="this CPU has neither a matrix unit nor instructions for pairs of bfloat16 numbers",
)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "Q8_0", "float32"])
def test_rounded_products_keep_the_digits_of_bfloat16(name):
    W, numbers = matrix(name, 259, 544)
    x = RNG.normal(size=(100, W.columns)).astype(np.float32)
    exact, size = x @ numbers.T, np.abs(x) @ np.abs(numbers).T
    error = np.abs(weights.product(x, W.rounded().T) - exact)
    assert (error <= 2.0**-7 * size).all()
    assert error.max() > 2.0**-16 * size.mean()
    check(weights.product(x[:5], W.rounded().T), x[:5].astype(np.float64), numbers)


@pytest.mark.parametrize("rows", [1, 2, 5, 100, 500])
def test_rows_anywhere_at_any_byte(rows):
    W, numbers = matrix("bfloat16", 131, 97)
    data = np.full(3 + W.data.size, 0xFF, np.uint8)
    data[3:] = W.data
    order = RNG.permutation(131)[:77]
    moved = Stored("bfloat16", data, W.starts + 3, 97).reordered(order)
    x = RNG.normal(size=(rows, 97)).astype(np.float32)
    check(weights.product(x, moved.T), x.astype(np.float64), numbers[order])
    several = RNG.normal(size=(rows, 2 * 97)).astype(np.float32)[:, ::2]
    check(weights.product(several, W.T), several.astype(np.float64), numbers)


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
@pytest.mark.parametrize("name", ["Q8_0", "bfloat16", "float32"])
def test_one_product_has_the_columns_of_several_matrices(name, rows):
    drawn = [matrix(name, N, 288) for N in (131, 7, 70)]
    order = RNG.permutation(131)
    x = RNG.normal(size=(rows, drawn[0][0].columns)).astype(np.float32)
    for chosen in ([2, 0, 1], [1]):
        parts = [drawn[0][0].reordered(order).T, *(drawn[n][0].T for n in chosen)]
        numbers = np.concatenate([drawn[0][1][order], *(drawn[n][1] for n in chosen)])
        check(weights.product(x, weights.weights_of(*parts)), x.astype(np.float64), numbers)


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_a_float32_array_by_columns(rows):
    W = RNG.normal(size=(131, 100)).astype(np.float32)[:, :97]
    x = RNG.normal(size=(rows, 97)).astype(np.float32)
    check(weights.product(x, W.T), x.astype(np.float64), W.astype(np.float64))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
def test_nan_and_infinity_reach_their_sums_alone(name, rows):
    W, numbers = matrix(name, 131, 544)
    wide = numbers.astype(PLAIN[name])
    for at, value in (((3, 5), np.nan), ((70, 40), np.inf), ((130, 543), -np.inf), ((9, 0), 0)):
        wide[at] = value
    W = Stored.of_rows(name, wide.view(np.uint8))
    x = RNG.normal(size=(rows, 544)).astype(np.float32)
    x[0, 7], x[-1, 40] = np.inf, 0
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ wide.astype(np.float64).T
        for unit in (False, None):
            got = weights.product(x, W.T, has_matrix_unit=unit)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            np.testing.assert_array_equal(np.isposinf(got), np.isposinf(expected))
            np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
            is_finite = np.isfinite(expected)
            np.testing.assert_allclose(got[is_finite], expected[is_finite], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in ALL if name not in PLAIN])
@pytest.mark.parametrize("x", ["outlier", "wide", "large", "small", "zeros", "equal"])
def test_a_row_of_any_magnitudes(name, x):
    W, numbers = matrix(name, 131, 544)
    row = RNG.normal(size=(1, W.columns)).astype(np.float32)
    if x == "outlier":
        row[0, 40] = 1e6
    elif x == "wide":
        row *= np.exp(5 * RNG.normal(size=row.shape)).astype(np.float32)
    else:
        row *= {"large": 1e30, "small": 1e-28, "zeros": 0, "equal": 0}[x]
        row += x == "equal"
    exact, size = row @ numbers.T, np.abs(row) @ np.abs(numbers).T
    # Integers of one row may be off by 2^-23 of the largest of 32 numbers, as in ``simd.digits``.
    groups = np.abs(row).reshape(-1, 32).max(axis=1).repeat(32) @ np.abs(numbers).T
    error = np.abs(weights.product(row, W.T) - exact)
    assert (error <= 2.0**-22 * groups + W.columns * 2.0**-24 * size).all()


@pytest.mark.parametrize("name", [name for name in ALL if name not in PLAIN])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_with_one_number_that_is_not_finite(name, value):
    W, numbers = matrix(name, 131, 544)
    x = RNG.normal(size=(1, W.columns)).astype(np.float32)
    x[0, 40] = value
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float64) @ numbers.T
    got = weights.product(x, W.T)
    assert not np.isfinite(got).any()
    assert (np.isnan(got) | (got == expected)).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads, which is the point
def test_a_forked_child_multiplies_too():
    W, numbers = matrix("bfloat16", 515, 544)
    x = RNG.normal(size=(1, 544)).astype(np.float32)
    check(weights.product(x, W.T), x.astype(np.float64), numbers)
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        try:
            check(weights.product(x, W.T), x.astype(np.float64), numbers)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_times_something_is_nothing():
    W, _ = matrix("bfloat16", 131, 544)
    assert weights.product(np.zeros((0, 544), np.float32), W.T).shape == (0, 131)
