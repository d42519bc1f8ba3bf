"""Transposition, block by block in registers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.simd.vector import INT, pointer_to

BLOCK = 8  # rows and columns that are transposed in registers


def _interleaved(builder, one, other):
    """Two rows interleaved: one vector from their first halves, one from their second halves."""
    for start in (0, BLOCK // 2):
        picks = [source + start + x for x in range(BLOCK // 2) for source in (0, BLOCK)]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), picks)
        yield builder.shuffle_vector(one, other, pick)


@intrinsic
def _transpose_block(typing, X, x, x_row, Y, y, y_row):
    """``transpose`` of BLOCK rows and columns.

    Row i is interleaved with row i + BLOCK / 2, log2(BLOCK) times: each time halves the distance
    between two items of one column, in the end to 1.
    """
    index = types.intp
    signature = types.void(X, index, index, Y, index, index)

    def generate(context, builder, signature, arguments):
        X, x, x_row, Y, y, y_row = arguments
        item = context.get_data_type(signature.args[0].dtype)
        itemsize = context.get_abi_sizeof(item)
        row_type = ir.VectorType(item, BLOCK).as_pointer()
        X = pointer_to(context, builder, signature.args[0], X, x)
        Y = pointer_to(context, builder, signature.args[3], Y, y)

        def row_of(pointer, stride, r):
            start = builder.gep(pointer, [builder.mul(INT(r), stride)])
            return builder.bitcast(start, row_type)

        rows = [builder.load(row_of(X, x_row, r)) for r in range(BLOCK)]
        for row in rows:
            row.align = itemsize
        for _ in range(BLOCK.bit_length() - 1):
            pairs = zip(rows[: BLOCK // 2], rows[BLOCK // 2 :], strict=True)
            rows = [both for pair in pairs for both in _interleaved(builder, *pair)]
        for r, row in enumerate(rows):
            stored = builder.store(row, row_of(Y, y_row, r))
            stored.align = itemsize
        return context.get_dummy_value()

    return signature, generate


@jit
def transpose(X, x, x_row, Y, y, y_row, rows, columns):
    """Y[y + c · y_row + r] = X[x + r · x_row + c] for ``rows`` r, ``columns`` c; flat arrays."""
    full_rows, full_columns = rows // BLOCK * BLOCK, columns // BLOCK * BLOCK
    for r in range(0, full_rows, BLOCK):
        for c in range(0, full_columns, BLOCK):
            _transpose_block(X, x + r * x_row + c, x_row, Y, y + c * y_row + r, y_row)
    for r in range(rows):
        for c in range(full_columns if r < full_rows else 0, columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]
