"""Format numbers as text, with the same rules in the terminal and on pages."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_FIXED = 1e6  # larger numbers have an exponent


def cells(value: NDArray[Any], decimals: int, like: NDArray[Any] | None = None) -> list[list[str]]:
    """Return the numbers of ``value`` as rows of text; a vector is one row.

    If all numbers are whole, they have no decimals, else ``decimals``. They have an exponent if the
    largest magnitude is too large or too small for fixed decimals. If ``like`` is given, its
    numbers and not those of ``value`` determine the format.

    >>> cells(np.array([[1.0, -np.inf]]), 3), cells(np.array([0.5, -1e-9]), 3)
    ([['1', '-∞']], [['0.500', '0.000']])
    """
    matrix = as_matrix(np.asarray(value, np.float64))
    form = _form(matrix if like is None else np.asarray(like, np.float64), decimals)
    return [[_cell(number, form) for number in row] for row in matrix.tolist()]


def as_matrix(value: NDArray[Any]) -> NDArray[Any]:
    """Return ``value`` reshaped to two axes; a vector is one row, a scalar one number."""
    width = value.shape[-1] if value.ndim else 1
    return value.reshape(math.prod(value.shape[:-1]), width)


def term(value: NDArray[Any], decimals: int) -> Callable[[float], str]:
    """Return a function that formats a single number of ``value``.

    Whole numbers have no decimals, and other numbers have ``decimals``. As in ``cells``, all have
    an exponent if the largest magnitude needs one.

    >>> say = term(np.array([0.5, 1, 1e-17]), 3)
    >>> say(0.5), say(1), say(1e-17)
    ('0.500', '1', '0.000')
    """
    form = _form(np.asarray(value, np.float64), decimals)
    short = form if form.endswith("e") else ".0f"
    return lambda number: _cell(number, short if number == np.rint(number) else form)


def limits(values: Iterable[NDArray[Any]]) -> tuple[float, float]:
    """Return the least and the greatest finite number in all arrays, or (0, 0) if there is none.

    >>> limits([np.array([1.0, -np.inf]), np.array([[2]])])
    (1.0, 2.0)
    """
    numbers = [np.asarray(value, np.float64).ravel() for value in values]
    every = np.concatenate([*numbers, np.empty(0)])
    finite = every[np.isfinite(every)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _form(value: NDArray[np.float64], decimals: int) -> str:
    finite = value[np.isfinite(value)]
    if needs_exponent(value, decimals):
        return f".{decimals}e"
    return ".0f" if (finite == np.rint(finite)).all() else f".{decimals}f"


def needs_exponent(value: NDArray[np.float64], decimals: int) -> bool:
    """Return whether the largest finite magnitude in ``value`` needs an exponent.

    It does if it is too large, or if it would be 0 when it is rounded to ``decimals`` decimals.
    """
    largest = abs(value[np.isfinite(value)]).max(initial=0)
    return bool(largest >= LARGEST_FIXED or 0 < largest < 0.5 * 10.0**-decimals)


def in_units(number: int, unit: str) -> str:
    """Return ``number`` with three digits, a prefix and ``unit``, such as "1.21 GiB".

    If the unit is "B" (bytes), prefixes are powers of 1024, else powers of 1000.
    """
    base = 1024 if unit == "B" else 1000
    signs = {"": ("K", "M", "B", "T"), "B": ("Ki", "Mi", "Gi", "Ti")}.get(
        unit, ("K", "M", "G", "T", "P", "E")
    )
    scaled, sign = float(number), ""
    for larger in signs:
        if round(scaled) < base:
            break
        scaled, sign = scaled / base, larger
    digits = f"{scaled:#.3g}".rstrip(".") if sign and scaled < 999.5 else f"{scaled:.0f}"
    return f"{digits} {sign}{unit}".rstrip()


def _cell(number: float, form: str) -> str:
    if np.isfinite(number):
        text = format(number, form)
        return text.removeprefix("-") if float(text) == 0 else text
    return "NaN" if np.isnan(number) else "∞" if number > 0 else "-∞"
