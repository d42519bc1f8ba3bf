"""PTX on NumPy: run a CUDA kernel where there is no GPU, and notice what a GPU would let pass.

``Emulator(text)`` reads one kernel; every instruction becomes a closure over NumPy calls that take
all threads at once. ``forward(module, problem)`` runs a whole rung.

In lockstep all threads of many blocks march together, which is fast and hides what depends on
warps being alike. With an ``order``, a seed, one warp after the other runs from barrier to barrier
in random order, and what no order may decide is a ``PTXError``:

- a byte of shared memory that another warp wrote or read since the last barrier, or another lane
  since the last ``bar.warp.sync``, and at least one of the two wrote (a race);

and in both modes

- shared memory that nobody wrote, or that a ``cp.async`` is still on its way to: what is copied
  arrives when it is waited for and no earlier;
- an address outside of every array, across two of them, or not a multiple of what is accessed;
- an instruction of a whole warp that some of its lanes do not take part in.

Threads that went different ways are brought together by running those first that are furthest
behind in the text, which is how compilers lay it out.

What it does not know: time, bank conflicts, what one block may see of another. ``ex2``, ``lg2`` and
``rcp`` are correctly rounded here and up to two units off on a GPU; ``tanh.approx`` is as coarse as
it is documented. References: PTX ISA 9.0, chapter 9.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

ARENA, SHARED, LOCAL = 0x7000_0000_0000, 1 << 40, 1 << 41  # where generic addresses begin
WARP = 32
LOCKSTEP = 4096  # threads that run at once
GAP = 256  # bytes between two arrays of an arena, more than any access
UNKNOWN, IN_FLIGHT = -1, -2  # who wrote a piece of shared memory: nobody, an unfinished cp.async
SYNCS = 1 << 24  # more bar.warp.sync than a kernel executes

DTYPES = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8,
    "u16": np.uint16, "s16": np.int16, "f16": np.float16,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
SAME = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64",
        "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}  # fmt: skip
BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
SPECIAL = (
    *[f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"],
    "%laneid", "%warpid", "%dynamic_smem_size",
)  # fmt: skip


class PTXError(Exception):
    """What a kernel did and may not do."""


class Arena:
    """Global memory, a ``arguments.Memory``: arrays with gaps that may not be touched."""

    def __init__(self):
        self.data = np.zeros(1 << 20, np.uint8)
        self.is_mine = np.zeros(1 << 20, bool)
        self.end = GAP

    def put(self, array):
        """Copy ``array`` here and return its address."""
        array = np.ascontiguousarray(array)
        address = self.reserve(array.nbytes)
        start = address - ARENA
        self.data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return address

    def scratch(self, shape):
        """Reserve float32 memory that nobody wrote, NaN, and return its address."""
        return self.put(np.full(shape, np.nan, np.float32))

    def get(self, address, shape, dtype):
        """Return a copy of the array at ``address``."""
        start, size = address - ARENA, int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[start : start + size].view(dtype).reshape(shape).copy()

    def reserve(self, size):
        """Return the address of ``size`` bytes, a multiple of 256."""
        start = self.end
        self.end = (start + size + 2 * GAP - 1) // GAP * GAP
        while self.end > self.data.size:
            self.data = np.concatenate([self.data, np.zeros_like(self.data)])
            self.is_mine = np.concatenate([self.is_mine, np.zeros_like(self.is_mine)])
        self.is_mine[start : start + size] = True
        return ARENA + start

    def locate(self, team, address, size):
        """Where in ``data`` the bytes at ``address`` are, one address a lane."""
        at = address - ARENA
        check(team, address, (at < 0) | (at > self.end - size), "is in no array")
        outside = ~(self.is_mine[at] & self.is_mine[at + size - 1])
        check(team, address, outside, "is in no array")
        check(team, address, at & (size - 1) != 0, f"is no multiple of {size}")
        return at

    def reads(self, team, at, size):
        """Whoever reads global memory is right."""

    def writes(self, team, at, size, by=None):
        """And whoever writes it."""


class Local:
    """Memory of each thread by itself."""

    def __init__(self, threads, size):
        self.size = size
        self.data = np.full(threads * size, 0xFF, np.uint8)

    def locate(self, team, address, size):
        check(team, address, (address < 0) | (address > self.size - size), "is outside of .local")
        check(team, address, address & (size - 1) != 0, f"is no multiple of {size}")
        return address + team.active(np.arange(team.size)) * self.size

    def reads(self, team, at, size):
        pass

    def writes(self, team, at, size, by=None):
        pass


class Shared:
    """Shared memory of some blocks, and who last wrote and read each piece of it.

    ``writer`` and ``reader`` hold tags of threads: barriers passed by the block, then warp, then
    warp-wide instructions passed by the warp, then lane. For who wrote these are bar.warp.sync,
    which alone makes a write visible to the warp; a read is over when its lane takes part in any of
    them, in a shuffle say. A piece is as small as the kernel's smallest access. With
    ``finds_races`` False it is only known what was written at all.
    """

    def __init__(self, blocks, size, piece, warps, finds_races):
        self.size = size
        self.stride = (size + 15) // 16 * 16
        self.piece = piece
        self.warps = warps
        self.finds_races = finds_races
        self.data = np.zeros(blocks * self.stride, np.uint8)
        self.writer = np.full(self.data.size // piece, UNKNOWN, np.int64)
        self.reader = np.full(self.data.size // piece, UNKNOWN, np.int64)
        self.epoch = 0

    def locate(self, team, address, size):
        check(
            team, address, (address < 0) | (address > self.size - size),
            f"is outside of the {self.size} bytes of shared memory",
        )  # fmt: skip
        check(team, address, address & (size - 1) != 0, f"is no multiple of {size}")
        return address + team.active(team.block) * self.stride

    def reads(self, team, at, size):
        """Note that the bytes are read, or say why they may not be."""
        pieces = self._pieces(at, size)
        writer = self.writer[pieces]
        self._check(team, writer == UNKNOWN, "reads shared memory that nobody wrote")
        self._check(team, writer == IN_FLIGHT, "reads what cp.async has not been waited for")
        if self.finds_races:
            tag = team.tag(team.syncs)[:, None]
            self._check(team, self._clashes(writer, tag), "reads what another wrote unsynchronised")
            tag = team.tag(team.meetings)[:, None]
            before = self.reader[pieces]
            others = (before >= self._first(tag)) & (before // (SYNCS * WARP) != self._warp(tag))
            self.reader[pieces] = np.where(others, self._first(tag) + self._several, tag)

    def writes(self, team, at, size, by=None):
        """Note that the bytes are written, or say why they may not be."""
        pieces = self._pieces(at, size)
        if not self.finds_races:
            self.writer[pieces] = 0 if by is None else by
            return
        tag = team.tag(team.meetings)[:, None]
        clashes = self._clashes(self.reader[pieces], tag)
        self._check(team, clashes, "overwrites what another read unsynchronised")
        tag = team.tag(team.syncs)[:, None]
        clashes = self._clashes(self.writer[pieces], tag)
        self._check(team, clashes, "overwrites what another wrote unsynchronised")
        written = np.broadcast_to(tag if by is None else by, pieces.shape)
        self.writer[pieces] = written
        if by is None:
            twice = self.writer[pieces] != written
            self._check(team, twice, "writes where another lane writes with it")

    def arrives(self, at, size, tag):
        """Note that what a cp.async of the threads ``tag`` copied is there."""
        self.writer[self._pieces(at, size)] = tag[:, None] if self.finds_races else 0

    @property
    def _several(self):
        return self.warps * SYNCS * WARP

    def _first(self, tag):
        """The smallest tag since the last barrier."""
        return tag // (self._several + SYNCS * WARP) * (self._several + SYNCS * WARP)

    def _warp(self, tag):
        return tag // (SYNCS * WARP)

    def _clashes(self, other, tag):
        is_recent = other >= self._first(tag)
        is_earlier_here = (self._warp(other) == self._warp(tag)) & (other // WARP < tag // WARP)
        return is_recent & (other != tag) & ~is_earlier_here

    def _pieces(self, at, size):
        first = at // self.piece
        return first[:, None] + np.arange(max(size // self.piece, 1))

    def _check(self, team, wrong, what):
        if wrong.any():
            team.fail(wrong.any(axis=1), what)


def check(team, address, wrong, what):
    """Raise a PTXError if anything is wrong with one lane's address."""
    if wrong.any():
        team.fail(wrong, f"address {int(address[np.argmax(wrong)]):#x} {what}")


class Team:
    """Threads that run together, with their registers.

    All arrays have one entry a thread; warps lie one behind the other. ``mask`` are those that the
    present instruction is for, None if it is for all.
    """

    def __init__(self, emulator, block, thread, given):
        self.size = len(thread)
        self.block, self.thread = block, thread
        self.warp, self.lane = thread // WARP, thread % WARP
        self.mask = self._lanes = None
        self.pc = np.zeros(self.size, np.int64)
        self.is_alive = np.ones(self.size, bool)
        self.waits = np.zeros(self.size, bool)  # at a barrier of the block
        self.is_parked = np.zeros(self.size, bool)  # for the other lanes of its warp
        self.syncs = np.zeros(self.size, np.int64)  # bar.warp.sync passed
        self.meetings = np.zeros(self.size, np.int64)  # instructions of whole warps passed
        self.copies, self.groups = [], np.zeros(self.size, np.int64)
        self.regs = {name: [None] * len(emulator.names) for name in DTYPES}
        for bits in ("16", "32", "64"):
            own = [i for i, kind in enumerate(emulator.kinds) if kind == "u" + bits]
            unset = DTYPES["u" + bits](2 ** int(bits) - 1)
            bank = np.full((len(own), self.size), unset, unset.dtype)
            for kind in ("u" + bits, "s" + bits, "f" + bits):
                for i, row in zip(own, bank.view(DTYPES[kind]), strict=True):
                    self.regs[kind][i] = row
        for i, kind in enumerate(emulator.kinds):
            if kind == "pred":
                self.regs["pred"][i] = np.zeros(self.size, bool)
        for kind, value in emulator.constants:
            value = given[value] if isinstance(value, str) else value
            for name, registers in self.regs.items():
                registers.append(constant(kind, value) if name == kind else None)
        for name in SPECIAL:
            if name in emulator.index:
                self.regs["u32"][emulator.index[name]][...] = given[name](self)

    def take(self, mask):
        """Let the next instructions be for the threads in ``mask``; None for all."""
        self.mask, self._lanes = mask, None

    @property
    def lanes(self):
        """Indices of the threads that the instruction is for."""
        if self._lanes is None:
            self._lanes = np.flatnonzero(self.mask)
        return self._lanes

    def active(self, values):
        """``values``, one a thread or one for all, of the threads that the instruction is for."""
        values = np.broadcast_to(values, (self.size,))
        return values if self.mask is None else values[self.lanes]

    def assign(self, register, values):
        """Write ``values``, one for each active thread, into a register."""
        if self.mask is None:
            register[...] = values
        else:
            register[self.lanes] = values

    def write(self, register, values):
        """Write ``values``, one for each thread, into a register of those that are active."""
        if self.mask is None:
            register[...] = values
        else:
            np.putmask(register, self.mask, np.asarray(values).astype(register.dtype, copy=False))

    def meet(self):
        """Which warps execute an instruction of whole warps; an error if only some lanes do."""
        self.meetings[slice(None) if self.mask is None else self.mask] += 1
        if self.mask is None:
            return slice(None)
        by_warp = self.mask.reshape(-1, WARP)
        chosen = by_warp[:, 0]
        if (by_warp != chosen[:, None]).any():
            self.fail(np.ones(len(self.lanes), bool), "is for whole warps, some lanes miss")
        return chosen

    def of_warps(self, chosen, values):
        """(warps, 32) of a register, for the warps that ``meet`` returned."""
        return np.broadcast_to(values, (self.size,)).reshape(-1, WARP)[chosen]

    def tag(self, counts):
        """Who this is and when: see ``Shared``."""
        shared = self.shared
        place = shared.epoch * (shared.warps + 1) + self.warp
        return self.active((place * SYNCS + counts) * WARP + self.lane)

    def fail(self, wrong, what):
        """Raise a PTXError that names the first thread that is ``wrong`` among the active ones."""
        lane = (np.arange(self.size) if self.mask is None else self.lanes)[np.argmax(wrong)]
        block = self.first_block + self.block[lane]
        raise PTXError(f"thread {self.thread[lane]} of block {block} {what}")


def constant(kind, value):
    """A number, or the bits of one, as NumPy's number of that kind."""
    if isinstance(value, np.ndarray):
        return value.view(DTYPES[kind])
    if kind == "pred" or kind.startswith("f"):
        return np.array(value, DTYPES[kind])
    bits = 8 * BYTES[kind]
    return np.array(value & (1 << bits) - 1, DTYPES["u" + kind[1:]]).view(DTYPES[kind])


NO_STATEMENT = re.compile(r"\s+|\.loc\s[^\n]*")
LABEL = re.compile(r"([$\w]+):(?!:)")


def statements(body):
    """(label or None, text or None) of a PTX body, in order; scopes get names of their own."""
    found, scopes, number = [], [{}], 0
    position, end = 0, len(body)
    while position < end:
        if nothing := NO_STATEMENT.match(body, position):
            position = nothing.end()
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


def pieces_of(text):
    """An instruction's operands: split at commas outside of brackets."""
    operands, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "," and depth == 0:
            operands.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*operands, last] if last else operands


def listed(text):
    """Names in ``{a, b}``; a name by itself is a list of one."""
    return [name.strip() for name in text.strip("{} ").split(",")]


INSTRUCTIONS = {}


def instruction(*names):
    """Register a function that turns (emulator, name and modifiers, operands) into a closure."""

    def register(function):
        INSTRUCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


class Emulator:
    """One kernel, read once; ``run`` as often as wanted.

    Attributes
    ----------
    code : list of closures, or None where an instruction directs the flow
    texts : list of str
    """

    def __init__(self, text):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)[^{]*\{", text, re.DOTALL)
        if entry is None or ".func" in text:
            raise NotImplementedError("expected one kernel, .entry, and no functions beside it")
        self.parameters = re.findall(r"\.param\s+\.(\w+)\s+([\w$]+)", entry[1])
        if entry[1].count(".param") != len(self.parameters):
            raise NotImplementedError(f"parameters that are no plain numbers: {entry[1][:200]}")
        body = text[entry.end() : text.rindex("}")]
        self.names, self.kinds, self.index, self.constants = [], [], {}, []
        self.texts, self.labels, self.code = [], {}, []
        self._symbols(text)
        for label, one in statements(body):
            if label is not None:
                self.labels[label] = len(self.texts)
            elif one.startswith(".reg"):
                self._declare(one)
            elif not one.startswith("."):
                self.texts.append(one)
        self.texts.append("exit")
        for name in SPECIAL:
            if any(name in one for one in self.texts):
                self._register(name, "u32")
        self.piece = self._smallest_piece()
        self.flow, self.votes = {}, {}
        self.code = [self._decode(i, one) for i, one in enumerate(self.texts)]
        self._stops()

    def _symbols(self, text):
        """Where shared and local variables lie, and tables in global and constant memory."""
        self.shared, self.local, self.tables = {}, {}, {}
        self.static = self.local_size = 0
        dynamic = []
        variable = re.compile(
            r"(\.extern\s+|\.visible\s+|\.weak\s+|\.common\s+)?\.(shared|local|global|const)\s+"
            r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?\s*(?:=\s*\{?([^;}]*)\}?)?\s*;"
        )
        for linkage, space, align, kind, name, many, count, values in variable.findall(text):
            kind, align = SAME.get(kind, kind), int(align or BYTES[SAME.get(kind, kind)])
            size = BYTES[kind] * int(count or 1)
            if space == "shared" and linkage.strip() == ".extern" and many and not count:
                dynamic.append(name)
            elif space == "shared":
                self.shared[name] = -(-self.static // align) * align
                self.static = self.shared[name] + size
            elif space == "local":
                self.local[name] = -(-self.local_size // align) * align
                self.local_size = self.local[name] + size
            else:
                numbers = [int(x, 0) for x in values.split(",")] if values.strip() else []
                table = np.zeros(int(count or 1), DTYPES["u" + kind[1:]])
                table[: len(numbers)] = [x & (1 << 8 * BYTES[kind]) - 1 for x in numbers]
                self.tables[name] = table
        self.static = -(-self.static // 16) * 16
        for name in dynamic:
            self.shared[name] = self.static

    def _declare(self, text):
        _, kind, names = text.split(None, 2)
        kind = SAME.get(kind[1:], kind[1:])
        kind = kind if kind == "pred" else f"u{8 * BYTES[kind]}"
        for name, count in re.findall(r"(%?[\w$.]+)(?:<(\d+)>)?", names):
            for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self._register(one, kind)

    def _register(self, name, kind):
        self.index[name] = len(self.names)
        self.names.append(name)
        self.kinds.append(kind)

    def _smallest_piece(self):
        """Bytes of the smallest access to shared memory."""
        smallest = 16
        for one in self.texts:
            name = re.sub(r"^@\S+\s+", "", one).split()[0]
            if name.startswith("cp.async") and "group" not in name and "wait" not in name:
                smallest = min(smallest, int(pieces_of(one.split(None, 1)[1])[2]))
            elif re.match(r"(ld|st|atom|red)\.", name) and not re.search(
                r"\.(global|param|local|const)\b", name
            ):
                vector = re.search(r"\.v([24])\b", name)
                size = BYTES[kind_of(name.split(".")[-1])] * int(vector[1] if vector else 1)
                smallest = min(smallest, size)
        return smallest

    def at(self, text, kind):
        """Index of an operand among the registers of a kind; a constant gets one too."""
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
        return len(self.names) + len(self.constants) - 1

    def own_kind(self, text, otherwise):
        """A register's kind, or of a constant what is expected."""
        return self.kinds[self.index[text]] if text in self.index else otherwise

    def address(self, text):
        """A function of the team to the addresses that ``[register + offset]`` means."""
        base, offset = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()
        kind, offset = self.own_kind(base, "u64"), int(offset or 0)
        at = self.at(base, kind)
        return lambda team: team.active(team.regs[kind][at]).astype(np.int64) + offset

    def _decode(self, i, text):
        guard, name, rest = re.fullmatch(r"(?:@(!?%?[\w$.]+)\s+)?([\w.:]+)\s*(.*)", text).groups()
        words, operands = name.split("."), pieces_of(rest)
        try:
            predicate = None if guard is None else self.at(guard.lstrip("!"), "pred")
            is_negated = guard is not None and guard[0] == "!"
            flow = {"bra": "branch", "ret": "exit", "exit": "exit", "bar": "barrier",
                    "barrier": "barrier"}.get(words[0])  # fmt: skip
            if flow == "barrier" and "warp" not in words:
                if guard or not re.fullmatch(r"(sync|red\.(or|and|popc))(\.aligned)?(\.\w+)?",
                                             ".".join(words[1:])):  # fmt: skip
                    raise NotImplementedError("only barriers of all threads")
                self.flow[i] = ("barrier", None, None, False)
                if words[1] == "red":
                    self.votes[i + 1] = self._vote(words, operands)
                elif operands != ["0"]:
                    raise NotImplementedError("only barrier 0 of all threads")
                return None
            if flow in ("branch", "exit"):
                target = self.labels[operands[0]] if flow == "branch" else len(self.texts)
                self.flow[i] = (flow, target, predicate, is_negated)
                return None
            action = INSTRUCTIONS[words[0]](self, words, operands)
        except (NotImplementedError, KeyError, ValueError, IndexError) as error:
            raise NotImplementedError(f"not emulated: {text} ({error!r})") from error
        return action if guard is None else guarded(action, predicate, is_negated)

    def _vote(self, words, operands):
        """What ``bar.red`` asks and where its answer goes: (or, and or popc; kind, to; of)."""
        if operands[1] != "0" or len(operands) != 3:
            raise NotImplementedError("only barrier 0 of all threads")
        kind = "u32" if words[2] == "popc" else "pred"
        of = self.at(operands[2].lstrip("!"), "pred")
        return words[2], kind, self.at(operands[0], kind), of, operands[2][0] == "!"

    def _answer(self, teams, blocks):
        """Give the threads that stand at a ``bar.red`` its answer."""
        for pc, (asked, kind, to, of, is_negated) in self.votes.items():
            voters = [(team, team.waits & (team.pc == pc)) for team in teams]
            yes, number = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
            for team, here in voters:
                holds = team.regs["pred"][of] != is_negated
                yes += np.bincount(team.block[here & holds], minlength=blocks)
                number += np.bincount(team.block[here], minlength=blocks)
            answer = {"or": yes > 0, "and": yes == number, "popc": yes}[asked]
            for team, here in voters:
                team.take(here)
                team.write(team.regs[kind][to], answer[team.block])

    def _stops(self):
        """For each instruction how far one may go on, with all threads and with some of them."""
        number = len(self.texts)
        labels = set(self.labels.values())
        self.is_collective = [
            bool(re.search(r"\b(shfl|vote|match|redux|mma|ldmatrix|bar|barrier)\.", one))
            for one in self.texts
        ]
        self.stop_all, self.stop_some = [0] * number, [0] * number
        for i in range(number - 1, -1, -1):
            ends = i in self.flow or i + 1 == number
            self.stop_all[i] = i if i in self.flow else self.stop_all[i + 1]
            ends = ends or i + 1 in labels or i + 1 in self.flow or self.is_collective[i + 1]
            self.stop_some[i] = i + 1 if ends else self.stop_some[i + 1]

    def run(self, launch, arguments, memory, order=None):
        """Execute a launch: its ``grid``, ``threads`` and ``shared`` bytes.

        ``arguments`` are numbers, nested tuples of them count as their numbers in order. ``order``
        is None for lockstep, or the seed of a random order of warps.
        """
        values = flattened(arguments)
        if len(values) != len(self.parameters):
            raise TypeError(f"{len(self.parameters)} parameters, {len(values)} arguments")
        if launch.threads % WARP:
            raise NotImplementedError(f"{launch.threads} threads are no whole warps")
        given = {}
        for (kind, name), value in zip(self.parameters, values, strict=True):
            given[name] = constant(SAME.get(kind, kind), value)
        for name, table in self.tables.items():
            given[name] = memory.put(table)
        grid = (*launch.grid, 1, 1)[:3]
        number = int(np.prod(grid))
        together = max(1, LOCKSTEP // launch.threads)
        with np.errstate(all="ignore"):
            for first in range(0, number, together):
                blocks = np.arange(first, min(first + together, number))
                self._run_blocks(launch, grid, blocks, given, memory, order)

    def _run_blocks(self, launch, grid, blocks, given, memory, order):
        warps = launch.threads // WARP
        block, thread = np.divmod(np.arange(len(blocks) * launch.threads), launch.threads)
        special = self._special(launch, grid, blocks)
        if order is None:
            members = [slice(None)]
        else:
            members = [thread // WARP == warp for warp in range(warps)]
            rng = np.random.default_rng((order, int(blocks[0])))
        given = {**given, **special}
        teams = [Team(self, block[those], thread[those], given) for those in members]
        shared = Shared(
            len(blocks), self.static + launch.shared, self.piece, warps, order is not None
        )
        for team in teams:
            team.shared, team.memory, team.given = shared, memory, given
            team.first_block = int(blocks[0])
            team.local = Local(team.size, self.local_size)
        while any(team.is_alive.any() for team in teams):
            shared.epoch += 1
            self._answer(teams, len(blocks))
            for i in range(len(teams)) if order is None else rng.permutation(len(teams)):
                teams[i].waits[:] = False
                self._advance(teams[i])
        for team in teams:
            if team.copies:
                raise PTXError("the kernel ends before its cp.async were waited for")

    def _special(self, launch, grid, blocks):
        """Functions of a team to its special registers."""
        place = np.unravel_index(blocks, grid[::-1])[::-1]
        special = {
            "%laneid": lambda team: team.lane,
            "%warpid": lambda team: team.warp,
            "%dynamic_smem_size": lambda team: launch.shared,
        }
        threads = (launch.threads, 1, 1)
        for axis, name in enumerate("xyz"):
            special[f"%ntid.{name}"] = lambda team, axis=axis: threads[axis]
            special[f"%nctaid.{name}"] = lambda team, axis=axis: grid[axis]
            special[f"%ctaid.{name}"] = lambda team, axis=axis: place[axis][team.block]
            special[f"%tid.{name}"] = lambda team, axis=axis: team.thread if axis == 0 else 0
        return special

    def _advance(self, team):
        """Run a team until every thread of it has ended or stands at a barrier of its block."""
        while True:
            ready = team.is_alive & ~team.waits & ~team.is_parked
            if not ready.any():
                if not team.is_parked.any():
                    return
                self._wake(team)
                continue
            pc = int(team.pc[ready].min())
            group = team.is_alive & ~team.waits & (team.pc == pc)
            if self.is_collective[pc] and not group.all():
                group = self._whole_warps(team, pc, group)
                if not group.any():
                    continue
            if group.all():
                team.is_parked[:] = False
                self._advance_all(team, pc)
            else:
                rest = ready & ~group
                self._advance_some(team, pc, group, int(team.pc[rest].min()) if rest.any() else -1)

    def _whole_warps(self, team, pc, group):
        """The lanes of ``group`` whose whole warp is in it; park the others."""
        those = team.is_alive if self.flow.get(pc, " ")[0] == "barrier" else True
        by_warp = (group | ~np.broadcast_to(those, group.shape)).reshape(-1, WARP)
        whole = np.repeat(by_warp.all(axis=1), WARP) & group
        team.is_parked |= group & ~whole
        team.is_parked &= ~whole
        return whole

    def _wake(self, team):
        """Let lanes go on that waited for others of their warp, which meanwhile have ended."""
        for pc in np.unique(team.pc[team.is_parked]):
            group = self._whole_warps(team, int(pc), team.is_parked & (team.pc == pc))
            if group.any():
                self._advance_some(team, int(pc), group, -1)
                return
        team.take(team.is_parked)
        at = self.texts[int(team.pc[team.is_parked].min())]
        self._blame(at, team.fail, team.is_parked[team.is_parked],
                    "waits for lanes of its warp that went elsewhere")  # fmt: skip

    def _advance_all(self, team, pc):
        """All threads of the team stand at ``pc``: go on until they part, wait or end."""
        team.take(None)
        while True:
            stop = self.stop_all[pc]
            self._execute(team, pc, stop)
            flow, target, predicate, is_negated = self.flow[stop]
            pc = stop + 1
            if flow == "barrier":
                team.waits[:], team.pc[:] = True, pc
                return
            if predicate is None:
                goes = True
            else:
                chosen = team.regs["pred"][predicate] != is_negated
                goes = bool(chosen.all())
                if not goes and chosen.any():
                    self._part(team, chosen, ~chosen, flow, target, pc)
                    return
            if goes and flow == "exit":
                team.is_alive[:] = False
                return
            if goes:
                pc = target

    def _advance_some(self, team, pc, group, others):
        """Some threads stand at ``pc``, the nearest others at ``others``: let the some go on."""
        team.take(group)
        while True:
            flow = self.flow.get(pc)
            if flow is None:
                stop = self.stop_some[pc]
                self._execute(team, pc, stop)
                pc = stop
            elif flow[0] == "barrier":
                team.waits |= group
                team.pc[group] = pc + 1
                return
            else:
                kind, target, predicate, is_negated = flow
                chosen = group
                if predicate is not None:
                    chosen = group & (team.regs["pred"][predicate] != is_negated)
                if kind == "exit" or (not np.array_equal(chosen, group) and chosen.any()):
                    self._part(team, chosen, group & ~chosen, kind, target, pc + 1)
                    return
                pc = target if chosen.any() else pc + 1
            if self.is_collective[pc] or others == -1 or pc >= others:
                team.pc[group] = pc
                return

    def _part(self, team, chosen, rest, flow, target, following):
        team.pc[rest] = following
        if flow == "exit":
            team.is_alive &= ~chosen
        else:
            team.pc[chosen] = target

    def _execute(self, team, start, stop):
        i = start
        try:
            for i in range(start, stop):
                self.code[i](team)
        except PTXError as fault:
            raise PTXError(f"{self.texts[i]}: {fault}") from None

    def _blame(self, text, action, *arguments):
        try:
            action(*arguments)
        except PTXError as fault:
            raise PTXError(f"{text}: {fault}") from None


def flattened(arguments):
    """The numbers in nested tuples, in order."""
    if isinstance(arguments, (tuple, list)):
        return [number for one in arguments for number in flattened(one)]
    return [arguments]


def kind_of(name):
    return SAME.get(name, name)


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


def ptx_of(launch, cc=(9, 0)):
    """The PTX of a launch's kernel, compiled when it is first asked for."""
    return _ptx(launch._replace(grid=(1, 1, 1), shared=0), cc)


@cache
def _ptx(kernel, cc):
    from minimha.kernels.cuda.launch import ptx as ptx_of

    return ptx_of(kernel, cc)


emulator_of = cache(Emulator)  # of a text


def forward(module, problem, order=None, *, change=None, cc=(9, 0)):
    """O and L of ``problem`` from a rung that takes addresses.

    ``order`` is that of ``Emulator.run``; ``change`` is applied to the PTX before it is read.
    """
    from minimha.kernels.cuda import arguments as cuda_entry

    memory = Arena()
    arguments = cuda_entry.place(problem, memory)
    for launch, given in module.launches(problem, arguments, memory.scratch):
        text = ptx_of(launch, cc)
        emulator = emulator_of(text) if change is None else Emulator(change(text))
        emulator.run(launch, given, memory, order)
    return cuda_entry.taken(problem, arguments, memory)
