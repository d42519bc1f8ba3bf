"""Create views of memory, increment shared counters, and prefetch cache lines."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import INT, pointer_to

# The length of a view whose length is unknown. numba adds it to a negative index, which must stay
# negative if the rows of an array run backwards.
UNKNOWN = INT(0)


@intrinsic
def flat(typing, X, offset):
    """Return a 1-D view of the memory of X from element ``offset`` on."""
    signature = types.Array(X.dtype, 1, "C")(X, types.intp)

    def generate(context, builder, signature, arguments):
        kind, line = signature.args[0], signature.return_type
        return _view(
            context, builder, line, pointer_to(context, builder, kind, *arguments), [UNKNOWN]
        )

    return signature, generate


@intrinsic
def matrix(typing, X, offset, rows, columns):
    """Return a 2-D view (rows, columns) of the memory of X from element ``offset`` on."""
    signature = types.Array(X.dtype, 2, "C")(X, types.intp, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        kind, table = signature.args[0], signature.return_type
        pointer = pointer_to(context, builder, kind, *arguments[:2])
        return _view(context, builder, table, pointer, arguments[2:])

    return signature, generate


def _integers(type_of):
    """Return a primitive that views the memory of X as integers of the type ``type_of(X)``."""

    @intrinsic
    def integers(typing, X):
        signature = types.Array(type_of(X), 1, "C")(X)

        def generate(context, builder, signature, arguments):
            line = signature.return_type
            pointer = pointer_to(context, builder, signature.args[0], arguments[0], INT(0))
            item = context.get_data_type(line.dtype).as_pointer()
            return _view(context, builder, line, builder.bitcast(pointer, item), [UNKNOWN])

        return signature, generate

    return integers


bits_of = _integers(lambda X: types.Integer.from_bitwidth(X.dtype.bitwidth, False))
halves_of = _integers(lambda X: types.uint16)


def _view(context, builder, kind, pointer, shape):
    view = context.make_array(kind)(context, builder)
    itemsize = INT(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(length, strides[0]))
    context.populate_array(
        view, data=pointer, shape=shape, strides=strides, itemsize=itemsize, meminfo=None
    )
    return view._getvalue()


@intrinsic
def fetch_add(typing, counters, n):
    """Increment counters[n] atomically, and return the old value.

    A thread whose increment comes later sees everything that this thread wrote before its own.
    """
    signature = types.int64(counters, types.intp)

    def generate(context, builder, signature, arguments):
        pointer = pointer_to(context, builder, signature.args[0], *arguments)
        return builder.atomic_rmw("add", pointer, INT(1), "acq_rel")

    return signature, generate


def prefetch(builder, pointer, level):
    """Generate a prefetch of the cache line at ``pointer`` into the L1 or L2 cache (``level``).

    The pointer may be invalid.
    """
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, number(0), number(4 - level), number(1)])  # to read, data


@intrinsic
def prefetch_to_L2(typing, X, offset):
    """Prefetch the cache line of element ``offset`` of X into the L2 cache."""

    def generate(context, builder, signature, arguments):
        prefetch(builder, pointer_to(context, builder, signature.args[0], *arguments), 2)
        return context.get_dummy_value()

    return types.void(X, types.intp), generate
