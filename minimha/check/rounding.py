"""Round numbers to fewer bits than float64 has, and sum with rounding at each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FORMATS = {"bfloat16": (8, 128), "float16": (11, 16)}  # bits and exponent, coarsest first
OF_FLOAT8 = (4, 8)  # of float8_e4m3fn, for numbers below 256


def rounded(x: Array, bits: int, exponent: int = 128) -> Array:
    """Round ``x`` to a significand of ``bits`` bits, ties to even; 2^exponent becomes infinite.

    (11, 16) is float16, (11, 128) is TF32 and (8, 128) is bfloat16. Subnormal numbers keep fewer
    bits.

    >>> rounded(np.array([2049.0, 2051, 70000, 2e-8]), 11, 16)
    array([2048., 2052.,   inf,   0.])
    """
    _, power = np.frexp(x)
    power = np.maximum(power, 3 - exponent)  # below it numbers are subnormal
    unit = np.ldexp(1.0, power - bits)
    result = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
    return np.where(abs(result) >= 2.0**exponent, np.copysign(np.inf, x), result)


def format_of(arrays: Iterable[Array]) -> str | None:
    """Return the coarsest format that holds every number exactly, "bfloat16" or "float16".

    Returns None if neither does, or if far fewer bits suffice.

    >>> format_of([np.array([0.0999755859375, 3.0])])
    'float16'
    >>> format_of([np.ones(3)]) is None
    True
    """
    numbers = np.concatenate([np.ravel(x) for x in arrays] or [np.zeros(0)]).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    for name, (bits, exponent) in FORMATS.items():
        if np.array_equal(rounded(numbers, bits, exponent), numbers):
            is_coarser = np.array_equal(rounded(numbers, bits - 3, exponent), numbers)
            return None if is_coarser else name
    return None


def accumulated(terms: Array, bits: int) -> Array:
    """Return the sum along the last axis, rounded to ``bits`` bits after every addition.

    >>> float(accumulated(np.ones(4096), 11))
    2048.0
    """
    if not terms.shape[-1]:
        return np.zeros(terms.shape[:-1])
    if bits == 11:
        return np.add.accumulate(terms.astype(np.float16), -1)[..., -1].astype(np.float64)
    drop = 24 - bits  # bits of float32, which is exact enough for these sums
    below, kept = np.uint32((1 << (drop - 1)) - 1), np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))

    def narrow(x: Array) -> Array:
        u = x.view(np.uint32)  # add half of the last kept bit, ties to even, and cut off the rest
        return np.asarray(((u + (below + ((u >> drop) & 1))) & kept).view(np.float32))

    each = np.ascontiguousarray(np.moveaxis(terms, -1, 0), np.float32)
    total = np.zeros(each.shape[1:], np.float32)
    for term in narrow(each):
        total = narrow(total + term)
    return total.astype(np.float64)
