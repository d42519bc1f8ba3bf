"""Multiply few queries, or weights, in bfloat16 by 8-bit keys and values.

If the queries are bfloat16, widening keys and values to float32 takes longer than reading them.
Here they become bfloat16, which is exact, and an instruction adds two products to each lane of a
sum in float32. Weights are rounded to bfloat16, once. A table has the bits of each magnitude:

float8_e4m3fn   all but the sign; the numbers are over ``UNIT_OF_FLOAT8``, as elsewhere
int8            the magnitudes up to 127, over 64; the bits of -128, which is then -2, are added

Arrays are those of ``simd.dot``; bfloat16 numbers are uint16, their bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from minimha.kernels.cpu.jit import OPTIONS, jit
from minimha.kernels.cpu.simd.dot import (
    horizontal_sums,
    loop_far_or_near,
    offsets_of,
    prefetch_rows_to_L2,
    start_at,
)
from minimha.kernels.cpu.simd.halves import to_bfloat16
from minimha.kernels.cpu.simd.memory import bits_of, flat
from minimha.kernels.cpu.simd.vector import (
    FEATURES,
    INT,
    MULTIPLIES_PAIRS,
    Vector,
    loop,
    pointer_to,
)

UNIT = 64  # columns are multiples of it
MOST_KEYS = 256  # of which the weights are in bfloat16 at once
TILE = 16  # products per register tile, one per lane
V = Vector(types.float32)
BYTE, WORD = ir.IntType(8), ir.IntType(16)
BYTES, WORDS = ir.VectorType(BYTE, UNIT), ir.VectorType(WORD, UNIT // 2)
IS_FAST = MULTIPLIES_PAIRS and "avx512vbmi" in FEATURES
OF_INT8 = 64  # int8 numbers are looked up over this


def _table(kind):
    """Return the upper and lower bytes of the bfloat16 bits of the magnitudes 0 to 127."""
    code = np.arange(128)
    if kind.dtype == types.int8:
        numbers = code / OF_INT8
    else:
        exponent, digits = code >> 3, code & 7
        normal = (8 + digits) * 2.0 ** (exponent - 18)  # over 2^8
        numbers = np.where(exponent == 0, digits * 2.0**-17, normal)
        numbers[127] = np.nan
    bits = numbers.astype(np.float32).view(np.uint32) >> 16
    return [[int(x) for x in part] for part in (bits >> 8, bits & 0xFF)]


def _mixed(builder, a, b):
    """Generate two vectors with the lanes of a and b in turn, in the order of ``_mixed_order``."""
    lanes = a.type.count
    picks = _mixed_order([(x, lanes + x) for x in range(lanes)])
    picks = [[x for pair in some for x in pair] for some in picks]
    kind = ir.VectorType(ir.IntType(32), lanes)
    return [builder.shuffle_vector(a, b, ir.Constant(kind, some)) for some in picks]


def _mixed_order(lanes):
    """Return the ``lanes`` of a vector that go into the first of two mixed vectors, and the others.

    The first gets half of each piece of 128 bits, because shuffles within pieces are fastest.
    """
    half = len(lanes) // 8
    pieces = [lanes[x : x + half] for x in range(0, len(lanes), half)]
    return [[lane for piece in pieces[first::2] for lane in piece] for first in (0, 1)]


ORDER = np.array(_mixed_order(list(range(UNIT))))  # of the columns in both vectors of ``_words``


def _in_order(builder, vectors):
    """Generate the vectors of a sum with their lanes in the order of the columns."""
    columns = [x for words in ORDER.tolist() for some in _mixed_order(words) for x in some]
    lane = ir.VectorType(ir.IntType(32), 2 * V.width)
    both = ir.Constant(lane, list(range(2 * V.width)))
    halves = [builder.shuffle_vector(*vectors[x : x + 2], both) for x in (0, 2)]
    every = ir.Constant(ir.VectorType(ir.IntType(32), UNIT), list(range(UNIT)))
    line = builder.shuffle_vector(*halves, every)
    found = []
    for first in range(0, UNIT, V.width):
        picks = [columns.index(x) for x in range(first, first + V.width)]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), V.width), picks)
        found.append(builder.shuffle_vector(line, line, pick))
    return found


def _words(builder, kind, pointer):
    """Generate ``UNIT`` numbers from ``pointer`` on as two vectors, in each lane two bfloat16."""
    stored = builder.load(builder.bitcast(pointer, BYTES.as_pointer()), align=1)
    sign, size = builder.and_(stored, _every(0x80)), stored
    is_integer = kind.dtype == types.int8
    if is_integer:
        absolute = _function(builder, "llvm.abs.v64i8", BYTES, ir.IntType(1))
        size = builder.call(absolute, [stored, ir.IntType(1)(0)])
    look_up = _function(builder, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, BYTES, BYTES)
    upper, lower = (
        builder.call(look_up, [ir.Constant(BYTES, part[:64]), size, ir.Constant(BYTES, part[64:])])
        for part in _table(kind)
    )
    upper = builder.or_(upper, sign)
    if is_integer:  # only the magnitude of -128 has the upper bit, and 0x4000 is 2
        upper = builder.or_(upper, builder.lshr(builder.and_(size, _every(0x80)), _every(1)))
    return [builder.bitcast(x, V.type) for x in _mixed(builder, lower, upper)]


def _every(byte):
    return ir.Constant(BYTES, [byte] * UNIT)


def _function(builder, name, *kinds):
    """Return LLVM's intrinsic that maps vectors of bytes, and flags, to a vector of bytes."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(BYTES, kinds), name)


def _is_taken(kind):
    """Return whether this CPU multiplies arrays of the numba type ``kind`` here."""
    return IS_FAST and kind.dtype in (types.int8, types.uint8)


def _next(builder, row, number, last):
    """Generate the index of the ``number``-th row after ``row``, or of the ``last`` row."""
    later = builder.add(row, INT(number))
    return builder.select(builder.icmp_signed("<", later, last), later, last)


def _in_units(builder, kind, sums):
    """Generate sums of products with the numbers, or float8 numbers over ``UNIT_OF_FLOAT8``."""
    return builder.fmul(sums, V.constant(OF_INT8)) if kind.dtype == types.int8 else sums


def _scores(queries):
    """Return a primitive for S = Q Kᵀ of ``queries`` rows of Q and n rows of K."""
    together = TILE // queries

    @intrinsic
    def scores(typing, K, starts, k, Q, q_row, S, s_row, n, depth, far):
        index = types.intp
        signature = types.void(K, starts, index, Q, index, S, index, index, index, far)

        def generate(context, builder, signature, arguments):
            K, starts, k, Q, q_row, S, s_row, n, depth, far = arguments
            kinds = signature.args
            if not _is_taken(kinds[0]):
                return context.get_dummy_value()
            starts = offsets_of(context, builder, kinds[1], starts, k)
            K, Q, S = (
                pointer_to(context, builder, kinds[x], array, INT(0))
                for x, array in ((0, K), (3, Q), (5, S))
            )
            rows_of_Q = [builder.gep(Q, [builder.mul(INT(g), q_row)]) for g in range(queries)]
            last = builder.sub(n, INT(1))

            def some_rows(first, _, is_far):
                if is_far:
                    prefetch_rows_to_L2(builder, K, kinds[0], starts, first, together, depth)
                places = [_next(builder, first, x, last) for x in range(together)]
                rows = [builder.gep(K, [starts(place)]) for place in places]

                def some_columns(d, sums):
                    own = []
                    for row in rows_of_Q:
                        at = builder.gep(row, [d])
                        at = builder.bitcast(at, V.type.as_pointer())
                        parts = [builder.gep(at, [INT(x)]) for x in (0, 1)]
                        own.append([builder.load(x, align=2) for x in parts])
                    found = []
                    for row in rows:
                        keys = _words(builder, kinds[0], builder.gep(row, [d]))
                        for words in own:
                            total = sums[len(found)]
                            for pair in zip(keys, words, strict=True):
                                total = V.add_pairs(builder, *pair, total)
                            found.append(total)
                    return found

                sums = loop(builder, depth, UNIT, [V.constant(0.0)] * TILE, some_columns)
                sums = [sums[r * queries + g] for g in range(queries) for r in range(together)]
                products = _in_units(builder, kinds[0], horizontal_sums(builder, V, sums))
                for g in range(queries):
                    to = builder.gep(S, [builder.add(builder.mul(INT(g), s_row), first)])
                    V.store_lanes(builder, products, g * together, together, to)
                return []

            loop_far_or_near(builder, far, n, together, some_rows)
            return context.get_dummy_value()

        return signature, generate

    return scores


_scores_of_4, _scores_of_2, _scores_of_1 = _scores(4), _scores(2), _scores(1)


@jit
def byte_products(K, starts, k, Q, S, s, s_row, n, queries, depth, far):
    """Set S[s + g · s_row + j] = Σ_d K[starts[k + j] + d] · q_g[d], reading K once.

    Here j < ``n``, g < ``queries`` and d < ``depth``, a multiple of ``UNIT``. Q is that of
    ``round_queries``. Up to 15 numbers after the n of each row are overwritten.
    """
    g = 0
    while g < queries:
        from_Q, to = flat(Q, g * depth), flat(S, s + g * s_row)
        if g + 4 <= queries:
            _scores_of_4(K, starts, k, from_Q, depth, to, s_row, n, depth, far)
            g += 4
        elif g + 2 <= queries:
            _scores_of_2(K, starts, k, from_Q, depth, to, s_row, n, depth, far)
            g += 2
        else:
            _scores_of_1(K, starts, k, from_Q, depth, to, s_row, n, depth, far)
            g += 1


def _weigh(queries):
    """Return a primitive for O += P V with ``queries`` rows of O and n rows of V."""

    @intrinsic
    def weigh(typing, P, V_, starts, v, O, o_row, n, columns, far):
        index = types.intp
        signature = types.void(P, V_, starts, index, O, index, index, index, far)

        def generate(context, builder, signature, arguments):
            P, values, starts, v, O, o_row, n, columns, far = arguments
            kinds = signature.args
            if not _is_taken(kinds[1]):
                return context.get_dummy_value()
            starts = offsets_of(context, builder, kinds[2], starts, v)
            P, values, O = (
                pointer_to(context, builder, kinds[x], array, INT(0))
                for x, array in ((0, P), (1, values), (4, O))
            )
            last, vectors = builder.sub(n, INT(1)), UNIT // V.width

            def some_columns(d, _):
                def two_keys(j, sums, is_far):
                    if is_far:
                        prefetch_rows_to_L2(builder, values, kinds[1], starts, j, 2, columns)
                    words = []
                    for key in (j, _next(builder, j, 1, last)):
                        row = builder.gep(values, [builder.add(starts(key), d)])
                        own = _words(builder, kinds[1], row)
                        words.append([builder.bitcast(x, WORDS) for x in own])
                    both = [x for pair in zip(*words, strict=True) for x in _mixed(builder, *pair)]
                    both = [builder.bitcast(x, V.type) for x in both]
                    found = []
                    for g in range(queries):
                        at = builder.gep(P, [builder.add(INT(g * MOST_KEYS), j)])
                        at = builder.bitcast(at, V.item.as_pointer())
                        weights = V.splat(builder, builder.load(at, align=2))
                        for x, value in enumerate(both):
                            total = sums[g * vectors + x]
                            found.append(V.add_pairs(builder, weights, value, total))
                    return found

                none = [V.constant(0.0)] * (queries * vectors)
                is_first = builder.icmp_signed("==", d, INT(0))  # then whole rows are prefetched
                sums = loop_far_or_near(builder, builder.and_(far, is_first), n, 2, two_keys, none)
                for g in range(queries):
                    to = builder.gep(O, [builder.add(builder.mul(INT(g), o_row), d)])
                    own = _in_order(builder, sums[g * vectors : (g + 1) * vectors])
                    for x, total in enumerate(own):
                        total = _in_units(builder, kinds[1], total)
                        total = builder.fadd(total, V.load(builder, to, x))
                        V.store(builder, total, to, x)
                return []

            loop(builder, columns, UNIT, [], some_columns)
            return context.get_dummy_value()

        return signature, generate

    return weigh


_weigh_4, _weigh_2, _weigh_1 = _weigh(4), _weigh(2), _weigh(1)


@jit
def weighted_bytes(P, V_, starts, v, O, o_row, n, queries, columns, far):
    """Add Σ_j p_g[j] · V[starts[v + j] + d] to O[g · o_row + d], reading V once.

    Here j < ``n``, g < ``queries`` and d < ``columns``, a multiple of ``UNIT``. P is that of
    ``round_weights``.
    """
    g = 0
    while g < queries:
        from_P, to = flat(P, g * MOST_KEYS), flat(O, g * o_row)
        if g + 4 <= queries:
            _weigh_4(from_P, V_, starts, v, to, o_row, n, columns, far)
            g += 4
        elif g + 2 <= queries:
            _weigh_2(from_P, V_, starts, v, to, o_row, n, columns, far)
            g += 2
        else:
            _weigh_1(from_P, V_, starts, v, to, o_row, n, columns, far)
            g += 1


def are_multiplied(X, columns):
    """Return whether rows of X can be multiplied here by ``columns`` bfloat16 numbers."""


@overload(are_multiplied, jit_options=OPTIONS)
def _are_multiplied(X, columns):
    if _is_taken(X):
        return lambda X, columns: columns % UNIT == 0
    return lambda X, columns: False


def has_nan(V_, starts, n, columns):
    """Return whether one of n rows of V has NaN, which int8 numbers never are."""


@overload(has_nan, jit_options=OPTIONS)
def _has_nan(V_, starts, n, columns):
    if V_.dtype != types.uint8:
        return lambda V_, starts, n, columns: False

    def find(V_, starts, n, columns):
        found = False
        for j in range(n):
            row = flat(V_, start_at(starts, j))
            for d in range(columns):
                found |= row[d] & np.uint8(0x7F) == np.uint8(0x7F)
        return found

    return find


@jit
def round_queries(Q, rows, depth, to):
    """Write ``rows`` rows of Q, of ``depth`` bfloat16 numbers each, for ``byte_products``."""
    bits = bits_of(Q)
    for first in range(0, rows * depth, UNIT):
        for half in range(2):
            for x in range(UNIT // 2):
                at = first + half * (UNIT // 2) + x
                to[at] = to_bfloat16(bits[first + ORDER[half, x]])


@jit
def round_weights(P, p, p_row, rows, n, to):
    """Write n weights of each row of P, from P[p] on, for ``weighted_bytes`` to ``to``.

    Row r of ``to`` begins at r · ``MOST_KEYS``.
    """
    for r in range(rows):
        bits, row = bits_of(flat(P, p + r * p_row)), flat(to, r * MOST_KEYS)
        for x in range(n):
            row[x] = to_bfloat16(bits[x])
        if n % 2:
            row[n] = 0
