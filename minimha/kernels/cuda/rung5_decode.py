"""CUDA rung 5, decode: few queries against many keys, where reading K and V is all the work.

With one query a head the blocks of rung 4 would be nearly empty and their number too small for the
GPU. Here the keys are split among the warps, and a warp takes all the queries that share a
key/value head: row r is query r // group of the group's head r % group. Keys and values go from
memory straight into registers, so that a warp is on its own: no shared memory, no barrier. Each
split ends with its own m, l and O, and a second kernel merges them by log-sum-exp:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

Lines 8 to 10 of Algorithm 1 stand in ``_tensor_cores`` for 16-bit numbers and in ``_multiply_adds``
for float32. On the tensor cores S = Q Kᵀ may sum over the head width in any order, and Oᵀ = Vᵀ Pᵀ
over the keys, as long as both factors have the same one. So a lane reads 16 bytes of a row in one
piece and calls them those parts of the fragment that it has to hold; and S lies where it comes out
as Pᵀ has to lie when it goes in. P is given as two 16-bit numbers, its upper bits and what they
leave, which makes O as exact as in float32: the tensor cores have time for it.

Not measured: no GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, types, uint32, uint64

from minimha.equations.problem import Problem
from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.arguments import ADDRESSES, Arguments, padded_width, too_wide
from minimha.kernels.cuda.functions import device, key_range
from minimha.kernels.cuda.launch import Launch

WARPS = 2  # in a block: fewer waste less of the registers
WARPS_A_MULTIPROCESSOR = 16  # splits are as many as give each multiprocessor so many warps
SPLIT = 64  # keys of a split at least: less is not worth a merge
MERGERS = 8  # warps that merge a row's splits
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
LOWEST = float32(-math.inf)
SIGNATURE = (*ADDRESSES[:6], types.uint64, types.uint64, types.int32)
MERGE_SIGNATURE = (*ADDRESSES[5:], types.uint64, types.uint64, types.int32)


class Kind(NamedTuple):
    """What is constant in a kernel: width, storage, rows that a warp takes, and the options."""

    width: int
    dtype: str
    rows: int
    has_mask: bool
    has_bias: bool
    has_softcap: bool
    has_slopes: bool

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2


class Place(NamedTuple):
    """Which rows a warp has, and which keys: its own, and those that all of its rows see."""

    b: int
    kv: int
    group: int
    first_row: int
    rows: int
    start: int
    stop: int
    whole_start: int
    whole_stop: int
    split: int
    part: int


class Row(NamedTuple):
    """What one row needs beside its query: the keys in its reach, and where its pairs begin."""

    start: int
    stop: int
    position: int
    slope: float
    mask: int
    bias: int


def unsupported(problem: Problem) -> str | None:
    """Return why this rung cannot take ``problem``, or None."""
    if problem.dtype.itemsize > 4:
        return "q, k and v are float64: GPU kernels take float32, float16 and bfloat16"
    return too_wide(problem)


def launches(
    problem: Problem,
    arguments: Arguments,
    scratch: Callable[[tuple[int, ...]], int],
    *,
    splits: int | None = None,
    multiprocessors: int = 132,
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """Return the two kernels and what they are called with.

    ``splits`` of the keys are as many as keep ``multiprocessors`` busy, unless they are given.
    """
    B, H, Lq, _ = problem.q.shape
    _, Hkv, Lk, _ = problem.k.shape
    if 0 in (B, Lq):
        return []
    width, rows = padded_width(problem), H // Hkv * Lq
    kind = Kind(
        width=width,
        dtype=problem.dtype.name,
        rows=rows_of_warp(rows, width, problem.dtype.itemsize),
        has_mask=problem.attn_mask is not None,
        has_bias=problem.attn_bias is not None,
        has_softcap=problem.softcap is not None,
        has_slopes=problem.alibi_slopes is not None,
    )
    tiles = B * Hkv * -(-rows // kind.rows)
    if splits is None:
        wanted = -(-multiprocessors * WARPS_A_MULTIPROCESSOR // tiles)
        splits = max(1, min(wanted, Lk // SPLIT))
    parts_O = scratch((tiles, splits, kind.rows, width))
    parts_ml = scratch((tiles, splits, 2, kind.rows))
    take = Launch(
        function=(_multiply_adds if kind.itemsize == 4 else _tensor_cores)(kind),
        signature=SIGNATURE,
        grid=(tiles, -(-splits // WARPS), 1),
        threads=32 * WARPS,
    )
    merge = Launch(
        function=_merge(width, kind.dtype, kind.rows),
        signature=MERGE_SIGNATURE,
        grid=(B * H * Lq, 1, 1),
        threads=32 * MERGERS,
    )
    return [
        (take, (*arguments[:6], parts_O, parts_ml, splits)),
        (merge, (*arguments[5:], parts_O, parts_ml, splits)),
    ]


def rows_of_warp(rows: int, width: int, itemsize: int) -> int:
    """How many rows a warp takes: all, if its registers hold them; others read the keys again."""
    if itemsize == 2:
        return 8 if rows <= 8 or width > 128 else 16
    return min(8 if width <= 128 else 4, 1 << (rows - 1).bit_length())


@cache
def _loader(words: int, parts: int, has_floats: bool) -> Any:
    """load(address, part, into, first): a lane's ``words`` 32-bit words of a row of numbers.

    ``parts`` lanes share the row. Each takes 16 bytes as long as there are enough for all, then 8,
    then 4, so that neighbours read side by side.
    """
    four = ptx.ld_global_nc_v4_f32 if has_floats else ptx.ld_global_nc_v4_u32
    two = ptx.ld_global_nc_v2_f32 if has_floats else ptx.ld_global_nc_v2_u32
    one = ptx.ld_global_nc_f32 if has_floats else ptx.ld_global_nc_u32
    fours, has_two, has_one = words // 4, words & 2, words & 1

    @device
    def load(address, part, into, first):
        part = uint64(part)
        for piece in range(fours):
            at = first + 4 * piece
            a, b, c, d = four(address + uint64(16 * parts * piece) + part * uint64(16))
            into[at], into[at + 1], into[at + 2], into[at + 3] = a, b, c, d
        if has_two:
            at = first + 4 * fours
            a, b = two(address + uint64(16 * parts * fours) + part * uint64(8))
            into[at], into[at + 1] = a, b
        if has_one:
            beyond = uint64(4 * parts * (words - 1))
            into[first + words - 1] = one(address + beyond + part * uint64(4))

    return load


@cache
def _storer(words: int, parts: int, a_word: int) -> Any:
    """store(address, part, values): as float32 what ``_loader`` spread, ``a_word`` numbers each."""
    fours, has_two, has_one = words // 4, words & 2, words & 1

    @device
    def store(address, part, values):
        part = uint64(part)
        for piece in range(fours):
            to = address + uint64(16 * a_word) * (uint64(parts * piece) + part)
            for quarter in range(a_word):
                x = 4 * (a_word * piece + quarter)
                ptx.st_global_v4_f32(
                    to + uint64(16 * quarter),
                    values[x],
                    values[x + 1],
                    values[x + 2],
                    values[x + 3],
                )
        if has_two:
            x = 4 * a_word * fours
            to = address + uint64(4 * x * parts) + uint64(8 * a_word) * part
            for half in range(a_word):
                ptx.st_global_v2_f32(
                    to + uint64(8 * half), values[x + 2 * half], values[x + 2 * half + 1]
                )
        if has_one:
            x = a_word * (words - 1)
            to = address + uint64(4 * x * parts) + uint64(4 * a_word) * part
            for item in range(a_word):
                ptx.st_global_f32(to + uint64(4 * item), values[x + item])

    return store


@device
def divided(a, b):
    """Quotient and remainder of numbers that are not negative."""
    quotient = int32(ptx.div_u32(a, b))
    return quotient, int32(a - quotient * b)


@device
def reach(i_start, i_stop, b, o):
    """``key_range`` as numbers between 0 and Lk."""
    q_offset = ptx.ld_global_nc_s64(o.q_offset + uint64(8) * uint64(b))
    length = ptx.ld_global_nc_s64(o.kv_lengths + uint64(8) * uint64(b))
    start, stop = key_range(int64(i_start), int64(i_stop), q_offset, o.left, o.right, length)
    limit = int64(o.Lk)
    return int32(min(start, limit)), int32(max(int64(0), min(stop, limit)))


@cache
def _locator(kind: Kind, step: int) -> Any:
    """place(splits, o): the ``Place`` of this warp, whose keys come ``step`` at a time."""
    R = kind.rows

    @device
    def place(splits, o):
        split = int32(int32(cuda.blockIdx.y) * int32(WARPS) + (int32(cuda.threadIdx.x) >> int32(5)))
        group, _ = divided(o.H, o.Hkv)
        rows = int32(group * o.Lq)
        tiles, _ = divided(rows + R - 1, R)
        tile = int32(cuda.blockIdx.x)
        head, tile_of_head = divided(tile, tiles)
        first_row = int32(tile_of_head * R)
        b, kv = divided(head, o.Hkv)
        i_first, _ = divided(first_row, group)
        i_last, _ = divided(min(first_row + R, rows) - 1, group)
        start, stop = reach(i_first, i_last + 1, b, o)
        _, whole_stop = reach(i_first, i_first + 1, b, o)
        whole_start, _ = reach(i_last, i_last + 1, b, o)
        steps, _ = divided(max(int32(0), int32(stop - start)) + step - 1, step)
        each, left_over = divided(steps, splits)  # the first splits have one step more
        before = int32(each * split + min(split, left_over))
        first = int32(start + before * step)
        beyond = min(stop, int32(first + int32(each + (split < left_over)) * step))
        part = int32(tile * splits + split)
        return Place(
            b, kv, group, first_row, rows, first, beyond, whole_start, whole_stop, split, part
        )

    return place


@cache
def _describer(kind: Kind) -> Any:
    """describe(r, here, mask, bias, o): the ``Row`` of the warp's row r; beyond the last, empty."""

    @device
    def describe(r, here, mask, bias, o):
        row = int32(here.first_row + r)
        if row >= here.rows:
            return Row(int32(0), int32(0), int64(0), float32(0), uint64(0), uint64(0))
        i, of_group = divided(row, here.group)
        h = int32(here.kv * here.group + of_group)
        start, stop = reach(i, i + 1, here.b, o)
        position, slope, mask_at, bias_at = int64(0), float32(0), uint64(0), uint64(0)
        if kind.has_slopes:
            q_offset = ptx.ld_global_nc_s64(o.q_offset + uint64(8) * uint64(here.b))
            position = i + q_offset
            slope = ptx.ld_global_nc_f32(o.slopes + uint64(4) * uint64(h))
        if kind.has_mask:
            mask_at = mask.address + uint64(here.b * mask.batch + h * mask.head + i * mask.row)
        if kind.has_bias:
            past = here.b * bias.batch + h * bias.head + i * bias.row
            bias_at = bias.address + uint64(4) * uint64(past)
        return Row(start, stop, position, slope, mask_at, bias_at)

    return describe


@cache
def _scorer(kind: Kind) -> Any:
    """score(s, j, row, is_cut, mask, bias, o): scaled, capped, biased; -inf where it is hidden."""

    @device
    def score(s, j, row, is_cut, mask, bias, o):
        s *= o.scale
        if kind.has_softcap:
            s = o.softcap * float32(math.tanh(s / o.softcap))
        if is_cut:
            if j < row.start or j >= row.stop:
                return LOWEST
            if kind.has_mask and ptx.ld_global_nc_u8(row.mask + uint64(j * mask.column)) == 0:
                return LOWEST
            if kind.has_bias:
                added = ptx.ld_global_nc_f32(row.bias + uint64(4) * uint64(j * bias.column))
                if added == LOWEST:
                    return LOWEST
                s += added
        if kind.has_slopes:
            s -= row.slope * float32(abs(row.position - j))
        return s

    return score


@device
def row_address(X, b, h, i, itemsize):
    """Address of X[b, h, i]."""
    return X.address + uint64((b * X.batch + h * X.head + i * X.row) * itemsize)


@device
def exp(x):
    return ptx.ex2_approx(x * float32(LOG2_E))


@device
def shift_of(m):
    """What is subtracted before ``exp``: m, or 0 where no key has been seen."""
    return m if m > LOWEST else float32(0)


@cache
def _multiply_adds(kind: Kind) -> Callable[..., None]:
    """float32: 16 lanes share a key, so a warp works on two at a time, ``U`` times over.

    Lane ``part`` of the 16 holds its words of the queries and of O for all rows; a score is a sum
    over these lanes. m and l are alike in them. The two halves of a warp are merged at the end.
    """
    R, words = kind.rows, kind.width // 16
    # Options take registers of every row, and the keys on their way get what is left.
    room = 16 if kind.has_mask or kind.has_bias or kind.has_slopes else 32
    U = 4 if R * words <= room else 2 if R * words <= 2 * room and words <= 8 else 1
    U_words, R_words, RU = U * words, R * words, R * U
    load, store = _loader(words, 16, True), _storer(words, 16, 1)
    locate, describe, score = _locator(kind, 2 * U), _describer(kind), _scorer(kind)
    is_masked = kind.has_mask or kind.has_bias

    def multiply_adds(q, k, v, mask, bias, o, parts_O, parts_ml, splits):
        lane = int32(cuda.threadIdx.x) & int32(31)
        part, half = int32(lane & int32(15)), int32(lane >> int32(4))
        here = locate(splits, o)
        if here.split >= splits:
            return
        Q = cuda.local.array(R_words, float32)
        O = cuda.local.array(R_words, float32)
        K_j = cuda.local.array(U_words, float32)
        V_j = cuda.local.array(U_words, float32)
        S = cuda.local.array(RU, float32)
        m = cuda.local.array(R, float32)
        l = cuda.local.array(R, float32)
        start = cuda.local.array(R, int32)
        stop = cuda.local.array(R, int32)
        position = cuda.local.array(R, int64)
        slope = cuda.local.array(R, float32)
        mask_at = cuda.local.array(R, uint64)
        bias_at = cuda.local.array(R, uint64)
        for r in range(R):
            m[r], l[r] = LOWEST, float32(0)
            row = describe(r, here, mask, bias, o)
            start[r], stop[r], position[r], slope[r] = row.start, row.stop, row.position, row.slope
            mask_at[r], bias_at[r] = row.mask, row.bias
            for x in range(words):
                Q[r * words + x], O[r * words + x] = float32(0), float32(0)
            at = int32(here.first_row + r)
            if at < here.rows:
                i, of_group = divided(at, here.group)
                h = here.kv * here.group + of_group
                load(row_address(q, here.b, h, i, 4), part, Q, r * words)
        K, V = row_address(k, here.b, here.kv, 0, 4), row_address(v, here.b, here.kv, 0, 4)
        K_row, V_row = uint64(4 * k.row), uint64(4 * v.row)

        j0 = here.start
        if j0 < here.stop:
            for u in range(U):
                j = min(int32(j0 + 2 * u + half), int32(here.stop - 1))
                load(K + uint64(j) * K_row, part, K_j, u * words)
        while j0 < here.stop:
            for u in range(U):
                j = min(int32(j0 + 2 * u + half), int32(here.stop - 1))
                load(V + uint64(j) * V_row, part, V_j, u * words)
            for r in range(R):  # line 8
                for u in range(U):
                    s = float32(0)
                    for x in range(words):
                        s += Q[r * words + x] * K_j[u * words + x]
                    for bit in (8, 4, 2, 1):
                        s += ptx.shfl_bfly_f32(s, bit)
                    S[r * U + u] = s
            is_cut = is_masked or j0 < here.whole_start or j0 + 2 * U > here.whole_stop
            for r in range(R):
                row = Row(start[r], stop[r], position[r], slope[r], mask_at[r], bias_at[r])
                for u in range(U):
                    j = int32(j0 + 2 * u + half)
                    S[r * U + u] = score(S[r * U + u], j, row, is_cut, mask, bias, o)
            j1 = int32(j0 + 2 * U)
            if j1 < here.stop:
                for u in range(U):
                    j = min(int32(j1 + 2 * u + half), int32(here.stop - 1))
                    load(K + uint64(j) * K_row, part, K_j, u * words)
            for r in range(R):  # lines 9 and 10
                m_new = m[r]
                for u in range(U):
                    m_new = ptx.max_f32(m_new, S[r * U + u])
                shift = shift_of(m_new)
                if m_new != m[r]:
                    correction = exp(m[r] - shift)
                    l[r] *= correction
                    for x in range(words):
                        O[r * words + x] *= correction
                    m[r] = m_new
                for u in range(U):
                    s = S[r * U + u]
                    if not is_cut or s != LOWEST:  # 0 times a hidden NaN would be NaN
                        p = exp(s - shift)
                        l[r] += p
                        for x in range(words):
                            O[r * words + x] += p * V_j[u * words + x]
            j0 = j1

        row_bytes = uint64(4 * kind.width)
        to = parts_O + uint64(here.part) * uint64(R) * row_bytes
        to_ml = parts_ml + uint64(here.part) * uint64(8 * R)
        line = cuda.local.array(words, float32)
        for r in range(R):
            m_both = ptx.max_f32(m[r], ptx.shfl_bfly_f32(m[r], 16))
            correction = exp(m[r] - shift_of(m_both))
            l_half = correction * l[r]
            l_both = l_half + ptx.shfl_bfly_f32(l_half, 16)
            for x in range(words):
                O_half = correction * O[r * words + x]
                line[x] = O_half + ptx.shfl_bfly_f32(O_half, 16)
            is_row = here.first_row + r < here.rows
            if half == 0 and is_row:
                store(to + uint64(r) * row_bytes, part, line)
            if lane == 0 and is_row:
                ptx.st_global_f32(to_ml + uint64(4 * r), m_both)
                ptx.st_global_f32(to_ml + uint64(4 * (R + r)), l_both)

    return multiply_adds


@cache
def _tensor_cores(kind: Kind) -> Callable[..., None]:
    """float16 and bfloat16: tiles of 8 keys, with lane = 4 g + t as ``ptx.mma_f16`` says.

    S = Q Kᵀ: A holds the queries, row g and g + 8; B the keys, key g of a tile. Lane (g, t) gives
    both the part t of 4 of a row, so that it has S[g, 2t], S[g, 2t + 1] and the same of row g + 8.
    Oᵀ = Vᵀ Pᵀ: P of row g and two tiles is B as it stands; lane (g, t) gives part g of 8 of the
    values of the keys 2t and 2t + 1 of both tiles, paired up, and has O of rows 2t and 2t + 1.
    """
    R, W, is_half = kind.rows, kind.width, kind.dtype == "float16"
    mma = ptx.mma_f16 if is_half else ptx.mma_bf16
    pack = ptx.pack_f16x2 if is_half else ptx.pack_bf16x2
    upper_bits = 0xFFFFE000 if is_half else 0xFFFF0000  # of a float32: those that 16 bits hold
    exponents, lowest = (0x7C007C00, 0x04000400) if is_half else (0x7F807F80, 0x00800080)
    tiles = 4 if W <= 64 else 2
    step, steps, q_words, v_words = 8 * tiles, W // 16, W // 8, W // 16
    sides_R = R // 8  # 2 if rows g + 8 are there
    is_ahead = W * R <= 128 * 8  # are there registers for the next keys beside these values?
    load_K, load_V = _loader(q_words, 4, False), _loader(v_words, 8, False)
    store = _storer(v_words, 8, 2)
    locate, describe, score = _locator(kind, step), _describer(kind), _scorer(kind)
    is_masked = kind.has_mask or kind.has_bias
    Q_size, K_size, V_size = 2 * q_words, tiles * q_words, 2 * tiles * v_words
    S_size, P_size, O_size = 4 * tiles, sides_R * tiles, 4 * v_words * sides_R
    line_size = 2 * v_words

    @device
    def widen(word):
        """Both halves as float32."""
        if is_half:
            low, high = ptx.split_b32(word)
            return ptx.cvt_f32_f16(low), ptx.cvt_f32_f16(high)
        shifted = uint32(word << uint32(16))
        return ptx.bits_as_f32(shifted), ptx.bits_as_f32(word & uint32(0xFFFF0000))

    @device
    def load_keys(K, K_row, j0, here, g, t, K_j):
        for n in range(tiles):
            j = min(int32(j0 + 8 * n + g), int32(here.stop - 1))
            load_K(K + uint64(j) * K_row, t, K_j, n * q_words)

    @device
    def load_values(V, V_row, j0, here, g, t, V_j):
        for n in range(tiles):
            for x in range(2):
                j = min(int32(j0 + 8 * n + 2 * t + x), int32(here.stop - 1))
                load_V(V + uint64(j) * V_row, g, V_j, (2 * n + x) * v_words)

    @device
    def is_wild(word):
        """Not 0 where a half is not finite: there a carry runs out of the exponent."""
        return uint32((word & uint32(exponents)) + uint32(lowest)) & uint32(0x80008000)

    @device
    def finite(word):
        """A word with 0 for each half that is not finite."""
        return word & ~uint32((is_wild(word) >> uint32(15)) * uint32(0xFFFF))

    @device
    def add_wild(here, lane, V, V_row, parts, mask, bias, o):
        """Add the values that ``finite`` left out to O of the rows that see them."""
        for j in range(here.start, here.stop):
            for x in range(lane, W // 2, 32):
                word = ptx.ld_global_nc_u32(V + uint64(j) * V_row + uint64(4) * uint64(x))
                if is_wild(word) != uint32(0):
                    low, high = widen(word)
                    for r in range(min(int32(R), int32(here.rows - here.first_row))):
                        row = describe(r, here, mask, bias, o)
                        if score(float32(0), j, row, True, mask, bias, o) != LOWEST:
                            at = parts + uint64(4 * W) * uint64(r) + uint64(8) * uint64(x)
                            if is_wild(word & uint32(0xFFFF)) != uint32(0):
                                ptx.st_global_f32(at, ptx.ld_global_f32(at) + low)
                            if is_wild(word & uint32(0xFFFF0000)) != uint32(0):
                                at += uint64(4)
                                ptx.st_global_f32(at, ptx.ld_global_f32(at) + high)

    @device
    def add_product(V_j, P_upper, P_rest, O):
        """Line 10."""
        for n in range(0, tiles, 2):
            for M in range(v_words):
                a, b = V_j[2 * n * v_words + M], V_j[(2 * n + 1) * v_words + M]
                c, d = V_j[(2 * n + 2) * v_words + M], V_j[(2 * n + 3) * v_words + M]
                a0, a1 = ptx.lower_halves(a, b), ptx.upper_halves(a, b)
                a2, a3 = ptx.lower_halves(c, d), ptx.upper_halves(c, d)
                for side in range(sides_R):
                    x, y = 4 * (side * v_words + M), side * tiles + n
                    p0, p1, rest0, rest1 = P_upper[y], P_upper[y + 1], P_rest[y], P_rest[y + 1]
                    o0, o1, o2, o3 = mma(a0, a1, a2, a3, p0, p1, O[x], O[x + 1], O[x + 2], O[x + 3])
                    O[x], O[x + 1], O[x + 2], O[x + 3] = mma(
                        a0, a1, a2, a3, rest0, rest1, o0, o1, o2, o3
                    )

    def tensor_cores(q, k, v, mask, bias, o, parts_O, parts_ml, splits):
        lane = int32(cuda.threadIdx.x) & int32(31)
        g, t = int32(lane >> int32(2)), int32(lane & int32(3))
        here = locate(splits, o)
        if here.split >= splits:
            return
        Q = cuda.local.array(Q_size, uint32)
        K_j = cuda.local.array(K_size, uint32)
        V_j = cuda.local.array(V_size, uint32)
        S = cuda.local.array(S_size, float32)
        P_upper = cuda.local.array(P_size, uint32)
        P_rest = cuda.local.array(P_size, uint32)
        O = cuda.local.array(O_size, float32)
        m = cuda.local.array(sides_R, float32)
        l = cuda.local.array(sides_R, float32)
        start = cuda.local.array(sides_R, int32)
        stop = cuda.local.array(sides_R, int32)
        position = cuda.local.array(sides_R, int64)
        slope = cuda.local.array(sides_R, float32)
        mask_at = cuda.local.array(sides_R, uint64)
        bias_at = cuda.local.array(sides_R, uint64)
        for x in range(O_size):
            O[x] = float32(0)
        for x in range(2 * q_words):
            Q[x] = uint32(0)
        for side in range(sides_R):
            m[side], l[side] = LOWEST, float32(0)
            r = int32(g + 8 * side)
            row = describe(r, here, mask, bias, o)
            start[side], stop[side] = row.start, row.stop
            position[side], slope[side] = row.position, row.slope
            mask_at[side], bias_at[side] = row.mask, row.bias
            at = int32(here.first_row + r)
            if at < here.rows:
                i, of_group = divided(at, here.group)
                h = here.kv * here.group + of_group
                load_K(row_address(q, here.b, h, i, 2), t, Q, side * q_words)
        K, V = row_address(k, here.b, here.kv, 0, 2), row_address(v, here.b, here.kv, 0, 2)
        K_row, V_row = uint64(2 * k.row), uint64(2 * v.row)

        has_wild = uint32(0)

        j0 = here.start
        if is_ahead and j0 < here.stop:
            load_keys(K, K_row, j0, here, g, t, K_j)
        while j0 < here.stop:
            if is_ahead:
                load_values(V, V_row, j0, here, g, t, V_j)
            else:
                load_keys(K, K_row, j0, here, g, t, K_j)
            for x in range(4 * tiles):
                S[x] = float32(0)
            for x in range(steps):  # line 8
                for n in range(tiles):
                    S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3] = mma(
                        Q[2 * x],
                        Q[q_words + 2 * x],
                        Q[2 * x + 1],
                        Q[q_words + 2 * x + 1],
                        K_j[n * q_words + 2 * x],
                        K_j[n * q_words + 2 * x + 1],
                        S[4 * n],
                        S[4 * n + 1],
                        S[4 * n + 2],
                        S[4 * n + 3],
                    )
            j1 = int32(j0 + step)
            if is_ahead and j1 < here.stop:
                load_keys(K, K_row, j1, here, g, t, K_j)
            is_cut = is_masked or j0 < here.whole_start or j1 > here.whole_stop
            for side in range(sides_R):  # line 9
                row = Row(
                    start[side], stop[side], position[side], slope[side],
                    mask_at[side], bias_at[side],
                )  # fmt: skip
                m_new = m[side]
                for n in range(tiles):
                    for x in range(2):
                        s = S[4 * n + 2 * side + x]
                        s = score(s, int32(j0 + 8 * n + 2 * t + x), row, is_cut, mask, bias, o)
                        S[4 * n + 2 * side + x] = s
                        m_new = ptx.max_f32(m_new, s)
                m_new = ptx.max_f32(m_new, ptx.shfl_bfly_f32(m_new, 1))
                m_new = ptx.max_f32(m_new, ptx.shfl_bfly_f32(m_new, 2))
                shift = shift_of(m_new)
                correction = exp(m[side] - shift)
                m[side] = m_new
                l[side] *= correction
                for n in range(tiles):
                    s0, s1 = S[4 * n + 2 * side], S[4 * n + 2 * side + 1]
                    p0, p1 = exp(s0 - shift), exp(s1 - shift)
                    l[side] += p0 + p1
                    first = ptx.bits_as_f32(ptx.f32_as_bits(p0) & uint32(upper_bits))
                    second = ptx.bits_as_f32(ptx.f32_as_bits(p1) & uint32(upper_bits))
                    P_upper[side * tiles + n] = pack(first, second)
                    P_rest[side * tiles + n] = pack(p0 - first, p1 - second)
                of_first = ptx.shfl_idx_f32(correction, int32(8) * t)
                of_second = ptx.shfl_idx_f32(correction, int32(8) * t + int32(4))
                if of_first != float32(1) or of_second != float32(1):
                    for M in range(v_words):
                        x = 4 * (side * v_words + M)
                        O[x] *= of_first
                        O[x + 1] *= of_second
                        O[x + 2] *= of_first
                        O[x + 3] *= of_second
            is_seen = uint32(0)
            for x in range(P_size):
                is_seen |= P_upper[x] | P_rest[x]
            if is_ahead or ptx.ballot(is_seen) != uint32(0):
                if not is_ahead:
                    load_values(V, V_row, j0, here, g, t, V_j)
                if is_cut:  # 0 times a hidden NaN would be NaN
                    for x in range(V_size):
                        has_wild |= is_wild(V_j[x])
                        V_j[x] = finite(V_j[x])
                add_product(V_j, P_upper, P_rest, O)
            j0 = j1

        row_bytes = uint64(4 * W)
        to = parts_O + uint64(here.part) * uint64(R) * row_bytes
        to_ml = parts_ml + uint64(here.part) * uint64(8 * R)
        line = cuda.local.array(line_size, float32)
        for side in range(sides_R):
            for x in range(2):
                for M in range(v_words):
                    line[2 * M] = O[4 * (side * v_words + M) + x]
                    line[2 * M + 1] = O[4 * (side * v_words + M) + 2 + x]
                r = int32(8 * side + 2 * t + x)
                if here.first_row + r < here.rows:
                    store(to + uint64(r) * row_bytes, g, line)
            total = l[side]
            total += ptx.shfl_bfly_f32(total, 1)
            total += ptx.shfl_bfly_f32(total, 2)
            r = int32(8 * side + g)
            if t == 0 and here.first_row + r < here.rows:
                ptx.st_global_f32(to_ml + uint64(4 * r), m[side])
                ptx.st_global_f32(to_ml + uint64(4 * (r + R)), total)
        if ptx.ballot(has_wild) != uint32(0):
            cuda.syncwarp()
            add_wild(here, lane, V, V_row, to, mask, bias, o)

    return tensor_cores


@cache
def _merge(width: int, dtype: str, R: int) -> Callable[..., None]:
    """One block a row of O. Each warp takes every ``MERGERS``-th split; shared memory adds them up.

    A sink joins the splits as one more, without a value.
    """
    columns = -(-width // 32)
    pack = ptx.pack_bf16x2 if dtype == "bfloat16" else ptx.pack_f16x2
    is_wide = dtype == "float32"

    def merge(o, O, L, parts_O, parts_ml, splits):
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> int32(5)), int32(thread & int32(31))
        sums = cuda.shared.array((MERGERS, width), float32)
        totals = cuda.shared.array(MERGERS, float32)
        group, _ = divided(o.H, o.Hkv)
        head, i = divided(cuda.blockIdx.x, o.Lq)
        b, h = divided(head, o.H)
        kv, of_group = divided(h, group)
        tiles, _ = divided(group * o.Lq + R - 1, R)
        tile, r = divided(i * group + of_group, R)
        tile = int32((b * o.Hkv + kv) * tiles + tile)
        r = uint64(r)
        first = uint64(tile) * uint64(splits)
        ml = parts_ml + uint64(4) * (first * uint64(2 * R) + r)
        parts = parts_O + uint64(4) * (first * uint64(R) + r) * uint64(width)

        sink = ptx.ld_global_nc_f32(o.sinks + uint64(4) * uint64(h))
        m = sink
        for s in range(lane, splits, 32):
            m = ptx.max_f32(m, ptx.ld_global_nc_f32(ml + uint64(s) * uint64(8 * R)))
        for bit in (16, 8, 4, 2, 1):
            m = ptx.max_f32(m, ptx.shfl_bfly_f32(m, bit))
        shift = shift_of(m)

        l = float32(0)
        line = cuda.local.array(columns, float32)
        for c in range(columns):
            line[c] = float32(0)
        for s in range(warp, splits, MERGERS):
            at = ml + uint64(s) * uint64(8 * R)
            correction = exp(ptx.ld_global_nc_f32(at) - shift)
            l += correction * ptx.ld_global_nc_f32(at + uint64(4 * R))
            O_s = parts + uint64(s) * uint64(4 * R * width) + uint64(4) * uint64(lane)
            for c in range(columns):
                if 32 * c + lane < width:
                    line[c] += correction * ptx.ld_global_nc_f32(O_s + uint64(128 * c))
        for c in range(columns):
            if 32 * c + lane < width:
                sums[warp, 32 * c + lane] = line[c]
        if lane == 0:
            totals[warp] = l
        cuda.syncthreads()
        l = exp(sink - shift)
        for w in range(MERGERS):
            l += totals[w]
        if thread < width:
            value = float32(0)
            for w in range(MERGERS):
                value += sums[w, thread]
            if l != float32(0):
                value /= l
            at = row_address(O, b, h, i, 4 if is_wide else 2)
            if is_wide:
                ptx.st_global_f32(at + uint64(4) * uint64(thread), value)
            else:
                low, _ = ptx.split_b32(pack(value, value))
                ptx.st_global_b16(at + uint64(2) * uint64(thread), low)
        if thread == 0:
            to = L + uint64(4) * ((uint64(b) * uint64(o.H) + uint64(h)) * uint64(o.Lq) + uint64(i))
            ptx.st_global_f32(to, m + ptx.lg2_approx(l) * float32(LN_2))

    return merge
