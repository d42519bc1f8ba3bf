"""Numbers as text, by one rule for the terminal and for every page."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_FIXED = 1e6  # beyond, a number with fixed decimals would be mostly digits


def cells(value: NDArray[Any], decimals: int) -> list[list[str]]:
    """The numbers of ``value`` as rows of text; a scalar is one row of one, a vector one row.

    Decimals are left out where all numbers are whole. Where the largest number is too large or too
    small for fixed decimals, all have an exponent.

    >>> cells(np.array([[1.0, -np.inf]]), 3), cells(np.array([0.5, -1e-9]), 3)
    ([['1', '-∞']], [['0.500', '0.000']])
    """
    width = value.shape[-1] if value.ndim else 1
    matrix = np.asarray(value, np.float64).reshape(math.prod(value.shape[:-1]), width)
    finite = matrix[np.isfinite(matrix)]
    largest = abs(finite).max(initial=0)
    if largest >= LARGEST_FIXED or 0 < largest < 0.5 * 10.0**-decimals:
        form = f".{decimals}e"
    else:
        form = ".0f" if (finite == np.rint(finite)).all() else f".{decimals}f"
    return [[_cell(number, form) for number in row] for row in matrix.tolist()]


def limits(values: Iterable[NDArray[Any]]) -> tuple[float, float]:
    """Return the least and the greatest finite number of all ``values``; zeros if there is none.

    >>> limits([np.array([1.0, -np.inf]), np.array([[2]])])
    (1.0, 2.0)
    """
    numbers = [np.asarray(value, np.float64).ravel() for value in values]
    every = np.concatenate([*numbers, np.empty(0)])
    finite = every[np.isfinite(every)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _cell(number: float, form: str) -> str:
    if np.isfinite(number):
        text = format(number, form)
        return text.removeprefix("-") if float(text) == 0 else text
    return "NaN" if np.isnan(number) else "∞" if number > 0 else "-∞"
