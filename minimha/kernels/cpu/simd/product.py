"""The two products of a tile: S = K Q and O += V P."""

from __future__ import annotations

import numba
from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import FASTMATH, INT, REGISTERS, Vector, _loop, _pointer

ROWS = 8 if REGISTERS == 32 else 4


def _tile_product(rows, vectors, adds):
    """Primitive for a tile of ``rows`` × ``vectors`` sums; see ``tile_product`` for its meaning."""

    @intrinsic
    def product(typing, A, a, a_row, a_k, B, b, b_k, C, c, c_row, F, depth):
        index = types.intp
        signature = types.void(
            A, index, index, index, B, index, index, C, index, index, F, index
        )  # fmt: skip

        def generate(context, builder, signature, arguments):
            A, a, a_row, a_k, B, b, b_k, C, c, c_row, F, depth = arguments
            kinds = signature.args
            vector = Vector(kinds[7].dtype)
            A = _pointer(context, builder, kinds[0], A, a)
            B = _pointer(context, builder, kinds[4], B, b)
            C = _pointer(context, builder, kinds[7], C, c)
            F = _pointer(context, builder, kinds[10], F, INT(0))

            def row_of(pointer, stride, r):
                return builder.gep(pointer, [builder.mul(INT(r), stride)])

            rows_of_A = [row_of(A, a_row, r) for r in range(rows)]
            rows_of_C = [row_of(C, c_row, r) for r in range(rows)]
            tile = [(r, n) for r in range(rows) for n in range(vectors)]
            factors = [vector.load(builder, F, n) for n in range(vectors)]
            zeros = [vector.constant(0.0)] * len(tile)

            def body(k, sums):
                row = builder.gep(B, [builder.mul(k, b_k)])
                right = [vector.load(builder, row, n) for n in range(vectors)]
                column = builder.mul(k, a_k)
                left = [
                    vector.splat(builder, builder.load(builder.gep(row, [column])))
                    for row in rows_of_A
                ]
                return [
                    vector.fma(builder, left[r], right[n], total)
                    for (r, n), total in zip(tile, sums, strict=True)
                ]

            sums = _loop(builder, depth, 1, zeros, body)
            for (r, n), total in zip(tile, sums, strict=True):
                if adds:  # last, so that a long sum is one of short sums and loses few digits
                    so_far = vector.load(builder, rows_of_C[r], n)
                    result = vector.fma(builder, so_far, factors[n], total)
                else:
                    result = builder.fmul(total, factors[n])
                vector.store(builder, result, rows_of_C[r], n)
            return context.get_dummy_value()

        return signature, generate

    return product


_set_3, _set_2, _set_1 = (_tile_product(ROWS, vectors, False) for vectors in (3, 2, 1))
_set_row_3, _set_row_2, _set_row_1 = (_tile_product(1, vectors, False) for vectors in (3, 2, 1))
_add_3, _add_2, _add_1 = (_tile_product(ROWS, vectors, True) for vectors in (3, 2, 1))
_add_row_3, _add_row_2, _add_row_1 = (_tile_product(1, vectors, True) for vectors in (3, 2, 1))


@numba.njit(fastmath=FASTMATH)
def tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
    """C = factor ∘ (A B): ``rows`` rows of ``vectors`` vectors, over ``depth`` products.

    A's element (r, k) lies at a + r · a_row + k · a_k, B's row k at b + k · b_k, C's row r at
    c + r · c_row, all counted in elements; ``factor`` has one number a lane.
    """
    r = 0
    while r + ROWS <= rows:
        if vectors == 3:
            _set_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _set_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _set_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + ROWS * a_row, c + ROWS * c_row, r + ROWS
    while r < rows:
        if vectors == 3:
            _set_row_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _set_row_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _set_row_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + a_row, c + c_row, r + 1


@numba.njit(fastmath=FASTMATH)
def tile_product_add(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
    """C = factor ∘ C + A B; the arguments are those of ``tile_product``."""
    r = 0
    while r + ROWS <= rows:
        if vectors == 3:
            _add_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _add_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _add_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + ROWS * a_row, c + ROWS * c_row, r + ROWS
    while r < rows:
        if vectors == 3:
            _add_row_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _add_row_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _add_row_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + a_row, c + c_row, r + 1
