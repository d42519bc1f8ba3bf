"""What happened before what: a vector clock per warp.

Each warp has a time of its own, which advances whenever it lets other warps see what it did so far.
Of each warp every other one knows up to which time it has seen it; what was done later may happen
before, after or at the same time. Lamport, "Time, clocks, and the ordering of events", 1978;
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
        ``seen[0, b, x, y]`` is the time of warp y up to which warp x has seen what it did, -1 for
        never; ``seen[1]`` the same, for what has passed a ``fence.proxy.async`` in either warp.
    """

    def __init__(self, blocks, warps):
        self.now = np.zeros((blocks, warps), np.int64)
        self.seen = np.full((2, blocks, warps, warps), -1)

    def leave(self, block, warp):
        """What others see that these warps now let see, (2, number of them, warps)."""
        self.seen[0, block, warp, warp] = self.now[block, warp]
        left = self.seen[:, block, warp].copy()
        self.now[block, warp] += 1
        return left

    def see(self, block, warp, left):
        """Let these warps, some perhaps named several times, see what was left for each."""
        np.maximum.at(self.seen, (slice(None), block, warp), left)

    def meet(self, block, warp):
        """Let warps see each other, those of each block; each is named once."""
        left, met = self.leave(block, warp), np.full(self.seen.shape[:3], -1)
        for b, of_warp in zip(block, left.transpose(1, 0, 2), strict=True):
            met[:, b] = np.maximum(met[:, b], of_warp)
        self.see(block, warp, met[:, block])

    def pass_fence(self, block, warp):
        """Let ``wgmma`` see what these warps see, and what they did themselves."""
        self.seen[1, block, warp] = np.maximum(*self.leave(block, warp))
