"""Read q, k and v, in place or widened one block at a time, and write O.

16-bit numbers are read and written as their bits. Rounding O in NumPy would take as long as the
kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import overload

from minimha.equations.visibility import UNBOUNDED
from minimha.kernels.cpu.jit import OPTIONS, jit, jit_inline
from minimha.kernels.cpu.simd.dot import LINE, ROWS_AHEAD, ROWS_AHEAD_OF_L1
from minimha.kernels.cpu.simd.halves import of_bfloat16, of_float16, to_bfloat16, to_float16
from minimha.kernels.cpu.simd.memory import bits_of, flat, prefetch_to_L2

CACHED = 1 << 24  # bytes of K or V that may be in a cache
WIDE = 128  # numbers per row; wider rows are prefetched for widening even if they are not in pages


class Rows(NamedTuple):
    """Rows of floats, where row r starts at item start + r · stride of ``line``."""

    line: Any
    start: int
    stride: int


@jit_inline
def start_of(X, b, h, i):
    """Return the index in ``flat(X, 0)`` of the first item of X[b, h, i]."""
    return (b * X.strides[0] + h * X.strides[1] + i * X.strides[2]) // X.itemsize


@jit_inline
def rows_at(X, b, h, i):
    """Return a view of the rows of X[b, h], from row i on."""
    return Rows(flat(X, start_of(X, b, h, i)), 0, X.strides[2] // X.itemsize)


@jit_inline
def rows_from(rows, r):
    """Return a view of ``rows`` from row r on."""
    return Rows(rows.line, rows.start + r * rows.stride, rows.stride)


@jit_inline
def queries_of(o, b):
    """Return where the queries of sequence b are: batch entry, first row and number of rows."""
    return o.queries[b, 0], o.queries[b, 1], o.queries[b, 2]


@jit_inline
def most_queries(o):
    """Return the largest number of queries of any sequence."""
    most = 0
    for b in range(len(o.queries)):
        most = max(most, o.queries[b, 2])
    return most


@jit_inline
def key_at(o, b, j):
    """Return where key j of sequence b is in k and v: the batch entry or page, and the row."""
    page = j // o.page_size
    return o.pages[b, page], o.first_keys[b] + j - page * o.page_size


@jit_inline
def keys_ahead(o, j):
    """Return the number of keys from key j to the end of its page."""
    return o.page_size - j % o.page_size


@jit
def find_keys(X, o, b, kv, j, n, starts):
    """Write where n keys from key j on begin in X, then where the keys to prefetch begin."""
    n += ROWS_AHEAD if is_far(X) else ROWS_AHEAD_OF_L1
    r, known, stride = 0, min(n, o.kv_lengths[b] - j), X.strides[2] // X.itemsize
    page, at, ahead = j // o.page_size, key_at(o, b, j)[1], keys_ahead(o, j)
    while r < known:
        first, run = start_of(X, o.pages[b, page], kv, at), min(known - r, ahead)
        run_starts = flat(starts, r)  # see ``_write_numbers``
        for x in range(run):
            run_starts[x] = first + x * stride
        r, page, at, ahead = r + run, page + 1, o.first_keys[b], o.page_size  # without a division
    beyond, last = flat(starts, known), starts[known - 1]
    for x in range(n - known):
        beyond[x] = last


@jit_inline
def is_in_one_piece(o):
    """Return True if keys are not in pages, so that a sequence's rows have one constant stride."""
    return o.page_size == UNBOUNDED


@jit_inline
def keys_from(X, o, b, kv, j):
    """Return where key j begins in X, and the stride from key to key; keys must not be in pages."""
    page, at = key_at(o, b, j)
    return start_of(X, page, kv, at), X.strides[2] // X.itemsize


@jit_inline
def is_far(X):
    """Return whether X is so large that memory, not a cache, holds most of X."""
    return X.size * X.itemsize >= CACHED


def write_numbers(X, x, to, start, n, o):
    """Copy n numbers from X[x:] to to[start:], rounded if ``to`` has 16-bit numbers."""


@overload(write_numbers, jit_options=OPTIONS)
def _write_numbers(X, x, to, start, n, o):
    # Views, because LLVM does not vectorize an index x + i that it must assume to be negative.
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
    """Return whether rung 5 reads X in place; float16 must be widened before."""


@overload(is_read_in_place, jit_options=OPTIONS)
def _is_read_in_place(X, o):
    if X.dtype != types.uint16:
        return lambda X, o: True
    return lambda X, o: o.is_bfloat16


def float_rows(X, b, h, i, n, o, copy):
    """Return n rows of X[b, h] from row i on as floats: a view, or widened into ``copy``."""


@overload(float_rows, jit_options=OPTIONS)
def _float_rows(X, b, h, i, n, o, copy):
    if X.dtype != types.uint16:
        return lambda X, b, h, i, n, o, copy: rows_at(X, b, h, i)

    def widen(X, b, h, i, n, o, copy):
        D, rows = X.shape[3], rows_at(X, b, h, i)
        for r in range(n):
            _widen(flat(rows.line, r * rows.stride), flat(copy, r * D), D, o)
        return Rows(copy, 0, D)

    return widen


def float_keys(X, starts, n, o, copy):
    """Return n rows of X that begin at ``starts`` as floats: a view, or widened into ``copy``."""


@overload(float_keys, jit_options=OPTIONS)
def _float_keys(X, starts, n, o, copy):
    if X.dtype != types.uint16:
        return lambda X, starts, n, o, copy: Rows(flat(X, 0), starts[0], starts[1] - starts[0])

    def widen(X, starts, n, o, copy):
        D = X.shape[3]
        is_late = is_far(X) and (D >= WIDE or not is_in_one_piece(o))  # the CPU's own prefetching
        for r in range(n):
            for d in range(0, D if is_late else 0, LINE // 2):
                prefetch_to_L2(X, starts[r + ROWS_AHEAD] + d)
            _widen(flat(X, starts[r]), flat(copy, r * D), D, o)
            starts[r] = r * D
        for r in range(n, n + ROWS_AHEAD_OF_L1):
            starts[r] = 0
        return Rows(copy, 0, D)

    return widen


@jit_inline
def _widen(halves, wide, n, o):
    """Widen n 16-bit numbers to floats."""
    if o.is_bfloat16:
        for x in range(n):
            wide[x] = of_bfloat16(halves[x])
    else:
        for x in range(n):
            wide[x] = of_float16(halves[x])
