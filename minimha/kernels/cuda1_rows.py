"""CUDA rung 1, rows: one thread a query, one key at a time, with the online softmax.

CPU rung 1 with its loops over b, h and i made threads: Algorithm 1 with blocks of one row and one
key. A thread keeps its query, its maximum m, its sum l and its output O to itself and walks the
keys that its query may see. Neighbouring threads walk the same keys, but each reads every one of
them from global memory on its own, and each key waits for the exponential of the one before it.

Launch: a thread a query, blocks of ``THREADS`` along x over all B · H · Lq queries.

Not measured: no GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda

from minimha.equations import visibility
from minimha.equations.problem import Problem
from minimha.kernels import one_score
from minimha.kernels.cuda_entry import Arrays, Launch, array_types

THREADS = 128
WIDEST = 4096  # two rows of a thread then take 64 KiB of its local memory in float64

device = cuda.jit(device=True, inline="always")
key_range = device(visibility.key_range)
head_of = device(one_score.head_of)
is_hidden = device(one_score.is_hidden)
final_score = device(one_score.final_score)


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``, or None."""
    D, Dv = problem.q.shape[3], problem.v.shape[3]
    if max(D, Dv) > WIDEST:
        return f"D={D} and Dv={Dv} exceed {WIDEST}, the longest rows that a thread keeps to itself"
    return None


def launches(
    problem: Problem, arguments: Arrays, scratch: Callable[[tuple[int, ...]], int]
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The one launch; no scratch memory."""
    B, H, Lq, D = problem.q.shape
    real: Any = problem.compute.type
    function = kernel(D, problem.v.shape[3], real)
    blocks = -(-B * H * Lq // THREADS)
    return [(Launch(function, array_types(problem.compute), (blocks, 1, 1), THREADS), arguments)]


@cache
def kernel(D: int, Dv: int, real: Any) -> Callable[..., None]:
    """The kernel for these widths, which are constants in it, and float32 or float64."""
    lowest, room = real(-math.inf), max(Dv, 1)  # an array of size 0 cannot be had

    def rows(q, k, v, mask, bias, o, O, L):
        H, Lq = q.shape[1], q.shape[2]
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if row >= q.shape[0] * H * Lq:
            return
        i, h, b = row % Lq, row // Lq % H, row // Lq // H
        kv, head = h // (H // k.shape[1]), head_of(o, b, h)
        Q_i = cuda.local.array(D, real)
        O_i = cuda.local.array(room, real)
        for d in range(D):
            Q_i[d] = q[b, h, i, d]
        for d in range(Dv):
            O_i[d] = real(0)
        m = o.sinks[h]
        l = real(0) if m == lowest else real(1)
        start, stop = key_range(i, i + 1, head.offset, head.left, head.right, head.length)
        for j in range(start, stop):
            if is_hidden(mask, bias, b, h, i, j):
                continue
            s = real(0)
            for d in range(D):
                s += Q_i[d] * k[b, kv, j, d]
            s = real(final_score(s, bias, head, b, h, i, j))  # line 8
            m_old = m
            if s > m:
                m = s
            shift = real(0) if m == lowest else m
            correction = math.exp(m_old - shift)  # line 9
            p = math.exp(s - shift)
            l = correction * l + p
            for d in range(Dv):  # line 10
                O_i[d] = correction * O_i[d] + p * v[b, kv, j, d]
        for d in range(Dv):  # line 12
            O[b, h, i, d] = O_i[d] / l if l != 0 else real(0)
        L[b, h, i] = m + math.log(l) if l != 0 else lowest  # line 13

    return rows
