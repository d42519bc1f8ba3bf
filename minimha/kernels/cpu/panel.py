"""Compute the outputs of a panel, which is a group of queries with one query per vector lane.

CPU rungs 3, 4 and 6 use panels; ``rung3_vector_tiles`` explains why. Line numbers are those of
FlashAttention-2's Algorithm 1, with running maximum m, sum l and output O. ``t`` holds a thread's
buffers, and ``o`` the options of the problem.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numba import types
from numba.extending import overload

from minimha.kernels.cpu.arguments import BYTE, DOUBLE, NONFINITE, REAL, Buffer
from minimha.kernels.cpu.jit import OPTIONS, jit, jit_inline, jit_too
from minimha.kernels.cpu.mask import (
    apply_score_mod,
    apply_softcap_and_bias,
    has_softcap_or_bias,
    hide,
    mask_tile,
)
from minimha.kernels.cpu.nonfinite import add_nonfinite, has_nonfinite, zero_nonfinite
from minimha.kernels.cpu.simd.memory import flat, halves_of
from minimha.kernels.cpu.simd.product import tile_product, tile_product_add, whole_tiles
from minimha.kernels.cpu.simd.softmax import lanes_exp, lanes_max, round_lanes, scale_lanes
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.simd.vector import VECTOR_BITS, VECTORS, panel_width
from minimha.kernels.cpu.storage import Rows, queries_of, rows_at, rows_from, write_numbers

FAR = 1 << 16  # a score: float32 rounds larger ones by more than 0.004
B_C = 160  # a tile of scores, 160 keys × 48 queries of float32, is 30 KiB of the L1 cache


class Panel(NamedTuple):
    """Queries i0 to i0 + rows of head h, with their running maximum m, sum l and output O.

    ``Q`` is (D, lanes) and ``O`` is (Dv, lanes), flat. ``m`` and ``l`` are (lanes,); ``l``, a long
    sum, is in float64. The panel is ``vectors`` vectors wide; lanes beyond ``rows`` are padding.
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
    lanes: int


# One thread's buffers. For each panel: Q, O, m and l. For one tile: scores, visible pairs, biases,
# a copy of V. One number per lane: scales to total.
PANEL_BUFFERS = dict.fromkeys(
    ("Qs", "Os", "ms", "S", "biases", "V_j", "scales", "top", "shift", "correction", "total"),
    Buffer(REAL),
) | {"ls": Buffer(DOUBLE), "visible": Buffer(BYTE)}


def buffer_lengths(itemsize: int, D: int, Dv: int, B_c: int, panels: int) -> dict[str, int]:
    """Return the length of each of ``PANEL_BUFFERS``, with room for whole register tiles.

    A thread has ``panels`` panels at once, and tiles of B_c keys.
    """
    lanes, keys, columns = panel_width(itemsize), whole_tiles(B_c), whole_tiles(Dv)
    lengths = dict.fromkeys(("scales", "top", "shift", "correction", "total"), lanes)
    lengths |= dict.fromkeys(("S", "visible", "biases"), keys * lanes) | {"V_j": keys * Dv}
    lengths |= {"Qs": panels * D * lanes, "Os": panels * columns * lanes}
    return lengths | {"ms": panels * lanes, "ls": panels * lanes}


@jit
def panel_of(t, u, Lq, b, h, p):
    """Return the p-th panel of head h, with Q, O, m and l in section u of their buffers."""
    widest = panel_width(t.ms.itemsize)
    panels = len(t.ms) // widest
    i0, rows, vectors = panel_rows(Lq, t.ms.itemsize, p)
    Q, O = flat(t.Qs, u * (len(t.Qs) // panels)), flat(t.Os, u * (len(t.Os) // panels))
    m, l = flat(t.ms, u * widest), flat(t.ls, u * widest)
    return Panel(Q, O, m, l, b, h, i0, rows, vectors, vectors * widest // VECTORS)


@jit_too
def num_panels(Lq, itemsize):
    """Return the number of panels for Lq queries whose numbers have ``itemsize`` bytes."""
    return -(-Lq // panel_width(itemsize))


@jit
def panel_rows(Lq, itemsize, p):
    """Return the first query, the number of queries and the width in vectors of panel p."""
    width = VECTOR_BITS // (8 * itemsize)
    total, number = -(-Lq // width), num_panels(Lq, itemsize)
    first = p * total // number
    vectors = (p + 1) * total // number - first
    return first * width, min(Lq - first * width, vectors * width), vectors


@jit
def load_panel(panel, Q, D, Dv, t, o):
    """Copy Qᵀ into a panel, and initialize m, l and O (FlashAttention-2, lines 4 and 5)."""
    lanes = panel.lanes
    transpose(Q.line, Q.start, Q.stride, panel.Q, 0, lanes, panel.rows, D)
    if panel.rows < lanes:
        for d in range(D):
            for r in range(panel.rows, lanes):
                panel.Q[d * lanes + r] = 0
    begin_panel(panel, whole_tiles(Dv), t, o)


@jit
def begin_panel(panel, rows_of_O, t, o):
    """Initialize maximum m, sum l and output O of a panel (FlashAttention-2, line 5).

    m and l begin with the sink. The scale is written to all of ``t.scales``.
    """
    lanes, sink = panel.lanes, o.sinks[panel.h]
    for x in range(rows_of_O * lanes):
        panel.O[x] = 0
    for r in range(lanes):
        t.scales[r] = o.scale
        panel.m[r] = sink
        panel.l[r] = 0 if sink == -math.inf else 1


@jit_inline
def update_panel(panel, block, first, j0, n, D, Dv, t, mask, bias, o, full):
    """Update m, l and O of a panel with n keys from j0 on (FlashAttention-2, lines 8 to 10).

    These keys are the rows of ``block``, a pair K_j and V_j, from ``first`` on. If ``full``,
    causality, window, length and ``mask_mod`` hide none of them.
    """
    K_j, V_j = rows_from(block[0], first), rows_from(block[1], first)
    S, visible = flat(t.S, 0), flat(t.visible, 0)
    rows, vectors, lanes = panel.rows, panel.vectors, panel.lanes
    num_visible = n * rows
    if mask.size or bias.size or o.score_mod or o.picks.size or not full:
        num_visible = mask_panel(panel, j0, n, t, mask, bias, o, full)
        if num_visible == 0:
            return
    tile_product(
        K_j.line, K_j.start, K_j.stride, 1, panel.Q, 0, lanes, S, 0, lanes, t.scales, n, vectors, D
    )  # line 8
    num_visible = weigh(panel, S, True, 0, num_visible, j0, n, t, bias, o)  # line 9
    is_zeroed = num_visible < n * rows and has_nonfinite(V_j, n, Dv)
    V = zero_nonfinite(V_j, n, Dv, t.V_j) if is_zeroed else V_j
    tile_product_add(
        V.line, V.start, 1, V.stride, S, 0, lanes, panel.O, 0, lanes, t.correction, Dv, vectors, n
    )  # line 10
    if is_zeroed:
        add_nonfinite(panel.O, S, visible, V_j, n, Dv, rows, lanes)


@jit_inline
def mask_panel(panel, j0, n, t, mask, bias, o, full):
    """Write the mask of a panel and n keys from j0 on, and return the number of visible pairs.

    ``full`` has the same meaning as in ``update_panel``.
    """
    return mask_tile(
        mask, bias, o, panel.b, panel.h, panel.i0, panel.rows, j0, n, panel.lanes, full,
        flat(t.visible, 0), t.biases,
    )  # fmt: skip


@jit_inline
def weigh(panel, S, is_scaled, slack, num_visible, j0, n, t, bias, o):
    """Turn n rows of scores into weights, and update m and l (FlashAttention-2, line 9).

    ``is_scaled`` means that the scores are already scaled. If not, they are scaled inside the
    exponential, which saves a pass. But they are scaled before it if another step needs scaled
    scores, if the scale is not positive, or if a query's largest score is beyond ±``FAR``. m is
    raised only if a score exceeds it by more than ``slack``, so weights are at most exp(slack).
    ``num_visible`` is the number of pairs of this tile that the masks leave visible. The function
    returns that number without the pairs that ``score_mod`` hides. The caller must multiply O by
    ``t.correction``.
    """
    b, h, i0, rows, vectors = panel.b, panel.h, panel.i0, panel.rows, panel.vectors
    lanes, visible, scale = panel.lanes, flat(t.visible, 0), S.dtype.type(1)
    if not is_scaled:
        if o.scale <= 0 or has_softcap_or_bias(bias, o) or o.score_mod:
            scale_lanes(S, 0, n, lanes, t.scales)
        else:
            scale = t.scales[0]
    if has_softcap_or_bias(bias, o):
        apply_softcap_and_bias(S, bias, t.biases, o, b, h, i0, j0, n, lanes)
    if o.score_mod:
        num_visible = apply_score_mod(S, visible, o, b, h, i0, rows, j0, n, lanes)
    if num_visible < n * rows:
        hide(S, visible, n * lanes)
    lanes_max(S, 0, n, vectors, t.top)
    if scale != 1:
        is_far = False
        for r in range(lanes):
            t.top[r] *= scale
            is_far |= t.top[r] > FAR or -math.inf < t.top[r] < -FAR
        if is_far:  # the exponential scales without rounding, but m is rounded
            scale_lanes(S, 0, n, lanes, t.scales)
            scale = S.dtype.type(1)
    for r in range(lanes):
        m, top = panel.m[r], t.top[r]
        panel.m[r] = top if top > m + slack else m
        t.shift[r] = panel.m[r] if panel.m[r] > -math.inf else 0
        t.correction[r] = m if m > -math.inf else t.shift[r]  # O and l are still 0
    lanes_exp(t.correction, 0, 1, vectors, 1, t.shift, t.total)
    lanes_exp(S, 0, n, vectors, scale, t.shift, t.total)
    for r in range(lanes):
        panel.l[r] = t.correction[r] * panel.l[r] + t.total[r]
    return num_visible


@jit
def store_panel(panel, O, L, o, t):
    """Write O / l and L = m + log l, or 0 and -inf if l is 0 (FlashAttention-2, line 12 on)."""
    lanes, Dv = panel.lanes, O.shape[3]
    entry, first, _ = queries_of(o, panel.b)
    h, i0 = panel.h, first + panel.i0
    for r in range(panel.rows):
        m, l = panel.m[r], panel.l[r]
        L[entry, h, i0 + r] = m + math.log(L.dtype.type(l)) if l != 0 else -math.inf
        panel.m[r] = 1 / l if l != 0 else 0
    for r in range(panel.rows, lanes):
        panel.m[r] = 0
    store_lanes(panel, rows_at(O, entry, h, i0), Dv, o, t)


@jit
def scale_O(panel, d, n, t):
    """Multiply rows d to d + n of O by ``panel.m``, which holds 1 / l.

    Sets ``t.counters[NONFINITE]`` to 1 if a product is NaN or infinite.
    """
    lanes = panel.lanes
    scale_lanes(panel.O, d * lanes, n, lanes, panel.m)
    if has_nonfinite(Rows(panel.O, d * lanes, lanes), n, lanes):
        t.counters[NONFINITE] = 1


def store_lanes(panel, to, Dv, o, t):
    """Write O / l of a panel into the output rows ``to``, transposed to one query per row.

    ``panel.m`` must already hold 1 / l. A 16-bit output is rounded, and written as its bits.
    """


@overload(store_lanes, jit_options=OPTIONS)
def _store_lanes(panel, to, Dv, o, t):
    if to.types[0].dtype != types.uint16:

        def store(panel, to, Dv, o, t):
            lanes = panel.lanes
            scale_O(panel, 0, Dv, t)
            transpose(panel.O, 0, lanes, to.line, to.start, to.stride, Dv, panel.rows)

        return store

    def store_rounded(panel, to, Dv, o, t):
        halves, lanes = halves_of(t.S), panel.lanes
        room = 2 * len(t.S) // lanes
        for d in range(0, Dv, room):
            n = min(room, Dv - d)
            is_rounded = o.is_bfloat16 and round_lanes(
                panel.O, d * lanes, n, lanes, panel.m, halves
            )
            if not is_rounded:
                scale_O(panel, d, n, t)
                write_numbers(panel.O, d * lanes, halves, 0, n * lanes, o)
            transpose(halves, 0, lanes, to.line, to.start + d, to.stride, n, panel.rows)

    return store_rounded
