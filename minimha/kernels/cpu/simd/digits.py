"""Multiply a row of quantised numbers by a row of x, with instructions for integers of 8 bits.

32 numbers of x, a *group*, are written as integers times a power of two. Integers have 23 bits, so
that each is off by at most 2^-23 of the group's largest number (22 bits and 2^-22 for Q8_0). They
have three *digits* in base 256, from -128 to 127. One instruction of AVX-512 VNNI adds the products
of 64 digits and 64 quantised numbers, from 0 to 255, by fours, and nothing is widened. Sums of four
are exact, with all three digits, because they stay below 2^31. Then they become float32, and are
multiplied by their scale.

Where a format has numbers below 0, its bytes count from the smallest one, ``least``, and the
product of ``least`` and the sum of each four numbers of x is added.

Measured with rows of 2048 numbers in the L2 cache: Q4_K takes 4.1 cycles for 32 numbers, Q6_K 4.5
and Q8_0 4.6; widened, they take 6.8, 7.9 and 6.0 (AMD EPYC of generation Zen 4, 2026-11-29).

What the bytes of a format mean is in ``minimha.equations.stored``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.vector import INT, MULTIPLIES_BYTES, loop, pairwise_sum
from minimha.kernels.cpu.simd.weights import (
    BYTE,
    FLOAT,
    HALF,
    IN_GROUP,
    POINTER,
    UNITS,
    WIDTH,
    WORD,
    V,
    address_of,
    float_of_half,
    halves_at_once,
    load,
    prefetch_ahead,
    scales_of_q6_k,
    six_bits,
    sum_of,
)

TOGETHER = 64  # numbers that one instruction multiplies
DIGITS = 3
MOST_BYTES = 5  # for a number of x, at most
SIXTEEN = ir.VectorType(WORD, 16)


def _bytes(number):
    return ir.VectorType(BYTE, number)


def _shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))


def _twice(builder, vector):
    """Generate ``vector``, followed by itself."""
    return _shuffled(builder, vector, vector, [*range(vector.type.count)] * 2)


def _shifted(builder, q, left, right):
    """Generate ``q`` with the 32-bit words of each part shifted to the left, or to the right.

    All parts, of which each has a number, are of the same length.
    """
    words = builder.bitcast(q, SIXTEEN)
    shift = builder.shl if any(left) else builder.lshr
    by = [x or y for x, y in zip(left, right, strict=True) for _ in range(16 // len(left))]
    return builder.bitcast(shift(words, ir.Constant(words.type, by)), q.type)


def _masked(builder, q, mask):
    return builder.and_(q, ir.Constant(q.type, [mask] * q.type.count))


def _nibbles(builder, some):
    """Generate the lower halves of 32 bytes, then the upper halves."""
    return _masked(builder, _shifted(builder, _twice(builder, some), (0, 0), (0, 4)), 15)


def _q8_0(builder, first, second):
    both = [load(builder, at, _bytes(32), 2) for at in (first, second)]
    q = _shuffled(builder, *both, [*range(64)])
    return builder.xor(q, ir.Constant(q.type, [0x80] * 64))


def _of_32(first_byte, has_fifth):
    """Return the function that generates two blocks of 32 numbers of 4 or 5 bits."""

    def quantised(builder, first, second):
        both = [load(builder, at, _bytes(16), first_byte) for at in (first, second)]
        pick = [n + 16 * x for x in range(2) for _ in range(2) for n in range(16)]
        q = _shifted(builder, _shuffled(builder, *both, pick), (0, 0, 0, 0), (0, 4, 0, 4))
        q = _masked(builder, q, 15)
        if has_fifth:
            bits = [
                builder.bitcast(
                    load(builder, at, WORD, first_byte - 4), ir.VectorType(ir.IntType(1), 32)
                )
                for at in (first, second)
            ]
            chosen = _shuffled(builder, *bits, [*range(64)])
            own = ir.Constant(q.type, [16] * 64)
            q = builder.or_(q, builder.select(chosen, own, ir.Constant(q.type, [0] * 64)))
        return q

    return quantised


def _of_256(has_fifth):
    """Return the function that generates the four vectors of a block of Q4_K or Q5_K."""

    def quantised(builder, block):
        found = []
        for n in range(4):
            q = _nibbles(
                builder, load(builder, block, _bytes(32), (48 if has_fifth else 16) + 32 * n)
            )
            if has_fifth:
                own = _twice(builder, load(builder, block, _bytes(32), 16))
                if n < 2:
                    own = _shifted(builder, own, (4 - 2 * n, 3 - 2 * n), (0, 0))
                else:
                    own = _shifted(builder, own, (0, 0), (2 * n - 4, 2 * n - 3))
                q = builder.or_(q, _masked(builder, own, 16))
            found.append(q)
        return found

    return quantised


def _q6_k(builder, block):
    found = []
    for n in range(4):
        half, is_upper = divmod(n, 2)
        low = load(builder, block, _bytes(64), 64 * half)
        if is_upper:
            low = _shifted(builder, low, (0, 0), (4, 4))
        high = _twice(builder, load(builder, block, _bytes(32), 128 + 32 * half))
        high = _shifted(builder, high, *(((0, 0), (0, 2)) if is_upper else ((4, 2), (0, 0))))
        found.append(builder.or_(_masked(builder, low, 15), _masked(builder, high, 0x30)))
    return found


def _scales_and_minima(builder, block):
    """Generate the scales and minima of a block of Q4_K or Q5_K, in turns of four."""
    numbers = builder.sitofp(builder.zext(six_bits(builder, block), SIXTEEN), V.type)
    factors = halves_at_once(builder, block)
    factors = _shuffled(builder, factors, factors, [x // 4 % 2 for x in range(16)])
    return builder.fmul(numbers, factors)


class Format(NamedTuple):
    """How a format's numbers become bytes from 0 to 255.

    ``quantised`` generates the bytes, and ``least`` is the number that becomes 0. Integers of x
    have so many ``bits`` that a sum of four products stays below 2^31.
    """

    quantised: Callable[..., Any]
    least: int
    bits: int
    has_offset: bool


FORMATS = {
    "Q8_0": Format(_q8_0, -128, 22, False), "Q4_0": Format(_of_32(2, False), -8, 23, False),
    "Q4_1": Format(_of_32(4, False), 0, 23, True), "Q5_0": Format(_of_32(6, True), -16, 23, False),
    "Q5_1": Format(_of_32(8, True), 0, 23, True), "Q4_K": Format(_of_256(False), 0, 23, True),
    "Q5_K": Format(_of_256(True), 0, 23, True), "Q6_K": Format(_q6_k, -32, 23, False),
}  # fmt: skip


def has_digits(name):
    """Return whether this CPU multiplies digits by the numbers of a format."""
    return MULTIPLIES_BYTES and name in FORMATS


class Turn(NamedTuple):
    """Where the bytes of x are for 64 numbers, or for the 256 numbers of a block.

    There are three vectors of digits for each 64 numbers, highest first; then, if the format has
    numbers below 0, a vector of ``least`` times sums of four; a vector of scales; and, for blocks
    of 32 numbers with an offset, a vector of an eighth of each group's sum. For blocks of 256
    with offsets, negative sums are beside the scales, in turns of four.
    """

    vectors: int  # of digits, each with 64 numbers
    fours: int
    scales: int
    sums: int
    nbytes: int


def _turn_of(name):
    vectors, form = UNITS[name][0] // TOGETHER or 1, FORMATS[name]
    fours = DIGITS * TOGETHER * vectors
    scales = fours + TOGETHER * vectors * (form.least < 0)
    sums = scales + TOGETHER
    return Turn(vectors, fours, scales, sums, sums + TOGETHER * (form.has_offset and vectors == 1))


def _all(kind, number):
    return ir.Constant(kind, [number] * kind.count)


def _store(builder, value, address, offset=0):
    at = builder.gep(address, [INT(offset)])
    builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=1)


def _copies(builder, scalar, number):
    one = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, 1), ir.Undefined), scalar, WORD(0)
    )
    return _shuffled(builder, one, one, [0] * number)


def _largest(builder, vector):
    kind = ir.FunctionType(WORD, [vector.type])
    name = f"llvm.vector.reduce.umax.v{vector.type.count}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])


def digits_of(name):
    """Return a primitive that writes ``groups`` · 32 numbers of x as digits; see ``Turn``.

    Returns whether all numbers are finite.
    """
    form, turn, is_block = FORMATS[name], _turn_of(name), UNITS[name][0] == 256

    @intrinsic
    def write_digits(typing, x, to, groups):
        def integers(builder, vectors):
            """Generate integers, their scale, and the bits of the largest number."""
            sizes = [
                builder.and_(builder.bitcast(v, V.integers), _all(V.integers, 0x7FFFFFFF))
                for v in vectors
            ]
            larger = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
            largest = _largest(builder, larger)
            # One more from 63/64 of the next power of two on, for the highest digit.
            exponent = builder.lshr(builder.add(largest, WORD(1 << 17)), WORD(23))
            is_tiny = builder.icmp_unsigned("<", exponent, WORD(24))
            exponent = builder.select(is_tiny, WORD(24), exponent)
            factor = builder.shl(builder.sub(WORD(253 + form.bits), exponent), WORD(23))
            scale = builder.shl(builder.sub(exponent, WORD(form.bits - 1)), WORD(23))
            factor = V.splat(builder, builder.bitcast(factor, FLOAT))
            words = [
                builder.fptosi(V.call(builder, "rint", builder.fmul(v, factor)), V.integers)
                for v in vectors
            ]
            return words, builder.bitcast(scale, FLOAT), largest

        def write_words(builder, words, at):
            bias = _all(V.integers, 0x808080)
            words = [builder.xor(builder.add(word, bias), bias) for word in words]
            for d in range(DIGITS):
                shift = _all(V.integers, 8 * (DIGITS - 1 - d))
                parts = [builder.trunc(builder.lshr(word, shift), _bytes(WIDTH)) for word in words]
                _store(builder, _shuffled(builder, *parts, [*range(IN_GROUP)]), at, TOGETHER * d)

        def generate(context, builder, signature, arguments):
            x, to = (builder.inttoptr(value, POINTER) for value in arguments[:2])
            groups = arguments[2]

            def write_zeros(_, __):
                at = address_of(builder, to, builder.lshr(groups, INT(1)), turn.nbytes)
                for n in range(0, turn.nbytes, TOGETHER):
                    _store(builder, _all(_bytes(TOGETHER), 0), at, n)
                return []

            def body(g, so_far):
                source = address_of(builder, x, g, 4 * IN_GROUP)
                vectors = [load(builder, source, V.type, 4 * n * WIDTH) for n in (0, 1)]
                words, scale, largest = integers(builder, vectors)
                half, n = builder.and_(g, INT(1)), builder.lshr(g, INT(1))
                at = address_of(builder, to, builder.udiv(n, INT(turn.vectors)), turn.nbytes)
                n = builder.urem(n, INT(turn.vectors))
                digits = address_of(builder, at, n, DIGITS * TOGETHER)
                write_words(builder, words, address_of(builder, digits, half, IN_GROUP))
                if form.least:
                    fours = [_shuffled(builder, *words, [*range(i, IN_GROUP, 4)]) for i in range(4)]
                    total = builder.add(builder.add(*fours[:2]), builder.add(*fours[2:]))
                    total = builder.mul(total, _all(total.type, form.least))
                    own = address_of(builder, address_of(builder, at, n, TOGETHER), half, IN_GROUP)
                    _store(builder, total, own, turn.fours)
                total = sum_of(builder, builder.fadd(*vectors)) if form.has_offset else None
                if is_block:
                    i = builder.urem(g, INT(8))
                    if form.has_offset:
                        i = builder.add(i, builder.and_(i, INT(4)))
                        own = address_of(builder, at, i, 4)
                        _store(builder, scale, own, turn.scales)
                        _store(builder, builder.fneg(total), own, turn.scales + 4 * 4)
                    else:
                        own = address_of(builder, at, i, 8)
                        _store(builder, _copies(builder, scale, 2), own, turn.scales)
                else:
                    own = address_of(builder, at, half, IN_GROUP)
                    _store(builder, _copies(builder, scale, 8), own, turn.scales)
                    if form.has_offset:
                        eighth = builder.fmul(total, ir.Constant(FLOAT, 0.125))
                        _store(builder, _copies(builder, eighth, 8), own, turn.sums)
                is_larger = builder.icmp_unsigned(">", largest, so_far[0])
                return [builder.select(is_larger, largest, so_far[0])]

            loop(builder, builder.and_(groups, INT(1)), 1, [], write_zeros)
            (largest,) = loop(builder, groups, 1, [WORD(0)], body)
            return builder.icmp_unsigned("<", largest, WORD(0x7F800000))

        i = types.int64
        return types.boolean(i, i, i), generate

    return write_digits


def _add_products(builder, total, q, digits):
    """Generate ``total`` plus the products of bytes ``q`` and signed ``digits``, by fours."""
    kind = ir.FunctionType(SIXTEEN, [SIXTEEN] * 3)
    q, digits = (builder.bitcast(each, SIXTEEN) for each in (q, digits))
    return builder.asm(kind, "vpdpbusd $2, $1, $0", "=v,v,v,0", (q, digits, total), False)


def digit_product(name):
    """Return a primitive that multiplies a row of W by x, as ``digits_of`` wrote it.

    It prefetches what lies ``ahead`` bytes later.
    """
    form, turn = FORMATS[name], _turn_of(name)
    size, nbytes, _ = UNITS[name]

    @intrinsic
    def product(typing, row, x, groups, ahead):
        def products(builder, vectors, places):
            """Generate the products of vectors and x, by fours, as float32.

            ``places`` are the turns of x, and the number of the vector there.
            """
            totals = [_all(SIXTEEN, 0)] * len(vectors)
            for d in range(DIGITS):
                if d:
                    totals = [builder.shl(total, _all(SIXTEEN, 8)) for total in totals]
                for i, (at, n) in enumerate(places):
                    own = load(builder, at, _bytes(TOGETHER), TOGETHER * (DIGITS * n + d))
                    totals[i] = _add_products(builder, totals[i], vectors[i], own)
            if form.least:
                for i, (at, n) in enumerate(places):
                    own = load(builder, at, SIXTEEN, turn.fours + TOGETHER * n)
                    totals[i] = builder.add(totals[i], own)
            return [builder.sitofp(total, V.type) for total in totals]

        def of_blocks(builder, row, x, blocks, ahead):
            """Multiply blocks of 256 numbers."""

            def body(k, sums):
                block = address_of(builder, row, k, nbytes)
                at = address_of(builder, x, k, turn.nbytes)
                prefetch_ahead(builder, block, ahead, nbytes)
                own = load(builder, at, V.type, turn.scales)
                if form.has_offset:
                    factors = builder.fmul(_scales_and_minima(builder, block), own)
                    offsets, lanes = [builder.fadd(sums[4], factors)], [0, 1, 2, 3, 8, 9, 10, 11]
                else:
                    factors = builder.fmul(scales_of_q6_k(builder, block)[0], own)
                    offsets, lanes = [], range(16)
                found, places = [], [(at, n) for n in range(turn.vectors)]
                for n, some in enumerate(products(builder, form.quantised(builder, block), places)):
                    few = len(lanes) // turn.vectors
                    pick = [lanes[few * n + x * few // 16] for x in range(16)]
                    factor = _shuffled(builder, factors, factors, pick)
                    found.append(V.fma(builder, some, factor, sums[n]))
                return found + offsets

            sums = [V.constant(0.0)] * (turn.vectors + form.has_offset)
            sums = loop(builder, blocks, 1, sums, body)
            total = pairwise_sum(builder, sums[:4])
            if form.has_offset:
                is_offset = ir.Constant(
                    ir.VectorType(ir.IntType(1), 16), [x // 4 % 2 for x in range(16)]
                )
                own = builder.select(is_offset, sums[4], V.constant(0.0))
                total = builder.fadd(total, own)
            return sum_of(builder, total)

        def of_pairs(builder, row, x, groups, ahead):
            """Multiply blocks of 32 numbers, two at a time."""

            def halves(blocks, offset):
                """Generate a float16 number of both blocks as float32, eight times each."""
                both = [_copies(builder, load(builder, at, HALF, offset), 8) for at in blocks]
                return float_of_half(builder, _shuffled(builder, *both, [*range(16)]))

            def pairs(first, number, sums, is_alone=False):
                """Add the products of ``number`` pairs, or of one block that is alone."""
                blocks, at = [], []
                for n in range(number):
                    place = builder.add(first, INT(n))
                    block = address_of(builder, row, place, 2 * nbytes)
                    prefetch_ahead(builder, block, ahead, 2 * nbytes)
                    other = block if is_alone else builder.gep(block, [INT(nbytes)])
                    blocks.append((block, other))
                    at.append(address_of(builder, x, place, turn.nbytes))
                vectors = [form.quantised(builder, *pair) for pair in blocks]
                found = products(builder, vectors, [(each, 0) for each in at])
                sums = list(sums)
                for n, pair in enumerate(blocks):
                    factor = load(builder, at[n], V.type, turn.scales)
                    factor = builder.fmul(halves(pair, 0), factor)
                    sums[n] = V.fma(builder, found[n], factor, sums[n])
                    if form.has_offset:
                        own = load(builder, at[n], V.type, turn.sums)
                        sums[n] = V.fma(builder, halves(pair, 2), own, sums[n])
                return sums

            def in_fours(k, sums):
                return pairs(builder.mul(k, INT(4)), 4, sums)

            def one_by_one(k, sums):
                return pairs(builder.add(fours, k), 1, sums)

            def alone(_, sums):
                return pairs(whole, 1, sums, is_alone=True)

            whole, sums = builder.lshr(groups, INT(1)), [V.constant(0.0)] * 4
            fours = builder.and_(whole, INT(-4))
            sums = loop(builder, builder.lshr(whole, INT(2)), 1, sums, in_fours)
            sums = loop(builder, builder.and_(whole, INT(3)), 1, sums, one_by_one)
            sums = loop(builder, builder.and_(groups, INT(1)), 1, sums, alone)
            return sum_of(builder, pairwise_sum(builder, sums))

        def generate(context, builder, signature, arguments):
            row, x = (builder.inttoptr(value, POINTER) for value in arguments[:2])
            groups, ahead = arguments[2:]
            if size == 256:
                return of_blocks(builder, row, x, builder.lshr(groups, INT(3)), ahead)
            return of_pairs(builder, row, x, groups, ahead)

        i = types.int64
        return types.float32(i, i, i, i), generate

    return product
