"""Locate the queries and keys of sequences that are packed end to end or stored in pages.

Packed sequences follow each other along L, in one batch entry. Their starts are the cumulative
lengths, flash-attention's ``cu_seqlens``. Paged keys are in a pool of pages of equal size. A table
lists the pages of each sequence in order (Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", 2023).

Each sequence is a separate problem: positions, lengths and offsets count from its first query and
key, and no sequence sees another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, counted, name_of
from minimha.equations.visibility import UNBOUNDED

ONE_PAGE = UNBOUNDED  # the page size if a sequence's keys are next to each other

Shape = tuple[int, ...]


class Sequences(NamedTuple):
    """The locations of n sequences in q, k and v, as indices of rows.

    Key j of sequence s is row ``first_keys[s] + j % page_size`` of the batch entry ``pages[s, j //
    page_size]`` of k and v. ``queries`` (n, 3) has the batch entry of q, the first row there and
    the number of queries. ``pages`` is (n, pages per sequence). ``first_keys``, ``room`` and
    ``ids`` are (n,). ``room`` is the largest number of keys, and ``ids`` are the sequence numbers.
    """

    queries: NDArray[np.int64]  # batch entry of q, first row there, number of queries
    pages: NDArray[np.int64]
    first_keys: NDArray[np.int64]
    page_size: int  # ``ONE_PAGE`` if the keys are not paged
    room: NDArray[np.int64]  # the number of keys for which each sequence has rows
    ids: NDArray[np.int64]  # the number of each sequence, which caller's functions get as b

    def rows(self, s: int) -> tuple[slice, slice, slice]:
        """Return the index that selects the queries of sequence ``s`` in q and in results."""
        entry, first, number = self.queries[s].tolist()
        return slice(entry, entry + 1), slice(None), slice(first, first + number)

    def keys(self, X: NDArray[Any], s: int, length: int) -> NDArray[Any]:
        """Return the first ``length`` keys or values of sequence ``s``, (1, Hkv, length, D)."""
        if self.page_size == ONE_PAGE:
            entry, first = self.pages[s, 0], self.first_keys[s]
            return X[entry : entry + 1, :, first : first + length]
        used = X[self.pages[s, : -(-length // self.page_size)]]  # (pages, Hkv, page_size, D)
        rows = used.swapaxes(0, 1).reshape(1, X.shape[1], -1, X.shape[3])
        return np.asarray(rows[:, :, :length])

    def some(self, chosen: NDArray[np.bool_]) -> Sequences:
        """Return the sequences where ``chosen`` (n,) is True, with unchanged rows and ids."""
        names = ("queries", "pages", "first_keys", "room", "ids")
        return self._replace(**{name: getattr(self, name)[chosen] for name in names})


def one_per_entry(B: int, Lq: int, Lk: int) -> Sequences:
    """Return ``Sequences`` for unpacked arrays: B sequences of Lq queries and Lk keys."""
    entries, zeros = np.arange(B), np.zeros(B, np.int64)
    queries = np.column_stack((entries, zeros, np.full(B, Lq)))
    return Sequences(queries, entries[:, None], zeros, ONE_PAGE, np.full(B, Lk), entries)


def sequences_of(
    q: Shape, k: Shape, cu_seqlens_q: ArrayLike | None, cu_seqlens_k: ArrayLike | None,
    block_table: ArrayLike | None,
) -> Sequences | None:  # fmt: skip
    """Check the options of packed and paged sequences; return ``Sequences``, or None without them.

    ``q`` and ``k`` are shapes. Raises TypeError or ValueError for an invalid option.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None and block_table is None:
        return None
    (B, _, Lq, _), (Bk, _, Lk, _) = q, k
    if cu_seqlens_q is None:
        if block_table is None:
            raise ValueError(
                f"{name_of('cu_seqlens_k')} is given without {name_of('cu_seqlens_q')}: packed "
                f"keys belong to packed queries"
            )
        queries = one_per_entry(B, Lq, 0).queries
    else:
        starts = _cumulative("cu_seqlens_q", cu_seqlens_q, "q", B, Lq)
        queries = np.column_stack((np.zeros_like(starts[1:]), starts[:-1], np.diff(starts)))
    if block_table is not None:
        if cu_seqlens_k is not None:
            raise ValueError(
                f"{name_of('cu_seqlens_k')} is given with {name_of('block_table')}: keys are "
                f"packed or paged, not both; kv_lengths is the number of keys of each sequence"
            )
        return _paged(queries, block_table, Lk)
    starts = _cumulative(
        "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k",
        cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, "k", Bk, Lk,
    )  # fmt: skip
    if len(starts) != len(queries) + 1:
        raise ValueError(
            f"{name_of('cu_seqlens_k')} has {len(starts)} entries but {name_of('cu_seqlens_q')} "
            f"has {len(queries) + 1}: both have one for each sequence, and the end"
        )
    n = len(queries)
    pages = np.zeros((n, 1), np.int64)
    return Sequences(queries, pages, starts[:-1], ONE_PAGE, np.diff(starts), np.arange(n))


def _cumulative(name: str, value: Any, array: str, B: int, L: int) -> NDArray[np.int64]:
    """Return ``value`` (n + 1,), checked: the first row of each sequence in ``array``, and L."""
    starts, name, axis = as_integers(name, value), name_of(name), f"L{array}"
    if B != 1:
        raise ValueError(
            f"{name_of(array)} has B={B}: with {name} the sequences are packed one after another "
            f"along {axis}, in one batch entry, so B must be 1"
        )
    if starts.ndim != 1 or not len(starts):
        raise ValueError(
            f"{name} has shape {starts.shape}: expected (n + 1,), the first row of each of n "
            f"sequences, and the end"
        )
    if starts[0] != 0:
        raise ValueError(f"{name} begins with {starts[0]}: the first sequence begins at row 0")
    down = np.flatnonzero(np.diff(starts) < 0)
    if down.size:
        s = down[0]
        raise ValueError(
            f"{name} decreases from {starts[s]} to {starts[s + 1]}: it must be the running total "
            f"of lengths, and sequence {s} would have {starts[s + 1] - starts[s]} rows"
        )
    if starts[-1] != L:
        raise ValueError(
            f"{name} ends with {starts[-1]} but {name_of(array)} has {axis}={L}: the last sequence "
            f"ends with the last row"
        )
    return starts


def _paged(queries: NDArray[np.int64], block_table: Any, page_size: int) -> Sequences:
    """Return sequences with paged keys; ``check_pages`` checks later that the pages exist."""
    table, name = as_integers("block_table", block_table, 1 << 64), name_of("block_table")
    n = len(queries)
    if table.ndim != 2 or len(table) != n:
        raise ValueError(
            f"{name} has shape {table.shape}: expected (n, pages), the pages of each of n={n} "
            f"sequences"
        )
    if page_size == 0:
        raise ValueError(f"{name_of('k')} has pages of 0 keys: a page holds at least 1")
    room = np.full(n, table.shape[1] * page_size)
    return Sequences(queries, table, np.zeros(n, np.int64), page_size, room, np.arange(n))


def check_pages(sequences: Sequences, kv_lengths: NDArray[np.int64], num_pages: int) -> None:
    """Raise ValueError if a sequence uses a page number outside 0 to ``num_pages`` - 1."""
    needed = -(-kv_lengths // sequences.page_size)
    is_used = np.arange(sequences.pages.shape[1]) < needed[:, None]
    wrong = np.argwhere(is_used & ((sequences.pages < 0) | (sequences.pages >= num_pages)))
    if wrong.size:
        s, page = wrong[0]
        raise ValueError(
            f"{name_of('block_table')}[{s}, {page}] is {sequences.pages[s, page]}: expected a page "
            f"from 0 to {num_pages - 1}, since the {counted(kv_lengths[s], 'key')} of sequence {s} "
            f"{'takes' if kv_lengths[s] == 1 else 'take'} {counted(needed[s], 'page')} of "
            f"{sequences.page_size}"
        )
