"""Generate LLVM code for loads, stores, multiply-adds and loops of this CPU's vectors."""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from minimha.kernels.cpu.jit import jit_too

VECTORS = 3  # side by side in a full panel
INT = ir.IntType(64)


def host_vectors():
    """Return the width in bits and the number of this machine's vector registers."""
    if "avx512f" in FEATURES:
        return 512, 32
    if {"avx2", "fma"} <= FEATURES:
        return 256, 16
    return 128, 32 if binding.get_default_triple().startswith(("aarch64", "arm64")) else 16


# LLVM's names of the target's features, which numba's settings may change. They are part of the
# digest of machine code on disk.
_, _, _signed = cpu_target.target_context.codegen().magic_tuple()
FEATURES = {name[1:] for name in _signed.split(",") if name.startswith("+")}
VECTOR_BITS, REGISTERS = host_vectors()
MULTIPLIES_PAIRS = VECTOR_BITS == 512 and "avx512bf16" in FEATURES
MULTIPLIES_BYTES = VECTOR_BITS == 512 and "avx512vnni" in FEATURES
if MULTIPLIES_PAIRS or MULTIPLIES_BYTES:
    binding.initialize_native_asmparser()  # for ``Vector.add_pairs``, and sums of bytes' products


@jit_too
def panel_width(itemsize):
    """Return the number of lanes of a full panel, three vectors of ``itemsize``-byte items."""
    return VECTORS * VECTOR_BITS // (8 * itemsize)


class Vector:
    """LLVM's vector types for one floating dtype, with methods that generate operations."""

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
        """Generate a call of LLVM's elementwise intrinsic ``name``."""
        kind = ir.FunctionType(self.type, [self.type] * len(arguments))
        function = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.{name}.{self.suffix}"
        )
        return builder.call(function, arguments)

    def fma(self, builder, a, b, c):
        """Generate a · b + c, as one fused instruction if this CPU has it."""
        return self.call(builder, "fmuladd", a, b, c)

    def add_pairs(self, builder, a, b, c):
        """Generate c + a · b, where each lane of a and b has the bits of two bfloat16 numbers.

        Numbers below the smallest normal number, 2^-126, count as 0.
        """
        kind = ir.FunctionType(self.type, [self.type] * 3)
        return builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", (a, b, c), False)

    def splat_pair(self, builder, pointer):
        """Generate a vector with the two bfloat16 numbers at ``pointer`` in each lane.

        LLVM would choose ``vbroadcastss``, after which an AMD Zen 4 multiplies pairs at 0.7 times
        the rate.
        """
        kind = ir.FunctionType(self.type, [pointer.type])
        return builder.asm(kind, "vpbroadcastd ($1), $0", "=v,r,~{memory}", (pointer,), False)

    def load(self, builder, pointer, n=0):
        """Generate code that loads vector n, counted from ``pointer``."""
        source = builder.gep(pointer, [INT(n * self.width)])
        loaded = builder.load(builder.bitcast(source, self.type.as_pointer()))
        loaded.align = self.bits // 8
        return loaded

    def load_bfloat16(self, builder, pointer, n=0):
        """Generate code that loads vector n of bfloat16 bits, and widens it to float32."""
        bits = ir.VectorType(ir.IntType(16), self.width)
        source = builder.gep(pointer, [INT(n * self.width)])
        loaded = builder.load(builder.bitcast(source, bits.as_pointer()))
        loaded.align = 2
        half = ir.Constant(self.integers, [16] * self.width)
        return builder.bitcast(builder.shl(builder.zext(loaded, self.integers), half), self.type)

    def _load_bytes(self, builder, pointer, n, number=1):
        bits = ir.VectorType(ir.IntType(8), number * self.width)
        source = builder.gep(pointer, [INT(n * self.width)])
        loaded = builder.load(builder.bitcast(source, bits.as_pointer()))
        loaded.align = 1
        return loaded

    def load_int8(self, builder, pointer, n=0):
        """Generate code that loads vector n of int8 numbers, and converts it to float32."""
        return builder.sitofp(self._load_bytes(builder, pointer, n), self.type)

    def load_float8s(self, builder, pointer, number):
        """Generate code that loads ``number`` vectors of float8_e4m3fn bits, 1 or an even number.

        Returns float32 numbers that are 2^8 times too small, like ``halves.of_float8``. Read as the
        bits of float16, the numbers are so, since the exponent's bias is 15 instead of 7. The CPU
        then widens them, subnormal ones too. Two vectors together take fewer instructions.
        """
        if "f16c" not in FEATURES:
            loaded = [self._load_bytes(builder, pointer, n) for n in range(number)]
            return [self._widen_float8(builder, builder.zext(x, self.integers)) for x in loaded]
        together, found = min(2, number), []
        lanes = together * self.width
        halves, words = (ir.VectorType(x, lanes) for x in (ir.IntType(16), ir.HalfType()))
        parts = ir.VectorType(ir.IntType(32), self.width)

        def all_(bits):
            return ir.Constant(halves, [bits] * lanes)

        for n in range(0, number, together):
            loaded = builder.sext(self._load_bytes(builder, pointer, n, together), halves)
            bits = builder.and_(builder.shl(loaded, all_(7)), all_(0xBF80))  # with one sign
            is_nan = builder.icmp_unsigned("==", builder.and_(bits, all_(0x3F80)), all_(0x3F80))
            numbers = builder.bitcast(builder.select(is_nan, all_(0x7E00), bits), words)
            for first in range(0, lanes, self.width):
                pick = ir.Constant(parts, [first + lane for lane in range(self.width)])
                part = builder.shuffle_vector(numbers, numbers, pick)
                found.append(builder.fpext(part, self.type))
        return found

    def _widen_float8(self, builder, words):
        """Generate code for ``halves.of_float8`` of every lane."""

        def all_(number):
            return ir.Constant(self.integers, [number] * self.width)

        size = builder.and_(words, all_(0x7F))
        normal = builder.add(builder.shl(size, all_(20)), all_(112 << 23))
        small = builder.fmul(builder.uitofp(size, self.type), self.constant(2.0**-17))
        is_small = builder.icmp_unsigned("<", size, all_(8))
        bits = builder.select(is_small, builder.bitcast(small, self.integers), normal)
        is_nan = builder.icmp_unsigned("==", size, all_(0x7F))
        bits = builder.select(is_nan, all_(0x7FC00000), bits)
        sign = builder.shl(builder.and_(words, all_(0x80)), all_(24))
        return builder.bitcast(builder.or_(bits, sign), self.type)

    def store(self, builder, value, pointer, n=0):
        """Generate code that stores ``value`` as vector n, counted from ``pointer``."""
        target = builder.gep(pointer, [INT(n * self.width)])
        stored = builder.store(value, builder.bitcast(target, self.type.as_pointer()))
        stored.align = self.bits // 8

    def store_lanes(self, builder, value, first, number, pointer):
        """Generate code that stores lanes ``first`` to ``first`` + ``number`` - 1 of ``value``."""
        lane = ir.IntType(32)
        picks = ir.Constant(ir.VectorType(lane, number), [lane(first + x) for x in range(number)])
        part = builder.shuffle_vector(value, value, picks)
        stored = builder.store(part, builder.bitcast(pointer, part.type.as_pointer()))
        stored.align = self.bits // 8

    def splat(self, builder, scalar):
        """Generate a vector with ``scalar`` in every lane."""
        undefined = ir.Constant(self.type, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return builder.shuffle_vector(first, undefined, zeros)


def pointer_to(context, builder, kind, array, offset):
    """Generate a pointer to element ``offset`` of ``array``, whose numba type is ``kind``."""
    data = context.make_array(kind)(context, builder, array).data
    item = context.get_data_type(kind.dtype)
    return builder.gep(builder.bitcast(data, item.as_pointer()), [offset])


def loop(builder, stop, step, initial, body):
    """Generate ``for k in range(0, stop, step): values = body(k, values)``; return the values."""
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


def pairwise_sum(builder, terms):
    """Generate the pairwise sum of ``terms``, a list of 1, 2, 4, … vectors."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=True)
        terms = [builder.fadd(*pair) for pair in pairs]
    return terms[0]
