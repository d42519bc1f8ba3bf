"""The two products of a tile, S = K_j Q_iᵀ and O += V_jᵀ P, with their sums in registers.

``tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth)`` is
C = factor ∘ (A B), and ``tile_product_add`` with the same arguments is C = factor ∘ C + A B. C has
``rows`` rows of ``vectors`` vectors, and the inner dimension is ``depth``. A's element (r, k) is at
a + r · a_row + k · a_k, B's row k starts at b + k · b_k and C's row r at c + r · c_row, all counted
in elements. ``factor`` has one number per lane.
"""

from __future__ import annotations

import numba
from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import FASTMATH, INT, REGISTERS, Vector, loop, pointer_to

ROWS = REGISTERS // 4  # of a register tile


def _register_tile(rows, vectors, adds):
    """Primitive for a tile of ``rows`` × ``vectors`` vectors of sums."""

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
            A = pointer_to(context, builder, kinds[0], A, a)
            B = pointer_to(context, builder, kinds[4], B, b)
            C = pointer_to(context, builder, kinds[7], C, c)
            F = pointer_to(context, builder, kinds[10], F, INT(0))

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

            sums = loop(builder, depth, 1, zeros, body)
            for (r, n), total in zip(tile, sums, strict=True):
                if adds:  # last, so that a long sum is one of short sums and loses fewer digits
                    so_far = vector.load(builder, rows_of_C[r], n)
                    result = vector.fma(builder, so_far, factors[n], total)
                else:
                    result = builder.fmul(total, factors[n])
                vector.store(builder, result, rows_of_C[r], n)
            return context.get_dummy_value()

        return signature, generate

    return product


def _tile_product(adds):
    rows_3, rows_2, rows_1 = (_register_tile(ROWS, vectors, adds) for vectors in (3, 2, 1))
    row_3, row_2, row_1 = (_register_tile(1, vectors, adds) for vectors in (3, 2, 1))

    @numba.njit(fastmath=FASTMATH)
    def product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
        r = 0
        while r + ROWS <= rows:
            if vectors == 3:
                rows_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            elif vectors == 2:
                rows_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            else:
                rows_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            a, c, r = a + ROWS * a_row, c + ROWS * c_row, r + ROWS
        while r < rows:
            if vectors == 3:
                row_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            elif vectors == 2:
                row_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            else:
                row_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
            a, c, r = a + a_row, c + c_row, r + 1

    return product


tile_product, tile_product_add = _tile_product(adds=False), _tile_product(adds=True)
