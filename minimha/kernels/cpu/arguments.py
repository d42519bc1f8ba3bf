"""The arguments of a kernel, packed into one line of integers that every thread reads.

A kernel is called with the address of that line and the number of the thread. An array is nine
integers: its address, its shape and its strides, filled up to four axes. So the next call with
arrays of the same shapes and strides needs nothing but other addresses.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
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
REAL, DOUBLE, BYTE, COUNTER = "real", "double", "byte", "counter"  # REAL is the compute dtype


class Buffer(NamedTuple):
    """An array that a kernel may write besides O and L, allocated by its caller.

    Each thread has its own, on cache lines of its own, unless it ``is_shared``.
    """

    kind: str
    is_shared: bool = False


# The last buffer of every rung. They begin at 0: the first one deals out the tasks, the second one
# becomes 1 where an output is not finite, and more are the rung's own.
COUNTERS = {"counters": Buffer(COUNTER, is_shared=True)}
TASKS, NONFINITE, OWN = 0, 1, 2


class Layout(NamedTuple):
    """Shape and strides, in bytes, of an array; of a buffer also the stride between threads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


# The arrays of every problem, in the order of a line; the buffers follow, then the numbers.
ARRAYS = ("q", "k", "v", "mask", "bias", "O", "L", "q_offset", "kv_lengths", "slopes", "sinks")
NUMBERS = ("left", "right", "scale", "softcap", "is_bfloat16")


def slots(buffers: Iterable[str]) -> dict[str, int]:
    """Where each array and buffer begins in the line, and "numbers" and "sizes"."""
    names = [*ARRAYS, *buffers, "numbers"]
    if len({*names, *NUMBERS}) < len(names) + len(NUMBERS):
        raise ValueError(f"two arguments of a kernel have one name: {', '.join(names)}")
    found = {name: n * ARRAY for n, name in enumerate(names)}
    return found | {"sizes": found["numbers"] + len(NUMBERS)}


def pack(
    layouts: dict[str, Layout], slots: dict[str, int], o: Options, sizes: Sequence[int]
) -> NDArray[np.int64]:
    """The line for arrays and buffers of these layouts, whose addresses are left open."""
    line = np.zeros(slots["sizes"] + NUM_SIZES, np.int64)
    for name, (shape, strides) in layouts.items():
        at = slots[name] + 1
        line[at : at + len(shape)] = shape
        line[at + AXES : at + AXES + len(strides)] = strides
    for at, name in enumerate(NUMBERS, slots["numbers"]):
        number = getattr(o, name)
        line[at] = np.float64(number).view(np.int64) if isinstance(number, float) else number
    line[slots["sizes"] : slots["sizes"] + len(sizes)] = sizes
    return line


def unpacker(**buffers: Buffer) -> Any:
    """Primitive ``unpack(line, worker)``: the arguments of a rung that has these buffers.

    The type of ``line``, a pointer, says in which dtype q, k and v are stored.

    Returns
    -------
    tuple
        q, k, v, mask, bias, o, O, L, the buffers as a named tuple, the sizes.
    """
    memory, slot = namedtuple("Memory", buffers), slots(buffers)

    @intrinsic
    def unpack(typing, line, worker):
        storage = line.dtype
        real = types.float64 if storage == types.float64 else types.float32
        kinds = {REAL: real, DOUBLE: types.float64, BYTE: types.uint8, COUNTER: types.int64}
        arrays = dict.fromkeys(("q", "k", "v"), types.Array(storage, 4, "A"))
        arrays |= dict.fromkeys(("bias", "O"), types.Array(real, 4, "A"))
        arrays |= {"mask": types.Array(types.boolean, 4, "A"), "L": types.Array(real, 3, "A")}
        arrays |= dict.fromkeys(("q_offset", "kv_lengths"), types.Array(types.int64, 1, "C"))
        arrays |= dict.fromkeys(("slopes", "sinks"), types.Array(real, 1, "C"))
        arrays |= {name: types.Array(kinds[x.kind], 1, "C") for name, x in buffers.items()}
        numbers = (types.int64, types.int64, types.float64, types.float64, types.boolean)
        every = arrays | dict(zip(NUMBERS, numbers, strict=True))
        tuples = {
            "o": types.NamedTuple([every[name] for name in Options._fields], Options),
            "memory": types.NamedTuple([every[name] for name in buffers], memory),
            "sizes": types.UniTuple(types.int64, NUM_SIZES),
        }
        order = ("q", "k", "v", "mask", "bias", "o", "O", "L", "memory", "sizes")
        result = types.Tuple([(arrays | tuples)[name] for name in order])

        def generate(context, builder, signature, arguments):
            line = builder.bitcast(arguments[0], INT.as_pointer())

            def read(n):
                return builder.load(builder.gep(line, [INT(n)]))

            def array(name):
                kind, at = arrays[name], slot[name]
                pointer = read(at)
                if name in buffers and not buffers[name].is_shared:
                    pointer = builder.add(pointer, builder.mul(arguments[1], read(at + 2 + AXES)))
                struct = context.make_array(kind)(context, builder)
                item = context.get_data_type(kind.dtype)
                context.populate_array(
                    struct,
                    data=builder.inttoptr(pointer, item.as_pointer()),
                    shape=[read(at + 1 + axis) for axis in range(kind.ndim)],
                    strides=[read(at + 1 + AXES + axis) for axis in range(kind.ndim)],
                    itemsize=INT(context.get_abi_sizeof(item)),
                    meminfo=None,
                )
                return struct._getvalue()

            values = {name: array(name) for name in arrays}
            for n, (name, kind) in enumerate(zip(NUMBERS, numbers, strict=True)):
                values[name] = read(slot["numbers"] + n)
                if kind == types.float64:
                    values[name] = builder.bitcast(values[name], ir.DoubleType())
                elif kind == types.boolean:
                    values[name] = builder.icmp_signed("!=", values[name], INT(0))
            fields = {
                "o": [values[name] for name in Options._fields],
                "memory": [values[name] for name in buffers],
                "sizes": [read(slot["sizes"] + n) for n in range(NUM_SIZES)],
            }
            for name, kind in tuples.items():
                values[name] = context.make_tuple(builder, kind, fields[name])
            return context.make_tuple(builder, result, [values[name] for name in order])

        return result(line, types.int64), generate

    return unpack
