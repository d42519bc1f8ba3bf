"""What 8 bits do to weights and values: numbers against ml_dtypes, and a loop over single keys."""

import math

import ml_dtypes
import numpy as np
import pytest

from minimha import labs
from minimha.labs import precision
from minimha.labs.precision import OfValues, Row, attend, rounded


def test_rounding_is_that_of_ml_dtypes():
    steps = np.arange(-470, 470, 0.125)
    x = np.concatenate([steps, steps / 64, steps * 2.0**-14, [0.0, -0.0, 2.0**-10, 1e9, -1e9]])
    expected = np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(rounded(x), expected.astype(float))


@pytest.mark.parametrize("factor", [1.0, 256.0])
@pytest.mark.parametrize("is_backward", [False, True])
def test_one_query_key_by_key(is_backward, factor):
    rng = np.random.default_rng(4)
    S, V = rng.normal(size=(1, precision.NUM_KEYS)), rng.normal(size=(precision.NUM_KEYS, 64))
    S[0, :4] += 7
    O, lost, steps = attend(S, V, is_backward, factor)
    blocks = [range(first, first + 128) for first in range(0, 1024, 128)]
    top, numerator, total, zeros = -math.inf, np.zeros(64), 0.0, 0
    for block in reversed(blocks) if is_backward else blocks:
        before, top = top, max(top, *(S[0, j] for j in block))
        numerator, total = (x * math.exp(before - top) for x in (numerator, total))
        for j in block:
            p = math.exp(S[0, j] - top)
            cast = float(ml_dtypes.float8_e4m3fn(factor * p)) / factor
            numerator, total = numerator + cast * V[j], total + p
            zeros += cast == 0 and j >= 4
    np.testing.assert_allclose(O[0], numerator / total, atol=1e-12)
    assert lost == pytest.approx(zeros / 1020)
    assert steps[-1].m == top == S.max()
    assert steps[0].keys == ("896 to 1023" if is_backward else "0 to 127")


def test_a_weight_is_lost_below_half_of_the_smallest_number():
    rows = [Row(*row) for row in labs.run("precision").tables[0].rows]
    assert rows[0].forward_error == pytest.approx(rows[0].backward_error, rel=0.2)
    for row in rows:
        assert row.forward_256_lost <= row.forward_lost
        assert row.backward_lost <= row.forward_lost + 1e-3
        # The sinks' largest of four scores is about 1 above the gap; the others' are N(0, 1).
        below = 0.5 * math.erfc((math.log(2.0**10) - row.gap - 1.03) / math.sqrt(2))
        assert row.forward_lost == pytest.approx(below, abs=0.12)
    assert rows[-1].forward_error > 0.99


def test_the_conclusion_follows_its_rows():
    rows = [Row(1, *[0.1] * 8), Row(3, 0.6, 1, 0.2, 1, 0.1, 1, 0.1, 1), Row(5, *[0.9] * 8)]
    values = [
        OfValues("int8", "tensor", 0.01, 0.5), OfValues("int8", "token", 0.01, 0.02),
        OfValues("float8_e4m3fn", "tensor", 0.02, 0.02),
    ]  # fmt: skip
    assert precision.conclude(rows, values) == (
        "Sinks first, half of the other weights become 0 from a gap of 3 on, and with P × 256 from "
        "a gap of 5 on; sinks last, from a gap of 5 on and from a gap of 5 on; one large value "
        "multiplies the error of cast values by up to 50 with scales per tensor, 2 with scales per "
        "token."
    )
