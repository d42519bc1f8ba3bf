"""CUDA rung 3, register tiles: each thread computes 8 × 8 scores at a time, float32.

What changed from rung 2: a number that is read from shared memory is used eight times, not once.
A thread reads four numbers each of 8 queries and 8 keys, 16 reads of 16 bytes, and multiplies 256
times. S_ij and O_i stay in registers. Only P_ij goes through shared memory, within a warp, and
overwrites K_j, which is no longer needed.

Why it should be faster: rung 2 is bound by reads of shared memory, this rung by multiply-adds.

Rows of Q_i and K_j are padded by four numbers: 8 lanes that read 16 bytes each of 8 successive rows
then use 32 different banks. Rows of P_ij are padded by a warp's number of columns.

Tiles in which no query of the block sees a key are skipped, and full tiles are not masked. In
partial tiles a hidden score is -inf and its weight -0. If a value is not finite, keys of weight -0
are left out, because 0 · NaN is NaN.

A caller's functions are called score by score, and no tile counts as full: a ``mask_mod`` may hide
any key, and so may a ``score_mod`` that returns -inf.

Dao, "FlashAttention-2", 2023, Algorithm 1, whose lines are named below.

Measured: 24 TFLOP/s in the same case, 7 × rung 2; 35 for 2 × 16 heads of 4096 tokens, as fast as
torch 2.11; 25 at width 128 (H200, 2026-11-26).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as kernel_arguments
from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.functions import KEPT, DeviceFunction, call_functions, device_functions
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts import online_softmax as softmax
from minimha.kernels.cuda.parts.mask import ScoreOptions, is_full, key_range, mask_registers
from minimha.kernels.cuda.parts.nonfinite import add_nonfinite_values
from minimha.kernels.cuda.parts.register_tiles import (
    RegisterTiles,
    copy_to_shared,
    fma_keys,
    fma_values,
)
from minimha.kernels.cuda.parts.rows import row_address, store_row

ROW_UNIT = 16  # bytes, of which rows in memory are a multiple: see ``row_width``
THREADS = 64
ROWS = 8  # rows of scores and of O per thread
LONGEST = 1 << 30  # no sequence is longer


class Variant(NamedTuple):
    """The constants for which a kernel is compiled.

    Rows have ``stored`` numbers in memory (``row_width``), and ``width`` numbers in registers.
    """

    width: int
    options: ScoreOptions
    stored: int


def tiles_of(width: int) -> RegisterTiles:
    """Return the tile sizes for rows of ``width`` numbers.

    S_ij and O_i fit into a thread's registers, and two thread blocks into a multiprocessor.
    """
    return RegisterTiles(width, 8 if width <= 128 else 16, ROWS, 64 if width <= 64 else 32, THREADS)


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    if problem.dtype != np.float32:
        return f"register tiles are made for float32, and q, k, v are {problem.dtype}"
    return kernel_arguments.refused(problem) or kernel_arguments.too_wide(problem)


def launches(problem: Problem, arguments: kernel_arguments.Arguments, scratch: Scratch) -> Launches:
    """Return the launch that computes ``problem``, or no launch if there is no query."""
    stored = kernel_arguments.row_width(problem, ROW_UNIT)
    kernel_arguments.check_alignment(arguments, stored, 4)
    B, H, Lq, _ = problem.q.shape
    if B * Lq == 0:
        return []
    width = kernel_arguments.padded_width(problem)
    tiles = tiles_of(width)
    made_for = Variant(width, ScoreOptions.of(problem), stored)
    function = kernel(made_for, *device_functions(problem))
    grid = (-(-Lq // tiles.B_r) * H * B, 1, 1)
    signature = kernel_arguments.address_types(problem)
    return [(Launch(function, signature, grid, THREADS, tiles.bytes), arguments)]


@lru_cache(KEPT)
def kernel(
    made_for: Variant,
    score_mod: DeviceFunction | None = None,
    mask_mod: DeviceFunction | None = None,
) -> Callable[..., None]:
    """Return the kernel for the constants ``made_for`` and a caller's functions, None if absent."""
    W, options, stored = made_for
    tiles = tiles_of(W)
    B_r, B_c, columns, row_step = tiles.B_r, tiles.B_c, tiles.columns, tiles.row_step
    keys, own, long_row, weights_row = tiles.keys, tiles.own, tiles.long_row, tiles.weights_row
    keys_or_weights = tiles.keys_or_weights
    functions = call_functions(score_mod, mask_mod) if score_mod or mask_mod else None
    changes_scores, hides_keys = options.change_scores, options.hide_keys or functions is not None
    copy_queries, copy = (copy_to_shared(tiles, rows, stored) for rows in (B_r, B_c))
    multiply_keys, multiply_values = fma_keys(tiles), fma_values(tiles)
    add_values = add_nonfinite_values(tiles)
    mask_tile = mask_registers(tiles, options, functions)
    update_softmax = softmax.update_registers(tiles)
    total, store = softmax.sum_over(*softmax.bits_of(columns)), store_row(own, columns, 1, stored)

    def register_tiles(q, k, v, mask, bias, o, O, L):
        t = cuda.threadIdx.x
        lane, warp = t % 32, t // 32
        row_blocks = int32((o.Lq + B_r - 1) // B_r)
        # The last queries of a causal problem see the most keys: their blocks start first.
        i_start = int32((row_blocks - 1 - cuda.blockIdx.x % row_blocks) * B_r)
        h = int32(cuda.blockIdx.x // row_blocks % o.H)
        b = int32(cuda.blockIdx.x // row_blocks // o.H)
        kv = int32(h // (o.H // o.Hkv))

        # Bounds relative to the index of a query, not to its position, fit into 32 bits.
        q_offset = ptx.ld_global_nc_s64(o.q_offset + 8 * b)
        left = int32(min(max(o.left - q_offset, -LONGEST), LONGEST))
        right = int32(min(max(o.right + q_offset, -LONGEST), LONGEST))
        length = int32(ptx.ld_global_nc_s64(o.kv_lengths + 8 * b))
        i_stop = int32(min(i_start + B_r, o.Lq))
        j_start, j_stop = key_range(i_start, i_stop, 0, left, right, length)
        j_start, j_stop = int32(min(j_start, length)), int32(max(j_stop, 0))

        my_row = warp * ROWS * row_step + lane // columns
        my_column = lane % columns
        row = i_start + my_row
        # 32 bits again, so that ptxas uses one register and constant offsets.
        Q_i = ptx.shared_address(cuda.shared.array(0, float32, alignment=16))
        K_j = uint32(Q_i + 4 * B_r * long_row)
        V_j = uint32(K_j + 4 * keys_or_weights)
        Q_at = uint32(Q_i + 4 * my_row * long_row)
        K_at = uint32(K_j + 4 * my_column * long_row)
        P_at = uint32(K_j + 4 * my_row * weights_row)
        K_from, V_from = row_address(k, b, kv, 0, 4), row_address(v, b, kv, 0, 4)

        S_ij = cuda.local.array((ROWS, keys), float32)
        O_i = cuda.local.array((ROWS, own), float32)
        m_i = cuda.local.array(ROWS, float32)
        l_i = cuda.local.array(ROWS, float32)
        for i in range(ROWS):  # line 5
            m_i[i], l_i[i] = softmax.LOWEST, 0
            for x in range(own):
                O_i[i, x] = 0
        if j_start < j_stop:
            Q_from = row_address(q, b, h, i_start, 4)
            copy_queries(t, Q_i, long_row, Q_from, q.row, i_stop - i_start)  # line 4
        for j in range(j_start, j_stop, int32(B_c)):  # line 6
            is_partial = hides_keys or not is_full(
                i_start, i_stop, j, j + B_c, 0, left, right, length
            )
            cuda.syncthreads()  # all have read P_ij and V_j
            copy(t, K_j, long_row, K_from + 4 * j * k.row, k.row, length - j)  # line 7
            found = copy(t, V_j, W, V_from + 4 * j * v.row, v.row, length - j)
            has_nonfinite = cuda.syncthreads_or(1 if found and is_partial else 0) != 0
            multiply_keys(Q_at, K_at, S_ij)
            for i in range(ROWS):
                for n in range(keys):
                    S_ij[i, n] *= o.scale
            if changes_scores or is_partial:
                column = j + my_column
                mask_tile(S_ij, mask, bias, o, b, h, row, column, left, right, length)
            cuda.syncthreads()  # all have read K_j
            update_softmax(S_ij, O_i, m_i, l_i, uint32(P_at + 4 * my_column))
            cuda.syncwarp()
            if has_nonfinite:
                add_values(P_at, V_j, my_column, O_i)
            else:
                multiply_values(P_at, V_j, my_column, O_i)

        sink = ptx.ld_global_nc_f32(o.sinks + 4 * h)
        for i in range(ROWS):  # lines 12 to 15
            r = row + i * row_step
            m, l, inverse = softmax.with_sink(m_i[i], total(l_i[i]), sink)
            if r < o.Lq:
                if my_column == 0:  # here ``lg2`` would be the largest error
                    ptx.st_global_f32(L + 4 * ((b * o.H + h) * o.Lq + r), m + math.log(l))
                for x in range(own):
                    O_i[i, x] *= inverse
                store(row_address(O, b, h, r, 4), my_column, O_i[i])

    return register_tiles
