"""Transpose matrices, one block at a time in registers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.jit import jit, jit_too
from minimha.kernels.cpu.simd.vector import INT, VECTOR_BITS, pointer_to

PIECE = 16  # bytes: shuffles within a piece are cheap, and loads can put it anywhere in a vector
TALLEST = 16  # rows of a block


@jit_too
def block_shape(itemsize):
    """Return the shape of a block of ``itemsize``-byte numbers to transpose in registers."""
    return min(TALLEST, VECTOR_BITS // (8 * itemsize)), PIECE // itemsize


def _interleaved(builder, one, other, columns):
    """Yield two vectors that interleave first halves of pieces, then second halves."""
    number = one.type.count
    for half in range(0, columns, columns // 2):
        picks = [
            source + piece + half + x
            for piece in range(0, number, columns)
            for x in range(columns // 2)
            for source in (0, number)
        ]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), number), picks)
        yield builder.shuffle_vector(one, other, pick)


def _joined(builder, pieces):
    """Generate one vector that concatenates ``pieces``."""
    while len(pieces) > 1:
        number = 2 * pieces[0].type.count
        pick = ir.Constant(ir.VectorType(ir.IntType(32), number), list(range(number)))
        pairs = zip(pieces[::2], pieces[1::2], strict=True)
        pieces = [builder.shuffle_vector(*pair, pick) for pair in pairs]
    return pieces[0]


@intrinsic
def _transpose_block(typing, X, x, x_row, Y, y, y_row):
    """Transpose one block in registers.

    Vector i has the pieces of rows i, i + columns, i + 2 · columns, … Vectors i and i + columns / 2
    are interleaved, log2(columns) times. Each time halves the distance between neighbours in a
    column, finally to 1.
    """
    index = types.intp
    signature = types.void(X, index, index, Y, index, index)

    def generate(context, builder, signature, arguments):
        X, x, x_row, Y, y, y_row = arguments
        item = context.get_data_type(signature.args[0].dtype)
        itemsize = context.get_abi_sizeof(item)
        rows, columns = block_shape(itemsize)
        X = pointer_to(context, builder, signature.args[0], X, x)
        Y = pointer_to(context, builder, signature.args[3], Y, y)

        def row_of(pointer, stride, r, length):
            start = builder.gep(pointer, [builder.mul(INT(r), stride)])
            return builder.bitcast(start, ir.VectorType(item, length).as_pointer())

        pieces = [builder.load(row_of(X, x_row, r, columns), align=itemsize) for r in range(rows)]
        vectors = [_joined(builder, pieces[n::columns]) for n in range(columns)]
        for _ in range(columns.bit_length() - 1):
            pairs = zip(vectors[: columns // 2], vectors[columns // 2 :], strict=True)
            vectors = [both for pair in pairs for both in _interleaved(builder, *pair, columns)]
        for c, vector in enumerate(vectors):
            builder.store(vector, row_of(Y, y_row, c, rows), align=itemsize)
        return context.get_dummy_value()

    return signature, generate


@jit
def transpose(X, x, x_row, Y, y, y_row, rows, columns):
    """Set Y[y + c · y_row + r] = X[x + r · x_row + c] for r < ``rows`` and c < ``columns``."""
    tall, wide = block_shape(X.itemsize)
    full_rows, full_columns = rows // tall * tall, columns // wide * wide
    for r in range(0, full_rows, tall):
        for c in range(0, full_columns, wide):
            _transpose_block(X, x + r * x_row + c, x_row, Y, y + c * y_row + r, y_row)
    for c in range(full_columns, columns):
        for r in range(full_rows):
            Y[y + c * y_row + r] = X[x + r * x_row + c]
    for r in range(full_rows, rows):
        for c in range(columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]
