"""CPU rung 3, vector tiles: the same tiles, transposed, with every inner loop written as vectors.

A panel of queries lies across the lanes of up to three vectors. S = K_j Q_iᵀ then has a key a row
and a query a lane, and nothing in the softmax goes across a vector: the maximum, the exponential
and the sum of a query run down its lane. K and V are read where they are, one number at a time,
each broadcast against a row of the panel; only Q is copied (transposed) and O is copied back.
The products keep 8 × 3 vectors of sums in registers; the exponential is a polynomial (``simd``).

Every block of keys is visited and every score is checked by itself: the next rung does away with
both.

Measured: 9 × as fast as rung 2 (4 heads, 512 tokens, width 64; AMD EPYC, AVX-512, 2026-11-21).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu.kernel import glue, jit, kernel
from minimha.kernels.cpu.scores import bend_tile, bends, hide, see_tile
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.simd.product import tile_product, tile_product_add
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.simd.vector import VECTOR_BITS, VECTORS, lanes

B_C = 160  # a tile of scores, 160 keys × 48 queries of float32, is 30 KiB of the L1 cache
full_panel = jit(lanes)


class Rows(NamedTuple):
    """Rows of q, k or v where they lie: row r begins at item start + r · stride of ``line``."""

    line: Any
    start: int
    stride: int


class Panel(NamedTuple):
    """One panel of queries, i0 to i0 + rows of head h, and what is known of them so far.

    ``Q`` is (D, lanes) and ``O`` (Dv, lanes), flat; ``m`` is (lanes,) and so is ``l``, float64, for
    it grows with the keys. The panel is ``vectors`` wide; lanes beyond ``rows`` are padding.
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
    """Room for one tile: scores, who sees whom, biases, a copy of V, and five numbers a lane.

    ``zeros``, ``ones`` and ``sums`` are those of ``has_wild``.
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
    """What the panels and scratches of all threads lie in, a row a thread.

    They borrow it as ``flat`` lines, which numba does not count references of: counting takes
    longer than the softmax of a small tile. Whoever makes the memory passes it down, and so
    outlives what borrows it.
    """

    reals: Any
    doubles: Any
    bytes: Any


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``: it takes all, so None."""
    return None


def forward(problem: Problem, *, B_c: int = B_C) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.tiled.forward``."""
    return vector_tiles(problem, B_c)


@kernel(num_sizes=1)
def vector_tiles(q, k, v, mask, bias, o, O, L, B_c):
    memory = make_memory(1, 1, O, q.shape[3], B_c)
    visit_all(q, k, v, mask, bias, o, O, L, memory, B_c)


@glue
def visit_all(q, k, v, mask, bias, o, O, L, memory, B_c):
    """Algorithm 1, with a panel as its block of queries."""
    (B, H, Lq, D), (Hkv, Lk, Dv) = q.shape, v.shape[1:]
    scratch = make_scratch(memory, 0, o, B_c, D, Dv)
    for b in range(B):
        for h in range(H):
            kv = h // (H // Hkv)
            for p in range(num_panels(Lq, O.itemsize)):  # line 3
                panel = make_panel(memory, 0, 0, Lq, D, Dv, b, h, p)
                load_panel(panel, rows_at(q, b, h, panel.i0), D, Dv, o.sinks[h])  # lines 4 and 5
                for j0 in range(0, Lk, B_c):  # line 6
                    n = min(B_c, Lk - j0)
                    K_j, V_j = rows_at(k, b, kv, j0), rows_at(v, b, kv, j0)  # line 7
                    take_tile(panel, K_j, V_j, j0, n, D, Dv, scratch, mask, bias, o, False)
                store_panel(panel, O, L)


@jit
def make_memory(workers, panels, O, D, B_c):
    """Memory for ``workers`` threads with ``panels`` panels each."""
    widest, Dv = full_panel(O.itemsize), O.shape[3]
    reals = panels * (D + Dv + 1) * widest + (2 * B_c + 6) * widest + B_c * (Dv + 1) + Dv
    return Memory(
        np.empty((workers, reals), O.dtype),
        np.empty((workers, panels * widest)),
        np.empty((workers, B_c * widest), np.uint8),
    )


@glue
def make_panel(memory, worker, u, Lq, D, Dv, b, h, p):
    """Panel p of head h in the u-th place from the end of the worker's memory."""
    reals = memory.reals
    widest, end = full_panel(reals.itemsize), (worker + 1) * reals.shape[1]
    Q = end - (u + 1) * (D + Dv + 1) * widest
    O = Q + D * widest
    l = flat(memory.doubles, worker * memory.doubles.shape[1] + u * widest)
    i0, rows, vectors = panel_rows(Lq, reals.itemsize, p)
    return Panel(
        flat(reals, Q), flat(reals, O), flat(reals, O + Dv * widest), l, b, h, i0, rows, vectors
    )


@glue
def make_scratch(memory, worker, o, B_c, D, Dv):
    """The worker's scratch, at the beginning of its memory."""
    reals = memory.reals
    widest, start = full_panel(reals.itemsize), worker * reals.shape[1]
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
def rows_at(X, b, h, i):
    """The rows of X[b, h] from i on, in place."""
    offset = b * X.strides[0] + h * X.strides[1] + i * X.strides[2]
    return Rows(flat(X, offset // X.itemsize), 0, X.strides[2] // X.itemsize)


@jit
def num_panels(Lq, itemsize):
    """Panels that Lq queries need; ``panel_rows`` shares the queries out evenly among them."""
    return -(-Lq // full_panel(itemsize))


@jit
def panel_rows(Lq, itemsize, p):
    """First query, number of queries and width in vectors of panel p."""
    width = VECTOR_BITS // (8 * itemsize)
    total, number = -(-Lq // width), num_panels(Lq, itemsize)
    first = p * total // number
    vectors = (p + 1) * total // number - first
    return first * width, min(Lq - first * width, vectors * width), vectors


@glue
def load_panel(panel, Q, D, Dv, sink):
    """Lines 4 and 5: Q transposed, m, l and O before the first key."""
    lanes = panel.vectors * full_panel(panel.m.itemsize) // VECTORS
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


@glue
def take_tile(panel, K_j, V_j, j0, n, D, Dv, t, mask, bias, o, is_in_reach):
    """Lines 8 to 10: let the panel see keys j0 to j0 + n.

    ``is_in_reach`` says that causality, window and length let every query see all of them.
    """
    S, seen = t.S, t.seen
    b, h, i0, rows, vectors = panel.b, panel.h, panel.i0, panel.rows, panel.vectors
    lanes = vectors * full_panel(S.itemsize) // VECTORS
    num_seen = n * rows
    if mask.size or bias.size or not is_in_reach:
        num_seen = see_tile(
            mask, bias, o, b, h, i0, rows, j0, n, lanes, is_in_reach, seen, t.biases
        )
        if num_seen == 0:
            return
    tile_product(
        K_j.line, K_j.start, K_j.stride, 1, panel.Q, 0, lanes, S, 0, lanes, t.scale, n, vectors, D
    )  # line 8
    if bends(bias, o):
        bend_tile(S, bias, t.biases, o, b, h, i0, j0, n, lanes)
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
    must_tame = num_seen < n * rows and has_wild(V_j, n, Dv, t.zeros, t.ones, t.sums)
    V = tame(V_j, n, Dv, t.V) if must_tame else V_j
    tile_product_add(
        V.line, V.start, 1, V.stride, S, 0, lanes, panel.O, 0, lanes, t.correction, Dv, vectors, n
    )  # line 10
    if must_tame:
        add_wild(panel.O, S, seen, V_j, n, Dv, rows, lanes)


@jit
def has_wild(V_j, n, Dv, zeros, ones, sums):
    """Whether NaN or infinity is among the values: only they make a product with 0 other than 0.

    ``zeros`` are n, ``ones`` a panel's, and ``sums`` is room for Dv numbers.
    """
    width = VECTOR_BITS // (8 * sums.itemsize)
    d = 0
    while d + width <= Dv:
        vectors = min(VECTORS, (Dv - d) // width)
        V = V_j.start + d
        tile_product(zeros, 0, 0, 1, V_j.line, V, V_j.stride, sums, d, 0, ones, 1, vectors, n)
        d += vectors * width
    found = False
    for x in range(d):
        found |= sums[x] != 0
    for x in range(d, Dv):
        for j in range(n):
            found |= is_wild(V_j.line[V_j.start + j * V_j.stride + x])
    return found


@jit
def is_wild(number):
    """Whether it is NaN or infinite; a comparison, since compilers may know what 0 · number is."""
    return not abs(number) < math.inf


@jit
def is_wild_key(V_j, j, Dv):
    found = False
    for d in range(Dv):
        found |= is_wild(V_j.line[V_j.start + j * V_j.stride + d])
    return found


@jit
def tame(V_j, n, Dv, copy):
    """The values with 0 for those of a key that is wild; ``add_wild`` adds these."""
    for j in range(n):
        is_tamed = is_wild_key(V_j, j, Dv)
        for d in range(Dv):
            copy[j * Dv + d] = 0 if is_tamed else V_j.line[V_j.start + j * V_j.stride + d]
    return Rows(copy, 0, Dv)


@jit
def add_wild(O, P, seen, V_j, n, Dv, rows, lanes):
    """Add the values that are wild to the queries that see them, and to no other."""
    for j in range(n):
        if is_wild_key(V_j, j, Dv):
            for r in range(rows):
                if seen[j * lanes + r]:
                    for d in range(Dv):
                        O[d * lanes + r] += (
                            P[j * lanes + r] * V_j.line[V_j.start + j * V_j.stride + d]
                        )


@glue
def store_panel(panel, O, L):
    """Lines 12 to 15: O / l, transposed back, and m + log l; 0 and -inf if no key was seen."""
    lanes, Dv = panel.vectors * full_panel(O.itemsize) // VECTORS, O.shape[3]
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
