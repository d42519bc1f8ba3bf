"""Whole numbers that a caller gives as an array: positions of tokens, and how many there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST = 1 << 53  # float64, in which angles are computed, holds all integers up to here


def as_integers(name: str, value: ArrayLike) -> NDArray[np.int64]:
    """``value`` as an array of int64 whose sums and differences do not wrap around.

    Raises
    ------
    TypeError
        It holds something else than integers, or hides some of them (a masked array).
    ValueError
        Its rows differ in length, or an integer is beyond ±2^53.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: give a plain array")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name} is not a rectangular array of integers ({error})") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    low, high = int(array.min()), int(array.max())
    if low < -LARGEST or high > LARGEST:
        raise ValueError(f"{name} go from {low} to {high}: expected integers within ±2^53")
    return array.astype(np.int64)
