"""Sort ``key_indices`` for the kernels, and find in them the keys that a query picked."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.equations.sequences import Sequences, one_per_entry
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.storage import start_of

NO_KEY = np.iinfo(np.int32).max  # ends every list of keys, so that loops need no length
PICKED = 2  # a bit of a visible pair


class Selection(NamedTuple):
    """Sorted lists of keys, without duplicates; both arrays are empty without ``key_indices``."""

    picks: NDArray[np.int32]  # (B, Hkv, Lq, K + 1): the keys that each query picked
    chosen: NDArray[np.int32]  # (n, Hkv, any): those that some query of a sequence picked


@cache
def no_selection() -> Selection:
    """Return an empty ``Selection``, cached because new arrays cost microseconds per call."""
    return Selection(np.empty((0, 0, 0, 0), np.int32), np.empty((0, 0, 0), np.int32))


def selection_of(problem: Problem, gathers: bool) -> Selection:
    """Return the ``Selection`` of ``problem``.

    ``chosen`` is empty unless the kernel reads only picked keys (``gathers``).
    """
    if problem.key_indices is None:
        return no_selection()
    (B, _, Lq, _), Hkv = problem.q.shape, problem.k.shape[1]
    picks, chosen = _sorted(problem.key_indices), no_selection().chosen
    if gathers:
        rows = problem.sequences or one_per_entry(B, Lq, 0)
        chosen = _joined(picks, rows)
        chosen = np.broadcast_to(chosen, (len(chosen), Hkv, chosen.shape[2]))
    return Selection(np.broadcast_to(picks, (B, Hkv, Lq, picks.shape[3])), chosen)


def _sorted(indices: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each list along the last axis sorted and without duplicates, ended by ``NO_KEY``."""
    lists = np.full((*indices.shape[:-1], indices.shape[-1] + 1), NO_KEY, np.int32)
    np.copyto(lists[..., :-1], indices, where=indices >= 0)
    lists.sort(axis=-1)
    is_repeated = (lists[..., 1:] == lists[..., :-1]) & (lists[..., 1:] != NO_KEY)
    if is_repeated.any():
        lists[..., 1:][is_repeated] = NO_KEY
        lists.sort(axis=-1)
    return lists


def _joined(picks: NDArray[np.int32], sequences: Sequences) -> NDArray[np.int32]:
    """Return the keys that any query of a sequence picked, for each head: (n, heads, any)."""
    (entries, firsts, numbers), heads = sequences.queries.T, picks.shape[1]
    if (numbers == 1).all():
        return picks[entries, :, firsts]
    each = map(sequences.rows, range(len(numbers)))
    joined = [_sorted(picks[rows].reshape(heads, -1)) for rows in each]
    width = max((lists.shape[1] for lists in joined), default=1)
    chosen = np.full((len(joined), heads, width), NO_KEY, np.int32)
    for s, lists in enumerate(joined):
        chosen[s, :, : lists.shape[1]] = lists
    return chosen


@jit
def place_in(keys, length, j):
    """Return the index of the first item of ``keys`` that is at least ``j``.

    ``keys`` is a sorted list of ``length`` items. Without such an item, the last index is returned.
    """
    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < j:
            low = middle + 1
        else:
            high = middle
    return low


@jit_inline
def start_of_picks(o, entry, h, i):
    """Return the index in ``flat(o.picks, 0)`` of the first key that q[entry, h, i] picked."""
    return start_of(o.picks, entry, h // (len(o.sinks) // o.picks.shape[1]), i)


@jit
def is_picked(o, entry, h, i, j):
    """Return whether the query in row i of q picked key j for query head h.

    Returns True if the problem has no ``key_indices``.
    """
    if not o.picks.size:
        return True
    keys = flat(o.picks, start_of_picks(o, entry, h, i))
    return keys[place_in(keys, o.picks.shape[3], j)] == j


@jit
def hide_others(o, entry, h, i0, rows, j0, n, lanes, visible):
    """Set ``visible`` to 0 for each pair of a query and a key that the query did not pick.

    ``visible`` is a tile with a row of ``lanes`` items for each of the n keys from j0 on. Its first
    lanes are ``rows`` queries, from row i0 of q on; further lanes are set to 0.
    """
    for r in range(rows):
        keys = flat(o.picks, start_of_picks(o, entry, h, i0 + r))
        x = place_in(keys, o.picks.shape[3], j0)
        while keys[x] < min(j0 + n, NO_KEY):
            visible[(keys[x] - j0) * lanes + r] |= PICKED
            x += 1
    for x in range(n * lanes):
        visible[x] = visible[x] == PICKED | 1
