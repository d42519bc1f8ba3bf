"""What each instruction does."""

from __future__ import annotations

import re

import numpy as np

from emulator.memory import IN_FLIGHT, LOCAL, SHARED, WARP, check
from emulator.parse import BYTES, DTYPES, kind_of, listed

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")


INSTRUCTIONS = {}


def instruction(*names):
    """Register a function that turns (emulator, name and modifiers, operands) into a closure."""

    def register(function):
        INSTRUCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def guarded(action, predicate, is_negated):
    """An instruction for the threads whose predicate holds."""

    def run(team):
        before = team.mask
        chosen = team.regs["pred"][predicate] != is_negated
        team.take(chosen if before is None else chosen & before)
        if team.mask.any():
            action(team)
        team.take(before)

    return run


TINY = np.finfo(np.float32).tiny


def flushed(x):
    """Numbers below the normal range as zeros of their sign."""
    return x * (abs(x) >= TINY)


def elementwise(emulator, kind, destination, sources, function, words=()):
    """The closure of ``destination = function(*sources)``, all of one kind."""
    to = emulator.at(destination, kind)
    at = [emulator.at(text, kind) for text in sources]
    if "ftz" in words or "sat" in words or not (isinstance(function, np.ufunc) and len(at) == 2):
        finish = saturated if "sat" in words else flushed if "ftz" in words else None
        start = flushed if "ftz" in words else None

        def run(team):
            registers = team.regs[kind]
            given = [registers[i] for i in at]
            if start is not None:
                given = [start(x) for x in given]
            values = function(*given)
            team.write(registers[to], values if finish is None else finish(values))

        return run
    left, right = at

    def run_fast(team):
        registers = team.regs[kind]
        if team.mask is None:
            function(registers[left], registers[right], registers[to])
        else:
            np.putmask(registers[to], team.mask, function(registers[left], registers[right]))

    return run_fast


def saturated(x):
    return np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)


def rounded(exact, dtype, rounding):
    """float64 as float32 in one of the directions rn, rz, rm (down) and rp (up)."""
    near = exact.astype(dtype)
    if rounding in ("rn", "rna"):
        return near
    towards = {"rm": -np.inf, "rp": np.inf}.get(rounding, 0)
    if rounding == "rz":
        is_beyond = abs(near.astype(np.float64)) > abs(exact)
    else:
        is_beyond = near > exact if rounding == "rm" else near < exact
    return np.where(is_beyond, np.nextafter(near, dtype(towards)), near)


def rounding_of(words):
    return next((word for word in words if word in ROUNDINGS), "rn")


@instruction("add", "sub", "mul", "min", "max", "and", "or", "xor")
def _two(emulator, words, operands):
    name, kind = words[0], kind_of(words[-1])
    if words[-1] in ("bf16", "bf16x2", "f16x2") or len(operands) != 3:
        raise NotImplementedError(words[-1])
    if name == "mul" and words[1] in ("wide", "hi"):
        return _product(emulator, words, operands)
    if words[1] in ("cc",):
        raise NotImplementedError("carries")
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
        exact, dtype = function, DTYPES[kind]

        def function(a, b):
            return rounded(exact(a.astype(np.float64), b), dtype, rounding)

    return elementwise(emulator, kind, operands[0], operands[1:], function, words)


def _product(emulator, words, operands):
    """mul and mad, wide or hi."""
    kind = words[-1]
    bits = 8 * BYTES[kind]
    twice = f"{kind[0]}{2 * bits}"
    is_wide = words[1] == "wide"
    a, b = (emulator.at(text, kind) for text in operands[1:3])
    to_kind = twice if is_wide else kind
    to = emulator.at(operands[0], to_kind)
    plus = emulator.at(operands[3], to_kind) if len(operands) == 4 else None

    def run(team):
        x, y = team.regs[kind][a], team.regs[kind][b]
        if bits < 64:
            product = x.astype(DTYPES[twice]) * y.astype(DTYPES[twice])
        else:
            product = np.multiply(x.astype(object), y.astype(object))
        if not is_wide:
            product = (product >> bits).astype(DTYPES[kind])
        if plus is not None:
            product = product + team.regs[to_kind][plus]
        team.write(team.regs[to_kind][to], product)

    return run


@instruction("fma", "mad")
def _fma(emulator, words, operands):
    kind, rounding = kind_of(words[-1]), rounding_of(words)
    if words[1] in ("wide", "hi"):
        return _product(emulator, words, operands)
    if kind != "f32":
        if kind[0] == "f" or words[-1][0] == "b":
            raise NotImplementedError(words[-1])
        return elementwise(
            emulator, kind, operands[0], operands[1:], lambda a, b, c: a * b + c, words
        )
    if rounding != "rn" or "ftz" in words or "sat" in words:

        def fused(a, b, c):
            return rounded(a.astype(np.float64) * b + c, np.float32, rounding)

        return elementwise(emulator, kind, operands[0], operands[1:], fused, words)
    to, *at = (emulator.at(text, kind) for text in operands)

    def run(team):
        registers = team.regs["f32"]
        a, b, c = [registers[i].astype(np.float64) for i in at]
        a = a * b
        a += c
        if team.mask is None:
            registers[to][...] = a
        else:
            np.putmask(registers[to], team.mask, a.astype(np.float32))

    return run


def whole_quotient(a, b):
    """a / b cut towards 0; all bits set where b is 0."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(quotient), quotient)


@instruction("div")
def _div(emulator, words, operands):
    kind = words[-1]
    function = np.true_divide if kind[0] == "f" else whole_quotient
    return elementwise(emulator, kind, operands[0], operands[1:], function, words)


@instruction("rem")
def _rem(emulator, words, operands):
    def function(a, b):
        return a - b * whole_quotient(a, b)

    return elementwise(emulator, words[-1], operands[0], operands[1:], function)


def in_double(function):
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def coarse_tanh(x):
    """tanh, 11 bits of it: the relative error of tanh.approx.f32 is 2 ** -11."""
    mantissa, exponent = np.frexp(np.tanh(x.astype(np.float64)))
    return np.ldexp(np.round(mantissa * 2048) / 2048, exponent).astype(x.dtype)


UNARY = {
    "abs": np.abs, "neg": np.negative, "not": np.invert,
    "sqrt": np.sqrt, "rsqrt": in_double(lambda x: 1 / np.sqrt(x)), "rcp": in_double(np.reciprocal),
    "ex2": in_double(np.exp2), "lg2": in_double(np.log2), "sin": in_double(np.sin),
    "cos": in_double(np.cos), "tanh": coarse_tanh,
}  # fmt: skip


@instruction(*UNARY)
def _one(emulator, words, operands):
    kind = kind_of(words[-1])
    if words[-1] in ("bf16", "bf16x2", "f16x2"):
        raise NotImplementedError(words[-1])
    function = np.logical_not if kind == "pred" else UNARY[words[0]]
    return elementwise(emulator, kind, operands[0], operands[1:], function, words)


@instruction("copysign")
def _copysign(emulator, words, operands):
    def function(sign, size):
        return np.copysign(size, sign)

    return elementwise(emulator, words[-1], operands[0], operands[1:], function)


@instruction("shl", "shr")
def _shift(emulator, words, operands):
    name, kind = words[0], kind_of(words[-1])
    dtype, bits = DTYPES[kind], 8 * BYTES[kind]
    to, value = emulator.at(operands[0], kind), emulator.at(operands[1], kind)
    count = emulator.at(operands[2], "u32")

    def run(team):
        x, n = team.regs[kind][value], team.regs["u32"][count]
        most = np.minimum(n, bits - 1).astype(dtype)
        shifted = x << most if name == "shl" else x >> most
        if name == "shl" or kind[0] == "u":
            shifted = np.where(n >= bits, dtype(0), shifted)
        team.write(team.regs[kind][to], shifted)

    return run


@instruction("shf")
def _funnel(emulator, words, operands):
    to, low, high, count = (emulator.at(text, "u32") for text in operands)

    def run(team):
        registers = team.regs["u32"]
        both = registers[high].astype(np.uint64) << 32 | registers[low].astype(np.uint64)
        n = registers[count].astype(np.uint64)
        n = n & 31 if "wrap" in words else np.minimum(n, 32)
        value = (both << n) >> 32 if "l" in words else both >> n
        team.write(registers[to], (value & 0xFFFFFFFF).astype(np.uint32))

    return run


@instruction("bfe")
def _extract(emulator, words, operands):
    kind, bits = words[-1], 8 * BYTES[words[-1]]
    to, value = emulator.at(operands[0], kind), emulator.at(operands[1], kind)
    start, count = (emulator.at(text, "u32") for text in operands[2:])

    def run(team):
        x = team.regs[kind][value]
        first = (team.regs["u32"][start] & 255).astype(np.int64)
        n = (team.regs["u32"][count] & 255).astype(np.int64)
        wide = np.array([int(v) for v in np.broadcast_to(x, (team.size,))], object)
        cut = (wide >> np.minimum(first, bits)) & ((1 << n.astype(object)) - 1)
        if kind[0] == "s":
            top = np.minimum(first + n - 1, bits - 1)
            sign = (wide >> np.maximum(top, 0)) & 1
            cut = np.where((sign == 1) & (n > 0), cut | ~((1 << n.astype(object)) - 1), cut)
        cut = np.broadcast_to(cut & (1 << bits) - 1, (team.size,)).astype(DTYPES["u" + kind[1:]])
        team.write(team.regs[kind][to], cut.view(DTYPES[kind]))

    return run


@instruction("bfi")
def _insert(emulator, words, operands):
    kind = kind_of(words[-1])
    dtype, bits = DTYPES[kind], 8 * BYTES[kind]
    to, value, into = (emulator.at(text, kind) for text in operands[:3])
    start, count = (emulator.at(text, "u32") for text in operands[3:])

    def run(team):
        first = np.minimum(team.regs["u32"][start] & 255, bits).astype(np.uint64)
        n = np.minimum(team.regs["u32"][count] & 255, bits).astype(np.uint64)
        ones = np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << n) - np.uint64(1))
        shift = np.minimum(first, np.uint64(63))
        ones = np.where(first >= 64, np.uint64(0), ones << shift)
        placed = team.regs[kind][value].astype(np.uint64) << shift
        kept = team.regs[kind][into].astype(np.uint64) & ~ones
        team.write(team.regs[kind][to], (kept | placed & ones).astype(dtype))

    return run


@instruction("prmt")
def _permute(emulator, words, operands):
    if words[-1] != "b32" or len(words) != 2:
        raise NotImplementedError("modes of prmt")
    to, low, high, selector = (emulator.at(text, "u32") for text in operands)

    def run(team):
        registers = team.regs["u32"]
        both = [registers[low] >> np.uint32(8 * i) for i in range(4)]
        both += [registers[high] >> np.uint32(8 * i) for i in range(4)]
        value = np.uint32(0)
        for i in range(4):
            choice = registers[selector] >> np.uint32(4 * i)
            byte = np.choose(choice & np.uint32(7), both) & np.uint32(255)
            byte = np.where(choice & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
            value = value | byte << np.uint32(8 * i)
        team.write(registers[to], value)

    return run


@instruction("lop3")
def _logic(emulator, words, operands):
    table = int(operands[4], 0)

    def function(a, b, c):
        value = np.zeros_like(a | b | c)
        for i in range(8):
            if table >> i & 1:
                value = value | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return value

    return elementwise(emulator, "u32", operands[0], operands[1:4], function)


def counted(x, bits):
    return sum((x >> x.dtype.type(i)) & x.dtype.type(1) for i in range(bits))


def leading(x, bits):
    zeros = np.zeros(np.shape(x), np.uint32)
    for i in range(1, bits + 1):
        zeros += (x >> x.dtype.type(bits - i) == 0).astype(np.uint32)
    return zeros


def reversed_bits(x, bits):
    one = x.dtype.type(1)
    return sum(((x >> x.dtype.type(i)) & one) << x.dtype.type(bits - 1 - i) for i in range(bits))


@instruction("popc", "clz", "brev")
def _bits(emulator, words, operands):
    kind = kind_of(words[-1])
    to_kind = kind if words[0] == "brev" else "u32"
    function = {"popc": counted, "clz": leading, "brev": reversed_bits}[words[0]]
    to, value = emulator.at(operands[0], to_kind), emulator.at(operands[1], kind)

    def run(team):
        bits = function(team.regs[kind][value], 8 * BYTES[kind])
        team.write(team.regs[to_kind][to], bits.astype(DTYPES[to_kind]))

    return run


COMPARISONS = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal,
    "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


@instruction("setp")
def _compare(emulator, words, operands):
    kind = kind_of(words[-1])
    function = COMPARISONS[words[1]]
    to, *other = (emulator.at(name.strip(), "pred") for name in operands[0].split("|"))
    left, right = (emulator.at(text, kind) for text in operands[1:3])
    joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(words[2])
    with_negated = len(operands) == 4 and operands[3][0] == "!"
    with_ = emulator.at(operands[3].lstrip("!"), "pred") if len(operands) == 4 else None

    def run(team):
        registers = team.regs["pred"]
        holds = function(team.regs[kind][left], team.regs[kind][right])
        results = [(to, holds), *((q, ~holds) for q in other)]
        third = None if with_ is None else registers[with_] != with_negated
        for q, value in results:
            team.write(registers[q], value if third is None else joined(value, third))

    return run


@instruction("selp")
def _select(emulator, words, operands):
    kind = kind_of(words[-1])
    to, yes, no = (emulator.at(text, kind) for text in operands[:3])
    predicate = emulator.at(operands[3], "pred")

    def run(team):
        registers = team.regs[kind]
        chosen = np.where(team.regs["pred"][predicate], registers[yes], registers[no])
        team.write(registers[to], chosen)

    return run


@instruction("mov")
def _mov(emulator, words, operands):
    kind = kind_of(words[-1])
    to, source = operands
    if "{" in source:
        parts = listed(source)
        part = f"u{8 * BYTES[kind] // len(parts)}"
        at, out = [emulator.at(text, part) for text in parts], emulator.at(to, kind)

        def join(team):
            shape = [np.broadcast_to(team.regs[part][i], (team.size,)) for i in at]
            joined = np.ascontiguousarray(np.stack(shape, axis=1)).view(DTYPES[kind])[:, 0]
            team.write(team.regs[kind][out], joined)

        return join
    if "{" in to:
        parts = listed(to)
        part = f"u{8 * BYTES[kind] // len(parts)}"
        value = emulator.at(source, kind)
        at = [None if text == "_" else emulator.at(text, part) for text in parts]

        def split(team):
            whole = np.array(np.broadcast_to(team.regs[kind][value], (team.size,)))
            for i, half in zip(at, whole.view(DTYPES[part]).reshape(-1, len(at)).T, strict=True):
                if i is not None:
                    team.write(team.regs[part][i], half)

        return split
    out, value = emulator.at(to, kind), emulator.at(source, kind)

    def run(team):
        team.write(team.regs[kind][out], team.regs[kind][value])

    return run


@instruction("cvta")
def _cvta(emulator, words, operands):
    space, kind = words[-2], words[-1]
    begin = {"shared": SHARED, "local": LOCAL}.get(space, 0)
    begin = DTYPES[kind](begin)
    function = (lambda x: x - begin) if "to" in words else (lambda x: x + begin)
    return elementwise(emulator, kind, operands[0], operands[1:], function)


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


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def _convert(emulator, words, operands):
    to_kind, from_kind = words[-2:]
    if to_kind in ("f16x2", "bf16x2"):
        return _pack(emulator, to_kind, words, operands)
    has_bits = {"b16": "u16", "bf16": "u16"}
    source = has_bits.get(from_kind, from_kind)
    held = emulator.own_kind(operands[1], source)
    read = held if BYTES[held] > BYTES[source] else source
    value = emulator.at(operands[1], read)
    target = has_bits.get(to_kind, to_kind)
    own = emulator.own_kind(operands[0], target)
    is_wider = BYTES[own] > BYTES[target]
    as_kind = own if is_wider else target
    to = emulator.at(operands[0], as_kind)
    whole = next((WHOLE[word] for word in words if word in WHOLE), None)
    rounding, is_saturated = rounding_of(words), "sat" in words

    def run(team):
        x = team.regs[read][value]
        if read != source:
            x = x.astype(DTYPES["u" + source[1:]]).view(DTYPES[source])
        if from_kind == "bf16":
            x = widened(x, "bf16")
        if "ftz" in words and x.dtype == np.float32:
            x = flushed(x)
        y = converted(x, to_kind, whole, rounding, is_saturated)
        if is_wider:
            y = y.astype(np.int64 if target[0] == "s" else np.uint64)
            y = y.astype(DTYPES[as_kind])
        team.write(team.regs[as_kind][to], y)

    return run


def converted(x, to_kind, whole, rounding, is_saturated):
    """Numbers of one kind as another's."""
    is_real = x.dtype.kind == "f"
    if to_kind == "bf16":
        return bfloat16(x)
    if to_kind[0] == "f":
        if whole is not None:
            x = whole(x)
        exact = rounding == "rn" or x.dtype == DTYPES[to_kind]
        y = x.astype(DTYPES[to_kind]) if exact else rounded(
            x.astype(np.float64), DTYPES[to_kind], rounding)  # fmt: skip
        return saturated(y) if is_saturated else y
    limits = np.iinfo(DTYPES[to_kind])
    if is_real:
        x = whole(x.astype(np.float64))
        clipped = np.clip(x, float(limits.min), float(limits.max))
        inside = np.where(np.isnan(x) | (x >= float(limits.max)), 0, clipped)
        y = inside.astype(DTYPES[to_kind])
        return np.where(x >= float(limits.max), limits.max, y)
    if is_saturated:
        low, high = max(limits.min, np.iinfo(x.dtype).min), min(limits.max, np.iinfo(x.dtype).max)
        x = np.clip(x, low, high)
    return x.astype(DTYPES[to_kind])


def _pack(emulator, to_kind, words, operands):
    """Two float32 as 16 bits each; the first goes to the upper half."""
    if words[-1] != "f32" or rounding_of(words) != "rn" or len(operands) != 3 or "relu" in words:
        raise NotImplementedError("forms of packing")
    narrow = bfloat16 if to_kind == "bf16x2" else float16
    to = emulator.at(operands[0], "u32")
    high, low = (emulator.at(text, "f32") for text in operands[1:])

    def run(team):
        upper, lower = (narrow(team.regs["f32"][i]).astype(np.uint32) for i in (high, low))
        team.write(team.regs["u32"][to], upper << np.uint32(16) | lower)

    return run


def space_of(words):
    return next(
        (word.split("::")[0] for word in words
         if word.split("::")[0] in ("global", "shared", "local", "param", "const")),
        "generic",
    )  # fmt: skip


def in_spaces(team, space, address):
    """(memory, address in it) for each active thread; generic addresses must be of one space."""
    if space == "generic":
        is_shared = (address >= SHARED) & (address < SHARED + (1 << 32))
        is_local = (address >= LOCAL) & (address < LOCAL + (1 << 32))
        for found, name, begin in ((is_shared, "shared", SHARED), (is_local, "local", LOCAL)):
            if found.all():
                return in_spaces(team, name, address - begin)
            check(team, address, found, "is generic, and others of it in another space")
        space = "global"
    memory = {"shared": team.shared, "local": team.local}.get(space, team.memory)
    return memory, address


@instruction("ld", "ldu")
def _load(emulator, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    names = listed(operands[0])
    own = [emulator.own_kind(name, kind) for name in names]
    as_kinds = [k if BYTES[k] > BYTES[kind] else kind for k in own]
    at = [emulator.at(name, k) for name, k in zip(names, as_kinds, strict=True)]
    if space == "param":
        (name,) = re.fullmatch(r"\[\s*([\w$]+)\s*\]", operands[1]).groups()

        def load_parameter(team):
            value = team.given[name]
            if value.dtype.itemsize == BYTES[kind]:
                value = value.view(DTYPES[kind])
            team.write(team.regs[as_kinds[0]][at[0]], value)

        return load_parameter
    item = BYTES[kind]
    size = item * len(names)
    address = emulator.address(operands[1])

    def load(team):
        memory, where = in_spaces(team, space, address(team))
        where = memory.locate(team, where, size)
        memory.reads(team, where, size)
        items, first = memory.data.view(DTYPES[kind]), where // item
        for i, (as_kind, to) in enumerate(zip(as_kinds, at, strict=True)):
            team.assign(team.regs[as_kind][to], items[first + i])

    return load


@instruction("st")
def _store(emulator, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    names = listed(operands[1])
    own = [emulator.own_kind(name, kind) for name in names]
    as_kinds = [k if BYTES[k] > BYTES[kind] else kind for k in own]
    at = [emulator.at(name, k) for name, k in zip(names, as_kinds, strict=True)]
    item = BYTES[kind]
    size = item * len(names)
    address = emulator.address(operands[0])

    def store(team):
        memory, where = in_spaces(team, space, address(team))
        where = memory.locate(team, where, size)
        memory.writes(team, where, size)
        items, first = memory.data.view(DTYPES[kind]), where // item
        for i, (as_kind, of) in enumerate(zip(as_kinds, at, strict=True)):
            values = team.active(team.regs[as_kind][of])
            items[first + i] = values.astype(DTYPES[kind]) if as_kind != kind else values

    return store


@instruction("atom", "red")
def _atomic(emulator, words, operands):
    kind, space = kind_of(words[-1]), space_of(words)
    name = next(word for word in words if word in ("add", "min", "max", "and", "or", "exch", "cas"))
    operands = operands if words[0] == "atom" else [None, *operands]
    to = None if operands[0] in (None, "_") else emulator.at(operands[0], kind)
    address = emulator.address(operands[1])
    values = [emulator.at(text, kind) for text in operands[2:]]
    functions = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
        "exch": lambda old, new: new, "cas": lambda old, wanted, new: new if old == wanted else old,
    }  # fmt: skip

    def run(team):
        memory, where = in_spaces(team, space, address(team))
        where = memory.locate(team, where, BYTES[kind])
        items = memory.data.view(DTYPES[kind])
        given = [team.active(team.regs[kind][i]) for i in values]
        before = np.empty(len(where), DTYPES[kind])
        for lane, i in enumerate(where // BYTES[kind]):
            before[lane] = items[i]
            items[i] = functions[name](items[i], *(x[lane] for x in given))
        if to is not None:
            team.assign(team.regs[kind][to], before)

    return run


@instruction("cp")
def _copy(emulator, words, operands):
    if words[1] != "async" or "bulk" in words:
        raise NotImplementedError("forms of cp")
    if words[2] == "commit_group":
        return commit
    if words[2] in ("wait_group", "wait_all"):
        left = int(operands[0]) if words[2] == "wait_group" else None
        return lambda team: arrive(team, left)
    if len(operands) > 4 or "cache_hint" in words:
        raise NotImplementedError("operands of cp.async")
    to, source = emulator.address(operands[0]), emulator.address(operands[1])
    size = int(operands[2])
    given = emulator.at(operands[3], "u32") if len(operands) == 4 else None

    def run(team):
        where = team.shared.locate(team, to(team), size)
        address = source(team)
        count = np.full(len(where), size)
        if given is not None:
            count = team.active(team.regs["u32"][given]).astype(np.int64)
        check(team, count, count > size, "bytes are more than are copied")
        lanes = np.arange(team.size) if team.mask is None else team.lanes
        before, some = team.mask, np.zeros(team.size, bool)
        some[lanes[count > 0]] = True
        found = np.zeros(len(where), np.int64)
        team.take(some)
        found[count > 0] = team.memory.locate(team, address[count > 0], size)
        team.take(before)
        team.shared.writes(team, where, size, by=IN_FLIGHT)
        team.copies.append((lanes, team.groups[lanes].copy(), where, found, count, size))

    return run


def commit(team):
    """What was copied so far is one more group."""
    team.groups[team.active(np.arange(team.size))] += 1


def arrive(team, left):
    """Let all copies of the active threads arrive but those of their last ``left`` groups."""
    is_active = np.ones(team.size, bool) if team.mask is None else team.mask
    team.take(None)
    tags, kept = team.tag(team.syncs), []
    for lanes, group, where, source, count, size in team.copies:
        is_due = is_active[lanes]
        if left is not None:
            is_due = is_due & (group < team.groups[lanes] - left)
        if is_due.any():
            to, byte = where[is_due], np.arange(size)
            copied = team.memory.data[source[is_due][:, None] + byte]
            copied[byte >= count[is_due][:, None]] = 0
            team.shared.data[to[:, None] + byte] = copied
            team.shared.arrives(to, size, tags[lanes[is_due]])
        rest = ~is_due
        if rest.any():
            kept.append((lanes[rest], group[rest], where[rest], source[rest], count[rest], size))
    team.copies = kept
    team.take(None if is_active.all() else is_active)


@instruction("bar", "barrier")
def _sync_warp(emulator, words, operands):
    mask = emulator.at(operands[0], "u32")

    def run(team):
        whole(team, mask)
        team.syncs[team.active(np.arange(team.size))] += 1

    return run


def whole(team, mask):
    """Which warps take part in an instruction whose membermask must be all lanes."""
    members = team.active(team.regs["u32"][mask])
    if (members != 0xFFFFFFFF).any():
        team.fail(members != 0xFFFFFFFF, "is for some lanes of a warp only, which is not emulated")
    return team.meet()


@instruction("shfl")
def _shuffle(emulator, words, operands):
    mode = words[2]
    to, *valid = (name.strip() for name in operands[0].split("|"))
    to = emulator.at(to, "u32")
    valid = emulator.at(valid[0], "pred") if valid else None
    value, by, clamp, mask = (emulator.at(text, "u32") for text in operands[1:])

    def run(team):
        chosen = whole(team, mask)
        registers = team.regs["u32"]
        values = team.of_warps(chosen, registers[value])
        b = team.of_warps(chosen, registers[by]).astype(np.int64) & 31
        c = team.of_warps(chosen, registers[clamp]).astype(np.int64)
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
        moved = np.take_along_axis(values, source, axis=1)
        registers[to].reshape(-1, WARP)[chosen] = moved
        if valid is not None:
            team.regs["pred"][valid].reshape(-1, WARP)[chosen] = is_valid

    return run


@instruction("vote")
def _vote(emulator, words, operands):
    mode, kind = words[2], kind_of(words[-1])
    to, mask = emulator.at(operands[0], kind), emulator.at(operands[2], "u32")
    value, is_negated = emulator.at(operands[1].lstrip("!"), "pred"), operands[1][0] == "!"

    def run(team):
        chosen = whole(team, mask)
        holds = team.of_warps(chosen, team.regs["pred"][value]) != is_negated
        if mode == "ballot":
            bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
            result = np.where(holds, bits, np.uint32(0)).sum(axis=1, dtype=np.uint32)
        else:
            same = holds == holds[:, :1]
            result = {"all": holds, "any": holds, "uni": same}[mode]
            result = result.any(axis=1) if mode == "any" else result.all(axis=1)
        team.regs[kind][to].reshape(-1, WARP)[chosen] = result[:, None]

    return run


@instruction("activemask")
def _activemask(emulator, words, operands):
    to = emulator.at(operands[0], "u32")

    def run(team):
        is_active = np.ones(team.size, bool) if team.mask is None else team.mask
        bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
        by_warp = np.where(is_active.reshape(-1, WARP), bits, np.uint32(0)).sum(1, np.uint32)
        team.write(team.regs["u32"][to], np.repeat(by_warp, WARP))

    return run


@instruction("ldmatrix")
def _load_matrices(emulator, words, operands):
    """Up to four matrices of 8 rows, 16 bytes each; lanes 8i to 8i + 7 say where those of i are.

    A lane gets the pair 2 (lane % 4) of row lane // 4, or of column lane // 4 if transposed.
    """
    if "m8n8" not in words or words[-1] != "b16":
        raise NotImplementedError("forms of ldmatrix")
    at = [emulator.at(name, "u32") for name in listed(operands[0])]
    address = emulator.address(operands[1])
    is_transposed = "trans" in words
    lane = np.arange(WARP)

    def run(team):
        chosen = team.meet()
        before = team.mask
        givers = np.tile(lane < 8 * len(at), team.size // WARP)
        team.take(givers if before is None else givers & before)
        rows = team.shared.locate(team, address(team), 16)
        team.shared.reads(team, rows, 16)
        team.take(before)
        rows = rows.reshape(-1, len(at), 8)
        halves = team.shared.data.view(np.uint16)
        for i, to in enumerate(at):
            if is_transposed:
                first = rows[:, i, 2 * (lane % 4)] // 2 + lane // 4
                second = rows[:, i, 2 * (lane % 4) + 1] // 2 + lane // 4
            else:
                first = rows[:, i, lane // 4] // 2 + 2 * (lane % 4)
                second = first + 1
            pair = halves[first].astype(np.uint32) | halves[second].astype(np.uint32) << np.uint32(
                16
            )
            team.regs["u32"][to].reshape(-1, WARP)[chosen] = pair

    return run


@instruction("mma")
def _matrix_product(emulator, words, operands):
    """D = A B + C, m16n8k16: PTX ISA 9.7.14.5.8 has the fragments.

    A's four registers are its 8 × 8 quarters (rows 0 and 8 of columns 0, then of columns 8), B's
    two its upper and lower half, a column a group of four lanes. C and D hold rows 0 and 8.
    """
    kind = words[-3]
    if words[3:] != ["m16n8k16", "row", "col", "f32", kind, kind, "f32"] or kind not in (
        "f16",
        "bf16",
    ):
        raise NotImplementedError("forms of mma")
    kinds = ("f32", "u32", "u32", "f32")
    D, A, B, C = (
        [emulator.at(name, k) for name in listed(text)]
        for k, text in zip(kinds, operands, strict=True)
    )

    def run(team):
        chosen = team.meet()
        bits, real = team.regs["u32"], team.regs["f32"]

        def eight(register):
            """The 8 × 8 matrix whose row g is in lanes 4g to 4g + 3, two numbers each."""
            pairs = np.ascontiguousarray(team.of_warps(chosen, bits[register])).view(np.uint16)
            return widened(pairs, kind).reshape(-1, 8, 8)

        a = np.block([[eight(A[0]), eight(A[2])], [eight(A[1]), eight(A[3])]])
        b = np.concatenate([eight(B[0]), eight(B[1])], axis=2).transpose(0, 2, 1)
        product = a @ b
        for half in range(2):
            rows = product[:, 8 * half : 8 * half + 8].reshape(-1, WARP, 2)
            for i in range(2):
                to, plus = D[2 * half + i], team.of_warps(chosen, real[C[2 * half + i]])
                real[to].reshape(-1, WARP)[chosen] = rows[:, :, i] + plus

    return run


@instruction("membar", "fence", "prefetch", "nanosleep")
def _nothing(emulator, words, operands):
    return lambda team: None


@instruction("trap")
def _trap(emulator, words, operands):
    return lambda team: team.fail(np.ones(team.size, bool), "stops the kernel")
