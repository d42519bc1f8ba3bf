"""CUDA rung 4, tensor cores: both products of a tile by ``mma.sync``, float16 or bfloat16.

What changed from rung 3: a warp multiplies (16, 16) by (16, 8) numbers with one instruction. It
owns 16 or 32 rows of Q_i, whose S_ij, P_ij, m_i, l_i and O_i stay in its registers from the first
key to the last: where ``mma`` leaves S_ij is, packed in pairs, where it wants P_ij. Shared memory
holds Q_i and two tiles each of K and V. While the warps work on one, ``cp.async`` brings the next,
past the registers, and one barrier a tile keeps the two apart. ``ldmatrix`` takes the same column
of eight rows at a time, which would lie in the same banks; so the 16-byte chunks of a row change
places, by an exclusive or with the row's number.

Why faster: a tensor core does in one instruction what takes 64 of a warp's fused multiply-adds, and
each number that is read from shared memory takes part in more of them.

Tiles that no query of the block sees are not visited. Tiles that all its queries see whole, most of
them, are not masked. In the others each score is asked whether it counts, and each value whether it
is finite: 0 · NaN is NaN, so a value that is not would spoil the rows that do not see it too.
``mark_wild`` adds it to those that do, at the cost of more products, and it becomes 0.

Rows of q, k, v and O must begin at multiples of 16 bytes.

Dao, "FlashAttention-2", 2023, Algorithm 1, whose lines are named below. Not measured: no GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from minimha.equations.problem import Problem
from minimha.kernels.cuda.arguments import (
    ADDRESSES,
    Arguments,
    check_alignment,
    padded_width,
    too_wide,
)
from minimha.kernels.cuda.functions import device, key_range
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.ptx import (
    afresh,
    bits_as_f32,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group,
    cvt_f32_f16,
    ex2_approx,
    ld_global_f32,
    ld_global_nc_f32,
    ld_global_nc_s64,
    ld_global_s64,
    ld_global_u8,
    ld_global_u32,
    ld_shared_v4_u32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    lg2_approx,
    mma_bf16_in,
    mma_f16_in,
    pack_bf16x2,
    pack_f16x2,
    rcp_approx,
    shared_address,
    shfl_bfly_f32,
    split_b32,
    st_global_f32,
    st_global_u32,
    st_global_v4_u32,
    st_shared_u32,
    st_shared_v4_u32,
)

WARPS = 4
THREADS = 32 * WARPS
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def swizzled(row: int, chunk: int, chunks: int) -> int:
    """Where in a tile of shared memory a 16-byte chunk of a row lies, in bytes.

    Eight chunks are as wide as the banks. Of eight rows that follow each other, the same chunk must
    lie in eight different places there. Rows come back to the same place after 8 / spread of them,
    where spread is the largest power of 2 in the number of chunks, at most 8; so from there on they
    are moved on by an exclusive or, which keeps them within groups of ``spread`` chunks.

    >>> [[swizzled(row, chunk, 4) // 16 % 8 for chunk in range(4)] for row in range(4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [1, 0, 3, 2], [5, 4, 7, 6]]
    """
    spread = min(chunks & -chunks, 8)
    return 16 * (row * chunks + (chunk ^ ((row // (8 // spread)) & (spread - 1))))


offset_in_tile = device(swizzled)
wait_for_all = cp_async_wait_group(0)


class Bits(NamedTuple):
    """How a 16-bit number is written, and what works on two of them in a register."""

    infinity: int
    one: int
    pack: Any
    mma: Any


BITS = {
    "float16": Bits(0x7C00, 0x3C00, pack_f16x2, mma_f16_in),
    "bfloat16": Bits(0x7F80, 0x3F80, pack_bf16x2, mma_bf16_in),
}


class Variant(NamedTuple):
    """What a compiled kernel is made for; ``is_plain`` if scores are scaled and no more."""

    width: int
    dtype: str
    is_plain: bool
    has_softcap: bool
    has_slopes: bool
    has_mask: bool
    has_bias: bool


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``, or None."""
    if problem.dtype.name not in BITS:
        return f"tensor cores take float16 and bfloat16 here, and q, k, v are {problem.dtype}"
    return too_wide(problem)


def blocks(made_for: Variant) -> tuple[int, int]:
    """B_r and B_c, so that 255 registers a thread and 99 KB of shared memory suffice.

    S_ij and O_i are (B_c + W) · B_r / 64 registers. Options that look at every score by itself
    need others, and so does a width of 112, whose 14 chunks a row 128 threads share unevenly.
    """
    is_tight = made_for.has_mask or not made_for.is_plain or made_for.width == 112
    if made_for.width > 128:
        return 64, 16 if is_tight else 32
    if made_for.width == 128 and not is_tight:
        return 128, 48
    return 64 if is_tight and made_for.width > 64 else 128, 32 if is_tight else 64


def shared_bytes(made_for: Variant) -> int:
    """Q_i and two tiles each of K and V."""
    B_r, B_c = blocks(made_for)
    return (B_r + 4 * B_c) * made_for.width * 2


def variant(problem: Problem) -> Variant:
    """What the kernel for ``problem`` is made for."""
    bends = (
        problem.softcap is not None,
        problem.alibi_slopes is not None,
        problem.attn_mask is not None,
        problem.attn_bias is not None,
    )
    # The largest of the products is the largest score only if the scale is positive.
    is_plain = not (bends[0] or bends[1] or bends[3])
    is_plain = is_plain and problem.scale >= float(np.finfo(np.float32).tiny)
    return Variant(padded_width(problem), problem.dtype.name, is_plain, *bends)


def launches(
    problem: Problem, arguments: Arguments, scratch: Callable[[tuple[int, ...]], int]
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """One launch, a thread block for every B_r queries; none if there is no query.

    Raises
    ------
    ValueError
        Rows of q, k, v or O do not begin at multiples of 16 bytes.
    """
    check_alignment(arguments, 2)
    B, H, Lq, _ = problem.q.shape
    if B * Lq == 0:
        return []
    made_for = variant(problem)
    launch = Launch(
        function=kernel(made_for),
        signature=ADDRESSES,
        grid=(-(-Lq // blocks(made_for)[0]) * H * B, 1, 1),
        threads=THREADS,
        shared=shared_bytes(made_for),
        registers=255,
    )
    return [(launch, arguments)]


@cache
def kernel(made_for: Variant) -> Callable[..., None]:
    """The kernel for a width, a dtype and a set of options."""
    W, dtype, is_plain, has_softcap, has_slopes, has_mask, has_bias = made_for
    infinity, one, pack, mma = BITS[dtype]
    B_r, B_c = blocks(made_for)
    M = B_r // (16 * WARPS)  # tiles of 16 rows that a warp owns
    N = B_c // 8  # tiles of 8 keys in a tile of scores
    chunks = W // 8  # of 16 bytes in a row
    S_size, O_size, A_size = 4 * M * N, 4 * M * chunks, 4 * M  # numbers of a thread
    stage = B_c * W * 2  # bytes of a tile of K or V
    stride = THREADS // chunks  # rows that the block copies in one pass
    copies_evenly = THREADS % chunks == 0 and B_c % stride == 0

    @device
    def at(row, chunk):
        return offset_in_tile(row, chunk, chunks)

    @device
    def is_mine(t, row, rows):
        """Whether thread t copies ``row``: the last pass may be cut, and threads may be left."""
        return copies_evenly or (t < stride * chunks and row < rows)

    @device
    def place_of(t):
        """Lane in the warp, and the first row of Q_i that the warp owns."""
        t = afresh(t)
        return t & 31, (t >> 5) * (16 * M)

    @device
    def begin(t, X, b, h, i):
        """Where thread t begins to read the rows of X from i on."""
        row = i + t // chunks
        return X.address + 2 * (b * X.batch + h * X.head + row * X.row) + 16 * (t % chunks)

    @device
    def fetch(t, to, X, row_bytes, rows, present):
        """Start copying ``rows`` rows, those that are not ``present`` as 0.

        ``X`` is where thread t begins to read, as ``begin`` says.
        """
        first, chunk = t // chunks, t % chunks
        for r in range(-(-rows // stride)):
            row = np.int32(first + r * stride)
            if is_mine(t, row, rows):
                cp_async_16(to + at(row, chunk), X, 16 if row < present else 0)
            X += stride * row_bytes

    @device
    def is_wild(half):
        return (half & infinity) == infinity

    @device
    def any_half(word):
        return is_wild(word) | is_wild(word >> 16)

    @device
    def has_wild(t, V_j):
        """Whether thread t copied a value that is NaN or infinite."""
        found = 0
        first, chunk = t // chunks, t % chunks
        for r in range(-(-B_c // stride)):
            row = first + r * stride
            if is_mine(t, row, B_c):
                w0, w1, w2, w3 = ld_shared_v4_u32(V_j + at(row, chunk))
                found |= any_half(w0) | any_half(w1) | any_half(w2) | any_half(w3)
        return found

    @device
    def tamed(word):
        low = 0 if is_wild(word) else word & 0xFFFF
        return low if is_wild(word >> 16) else low | (word & 0xFFFF0000)

    @device
    def tame(t, V_j):
        """Put 0 for the wild values that thread t copied."""
        first, chunk = t // chunks, t % chunks
        for r in range(-(-B_c // stride)):
            row = first + r * stride
            if is_mine(t, row, B_c):
                place = V_j + at(row, chunk)
                a, b, c, d = ld_shared_v4_u32(place)
                st_shared_v4_u32(place, tamed(a), tamed(b), tamed(c), tamed(d))

    @device
    def flag(half, sign):
        """1 for NaN and for the infinity of that sign bit, 0 for all else."""
        is_one = (half & 0x7FFF) > infinity or half ^ sign == infinity
        return one if is_one else 0

    @device
    def flags(word, sign):
        return flag(word & 0xFFFF, sign) | (flag(word >> 16, sign) << 16)

    @device
    def halves(word):
        """The two numbers in a register as float32."""
        if dtype == "bfloat16":
            return bits_as_f32(word << 16), bits_as_f32(word & 0xFFFF0000)
        low, high = split_b32(word)
        return cvt_f32_f16(low), cvt_f32_f16(high)

    @device
    def mark_wild(t, V_j, seen, sign, has_marks, O_at, row_bytes, rows):
        """Add NaN and the infinity of that sign bit to the marks of the rows that see them.

        Who sees, times where they are, is a count, which cannot go wrong. The marks lie where the
        output will, each written and read by one thread alone; ``has_marks`` if some are there.
        """
        A = cuda.local.array(4, types.uint32)
        B = cuda.local.array(4, types.uint32)
        C = cuda.local.array(8, types.float32)
        infinite = np.float32(-math.inf if sign else math.inf)
        for i in range(M):
            for d in range(0, chunks, 2):
                lane, first_row = place_of(t)
                bits = seen[0] if i == 0 else seen[M - 1]
                for e in range(8):
                    C[e] = 0
                for j in range(N // 2):
                    for a in range(4):
                        pair = bits >> (8 * j + 2 * a)
                        A[a] = (pair & 1) * one | (((pair >> 1) & 1) * one) << 16
                    ldmatrix_x4_trans(B, 0, V_j + at(16 * j + (lane & 15), d + (lane >> 4)))
                    for e in range(4):
                        B[e] = flags(B[e], sign)
                    mma(C, 0, A, 0, B, 0)
                    mma(C, 4, A, 0, B, 2)
                for x in range(4):
                    row = first_row + 16 * i + 8 * (x % 2) + (lane >> 2)
                    if row < rows:
                        place = O_at + row * row_bytes + 16 * (d + x // 2) + 4 * (lane & 3)
                        low = infinite if C[2 * x] > 0 else np.float32(0)
                        high = infinite if C[2 * x + 1] > 0 else np.float32(0)
                        if has_marks:
                            old_low, old_high = halves(ld_global_u32(place))
                            low += old_low
                            high += old_high
                        st_global_u32(place, pack(low, high))

    @device
    def add_marks(t, O, O_at, row_bytes, rows):
        lane, first_row = place_of(t)
        for i in range(M):
            for half in range(2):
                row = first_row + 16 * i + 8 * half + (lane >> 2)
                if row < rows:
                    for d in range(chunks):
                        place = O_at + row * row_bytes + 16 * d + 4 * (lane & 3)
                        low, high = halves(ld_global_u32(place))
                        O[4 * (i * chunks + d) + 2 * half] += low
                        O[4 * (i * chunks + d) + 2 * half + 1] += high

    @device
    def multiply_keys(t, Q_i, K_j, S):
        """Line 8: S_ij = Q_i K_jᵀ."""
        lane, first_row = place_of(t)
        A = cuda.local.array(A_size, types.uint32)
        B = cuda.local.array(4, types.uint32)
        for e in range(S_size):
            S[e] = 0
        for d in range(0, chunks, 2):
            for i in range(M):
                row = first_row + 16 * i + (lane & 15)
                ldmatrix_x4(A, 4 * i, Q_i + at(row, d + (lane >> 4)))
            for n in range(0, N, 2):
                key = 8 * n + (lane & 7) + ((lane >> 4) << 3)
                ldmatrix_x4(B, 0, K_j + at(key, d + ((lane >> 3) & 1)))
                for i in range(M):
                    mma(S, 4 * (i * N + n), A, 4 * i, B, 0)
                    mma(S, 4 * (i * N + n + 1), A, 4 * i, B, 2)

    @device
    def multiply_values(t, V_j, P, O):
        """Line 10: O_i + P_ij V_j."""
        lane, _ = place_of(t)
        A = cuda.local.array(A_size, types.uint32)
        B = cuda.local.array(4, types.uint32)
        for j in range(N // 2):
            for i in range(M):
                for a in range(4):
                    e = 4 * (i * N + 2 * j) + 2 * a
                    A[4 * i + a] = pack(P[e], P[e + 1])
            for d in range(0, chunks, 2):
                ldmatrix_x4_trans(B, 0, V_j + at(16 * j + (lane & 15), d + (lane >> 4)))
                for i in range(M):
                    mma(O, 4 * (i * chunks + d), A, 4 * i, B, 0)
                    mma(O, 4 * (i * chunks + d + 1), A, 4 * i, B, 2)

    @device
    def line_of(X, b, h, i, o):
        """Which pair stands at query i, or the last one for those beyond, and key 0."""
        return b * X.batch + h * X.head + min(i, o.Lq - 1) * X.row

    @device
    def key_of(j, o):
        return np.int32(min(j, o.Lk - 1))

    @device
    def corner(t, i_start, j):
        """Query and key of this thread's first score."""
        t = afresh(t)
        return i_start + (t >> 5) * (16 * M) + ((t & 31) >> 2), j + 2 * (t & 3)

    @device
    def cap(S, scale, softcap):
        """scale · S, beyond which softcap · tanh(S / softcap) bends it."""
        to_cap = np.float32(1) / softcap
        for e in range(S_size):
            x = S[e] * scale * to_cap
            size = abs(x)
            square = size * size
            # 1 - 2 / (1 + exp(2 x)) has no digits left where x is small; there is a series.
            power = ex2_approx(size * np.float32(2 * LOG2_E))
            bent = np.float32(1) - np.float32(2) * rcp_approx(np.float32(1) + power)
            if size < np.float32(0.1):
                series = np.float32(2 / 15) * square - np.float32(1 / 3)
                bent = size + size * square * series
            S[e] = softcap * (-bent if x < 0 else bent)

    @device
    def bend(t, S, bias, o, b, h, i_start, j_start):
        """Scale, softcap, ALiBi and bias."""
        if has_softcap:
            cap(S, o.scale, o.softcap)
        else:
            for e in range(S_size):
                S[e] *= o.scale
        if has_slopes:
            slope = ld_global_nc_f32(o.slopes + 4 * h)
            row, column = corner(t, i_start, j_start)
            distance = row + ld_global_s64(o.q_offset + 8 * b) - column
            for i in range(M):
                for n in range(N):
                    for e in range(4):
                        further = distance + (16 * i + 8 * (e // 2) - 8 * n - e % 2)
                        S[4 * (i * N + n) + e] -= slope * np.float32(abs(further))
        if has_bias:
            for i in range(M):
                for half in range(2):
                    row, column = corner(t, i_start, j_start)
                    line = bias.address + 4 * line_of(bias, b, h, row + 16 * i + 8 * half, o)
                    for n in range(N):
                        for x in range(2):
                            key = key_of(column + 8 * n + x, o)
                            S[4 * (i * N + n) + 2 * half + x] += ld_global_f32(
                                line + 4 * key * bias.column
                            )

    @device
    def see(t, mask, bias, o, b, h, i_start, j_start, i):
        """Bit 4 n + e says whether the score S[i, n, e] counts."""
        q_offset, length = ld_global_s64(o.q_offset + 8 * b), ld_global_s64(o.kv_lengths + 8 * b)
        bits = np.uint32(0)
        for half in range(2):
            row, column = corner(t, i_start, j_start)
            r = row + 16 * i + 8 * half
            start, stop = key_range(r, r + 1, q_offset, o.left, o.right, length)
            low = np.int32(min(start - column, B_c))
            high = np.int32(max(min(stop - column, B_c), 0))
            mask_line = mask.address + line_of(mask, b, h, r, o)
            bias_line = bias.address + 4 * line_of(bias, b, h, r, o)
            for n in range(N):
                for x in range(2):
                    j = 8 * n + x
                    visible = (low <= j) & (j < high)
                    key = key_of(column + j, o)
                    if has_mask:
                        visible &= ld_global_u8(mask_line + key * mask.column) != 0
                    if has_bias:
                        added = ld_global_f32(bias_line + 4 * key * bias.column)
                        visible &= added != -math.inf
                    bits |= np.uint32(visible) << np.uint32(4 * n + 2 * half + x)
        return np.uint32(bits)

    @device
    def hide(S, seen):
        """-inf for the keys that a query does not see."""
        for i in range(M):
            for x in range(4 * N):
                if not (seen[i] >> x) & 1:
                    S[4 * N * i + x] = np.float32(-math.inf)

    @device
    def take_scores(S, O, m, l, factor):
        """Lines 9 and 10: m_i, P_ij in the place of S_ij, l_i; O_i for the new maximum."""
        for i in range(M):
            for half in range(2):
                e = 2 * half
                top = m[i, half]
                for n in range(N):
                    top = max(top, max(S[4 * (i * N + n) + e], S[4 * (i * N + n) + e + 1]))
                top = max(top, shfl_bfly_f32(top, 1))
                top = max(top, shfl_bfly_f32(top, 2))
                reference = top if top > -math.inf else np.float32(0)
                correction = ex2_approx((m[i, half] - reference) * factor)
                m[i, half] = top
                shift = -reference * factor
                total = np.float32(0)
                for n in range(N):
                    for x in range(2):
                        if is_plain:
                            power = cuda.fma(S[4 * (i * N + n) + e + x], factor, shift)
                        else:  # a bias may be so large that its product would overflow
                            power = (S[4 * (i * N + n) + e + x] - reference) * factor
                        S[4 * (i * N + n) + e + x] = ex2_approx(power)
                        total += S[4 * (i * N + n) + e + x]
                l[i, half] = correction * l[i, half] + total
                for d in range(chunks):
                    O[4 * (i * chunks + d) + e] *= correction
                    O[4 * (i * chunks + d) + e + 1] *= correction

    @device
    def finish(lane, row, first_row, Q_i, O_i, m_i, l_i, unit, sink, o, L_at):
        """Lines 12 and 13: L_i, and O_i / l_i, rounded, into the place of Q_i."""
        for i in range(M):
            for half in range(2):
                l = l_i[i, half]
                l += shfl_bfly_f32(l, 1)
                l += shfl_bfly_f32(l, 2)
                m = m_i[i, half] * unit
                top = max(m, sink)
                reference = top if top > -math.inf else np.float32(0)
                correction = ex2_approx((m - reference) * np.float32(LOG2_E))
                l = l * correction + ex2_approx((sink - reference) * np.float32(LOG2_E))
                r = 16 * i + 8 * half
                if lane & 3 == 0 and row + r < o.Lq:
                    st_global_f32(L_at + 4 * (row + r), top + lg2_approx(l) * np.float32(LN_2))
                inverse = correction / l if l != 0 else np.float32(0)
                for d in range(chunks):
                    e = 4 * (i * chunks + d) + 2 * half
                    st_shared_u32(
                        Q_i + at(first_row + r + (lane >> 2), d) + 4 * (lane & 3),
                        pack(O_i[e] * inverse, O_i[e + 1] * inverse),
                    )

    @device
    def store(lane, first_row, Q_i, O_at, row_bytes, rows):
        """Lines 14 and 15: whole chunks of the rows of this warp, which no other one touches."""
        cuda.syncwarp()
        for c in range(16 * M * chunks // 32):
            place = lane + 32 * c
            r, chunk = first_row + place // chunks, place % chunks
            if r < rows:
                w0, w1, w2, w3 = ld_shared_v4_u32(Q_i + at(r, chunk))
                st_global_v4_u32(O_at + r * row_bytes + 16 * chunk, w0, w1, w2, w3)

    def tensor_cores(q, k, v, mask, bias, o, O, L):
        t = cuda.threadIdx.x
        tiles = np.uint32((o.Lq + B_r - 1) // B_r)
        # The last queries of a causal problem see the most keys: their blocks start first.
        block = np.uint32(cuda.blockIdx.x)
        i_start = np.int32(tiles - 1 - block % tiles) * B_r
        head = np.uint32(block // tiles)
        h, b = np.int32(head % np.uint32(o.H)), np.int32(head // np.uint32(o.H))
        kv = np.int32(np.uint32(h) // np.uint32(np.uint32(o.H) // np.uint32(o.Hkv)))

        q_offset = ld_global_nc_s64(o.q_offset + 8 * b)
        length = ld_global_nc_s64(o.kv_lengths + 8 * b)
        i_stop = min(i_start + B_r, o.Lq)
        start, stop = key_range(i_start, i_stop, q_offset, o.left, o.right, length)
        j_start, j_stop = np.int32(min(start, o.Lk)), np.int32(max(stop, 0))
        # Between these, the first key that the last query sees and the last one that the first
        # query sees, every query sees every key.
        start, _ = key_range(i_stop - 1, i_stop, q_offset, o.left, o.right, length)
        _, stop = key_range(i_start, i_start + 1, q_offset, o.left, o.right, length)
        whole_start, whole_stop = np.int32(min(start, o.Lk)), np.int32(max(stop, 0))

        Q_i = shared_address(cuda.shared.array(0, types.uint8, alignment=16))
        K, V = Q_i + B_r * W * 2, Q_i + B_r * W * 2 + 2 * stage
        K_at, V_at = begin(t, k, b, kv, j_start), begin(t, v, b, kv, j_start)
        O_at = O.address + 2 * (b * O.batch + h * O.head + i_start * O.row)

        S_ij = cuda.local.array(S_size, types.float32)
        O_i = cuda.local.array(O_size, types.float32)
        m_i = cuda.local.array((M, 2), types.float32)
        l_i = cuda.local.array((M, 2), types.float32)
        seen = cuda.local.array(M, types.uint32)
        for i in range(M):  # line 5
            for half in range(2):
                m_i[i, half] = -math.inf
                l_i[i, half] = 0
        for e in range(O_size):
            O_i[e] = 0

        factor = np.float32(LOG2_E) * (o.scale if is_plain else np.float32(1))
        left_over = j_stop - j_start
        if left_over > 0:
            fetch(t, Q_i, begin(t, q, b, h, i_start), 2 * q.row, B_r, o.Lq - i_start)  # line 4
            fetch(t, K, K_at, 2 * k.row, B_c, left_over)  # line 7
            fetch(t, V, V_at, 2 * v.row, B_c, left_over)
            cp_async_commit_group()
        now, has_marks = 0, False
        for j in range(j_start, j_stop, B_c):  # line 6
            K_j, V_j = K + now, V + now
            now = stage - now
            is_cut = has_mask or has_bias or j < whole_start or j + B_c > whole_stop
            wait_for_all()
            # From here on K_j and V_j are there for all, and nobody reads the other two any more.
            cuda.syncthreads()
            if j + B_c < j_stop:
                K_at += 2 * B_c * k.row
                V_at += 2 * B_c * v.row
                fetch(t, K + now, K_at, 2 * k.row, B_c, j_stop - j - B_c)
                fetch(t, V + now, V_at, 2 * v.row, B_c, j_stop - j - B_c)
            cp_async_commit_group()
            if is_cut:
                seen[0] = see(t, mask, bias, o, b, h, i_start, j, 0)
                if M == 2:
                    seen[M - 1] = see(t, mask, bias, o, b, h, i_start, j, 1)
                if cuda.syncthreads_or(has_wild(afresh(t), V_j)):
                    for sign in range(2):
                        mark_wild(
                            t, V_j, seen, sign << 15, has_marks, O_at, 2 * O.row, o.Lq - i_start
                        )
                        has_marks = True
                    cuda.syncthreads()
                    tame(afresh(t), V_j)
                    cuda.syncthreads()
            multiply_keys(t, Q_i, K_j, S_ij)
            if not is_plain:
                bend(t, S_ij, bias, o, b, h, i_start, j)
            if is_cut:
                hide(S_ij, seen)
            take_scores(S_ij, O_i, m_i, l_i, factor)
            multiply_values(t, V_j, S_ij, O_i)

        if has_marks:
            add_marks(t, O_i, O_at, 2 * O.row, o.Lq - i_start)
        lane, first_row = place_of(t)
        row = i_start + first_row + (lane >> 2)
        unit = o.scale if is_plain else np.float32(1)
        sink = ld_global_nc_f32(o.sinks + 4 * h)
        L_at = L + 4 * o.Lq * (b * o.H + h)
        finish(lane, row, first_row, Q_i, O_i, m_i, l_i, unit, sink, o, L_at)
        store(lane, first_row, Q_i, O_at, 2 * O.row, o.Lq - i_start)

    return tensor_cores
