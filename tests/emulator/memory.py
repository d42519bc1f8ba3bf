"""Global, local and shared memory, and the accesses that each of them refuses.

A memory finds its bytes with ``locate`` and receives each access by ``note_read`` and
``note_write``. Each of these raises ``PTXError`` through the team that accesses it.
"""

from __future__ import annotations

import numpy as np

from emulator.clocks import Clocks
from emulator.parse import round_up
from emulator.team import WARP

ARENA, SHARED, LOCAL = 0x7000_0000_0000, 1 << 40, 1 << 41  # where generic addresses begin
GAP = 256  # bytes between two arrays of an arena, more than any access
UNWRITTEN, IN_FLIGHT = -1, -2  # instead of a writer's tag; a cp.async is in flight until waited for
COLLECTIVES = 1 << 24  # more instructions of whole warps than one warp executes in a kernel


class Memory:
    """Memory in which every access within its bounds is allowed."""

    def note_read(self, team, at, size):
        """Record that the active threads read ``size`` bytes at ``at``."""

    def note_write(self, team, at, size, by=None):
        """Record that they write them."""


class Arena(Memory):
    """Global memory: arrays at multiples of 256 bytes with gaps between them, which are guarded."""

    def __init__(self):
        self.data = np.zeros(1 << 20, np.uint8)
        self.is_reserved = np.zeros(1 << 20, bool)
        self.end = GAP

    def put(self, array):
        """Copy ``array`` here and return its address."""
        array = np.ascontiguousarray(array)
        address = self.reserve(array.nbytes)
        start = address - ARENA
        self.data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return address

    def scratch(self, shape):
        """Reserve float32 memory, NaN until a kernel writes it, and return its address."""
        return self.put(np.full(shape, np.nan, np.float32))

    def get(self, address, shape, dtype):
        """Return a copy of the array at ``address``."""
        start, size = address - ARENA, int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[start : start + size].view(dtype).reshape(shape).copy()

    def reserve(self, size):
        """Return the address of ``size`` bytes, a multiple of 256."""
        start = self.end
        self.end = round_up(start + size + GAP, GAP)
        while self.end > self.data.size:
            self.data = np.concatenate([self.data, np.zeros_like(self.data)])
            self.is_reserved = np.concatenate([self.is_reserved, np.zeros_like(self.is_reserved)])
        self.is_reserved[start : start + size] = True
        return ARENA + start

    def locate(self, team, address, size):
        """Return where in ``data`` each active thread's ``size`` bytes at ``address`` begin."""
        at = address - ARENA
        team.check(address, (at < 0) | (at > self.end - size), "is in no array")
        is_inside = self.is_reserved[at] & self.is_reserved[at + size - 1]
        team.check(address, ~is_inside, "is in no array")
        team.check_alignment(address, size)
        return at


class Local(Memory):
    """Memory of each thread by itself; all bits are set until it is written."""

    def __init__(self, threads, size):
        self.size = size
        self.data = np.full(threads * size, 0xFF, np.uint8)

    def locate(self, team, address, size):
        is_outside = (address < 0) | (address > self.size - size)
        team.check(address, is_outside, "is outside of .local")
        team.check_alignment(address, size)
        return address + team.lanes * self.size


class Shared(Memory):
    """Shared memory of some blocks, and which thread last wrote and read each granule of it.

    A granule has the size of the kernel's smallest access. Its last writer, and the last reader
    of each warp, are kept as tags, integers made of

    - the time of the warp, see ``Clocks``,
    - the warp,
    - the collectives that the warp has executed,
    - the lane.

    Two warps are ordered by their clocks. Two lanes of a warp are ordered by collectives: a write
    becomes visible to other lanes with a ``bar.warp.sync``, a read is over with any collective,
    such as a shuffle. Of several lanes of one warp that read a granule only the last is kept.

    With ``finds_races`` False it only notices missing writes, missing fences and copies in flight.

    ``has_products`` if the kernel has some ``wgmma``. Then it also knows how many products under
    way read a granule.
    """

    def __init__(self, blocks, size, granule, warps, finds_races, has_products=False):
        self.size = size
        self.stride = round_up(size, 16)
        self.granule = granule
        self.finds_races = finds_races
        self.data = np.zeros(blocks * self.stride, np.uint8)
        granules = self.data.size // granule
        self.writer = np.full(granules, UNWRITTEN, np.int64)
        if finds_races:
            self.reader = np.full((granules, warps), UNWRITTEN, np.int64)
        self.has_products = has_products
        self.products = np.zeros(granules, np.int64)
        self.warps, self.clocks = warps, Clocks(blocks, warps)
        self.mbarriers, self.arrivals = {}, []  # by address; once copies have landed
        self.registers = np.zeros(blocks, np.int64)  # registers of a block that no warp has
        self.changes = 0  # the number of events that others may wait for

    def tags(self, team, collectives):
        """Each thread's tag, given how many collectives each has executed."""
        times = self.clocks.now[team.block, team.warp]
        return ((times * self.warps + team.warp) * COLLECTIVES + collectives) * WARP + team.lane

    def locate(self, team, address, size):
        is_outside = (address < 0) | (address > self.size - size)
        team.check(address, is_outside, f"is outside of the {self.size} bytes of shared memory")
        team.check_alignment(address, size)
        return address + team.active(team.block) * self.stride

    def note_read(self, team, at, size):
        granules = self._granules(at, size)
        writer = self.writer[granules]
        refuse(team, writer == UNWRITTEN, "reads shared memory that was never written")
        refuse(team, writer == IN_FLIGHT, "reads what cp.async has not been waited for")
        if self.finds_races:
            is_race = self._is_unordered(team, writer, team.warp_syncs)
            refuse(team, is_race, "reads what another thread wrote, unsynchronised")
            tags = team.active(self.tags(team, team.collectives))
            self.reader[granules, team.active(team.warp)[:, None]] = tags[:, None]

    def note_write(self, team, at, size, by=None):
        """Record that the active threads write; ``by`` IN_FLIGHT if it is a ``cp.async``."""
        granules = self._granules(at, size)
        if self.has_products:
            is_read = self.products[granules] > 0
            refuse(team, is_read, "overwrites what a wgmma that was not waited for reads")
        tags = team.active(self.tags(team, team.warp_syncs))[:, None]
        if self.finds_races:
            is_race = self._is_unordered(team, self.reader[granules], team.collectives).any(axis=2)
            refuse(team, is_race, "overwrites what another thread read, unsynchronised")
            is_race = self._is_unordered(team, self.writer[granules], team.warp_syncs)
            refuse(team, is_race, "overwrites what another thread wrote, unsynchronised")
        written = np.broadcast_to(tags if by is None else by, granules.shape)
        self.writer[granules] = written
        if self.finds_races and by is None:
            is_lost = self.writer[granules] != written
            refuse(team, is_lost, "writes where another lane writes in the same instruction")

    def note_arrival(self, at, size, tags):
        """Record that a ``cp.async`` of the threads with these tags has arrived."""
        self.writer[self._granules(at, size)] = tags[:, None]

    def let_arrive(self, team, chosen):
        """Let those of ``arrivals`` happen that are of the ``chosen`` threads of a team."""
        arrivals, self.arrivals = self.arrivals, []
        for arrival in arrivals:
            rest = arrival
            if arrival.team is team:
                arrival.of(chosen).happen()
                rest = arrival.of(~chosen)
            if rest.members.any():
                self.arrivals.append(rest)

    def note_product(self, team, at, size):
        """Record that a product that the active threads start reads ``size`` bytes at ``at``."""
        self.note_read(team, at, size)
        granules = self._granules(at, size)
        time, warp = divmod(self.writer[granules] // (COLLECTIVES * WARP), self.warps)
        fenced = self.clocks.seen[1, team.active(team.block)[:, None], self._own(team), warp]
        refuse(team, time > fenced, "reads what has not passed a fence.proxy.async")
        np.add.at(self.products, granules, 1)

    def end_product(self, team, at, size):
        """Record that it has been waited for, and was reading until then."""
        self.note_read(team, at, size)
        granules = self._granules(at, size)
        np.subtract.at(self.products, granules, 1)

    def _granules(self, at, size):
        """(threads, granules of its accesses); ``at`` is (threads,) or (threads, accesses)."""
        first = at // self.granule
        granules = first[..., None] + np.arange(max(size // self.granule, 1))
        return granules.reshape(len(at), -1)

    def _own(self, team):
        return team.active(team.warp)[:, None]

    def _is_unordered(self, team, others, collectives):
        """Whether nothing orders the accesses of ``others``, tags, before the active threads'."""
        shape = (-1,) + (1,) * (others.ndim - 1)
        block, own, lane, collectives = (
            team.active(x).reshape(shape) for x in (team.block, team.warp, team.lane, collectives)
        )
        rest, other_lane = divmod(others, WARP)
        rest, before = divmod(rest, COLLECTIVES)
        time, warp = divmod(rest, self.warps)
        is_ordered_in_warp = (other_lane == lane) | (before < collectives)
        is_ordered = np.where(
            warp == own, is_ordered_in_warp, time <= self.clocks.seen[0, block, own, warp]
        )
        return (others >= 0) & ~is_ordered


def refuse(team, is_wrong, what):
    """Raise PTXError if an active thread, an entry along axis 0, ``is_wrong`` somewhere."""
    if is_wrong.any():
        team.fail(is_wrong.any(axis=1), what)
