"""CPU rung 2, tiles: compute B_r queries against B_c keys at a time, as FlashAttention-2 does.

A block of keys is read once for B_r queries, not once per query. A row is rescaled once per block,
not once per key. The products are plain loops over small arrays, which stay in the cache. The loop
over d is innermost, so that LLVM can vectorize it.

Measured: 6 × as fast as rung 1 (4 heads, 512 tokens, width 64; AMD EPYC, 2026-11-21).
"""

from __future__ import annotations

import math

from minimha.equations.problem import Problem
from minimha.kernels.cpu.arguments import BYTE, DOUBLE, REAL, Buffer, unpacker
from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.kernel import Kernel, Sizes
from minimha.kernels.cpu.mask import apply_score_mod, apply_softcap_and_bias, mask_tile
from minimha.kernels.cpu.nonfinite import note_nonfinite
from minimha.kernels.cpu.simd.memory import matrix
from minimha.kernels.cpu.storage import key_at, keys_ahead, queries_of, rows_at

B_R, B_C = 64, 64

# l is a long sum of positive numbers, in float64.
BUFFERS = dict.fromkeys(("S", "biases", "m", "O_i"), Buffer(REAL))
BUFFERS |= {"l": Buffer(DOUBLE), "visible": Buffer(BYTE)}
unpack = unpacker(**BUFFERS)


def sizes(problem: Problem, *, B_r: int = B_R, B_c: int = B_C) -> Sizes:
    """Return buffer lengths for ``problem``, with blocks of ``B_r`` queries and ``B_c`` keys."""
    lengths = dict.fromkeys(("S", "biases", "visible"), B_r * B_c)
    lengths |= {"m": B_r, "l": B_r, "O_i": B_r * problem.v.shape[3]}
    return Sizes((B_r, B_c), lengths)


def plain_tiles(line, worker):
    q, k, v, mask, bias, o, O, L, memory, (B_r, B_c) = unpack(line, worker)
    for b in range(len(o.queries)):
        _, _, Lq = queries_of(o, b)
        for h in range(q.shape[1]):
            for i0 in range(0, Lq, B_r):  # line 3
                row_block(q, k, v, mask, bias, o, O, L, memory, b, h, i0, min(B_r, Lq - i0), B_c)


KERNEL = Kernel(plain_tiles, BUFFERS, sizes)
plan, forward = KERNEL.plan, KERNEL.forward


@jit
def row_block(q, k, v, mask, bias, o, O, L, memory, b, h, i0, rows, B_c):
    """Write O and L for queries i0 to i0 + rows (FlashAttention-2, Algorithm 1, lines 4 to 15)."""
    kv = h // (q.shape[1] // k.shape[1])
    D, Dv, Lk = q.shape[3], v.shape[3], o.kv_lengths[b]
    entry, first, _ = queries_of(o, b)
    zero, lowest = O.dtype.type(0), O.dtype.type(-math.inf)
    S, biases, visible, m, l = memory.S, memory.biases, memory.visible, memory.m, memory.l
    O_i = matrix(memory.O_i, 0, rows, Dv)
    Q_i = rows_at(q, entry, h, first + i0)  # line 4
    for r in range(rows):  # line 5
        m[r] = o.sinks[h]
        l[r] = 0 if m[r] == lowest else 1
        for d in range(Dv):
            O_i[r, d] = 0
    j0 = 0
    while j0 < Lk:  # line 6
        n = min(B_c, Lk - j0, keys_ahead(o, j0))
        page, at = key_at(o, b, j0)
        K_j, V_j = rows_at(k, page, kv, at), rows_at(v, page, kv, at)  # line 7
        mask_tile(mask, bias, o, b, h, i0, rows, j0, n, rows, False, visible, biases)
        for j in range(n):  # line 8: key j and query r meet at j · rows + r
            for r in range(rows):
                s = zero
                for d in range(D):
                    s += Q_i.line[r * Q_i.stride + d] * K_j.line[j * K_j.stride + d]
                S[j * rows + r] = o.scale * s
        apply_softcap_and_bias(S, bias, biases, o, b, h, i0, j0, n, rows)
        if o.score_mod:
            apply_score_mod(S, visible, o, b, h, i0, rows, j0, n, rows)
        for r in range(rows):
            m_old = m[r]
            for x in range(r, n * rows, rows):
                if visible[x] and S[x] > m[r]:
                    m[r] = S[x]
            shift = zero if m[r] == lowest else m[r]
            correction = math.exp(m_old - shift)  # line 9
            l[r] *= correction
            for d in range(Dv):
                O_i[r, d] *= correction
            for j in range(n):  # line 10
                if visible[j * rows + r]:
                    p = math.exp(S[j * rows + r] - shift)
                    l[r] += p
                    for d in range(Dv):
                        O_i[r, d] += p * V_j.line[j * V_j.stride + d]
        j0 += n
    for r in range(rows):
        for d in range(Dv):  # line 12
            O[entry, h, first + i0 + r, d] = O_i[r, d] / l[r] if l[r] != 0 else O_i[r, d]
        note_nonfinite(rows_at(O, entry, h, first + i0 + r), Dv, memory.counters)
        L[entry, h, first + i0 + r] = m[r] + math.log(l[r]) if l[r] != 0 else lowest  # line 13
