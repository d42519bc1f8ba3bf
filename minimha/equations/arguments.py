"""Check one argument of a public function at a time, and raise errors that name the argument.

Each check takes the argument's name first, and returns the value in a standard form. Its error
states which argument is wrong, what was expected, what was given, and why. A wrong type raises
TypeError, any other wrong value ValueError.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arrays import LIBRARIES, as_numpy, check_file, library_of

COMPUTED = (np.dtype(np.float32), np.dtype(np.float64))  # used as they are
FLOATING = ("float16", "bfloat16", "float32", "float64")
LARGEST_INTEGER = 1 << 53  # up to here float64, in which angles are computed, is exact

T = TypeVar("T", bound=str | None)

_names: ContextVar[Mapping[str, str] | None] = ContextVar("argument names", default=None)


@contextmanager
def argument_names(**names: str) -> Iterator[None]:
    """Rename arguments in the errors that a ``with`` block raises, such as q to ``query``.

    >>> with argument_names(scale="softmax_scale"):
    ...     number("scale", float("nan"), np.dtype(np.float32))
    Traceback (most recent call last):
    ValueError: softmax_scale is nan: expected a finite number, at most 3.4e+38
    """
    token = _names.set({**(_names.get() or {}), **names})
    try:
        yield
    finally:
        _names.reset(token)


def name_of(argument: str) -> str:
    """Return the name by which errors call ``argument``, which ``argument_names`` can change."""
    return (_names.get() or {}).get(argument, argument)


def flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool; raise TypeError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name_of(name)} is {value!r}: expected True or False")
    return bool(value)


def choice(name: str, value: T, choices: Iterable[str | None]) -> T:
    """Return ``value``; raise ValueError unless it is one of ``choices``."""
    if not isinstance(value, str | None) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name_of(name)} is {value!r}: expected one of {listed}")
    return value


def integer(name: str, value: Any, low: int = 1) -> int:
    """Return ``value`` as a Python int.

    Raises TypeError unless it is an integer, and ValueError if it is less than ``low``.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name_of(name)} is {value!r}: expected an integer")
    if value < low:
        raise ValueError(f"{name_of(name)} is {value!r}: expected an integer of at least {low}")
    return int(value)


def number(
    name: str, value: Any, compute: np.dtype[Any] = COMPUTED[1], low: float = -math.inf
) -> float:
    """Return ``value``, a number or a 0-d array, as a float.

    Raises TypeError unless ``value`` is a real number. Raises ValueError unless it is at least
    ``low`` and finite in the dtype ``compute``.
    """
    _check_unmasked(name, value)
    scalar = rectangular(name, value).item() if getattr(value, "shape", None) == () else value
    if isinstance(scalar, bool) or not isinstance(scalar, numbers.Real):
        raise TypeError(f"{name_of(name)} is {value!r}: expected a number")
    largest = float(np.finfo(compute).max)
    try:
        result = float(scalar)
    except OverflowError:
        result = math.inf
    if not abs(result) <= largest:
        raise ValueError(
            f"{name_of(name)} is {value!r}: expected a finite number, at most {largest:.1e}"
        )
    if result < low:
        raise ValueError(f"{name_of(name)} is {value!r}: expected a number of at least {low:g}")
    return result


def rectangular(name: str, value: ArrayLike, hint: str = "") -> NDArray[Any]:
    """Convert ``value``, such as a list of rows, to an ndarray; an ndarray is not copied.

    Raises ValueError if rows have different lengths. Raises TypeError for a masked array, because
    NumPy would drop the mask; ``hint`` is the end of that message. Also raises the errors of
    ``as_numpy`` and ``check_file``.
    """
    if type(value) is np.ndarray:  # not masked, not in a file, of no other library
        return value
    _check_unmasked(name, value, hint)
    check_file(name_of(name), value)
    if library_of(value) in LIBRARIES:
        return as_numpy(name_of(name), value)
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"{name_of(name)} is not a rectangular array of numbers: rows of one matrix must have "
            f"equal lengths ({error})"
        ) from None


def _check_unmasked(name: str, value: Any, hint: str = "") -> None:
    if _has_mask(value):
        is_list = isinstance(value, (list, tuple))
        raise TypeError(
            f"{name_of(name)} {'holds' if is_list else 'is'} a masked array, whose mask would be "
            f"lost: give a plain array{hint}"
        )


def _has_mask(value: Any) -> bool:
    """Return whether ``value`` is a masked array or number, or a nested list that holds one."""
    ma = sys.modules.get("numpy.ma")  # slow to import; before that no masked array exists
    if ma is None:
        return False
    if not isinstance(value, (list, tuple)):
        return isinstance(value, ma.MaskedArray)
    kinds = set(map(type, value))  # one check per type, not per number
    return any(issubclass(kind, (ma.MaskedArray, list, tuple)) for kind in kinds) and any(
        map(_has_mask, value)
    )


def cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert ``array`` to ``dtype`` without warnings or errors, regardless of ``np.seterr``.

    >>> with np.errstate(all="raise"):
    ...     cast(np.array([1e-300, 1e300]), np.dtype(np.float32))
    array([ 0., inf], dtype=float32)
    """
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def as_floating(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return ``value`` as a floating array of 16, 32 or 64 bits; integers become float64.

    Raises TypeError for any other dtype, and the errors of ``rectangular``.
    """
    array = rectangular(name, value, hint=" and attn_mask")
    if array.dtype in COMPUTED:
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.float64)
    if array.dtype.name not in FLOATING:
        raise TypeError(
            f"{name_of(name)} has dtype {array.dtype}: expected integers, float16, bfloat16, "
            f"float32 or float64"
        )
    return array


def as_integers(name: str, value: ArrayLike, limit: int = LARGEST_INTEGER) -> NDArray[np.int64]:
    """Return ``value``, an array of integers, as an int64 array.

    Raises TypeError for another dtype, unless the array is empty. Raises ValueError if a number is
    less than -``limit`` or greater than ``limit``.
    """
    array = rectangular(name, value)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name_of(name)} has dtype {array.dtype}: expected integers")
    low, high = int(array.min()), int(array.max())
    if low < -limit or high > limit:
        raise ValueError(
            f"{name_of(name)} has numbers from {low} to {high}: expected integers within ±2^53"
        )
    return array.astype(np.int64)


def common_dtype(dtypes: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    """Return the smallest floating dtype that can represent all ``dtypes``, or raise TypeError."""
    first, *rest = dtypes.values()
    if first in COMPUTED and all(dtype == first for dtype in rest):
        return first
    try:
        common: np.dtype[Any] = np.result_type(*dtypes.values())
    except TypeError:
        common = np.dtype(object)
    if common.name not in FLOATING:
        listed = ", ".join(f"{name_of(name)} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{listed}: no common dtype holds them, convert them to one first")
    return common


def of_one_dtype(**arrays: ArrayLike) -> dict[str, NDArray[Any]]:
    """Convert all arrays to their common floating dtype, and return them by name."""
    given = {name: as_floating(name, value) for name, value in arrays.items()}
    dtype = common_dtype({name: array.dtype for name, array in given.items()})
    return {name: cast(array, dtype) for name, array in given.items()}


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of intermediate results: float64 for float64 inputs, else float32."""
    return COMPUTED[1] if dtype == COMPUTED[1] else COMPUTED[0]


def counted(number: int, noun: str) -> str:
    """Return ``number`` followed by ``noun``, in the plural if needed: ``1 head``, ``2 heads``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
