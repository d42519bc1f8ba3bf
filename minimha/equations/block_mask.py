"""Define ``BlockMask``, a mask function with the blocks of scores that a kernel can skip."""

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
    """A ``mask_mod``, and which blocks of 16 × 32 scores it hides entirely, partly or not at all.

    ``minimha.block_mask`` returns a BlockMask, which ``attention`` accepts as ``mask_mod``.

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

    def check(self, shape: tuple[int, int, int, int], q_offset: NDArray[np.int64]) -> None:
        """Raise ValueError unless this mask fits scores of ``shape`` (B, H, Lq, Lk).

        The mask must also have this ``q_offset``, and its function must still capture the same
        values.
        """
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
        self._check_contents()

    def check_sequences(
        self, H: int, num_queries: NDArray[np.int64], num_keys: NDArray[np.int64],
        q_offset: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Raise ValueError unless this mask has all positions of n packed or paged sequences.

        ``num_queries``, ``num_keys`` and ``q_offset`` (n,) are those of each sequence, and H is
        their number of query heads.
        """
        name, n = name_of("mask_mod"), len(num_queries)
        batch, heads = self.states.shape[:2]
        if not {batch, len(self.q_offset)} <= {1, n} or heads not in (1, H):
            raise ValueError(
                f"{name} is a BlockMask for B={batch} and H={heads}: expected B={n}, the number of "
                f"sequences, and H={H}, where 1 stands for all"
            )
        rows = q_offset - self.q_offset
        fits = (rows >= 0) & (rows + num_queries <= self.Lq) & (num_keys <= self.Lk)
        beyond = np.flatnonzero(~fits & (num_queries > 0))
        if beyond.size:
            s = beyond[0]
            first = int(np.broadcast_to(self.q_offset, n)[s])
            raise ValueError(
                f"{name} is a BlockMask for queries at {_span(first, self.Lq)} and {self.Lk} keys: "
                f"sequence {s} has queries at {_span(q_offset[s], num_queries[s])} and "
                f"{num_keys[s]} keys"
            )
        self._check_contents()

    def _check_contents(self) -> None:
        if read(self.mask_mod).contents != self.contents:
            raise ValueError(
                f"{name_of('mask_mod')} is a BlockMask whose function captures a value that has "
                f"changed since: make another BlockMask"
            )


def _span(first: int, number: int) -> str:
    return f"positions {first} to {first + number - 1}"


def states(
    mask_mod: Callable[..., Any], B: int, H: int, Lq: int, Lk: int, q_offset: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return ``BlockMask.states``: 0, 1 or 2 for each block that is hidden, partial or full."""
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
