"""Memory: views without reference counts, a counter that threads share, prefetching, bandwidth."""

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
from minimha.kernels.cpu.simd.vector import FASTMATH, INT, VECTORS, panel_width, pointer_to


@intrinsic
def flat(typing, X, offset):
    """The memory of X from element ``offset`` on, as a 1-D array without a length of its own.

    numba does not count references to it, so X must outlive it.
    """
    signature = types.Array(X.dtype, 1, "C")(X, types.intp)

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        line = context.make_array(signature.return_type)(context, builder)
        itemsize = INT(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        context.populate_array(
            line,
            data=pointer_to(context, builder, kind, *arguments),
            shape=[INT(0)],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return line._getvalue()

    return signature, generate


@intrinsic
def fetch_add(typing, counter):
    """counter[0] += 1, atomically; returns the value before."""
    signature = types.int64(counter)

    def generate(context, builder, signature, arguments):
        pointer = pointer_to(context, builder, signature.args[0], arguments[0], INT(0))
        return builder.atomic_rmw("add", pointer, INT(1), "monotonic")

    return signature, generate


def prefetch(builder, pointer):
    """Prefetch the cache line at ``pointer`` into L1, for reading; any address is allowed."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, number(0), number(3), number(1)])  # to read, into L1, data


def prefetcher(builder, vector, stride, columns, rows):
    """prefetch_rows(pointer, k) for ``rows`` rows that are read side by side, vector k of each.

    Memory delivers sequential addresses faster. So rows without a gap between them (``stride`` is
    ``columns``) are prefetched one after the other: by the time k has reached ``columns``, all
    of them have been.
    """
    is_gapless = builder.icmp_signed("==", stride, columns)
    along = builder.select(is_gapless, INT(rows), INT(1))
    across = builder.select(is_gapless, INT(vector.width), stride)

    def prefetch_rows(pointer, k):
        first = builder.mul(k, along)
        for r in range(rows):
            offset = builder.add(first, builder.mul(INT(r), across))
            prefetch(builder, builder.gep(pointer, [offset]))

    return prefetch_rows


def read_memory(numbers: NDArray[Any]) -> NDArray[Any]:
    """Read a 1-D array once, with all of numba's threads, up to the last full panel of lanes.

    Returns
    -------
    ndarray of shape (threads, lanes)
        The largest number that each lane of each thread read.
    """
    largest: NDArray[Any] = _read_memory(numbers, numba.get_num_threads())
    return largest


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _read_memory(numbers, workers):
    width = panel_width(numbers.itemsize)
    rows = numbers.size // width
    largest = np.empty((workers, width), numbers.dtype)
    for worker in numba.prange(workers):
        first, last = worker * rows // workers, (worker + 1) * rows // workers
        lanes_max(numbers, first * width, last - first, VECTORS, largest[worker])
    return largest
