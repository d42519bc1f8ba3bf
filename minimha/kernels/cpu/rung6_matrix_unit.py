"""CPU rung 6, matrix unit: compute both products of rung 4 in the CPU's matrix unit.

Intel AMX multiplies tiles of bfloat16 numbers and adds in float32 (``simd.matrix_unit``). Scores
are transposed as in rung 3, so that masks, options and softmax are the same:

- S = K_j Q_iᵀ multiplies rows of K by columns of Q_iᵀ, whose numbers are stored in pairs. Q is
  packed once per panel, and a block of K and V once per task. V is transposed for O += V_jᵀ P.
- bfloat16 is used unchanged. Other numbers are sums of *parts* (``simd.parts``): float16 has two,
  so that one product becomes four, and the weights P have two, to keep more digits.
- Products are so fast that everything around them matters. Scores are scaled inside the
  exponential, and m is raised only if a score exceeds it by ``SLACK``: O is seldom corrected.
- A part may be 0 and a value infinite, and their product would be NaN. So a key with a nonfinite
  value is left out of the product, and ``add_nonfinite`` adds it wherever it is visible.

Nonzero inputs smaller than 2^-126 count as ±2^-126, and weights below 2^-126 as 0. Rung 4 computes
other dtypes, and all dtypes on CPUs without AMX. float32 would need three parts and six products.
In a trial it was then 1.1 × as fast as in rung 4 with 1024 tokens, and 0.75 × with 128, where few
queries share packed keys. If another thread of the core was busy, it was not faster than rung 4.

Measured: 2.8 × as fast as rung 4 in bfloat16, 1.9 × in float16, on one core (8 heads, 1024 tokens,
width 64; 3.5 and 2.1 × at width 128; Intel Xeon with AMX, 2026-11-23).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu import rung4_parallel
from minimha.kernels.cpu.arguments import REAL, Buffer, unpacker
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.kernel import Kernel, Plan, Sizes
from minimha.kernels.cpu.nonfinite import add_nonfinite, is_nonfinite_key
from minimha.kernels.cpu.panel import PANEL_BUFFERS, begin_panel, buffer_lengths, mask_panel, weigh
from minimha.kernels.cpu.rung4_parallel import key_loop, shared_out, task_loop
from minimha.kernels.cpu.simd.matrix_unit import (
    DEPTH,
    TILE,
    configure_tiles,
    is_usable,
    matrix_product,
    release_tiles,
    whole,
)
from minimha.kernels.cpu.simd.memory import flat, halves_of
from minimha.kernels.cpu.simd.parts import WIDTH, pack_rows, split_rows
from minimha.kernels.cpu.simd.softmax import scale_lanes
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.simd.vector import panel_width
from minimha.kernels.cpu.storage import Rows, float_rows, rows_at, rows_from

PANELS = 24  # per task, at most: more than in rung 4, because keys are packed for each task
TASKS_PER_THREAD = 4  # at least: fewer than in rung 4, for the same reason
B_C = 128
SLACK = 8  # the most by which a score may exceed m, so that weights are at most e^8
# A thread's buffers, besides those of a panel: rows of Q or V before they are transposed, the end
# of a row, a block of K, a transposed block of V, and V widened if it is nonfinite.
PACKED = ("rows", "tail", "packed_K", "packed_V", "wide_V")
BUFFERS = PANEL_BUFFERS | dict.fromkeys(PACKED, Buffer(REAL))
unpack = unpacker(**BUFFERS)


def is_made_for(dtype: np.dtype[Any]) -> bool:
    """Return whether this CPU's matrix unit supports ``dtype``; uint16 means 16-bit floats."""
    return dtype.itemsize == 2 and is_usable()


def plan(problem: Problem, **chosen: int) -> Plan:
    """Return a ``Plan`` with this kernel if the CPU's matrix unit can be used, else with rung 4."""
    is_halves = is_made_for(problem.dtype) and problem.k_scale is None
    kernel = KERNEL if is_halves else rung4_parallel.KERNEL
    return kernel.plan(problem, **chosen)


def forward(problem: Problem, **chosen: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O and log-sum-exp L of ``problem``; see ``Kernel.forward``."""
    return plan(problem, **chosen)(problem)


def sizes(problem: Problem, *, panels: int | None = None, B_c: int = B_C) -> Sizes:
    """Return buffer lengths and threads for ``problem``, with ``panels`` panels per task.

    By default a task has up to 24 panels. A block has ``B_c`` keys.
    """
    D, Dv, itemsize = problem.q.shape[3], problem.v.shape[3], problem.compute.itemsize
    most, workers = shared_out(problem, PANELS, TASKS_PER_THREAD)
    panels = panels or most
    B_c, lanes = whole(B_c, DEPTH), panel_width(itemsize)
    row_of_Q, row_of_V, rows_of_O = whole(D, DEPTH), whole(Dv, WIDTH), whole(Dv, TILE)
    items = {  # 16-bit numbers of one part
        "Qs": panels * lanes * row_of_Q, "rows": max(lanes * row_of_Q, B_c * row_of_V),
        "packed_K": (B_c + TILE) * row_of_Q, "packed_V": rows_of_O * (B_c + DEPTH),
    }  # fmt: skip
    parts = 1 if problem.dtype.name == "bfloat16" else 2
    lengths = buffer_lengths(itemsize, D, Dv, B_c, panels) | {"V_j": 0, "wide_V": B_c * Dv}
    lengths |= {name: parts * number // 2 for name, number in items.items()}
    lengths |= {"Os": panels * lanes * rows_of_O, "tail": WIDTH // 2, "counters": workers}
    return Sizes((panels, B_c), lengths, workers)


class Packed(NamedTuple):
    """Rows of numbers, each a sum of bfloat16 parts.

    Part p of number c of row r is ``line[p * part + r * row + c]``.
    """

    line: Any
    row: int
    part: int


class Block(NamedTuple):
    """The packed K and Vᵀ of a block of keys.

    ``V`` is the packed Vᵀ. If V has NaN or infinity, ``is_finite`` is False, ``values`` is V as
    floats, and Vᵀ is 0 for the keys with such values.
    """

    K: Any
    V: Any
    values: Any
    is_finite: bool


@jit
def num_parts(o):
    """Return the number of bfloat16 parts of each number of Q, K and V, 1 or 2."""
    return 1 if o.is_bfloat16 else 2


@jit
def pack(X, b, h, i, n, o, tail, to):
    """Split n rows of X[b, h] from row i on into parts; return whether a number is nonfinite.

    The parts are written to ``to``, which is ``Packed``. ``tail`` is scratch memory for
    ``simd.parts.pack_rows``.
    """
    rows = rows_at(X, b, h, i)
    return pack_rows(
        rows.line, rows.start, rows.stride, to.line, to.row, to.part, n, X.shape[3],
        o.is_bfloat16, halves_of(tail),
    )  # fmt: skip


@jit_inline
def load_queries(panel, q, entry, i0, Dv, o, t):
    """Transpose Q by pairs of numbers, and initialize m, l and O (FlashAttention-2, lines 4, 5)."""
    lanes, row = panel.lanes, whole(q.shape[3], DEPTH)
    packed = Packed(halves_of(t.rows), row, lanes * row)
    pack(q, entry, panel.h, i0, panel.rows, o, t.tail, packed)
    for part in range(0, num_parts(o) * packed.part, packed.part):
        for x in range(panel.rows * row, packed.part):
            packed.line[part + x] = 0
        transpose(t.rows, part // 2, row // 2, panel.Q, part // 2, lanes, lanes, row // 2)
    begin_panel(panel, whole(Dv, TILE), t, o)


@jit_inline
def load_block(k, v, page, kv, at, n, o, t):
    """Pack n rows of K[page, kv] and V[page, kv], from row ``at`` on, into a ``Block`` (line 7)."""
    Dv, parts = v.shape[3], num_parts(o)
    K = Packed(halves_of(t.packed_K), whole(k.shape[3], DEPTH), 2 * len(t.packed_K) // parts)
    pack(k, page, kv, at, n, o, t.tail, K)
    rows = Packed(halves_of(t.rows), whole(Dv, WIDTH), n * whole(Dv, WIDTH))
    is_finite = not pack(v, page, kv, at, n, o, t.tail, rows)
    values = Rows(t.wide_V, 0, Dv)
    if not is_finite:
        values = float_rows(v, page, kv, at, n, o, t.wide_V)
        zero_nonfinite(values, rows, n, Dv, parts)
    part = 2 * len(t.packed_V) // parts
    V = Packed(halves_of(t.packed_V), part // whole(Dv, TILE), part)
    for p in range(parts):
        transpose(rows.line, p * rows.part, rows.row, V.line, p * part, V.row, n, Dv)
        for d in range(Dv):
            for j in range(n, min(n + DEPTH, V.row)):
                V.line[p * part + d * V.row + j] = 0
    return Block(K, V, values, is_finite)


@jit
def zero_nonfinite(values, rows, n, Dv, parts):
    """Set the parts of each of n rows to 0 in ``rows`` if that row of ``values`` is nonfinite."""
    for j in range(n):
        if is_nonfinite_key(values, j, Dv):
            for first in range(j * rows.row, j * rows.row + parts * rows.part, rows.part):
                for d in range(Dv):
                    rows.line[first + d] = 0


@jit_inline
def update(panel, block, first, j0, n, D, Dv, t, mask, bias, o, full):
    """Update m, l and O with the keys of a ``Block`` from ``first`` on, like ``update_panel``."""
    S, visible = flat(t.S, 0), flat(t.visible, 0)
    K, V, lanes, parts = block.K, block.V, panel.lanes, num_parts(o)
    num_visible = n * panel.rows
    is_partial = mask.size > 0 or bias.size > 0 or o.score_mod != 0 or o.picks.size > 0
    if is_partial or not full or not block.is_finite:
        num_visible = mask_panel(panel, j0, n, t, mask, bias, o, full)
        if num_visible == 0:
            return
    matrix_product(
        K.line, first * K.row, K.row, K.part, parts, panel.Q, 0, lanes, K.row // 2 * lanes, parts,
        S, 0, lanes, n, lanes, K.row, False,
    )  # line 8  # fmt: skip
    weigh(panel, S, False, SLACK, num_visible, j0, n, t, bias, o)  # line 9
    is_corrected = False
    for r in range(lanes):
        is_corrected |= t.correction[r] != 1
    if is_corrected:
        scale_lanes(panel.O, 0, Dv, lanes, t.correction)
    if not block.is_finite:
        V_j = rows_from(block.values, first)
        add_nonfinite(panel.O, S, visible, V_j, n, Dv, panel.rows, lanes)
    depth = whole(n, DEPTH)
    for x in range(n * lanes, depth * lanes):
        S[x] = 0
    split_rows(S, 0, n + n % 2, lanes)
    matrix_product(
        V.line, first, V.row, V.part, parts, S, 0, 2 * lanes, lanes, 2,
        panel.O, 0, lanes, Dv, lanes, depth, True,
    )  # line 10  # fmt: skip


compute_tasks = task_loop(load_queries, key_loop(load_block, update))


def matrix_tiles(line, worker):
    """Run thread number ``worker`` of the kernel, which computes tasks until none is left."""
    q, k, v, mask, bias, o, O, L, t, (panels, B_c) = unpack(line, worker)
    configure_tiles()
    compute_tasks(q, k, v, mask, bias, o, O, L, t, panels, B_c)
    release_tiles()


KERNEL = Kernel(
    matrix_tiles, BUFFERS, sizes, widens=True, skips=True, largest_weight=math.ceil(math.exp(SLACK))
)
