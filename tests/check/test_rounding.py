import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimha.check.rounding import accumulated, rounded


@given(st.lists(st.floats(-1e5, 1e5) | st.floats(-1e-4, 1e-4), min_size=1))
def test_float16_is_numpys(numbers):
    x = np.array(numbers, np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(rounded(x.astype(np.float64), 11, 16), expected)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1))
def test_bfloat16_is_that_of_ml_dtypes(numbers):
    x = np.array(numbers, np.float32)
    np.testing.assert_array_equal(rounded(x.astype(np.float64), 8), x.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("bits", "stops_at"), [(11, 2048), (8, 256)])
def test_a_sum_of_ones_stops_growing(bits, stops_at):
    assert accumulated(np.ones((2, 3000)), bits).tolist() == [stops_at, stops_at]


def test_sums_in_bfloat16_are_rounded_at_each_step():
    terms = np.random.default_rng(3).normal(size=(2, 40)).astype(ml_dtypes.bfloat16)
    total = np.zeros(2, ml_dtypes.bfloat16)
    for n in range(40):
        total = total + terms[:, n]
    assert total.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(accumulated(terms.astype(np.float64), 8), total)


def test_what_is_not_finite_stays():
    assert np.isnan(rounded(np.array([np.nan]), 11, 16)[0])
    assert rounded(np.array([-np.inf]), 8)[0] == -np.inf
