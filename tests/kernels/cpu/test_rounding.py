"""O in 16 bits is what NumPy and ml_dtypes round it to."""

import ml_dtypes
import numpy as np
import pytest

from minimha import attention
from minimha.equations.problem import Problem
from minimha.kernels.cpu import backend
from minimha.kernels.cpu.rounding import rounded

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def around(numbers):
    """They and their neighbours in float32."""
    return np.concatenate([numbers, np.nextafter(numbers, np.inf), np.nextafter(numbers, -np.inf)])


def corners(dtype):
    """What 16 bits can say, what is half-way between two of these, neighbours, and any bits."""
    each = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    finite = np.sort(each[np.isfinite(each)])
    half_way = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    largest = np.float32([65519.99, 65520, 65536, 3.3961775e38, 3.4028235e38, np.inf])
    anything = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    exact = finite.astype(np.float32)
    return np.concatenate([around(exact), around(half_way), around(largest), -largest, anything])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_as_ieee_754_says(dtype):
    with np.errstate(all="ignore"):
        O = corners(dtype)
        expected = O.astype(dtype)
    result = rounded(O, dtype)
    is_nan = np.isnan(O)
    np.testing.assert_array_equal(result[~is_nan].view("u2"), expected[~is_nan].view("u2"))
    assert np.isnan(result[is_nan]).all()
    assert is_nan.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_orders_stay(dtype):
    O = np.random.default_rng(0).standard_normal((2, 3, 5, 7), np.float32)
    for given in (O, O.swapaxes(1, 2), O[:, ::-1], O[:0], O[0, 0, 0, 0]):
        np.testing.assert_array_equal(rounded(given, dtype), given.astype(dtype))
    for other in (np.dtype(np.float32), np.dtype(np.float64)):
        assert rounded(O, other).dtype == other
    assert rounded(O.astype(np.float64), dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_is_rounded_at_the_first_call_and_when_its_plan_is_remembered(dtype):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 16)).astype(dtype)
    O, _ = backend.plan(Problem.of(q, k, v))(Problem.of(q, k, v))
    for _ in range(2):
        np.testing.assert_array_equal(attention(q, k, v, backend="cpu"), O.astype(dtype))
