"""Multiply rows x by a matrix as a file stores it, y = x Wᵀ or x W, with W widened on the way.

A token costs what the weights weigh: decoding reads each number of W once, from memory, and uses it
once. So the fewer bytes a number takes there, the faster. Sums and rows x are float32 throughout.

- One or two rows of x: one row of W after the other, widened in registers, in the order in which
  memory delivers fastest. Rows side by side reach half of that rate. A row of x is summed group by
  group, because Q4_K and Q5_K add an offset to each number of a group. A CPU that multiplies
  integers of 8 bits does not widen quantised numbers for one row of x; see ``simd.digits``.
- Up to ``MANY`` rows: a few rows of W are widened into the L1 cache, and multiplied by groups of
  four or eight rows of x, with all sums in registers.
- More rows: a panel of W is widened into the L2 cache, and multiplied by register tiles. If W
  ``is_rounded``, and the CPU multiplies pairs of bfloat16 numbers, each number of x and W is
  rounded to one instead.
- More rows, with a matrix unit, which multiplies bfloat16 numbers: each number of x is split
  exactly into three bfloat16 parts. A number of W is split into one part (bfloat16), two (float16)
  or three (other formats). Products of parts below 2^-24 of the largest are left out. If W
  ``is_rounded``, there is one part of each.

GPT-2's files store W for x W. There a panel of W has some columns of successive rows, and register
tiles multiply it. Pieces of rows are read at less than half the rate of whole rows.

A task is 64 rows of W, or up to 256 for a matrix unit, which prefetches the next panel meanwhile.
There is one job per product, and before it one that packs many rows of x. Matrices that multiply
the same rows of x are one product, because waking a thread takes as long as reading 1 MB. A matrix
unit's nonfinite sums are computed again, one by one, because parts of infinity are NaN.

Measured with 1.1 billion numbers in bfloat16: a token takes 157 ms, three fifths of the rate at
which two threads read this memory; torch takes 142 ms in bfloat16. 128 tokens take 0.84 s, and
0.51 s if W ``is_rounded``; torch takes 1.14 s in float32, and 0.33 s in bfloat16 (two cores of an
Intel Xeon with AMX, which torch uses too; in turns, best of three, 2026-11-26). With pairs and
without a matrix unit, 128 tokens take 1.40 s, 0.79 s if W ``is_rounded``, and torch 1.81 s in
float32, 0.77 s in bfloat16. A token takes 50 to 68 ms, mostly 0.87 of the rate of reading, which
differs from minute to minute, and torch 137 to 166 ms (two cores of an AMD EPYC of generation
Zen 4, in turns, medians, 2026-11-29).
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.equations.stored import Stored
from minimha.kernels.cpu.arguments import CACHE_LINE, address
from minimha.kernels.cpu.compiler import ONCE, Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.kernel import CompilationFailed, give_back, memory_of
from minimha.kernels.cpu.pool import add, pool
from minimha.kernels.cpu.simd.digits import (
    MOST_BYTES,
    digit_product,
    digits_of,
    has_digits,
)
from minimha.kernels.cpu.simd.matrix_unit import (
    TILE,
    configure_tiles,
    is_usable,
    release_tiles,
    tile_column,
)
from minimha.kernels.cpu.simd.product import (
    row_tile_add,
    tile_product,
    tile_product_add,
    whole_tiles,
)
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.simd.vector import MULTIPLIES_PAIRS, REGISTERS, panel_width
from minimha.kernels.cpu.simd.weights import (
    IN_GROUP,
    SCALED,
    UNIT,
    UNITS,
    WIDTH,
    block_product,
    bytes_at,
    floats_at,
    halves_at,
    integers_at,
    prefetch_bytes,
    row_product,
    splitter,
    widener,
    words_at,
)
from minimha.kernels.cpu.threads import get_num_threads

__all__ = ["CompilationFailed", "compile", "is_ready", "is_stored", "product", "weights_of"]
Array = NDArray[Any]
CHUNK = 64  # rows of W in a task
DEPTH, SHALLOW = 512, 256  # numbers of a row of W in a panel, and in one for the matrix unit
MANY = 48  # rows of x from which on panels are faster
AT_ONCE = 384  # rows of x that are packed at once
STEP = 256  # numbers of a row of x in a task of packing
LANES = panel_width(4)  # rows of x in a panel of x
WORTH_SHARING = 1 << 17  # products; fewer are faster than waking a thread
LARGEST = 4  # chunks in a task for the matrix unit
TOGETHER = 6  # rows of W in the L1 cache
HAS_EIGHT = REGISTERS == 32  # whether eight rows of x fit into registers, beside three of W
TAIL = 256  # bytes for the end of a row
AHEAD = 8192  # bytes of W that are prefetched
# What a job does.
FEW, PACK, TILES, PACK_PAIRS, PAIR_TILES, MATRIX_UNIT, BY_ROWS = range(7)
PIECE, PIECE_OF_MANY, TALL = 1024, 192, 16  # most columns, and rows, of a panel of W for x W
FEW_ROWS = 4  # fewer rows of x are multiplied one by one for x W

# The kernel's arguments, a line of integers: addresses of W, its scales, starts of its rows, x,
# y, each thread's memory (and its size) and packed x; y's row in bytes, N, K, rows of x; what to
# do, whether in bfloat16, rows of W in a task; and the address of the number of tasks so far.
(
    DATA, SCALES, STARTS, X, Y, MEMORY, ROOM, SHARED, Y_ROW, OUTPUTS, INPUTS, ROWS, DOES,
    IS_REDUCED, TASK_ROWS, COUNTER,
) = range(16)  # fmt: skip
AT = 16 + CACHE_LINE // 8  # of the counter, on another cache line


@jit
def task_of(line):
    """Return the number of the next task."""
    return add(line[COUNTER], 1)


@jit_inline
def whole_units(number):
    """Return ``number``, rounded up to a multiple of ``UNIT``."""
    return -(-number // UNIT) * UNIT


tile_4 = block_product(TOGETHER if HAS_EIGHT else 2, 4)
tile_8 = block_product(3, 8)
STEP_4 = TOGETHER if HAS_EIGHT else 2
split_1, split_2, split_3 = map(splitter, (1, 2, 3))
# Four tiles below each other, so that a tile of x, from the L2 cache, is used four times.
column_1, column_2, column_3 = (tile_column(CHUNK // TILE, 1, parts) for parts in (1, 2, 3))


@jit
def multiply_widened(W, row, line, own, at, m):
    """Multiply ``TOGETHER`` widened rows of W by all rows of x, and store m numbers of each."""
    rows, units = line[ROWS], row // (4 * UNIT)
    x, C, y_row = line[X], floats_at(own), line[Y_ROW] // 4
    g = 0
    while g < rows:
        if HAS_EIGHT and rows - g > 4:
            for r in range(0, TOGETHER, 3):
                tile_8(W + r * row, row, x, own + 4 * r, 4 * TOGETHER, units)
            number = 8
        else:
            for r in range(0, TOGETHER, STEP_4):
                tile_4(W + r * row, row, x, own + 4 * r, 4 * TOGETHER, units)
            number = 4
        y = floats_at(at + g * line[Y_ROW])
        for i in range(min(number, rows - g)):
            for r in range(m):
                y[i * y_row + r] = C[i * TOGETHER + r]
        x += number * row
        g += number


@jit
def pack_lanes(line):
    """Transpose x into panels of ``LANES`` rows: numbers k of all rows side by side."""
    K, rows = line[INPUTS], line[ROWS]
    x, to = floats_at(line[X]), floats_at(line[SHARED])
    steps, lanes_all = -(-K // STEP), -(-rows // WIDTH) * WIDTH
    tasks = -(-lanes_all // LANES) * steps
    task = task_of(line)
    while task < tasks:
        first, k = task // steps * LANES, task % steps * STEP
        lanes = min(LANES, lanes_all - first)
        transpose(
            x, first * K + k, K, to, first * K + k * lanes, lanes, min(lanes, rows - first),
            min(STEP, K - k),
        )  # fmt: skip
        task = task_of(line)


@jit
def pack_pairs(line, worker):
    """Split x into bfloat16 parts, and transpose them by pairs of numbers."""
    K, rows, parts = line[INPUTS], line[ROWS], 1 if line[IS_REDUCED] else 3
    own, lanes, steps = line[MEMORY] + worker * line[ROOM], -(-rows // TILE) * TILE, -(-K // STEP)
    part = 2 * TILE * STEP
    pairs, to = floats_at(own), floats_at(line[SHARED])
    task = task_of(line)
    while task < lanes // TILE * steps:
        first, k = task // steps * TILE, task % steps * STEP
        depth = min(STEP, K - k)
        for r in range(TILE):
            x = line[X] + 4 * (min(first + r, rows - 1) * K + k)
            if parts == 3:
                split_3(x, own + 2 * STEP * r, part, depth // UNIT)
            else:
                split_1(x, own + 2 * STEP * r, part, depth // UNIT)
        for p in range(parts):
            transpose(
                pairs, p * part // 4, STEP // 2, to, (p * (K // 2) + k // 2) * lanes + first,
                lanes, TILE, depth // 2,
            )  # fmt: skip
        task = task_of(line)


@jit
def is_finite(C, first, number):
    """Return whether ``number`` numbers of C, from the first on, are all finite."""
    total = np.float32(0)
    for c in range(first, first + number):
        total += C[c] * np.float32(0)
    return total == 0


def function_of(name, has_matrix_unit):
    """Return the kernel's function for a format."""
    size, nbytes, _ = UNITS[name]
    one, two, widen = row_product(name, 1), row_product(name, 2), widener(name)
    is_plain, is_summed = name in ("float32", "float16", "bfloat16"), name in SCALED
    itemsize, is_bfloat16 = nbytes // size, name == "bfloat16"
    parts_of_W = {"bfloat16": 1, "float16": 2}.get(name, 3)

    @jit_inline
    def end_of_row(row, K, tail):
        """Copy the numbers of a row that fill no unit to ``tail``, with zeros behind."""
        source, to = bytes_at(row + K // size * nbytes), bytes_at(tail)
        number = K % size * itemsize
        for n in range(nbytes):
            to[n] = source[n] if n < number else 0

    @jit
    def row_by_one(row, scales, x, K, tail, ahead):
        """Return the product of a row of W and a row of x, padded to whole units.

        Formats in ``SCALED`` read the sums of groups of x behind ``tail``.
        """
        sums, room = tail + TAIL, tail + TAIL + 4 * (K // IN_GROUP)
        y = one(row, scales, x, sums, room, K // size, ahead)[0]
        if is_plain and K % size:
            end_of_row(row, K, tail)
            y += one(tail, 0, x + 4 * (K // size * size), 0, 0, 1, 0)[0]
        return y

    @jit_inline
    def sum_groups(x_at, K, tail):
        """Write the sums of groups of a row of x behind ``tail``."""
        x, to = floats_at(x_at), floats_at(tail + TAIL)
        for g in range(K // IN_GROUP):
            total = np.float32(0)
            for i in range(g * IN_GROUP, (g + 1) * IN_GROUP):
                total += x[i]
            to[g] = total

    @jit
    def widen_row(row, scales, first, depth, K, to, tail):
        """Widen the numbers of a row from ``first`` on, with zeros from K on."""
        number = min(depth, K - first)
        widen(row + first // size * nbytes, scales + first // size, to, number // size)
        if is_plain and number % size:
            end_of_row(row, K, tail)
            widen(tail, 0, to + 4 * (number // size * size), 1)

    def each_row(multiply):
        """Return the function that computes y for one row of x, with ``multiply`` per row of W."""

        @jit_inline
        def rows(line, worker):
            data, starts, K = line[DATA], integers_at(line[STARTS]), line[INPUTS]
            tail, y = line[MEMORY] + worker * line[ROOM], floats_at(line[Y])
            row = K // size * nbytes
            task = task_of(line)
            while task * CHUNK < line[OUTPUTS]:
                first, last = task * CHUNK, min(line[OUTPUTS], (task + 1) * CHUNK)
                task = task_of(line)  # known now, so that it is prefetched
                end = starts[last - 1] + row
                jump = starts[task * CHUNK] - end if task * CHUNK < line[OUTPUTS] else -AHEAD
                for n in range(first, last):
                    at = starts[n]
                    ahead = AHEAD if at + AHEAD < end else AHEAD + jump
                    scales = line[SCALES] + at // nbytes
                    y[n] = multiply(data + at, scales, line[X], K, tail, ahead)

        return rows

    widened_rows = each_row(row_by_one)

    @jit_inline
    def one_row(line, worker):
        if is_summed:
            sum_groups(line[X], line[INPUTS], line[MEMORY] + worker * line[ROOM])
        widened_rows(line, worker)

    multiply_one_row = one_row
    if has_digits(name):
        write_digits, of_digits = digits_of(name), digit_product(name)

        @jit_inline
        def row_by_digits(row, scales, x, K, tail, ahead):
            return of_digits(row, tail + TAIL, K // IN_GROUP, ahead)

        rows_by_digits = each_row(row_by_digits)

        @jit_inline
        def by_digits(line, worker):
            room = line[MEMORY] + worker * line[ROOM] + TAIL
            if write_digits(line[X], room, line[INPUTS] // IN_GROUP):
                rows_by_digits(line, worker)
            else:
                one_row(line, worker)

        multiply_one_row = by_digits

    @jit_inline
    def few_rows(line, worker):
        data, starts, K, rows = line[DATA], integers_at(line[STARTS]), line[INPUTS], line[ROWS]
        tail = line[MEMORY] + worker * line[ROOM]
        C, W, row = tail + TAIL, tail + TAIL + 4 * 8 * TOGETHER, 4 * whole_units(K)
        y, y_row = floats_at(line[Y]), line[Y_ROW] // 4
        task = task_of(line)
        while task * CHUNK < line[OUTPUTS]:
            first, last = task * CHUNK, min(line[OUTPUTS], (task + 1) * CHUNK)
            if rows == 2:
                for n in range(first, last):
                    at = starts[n]
                    start, scales = data + at, line[SCALES] + at // nbytes
                    a, b = two(start, scales, line[X], 0, 0, K // size, AHEAD)
                    if is_plain and K % size:
                        end_of_row(start, K, tail)
                        c, d = two(tail, 0, line[X] + 8 * (K // size * size), 0, 0, 1, 0)
                        a, b = a + c, b + d
                    y[n], y[y_row + n] = a, b
            else:
                for n in range(first, last, TOGETHER):
                    m = min(TOGETHER, last - n)
                    for r in range(m):
                        at = starts[n + r]
                        scales = line[SCALES] + at // nbytes
                        widen_row(data + at, scales, 0, row // 4, K, W + r * row, tail)
                    multiply_widened(W, row, line, C, line[Y] + 4 * n, m)
            task = task_of(line)

    @jit_inline
    def by_rows(line, worker):
        """Compute y = x W, of which each task is some columns."""
        data, starts, N, K = line[DATA], integers_at(line[STARTS]), line[OUTPUTS], line[INPUTS]
        tail, rows = line[MEMORY] + worker * line[ROOM], line[ROWS]
        ones = floats_at(tail + TAIL)
        W_at = tail + TAIL + 4 * LANES
        piece = line[TASK_ROWS]
        W, C = floats_at(W_at), floats_at(W_at + 4 * TALL * piece)
        x, y, y_row = floats_at(line[X]), floats_at(line[Y]), line[Y_ROW] // 4
        for i in range(LANES):
            ones[i] = 1
        task = task_of(line)
        while task * piece < N:
            first, columns = task * piece, min(piece, N - task * piece)
            for c in range(rows * piece):
                C[c] = 0
            for k in range(0, K, TALL):
                depth = min(TALL, K - k)
                for r in range(depth):
                    at = starts[k + r]
                    scales = line[SCALES] + at // nbytes
                    widen_row(data + at, scales, first, piece, N, W_at + 4 * r * piece, tail)
                for c in range(0, columns, LANES):
                    vectors = -(-min(LANES, columns - c) // WIDTH)
                    if rows < FEW_ROWS:
                        row_tile_add(
                            x, k, K, 1, W, c, piece, C, c, piece, ones, rows, vectors, depth
                        )
                    else:
                        tile_product_add(
                            x, k, K, 1, W, c, piece, C, c, piece, ones, rows, vectors, depth
                        )
            for i in range(rows):
                for c in range(columns):
                    y[i * y_row + first + c] = C[i * piece + c]
            task = task_of(line)

    @jit
    def pack_W(row, scales, k, depth, to, part, parts, wide):
        """Write numbers of a row of W as bfloat16 parts."""
        if is_bfloat16:
            source, target = halves_at(row + 2 * k), halves_at(to)
            for i in range(depth):
                target[i] = source[i]
        else:
            widen(row + k // size * nbytes, scales + k // size, wide, depth // size)
            if parts == 1:
                split_1(wide, to, part, depth // UNIT)
            elif parts == 2:
                split_2(wide, to, part, depth // UNIT)
            else:
                split_3(wide, to, part, depth // UNIT)

    def multiplier(is_paired):
        """Return a function for panels of W that are widened, or rounded to pairs."""
        together = 2 if is_paired else 1  # numbers in an item
        items_at = words_at if is_paired else floats_at

        @jit_inline
        def in_tiles(line, worker):
            data, starts, K, rows = line[DATA], integers_at(line[STARTS]), line[INPUTS], line[ROWS]
            tail = line[MEMORY] + worker * line[ROOM]
            lanes_all, padded = -(-rows // WIDTH) * WIDTH, whole_units(K)
            ones = floats_at(tail + TAIL)
            A_at = tail + TAIL + 4 * LANES
            wide = A_at + 2 * CHUNK * DEPTH  # behind A, if that has pairs
            A, C = items_at(A_at), floats_at(A_at + 4 * CHUNK * DEPTH)
            x, y, y_row = items_at(line[SHARED]), floats_at(line[Y]), line[Y_ROW] // 4
            for i in range(LANES):
                ones[i] = 1
            panels, piece = -(-lanes_all // LANES), DEPTH // size * nbytes
            task = task_of(line)
            while task * CHUNK < line[OUTPUTS]:
                n, following = task * CHUNK, task_of(line)
                m = min(CHUNK, line[OUTPUTS] - n)
                for k in range(0, padded, DEPTH):
                    depth = min(DEPTH, padded - k)
                    for r in range(m):
                        at = starts[n + r]
                        scales, to = line[SCALES] + at // nbytes, A_at + 4 // together * r * DEPTH
                        if is_paired:
                            pack_W(data + at, scales, k, depth, to, 0, 1, wide)
                        else:
                            widen_row(data + at, scales, k, depth, K, to, tail)
                    items, A_row = depth // together, DEPTH // together
                    ahead, next_k = n, k + DEPTH  # is prefetched meanwhile
                    if next_k >= padded:
                        ahead, next_k = following * CHUNK, 0
                    left = min(CHUNK, line[OUTPUTS] - ahead)
                    share = -(-left // panels)
                    for first in range(0, lanes_all, LANES):
                        for _ in range(min(share, left)):
                            left -= 1
                            at = data + starts[ahead + left] + next_k // size * nbytes
                            prefetch_bytes(at, piece)
                        lanes = min(LANES, lanes_all - first)
                        b, b_k = first * padded + k * lanes, lanes
                        if is_paired:
                            b, b_k = k // 2 * lanes_all + first, lanes_all
                        c, vectors = first * CHUNK, lanes // WIDTH
                        if k == 0:
                            tile_product(
                                A, 0, A_row, 1, x, b, b_k, C, c, lanes, ones, m, vectors, items
                            )
                        else:
                            tile_product_add(
                                A, 0, A_row, 1, x, b, b_k, C, c, lanes, ones, m, vectors, items
                            )
                for first in range(0, lanes_all, LANES):
                    lanes = min(LANES, lanes_all - first)
                    number = min(lanes, rows - first)
                    transpose(C, first * CHUNK, lanes, y, first * y_row + n, y_row, m, number)
                task = following

        return in_tiles

    in_tiles = multiplier(is_paired=False)
    # Without such pairs this is the function above; no job calls it then.
    in_pair_tiles = multiplier(is_paired=True) if MULTIPLIES_PAIRS else in_tiles

    @jit_inline
    def in_matrix_unit(line, worker):
        data, starts, K, rows = line[DATA], integers_at(line[STARTS]), line[INPUTS], line[ROWS]
        tail, N, chunk = line[MEMORY] + worker * line[ROOM], line[OUTPUTS], line[TASK_ROWS]
        lanes, parts = -(-rows // TILE) * TILE, 1 if line[IS_REDUCED] else parts_of_W
        a_part, b_part = chunk * SHALLOW, K // 2 * lanes
        wide = tail + TAIL
        A_at = wide + 4 * SHALLOW
        A, C = halves_at(A_at), floats_at(A_at + 2 * parts_of_W * a_part)
        x, y, y_row = floats_at(line[SHARED]), floats_at(line[Y]), line[Y_ROW] // 4
        configure_tiles()
        task = task_of(line)
        while task * chunk < N:
            n, following = task * chunk, task_of(line)
            m = min(chunk, N - n)
            for k in range(0, K, SHALLOW):
                depth = min(SHALLOW, K - k)
                for r in range(m):
                    at = starts[n + r]
                    pack_W(
                        data + at, line[SCALES] + at // nbytes, k, depth, A_at + 2 * r * SHALLOW,
                        2 * a_part, parts, wide,
                    )  # fmt: skip
                ahead, next_k = n, k + SHALLOW  # is prefetched meanwhile
                if next_k >= K:
                    ahead, next_k = following * chunk, 0
                left, piece = min(chunk, N - ahead), SHALLOW // size * nbytes
                share = -(-left * TILE * CHUNK // (m * lanes)) + 1
                for r in range(0, m, CHUNK):
                    for c in range(0, lanes, TILE):
                        for _ in range(min(share, left)):
                            left -= 1
                            at = data + starts[ahead + left] + next_k // size * nbytes
                            prefetch_bytes(at, piece)
                        a, b, to = r * SHALLOW, k // 2 * lanes + c, r * lanes + c
                        if line[IS_REDUCED]:
                            column_1(A, a, SHALLOW, 0, x, b, lanes, 0, C, to, lanes, depth, k > 0)
                        else:
                            column_3(
                                A, a, SHALLOW, 0, x, b, lanes, b_part, C, to, lanes, depth, k > 0
                            )
                            if parts_of_W > 1:
                                a += a_part
                                column_2(
                                    A, a, SHALLOW, 0, x, b, lanes, b_part, C, to, lanes, depth,
                                    True,
                                )  # fmt: skip
                            if parts_of_W > 2:
                                a += a_part
                                column_1(
                                    A, a, SHALLOW, 0, x, b, lanes, 0, C, to, lanes, depth, True
                                )
            transpose(C, 0, lanes, y, n, y_row, m, rows)
            for r in range(m):
                if not is_finite(C, r * lanes, rows):
                    at = starts[n + r]
                    scales = line[SCALES] + at // nbytes
                    for g in range(rows):
                        if not is_finite(C, r * lanes + g, 1):
                            own = line[X] + 4 * g * K
                            if is_summed:
                                sum_groups(own, K, tail)
                            sum_of_one = row_by_one(data + at, scales, own, K, tail, 0)
                            y[g * y_row + n + r] = sum_of_one
            task = following
        release_tiles()

    def weights(line, worker):
        if line[DOES] == FEW and line[ROWS] == 1:
            multiply_one_row(line, worker)
        elif line[DOES] == FEW:
            few_rows(line, worker)
        elif line[DOES] == PACK:
            pack_lanes(line)
        elif line[DOES] == PACK_PAIRS:
            pack_pairs(line, worker)
        elif MULTIPLIES_PAIRS and line[DOES] == PAIR_TILES:
            in_pair_tiles(line, worker)
        elif line[DOES] == BY_ROWS:
            by_rows(line, worker)
        else:
            in_tiles(line, worker)

    def weights_in_matrix_unit(line, worker):
        if line[DOES] == MATRIX_UNIT:
            in_matrix_unit(line, worker)
        else:
            weights_part(line, worker)

    weights_part = jit_inline(weights)
    return weights_in_matrix_unit if has_matrix_unit else weights


SIGNATURE = types.void(types.CPointer(types.int64), types.int64)
_compiled: dict[str, Compiled] = {}


def file_of(name: str) -> File:
    """Return the file of the machine code for a format."""
    unit = "matrix" if is_usable() else "vector"
    return File(f"weights-{name}-{unit}", str(SIGNATURE))


def compile(name: str) -> Compiled:
    """Load or compile the code for a format; log a compilation."""
    if name not in _compiled:
        try:
            function = function_of(name, is_usable())
            _compiled[name] = compiled(function, SIGNATURE, file_of(name), ONCE)
        except Exception as error:  # numba and LLVM raise errors of many types
            raise CompilationFailed(f"weights-{name} cannot be compiled here: {error}") from error
    return _compiled[name]


def is_ready(name: str) -> bool:
    """Return whether this process has compiled the kernel for a format."""
    return name in _compiled


def is_stored(name: str) -> bool:
    """Return whether the kernel for a format is on disk."""
    return file_of(name).read() is not None


class Weights(NamedTuple):
    """Where the stored rows of one matrix or of several are, and how many numbers each row has.

    Starts of rows count from ``address``. ``held`` keeps the memory alive. If ``is_by_rows``, x
    multiplies these rows, and otherwise their transpose. Memory delivers rows fastest in the order
    in which they are stored. If ``starts`` has them in that order and the matrix in another,
    ``columns_of`` has the number of each of its columns in ``starts``.
    """

    name: str
    address: int
    starts: NDArray[np.int64]
    columns: int
    scales: NDArray[Any] | None
    is_by_rows: bool
    is_rounded: bool
    held: Any
    columns_of: NDArray[np.intp] | None = None


def weights_of(W: Stored | Array, *others: Stored | Array) -> Weights:
    """Return the rows of the matrix ``W`` (K, N), stored or float32 by columns.

    The rows of ``others`` follow, in the same format and without scales in another array, so that
    one product computes the columns of all.
    """
    if isinstance(W, Stored):
        first = Weights(
            W.format, address(W.data), W.starts, W.columns, W.scales, not W.is_transposed,
            W.is_rounded, W.data,
        )  # fmt: skip
    else:
        starts = _starts(W.shape[1], W.strides[1])
        first = Weights("float32", address(W), starts, W.shape[0], None, False, False, W)
    if not others:
        return first
    every = [first, *map(weights_of, others)]
    starts = np.concatenate([each.starts + (each.address - first.address) for each in every])
    held, stored = [each.held for each in every], np.argsort(starts)
    if (stored[1:] > stored[:-1]).all():
        return first._replace(starts=starts, held=held)
    return first._replace(starts=starts[stored], held=held, columns_of=np.argsort(stored))


@lru_cache(64)
def _starts(rows: int, stride: int) -> NDArray[np.int64]:
    return np.arange(rows, dtype=np.int64) * stride


def product(x: Array, W: Stored | Array | Weights, has_matrix_unit: bool | None = None) -> Array:
    """Return x (n, K), float32, times the matrix ``W`` (K, N), as float32 (n, N)."""
    weights = W if isinstance(W, Weights) else weights_of(W)
    y = _product(x, weights, has_matrix_unit)
    return y if weights.columns_of is None else y[:, weights.columns_of]


def _product(x: Array, weights: Weights, has_matrix_unit: bool | None) -> Array:
    """Return the product, with columns in the order of ``weights.starts``."""
    size, is_reduced = UNITS[weights.name][0], weights.is_rounded
    kernel = compile(weights.name)
    n, columns = x.shape
    N = weights.columns if weights.is_by_rows else len(weights.starts)
    y = np.empty((n, N), np.float32)
    if not y.size:
        return y
    if weights.is_by_rows:
        x = np.ascontiguousarray(x)
        for first in range(0, n, AT_ONCE):
            some, to = x[first : first + AT_ONCE], y[first : first + AT_ONCE]
            _run(kernel, weights, some, to, BY_ROWS, None, is_reduced)
        return y
    padded = -(-columns // UNIT) * UNIT
    if padded != columns:
        x, given = np.zeros((n, padded), np.float32), x
        x[:, :columns] = given
    x = np.ascontiguousarray(x)
    if n <= MANY:
        _run(kernel, weights, _packed(x, size), y, FEW, None, is_reduced)
        return y
    in_unit = (is_usable() if has_matrix_unit is None else has_matrix_unit) and padded == columns
    jobs, itemsize = (PACK, TILES), 4  # of packed x, with all parts
    if in_unit:
        jobs, itemsize = (PACK_PAIRS, MATRIX_UNIT), 2 if is_reduced else 6
    elif is_reduced and MULTIPLIES_PAIRS and padded == columns:
        jobs, itemsize = (PACK_PAIRS, PAIR_TILES), 2
    for first in range(0, n, AT_ONCE):
        some, to = x[first : first + AT_ONCE], y[first : first + AT_ONCE]
        shared = memory_of(itemsize * padded * -(-len(some) // TILE) * TILE)
        for job in jobs:
            _run(kernel, weights, some, to, job, shared, is_reduced)
        give_back(shared)
    return y


def _packed(x: Array, size: int) -> Array:
    """Pack groups of rows of x: a unit of each, side by side."""
    n, columns = x.shape
    if n == 1:
        return x
    if n == 2:
        return np.ascontiguousarray(x.reshape(2, -1, size).swapaxes(0, 1))
    groups, first = [], 0
    while first < n:
        number = 8 if HAS_EIGHT and n - first > 4 else 4
        some = x[first : first + number]
        if len(some) < number:
            some = np.concatenate([some, np.zeros((number - len(some), columns), np.float32)])
        groups.append(some.reshape(number, -1, UNIT).swapaxes(0, 1).ravel())
        first += number
    return np.concatenate(groups)


class Job(NamedTuple):
    """A product that is ready to run: the kernel, its line, and the number of threads.

    Before each run, the integer at address ``line[COUNTER]`` must be 0. ``held`` has what must
    stay alive.
    """

    kernel: Compiled
    line: array[int]
    workers: int
    held: Any


def job_of_row(weights: Weights, x: Array, y: Array) -> Job:
    """Return the job that computes y (1, N), in the order of ``weights.starts``, of one row.

    x is (1, K), contiguous, followed by zeros up to whole units.
    """
    does = BY_ROWS if weights.is_by_rows else FEW
    return _job(compile(weights.name), weights, x, y, does, None, weights.is_rounded)


def _job(
    kernel: Compiled, W: Weights, x: Array, y: Array, job: int, shared: Any, is_reduced: bool
) -> Job:
    """Return a job that does ``job``, with as many threads as it is worth."""
    N, rows = y.shape[1], len(y)
    K = x.shape[1] if job in (PACK, PACK_PAIRS, BY_ROWS) else W.columns
    workers = get_num_threads() if N * K * rows >= WORTH_SHARING else 1
    chunk, lanes = CHUNK, -(-rows // LANES) * LANES
    if job == FEW:
        room = TAIL + (
            MOST_BYTES * (K + 64) if rows <= 2 else 4 * TOGETHER * (8 + -(-K // UNIT) * UNIT)
        )
    elif job == BY_ROWS:
        most, unit = PIECE if rows < FEW_ROWS else PIECE_OF_MANY, max(UNIT, UNITS[W.name][0])
        tasks = workers * -(-N // (most * workers))  # of equal size
        chunk = -(-N // (tasks * unit)) * unit
        room = TAIL + 4 * (LANES + chunk * (TALL + whole_tiles(rows)))
    elif job == MATRIX_UNIT:  # a large task reads x less often
        chunk *= max(1, min(LARGEST, N // (2 * workers * CHUNK)))
        room = TAIL + 4 * SHALLOW + 6 * chunk * SHALLOW + 4 * chunk * lanes
    else:
        room = TAIL + 4 * (LANES + CHUNK * DEPTH + CHUNK * lanes)
    room, workers = -(-room // 4096) * 4096, min(workers, -(-N // chunk))
    memory = memory_of(room * workers)
    line = array("q", bytes(8 * (AT + 1)))
    line[:COUNTER] = array("q", (
        W.address, 0 if W.scales is None else address(W.scales), address(W.starts),
        address(x), address(y), address(memory), room, 0 if shared is None else address(shared),
        y.strides[0], N, K, rows, job, is_reduced, chunk,
    ))  # fmt: skip
    at, _ = line.buffer_info()
    line[COUNTER] = at + 8 * AT
    return Job(kernel, line, workers, memory)


def _run(*given: Any) -> None:
    """Do the job that ``_job`` returns for the same arguments."""
    kernel, line, workers, memory = _job(*given)
    at, _ = line.buffer_info()
    if workers == 1:
        kernel.call(at, 0)
    else:
        pool().run(kernel.address, at, workers)
    give_back(memory)
