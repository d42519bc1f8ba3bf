"""CPU rung 5, decode: few queries against many keys, where reading K and V is all the work.

With one query a head the panels of rung 4 would be nearly empty and one head a task too little for
many cores. Here the keys are split among the tasks, and a task takes all the queries that share a
key/value head (H / Hkv heads of Lq queries each), so that every key and value is read from memory
once. S = Q K_jᵀ has a query a row; a score is a dot product along the head width. Each split ends
with its own m, l and O, and log-sum-exp merges them:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

Measured: K and V are read at 80 % or more of the rate at which the same threads read memory and do
nothing else (32 heads over 8, 2048 keys: 80, 87 and 93 % in three runs; two cores of an AMD EPYC,
2026-11-21).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu.kernel import jit, kernel
from minimha.kernels.cpu.rung3_vector_tiles import full_panel, has_wild
from minimha.kernels.cpu.rung4_parallel import TASKS_A_THREAD, readable
from minimha.kernels.cpu.scores import bends, final_score, head_of, is_seen, key_range, sees
from minimha.kernels.cpu.simd.dot import dot_products, weighted_rows
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max
from minimha.kernels.cpu.simd.vector import VECTORS, lanes
from minimha.kernels.cpu.threads import num_workers

B_C = 768  # keys at least whose scores are known before the maximum is taken
SCORES = 9216  # of a block, if it can have more keys: the seldomer reading pauses for the softmax
NEAR = 32  # keys, or values, that stay in the L1 cache from one use to the next
SUMMED = 256  # keys whose values are added before the sum joins O
SPLIT = 512  # keys of a split at least: less is not worth a merge


class Scratch(NamedTuple):
    """Room for one block.

    Scores and who sees whom (R, B_c), widened K and V, numbers a lane, part of a sum (R, Dv).
    """

    S: Any
    seen: Any
    copies: Any
    zeros: Any
    ones: Any
    top: Any
    shift: Any
    total: Any
    sums: Any
    part: Any


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``: it takes all, so None."""
    return None


def forward(
    problem: Problem, *, splits: int | None = None, B_c: int | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.tiled.forward``.

    ``splits`` of the keys are as many as give each thread a few tasks, unless they are given, and
    ``B_c``, rounded up to whole panels of lanes, follows from ``SCORES``.
    """
    workers = num_workers()
    panel = lanes(problem.compute.itemsize)
    B_c = -(-(B_c or block_size(problem)) // panel) * panel
    if splits is None:
        B, Hkv, Lk, _ = problem.k.shape
        wanted = -(-TASKS_A_THREAD * max(1, workers) // max(1, B * Hkv))
        splits = max(1, min(wanted, Lk // SPLIT))
    if workers:
        return parallel_decode(problem, workers, splits, B_c)
    return serial_decode(problem, splits, B_c)


def block_size(problem: Problem) -> int:
    """Keys of a block, as ``SCORES`` says."""
    (_, H, Lq, _), (_, Hkv, Lk, _) = problem.q.shape, problem.k.shape
    most = max(B_C, SCORES // max(1, H // Hkv * Lq))
    return int(max(1, min(Lk, most)))


@kernel(num_sizes=3, parallel=True, widens=True)
def parallel_decode(q, k, v, mask, bias, o, O, L, workers, splits, B_c):
    parts_O, parts_ml = room_for_parts(k, O, splits)
    tasks = parts_O.shape[0] * splits
    for worker in numba.prange(workers):
        first, last = worker * tasks // workers, (worker + 1) * tasks // workers
        attend(q, k, v, mask, bias, o, parts_O, parts_ml, first, last, B_c)
    for b in numba.prange(O.shape[0]):
        merge(parts_O, parts_ml, o, O, L, b)


@kernel(num_sizes=2, widens=True)
def serial_decode(q, k, v, mask, bias, o, O, L, splits, B_c):
    parts_O, parts_ml = room_for_parts(k, O, splits)
    attend(q, k, v, mask, bias, o, parts_O, parts_ml, 0, parts_O.shape[0] * splits, B_c)
    for b in range(O.shape[0]):
        merge(parts_O, parts_ml, o, O, L, b)


@jit
def room_for_parts(k, O, splits):
    """Arrays (B · Hkv, splits, R, Dv) for O and (B · Hkv, splits, 2, R) for m and l."""
    (B, H, Lq, Dv), Hkv = O.shape, k.shape[1]
    rows = H // Hkv * Lq
    parts_O = np.zeros((B * Hkv, splits, rows, Dv), O.dtype)
    return parts_O, np.empty((B * Hkv, splits, 2, rows))


@jit
def attend(q, k, v, mask, bias, o, parts_O, parts_ml, first, last, B_c):
    """The tasks ``first`` to ``last``: one split of the keys of one key/value head each."""
    (_, H, Lq, D), (Hkv, _, Dv) = q.shape, v.shape[1:]
    splits, rows = parts_O.shape[1:3]
    widest, dtype = full_panel(parts_O.itemsize), parts_O.dtype
    Q = np.empty((rows, D), dtype)
    scratch = Scratch(
        np.empty((rows, B_c), dtype),
        np.empty((rows, B_c), np.bool_),
        np.empty((1, 2, 0 if q.itemsize == parts_O.itemsize else NEAR * max(D, Dv)), dtype),
        np.zeros(B_c, dtype),
        np.ones(2 * widest, dtype),
        np.empty(widest, dtype),
        np.empty(widest, dtype),
        np.empty(widest, dtype),
        np.empty(Dv, dtype),
        np.empty((rows, Dv), dtype),
    )
    for task in range(first, last):
        head, split = task // splits, task % splits
        b, kv = head // Hkv, head % Hkv
        load_queries(q, Q, o, b, kv, H // Hkv, scratch.copies)
        O, m, l = parts_O[head, split], parts_ml[head, split, 0], parts_ml[head, split, 1]
        m[:] = -math.inf
        l[:] = 0
        start, stop = key_range(0, Lq, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        size = max(0, stop - start)
        stop = start + (split + 1) * size // splits
        start += split * size // splits
        for j0 in range(start, stop, B_c):
            n = min(B_c, stop - j0)
            take_block(Q, k, v, O, m, l, mask, bias, o, b, kv, Lq, j0, n, scratch)


@jit
def load_queries(q, Q, o, b, kv, group, copies):
    """Row g · Lq + i is query i of the g-th head that shares key/value head ``kv``."""
    Lq, D = q.shape[2:]
    for g in range(group):
        for i in range(Lq):
            row = readable(q, b, kv * group + g, i, 1, o, copies, 0, 0)
            for d in range(D):
                Q[g * Lq + i, d] = row.line[row.start + d]


@jit
def take_block(Q, k, v, O, m, l, mask, bias, o, b, kv, Lq, j0, n, t):
    """Lines 8 to 10 for all rows of Q and n keys."""
    (rows, D), S = Q.shape, t.S
    B_c, panel = S.shape[1], t.top.size
    lowest = S.dtype.type(-math.inf)
    Q_, S_ = flat(Q, 0), flat(S, 0)
    size = keys_of_piece(k, Q, n)
    for near in range(0, n, size):
        depth = min(size, n - near)
        K = readable(k, b, kv, j0 + near, depth, o, t.copies, 0, 0)
        dot_products(K.line, K.start, K.stride, Q_, 0, D, S_, near, B_c, depth, rows, D)  # line 8
    is_cut = mask.size > 0 or bias.size > 0
    for i in range(Lq):
        first = sees(i, j0, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        last = sees(i, j0 + n - 1, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        is_cut = is_cut or not (first and last)
    finish_scores(S, t.seen, mask, bias, o, b, kv * (rows // Lq), Lq, j0, n, is_cut)
    padded = -(-n // panel) * panel
    for r in range(rows):  # line 9
        S[r, n:padded] = lowest
        lanes_max(S, r * B_c, padded // panel, VECTORS, t.top)
        m_old, largest = m[r], t.top.max()
        m[r] = max(m_old, largest)
        t.shift[:] = m[r] if m[r] > lowest else 0
        correction = math.exp(m_old - t.shift[0])
        lanes_exp(S, r * B_c, padded // panel, VECTORS, t.shift, t.total)
        l[r] = correction * l[r] + t.total.sum()
        if correction != 1:
            O[r] *= S.dtype.type(correction)
    for begin in range(0, n, SUMMED):  # line 10
        add_values(v, O, o, b, kv, j0, begin, min(SUMMED, n - begin), is_cut, t)


@jit
def keys_of_piece(X, Q, n):
    """How many of n rows of k or v to take at a time.

    One, two or four queries meet a row as it comes from memory, and pieces would only interrupt.
    Others come again, and widened rows are read again: from the L1 cache.
    """
    at_once = Q.shape[0] in (1, 2, 4) and X.itemsize == Q.itemsize
    return n if at_once else min(n, NEAR)


@jit
def add_values(v, O, o, b, kv, j0, begin, n, is_cut, t):
    """O += P V for n keys of a block; a long sum is one of short sums, which loses fewer digits."""
    (rows, Dv), B_c = O.shape, t.S.shape[1]
    P, part = flat(t.S, 0), flat(t.part, 0)
    t.part[:] = 0
    size = keys_of_piece(v, O, n)
    for near in range(begin, begin + n, size):
        depth = min(size, begin + n - near)
        V = readable(v, b, kv, j0 + near, depth, o, t.copies, 0, 1)
        if is_cut and has_wild(V, depth, Dv, t.zeros, t.ones, t.sums):
            add_seen_values(t.S, t.seen, V, t.part, near, depth)
        else:
            weighted_rows(P, near, B_c, V.line, V.start, V.stride, part, 0, Dv, rows, Dv, depth)
    for r in range(rows):
        for d in range(Dv):
            O[r, d] += t.part[r, d]


@jit
def finish_scores(S, seen, mask, bias, o, b, first_head, Lq, j0, n, is_cut):
    """Scale, cap, bias and mask the scores; mark in ``seen`` who sees whom, if that is needed."""
    scale, is_bent = S.dtype.type(o.scale), bends(bias, o)
    for r in range(S.shape[0]):
        h, i = first_head + r // Lq, r % Lq
        head = head_of(o, b, h)
        if is_bent:
            for j in range(n):
                S[r, j] = final_score(S[r, j], bias, head, b, h, i, j0 + j)
        else:
            for j in range(n):
                S[r, j] *= scale
        if is_cut:
            for j in range(n):
                seen[r, j] = is_seen(mask, bias, head, b, h, i, j0 + j)
                if not seen[r, j]:
                    S[r, j] = -math.inf


@jit
def add_seen_values(P, seen, V, O, first, n):
    """O += P V for n keys where a value that is not finite may be hidden from some queries."""
    for r in range(O.shape[0]):
        for j in range(n):
            if seen[r, first + j]:
                for d in range(O.shape[1]):
                    O[r, d] += P[r, first + j] * V.line[V.start + j * V.stride + d]


@jit
def merge(parts_O, parts_ml, o, O, L, b):
    """Write O and L of batch entry b from its splits; a sink joins them as one more."""
    _, H, Lq, Dv = O.shape
    splits, rows = parts_O.shape[1:3]
    group = rows // max(1, Lq)
    for h in range(H):
        head = b * (H // group) + h // group
        for i in range(Lq):
            r = h % group * Lq + i
            m = o.sinks[h]
            for s in range(splits):
                m = max(m, parts_ml[head, s, 0, r])
            shift = m if m > -math.inf else O.dtype.type(0)
            l = math.exp(o.sinks[h] - shift)
            O[b, h, i, :] = 0
            for s in range(splits):
                correction = math.exp(parts_ml[head, s, 0, r] - shift)
                l += correction * parts_ml[head, s, 1, r]
                for d in range(Dv):
                    O[b, h, i, d] += correction * parts_O[head, s, r, d]
            inverse = 1 / l if l != 0 else O.dtype.type(0)
            for d in range(Dv):
                O[b, h, i, d] *= inverse
            L[b, h, i] = m + math.log(l) if l != 0 else -math.inf
