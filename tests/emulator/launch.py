"""A kernel, decoded, and its launches."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from emulator.instructions import INSTRUCTIONS, guarded
from emulator.memory import WARP, Arena, Local, Shared
from emulator.parse import BYTES, DTYPES, SAME, constant, kind_of, pieces_of, statements
from emulator.team import SPECIAL, PTXError, Team

LOCKSTEP = 4096  # threads that run at once


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
