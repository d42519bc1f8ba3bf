"""A team of threads: their registers, which of them execute what next, and where they reconverge.

The threads of a team that are at the same instruction execute it together. Where they diverge,
those that are furthest behind in the text go first, up to where the next ones wait: compilers lay
code out so that this brings them together again. Instructions of whole warps ("collectives":
shuffles, votes, matrix products, barriers) hold lanes back until the other lanes of their warp
arrive; if these went elsewhere, that is an error.
"""

from __future__ import annotations

import numpy as np

from emulator.parse import DTYPES, SPECIAL, constant

WARP = 32
REGISTERS = 65536  # of a multiprocessor
FREE = -1  # instead of a group of products that uses a register


class PTXError(Exception):
    """A kernel did what PTX does not allow, or leaves undefined."""


class Team:
    """Threads that run together; arrays have one entry per thread, warp after warp.

    Attributes
    ----------
    registers : dict of str to list of array
        By kind, then by the index of ``Kernel.operand``. A register's kinds of the same width are
        views of the same bytes. Constants follow, as arrays without axes.
    mask : array or None
        The active threads, which execute the current instruction; None for all.
    pc : array
        Where each thread continues; out of date while it runs.
    is_alive, is_at_barrier, is_parked, is_suspended : array
        Not yet exited; waiting at a barrier; waiting for the other lanes of its warp; refused by
        the ``Wait`` at its ``pc``.
    barrier, awaited : array
        The barrier at which the thread waits or last waited, for how many threads; 0 for all.
    was_refused, changes : array, int
        Whether its last ``mbarrier.try_wait`` failed; ``Shared.changes`` when suspended threads
        last tried again.
    allotted : array
        Registers per thread, at first an equal share.
    warp_syncs, collectives : array
        The numbers of ``bar.warp.sync`` and of all collectives that the thread has executed.
    copies, copied, groups : list of Copy, int, array
        Every ``cp.async`` in flight, the number executed, and the thread's committed groups.
    products, product_groups : list of Product, array
        Every ``wgmma`` under way, and the thread's committed groups of them.
    used_by, is_fenced : array of shape (registers that some ``wgmma`` uses, threads)
        The group under way that uses a register, or FREE, and whether ``wgmma.fence`` was passed
        since another instruction did.
    given : dict of str to array
        Values of parameters and addresses of tables.
    memories : dict of str to Memory
        By state space.
    """

    def __init__(self, program, launch, grid, first_block, block, thread, given, memories):
        kernel = program.kernel
        self.program, self.given, self.memories = program, given, memories
        self.size, self.first_block = len(thread), first_block
        self.block, self.thread = block, thread
        self.warp, self.lane = thread // WARP, thread % WARP
        self.activate(None)
        self.executing = 0
        self.pc, self.warp_syncs, self.collectives, self.groups, self.product_groups = np.zeros(
            (5, self.size), np.int64
        )
        self.is_at_barrier, self.is_parked, self.is_suspended, self.was_refused = np.zeros(
            (4, self.size), bool
        )
        self.is_alive = np.ones(self.size, bool)
        self.barrier, self.awaited = np.zeros((2, self.size), np.int64)
        self.allotted = np.full(self.size, min(255, REGISTERS // launch.threads) // 8 * 8)
        self.copies, self.products, self.copied, self.changes = [], [], 0, 0
        self.used_by = np.full((len(kernel.watched), self.size), FREE)
        self.is_fenced = np.zeros(self.used_by.shape, bool)
        self.registers = {kind: [None] * len(kernel.kinds) for kind in DTYPES}
        for bits in ("16", "32", "64"):
            own = [i for i, kind in enumerate(kernel.kinds) if kind == "u" + bits]
            unset = DTYPES["u" + bits](2 ** int(bits) - 1)
            bank = np.full((len(own), self.size), unset, unset.dtype)
            for kind in ("u" + bits, "s" + bits, "f" + bits):
                for i, row in zip(own, bank.view(DTYPES[kind]), strict=True):
                    self.registers[kind][i] = row
        for i, kind in enumerate(kernel.kinds):
            if kind == "pred":
                self.registers["pred"][i] = np.zeros(self.size, bool)
        for kind, value in kernel.constants:
            value = given[value] if isinstance(value, str) else value
            for name, registers in self.registers.items():
                registers.append(constant(kind, value) if name == kind else None)
        special = self._special_registers(launch, grid)
        for name in SPECIAL:
            if name in kernel.index:
                self.registers["u32"][kernel.index[name]][...] = special[name]

    def _special_registers(self, launch, grid):
        special = {
            "%laneid": self.lane, "%warpid": self.warp, "%dynamic_smem_size": launch.shared,
        }  # fmt: skip
        place = np.unravel_index(self.first_block + self.block, grid[::-1])[::-1]
        for axis, name in enumerate("xyz"):
            special[f"%tid.{name}"] = self.thread if axis == 0 else 0
            special[f"%ntid.{name}"] = launch.threads if axis == 0 else 1
            special[f"%ctaid.{name}"] = place[axis]
            special[f"%nctaid.{name}"] = grid[axis]
        return special

    # ---- what instructions use

    def activate(self, mask):
        """Let the next instructions be for the threads in ``mask``; None for all."""
        self.mask, self._lanes = mask, None

    def narrow(self, mask):
        """Let them be for those of the active threads that are in ``mask``; return the mask before.

        ``activate`` with that mask undoes it.
        """
        before = self.mask
        self.activate(mask if before is None else mask & before)
        return before

    @property
    def lanes(self):
        """Indices of the active threads."""
        if self._lanes is None:
            self._lanes = np.arange(self.size) if self.mask is None else np.flatnonzero(self.mask)
        return self._lanes

    @property
    def is_active(self):
        return np.ones(self.size, bool) if self.mask is None else self.mask

    def active(self, values):
        """``values``, one per thread or one for all, of the active threads only."""
        values = np.broadcast_to(values, (self.size,))
        return values if self.mask is None else values[self.lanes]

    def write_active(self, register, values):
        """Write ``values``, one per active thread, into a register."""
        if self.mask is None:
            register[...] = values
        else:
            register[self.lanes] = values

    def write(self, register, values):
        """Write ``values``, one per thread or one for all, but only for the active threads."""
        if self.mask is None:
            register[...] = values
        else:
            np.putmask(register, self.mask, np.asarray(values).astype(register.dtype, copy=False))

    def holds(self, predicate):
        """Where a predicate holds, given as (index, whether it is negated)."""
        index, is_negated = predicate
        return self.registers["pred"][index] != is_negated

    def collective(self):
        """Count an instruction of whole warps and return which warps execute it.

        It raises PTXError if only some lanes of a warp are active.
        """
        self.collectives[slice(None) if self.mask is None else self.mask] += 1
        if self.mask is None:
            return slice(None)
        by_warp = self.mask.reshape(-1, WARP)
        warps = by_warp[:, 0]
        if (by_warp != warps[:, None]).any():
            self.fail(np.ones(len(self.lanes), bool), "is for whole warps, some lanes are missing")
        return warps

    def by_warp(self, values, warps):
        """(warps, 32) values, of those warps that ``collective`` returned."""
        return np.broadcast_to(values, (self.size,)).reshape(-1, WARP)[warps]

    def write_by_warp(self, register, warps, values):
        """Write (warps, 32) values into a register of those warps."""
        register.reshape(-1, WARP)[warps] = values

    def check(self, address, is_wrong, what):
        """Raise PTXError if something ``is_wrong`` with an active thread's address."""
        if is_wrong.any():
            self.fail(is_wrong, f"address {int(address[np.argmax(is_wrong)]):#x} {what}")

    def check_alignment(self, address, size):
        self.check(address, address & (size - 1) != 0, f"is not a multiple of {size}")

    def fail(self, is_wrong, what):
        """Raise PTXError, naming the instruction and the first active thread that ``is_wrong``."""
        raise PTXError(self.sentence(int(np.argmax(is_wrong)), what))

    def sentence(self, number, what):
        """The sentence ``what`` about an active thread, with its instruction."""
        thread = self.lanes[number]
        block = self.first_block + self.block[thread]
        text = self.program.kernel.instructions[self.executing].text
        return f"{text}: thread {self.thread[thread]} of block {block} {what}"

    # ---- who executes what next

    def advance(self):
        """Run until every thread has exited or waits for what others have to do."""
        is_collective = self.program.is_collective
        while True:
            free = self.is_alive & ~self.is_at_barrier & ~self.is_suspended
            ready = free & ~self.is_parked
            if not ready.any():
                if self.may_be_woken:
                    self.changes = self.memories["shared"].changes
                    self.is_suspended[:] = False
                elif self.is_parked.any() and not self.is_suspended.any():
                    self._resume_parked()
                else:
                    return
                continue
            pc = int(self.pc[ready].min())
            group = free & (self.pc == pc)
            if is_collective[pc] and not group.all():
                group = self._converged(pc, group)
                if not group.any():
                    continue
            if group.all():
                self.is_parked[:] = False
                self._advance_all(pc)
            else:
                rest = ready & ~group
                self._advance_some(pc, group, int(self.pc[rest].min()) if rest.any() else None)

    @property
    def may_be_woken(self):
        """Whether something has changed since threads were suspended."""
        return self.is_suspended.any() and self.changes != self.memories["shared"].changes

    def _converged(self, pc, group):
        """Which of ``group``, all at ``pc``, have their whole warp in it; the others are parked.

        A barrier of the block does not wait for lanes that have exited.
        """
        flow = self.program.flow.get(pc)
        is_expected = self.is_alive if flow and flow.kind == "barrier" else np.True_
        by_warp = (group | ~is_expected).reshape(-1, WARP)
        converged = np.repeat(by_warp.all(axis=1), WARP) & group
        self.is_parked |= group & ~converged
        self.is_parked &= ~converged
        return converged

    def _resume_parked(self):
        """Advance lanes parked at a barrier that the rest of their warp has meanwhile exited."""
        for pc in np.unique(self.pc[self.is_parked]).tolist():
            group = self._converged(pc, self.is_parked & (self.pc == pc))
            if group.any():
                self._advance_some(pc, group, None)
                return
        self.activate(self.is_parked)
        self.executing = int(self.pc[self.is_parked].min())
        self.fail(self.is_parked[self.is_parked],
                  "waits for lanes of its warp that went elsewhere")  # fmt: skip

    def _advance_all(self, pc):
        """Run all threads, which are at ``pc``, until they diverge, wait or exit."""
        self.activate(None)
        while True:
            stop = self.program.stop_all[pc]
            self._execute(pc, stop)
            kind, target, guard, _ = self.program.flow[stop]
            pc = stop + 1
            if kind == "barrier":
                self._wait_at_barrier(np.ones(self.size, bool), stop)
                return
            if kind == "wait":
                if not self._goes_on(stop, np.ones(self.size, bool)):
                    return
                continue
            chosen = np.True_ if guard is None else self.holds(guard)
            if chosen.all():
                if kind == "exit":
                    self._exit(np.ones(self.size, bool))
                    return
                pc = target
            elif chosen.any():
                self._diverge(chosen, ~chosen, kind, target, pc)
                return

    def _advance_some(self, pc, group, others):
        """Run ``group``, which is at ``pc``, until it reaches ``others``, diverges, waits or exits.

        ``others`` is where the nearest threads outside of it are, None if there are none.
        """
        self.activate(group)
        while True:
            flow = self.program.flow.get(pc)
            if flow is None:
                stop = self.program.stop_some[pc]
                self._execute(pc, stop)
                pc = stop
            elif flow.kind == "barrier":
                self._wait_at_barrier(group, pc)
                return
            elif flow.kind == "wait":
                if not self._goes_on(pc, group):
                    return
                pc += 1
            else:
                chosen = group if flow.guard is None else group & self.holds(flow.guard)
                is_uniform = not chosen.any() or np.array_equal(chosen, group)
                if flow.kind == "exit" or not is_uniform:
                    self._diverge(chosen, group & ~chosen, flow.kind, flow.target, pc + 1)
                    return
                pc = flow.target if chosen.any() else pc + 1
            if others is None or pc >= others or self.program.is_collective[pc]:
                self.pc[group] = pc
                return

    def _wait_at_barrier(self, group, pc):
        self.is_at_barrier |= group
        self.barrier[group], self.awaited[group] = self.program.flow[pc].barrier
        self.pc[group] = pc + 1

    def _goes_on(self, pc, group):
        """Whether all of ``group`` may go on from a ``Wait``; if not, those that may not wait."""
        self.executing = pc
        may = self.program.code[pc].go_on(self)
        if np.array_equal(may, group):
            return True
        self.pc[group] = np.where(may[group], pc + 1, pc)
        self.is_suspended |= group & ~may
        return False

    def _diverge(self, chosen, rest, kind, target, following):
        """Let ``chosen`` exit or branch to ``target``, and ``rest`` continue at ``following``."""
        self.pc[rest] = following
        if kind == "exit":
            self._exit(chosen)
        else:
            self.pc[chosen] = target

    def _exit(self, chosen):
        """Let the threads that are ``chosen`` end, without copies of theirs in flight."""
        for copy in self.copies:
            if chosen[copy.lanes].any():
                thread = self.thread[copy.lanes[chosen[copy.lanes]][0]]
                raise PTXError(f"thread {thread} exits before its cp.async were waited for")
        self.is_alive &= ~chosen

    def _execute(self, start, stop):
        """Execute the instructions from ``start`` to before ``stop``, which all fall through."""
        code = self.program.code
        for i in range(start, stop):
            self.executing = i
            code[i](self)
