"""CPU rung 1, rows: compute one query and one key at a time, with the online softmax.

This is Algorithm 1 of FlashAttention-2 with blocks of one row and one key. It keeps only the
maximum m, sum l and output O of one query, so that memory does not grow with the sequence. All
loops are scalar: each product of two rows is a loop, and each score waits for the previous one.

Measured: 2.5 GFLOP/s on one core (4 heads, 512 tokens, width 64; AMD EPYC, 2026-11-21).
"""

from __future__ import annotations

import math

from minimha.equations.problem import Problem
from minimha.kernels.cpu.arguments import BYTE, DOUBLE, REAL, Buffer, unpacker
from minimha.kernels.cpu.functions import call_function
from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.kernel import Kernel, Sizes
from minimha.kernels.cpu.mask import final_score, head_of, is_visible
from minimha.kernels.cpu.nonfinite import note_nonfinite
from minimha.kernels.cpu.selection import is_picked
from minimha.kernels.cpu.storage import key_at, queries_of, rows_at

BUFFERS = {"O_i": Buffer(DOUBLE), "s": Buffer(REAL), "visible": Buffer(BYTE)}
unpack = unpacker(**BUFFERS)


def sizes(problem: Problem) -> Sizes:
    """Return buffer lengths for ``problem``; this kernel has no blocks and one thread."""
    return Sizes((), {"O_i": problem.v.shape[3], "s": 1, "visible": 1})


def rows(line, worker):
    q, k, v, mask, bias, o, O, L, memory, _ = unpack(line, worker)
    for b in range(len(o.queries)):
        entry, first, Lq = queries_of(o, b)
        for h in range(q.shape[1]):
            for i in range(Lq):
                at = rows_at(O, entry, h, first + i)
                L[entry, h, first + i] = row(q, k, v, mask, bias, o, at, memory, b, h, i)
                note_nonfinite(at, v.shape[3], memory.counters)


KERNEL = Kernel(rows, BUFFERS, sizes)
plan, forward = KERNEL.plan, KERNEL.forward


@jit
def row(q, k, v, mask, bias, o, O, memory, b, h, i):
    """Write the output of query i of head h into O, and return the query's log-sum-exp."""
    O_i, (entry, first, _) = memory.O_i, queries_of(o, b)
    kv = h // (q.shape[1] // k.shape[1])
    D, Dv = q.shape[3], v.shape[3]
    m = float(o.sinks[h])
    l = 0.0 if m == -math.inf else 1.0
    head = head_of(o, b, h)
    for d in range(Dv):
        O_i[d] = 0
    for j in range(o.kv_lengths[b]):
        if not is_visible(mask, bias, head, entry, h, first + i, j):
            continue
        if not is_picked(o, entry, h, first + i, j):
            continue
        if o.mask_mod:
            memory.visible[0] = 1
            call_function(o.mask_mod, memory.visible, 0, o, b, h, i, j, 1, 1, 1, 0)
            if not memory.visible[0]:
                continue
        page, at = key_at(o, b, j)
        s = 0.0
        for d in range(D):
            s += q[entry, h, first + i, d] * k[page, kv, at, d]
        s = final_score(s, bias, head, entry, h, first + i, j)  # line 8
        if o.score_mod:
            memory.s[0] = s
            call_function(o.score_mod, memory.s, 0, o, b, h, i, j, 1, 1, 1, 0)
            s = memory.s[0]
            if s == -math.inf:
                continue
        m_old = m
        if s > m:
            m = s
        shift = 0.0 if m == -math.inf else m
        correction, p = math.exp(m_old - shift), math.exp(s - shift)  # line 9
        l = correction * l + p
        for d in range(Dv):  # line 10
            O_i[d] = correction * O_i[d] + p * v[page, kv, at, d]
    for d in range(Dv):  # line 12
        O.line[O.start + d] = O_i[d] / l if l != 0 else O_i[d]
    return m + math.log(l) if l != 0 else -math.inf  # line 13
