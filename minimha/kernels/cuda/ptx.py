"""Provide PTX instructions that numba lacks, each as a function for CUDA kernels.

An intrinsic is one PTX instruction and has its name: ``ld.global.nc.v4.f32`` becomes
``ld_global_nc_v4_f32(address)``. ``instruction`` creates intrinsics: LLVM pastes the text into the
program, where ``$0, $1, …`` are first the results, then the operands. An intrinsic with several
results returns a tuple, which exists only while compiling: each item is a register.

Addresses are integers. They have 64 bits for global memory. For shared memory they have 32 bits and
count bytes from the start of the block's window (``shared_address``). A vector access (v2, v4)
needs an address that is a multiple of its size.

A register of 32 bits holds two 16-bit numbers, or one in its lower half. Of two numbers, the one
with the lower column or address is in the lower half.

NVIDIA, "PTX ISA", version 9.0: https://docs.nvidia.com/cuda/parallel-thread-execution. Numbers in
the comments are its sections.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

# The letters of register types in inline assembly.
REGISTER = {
    types.uint16: "h", types.uint32: "r", types.int32: "r", types.uint64: "l", types.int64: "l",
    types.float32: "f",
}  # fmt: skip
u16, u32, i32, u64, i64, f32 = REGISTER
Types = tuple[Any, ...]


def instruction(
    text: str,
    results: Types = (),
    operands: Types = (),
    *,
    has_effects: bool = False,
    is_collective: bool = False,
) -> Any:
    """Return an intrinsic, a function for CUDA kernels that executes one PTX instruction.

    In ``text``, ``$0, $1, …`` are first the results, then the operands. Arguments are converted to
    the operands' types. Set ``has_effects`` for an instruction that writes memory, or reads memory
    that others write: the compiler does not remove such instructions or change their order. Set
    ``is_collective`` if all threads of a warp execute the instruction together: the compiler does
    not move such instructions into or out of a branch.
    """
    paste = _paste(text, results, operands, has_effects, is_collective)
    if len(results) > 1:
        returned = types.UniTuple(results[0], len(results))
    else:
        returned = results[0] if results else types.void

    def generate(context, builder, signature, values):
        numbers = paste(context, builder, values)
        if len(results) > 1:
            return context.make_tuple(builder, signature.return_type, numbers)
        return numbers[0] if results else context.get_dummy_value()

    def typed(context, *given):
        return returned(*operands), generate

    names = ["context", *(f"operand{i}" for i in range(len(operands)))]
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # numba reads the number of arguments from the signature.
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, either) for name in names]
    )
    typed.__name__ = text.split()[0].replace(".", "_").rstrip(";")
    return intrinsic(typed)


def _paste(
    text: str,
    results: Types,
    operands: Types,
    has_effects: bool,
    is_collective: bool,
    in_place: int = 0,
) -> Callable[..., list[Any]]:
    """Return a function that inserts the instruction into the program and returns its results.

    The first ``in_place`` operands share the registers of the first results.
    """
    letters = [f"={REGISTER[t]}" for t in results] + [str(i) for i in range(in_place)]
    letters += [REGISTER[t] for t in operands[in_place:]]
    constraints = ",".join([*letters, "~{memory}"] if has_effects else letters)
    attributes = ("convergent", "nounwind") if is_collective else ("nounwind",)

    def paste(context, builder, values):
        kinds = [context.get_value_type(t) for t in results]
        kind = ir.LiteralStructType(kinds) if len(kinds) > 1 else [*kinds, ir.VoidType()][0]
        function = ir.FunctionType(kind, [value.type for value in values])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=has_effects)
        result = builder.call(assembly, values, attrs=attributes)
        if len(results) > 1:
            return [builder.extract_value(result, i) for i in range(len(results))]
        return [result] if results else []

    return paste


def _places(context: Any, builder: Any, array: Any, values: Any, count: int) -> list[Any]:
    """Generate pointers to ``count`` items of a local array; ``values`` are array, first item."""
    data = context.make_array(array)(context, builder, values[0]).data
    ahead = [ir.Constant(ir.IntType(64), i) for i in range(count)]
    return [builder.gep(data, [builder.add(values[1], i)]) for i in ahead]


def _width(operation: str) -> int:
    """Return the number of values of a load or store, such as 4 for ``ld.global.v4.f32``."""
    return next((int(part[1]) for part in operation.split(".") if part in ("v2", "v4")), 1)


def _registers(first: int, count: int) -> str:
    """Return the text for ``count`` registers: ``$2`` or, for several, ``{$2, $3}``."""
    names = ", ".join(f"${i}" for i in range(first, first + count))
    return names if count == 1 else f"{{{names}}}"


def _load(operation: str, register: Any, has_effects: bool = True) -> Any:
    """Return the intrinsic ``operation(address)``, which loads a number or a tuple of numbers."""
    count, address = _width(operation), u32 if ".shared." in operation else u64
    text = f"{operation} {_registers(0, count)}, [${count}];"
    return instruction(text, (register,) * count, (address,), has_effects=has_effects)


def _store(operation: str, register: Any) -> Any:
    """Return the intrinsic ``operation(address, number, …)``, which stores numbers."""
    count, address = _width(operation), u32 if ".shared." in operation else u64
    text = f"{operation} [$0], {_registers(1, count)};"
    return instruction(text, (), (address, *(register,) * count), has_effects=True)


# 9.7.9, ld.global.nc: load constant global memory through the cache for read-only data. (address:
# u64) -> one number, or a tuple. Bytes become 32 bits.
ld_global_nc_f32 = _load("ld.global.nc.f32", f32, has_effects=False)
ld_global_nc_v2_f32 = _load("ld.global.nc.v2.f32", f32, has_effects=False)
ld_global_nc_v4_f32 = _load("ld.global.nc.v4.f32", f32, has_effects=False)
ld_global_nc_u32 = _load("ld.global.nc.u32", u32, has_effects=False)
ld_global_nc_v2_u32 = _load("ld.global.nc.v2.u32", u32, has_effects=False)
ld_global_nc_v4_u32 = _load("ld.global.nc.v4.u32", u32, has_effects=False)
ld_global_nc_u8 = _load("ld.global.nc.u8", u32, has_effects=False)
ld_global_nc_s64 = _load("ld.global.nc.s64", i64, has_effects=False)

# 9.7.9, ld: load global memory that this kernel also writes, in program order.
ld_global_f32 = _load("ld.global.f32", f32)
ld_global_u32 = _load("ld.global.u32", u32)
ld_global_u8 = _load("ld.global.u8", u32)
ld_global_s64 = _load("ld.global.s64", i64)

# 9.7.9, st: store to global memory. (address: u64, number, …)
st_global_f32 = _store("st.global.f32", f32)
st_global_v2_f32 = _store("st.global.v2.f32", f32)
st_global_v4_f32 = _store("st.global.v4.f32", f32)
st_global_u32 = _store("st.global.u32", u32)
st_global_v4_u32 = _store("st.global.v4.u32", u32)
st_global_b16 = _store("st.global.b16", u16)

# 9.7.9, ld, st: load, store shared memory. (address: u32) -> numbers; (address: u32, number, …)
ld_shared_f32 = _load("ld.shared.f32", f32)
ld_shared_v2_f32 = _load("ld.shared.v2.f32", f32)
ld_shared_v4_f32 = _load("ld.shared.v4.f32", f32)
ld_shared_u32 = _load("ld.shared.u32", u32)
ld_shared_v4_u32 = _load("ld.shared.v4.u32", u32)
st_shared_f32 = _store("st.shared.f32", f32)
st_shared_v4_f32 = _store("st.shared.v4.f32", f32)
st_shared_u32 = _store("st.shared.u32", u32)
st_shared_v4_u32 = _store("st.shared.v4.u32", u32)

# 9.7.13, red: an atomic bitwise or into shared memory. (address: u32, bits: u32)
red_shared_or_u32 = instruction("red.shared.or.b32 [$0], $1;", (), (u32, u32), has_effects=True)

# 9.7.3, ex2, lg2 and rcp: 2 ** x, which is 0 for -inf; the logarithm to base 2, -inf for 0; 1 / x,
# 0 for inf. Their relative errors are about 2 ** -22. Numbers below the normal range count as 0.
ex2_approx = instruction("ex2.approx.ftz.f32 $0, $1;", (f32,), (f32,))
lg2_approx = instruction("lg2.approx.ftz.f32 $0, $1;", (f32,), (f32,))
rcp_approx = instruction("rcp.approx.ftz.f32 $0, $1;", (f32,), (f32,))


def _shuffle(mode: str) -> Any:
    # The last lane of the exchange is 31, and the mask has all 32 lanes.
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, 0xffffffff;"
    return instruction(text, (f32,), (f32, i32), has_effects=True, is_collective=True)


# 9.7.9, shfl.sync: read the number of another lane. (number, lane) -> number; with ``bfly`` that of
# lane (own lane ^ bits). (number, bits) -> number
shfl_idx_f32 = _shuffle("idx")
shfl_bfly_f32 = _shuffle("bfly")

# 9.7.9, cvt: round two float32 (first, second) into one register, the first into the lower half.
# PTX names the upper half first.
pack_f16x2 = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", (u32,), (f32, f32))
pack_bf16x2 = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", (u32,), (f32, f32))

# 9.7.9, mov: split a register into halves, the lower one first, or view its bits as float32.
split_b32 = instruction("mov.b32 {$0, $1}, $2;", (u16, u16), (u32,))
bits_as_f32 = instruction("mov.b32 $0, $1;", (f32,), (u32,))
f32_as_bits = instruction("mov.b32 $0, $1;", (u32,), (f32,))

# 9.7.9, cvt: widen a float16, given by its bits.
cvt_f32_f16 = instruction("cvt.f32.f16 $0, $1;", (f32,), (u16,))

# 9.7.9, mov: copy a number, which hides its value from the compiler. So dependent numbers are
# computed where the program says, not ahead of a loop, which would keep them in registers.
optimization_barrier = instruction("mov.b32 $0, $1;", (i32,), (i32,), has_effects=True)


def cp_async(size: int) -> Any:
    """Return an intrinsic that copies 4, 8 or 16 bytes from global to shared memory.

    Section 9.7.9. The arguments are the shared address (u32), the global address (u64), both
    multiples of ``size``, and a number of bytes (u32). That many bytes are read, and the rest of
    the ``size`` bytes becomes 0. The copy bypasses registers. After a wait for its group, the
    waiting thread sees it; after a later barrier, other threads do.
    """
    cache = "cg" if size == 16 else "ca"  # cg, which bypasses the L1 cache too, copies 16 bytes
    text = f"cp.async.{cache}.shared.global [$0], [$1], {size}, $2;"
    return instruction(text, (), (u32, u64, u32), has_effects=True)


cp_async_commit_group = instruction("cp.async.commit_group;", has_effects=True)


# Wait for all copies of this thread, in groups or not.
cp_async_wait_all = instruction("cp.async.wait_all;", has_effects=True)


def cp_async_wait_group(pending: int) -> Any:
    """Return an intrinsic that waits until at most ``pending`` groups of copies are in flight."""
    return instruction(f"cp.async.wait_group {pending};", has_effects=True)


def _matrices(transposed: str) -> Any:
    text = f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {_registers(0, 4)}, [$4];"
    paste = _paste(text, (u32,) * 4, (u32,), has_effects=True, is_collective=True)

    @intrinsic
    def load_matrices(context, X, first, address):
        def generate(context, builder, signature, values):
            places = _places(context, builder, signature.args[0], values[:2], 4)
            for place, number in zip(places, paste(context, builder, values[2:]), strict=True):
                builder.store(number, place)
            return context.get_dummy_value()

        return types.void(X, i64, u32), generate

    return load_matrices


# 9.7.14, ldmatrix: load four matrices of 8 × 8 16-bit numbers from shared memory, a register each.
# (array, first, address: u32): they become items first to first + 3 of a local array of uint32.
# Lanes 8r to 8r + 7 pass the addresses of the 8 rows of matrix r, 16 bytes each. Lane t receives
# columns c and c + 1 of row t // 4 of every matrix, with c = 2 (t % 4). With ``trans`` it receives
# rows c and c + 1 of column t // 4.
ldmatrix_x4 = _matrices("")
ldmatrix_x4_trans = _matrices(".trans")


def _multiply_add(dtype: str) -> tuple[Any, Any]:
    """Return ``mma`` with registers as operands, and ``mma`` with local arrays as operands."""
    operation = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    D, A, B, C = _registers(0, 4), _registers(4, 4), _registers(8, 2), _registers(10, 4)
    form = (f"{operation} {D}, {A}, {B}, {C};", (f32,) * 4, (*(u32,) * 6, *(f32,) * 4))
    paste = _paste(*form, has_effects=False, is_collective=True)

    @intrinsic
    def multiply_add(context, C, c, A, a, B, b):
        def generate(context, builder, signature, values):
            C_at, A_at, B_at = (
                _places(context, builder, signature.args[x], values[x : x + 2], count)
                for x, count in ((0, 4), (2, 4), (4, 2))
            )
            numbers = [builder.load(place) for place in (*A_at, *B_at, *C_at)]
            for place, number in zip(C_at, paste(context, builder, numbers), strict=True):
                builder.store(number, place)
            return context.get_dummy_value()

        return types.void(C, i64, A, i64, B, i64), generate

    return instruction(*form, is_collective=True), multiply_add


# 9.7.14, mma.sync: D = A B + C with A (16, 16), B (16, 8), C and D (16, 8), spread over a warp.
# (a0, a1, a2, a3, b0, b1: u32, c0, c1, c2, c3: f32) -> (d0, d1, d2, d3). With g = lane // 4 and
# c = 2 (lane % 4) lane holds
#   a0 = A[g, c:c+2], a1 = A[g + 8, c:c+2], a2 = A[g, c+8:c+10], a3 = A[g + 8, c+8:c+10],
#   b0 = B[c:c+2, g], b1 = B[c+8:c+10, g],
#   c0, c1 = C[g, c:c+2], c2, c3 = C[g + 8, c:c+2], and D as C.
# So ``ldmatrix_x4`` of a row-major A is a0 … a3 if its matrices are read in that order, and D,
# packed, is half of an A.
# The other form takes local arrays (C, c, A, a, B, b): items of C, float32, from c on become D.
# Items of A and B, uint32, from a and b on are the factors. Many unrolled products compile much
# faster in this form.
mma_f16, mma_f16_in = _multiply_add("f16")
mma_bf16, mma_bf16_in = _multiply_add("bf16")


# 9.7.13, fence.proxy.async: ``wgmma`` reads shared memory by a separate path (a proxy). The fence
# makes writes and awaited copies of this thread visible to ``wgmma``, after a barrier also others'.
fence_proxy_async = instruction("fence.proxy.async.shared::cta;", has_effects=True)


# 9.7.13, mbarrier: a barrier in 8 bytes of shared memory; arriving and waiting are separate. A
# phase completes after ``arrivals`` arrivals, and the next phase expects the same number.
# (address: u32, arrivals: u32); (address: u32)
mbarrier_init = instruction(
    "mbarrier.init.shared::cta.b64 [$0], $1;", (), (u32, u32), has_effects=True
)
mbarrier_arrive = instruction(
    "{ .reg .b64 %state; mbarrier.arrive.shared::cta.b64 %state, [$0]; }",
    (), (u32,), has_effects=True,
)  # fmt: skip

# Arrive by copies: this thread arrives when all ``cp.async`` that it has executed are complete.
cp_async_mbarrier_arrive_noinc = instruction(
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", (), (u32,), has_effects=True
)

# Test whether the phase of that parity is complete, possibly after a short wait: 0 if it is not.
# (address: u32, parity: u32). Phases are counted from 0, and phase -1 counts as complete. After
# completion, earlier writes of the threads that arrived are visible.
mbarrier_try_wait = instruction(
    "{ .reg .pred %is_over; mbarrier.try_wait.parity.shared::cta.b64 %is_over, [$1], $2; "
    "selp.u32 $0, 1, 0, %is_over; }",
    (u32,), (u32, u32), has_effects=True,
)  # fmt: skip


def setmaxnreg(direction: str, count: int) -> Any:
    """Return an intrinsic that changes the number of registers of each thread to ``count``.

    ``direction`` is "dec" to give registers back, or "inc" to wait until enough are free.
    """
    text = f"setmaxnreg.{direction}.sync.aligned.u32 {count};"
    return instruction(text, has_effects=True, is_collective=True)


def bar_sync(number: int, threads: int) -> Any:
    """Return an intrinsic that waits for ``threads`` threads at the barrier ``number``, 1 to 15."""
    return instruction(f"bar.sync {number}, {threads};", has_effects=True, is_collective=True)


# 9.7.9, st: store to shared memory if the number is negative. (address: u32, number). For a number
# that is never negative, which the compiler cannot know, this costs two instructions and keeps an
# order: ptxas moves ``wgmma.wait_group`` ahead of independent arithmetic, but not of a store.
st_shared_f32_if_negative = instruction(
    "{ .reg .pred %is_less; setp.lt.f32 %is_less, $1, 0f00000000; "
    "@%is_less st.shared.f32 [$0], $1; }",
    (), (u32, f32), has_effects=True,
)  # fmt: skip


def _first_items(context: Any, builder: Any, array: Any, D: Any, count: int) -> list[Any]:
    first = ir.Constant(ir.IntType(64), 0)
    return _places(context, builder, array, (D, first), count)


def wgmma_wait_group(pending: int, count: int) -> Any:
    """Return an intrinsic that waits for all but the last ``pending`` groups of ``wgmma``.

    Its argument D is a local array of ``count`` float32, which one of the completed groups writes.
    As D is an operand, the compiler does not access D earlier.
    """
    numbers = (f32,) * count
    paste = _paste(
        f"wgmma.wait_group.sync.aligned {pending};", numbers, numbers, True, True, in_place=count
    )

    @intrinsic
    def wait(context, D):
        def generate(context, builder, signature, values):
            places = _first_items(context, builder, signature.args[0], values[0], count)
            _store_all(builder, paste(context, builder, _load_all(builder, places)), places)
            return context.get_dummy_value()

        return types.void(D), generate

    return wait


def _load_all(builder: Any, places: list[Any]) -> list[Any]:
    return [builder.load(place) for place in places]


def _store_all(builder: Any, numbers: list[Any], places: list[Any]) -> None:
    for number, place in zip(numbers, places, strict=True):
        builder.store(number, place)


def _wgmma_group(products: list[str]) -> str:
    """Join ``wgmma`` instructions to one text, so that no other code accesses their registers.

    The fence orders the group after earlier accesses. In ``products`` %no and %yes are predicates,
    %a and %b descriptors.
    """
    lines = [
        "{ .reg .pred %no, %yes; .reg .b64 %a, %b; setp.ne.b32 %no, 0, 0; setp.eq.b32 %yes, 0, 0;",
        "wgmma.fence.sync.aligned;", *products, "wgmma.commit_group.sync.aligned; }",
    ]  # fmt: skip
    return " ".join(lines)


# 9.7.15, wgmma.mma_async: start D = A B or D = A B + D, with A (64, 16), B (16, N) and D (64, N),
# by the four warps of a warpgroup together. Warp w holds rows 16 w to 16 w + 15 of D, and of A if A
# is in registers, in the layout of ``mma``: D is N / 8 matrices C side by side. A descriptor of 64
# bits has the start and the layout of a matrix in shared memory (9.7.15.5). Both functions below
# start several products, which are added up, as one group.


def wgmma_shared(dtype: str, N: int, steps: list[tuple[int, int]]) -> Any:
    """Return an intrinsic that starts D = A B on the tensor cores, with A and B in shared memory.

    Its arguments are D, a local array of float32, and the descriptors a and b of A and B. B and D
    have N columns. The product is a sum over ``steps``: step (x, y) reads A at descriptor a + x and
    B at b + y. Rows of 16 numbers are contiguous in A and in the transpose of B.
    """
    count = N // 2
    D, a, b = _registers(0, count), f"${count}", f"${count + 1}"
    products = [
        f"add.s64 %a, {a}, {x}; add.s64 %b, {b}, {y}; "
        f"{_wgmma(dtype, N)} {D}, %a, %b, {'%yes' if step else '%no'}, 1, 1, 0, 0;"
        for step, (x, y) in enumerate(steps)
    ]
    paste = _paste(_wgmma_group(products), (f32,) * count, (u64, u64), True, True)

    @intrinsic
    def start(context, D, a, b):
        def generate(context, builder, signature, values):
            places = _first_items(context, builder, signature.args[0], values[0], count)
            _store_all(builder, paste(context, builder, values[1:]), places)
            return context.get_dummy_value()

        return types.void(D, u64, u64), generate

    return start


def wgmma_registers(dtype: str, N: int, steps: list[int]) -> Any:
    """Return an intrinsic that starts D = A B + D on the tensor cores, with A in registers.

    Its arguments are D and A, local arrays of float32 and uint32, and the descriptor b of B, which
    is in shared memory. The product is a sum over ``steps``. Step x reads four items of A, and B at
    descriptor b + x, in contiguous rows of N numbers.
    """
    count, words = N // 2, 4 * len(steps)
    D, numbers, b = _registers(0, count), (f32,) * count, f"${N + words}"
    products = [
        f"add.s64 %b, {b}, {x}; "
        f"{_wgmma(dtype, N)} {D}, {_registers(N + 4 * step, 4)}, %b, %yes, 1, 1, 1;"
        for step, x in enumerate(steps)
    ]
    operands = (*numbers, *(u32,) * words, u64)
    paste = _paste(_wgmma_group(products), numbers, operands, True, True, in_place=count)

    @intrinsic
    def start(context, D, A, b):
        def generate(context, builder, signature, values):
            places = _first_items(context, builder, signature.args[0], values[0], count)
            sources = _first_items(context, builder, signature.args[1], values[1], words)
            given = [*_load_all(builder, places + sources), values[2]]
            _store_all(builder, paste(context, builder, given), places)
            return context.get_dummy_value()

        return types.void(D, A, u64), generate

    return start


def _wgmma(dtype: str, N: int) -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{dtype}.{dtype}"


@intrinsic
def shared_address(context, array):
    """Return the 32-bit address of a shared array within the shared memory of its block."""

    def generate(context, builder, signature, values):
        first = context.make_array(signature.args[0])(context, builder, values[0]).data
        window = ir.PointerType(first.type.pointee, addrspace=3)
        return builder.ptrtoint(builder.addrspacecast(first, window), ir.IntType(32))

    return u32(array), generate


# 9.7.3, max: the larger of two numbers; if one is NaN, the other. (first, second) -> number
max_f32 = instruction("max.f32 $0, $1, $2;", (f32,), (f32, f32))

# 9.7.1, div: the integer quotient; numba's is in 64 bits. (dividend, divisor) -> number
div_u32 = instruction("div.u32 $0, $1, $2;", (u32,), (u32, u32))

# 9.7.9, prmt: pack the lower halves, or the upper halves, of two registers; the first is lower.
lower_halves = instruction("prmt.b32 $0, $1, $2, 0x5410;", (u32,), (u32, u32))
upper_halves = instruction("prmt.b32 $0, $1, $2, 0x7632;", (u32,), (u32, u32))

# 9.7.13, vote.sync.ballot: a bit for each lane of the warp whose number is not 0. (number) -> bits
_BALLOT = (
    "{ .reg .pred %is_set; setp.ne.u32 %is_set, $1, 0; "
    "vote.sync.ballot.b32 $0, %is_set, 0xffffffff; }"
)
ballot = instruction(_BALLOT, (u32,), (u32,), has_effects=True, is_collective=True)
