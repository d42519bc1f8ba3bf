"""What some threads do while others wait: mbarriers, ``setmaxnreg`` and barriers of some threads.

An instruction that waits is a ``Wait``: threads that it does not let go on are suspended at it and
execute it again once something has changed. If nothing can change any more, that is an error.

PTX ISA 9.0, sections 9.7.13.15 (mbarrier), 9.7.20.5 (setmaxnreg) and 9.7.13.1 (bar).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from emulator.instructions import instruction, land
from emulator.team import WARP, PTXError


class Wait:
    """An instruction that waits."""

    def go_on(self, team):
        """Which of the team's threads may go on, False for all that are not active."""
        raise NotImplementedError

    def reason(self, team):
        """What the first active thread waits for."""
        raise NotImplementedError


# ---- mbarriers


class Mbarrier:
    """An mbarrier at the same address in each block.

    Attributes
    ----------
    expected, missing, phase : array of shape (blocks,)
        Arrivals per phase, missing arrivals of this phase, and its number. ``expected`` is 0 if a
        block has no mbarrier there.
    left, last_left : array of shape (2, blocks, warps)
        The clocks of those who arrived in this phase and in the last one: ``Clocks.leave``.
    """

    def __init__(self, blocks, warps):
        self.expected, self.missing, self.phase = np.zeros((3, blocks), np.int64)
        self.left = np.full((2, blocks, warps), -1)
        self.last_left = self.left.copy()

    def arrive(self, block, left):
        """Let threads arrive, given by their blocks and what they let others see."""
        for b, of_thread in zip(block, left.transpose(1, 0, 2), strict=True):
            self.left[:, b] = np.maximum(self.left[:, b], of_thread)
            self.missing[b] -= 1
            if self.missing[b] == 0:
                self.last_left[:, b], self.left[:, b] = self.left[:, b], -1
                self.missing[b], self.phase[b] = self.expected[b], self.phase[b] + 1


class Arrival(NamedTuple):
    """An arrival of threads of ``team`` after their copies have landed."""

    team: Any
    members: np.ndarray  # which threads of the team
    number: int  # copies that the team had executed before
    mbarrier: Mbarrier
    left: np.ndarray  # the clocks of the threads
    tags: np.ndarray  # the tags of their copies

    def of(self, chosen):
        """The arrival of some of the team's threads."""
        is_chosen = chosen[self.members]
        members, left = self.members & chosen, self.left[:, is_chosen]
        return self._replace(members=members, left=left)

    def happen(self):
        def is_due(copy):
            return self.members[copy.lanes] & (copy.number < self.number)

        land(self.team, is_due, self.tags)
        self.mbarrier.arrive(self.team.block[self.members], self.left)
        self.team.memories["shared"].changes += 1


def each_mbarrier(team, address):
    """Each mbarrier that active threads name; while it is the caller's, only these are active.

    Threads that execute one instruction together may be in different phases of their loops, as
    those of blocks with different numbers of tiles are.
    """
    shared, mask, lanes = team.memories["shared"], team.mask, team.lanes
    shared.note_read(team, shared.locate(team, address, 8), 8)
    for place in np.unique(address).tolist():
        is_named = np.zeros(team.size, bool)
        is_named[lanes[address == place]] = True
        team.activate(is_named)
        mbarrier, block = shared.mbarriers.get(place), team.active(team.block)
        is_none = np.array([mbarrier is None or mbarrier.expected[b] == 0 for b in block])
        team.check(np.full(len(block), place), is_none, "is no mbarrier")
        yield mbarrier
    team.activate(mask)


def leave(team):
    return team.memories["shared"].clocks.leave(team.active(team.block), team.active(team.warp))


@instruction("mbarrier")
def _mbarrier(kernel, words, operands):
    """Those of mbarriers; ``cp.async.mbarrier.arrive`` too, without ``cp.async``."""
    if words[1] == "init":
        return initialize(kernel, operands)
    if words[1] in ("try_wait", "test_wait") and words[2] == "parity" and len(operands) == 3:
        return TryWait(kernel, operands)
    is_of_copies = len(operands) == 1
    if words[1] != "arrive" or "expect_tx" in words or is_of_copies != ("noinc" in words):
        raise NotImplementedError("forms of mbarrier")
    address = kernel.address(operands[-1])

    def run(team):
        shared = team.memories["shared"]
        tags = shared.tags(team, team.warp_syncs) if is_of_copies else None
        for mbarrier in each_mbarrier(team, address(team)):
            if is_of_copies:
                shared.arrivals.append(
                    Arrival(team, team.is_active, team.copied, mbarrier, leave(team), tags)
                )
            else:
                mbarrier.arrive(team.active(team.block), leave(team))
                shared.changes += 1

    return run


def initialize(kernel, operands):
    address, count = kernel.address(operands[0]), kernel.operand(operands[1], "u32")

    def run(team):
        shared, block = team.memories["shared"], team.active(team.block)
        at, expected = address(team), team.active(team.registers["u32"][count]).astype(np.int64)
        shared.note_write(team, shared.locate(team, at, 8), 8)
        for place in np.unique(at).tolist():
            new = Mbarrier(len(shared.registers), shared.warps)
            mbarrier, here = shared.mbarriers.setdefault(place, new), at == place
            mbarrier.expected[block[here]] = mbarrier.missing[block[here]] = expected[here]

    return run


class TryWait(Wait):
    """``mbarrier.try_wait.parity``, which may be answered with no: so it is once, at first."""

    def __init__(self, kernel, operands):
        self.to = kernel.operand(operands[0], "pred")
        self.address = kernel.address(operands[1])
        self.parity = kernel.operand(operands[2], "u32")

    def go_on(self, team):
        clocks, goes_on = team.memories["shared"].clocks, np.zeros(team.size, bool)
        for mbarrier in each_mbarrier(team, self.address(team)):
            block, lanes = team.active(team.block), team.lanes
            is_over = mbarrier.phase[block] & 1 != team.active(team.registers["u32"][self.parity])
            team.write_active(team.registers["pred"][self.to], is_over)
            seeing, warp = block[is_over], team.active(team.warp)[is_over]
            clocks.see(seeing, warp, mbarrier.last_left[:, seeing])
            goes_on[lanes] = is_over | ~team.was_refused[lanes]
            team.was_refused[lanes] = ~is_over
        return goes_on

    def reason(self, team):
        address, block = self.address(team)[0], team.active(team.block)[0]
        mbarrier = team.memories["shared"].mbarriers[int(address)]
        parity = team.active(team.registers["u32"][self.parity])[0]
        return (
            f"waits for ever at the mbarrier at {int(address):#x}: of its phase "
            f"{mbarrier.phase[block]}, while one of parity {parity} should be over, "
            f"{mbarrier.missing[block]} of {mbarrier.expected[block]} have not arrived"
        )


# ---- registers


class TakeRegisters(Wait):
    """``setmaxnreg.inc``, which waits until other warps of the block released enough."""

    def __init__(self, count):
        self.count = count

    def go_on(self, team):
        team.collective()
        shared, goes_on = team.memories["shared"], np.zeros(team.size, bool)
        if (team.allotted[team.lanes] > self.count).any():
            team.fail(team.allotted[team.lanes] > self.count, "takes registers, but has more")
        for first in team.lanes[::WARP]:
            more = WARP * (self.count - team.allotted[first])
            if shared.registers[team.block[first]] >= more:
                shared.registers[team.block[first]] -= more
                team.allotted[first : first + WARP] = self.count
                goes_on[first : first + WARP] = True
        return goes_on

    def reason(self, team):
        free = team.memories["shared"].registers[team.active(team.block)[0]]
        return f"waits for ever for registers: its block has {free} that no warp has"


@instruction("setmaxnreg")
def _set_registers(kernel, words, operands):
    count = int(operands[0])
    if words[2:] != ["sync", "aligned", "u32"] or count not in range(24, 257, 8):
        raise NotImplementedError("forms of setmaxnreg")
    if words[1] == "inc":
        return TakeRegisters(count)

    def give(team):
        team.collective()
        shared, before = team.memories["shared"], team.allotted[team.lanes]
        if (before < count).any():
            team.fail(before < count, "gives back registers, but has fewer")
        np.add.at(shared.registers, team.active(team.block), before - count)
        team.allotted[team.lanes] = count
        shared.changes += 1

    return give


# ---- barriers


def release_barriers(votes, teams, blocks):
    """Let threads go on that wait at a barrier for which all have come; return whether any do.

    Those of a ``bar.red`` get its result.
    """
    shared, is_any = teams[0].memories["shared"], False
    alive = sum(np.bincount(team.block[team.is_alive], minlength=blocks) for team in teams)
    for number in {n for team in teams for n in team.barrier[team.is_at_barrier].tolist()}:
        waiting = [(team, team.is_at_barrier & (team.barrier == number)) for team in teams]
        awaited, come = np.zeros((2, blocks), np.int64)
        for team, here in waiting:
            np.maximum.at(awaited, team.block[here], team.awaited[here])
            come += np.bincount(team.block[here], minlength=blocks)
        is_full = (come > 0) & (come >= np.where(awaited > 0, awaited, alive))
        released = [(team, here & is_full[team.block]) for team, here in waiting]
        count_votes(votes, released, blocks)
        met = set()
        for team, those in released:
            met.update(zip(team.block[those].tolist(), team.warp[those].tolist(), strict=True))
            team.is_at_barrier[those] = False
            team.warp_syncs[those] += 1
            team.collectives[those] += 1
        if met:
            shared.clocks.meet(*np.array(sorted(met)).T)
            is_any = True
    return is_any


def count_votes(votes, released, blocks):
    """Give the threads that go on from a ``bar.red`` its result."""
    for pc, (mode, kind, to, predicate) in votes.items():
        voters = [(team, those & (team.pc == pc)) for team, those in released]
        yes, number = np.zeros((2, blocks), np.int64)
        for team, is_here in voters:
            yes += np.bincount(team.block[is_here & team.holds(predicate)], minlength=blocks)
            number += np.bincount(team.block[is_here], minlength=blocks)
        result = {"or": yes > 0, "and": yes == number, "popc": yes}[mode]
        for team, is_here in voters:
            team.activate(is_here)
            team.write(team.registers[kind][to], result[team.block])


def refuse_deadlock(teams):
    """Raise PTXError that says what threads wait for, where nothing can change any more."""
    found = {}
    for team in teams:
        for pc in np.unique(team.pc[team.is_suspended]).tolist():
            team.executing = pc
            team.activate(team.is_suspended & (team.pc == pc))
            found.setdefault(pc, team.sentence(0, team.program.code[pc].reason(team)))
        for pc in np.unique(team.pc[team.is_at_barrier]).tolist():
            team.executing = pc - 1
            team.activate(team.is_at_barrier & (team.pc == pc))
            count = team.awaited[team.lanes[0]]
            others = f"{count} threads" if count else "all threads"
            found.setdefault(pc, team.sentence(0, f"waits for ever at a barrier for {others}"))
    raise PTXError("; ".join(found.values()) or "the kernel ends before its cp.async have landed")
