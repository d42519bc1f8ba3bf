"""Pack the arguments of a kernel into one *line*, an array of integers that every thread reads.

A kernel is called with the address of the line and the number of the thread. The line holds::

    6 integers               addresses of the headers of q, k, v, O, L and the buffers' memory
    9 integers per array     its address, its shape and its strides, padded to four axes
    10 numbers and 2 sizes
    the counters             on a separate cache line

A later call with arrays of the same shapes and strides copies the line and replaces the first six
integers. These are the arrays' ``id``, the addresses of their headers. A header begins with the
address of the data, which compiled code reads there at no cost.
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
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numpy.typing import NDArray

from minimha.kernels.cpu.simd.vector import INT
from minimha.kernels.options import Options

AXES = 4
ARRAY = 1 + 2 * AXES  # integers that describe one array
NUM_SIZES = 2
CACHE_LINE = 128  # bytes: two lines of most CPUs, which fetch them together
REAL, DOUBLE, BYTE, INDEX = "real", "double", "byte", "index"  # REAL is the compute dtype
# Counters begin at 0. NONFINITE becomes 1 if an output is not finite, FAILED if a caller's function
# raises. The rung uses the others, from TASKS on, to deal out tasks.
NONFINITE, FAILED, TASKS = 0, 1, 2


class Buffer(NamedTuple):
    """A temporary array that a kernel uses during one call.

    ``kind`` is REAL (the compute dtype), DOUBLE (float64), BYTE (uint8) or INDEX (int64). If
    ``is_shared``, all threads use the same array. Otherwise, each thread has a separate array, on
    separate cache lines.
    """

    kind: str
    is_shared: bool = False


class Layout(NamedTuple):
    """The shape of an array, and its strides in bytes.

    The last stride of a buffer is the distance between the arrays of successive threads.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]


# A line's order: the headers of each call, the arrays of every problem, the buffers, the numbers.
BROUGHT = ("q", "k", "v", "O", "L", "memory")
ROWS = ("queries", "pages", "first_keys", "ids")  # of ``Sequences``
BLOCKS = ("blocks", "first_blocks", "block_columns", "block_rows")  # of ``blocks.Blocks``
PICKS = ("picks", "chosen")  # of ``selection.Selection``
SMALL = ("q_offset", "kv_lengths", "slopes", "sinks", *ROWS, *BLOCKS, *PICKS)
ARRAYS = ("q", "k", "v", "mask", "bias", "k_scale", "v_scale", "O", "L", *SMALL)
FUNCTIONS = ("score_mod", "mask_mod", "first_head", "first_key")
NUMBERS = ("left", "right", "scale", "softcap", "is_bfloat16", "page_size", *FUNCTIONS)
HEADERS = Struct(f"={len(BROUGHT)}q")


# ``Options``, the rows of each sequence (``Sequences``) and the caller's functions: addresses of
# ``score_mod`` and ``mask_mod`` or 0, the h and j that they get for head 0 and key 0 (as b they get
# ``ids``), the blocks that are hidden, the keys that queries picked, and the counter FAILED.
CPUOptions = namedtuple(  # type: ignore[misc]  # mypy wants literals
    "CPUOptions", (*Options._fields, *ROWS, "page_size", *FUNCTIONS, *BLOCKS, *PICKS, "failed")
)


def slots(buffers: Iterable[str]) -> dict[str, int]:
    """Return a dict from each argument's name to its index in the line of a kernel's arguments.

    It also has the indices of "numbers", "sizes", "workers" and "counters". Raises ValueError if
    one of the names ``buffers`` is that of another argument.
    """
    names = [*ARRAYS, *buffers, "numbers"]
    if len({*names, *NUMBERS}) < len(names) + len(NUMBERS):
        raise ValueError(f"two arguments of a kernel have one name: {', '.join(names)}")
    found = {name: len(BROUGHT) + n * ARRAY for n, name in enumerate(names)}
    found["sizes"] = found["numbers"] + len(NUMBERS)
    found["workers"] = found["sizes"] + NUM_SIZES
    # All threads read the line and write its counters: the gap puts these on another cache line.
    return found | {"counters": found["workers"] + 1 + CACHE_LINE // 8}


def pack(
    layouts: dict[str, Layout], slots: dict[str, int], o: Any, sizes: Sequence[int], workers: int,
    num_counters: int,
) -> array[int]:  # fmt: skip
    """Pack a kernel's arguments, except addresses of arrays, into a line of integers.

    ``layouts`` has the layout of each array by name, and ``slots`` the index of each argument.
    ``o`` is the ``CPUOptions``, ``sizes`` has at most two integers of the kernel, and ``workers``
    is the number of threads. The ``num_counters`` counters are 0. The line is an ``array.array``,
    which is copied in half the time of an ndarray.
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
    line[slots["workers"]] = workers
    return line


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's data, ten times as fast as ``array.ctypes.data``.

    In CPython ``id`` is the address of an array's header, which begins with the data's address.
    """
    return POINTER(id(array) + HEADER).value or 0


POINTER, HEADER = ctypes.c_void_p.from_address, object.__basicsize__
for _array in (np.empty(3), np.empty((4, 5), np.uint8)[1:, 2:]):
    if address(_array) != _array.ctypes.data:
        raise ImportError("this Python does not keep the headers of NumPy's arrays as CPython does")


class Line(types.Type):
    """The numba type of packed arguments, which kernels read like a named tuple: ``o.scale``.

    A Line is passed to functions as two integers, an address and the thread's number. A named tuple
    would be more than a hundred arguments. q, k and v have the dtype ``storage``; with 8-bit k and
    v, q has the compute dtype.
    """

    mangling_args = "Line", ()  # shorter than the name, and part of each function's name

    def __init__(self, storage: Any, buffers: dict[str, Buffer]) -> None:
        self.buffers, self.slots = buffers, slots(buffers)
        real = types.float64 if storage == types.float64 else types.float32
        kinds = {REAL: real, DOUBLE: types.float64, BYTE: types.uint8, INDEX: types.int64}
        counters = types.Array(types.int64, 1, "C")
        fields = dict.fromkeys(("q", "k", "v"), types.Array(storage, 4, "A"))
        if storage in (types.int8, types.uint8):
            fields["q"] = types.Array(real, 4, "A")
        fields |= dict.fromkeys(("k_scale", "v_scale"), types.Array(real, 3, "A"))
        fields |= {"bias": types.Array(real, 4, "A")}
        fields |= {"O": types.Array(storage if storage == types.uint16 else real, 4, "A")}
        fields |= {"mask": types.Array(types.boolean, 4, "A"), "L": types.Array(real, 3, "A")}
        lines = ("q_offset", "kv_lengths", "first_keys", "ids", "block_columns", "block_rows")
        fields |= dict.fromkeys(lines, types.Array(types.int64, 1, "C"))
        fields |= dict.fromkeys(("queries", "pages"), types.Array(types.int64, 2, "C"))
        fields |= dict.fromkeys(("slopes", "sinks"), types.Array(real, 1, "C"))
        fields |= {"blocks": types.Array(types.uint8, 1, "C")}
        fields |= {"first_blocks": types.Array(types.int64, 2, "A")}
        fields |= {"picks": types.Array(types.int32, 4, "A")}
        fields |= {"chosen": types.Array(types.int32, 3, "A")}
        fields |= {name: types.Array(kinds[x.kind], 1, "C") for name, x in buffers.items()}
        numbers = (*[types.int64] * 2, *[types.float64] * 2, types.boolean, *[types.int64] * 5)
        fields |= zip(NUMBERS, numbers, strict=True)
        self.fields = fields | dict.fromkeys(("counters", "failed"), counters)
        self.fields |= dict.fromkeys(("worker", "workers"), types.int64)
        self.fields["sizes"] = types.UniTuple(types.int64, NUM_SIZES)
        super().__init__(f"Line({storage}, {buffers})")


@register_model(Line)
class _LineModel(models.StructModel):
    def __init__(self, manager: Any, kind: Line) -> None:
        members = [("line", types.CPointer(types.int64)), ("worker", types.int64)]
        super().__init__(manager, kind, members)


@infer_getattr
class _Fields(AttributeTemplate):
    key = Line

    def generic_resolve(self, kind: Line, name: str) -> Any:
        return kind.fields.get(name)


@lower_getattr_generic(Line)
def _read_field(context: Any, builder: Any, kind: Line, value: Any, name: str) -> Any:
    pair = cgutils.create_struct_proxy(kind)(context, builder, value)
    return _Reader(context, builder, kind, pair.line, pair.worker).field(name)


class _Reader:
    """A generator of code that reads a line."""

    def __init__(self, context: Any, builder: Any, kind: Line, line: Any, worker: Any) -> None:
        self._context, self._builder, self._kind = context, builder, kind
        self._line, self._worker = line, worker

    def field(self, name: str) -> Any:
        """Generate code that reads the array, the number or the sizes of this name."""
        kind, slot = self._kind.fields[name], self._kind.slots
        if name in NUMBERS:
            return self._number(slot["numbers"] + NUMBERS.index(name), kind)
        if name == "worker":
            return self._worker
        if name == "workers":
            return self._read(slot[name])
        if name == "sizes":
            sizes = [self._read(slot["sizes"] + n) for n in range(NUM_SIZES)]
            return self._context.make_tuple(self._builder, kind, sizes)
        if name in ("counters", "failed"):
            first, length = (0, TASKS + 1) if name == "counters" else (FAILED, 1)
            pointer = self._builder.gep(self._line, [INT(slot["counters"] + first)])
            shape, strides = [INT(length)], [INT(8)]
        else:
            first, pointer = slot[name] + 1, self._address(name)
            shape = [self._read(first + axis) for axis in range(kind.ndim)]
            strides = [self._read(first + AXES + axis) for axis in range(kind.ndim)]
        return array_at(self._context, self._builder, kind, pointer, shape, strides)

    def _load(self, pointer: Any) -> Any:
        """Load a value that is constant during a call, so that LLVM need not reload it."""
        loaded = self._builder.load(pointer)
        loaded.set_metadata("invariant.load", self._builder.module.add_metadata([]))
        return loaded

    def _read(self, n: int) -> Any:
        return self._load(self._builder.gep(self._line, [INT(n)]))

    def _number(self, n: int, kind: Any) -> Any:
        if kind == types.float64:
            return self._builder.bitcast(self._read(n), ir.DoubleType())
        if kind == types.boolean:
            return self._builder.icmp_signed("!=", self._read(n), INT(0))
        return self._read(n)

    def _brought(self, name: str) -> Any:
        header = self._builder.add(self._read(BROUGHT.index(name)), INT(HEADER))
        return self._load(self._builder.inttoptr(header, INT.as_pointer()))

    def _address(self, name: str) -> Any:
        at, buffers, builder = self._kind.slots[name], self._kind.buffers, self._builder
        if name in BROUGHT:
            address = self._brought(name)
        elif name not in buffers:
            address = self._read(at)
        else:
            address = builder.add(self._brought("memory"), self._read(at))
            if not buffers[name].is_shared:
                own = builder.mul(self._worker, self._read(at + 2 + AXES))
                address = builder.add(address, own)
        return builder.inttoptr(address, INT.as_pointer())


def array_at(context: Any, builder: Any, kind: Any, pointer: Any, shape: Any, strides: Any) -> Any:
    """Generate LLVM code for an array of numba type ``kind`` whose data is at ``pointer``."""
    struct = context.make_array(kind)(context, builder)
    item = context.get_data_type(kind.dtype)
    context.populate_array(
        struct, data=builder.bitcast(pointer, item.as_pointer()), shape=shape, strides=strides,
        itemsize=INT(context.get_abi_sizeof(item)), meminfo=None,
    )  # fmt: skip
    return struct._getvalue()


def unpacker(**buffers: Buffer) -> Any:
    """Return a function ``unpack(line, worker)`` that reads a kernel's packed arguments.

    ``unpack`` returns q, k, v, mask, bias, o, O, L, memory and the sizes; ``o`` and ``memory`` are
    the same ``Line``. The pointer ``line`` has the dtype in which q, k and v are stored.
    """

    @intrinsic
    def unpack(typing, line, worker):
        kind = Line(line.dtype, buffers)
        order = ("q", "k", "v", "mask", "bias", "o", "O", "L", "memory", "sizes")
        kinds = [kind.fields.get(name, kind) for name in order]

        def generate(context, builder, signature, arguments):
            pair = cgutils.create_struct_proxy(kind)(context, builder)
            pair.line = builder.bitcast(arguments[0], INT.as_pointer())
            pair.worker = arguments[1]
            reader = _Reader(context, builder, kind, pair.line, pair.worker)
            values = [
                reader.field(name) if name in kind.fields else pair._getvalue() for name in order
            ]
            return context.make_tuple(builder, signature.return_type, values)

        return types.Tuple(kinds)(line, types.int64), generate

    return unpack
