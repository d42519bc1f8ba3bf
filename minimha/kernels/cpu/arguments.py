"""The arguments of a kernel, packed into one line of integers that every thread reads.

A kernel is called with the address of that line and the number of the thread. It holds::

    6 integers               where the headers of q, k, v, O, L and the buffers' memory are
    9 integers per array     its address, its shape and its strides, filled up to four axes
    10 numbers and 2 sizes
    the counters             on a cache line of their own

The next call with arrays of the same shapes and strides needs a copy in which only the first six
are new. They are what ``id`` returns: the address of the data is at the beginning of a header, and
compiled code reads it there in no time.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import namedtuple
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from minimha.kernels.cpu.simd.vector import INT
from minimha.kernels.options import Options

AXES = 4
ARRAY = 1 + 2 * AXES  # integers that describe one array
NUM_SIZES = 2
CACHE_LINE = 64  # bytes
REAL, DOUBLE, BYTE = "real", "double", "byte"  # REAL is the compute dtype
# Counters begin at 0: the first one deals out the tasks, the second one becomes 1 where an output
# is not finite, the third one where a caller's function raises, and more are the rung's own.
TASKS, NONFINITE, FAILED, OWN = 0, 1, 2, 3


class Buffer(NamedTuple):
    """An array that a kernel may write besides O and L, a part of the memory that a call brings.

    Each thread has its own, on cache lines of its own, unless it ``is_shared``.
    """

    kind: str
    is_shared: bool = False


class Layout(NamedTuple):
    """Shape and strides, in bytes, of an array; of a buffer also the stride between threads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


# What every call brings; then the arrays of every problem, in the order of a line. The buffers
# follow, then the numbers.
BROUGHT = ("q", "k", "v", "O", "L", "memory")
ROWS = ("queries", "pages", "first_keys", "ids")  # of ``Sequences``
BLOCKS = ("blocks", "first_blocks", "block_columns")  # of ``functions.Blocks``
SMALL = ("q_offset", "kv_lengths", "slopes", "sinks", *ROWS, *BLOCKS)
ARRAYS = ("q", "k", "v", "mask", "bias", "O", "L", *SMALL)
FUNCTIONS = ("score_mod", "mask_mod", "first_head", "first_key")
NUMBERS = ("left", "right", "scale", "softcap", "is_bfloat16", "page_size", *FUNCTIONS)
HEADERS = Struct(f"={len(BROUGHT)}q")


# ``Options``; where the rows of each sequence are, as in ``Sequences``; and the caller's functions,
# see ``functions``: addresses of ``score_mod`` and ``mask_mod`` or 0, what they get for head 0 and
# key 0 (as b they get ``ids``), which blocks are skipped, and where an exception is noted.
CPUOptions = namedtuple(  # type: ignore[misc]  # mypy wants literals
    "CPUOptions",
    (*Options._fields, *ROWS, "page_size", *FUNCTIONS, *BLOCKS, "failed"),
)


def slots(buffers: Iterable[str]) -> dict[str, int]:
    """Where each array and buffer begins in the line, "numbers", "sizes" and "counters"."""
    names = [*ARRAYS, *buffers, "numbers"]
    if len({*names, *NUMBERS}) < len(names) + len(NUMBERS):
        raise ValueError(f"two arguments of a kernel have one name: {', '.join(names)}")
    found = {name: len(BROUGHT) + n * ARRAY for n, name in enumerate(names)}
    found["sizes"] = found["numbers"] + len(NUMBERS)
    # So far away that what all threads read is on another cache line than what they write.
    return found | {"counters": found["sizes"] + NUM_SIZES + CACHE_LINE // 8}


def pack(
    layouts: dict[str, Layout], slots: dict[str, int], o: Any, sizes: Sequence[int],
    num_counters: int,
) -> array[int]:  # fmt: skip
    """The line for arrays and buffers of these layouts, whose addresses are left open.

    It is Python's array, which is copied, read and asked for its address in half of NumPy's time.
    """
    line = array("q", bytes(8 * (slots["counters"] + num_counters)))
    for name, (shape, strides) in layouts.items():
        at = slots[name] + 1
        line[at : at + len(shape)] = array("q", shape)
        line[at + AXES : at + AXES + len(strides)] = array("q", strides)
    for at, name in enumerate(NUMBERS, slots["numbers"]):
        number = getattr(o, name)
        line[at] = int(np.float64(number).view(np.int64) if isinstance(number, float) else number)
    line[slots["sizes"] : slots["sizes"] + len(sizes)] = array("q", sizes)
    return line


def address(array: NDArray[Any]) -> int:
    """Where the data of an array is: in a tenth of the time that ``array.ctypes.data`` takes.

    NumPy's C API fixes that an array's header begins with it, and CPython that ``id`` is the
    header's address.
    """
    return POINTER(id(array) + HEADER).value or 0


POINTER, HEADER = ctypes.c_void_p.from_address, object.__basicsize__
for _array in (np.empty(3), np.empty((4, 5), np.uint8)[1:, 2:]):
    if address(_array) != _array.ctypes.data:
        raise ImportError("this Python does not keep the headers of NumPy's arrays as CPython does")


def unpacker(**buffers: Buffer) -> Any:
    """Primitive ``unpack(line, worker)``: the arguments of a rung that has these buffers.

    The type of ``line``, a pointer, says in which dtype q, k and v are stored.

    Returns
    -------
    tuple
        q, k, v, mask, bias, o, O, L, the buffers and counters as a named tuple, the sizes.
    """
    memory, slot = namedtuple("Memory", [*buffers, "counters"]), slots(buffers)

    @intrinsic
    def unpack(typing, line, worker):
        storage = line.dtype
        real = types.float64 if storage == types.float64 else types.float32
        kinds = {REAL: real, DOUBLE: types.float64, BYTE: types.uint8}
        arrays = dict.fromkeys(("q", "k", "v"), types.Array(storage, 4, "A"))
        arrays |= dict.fromkeys(("bias", "O"), types.Array(real, 4, "A"))
        arrays |= {"mask": types.Array(types.boolean, 4, "A"), "L": types.Array(real, 3, "A")}
        lines = ("q_offset", "kv_lengths", "first_keys", "ids", "block_columns")
        arrays |= dict.fromkeys(lines, types.Array(types.int64, 1, "C"))
        arrays |= dict.fromkeys(("queries", "pages"), types.Array(types.int64, 2, "C"))
        arrays |= dict.fromkeys(("slopes", "sinks"), types.Array(real, 1, "C"))
        arrays |= {"blocks": types.Array(types.uint8, 1, "C")}
        arrays |= {"first_blocks": types.Array(types.int64, 2, "A")}
        arrays |= {name: types.Array(kinds[x.kind], 1, "C") for name, x in buffers.items()}
        counters = types.Array(types.int64, 1, "C")
        numbers = (*[types.int64] * 2, *[types.float64] * 2, types.boolean, *[types.int64] * 5)
        every = arrays | dict(zip(NUMBERS, numbers, strict=True)) | {"failed": counters}
        tuples = {
            "o": types.NamedTuple([every[name] for name in CPUOptions._fields], CPUOptions),
            "memory": types.NamedTuple([*(every[name] for name in buffers), counters], memory),
            "sizes": types.UniTuple(types.int64, NUM_SIZES),
        }
        order = ("q", "k", "v", "mask", "bias", "o", "O", "L", "memory", "sizes")
        result = types.Tuple([(arrays | tuples)[name] for name in order])

        def generate(context, builder, signature, arguments):
            line = builder.bitcast(arguments[0], INT.as_pointer())

            def read(n):
                return builder.load(builder.gep(line, [INT(n)]))

            def brought(name):
                header = builder.add(read(BROUGHT.index(name)), INT(HEADER))
                return builder.load(builder.inttoptr(header, INT.as_pointer()))

            def pointer(name):
                at = slot[name]
                if name in BROUGHT:
                    return brought(name)
                if name not in buffers:
                    return read(at)
                start = builder.add(brought("memory"), read(at))
                if buffers[name].is_shared:
                    return start
                return builder.add(start, builder.mul(arguments[1], read(at + 2 + AXES)))

            def array(kind, pointer, shape, strides):
                struct = context.make_array(kind)(context, builder)
                item = context.get_data_type(kind.dtype)
                context.populate_array(
                    struct,
                    data=builder.inttoptr(pointer, item.as_pointer()),
                    shape=shape,
                    strides=strides,
                    itemsize=INT(context.get_abi_sizeof(item)),
                    meminfo=None,
                )
                return struct._getvalue()

            values = {}
            for name, kind in arrays.items():
                first = slot[name] + 1
                shape = [read(first + axis) for axis in range(kind.ndim)]
                strides = [read(first + AXES + axis) for axis in range(kind.ndim)]
                values[name] = array(kind, pointer(name), shape, strides)
            after = builder.ptrtoint(builder.gep(line, [INT(slot["counters"])]), INT)
            shared = array(counters, after, [INT(OWN)], [INT(8)])
            failed = builder.add(after, INT(8 * FAILED))
            values["failed"] = array(counters, failed, [INT(1)], [INT(8)])
            for n, (name, kind) in enumerate(zip(NUMBERS, numbers, strict=True)):
                values[name] = read(slot["numbers"] + n)
                if kind == types.float64:
                    values[name] = builder.bitcast(values[name], ir.DoubleType())
                elif kind == types.boolean:
                    values[name] = builder.icmp_signed("!=", values[name], INT(0))
            fields = {
                "o": [values[name] for name in CPUOptions._fields],
                "memory": [*(values[name] for name in buffers), shared],
                "sizes": [read(slot["sizes"] + n) for n in range(NUM_SIZES)],
            }
            for name, kind in tuples.items():
                values[name] = context.make_tuple(builder, kind, fields[name])
            return context.make_tuple(builder, result, [values[name] for name in order])

        return result(line, types.int64), generate

    return unpack
