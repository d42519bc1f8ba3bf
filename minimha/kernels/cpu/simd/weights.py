"""Widen stored numbers to float32 in registers, and multiply rows of W by a few rows of x.

A *unit* is what is widened at once: a block of a quantised format, or 32 numbers that are stored
one by one. Its numbers come in *groups* with one scale and one offset, w = scale · q + offset, of
which either may be missing. What the bytes mean is in ``minimha.equations.stored``.

Addresses are integers, because rows of W may begin at any byte.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minimha.kernels.cpu.simd.dot import LINE
from minimha.kernels.cpu.simd.memory import prefetch
from minimha.kernels.cpu.simd.vector import FEATURES, INT, Vector, loop, pairwise_sum

UNIT = 32  # numbers of formats without blocks
BYTE, HALF, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
FLOAT, POINTER = ir.FloatType(), ir.IntType(8).as_pointer()
V = Vector(types.float32)
WIDTH = V.width
IS_ARM = binding.get_default_triple().startswith(("aarch64", "arm64"))
CONVERTS_HALVES = IS_ARM or "f16c" in FEATURES or "avx512f" in FEATURES


def load(builder, address, kind, offset=0):
    """Generate a load of a number or vector ``kind`` at a byte's address, aligned or not."""
    pointer = builder.gep(address, [INT(offset)])
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _all(number):
    return ir.Constant(V.integers, [number] * WIDTH)


def float_of_half(builder, bits):
    """Generate the float32, or the vector of them, equal to float16 ``bits``."""
    count = getattr(bits.type, "count", None)
    if CONVERTS_HALVES:
        kind = (ir.HalfType(), FLOAT) if count is None else (
            ir.VectorType(ir.HalfType(), count), ir.VectorType(FLOAT, count))  # fmt: skip
        return builder.fpext(builder.bitcast(bits, kind[0]), kind[1])
    words, floats = (WORD, FLOAT) if count is None else (
        ir.VectorType(WORD, count), ir.VectorType(FLOAT, count))  # fmt: skip

    def number(kind, value):
        return ir.Constant(kind, value if count is None else [value] * count)

    word = builder.zext(bits, words)
    rest = builder.shl(builder.and_(word, number(words, 0x7FFF)), number(words, 13))
    # As in ``halves.of_float16``: shifted finite numbers are 2^112 too small.
    small = builder.fmul(builder.bitcast(rest, floats), number(floats, 2.0**112))
    other = builder.or_(rest, number(words, 0x7F800000))
    is_other = builder.icmp_unsigned(">=", rest, number(words, 0x7C00 << 13))
    size = builder.select(is_other, other, builder.bitcast(small, words))
    sign = builder.shl(builder.and_(word, number(words, 0x8000)), number(words, 16))
    return builder.bitcast(builder.or_(size, sign), floats)


def _half(builder, address, offset):
    """Generate the float16 at a byte's address as float32."""
    return float_of_half(builder, load(builder, address, HALF, offset))


def _words(builder, address, offset, is_signed=False):
    """Generate a vector of integers from ``WIDTH`` bytes."""
    some = load(builder, address, ir.VectorType(BYTE, WIDTH), offset)
    return (builder.sext if is_signed else builder.zext)(some, V.integers)


def _floats(builder, words):
    return builder.sitofp(words, V.type)


def _starts(number):
    return range(0, number, WIDTH)


def _in_order(convert):
    """Return the groups of a format whose numbers are stored one by one."""

    def groups(builder, address, scales):
        return [(None, None, [convert(builder, address, n) for n in range(UNIT // WIDTH)])]

    return groups


def _of_float32(builder, address, n):
    return load(builder, address, V.type, 4 * n * WIDTH)


def _of_float16(builder, address, n):
    some = load(builder, address, ir.VectorType(HALF, WIDTH), 2 * n * WIDTH)
    return float_of_half(builder, some)


def _of_bfloat16(builder, address, n):
    some = load(builder, address, ir.VectorType(HALF, WIDTH), 2 * n * WIDTH)
    return builder.bitcast(builder.shl(builder.zext(some, V.integers), _all(16)), V.type)


def _q8_0(builder, address, scales):
    q = [_floats(builder, _words(builder, address, 2 + n, True)) for n in _starts(32)]
    return [(V.splat(builder, _half(builder, address, 0)), None, q)]


def _of_32(first, bits, has_offset):
    """Return the groups of ggml's formats with 32 numbers of 4 or 5 bits."""

    def groups(builder, address, scales):
        scale, q = V.splat(builder, _half(builder, address, 0)), []
        offset = V.splat(builder, _half(builder, address, 2)) if has_offset else None
        if bits == 5:
            fifth = load(builder, address, WORD, first - 4)
            fifth = V.splat(builder, builder.bitcast(fifth, FLOAT))
            fifth = builder.bitcast(fifth, V.integers)
        for half in (0, 1):
            for n in _starts(16):
                words = _words(builder, address, first + n)
                words = builder.lshr(words, _all(4)) if half else builder.and_(words, _all(15))
                if bits == 5:
                    shifts = [16 * half + n + lane for lane in range(WIDTH)]
                    own = builder.lshr(fifth, ir.Constant(V.integers, shifts))
                    own = builder.shl(builder.and_(own, _all(1)), _all(4))
                    words = builder.or_(words, own)
                if not has_offset:
                    words = builder.sub(words, _all(1 << (bits - 1)))
                q.append(_floats(builder, words))
        return [(scale, offset, q)]

    return groups


def _lane(builder, vector, n):
    """Generate a vector whose lanes all have the number in lane ``n`` of ``vector``."""
    pick = ir.Constant(ir.VectorType(WORD, WIDTH), [n] * WIDTH)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), pick)


def _scaled_bytes(builder, data, factor, is_signed=False):
    """Generate the numbers in the bytes of a vector, times lane n of a vector: (vector, n)."""
    words = (builder.sext if is_signed else builder.zext)(
        data, ir.VectorType(WORD, data.type.count)
    )
    floats = builder.sitofp(words, ir.VectorType(FLOAT, data.type.count))
    vector, lane = factor
    pick = ir.Constant(words.type, [lane] * data.type.count)
    return builder.fmul(floats, builder.shuffle_vector(vector, vector, pick))


def halves_at_once(builder, address, offset=0):
    """Generate eight float16 numbers as float32.

    LLVM loads one number alone into a register of which it keeps the rest, and so makes each turn
    of a loop wait for the one before.
    """
    return float_of_half(builder, load(builder, address, ir.VectorType(HALF, 8), offset))


def six_bits(builder, block):
    """Generate the scales and minima of a block of Q4_K or Q5_K as 16 bytes, in turns of four."""
    # Four scales, four minima and the upper two bits of later ones; then the lower four bits of
    # later ones, of a scale and a minimum each.
    first = load(builder, block, INT, 4)
    last = builder.zext(load(builder, block, WORD, 12), INT)
    last = builder.or_(last, builder.shl(last, INT(28)))

    def masked(word, mask):  # each of eight bytes
        return builder.and_(word, INT(mask * 0x0101010101010101))

    upper = masked(builder.lshr(first, INT(2)), 0x30)
    both = ir.Constant(ir.VectorType(INT, 2), ir.Undefined)
    for n, word in enumerate((masked(first, 63), builder.or_(masked(last, 15), upper))):
        both = builder.insert_element(both, word, WORD(n))
    return builder.bitcast(both, ir.VectorType(BYTE, 16))


def scales_and_minima(builder, block):
    """Generate the eight scales and negative minima of Q4_K and Q5_K; see ``equations.stored``."""
    both, heads, found = six_bits(builder, block), halves_at_once(builder, block), []
    for n, factor in enumerate(((heads, 0), (builder.fneg(heads), 1))):
        pick = [4 * n + x + x // 4 * 4 for x in range(8)]
        some = builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(WORD, 8), pick))
        found.append(_scaled_bytes(builder, some, factor))
    return found


def _looked_up(builder, table, words):
    """Generate the number of ``table``, of 16, that the lowest four bits of each word choose.

    A vector must have 16 lanes: one instruction then looks up all.
    """
    kind = ir.FunctionType(V.type, [V.type, V.integers])
    function = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.x86.avx512.permvar.sf.512"
    )
    return builder.call(function, [ir.Constant(V.type, table), words])


def _of_256(has_fifth):
    """Return the groups of Q4_K and Q5_K: eight of 32 numbers."""

    def groups(builder, address, scales):
        pairs, found = scales_and_minima(builder, address), []
        for n in range(8):
            q = []
            for x in _starts(32):
                words = _words(builder, address, (48 if has_fifth else 16) + n // 2 * 32 + x)
                if n % 2:
                    words = builder.lshr(words, _all(4))
                if WIDTH == 16 and not has_fifth:
                    q.append(_looked_up(builder, [float(number) for number in range(16)], words))
                    continue
                words = builder.and_(words, _all(15))
                if has_fifth:
                    own = builder.lshr(_words(builder, address, 16 + x), _all(n))
                    own = builder.shl(builder.and_(own, _all(1)), _all(4))
                    words = builder.or_(words, own)
                q.append(_floats(builder, words))
            found.append((*(_lane(builder, each, n) for each in pairs), q))
        return found

    return groups


def scales_of_q6_k(builder, address):
    """Generate the 16 scales of Q6_K, and None for minima."""
    d = load(builder, address, ir.VectorType(BYTE, 16), 192)
    head = halves_at_once(builder, address, 194)
    return _scaled_bytes(builder, d, (head, 7), is_signed=True), None


def _q6_k(builder, address, scales):
    found, bytes_32 = [], ir.VectorType(BYTE, 32)

    def each(number):
        return ir.Constant(bytes_32, [number] * 32)

    d, _ = scales_of_q6_k(builder, address)
    for n in range(8):  # pairs of groups of 16 numbers, whose bits are put together as bytes
        half, quarter = divmod(n, 4)
        low = load(builder, address, bytes_32, 64 * half + quarter % 2 * 32)
        low = builder.lshr(low, each(4)) if quarter > 1 else builder.and_(low, each(15))
        high, shift = load(builder, address, bytes_32, 128 + 32 * half), 4 - 2 * quarter
        high = builder.shl(high, each(shift)) if shift > 0 else builder.lshr(high, each(-shift))
        q = builder.sub(builder.or_(low, builder.and_(high, each(0x30))), each(32))
        for group in range(2):
            numbers = []
            for x in _starts(16):
                pick = [WORD(16 * group + x + lane) for lane in range(WIDTH)]
                some = builder.shuffle_vector(q, q, ir.Constant(ir.VectorType(WORD, WIDTH), pick))
                numbers.append(_floats(builder, builder.sext(some, V.integers)))
            found.append((_lane(builder, d, 2 * n + group), None, numbers))
    return found


def _mxfp4(builder, address, scales):
    # 2^(byte - 128), a double's exponent rounded to float32, and twice the numbers.
    exponent = builder.zext(load(builder, scales, BYTE), INT)
    exponent = builder.shl(builder.add(exponent, INT(1023 - 128)), INT(52))
    scale = builder.fptrunc(builder.bitcast(exponent, ir.DoubleType()), FLOAT)
    q, half = [], WIDTH // 2
    twice = ir.VectorType(WORD, WIDTH)
    for n in range(0, 16, half):
        some = load(builder, address, ir.VectorType(BYTE, half), n)
        pick = ir.Constant(twice, [x // 2 for x in range(WIDTH)])
        words = builder.zext(builder.shuffle_vector(some, some, pick), V.integers)
        words = builder.lshr(words, ir.Constant(V.integers, [0, 4] * half))
        q.append(_twice_fp4(builder, words))
    return [(V.splat(builder, scale), None, q)]


def _twice_fp4(builder, words):
    """Generate twice the numbers whose four bits are the lowest of ``words``."""
    if WIDTH == 16:
        sizes = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
        return _looked_up(builder, sizes + [-size for size in sizes], words)
    size = builder.and_(words, _all(7))
    # Exponents 1 to 3 become 127 to 129; the numbers 0 and 1/2 have exponent 0.
    normal = builder.add(builder.shl(size, _all(22)), _all(127 << 23))
    is_zero, is_half = (builder.icmp_unsigned("==", size, _all(n)) for n in (0, 1))
    bits = builder.select(is_half, _all(127 << 23), normal)
    bits = builder.select(is_zero, _all(0), bits)
    sign = builder.shl(builder.and_(words, _all(8)), _all(28))
    return builder.bitcast(builder.or_(bits, sign), V.type)


# For each format: the numbers and bytes of a unit, and the function that generates its groups.
UNITS = {
    "float32": (UNIT, 4 * UNIT, _in_order(_of_float32)),
    "float16": (UNIT, 2 * UNIT, _in_order(_of_float16)),
    "bfloat16": (UNIT, 2 * UNIT, _in_order(_of_bfloat16)),
    "Q8_0": (32, 34, _q8_0), "Q4_0": (32, 18, _of_32(2, 4, False)),
    "Q4_1": (32, 20, _of_32(4, 4, True)), "Q5_0": (32, 22, _of_32(6, 5, False)),
    "Q5_1": (32, 24, _of_32(8, 5, True)), "Q4_K": (256, 144, _of_256(False)),
    "Q5_K": (256, 176, _of_256(True)), "Q6_K": (256, 210, _q6_k), "MXFP4": (32, 16, _mxfp4),
}  # fmt: skip
# Formats with several groups in a unit: the function that generates their scales and offsets.
SCALED = {"Q4_K": scales_and_minima, "Q5_K": scales_and_minima, "Q6_K": scales_of_q6_k}
IN_GROUP = 32  # numbers of x with one sum, to which an offset of these formats is added


def address_of(builder, address, k, nbytes):
    return builder.gep(address, [builder.mul(k, INT(nbytes))])


def _widened(builder, groups):
    """Generate the vectors of the numbers of all ``groups``."""
    vectors = []
    for scale, offset, q in groups:
        if scale is not None:
            if offset is None:
                q = [builder.fmul(x, scale) for x in q]
            else:
                q = [V.fma(builder, x, scale, offset) for x in q]
        vectors += q
    return vectors


def widener(name):
    """Return a primitive that writes ``units`` of a row of W as float32 to an address."""
    size, nbytes, groups = UNITS[name]

    @intrinsic
    def widen(typing, row, scales, to, units):
        def generate(context, builder, signature, arguments):
            row, scales, to = (builder.inttoptr(x, POINTER) for x in arguments[:3])

            def body(k, _):
                unit, own = (address_of(builder, row, k, nbytes), address_of(builder, scales, k, 1))
                found = groups(builder, unit, own)
                target = builder.bitcast(address_of(builder, to, k, 4 * size), FLOAT.as_pointer())
                for n, vector in enumerate(_widened(builder, found)):
                    V.store(builder, vector, target, n)
                return []

            loop(builder, arguments[3], 1, [], body)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i), generate

    return widen


def sum_of(builder, vector):
    kind = ir.FunctionType(FLOAT, [FLOAT, vector.type])
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [ir.Constant(FLOAT, -0.0), vector], fastmath=("reassoc",))


def prefetch_ahead(builder, address, ahead, nbytes):
    """Generate prefetches of ``nbytes`` bytes, ``ahead`` bytes after an address."""
    at = builder.gep(address, [ahead])
    for n in range(0, nbytes, LINE):
        prefetch(builder, builder.gep(at, [INT(n)]), 2)


def row_product(name, queries):
    """Return a primitive that multiplies ``units`` of a row of W by one or two rows of x.

    The rows of x are packed: a unit of each, side by side. With one row of x, a group with a scale
    is summed before the sum is multiplied by the scale, unless the group has an offset. Formats in
    ``SCALED`` have their offsets multiplied by the sums of groups of x, which are float32 at
    ``sums``. Their scales are first written to ``room``, because a number in memory is read into
    all lanes at once. What lies ``ahead`` bytes later is prefetched.
    """
    size, nbytes, groups = UNITS[name]
    together = max(1, 4 * UNIT // (size * queries))  # units per step
    chains, scales_of = 4 // queries, SCALED.get(name) if queries == 1 else None
    eight = ir.VectorType(FLOAT, 8)

    @intrinsic
    def product(typing, row, scales, x, sums_of_x, room, units, ahead):
        def generate(context, builder, signature, arguments):
            row, scales, x, sums_of_x, room = (
                builder.inttoptr(value, POINTER) for value in arguments[:5]
            )
            units, ahead = arguments[5:]
            full = builder.and_(units, INT(-together))

            def place(unit, number):
                """Generate the address of the scales of a unit with ``number`` groups."""
                return address_of(builder, room, unit, 4 * number)

            def write_scales(unit, sums):
                factors, offsets = scales_of(builder, address_of(builder, row, unit, nbytes))
                to = place(unit, factors.type.count)
                stored = builder.store(factors, builder.bitcast(to, factors.type.as_pointer()))
                stored.align = 4
                if offsets is None:
                    return sums
                own = load(builder, address_of(builder, sums_of_x, unit, 4 * 8), eight)
                product = builder.fmul(offsets, own, ("contract",))
                return [builder.fadd(product, sums[0], ("contract",))]

            def steps(number, first):
                def body(k, sums):
                    sums, turn = list(sums), 0
                    some = address_of(builder, row, builder.add(first, k), nbytes)
                    prefetch_ahead(builder, some, ahead, number * nbytes)
                    for u in range(number):
                        unit = builder.add(builder.add(first, k), INT(u))
                        at = address_of(builder, row, unit, nbytes)
                        found = groups(builder, at, address_of(builder, scales, unit, 1))
                        if scales_of:
                            at = place(unit, len(found))
                            found = [
                                (V.splat(builder, load(builder, at, FLOAT, 4 * g)), None, q)
                                for g, (_, _, q) in enumerate(found)
                            ]
                        at = address_of(builder, x, unit, 4 * size * queries)
                        at = builder.bitcast(at, FLOAT.as_pointer())
                        n = 0
                        for group in found:
                            is_late = queries == 1 and group[0] is not None and group[1] is None
                            vectors = group[2] if is_late else _widened(builder, [group])
                            part = None
                            for vector in vectors:
                                for g in range(queries):
                                    other = V.load(builder, at, g * size // WIDTH + n)
                                    slot = g * chains + turn % chains
                                    if is_late and part is None:
                                        part = builder.fmul(vector, other)
                                    elif is_late:
                                        part = V.fma(builder, vector, other, part)
                                    else:
                                        sums[slot] = V.fma(builder, vector, other, sums[slot])
                                n += 1
                                turn += not is_late
                            if is_late:
                                slot = turn % chains
                                sums[slot] = V.fma(builder, part, group[0], sums[slot])
                                turn += 1
                    return sums

                return body

            if scales_of:
                (rest,) = loop(builder, units, 1, [ir.Constant(eight, [0.0] * 8)], write_scales)
            sums = [V.constant(0.0)] * (queries * chains)
            sums = loop(builder, full, together, sums, steps(together, INT(0)))
            if together > 1:
                sums = loop(builder, builder.sub(units, full), 1, sums, steps(1, full))
            totals = [
                sum_of(builder, pairwise_sum(builder, sums[g * chains : (g + 1) * chains]))
                for g in range(queries)
            ]
            if scales_of:
                totals[0] = builder.fadd(totals[0], sum_of(builder, rest))
            return context.make_tuple(builder, signature.return_type, totals)

        i = types.int64
        return types.UniTuple(types.float32, queries)(i, i, i, i, i, i, i), generate

    return product


def block_product(rows, queries):
    """Return a primitive that computes C[g, r] = W[r] · x[g], for widened W and packed x.

    W has ``rows`` rows and x has ``queries``, each of ``units`` units of 32 numbers. Rows of W are
    ``row`` bytes apart, and rows of C ``c_row`` bytes.
    """

    @intrinsic
    def product(typing, W, row, x, C, c_row, units):
        def generate(context, builder, signature, arguments):
            W, row, x, C, c_row, units = arguments
            W, x, C = (builder.inttoptr(value, POINTER) for value in (W, x, C))
            lines = [builder.gep(W, [builder.mul(INT(r), row)]) for r in range(rows)]
            tile = [(g, r) for g in range(queries) for r in range(rows)]

            def body(k, sums):
                own = [
                    builder.bitcast(address_of(builder, line, k, 4 * UNIT), FLOAT.as_pointer())
                    for line in lines
                ]
                at = address_of(builder, x, k, 4 * UNIT * queries)
                at = builder.bitcast(at, FLOAT.as_pointer())
                for n in range(UNIT // WIDTH):
                    left = [V.load(builder, line, n) for line in own]
                    new = []
                    for g in range(queries):
                        right = V.load(builder, at, g * UNIT // WIDTH + n)
                        new += [
                            V.fma(builder, x, right, sums[g * rows + r]) for r, x in enumerate(left)
                        ]
                    sums = new
                return sums

            sums = loop(builder, units, 1, [V.constant(0.0)] * len(tile), body)
            for (g, r), total in zip(tile, sums, strict=True):
                to = builder.gep(C, [builder.add(builder.mul(INT(g), c_row), INT(4 * r))])
                to = builder.bitcast(to, FLOAT.as_pointer())
                builder.store(sum_of(builder, total), to, align=4)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i), generate

    return product


def _array_at(item):
    """Return a primitive that views the memory at an address as items of a type."""

    @intrinsic
    def view(typing, address):
        kind = types.Array(item, 1, "C")

        def generate(context, builder, signature, arguments):
            array = context.make_array(kind)(context, builder)
            data = context.get_data_type(item).as_pointer()
            context.populate_array(
                array, data=builder.inttoptr(arguments[0], data), shape=[INT(0)],
                strides=[INT(kind.dtype.bitwidth // 8)], itemsize=INT(kind.dtype.bitwidth // 8),
                meminfo=None,
            )  # fmt: skip
            return array._getvalue()

        return kind(types.int64), generate

    return view


floats_at, integers_at, bytes_at = map(_array_at, (types.float32, types.int64, types.uint8))
halves_at, words_at, doubles_at = map(_array_at, (types.uint16, types.uint32, types.float64))


def splitter(parts):
    """Return a primitive that splits each number of ``units`` into ``parts`` bfloat16 numbers.

    A unit has 32 numbers. The first parts of all numbers come first; the second parts begin
    ``part`` bytes later, and so on. All parts but the last are truncated, which keeps signs. The
    last one is rounded to nearest, ties to even. Three parts are exact.
    """

    @intrinsic
    def split(typing, x, to, part, units):
        def generate(context, builder, signature, arguments):
            x, to = (builder.inttoptr(value, POINTER) for value in arguments[:2])
            part, units = arguments[2:]

            def rounded(vector):
                words = builder.bitcast(vector, V.integers)
                odd = builder.and_(builder.lshr(words, _all(16)), _all(1))
                nearest = builder.add(words, builder.add(odd, _all(0x7FFF)))
                is_nan = builder.fcmp_unordered("uno", vector, vector)
                return builder.select(is_nan, _all(0x7FC00000), nearest)

            def body(k, _):
                source = builder.bitcast(address_of(builder, x, k, 4 * UNIT), FLOAT.as_pointer())
                target = address_of(builder, to, k, 2 * UNIT)
                for n in range(UNIT // WIDTH):
                    rest = V.load(builder, source, n)
                    for p in range(parts):
                        is_last = p + 1 == parts
                        words = rounded(rest) if is_last else builder.bitcast(rest, V.integers)
                        some = builder.trunc(
                            builder.lshr(words, _all(16)), ir.VectorType(HALF, WIDTH)
                        )
                        place = builder.add(builder.mul(part, INT(p)), INT(2 * WIDTH * n))
                        at = builder.gep(target, [place])
                        builder.store(some, builder.bitcast(at, some.type.as_pointer()), align=2)
                        first = builder.and_(words, _all(0xFFFF0000))
                        rest = builder.fsub(rest, builder.bitcast(first, V.type))
                return []

            loop(builder, units, 1, [], body)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i), generate

    return split


@intrinsic
def prefetch_bytes(typing, address, number):
    """Prefetch ``number`` bytes from an address on into the L2 cache."""

    def generate(context, builder, signature, arguments):
        start = builder.inttoptr(arguments[0], POINTER)

        def body(k, _):
            prefetch(builder, builder.gep(start, [k]), 2)
            return []

        loop(builder, arguments[1], LINE, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
