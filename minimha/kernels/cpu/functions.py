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
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from minimha.equations import block_mask
from minimha.equations.arguments import name_of
from minimha.equations.block_mask import COLUMNS, FULL, HIDDEN, PARTIAL, ROWS, BlockMask, extent
from minimha.equations.functions import allowed, contents, modified
from minimha.equations.problem import Problem
from minimha.kernels.cpu.arguments import address
from minimha.kernels.cpu.compiler import compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import FASTMATH, jit
from minimha.kernels.cpu.simd.vector import INT, pointer_to
from minimha.kernels.cpu.threads import get_num_threads
from minimha.kernels.functions import I64, Refused, check_returned
from minimha.kernels.functions import compiled as compiled_function

FILL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
FLOAT32 = np.dtype(np.float32)
OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy", "nogil": True}
MOST = 256  # functions and block masks that are kept
LARGEST_KEPT = 1 << 20  # bytes of a block mask
CALLED = 128  # queries and keys of the tiles in which an exception is looked for
WORTH_SHARING = 1 << 12  # blocks, which one thread asks about while others start

_kept: dict[Hashable, Any] = {}


class Function(NamedTuple):
    """A caller's function for scores of one dtype, and what it captures in this call."""

    name: str
    given: Any  # it or a ``BlockMask``
    compute: np.dtype[Any]
    contents: Hashable

    @property
    def key(self) -> Hashable:
        """What is compiled is found by this; a mask does not depend on the dtype of the scores."""
        return self.name, self.contents, self.compute.name if self.name == "score_mod" else None


def given(problem: Problem) -> list[Function]:
    """The functions of ``problem``."""
    return [
        Function(name, getattr(problem, name), problem.compute, captured)
        for name, captured in problem.contents.items()
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
    return _kept.get(key) or _keep(key, _looped(function, dispatcher))


def blocks_of(problem: Problem) -> NDArray[np.uint8]:
    """What the ``mask_mod`` of ``problem`` hides, as ``BlockMask.states``, for every b and h."""
    (B, H, Lq, _), Lk = problem.q.shape, problem.k.shape[2]
    mask_mod: Any = problem.mask_mod
    states: Any
    if isinstance(mask_mod, BlockMask):
        states = mask_mod.states
    else:
        shape = *extent(mask_mod, B, H, problem.q_offset), Lq, Lk
        key = ("blocks", problem.contents["mask_mod"], shape, problem.q_offset.tobytes())
        states = _kept.get(key)
        if states is None:
            states = block_states(mask_mod, *shape, problem.q_offset)
            if states.nbytes <= LARGEST_KEPT:
                _keep(key, states)
    return np.broadcast_to(states, (B, H, *states.shape[2:]))


def block_states(
    mask_mod: Any, B: int, H: int, Lq: int, Lk: int, q_offset: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """``BlockMask.states``, by the compiled function if there is one."""
    try:
        tile = tile_function(Function("mask_mod", mask_mod, FLOAT32, contents(mask_mod)))
    except Refused:
        return block_mask.states(mask_mod, B, H, Lq, Lk, q_offset)
    states: NDArray[Any] = np.zeros((B, H, -(-Lq // ROWS), -(-Lk // COLUMNS)), np.uint8)
    sizes: NDArray[Any] = np.array([B, H, Lq, Lk])
    failed: NDArray[Any] = np.zeros(1, np.int64)
    threads = get_num_threads() if states.size >= WORTH_SHARING else 1
    seen: NDArray[Any] = np.empty((threads, ROWS * COLUMNS), np.uint8)
    items = [types.CPointer(kind) for kind in (types.uint8, types.uint8, I64, I64, I64)]
    signature = types.void(I64, *items, I64, I64)
    code = compiled(fill, signature, File("blocks", str(signature)))
    run = FILL(code.address)
    arrays = (states, seen, failed, np.ascontiguousarray(q_offset), sizes)
    shared = (tile.address, *(address(array) for array in arrays))
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(lambda first: run(*shared, first, threads), range(threads)))
    if failed[0]:  # NumPy raises what the function raised
        return block_mask.states(mask_mod, B, H, Lq, Lk, q_offset)
    return states


def raise_again(problem: Problem) -> None:
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
def seen_range(blocks, b, h, i0, i1, j0, j1):
    """The part of the keys j0 to j1 that the queries i0 to i1 may see, and whether they see it all.

    ``blocks`` has the states of a ``BlockMask``, or none, where nothing is known.
    """
    if not blocks.size:
        return j0, j1, False
    first, last, is_full = j1, j0, True
    for column in range(j0 // COLUMNS, -(-j1 // COLUMNS)):
        for row in range(i0 // ROWS, -(-i1 // ROWS)):
            state = blocks[b, h, row, column]
            is_full &= state == FULL
            if state != HIDDEN:
                first, last = min(first, column * COLUMNS), max(last, (column + 1) * COLUMNS)
    return max(j0, first), min(j1, last), is_full


def fill(tile, states, seen, failed, q_offset, sizes, first, step):
    """Write every ``step``-th row of blocks, from ``first`` on; ``seen`` is a block per thread."""
    B, H, Lq, Lk = sizes[0], sizes[1], sizes[2], sizes[3]
    rows, columns = -(-Lq // ROWS), -(-Lk // COLUMNS)
    start = first * ROWS * COLUMNS
    for row in range(first, rows, step):
        i0, lines = row * ROWS, min(ROWS, Lq - row * ROWS)
        for b in range(B):
            for h in range(H):
                for column in range(columns):
                    j0, length = column * COLUMNS, min(COLUMNS, Lk - column * COLUMNS)
                    size, count = lines * length, 0
                    for x in range(size):
                        seen[start + x] = 1
                    i = i0 + q_offset[b]
                    call_tile(tile, seen, start, failed, b, h, i, j0, lines, length, length, 0)
                    for x in range(size):
                        count += seen[start + x]
                    state = HIDDEN if count == 0 else FULL if count == size else PARTIAL
                    states[((b * H + h) * rows + row) * columns + column] = state


def _keep(key: Hashable, value: Any) -> Any:
    """Keep ``value`` for later calls; when there is too much, all else is forgotten."""
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[key] = value
    return value


def _compiled(function: Function) -> tuple[Any, Any]:
    """numba's dispatcher of the caller's function, and the type that it returns."""
    found = _kept.get(function.key) or _keep(function.key, _compile(function))
    if isinstance(found, Refused):
        raise found
    dispatcher, returned = found
    return dispatcher, returned


def _compile(function: Function) -> Any:
    """What ``_compiled`` returns, or the reason why there is none."""
    try:
        return compiled_function(function.name, function.given, function.compute, _dispatcher)
    except Refused as error:
        return error


def _dispatcher(function: FunctionType, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """numba's dispatcher of ``function``, and the type that it returns."""
    dispatcher = numba.njit(**OPTIONS, boundscheck=True)(function)
    dispatcher.compile(arguments)
    return dispatcher, dispatcher.overloads[arguments].signature.return_type


def _looped(given: Function, function: Any) -> Any:
    """The loop over a tile around ``function``, the dispatcher of ``given``, compiled."""

    def scores(S, failed, b, h, i, j, lines, length, stride, is_transposed):
        try:
            for y in range(lines):
                for x in range(length):
                    at = y * stride + x
                    if is_transposed:
                        S[at] = function(S[at], b, h, i + x, j + y)
                    else:
                        S[at] = function(S[at], b, h, i + y, j + x)
        except Exception:
            failed[0] = 1

    def seen(S, failed, b, h, i, j, lines, length, stride, is_transposed):
        try:
            for y in range(lines):
                for x in range(length):
                    at = y * stride + x
                    if is_transposed:
                        S[at] &= function(b, h, i + x, j + y)
                    else:
                        S[at] &= function(b, h, i + y, j + x)
        except Exception:
            failed[0] = 1

    is_score = given.name == "score_mod"
    item = numba.from_dtype(given.compute) if is_score else types.uint8
    signature = types.void(types.CPointer(item), types.CPointer(I64), *[I64] * 8)
    loop = scores if is_score else seen
    return numba.cfunc(signature, **OPTIONS, boundscheck=False)(loop)
