"""A caller's ``score_mod`` and ``mask_mod`` as machine code, which a kernel calls once per tile.

The kernel stays the same for all functions, and so on disk: it finds the address of a function
among its arguments. What is compiled here is a loop over a tile around the caller's function, which
LLVM inlines and vectorizes::

    tile(S, failed, b, h, i, j, lines, length, stride, is_transposed)

The x-th item of line y, ``S[y * stride + x]``, belongs to query i + y and key j + x, or, where the
tile ``is_transposed``, to query i + x and key j + y. A tile of bytes says who sees whom. Indices of
captured arrays are checked: an exception of the function ends the loop and makes ``failed[0]`` 1,
since nobody could catch it, and ``raise_again`` finds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from minimha.equations import block_mask
from minimha.equations.arguments import name_of
from minimha.equations.block_mask import COLUMNS, FULL, HIDDEN, PARTIAL, ROWS, BlockMask
from minimha.equations.functions import WHOLE, Place, allowed, contents, modified, uses
from minimha.equations.problem import Problem
from minimha.kernels import os_threads
from minimha.kernels.cpu.arguments import address
from minimha.kernels.cpu.compiler import Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import FASTMATH, jit
from minimha.kernels.cpu.simd.vector import INT, pointer_to
from minimha.kernels.cpu.threads import get_num_threads
from minimha.kernels.functions import I64, NotNow, Refused, check_returned, compiled_function

FILL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
FLOAT32 = np.dtype(np.float32)
OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "nogil": True}
MOST = 256  # functions that are kept, and block masks
LARGEST_KEPT = 1 << 20  # bytes of a block mask
CALLED = 128  # queries and keys of the tiles in which an exception is looked for
WORTH_SHARING = 1 << 14  # blocks, which one thread asks about while others start

_kept: dict[Hashable, Any] = {}  # functions
_kept_blocks: dict[Hashable, Any] = {}  # of which a problem in parts has many


class Function(NamedTuple):
    """A caller's function for scores of one dtype, and what it captures in this call."""

    name: str
    given: Any
    compute: np.dtype[Any]
    contents: Hashable

    @property
    def key(self) -> Hashable:
        """What is compiled is found by this; a mask does not depend on the dtype of the scores."""
        return self.name, self.contents, self.compute.name if self.name == "score_mod" else None


def given(problem: Problem) -> list[Function]:
    """The functions of ``problem``."""
    return [
        Function(name, function, problem.compute, problem.contents[name])
        for name, function in problem.functions.items()
    ]


def unsupported(problem: Problem) -> str | None:
    """Return why a function of ``problem`` cannot be compiled, or None."""
    try:
        for function in given(problem):
            _compiled(function)
    except Refused as error:
        return str(error)
    return None


def is_ready(problem: Problem) -> bool:
    """Whether all functions of ``problem`` are compiled."""
    return all(function.key in _kept for function in given(problem))


def tile_function(function: Function) -> Any:
    """The loop around ``function``, numba's ``CFunc``: its ``address`` is what kernels call.

    Raises
    ------
    Refused
        numba cannot compile the function.
    TypeError
        A ``score_mod`` does not return a real number, or a ``mask_mod`` no bool.
    """
    dispatcher, returned = _compiled(function)
    check_returned(function.name, returned)
    key = ("tile", function.key)
    return _kept.get(key) or _keep(_kept, key, _looped(function, dispatcher))


class Blocks(NamedTuple):
    """Which blocks of scores a ``mask_mod`` hides, of sequences that differ in length.

    Attributes
    ----------
    blocks : ndarray of shape (N,), uint8
        The states of all blocks, as in ``BlockMask``; none where nothing is known.
    first_blocks : ndarray of shape (B, H), int64
        Where those of a sequence and head begin, row by row. B counts sequences, or batch entries.
    block_columns : ndarray of shape (B,), int64
        Blocks of keys, which is how many a row has.
    """

    blocks: NDArray[np.uint8]
    first_blocks: NDArray[np.int64]
    block_columns: NDArray[np.int64]


@cache
def no_blocks(H: int) -> Blocks:
    """Nothing is known; cached, because new arrays cost microseconds in each call."""
    return Blocks(np.empty(0, np.uint8), np.empty((0, H), np.int64), np.empty(0, np.int64))


def blocks_of(problem: Problem) -> Blocks:
    """What the ``mask_mod`` of ``problem`` hides; found once for sequences that it treats alike."""
    H, B, Lk = problem.q.shape[1], len(problem.kv_lengths), problem.k.shape[2]
    mask_mod: Any = problem.mask_mod
    if isinstance(mask_mod, BlockMask):
        num_batch, heads, rows, columns = mask_mod.states.shape
        firsts = np.arange(num_batch * heads).reshape(num_batch, heads) * rows * columns
        states = np.ascontiguousarray(mask_mod.states).ravel()
        return Blocks(states, np.broadcast_to(firsts, (B, H)), np.full(B, columns))
    sequences = problem.sequences
    ids = (np.arange(B) if sequences is None else sequences.ids) + problem.place.b
    lengths = np.full(B, Lk) if sequences is None else problem.kv_lengths
    facts = ids * uses(mask_mod, 0), problem.num_queries, lengths, problem.q_offset
    each = zip(*(fact.tolist() for fact in facts), strict=True)
    numbers: dict[tuple[int, ...], int] = {}  # np.unique takes 40 µs, even of one sequence
    kind = np.array([numbers.setdefault(one, len(numbers)) for one in each], np.int64)
    kinds = np.array(list(numbers), np.int64).reshape(-1, len(facts))
    uses_heads = uses(mask_mod, 1)
    heads, place = H if uses_heads else 1, Place(0, problem.place.h * uses_heads, problem.place.key)
    key = (problem.contents["mask_mod"], place, heads, kinds.tobytes())
    found = _kept_blocks.get(key)
    if found is None:
        found = _found(given(problem)[-1], kinds, heads, place)
        if found is None:
            raise_again(problem)
        if found.nbytes <= LARGEST_KEPT:
            _keep(_kept_blocks, key, found)
    rows, columns, firsts = _layout(kinds, heads)
    each_head = firsts[kind, None] + np.arange(heads) * (rows * columns)[kind, None]
    return Blocks(found, np.broadcast_to(each_head, (B, H)), columns[kind])


def block_states(
    mask_mod: Any, B: int, H: int, Lq: int, Lk: int, q_offset: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """``BlockMask.states``, found by the compiled function if there is one.

    An array of shape (B, H, ceil(Lq / 16), ceil(Lk / 32)).
    """
    kinds = np.column_stack((np.arange(B), np.full(B, Lq), np.full(B, Lk), q_offset))
    try:
        found = _found(Function("mask_mod", mask_mod, FLOAT32, contents(mask_mod)), kinds, H)
    except Refused:
        found = None
    if found is None:  # NumPy raises what the function raised
        return block_mask.states(mask_mod, B, H, Lq, Lk, q_offset)
    return found.reshape(B, H, -(-Lq // ROWS), -(-Lk // COLUMNS))


def _layout(kinds: NDArray[np.int64], heads: int) -> tuple[NDArray[np.int64], ...]:
    """For each of ``kinds`` its rows and columns of blocks, and where its states begin."""
    rows, columns = -(-kinds[:, 1] // ROWS), -(-kinds[:, 2] // COLUMNS)
    sizes = heads * rows * columns
    return rows, columns, np.cumsum(sizes) - sizes


def _found(
    mask_mod: Function, kinds: NDArray[np.int64], heads: int, place: Place = WHOLE
) -> NDArray[np.uint8] | None:
    """The states of all blocks of sequences, each with ``heads`` heads; None where it raises.

    ``kinds`` (n, 4) has b, the numbers of queries and keys, and the position of query 0.
    """
    tile = tile_function(mask_mod)
    rows, columns, firsts = _layout(kinds, heads)
    states: NDArray[Any] = np.zeros(heads * int(rows @ columns), np.uint8)
    table: NDArray[Any] = np.column_stack((kinds, firsts))
    sizes: NDArray[Any] = np.array([len(kinds), heads, place.h, place.key])
    failed: NDArray[Any] = np.zeros(1, np.int64)
    threads = get_num_threads() if states.size >= WORTH_SHARING else 1
    seen: NDArray[Any] = np.empty((threads, ROWS * COLUMNS), np.uint8)
    run = FILL(_filling().address)
    arrays = states, seen, failed, table, sizes

    def fill_from(first: int) -> None:  # it holds what it writes
        run(tile.address, *map(address, arrays), first, threads)

    if threads == 1:  # which is quicker than to start one
        fill_from(0)
    else:
        os_threads.call([partial(fill_from, first) for first in range(threads)])
    return None if failed[0] else states


@cache
def _filling() -> Compiled:
    """``fill`` as machine code; loading it takes milliseconds."""
    items = [types.CPointer(kind) for kind in (types.uint8, types.uint8, I64, I64, I64)]
    signature = types.void(I64, *items, I64, I64)
    return compiled(fill, signature, File("blocks", str(signature)))


def raise_again(problem: Problem) -> NoReturn:
    """Raise the exception that a function of ``problem`` raised in a kernel."""
    parts = [problem]
    if problem.sequences is not None:
        parts = [part for _, part in problem.each_sequence()]
    for part in parts:
        _call_everywhere(part)
    raise RuntimeError(
        f"{' or '.join(map(name_of, problem.contents))} raised an exception in machine code, but "
        f"raises none in Python"
    )


def _call_everywhere(problem: Problem) -> None:
    """Call the functions of ``problem`` in Python for every pair, a tile at a time."""
    Lq, Lk = problem.q.shape[2], problem.k.shape[2]
    for i in range(0, Lq, CALLED):
        for j in range(0, Lk, CALLED):
            rows, keys = slice(i, min(Lq, i + CALLED)), slice(j, min(Lk, j + CALLED))
            shape = *problem.q.shape[:2], rows.stop - i, keys.stop - j
            indices = problem.indices(rows, keys)
            if problem.mask_mod is not None:
                allowed(problem.mask_mod, indices, shape)
            if problem.score_mod is not None:
                modified(problem.score_mod, np.zeros(shape, problem.compute), indices)


@intrinsic
def call_tile(
    typing, function, X, offset, failed, b, h, i, j, lines, length, stride, is_transposed
):  # fmt: skip
    """Call the tile function at an address, for the tile that begins at X[offset].

    ``X`` and ``failed`` are arrays or pointers.
    """

    def generate(context, builder, signature, arguments):
        function, X, offset, failed, *numbers = arguments

        def pointer(kind, value, offset):
            if isinstance(kind, types.CPointer):
                return builder.gep(value, [offset])
            return pointer_to(context, builder, kind, value, offset)

        pointers = [
            pointer(signature.args[1], X, offset), pointer(signature.args[3], failed, INT(0))
        ]  # fmt: skip
        kinds = [pointer.type for pointer in pointers] + [INT] * len(numbers)
        kind = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        builder.call(builder.inttoptr(function, kind), [*pointers, *numbers])
        return context.get_dummy_value()

    return types.void(I64, X, I64, failed, *[I64] * 8), generate


@jit
def call_function(function, X, offset, o, b, h, i, j, lines, length, stride, is_transposed):
    """Call a caller's function for the tile of sequence b that begins at query i and key j."""
    s, h, i, j = o.ids[b], h + o.first_head, i + o.q_offset[b] + o.first_key, j + o.first_key
    call_tile(function, X, offset, o.failed, s, h, i, j, lines, length, stride, is_transposed)


@jit
def seen_range(o, b, h, i0, i1, j0, j1):
    """Where the keys begin and end that the queries i0 to i1 may see, of those from j0 to j1.

    And whether they see all of them; where ``o.blocks`` is empty that is not known.
    """
    if not o.blocks.size:
        return j0, j1, False
    first, last, is_full, columns = j1, j0, True, o.block_columns[b]
    for column in range(j0 // COLUMNS, -(-j1 // COLUMNS)):
        for row in range(i0 // ROWS, -(-i1 // ROWS)):
            state = o.blocks[o.first_blocks[b, h] + row * columns + column]
            is_full &= state == FULL
            if state != HIDDEN:
                first, last = min(first, column * COLUMNS), max(last, (column + 1) * COLUMNS)
    return max(j0, first), min(j1, last), is_full


@jit
def seen_by_heads(o, b, h, heads, Lq, j0, j1):
    """``seen_range`` of Lq queries, the first ones of each of ``heads`` heads from h on."""
    j1 = max(j0, j1)  # where there is no key, j0 may be far beyond
    first, last, is_full = j1, j0, True
    for head in range(h, h + heads):
        start, stop, all_seen = seen_range(o, b, head, 0, Lq, j0, j1)
        first, last, is_full = min(first, start), max(last, stop), is_full and all_seen
    return first, last, is_full


@jit
def seen_run(o, b, h, heads, Lq, j0, j1):
    """Where the first run of keys between j0 and j1 that are in no hidden block begins and ends.

    And whether all of its keys are seen by all queries, as ``seen_by_heads`` says.
    """
    if not o.blocks.size:
        return j0, j1, False
    start, stop, is_full = j0, j0, True
    while stop < j1:
        end = min(j1, (stop // COLUMNS + 1) * COLUMNS)
        first, last, all_seen = seen_by_heads(o, b, h, heads, Lq, stop, end)
        if first < last:
            stop, is_full = end, is_full and all_seen
        elif start < stop:
            break
        else:
            start, stop = end, end
    return start, stop, is_full


def fill(tile, states, seen, failed, table, sizes, first, step):
    """Write every ``step``-th row of blocks, from ``first`` on; ``seen`` is a block per thread.

    Of each sequence ``table`` has b, the numbers of queries and keys, the position of query 0 and
    where its states begin. ``sizes`` are the numbers of sequences and heads, and which head and key
    the function gets for the first ones.
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
                        seen[start + x] = 1
                    to_h, i, j = first_head + h, first_key + offset + i0, first_key + j0
                    call_tile(tile, seen, start, failed, b, to_h, i, j, lines, length, length, 0)
                    for x in range(size):
                        count += seen[start + x]
                    state = HIDDEN if count == 0 else FULL if count == size else PARTIAL
                    states[to + (h * rows + row) * columns + column] = state


def _keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    """Keep ``value`` for later calls; when there is too much, all else is forgotten."""
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value
    return value


def _compiled(function: Function) -> tuple[Any, Any]:
    """numba's dispatcher of the caller's function, and the type that it returns."""
    found = _kept.get(function.key) or _keep(_kept, function.key, _compile(function))
    if isinstance(found, Refused):
        raise found
    dispatcher, returned = found
    return dispatcher, returned


def _compile(function: Function) -> Any:
    """What ``_compiled`` returns, or the reason why there is none."""
    try:
        return compiled_function(function.name, function.given, function.compute, _dispatcher)
    except NotNow:
        raise
    except Refused as error:
        return error


def _dispatcher(function: FunctionType, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """numba's dispatcher of ``function``, and the type that it returns."""
    dispatcher = numba.njit(**OPTIONS, boundscheck=True)(function)
    dispatcher.compile(arguments)
    return dispatcher, dispatcher.overloads[arguments].signature.return_type


def _looped(given: Function, function: Any) -> Any:
    """The loop over a tile around ``function``, the dispatcher of ``given``, compiled."""

    is_score = given.name == "score_mod"
    changed = function
    if not is_score:
        changed = numba.njit(**OPTIONS)(lambda seen, b, h, i, j: seen & function(b, h, i, j))

    def loop(S, failed, b, h, i, j, lines, length, stride, is_transposed):
        try:
            for y in range(lines):
                for x in range(length):
                    at = y * stride + x
                    if is_transposed:
                        S[at] = changed(S[at], b, h, i + x, j + y)
                    else:
                        S[at] = changed(S[at], b, h, i + y, j + x)
        except Exception:
            failed[0] = 1

    item = numba.from_dtype(given.compute) if is_score else types.uint8
    signature = types.void(types.CPointer(item), types.CPointer(I64), *[I64] * 8)
    return numba.cfunc(signature, **OPTIONS, boundscheck=False)(loop)
