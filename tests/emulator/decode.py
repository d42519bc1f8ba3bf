"""A ``Kernel`` to a ``Program``: closures, branches, and where threads may meet others."""

from __future__ import annotations

import re
from typing import NamedTuple

from emulator.instructions import INSTRUCTIONS
from emulator.parse import Kernel
from emulator.waits import Wait
from emulator.wgmma import watched

COLLECTIVE = ("shfl", "vote", "mma", "wgmma", "ldmatrix", "bar", "barrier", "setmaxnreg")
NOT_EMULATED = {"cc", "relu", "satfinite", "xorsign"}  # modifiers
REGISTER = re.compile(r"%[\w$.]+")
BARRIER = re.compile(r"(sync|red\.(or|and|popc))(\.aligned)?(\.\w+)?")


class Flow(NamedTuple):
    """An instruction after which threads continue elsewhere, or later."""

    kind: str  # "branch", "exit", "barrier" or "wait"
    target: int | None = None  # the instruction that a branch leads to
    guard: tuple[int, bool] | None = None  # a ``Kernel.predicate``
    barrier: tuple[int, int] | None = None  # its number, and its number of threads; 0 for all


class Vote(NamedTuple):
    """The reduction of a ``bar.red``: ``mode`` of ``predicate`` goes to register ``to``."""

    mode: str
    kind: str
    to: int
    predicate: tuple[int, bool]


class Program:
    """A kernel that teams can execute.

    Attributes
    ----------
    kernel : Kernel
    code : list of callables of a team; a ``Wait``, or None where ``flow`` has the instruction
    flow : dict of int to Flow
    votes : dict of int to Vote
        By the instruction after each ``bar.red``, at which its threads wait.
    is_collective : list of bool
        Whether an instruction is for whole warps.
    stop_all, stop_some : list of int
        How far threads may run from each instruction: all threads of a team up to the next
        ``flow``, some of them no further than the next label or collective, where others may join.
    """

    def __init__(self, text):
        self.kernel = Kernel(text)
        self.flow, self.votes = {}, {}
        instructions, self.code = self.kernel.instructions, []
        for i, one in enumerate(instructions):
            try:
                self.code.append(self._decode(i, one))
            except (NotImplementedError, KeyError, ValueError, IndexError) as error:
                raise NotImplementedError(f"not emulated: {one.text} ({error!r})") from error
        self._watch()
        self.is_collective = [one.words[0] in COLLECTIVE for one in instructions]
        labels, end = set(self.kernel.labels.values()), len(instructions)
        self.stop_all, self.stop_some = [0] * end, [0] * end
        for i in range(end - 1, -1, -1):
            self.stop_all[i] = i if i in self.flow else self.stop_all[i + 1]
            is_stop = (
                i in self.flow or i + 1 in self.flow or i + 1 in labels or self.is_collective[i + 1]
            )
            self.stop_some[i] = i + 1 if is_stop else self.stop_some[i + 1]

    def _watch(self):
        """Let instructions beside ``wgmma`` notice that they access its registers."""
        if not self.kernel.watched:
            return
        index, rows_of = self.kernel.index, self.kernel.watched
        for i, one in enumerate(self.kernel.instructions):
            registers = {index.get(name) for name in REGISTER.findall(one.text)}
            rows = [rows_of[register] for register in registers if register in rows_of]
            if rows and one.words[0] != "wgmma":
                self.code[i] = watched(self.code[i], rows)

    def _decode(self, i, instruction):
        """The closure of one instruction, or None if ``flow`` now has it."""
        _, guard, words, operands = instruction
        guard = None if guard is None else self.kernel.predicate(guard)
        if words[0] == "bra":
            self.flow[i] = Flow("branch", self.kernel.labels[operands[0]], guard)
        elif words[0] in ("ret", "exit"):
            self.flow[i] = Flow("exit", None, guard)
        elif words[0] in ("bar", "barrier") and "warp" not in words:
            if guard or not BARRIER.fullmatch(".".join(words[1:])):
                raise NotImplementedError("only unconditional barriers that all wait at")
            if words[1] == "red":
                to, *operands, predicate = operands
                kind = "u32" if words[2] == "popc" else "pred"
                self.votes[i + 1] = Vote(
                    words[2], kind, self.kernel.operand(to, kind), self.kernel.predicate(predicate)
                )
            number, count = map(int, [*operands, 0][:2])
            self.flow[i] = Flow("barrier", barrier=(number, count))
        elif words[0] not in INSTRUCTIONS or NOT_EMULATED & set(words):
            raise NotImplementedError(f"no instruction {'.'.join(words)}")
        else:
            action = INSTRUCTIONS[words[0]](self.kernel, words, operands)
            if isinstance(action, Wait):
                if guard is not None:
                    raise NotImplementedError("waits of some threads only")
                self.flow[i] = Flow("wait")
            return action if guard is None else guarded(action, guard)
        return None


def guarded(action, guard):
    """An instruction for the threads whose predicate holds."""

    def run(team):
        before = team.narrow(team.holds(guard))
        if team.mask.any():
            action(team)
        team.activate(before)

    return run
