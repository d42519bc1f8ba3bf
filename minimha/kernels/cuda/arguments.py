"""Convert a problem to the arguments of a CUDA kernel.

``DeviceArray`` describes an array on the device. A kernel has the arguments of the CPU rungs::

    rung(q, k, v, mask, bias, o, O, L)

The arguments have two forms. Rungs 1 and 2 take ``Arrays``, so they also run in numba's simulator.
From rung 3 on, kernels have explicit load instructions and take ``Arguments``, which are addresses.
The module of such a rung has a ``ROW_UNIT``, from which ``row_width`` follows:

q, k, v, O   ``Rows``: address and strides of (B, H, L, D); the last axis is contiguous
mask, bias   ``Pairs``: address and strides of (B, H, Lq, Lk), stride 0 along a broadcast axis;
             address 0 if absent. A mask has one byte per pair, a bias float32.
o            ``Numbers``: sizes and small options
L            address of (B, H, Lq), float32, contiguous

Strides are in elements. A kernel with a caller's functions also receives their ``Corner``, in the
last three fields of o.
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from minimha.equations.arguments import name_of
from minimha.equations.problem import Problem
from minimha.kernels.options import NO_BIAS, NO_MASK, Options, options

WIDEST = 256  # numbers of a row of O that a rung can keep in registers


class DeviceArray(NamedTuple):
    """An array in a device's memory, with strides in elements.

    ``owner`` keeps the memory alive. ``ready_on`` is the stream on which another library fills the
    array, or None if the array is complete.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any = None
    ready_on: int | None = None

    @property
    def nbytes(self) -> int:
        """Return the size of all elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Rows(NamedTuple):
    """The address and the strides, in elements, of an array (B, H, L, D) of contiguous rows."""

    address: int
    batch: int
    head: int
    row: int


class Pairs(NamedTuple):
    """The address and the strides of an array (B, H, Lq, Lk).

    Strides are in elements, and 0 along a broadcast axis.
    """

    address: int
    batch: int
    head: int
    row: int
    column: int


class Numbers(NamedTuple):
    """The sizes and small options of a problem.

    ``q_offset`` and ``kv_lengths`` are addresses of (B,) int64, ``slopes`` and ``sinks`` of (H,)
    float32. If absent, ``slopes`` (the address) and ``softcap`` are 0, and the sinks are -inf. A
    side of the window without a bound has ``left`` or ``right`` = ``visibility.UNBOUNDED``.
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
    """The arguments of a kernel that takes addresses, in order."""

    q: Rows
    k: Rows
    v: Rows
    mask: Pairs
    bias: Pairs
    o: Numbers
    O: Rows
    L: int


# The arguments of a kernel that takes arrays, in its order. On a device each array is an
# ``ArrayAt``, in the simulator a NumPy array. ``mask`` and ``bias`` are empty if absent.
Arrays = namedtuple("Arrays", "q k v mask bias o O L")


class ArrayAt(NamedTuple):
    """An array on a device, in the layout of numba's compiled kernels.

    ``meminfo`` and ``parent`` are 0: a device does not count references. Strides are in bytes.
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

NO_ROWS, NO_PAIRS = Rows(0, 0, 0, 0), Pairs(0, 0, 0, 0, 0)
# For kernels with a caller's functions, which get these indices for batch entry, head and key 0.
PLACE = ("first_b", "first_head", "first_key")
PlacedOptions = namedtuple("PlacedOptions", (*Options._fields, *PLACE))  # type: ignore[misc]
PlacedNumbers = namedtuple("PlacedNumbers", (*Numbers._fields, *PLACE))  # type: ignore[misc]
PLACED_NUMBERS = types.NamedTuple([*NUMBERS.types, *[types.int64] * 3], PlacedNumbers)
PLACED_ADDRESSES = (*ADDRESSES[:5], PLACED_NUMBERS, *ADDRESSES[6:])

PLACEHOLDERS = Arguments(
    NO_ROWS, NO_ROWS, NO_ROWS, NO_PAIRS, NO_PAIRS, Numbers(*[0] * 12), NO_ROWS, 0
)  # for launches that are compiled but not started


class Memory(Protocol):
    """The memory of a device, or of the emulator that runs kernels in tests."""

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` to contiguous memory of the device; return its 16-byte aligned address."""

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a copy of the contiguous array at ``address``."""


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array in C order.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def to_device(array: NDArray[Any], memory: Memory) -> DeviceArray:
    """Copy ``array`` to ``memory``; along an axis of stride 0, copy one item and keep stride 0."""
    is_broadcast = [step == 0 and array.size > 0 for step in array.strides]
    once = array[tuple(slice(0, 1) if one else slice(None) for one in is_broadcast)]
    steps = zip(is_broadcast, contiguous(once.shape), strict=True)
    strides = tuple(0 if one else step for one, step in steps)
    return DeviceArray(memory.put(once), array.shape, strides, array.dtype)


def to_host(array: DeviceArray, memory: Memory) -> NDArray[Any]:
    """Copy ``array`` to the host with its strides, and with the memory between its elements."""
    if 0 in array.shape:
        return np.empty(array.shape, array.dtype)
    itemsize = array.dtype.itemsize
    ends = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    first, last = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
    span = memory.get(array.address + first * itemsize, (last - first + 1,), array.dtype)
    strides = [step * itemsize for step in array.strides]
    return np.lib.stride_tricks.as_strided(span[-first:], array.shape, strides)


def array_at(array: DeviceArray) -> ArrayAt:
    """Return ``array`` as an argument of a kernel that takes arrays."""
    itemsize = array.dtype.itemsize
    strides = tuple(step * itemsize for step in array.strides)
    return ArrayAt(0, 0, prod(array.shape), itemsize, array.address, array.shape, strides)


def padded_width(problem: Problem) -> int:
    """Return the width of padded rows: the larger of D and Dv, rounded up to a multiple of 16."""
    return -(-int(max(problem.q.shape[3], problem.v.shape[3])) // 16) * 16


def refused(problem: Problem) -> str | None:
    """Return why no CUDA kernel supports ``problem``, or None if there is no such reason."""
    if problem.k_scale is not None:
        return "GPU kernels read no 8-bit keys and values (k_scale, v_scale): use backend 'cpu'"
    if problem.key_indices is None:
        return None
    return (
        f"GPU kernels read every key, so they take no {name_of('key_indices')}: use backend 'cpu', "
        f"or give attn_mask"
    )


def row_width(problem: Problem, unit: int = 16) -> int:
    """Return the width of rows of q, k, v and O in memory: D or ``padded_width``.

    It is D if D = Dv and a row's size is a multiple of ``unit`` bytes.
    """
    D = int(problem.q.shape[3])
    is_padded = problem.v.shape[3] != D or D * problem.dtype.itemsize % unit
    return padded_width(problem) if is_padded else D


def row_alignment(width: int, itemsize: int) -> int:
    """Return the largest power of 2, at most 16, that divides the bytes of ``width`` numbers."""
    return min(16, width * itemsize & -width * itemsize)


def too_wide(problem: Problem) -> str | None:
    """Return why rows of O are too wide for a kernel's registers, or None if they fit."""
    width = padded_width(problem)
    if width > WIDEST:
        return f"heads are {width} wide: beyond {WIDEST} O does not fit into the registers"
    return None


def check_alignment(arguments: Arguments, width: int, itemsize: int) -> None:
    """Raise ValueError unless rows of q, k, v and O are aligned for vector loads.

    ``width`` is the rung's ``row_width``. Each row must begin at a multiple of
    ``row_alignment(width, itemsize)`` bytes.
    """
    unit = row_alignment(width, itemsize)
    for name in ("q", "k", "v", "O"):
        address, *strides = getattr(arguments, name)
        if address % unit or any(stride * itemsize % unit for stride in strides):
            raise ValueError(
                f"{name} begins at {address:#x} with strides {tuple(strides)}: expected rows that "
                f"begin at multiples of {unit} bytes, because they are read {unit} bytes at a time"
            )


def in_parts(width: int, widest: int) -> tuple[int, int]:
    """Split a row of ``width`` numbers into the fewest equal parts of at most ``widest``.

    Returns the number of parts and their width, rounded up.

    >>> in_parts(80, 64)
    (2, 40)
    """
    parts = max(1, -(-width // widest))
    return parts, -(-width // parts)


def array_types(problem: Problem) -> tuple[Any, ...]:
    """Return the argument types of a kernel for ``problem`` that takes ``Arrays``."""
    real = types.float64 if problem.compute == np.float64 else types.float32
    floating, mask = types.Array(real, 4, "A"), types.Array(types.boolean, 4, "A")
    per_batch, per_head = types.Array(types.int64, 1, "C"), types.Array(real, 1, "C")
    small = [*[types.int64] * 2, *[per_batch] * 2, *[per_head] * 2, *[real] * 2, types.boolean]
    o = types.NamedTuple(small, Options)
    if problem.contents:
        o = types.NamedTuple([*small, *[types.int64] * 3], PlacedOptions)
    return floating, floating, floating, mask, floating, o, floating, types.Array(real, 3, "A")


def address_types(problem: Problem) -> tuple[Any, ...]:
    """Return the argument types of a kernel for ``problem`` that takes ``Arguments``."""
    return PLACED_ADDRESSES if problem.contents else ADDRESSES


def host_arrays(
    problem: Problem, dtype: np.dtype[Any], width: int | None = None
) -> dict[str, NDArray[Any]]:
    """Return q, k, v and, if given, mask and bias, by their names in ``problem``.

    q, k and v are converted to ``dtype``. If ``width`` is given, their rows are padded with 0 to
    that width. This changes no score, and only adds columns of 0 to O.
    """

    def rows(array: NDArray[Any]) -> NDArray[Any]:
        array = array.astype(dtype, copy=False)
        if width is None:
            return array
        missing = width - array.shape[3]
        padded = np.pad(array, ((0, 0),) * 3 + ((0, missing),)) if missing else array
        return np.ascontiguousarray(padded)

    given = {"q": rows(problem.q), "k": rows(problem.k), "v": rows(problem.v)}
    over_scores = {"attn_mask": problem.attn_mask, "attn_bias": problem.attn_bias}
    return given | {name: array for name, array in over_scores.items() if array is not None}


def as_arrays(
    problem: Problem, given: Mapping[str, Any], put: Callable[[NDArray[Any]], Any]
) -> Arrays:
    """Return ``Arrays``, the arguments for ``problem`` of a kernel that takes arrays.

    ``given`` has "q", "k", "v", "O", "L" in the compute dtype, and "attn_mask" and "attn_bias", of
    the scores' shape, if they exist. ``put`` copies an array to the device as an ``ArrayAt``.
    """
    o: Any = options(problem)
    lines = {name: put(getattr(o, name)) for name in ("q_offset", "kv_lengths", "slopes", "sinks")}
    o = o._replace(**lines)
    if problem.contents:
        o = PlacedOptions._make([*o, *problem.corner])
    mask = given["attn_mask"] if "attn_mask" in given else put(NO_MASK)
    bias = given["attn_bias"] if "attn_bias" in given else put(NO_BIAS[problem.compute])
    q, k, v, O, L = (given[name] for name in ("q", "k", "v", "O", "L"))
    return Arrays(q, k, v, mask, bias, o, O, L)


def as_addresses(
    problem: Problem,
    given: Mapping[str, DeviceArray],
    put: Callable[[list[NDArray[Any]]], list[int]],
) -> Arguments:
    """Return ``Arguments``, the arguments for ``problem`` of a kernel that takes addresses.

    ``given`` has "q", "k", "v", "O", of the rung's ``row_width`` and in the problem's dtype, and
    "L" in float32. It has "attn_mask" and "attn_bias" (float32), of the scores' shape, if they
    exist. ``put`` copies arrays to the device and returns their addresses.
    """

    def rows(name: str) -> Rows:
        return Rows(given[name].address, *given[name].strides[:3])

    def pairs(name: str) -> Pairs:
        return Pairs(given[name].address, *given[name].strides) if name in given else NO_PAIRS

    o = options(problem)
    q_offset, kv_lengths, slopes, sinks = put([o.q_offset, o.kv_lengths, o.slopes, o.sinks])
    (_, H, Lq, _), (_, Hkv, Lk, _) = problem.q.shape, problem.k.shape
    numbers: Any = Numbers(
        H=H, Hkv=Hkv, Lq=Lq, Lk=Lk, left=o.left, right=o.right, q_offset=q_offset,
        kv_lengths=kv_lengths, slopes=slopes if o.slopes.size else 0, sinks=sinks,
        scale=o.scale, softcap=o.softcap,
    )  # fmt: skip
    if problem.contents:
        numbers = PlacedNumbers._make([*numbers, *problem.corner])
    over_scores = pairs("attn_mask"), pairs("attn_bias")
    return Arguments(
        rows("q"), rows("k"), rows("v"), *over_scores, numbers, rows("O"), given["L"].address
    )
