"""Global, local and shared memory."""

from __future__ import annotations

import numpy as np

ARENA, SHARED, LOCAL = 0x7000_0000_0000, 1 << 40, 1 << 41  # where generic addresses begin
WARP = 32
GAP = 256  # bytes between two arrays of an arena, more than any access
UNKNOWN, IN_FLIGHT = -1, -2  # who wrote a piece of shared memory: nobody, an unfinished cp.async
SYNCS = 1 << 24  # more bar.warp.sync than a kernel executes


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
