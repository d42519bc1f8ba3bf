"""Memory as it lies there: flat lines, a counter that threads share, and rows asked for ahead."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from minimha.kernels.cpu.simd.softmax import lanes_max
from minimha.kernels.cpu.simd.vector import FASTMATH, INT, VECTORS, lanes


def _ask(builder, pointer):
    """Ask memory for the cache line at ``pointer``, without waiting; any address may be given."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, number(0), number(3), number(1)])  # to read, into L1, data


def _asker(builder, vector, row, columns, rows):
    """ask(pointer, k): for vector k of each of ``rows`` rows that are used side by side, or alike.

    Memory gives them faster one after the other. So rows that lie without a gap, ``row`` from one
    to the next, are asked for in order: by the time k has reached ``columns``, all of them were.
    """
    is_gapless = builder.icmp_signed("==", row, columns)
    along = builder.select(is_gapless, INT(rows), INT(1))
    across = builder.select(is_gapless, INT(vector.width), row)

    def ask(pointer, k):
        first = builder.mul(k, along)
        for r in range(rows):
            _ask(builder, builder.gep(pointer, [builder.add(first, builder.mul(INT(r), across))]))

    return ask


@intrinsic
def take_ticket(typing, counter):
    """counter[0] += 1, by one thread at a time; returns what it was before."""
    signature = types.int64(counter)

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, INT(1), "monotonic")

    return signature, generate


@intrinsic
def flat(typing, X, offset):
    """The memory of X from element ``offset`` on, as a line of items that X must outlive."""
    signature = types.Array(X.dtype, 1, "C")(X, types.intp)

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, arguments[0]).data
        line = context.make_array(signature.return_type)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        zero, itemsize = INT(0), INT(size)
        context.populate_array(
            line,
            data=builder.gep(data, [arguments[1]]),
            shape=[zero],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return line._getvalue()

    return signature, generate


def read_memory(numbers: NDArray[Any]) -> NDArray[Any]:
    """Read every number of a line once, with all of numba's threads."""
    width = VECTORS * lanes(numbers.itemsize)
    largest: NDArray[Any] = _read_memory(numbers, numba.get_num_threads(), width)
    return largest


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _read_memory(numbers, workers, width):
    rows = numbers.size // width
    largest = np.empty((workers, width), numbers.dtype)
    for worker in numba.prange(workers):
        first, last = worker * rows // workers, (worker + 1) * rows // workers
        lanes_max(numbers, first * width, last - first, VECTORS, largest[worker])
    return largest
