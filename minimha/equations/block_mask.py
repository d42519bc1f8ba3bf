"""Define ``BlockMask``, which lists the blocks of scores that a kernel can skip."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import name_of
from minimha.equations.functions import for_numpy, read, visible_pairs

ROWS, COLUMNS = 16, 32  # queries and keys of a block
HIDDEN, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A ``mask_mod`` with the state of each block of 16 queries and 32 keys: hidden, partial, full.

    ``minimha.block_mask`` returns a BlockMask, and ``attention`` takes it as ``mask_mod``.

    Attributes
    ----------
    mask_mod : callable ``mask_mod(b, h, i, j) -> bool``
    states : ndarray of shape (B or 1, H or 1, ceil(Lq / 16), ceil(Lk / 32)), uint8
        0: all pairs of the block are hidden, 1: some are hidden, 2: none is hidden.
    Lq, Lk : int
        Numbers of queries and keys.
    q_offset : tuple of int
        Position of query 0 among the keys: one for each batch entry, or one for all.
    contents : hashable
        The code of ``mask_mod`` and the values that it captured when the blocks were found.
    """

    mask_mod: Callable[..., Any]
    states: NDArray[np.uint8]
    Lq: int
    Lk: int
    q_offset: tuple[int, ...]
    contents: Hashable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "contents", read(self.mask_mod).contents)

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Call ``mask_mod`` with indices that may be arrays."""
        return for_numpy(self.mask_mod)(b, h, i, j)

    def __repr__(self) -> str:
        share = (self.states == HIDDEN).mean() if self.states.size else 0
        return f"BlockMask(Lq={self.Lq}, Lk={self.Lk}, {share:.0%} of the blocks hidden)"

    def check(
        self, shape: tuple[int, int, int, int], q_offset: NDArray[np.int64], has_sequences: bool
    ) -> None:
        """Raise ValueError unless this mask fits a call with these arguments.

        ``shape`` is (B, H, Lq, Lk). No BlockMask fits packed or paged sequences.
        """
        if has_sequences:
            raise ValueError(
                f"{name_of('mask_mod')} is a BlockMask, for one Lq and one Lk, but with cu_seqlens "
                f"or block_table each sequence has other lengths: expected its function, "
                f"{name_of('mask_mod')}.mask_mod"
            )
        B, H, Lq, Lk = shape
        mine = (*self.states.shape[:2], self.Lq, self.Lk)
        if (Lq, Lk) != mine[2:] or mine[0] not in (1, B) or mine[1] not in (1, H):
            raise ValueError(
                f"{name_of('mask_mod')} is a BlockMask for (B, H, Lq, Lk) = {mine}: expected one "
                f"for {shape}, where 1 stands for every batch entry and head"
            )
        if (q_offset != self.q_offset).any():
            raise ValueError(
                f"{name_of('mask_mod')} is a BlockMask with q_offset={self.q_offset}: expected "
                f"{tuple(q_offset.tolist())}, the positions of the queries in this call"
            )
        if read(self.mask_mod).contents != self.contents:
            raise ValueError(
                f"{name_of('mask_mod')} is a BlockMask whose function captures a value that has "
                f"changed since: make another BlockMask"
            )


def states(
    mask_mod: Callable[..., Any], B: int, H: int, Lq: int, Lk: int, q_offset: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Compute ``BlockMask.states``, the state of each block, one row of blocks at a time."""
    found = np.zeros((B, H, -(-Lq // ROWS), -(-Lk // COLUMNS)), np.uint8)
    b, h, j = (np.arange(n).reshape(s) for n, s in ((B, (-1, 1, 1, 1)), (H, (-1, 1, 1)), (Lk, -1)))
    for row in range(found.shape[2] if found.size else 0):
        queries = np.arange(row * ROWS, min(Lq, (row + 1) * ROWS))
        i = queries[:, None] + q_offset[:B, None, None, None]
        visible = visible_pairs(mask_mod, (b, h, i, j), (B, H, len(queries), Lk))
        starts = np.arange(0, Lk, COLUMNS)
        count = np.add.reduceat(visible.sum(axis=2), starts, axis=2)
        size = len(queries) * np.minimum(COLUMNS, Lk - starts)
        found[:, :, row] = (count > 0).astype(np.uint8) + (count == size)
    return found
