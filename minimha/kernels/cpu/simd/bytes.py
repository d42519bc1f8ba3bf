"""Multiply few queries, or weights, of 16 bits by 8-bit keys and values.

If the queries have 16 bits, widening keys and values to float32 takes longer than reading them.
Here an instruction adds two products of 16-bit numbers to each lane of a sum:

int8            keys become int16. Each query is a factor times int16 numbers, and so are the
                weights of up to ``MOST_KEYS`` keys. Sums are int32, and exact.
float8_e4m3fn   keys become bfloat16, looked up in a table. Queries and weights are bfloat16, sums
                float32. The numbers are over ``UNIT_OF_FLOAT8``, as elsewhere.

Arrays are those of ``simd.dot``. Numbers of 16 bits are uint16, the bits of int16 or bfloat16.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from minimha.kernels.cpu.jit import OPTIONS, jit, jit_inline
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
    ADDS_PAIRS,
    FEATURES,
    INT,
    MULTIPLIES_PAIRS,
    Vector,
    loop,
    pointer_to,
)

UNIT = 64  # columns are multiples of it
MOST_KEYS, MOST_COLUMNS = 256, 256  # of which products of int16 and int8 fit into an int32
LARGEST = np.float32(2**15 - 1)  # int16 number
TO_INTEGER = np.float32(3 << 22)  # a float32 plus this ends with the bits of the nearest integer
INFINITE, SMALL = 0x7F800000, 0x0D800000  # bits of float32: infinity, 2^-100
TILE = 16  # products per register tile, one per lane
V = Vector(types.float32)
BYTE, WORD = ir.IntType(8), ir.IntType(16)
BYTES, WORDS = ir.VectorType(BYTE, UNIT), ir.VectorType(WORD, UNIT // 2)
TAKES_FLOAT8 = MULTIPLIES_PAIRS and "avx512vbmi" in FEATURES


def _float8_table():
    """Return the upper and lower bytes of the bfloat16 bits of the float8 numbers 0 to 127."""
    code = np.arange(128)
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


def _order_of_words(kind):
    """Return the columns of both vectors of ``_int8_words`` or ``_float8_words``, lane by lane."""
    columns = list(range(UNIT))
    if kind.dtype == types.int8:
        return [columns[: UNIT // 2], columns[UNIT // 2 :]]
    return _mixed_order(columns)


def _in_order(builder, kind, vectors):
    """Generate the vectors of a sum with their lanes in the order of the columns."""
    columns = [x for words in _order_of_words(kind) for some in _mixed_order(words) for x in some]
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


def _int8_words(builder, pointer):
    """Generate ``UNIT`` numbers from ``pointer`` on as two vectors of int16."""
    half = ir.VectorType(BYTE, UNIT // 2)
    starts = [builder.gep(pointer, [INT(n)]) for n in (0, UNIT // 2)]
    loads = [builder.load(builder.bitcast(x, half.as_pointer()), align=1) for x in starts]
    return [builder.sext(x, WORDS) for x in loads]


def _float8_words(builder, pointer):
    """Generate ``UNIT`` numbers from ``pointer`` on as two vectors of the bits of bfloat16."""
    bits = builder.load(builder.bitcast(pointer, BYTES.as_pointer()), align=1)
    kind = ir.FunctionType(BYTES, [BYTES] * 3)
    function = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.x86.avx512.vpermi2var.qi.512"
    )
    upper, lower = (
        builder.call(function, [ir.Constant(BYTES, part[:64]), bits, ir.Constant(BYTES, part[64:])])
        for part in _float8_table()
    )
    sign = builder.and_(bits, ir.Constant(BYTES, [0x80] * UNIT))
    return [builder.bitcast(x, WORDS) for x in _mixed(builder, lower, builder.or_(upper, sign))]


def _is_taken(kind):
    """Return whether this CPU multiplies arrays of the numba type ``kind`` here."""
    return {types.int8: ADDS_PAIRS, types.uint8: TAKES_FLOAT8}.get(kind.dtype, False)


def _pairs(kind):
    """Return the zero of a sum, the function that loads words, and the one that adds products."""
    if kind.dtype == types.int8:
        return ir.Constant(V.integers, [0] * TILE), _int8_words, V.add_integer_pairs
    return V.constant(0.0), _float8_words, V.add_pairs


def _in_lanes(builder, words, kind):
    return builder.bitcast(words, V.integers if kind.dtype == types.int8 else V.type)


def _scores(queries):
    """Return a primitive for S = Q Kᵀ of ``queries`` rows of Q and n rows of K."""
    together = TILE // queries

    @intrinsic
    def scores(typing, K, starts, k, Q, q_row, factors, S, s_row, n, depth, far):
        index = types.intp
        signature = types.void(K, starts, index, Q, index, factors, S, *[index] * 3, far)

        def generate(context, builder, signature, arguments):
            K, starts, k, Q, q_row, factors, S, s_row, n, depth, far = arguments
            kinds = signature.args
            if not _is_taken(kinds[0]):
                return context.get_dummy_value()
            zero, words_at, add = _pairs(kinds[0])
            starts = offsets_of(context, builder, kinds[1], starts, k)
            K, Q, factors, S = (
                pointer_to(context, builder, kinds[x], array, INT(0))
                for x, array in ((0, K), (3, Q), (5, factors), (6, S))
            )
            rows_of_Q = [builder.gep(Q, [builder.mul(INT(g), q_row)]) for g in range(queries)]
            last = builder.sub(n, INT(1))
            scale = ir.Constant(V.type, ir.Undefined)
            for lane in range(TILE):
                own = builder.load(builder.gep(factors, [INT(lane // together)]))
                scale = builder.insert_element(scale, own, ir.IntType(32)(lane))

            def some_rows(first, _, is_far):
                if is_far:
                    prefetch_rows_to_L2(builder, K, kinds[0], starts, first, together, depth)
                places = [builder.add(first, INT(x)) for x in range(together)]
                places = [
                    builder.select(builder.icmp_signed("<", x, last), x, last) for x in places
                ]
                rows = [builder.gep(K, [starts(x)]) for x in places]

                def some_columns(d, sums):
                    sums = [*sums]
                    own = []
                    for row in rows_of_Q:
                        at = builder.gep(row, [d])
                        at = builder.bitcast(at, V.integers.as_pointer())
                        parts = [builder.gep(at, [INT(x)]) for x in (0, 1)]
                        own.append([builder.load(x, align=2) for x in parts])
                    for r, row in enumerate(rows):
                        for part, words in enumerate(words_at(builder, builder.gep(row, [d]))):
                            key = _in_lanes(builder, words, kinds[0])
                            for g in range(queries):
                                query = _in_lanes(builder, own[g][part], kinds[0])
                                at = g * together + r
                                sums[at] = add(builder, key, query, sums[at])
                    return sums

                sums = loop(builder, depth, UNIT, [zero] * TILE, some_columns)
                products = horizontal_sums(builder, V, sums)
                if kinds[0].dtype == types.int8:
                    products = builder.fmul(builder.sitofp(products, V.type), scale)
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
def byte_products(K, starts, k, Q, factors, S, s, s_row, n, queries, depth, far):
    """Set S[s + g · s_row + j] = Σ_d K[starts[k + j] + d] · q_g[d], reading K once.

    Here j < ``n``, g < ``queries`` and d < ``depth``, a multiple of ``UNIT``. Q and ``factors`` are
    those of ``narrow_queries``. Up to 15 numbers after the n of each row are overwritten.
    """
    g = 0
    while g < queries:
        from_Q, own, to = flat(Q, g * depth), flat(factors, g), flat(S, s + g * s_row)
        if g + 4 <= queries:
            _scores_of_4(K, starts, k, from_Q, depth, own, to, s_row, n, depth, far)
            g += 4
        elif g + 2 <= queries:
            _scores_of_2(K, starts, k, from_Q, depth, own, to, s_row, n, depth, far)
            g += 2
        else:
            _scores_of_1(K, starts, k, from_Q, depth, own, to, s_row, n, depth, far)
            g += 1


def _weigh(queries):
    """Return a primitive for O += P V with ``queries`` rows of O and n rows of V."""

    @intrinsic
    def weigh(typing, P, factors, V_, starts, v, O, o_row, n, columns, far):
        index = types.intp
        signature = types.void(P, factors, V_, starts, index, O, *[index] * 3, far)

        def generate(context, builder, signature, arguments):
            P, factors, values, starts, v, O, o_row, n, columns, far = arguments
            kinds = signature.args
            if not _is_taken(kinds[2]):
                return context.get_dummy_value()
            zero, words_at, add = _pairs(kinds[2])
            starts = offsets_of(context, builder, kinds[3], starts, v)
            P, factors, values, O = (
                pointer_to(context, builder, kinds[x], array, INT(0))
                for x, array in ((0, P), (1, factors), (2, values), (5, O))
            )
            last = builder.sub(n, INT(1))
            vectors = UNIT // V.width

            def some_columns(d, _):
                def two_keys(j, sums, is_far):
                    if is_far:
                        prefetch_rows_to_L2(builder, values, kinds[2], starts, j, 2, columns)
                    second = builder.add(j, INT(1))
                    second = builder.select(builder.icmp_signed("<", j, last), second, last)
                    words = [
                        words_at(builder, builder.gep(values, [builder.add(starts(x), d)]))
                        for x in (j, second)
                    ]
                    both = [x for pair in zip(*words, strict=True) for x in _mixed(builder, *pair)]
                    found = []
                    for g in range(queries):
                        at = builder.gep(P, [builder.add(INT(g * MOST_KEYS), j)])
                        at = builder.bitcast(at, V.item.as_pointer())
                        weights = V.splat(builder, builder.load(at, align=2))
                        if kinds[2].dtype == types.int8:
                            weights = builder.bitcast(weights, V.integers)
                        for x, value in enumerate(both):
                            value = _in_lanes(builder, value, kinds[2])
                            total = sums[g * vectors + x]
                            found.append(add(builder, weights, value, total))
                    return found

                none = [zero] * (queries * vectors)
                is_first = builder.icmp_signed("==", d, INT(0))  # prefetches whole rows
                fetches = builder.and_(far, is_first)
                sums = loop_far_or_near(builder, fetches, n, 2, two_keys, none)
                for g in range(queries):
                    factor = V.splat(builder, builder.load(builder.gep(factors, [INT(g)])))
                    to = builder.gep(O, [builder.add(builder.mul(INT(g), o_row), d)])
                    own = _in_order(builder, kinds[2], sums[g * vectors : (g + 1) * vectors])
                    for x, total in enumerate(own):
                        if kinds[2].dtype == types.int8:
                            total = builder.fmul(builder.sitofp(total, V.type), factor)
                        total = builder.fadd(total, V.load(builder, to, x))
                        V.store(builder, total, to, x)
                return []

            loop(builder, columns, UNIT, [], some_columns)
            return context.get_dummy_value()

        return signature, generate

    return weigh


_weigh_4, _weigh_2, _weigh_1 = _weigh(4), _weigh(2), _weigh(1)


@jit
def weighted_bytes(P, factors, V_, starts, v, O, o_row, n, queries, columns, far):
    """Add Σ_j p_g[j] · V[starts[v + j] + d] to O[g · o_row + d], reading V once.

    Here j < ``n``, g < ``queries`` and d < ``columns``, a multiple of ``UNIT``. P and ``factors``
    are those of ``narrow_weights``.
    """
    g = 0
    while g < queries:
        from_P, own, to = flat(P, g * MOST_KEYS), flat(factors, g), flat(O, g * o_row)
        if g + 4 <= queries:
            _weigh_4(from_P, own, V_, starts, v, to, o_row, n, columns, far)
            g += 4
        elif g + 2 <= queries:
            _weigh_2(from_P, own, V_, starts, v, to, o_row, n, columns, far)
            g += 2
        else:
            _weigh_1(from_P, own, V_, starts, v, to, o_row, n, columns, far)
            g += 1


def most_digits(X):
    """Return how many binary digits queries may have if rows of X are to be multiplied here."""


@overload(most_digits, jit_options=OPTIONS)
def _most_digits(X):
    most = {types.int8: 11, types.uint8: 8}[X.dtype] if _is_taken(X) else 0
    return lambda X: most


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


@jit_inline
def _largest(numbers, n):
    """Return the bits of the largest magnitude of n numbers; those of NaN are the largest."""
    bits, largest = bits_of(numbers), np.uint32(0)
    for x in range(n):
        largest = max(largest, np.uint32(bits[x] & np.uint32(0x7FFFFFFF)))
    return largest


ORDER = np.array(_order_of_words(types.Array(types.uint8, 1, "C"))).ravel()


def column_at(K, x):
    """Return the column of word x of a unit of K; see ``_order_of_words``."""


@overload(column_at, jit_options=OPTIONS)
def _column_at(K, x):
    if K.dtype == types.uint8:
        return lambda K, x: ORDER[x]
    return lambda K, x: x


def narrow(X, numbers, n, to, factors, g):
    """Write n float32 ``numbers`` to ``to`` in the 16 bits that rows of X are multiplied by.

    Their factor is written to ``factors[g]``. Returns whether the numbers can be written so: they
    must be finite, and for int8 keys the largest must not be tiny. Returns False if X is not
    multiplied here.
    """


@overload(narrow, jit_options=OPTIONS)
def _narrow(X, numbers, n, to, factors, g):
    if not _is_taken(X):
        return lambda X, numbers, n, to, factors, g: False
    if X.dtype == types.uint8:

        def to_bfloat16s(X, numbers, n, to, factors, g):
            bits = bits_of(numbers)
            for x in range(n):
                to[x] = to_bfloat16(bits[x])
            factors[g] = 1
            return _largest(numbers, n) < INFINITE

        return to_bfloat16s

    def to_integers(X, numbers, n, to, factors, g):
        largest = _largest(numbers, n)
        if largest == 0:
            for x in range(n):
                to[x] = 0
            factors[g] = 0
            return True
        if not SMALL < largest < INFINITE:
            return False
        factors[g] = np.uint32(largest).view(np.float32) / LARGEST
        inverse = np.float32(1) / factors[g]
        for x in range(n):
            moved = np.float32(numbers[x] * inverse) + TO_INTEGER
            to[x] = np.uint16(np.float32(moved).view(np.uint32) & np.uint32(0xFFFF))
        return True

    return to_integers


@jit
def narrow_queries(K, Q, digits, rows, depth, spare, to, factors):
    """Write the ``rows`` rows of Q (``depth`` numbers each) for ``byte_products`` to ``to``.

    Numbers of Q have ``digits`` binary digits. Returns whether all rows can be written so, without
    more loss than the input's; see ``narrow``. ``spare`` has room for a row.
    """
    if digits > most_digits(K) or depth % UNIT or depth > MOST_COLUMNS:
        return False
    is_narrow = True
    for r in range(rows):
        own = narrow(K, flat(Q, r * depth), depth, spare, factors, r)
        is_narrow = is_narrow and own
        for first in range(0, depth, UNIT):
            unit, line = flat(to, r * depth + first), flat(spare, first)
            for x in range(UNIT):
                unit[x] = line[column_at(K, x)]
    return is_narrow


@jit
def narrow_weights(V_, P, p, p_row, rows, n, to, factors):
    """Write n weights of each row of P, from P[p] on, for ``weighted_bytes`` to ``to``.

    Row r of ``to`` begins at r · ``MOST_KEYS``. Returns whether all rows can be written so.
    """
    is_narrow = True
    for r in range(rows):
        row = flat(to, r * MOST_KEYS)
        own = narrow(V_, flat(P, p + r * p_row), n, row, factors, r)
        is_narrow = is_narrow and own
        if n % 2:
            row[n] = 0
    return is_narrow
