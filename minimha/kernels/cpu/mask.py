"""Apply masks and options to one score or to a tile of scores.

``minimha.kernels.score`` and ``equations.visibility`` define these steps for one score, and are
compiled unchanged. For a tile, ``mask_tile`` and ``apply_softcap_and_bias`` do each step for all
scores before the next step: LLVM vectorizes such loops, but not calls per score.

A tile is transposed: row j holds the scores of key j0 + j, with one query per vector lane. So no
step of the softmax goes across lanes. S[j · lanes + r] is the score of query i0 + r; lanes from
``rows`` on are padding. A tile has n keys. ``o`` has the options, b is a sequence, and h a head.
"""

from __future__ import annotations

import math

import numpy as np

from minimha.equations import visibility
from minimha.kernels import score
from minimha.kernels.cpu.functions import call_function
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.selection import hide_others
from minimha.kernels.cpu.simd.memory import flat
from minimha.kernels.cpu.simd.softmax import soft_cap
from minimha.kernels.cpu.simd.transpose import transpose
from minimha.kernels.cpu.storage import queries_of

sees = jit_inline(visibility.sees)
key_range = jit_inline(visibility.key_range)
query_range = jit(visibility.query_range)
is_full = jit_inline(visibility.is_full)
is_hidden = jit_inline(score.is_hidden)
final_score = jit_inline(score.final_score)


_head_of = jit_inline(score.head_of)


@jit_inline
def head_of(o, b, h):
    """Return the ``Head`` of head h of sequence b, whose ``offset`` is that of row 0 of q.

    So functions that take this ``Head`` count queries as rows of q, not within their sequence.
    """
    head, (_, first, _) = _head_of(o, b, h), queries_of(o, b)
    return score.Head(
        head.left, head.right, head.offset - first, head.length, head.scale, head.softcap,
        head.slope,
    )  # fmt: skip


@jit_inline
def is_visible(mask, bias, head, b, h, i, j):
    """Return whether the query q[b, h, i] sees key j by position, length, mask and bias."""
    if not sees(i, j, head.offset, head.left, head.right, head.length):
        return False
    return not is_hidden(mask, bias, b, h, i, j)


@jit_inline
def has_softcap_or_bias(bias, o):
    """Return whether the problem has a soft cap, a bias or ALiBi."""
    return o.softcap != 0 or bias.size > 0 or o.slopes.size > 0


@jit_inline
def load_tile(X, b, h, i0, rows, j0, n, lanes, tile):
    """Write the transpose of X[b, h, i0 : i0 + rows, j0 : j0 + n] into ``tile``."""
    offset = b * X.strides[0] + h * X.strides[1] + i0 * X.strides[2] + j0 * X.strides[3]
    size = X.itemsize
    if X.strides[3] == size and X.strides[2] % size == 0 and offset % size == 0:
        line = flat(X, offset // size)
        transpose(line, 0, X.strides[2] // size, tile, 0, lanes, rows, n)
    else:
        for r in range(rows):
            for j in range(n):
                tile[j * lanes + r] = X[b, h, i0 + r, j0 + j]


@jit
def mask_tile(mask, bias, o, b, h, i0, rows, j0, n, lanes, full, visible, biases):
    """Write the mask of a tile into ``visible`` as 0 and 1, and return the number of visible pairs.

    ``full`` means that causality, window, length and ``mask_mod`` hide no key of the tile. If there
    is a bias, the tile's biases are written into ``biases``.
    """
    size, count, (entry, first, _) = n * lanes, 0, queries_of(o, b)
    if mask.size:
        load_tile(mask, entry, h, first + i0, rows, j0, n, lanes, visible)
    else:
        for x in range(size):
            visible[x] = 1
    if bias.size:
        lowest = biases.dtype.type(-math.inf)
        load_tile(bias, entry, h, first + i0, rows, j0, n, lanes, biases)
        for x in range(size):
            visible[x] &= biases[x] != lowest
    if not full:
        for j in range(n):
            start, stop = query_range(j0 + j, o.q_offset[b], o.left, o.right, o.kv_lengths[b])
            low = np.int32(min(max(start - i0, 0), lanes))
            high = np.int32(min(max(stop - i0, 0), lanes))
            for r in range(np.int32(lanes)):
                visible[j * lanes + r] &= (low <= r) & (r < high)
    if o.mask_mod and not full:
        call_function(o.mask_mod, visible, 0, o, b, h, i0, j0, n, rows, lanes, 1)
    if o.picks.size:
        hide_others(o, entry, h, first + i0, rows, j0, n, lanes, visible)
    if rows < lanes:
        for j in range(n):
            for r in range(rows, lanes):
                visible[j * lanes + r] = 0
    for x in range(size):
        count += visible[x]
    return count


@jit
def apply_softcap_and_bias(S, bias, biases, o, b, h, i0, j0, n, lanes):
    """Apply soft cap, bias and ALiBi to scaled scores S; ``mask_tile`` has written ``biases``."""
    if o.softcap:
        soft_cap(S, 0, n * lanes, o.softcap)
    if bias.size:
        for x in range(n * lanes):
            S[x] += biases[x]
    if o.slopes.size:
        for j in range(n):
            first = i0 + o.q_offset[b] - (j0 + j)
            for r in range(lanes):
                S[j * lanes + r] -= o.slopes[h] * S.dtype.type(abs(first + r))


@jit
def apply_score_mod(S, visible, o, b, h, i0, rows, j0, n, lanes):
    """Apply ``score_mod`` to S, and set ``visible`` to 0 where S becomes -inf.

    Returns the number of pairs that are still visible.
    """
    call_function(o.score_mod, S, 0, o, b, h, i0, j0, n, rows, lanes, 1)
    count, lowest = 0, S.dtype.type(-math.inf)
    for x in range(n * lanes):
        visible[x] &= S[x] != lowest
        count += visible[x]
    return count


@jit
def hide(S, visible, size):
    """Set the first ``size`` scores of S to -inf where ``visible`` is 0."""
    for x in range(size):
        S[x] = S[x] if visible[x] else S.dtype.type(-math.inf)
