"""PTX text to a ``Kernel``: parameters, variables, registers and instructions, none executed yet.

PTX ISA 9.0, chapters 4 (syntax) and 5 (state spaces, types and variables).
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import numpy as np

# A "kind" is a type that NumPy has; PTX's other types are held as one of these.
DTYPES = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8,
    "u16": np.uint16, "s16": np.int16, "f16": np.float16,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
HELD_AS = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64",
           "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}  # fmt: skip
BYTES = {kind: np.dtype(dtype).itemsize for kind, dtype in DTYPES.items()}
SPACES = ("global", "shared", "local", "param", "const")
SPECIAL = (
    *[f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"],
    "%laneid", "%warpid", "%dynamic_smem_size",
)  # fmt: skip

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)[^{]*\{", re.DOTALL)
VARIABLE = re.compile(
    r"(\.extern\s+|\.visible\s+|\.weak\s+|\.common\s+)?\.(shared|local|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?\s*(?:=\s*\{?([^;}]*)\}?)?\s*;"
)
SKIPPED = re.compile(r"\s+|\.loc\s[^\n]*")
LABEL = re.compile(r"([$\w]+):(?!:)")
ADDRESS = re.compile(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]")
INSTRUCTION = re.compile(r"(?:@(!?%?[\w$.]+)\s+)?([\w.:]+)\s*(.*)")


class Instruction(NamedTuple):
    """One instruction, split."""

    text: str  # the original, for messages
    guard: str | None  # the predicate of ``@p`` or ``@!p``
    words: list[str]  # opcode and modifiers: ``["add", "rn", "f32"]``
    operands: list[str]


class Kernel:
    """One kernel, parsed; NotImplementedError if its text is anything else.

    Attributes
    ----------
    parameters : list of (type, name)
    instructions : list of Instruction
    labels : dict of str to int
        The instruction that each label is in front of.
    kinds : list of str
        Of each register, unsigned or predicate.
    index : dict of str to int
        Each register's place in ``kinds``.
    watched : dict of int to int
        The registers that some ``wgmma`` uses, and each one's place among them.
    constants : list of (kind, number, bits or name of a table)
        Immediate operands, which are read like registers and follow them.
    shared, local : dict of str to int
        Where variables begin in shared and local memory.
    static, local_size : int
        Bytes of all variables in shared and in local memory.
    tables : dict of str to array
        Variables in global and constant memory.
    """

    def __init__(self, text):
        text = COMMENT.sub("", text)
        entry = ENTRY.search(text)
        if entry is None or ".func" in text:
            raise NotImplementedError("expected one kernel, .entry, and no functions beside it")
        self.parameters = re.findall(r"\.param\s+\.(\w+)\s+([\w$]+)", entry[1])
        if entry[1].count(".param") != len(self.parameters):
            raise NotImplementedError(f"parameters other than plain numbers: {entry[1][:200]}")
        self.kinds, self.index, self.watched, self.constants = [], {}, {}, []
        self.instructions, self.labels = [], {}
        self._place_variables(text)
        for label, statement in statements(text[entry.end() : text.rindex("}")]):
            if label is not None:
                self.labels[label] = len(self.instructions)
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif not statement.startswith("."):
                self.instructions.append(parsed(statement))
        self.instructions.append(parsed("exit"))
        for name in SPECIAL:
            if any(name in instruction.text for instruction in self.instructions):
                self._add_register(name, "u32")

    def _place_variables(self, text):
        """Give variables their places in shared and local memory, and tables their values."""
        self.shared, self.local, self.tables = {}, {}, {}
        self.static = self.local_size = 0
        dynamic = []
        for linkage, space, align, kind, name, is_array, count, values in VARIABLE.findall(text):
            kind = kind_of(kind)
            align, size = int(align or BYTES[kind]), BYTES[kind] * int(count or 1)
            if space == "shared" and linkage.strip() == ".extern" and is_array and not count:
                dynamic.append(name)
            elif space == "shared":
                self.shared[name] = round_up(self.static, align)
                self.static = self.shared[name] + size
            elif space == "local":
                self.local[name] = round_up(self.local_size, align)
                self.local_size = self.local[name] + size
            else:
                numbers = [int(x, 0) for x in values.split(",")] if values.strip() else []
                table = np.zeros(int(count or 1), DTYPES["u" + kind[1:]])
                table[: len(numbers)] = [x & (1 << 8 * BYTES[kind]) - 1 for x in numbers]
                self.tables[name] = table
        self.static = round_up(self.static, 16)
        self.shared.update(dict.fromkeys(dynamic, self.static))

    def _declare(self, statement):
        _, kind, names = statement.split(None, 2)
        kind = kind_of(kind[1:])
        kind = kind if kind == "pred" else f"u{8 * BYTES[kind]}"
        for name, count in re.findall(r"(%?[\w$.]+)(?:<(\d+)>)?", names):
            for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self._add_register(one, kind)

    def _add_register(self, name, kind):
        self.index[name] = len(self.kinds)
        self.kinds.append(kind)

    @cached_property
    def granule(self):
        """Bytes of the smallest access to shared memory, at most 16."""
        smallest = 16
        for _, _, words, operands in self.instructions:
            if words[:2] == ["cp", "async"] and len(operands) > 2:
                smallest = min(smallest, int(operands[2]))
            elif words[0] in ("ld", "st", "atom", "red") and (
                space_of(words) in ("shared", "generic")
            ):
                count = 2 if "v2" in words else 4 if "v4" in words else 1
                smallest = min(smallest, BYTES[kind_of(words[-1])] * count)
        return smallest

    def operand(self, text, kind):
        """Index of an operand among a team's registers of a kind; a constant is given one."""
        if text in self.index:
            own = self.kinds[self.index[text]]
            if (own != kind and BYTES[own] != BYTES[kind]) or (own == "pred") != (kind == "pred"):
                raise NotImplementedError(f"{text} is {own}, an operand of {kind} was expected")
            return self.index[text]
        if text in self.shared:
            value = self.shared[text]
        elif text in self.local:
            value = self.local[text]
        elif text in self.tables:
            value = text
        elif text.startswith("0f"):
            value = np.array(int(text[2:], 16), np.uint32)
        elif text.startswith("0d"):
            value = np.array(int(text[2:], 16), np.uint64)
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0)
        elif re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", text):
            value = float(text)
        else:
            raise NotImplementedError(f"operand {text}")
        self.constants.append((kind, value))
        return len(self.kinds) + len(self.constants) - 1

    def watch(self, register):
        """The place of a register among the watched ones, of which it is one from now on."""
        return self.watched.setdefault(register, len(self.watched))

    def predicate(self, text):
        """(index, whether it is negated) of ``p`` or ``!p``."""
        return self.operand(text.lstrip("!"), "pred"), text[0] == "!"

    def own_kind(self, text, otherwise):
        """A register's kind; ``otherwise`` for a constant, which is what is expected of it."""
        return self.kinds[self.index[text]] if text in self.index else otherwise

    def at_least(self, text, kind):
        """(kind, index) of an operand of ``cvt``, ``ld`` or ``st``, whose register may be wider.

        PTX ISA 9.4.1, operand size exceeding instruction-type size.
        """
        own = self.own_kind(text, kind)
        kind = own if BYTES[own] > BYTES[kind] else kind
        return kind, self.operand(text, kind)

    def address(self, text):
        """A function that returns a team's addresses, int64, for ``[register + offset]``."""
        parts = ADDRESS.fullmatch(text)
        if parts is None:
            raise NotImplementedError(f"address {text}")
        base, offset = parts[1], int(parts[2] or 0)
        kind = self.own_kind(base, "u64")
        at = self.operand(base, kind)
        return lambda team: team.active(team.registers[kind][at]).astype(np.int64) + offset


def statements(body):
    """(label or None, text or None) of a PTX body, in order.

    Registers declared in an inner scope are renamed, so that no two scopes share a name.
    """
    found, scopes, number = [], [{}], 0
    position, end = 0, len(body)
    while position < end:
        if skipped := SKIPPED.match(body, position):
            position = skipped.end()
        elif body[position] == "{":
            scopes.append({})
            number += 1
            position += 1
        elif body[position] == "}":
            scopes.pop()
            position += 1
        elif label := LABEL.match(body, position):
            found.append((label.group(1), None))
            position = label.end()
        else:
            stop = body.index(";", position)
            text = " ".join(body[position:stop].split())
            position = stop + 1
            if len(scopes) > 1:
                if text.startswith(".reg"):
                    for name in re.findall(r"%?[\w$]+", text.split(None, 2)[2]):
                        scopes[-1][name] = f"%{name.strip('%')}.{number}"
                    text = renamed(text, scopes[-1])
                else:
                    for scope in scopes[:0:-1]:
                        text = renamed(text, scope)
            found.append((None, text))
    return found


def renamed(text, names):
    return re.sub(r"%?[\w$]+", lambda word: names.get(word.group(), word.group()), text)


def parsed(statement):
    """An ``Instruction`` from its text."""
    parts = INSTRUCTION.fullmatch(statement)
    if parts is None:
        raise NotImplementedError(f"not emulated: {statement}")
    guard, words, operands = parts.groups()
    return Instruction(statement, guard, words.split("."), split_operands(operands))


def split_operands(text):
    """Operands, split at commas outside of brackets."""
    operands, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "," and depth == 0:
            operands.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*operands, last] if last else operands


def components(text):
    """Names in ``{a, b}``; a name by itself is a list of one."""
    return [name.strip() for name in text.strip("{} ").split(",")]


def kind_of(name):
    """The kind that holds values of a PTX type."""
    return HELD_AS.get(name, name)


def space_of(words):
    """The state space that a memory instruction names, or "generic"."""
    named = {word.partition("::")[0] for word in words}
    return next((space for space in SPACES if space in named), "generic")


def constant(kind, value):
    """A number, or the bits of one in an array, as a NumPy array of that kind and no axes."""
    if isinstance(value, np.ndarray):
        return value.view(DTYPES[kind])
    if kind == "pred" or kind.startswith("f"):
        return np.array(value, DTYPES[kind])
    bits = 8 * BYTES[kind]
    return np.array(value & (1 << bits) - 1, DTYPES["u" + kind[1:]]).view(DTYPES[kind])


def round_up(size, multiple):
    return -(-size // multiple) * multiple
