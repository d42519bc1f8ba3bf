"""Multiply few queries, or weights, in bfloat16 by 8-bit keys and values.

If the queries are bfloat16, widening keys and values to float32 takes longer than reading them.
Here they become bfloat16, which is exact, and an instruction adds two products to each lane of a
sum in float32. Weights are rounded to bfloat16, once. A table has the bits of each magnitude:

float8_e4m3fn   all but the sign; the numbers are over ``UNIT_OF_FLOAT8``, as elsewhere
int8            the magnitudes up to 127, over 64; the bits of -128, which is then -2, are added.
                Keys are increased by 1/2: with n and -1-n of one magnitude, all 256 are in the
                table, and half of the sum of a query is subtracted from its scores

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
    PIECE,
    ROWS_AHEAD,
    loop_far_or_near,
    offsets_of,
    start_at,
    sums_of_pieces,
)
from minimha.kernels.cpu.simd.halves import to_bfloat16
from minimha.kernels.cpu.simd.memory import bits_of, flat, prefetch
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
COLUMNS = PIECE // 8  # of each of four keys in a vector of bytes
COPIES = UNIT // COLUMNS  # of each part of a query, beside each other
TILE = 16  # keys of a register tile
FAR_AHEAD = 4 * ROWS_AHEAD  # of rows whose places need not be looked up
V = Vector(types.float32)
BYTE = ir.IntType(8)
BYTES = ir.VectorType(BYTE, UNIT)
IS_FAST = MULTIPLIES_PAIRS and "avx512vbmi" in FEATURES
OF_INT8 = 64  # int8 numbers are looked up over this
HALF = 0.5


def _table(kind, increase):
    """Return the upper and lower bytes of the bfloat16 bits of the magnitudes 0 to 127.

    int8 numbers are increased by ``increase``, 0 or ``HALF``.
    """
    code = np.arange(128)
    if kind.dtype == types.int8:
        numbers = (code + increase) / OF_INT8
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


def _in_order(builder, vectors):
    """Generate the vectors of a sum with their lanes in the order of the columns."""
    halves = _mixed_order(list(range(UNIT)))
    columns = [x for half in halves for some in _mixed_order(half) for x in some]
    lane = ir.VectorType(ir.IntType(32), 2 * V.width)
    both = ir.Constant(lane, list(range(2 * V.width)))
    lines = [builder.shuffle_vector(*vectors[x : x + 2], both) for x in (0, 2)]
    every = ir.Constant(ir.VectorType(ir.IntType(32), UNIT), list(range(UNIT)))
    line = builder.shuffle_vector(*lines, every)
    found = []
    for first in range(0, UNIT, V.width):
        picks = [columns.index(x) for x in range(first, first + V.width)]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), V.width), picks)
        found.append(builder.shuffle_vector(line, line, pick))
    return found


def _load(builder, pointer):
    return builder.load(builder.bitcast(pointer, BYTES.as_pointer()), align=1)


def _load_pieces(builder, pointers):
    """Generate one vector of the ``COLUMNS`` bytes at each of four ``pointers``."""
    kind = ir.VectorType(BYTE, COLUMNS)
    parts = [builder.load(builder.bitcast(x, kind.as_pointer()), align=1) for x in pointers]
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        both = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        parts = [
            builder.shuffle_vector(*pair, both)
            for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _words(builder, kind, stored, increase=0.0):
    """Generate the numbers of a vector of bytes as two vectors, in each lane two bfloat16.

    int8 numbers are increased by ``increase``, 0 or ``HALF``.
    """
    sign, size = builder.and_(stored, _every(0x80)), stored
    is_integer = kind.dtype == types.int8
    if is_integer:
        two = ir.FunctionType(BYTES, [BYTES] * 2)  # not LLVM's abs, for which Zen 4 has fewer units
        other = builder.not_(stored) if increase else builder.sub(_every(0), stored)
        size = builder.asm(two, "vpminub $2, $1, $0", "=v,v,v", (stored, other), False)
    look_up = _function(builder, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, BYTES, BYTES)
    upper, lower = (
        builder.call(look_up, [ir.Constant(BYTES, part[:64]), size, ir.Constant(BYTES, part[64:])])
        for part in _table(kind, increase)
    )
    upper = builder.or_(upper, sign)
    if is_integer and not increase:  # only -128 has the upper bit now, and 0x4000 is 2
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


def _prefetch_line(builder, X, kind, starts, row, number, column):
    """Generate prefetches of a line from ``column`` on, of ``number`` rows ahead of ``row``.

    ``kind`` is the type of ``starts``. Rows at a constant stride are prefetched earlier.
    """
    ahead = FAR_AHEAD if isinstance(kind, types.BaseTuple) else ROWS_AHEAD
    for x in range(number):
        start = starts(builder.add(row, INT(ahead + x)))
        prefetch(builder, builder.gep(X, [builder.add(start, column)]), 2)


def _in_units(builder, kind, sums):
    """Generate sums of products with the numbers, or float8 numbers over ``UNIT_OF_FLOAT8``."""
    return builder.fmul(sums, V.constant(OF_INT8)) if kind.dtype == types.int8 else sums


def _scores(queries):
    """Return a primitive for S = Q Kᵀ of ``queries`` rows of Q and n rows of K.

    A vector has 16 columns of four keys, whose sums then take four lanes each: adding up the lanes
    of a vector per key would take half as long as multiplying.
    """

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
            last, increase = builder.sub(n, INT(1)), HALF if kinds[0].dtype == types.int8 else 0.0

            def words_of(row, d):
                """Generate the numbers of a row of Q for columns from d on."""
                at = builder.gep(row, [builder.mul(d, INT(COPIES))])
                at = builder.bitcast(at, V.type.as_pointer())
                return [builder.load(builder.gep(at, [INT(x)]), align=2) for x in (0, 1)]

            def sums_of_zeros(d, sums):
                """Add the products of Q with a key of zeros, as they are for other keys."""
                zeros = _words(builder, kinds[0], _every(0), increase)
                return [
                    add_products(zeros, words_of(row, d), total)
                    for row, total in zip(rows_of_Q, sums, strict=True)
                ]

            def add_products(keys, words, total):
                for pair in zip(keys, words, strict=True):
                    total = V.add_pairs(builder, *pair, total)
                return total

            zeros = []
            if increase:
                none = [V.constant(0.0)] * queries
                zeros = loop(builder, depth, COLUMNS, none, sums_of_zeros)
                zeros = [sums_of_pieces(builder, V, [each] * COPIES) for each in zeros]

            def some_rows(first, _, is_far):
                places = [_next(builder, first, x, last) for x in range(TILE)]
                rows = [builder.gep(K, [starts(place)]) for place in places]

                def some_columns(d, sums):
                    if is_far:  # one of the lines that start here, of a quarter of the rows
                        quarter = builder.and_(d, INT(UNIT - COLUMNS))
                        row = builder.add(first, builder.udiv(quarter, INT(COLUMNS // COPIES)))
                        line = builder.and_(d, INT(-UNIT))
                        _prefetch_line(builder, K, kinds[1], starts, row, COPIES, line)
                    own = [words_of(row, d) for row in rows_of_Q]
                    found = []
                    for x in range(COPIES):  # lane 4 y + x of ``products`` is row 4 y + x
                        places = [builder.gep(row, [d]) for row in rows[x::COPIES]]
                        keys = _words(builder, kinds[0], _load_pieces(builder, places), increase)
                        found += [
                            add_products(keys, words, sums[len(found) + g])
                            for g, words in enumerate(own)
                        ]
                    return found

                none = [V.constant(0.0)] * (COPIES * queries)
                sums = loop(builder, depth, COLUMNS, none, some_columns)
                for g in range(queries):
                    products = sums_of_pieces(builder, V, sums[g::queries])
                    if zeros:
                        products = builder.fsub(products, zeros[g])
                    products = _in_units(builder, kinds[0], products)
                    to = builder.add(builder.mul(INT(g), s_row), first)
                    V.store(builder, products, builder.gep(S, [to]))
                return []

            loop_far_or_near(builder, far, n, TILE, some_rows)
            return context.get_dummy_value()

        return signature, generate

    return scores


_scores_of_4, _scores_of_2, _scores_of_1 = _scores(4), _scores(2), _scores(1)


@jit
def byte_products(K, starts, k, Q, S, s, s_row, n, queries, depth, far):
    """Set S[s + g · s_row + j] = Σ_d K[starts[k + j] + d] · q_g[d], reading K once.

    Here j < ``n``, g < ``queries`` and d < ``depth``, a multiple of ``UNIT``. Q is that of
    ``round_queries``. Up to 15 numbers after the n of each row are overwritten. An array of starts
    has up to 15 more offsets than for ``simd.dot``, which only prefetches use.
    """
    g = 0
    while g < queries:
        from_Q, to = flat(Q, g * depth * COPIES), flat(S, s + g * s_row)
        if g + 4 <= queries:
            _scores_of_4(K, starts, k, from_Q, depth * COPIES, to, s_row, n, depth, far)
            g += 4
        elif g + 2 <= queries:
            _scores_of_2(K, starts, k, from_Q, depth * COPIES, to, s_row, n, depth, far)
            g += 2
        else:
            _scores_of_1(K, starts, k, from_Q, depth * COPIES, to, s_row, n, depth, far)
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
                        _prefetch_line(builder, values, kinds[2], starts, j, 2, d)
                    rows = [
                        _load(builder, builder.gep(values, [builder.add(starts(key), d)]))
                        for key in (j, _next(builder, j, 1, last))
                    ]
                    both = [
                        words
                        for stored in _mixed(builder, *rows)
                        for words in _words(builder, kinds[1], stored)
                    ]
                    found = []
                    for g in range(queries):
                        at = builder.gep(P, [builder.add(INT(g * MOST_KEYS), j)])
                        weights = V.splat_pair(builder, at)
                        for x, value in enumerate(both):
                            total = sums[g * vectors + x]
                            found.append(V.add_pairs(builder, weights, value, total))
                    return found

                none = [V.constant(0.0)] * (queries * vectors)
                sums = loop_far_or_near(builder, far, n, 2, two_keys, none)
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
    """Write ``rows`` rows of Q, of ``depth`` bfloat16 numbers each, for ``byte_products``.

    The numbers of a piece of 128 bits are repeated ``COPIES`` times before the next. Returns
    whether all are finite. If not, ``byte_products`` must not be called: infinity plus a half of it
    minus that half is NaN.
    """
    bits, numbers, are_finite = bits_of(Q), PIECE // 16, True
    for first in range(0, rows * depth, numbers):
        for copy in range(COPIES):
            for x in range(numbers):
                number = to_bfloat16(bits[first + x])
                to[first * COPIES + copy * numbers + x] = number
                are_finite &= number & 0x7F80 != 0x7F80
    return are_finite


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
