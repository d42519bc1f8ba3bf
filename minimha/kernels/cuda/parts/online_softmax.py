"""Compute the online softmax: row maxima, exponentials, rescaling, and the final log-sum-exp.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Algorithm 1 of
FlashAttention-2, lines 9 to 13. A GPU has instructions for exponentials and logarithms to base 2
only. Those to base e take another multiplication, by ``LOG2_E`` or ``LN_2``.
"""

import math
from typing import Any

import numpy as np
from numba import cuda, float32, int32, uint32
from numba.cuda.libdevice import fmul_rn

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.fragments import FORMATS, DecodeTiles, MmaTiles
from minimha.kernels.cuda.parts.register_tiles import RegisterTiles

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
LOWEST = float32(-math.inf)  # the score of a hidden key, and the maximum of no scores
FAR = float32(1 << 20)  # a score in base 2: float32 rounds larger ones by more than 1/16


@device
def exp(x):
    return ptx.ex2_approx(x * float32(LOG2_E))


@device
def log(x):
    return ptx.lg2_approx(x) * float32(LN_2)


@device
def shift_of(m):
    """Return what to subtract before ``exp``: m, or 0 if m is -inf, since -inf - -inf is NaN."""
    return m if m > LOWEST else float32(0)


@device
def rounding(m, factor):
    """Return the rounding error of m · factor, or 0 if the product is at least 2 ``FAR`` from 0.

    Weights are 2^(S · factor - shift), where the shift is m · factor, rounded. O_i and l_i share
    the rounding error, so it cancels. But if |m · factor| is at least ``FAR``, the error is so
    large that weights could overflow. There ``shifted`` subtracts m from S before it multiplies,
    and adds the error. So the weights have the same rounded shift as without the subtraction.

    From 2 ``FAR`` on, no error is added: the shift is m · factor itself. A maximum above 2 ``FAR``
    can only rise. If one below -2 ``FAR`` rises to -``FAR``, the correction of earlier weights is 0
    in any case.
    """
    shift = fmul_rn(m, factor)
    return cuda.fma(m, factor, -shift) if abs(shift) < 2 * FAR else float32(0)


@device
def with_sink(m, l, sink):
    """Return a row's maximum and sum after adding its sink, and the factor that scales O_i.

    L_i is the maximum plus the logarithm of the sum (Algorithm 1, lines 12 and 13). The factor is 0
    for a row that sees no key.
    """
    m_new = ptx.max_f32(m, sink)
    shift = shift_of(m_new)
    correction = exp(m - shift)
    l = l * correction + exp(sink - shift)
    return m_new, l, correction / l if l != 0 else float32(0)


def bits_of(lanes: int) -> tuple[int, ...]:
    """Return the bits in which the indices of ``lanes`` neighbouring lanes differ.

    ``lanes`` is a power of 2.

    >>> bits_of(8)
    (1, 2, 4)
    """
    return tuple(1 << bit for bit in range(lanes.bit_length() - 1))


def maximum_over(*bits: int) -> Any:
    """Return a device function that returns the largest x of a group of lanes.

    The indices of these lanes differ only in ``bits``.
    """

    @device
    def maximum(x):
        for bit in bits:
            x = ptx.max_f32(x, ptx.shfl_bfly_f32(x, bit))
        return x

    return maximum


def sum_over(*bits: int) -> Any:
    """Return a device function that sums x over lanes whose indices differ only in ``bits``."""

    @device
    def total(x):
        for bit in bits:
            x += ptx.shfl_bfly_f32(x, bit)
        return x

    return total


def update_halves(rows: int, keys: int, words: int) -> Any:
    """Return a device function that updates the softmax and O by a lane's keys, for rung 5.

    These are lines 9 and 10 of Algorithm 1. A lane has ``rows`` rows of S and O, ``keys`` keys, and
    ``words`` columns of O and V. If ``is_partial``, hidden keys are skipped, because 0 times NaN
    would be NaN.
    """

    @device
    def update(S, V_j, O, m, l, is_partial):
        for r in range(rows):
            m_new = m[r]
            for u in range(keys):
                m_new = ptx.max_f32(m_new, S[r * keys + u])
            shift = shift_of(m_new)
            if m_new != m[r]:
                correction = exp(m[r] - shift)
                l[r] *= correction
                for x in range(words):
                    O[r * words + x] *= correction
                m[r] = m_new
            for u in range(keys):
                s = S[r * keys + u]
                if not is_partial or s != LOWEST:
                    p = exp(s - shift)
                    l[r] += p
                    for x in range(words):
                        O[r * words + x] += p * V_j[u * words + x]

    return update


def update_transposed(tiles: DecodeTiles) -> Any:
    """Return a device function that updates the softmax by scores in registers, for rung 5.

    It does line 9 of Algorithm 1, and rescales O_i as in line 10. S and the transposed O have the
    layout of ``DecodeTiles``. Each weight becomes two 16-bit numbers: its upper bits in
    ``P_upper``, and the rest in ``P_rest``.
    """
    sides, keys, words = tiles.sides, tiles.keys // 8, tiles.v_words
    _, _, pack, _, _ = FORMATS[tiles.dtype]
    upper_bits = 0xFFFFE000 if tiles.dtype == "float16" else 0xFFFF0000  # the bits that fit into 16
    maximum = maximum_over(1, 2)

    @device
    def upper(p):
        return ptx.bits_as_f32(ptx.f32_as_bits(p) & uint32(upper_bits))

    @device
    def update_softmax(S, O, m, l, P_upper, P_rest, t):
        for side in range(sides):
            m_new = m[side]
            for n in range(keys):
                for x in range(2):
                    m_new = ptx.max_f32(m_new, S[4 * n + 2 * side + x])
            m_new = maximum(m_new)
            shift = shift_of(m_new)
            correction = exp(m[side] - shift)
            m[side] = m_new
            l[side] *= correction
            for n in range(keys):
                p0 = exp(S[4 * n + 2 * side] - shift)
                p1 = exp(S[4 * n + 2 * side + 1] - shift)
                l[side] += p0 + p1
                upper0, upper1 = upper(p0), upper(p1)
                P_upper[side * keys + n] = pack(upper0, upper1)
                P_rest[side * keys + n] = pack(p0 - upper0, p1 - upper1)
            # The scores of a row are in the lanes of one g, its columns of O in the lanes of one t.
            first = ptx.shfl_idx_f32(correction, int32(8) * t)
            second = ptx.shfl_idx_f32(correction, int32(8) * t + int32(4))
            if first != float32(1) or second != float32(1):
                for M in range(words):
                    x = 4 * (side * words + M)
                    O[x] *= first
                    O[x + 1] *= second
                    O[x + 2] *= first
                    O[x + 3] *= second

    return update_softmax


def update_registers(tiles: RegisterTiles) -> Any:
    """Return a device function that updates the softmax by scores in registers, for rung 3.

    It does line 9 of Algorithm 1, and rescales O_i as in line 10. ``tiles.columns`` lanes share a
    row. P_ij is stored in shared memory, from ``P_at`` on, with the weight -0 for a hidden key.
    """
    columns, rows, keys, own = tiles.columns, tiles.rows, tiles.keys, tiles.own
    row_step, weights_row = tiles.row_step, tiles.weights_row
    maximum = maximum_over(*bits_of(columns))

    @device
    def update_softmax(S, O, m, l, P_at):
        for i in range(rows):
            m_new = S[i, 0]
            for j in range(1, keys):
                m_new = ptx.max_f32(m_new, S[i, j])
            m_new = ptx.max_f32(maximum(m_new), m[i])
            shift = shift_of(m_new)
            correction = exp(m[i] - shift)
            m[i] = m_new
            total = float32(0)
            for j in range(keys):
                p = exp(S[i, j] - shift)
                total += p
                p = p if S[i, j] != LOWEST else float32(-0.0)
                ptx.st_shared_f32(P_at + 4 * (i * row_step * weights_row + j * columns), p)
            l[i] = correction * l[i] + total
            for x in range(own):
                O[i, x] *= correction

    return update_softmax


def shifted(N: int) -> Any:
    """Return a device function that returns two exponents to base 2, for a row's new maximum.

    The correction of l_i and O_i is 2^first exponent. A weight is 2^(S · factor + second exponent).
    If m_new · factor is far from 0 (``FAR``) in any lane of the warp, m_new is subtracted from S in
    place. The row has ``N`` pairs of scores in a lane, from S[first] on.
    """

    @device
    def near_or_far(S, m, m_new, factor, first):
        addend = fmul_rn(-m_new, factor)
        power = fmul_rn(m, factor) + addend
        if cuda.any_sync(0xFFFFFFFF, abs(addend) >= FAR):
            addend = rounding(m_new, factor)
            power = (m - m_new) * factor + (addend - rounding(m, factor))
            for n in range(N):
                for x in range(2):
                    S[first + 4 * n + x] -= m_new
        return power, addend

    return near_or_far


def update_fragments(tiles: MmaTiles, is_plain: bool) -> Any:
    """Return a device function that updates the softmax by fragments of scores, for rung 4.

    It does line 9 of Algorithm 1, and rescales O_i as in line 10. S has the layout of ``mma``, and
    P_ij replaces it. Multiplying by ``factor`` converts scores to base 2. If ``is_plain``,
    ``factor`` also has the scale, which S then lacks.
    """
    M, N, chunks = tiles.M, tiles.N, tiles.chunks
    maximum, near_or_far = maximum_over(1, 2), shifted(N)
    # ptxas moves nothing past a branch. If registers are scarce, a branch precedes the products
    # with V_j: otherwise P_ij would be summed after them, and would stay next to packed P_ij. If
    # registers are not scarce, exponentials and O_i may wait until the tensor cores are busy.
    are_scarce = tiles.width > 64

    @device
    def update_softmax(S, O, m, l, factor):
        """Update m_i and l_i, replace S_ij by P_ij, and rescale O_i (Algorithm 1, lines 9, 10)."""
        corrections = cuda.local.array((M, 2), float32)
        is_new = uint32(0)
        for i in range(M):
            for half in range(2):
                e = 2 * half
                m_new = m[i, half]
                for n in range(N):
                    m_new = max(m_new, max(S[4 * (i * N + n) + e], S[4 * (i * N + n) + e + 1]))
                m_new = maximum(m_new)
                shift = shift_of(m_new)
                power, addend = (m[i, half] - shift) * factor, float32(0)
                if is_plain:
                    power, addend = near_or_far(S, m[i, half], shift, factor, 4 * i * N + e)
                correction = ptx.ex2_approx(power)
                m[i, half] = m_new
                total = np.float32(0)
                for n in range(N):
                    for x in range(2):
                        if is_plain:
                            power = cuda.fma(S[4 * (i * N + n) + e + x], factor, addend)
                        else:  # a bias may be so large that its product would overflow
                            power = (S[4 * (i * N + n) + e + x] - shift) * factor
                        S[4 * (i * N + n) + e + x] = ptx.ex2_approx(power)
                        total += S[4 * (i * N + n) + e + x]
                l[i, half] = correction * l[i, half] + total
                corrections[i, half] = correction
                is_new |= uint32(correction != float32(1))
        if not are_scarce or ptx.ballot(is_new) != uint32(0):
            for i in range(M):
                for half in range(2):  # two loops, since LLVM does not unroll 128 steps
                    for d in range(chunks):
                        for x in range(2):
                            O[4 * (i * chunks + d) + 2 * half + x] *= corrections[i, half]

    return update_softmax


def update_scores(tiles: MmaTiles, is_plain: bool) -> Any:
    """Return a device function that updates the softmax by 16 rows of scores, for rung 6.

    It does line 9 of Algorithm 1, and P_ij replaces S. The tensor cores may still be adding to O_i,
    so the caller must multiply O_i by ``correction`` afterwards. ``factor`` and ``is_plain`` are
    as in ``update_fragments``.
    """
    N, maximum, near_or_far = tiles.N, maximum_over(1, 2), shifted(tiles.N)

    @device
    def update(S, correction, m, l, factor):
        for half in range(2):
            m_new = m[0, half]
            for n in range(N):
                m_new = max(m_new, max(S[4 * n + 2 * half], S[4 * n + 2 * half + 1]))
            m_new = maximum(m_new)
            shift = shift_of(m_new)
            power, addend = (m[0, half] - shift) * factor, float32(0)
            if is_plain:
                power, addend = near_or_far(S, m[0, half], shift, factor, 2 * half)
            correction[half] = ptx.ex2_approx(power)
            m[0, half] = m_new
            total = np.float32(0)
            for n in range(N):
                for e in range(2 * half, 2 * half + 2):
                    if is_plain:
                        power = cuda.fma(S[4 * n + e], factor, addend)
                    else:  # a bias may be so large that its product would overflow
                        power = (S[4 * n + e] - shift) * factor
                    S[4 * n + e] = ptx.ex2_approx(power)
                    total += S[4 * n + e]
            l[0, half] = correction[half] * l[0, half] + total

    return update
