"""How kernels read q, k and v, in place or widened one block at a time, and write O.

16-bit numbers are read and written as their bits. NumPy would round O one number after another,
which takes as long as all the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from minimha.kernels.cpu.jit import OPTIONS, jit, jit_inline
from minimha.kernels.cpu.simd.memory import bits_of, flat


class Rows(NamedTuple):
    """Rows of floats: row r starts at item start + r · stride of ``line``."""

    line: Any
    start: int
    stride: int


@jit_inline
def rows_at(X, b, h, i):
    """The rows of X[b, h] from i on, in place."""
    offset = b * X.strides[0] + h * X.strides[1] + i * X.strides[2]
    return Rows(flat(X, offset // X.itemsize), 0, X.strides[2] // X.itemsize)


@jit_inline
def rows_from(rows, r):
    """``rows`` without the first r."""
    return Rows(rows.line, rows.start + r * rows.stride, rows.stride)


@jit_inline
def queries_of(o, b):
    """Of sequence b the batch entry in q, O and L, its first row there and the number of rows."""
    return o.queries[b, 0], o.queries[b, 1], o.queries[b, 2]


@jit_inline
def most_queries(o):
    """Number of queries of the sequence that has most."""
    most = 0
    for b in range(len(o.queries)):
        most = max(most, o.queries[b, 2])
    return most


@jit_inline
def key_at(o, b, j):
    """Of key j of sequence b the batch entry and the row in k and v."""
    page = j // o.page_size
    return o.pages[b, page], o.first_keys[b] + j - page * o.page_size


@jit_inline
def keys_ahead(o, j):
    """Number of keys from j to the end of its page: their rows are next to each other."""
    return o.page_size - j % o.page_size


def write_numbers(X, x, to, start, n, o):
    """n numbers from X[x] on go to to[start] and following, rounded if these are of 16 bits."""


@overload(write_numbers, jit_options=OPTIONS)
def _write_numbers(X, x, to, start, n, o):
    # Views, since a sum as index may be negative, for all that LLVM knows: loops would stay scalar.
    if to.dtype == X.dtype:

        def copy(X, x, to, start, n, o):
            numbers, copies = flat(X, x), flat(to, start)
            for c in range(n):
                copies[c] = numbers[c]

        return copy

    def narrow(X, x, to, start, n, o):
        words, halves = flat(bits_of(X), x), flat(to, start)
        if o.is_bfloat16:
            for c in range(n):
                halves[c] = to_bfloat16(words[c])
        else:
            for c in range(n):
                halves[c] = to_float16(words[c])

    return narrow


def float_rows(X, b, h, i, n, o, copy):
    """n rows of X[b, h] from i on: in place, or widened into ``copy``."""


@overload(float_rows, jit_options=OPTIONS)
def _float_rows(X, b, h, i, n, o, copy):
    if X.dtype != types.uint16:
        return lambda X, b, h, i, n, o, copy: rows_at(X, b, h, i)

    def widen(X, b, h, i, n, o, copy):
        D, rows = X.shape[3], rows_at(X, b, h, i)
        for r in range(n):
            halves, wide = flat(rows.line, rows.start + r * rows.stride), flat(copy, r * D)
            if o.is_bfloat16:
                for d in range(D):
                    wide[d] = of_bfloat16(halves[d])
            else:
                for d in range(D):
                    wide[d] = of_float16(halves[d])
        return Rows(copy, 0, D)

    return widen


@jit
def of_bfloat16(bits):
    """The float32 whose upper half is ``bits``."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@jit
def of_float16(bits):
    """The float32 equal to the float16 with these bits."""
    word = np.uint32(bits)
    rest = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13))
    # With exponent and mantissa shifted, every finite number is too small by 2^112, also subnormal.
    finite = np.uint32(rest).view(np.float32) * np.float32(2.0**112)
    other = np.uint32(rest | np.uint32(0x7F800000)).view(np.float32)  # infinity and NaN
    magnitude = other if rest >= np.uint32(0x7C00 << 13) else finite
    return -magnitude if word & np.uint32(0x8000) else magnitude


# In integers, of which LLVM makes vector code on every CPU: what is added to the digits that go
# carries into the last digit that stays, and on into the exponent.


@jit
def to_bfloat16(word):
    """The bits of the bfloat16 nearest to a float32, given by its own; the even one of two."""
    upper = np.uint32(word >> np.uint32(16))
    nearest = np.uint32(word + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(upper | np.uint32(0x40) if is_nan else nearest)


@jit
def to_float16(word):
    """The bits of the float16 nearest to a float32, given by its own; the even one of two."""
    size = np.uint32(word & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    # 112 less in the exponent, whose bias is 15 instead of 127.
    normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
    # A sum with 1/2 has its last digit where those of subnormal numbers have it, at 2^-24.
    moved = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32)
    nearest = normal if size >= np.uint32(113 << 23) else np.uint32(moved - np.uint32(126 << 23))
    infinite = np.uint32(0x7E00 if size > np.uint32(0x7F800000) else 0x7C00)
    nearest = infinite if size >= np.uint32(143 << 23) else nearest
    return np.uint16(nearest | np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(0x8000)))
