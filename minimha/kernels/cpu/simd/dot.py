"""Compute S = Q Kᵀ and O += P V for few queries, reading each row of K and V once.

K and V are floats, int8, or the bits of bfloat16 (uint16) or float8_e4m3fn numbers (uint8), which
are widened when loaded; the last as numbers over ``UNIT_OF_FLOAT8``. Rows may be anywhere, as in
pages. ``starts`` has the offset of each row,
and of ``ROWS_AHEAD`` more rows, which are prefetched: the CPU's own prefetching stops at the end of
a page. For rows at a constant stride, ``starts`` is the pair (first offset, stride), which costs
nothing to read. Arrays too large for a cache (``far``) are first prefetched into L2, where more
cache lines can be in flight.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from minimha.kernels.cpu.jit import OPTIONS, jit
from minimha.kernels.cpu.simd.halves import of_bfloat16, of_float8
from minimha.kernels.cpu.simd.memory import prefetch
from minimha.kernels.cpu.simd.vector import (
    INT,
    REGISTERS,
    VECTOR_BITS,
    Vector,
    loop,
    pairwise_sum,
    pointer_to,
)

ROWS_AHEAD, ROWS_AHEAD_OF_L1 = 64, 16  # distances in rows at which they are prefetched
PIECE = 128  # bits within which shuffles are fast
LINE = 64  # bytes of most CPUs' cache lines
TOGETHER = REGISTERS // 8  # rows of K that meet four queries in registers


def start_at(starts, r):
    """Return the offset of row r from ``starts``, an array of offsets or a pair (first, stride)."""


@overload(start_at, jit_options=OPTIONS)
def _start_at(starts, r):
    if isinstance(starts, types.BaseTuple):
        return lambda starts, r: starts[0] + r * starts[1]
    return lambda starts, r: starts[r]


def offsets_of(context, builder, kind, starts, first):
    """Return start(r), which generates item first + r of ``starts``, of the numba type ``kind``."""
    if isinstance(kind, types.BaseTuple):
        begin, stride = cgutils.unpack_tuple(builder, starts)
        begin = builder.add(begin, builder.mul(first, stride))
        return lambda r: builder.add(begin, builder.mul(r, stride))
    pointer = pointer_to(context, builder, kind, starts, first)
    return lambda r: builder.load(builder.gep(pointer, [r]))


def _rows(builder, X, start, r, number, ahead=0):
    """Generate pointers to ``number`` rows of X from row r + ``ahead`` on."""
    places = [start(builder.add(r, INT(ahead + x))) for x in range(number)]
    return [builder.gep(X, [place]) for place in places]


def prefetch_rows_to_L2(builder, X, kind, starts, r, number, columns):
    """Generate prefetches of ``number`` rows from r + ``ROWS_AHEAD`` on; ``kind`` is X's type."""
    rows = _rows(builder, X, starts, r, number, ROWS_AHEAD)

    def lines(k, _):
        for row in rows:
            prefetch(builder, builder.gep(row, [k]), 2)
        return []

    loop(builder, columns, 8 * LINE // kind.dtype.bitwidth, [], lines)


def _prefetcher(builder, vector, X, starts, r, number, columns):
    """Return prefetch_rows(k), which prefetches vector k of later rows into L1."""
    # Memory delivers sequential addresses faster: contiguous rows are fetched one after the other.
    rows = _rows(builder, X, starts, r, number, ROWS_AHEAD_OF_L1)
    last = builder.gep(rows[0], [builder.mul(INT(number - 1), columns)])
    is_gapless = builder.icmp_unsigned("==", last, rows[-1])
    along = builder.select(is_gapless, INT(number), INT(1))
    first = [builder.gep(rows[0], [INT(x * vector.width)]) for x in range(number)]
    places = [builder.select(is_gapless, *both) for both in zip(first, rows, strict=True)]

    def prefetch_rows(k):
        for place in places:
            prefetch(builder, builder.gep(place, [builder.mul(k, along)]), 1)

    return prefetch_rows


def loop_far_or_near(builder, far, stop, step, body, initial=()):
    """Generate two loops of ``body(n, values, is_far)`` without branches inside; see ``loop``.

    ``far`` chooses one of them. Returns the values.
    """
    results = []
    with builder.if_else(far) as branches:
        for is_far, branch in zip((True, False), branches, strict=True):
            with branch:
                own = loop(builder, stop, step, initial, partial(body, is_far=is_far))
                results.append((own, builder.block))
    values = [builder.phi(value.type) for value in initial]
    for own, block in results:
        for phi, value in zip(values, own, strict=True):
            phi.add_incoming(value, block)
    return values


def _loader(vector, kind):
    """Return load(builder, pointer, number), which loads vectors of K or V of type ``kind``."""
    if kind.dtype == types.uint8:
        return vector.load_float8s
    widening = {types.uint16: vector.load_bfloat16, types.int8: vector.load_int8}
    load = widening.get(kind.dtype, vector.load)
    return lambda builder, pointer, number: [load(builder, pointer, u) for u in range(number)]


def _vectors_per_step(kind):
    """Return how many vectors of K or V of type ``kind`` are loaded at once, if possible."""
    return 2 if kind.dtype.bitwidth == 8 else 1


def number_at(X, x):
    """Return X[x] as a float; uint16 and uint8 are the bits of bfloat16 and float8_e4m3fn."""


@overload(number_at, jit_options=OPTIONS)
def _number_at(X, x):
    if X.dtype == types.uint16:
        return lambda X, x: of_bfloat16(X[x])
    if X.dtype == types.uint8:
        return lambda X, x: of_float8(X[x])
    if X.dtype == types.int8:
        return lambda X, x: types.float32(X[x])
    return lambda X, x: X[x]


def horizontal_sums(builder, vector, values):
    """Generate one vector whose lane x is the sum of all lanes of ``values[x]``."""
    width, span = vector.width, vector.width
    piece = min(width, PIECE // vector.bits)
    values = [
        sums_of_pieces(builder, vector, values[x : x + piece]) for x in range(0, width, piece)
    ]
    while span > piece:  # the partial sums of a value are spread over ``span`` lanes
        halves = [
            [
                source + start + half + x
                for source in (0, width)
                for start in range(0, width, span)
                for x in range(span // 2)
            ]
            for half in (0, span // 2)
        ]
        values, span = _halved(builder, values, halves), span // 2
    return values[0]


def sums_of_pieces(builder, vector, values):
    """Generate one vector whose lane x of each piece is the sum of that piece of ``values[x]``.

    Pieces have 128 bits; shuffles within them are fast. Each step turns two vectors into one: it
    adds one half of each piece's lanes to the other half.
    """
    width, m = vector.width, 1
    piece = min(width, PIECE // vector.bits)
    while m < piece:  # a piece has partial sums of m values
        halves = [
            [
                source + start + half + x + y
                for start in range(0, width, piece)
                for x in range(0, piece // 2, m)
                for source in (0, width)
                for y in range(m)
            ]
            for half in (0, piece // 2)
        ]
        values, m = _halved(builder, values, halves), 2 * m
    return values[0]


def _halved(builder, values, halves):
    """Generate half as many vectors: sums of the lanes ``halves`` of two vectors each."""
    picks = [ir.Constant(ir.VectorType(ir.IntType(32), len(half)), half) for half in halves]
    return [
        builder.fadd(*(builder.shuffle_vector(one, other, pick) for pick in picks))
        for one, other in zip(values[::2], values[1::2], strict=True)
    ]


def _dots(queries, together, vectors):
    """Return a primitive that multiplies ``queries`` rows of B by one vector's width of rows of A.

    ``together`` rows of A are read side by side, so that each loaded vector of B is used for all of
    them. A step reads ``vectors`` vectors of each row, or more of 8-bit numbers. The depth is a
    multiple of the width.
    """

    @intrinsic
    def dots(typing, A, starts, a, B, b, b_row, C, c, c_row, depth, far):
        index = types.intp
        signature = types.void(A, starts, index, B, index, index, C, index, index, index, far)

        def generate(context, builder, signature, arguments):
            A, starts, a, B, b, b_row, C, c, c_row, depth, far = arguments
            kinds = signature.args
            vector = Vector(kinds[6].dtype)
            A = pointer_to(context, builder, kinds[0], A, INT(0))
            starts = offsets_of(context, builder, kinds[1], starts, a)
            B = pointer_to(context, builder, kinds[3], B, b)
            C = pointer_to(context, builder, kinds[6], C, c)
            rows = max(together, vector.width // queries)
            most = max(vectors, _vectors_per_step(kinds[0]))
            step = most * vector.width
            full = builder.and_(depth, INT(-step))
            rest = builder.sub(depth, full)
            others = [builder.gep(B, [builder.mul(INT(g), b_row)]) for g in range(queries)]
            tile = [(g, r) for g in range(queries) for r in range(together)]
            totals = cgutils.alloca_once(builder, vector.type, queries * rows)
            load = _loader(vector, kinds[0])

            def some_rows(first, _, is_far):
                own = _rows(builder, A, starts, first, together)
                prefetch_rows = _prefetcher(builder, vector, A, starts, first, together, depth)
                if is_far:
                    prefetch_rows_to_L2(builder, A, kinds[0], starts, first, together, depth)

                def some_vectors(begin, number):
                    def body(k, sums):
                        start = builder.add(begin, k)
                        left = [builder.gep(row, [start]) for row in own]
                        for u in range(0, number, _vectors_per_step(kinds[0])):
                            prefetch_rows(builder.add(start, INT(u * vector.width)))
                        x, results = [load(builder, row, number) for row in left], [*sums]
                        for u in range(number):
                            y = [
                                vector.load(builder, builder.gep(row, [start]), u) for row in others
                            ]
                            for at, (g, r) in enumerate(tile, u % vectors * len(tile)):
                                results[at] = vector.fma(builder, x[r][u], y[g], results[at])
                        return results

                    return body

                sums = [vector.constant(0.0)] * (vectors * len(tile))
                sums = loop(builder, full, step, sums, some_vectors(INT(0), most))
                if most > 1:
                    sums = loop(builder, rest, vector.width, sums, some_vectors(full, 1))
                for x, (g, r) in enumerate(tile):
                    total = pairwise_sum(builder, sums[x :: len(tile)])
                    place = builder.add(INT(g * rows + r), first)
                    builder.store(total, builder.gep(totals, [place]))
                return []

            loop_far_or_near(builder, far, INT(rows), together, some_rows)
            for first in range(0, queries * rows, vector.width):
                to_add = [
                    builder.load(builder.gep(totals, [INT(first + x)])) for x in range(vector.width)
                ]
                products = horizontal_sums(builder, vector, to_add)
                for lane in range(0, vector.width, min(rows, vector.width)):
                    g, r = divmod(first + lane, rows)
                    to = builder.gep(C, [builder.add(builder.mul(INT(g), c_row), INT(r))])
                    vector.store_lanes(builder, products, lane, min(rows, vector.width), to)
            return context.get_dummy_value()

        return signature, generate

    return dots


_dots_of_4, _dots_of_2, _dots_of_1 = _dots(4, TOGETHER, 1), _dots(2, TOGETHER, 1), _dots(1, 1, 4)


@jit
def dot_products(A, starts, a, B, b, b_row, C, c, c_row, rows, queries, depth, far):
    """Set C[c + g · c_row + r] = Σ_k A[starts[a + r] + k] · B[b + g · b_row + k], reading A once.

    Here r < ``rows``, g < ``queries`` and k < ``depth``. All arrays are flat.
    """
    width = VECTOR_BITS // (8 * C.itemsize)
    by_4, by_2, most = max(TOGETHER, width // 4), max(TOGETHER, width // 2), max(TOGETHER, width)
    full_rows, full_depth = rows // most * most, depth // width * width
    g = 0
    while g < queries:
        from_b, to = b + g * b_row, c + g * c_row
        if g + 4 <= queries:
            for r in range(0, full_rows, by_4):
                _dots_of_4(A, starts, a + r, B, from_b, b_row, C, to + r, c_row, full_depth, far)
            g += 4
        elif g + 2 <= queries:
            for r in range(0, full_rows, by_2):
                _dots_of_2(A, starts, a + r, B, from_b, b_row, C, to + r, c_row, full_depth, far)
            g += 2
        else:
            for r in range(0, full_rows, width):
                _dots_of_1(A, starts, a + r, B, from_b, b_row, C, to + r, c_row, full_depth, far)
            g += 1
    if full_rows == rows and full_depth == depth:
        return
    for g in range(queries):
        for r in range(rows):
            first, to = full_depth if r < full_rows else 0, c + g * c_row + r
            total = C.dtype.type(0)
            for k in range(first, depth):
                total += number_at(A, start_at(starts, a + r) + k) * B[b + g * b_row + k]
            C[to] = C[to] + total if r < full_rows else total


def _weigh(queries, keys):
    """Return a primitive for O += P V with ``queries`` rows of O, ``keys`` rows of V at a time.

    The weights stay in registers while ``keys`` rows of V are read side by side, and prefetched in
    memory order. A row of O is loaded and stored once for these keys. ``columns`` is a multiple of
    the vector width, ``depth`` a multiple of ``keys``.
    """

    @intrinsic
    def weigh(typing, P, p, p_row, V, starts, v, O, o, o_row, columns, depth, far):
        index = types.intp
        signature = types.void(P, index, index, V, starts, index, O, *[index] * 4, far)

        def generate(context, builder, signature, arguments):
            P, p, p_row, V, starts, v, O, o, o_row, columns, depth, far = arguments
            kinds = signature.args
            vector = Vector(kinds[6].dtype)
            P = pointer_to(context, builder, kinds[0], P, p)
            V = pointer_to(context, builder, kinds[3], V, INT(0))
            starts = offsets_of(context, builder, kinds[4], starts, v)
            O = pointer_to(context, builder, kinds[6], O, o)
            load = _loader(vector, kinds[3])
            rows_of_O = [builder.gep(O, [builder.mul(INT(g), o_row)]) for g in range(queries)]
            rows_of_P = [builder.gep(P, [builder.mul(INT(g), p_row)]) for g in range(queries)]

            def some_keys(k, _, is_far):
                indices = [builder.add(k, INT(x)) for x in range(keys)]
                rows_of_V = _rows(builder, V, starts, k, keys)
                prefetch_rows = _prefetcher(builder, vector, V, starts, k, keys, columns)
                if is_far:
                    prefetch_rows_to_L2(builder, V, kinds[3], starts, k, keys, columns)
                weights = [
                    [vector.splat(builder, builder.load(builder.gep(row, [j]))) for j in indices]
                    for row in rows_of_P
                ]

                def some_columns(begin, number):
                    def body(n, _):
                        n = builder.add(begin, n)
                        prefetch_rows(n)
                        starts = [builder.gep(row, [n]) for row in rows_of_V]
                        values = [load(builder, start, number) for start in starts]
                        for row, own in zip(rows_of_O, weights, strict=True):
                            to = builder.gep(row, [n])
                            for u in range(number):
                                total = vector.load(builder, to, u)
                                for weight, value in zip(own, values, strict=True):
                                    total = vector.fma(builder, weight, value[u], total)
                                vector.store(builder, total, to, u)
                        return []

                    return body

                most = _vectors_per_step(kinds[3])
                full = builder.and_(columns, INT(-most * vector.width))
                loop(builder, full, most * vector.width, [], some_columns(INT(0), most))
                if most > 1:
                    rest = builder.sub(columns, full)
                    loop(builder, rest, vector.width, [], some_columns(full, 1))
                return []

            loop_far_or_near(builder, far, depth, keys, some_keys)
            return context.get_dummy_value()

        return signature, generate

    return weigh


_weigh_4, _weigh_2, _weigh_1 = (_weigh(queries, 4) for queries in (4, 2, 1))


@jit
def weighted_rows(P, p, p_row, V, starts, v, O, o, o_row, rows, columns, depth, far):
    """Add P V to ``rows`` rows of O, reading V from memory once.

    O has ``columns`` columns, and the sum is over ``depth`` rows of V. All arrays are flat. P's
    element (r, k) is at p + r · p_row + k. V's row k starts at starts[v + k], and O's row r at
    o + r · o_row.
    """
    width = VECTOR_BITS // (8 * O.itemsize)
    full_columns, full_depth = columns // width * width, depth // 4 * 4
    r = 0
    while r < rows:
        from_p, to = p + r * p_row, o + r * o_row
        if r + 4 <= rows:
            _weigh_4(P, from_p, p_row, V, starts, v, O, to, o_row, full_columns, full_depth, far)
            r += 4
        elif r + 2 <= rows:
            _weigh_2(P, from_p, p_row, V, starts, v, O, to, o_row, full_columns, full_depth, far)
            r += 2
        else:
            _weigh_1(P, from_p, p_row, V, starts, v, O, to, o_row, full_columns, full_depth, far)
            r += 1
    if full_columns == columns and full_depth == depth:
        return
    for r in range(rows):
        for k in range(depth):
            for d in range(full_columns if k < full_depth else 0, columns):
                x = start_at(starts, v + k) + d
                O[o + r * o_row + d] += P[p + r * p_row + k] * number_at(V, x)
