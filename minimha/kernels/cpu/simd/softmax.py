"""Compute scale, soft cap, maximum, exp and sum of a tile of scores, lane by lane.

A row of the tile has ``vectors`` vectors, which together have ``lanes`` lanes.
"""

from __future__ import annotations

import math
from functools import reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels.cpu.jit import jit
from minimha.kernels.cpu.simd.vector import INT, VECTOR_BITS, Vector, loop, pairwise_sum, pointer_to

TOGETHER = 8  # rows of a column that are computed independently of each other


def _down_columns(builder, vector, rows, lanes, initial, fold, finish):
    """Generate values = fold(places, values, lane) down each column, then finish(values, lane).

    ``fold`` gets the places of ``TOGETHER`` rows, or of one row among the last. The first values
    are ``initial``, and ``lane`` is the first lane of the column.
    """
    full = builder.and_(rows, INT(-TOGETHER))

    def column(lane, _):
        def some_rows(first, number):
            def body(row, values):
                start = builder.mul(builder.add(first, row), lanes)
                places = [builder.add(start, lane)]
                while len(places) < number:
                    places.append(builder.add(places[-1], lanes))
                return fold(places, values, lane)

            return body

        values = loop(builder, full, TOGETHER, initial, some_rows(INT(0), TOGETHER))
        values = loop(builder, builder.sub(rows, full), 1, values, some_rows(full, 1))
        finish(values, lane)
        return []

    loop(builder, lanes, vector.width, [], column)


@intrinsic
def _lanes_max(typing, S, s, n, vectors, M):
    signature = types.void(S, types.intp, types.intp, types.intp, M)

    def generate(context, builder, signature, arguments):
        S, s, n, vectors, M = arguments
        vector = Vector(signature.args[0].dtype)
        lanes = builder.mul(vectors, INT(vector.width))
        S = pointer_to(context, builder, signature.args[0], S, s)
        M = pointer_to(context, builder, signature.args[4], M, INT(0))

        def larger(x, best):
            return builder.select(builder.fcmp_ordered(">", x, best), x, best)

        def fold(places, best, lane):
            rows = [vector.load(builder, builder.gep(S, [place])) for place in places]
            return [larger(row, best[n]) for n, row in enumerate(rows)] + best[len(rows) :]

        def finish(best, lane):
            vector.store(builder, reduce(larger, best), builder.gep(M, [lane]))

        lowest = [vector.constant(-math.inf)] * TOGETHER
        _down_columns(builder, vector, n, lanes, lowest, fold, finish)
        return context.get_dummy_value()

    return signature, generate


@jit
def lanes_max(S, s, n, vectors, M):
    """Set M[lane] to the maximum of S[s + row · lanes + lane] over n rows, ignoring NaN."""
    _lanes_max(S, s, n, vectors, M)


# Coefficients of 2^r for |r| <= 1/2, highest power first: for float32 a fit with a relative error
# of 2e-9, for float64 the Taylor series, whose error is below 1e-17 there. The last is exactly 1.
POLYNOMIAL = {
    32: [1.5353362e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 0.24022648, 0.6931472, 1.0],
    64: [math.log(2) ** n / math.factorial(n) for n in range(13, -1, -1)],
}
MANTISSA = {32: 23, 64: 52}
# Adding ROUNDER to a number rounds the number to an integer, in the lowest bits of the sum.
ROUNDER = {bits: 1.5 * 2.0**mantissa for bits, mantissa in MANTISSA.items()}
# For x from here on e^x is a normal number, although x / ln(2) is rounded.
SMALLEST = {32: -126 * math.log(2) * (1 - 2**-20), 64: -1022 * math.log(2) * (1 - 2**-49)}


def _reduced(builder, vector, x):
    """Generate w, r, and a mask where e^x is not normal; e^x = 2^(w + r), |r| <= 1/2, w an integer.

    1 / ln(2) is rounded once, which gives float32's smallest weights a relative error of 1e-6 (4e-6
    without fused multiply-adds). Adding its rounding error would cost an instruction and change no
    sum of weights.
    """
    log2_e = vector.constant(1 / math.log(2))
    if VECTOR_BITS > 128:  # multiply-adds are fused: rint would take two instructions more
        rounder = vector.constant(ROUNDER[vector.bits])
        w = builder.fsub(vector.fma(builder, x, log2_e, rounder), rounder)
    else:
        w = vector.call(builder, "rint", builder.fmul(x, log2_e))
    r = vector.fma(builder, x, log2_e, builder.fneg(w))
    return w, r, builder.fcmp_ordered("<", x, vector.constant(SMALLEST[vector.bits]))


def _polynomial(builder, vector, coefficients, r):
    first, *rest = coefficients
    power = vector.constant(first)
    for coefficient in rest:
        power = vector.fma(builder, power, r, vector.constant(coefficient))
    return power


def _times_power_of_2(builder, vector, x, w):
    """Generate x · 2^w, where 2^w is a normal number; NaN stays NaN with any payload.

    AVX-512 has an instruction for that. Elsewhere 2^w is made from its exponent bits. Adding w to
    the exponent bits of x would save the product, but turn some NaNs into numbers.
    """
    if VECTOR_BITS == 512:
        suffix = {32: "ps", 64: "pd"}[vector.bits]
        lanes, rounding = ir.IntType(vector.width)(-1), ir.IntType(32)(4)  # all; the usual one
        kind = ir.FunctionType(vector.type, [*[vector.type] * 3, lanes.type, rounding.type])
        function = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.x86.avx512.mask.scalef.{suffix}.512"
        )
        return builder.call(function, [x, w, x, lanes, rounding])
    mantissa = MANTISSA[vector.bits]
    # A conversion to integers would be undefined for NaN.
    shifted = builder.fadd(w, vector.constant(ROUNDER[vector.bits]))
    exponent = builder.shl(
        builder.bitcast(shifted, vector.integers),
        ir.Constant(vector.integers, [mantissa] * vector.width),
    )
    one = builder.bitcast(vector.constant(1.0), vector.integers)
    power = builder.bitcast(builder.add(exponent, one), vector.type)
    return builder.fmul(x, power)


def exp_of_vector(builder, vector, x):
    """Generate exp(x) for a vector x whose exponentials are finite or NaN.

    A result below the smallest normal number becomes exactly 0.
    """
    w, r, vanishes = _reduced(builder, vector, x)
    power = _polynomial(builder, vector, POLYNOMIAL[vector.bits], r)
    scaled = _times_power_of_2(builder, vector, power, w)
    return builder.select(vanishes, vector.constant(0.0), scaled)


def _tanh(builder, vector, x):
    """Generate tanh(x) = -e / (e + 2) with e = exp(-2 abs(x)) - 1, which is exact for small x.

    e = 2^w (2^r - 1) + (2^w - 1), and the polynomial of 2^r - 1 is divisible by r.
    """
    one = vector.constant(1.0)
    size = builder.fmul(vector.call(builder, "fabs", x), vector.constant(-2.0))
    w, r, vanishes = _reduced(builder, vector, size)
    power = _times_power_of_2(builder, vector, one, w)
    rest = builder.fmul(r, _polynomial(builder, vector, POLYNOMIAL[vector.bits][:-1], r))
    e = vector.fma(builder, power, rest, builder.fsub(power, one))
    e = builder.select(vanishes, vector.constant(-1.0), e)
    quotient = builder.fdiv(e, builder.fadd(e, vector.constant(2.0)))
    return vector.call(builder, "copysign", quotient, x)


def _stay_apart(builder):
    """Prevent inlining of the function, because the constants of its loop need registers."""
    builder.function.attributes.add("noinline")


@intrinsic
def _cap(typing, S, s, n, cap):
    """Do ``soft_cap`` for n items, where n is a multiple of the vector width."""
    signature = types.void(S, types.intp, types.intp, S.dtype)

    def generate(context, builder, signature, arguments):
        S, s, n, cap = arguments
        _stay_apart(builder)
        vector = Vector(signature.args[0].dtype)
        S = pointer_to(context, builder, signature.args[0], S, s)
        cap = vector.splat(builder, cap)

        def body(k, _):
            pointer = builder.gep(S, [k])
            ratio = builder.fdiv(vector.load(builder, pointer), cap)
            vector.store(builder, builder.fmul(cap, _tanh(builder, vector, ratio)), pointer)
            return []

        loop(builder, n, vector.width, [], body)
        return context.get_dummy_value()

    return signature, generate


@jit
def soft_cap(S, s, n, cap):
    """Set S[x] = cap · tanh(S[x] / cap) for n items x from s on."""
    width = VECTOR_BITS // (8 * S.itemsize)
    full = n // width * width
    _cap(S, s, full, S.dtype.type(cap))
    for x in range(s + full, s + n):
        S[x] = cap * math.tanh(S[x] / cap)


@intrinsic
def _lanes_exp(typing, S, s, n, vectors, scale, M, T):
    signature = types.void(S, types.intp, types.intp, types.intp, S.dtype, M, T)

    def generate(context, builder, signature, arguments):
        S, s, n, vectors, scale, M, T = arguments
        _stay_apart(builder)
        vector = Vector(signature.args[0].dtype)
        lanes = builder.mul(vectors, INT(vector.width))
        S = pointer_to(context, builder, signature.args[0], S, s)
        M = pointer_to(context, builder, signature.args[5], M, INT(0))
        T = pointer_to(context, builder, signature.args[6], T, INT(0))
        scale = vector.splat(builder, scale)

        def fold(places, total, lane):
            below, terms = builder.fneg(vector.load(builder, builder.gep(M, [lane]))), []
            for place in places:
                at = builder.gep(S, [place])
                difference = vector.fma(builder, vector.load(builder, at), scale, below)
                terms.append(exp_of_vector(builder, vector, difference))
                vector.store(builder, terms[-1], at)
            return [builder.fadd(*total, pairwise_sum(builder, terms))]

        def finish(total, lane):
            vector.store(builder, *total, builder.gep(T, [lane]))

        _down_columns(builder, vector, n, lanes, [vector.constant(0.0)], fold, finish)
        return context.get_dummy_value()

    return signature, generate


@jit
def lanes_exp(S, s, n, vectors, scale, M, T):
    """Set S = exp(scale · S - M[lane]) for n rows from S[s] on, and T[lane] to their sum.

    scale · S - M must be at most 88 (float64: 709). Results below the smallest normal number become
    0.
    """
    _lanes_exp(S, s, n, vectors, S.dtype.type(scale), M, T)


@intrinsic
def scale_lanes(typing, X, x, rows, lanes, F):
    """Multiply X[x + row · lanes + lane] by F[lane], for all lanes of ``rows`` rows."""
    signature = types.void(X, types.intp, types.intp, types.intp, F)

    def generate(context, builder, signature, arguments):
        X, x, rows, lanes, F = arguments
        vector = Vector(signature.args[0].dtype)
        X = pointer_to(context, builder, signature.args[0], X, x)
        F = pointer_to(context, builder, signature.args[4], F, INT(0))

        def fold(places, _, lane):
            factor = vector.load(builder, builder.gep(F, [lane]))
            for place in places:
                at = builder.gep(X, [place])
                vector.store(builder, builder.fmul(vector.load(builder, at), factor), at)
            return []

        _down_columns(builder, vector, rows, lanes, [], fold, lambda values, lane: None)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def round_lanes(typing, X, x, rows, lanes, F, to):
    """Set to[i] to the bits of the bfloat16 nearest to X[x + i] · F[lane], i = row · lanes + lane.

    Returns whether all products are finite; if not, ``to`` is invalid. X is float32.
    """
    signature = types.boolean(X, types.intp, types.intp, types.intp, F, to)

    def generate(context, builder, signature, arguments):
        X, x, rows, lanes, F, to = arguments
        vector = Vector(signature.args[0].dtype)
        halves = ir.VectorType(ir.IntType(16), vector.width)
        X = pointer_to(context, builder, signature.args[0], X, x)
        F = pointer_to(context, builder, signature.args[4], F, INT(0))
        to = pointer_to(context, builder, signature.args[5], to, INT(0))
        zero, one, size, below_half, exponent, half = (
            ir.Constant(vector.integers, [number] * vector.width)
            for number in (0, 1, 0x7FFFFFFF, 0x7FFF, 0x00800000, 16)
        )

        def fold(places, found, lane):
            factor = vector.load(builder, builder.gep(F, [lane]))
            for place in places:
                x = vector.load(builder, builder.gep(X, [place]))
                product = builder.fmul(x, factor)
                word = builder.bitcast(product, vector.integers)
                # Adding 1 to an exponent of ones carries into the sign.
                found = [builder.or_(*found, builder.add(builder.and_(word, size), exponent))]
                odd = builder.and_(builder.lshr(word, half), one)
                nearest = builder.add(builder.add(word, below_half), odd)
                target = builder.bitcast(builder.gep(to, [place]), halves.as_pointer())
                builder.store(builder.trunc(builder.lshr(nearest, half), halves), target, align=2)
            return found

        ends = cgutils.alloca_once_value(builder, zero)

        def finish(found, lane):
            builder.store(builder.or_(*found, builder.load(ends)), ends)

        _down_columns(builder, vector, rows, lanes, [zero], fold, finish)
        is_infinite = builder.icmp_signed("<", builder.load(ends), zero)
        mask = ir.IntType(vector.width)
        return builder.icmp_unsigned("==", builder.bitcast(is_infinite, mask), mask(0))

    return signature, generate
