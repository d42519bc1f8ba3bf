"""Read q, k and v, in place or widened one block at a time, and write O.

16-bit and float8_e4m3fn numbers are read as their bits, and 16-bit numbers written so. Rounding O
in NumPy would take as long as the kernel. Below, X is q, k, v or O, b a batch entry or sequence,
and ``o`` has the options.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from minimha.equations.visibility import UNBOUNDED
from minimha.kernels.cpu.jit import OPTIONS, jit, jit_inline
from minimha.kernels.cpu.simd.dot import LINE, ROWS_AHEAD, ROWS_AHEAD_OF_L1
from minimha.kernels.cpu.simd.halves import (
    UNIT_OF_FLOAT8,
    of_bfloat16,
    of_float8,
    of_float16,
    to_bfloat16,
    to_float16,
)
from minimha.kernels.cpu.simd.memory import bits_of, flat, prefetch_to_L2

CACHED = 1 << 24  # bytes of K or V that may be in a cache
BYTES = (types.int8, types.uint8)  # dtypes of 8-bit keys and values: int8, float8_e4m3fn
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
    """Return batch entry, first row and number of rows of the queries of sequence b."""
    return o.queries[b, 0], o.queries[b, 1], o.queries[b, 2]


@jit_inline
def most_queries(o):
    """Return the number of queries of the sequence with the most queries."""
    most = 0
    for b in range(len(o.queries)):
        most = max(most, o.queries[b, 2])
    return most


@jit_inline
def key_at(o, b, j):
    """Return the batch entry (or page) of k and v and the row that hold key j of sequence b."""
    page = j // o.page_size
    return o.pages[b, page], o.first_keys[b] + j - page * o.page_size


@jit_inline
def keys_ahead(o, j):
    """Return the number of keys from key j to the end of its page."""
    return o.page_size - j % o.page_size


@jit
def find_keys(X, o, b, kv, j, n, starts):
    """Write to ``starts`` the offsets in X of n keys from key j on, then those of keys to prefetch.

    After the sequence's last key, its offset is repeated.
    """
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
def start_of_chosen(o, b, kv):
    """Return the index in ``flat(o.chosen, 0)`` of the first key picked in sequence b."""
    return (b * o.chosen.strides[0] + kv * o.chosen.strides[1]) // o.chosen.itemsize


@jit_inline
def key_number(o, b, kv, x):
    """Return the index in sequence b of key x; with ``key_indices``, x counts only picked keys."""
    return types.int64(flat(o.chosen, start_of_chosen(o, b, kv))[x]) if o.chosen.size else x


@jit_inline
def is_in_one_piece(o):
    """Return whether keys are stored without pages, so that they have one constant stride."""
    return o.page_size == UNBOUNDED


@jit_inline
def keys_from(X, o, b, kv, j):
    """Return the offset of key j in X and the stride between keys, which are not in pages."""
    page, at = key_at(o, b, j)
    return start_of(X, page, kv, at), X.strides[2] // X.itemsize


@jit
def find_chosen(X, o, b, kv, x, n, starts):
    """Write offsets as ``find_keys`` does, but of the n picked keys from number x of them on."""
    n += ROWS_AHEAD if is_far(X) else ROWS_AHEAD_OF_L1
    keys, length = flat(o.chosen, start_of_chosen(o, b, kv)), o.kv_lengths[b]
    known = 0
    while known < min(n, o.chosen.shape[2] - x) and keys[x + known] < length:
        known += 1
    if is_in_one_piece(o):  # without divisions
        first, stride = keys_from(X, o, b, kv, 0)
        for r in range(known):
            starts[r] = first + keys[x + r] * stride
    else:
        for r in range(known):
            page, at = key_at(o, b, key_number(o, b, kv, x + r))
            starts[r] = start_of(X, page, kv, at)
    for r in range(known, n):
        starts[r] = starts[known - 1]


@jit_inline
def is_far(X):
    """Return whether X is too large to stay in the CPU's caches."""
    return X.size * X.itemsize >= CACHED


def write_numbers(X, x, to, start, n, o):
    """Copy n numbers from X[x:] to ``to[start:]``, rounded if ``to`` has 16-bit numbers."""


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
    """Return whether the decode kernel reads X directly; only float16 is widened first."""


@overload(is_read_in_place, jit_options=OPTIONS)
def _is_read_in_place(X, o):
    if X.dtype != types.uint16:
        return lambda X, o: True
    return lambda X, o: o.is_bfloat16


def float_rows(X, b, h, i, n, o, copy):
    """Return n rows of X[b, h] from row i on as floats, as a view or widened into ``copy``."""


@overload(float_rows, jit_options=OPTIONS)
def _float_rows(X, b, h, i, n, o, copy):
    if isinstance(X.dtype, types.Float):
        return lambda X, b, h, i, n, o, copy: rows_at(X, b, h, i)

    def widen(X, b, h, i, n, o, copy):
        D, rows = X.shape[3], rows_at(X, b, h, i)
        for r in range(n):
            _widen(flat(rows.line, r * rows.stride), flat(copy, r * D), D, o)
        return Rows(copy, 0, D)

    return widen


def float_keys(X, starts, n, o, copy):
    """Return n rows of X at offsets ``starts`` as floats, as a view or copied into ``copy``.

    Rows are copied if their numbers have 16 bits, or if they have no constant stride. Their offsets
    in ``copy`` are then written to ``starts``.
    """


@overload(float_keys, jit_options=OPTIONS)
def _float_keys(X, starts, n, o, copy):
    if isinstance(X.dtype, types.Float):

        def view(X, starts, n, o, copy):
            if not o.chosen.size:
                return Rows(flat(X, 0), starts[0], starts[1] - starts[0])
            D = X.shape[3]
            for r in range(n):
                numbers, copies = flat(X, starts[r]), flat(copy, r * D)
                for d in range(D):
                    copies[d] = numbers[d]
                starts[r] = r * D
            for r in range(n, n + ROWS_AHEAD_OF_L1):
                starts[r] = 0
            return Rows(copy, 0, D)

        return view

    def widen(X, starts, n, o, copy):
        D = X.shape[3]
        is_scattered = not is_in_one_piece(o) or o.chosen.size > 0
        is_late = is_far(X) and (D >= WIDE or is_scattered)  # the CPU's own prefetching
        for r in range(n):
            for d in range(0, D if is_late else 0, LINE // 2):
                prefetch_to_L2(X, starts[r + ROWS_AHEAD] + d)
            _widen(flat(X, starts[r]), flat(copy, r * D), D, o)
            starts[r] = r * D
        for r in range(n, n + ROWS_AHEAD_OF_L1):
            starts[r] = 0
        return Rows(copy, 0, D)

    return widen


def _widen(stored, wide, n, o):
    """Widen n 16-bit or 8-bit numbers to floats."""


@overload(_widen, jit_options=OPTIONS)
def _widened(stored, wide, n, o):
    if stored.dtype == types.int8:

        def of_int8s(stored, wide, n, o):
            for x in range(n):
                wide[x] = stored[x]

        return of_int8s
    if stored.dtype == types.uint8:

        def of_float8s(stored, wide, n, o):
            for x in range(n):
                wide[x] = of_float8(stored[x])

        return of_float8s

    def of_halves(stored, wide, n, o):
        if o.is_bfloat16:
            for x in range(n):
                wide[x] = of_bfloat16(stored[x])
        else:
            for x in range(n):
                wide[x] = of_float16(stored[x])

    return of_halves


def scaled_rows(X, scales, b, h, i, n, o, copy):
    """Return ``float_rows``, and multiply 8-bit rows by their ``scales`` (B, Hkv, Lk)."""


def _unit(X):
    """Return the factor of the numbers that are read from an array of numba type ``X``."""
    return UNIT_OF_FLOAT8 if X.dtype == types.uint8 else np.float32(1)


@overload(scaled_rows, jit_options=OPTIONS)
def _scaled_rows(X, scales, b, h, i, n, o, copy):
    if X.dtype not in BYTES:
        return lambda X, scales, b, h, i, n, o, copy: float_rows(X, b, h, i, n, o, copy)

    unit = _unit(X)

    def scale(X, scales, b, h, i, n, o, copy):
        D, rows = X.shape[3], float_rows(X, b, h, i, n, o, copy)
        for r in range(n):
            row, factor = flat(copy, r * D), scales[b, h, i + r] * unit
            for d in range(D):
                row[d] *= factor
        return rows

    return scale


def scale_columns(X, scales, S, o, b, kv, j, n):
    """Multiply the first n columns of S by the ``scales`` of n keys of X from key j on, if any.

    If queries picked keys, j counts only these.
    """


@overload(scale_columns, jit_options=OPTIONS)
def _scale_columns(X, scales, S, o, b, kv, j, n):
    if X.dtype not in BYTES:
        return lambda X, scales, S, o, b, kv, j, n: None

    unit = _unit(X)

    def scale(X, scales, S, o, b, kv, j, n):
        x, is_line = 0, scales.strides[2] == scales.itemsize
        while x < n:
            key = key_number(o, b, kv, j + x)
            page, at = key_at(o, b, key)
            run = 1 if o.chosen.size else min(n - x, keys_ahead(o, key))
            for r in range(S.shape[0]):
                row = flat(S, r * S.shape[1] + x)
                if is_line:
                    factors = flat(scales, start_of(scales, page, kv, at))
                    for c in range(run):
                        row[c] *= factors[c] * unit
                else:
                    for c in range(run):
                        row[c] *= scales[page, kv, at + c] * unit
            x += run

    return scale
