"""Apply the options to scores, and find the visible keys.

Kernels (rungs) whose arguments are arrays use the compiled functions of ``equations/visibility.py``
and ``score.py``. For the rungs that take addresses, the factories below compile the same options
according to a problem's ``ScoreOptions``, so that an absent option costs nothing.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint64

from minimha.equations import visibility
from minimha.equations.problem import Problem
from minimha.kernels import score
from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.fragments import MmaTiles
from minimha.kernels.cuda.parts.online_softmax import LOG2_E, LOWEST
from minimha.kernels.cuda.parts.register_tiles import RegisterTiles

sees = device(visibility.sees)
key_range = device(visibility.key_range)
is_full = device(visibility.is_full)
head_of = device(score.head_of)
is_hidden = device(score.is_hidden)
final_score = device(score.final_score)


class ScoreOptions(NamedTuple):
    """Flags that say which options change or hide single scores."""

    has_softcap: bool
    has_slopes: bool
    has_mask: bool
    has_bias: bool

    @classmethod
    def of(cls, problem: Problem) -> ScoreOptions:
        names = ("softcap", "alibi_slopes", "attn_mask", "attn_bias")
        return cls(*(getattr(problem, name) is not None for name in names))

    @property
    def change_scores(self) -> bool:
        return self.has_softcap or self.has_slopes or self.has_bias

    @property
    def hide_keys(self) -> bool:
        """Return whether options may hide single keys. If so, no tile counts as full."""
        return self.has_mask or self.has_bias


# ---- visibility of a tile, which is full, partial or skipped


@device
def visible_keys(i_start, i_stop, b, o):
    """Return start and stop of the keys that queries i_start to i_stop - 1 may see.

    The queries are of batch entry b. Only position and length count, not a mask or a bias.
    """
    q_offset = ptx.ld_global_nc_s64(o.q_offset + uint64(8) * uint64(b))
    length = ptx.ld_global_nc_s64(o.kv_lengths + uint64(8) * uint64(b))
    start, stop = key_range(int64(i_start), int64(i_stop), q_offset, o.left, o.right, length)
    limit = int64(o.Lk)
    return int32(min(start, limit)), int32(max(int64(0), min(stop, limit)))


@device
def tile_bounds(i_start, i_stop, b, o):
    """Return start and stop of the keys that any query sees, and of the keys that all queries see.

    The queries are i_start to i_stop - 1 of batch entry b. Only position and length count, as in
    ``visible_keys``. All queries see the keys from the last query's first key to the first query's
    last key.
    """
    start, stop = visible_keys(i_start, i_stop, b, o)
    full_start, _ = visible_keys(i_stop - 1, i_stop, b, o)
    _, full_stop = visible_keys(i_start, i_start + 1, b, o)
    return start, stop, full_start, full_stop


# ---- one score: rungs 3 and 5


@device
def pair_address(X, b, h, i, j, itemsize):
    """Return the address of X[b, h, i, j], an item of ``itemsize`` bytes."""
    at = b * X.batch + h * X.head + i * X.row + j * X.column
    return X.address + uint64(at * itemsize)


def scored_pair(options: ScoreOptions) -> Any:
    """Return a device function that returns a score after options, and whether it is visible.

    ``s`` is the scaled score, and ``distance`` the query's position minus the key's. The argument
    ``is_visible`` is the visibility by position and length. If it is False, the mask and the bias
    are not read. ``mask_at`` and ``bias_at`` are the addresses of their items.
    """
    has_softcap, has_slopes, has_mask, has_bias = options

    @device
    def scored(s, is_visible, distance, slope, mask_at, bias_at, o):
        if has_softcap:
            s = o.softcap * float32(math.tanh(s / o.softcap))
        if has_mask and is_visible:
            is_visible = ptx.ld_global_nc_u8(mask_at) != 0
        if has_bias and is_visible:
            added = ptx.ld_global_nc_f32(bias_at)
            s += added
            is_visible = added != LOWEST
        if has_slopes:
            s -= slope * float32(abs(distance))
        return s, is_visible

    return scored


def score_pair(options: ScoreOptions) -> Any:
    """Return a device function that returns a score after options, or -inf if it is hidden.

    The arguments are those of ``scored_pair``.
    """
    scored = scored_pair(options)

    @device
    def score(s, is_visible, distance, slope, mask_at, bias_at, o):
        s, is_visible = scored(s, is_visible, distance, slope, mask_at, bias_at, o)
        return s if is_visible else LOWEST

    return score


# The options of one query: the bounds of its visible keys, its position and slope, and addresses of
# its pairs with key 0. For several queries each field is an array.
QueryOptions = namedtuple("QueryOptions", "start stop position slope mask bias")


def query_options(options: ScoreOptions) -> Any:
    """Return a device function that returns the ``QueryOptions`` of query i."""
    _, has_slopes, has_mask, has_bias = options

    @device
    def describe(b, h, i, mask, bias, o):
        start, stop = visible_keys(i, i + 1, b, o)
        position, slope, mask_at, bias_at = int64(0), float32(0), uint64(0), uint64(0)
        if has_slopes:
            position = i + ptx.ld_global_nc_s64(o.q_offset + uint64(8) * uint64(b))
            slope = ptx.ld_global_nc_f32(o.slopes + uint64(4) * uint64(h))
        if has_mask:
            mask_at = pair_address(mask, b, h, i, 0, 1)
        if has_bias:
            bias_at = pair_address(bias, b, h, i, 0, 4)
        return QueryOptions(start, stop, position, slope, mask_at, bias_at)

    return describe


def score_query(options: ScoreOptions) -> Any:
    """Return a device function that returns the final score of key j, or -inf if it is hidden.

    ``s`` is the product q·k, and ``query`` has the ``QueryOptions``. The bounds of visible keys are
    checked only if ``is_partial``.
    """
    score = score_pair(options)

    @device
    def score_of(s, j, query, is_partial, mask, bias, o):
        if is_partial and (j < query.start or j >= query.stop):
            return LOWEST
        mask_at = query.mask + uint64(j * mask.column)
        bias_at = query.bias + uint64(4) * uint64(j * bias.column)
        return score(s * o.scale, True, query.position - j, query.slope, mask_at, bias_at, o)

    return score_of


def mask_registers(tiles: RegisterTiles, options: ScoreOptions, functions: Any = None) -> Any:
    """Return a device function that applies the options to a tile of scores in registers.

    Hidden scores become -inf. ``row`` and ``column`` are the query and the key of the thread's
    first score. ``left`` and ``right`` are bounds relative to the query's index, not to its
    position. The factory's ``functions`` is the result of ``functions.call_functions``, or None.
    """
    columns, rows, keys, row_step = tiles.columns, tiles.rows, tiles.keys, tiles.row_step
    _, has_slopes, has_mask, has_bias = options
    score, scored = score_pair(options), scored_pair(options)

    @device
    def rotate(S):
        """Rotate the rows of S by one, because only unrolled loops can index registers."""
        for j in range(keys):
            first = S[0, j]
            for i in range(rows - 1):
                S[i, j] = S[i + 1, j]
            S[rows - 1, j] = first

    @device
    def mask_row(S, mask, bias, o, b, h, r, column, left, right, length):
        # Bounds are relative to query r: absolute ones would stay in registers for all tiles.
        away, end = int32(column - r), int32(length - r)
        mask_at = pair_address(mask, b, h, r, column, 1)
        bias_at = pair_address(bias, b, h, r, column, 4)
        slope, distance = float32(0), int64(0)
        if has_slopes:
            slope = ptx.ld_global_nc_f32(o.slopes + 4 * h)
            distance = r + ptx.ld_global_nc_s64(o.q_offset + 8 * b) - column
        for j in range(keys):
            is_visible = sees(0, int32(away + j * columns), 0, left, right, end)
            if has_mask or has_bias:
                is_visible &= r < o.Lq
            S[0, j] = score(S[0, j], is_visible, distance - j * columns, slope, mask_at, bias_at, o)
            mask_at += columns * mask.column
            bias_at += 4 * columns * bias.column

    @device
    def modify_row(S, mask, bias, o, b, h, r, column, left, right, length):
        """Mask a row by the caller's functions, in a loop that need not be unrolled."""
        away, end = int32(column - r), int32(length - r)
        mask_at = pair_address(mask, b, h, r, column, 1)
        bias_at = pair_address(bias, b, h, r, column, 4)
        slope = ptx.ld_global_nc_f32(o.slopes + 4 * h) if has_slopes else float32(0)
        position = r + ptx.ld_global_nc_s64(o.q_offset + 8 * b)
        for n in range(keys):
            j = int64(column + n * columns)
            is_visible = sees(0, int32(away + n * columns), 0, left, right, end) & (r < o.Lq)
            s, is_visible = scored(S[0, 0], is_visible, position - j, slope, mask_at, bias_at, o)
            s = functions(s, is_visible, o, int64(b), int64(h), position, j)
            for x in range(keys - 1):
                S[0, x] = S[0, x + 1]
            S[0, keys - 1] = s
            mask_at += columns * mask.column
            bias_at += 4 * columns * bias.column

    do_row = mask_row if functions is None else modify_row

    @device
    def mask_tile(S, mask, bias, o, b, h, row, column, left, right, length):
        for i in range(rows):
            r = row + i * row_step
            do_row(S, mask, bias, o, b, h, r, column, left, right, length)
            rotate(S)

    return mask_tile


# ---- scores as ``mma`` leaves them: rung 4


@device
def last_or(i, length):
    """Return the smaller of i and ``length`` - 1, the last index, for a load within the array.

    The scores of larger i are hidden or not stored.
    """
    return int32(min(i, length - 1))


def first_score(tiles: MmaTiles) -> Any:
    """Return a device function that returns the query and the key of thread t's first score.

    The tile begins at query i_start and key j.
    """
    rows = 16 * tiles.M

    @device
    def first_score(t, i_start, j):
        t = ptx.optimization_barrier(t)
        return i_start + (t >> 5) * rows + ((t & 31) >> 2), j + 2 * (t & 3)

    return first_score


@device
def softcapped(x, softcap):
    """Return softcap · tanh(x / softcap), computed by ``ex2`` and ``rcp`` to save registers."""
    x *= np.float32(1) / softcap
    size = abs(x)
    square = size * size
    # 1 - 2 / (1 + exp(2 x)) loses all digits if x is small: use a series there.
    power = ptx.ex2_approx(size * np.float32(2 * LOG2_E))
    capped = np.float32(1) - np.float32(2) * ptx.rcp_approx(np.float32(1) + power)
    if size < np.float32(0.1):
        series = np.float32(2 / 15) * square - np.float32(1 / 3)
        capped = size + size * square * series
    return softcap * (-capped if x < 0 else capped)


def apply_softcap_and_bias(tiles: MmaTiles, options: ScoreOptions) -> Any:
    """Return a device function that applies scale, soft cap, bias and ALiBi to the scores S.

    S has the layout of ``mma``. The tile begins at query i_start and key j_start. Options that
    ``options`` lacks cost nothing.
    """
    M, N = tiles.M, tiles.N
    S_size = 4 * M * N
    has_softcap, has_slopes, _, has_bias = options
    corner = first_score(tiles)

    @device
    def apply(t, S, bias, o, b, h, i_start, j_start):
        for e in range(S_size):
            S[e] *= o.scale
            if has_softcap:
                S[e] = softcapped(S[e], o.softcap)
        if has_bias:
            for i in range(M):
                for half in range(2):
                    row, column = corner(t, i_start, j_start)
                    query = last_or(row + 16 * i + 8 * half, o.Lq)
                    bias_at = pair_address(bias, b, h, query, 0, 4)
                    for n in range(N):
                        for x in range(2):
                            key = last_or(column + 8 * n + x, o.Lk)
                            S[4 * (i * N + n) + 2 * half + x] += ptx.ld_global_f32(
                                bias_at + 4 * key * bias.column
                            )
        if has_slopes:
            slope = ptx.ld_global_nc_f32(o.slopes + 4 * h)
            row, column = corner(t, i_start, j_start)
            distance = row + ptx.ld_global_s64(o.q_offset + 8 * b) - column
            for i in range(M):
                for n in range(N):
                    for e in range(4):
                        further = distance + (16 * i + 8 * (e // 2) - 8 * n - e % 2)
                        S[4 * (i * N + n) + e] -= slope * np.float32(abs(further))

    return apply


def visible_bits(tiles: MmaTiles, options: ScoreOptions) -> Any:
    """Return a device function that returns the visibility of a thread's scores as bits.

    The argument i, below ``tiles.M``, selects 16 rows of the thread's warp. Bit 4 n + e is 1 if the
    score S[i, n, e] is visible. The tile begins at query i_start and key j_start.
    """
    N, B_c = tiles.N, tiles.B_c
    _, _, has_mask, has_bias = options
    corner = first_score(tiles)

    @device
    def visible(t, mask, bias, o, b, h, i_start, j_start, i):
        # Not ``ld.global.nc``, so that each tile reads again, and no register keeps the numbers.
        q_offset = ptx.ld_global_s64(o.q_offset + 8 * b)
        length = ptx.ld_global_s64(o.kv_lengths + 8 * b)
        bits = np.uint32(0)
        for half in range(2):
            row, column = corner(t, i_start, j_start)
            r = row + 16 * i + 8 * half
            start, stop = key_range(r, r + 1, q_offset, o.left, o.right, length)
            low = np.int32(min(start - column, B_c))
            high = np.int32(max(min(stop - column, B_c), 0))
            query = last_or(r, o.Lq)
            mask_at = pair_address(mask, b, h, query, 0, 1)
            bias_at = pair_address(bias, b, h, query, 0, 4)
            for n in range(N):
                for x in range(2):
                    j = 8 * n + x
                    is_visible = (low <= j) & (j < high)
                    key = last_or(column + j, o.Lk)
                    if has_mask:
                        is_visible &= ptx.ld_global_u8(mask_at + key * mask.column) != 0
                    if has_bias:
                        added = ptx.ld_global_f32(bias_at + 4 * key * bias.column)
                        is_visible &= added != -math.inf
                    bits |= np.uint32(is_visible) << np.uint32(4 * n + 2 * half + x)
        return np.uint32(bits)

    return visible


def hide_keys(tiles: MmaTiles) -> Any:
    """Return a device function that sets a score to -inf if its bit in ``visible`` is 0.

    ``visible[i]`` is the result of ``visible_bits`` for i.
    """
    M, N = tiles.M, tiles.N

    @device
    def hide(S, visible):
        for i in range(M):
            for x in range(4 * N):
                if not (visible[i] >> x) & 1:
                    S[4 * N * i + x] = np.float32(-math.inf)

    return hide
