"""Generate LLVM's vector code: loads, stores, multiply-adds, loops, at this machine's width."""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from minimha.kernels.cpu.jit import jit_too

VECTORS = 3  # side by side in a full panel
INT = ir.IntType(64)


def host_vectors():
    """Return the width in bits of this machine's vector registers, and how many it has."""
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


@jit_too
def panel_width(itemsize):
    """Return the number of lanes of a full panel of items of ``itemsize`` bytes."""
    return VECTORS * VECTOR_BITS // (8 * itemsize)


class Vector:
    """LLVM's types for one floating dtype, and operations on them."""

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
        """Generate a · b + c, as a fused instruction if the machine has one."""
        return self.call(builder, "fmuladd", a, b, c)

    def load(self, builder, pointer, n=0):
        """Generate code that loads the n-th vector from ``pointer`` on."""
        source = builder.gep(pointer, [INT(n * self.width)])
        loaded = builder.load(builder.bitcast(source, self.type.as_pointer()))
        loaded.align = self.bits // 8
        return loaded

    def load_bfloat16(self, builder, pointer, n=0):
        """Generate code that loads the n-th vector of bfloat16 bits as float32."""
        bits = ir.VectorType(ir.IntType(16), self.width)
        source = builder.gep(pointer, [INT(n * self.width)])
        loaded = builder.load(builder.bitcast(source, bits.as_pointer()))
        loaded.align = 2
        half = ir.Constant(self.integers, [16] * self.width)
        return builder.bitcast(builder.shl(builder.zext(loaded, self.integers), half), self.type)

    def store(self, builder, value, pointer, n=0):
        """Generate code that stores ``value`` as the n-th vector from ``pointer`` on."""
        target = builder.gep(pointer, [INT(n * self.width)])
        stored = builder.store(value, builder.bitcast(target, self.type.as_pointer()))
        stored.align = self.bits // 8

    def store_lanes(self, builder, value, first, number, pointer):
        """Generate code that stores ``number`` lanes of ``value``, from lane ``first`` on."""
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
    """Generate the sum of ``terms``, a power-of-two number of vectors, pair by pair."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=True)
        terms = [builder.fadd(*pair) for pair in pairs]
    return terms[0]
