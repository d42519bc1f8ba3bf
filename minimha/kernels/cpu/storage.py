"""How kernels read q, k and v, in place or widened one block at a time, and write O.

16-bit numbers are read and written as their bits. NumPy would round O one number after another,
which takes as long as all the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import overload

from minimha.kernels.cpu.jit import OPTIONS, jit_inline
from minimha.kernels.cpu.simd.halves import of_bfloat16, of_float16, to_bfloat16, to_float16
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


def is_read_in_place(X, o):
    """Whether the products for few queries read X in place: all dtypes but float16."""


@overload(is_read_in_place, jit_options=OPTIONS)
def _is_read_in_place(X, o):
    if X.dtype != types.uint16:
        return lambda X, o: True
    return lambda X, o: o.is_bfloat16


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
