"""Products of rows and a matrix: the same numbers whichever order BLAS is asked in."""

import pickle
import sys

import numpy as np
import pytest

from minimha.equations.stored import Stored
from minimha.kernels import auto
from minimha.layers import linear
from minimha.layers.linear import BLOCK, Joined, product

BY_KERNEL = linear._by_kernel  # which tests replace


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("columns", [5, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_products_of_integers_are_exact(rows, columns, order):
    rng = np.random.default_rng(0)
    x, W = rng.integers(-9, 10, (1, rows, 6)), rng.integers(-9, 10, (6, columns))
    got = product(x.astype(np.float32), np.asarray(W, np.float32, order=order))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x @ W)


def stored(rows, columns, seed=0):
    W = np.random.default_rng(seed).normal(size=(columns, rows)).astype(np.float16)
    return Stored.of_rows("float16", W.view(np.uint8)).T, W.T.astype(np.float64)


@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_stored_matrix_is_widened_some_rows_at_a_time(monkeypatch, rows, dtype):
    monkeypatch.setattr("minimha.equations.stored.AT_ONCE", 100)
    (W, numbers), x = stored(33, 57), np.random.default_rng(1).normal(size=(2, rows, 33))
    got = product(x.astype(dtype), W)
    assert (got.shape, got.dtype) == ((2, rows, 57), dtype)
    np.testing.assert_allclose(got, x @ numbers, atol=1e-4)
    other = Stored.of_rows(
        "float16", np.ascontiguousarray(np.asarray(W), np.float16).view(np.uint8)
    )
    np.testing.assert_allclose(product(x.astype(dtype), other), x @ numbers, atol=1e-4)


class Kernel:
    """What a kernel's module is to ``product``."""

    class CompilationFailed(RuntimeError):  # noqa: N818
        pass

    def __init__(self, fails=False):
        self.fails, self.names, self.ready, self.calls = fails, set(), set(), 0

    def is_ready(self, name):
        return name in self.ready

    def is_stored(self, name):
        return name in self.names

    def weights_of(self, *matrices):
        return np.concatenate([np.asarray(W) for W in matrices], axis=1)

    def product(self, x, W):
        self.calls += 1
        if self.fails:
            raise self.CompilationFailed("no compiler")
        return x @ np.asarray(W)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that is asked as if this process had computed nothing before."""
    made = Kernel()
    monkeypatch.setattr(linear, "_by_kernel", BY_KERNEL)
    monkeypatch.setattr(auto, "_spent", {})
    monkeypatch.setattr(auto, "_broken", False)
    monkeypatch.setattr(auto, "imported", lambda name: made)
    monkeypatch.setitem(sys.modules, linear.KERNEL, made)
    monkeypatch.setitem(sys.modules, "numba", made)  # a kernel on disk is then read soon
    return made


def test_a_toy_never_asks_for_a_kernel_and_a_ready_one_is_used(kernel):
    (W, numbers), x = stored(33, 57), np.ones((1, 33), np.float32)
    np.testing.assert_allclose(product(x, W), x @ numbers, rtol=1e-4)
    assert kernel.calls == 0
    kernel.ready.add("float16")
    np.testing.assert_allclose(product(x, W), x @ numbers, rtol=1e-4)
    assert kernel.calls == 1
    assert product(x.astype(np.float64), W).dtype == np.float64  # by NumPy
    assert kernel.calls == 1


@pytest.mark.parametrize(("seconds", "is_stored", "calls"), [
    (0.04, True, 0), (0.06, True, 1), (3.0, False, 0), (4.1, False, 1),
])  # fmt: skip
def test_a_kernel_is_prepared_once_numpy_took_as_long(kernel, seconds, is_stored, calls):
    (W, _), x = stored(33, 57), np.ones((1, 33), np.float32)
    kernel.names |= {"float16"} if is_stored else set()
    auto.spent(60.0)  # of attention, which is none of its business
    auto.spent(seconds, "float16")
    product(x, W)
    assert kernel.calls == calls


def test_numpy_goes_on_where_nothing_can_be_compiled(kernel, caplog):
    (W, numbers), x = stored(33, 57), np.ones((1, 33), np.float32)
    kernel.ready.add("float16")
    kernel.fails = True
    for _ in range(2):
        np.testing.assert_allclose(product(x, W), x @ numbers, rtol=1e-4)
    assert kernel.calls == 1
    assert "no compiler" in caplog.text


def test_large_float32_matrices_are_multiplied_by_a_ready_kernel_for_a_few_rows(kernel):
    kernel.ready.add("float32")
    W = np.ones((300, 300), np.float32)
    product(np.ones((1, 300), np.float32), W.T)
    assert kernel.calls == 1
    product(np.ones((99, 300), np.float32), W.T)
    product(np.ones((1, 300), np.float32), W)
    product(np.ones((1, 30), np.float32), W[:30, :30].T)
    assert kernel.calls == 1


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matrices_of_one_kind_are_multiplied_in_one_call(kernel, is_ready, dtype):
    kernel.ready |= {"float16", "float32"} if is_ready else set()
    first, second, third = (stored(33, columns, columns) for columns in (57, 5, 20))
    plain = np.random.default_rng(0).normal(size=(20, 33)).astype(np.float32).T
    joined = Joined(first[0], plain, second[0], third[0].rounded())
    x = np.random.default_rng(1).normal(size=(2, 3, 33)).astype(dtype)
    for matrices in (joined, pickle.loads(pickle.dumps(joined))):
        got = matrices.products(x)
        for y, numbers in zip(got, (first[1], plain, second[1], third[1]), strict=True):
            assert y.dtype == dtype
            np.testing.assert_allclose(y, x @ numbers, atol=1e-4)
    # The first and the third in one call, the rounded one alone; the small float32 array by BLAS.
    assert kernel.calls == (2 * 2 if is_ready and dtype == np.float32 else 0)
