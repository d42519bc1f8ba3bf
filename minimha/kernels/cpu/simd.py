"""The machine instructions that numba does not offer: vector code for the inner loops.

numba leaves vectors to LLVM, which makes them half as wide as an AVX-512 machine has them and does
not keep a tile of sums in registers at all. The primitives here are written as LLVM vectors. Each
takes whole arrays and an offset counted in elements, and has a twin beside it in plain numba
(``…_plain``) that says the same in two loops and against which it is tested.

A *panel* is up to ``VECTORS`` vectors side by side: ``VECTORS`` · width lanes, each lane one query.
A tile product keeps ``ROWS`` × ``VECTORS`` vectors of sums in registers while the depth runs: with
32 registers (AVX-512, NEON) 8 × 3 sums, 3 vectors of B and one broadcast of A make 28; with 16
(AVX2, SSE) 4 × 3 + 3 + 1 make 16. ROWS = 8 divides every usual head width.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FASTMATH = {
    "nsz",
    "arcp",
    "contract",
    "afn",
    "reassoc",
}  # but never nnan or ninf: -inf is real
VECTORS = 3
PAIRED = 4  # rows of exponentials that are added pair by pair
BLOCK = 8  # rows and columns that are transposed in registers
ROWS_AHEAD = 16  # rows of K or V that are asked for before they are needed


def host_vectors():
    """Bits of a vector register and number of vector registers of the machine compiled for.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, where they are set, decide as they do for numba itself,
    so that what is compiled here fits what numba caches it under.
    """
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        given = (numba.config.CPU_FEATURES or "").split(",")
        features = {name[1:]: True for name in given if name.startswith("+")}
    else:
        features = dict(binding.get_host_cpu_features())
    if features.get("avx512f"):
        return 512, 32
    if features.get("avx2") and features.get("fma"):
        return 256, 16
    return 128, 32 if binding.get_default_triple().startswith(("aarch64", "arm64")) else 16


VECTOR_BITS, REGISTERS = host_vectors()
ROWS = 8 if REGISTERS == 32 else 4
TOGETHER = ROWS // 2  # rows of K that meet four queries in registers


def lanes(itemsize):
    """Lanes of a full panel of items of ``itemsize`` bytes."""
    return VECTORS * VECTOR_BITS // (8 * itemsize)


INT = ir.IntType(64)


class Vector:
    """LLVM's types for one floating dtype, and the few operations on them."""

    def __init__(self, dtype):
        self.bits = dtype.bitwidth
        self.width = VECTOR_BITS // self.bits
        self.item = ir.FloatType() if self.bits == 32 else ir.DoubleType()
        self.type = ir.VectorType(self.item, self.width)
        self.integers = ir.VectorType(ir.IntType(self.bits), self.width)
        self.suffix = f"v{self.width}f{self.bits}"

    def constant(self, number):
        return ir.Constant(self.type, [number] * self.width)

    def call(self, builder, name, *arguments):
        """LLVM's elementwise intrinsic ``name``."""
        kind = ir.FunctionType(self.type, [self.type] * len(arguments))
        function = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.{name}.{self.suffix}"
        )
        return builder.call(function, arguments)

    def fma(self, builder, a, b, c):
        """a · b + c, in one instruction where the machine has it."""
        return self.call(builder, "fmuladd", a, b, c)

    def load(self, builder, pointer, number=0):
        """The ``number``-th vector from ``pointer`` on."""
        place = builder.gep(pointer, [INT(number * self.width)])
        loaded = builder.load(builder.bitcast(place, self.type.as_pointer()))
        loaded.align = self.bits // 8
        return loaded

    def store(self, builder, value, pointer, number=0):
        place = builder.gep(pointer, [INT(number * self.width)])
        stored = builder.store(value, builder.bitcast(place, self.type.as_pointer()))
        stored.align = self.bits // 8

    def store_part(self, builder, value, first, number, pointer):
        """Store ``number`` lanes of ``value``, from lane ``first`` on."""
        lane = ir.IntType(32)
        picked = ir.Constant(ir.VectorType(lane, number), [lane(first + x) for x in range(number)])
        part = builder.shuffle_vector(value, value, picked)
        stored = builder.store(part, builder.bitcast(pointer, part.type.as_pointer()))
        stored.align = self.bits // 8

    def splat(self, builder, scalar):
        """``scalar`` in every lane."""
        undefined = ir.Constant(self.type, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return builder.shuffle_vector(first, undefined, zeros)


def _pointer(context, builder, kind, array, offset):
    """Pointer to the element ``offset`` of an array's memory."""
    item = Vector(kind.dtype).item
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, item.as_pointer()), [offset])


def _loop(builder, stop, step, initial, body):
    """for k in range(0, stop, step): values = body(k, values). Returns the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(INT)
    k.add_incoming(INT(0), before)
    values = [builder.phi(value.type) for value in initial]
    for phi, value in zip(values, initial, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), inside, after)
    builder.position_at_end(inside)
    results = body(k, values)
    k.add_incoming(builder.add(k, INT(step)), builder.block)
    for phi, value in zip(values, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _ask(builder, pointer):
    """Ask memory for the cache line at ``pointer``, without waiting; any address may be given."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, number(0), number(3), number(1)])  # to read, into L1, data


def _asker(builder, vector, row, columns, rows):
    """ask(pointer, k): for vector k of each of ``rows`` rows that are used side by side, or alike.

    Memory gives them faster one after the other. So rows that lie without a gap, ``row`` from one
    to the next, are asked for in order: by the time k has reached ``columns``, all of them were.
    """
    is_gapless = builder.icmp_signed("==", row, columns)
    along = builder.select(is_gapless, INT(rows), INT(1))
    across = builder.select(is_gapless, INT(vector.width), row)

    def ask(pointer, k):
        first = builder.mul(k, along)
        for r in range(rows):
            _ask(builder, builder.gep(pointer, [builder.add(first, builder.mul(INT(r), across))]))

    return ask


def _tile_product(rows, vectors, adds):
    """Primitive for a tile of ``rows`` × ``vectors`` sums; see ``tile_product`` for its meaning."""

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
            A = _pointer(context, builder, kinds[0], A, a)
            B = _pointer(context, builder, kinds[4], B, b)
            C = _pointer(context, builder, kinds[7], C, c)
            F = _pointer(context, builder, kinds[10], F, INT(0))

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

            sums = _loop(builder, depth, 1, zeros, body)
            for (r, n), total in zip(tile, sums, strict=True):
                if adds:  # last, so that a long sum is one of short sums and loses few digits
                    so_far = vector.load(builder, rows_of_C[r], n)
                    result = vector.fma(builder, so_far, factors[n], total)
                else:
                    result = builder.fmul(total, factors[n])
                vector.store(builder, result, rows_of_C[r], n)
            return context.get_dummy_value()

        return signature, generate

    return product


_set_3, _set_2, _set_1 = (_tile_product(ROWS, vectors, False) for vectors in (3, 2, 1))
_set_row_3, _set_row_2, _set_row_1 = (_tile_product(1, vectors, False) for vectors in (3, 2, 1))
_add_3, _add_2, _add_1 = (_tile_product(ROWS, vectors, True) for vectors in (3, 2, 1))
_add_row_3, _add_row_2, _add_row_1 = (_tile_product(1, vectors, True) for vectors in (3, 2, 1))


@numba.njit(fastmath=FASTMATH)
def tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
    """C = factor ∘ (A B): ``rows`` rows of ``vectors`` vectors, over ``depth`` products.

    A's element (r, k) lies at a + r · a_row + k · a_k, B's row k at b + k · b_k, C's row r at
    c + r · c_row, all counted in elements; ``factor`` has one number a lane.
    """
    r = 0
    while r + ROWS <= rows:
        if vectors == 3:
            _set_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _set_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _set_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + ROWS * a_row, c + ROWS * c_row, r + ROWS
    while r < rows:
        if vectors == 3:
            _set_row_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _set_row_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _set_row_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + a_row, c + c_row, r + 1


@numba.njit(fastmath=FASTMATH)
def tile_product_add(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, vectors, depth):
    """C = factor ∘ C + A B; the arguments are those of ``tile_product``."""
    r = 0
    while r + ROWS <= rows:
        if vectors == 3:
            _add_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _add_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _add_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + ROWS * a_row, c + ROWS * c_row, r + ROWS
    while r < rows:
        if vectors == 3:
            _add_row_3(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        elif vectors == 2:
            _add_row_2(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        else:
            _add_row_1(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, depth)
        a, c, r = a + a_row, c + c_row, r + 1


@numba.njit
def tile_product_plain(
    A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, num_lanes, depth, adds
):
    """Twin of both tile products, over flat arrays; ``adds`` chooses which."""
    for r in range(rows):
        for lane in range(num_lanes):
            place = c + r * c_row + lane
            total = C[place] * factor[lane] if adds else C.dtype.type(0)
            for k in range(depth):
                total += A[a + r * a_row + k * a_k] * B[b + k * b_k + lane]
            C[place] = total if adds else total * factor[lane]


def _lanes_max(vectors):
    @intrinsic
    def maximum(typing, S, s, n, M):
        signature = types.void(S, types.intp, types.intp, M)

        def generate(context, builder, signature, arguments):
            S, s, n, M = arguments
            vector = Vector(signature.args[0].dtype)
            S = _pointer(context, builder, signature.args[0], S, s)
            M = _pointer(context, builder, signature.args[3], M, INT(0))

            def body(k, best):
                row = builder.gep(S, [builder.mul(k, INT(vectors * vector.width))])
                results = []
                for u in range(vectors):
                    x = vector.load(builder, row, u)
                    larger = builder.fcmp_ordered(">", x, best[u])
                    results.append(builder.select(larger, x, best[u]))
                return results

            lowest = [vector.constant(-math.inf)] * vectors
            for u, best in enumerate(_loop(builder, n, 1, lowest, body)):
                vector.store(builder, best, M, u)
            return context.get_dummy_value()

        return signature, generate

    return maximum


_max_3, _max_2, _max_1 = (_lanes_max(vectors) for vectors in (3, 2, 1))


@numba.njit(fastmath=FASTMATH)
def lanes_max(S, s, n, vectors, M):
    """M[lane] = the largest of n rows S[s + row · lanes + lane]; NaN is passed over."""
    if vectors == 3:
        _max_3(S, s, n, M)
    elif vectors == 2:
        _max_2(S, s, n, M)
    else:
        _max_1(S, s, n, M)


@numba.njit
def lanes_max_plain(S, s, n, num_lanes, M):
    """Twin of ``lanes_max``."""
    for lane in range(num_lanes):
        M[lane] = -math.inf
        for row in range(n):
            if S[s + row * num_lanes + lane] > M[lane]:
                M[lane] = S[s + row * num_lanes + lane]


# e^r for |r| <= ln(2) / 2, highest power first: fitted with a relative error of 3e-9 for float32,
# the Taylor series, whose error is below 1e-17 there, for float64.
POLYNOMIAL = {
    32: [
        1.3814540580e-3,
        8.3687454462e-3,
        4.1668388993e-2,
        1.6666521132e-1,
        0.49999994040,
        1.0,
        1.0,
    ],
    64: [1 / math.factorial(n) for n in range(13, -1, -1)],
}
LN_2 = {
    32: (0.693359375, -2.12194440e-4),
    64: (0.693145751953125, 1.42860682030941723e-6),
}
MANTISSA = {32: 23, 64: 52}
SMALLEST = {32: -126.0, 64: -1022.0}


def _reduced(builder, vector, x):
    """Whole w, r with x = w · ln(2) + r, and where e^x is too small for a normal number.

    ln(2) comes in two parts, the first so short that w times it is exact (Cody and Waite, 1980).
    """
    bits = vector.bits
    y = builder.fmul(x, vector.constant(1 / math.log(2)))
    w = vector.call(builder, "rint", y)
    r = x
    for part in LN_2[bits]:
        r = vector.fma(builder, w, vector.constant(-part), r)
    return w, r, builder.fcmp_ordered("<", y, vector.constant(SMALLEST[bits]))


def _polynomial(builder, vector, coefficients, r):
    first, *rest = coefficients
    power = vector.constant(first)
    for coefficient in rest:
        power = vector.fma(builder, power, r, vector.constant(coefficient))
    return power


def _times_power_of_2(builder, vector, x, w):
    """x · 2^w, by adding w to the exponent bits of x."""
    mantissa = MANTISSA[vector.bits]
    # Added to 1.5 · 2^mantissa a small whole number stands in the lowest bits, NaN or not.
    shifted = builder.bitcast(
        builder.fadd(w, vector.constant(1.5 * 2.0**mantissa)), vector.integers
    )
    exponent = builder.shl(shifted, ir.Constant(vector.integers, [mantissa] * vector.width))
    return builder.bitcast(
        builder.add(builder.bitcast(x, vector.integers), exponent), vector.type
    )  # fmt: skip


def _exp(builder, vector, x):
    """exp(x) of a vector of numbers that are at most 0, or NaN.

    Below the normal numbers, and for -inf, the result is exactly 0.
    """
    w, r, vanishes = _reduced(builder, vector, x)
    power = _polynomial(builder, vector, POLYNOMIAL[vector.bits], r)
    scaled = _times_power_of_2(builder, vector, power, w)
    return builder.select(vanishes, vector.constant(0.0), scaled)


def _tanh(builder, vector, x):
    """tanh(x) = -e / (e + 2) with e = exp(-2 abs(x)) - 1, which keeps the digits of a small x.

    e = 2^w (e^r - 1) + (2^w - 1), and the polynomial of e^r without its 1 is divisible by r.
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


@intrinsic
def _cap(typing, S, s, n, cap):
    """``soft_cap`` of n items, which fill whole vectors."""
    signature = types.void(S, types.intp, types.intp, S.dtype)

    def generate(context, builder, signature, arguments):
        S, s, n, cap = arguments
        vector = Vector(signature.args[0].dtype)
        S = _pointer(context, builder, signature.args[0], S, s)
        cap = vector.splat(builder, cap)

        def body(k, _):
            place = builder.gep(S, [k])
            ratio = builder.fdiv(vector.load(builder, place), cap)
            vector.store(builder, builder.fmul(cap, _tanh(builder, vector, ratio)), place)
            return []

        _loop(builder, n, vector.width, [], body)
        return context.get_dummy_value()

    return signature, generate


@numba.njit(fastmath=FASTMATH)
def soft_cap(S, s, n, cap):
    """S = cap · tanh(S / cap) in n items from S[s] on."""
    width = VECTOR_BITS // (8 * S.itemsize)
    ready = n // width * width
    _cap(S, s, ready, S.dtype.type(cap))
    for x in range(s + ready, s + n):
        S[x] = cap * math.tanh(S[x] / cap)


@numba.njit
def soft_cap_plain(S, s, n, cap):
    """Twin of ``soft_cap``."""
    for x in range(s, s + n):
        S[x] = cap * math.tanh(S[x] / cap)


def _total(builder, terms):
    """Sum of a power of two of vectors, pair by pair."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=True)
        terms = [builder.fadd(*pair) for pair in pairs]
    return terms[0]


def _lanes_exp(vectors):
    @intrinsic
    def exponential(typing, S, s, n, M, T):
        signature = types.void(S, types.intp, types.intp, M, T)

        def generate(context, builder, signature, arguments):
            S, s, n, M, T = arguments
            vector = Vector(signature.args[0].dtype)
            S = _pointer(context, builder, signature.args[0], S, s)
            M = _pointer(context, builder, signature.args[3], M, INT(0))
            T = _pointer(context, builder, signature.args[4], T, INT(0))
            m = [vector.load(builder, M, u) for u in range(vectors)]

            def exp_of(place, u):
                difference = builder.fsub(vector.load(builder, place), m[u])
                p = _exp(builder, vector, difference)
                vector.store(builder, p, place)
                return p

            def some_rows(first, rows):
                """Exponentials of ``rows`` rows from ``first`` on, and their sums, pair by pair."""

                def body(k, sums):
                    row = builder.mul(builder.add(first, k), INT(vectors * vector.width))
                    results = []
                    for u in range(vectors):
                        terms = []
                        for x in range(rows):
                            offset = INT((x * vectors + u) * vector.width)
                            place = builder.gep(S, [builder.add(row, offset)])
                            terms.append(exp_of(place, u))
                        results.append(builder.fadd(sums[u], _total(builder, terms)))
                    return results

                return body

            whole = builder.and_(n, INT(-PAIRED))
            sums = [vector.constant(0.0)] * vectors
            sums = _loop(builder, whole, PAIRED, sums, some_rows(INT(0), PAIRED))
            sums = _loop(builder, builder.sub(n, whole), 1, sums, some_rows(whole, 1))
            for u, total in enumerate(sums):
                vector.store(builder, total, T, u)
            return context.get_dummy_value()

        return signature, generate

    return exponential


_exp_3, _exp_2, _exp_1 = (_lanes_exp(vectors) for vectors in (3, 2, 1))


@numba.njit(fastmath=FASTMATH)
def lanes_exp(S, s, n, vectors, M, T):
    """S = exp(S - M[lane]) in n rows of lanes from S[s] on, and T[lane] = the sum over the rows.

    S - M must be at most 0. What is too small for a normal number becomes 0, as -inf does.
    """
    if vectors == 3:
        _exp_3(S, s, n, M, T)
    elif vectors == 2:
        _exp_2(S, s, n, M, T)
    else:
        _exp_1(S, s, n, M, T)


@numba.njit
def lanes_exp_plain(S, s, n, num_lanes, M, T):
    """Twin of ``lanes_exp``."""
    for lane in range(num_lanes):
        T[lane] = 0
        for row in range(n):
            place = s + row * num_lanes + lane
            S[place] = math.exp(S[place] - M[lane])
            T[lane] += S[place]


def _sums(builder, vector, values):
    """A vector of the sums of as many vectors as it has lanes, in their order.

    Step by step two vectors become one: half of the numbers of each value join the other half. At
    first within pieces of 128 bits, where shuffles are fast, then across them.
    """
    width, piece = vector.width, min(vector.width, 128 // vector.bits)
    steps, m = [], 1
    while m < piece:  # m values stand side by side in a piece
        steps.append(
            [
                [
                    source + start + half + x + y
                    for start in range(0, width, piece)
                    for x in range(0, piece // 2, m)
                    for source in (0, width)
                    for y in range(m)
                ]
                for half in (0, piece // 2)
            ]
        )
        m *= 2
    span = width
    while span > piece:  # lanes over which a value is spread
        steps.append(
            [
                [
                    source + start + half + x
                    for source in (0, width)
                    for start in range(0, width, span)
                    for x in range(span // 2)
                ]
                for half in (0, span // 2)
            ]
        )
        span //= 2
    for halves in steps:
        picks = [ir.Constant(ir.VectorType(ir.IntType(32), width), half) for half in halves]
        values = [
            builder.fadd(*(builder.shuffle_vector(one, other, pick) for pick in picks))
            for one, other in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]


def _dots(queries, together, vectors):
    """Primitive: ``queries`` rows of B against as many rows of A as make a vector of products.

    ``together`` rows of A stand side by side, so that a vector of B, once loaded, serves them all;
    ``vectors`` of each are taken at once. Depth is in whole vectors.
    """

    @intrinsic
    def dots(typing, A, a, a_row, B, b, b_row, C, c, c_row, depth):
        index = types.intp
        signature = types.void(A, index, index, B, index, index, C, index, index, index)

        def generate(context, builder, signature, arguments):
            A, a, a_row, B, b, b_row, C, c, c_row, depth = arguments
            kinds = signature.args
            vector = Vector(kinds[6].dtype)
            A = _pointer(context, builder, kinds[0], A, a)
            B = _pointer(context, builder, kinds[3], B, b)
            C = _pointer(context, builder, kinds[6], C, c)
            rows = max(together, vector.width // queries)
            step = vectors * vector.width
            whole = builder.and_(depth, INT(-step))
            rest = builder.sub(depth, whole)
            others = [builder.gep(B, [builder.mul(INT(g), b_row)]) for g in range(queries)]
            tile = [(g, r) for g in range(queries) for r in range(together)]
            totals = cgutils.alloca_once(builder, vector.type, queries * rows)
            ask = _asker(builder, vector, a_row, depth, together)

            def some_rows(first, _):
                own = [
                    builder.gep(A, [builder.mul(builder.add(first, INT(r)), a_row)])
                    for r in range(together)
                ]
                later = builder.gep(own[0], [builder.mul(INT(ROWS_AHEAD), a_row)])

                def some_vectors(begin, number):
                    def body(k, sums):
                        start = builder.add(begin, k)
                        left = [builder.gep(row, [start]) for row in own]
                        for u in range(number):
                            ask(later, builder.add(start, INT(u * vector.width)))
                        results = []
                        for u in range(number):
                            x = [vector.load(builder, row, u) for row in left]
                            y = [
                                vector.load(builder, builder.gep(row, [start]), u) for row in others
                            ]
                            results += [
                                vector.fma(builder, x[r], y[g], total)
                                for (g, r), total in zip(tile, sums[u * len(tile) :], strict=False)
                            ]
                        return results + sums[number * len(tile) :]

                    return body

                sums = [vector.constant(0.0)] * (vectors * len(tile))
                sums = _loop(builder, whole, step, sums, some_vectors(INT(0), vectors))
                if vectors > 1:
                    sums = _loop(builder, rest, vector.width, sums, some_vectors(whole, 1))
                for x, (g, r) in enumerate(tile):
                    total = _total(builder, sums[x :: len(tile)])
                    place = builder.add(INT(g * rows + r), first)
                    builder.store(total, builder.gep(totals, [place]))
                return []

            _loop(builder, INT(rows), together, [], some_rows)
            for first in range(0, queries * rows, vector.width):
                to_add = [
                    builder.load(builder.gep(totals, [INT(first + x)])) for x in range(vector.width)
                ]
                products = _sums(builder, vector, to_add)
                for lane in range(0, vector.width, min(rows, vector.width)):
                    g, r = divmod(first + lane, rows)
                    to = builder.gep(C, [builder.add(builder.mul(INT(g), c_row), INT(r))])
                    vector.store_part(builder, products, lane, min(rows, vector.width), to)
            return context.get_dummy_value()

        return signature, generate

    return dots


_dots_of_4, _dots_of_2, _dots_of_1 = _dots(4, TOGETHER, 1), _dots(2, TOGETHER, 1), _dots(1, 1, 4)


@numba.njit(fastmath=FASTMATH)
def dot_products(A, a, a_row, B, b, b_row, C, c, c_row, rows, queries, depth):
    """C[c + g · c_row + r] = Σ_k A[a + r · a_row + k] · B[b + g · b_row + k], reading A once.

    For ``rows`` r and ``queries`` g; flat arrays.
    """
    width = VECTOR_BITS // (8 * C.itemsize)
    by_4, by_2, most = max(TOGETHER, width // 4), max(TOGETHER, width // 2), max(TOGETHER, width)
    ready, whole = rows // most * most, depth // width * width
    g = 0
    while g < queries:
        from_b, to = b + g * b_row, c + g * c_row
        if g + 4 <= queries:
            for r in range(0, ready, by_4):
                _dots_of_4(A, a + r * a_row, a_row, B, from_b, b_row, C, to + r, c_row, whole)
            g += 4
        elif g + 2 <= queries:
            for r in range(0, ready, by_2):
                _dots_of_2(A, a + r * a_row, a_row, B, from_b, b_row, C, to + r, c_row, whole)
            g += 2
        else:
            for r in range(0, ready, width):
                _dots_of_1(A, a + r * a_row, a_row, B, from_b, b_row, C, to + r, c_row, whole)
            g += 1
    if ready == rows and whole == depth:
        return
    for g in range(queries):
        for r in range(rows):
            first, to = whole if r < ready else 0, c + g * c_row + r
            total = C.dtype.type(0)
            for k in range(first, depth):
                total += A[a + r * a_row + k] * B[b + g * b_row + k]
            C[to] = C[to] + total if r < ready else total


@numba.njit
def dot_products_plain(A, a, a_row, B, b, b_row, C, c, c_row, rows, queries, depth):
    """Twin of ``dot_products``."""
    for g in range(queries):
        for r in range(rows):
            total = C.dtype.type(0)
            for k in range(depth):
                total += A[a + r * a_row + k] * B[b + g * b_row + k]
            C[c + g * c_row + r] = total


def _weigh(queries, keys):
    """Primitive: O += P V for ``queries`` rows of O, ``keys`` whole rows of V at a time.

    The weights stay in registers while the rows of V pass side by side, asked for in memory's
    order; O's are loaded and stored once for all the keys. ``columns`` are in whole vectors,
    ``depth`` is divisible by keys.
    """

    @intrinsic
    def weigh(typing, P, p, p_row, V, v, v_row, O, o, o_row, columns, depth):
        index = types.intp
        signature = types.void(P, index, index, V, index, index, O, index, index, index, index)

        def generate(context, builder, signature, arguments):
            P, p, p_row, V, v, v_row, O, o, o_row, columns, depth = arguments
            kinds = signature.args
            vector = Vector(kinds[6].dtype)
            P = _pointer(context, builder, kinds[0], P, p)
            V = _pointer(context, builder, kinds[3], V, v)
            O = _pointer(context, builder, kinds[6], O, o)
            ask = _asker(builder, vector, v_row, columns, keys)
            rows_of_O = [builder.gep(O, [builder.mul(INT(g), o_row)]) for g in range(queries)]
            rows_of_P = [builder.gep(P, [builder.mul(INT(g), p_row)]) for g in range(queries)]

            def some_keys(k, _):
                places_of_k = [builder.add(k, INT(x)) for x in range(keys)]
                rows_of_V = [builder.gep(V, [builder.mul(at, v_row)]) for at in places_of_k]
                weights = [
                    [
                        vector.splat(builder, builder.load(builder.gep(row, [place])))
                        for place in places_of_k
                    ]
                    for row in rows_of_P
                ]

                def column(n, _):
                    ask(later, n)
                    places = [builder.gep(row, [n]) for row in rows_of_V]
                    values = [vector.load(builder, place) for place in places]
                    for row, own in zip(rows_of_O, weights, strict=True):
                        place = builder.gep(row, [n])
                        total = vector.load(builder, place)
                        for weight, value in zip(own, values, strict=True):
                            total = vector.fma(builder, weight, value, total)
                        vector.store(builder, total, place)
                    return []

                later = builder.gep(rows_of_V[0], [builder.mul(INT(ROWS_AHEAD), v_row)])
                _loop(builder, columns, vector.width, [], column)
                return []

            _loop(builder, depth, keys, [], some_keys)
            return context.get_dummy_value()

        return signature, generate

    return weigh


_weigh_4, _weigh_2, _weigh_1 = (_weigh(queries, 4) for queries in (4, 2, 1))


@numba.njit(fastmath=FASTMATH)
def weighted_rows(P, p, p_row, V, v, v_row, O, o, o_row, rows, columns, depth):
    """O += P V for ``rows`` rows of O, reading V from memory once.

    P's element (r, k) lies at p + r · p_row + k, V's row k at v + k · v_row, O's row r at
    o + r · o_row; flat arrays.
    """
    width = VECTOR_BITS // (8 * O.itemsize)
    whole, by_four = columns // width * width, depth // 4 * 4
    r = 0
    while r < rows:
        from_p, to = p + r * p_row, o + r * o_row
        if r + 4 <= rows:
            _weigh_4(P, from_p, p_row, V, v, v_row, O, to, o_row, whole, by_four)
            r += 4
        elif r + 2 <= rows:
            _weigh_2(P, from_p, p_row, V, v, v_row, O, to, o_row, whole, by_four)
            r += 2
        else:
            _weigh_1(P, from_p, p_row, V, v, v_row, O, to, o_row, whole, by_four)
            r += 1
    if whole == columns and by_four == depth:
        return
    for r in range(rows):
        for k in range(depth):
            for d in range(whole if k < by_four else 0, columns):
                O[o + r * o_row + d] += P[p + r * p_row + k] * V[v + k * v_row + d]


@numba.njit
def weighted_rows_plain(P, p, p_row, V, v, v_row, O, o, o_row, rows, columns, depth):
    """Twin of ``weighted_rows``."""
    for r in range(rows):
        for d in range(columns):
            for k in range(depth):
                O[o + r * o_row + d] += P[p + r * p_row + k] * V[v + k * v_row + d]


def _interleaved(builder, one, other):
    """Items of two rows in turn: the vector of the first halves, and that of the second."""
    for start in (0, BLOCK // 2):
        picks = [source + start + x for x in range(BLOCK // 2) for source in (0, BLOCK)]
        pick = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), picks)
        yield builder.shuffle_vector(one, other, pick)


@intrinsic
def _transpose_block(typing, X, x, x_row, Y, y, y_row):
    """``transpose`` of BLOCK rows and columns.

    Row i is interleaved with row i + BLOCK / 2, which halves the distance between an item and its
    place; log2(BLOCK) times makes it 1.
    """
    index = types.intp
    signature = types.void(X, index, index, Y, index, index)

    def generate(context, builder, signature, arguments):
        X, x, x_row, Y, y, y_row = arguments
        kind = signature.args[0]
        item = context.get_data_type(kind.dtype)
        row_type = ir.VectorType(item, BLOCK).as_pointer()

        def row_of(array_type, array, first, stride, r):
            data = context.make_array(array_type)(context, builder, array).data
            start = builder.gep(builder.bitcast(data, item.as_pointer()), [first])
            place = builder.gep(start, [builder.mul(INT(r), stride)])
            return builder.bitcast(place, row_type)

        rows = [builder.load(row_of(kind, X, x, x_row, r)) for r in range(BLOCK)]
        itemsize = context.get_abi_sizeof(item)
        for row in rows:
            row.align = itemsize
        for _ in range(BLOCK.bit_length() - 1):
            pairs = zip(rows[: BLOCK // 2], rows[BLOCK // 2 :], strict=True)
            rows = [both for pair in pairs for both in _interleaved(builder, *pair)]
        for r, row in enumerate(rows):
            stored = builder.store(row, row_of(signature.args[3], Y, y, y_row, r))
            stored.align = itemsize
        return context.get_dummy_value()

    return signature, generate


@numba.njit(fastmath=FASTMATH)
def transpose(X, x, x_row, Y, y, y_row, rows, columns):
    """Y[y + c · y_row + r] = X[x + r · x_row + c] for ``rows`` r, ``columns`` c; flat arrays."""
    ready_rows, ready_columns = rows // BLOCK * BLOCK, columns // BLOCK * BLOCK
    for r in range(0, ready_rows, BLOCK):
        for c in range(0, ready_columns, BLOCK):
            _transpose_block(X, x + r * x_row + c, x_row, Y, y + c * y_row + r, y_row)
    for r in range(rows):
        for c in range(ready_columns if r < ready_rows else 0, columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]


@numba.njit
def transpose_plain(X, x, x_row, Y, y, y_row, rows, columns):
    """Twin of ``transpose``."""
    for r in range(rows):
        for c in range(columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]


@intrinsic
def take_ticket(typing, counter):
    """counter[0] += 1, by one thread at a time; returns what it was before."""
    signature = types.int64(counter)

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, INT(1), "monotonic")

    return signature, generate


@intrinsic
def flat(typing, X, offset):
    """The memory of X from element ``offset`` on, as a line of items that X must outlive."""
    signature = types.Array(X.dtype, 1, "C")(X, types.intp)

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, arguments[0]).data
        line = context.make_array(signature.return_type)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        zero, itemsize = INT(0), INT(size)
        context.populate_array(
            line,
            data=builder.gep(data, [arguments[1]]),
            shape=[zero],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return line._getvalue()

    return signature, generate


def read_memory(numbers):
    """Read every number of a line once, with all of numba's threads."""
    return _read_memory(numbers, numba.get_num_threads(), VECTORS * lanes(numbers.itemsize))


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _read_memory(numbers, workers, width):
    rows = numbers.size // width
    largest = np.empty((workers, width), numbers.dtype)
    for worker in numba.prange(workers):
        first, last = worker * rows // workers, (worker + 1) * rows // workers
        lanes_max(numbers, first * width, last - first, VECTORS, largest[worker])
    return largest
