"""Find the blocks of scores that a ``mask_mod`` hides completely, so that kernels skip them."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.equations import block_mask
from minimha.equations.block_mask import COLUMNS, FULL, HIDDEN, PARTIAL, ROWS, BlockMask
from minimha.equations.functions import WHOLE, Corner, read, uses
from minimha.equations.problem import Problem
from minimha.kernels import os_threads
from minimha.kernels.cpu.arguments import address
from minimha.kernels.cpu.compiler import Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.functions import Function, call_tile, given, raise_again, tile_function
from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.threads import get_num_threads
from minimha.kernels.functions import I64, Refused

FILL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
FLOAT32 = np.dtype(np.float32)
MOST = 256  # block masks in memory; a problem in parts has many
LARGEST_KEPT = 1 << 20  # bytes of a block mask
WORTH_SHARING = 1 << 14  # blocks; for fewer, starting threads takes longer than finding the states

_kept: dict[Hashable, Any] = {}


class Blocks(NamedTuple):
    """How much of each block of scores a ``mask_mod`` hides, for B sequences of any lengths.

    A block's state is HIDDEN, PARTIAL or FULL (nothing is hidden). Without packed sequences, each
    batch entry is a sequence. The blocks of each sequence and head are in row-major order.
    """

    blocks: NDArray[np.uint8]  # (N,): all states, as in ``BlockMask``; empty if they are not known
    first_blocks: NDArray[np.int64]  # (B, H): the first block of a sequence and head
    block_columns: NDArray[np.int64]  # (B,): blocks per row
    block_rows: NDArray[np.int64]  # (B,): the query of the mask that is query 0


@cache
def no_blocks(H: int) -> Blocks:
    """Return empty ``Blocks`` for H heads, cached because new arrays take microseconds."""
    none = np.empty(0, np.int64)
    return Blocks(np.empty(0, np.uint8), np.empty((0, H), np.int64), none, none)


def blocks_of(problem: Problem) -> Blocks:
    """Return the ``Blocks`` of the ``mask_mod`` of ``problem``; small ones are cached."""
    H, B, Lk = problem.q.shape[1], len(problem.kv_lengths), problem.k.shape[2]
    mask_mod: Any = problem.mask_mod
    sequences = problem.sequences
    ids = np.arange(B) if sequences is None else sequences.ids
    if isinstance(mask_mod, BlockMask):
        num_batch, heads, rows, columns = mask_mod.states.shape
        firsts = np.arange(num_batch * heads).reshape(num_batch, heads) * rows * columns
        states, offsets = np.ascontiguousarray(mask_mod.states).ravel(), np.array(mask_mod.q_offset)
        firsts, offsets = (x[ids] if len(x) > 1 else x for x in (firsts, offsets))
        each_head, first_rows = np.broadcast_to(firsts, (B, H)), problem.q_offset - offsets
        return Blocks(states, each_head, np.full(B, columns), first_rows)
    ids = ids + problem.corner.b
    lengths = np.full(B, Lk) if sequences is None else problem.kv_lengths
    facts = ids * uses(mask_mod, 0), problem.num_queries, lengths, problem.q_offset
    each = zip(*(fact.tolist() for fact in facts), strict=True)
    numbers: dict[tuple[int, ...], int] = {}  # np.unique takes 40 µs, even for one sequence
    kind = np.array([numbers.setdefault(one, len(numbers)) for one in each], np.int64)
    kinds = np.array(list(numbers), np.int64).reshape(-1, len(facts))
    uses_heads = uses(mask_mod, 1)
    heads = H if uses_heads else 1
    corner = Corner(0, problem.corner.h * uses_heads, problem.corner.key)
    key = (problem.contents["mask_mod"], corner, heads, kinds.tobytes())
    found = _kept.get(key)
    if found is None:
        found = _found(given(problem)[-1], kinds, heads, corner)
        if found is None:
            raise_again(problem)
        if found.nbytes <= LARGEST_KEPT:
            if len(_kept) >= MOST:
                _kept.clear()
            _kept[key] = found
    rows, columns, firsts = _layout(kinds, heads)
    each_head = firsts[kind, None] + np.arange(heads) * (rows * columns)[kind, None]
    first_rows = np.zeros(B, np.int64)
    return Blocks(found, np.broadcast_to(each_head, (B, H)), columns[kind], first_rows)


def block_states(
    mask_mod: Any, B: int, H: int, Lq: int, Lk: int, q_offset: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return ``BlockMask.states``, computed with machine code of ``mask_mod``, or else in NumPy.

    The shape is (B, H, ⌈Lq / 16⌉, ⌈Lk / 32⌉): one state for each block of 16 queries × 32 keys.
    """
    kinds = np.column_stack((np.arange(B), np.full(B, Lq), np.full(B, Lk), q_offset))
    try:
        found = _found(Function("mask_mod", mask_mod, FLOAT32, read(mask_mod)), kinds, H)
    except Refused:
        found = None
    if found is None:  # it was not compiled, or it raised: then NumPy raises the same error
        return block_mask.states(mask_mod, B, H, Lq, Lk, q_offset)
    return found.reshape(B, H, -(-Lq // ROWS), -(-Lk // COLUMNS))


def _layout(kinds: NDArray[np.int64], heads: int) -> tuple[NDArray[np.int64], ...]:
    """Return for each of ``kinds`` the rows and columns of blocks, and the first block's index."""
    rows, columns = -(-kinds[:, 1] // ROWS), -(-kinds[:, 2] // COLUMNS)
    sizes = heads * rows * columns
    return rows, columns, np.cumsum(sizes) - sizes


def _found(
    mask_mod: Function, kinds: NDArray[np.int64], heads: int, corner: Corner = WHOLE
) -> NDArray[np.uint8] | None:
    """Return the states of all blocks, for ``heads`` heads each; None if ``mask_mod`` raises.

    ``kinds`` (n, 4) has b, the number of queries, the number of keys, and query 0's position.
    """
    tile = tile_function(mask_mod)
    line: Any = tile.line(mask_mod.reading.values)
    rows, columns, firsts = _layout(kinds, heads)
    states: NDArray[Any] = np.zeros(heads * int(rows @ columns), np.uint8)
    table: NDArray[Any] = np.column_stack((kinds, firsts))
    sizes: NDArray[Any] = np.array([len(kinds), heads, corner.h, corner.key])
    failed: NDArray[Any] = np.zeros(1, np.int64)
    threads = get_num_threads() if states.size >= WORTH_SHARING else 1
    visible: NDArray[Any] = np.empty((threads, ROWS * COLUMNS), np.uint8)
    run = FILL(_filling().address)
    arrays = states, visible, failed, table, sizes

    def fill_from(first: int, held: Any = (tile, mask_mod)) -> None:  # ``held`` must live as long
        run(line.buffer_info()[0], *map(address, arrays), first, threads)

    if threads == 1:  # without starting a thread
        fill_from(0)
    else:
        os_threads.call([partial(fill_from, first) for first in range(threads)])
    return None if failed[0] else states


@cache
def _filling() -> Compiled:
    """Load or compile ``fill`` as machine code."""
    items = [types.CPointer(kind) for kind in (types.uint8, types.uint8, I64, I64, I64)]
    signature = types.void(I64, *items, I64, I64)
    return compiled(fill, signature, File("blocks", str(signature)))


@jit
def visible_range(o, b, h, i0, i1, j0, j1):
    """Return the range of keys from j0 to j1 after dropping HIDDEN blocks at both ends.

    Keys are dropped if their blocks are HIDDEN for all queries from i0 to i1. The third result is
    whether all blocks from j0 to j1 are FULL (nothing is hidden). If ``o.blocks`` is empty, the
    results are j0, j1 and False.
    """
    if not o.blocks.size:
        return j0, j1, False
    first, last, is_full, columns = j1, j0, True, o.block_columns[b]
    i0, i1 = i0 + o.block_rows[b], i1 + o.block_rows[b]
    for column in range(j0 // COLUMNS, -(-j1 // COLUMNS)):
        for row in range(i0 // ROWS, -(-i1 // ROWS)):
            state = o.blocks[o.first_blocks[b, h] + row * columns + column]
            is_full &= state == FULL
            if state != HIDDEN:
                first, last = min(first, column * COLUMNS), max(last, (column + 1) * COLUMNS)
    return max(j0, first), min(j1, last), is_full


@jit
def visible_to_heads(o, b, h, heads, Lq, j0, j1):
    """Return the union of ``visible_range`` of queries 0 to Lq over heads h to h + ``heads``.

    The third result is whether all blocks from j0 to j1 are FULL for all these heads.
    """
    j1 = max(j0, j1)  # without keys, j0 may be far beyond j1
    first, last, is_full = j1, j0, True
    for head in range(h, h + heads):
        start, stop, all_visible = visible_range(o, b, head, 0, Lq, j0, j1)
        first, last, is_full = min(first, start), max(last, stop), is_full and all_visible
    return first, last, is_full


@jit
def visible_run(o, b, h, heads, Lq, j0, j1):
    """Return the first range of keys between j0 and j1 that contains no hidden block.

    Without such keys, it is the empty range j1 to j1. The third result is whether all blocks of the
    range are FULL. If ``o.blocks`` is empty, the results are j0, j1 and False. A block is hidden if
    it hides all its keys from queries 0 to Lq of heads h to h + ``heads``.
    """
    if not o.blocks.size:
        return j0, j1, False
    start, stop, is_full = j0, j0, True
    while stop < j1:
        end = min(j1, (stop // COLUMNS + 1) * COLUMNS)
        first, last, all_visible = visible_to_heads(o, b, h, heads, Lq, stop, end)
        if first < last:
            stop, is_full = end, is_full and all_visible
        elif start < stop:
            break
        else:
            start, stop = end, end
    return start, stop, is_full


def fill(tile, states, visible, failed, table, sizes, first, step):
    """Compute the states of every ``step``-th row of blocks, as one of ``step`` threads.

    ``first`` is the number of the thread. ``tile`` is a ``Tile.line``. For each sequence ``table``
    has b, the numbers of queries and of keys, the position of query 0, and the index of the first
    state. ``sizes`` holds the numbers of sequences and heads, the first h and the first j.
    ``visible`` has room for one block per thread. ``failed[0]`` becomes 1 if ``mask_mod`` raises.
    """
    num_sequences, heads, first_head, first_key = sizes[0], sizes[1], sizes[2], sizes[3]
    start, turn = first * ROWS * COLUMNS, 0
    for s in range(num_sequences):
        b, Lq, Lk = table[5 * s], table[5 * s + 1], table[5 * s + 2]
        offset, to = table[5 * s + 3], table[5 * s + 4]
        rows, columns = -(-Lq // ROWS), -(-Lk // COLUMNS)
        for row in range(rows):
            turn += 1
            if turn % step != first:
                continue
            i0, lines = row * ROWS, min(ROWS, Lq - row * ROWS)
            for h in range(heads):
                for column in range(columns):
                    j0, length = column * COLUMNS, min(COLUMNS, Lk - column * COLUMNS)
                    size, count = lines * length, 0
                    for x in range(size):
                        visible[start + x] = 1
                    to_h, i, j = first_head + h, first_key + offset + i0, first_key + j0
                    call_tile(tile, visible, start, failed, b, to_h, i, j, lines, length, length, 0)
                    for x in range(size):
                        count += visible[start + x]
                    state = HIDDEN if count == 0 else FULL if count == size else PARTIAL
                    states[to + (h * rows + row) * columns + column] = state
