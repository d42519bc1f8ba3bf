"""A transposition, block by block in registers."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import FASTMATH, INT

BLOCK = 8  # rows and columns that are transposed in registers


def _interleaved(builder, one, other):
    """Items of two rows in turn: the vector of the first halves, and that of the second."""
    for start in (0, BLOCK // 2):
        picks = [source + start + x for x in range(BLOCK // 2) for source in (0, BLOCK)]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), picks)
        yield builder.shuffle_vector(one, other, pick)


@intrinsic
def _transpose_block(typing, X, x, x_row, Y, y, y_row):
    """``transpose`` of BLOCK rows and columns.

    Row i is interleaved with row i + BLOCK / 2, which halves the distance between an item and its
    place; log2(BLOCK) times makes it 1.
    """
    index = types.intp
    signature = types.void(X, index, index, Y, index, index)

    def generate(context, builder, signature, arguments):
        X, x, x_row, Y, y, y_row = arguments
        kind = signature.args[0]
        item = context.get_data_type(kind.dtype)
        row_type = ir.VectorType(item, BLOCK).as_pointer()

        def row_of(array_type, array, first, stride, r):
            data = context.make_array(array_type)(context, builder, array).data
            start = builder.gep(builder.bitcast(data, item.as_pointer()), [first])
            place = builder.gep(start, [builder.mul(INT(r), stride)])
            return builder.bitcast(place, row_type)

        rows = [builder.load(row_of(kind, X, x, x_row, r)) for r in range(BLOCK)]
        itemsize = context.get_abi_sizeof(item)
        for row in rows:
            row.align = itemsize
        for _ in range(BLOCK.bit_length() - 1):
            pairs = zip(rows[: BLOCK // 2], rows[BLOCK // 2 :], strict=True)
            rows = [both for pair in pairs for both in _interleaved(builder, *pair)]
        for r, row in enumerate(rows):
            stored = builder.store(row, row_of(signature.args[3], Y, y, y_row, r))
            stored.align = itemsize
        return context.get_dummy_value()

    return signature, generate


@numba.njit(fastmath=FASTMATH)
def transpose(X, x, x_row, Y, y, y_row, rows, columns):
    """Y[y + c · y_row + r] = X[x + r · x_row + c] for ``rows`` r, ``columns`` c; flat arrays."""
    ready_rows, ready_columns = rows // BLOCK * BLOCK, columns // BLOCK * BLOCK
    for r in range(0, ready_rows, BLOCK):
        for c in range(0, ready_columns, BLOCK):
            _transpose_block(X, x + r * x_row + c, x_row, Y, y + c * y_row + r, y_row)
    for r in range(rows):
        for c in range(ready_columns if r < ready_rows else 0, columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]
