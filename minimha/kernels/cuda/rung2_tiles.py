"""CUDA rung 2, tiles: each thread block shares tiles of keys and values in shared memory.

What changed from rung 1: the threads of a block copy keys and values into shared memory together,
then each thread reads them there for its query. A row is rescaled once per tile instead of once per
key.

Why it should be faster: keys and values are read once per block from global memory, not B_r times.
The B_c products of a tile do not wait for exponentials. Tiles in which no query of the block sees a
key are skipped. Full tiles, in which every query sees every key, are not masked.

    lines 3, 4   one thread block per row block i, one row per thread
    line 5       m, l and O_i: in the thread's registers
    lines 6, 7   all threads copy K_j and V_j (B_c rows) into shared memory
    lines 8-10   each thread for its row: B_c scores, then the softmax, then the values
    lines 12-15  each thread writes its row

A thread's registers hold at most ``WIDE`` bytes each of Q_i and of O_i. Wider queries and keys are
read one part at a time, each part adding its products to the scores of the tile. A wider O_i is
computed in parts, as in rung 1, and the scores are recomputed for every part.

Launch: a block has B_r = ``B_R`` threads, one per query, and reads B_c = ``B_C`` keys at a time.
The grid has all B · H · ⌈Lq / B_r⌉ row blocks along x and the parts of O_i along y.

Measured: 3.3 TFLOP/s, 4.8 × rung 1 (4 × 4 heads, 1024 tokens, width 64, float32; H200, 2026-11-26).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda

from minimha.equations.problem import Problem
from minimha.kernels.cuda import functions
from minimha.kernels.cuda.arguments import Arrays, array_types, in_parts, refused
from minimha.kernels.cuda.functions import KEPT, DeviceFunction
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts import mask as masks

B_R, B_C = 64, 32
WIDE = 256


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    return refused(problem)


def launches(problem: Problem, arguments: Arrays, scratch: Scratch) -> Launches:
    """Return the launch that computes ``problem``; it needs no scratch memory."""
    B, H, Lq, D = problem.q.shape
    real: Any = problem.compute.type
    widest = WIDE // problem.compute.itemsize
    _, depth = in_parts(D, widest)
    parts, columns = in_parts(problem.v.shape[3], widest)
    function = kernel(depth, columns, real, *functions.device_functions(problem))
    grid = (B * H * -(-Lq // B_R), parts, 1)
    return [(Launch(function, array_types(problem), grid, B_R), arguments)]


@lru_cache(KEPT)
def kernel(
    depth: int,
    columns: int,
    real: Any,
    score_mod: DeviceFunction | None = None,
    mask_mod: DeviceFunction | None = None,
) -> Callable[..., None]:
    """Return the kernel whose threads keep ``depth`` columns of Q_i and ``columns`` of O_i."""
    lowest, size = real(-math.inf), max(columns, 1)  # an array cannot have size 0
    modified, is_pair_visible = functions.modifying(score_mod), functions.masking(mask_mod)
    is_modified, is_masked = score_mod is not None, mask_mod is not None

    @device
    def copy_to_shared(r, X, b, h, j, n, first, width, X_j):
        """Copy ``width`` columns of n rows of X (Algorithm 1, line 7); columns beyond X are 0."""
        for x in range(r, n * width, B_R):
            row, d = x // width, x % width
            is_there = first + d < X.shape[3]
            X_j[row, d] = X[b, h, j + row, first + d] if is_there else real(0)

    def tiles(q, k, v, mask, bias, o, O, L):
        H, Lq, D = q.shape[1], q.shape[2], q.shape[3]
        K_j = cuda.shared.array((B_C, depth), real)
        V_j = cuda.shared.array((B_C, size), real)
        S = cuda.shared.array((B_C, B_R), real)  # each thread has a column for its scores
        Q_i = cuda.local.array(depth, real)
        O_i = cuda.local.array(size, real)
        row_blocks = (Lq + B_R - 1) // B_R
        # What lasts beyond a tile has 32 bits, which leaves registers for Q_i and O_i.
        r = np.int32(cuda.threadIdx.x)
        of_head, block = cuda.blockIdx.x // row_blocks, cuda.blockIdx.x % row_blocks
        i0, h, b = np.int32(block * B_R), np.int32(of_head % H), np.int32(of_head // H)
        i_stop = np.int32(min(i0 + B_R, Lq))
        i = np.int32(min(i0 + r, i_stop - 1))  # threads beyond the last row compute it too
        kv, head = np.int32(h // (H // k.shape[1])), masks.head_of(o, b, h)
        # The last part is as wide as the others and may overlap the previous one.
        first = np.int32(min(cuda.blockIdx.y * columns, v.shape[3] - columns))
        for d in range(columns):
            O_i[d] = real(0)
        m = o.sinks[h]  # line 5
        l = real(0) if m == lowest else real(1)
        start, stop = masks.key_range(i0, i_stop, head.offset, head.left, head.right, head.length)
        for j0 in range(start, stop, B_C):  # line 6
            n = np.int32(min(B_C, stop - j0))
            for j in range(n):
                S[j, r] = real(0)
            for d0 in range(0, D, depth):
                cuda.syncthreads()  # all have read K_j and V_j
                if d0 == 0:
                    copy_to_shared(r, v, b, kv, j0, n, first, columns, V_j)
                copy_to_shared(r, k, b, kv, j0, n, d0, depth, K_j)
                if j0 == start or depth < D:
                    for d in range(depth):  # line 4
                        Q_i[d] = q[b, h, i, d0 + d] if d0 + d < D else real(0)
                cuda.syncthreads()
                for j in range(n):  # line 8
                    s = real(0)
                    for d in range(depth):
                        s += Q_i[d] * K_j[j, d]
                    S[j, r] += s
            is_partial = not masks.is_full(
                i0, i_stop, j0, j0 + n, head.offset, head.left, head.right, head.length
            )
            m_old = m
            for j in range(n):
                s = lowest
                is_visible = not is_partial or masks.sees(
                    i, j0 + j, head.offset, head.left, head.right, head.length
                )
                if is_masked and is_visible:
                    is_visible = is_pair_visible(o, b, h, i + head.offset, j0 + j)
                if is_visible and not masks.is_hidden(mask, bias, b, h, i, j0 + j):
                    s = real(masks.final_score(S[j, r], bias, head, b, h, i, j0 + j))
                    if is_modified:
                        s = real(modified(s, o, b, h, i + head.offset, j0 + j))
                S[j, r] = s
                if s > m:
                    m = s
            shift = real(0) if m == lowest else m
            correction = math.exp(m_old - shift)  # line 9
            l *= correction
            for d in range(columns):
                O_i[d] *= correction
            for j in range(n):  # line 10
                if S[j, r] == lowest:
                    continue
                p = math.exp(S[j, r] - shift)
                l += p
                for d in range(columns):
                    O_i[d] += p * V_j[j, d]
        if i == i0 + r:
            for d in range(columns):  # line 12
                O[b, h, i, first + d] = O_i[d] / l if l != 0 else real(0)
            if cuda.blockIdx.y == 0:
                L[b, h, i] = m + math.log(l) if l != 0 else lowest  # line 13

    return tiles
