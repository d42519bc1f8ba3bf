"""Products of rows and a matrix: the same numbers whichever order BLAS is asked in."""

import numpy as np
import pytest

from minimha.layers.linear import BLOCK, product


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("columns", [5, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_products_of_integers_are_exact(rows, columns, order):
    rng = np.random.default_rng(0)
    x, W = rng.integers(-9, 10, (1, rows, 6)), rng.integers(-9, 10, (6, columns))
    got = product(x.astype(np.float32), np.asarray(W, np.float32, order=order))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x @ W)
