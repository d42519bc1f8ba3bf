"""Keep NaN and infinity among the values out of rows that cannot see them.

A hidden key has the weight 0, and 0 · NaN is NaN. So a product with all values of a tile would
spoil rows that do not see the nonfinite value. In tiles that only some rows see, such a value
becomes 0, and is added separately to the rows that see its key.
"""

import math
from typing import Any

import numpy as np
from numba import cuda, float32, types, uint32, uint64

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device, fragments
from minimha.kernels.cuda.parts.fragments import MmaTiles, offset_in_tile
from minimha.kernels.cuda.parts.mask import ScoreOptions, query_options, score_query
from minimha.kernels.cuda.parts.online_softmax import LOWEST
from minimha.kernels.cuda.parts.register_tiles import RegisterTiles
from minimha.kernels.cuda.parts.rows import SHARED_F32, load_row

# ---- weights and values in shared memory: rung 3


def add_nonfinite_values(tiles: RegisterTiles) -> Any:
    """Return a device function that adds P_ij V_j to O, but skips hidden keys.

    This is line 10 of Algorithm 1.
    A hidden key is marked by the weight -0; visible keys have positive weights or +0.
    """
    width, rows, B_c, own = tiles.width, tiles.rows, tiles.B_c, tiles.own
    row_step, weights_row = tiles.row_step, tiles.weights_row
    load = load_row(own, tiles.columns, SHARED_F32)

    @device
    def add_values(P_at, V_j, column, O):
        V = cuda.local.array(own, float32)
        for j in range(B_c):
            load(V_j + 4 * j * width, column, V, 0)
            for i in range(rows):
                p = ptx.ld_shared_f32(P_at + 4 * (j + i * row_step * weights_row))
                if math.copysign(float32(1), p) > 0:
                    for x in range(own):
                        O[i, x] += p * V[x]

    return add_values


# ---- two 16-bit numbers in a register: rungs 4 and 5


def nonfinite_in(dtype: str) -> Any:
    """Return a device function that finds NaN and infinity among a word's two 16-bit numbers.

    It returns a word in which bit 15 is 1 if the lower number is nonfinite, bit 31 if the upper
    one is, and all other bits are 0. A nonfinite number has an exponent of ones, so adding 1 to the
    exponent carries into that bit.
    """
    infinity = fragments.FORMATS[dtype].infinity
    exponents, lowest = infinity << 16 | infinity, (0x8000 - infinity) << 16 | 0x8000 - infinity

    @device
    def nonfinite(word):
        return uint32((word & uint32(exponents)) + uint32(lowest)) & uint32(0x80008000)

    return nonfinite


def zero_nonfinite_in(dtype: str) -> Any:
    """Return a device function that replaces each nonfinite 16-bit half of a word by 0."""
    nonfinite = nonfinite_in(dtype)

    @device
    def zero_nonfinite(word):
        return word & ~uint32((nonfinite(word) >> uint32(15)) * uint32(0xFFFF))

    return zero_nonfinite


# ---- a tile of values in shared memory, multiplied by ``mma``: rung 4


def has_nonfinite_tile(tiles: MmaTiles) -> Any:
    """Return a device function that finds nonfinite values which thread t copied to the tile V_j.

    It returns 0 if there are none, else another number.
    """
    B_c, chunks, at_once = tiles.B_c, tiles.chunks, tiles.rows_at_once
    copies, nonfinite = fragments.is_copied(tiles), nonfinite_in(tiles.dtype)
    own = fragments.row_and_chunk(tiles)

    @device
    def has_nonfinite(t, V_j):
        found = uint32(0)
        first, chunk = own(t)
        for r in range(-(-B_c // at_once)):
            row = first + r * at_once
            if copies(t, row, B_c):
                a, b, c, d = ptx.ld_shared_v4_u32(V_j + offset_in_tile(row, chunk, chunks))
                found |= nonfinite(a) | nonfinite(b) | nonfinite(c) | nonfinite(d)
        return found

    return has_nonfinite


def zero_nonfinite_tile(tiles: MmaTiles) -> Any:
    """Return a device function that zeroes the nonfinite values that thread t copied to V_j."""
    B_c, chunks, at_once = tiles.B_c, tiles.chunks, tiles.rows_at_once
    copies, zeroed = fragments.is_copied(tiles), zero_nonfinite_in(tiles.dtype)
    own = fragments.row_and_chunk(tiles)

    @device
    def zero_nonfinite(t, V_j):
        first, chunk = own(t)
        for r in range(-(-B_c // at_once)):
            row = first + r * at_once
            if copies(t, row, B_c):
                place = V_j + offset_in_tile(row, chunk, chunks)
                a, b, c, d = ptx.ld_shared_v4_u32(place)
                ptx.st_shared_v4_u32(place, zeroed(a), zeroed(b), zeroed(c), zeroed(d))

    return zero_nonfinite


def mark_nonfinite_tile(tiles: MmaTiles) -> Any:
    """Return a device function that stores, in O, which rows see an infinity or NaN.

    The argument ``sign`` is 0 for +inf and 0x8000 for -inf. If a row sees that infinity or NaN in a
    column, that infinity is stored as a mark in this column of the row. So NaN leaves both marks,
    whose sum is NaN. To find what a row sees, ``mma`` multiplies the bits of ``visible`` by 0/1
    flags of the values; the sum counts exactly. Marks are in the output's memory, and each is
    written and read by one thread. If ``has_marks``, new marks are added to earlier ones.
    """
    M, N, chunks, stored = tiles.M, tiles.N, tiles.chunks, tiles.stored
    infinity, one, pack, _, mma = fragments.FORMATS[tiles.dtype]
    place, halves = fragments.lane_and_row(tiles), fragments.widen(tiles.dtype)

    @device
    def flag(half, sign):
        """Return 1 for NaN and for the infinity with sign bit ``sign``, else 0, in 16 bits."""
        is_one = (half & 0x7FFF) > infinity or half ^ sign == infinity
        return one if is_one else 0

    @device
    def flags(word, sign):
        return flag(word & 0xFFFF, sign) | (flag(word >> 16, sign) << 16)

    @device
    def mark_nonfinite(t, V_j, visible, sign, has_marks, O_at, row_bytes, rows):
        A = cuda.local.array(4, types.uint32)
        B = cuda.local.array(4, types.uint32)
        C = cuda.local.array(8, types.float32)
        infinite = np.float32(-math.inf if sign else math.inf)
        for i in range(M):
            for d in range(0, chunks, 2):
                lane, first_row = place(t)
                bits = visible[0] if i == 0 else visible[M - 1]
                for e in range(8):
                    C[e] = 0
                for j in range(N // 2):
                    for a in range(4):
                        pair = bits >> (8 * j + 2 * a)
                        A[a] = (pair & 1) * one | (((pair >> 1) & 1) * one) << 16
                    key = 16 * j + (lane & 15)
                    ptx.ldmatrix_x4_trans(B, 0, V_j + offset_in_tile(key, d + (lane >> 4), chunks))
                    for e in range(4):
                        B[e] = flags(B[e], sign)
                    mma(C, 0, A, 0, B, 0)
                    mma(C, 4, A, 0, B, 2)
                for x in range(4):
                    row = first_row + 16 * i + 8 * (x % 2) + (lane >> 2)
                    column = 8 * (d + x // 2) + 2 * (lane & 3)
                    if row < rows and column < stored:
                        to = O_at + row * row_bytes + 2 * column
                        low = infinite if C[2 * x] > 0 else np.float32(0)
                        high = infinite if C[2 * x + 1] > 0 else np.float32(0)
                        if has_marks:
                            old_low, old_high = halves(ptx.ld_global_u32(to))
                            low += old_low
                            high += old_high
                        ptx.st_global_u32(to, pack(low, high))

    return mark_nonfinite


def add_nonfinite_marks(tiles: MmaTiles) -> Any:
    """Return a device function that adds to O_i the marks of ``mark_nonfinite_tile``."""
    M, chunks, stored = tiles.M, tiles.chunks, tiles.stored
    place, halves = fragments.lane_and_row(tiles), fragments.widen(tiles.dtype)

    @device
    def add_nonfinite(t, O, O_at, row_bytes, rows):
        lane, first_row = place(t)
        for i in range(M):
            for half in range(2):
                row = first_row + 16 * i + 8 * half + (lane >> 2)
                if row < rows:
                    for d in range(chunks):
                        column = 8 * d + 2 * (lane & 3)
                        if column < stored:
                            low, high = halves(
                                ptx.ld_global_u32(O_at + row * row_bytes + 2 * column)
                            )
                            O[4 * (i * chunks + d) + 2 * half] += low
                            O[4 * (i * chunks + d) + 2 * half + 1] += high

    return add_nonfinite


# ---- rows of O in global memory, at the end: rung 5


def add_nonfinite_rows(tiles: fragments.DecodeTiles, describe: Any, score: Any) -> Any:
    """Return a device function that adds nonfinite values to the rows of O that see them (rung 5).

    The warp reads the values of its keys, ``start`` to ``stop`` - 1, again. The factory's arguments
    are device functions: ``describe`` returns a row's ``QueryOptions``, and ``score`` returns -inf
    for a hidden key.
    """
    nonfinite, halves = nonfinite_in(tiles.dtype), fragments.widen(tiles.dtype)
    width, words = tiles.width, tiles.stored // 2

    @device
    def add(lane, V, V_row, start, stop, O_at, rows, here, mask, bias, o):
        for j in range(start, stop):
            for x in range(lane, words, 32):
                word = ptx.ld_global_nc_u32(V + uint64(j) * V_row + uint64(4) * uint64(x))
                found = nonfinite(word)
                if found != uint32(0):
                    low, high = halves(word)
                    for r in range(rows):
                        row = describe(r, here, mask, bias, o)
                        if score(float32(0), j, row, True, mask, bias, o) != LOWEST:
                            at = O_at + uint64(4 * width) * uint64(r) + uint64(8) * uint64(x)
                            if found & uint32(0x8000) != uint32(0):
                                ptx.st_global_f32(at, ptx.ld_global_f32(at) + low)
                            if found & uint32(0x80000000) != uint32(0):
                                at += uint64(4)
                                ptx.st_global_f32(at, ptx.ld_global_f32(at) + high)

    return add


# ---- rows of O in global memory, at the end: rung 6


def add_nonfinite_to_output(tiles: MmaTiles, options: ScoreOptions) -> Any:
    """Return a device function that adds nonfinite values to the rows of O that see them (rung 6).

    The warp reads the values of keys ``start`` to ``stop`` - 1 again. Its ``rows`` rows of O begin
    at query i, and its lanes have already stored them at ``O_at``.
    """
    words = tiles.stored // 2
    pack = fragments.FORMATS[tiles.dtype].pack
    nonfinite, halves = nonfinite_in(tiles.dtype), fragments.widen(tiles.dtype)
    hiding = options._replace(has_softcap=False, has_slopes=False)
    describe, score = query_options(hiding), score_query(hiding)

    @device
    def add(lane, V, V_row, start, stop, O_at, O_row, rows, b, h, i, mask, bias, o):
        for j in range(start, stop):
            for x in range(lane, words, 32):
                word = ptx.ld_global_nc_u32(V + j * V_row + 4 * x)
                found = nonfinite(word)
                if found:
                    low, high = halves(word)
                    low = low if found & uint32(0x8000) else float32(0)
                    high = high if found >> uint32(31) else float32(0)
                    for r in range(rows):
                        row = describe(b, h, i + r, mask, bias, o)
                        if score(float32(0), j, row, True, mask, bias, o) != LOWEST:
                            at = O_at + r * O_row + 4 * x
                            old_low, old_high = halves(ptx.ld_global_u32(at))
                            ptx.st_global_u32(at, pack(old_low + low, old_high + high))

    return add
