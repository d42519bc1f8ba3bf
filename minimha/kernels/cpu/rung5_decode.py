"""CPU rung 5, decode: few queries against many keys, where reading K and V is all the work.

With one query per head the panels of rung 4 would be nearly empty, and one task per head too few
for many cores. Here the keys are split among tasks (split-K, as in Flash-Decoding), and a task
computes all the queries that share a key/value head (H / Hkv heads of Lq queries each), so that
every key and value is read from memory once. S = Q K_jᵀ has one query per row; a score is a dot
product along the head width. Each split has its own m, l and O, which log-sum-exp merges:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

Measured: K and V are read at 80 % or more of the bandwidth of the same threads when they only read
(32 heads over 8, 2048 keys: 80, 87 and 93 % in three runs; two cores of an AMD EPYC, 2026-11-21).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu.kernel import jit, kernel
from minimha.kernels.cpu.mask import (
    final_score,
    has_softcap_or_bias,
    head_of,
    is_full,
    is_seen,
    key_range,
)
from minimha.kernels.cpu.nonfinite import add_seen_values, has_nonfinite
from minimha.kernels.cpu.simd.dot import dot_products, weighted_rows
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max
from minimha.kernels.cpu.simd.vector import VECTORS, panel_width
from minimha.kernels.cpu.storage import float_rows, make_copies
from minimha.kernels.cpu.threads import TASKS_PER_THREAD, num_workers

B_C = 768  # keys per block, at least
SCORES = 9216  # per block, if it can have more keys: the softmax then interrupts reading less often
NEAR = 32  # keys, or values, that stay in the L1 cache from one use to the next
SUMMED = 256  # keys whose values are summed before the sum is added to O
SPLIT = 512  # keys per split, at least: fewer are not worth a merge


class Scratch(NamedTuple):
    """Buffers for one block of B_c keys, with R queries.

    ``S`` and ``seen`` (R, B_c): scores and who sees whom. ``copies``: widened K and V. ``zeros`` to
    ``sums``: numbers per key, per lane and per column of V. ``part`` (R, Dv): a part of O's sum.
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
    """Return why this rung does not support ``problem``: it supports all, so None."""
    return None


def forward(
    problem: Problem, *, splits: int | None = None, B_c: int | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.tiled.forward``.

    Parameters
    ----------
    splits : int, optional
        Splits of the keys. Default is as many as give each thread a few tasks.
    B_c : int, optional
        Keys per block, rounded up to whole panels. Default is ``block_size(problem)``.
    """
    workers = num_workers()
    panel = panel_width(problem.compute.itemsize)
    B_c = -(-(B_c or block_size(problem)) // panel) * panel
    if splits is None:
        B, Hkv, Lk, _ = problem.k.shape
        wanted = -(-TASKS_PER_THREAD * max(1, workers) // max(1, B * Hkv))
        splits = max(1, min(wanted, Lk // SPLIT))
    if workers:
        return parallel_decode(problem, workers, splits, B_c)
    return serial_decode(problem, splits, B_c)


def block_size(problem: Problem) -> int:
    """Keys per block: ``B_C``, or as many as make ``SCORES`` scores."""
    (_, H, Lq, _), (_, Hkv, Lk, _) = problem.q.shape, problem.k.shape
    most = max(B_C, SCORES // max(1, H // Hkv * Lq))
    return int(max(1, min(Lk, most)))


@kernel(num_sizes=3, parallel=True, widens=True)
def parallel_decode(q, k, v, mask, bias, o, O, L, workers, splits, B_c):
    parts_O, parts_ml = make_parts(k, O, splits)
    tasks = parts_O.shape[0] * splits
    for worker in numba.prange(workers):
        first, last = worker * tasks // workers, (worker + 1) * tasks // workers
        attend(q, k, v, mask, bias, o, parts_O, parts_ml, first, last, B_c)
    for b in numba.prange(O.shape[0]):
        merge(parts_O, parts_ml, o, O, L, b)


@kernel(num_sizes=2, widens=True)
def serial_decode(q, k, v, mask, bias, o, O, L, splits, B_c):
    parts_O, parts_ml = make_parts(k, O, splits)
    attend(q, k, v, mask, bias, o, parts_O, parts_ml, 0, parts_O.shape[0] * splits, B_c)
    for b in range(O.shape[0]):
        merge(parts_O, parts_ml, o, O, L, b)


@jit
def make_parts(k, O, splits):
    """O (B · Hkv, splits, R, Dv), and m and l (B · Hkv, splits, 2, R), of every split."""
    (B, H, Lq, Dv), Hkv = O.shape, k.shape[1]
    rows = H // Hkv * Lq
    parts_O = np.zeros((B * Hkv, splits, rows, Dv), O.dtype)
    return parts_O, np.empty((B * Hkv, splits, 2, rows))


@jit
def attend(q, k, v, mask, bias, o, parts_O, parts_ml, first, last, B_c):
    """The tasks ``first`` to ``last``, each one split of the keys of one key/value head."""
    (_, H, Lq, D), (Hkv, _, Dv) = q.shape, v.shape[1:]
    splits, rows = parts_O.shape[1:3]
    widest, dtype = panel_width(parts_O.itemsize), parts_O.dtype
    Q = np.empty((rows, D), dtype)
    scratch = Scratch(
        np.empty((rows, B_c), dtype),
        np.empty((rows, B_c), np.bool_),
        make_copies(1, 2, NEAR, q, parts_O),
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
            update_rows(Q, k, v, O, m, l, mask, bias, o, b, kv, Lq, j0, n, scratch)


@jit
def load_queries(q, Q, o, b, kv, group, copies):
    """Row g · Lq + i is query i of the g-th head that shares key/value head ``kv``."""
    Lq, D = q.shape[2:]
    for g in range(group):
        for i in range(Lq):
            row = float_rows(q, b, kv * group + g, i, 1, o, copies, 0, 0)
            for d in range(D):
                Q[g * Lq + i, d] = row.line[row.start + d]


@jit
def update_rows(Q, k, v, O, m, l, mask, bias, o, b, kv, Lq, j0, n, t):
    """Lines 8 to 10 for all rows of Q: the online softmax over the keys j0 to j0 + n."""
    (rows, D), S = Q.shape, t.S
    B_c, panel = S.shape[1], t.top.size
    lowest = S.dtype.type(-math.inf)
    Q_, S_ = flat(Q, 0), flat(S, 0)
    size = piece_size(k, Q, n)
    for near in range(0, n, size):
        depth = min(size, n - near)
        K = float_rows(k, b, kv, j0 + near, depth, o, t.copies, 0, 0)
        dot_products(K.line, K.start, K.stride, Q_, 0, D, S_, near, B_c, depth, rows, D)  # line 8
    is_partial = mask.size > 0 or bias.size > 0
    for i in range(Lq):
        offset, length = o.q_offset[b], o.kv_lengths[b]
        full = is_full(i, i + 1, j0, j0 + n, offset, o.left, o.right, length)
        is_partial = is_partial or not full
    apply_options(S, t.seen, mask, bias, o, b, kv * (rows // Lq), Lq, j0, n, is_partial)
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
        add_values(v, O, o, b, kv, j0, begin, min(SUMMED, n - begin), is_partial, t)


@jit
def piece_size(X, Q, n):
    """How many of n rows of k or v to process at a time.

    One, two or four queries use a row at once, as it comes from memory, and pieces would only
    interrupt. Other numbers of queries, and widened rows, need a second pass: from the L1 cache.
    """
    is_one_pass = Q.shape[0] in (1, 2, 4) and X.itemsize == Q.itemsize
    return n if is_one_pass else min(n, NEAR)


@jit
def add_values(v, O, o, b, kv, j0, begin, n, is_partial, t):
    """O += P V for n keys of a block; a long sum is one of short sums, which loses fewer digits."""
    (rows, Dv), B_c = O.shape, t.S.shape[1]
    P, part = flat(t.S, 0), flat(t.part, 0)
    t.part[:] = 0
    size = piece_size(v, O, n)
    for near in range(begin, begin + n, size):
        depth = min(size, begin + n - near)
        V = float_rows(v, b, kv, j0 + near, depth, o, t.copies, 0, 1)
        if is_partial and has_nonfinite(V, depth, Dv, t.zeros, t.ones, t.sums):
            add_seen_values(t.S, t.seen, V, t.part, near, depth)
        else:
            weighted_rows(P, near, B_c, V.line, V.start, V.stride, part, 0, Dv, rows, Dv, depth)
    for r in range(rows):
        for d in range(Dv):
            O[r, d] += t.part[r, d]


@jit
def apply_options(S, seen, mask, bias, o, b, first_head, Lq, j0, n, is_partial):
    """Scale, cap, bias and, if ``is_partial``, mask the scores; ``seen`` is written only then."""
    scale, is_scaled_only = S.dtype.type(o.scale), not has_softcap_or_bias(bias, o)
    for r in range(S.shape[0]):
        h, i = first_head + r // Lq, r % Lq
        head = head_of(o, b, h)
        if is_scaled_only:  # a loop of its own, which LLVM vectorizes
            for j in range(n):
                S[r, j] *= scale
        else:
            for j in range(n):
                S[r, j] = final_score(S[r, j], bias, head, b, h, i, j0 + j)
        if is_partial:
            for j in range(n):
                seen[r, j] = is_seen(mask, bias, head, b, h, i, j0 + j)
                if not seen[r, j]:
                    S[r, j] = -math.inf


@jit
def merge(parts_O, parts_ml, o, O, L, b):
    """Merge the splits of batch entry b into O and L; a sink counts as one more split."""
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
