"""A panel of queries, one per lane, from its Q to its O: what rungs 3 and 4 compute with.

The lines are those of Algorithm 1; ``rung3_vector_tiles`` says why a panel is what it is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minimha.kernels.cpu.kernel import jit, jit_inline
from minimha.kernels.cpu.mask import apply_softcap_and_bias, has_softcap_or_bias, hide, mask_tile
from minimha.kernels.cpu.nonfinite import add_nonfinite, has_nonfinite, zero_nonfinite
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.simd.product import tile_product, tile_product_add
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.simd.vector import VECTOR_BITS, VECTORS, panel_width
from minimha.kernels.cpu.storage import rows_at

B_C = 160  # a tile of scores, 160 keys × 48 queries of float32, is 30 KiB of the L1 cache


class Panel(NamedTuple):
    """The queries i0 to i0 + rows of head h, with m, l and O of the keys so far.

    ``Q`` is (D, lanes) and ``O`` (Dv, lanes), flat. ``m`` is (lanes,), and so is ``l``, in float64
    because it grows with the keys. The panel is ``vectors`` wide; lanes beyond ``rows`` are
    padding.
    """

    Q: Any
    O: Any
    m: Any
    l: Any
    b: int
    h: int
    i0: int
    rows: int
    vectors: int


class Scratch(NamedTuple):
    """Buffers for one tile: scores, who sees whom, biases, a copy of V, five numbers per lane.

    ``zeros``, ``ones`` and ``sums`` are those of ``has_nonfinite``.
    """

    S: Any
    seen: Any
    biases: Any
    V: Any
    scale: Any
    top: Any
    shift: Any
    correction: Any
    total: Any
    zeros: Any
    ones: Any
    sums: Any


class Memory(NamedTuple):
    """The memory of the panels and scratch of all threads, one row per thread.

    They are ``flat`` parts of it, to which numba counts no references: counting takes longer than
    the softmax of a small tile. Whoever allocates the memory passes it down, and so outlives them.
    """

    reals: Any
    doubles: Any
    bytes: Any


@jit
def make_memory(workers, panels, O, D, B_c):
    """Memory for ``workers`` threads with ``panels`` panels each."""
    widest, Dv = panel_width(O.itemsize), O.shape[3]
    reals = panels * (D + Dv + 1) * widest + (2 * B_c + 6) * widest + B_c * (Dv + 1) + Dv
    return Memory(
        np.empty((workers, reals), O.dtype),
        np.empty((workers, panels * widest)),
        np.empty((workers, B_c * widest), np.uint8),
    )


@jit_inline
def make_panel(memory, worker, u, Lq, D, Dv, b, h, p):
    """Panel p of head h, the u-th from the end of the worker's memory."""
    reals = memory.reals
    widest, end = panel_width(reals.itemsize), (worker + 1) * reals.shape[1]
    Q = end - (u + 1) * (D + Dv + 1) * widest
    O = Q + D * widest
    l = flat(memory.doubles, worker * memory.doubles.shape[1] + u * widest)
    i0, rows, vectors = panel_rows(Lq, reals.itemsize, p)
    return Panel(
        flat(reals, Q), flat(reals, O), flat(reals, O + Dv * widest), l, b, h, i0, rows, vectors
    )


@jit_inline
def make_scratch(memory, worker, o, B_c, D, Dv):
    """The worker's scratch, at the beginning of its memory."""
    reals = memory.reals
    widest, start = panel_width(reals.itemsize), worker * reals.shape[1]
    biases = start + B_c * widest
    lines = biases + B_c * widest
    V = lines + 6 * widest
    zeros = V + B_c * Dv
    t = Scratch(
        flat(reals, start),
        flat(memory.bytes, worker * memory.bytes.shape[1]),
        flat(reals, biases),
        flat(reals, V),
        flat(reals, lines),
        flat(reals, lines + widest),
        flat(reals, lines + 2 * widest),
        flat(reals, lines + 3 * widest),
        flat(reals, lines + 4 * widest),
        flat(reals, zeros),
        flat(reals, lines + 5 * widest),
        flat(reals, zeros + B_c),
    )
    for r in range(widest):
        t.scale[r], t.ones[r] = o.scale, 1
    for j in range(B_c):
        t.zeros[j] = 0
    return t


@jit
def num_panels(Lq, itemsize):
    """Number of panels for Lq queries; ``panel_rows`` divides the queries evenly among them."""
    return -(-Lq // panel_width(itemsize))


@jit
def panel_rows(Lq, itemsize, p):
    """First query, number of queries and width in vectors of panel p."""
    width = VECTOR_BITS // (8 * itemsize)
    total, number = -(-Lq // width), num_panels(Lq, itemsize)
    first = p * total // number
    vectors = (p + 1) * total // number - first
    return first * width, min(Lq - first * width, vectors * width), vectors


@jit_inline
def load_panel(panel, Q, D, Dv, sink):
    """Lines 4 and 5: Q transposed, m, l and O before the first key."""
    lanes = panel.vectors * panel_width(panel.m.itemsize) // VECTORS
    transpose(Q.line, Q.start, Q.stride, panel.Q, 0, lanes, panel.rows, D)
    if panel.rows < lanes:
        for d in range(D):
            for r in range(panel.rows, lanes):
                panel.Q[d * lanes + r] = 0
    for x in range(Dv * lanes):
        panel.O[x] = 0
    for r in range(lanes):
        panel.m[r] = sink
        panel.l[r] = 0 if sink == -math.inf else 1


@jit_inline
def update_panel(panel, K_j, V_j, j0, n, D, Dv, t, mask, bias, o, full):
    """Lines 8 to 10: the online softmax over the keys j0 to j0 + n.

    ``full`` says that causality, window and length let every query see all of them.
    """
    S, seen = t.S, t.seen
    b, h, i0, rows, vectors = panel.b, panel.h, panel.i0, panel.rows, panel.vectors
    lanes = vectors * panel_width(S.itemsize) // VECTORS
    num_seen = n * rows
    if mask.size or bias.size or not full:
        num_seen = mask_tile(mask, bias, o, b, h, i0, rows, j0, n, lanes, full, seen, t.biases)
        if num_seen == 0:
            return
    tile_product(
        K_j.line, K_j.start, K_j.stride, 1, panel.Q, 0, lanes, S, 0, lanes, t.scale, n, vectors, D
    )  # line 8
    if has_softcap_or_bias(bias, o):
        apply_softcap_and_bias(S, bias, t.biases, o, b, h, i0, j0, n, lanes)
    if num_seen < n * rows:
        hide(S, seen, n * lanes)
    lanes_max(S, 0, n, vectors, t.top)  # line 9
    for r in range(lanes):
        t.correction[r] = panel.m[r]
        panel.m[r] = max(panel.m[r], t.top[r])
        t.shift[r] = panel.m[r] if panel.m[r] > -math.inf else 0
    lanes_exp(t.correction, 0, 1, vectors, t.shift, t.total)
    lanes_exp(S, 0, n, vectors, t.shift, t.total)
    for r in range(lanes):
        panel.l[r] = t.correction[r] * panel.l[r] + t.total[r]
    is_zeroed = num_seen < n * rows and has_nonfinite(V_j, n, Dv, t.zeros, t.ones, t.sums)
    V = zero_nonfinite(V_j, n, Dv, t.V) if is_zeroed else V_j
    tile_product_add(
        V.line, V.start, 1, V.stride, S, 0, lanes, panel.O, 0, lanes, t.correction, Dv, vectors, n
    )  # line 10
    if is_zeroed:
        add_nonfinite(panel.O, S, seen, V_j, n, Dv, rows, lanes)


@jit_inline
def store_panel(panel, O, L):
    """Lines 12 to 15: O / l, transposed back, and m + log l; 0 and -inf if no key was seen."""
    lanes, Dv = panel.vectors * panel_width(O.itemsize) // VECTORS, O.shape[3]
    b, h, i0 = panel.b, panel.h, panel.i0
    for r in range(panel.rows):
        m, l = panel.m[r], panel.l[r]
        L[b, h, i0 + r] = m + math.log(O.dtype.type(l)) if l != 0 else -math.inf
        panel.m[r] = 1 / l if l != 0 else 0
    for d in range(Dv):
        for r in range(lanes):
            panel.O[d * lanes + r] *= panel.m[r]
    to = rows_at(O, b, h, i0)
    transpose(panel.O, 0, lanes, to.line, to.start, to.stride, Dv, panel.rows)
