"""Compute S = K_j Q_iᵀ and O += V_jᵀ P for a tile, with sums in registers.

``tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth)`` sets
C = factor ∘ (A B). ``tile_product_add`` with the same arguments sets C = factor ∘ C + A B. C has
``rows`` rows of ``vectors`` vectors; the inner dimension is ``depth``. A's element (r, k) is at
a + r · a_row + k · a_k. B's row k starts at b + k · b_k, and C's row r at c + r · c_row, all in
elements. ``factor`` has one number per lane. C must have room for whole register tiles: rows up to
the next multiple of ``ROWS`` are written too, as copies of the last row's product.

If A and B hold 32-bit integers, these are pairs of bfloat16 numbers, two successive ones along the
inner dimension, and ``depth`` counts pairs. One instruction, where ``MULTIPLIES_PAIRS``, multiplies
16 pairs by 16 pairs and adds all products.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from minimha.kernels.cpu.jit import jit_inline, jit_too
from minimha.kernels.cpu.simd.vector import INT, REGISTERS, Vector, loop, pointer_to

ROWS = REGISTERS // 4  # rows of a register tile


@jit_too
def whole_tiles(rows):
    """Return ``rows`` rounded up to a multiple of ``ROWS``, the height of a register tile."""
    return -(-rows // ROWS) * ROWS


def register_tile(vectors, adds, rows=ROWS):
    """Return a numba intrinsic that computes ``rows`` × ``vectors`` vectors of sums in registers.

    If ``adds``, it is part of ``tile_product_add``, else of ``tile_product``. If A has fewer than
    ``rows`` rows left, the intrinsic reads its last row in place of each missing row.
    """

    @intrinsic
    def product(typing, A, a, a_row, a_k, B, b, b_k, C, c, c_row, F, left, depth):
        index = types.intp
        signature = types.void(
            A, index, index, index, B, index, index, C, index, index, F, index, index
        )

        def generate(context, builder, signature, arguments):
            A, a, a_row, a_k, B, b, b_k, C, c, c_row, F, left, depth = arguments
            kinds = signature.args
            vector = Vector(kinds[7].dtype)
            is_paired = isinstance(kinds[0].dtype, types.Integer)
            multiply_add = vector.add_pairs if is_paired else vector.fma
            A = pointer_to(context, builder, kinds[0], A, a)
            B = pointer_to(context, builder, kinds[4], B, b)
            C = pointer_to(context, builder, kinds[7], C, c)
            if is_paired:  # vectors of floats carry the bits
                A, B = (builder.bitcast(x, C.type) for x in (A, B))
            F = pointer_to(context, builder, kinds[10], F, INT(0))

            def row_of(pointer, stride, r):
                return builder.gep(pointer, [builder.mul(r, stride)])

            last = builder.sub(left, INT(1))
            present = [
                builder.select(builder.icmp_signed("<", INT(r), left), INT(r), last)
                for r in range(rows)
            ]
            rows_of_A = [row_of(A, a_row, r) for r in present]
            rows_of_C = [row_of(C, c_row, INT(r)) for r in range(rows)]
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
                    multiply_add(builder, left[r], right[n], total)
                    for (r, n), total in zip(tile, sums, strict=True)
                ]

            sums = loop(builder, depth, 1, zeros, body)
            for (r, n), total in zip(tile, sums, strict=True):
                if adds:  # after the products: a long sum of short sums loses fewer digits
                    so_far = vector.load(builder, rows_of_C[r], n)
                    result = vector.fma(builder, so_far, factors[n], total)
                else:
                    result = builder.fmul(total, factors[n])
                vector.store(builder, result, rows_of_C[r], n)
            return context.get_dummy_value()

        return signature, generate

    return product


def _tile_product(adds, height=ROWS):
    tile_3, tile_2, tile_1 = (register_tile(vectors, adds, height) for vectors in (3, 2, 1))

    def product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
        for r in range(0, rows, height):
            from_a, to, left = a + r * a_row, c + r * c_row, rows - r
            if vectors == 3:
                tile_3(A, from_a, a_row, a_k, B, b, b_k, C, to, c_row, factor, left, depth)
            elif vectors == 2:
                tile_2(A, from_a, a_row, a_k, B, b, b_k, C, to, c_row, factor, left, depth)
            else:
                tile_1(A, from_a, a_row, a_k, B, b, b_k, C, to, c_row, factor, left, depth)

    return jit_inline(product)


tile_product, tile_product_add = _tile_product(adds=False), _tile_product(adds=True)
row_tile_add = _tile_product(adds=True, height=1)  # as ``tile_product_add``, one row after another
