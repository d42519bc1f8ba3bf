"""CUDA rung 2, tiles: a block of threads reads B_c keys and values once, for B_r queries.

The keys and values that rung 1 read B_r times come from global memory once a block: the threads
carry them into shared memory together, then each reads them there for its own query. A row is
rescaled once a tile instead of once a key, so that the B_c products of a tile do not wait for
exponentials. Tiles that no query of the block sees are not read, and who sees whom is asked only in
tiles that something cuts.

    lines 3, 4   a block of threads is row block i, a thread one of its rows
    line 5       m, l and O_i: in the thread's registers, as far as they fit
    lines 6, 7   all threads carry K_j and V_j (B_c rows) into shared memory
    lines 8-10   each thread for its row: B_c scores, then the softmax, then the values
    lines 12-15  each thread writes its row

Launch: B_r = ``B_R`` threads a block, along x over all B · H · ⌈Lq / B_r⌉ row blocks. B_c is the
largest power of two, up to ``B_C``, whose K_j, V_j and S fit into ``SHARED`` bytes.

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

B_R, B_C = 64, 32
SHARED = 48 << 10  # bytes that a block has without asking for more

device = cuda.jit(device=True, inline="always")
sees = device(visibility.sees)
key_range = device(visibility.key_range)
head_of = device(one_score.head_of)
is_hidden = device(one_score.is_hidden)
final_score = device(one_score.final_score)


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``, or None."""
    D, Dv = problem.q.shape[3], problem.v.shape[3]
    if block_size(D, Dv, problem.compute.itemsize) == 0:
        return (
            f"one key and its value, D={D} and Dv={Dv} numbers of {problem.compute}, exceed the "
            f"{SHARED} bytes of shared memory that a block has"
        )
    return None


def block_size(D: int, Dv: int, itemsize: int) -> int:
    """B_c: how many keys, values and scores fit into shared memory; 0 if not even one does."""
    fitting = SHARED // ((D + max(Dv, 1) + B_R) * itemsize)
    return min(B_C, 1 << fitting.bit_length() - 1) if fitting else 0


def launches(
    problem: Problem, arguments: Arrays, scratch: Callable[[tuple[int, ...]], int]
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The one launch; no scratch memory."""
    B, H, Lq, D = problem.q.shape
    Dv = problem.v.shape[3]
    B_c = block_size(D, Dv, problem.compute.itemsize)
    real: Any = problem.compute.type
    function = kernel(D, Dv, B_c, real)
    blocks = B * H * -(-Lq // B_R)
    return [(Launch(function, array_types(problem.compute), (blocks, 1, 1), B_R), arguments)]


@cache
def kernel(D: int, Dv: int, B_c: int, real: Any) -> Callable[..., None]:
    """The kernel for these sizes, which are constants in it, and float32 or float64."""
    lowest, room = real(-math.inf), max(Dv, 1)  # an array of size 0 cannot be had

    def tiles(q, k, v, mask, bias, o, O, L):
        H, Lq = q.shape[1], q.shape[2]
        K_j = cuda.shared.array((B_c, D), real)
        V_j = cuda.shared.array((B_c, room), real)
        S = cuda.shared.array((B_c, B_R), real)  # a thread's scores stand in its own column
        Q_i = cuda.local.array(D, real)
        O_i = cuda.local.array(room, real)
        row_blocks = (Lq + B_R - 1) // B_R
        r = cuda.threadIdx.x
        block = cuda.blockIdx.x
        i0, h, b = block % row_blocks * B_R, block // row_blocks % H, block // row_blocks // H
        i, i_stop = i0 + r, min(i0 + B_R, Lq)
        kv, head = h // (H // k.shape[1]), head_of(o, b, h)
        for d in range(Dv):
            O_i[d] = real(0)
        if i < Lq:
            for d in range(D):  # line 4
                Q_i[d] = q[b, h, i, d]
        m = o.sinks[h]  # line 5
        l = real(0) if m == lowest else real(1)
        first, stop = key_range(i0, i_stop, head.offset, head.left, head.right, head.length)
        for j0 in range(first, stop, B_c):  # line 6
            n = min(B_c, stop - j0)
            for x in range(r, n * D, B_R):  # line 7
                K_j[x // D, x % D] = k[b, kv, j0 + x // D, x % D]
            for x in range(r, n * Dv, B_R):
                V_j[x // Dv, x % Dv] = v[b, kv, j0 + x // Dv, x % Dv]
            cuda.syncthreads()
            if i < Lq:
                is_cut = not (
                    sees(i0, j0 + n - 1, head.offset, head.left, head.right, head.length)
                    and sees(i_stop - 1, j0, head.offset, head.left, head.right, head.length)
                )
                m_old = m
                for j in range(n):  # line 8
                    S[j, r] = lowest
                    if is_cut and not sees(
                        i, j0 + j, head.offset, head.left, head.right, head.length
                    ):
                        continue
                    if is_hidden(mask, bias, b, h, i, j0 + j):
                        continue
                    s = real(0)
                    for d in range(D):
                        s += Q_i[d] * K_j[j, d]
                    S[j, r] = real(final_score(s, bias, head, b, h, i, j0 + j))
                    if S[j, r] > m:
                        m = S[j, r]
                shift = real(0) if m == lowest else m
                correction = math.exp(m_old - shift)  # line 9
                l *= correction
                for d in range(Dv):
                    O_i[d] *= correction
                for j in range(n):  # line 10
                    if S[j, r] == lowest:
                        continue
                    p = math.exp(S[j, r] - shift)
                    l += p
                    for d in range(Dv):
                        O_i[d] += p * V_j[j, d]
            cuda.syncthreads()
        if i < Lq:
            for d in range(Dv):  # line 12
                O[b, h, i, d] = O_i[d] / l if l != 0 else real(0)
            L[b, h, i] = m + math.log(l) if l != 0 else lowest  # line 13

    return tiles
