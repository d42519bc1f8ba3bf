"""CUDA rung 3, register tiles: each thread computes 8 × 8 scores at a time, float32.

What changed from rung 2: a number that is read from shared memory is used eight times before it is
read again. There, each product took a read, and the reads were the bound; here a thread reads
four numbers each of 8 queries and 8 keys, 16 reads of 16 bytes, and multiplies 256 times. S_ij and
O_i stay in registers; only P_ij takes the way through shared memory, and only within a warp, into
the place of K_j, which by then nobody needs.

Rows of Q_i and K_j are four numbers longer than they are, so that 8 lanes which read 16 bytes each
of 8 following rows meet 32 different banks; P_ij's are longer by as many as the warp has columns.

Tiles that no query of the block sees are not visited, and those that all its queries see whole are
not masked. In the others a score that is hidden is -inf, and its weight the negative zero: if a
value is not finite, a row adds it unless the weight is that, because 0 · NaN is NaN.

Dao, "FlashAttention-2", 2023, Algorithm 1, whose lines are named below. Not measured: no GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32

from minimha.equations.problem import Problem
from minimha.kernels.cuda.arguments import (
    ADDRESSES,
    Arguments,
    check_alignment,
    padded_width,
    too_wide,
)
from minimha.kernels.cuda.functions import device, key_range, sees
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.ptx import (
    ex2_approx,
    ld_global_nc_f32,
    ld_global_nc_s64,
    ld_global_nc_u8,
    ld_global_nc_v4_f32,
    ld_shared_f32,
    ld_shared_v2_f32,
    ld_shared_v4_f32,
    max_f32,
    shared_address,
    shfl_bfly_f32,
    st_global_f32,
    st_global_v2_f32,
    st_global_v4_f32,
    st_shared_f32,
    st_shared_v4_f32,
)

THREADS = 64
ROWS = 8  # of scores and of O that a thread owns
LOG2_E = math.log2(math.e)
NOTHING = -math.inf
LONGEST = 1 << 30  # no query and no key stands behind so many


class Variant(NamedTuple):
    """What a compiled kernel is made for."""

    width: int
    has_softcap: bool
    has_slopes: bool
    has_mask: bool
    has_bias: bool


class Tiles(NamedTuple):
    """How a block of threads is laid over a tile.

    A warp is ``columns`` lanes wide and 32 / columns high; a lane owns every ``columns``-th key.
    ``B_r`` and ``B_c`` are the queries and keys of a tile. In shared memory, counted in numbers, a
    row of Q_i and K_j takes ``long_row``, one of P_ij ``weights_row``, and the tile that is first
    K_j, then P_ij, ``keys_or_weights``.
    """

    columns: int
    B_r: int
    B_c: int
    long_row: int
    weights_row: int
    keys_or_weights: int

    @property
    def bytes(self) -> int:
        """Of Q_i, of K_j or P_ij, and of V_j."""
        V_j = self.B_c * (self.long_row - 4)
        return 4 * (self.B_r * self.long_row + self.keys_or_weights + V_j)


def tiles(width: int) -> Tiles:
    """Sizes with which S_ij and O_i fit into the registers, and two blocks into a processor."""
    columns = 8 if width <= 128 else 16
    B_r, B_c = ROWS * THREADS // columns, 64 if width <= 64 else 32
    long_row, weights_row = width + 4, B_c + columns
    return Tiles(columns, B_r, B_c, long_row, weights_row, max(B_c * long_row, B_r * weights_row))


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``, or None."""
    if problem.dtype != np.float32:
        return f"register tiles are made for float32, and q, k, v are {problem.dtype}"
    return too_wide(problem)


def launches(
    problem: Problem, arguments: Arguments, scratch: Callable[[tuple[int, ...]], int]
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """One launch, a thread block for every B_r queries of a head; none if there is no query.

    Raises
    ------
    ValueError
        Rows of q, k, v or O do not begin at multiples of 16 bytes.
    """
    check_alignment(arguments, 4)
    B, H, Lq, _ = problem.q.shape
    if B * Lq == 0:
        return []
    width = padded_width(problem)
    made_for = Variant(
        width,
        problem.softcap is not None,
        problem.alibi_slopes is not None,
        problem.attn_mask is not None,
        problem.attn_bias is not None,
    )
    launch = Launch(
        function=kernel(made_for),
        signature=ADDRESSES,
        grid=(-(-Lq // tiles(width).B_r) * H * B, 1, 1),
        threads=THREADS,
        shared=tiles(width).bytes,
    )
    return [(launch, arguments)]


@cache
def kernel(made_for: Variant) -> Callable[..., None]:
    """The kernel for a width and a set of options."""
    W, has_softcap, has_slopes, has_mask, has_bias = made_for
    columns, B_r, B_c, long_row, weights_row, keys_or_weights = tiles(W)
    high = 32 // columns  # rows between two of the rows that a thread owns
    keys = B_c // columns  # that a thread owns
    mine = W // columns  # columns of O that it owns, in runs of ``run``
    run = math.gcd(mine, 4)
    chunks = W // 4  # of 16 bytes in a row
    # What a thread reads at once: the most chunks of a tile, and weights of a row. ptxas spills
    # where one more would have to stay in a register.
    most = 8 if W <= 64 else 4
    few = 2 if 64 < W < 240 else 4
    at_once_Q, at_once_KV = (
        max(n for n in range(1, most + 1) if rows * chunks // THREADS % n == 0)
        for rows in (B_r, B_c)
    )
    bends = has_softcap or has_slopes or has_bias
    load = {1: ld_shared_f32, 2: ld_shared_v2_f32, 4: ld_shared_v4_f32}[run]
    store = {1: st_global_f32, 2: st_global_v2_f32, 4: st_global_v4_f32}[run]

    @device
    def at_once(rows):
        return at_once_Q if rows == B_r else at_once_KV

    @device
    def fetch(t, to, row_length, X, row_stride, rows, length):
        """Copy ``rows`` rows into shared memory, those from ``length`` on as 0.

        Return whether a number of this thread is NaN or infinite.
        """
        x = cuda.local.array((8, 4), float32)
        together = at_once(rows)
        found = False
        for start in range(t, rows * chunks, together * THREADS):
            for n in range(together):
                place = start + n * THREADS
                row = place // chunks
                for e in range(4):
                    x[n, e] = 0
                if row < length:
                    x[n, 0], x[n, 1], x[n, 2], x[n, 3] = ld_global_nc_v4_f32(
                        X + 4 * (row * row_stride) + 16 * (place % chunks)
                    )
            for n in range(together):
                place = start + n * THREADS
                for e in range(4):
                    found |= not abs(x[n, e]) < math.inf
                st_shared_v4_f32(
                    to + 4 * row_length * (place // chunks) + 16 * (place % chunks),
                    x[n, 0], x[n, 1], x[n, 2], x[n, 3],
                )  # fmt: skip
        return found

    @device
    def multiply_keys(Q_at, K_at, S):
        """Line 8: S_ij = Q_i K_jᵀ, of the thread's rows and keys; four columns at a time."""
        K = cuda.local.array((keys, 4), float32)
        for i in range(ROWS):
            for j in range(keys):
                S[i, j] = 0
        for d in range(0, W, 4):
            for j in range(keys):
                K[j, 0], K[j, 1], K[j, 2], K[j, 3] = ld_shared_v4_f32(
                    K_at + 4 * (d + j * columns * long_row)
                )
            for i in range(ROWS):
                q0, q1, q2, q3 = ld_shared_v4_f32(Q_at + 4 * (d + i * high * long_row))
                for j in range(keys):
                    S[i, j] += q0 * K[j, 0]
                    S[i, j] += q1 * K[j, 1]
                    S[i, j] += q2 * K[j, 2]
                    S[i, j] += q3 * K[j, 3]

    @device
    def read_values(V_at, V):
        """The thread's columns of one row of V_j."""
        for x in range(0, mine, run):
            if run == 4:
                V[x], V[x + 1], V[x + 2], V[x + 3] = load(V_at + 4 * x * columns)
            elif run == 2:
                V[x], V[x + 1] = load(V_at + 4 * x * columns)
            else:
                V[x] = load(V_at + 4 * x * columns)

    @device
    def multiply_values(P_at, V_at, O):
        """Line 10: O_i + P_ij V_j, of the thread's rows and columns; a few keys at a time."""
        P = cuda.local.array((ROWS, 4), float32)
        V = cuda.local.array(mine, float32)
        for j in range(0, B_c, few):
            for i in range(ROWS):
                at = P_at + 4 * (j + i * high * weights_row)
                if few == 4:
                    P[i, 0], P[i, 1], P[i, 2], P[i, 3] = ld_shared_v4_f32(at)
                else:
                    P[i, 0], P[i, 1] = ld_shared_v2_f32(at)
            for n in range(few):
                read_values(V_at + 4 * (j + n) * W, V)
                for i in range(ROWS):
                    for x in range(mine):
                        O[i, x] += P[i, n] * V[x]

    @device
    def add_wild_values(P_at, V_at, O):
        """The same where a value is not finite: what a row does not see it leaves out."""
        V = cuda.local.array(mine, float32)
        for j in range(B_c):
            read_values(V_at + 4 * j * W, V)
            for i in range(ROWS):
                p = ld_shared_f32(P_at + 4 * (j + i * high * weights_row))
                if math.copysign(float32(1), p) > 0:
                    for x in range(mine):
                        O[i, x] += p * V[x]

    @device
    def finish_row(S, mask, bias, o, b, h, r, column, left, right, length):
        """Softcap, bias and ALiBi for the scores S[0] of query r, and -inf where it sees no key."""
        # Seen from query r itself. Bounds of each row would be kept in registers for all tiles.
        away, end = int32(column - r), int32(length - r)
        mask_at = mask.address + b * mask.batch + h * mask.head + r * mask.row
        mask_at += column * mask.column
        bias_at = b * bias.batch + h * bias.head + r * bias.row + column * bias.column
        bias_at = bias.address + 4 * bias_at
        if has_slopes:
            slope = ld_global_nc_f32(o.slopes + 4 * h)
            distance = r + ld_global_nc_s64(o.q_offset + 8 * b) - column
        for j in range(keys):
            is_seen = sees(0, int32(away + j * columns), 0, left, right, end)
            if has_mask or has_bias:
                is_seen &= r < o.Lq
            s = S[0, j]
            if has_softcap:
                s = o.softcap * math.tanh(s / o.softcap)
            if has_bias:
                if is_seen:
                    added = ld_global_nc_f32(bias_at)
                    s += added
                    is_seen = added != NOTHING
                bias_at += 4 * columns * bias.column
            if has_slopes:
                s -= slope * float32(abs(distance - j * columns))
            if has_mask:
                if is_seen:
                    is_seen = ld_global_nc_u8(mask_at) != 0
                mask_at += columns * mask.column
            S[0, j] = s if is_seen else float32(NOTHING)

    @device
    def turn(S):
        """Bring the next row of scores to S[0], the first one behind the last.

        Registers have no numbers at run time: what is to be done row by row, in a loop too long to
        be unrolled, is done to row 0.
        """
        for j in range(keys):
            first = S[0, j]
            for i in range(ROWS - 1):
                S[i, j] = S[i + 1, j]
            S[ROWS - 1, j] = first

    @device
    def across_columns(x):
        """The largest of a row's numbers, which lie in ``columns`` lanes."""
        x = max_f32(x, shfl_bfly_f32(x, 1))
        x = max_f32(x, shfl_bfly_f32(x, 2))
        x = max_f32(x, shfl_bfly_f32(x, 4))
        return max_f32(x, shfl_bfly_f32(x, 8)) if columns == 16 else x

    @device
    def sum_of_columns(x):
        x += shfl_bfly_f32(x, 1)
        x += shfl_bfly_f32(x, 2)
        x += shfl_bfly_f32(x, 4)
        return x + shfl_bfly_f32(x, 8) if columns == 16 else x

    @device
    def power(x):
        return ex2_approx(x * float32(LOG2_E))

    @device
    def take_scores(S, O, m, l, P_at):
        """Lines 9 and 10: m_i, P_ij into shared memory, l_i; O_i for the new maximum."""
        for i in range(ROWS):
            top = S[i, 0]
            for j in range(1, keys):
                top = max_f32(top, S[i, j])
            top = max_f32(across_columns(top), m[i])
            reference = top if top > NOTHING else float32(0)
            correction = power(m[i] - reference)
            m[i] = top
            total = float32(0)
            for j in range(keys):
                p = power(S[i, j] - reference)
                total += p
                p = p if S[i, j] != NOTHING else float32(-0.0)
                st_shared_f32(P_at + 4 * (i * high * weights_row + j * columns), p)
            l[i] = correction * l[i] + total
            for x in range(mine):
                O[i, x] *= correction

    @device
    def store_row(O, i, inverse, at):
        for x in range(0, mine, run):
            to = at + 4 * x * columns
            if run == 4:
                store(
                    to,
                    O[i, x] * inverse,
                    O[i, x + 1] * inverse,
                    O[i, x + 2] * inverse,
                    O[i, x + 3] * inverse,
                )
            elif run == 2:
                store(to, O[i, x] * inverse, O[i, x + 1] * inverse)
            else:
                store(to, O[i, x] * inverse)

    def register_tiles(q, k, v, mask, bias, o, O, L):
        t = cuda.threadIdx.x
        lane, warp = t % 32, t // 32
        number = int32((o.Lq + B_r - 1) // B_r)
        # The last queries of a causal problem see the most keys: their blocks start first.
        i_start = int32((number - 1 - cuda.blockIdx.x % number) * B_r)
        h = int32(cuda.blockIdx.x // number % o.H)
        b = int32(cuda.blockIdx.x // number // o.H)
        kv = int32(h // (o.H // o.Hkv))

        # Seen from the number of a query instead of its position, bounds need 32 bits and no more.
        q_offset = ld_global_nc_s64(o.q_offset + 8 * b)
        left = int32(min(max(o.left - q_offset, -LONGEST), LONGEST))
        right = int32(min(max(o.right + q_offset, -LONGEST), LONGEST))
        length = int32(ld_global_nc_s64(o.kv_lengths + 8 * b))
        i_stop = int32(min(i_start + B_r, o.Lq))
        j_start, j_stop = key_range(i_start, i_stop, 0, left, right, length)
        j_start, j_stop = int32(min(j_start, length)), int32(max(j_stop, 0))

        my_row = warp * ROWS * high + lane // columns
        my_column = lane % columns
        row = i_start + my_row
        # 32 bits again, from which ptxas makes one register and constant offsets.
        Q_i = shared_address(cuda.shared.array(0, float32, alignment=16))
        K_j = uint32(Q_i + 4 * B_r * long_row)
        V_j = uint32(K_j + 4 * keys_or_weights)
        Q_at = uint32(Q_i + 4 * my_row * long_row)
        K_at = uint32(K_j + 4 * my_column * long_row)
        P_at = uint32(K_j + 4 * my_row * weights_row)
        V_at = uint32(V_j + 4 * run * my_column)
        Q_from = q.address + 4 * (b * q.batch + h * q.head + i_start * q.row)
        K_from = k.address + 4 * (b * k.batch + kv * k.head)
        V_from = v.address + 4 * (b * v.batch + kv * v.head)

        S_ij = cuda.local.array((ROWS, keys), float32)
        O_i = cuda.local.array((ROWS, mine), float32)
        m_i = cuda.local.array(ROWS, float32)
        l_i = cuda.local.array(ROWS, float32)
        for i in range(ROWS):  # line 5
            m_i[i], l_i[i] = NOTHING, 0
            for x in range(mine):
                O_i[i, x] = 0
        if j_start < j_stop:
            fetch(t, Q_i, long_row, Q_from, q.row, B_r, i_stop - i_start)  # line 4
        for j in range(j_start, j_stop, int32(B_c)):  # line 6
            is_whole = sees(i_stop - 1, j, 0, left, right, length) & sees(
                i_start, j + B_c - 1, 0, left, right, length
            )
            is_cut = has_mask or has_bias or not is_whole
            cuda.syncthreads()  # nobody reads P_ij and V_j any more
            fetch(t, K_j, long_row, K_from + 4 * j * k.row, k.row, B_c, length - j)  # line 7
            found = fetch(t, V_j, W, V_from + 4 * j * v.row, v.row, B_c, length - j)
            any_wild = cuda.syncthreads_or(1 if found and is_cut else 0) != 0
            multiply_keys(Q_at, K_at, S_ij)
            for i in range(ROWS):
                for n in range(keys):
                    S_ij[i, n] *= o.scale
            if bends or is_cut:
                column = j + my_column
                for i in range(ROWS):
                    r = row + i * high
                    finish_row(S_ij, mask, bias, o, b, h, r, column, left, right, length)
                    turn(S_ij)
            cuda.syncthreads()  # nobody reads K_j any more
            take_scores(S_ij, O_i, m_i, l_i, uint32(P_at + 4 * my_column))
            cuda.syncwarp()
            if any_wild:
                add_wild_values(P_at, V_at, O_i)
            else:
                multiply_values(P_at, V_at, O_i)

        sink = ld_global_nc_f32(o.sinks + 4 * h)
        for i in range(ROWS):  # lines 12 to 15
            r = row + i * high
            top = max_f32(m_i[i], sink)
            reference = top if top > NOTHING else float32(0)
            correction = power(m_i[i] - reference)
            l = sum_of_columns(l_i[i]) * correction + power(sink - reference)
            if r < o.Lq:
                if my_column == 0:
                    st_global_f32(L + 4 * ((b * o.H + h) * o.Lq + r), reference + math.log(l))
                inverse = correction / l if l != 0 else float32(0)
                at = O.address + 4 * (b * O.batch + h * O.head + r * O.row + run * my_column)
                store_row(O_i, i, inverse, at)

    return register_tiles
