"""Sums that overflow where the mean does not."""

import numpy as np
import pytest
from problems import run

LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (np.float32, np.float64)}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("Lk", [2, 128, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_of_huge_values_is_finite(sign, Lk, dtype):
    q, k = np.zeros((1, 1, 3, 1), dtype), np.zeros((1, 1, Lk, 1), dtype)
    v = np.full((1, 1, Lk, 2), sign * 0.999 * LARGEST[dtype], dtype)
    output, lse = run("tiled", q, k, v)
    np.testing.assert_allclose(output, v[:, :, :1].repeat(3, axis=2), rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(Lk), rtol=1e-6)


@pytest.mark.parametrize("dtype", LARGEST)
def test_huge_values_change_no_digit_of_the_others(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 300, 4)).astype(dtype) for _ in range(3))
    given = {"is_causal": True, "sinks": [0.5, -np.inf]}
    expected = run("tiled", q, k, v, **given)
    v[0, 1, 299] = LARGEST[dtype]  # only the last query of a head sees it
    for got, wanted in zip(run("tiled", q, k, v, **given), expected, strict=True):
        np.testing.assert_array_equal(got[:, :, :299], wanted[:, :, :299])
        np.testing.assert_array_equal(got[:, 0], wanted[:, 0])


@pytest.mark.parametrize("name", ["dense", "tiled"])
def test_an_infinite_value_beside_huge_ones_stays_infinite(name):
    q, k = np.zeros((1, 1), np.float32), np.zeros((3, 1), np.float32)
    v = np.array([[3e38, -3e38], [3e38, -np.inf], [np.inf, 3e38]], np.float32)
    output, _ = run(name, q, k, v)
    assert output.tolist() == [[np.inf, -np.inf]]
