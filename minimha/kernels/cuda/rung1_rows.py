"""CUDA rung 1, rows: one query per thread, one key at a time, with the online softmax.

This is CPU rung 1 with its loops over b, h and i turned into threads: Algorithm 1 with blocks of
one row and one key. A thread keeps its maximum m, its sum l and its output O_i in registers and
visits the keys that its query may see.

What makes it slow: neighbouring threads visit the same keys, but each thread reads all keys, and
its query once per key, from global memory. Each key waits for the exponential of the previous key.

A thread has 255 registers, too few for a wide O_i. It keeps a part of at most ``WIDE`` bytes; other
threads keep the other parts and recompute the same scores. From rung 3 on the threads of a row
share its scores.

Launch: one query per thread, in blocks of ``THREADS``. The grid has all B · H · Lq queries along x
and the parts of O_i along y.

Measured: 0.7 TFLOP/s (4 × 4 heads, 1024 tokens, width 64, float32; H200, 2026-11-26).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import cuda

from minimha.equations.problem import Problem
from minimha.kernels.cuda import functions
from minimha.kernels.cuda.arguments import Arrays, array_types, in_parts, refused
from minimha.kernels.cuda.functions import KEPT, DeviceFunction
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts.mask import final_score, head_of, is_hidden, key_range

THREADS = 128
WIDE = 256


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    return refused(problem)


def launches(problem: Problem, arguments: Arrays, scratch: Scratch) -> Launches:
    """Return the launch that computes ``problem``; it needs no scratch memory."""
    B, H, Lq, _ = problem.q.shape
    real: Any = problem.compute.type
    parts, columns = in_parts(problem.v.shape[3], WIDE // problem.compute.itemsize)
    grid = (-(-B * H * Lq // THREADS), parts, 1)
    function = kernel(columns, real, *functions.device_functions(problem))
    return [(Launch(function, array_types(problem), grid, THREADS), arguments)]


@lru_cache(KEPT)
def kernel(
    columns: int,
    real: Any,
    score_mod: DeviceFunction | None = None,
    mask_mod: DeviceFunction | None = None,
) -> Callable[..., None]:
    """Return the kernel for ``columns`` columns of O_i per thread, of the type ``real``."""
    lowest, size = real(-math.inf), max(columns, 1)  # an array cannot have size 0
    modified, is_pair_visible = functions.modifying(score_mod), functions.masking(mask_mod)
    is_modified, is_masked = score_mod is not None, mask_mod is not None

    def rows(q, k, v, mask, bias, o, O, L):
        H, Lq, D = q.shape[1], q.shape[2], q.shape[3]
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if row >= q.shape[0] * H * Lq:
            return
        i, h, b = row % Lq, row // Lq % H, row // Lq // H
        kv, head = h // (H // k.shape[1]), head_of(o, b, h)
        # The last part is as wide as the others and may overlap the previous one.
        first = min(cuda.blockIdx.y * columns, v.shape[3] - columns)
        O_i = cuda.local.array(size, real)
        for d in range(columns):
            O_i[d] = real(0)
        m = o.sinks[h]
        l = real(0) if m == lowest else real(1)
        start, stop = key_range(i, i + 1, head.offset, head.left, head.right, head.length)
        for j in range(start, stop):
            if is_hidden(mask, bias, b, h, i, j):
                continue
            if is_masked and not is_pair_visible(o, b, h, i + head.offset, j):
                continue
            s = real(0)
            for d in range(D):
                s += q[b, h, i, d] * k[b, kv, j, d]
            s = real(final_score(s, bias, head, b, h, i, j))  # line 8
            if is_modified:
                s = real(modified(s, o, b, h, i + head.offset, j))
                if s == lowest:
                    continue
            m_old = m
            if s > m:
                m = s
            shift = real(0) if m == lowest else m
            correction = math.exp(m_old - shift)  # line 9
            p = math.exp(s - shift)
            l = correction * l + p
            for d in range(columns):  # line 10
                O_i[d] = correction * O_i[d] + p * v[b, kv, j, first + d]
        for d in range(columns):  # line 12
            O[b, h, i, first + d] = O_i[d] / l if l != 0 else real(0)
        if cuda.blockIdx.y == 0:
            L[b, h, i] = m + math.log(l) if l != 0 else lowest  # line 13

    return rows
