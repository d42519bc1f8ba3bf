"""Threads that run together, with their registers."""

from __future__ import annotations

import numpy as np

from emulator.memory import SYNCS, WARP
from emulator.parse import DTYPES, constant

SPECIAL = (
    *[f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"],
    "%laneid", "%warpid", "%dynamic_smem_size",
)  # fmt: skip


class PTXError(Exception):
    """What a kernel did and may not do."""


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
