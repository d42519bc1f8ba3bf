"""What the options do to scores, for every CPU rung: one score at a time, or a tile of them.

The order is that of the equations: scaled → capped → biased → masked. Who sees whom is decided by
``minimha.equations.visibility``, compiled here as it stands.

A tile is transposed: row j holds key j0 + j against one panel of queries, a query a lane, so that
every step of the softmax goes down the lanes and none across them. S[j · lanes + r] belongs to
query i0 + r; lanes from ``rows`` on are padding.
"""

from __future__ import annotations

import math

import numpy as np

from minimha.equations import visibility
from minimha.kernels.entry import jit

sees = jit(visibility.sees)
key_range = jit(visibility.key_range)


@jit
def is_seen(mask, bias, o, b, h, i, j):
    """May query i of head h see key j?"""
    if not sees(i, j, o.q_offset[b], o.left, o.right, o.kv_lengths[b]):
        return False
    if mask.size and not mask[b, h, i, j]:
        return False
    return not (bias.size and bias[b, h, i, j] == -math.inf)


@jit
def final_score(s, bias, o, b, h, i, j):
    """The score of query i and key j from their product ``s``: scaled, capped and biased."""
    s *= o.scale
    if o.softcap:
        s = o.softcap * math.tanh(s / o.softcap)
    if bias.size:
        s += bias[b, h, i, j]
    if o.slopes.size:
        s -= o.slopes[h] * abs(i + o.q_offset[b] - j)
    return s


@jit
def bends(bias, o):
    """Whether a scaled score is not final yet."""
    return o.softcap != 0 or bias.size > 0 or o.slopes.size > 0


@jit
def bend_tile(S, bias, o, b, h, i0, rows, j0, n, lanes):
    """Cap and bias a tile of n keys that is scaled already."""
    if o.softcap:
        cap = S.dtype.type(o.softcap)
        for x in range(n * lanes):
            S[x] = cap * np.tanh(S[x] / cap)
    if bias.size:
        for r in range(rows):
            for j in range(n):
                S[j * lanes + r] += bias[b, h, i0 + r, j0 + j]
    if o.slopes.size:
        for j in range(n):
            first = i0 + o.q_offset[b] - (j0 + j)
            for r in range(lanes):
                S[j * lanes + r] -= o.slopes[h] * S.dtype.type(abs(first + r))


@jit
def see_tile(mask, bias, o, b, h, i0, rows, j0, n, lanes, seen):
    """Mark in ``seen`` which lanes see which of n keys; return how many pairs do."""
    count = 0
    for j in range(n):
        for r in range(lanes):
            in_reach = sees(i0 + r, j0 + j, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
            seen[j * lanes + r] = in_reach & (r < rows)
    if mask.size:
        for r in range(rows):
            for j in range(n):
                seen[j * lanes + r] &= mask[b, h, i0 + r, j0 + j]
    if bias.size:
        for r in range(rows):
            for j in range(n):
                seen[j * lanes + r] &= bias[b, h, i0 + r, j0 + j] != -math.inf
    for x in range(n * lanes):
        count += seen[x]
    return count


@jit
def hide(S, seen, size):
    """Put -inf where a query does not see the key."""
    for x in range(size):
        S[x] = S[x] if seen[x] else S.dtype.type(-math.inf)
