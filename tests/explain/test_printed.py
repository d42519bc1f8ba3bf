"""The status of a printed number, at its edges."""

import numpy as np
import pytest

from minimha.explain.printed import PrintedMatrix, Status, classify

E, T, R, W, A, I = (
    Status.EXACT, Status.TRUNCATED, Status.FROM_ROUNDED, Status.WRONG, Status.ASSUMED,
    Status.ILLUSTRATIVE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "exact", "rounded", "assumed", "status"),
    [
        ("0.269", 0.268941, None, False, E),
        ("0.268", 0.268941, None, False, T),
        ("0.267", 0.268941, None, False, W),
        ("0.27", 0.268941, None, False, E),
        ("0.26", 0.268941, None, False, T),
        ("-0.26", -0.268941, None, False, T),
        ("−0.27", -0.268941, None, False, E),
        ("0.7", 0.7, None, False, E),
        ("0.6", 0.7, None, False, W),  # 0.7 in binary is a little less, and is not truncated to 0.6
        ("1.198", 1.0, 1.2, False, W),
        ("0.995", 0.99444, 0.995, False, R),
        ("0.994", 0.99444, 0.995, False, E),  # what is exact is not called anything less
        ("0.5", 4.0, None, True, A),
        ("4.0", 4.0, None, True, E),  # an assumption that is right is no assumption
        ("−∞", -np.inf, None, False, E),
        ("−∞", 0.0, None, False, W),
        ("0", -np.inf, None, False, W),
        ("0.2", None, None, False, I),
        ("0.12", 0.125, None, False, E),  # half-way: rounded to even, or away from 0
        ("0.13", 0.125, None, False, E),
        ("0.995", 0.9, 0.9946, False, R),
        ("0.994", 0.99467, 0.994, False, T),
        ("0.5", 0.2, 0.56, False, W),  # the rounded value must be rounded, not truncated
        ("0.7", 0.7999999999999, None, False, W),  # 0.8, but for float64
    ],
)
def test_status(text, exact, rounded, assumed, status):
    assert classify(text, exact, rounded, is_assumed=assumed) is status


@pytest.mark.parametrize(
    ("matrix", "value", "sentence"),
    [
        (PrintedMatrix("w", ("0.268",), "", T), 0.268941,
         "printed 0.268, exact 0.268941: truncated, not rounded"),
        (PrintedMatrix("o", ("1.198",), "", W, origin="the printed weights and V"), 1.0,
         "printed 1.198, exact 1.000000: does not follow from the printed weights and V"),
        (PrintedMatrix("o", ("0.995",), "", R), 0.99444,
         "printed 0.995, exact 0.994440: follows from the rounded numbers of the previous step, "
         "not from the exact ones"),
        (PrintedMatrix("o", ("0.5",), "", A), 4.0,
         "printed 0.5, exact 4.000000: assumed by the document, not computed from its inputs"),
        (PrintedMatrix("o", ("0.2",), "", I, has_inputs=False), 0.2,
         "printed 0.2: a picture's number, with no inputs behind it"),
        (PrintedMatrix("o", ("−∞",), ""), -np.inf, "printed −∞, exact -∞: correctly rounded"),
    ],
)  # fmt: skip
def test_status_in_words(matrix, value, sentence):
    [comparison] = matrix.compare(np.array([[value]]))
    assert comparison.sentence == sentence


def test_decimals_are_those_on_the_page():
    matrix = PrintedMatrix("w", ("1 0.50 −2.125",), "")
    assert [c.decimals for c in matrix.compare(np.zeros((1, 3)))] == [0, 2, 3]
    assert matrix.values.tolist() == [[1.0, 0.5, -2.125]]


def test_each_number_is_compared_with_its_own_rounded_one():
    matrix = PrintedMatrix("o", ("9 1.1", "2.2 9"), "", rounded=np.array([[0, 1.1], [2.2, 0]]))
    assert [c.computed for c in matrix.compare(np.zeros((2, 2)))] == [W, R, R, W]


def test_as_many_numbers_as_the_step_has():
    with pytest.raises(
        ValueError, match=r"page 3 prints 2 numbers for w, which has shape \(1, 3\)"
    ):
        PrintedMatrix("w", ("1 2",), "page 3").compare(np.zeros((1, 3)))
