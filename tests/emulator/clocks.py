"""What happened before what: a vector clock per warp.

Each warp has a time, which advances whenever it makes its accesses visible to other warps. Every
warp knows up to which time it has seen each other warp; later accesses of that warp are unordered
with its own. Lamport, "Time, clocks, and the ordering of events", 1978;
Mattern, "Virtual time and global states of distributed systems", 1989.
"""

from __future__ import annotations

import numpy as np


class Clocks:
    """The clocks of all warps of some blocks.

    Attributes
    ----------
    now : array of shape (blocks, warps)
    seen : array of shape (2, blocks, warps, warps)
        ``seen[0, b, x, y]`` is the time up to which warp x has seen warp y, or -1; ``seen[1]`` is
        the same for accesses that passed a ``fence.proxy.async`` in either warp.
    """

    def __init__(self, blocks, warps):
        self.now = np.zeros((blocks, warps), np.int64)
        self.seen = np.full((2, blocks, warps, warps), -1)

    def leave(self, block, warp):
        """Advance the times of these warps and return their clocks, (2, number of them, warps)."""
        self.seen[0, block, warp, warp] = self.now[block, warp]
        left = self.seen[:, block, warp].copy()
        self.now[block, warp] += 1
        return left

    def see(self, block, warp, left):
        """Let these warps, perhaps repeated, see the clocks ``left``."""
        np.maximum.at(self.seen, (slice(None), block, warp), left)

    def meet(self, block, warp):
        """Let the warps of each block see each other; each is named once."""
        left, met = self.leave(block, warp), np.full(self.seen.shape[:3], -1)
        for b, of_warp in zip(block, left.transpose(1, 0, 2), strict=True):
            met[:, b] = np.maximum(met[:, b], of_warp)
        self.see(block, warp, met[:, block])

    def pass_fence(self, block, warp):
        """Let ``wgmma`` see these warps' own accesses, and those that they have seen."""
        self.seen[1, block, warp] = np.maximum(*self.leave(block, warp))
