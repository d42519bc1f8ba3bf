"""CPU rung 5, decode: few queries against many keys, where reading K and V is all the work.

With one query a head the panels of rung 4 would be nearly empty and one head a task too little for
many cores. Here the keys are split among the tasks, and a task takes all the queries that share a
key/value head (H / Hkv heads of Lq queries each), so that every key and value is read from memory
once. S = Q K_jᵀ has a query a row; a score is a dot product along the head width. Each split ends
with its own m, l and O, and log-sum-exp merges them:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

Measured: K and V are read at 80 % or more of the rate at which the same threads read memory and do
nothing else (32 heads over 8, 2048 keys: 80, 87 and 93 % in three runs; above 100 where a part stays in
the L3 cache; two cores of an AMD EPYC, 2026-11-21).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu3_vector_tiles import full_panel, has_wild
from minimha.kernels.cpu4_parallel import TASKS_A_THREAD, readable
from minimha.kernels.entry import jit, kernel
from minimha.kernels.scores import bends, final_score, head_of, is_seen, key_range, sees
from minimha.kernels.simd import (
    VECTORS,
    dot_products,
    flat,
    lanes,
    lanes_exp,
    lanes_max,
    weighted_rows,
)
from minimha.kernels.threads import num_workers

B_C = 768  # keys at least whose scores are known before the maximum is taken
SCORES = 9216  # of a block, if it can have more keys: the seldomer reading pauses for the softmax
AT_ONCE = 4  # queries that meet a key, or a value, when it comes from memory
NEAR = 32  # keys, and values, that stay in the L1 cache for the queries that come after those
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
    """Keys of a block: as ``SCORES`` says, but 16-bit ones, widened, must fit the L2 cache."""
    (_, H, Lq, _), (_, Hkv, Lk, _) = problem.q.shape, problem.k.shape
    if problem.dtype.itemsize == 2:
        return B_C
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
        np.empty((1, 2, 0 if q.itemsize == parts_O.itemsize else B_c * max(D, Dv)), dtype),
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
            K_j = readable(k, b, kv, j0, n, o, scratch.copies, 0, 0)
            V_j = readable(v, b, kv, j0, n, o, scratch.copies, 0, 1)
            take_block(Q, K_j, V_j, O, m, l, mask, bias, o, b, kv * (H // Hkv), Lq, j0, n, scratch)


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
def take_block(Q, K_j, V_j, O, m, l, mask, bias, o, b, first_head, Lq, j0, n, t):
    """Lines 8 to 10 for all rows of Q and n keys."""
    (rows, D), Dv = Q.shape, O.shape[1]
    S = t.S
    B_c, panel = S.shape[1], t.top.size
    lowest = S.dtype.type(-math.inf)
    Q_, S_ = flat(Q, 0), flat(S, 0)
    size = NEAR if rows > AT_ONCE else n
    for near in range(0, n, size):
        first, depth = K_j.start + near * K_j.stride, min(size, n - near)
        dot_products(K_j.line, first, K_j.stride, Q_, 0, D, S_, near, B_c, depth, rows, D)  # line 8
    is_cut = mask.size > 0 or bias.size > 0
    for i in range(Lq):
        first = sees(i, j0, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        last = sees(i, j0 + n - 1, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
        is_cut = is_cut or not (first and last)
    finish_scores(S, t.seen, mask, bias, o, b, first_head, Lq, j0, n, is_cut)
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
    if is_cut and has_wild(V_j, n, Dv, t.zeros, t.ones, t.sums):
        add_seen_values(S, t.seen, V_j, O, n)
    else:
        add_values(S_, B_c, V_j, O, t.part, n)


@jit
def add_values(S_, B_c, V_j, O, part, n):
    """Line 10, O += P V_j; a long sum is one of short sums, which loses fewer digits."""
    rows, Dv = O.shape
    size = NEAR if rows > AT_ONCE else SUMMED
    O_, part_ = flat(O, 0), flat(part, 0)
    for begin in range(0, n, SUMMED):
        for x in range(rows * Dv):
            part_[x] = 0
        for near in range(begin, min(begin + SUMMED, n), size):
            first, depth = V_j.start + near * V_j.stride, min(size, n - near)
            weighted_rows(S_, near, B_c, V_j.line, first, V_j.stride, part_, 0, Dv, rows, Dv, depth)
        for x in range(rows * Dv):
            O_[x] += part_[x]


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
def add_seen_values(P, seen, V_j, O, n):
    """Line 10 where a value that is not finite may be hidden from some queries."""
    for r in range(O.shape[0]):
        for j in range(n):
            if seen[r, j]:
                for d in range(O.shape[1]):
                    O[r, d] += P[r, j] * V_j.line[V_j.start + j * V_j.stride + d]


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
