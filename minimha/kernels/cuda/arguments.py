"""How a problem enters a CUDA kernel.

Every CUDA rung is one function with the arguments of the CPU rungs::

    rung(q, k, v, mask, bias, o, O, L)

in one of two forms. Rungs 1 and 2 take ``Arrays``, so they run in numba's simulator as well. From
rung 3 on a kernel issues its own loads and takes ``Arguments``, which are addresses:

q, k, v, O   ``Rows``: where (B, H, L, D) begins and its strides; the last axis is contiguous
mask, bias   ``Pairs``: where (B, H, Lq, Lk) begins and its strides, 0 along a broadcast axis;
             address 0 if there is none. A mask is one byte a pair, a bias float32.
o            ``Numbers``: sizes, and everything that is small
L            address of (B, H, Lq), float32, contiguous

Their strides count elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from minimha.equations.problem import Problem
from minimha.kernels.options import NO_BIAS, NO_MASK, Options, options

WIDEST = 256  # numbers of a row of O that a rung can keep in registers


class Rows(NamedTuple):
    """Rows of D contiguous numbers: batch, head and row strides in elements."""

    address: int
    batch: int
    head: int
    row: int


class Pairs(NamedTuple):
    """One number for each query and key; strides in elements, 0 where it is broadcast."""

    address: int
    batch: int
    head: int
    row: int
    column: int


class Numbers(NamedTuple):
    """Sizes and small options.

    ``q_offset`` and ``kv_lengths`` are addresses of (B,) int64, ``slopes`` and ``sinks`` of (H,)
    float32; ``slopes`` is 0 without ALiBi, sinks are -inf where there are none. ``left`` and
    ``right`` are at most ``visibility.UNBOUNDED``. ``softcap`` is 0 where there is none.
    """

    H: int
    Hkv: int
    Lq: int
    Lk: int
    left: int
    right: int
    q_offset: int
    kv_lengths: int
    slopes: int
    sinks: int
    scale: float
    softcap: float


class Arguments(NamedTuple):
    """What a kernel that takes addresses is called with, in its order."""

    q: Rows
    k: Rows
    v: Rows
    mask: Pairs
    bias: Pairs
    o: Numbers
    O: Rows
    L: int


class Arrays(NamedTuple):
    """What a kernel that takes arrays is called with, in its order; see ``entry`` for each.

    On a device each array is an ``ArrayAt``, in the simulator a NumPy array.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    o: Options
    O: Any
    L: Any


class ArrayAt(NamedTuple):
    """An array on a device, field by field as numba's compiled kernels expect it.

    ``meminfo`` and ``parent`` are 0: nobody counts references there. Strides are in bytes.
    """

    meminfo: int
    parent: int
    size: int
    itemsize: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


ROWS = types.NamedTuple([types.uint64, *[types.int64] * 3], Rows)
PAIRS = types.NamedTuple([types.uint64, *[types.int64] * 4], Pairs)
NUMBERS = types.NamedTuple(
    [*[types.int32] * 4, *[types.int64] * 2, *[types.uint64] * 4, *[types.float32] * 2], Numbers
)
ADDRESSES = (ROWS, ROWS, ROWS, PAIRS, PAIRS, NUMBERS, ROWS, types.uint64)


class Memory(Protocol):
    """Where kernels find their arrays: a device's memory, or that of an emulator."""

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` there, contiguous, and return its address, a multiple of 16."""

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a copy of what stands at ``address``."""


def padded_width(problem: Problem) -> int:
    """The one width that queries, keys and values are given in ``place``: a multiple of 16."""
    return -(-int(max(problem.q.shape[3], problem.v.shape[3])) // 16) * 16


def too_wide(problem: Problem) -> str | None:
    """Why a rung that keeps whole rows of O in registers cannot take ``problem``, or None."""
    width = padded_width(problem)
    if width > WIDEST:
        return f"heads are {width} wide: beyond {WIDEST} O does not fit into the registers"
    return None


def check_alignment(arguments: Arguments, itemsize: int) -> None:
    """Refuse rows of q, k, v or O that cannot be read 16 bytes at a time.

    Raises
    ------
    ValueError
        They do not begin at multiples of 16 bytes.
    """
    for name in ("q", "k", "v", "O"):
        address, *strides = getattr(arguments, name)
        if address % 16 or any(stride * itemsize % 16 for stride in strides):
            raise ValueError(
                f"{name} begins at {address:#x} with strides {tuple(strides)}: expected rows that "
                f"begin at multiples of 16 bytes, because they are read 16 bytes at a time"
            )


def in_parts(width: int, widest: int) -> tuple[int, int]:
    """How many parts a row is cut into, none beyond ``widest``, and how many numbers each has.

    >>> in_parts(80, 64)
    (2, 40)
    """
    parts = max(1, -(-width // widest))
    return parts, -(-width // parts)


def array_types(compute: np.dtype[Any]) -> tuple[Any, ...]:
    """The signature of a kernel that takes ``Arrays`` of that dtype."""
    real = types.float64 if compute == np.float64 else types.float32
    given, scores = types.Array(real, 4, "A"), types.Array(types.boolean, 4, "A")
    whole, line = types.Array(types.int64, 1, "C"), types.Array(real, 1, "C")
    small = [*[types.int64] * 2, whole, whole, line, line, real, real, types.boolean]
    options = types.NamedTuple(small, Options)
    return given, given, given, scores, given, options, given, types.Array(real, 3, "A")


def placed_arrays(problem: Problem, put: Callable[[NDArray[Any]], Any]) -> Arrays:
    """``problem`` in the compute dtype, each of its arrays as ``put`` returns it.

    Axes along which a mask or a bias is broadcast are not copied: their stride stays 0.
    """
    B, H, Lq, _ = problem.q.shape
    Dv, compute = problem.v.shape[3], problem.compute
    return Arrays(
        q=put(problem.q.astype(compute, copy=False)),
        k=put(problem.k.astype(compute, copy=False)),
        v=put(problem.v.astype(compute, copy=False)),
        mask=put(NO_MASK if problem.attn_mask is None else problem.attn_mask),
        bias=put(NO_BIAS[compute] if problem.attn_bias is None else problem.attn_bias),
        o=placed_options(problem, put),
        O=put(np.zeros((B, H, Lq, Dv), compute)),
        L=put(np.zeros((B, H, Lq), compute)),
    )


def placed_options(problem: Problem, put: Callable[[NDArray[Any]], Any]) -> Options:
    """The small options, their lines as ``put`` returns them."""
    o = options(problem)
    lines = {name: put(getattr(o, name)) for name in ("q_offset", "kv_lengths", "slopes", "sinks")}
    return o._replace(**lines)


def unrepeated(
    array: NDArray[Any], dtype: DTypeLike | None = None
) -> tuple[NDArray[Any], tuple[int, ...]]:
    """``array``, contiguous, with one entry along each axis along which it is broadcast.

    And the strides, in bytes, with which that is read as ``array``: 0 along those axes.
    """
    is_broadcast = [step == 0 for step in array.strides]
    once = array[tuple(slice(0, 1) if one else slice(None) for one in is_broadcast)]
    once = np.ascontiguousarray(once, dtype)
    steps = zip(is_broadcast, once.strides, strict=True)
    return once, tuple(0 if one else step for one, step in steps)


def numbers(problem: Problem, put: Callable[[list[NDArray[Any]]], list[int]]) -> Numbers:
    """The small options of ``problem``; ``put`` copies arrays to the device."""
    H, slopes = problem.q.shape[1], problem.alibi_slopes
    sinks = np.full(H, -np.inf) if problem.sinks is None else problem.sinks
    lines: list[NDArray[Any]] = [
        problem.q_offset,
        problem.kv_lengths,
        np.asarray(sinks, np.float32),
    ]
    if slopes is not None:
        lines.append(np.asarray(slopes, np.float32))
    q_offset, kv_lengths, sinks_at, *rest = put(lines)
    return Numbers(
        H=H,
        Hkv=problem.k.shape[1],
        Lq=problem.q.shape[2],
        Lk=problem.k.shape[2],
        left=problem.left,
        right=problem.right,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        slopes=rest[0] if rest else 0,
        sinks=sinks_at,
        scale=problem.scale,
        softcap=problem.softcap or 0.0,
    )


def place(problem: Problem, memory: Memory) -> Arguments:
    """Put a float32 or 16-bit problem into ``memory``.

    q, k, v and O get the width ``padded_width``; what is added is 0, which changes no score. 16-bit
    numbers stay what they are.
    """
    B, H, Lq, _ = problem.q.shape
    width = padded_width(problem)

    def rows(array: NDArray[Any]) -> Rows:
        beside = ((0, 0),) * 3 + ((0, width - array.shape[3]),)
        array = np.pad(array, beside)
        _, heads, length, _ = array.shape
        return Rows(memory.put(array), heads * length * width, length * width, width)

    def pairs(array: NDArray[Any] | None, dtype: DTypeLike) -> Pairs:
        if array is None:
            return Pairs(0, 0, 0, 0, 0)
        once, strides = unrepeated(array, dtype)
        return Pairs(memory.put(once), *(step // once.itemsize for step in strides))

    return Arguments(
        q=rows(problem.q),
        k=rows(problem.k),
        v=rows(problem.v),
        mask=pairs(problem.attn_mask, np.uint8),
        bias=pairs(problem.attn_bias, np.float32),
        o=numbers(problem, lambda arrays: [memory.put(array) for array in arrays]),
        O=rows(np.zeros((B, H, Lq, width), problem.dtype)),
        L=memory.put(np.zeros((B, H, Lq), np.float32)),
    )


def taken(
    problem: Problem, arguments: Arguments, memory: Memory
) -> tuple[NDArray[Any], NDArray[Any]]:
    """O, in the problem's dtype, and L, as the kernels left them."""
    B, H, Lq, _ = problem.q.shape
    O = memory.get(arguments.O.address, (B, H, Lq, padded_width(problem)), problem.dtype)
    L = memory.get(arguments.L, (B, H, Lq), np.float32)
    return O[..., : problem.v.shape[3]], L
