"""CPU rung 4, parallel: the tiles of rung 3 on every core, and only those that matter.

- A task is up to four panels of one head. They take turns on each block of keys, so that K and V
  come from memory once for 192 queries. Threads draw tasks by number, the longest first, until none
  is left.
- A panel visits the keys within its reach, which ``key_range`` gives, and looks at single scores
  only in a tile that the mask cuts: with a causal mask the tiles on the diagonal.
- 16-bit K and V are widened a block at a time, so that only half the bytes come from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu3_vector_tiles import (
    B_C,
    Panel,
    Rows,
    full_panel,
    load_panel,
    make_scratch,
    num_panels,
    panel_rows,
    rows_at,
    store_panel,
    take_tile,
)
from minimha.kernels.entry import jit, kernel
from minimha.kernels.scores import key_range, sees
from minimha.kernels.simd import FASTMATH, ROWS, lanes, take_ticket
from minimha.kernels.threads import num_workers

PANELS = 4  # of a task
TASKS_A_THREAD = 4  # at least, so that threads end together


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``: it takes all, so None."""
    return None


def forward(
    problem: Problem, *, panels: int | None = None, B_c: int = B_C
) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.tiled.forward``.

    ``panels`` are those of a task: as many as leave each thread a few tasks, unless they are given.
    """
    workers = num_workers()
    if panels is None:
        B, H, Lq, _ = problem.q.shape
        all_panels = B * H * -(-Lq // lanes(problem.compute.itemsize))
        panels = min(PANELS, max(1, all_panels // (TASKS_A_THREAD * max(1, workers))))
    if workers:
        return parallel_tiles(problem, workers, panels, B_c)
    return serial_tiles(problem, panels, B_c)


@kernel(num_sizes=3, parallel=True, widens=True)
def parallel_tiles(q, k, v, mask, bias, o, O, L, workers, panels, B_c):
    tickets = np.zeros(1, np.int64)
    for _ in numba.prange(workers):
        work(q, k, v, mask, bias, o, O, L, tickets, panels, B_c)


@kernel(num_sizes=2, widens=True)
def serial_tiles(q, k, v, mask, bias, o, O, L, panels, B_c):
    work(q, k, v, mask, bias, o, O, L, np.zeros(1, np.int64), panels, B_c)


class Task(NamedTuple):
    """Room for a task's panels, a row a panel, and for blocks of q, k and v that are widened."""

    Q: Any
    O: Any
    m: Any
    l: Any
    copies: Any


@jit
def work(q, k, v, mask, bias, o, O, L, tickets, panels, B_c):
    """One thread: draw the next task until there is none."""
    (B, H, Lq, D), Dv = q.shape, v.shape[3]
    number = num_panels(Lq, O.itemsize)
    groups = -(-number // panels)
    widest = full_panel(O.itemsize)
    scratch = make_scratch(O, o, B_c, Dv)
    task = Task(
        np.empty((panels, D * widest), O.dtype),
        np.empty((panels, Dv * widest), O.dtype),
        np.empty((panels, widest), O.dtype),
        np.empty((panels, widest)),
        np.empty((3, max(B_c, widest) * max(D, Dv)), O.dtype),
    )
    while True:
        ticket = take_ticket(tickets)
        if ticket >= B * H * groups:
            return
        group, head = groups - 1 - ticket // (B * H), ticket % (B * H)
        b, h = head // H, head % H
        first, last = group * panels, min((group + 1) * panels, number)
        for p in range(first, last):
            panel = panel_of(task, p, first, Lq, O.itemsize, b, h)
            rows = readable(q, b, h, panel.i0, panel.rows, o, task.copies[0])
            load_panel(panel, rows, D, o.sinks[h])
        take_keys(task, first, last, q, k, v, mask, bias, o, O.itemsize, b, h, B_c, scratch)
        for p in range(first, last):
            store_panel(panel_of(task, p, first, Lq, O.itemsize, b, h), O, L)


@jit
def panel_of(task, p, first, Lq, itemsize, b, h):
    """Panel p, in the room that a task which begins with panel ``first`` has for it."""
    i0, rows, vectors = panel_rows(Lq, itemsize, p)
    u = p - first
    return Panel(task.Q[u], task.O[u], task.m[u], task.l[u], b, h, i0, rows, vectors)


@jit
def take_keys(task, first, last, q, k, v, mask, bias, o, itemsize, b, h, B_c, scratch):
    """Lines 6 to 11 for the panels of a task, block of keys by block of keys."""
    (H, Lq, D), Dv = q.shape[1:], v.shape[3]
    kv = h // (H // k.shape[1])
    offset, length = o.q_offset[b], o.kv_lengths[b]
    i_start, _, _ = panel_rows(Lq, itemsize, first)
    i_last, rows, _ = panel_rows(Lq, itemsize, last - 1)
    start, stop = key_range(i_start, i_last + rows, offset, o.left, o.right, length)
    for block in range(start // ROWS * ROWS, stop, B_c):
        block_stop = min(block + B_c, stop)
        K_j = readable(k, b, kv, block, block_stop - block, o, task.copies[1])
        V_j = readable(v, b, kv, block, block_stop - block, o, task.copies[2])
        for p in range(first, last):
            panel = panel_of(task, p, first, Lq, itemsize, b, h)
            i0, end = panel.i0, panel.i0 + panel.rows
            low, high = key_range(i0, end, offset, o.left, o.right, length)
            # Whole rows of the tile product: a few hidden keys cost less than the rest one by one.
            j0 = max(block, low // ROWS * ROWS)
            j1 = min(block_stop, -(-high // ROWS) * ROWS)
            if j0 < j1:
                sees_first = sees(end - 1, j0, offset, o.left, o.right, length)
                sees_last = sees(i0, j1 - 1, offset, o.left, o.right, length)
                is_cut = mask.size > 0 or bias.size > 0 or not (sees_first and sees_last)
                K, V = later(K_j, j0 - block), later(V_j, j0 - block)
                take_tile(panel, K, V, j0, j1 - j0, D, Dv, scratch, mask, bias, o, is_cut)


@jit
def later(rows, r):
    """``rows`` without the first r."""
    return Rows(rows.line, rows.start + r * rows.stride, rows.stride)


def readable(X, b, h, i, n, o, copy):
    """n rows of X[b, h] from i on as floats: in place, or widened into ``copy``."""


@overload(readable, jit_options={"fastmath": FASTMATH})
def _readable(X, b, h, i, n, o, copy):
    if X.dtype != numba.types.uint16:
        return lambda X, b, h, i, n, o, copy: rows_at(X, b, h, i)

    def widen(X, b, h, i, n, o, copy):
        D = X.shape[3]
        for r in range(n):
            for d in range(D):
                copy[r * D + d] = real(X[b, h, i + r, d], o.is_bfloat16)
        return Rows(copy, 0, D)

    return widen


@jit
def real(bits, is_bfloat16):
    """The float32 that 16 bits stand for: its upper half (bfloat16), or IEEE's half (float16)."""
    word = np.uint32(bits)
    if is_bfloat16:
        return np.uint32(word << np.uint32(16)).view(np.float32)
    rest = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13))
    if rest >= np.uint32(0x7C00 << 13):  # infinity and NaN
        magnitude = np.uint32(rest | np.uint32(0x7F800000)).view(np.float32)
    else:  # exponent and mantissa in their new place are too small by 2^112, subnormals too
        magnitude = np.uint32(rest).view(np.float32) * np.float32(2.0**112)
    return -magnitude if word & np.uint32(0x8000) else magnitude
