"""What each instruction does: PTX ISA 9.0, section 9.7, to closures over NumPy.

A function registered for an opcode gets ``(kernel, words, operands)``, as ``parse.Instruction`` has
them, and returns a closure that executes the instruction for the active threads of a team. A form
that it does not know is a NotImplementedError (KeyError, ValueError and IndexError count as one).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from emulator.memory import IN_FLIGHT, LOCAL, SHARED
from emulator.parse import BYTES, DTYPES, components, kind_of, space_of
from emulator.team import WARP

INSTRUCTIONS = {}
ROUNDINGS = ("rn", "rz", "rm", "rp")
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
TINY = np.finfo(np.float32).tiny


def instruction(*opcodes):
    """Register a function for opcodes."""

    def register(function):
        INSTRUCTIONS.update(dict.fromkeys(opcodes, function))
        return function

    return register


# ---- arithmetic


def flushed(x):
    """Subnormal numbers as zeros of their sign."""
    return x * (abs(x) >= TINY)


def saturated(x):
    """Numbers clipped to 0 and 1; NaN is 0."""
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)


def rounding_of(words):
    return next((word for word in words if word in ROUNDINGS), "rn")


def rounded(exact, dtype, rounding):
    """float64 as ``dtype``: to nearest even (rn), towards zero (rz), down (rm) or up (rp)."""
    near = exact.astype(dtype)
    if rounding == "rn":
        return near
    towards = {"rm": -np.inf, "rp": np.inf}.get(rounding, 0)
    if rounding == "rz":
        is_beyond = abs(near.astype(np.float64)) > abs(exact)
    else:
        is_beyond = near > exact if rounding == "rm" else near < exact
    return np.where(is_beyond, np.nextafter(near, dtype(towards)), near)


def applied(kernel, kinds, operands, function):
    """The closure of ``destination = function(*sources)``; operands and their kinds in order."""
    (to_kind, to), *at = (
        (kind, kernel.operand(text, kind)) for kind, text in zip(kinds, operands, strict=True)
    )

    def run(team):
        values = function(*[team.registers[kind][i] for kind, i in at])
        team.write(team.registers[to_kind][to], values)

    return run


def elementwise(kernel, kind, operands, function, words=()):
    """The same for operands of one kind, flushed and saturated as ``words`` say."""
    is_flushed, is_saturated = "ftz" in words, "sat" in words
    if is_saturated and kind[0] != "f":
        raise NotImplementedError("saturated integers")
    if is_flushed or is_saturated:
        exact = function

        def function(*sources):
            values = exact(*[flushed(x) for x in sources] if is_flushed else sources)
            return saturated(values) if is_saturated else flushed(values)

    elif isinstance(function, np.ufunc) and len(operands) == 3:
        to, left, right = (kernel.operand(text, kind) for text in operands)

        def run_in_place(team):
            registers = team.registers[kind]
            if team.mask is None:
                function(registers[left], registers[right], registers[to])
            else:
                np.putmask(registers[to], team.mask, function(registers[left], registers[right]))

        return run_in_place
    return applied(kernel, [kind] * len(operands), operands, function)


@instruction("add", "sub", "mul", "min", "max", "and", "or", "xor")
def _binary(kernel, words, operands):
    name, kind = words[0], kind_of(words[-1])
    if words[-1] in ("bf16", "bf16x2", "f16x2") or len(operands) != 3:
        raise NotImplementedError(words[-1])
    if name == "mul" and words[1] in ("wide", "hi"):
        return _wide_product(kernel, words, operands)
    is_nan_kept = "NaN" in words
    functions = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply,
        "min": np.minimum if is_nan_kept else np.fmin,
        "max": np.maximum if is_nan_kept else np.fmax,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    function = functions[name]
    rounding = rounding_of(words)
    if rounding != "rn":
        if kind != "f32":
            raise NotImplementedError(f"{rounding} of {kind}")
        exact = function

        def function(a, b):
            return rounded(exact(a.astype(np.float64), b), np.float32, rounding)

    return elementwise(kernel, kind, operands, function, words)


def _wide_product(kernel, words, operands):
    """mul and mad, wide or hi."""
    kind, is_wide = words[-1], words[1] == "wide"
    bits = 8 * BYTES[kind]
    twice = f"{kind[0]}{2 * bits}"
    to_kind, exact = twice if is_wide else kind, object if bits == 64 else DTYPES[twice]

    def function(x, y, plus=None):
        product = x.astype(exact) * y.astype(exact)
        if not is_wide:
            product = (product >> bits).astype(DTYPES[kind])
        return product if plus is None else product + plus

    return applied(kernel, [to_kind, kind, kind, to_kind][: len(operands)], operands, function)


# What fused products are computed in. On x86 a longdouble has 11 more bits than float64.
WIDER = {"f32": np.float64, "f64": np.longdouble}


@instruction("fma", "mad")
def _fma(kernel, words, operands):
    kind, rounding = kind_of(words[-1]), rounding_of(words)
    if words[1] in ("wide", "hi"):
        return _wide_product(kernel, words, operands)
    if kind in WIDER:

        def function(a, b, c):
            a, b, c = [x.astype(WIDER[kind]) for x in (a, b, c)]
            return rounded(a * b + c, DTYPES[kind], rounding)

    elif kind[0] == "f" or words[-1][0] == "b":
        raise NotImplementedError(words[-1])
    else:

        def function(a, b, c):
            return a * b + c

    return elementwise(kernel, kind, operands, function, words)


def truncated_quotient(a, b):
    """Integer a / b, truncated towards 0; all bits set where b is 0."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(quotient), quotient)


@instruction("div")
def _div(kernel, words, operands):
    kind = words[-1]
    if rounding_of(words) != "rn":
        raise NotImplementedError("quotients that are not rounded to nearest")
    function = np.true_divide if kind[0] == "f" else truncated_quotient
    return elementwise(kernel, kind, operands, function, words)


@instruction("rem")
def _rem(kernel, words, operands):
    def function(a, b):
        return a - b * truncated_quotient(a, b)

    return elementwise(kernel, words[-1], operands, function)


def in_double(function):
    """``function`` computed in float64 and rounded once."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def coarse_tanh(x):
    """tanh with 11 bits, since the relative error of tanh.approx.f32 may be 2 ** -11."""
    mantissa, exponent = np.frexp(np.tanh(x.astype(np.float64)))
    return np.ldexp(np.round(mantissa * 2048) / 2048, exponent).astype(x.dtype)


UNARY = {
    "abs": np.abs, "neg": np.negative, "not": np.invert,
    "sqrt": np.sqrt, "rsqrt": in_double(lambda x: 1 / np.sqrt(x)), "rcp": in_double(np.reciprocal),
    "ex2": in_double(np.exp2), "lg2": in_double(np.log2), "sin": in_double(np.sin),
    "cos": in_double(np.cos), "tanh": coarse_tanh,
}  # fmt: skip


@instruction(*UNARY)
def _unary(kernel, words, operands):
    kind = kind_of(words[-1])
    if words[-1] in ("bf16", "bf16x2", "f16x2") or rounding_of(words) != "rn":
        raise NotImplementedError(" ".join(words[1:]))
    function = np.logical_not if kind == "pred" else UNARY[words[0]]
    return elementwise(kernel, kind, operands, function, words)


@instruction("copysign")
def _copysign(kernel, words, operands):
    def function(sign, size):
        return np.copysign(size, sign)

    return elementwise(kernel, words[-1], operands, function)


@instruction("shl", "shr")
def _shift(kernel, words, operands):
    name, kind = words[0], kind_of(words[-1])
    dtype, bits = DTYPES[kind], 8 * BYTES[kind]

    def function(x, n):
        most = np.minimum(n, bits - 1).astype(dtype)
        if name == "shr" and kind[0] == "s":
            return x >> most
        return np.where(n >= bits, dtype(0), x << most if name == "shl" else x >> most)

    return applied(kernel, [kind, kind, "u32"], operands, function)


@instruction("shf")
def _funnel(kernel, words, operands):
    def function(low, high, n):
        both = high.astype(np.uint64) << 32 | low.astype(np.uint64)
        n = n.astype(np.uint64)
        n = n & 31 if "wrap" in words else np.minimum(n, 32)
        value = (both << n) >> 32 if "l" in words else both >> n
        return (value & 0xFFFFFFFF).astype(np.uint32)

    return elementwise(kernel, "u32", operands, function)


@instruction("bfe")
def _extract(kernel, words, operands):
    kind, bits = words[-1], 8 * BYTES[words[-1]]

    def function(x, start, count):
        first, n = ((y & 255).astype(np.int64) for y in (start, count))
        wide = np.atleast_1d(x).astype(object)
        ones = (1 << n.astype(object)) - 1
        field = (wide >> np.minimum(first, bits)) & ones
        if kind[0] == "s":
            top = np.minimum(first + n - 1, bits - 1)
            sign = (wide >> np.maximum(top, 0)) & 1
            field = np.where((sign == 1) & (n > 0), field | ~ones, field)
        return (field & (1 << bits) - 1).astype(DTYPES["u" + kind[1:]]).view(DTYPES[kind])

    return applied(kernel, [kind, kind, "u32", "u32"], operands, function)


@instruction("bfi")
def _insert(kernel, words, operands):
    kind = kind_of(words[-1])
    bits = 8 * BYTES[kind]

    def function(value, into, start, count):
        first, n = (np.minimum(x & 255, bits).astype(np.uint64) for x in (start, count))
        ones = np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << n) - np.uint64(1))
        shift = np.minimum(first, np.uint64(63))
        ones = np.where(first >= 64, np.uint64(0), ones << shift)
        kept = into.astype(np.uint64) & ~ones
        return (kept | value.astype(np.uint64) << shift & ones).astype(DTYPES[kind])

    return applied(kernel, [kind, kind, kind, "u32", "u32"], operands, function)


@instruction("prmt")
def _permute(kernel, words, operands):
    if words[-1] != "b32" or len(words) != 2:
        raise NotImplementedError("modes of prmt")

    def function(low, high, selector):
        both = [half >> np.uint32(8 * i) for half in (low, high) for i in range(4)]
        value = np.uint32(0)
        for i in range(4):
            choice = selector >> np.uint32(4 * i)
            byte = np.choose(choice & np.uint32(7), both) & np.uint32(255)
            byte = np.where(choice & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
            value = value | byte << np.uint32(8 * i)
        return value

    return elementwise(kernel, "u32", operands, function)


@instruction("lop3")
def _logic(kernel, words, operands):
    table = int(operands[4], 0)

    def function(a, b, c):
        value = np.zeros_like(a | b | c)
        for i in range(8):
            if table >> i & 1:
                value = value | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return value

    return elementwise(kernel, "u32", operands[:4], function)


def popcount(x, bits):
    return sum((x >> x.dtype.type(i)) & x.dtype.type(1) for i in range(bits))


def leading_zeros(x, bits):
    zeros = np.zeros(np.shape(x), np.uint32)
    for i in range(1, bits + 1):
        zeros += (x >> x.dtype.type(bits - i) == 0).astype(np.uint32)
    return zeros


def reversed_bits(x, bits):
    one = x.dtype.type(1)
    return sum(((x >> x.dtype.type(i)) & one) << x.dtype.type(bits - 1 - i) for i in range(bits))


@instruction("popc", "clz", "brev")
def _bits(kernel, words, operands):
    kind = kind_of(words[-1])
    to_kind = kind if words[0] == "brev" else "u32"
    count = {"popc": popcount, "clz": leading_zeros, "brev": reversed_bits}[words[0]]

    def function(x):
        return count(x, 8 * BYTES[kind]).astype(DTYPES[to_kind])

    return applied(kernel, [to_kind, kind], operands, function)


COMPARISONS = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal,
    "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


@instruction("setp")
def _compare(kernel, words, operands):
    """p or p|q: the comparison and its negation, each joined with a third predicate if given."""
    kind, compare = kind_of(words[-1]), COMPARISONS[words[1]]
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(words[2])
    to = [kernel.operand(name.strip(), "pred") for name in operands[0].split("|")]
    left, right = (kernel.operand(text, kind) for text in operands[1:3])
    third = kernel.predicate(operands[3]) if len(operands) == 4 else None

    def run(team):
        holds = compare(team.registers[kind][left], team.registers[kind][right])
        joined = None if third is None else team.holds(third)
        for i, value in zip(to, (holds, ~holds), strict=False):
            value = value if third is None else join(value, joined)
            team.write(team.registers["pred"][i], value)

    return run


@instruction("selp")
def _select(kernel, words, operands):
    kind = kind_of(words[-1])

    def function(yes, no, predicate):
        return np.where(predicate, yes, no)

    return applied(kernel, [kind, kind, kind, "pred"], operands, function)


# ---- moves and conversions


@instruction("mov")
def _mov(kernel, words, operands):
    kind = kind_of(words[-1])
    to, source = operands
    if "{" in source:
        parts = components(source)
        part = f"u{8 * BYTES[kind] // len(parts)}"

        def join(*values):
            values = np.broadcast_arrays(*(np.atleast_1d(x) for x in values))
            return np.ascontiguousarray(np.stack(values, axis=1)).view(DTYPES[kind])[:, 0]

        return applied(kernel, [kind, *[part] * len(parts)], [to, *parts], join)
    if "{" in to:
        parts = components(to)
        part = f"u{8 * BYTES[kind] // len(parts)}"
        value = kernel.operand(source, kind)
        at = [None if text == "_" else kernel.operand(text, part) for text in parts]

        def split(team):
            whole = np.array(np.broadcast_to(team.registers[kind][value], (team.size,)))
            for i, half in zip(at, whole.view(DTYPES[part]).reshape(-1, len(at)).T, strict=True):
                if i is not None:
                    team.write(team.registers[part][i], half)

        return split
    return applied(kernel, [kind, kind], operands, lambda x: x)


@instruction("cvta")
def _cvta(kernel, words, operands):
    space, kind = words[-2], words[-1]
    begin = {"shared": SHARED, "local": LOCAL}.get(space, 0)
    begin = DTYPES[kind](begin)
    function = (lambda x: x - begin) if "to" in words else (lambda x: x + begin)
    return elementwise(kernel, kind, operands, function)


def bfloat16(x):
    """Bits of float32 numbers rounded to bfloat16, to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), near).astype(np.uint16)


def float16(x):
    """Bits of float32 numbers rounded to float16."""
    return np.asarray(x, np.float16).view(np.uint16)


def widened(bits, kind):
    """The numbers behind 16 bits, as float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@instruction("cvt")
def _convert(kernel, words, operands):
    to_type, from_type = words[-2:]
    if to_type in ("f16x2", "bf16x2"):
        return _pack(kernel, words, operands)
    source, target = kind_of(from_type), kind_of(to_type)
    read, value = kernel.at_least(operands[1], source)
    written, to = kernel.at_least(operands[0], target)
    to_integer = next((TO_INTEGER[word] for word in words if word in TO_INTEGER), None)
    rounding, is_saturated = rounding_of(words), "sat" in words
    if to_type == "bf16" and (rounding != "rn" or is_saturated):
        raise NotImplementedError("forms of cvt to bf16")

    def run(team):
        x = team.registers[read][value]
        if read != source:
            x = x.astype(DTYPES["u" + source[1:]]).view(DTYPES[source])
        if from_type == "bf16":
            x = widened(x, "bf16")
        if "ftz" in words and x.dtype == np.float32:
            x = flushed(x)
        y = converted(x, to_type, to_integer, rounding, is_saturated)
        if written != target:
            y = y.astype(np.int64 if target[0] == "s" else np.uint64).astype(DTYPES[written])
        team.write(team.registers[written][to], y)

    return run


def converted(x, to_type, to_integer, rounding, is_saturated):
    """Numbers of one kind as another's; beyond an integer's limits they are clipped, NaN is 0."""
    if to_type == "bf16":
        return bfloat16(x)
    dtype, is_float = DTYPES[to_type], x.dtype.kind == "f"
    if to_type[0] == "f":
        if to_integer is not None:
            x = to_integer(x)
        is_direct = rounding == "rn" or x.dtype == dtype
        y = x.astype(dtype) if is_direct else rounded(x.astype(np.float64), dtype, rounding)
        return saturated(y) if is_saturated else y
    limits = np.iinfo(dtype)
    if is_float:
        x = to_integer(x.astype(np.float64))
        is_beyond = x >= float(limits.max)  # as float64, which may be more than the limit
        clipped = np.clip(x, float(limits.min), float(limits.max))
        y = np.where(np.isnan(x) | is_beyond, 0, clipped).astype(dtype)
        return np.where(is_beyond, limits.max, y)
    if is_saturated:
        own = np.iinfo(x.dtype)
        x = np.clip(x, max(limits.min, own.min), min(limits.max, own.max))
    return x.astype(dtype)


def _pack(kernel, words, operands):
    """Two float32 as 16 bits each; the first goes to the upper half."""
    if words[-1] != "f32" or rounding_of(words) != "rn":
        raise NotImplementedError("forms of packing")
    narrow = bfloat16 if words[-2] == "bf16x2" else float16

    def function(high, low):
        upper, lower = (narrow(x).astype(np.uint32) for x in (high, low))
        return upper << np.uint32(16) | lower

    return applied(kernel, ["u32", "f32", "f32"], operands, function)


# ---- memory


def resolve(team, space, address):
    """(memory, addresses in it) of the active threads; generic addresses must be of one space."""
    if space != "generic":
        return team.memories[space], address
    for name, begin in (("shared", SHARED), ("local", LOCAL)):
        is_here = (address >= begin) & (address < begin + (1 << 32))
        if is_here.all():
            return team.memories[name], address - begin
        team.check(address, is_here, f"is in {name} memory, those of other threads are not")
    return team.memories["global"], address


@instruction("ld", "ldu")
def _load(kernel, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    to = [kernel.at_least(name, kind) for name in components(operands[0])]
    if space == "param":
        name = operands[1].strip("[] ")
        if name not in [parameter for _, parameter in kernel.parameters]:
            raise NotImplementedError(f"parameter {name}")
        ((written, register),) = to

        def load_parameter(team):
            value = team.given[name]
            if value.dtype.itemsize == BYTES[kind]:
                value = value.view(DTYPES[kind])
            team.write(team.registers[written][register], value)

        return load_parameter
    size = BYTES[kind] * len(to)
    address = kernel.address(operands[1])

    def load(team):
        memory, at = resolve(team, space, address(team))
        at = memory.locate(team, at, size)
        memory.note_read(team, at, size)
        items, first = memory.data.view(DTYPES[kind]), at // BYTES[kind]
        for i, (written, register) in enumerate(to):
            team.write_active(team.registers[written][register], items[first + i])

    return load


@instruction("st")
def _store(kernel, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    sources = [kernel.at_least(name, kind) for name in components(operands[1])]
    size = BYTES[kind] * len(sources)
    address = kernel.address(operands[0])

    def store(team):
        memory, at = resolve(team, space, address(team))
        at = memory.locate(team, at, size)
        memory.note_write(team, at, size)
        items, first = memory.data.view(DTYPES[kind]), at // BYTES[kind]
        for i, (read, register) in enumerate(sources):
            values = team.active(team.registers[read][register])
            items[first + i] = values.astype(DTYPES[kind], copy=False)

    return store


# Atomics of different warps are unordered, so shared memory does not note them.
ATOMIC = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
    "exch": lambda old, new: new, "cas": lambda old, wanted, new: new if old == wanted else old,
}  # fmt: skip


@instruction("atom", "red")
def _atomic(kernel, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    (update,) = (ATOMIC[word] for word in words if word in ATOMIC)
    operands = operands if words[0] == "atom" else ["_", *operands]
    to = None if operands[0] == "_" else kernel.operand(operands[0], kind)
    address = kernel.address(operands[1])
    values = [kernel.operand(text, kind) for text in operands[2:]]

    def run(team):
        memory, at = resolve(team, space, address(team))
        at = memory.locate(team, at, BYTES[kind])
        items = memory.data.view(DTYPES[kind])
        given = [team.active(team.registers[kind][i]) for i in values]
        before = np.empty(len(at), DTYPES[kind])
        for lane, i in enumerate(at // BYTES[kind]):
            before[lane] = items[i]
            items[i] = update(items[i], *(x[lane] for x in given))
        if to is not None:
            team.write_active(team.registers[kind][to], before)

    return run


class Copy(NamedTuple):
    """A ``cp.async`` in flight; its arrays have one entry per thread that executed it."""

    lanes: np.ndarray  # the threads, as indices into their team
    group: np.ndarray  # the number of groups that each had committed before
    to: np.ndarray  # the start in the data of shared memory
    source: np.ndarray  # the start in the data of global memory
    count: np.ndarray  # copied bytes; the rest of ``size`` becomes 0
    number: np.ndarray  # the number of these instructions that the team executed before
    size: int

    def of(self, chosen):
        """The copies of some of the threads."""
        return Copy(*(column[chosen] for column in self[:-1]), self.size)


@instruction("cp")
def _copy(kernel, words, operands):
    if words[1] != "async" or "bulk" in words:
        raise NotImplementedError("forms of cp")
    if words[2] == "commit_group":
        return commit
    if words[2] == "mbarrier":
        return INSTRUCTIONS["mbarrier"](kernel, words[2:], operands)
    if words[2] in ("wait_group", "wait_all"):
        pending = int(operands[0]) if words[2] == "wait_group" else None
        return lambda team: arrive(team, pending)
    if len(operands) > 4 or "cache_hint" in words:
        raise NotImplementedError("operands of cp.async")
    to, source = kernel.address(operands[0]), kernel.address(operands[1])
    size = int(operands[2])
    given = kernel.operand(operands[3], "u32") if len(operands) == 4 else None

    def run(team):
        shared = team.memories["shared"]
        at = shared.locate(team, to(team), size)
        address, lanes = source(team), team.lanes
        count = np.full(len(at), size)
        if given is not None:
            count = team.active(team.registers["u32"][given]).astype(np.int64)
        if (count > size).any():
            team.fail(count > size, "copies more bytes than are copied at most")
        is_read, reads = count > 0, np.zeros(team.size, bool)
        reads[lanes[is_read]] = True
        before, found = team.narrow(reads), np.zeros(len(at), np.int64)
        found[is_read] = team.memories["global"].locate(team, address[is_read], size)
        team.activate(before)
        shared.note_write(team, at, size, by=IN_FLIGHT)
        number = np.full(len(at), team.copied)
        team.copies.append(Copy(lanes, team.groups[lanes].copy(), at, found, count, number, size))
        team.copied += 1

    return run


def commit(team):
    """Make one more group of what was copied so far."""
    team.groups[team.lanes] += 1


def arrive(team, pending):
    """Let the active threads' copies arrive, except for those of their last ``pending`` groups.

    ``pending`` is None for all copies, whether committed or not.
    """
    is_active, oldest = team.is_active, None if pending is None else team.groups - pending
    shared = team.memories["shared"]
    if pending is None:  # what was to arrive at an mbarrier with these copies does so now
        shared.let_arrive(team, is_active)
    tags = shared.tags(team, team.warp_syncs)

    def is_due(copy):
        is_due = is_active[copy.lanes]
        return is_due if pending is None else is_due & (copy.group < oldest[copy.lanes])

    land(team, is_due, tags)


def land(team, is_due, tags):
    """Let the copies of which ``is_due`` holds arrive, as if written by threads with ``tags``."""
    shared, data, kept = team.memories["shared"], team.memories["global"].data, []
    for copy in team.copies:
        is_here = is_due(copy)
        if is_here.any():
            due, byte = copy.of(is_here), np.arange(copy.size)
            copied = data[due.source[:, None] + byte]
            copied[byte >= due.count[:, None]] = 0
            shared.data[due.to[:, None] + byte] = copied
            shared.note_arrival(due.to, copy.size, tags[due.lanes])
        if not is_here.all():
            kept.append(copy.of(~is_here))
    team.copies = kept


# ---- whole warps


def warps_of(team, mask):
    """Which warps execute an instruction whose membermask must be all lanes."""
    members = team.active(team.registers["u32"][mask])
    if (members != 0xFFFFFFFF).any():
        team.fail(members != 0xFFFFFFFF, "is for some lanes of a warp only, which is not emulated")
    return team.collective()


def ballot(holds):
    """(warps,) uint32, bit i set where lane i of (warps, 32) ``holds``."""
    bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
    return np.where(holds, bits, np.uint32(0)).sum(axis=1, dtype=np.uint32)


@instruction("bar", "barrier")
def _sync_warp(kernel, words, operands):
    """bar.warp.sync; barriers of the block direct the flow and never come here."""
    mask = kernel.operand(operands[0], "u32")

    def run(team):
        warps_of(team, mask)
        team.warp_syncs[team.lanes] += 1

    return run


@instruction("shfl")
def _shuffle(kernel, words, operands):
    mode = words[2]
    to, *valid = (name.strip() for name in operands[0].split("|"))
    to = kernel.operand(to, "u32")
    valid = kernel.operand(valid[0], "pred") if valid else None
    value, by, clamp, mask = (kernel.operand(text, "u32") for text in operands[1:])

    def run(team):
        warps = warps_of(team, mask)
        registers = team.registers["u32"]
        values = team.by_warp(registers[value], warps)
        b = team.by_warp(registers[by], warps).astype(np.int64) & 31
        c = team.by_warp(registers[clamp], warps).astype(np.int64)
        lane = np.arange(WARP)
        segment = c >> 8 & 31
        most = (lane & segment) | (c & 31 & ~segment)
        least = lane & segment
        if mode == "up":
            source, limit = lane - b, most
            is_valid = source >= limit
        else:
            source = {"down": lane + b, "bfly": lane ^ b, "idx": least | b & ~segment}[mode]
            is_valid = source <= most
        source = np.where(is_valid, source, lane)
        team.write_by_warp(registers[to], warps, np.take_along_axis(values, source, axis=1))
        if valid is not None:
            team.write_by_warp(team.registers["pred"][valid], warps, is_valid)

    return run


@instruction("vote")
def _vote(kernel, words, operands):
    mode, kind = words[2], kind_of(words[-1])
    to, mask = kernel.operand(operands[0], kind), kernel.operand(operands[2], "u32")
    predicate = kernel.predicate(operands[1])

    def run(team):
        warps = warps_of(team, mask)
        holds = team.by_warp(team.holds(predicate), warps)
        if mode == "ballot":
            result = ballot(holds)
        elif mode == "any":
            result = holds.any(axis=1)
        else:
            result = {"all": holds, "uni": holds == holds[:, :1]}[mode].all(axis=1)
        team.write_by_warp(team.registers[kind][to], warps, result[:, None])

    return run


@instruction("activemask")
def _activemask(kernel, words, operands):
    to = kernel.operand(operands[0], "u32")

    def run(team):
        lanes = ballot(team.by_warp(team.is_active, slice(None)))
        team.write(team.registers["u32"][to], np.repeat(lanes, WARP))

    return run


@instruction("ldmatrix")
def _load_matrices(kernel, words, operands):
    """One to four matrices of 8 rows, 16 bytes each; lanes 8i to 8i + 7 have the addresses of i.

    A lane gets the pair 2 (lane % 4) of row lane // 4, or of column lane // 4 if transposed.
    """
    if "m8n8" not in words or words[-1] != "b16":
        raise NotImplementedError("forms of ldmatrix")
    to = [kernel.operand(name, "u32") for name in components(operands[0])]
    address = kernel.address(operands[1])
    lane = np.arange(WARP)
    row, pair = lane // 4, 2 * (lane % 4)

    def run(team):
        warps, shared = team.collective(), team.memories["shared"]
        before = team.narrow(np.tile(lane < 8 * len(to), team.size // WARP))
        rows = shared.locate(team, address(team), 16)
        shared.note_read(team, rows, 16)
        team.activate(before)
        rows = rows.reshape(-1, len(to), 8) // 2
        halves = shared.data.view(np.uint16)
        for i, register in enumerate(to):
            if "trans" in words:
                low, high = (halves[rows[:, i, pair + j] + row] for j in range(2))
            else:
                low, high = (halves[rows[:, i, row] + pair + j] for j in range(2))
            both = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
            team.write_by_warp(team.registers["u32"][register], warps, both)

    return run


def eight_by_eight(team, register, warps, kind):
    """The 8 × 8 matrix whose row g is in lanes 4g to 4g + 3, two numbers per lane."""
    words = team.by_warp(team.registers["u32"][register], warps)
    return widened(np.ascontiguousarray(words).view(np.uint16), kind).reshape(-1, 8, 8)


@instruction("mma")
def _matrix_product(kernel, words, operands):
    """D = A B + C, m16n8k16: PTX ISA 9.7.14.5.8 has the fragments.

    A's four registers are its 8 × 8 quarters (rows 0 and 8 of columns 0, then of columns 8), B's
    two its upper and lower half, one column per group of four lanes. C and D hold rows 0 and 8.
    """
    kind = words[-3]
    is_known = kind in ("f16", "bf16")
    if not is_known or words[3:] != ["m16n8k16", "row", "col", "f32", kind, kind, "f32"]:
        raise NotImplementedError("forms of mma")
    kinds = ("f32", "u32", "u32", "f32")
    D, A, B, C = (
        [kernel.operand(name, k) for name in components(text)]
        for k, text in zip(kinds, operands, strict=True)
    )

    def run(team):
        warps = team.collective()
        real = team.registers["f32"]
        a0, a1, a2, a3, b0, b1 = (eight_by_eight(team, i, warps, kind) for i in A + B)
        a = np.block([[a0, a2], [a1, a3]])
        b = np.concatenate([b0, b1], axis=2).transpose(0, 2, 1)
        product = a @ b
        for half in range(2):
            rows = product[:, 8 * half : 8 * half + 8].reshape(-1, WARP, 2)
            for i in range(2):
                to, plus = D[2 * half + i], team.by_warp(real[C[2 * half + i]], warps)
                team.write_by_warp(real[to], warps, rows[:, :, i] + plus)

    return run


# ---- the rest


@instruction("membar", "fence", "prefetch", "nanosleep")
def _nothing(kernel, words, operands):
    """Every access is visible at once, but to ``wgmma``, and time does not count."""
    if words[1:3] == ["proxy", "async"]:
        return pass_fence
    return lambda team: None


def pass_fence(team):
    """Let ``wgmma`` see what whole warps see; where only some lanes come here it is none."""
    before = team.narrow(np.repeat(team.is_active.reshape(-1, WARP).all(axis=1), WARP))
    team.memories["shared"].clocks.pass_fence(team.active(team.block), team.active(team.warp))
    team.activate(before)


@instruction("trap")
def _trap(kernel, words, operands):
    return lambda team: team.fail(np.ones(team.size, bool), "stops the kernel")
