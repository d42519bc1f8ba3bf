"""Split numbers into sums of bfloat16 numbers, their *parts*, which a matrix unit multiplies.

The first part is the upper half of the number as float32, 8 of its 24 binary digits. The second
part is the rest. bfloat16 has one part and float16 two, without error. A weight is a float32: its
two parts have 16 digits.

A matrix unit treats subnormal numbers as 0, and 0 times infinity would be NaN. Hence only 0 has a
part that is 0: the smallest normal number, 2^-126, replaces smaller parts.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.simd.matrix_unit import DEPTH
from minimha.kernels.cpu.simd.vector import Vector, loop, pointer_to

WIDTH = DEPTH  # numbers packed at once
HALF, WORD = ir.IntType(16), ir.IntType(32)
HALVES, WORDS = ir.VectorType(HALF, WIDTH), ir.VectorType(WORD, WIDTH)
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def _upper(builder, x):
    """Generate the upper halves of floats, as bits."""
    words = builder.lshr(builder.bitcast(x, WORDS), _all(WORDS, 16))
    return builder.trunc(words, HALVES)


def _part_of_bfloat16(builder, bits):
    """Generate the only part of bfloat16 numbers, as bits."""
    size = builder.and_(bits, _all(HALVES, 0x7FFF))
    is_below = builder.icmp_unsigned("<", builder.sub(size, _all(HALVES, 1)), _all(HALVES, 0x7F))
    normal = builder.or_(builder.and_(bits, _all(HALVES, 0x8000)), _all(HALVES, 0x0080))
    return builder.select(is_below, normal, bits)


def _parts_of_float16(builder, bits):
    """Generate both parts of float16 numbers, as bits."""
    x = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)
    words = builder.bitcast(x, WORDS)
    first = builder.and_(words, _all(WORDS, 0xFFFF0000))
    rest = builder.fsub(x, builder.bitcast(first, FLOATS))
    sign = builder.and_(words, _all(WORDS, 0x80000000))
    size = builder.and_(builder.bitcast(rest, WORDS), _all(WORDS, 0x7FFFFFFF))
    # Infinity less its first part is NaN, which as an integer is the largest number.
    is_some = builder.and_(
        builder.icmp_unsigned(">", size, _all(WORDS, 0x00800000)),
        builder.icmp_unsigned("<=", size, _all(WORDS, 0x7F800000)),
    )
    size = builder.select(is_some, size, _all(WORDS, 0x00800000))
    is_zero = builder.icmp_unsigned("==", words, sign)
    size = builder.select(is_zero, _all(WORDS, 0), size)
    second = builder.bitcast(builder.or_(sign, size), FLOATS)
    return _upper(builder, x), _upper(builder, second)


def _packer(is_bfloat16):
    @intrinsic
    def pack(typing, X, x, x_row, to, first, row, part, rows, n):
        """Do ``pack_rows`` for n numbers of each row, where n is a multiple of ``WIDTH``."""
        index = types.intp
        signature = types.boolean(X, index, index, to, index, index, index, index, index)
        one = 1 << (7 if is_bfloat16 else 10)  # carries if added to an exponent of ones

        def generate(context, builder, signature, arguments):
            X, x, x_row, to, first, row, part, rows, n = arguments
            X = pointer_to(context, builder, signature.args[0], X, x)
            to = pointer_to(context, builder, signature.args[3], to, first)

            def at(pointer, k):
                return builder.bitcast(builder.gep(pointer, [k]), HALVES.as_pointer())

            def one_row(r, found):
                start, target = builder.mul(r, x_row), builder.mul(r, row)

                def some(k, found):
                    bits = builder.load(at(X, builder.add(start, k)), align=2)
                    if is_bfloat16:
                        parts = [_part_of_bfloat16(builder, bits)]
                    else:
                        parts = _parts_of_float16(builder, bits)
                    place = builder.add(target, k)
                    for values in parts:
                        builder.store(values, at(to, place), align=2)
                        place = builder.add(place, part)
                    size = builder.and_(bits, _all(HALVES, 0x7FFF))
                    return [builder.or_(found[0], builder.add(size, _all(HALVES, one)))]

                return loop(builder, n, WIDTH, found, some)

            (found,) = loop(builder, rows, 1, [_all(HALVES, 0)], one_row)
            name = f"llvm.vector.reduce.or.v{WIDTH}i16"
            kind = ir.FunctionType(HALF, [HALVES])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.icmp_signed("<", builder.call(function, [found]), HALF(0))

        return signature, generate

    return pack


_pack_bfloat16, _pack_float16 = _packer(True), _packer(False)


@jit
def pack_rows(X, x, x_row, to, row, part, rows, columns, is_bfloat16, tail):
    """Split rows of X into parts, and return whether any number is NaN or infinite.

    Part p of number c of row r is written to to[p · part + r · row + c]. ``row`` is ``columns``
    rounded up to a multiple of ``WIDTH``; the numbers between are 0. ``tail`` is scratch memory for
    ``WIDTH`` numbers.
    """
    full = columns // WIDTH * WIDTH
    found = _pack(X, x, x_row, to, 0, row, part, rows, full, is_bfloat16)
    if full < row:
        for r in range(rows):
            for c in range(WIDTH):
                tail[c] = X[x + r * x_row + full + c] if full + c < columns else 0
            at = r * row + full
            found |= _pack(tail, 0, 0, to, at, row, part, 1, WIDTH, is_bfloat16)
    return found


@jit_inline
def _pack(X, x, x_row, to, first, row, part, rows, n, is_bfloat16):
    if is_bfloat16:
        return _pack_bfloat16(X, x, x_row, to, first, row, part, rows, n)
    return _pack_float16(X, x, x_row, to, first, row, part, rows, n)


@intrinsic
def split_rows(typing, S, s, n, lanes):
    """Split each weight in n rows of S, from S[s] on, into two parts.

    n must be even, and a row has ``lanes`` weights. Of rows 2 i and 2 i + 1, the former is replaced
    by pairs of both rows' first parts, and the latter by pairs of their second parts. Only second
    parts are rounded, so that a NaN stays NaN.
    """
    signature = types.void(S, types.intp, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        S, s, n, lanes = arguments
        vector = Vector(signature.args[0].dtype)
        S = pointer_to(context, builder, signature.args[0], S, s)
        upper = ir.Constant(vector.integers, [0xFFFF0000] * vector.width)
        half = ir.Constant(vector.integers, [0x8000] * vector.width)
        bits = ir.Constant(vector.integers, [16] * vector.width)

        def pairs(one, other):
            both = builder.or_(builder.lshr(one, bits), builder.and_(other, upper))
            return builder.bitcast(both, vector.type)

        def two_rows(j, _):
            def some_lanes(k, _):
                one = builder.add(builder.mul(j, lanes), k)
                places = [builder.gep(S, [one]), builder.gep(S, [builder.add(one, lanes)])]
                values = [vector.load(builder, place) for place in places]
                words = [builder.bitcast(x, vector.integers) for x in values]
                first = [builder.bitcast(builder.and_(x, upper), vector.type) for x in words]
                rests = [builder.fsub(x, y) for x, y in zip(values, first, strict=True)]
                rounded = [builder.add(builder.bitcast(x, vector.integers), half) for x in rests]
                vector.store(builder, pairs(*words), places[0])
                vector.store(builder, pairs(*rounded), places[1])
                return []

            loop(builder, lanes, vector.width, [], some_lanes)
            return []

        loop(builder, n, 2, [], two_rows)
        return context.get_dummy_value()

    return signature, generate
