"""Multiply 16-bit tiles in a CPU's matrix unit, Intel AMX, with sums in float32.

A *tile* is a register of 16 rows of 64 bytes. One instruction multiplies a tile A by a tile B and
adds the product to a tile C of 16 × 16 floats. A has 16 rows of 32 bfloat16 numbers. B has 16 rows
of 16 pairs; a pair is two successive numbers of a column. The matrix unit has 16 times the
throughput of vector instructions. Sums are rounded by IEEE 754, but numbers below the smallest
normal number, 2^-126, count as 0.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.simd.vector import FEATURES, INT, VECTOR_BITS, loop, pointer_to

TILES = 8  # registers
TILE = 16  # rows of a tile, and pairs or floats in a row
DEPTH = 32  # 16-bit numbers in a row
# Palette 1: eight tiles, with 64 bytes per row, and their numbers of rows.
CONFIGURATION = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [TILE] * 8 + [0] * 8)
TOGETHER = 2  # tiles of C; more registers are slower if another thread of the core has tiles too
CACHED = 8192  # 16-bit numbers of A at most, a third of an L1 cache of 48 KiB
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux
BYTE = ir.IntType(8)


@cache
def is_usable() -> bool:
    """Return whether the CPU has a matrix unit that this process may use.

    A process asks Linux for permission once, which an old kernel or a sandbox may refuse. Forked
    children inherit the permission.
    """
    if sys.platform != "linux" or VECTOR_BITS < 512 or not {"amx-tile", "amx-bf16"} <= FEATURES:
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


@register_jitable
def whole(number, unit):
    """Return ``number``, rounded up to a multiple of ``unit``."""
    return -(-number // unit) * unit


def _instruction(builder, name, *operands):
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, operands)


@intrinsic
def configure_tiles(typing):
    """Configure the tile registers of this thread, before it calls ``matrix_product``."""

    def generate(context, builder, signature, arguments):
        content = cgutils.make_bytearray(CONFIGURATION)
        constant = cgutils.global_constant(builder, "tile_configuration", content)
        _instruction(builder, "ldtilecfg", builder.bitcast(constant, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release_tiles(typing):
    """Release the tile registers, so that a switch of threads need not save them."""

    def generate(context, builder, signature, arguments):
        _instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def tile_column(tiles, parts_of_A, parts_of_B):
    """Return a primitive for ``tiles`` tiles of C below each other; A and B consist of parts.

    If not all tiles of A have registers, they take turns.
    """

    @intrinsic
    def column(typing, A, a, a_row, a_part, B, b, b_row, b_part, C, c, c_row, depth, adds):
        index = types.intp
        signature = types.void(
            A, index, index, index, B, index, index, index, C, index, index, index, types.boolean
        )

        def generate(context, builder, signature, arguments):
            A, a, a_row, a_part, B, b, b_row, b_part, C, c, c_row, depth, adds = arguments
            kinds = signature.args
            A = pointer_to(context, builder, kinds[0], A, a)
            B = pointer_to(context, builder, kinds[4], B, b)
            C = pointer_to(context, builder, kinds[8], C, c)
            sums, rights = [BYTE(r) for r in range(tiles)], range(TILES - parts_of_B, TILES)
            rights = [BYTE(right) for right in rights]
            together = min(tiles, TILES - tiles - parts_of_B)

            def transfer(name, tile, pointer, offset, row, itemsize):
                start = builder.bitcast(builder.gep(pointer, [offset]), BYTE.as_pointer())
                _instruction(builder, name, tile, start, builder.mul(row, INT(itemsize)))

            def step(k, _):
                row = builder.mul(builder.lshr(k, INT(1)), b_row)
                for q, right in enumerate(rights):
                    start = builder.add(row, builder.mul(b_part, INT(q)))
                    transfer("tileloadd64", right, B, start, b_row, 4)
                for p in range(parts_of_A):
                    place = builder.add(k, builder.mul(a_part, INT(p)))
                    for first in range(0, tiles, together):
                        some = sums[first : first + together]
                        lefts = [BYTE(tiles + r) for r in range(len(some))]
                        for r, left in enumerate(lefts, first):
                            start = builder.add(place, builder.mul(a_row, INT(r * TILE)))
                            transfer("tileloadd64", left, A, start, a_row, 2)
                        for right in rights:
                            for total, left in zip(some, lefts, strict=True):
                                _instruction(builder, "tdpbf16ps", total, left, right)
                return []

            rows = [builder.mul(c_row, INT(r * TILE)) for r in range(tiles)]
            with builder.if_else(adds) as (yes, no):
                with yes:
                    for total, row in zip(sums, rows, strict=True):
                        transfer("tileloadd64", total, C, row, c_row, 4)
                with no:
                    for total in sums:
                        _instruction(builder, "tilezero", total)
            loop(builder, depth, DEPTH, [], step)
            for total, row in zip(sums, rows, strict=True):
                transfer("tilestored64", total, C, row, c_row, 4)
            return context.get_dummy_value()

        return signature, generate

    return column


def _product(parts_of_A, parts_of_B):
    """Return ``matrix_product`` for these numbers of parts, with C in tiles until all are added."""
    two, one = (tile_column(tiles, parts_of_A, parts_of_B) for tiles in (TOGETHER, 1))

    def product(A, a, a_row, a_part, B, b, b_row, b_part, C, c, c_row, rows, columns, depth, adds):
        # If A is too large for the L1 cache, its rows are read only once; otherwise B's are.
        is_tall = rows * depth * parts_of_A > CACHED
        height = TOGETHER * TILE
        outer, outer_step = (rows, height) if is_tall else (columns, TILE)
        inner, inner_step = (columns, TILE) if is_tall else (rows, height)
        for i in range(0, outer, outer_step):
            for j in range(0, inner, inner_step):
                r, n = (i, j) if is_tall else (j, i)
                x, y, z = a + r * a_row, b + n, c + r * c_row + n
                if rows - r > TILE:
                    two(A, x, a_row, a_part, B, y, b_row, b_part, C, z, c_row, depth, adds)
                else:
                    one(A, x, a_row, a_part, B, y, b_row, b_part, C, z, c_row, depth, adds)

    return jit(product)


_one_by_one, _one_by_two, _two_by_two = _product(1, 1), _product(1, 2), _product(2, 2)


@jit
def matrix_product(
    A, a, a_row, a_part, a_parts, B, b, b_row, b_part, b_parts, C, c, c_row, rows, columns, depth,
    adds,
):  # fmt: skip
    """Set C = A B, or C += A B if ``adds``, where A and B are sums of one or two parts.

    Row r of part p of A starts at a + p · a_part + r · a_row and has ``depth`` 16-bit numbers, a
    multiple of ``DEPTH``. Row k of part p of B starts at b + p · b_part + k · b_row and has
    ``columns`` pairs, a multiple of ``TILE``, as 32-bit items: numbers 2 k and 2 k + 1 of a column.
    B has at least as many parts as A. C's row r is at c + r · c_row. ``rows`` is rounded up to a
    multiple of ``TILE``: more rows of A are read, and of C written.
    """
    if b_parts == 1:
        _one_by_one(A, a, a_row, 0, B, b, b_row, 0, C, c, c_row, rows, columns, depth, adds)
    elif a_parts == 1:
        _one_by_two(A, a, a_row, 0, B, b, b_row, b_part, C, c, c_row, rows, columns, depth, adds)
    else:
        _two_by_two(
            A, a, a_row, a_part, B, b, b_row, b_part, C, c, c_row, rows, columns, depth, adds
        )
