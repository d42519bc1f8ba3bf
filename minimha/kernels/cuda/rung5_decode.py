"""CUDA rung 5, decode: few queries against many keys, where reading K and V takes all the time.

What changed from rung 4: with one query per head, blocks of rung 4 would be nearly empty, and too
few for the GPU. Here the keys are split among the warps, and a warp takes all queries of the
``group`` heads that share a key/value head. Row r is query r // group of the group's head
r % group. Keys and values go from global memory straight into registers, so that warps need no
shared memory and no barrier. Each split s yields m, l and O, and a second kernel merges them by
log-sum-exp:

    m = max m_s,   l = Σ exp(m_s - m) l_s,   O = Σ exp(m_s - m) O_s / l

Why it should be faster: K and V are read once for all queries of a group, by enough warps to keep
the memory busy.

Lines 8 to 10 of Algorithm 1 are in ``_tensor_cores`` for 16-bit numbers and in ``_multiply_adds``
for float32. On the tensor cores S = Q Kᵀ may sum over the head width in any order, if both factors
use the same order. The same holds for Oᵀ = Vᵀ Pᵀ and the keys. So a lane reads 16 contiguous bytes
of a row as its parts of the fragment, and S has the layout of Pᵀ. P is split into two 16-bit
numbers, its upper bits and the residual, which makes O as exact as in float32 at little cost.

Measured: 3.7 TB/s, 0.92 × cuDNN in torch 2.11 (16 entries, 32 heads over 8, 8192 keys, width 128,
bfloat16; H200, 2026-11-26). Three warps per scheduler instead of two spill registers: 0.96 × that.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, types, uint32, uint64

from minimha.equations.problem import Problem
from minimha.kernels.cuda import functions, ptx
from minimha.kernels.cuda.arguments import (
    ADDRESSES,
    Arguments,
    padded_width,
    refused,
    row_width,
    too_wide,
)
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts import device, fragments
from minimha.kernels.cuda.parts import nonfinite as special
from minimha.kernels.cuda.parts import online_softmax as softmax
from minimha.kernels.cuda.parts.mask import (
    QueryOptions,
    ScoreOptions,
    query_options,
    score_query,
    tile_bounds,
)
from minimha.kernels.cuda.parts.rows import GLOBAL_F32, GLOBAL_U32, load_row, row_address, store_row

ROW_UNIT = 16  # bytes, of which rows in memory are a multiple: see ``row_width``
WARPS = 2  # per block: small blocks leave fewer registers unused
SPLIT = 64  # the fewest keys per split: a merge would cost more than it saves
MERGERS = 8  # warps that merge the splits of a row
SIGNATURE = (*ADDRESSES[:6], types.uint64, types.uint64, types.int32)
MERGE_SIGNATURE = (*ADDRESSES[5:], types.uint64, types.uint64, types.int32)


class Variant(NamedTuple):
    """The constants of a kernel, whose warps have ``rows`` rows each.

    Rows have ``stored`` numbers in memory (``row_width``), and ``width`` numbers in registers.
    """

    width: int
    dtype: str
    rows: int
    options: ScoreOptions
    stored: int


# The rows of a warp, the keys that it reads, and the keys that are visible to all its rows.
WarpRows = namedtuple(
    "WarpRows", "b kv group first_row rows start stop full_start full_stop split part"
)


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    if problem.dtype.itemsize > 4:
        return "q, k and v are float64: GPU kernels take float32, float16 and bfloat16"
    return refused(problem) or functions.refused(problem) or too_wide(problem)


def launches(
    problem: Problem, arguments: Arguments, scratch: Scratch, *, splits: int | None = None,
    multiprocessors: int = 132,
) -> Launches:  # fmt: skip
    """Return the launches of two kernels: one computes the splits, the other merges them.

    ``splits`` is the number of parts of the keys. By default the parts fill the ``multiprocessors``
    once, and have at least ``SPLIT`` keys each. More splits would run after the others, on an
    almost empty GPU.
    """
    B, H, Lq, _ = problem.q.shape
    _, Hkv, Lk, _ = problem.k.shape
    if 0 in (B, Lq):
        return []
    width, rows = padded_width(problem), H // Hkv * Lq
    itemsize = problem.dtype.itemsize
    R, options = rows_of_warp(rows, width, itemsize), ScoreOptions.of(problem)
    made_for = Variant(width, problem.dtype.name, R, options, row_width(problem, ROW_UNIT))
    tiles = B * Hkv * -(-rows // R)
    if splits is None:
        blocks = max(1, multiprocessors * blocks_at_once(made_for) // tiles)
        splits = max(1, min(WARPS * blocks, Lk // SPLIT))
    parts_O = scratch((tiles, splits, R, width))
    parts_ml = scratch((tiles, splits, 2, R))
    rung = (_multiply_adds if itemsize == 4 else _tensor_cores)(made_for)
    grid = tiles, -(-splits // WARPS), 1
    split = Launch(rung, SIGNATURE, grid, 32 * WARPS, blocks=blocks_at_once(made_for))
    merging = _merge(width, problem.dtype.name, R, made_for.stored)
    merge = Launch(merging, MERGE_SIGNATURE, (B * H * Lq, 1, 1), 32 * MERGERS)
    return [
        (split, (*arguments[:6], parts_O, parts_ml, splits)),
        (merge, (*arguments[5:], parts_O, parts_ml, splits)),
    ]


def blocks_at_once(made_for: Variant) -> int:
    """Return how many blocks a multiprocessor runs at once, which limits a thread's registers.

    Each of its four schedulers has 16,384 registers: for two warps of 255, or three of 168.
    """
    is_small = made_for.dtype == "float32" and made_for.width <= 64 and made_for.rows <= 4
    return 4 * (3 if is_small else 2) // WARPS


def rows_of_warp(rows: int, width: int, itemsize: int) -> int:
    """Return the number of rows per warp, a power of 2.

    It is at least ``rows``, the rows of a key/value head, if the registers suffice.
    """
    if itemsize == 2:
        return 8 if rows <= 8 or width > 128 else 16
    return min(8 if width <= 128 else 4, 1 << (rows - 1).bit_length())


@device
def divided(a, b):
    """Return the quotient and the remainder of the nonnegative integers ``a`` and ``b``."""
    quotient = int32(ptx.div_u32(a, b))
    return quotient, int32(a - quotient * b)


@device
def has_row(here, r):
    """Return whether row r of the warp exists, by 32-bit arithmetic to save registers."""
    return int32(here.first_row + r) < here.rows


@device
def query_of(here, r):
    """Return the query i and the query head h of row r of the warp."""
    i, of_group = divided(int32(here.first_row + r), here.group)
    return i, int32(here.kv * here.group + of_group)


def _locator(rows_of_warp: int, step: int) -> Any:
    """Return a device function that finds this warp's ``WarpRows``, with ``step`` keys at once."""
    R = rows_of_warp

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
        start, stop, full_start, full_stop = tile_bounds(i_first, i_last + 1, b, o)
        steps, _ = divided(max(int32(0), int32(stop - start)) + step - 1, step)
        each, left_over = divided(steps, splits)  # the first splits have one step more
        before = int32(each * split + min(split, left_over))
        first = int32(start + before * step)
        beyond = min(stop, int32(first + int32(each + (split < left_over)) * step))
        part = int32(tile * splits + split)
        return WarpRows(
            b, kv, group, first_row, rows, first, beyond, full_start, full_stop, split, part
        )

    return place


def _describer(options: ScoreOptions) -> Any:
    """Return a device function that finds the options of row r; rows beyond the last see no key."""
    describe_query = query_options(options)

    @device
    def describe(r, here, mask, bias, o):
        if not has_row(here, r):
            return QueryOptions(int32(0), int32(0), int64(0), float32(0), uint64(0), uint64(0))
        i, h = query_of(here, r)
        return describe_query(here.b, h, i, mask, bias, o)

    return describe


@device
def put_row(rows, x, row):
    rows.start[x], rows.stop[x] = row.start, row.stop
    rows.position[x], rows.slope[x] = row.position, row.slope
    rows.mask[x], rows.bias[x] = row.mask, row.bias


@device
def row_at(rows, x):
    return QueryOptions(
        rows.start[x], rows.stop[x], rows.position[x], rows.slope[x], rows.mask[x], rows.bias[x]
    )


@cache
def _multiply_adds(made_for: Variant) -> Callable[..., None]:
    """Return the float32 kernel, in which 16 lanes share a key.

    A warp reads 2 · ``U`` keys at a time. Lane ``part`` of the 16 holds its words of the queries
    and of O for all rows. A score is a sum over these lanes, which have the same m and l. The two
    halves of a warp are merged at the end.
    """
    W, _, R, options, stored = made_for
    words = W // 16
    # Options take registers of every row; prefetched keys use the rest.
    budget = 16 if options.hide_keys or options.has_slopes else 32
    U = 4 if R * words <= budget else 2 if R * words <= 2 * budget and words <= 8 else 1
    U_words, R_words, RU = U * words, R * words, R * U
    load, store = load_row(words, 16, GLOBAL_F32, stored), store_row(words, 16, 1)
    locate, describe, score = _locator(R, 2 * U), _describer(options), score_query(options)
    hides_keys = options.hide_keys
    total, update = softmax.sum_over(8, 4, 2, 1), softmax.update_halves(R, U, words)

    @device
    def load_rows(X, X_row, j, half, part, stop, into):
        """Load a half warp's keys or values from j on, and repeat key ``stop`` - 1 at the end."""
        for u in range(U):
            key = min(int32(j + 2 * u + half), int32(stop - 1))
            load(X + uint64(key) * X_row, part, into, u * words)

    @device
    def multiply_keys(Q, K_j, S):
        """Compute S = Q Kᵀ (Algorithm 1, line 8)."""
        for r in range(R):
            for u in range(U):
                s = float32(0)
                for x in range(words):
                    s += Q[r * words + x] * K_j[u * words + x]
                S[r * U + u] = total(s)

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
        start, stop = cuda.local.array(R, int32), cuda.local.array(R, int32)
        position, slope = cuda.local.array(R, int64), cuda.local.array(R, float32)
        mask_at, bias_at = cuda.local.array(R, uint64), cuda.local.array(R, uint64)
        rows = QueryOptions(start, stop, position, slope, mask_at, bias_at)
        for r in range(R):
            m[r], l[r] = softmax.LOWEST, float32(0)
            put_row(rows, r, describe(r, here, mask, bias, o))
            for x in range(words):
                Q[r * words + x], O[r * words + x] = float32(0), float32(0)
            if has_row(here, r):
                i, h = query_of(here, r)
                load(row_address(q, here.b, h, i, 4), part, Q, r * words)
        K, V = row_address(k, here.b, here.kv, 0, 4), row_address(v, here.b, here.kv, 0, 4)
        K_row, V_row = uint64(4 * k.row), uint64(4 * v.row)

        j0 = here.start
        if j0 < here.stop:
            load_rows(K, K_row, j0, half, part, here.stop, K_j)
        while j0 < here.stop:
            load_rows(V, V_row, j0, half, part, here.stop, V_j)
            multiply_keys(Q, K_j, S)
            is_partial = hides_keys or j0 < here.full_start or j0 + 2 * U > here.full_stop
            for r in range(R):
                row = row_at(rows, r)
                for u in range(U):
                    j = int32(j0 + 2 * u + half)
                    S[r * U + u] = score(S[r * U + u], j, row, is_partial, mask, bias, o)
            j1 = int32(j0 + 2 * U)
            if j1 < here.stop:
                load_rows(K, K_row, j1, half, part, here.stop, K_j)
            update(S, V_j, O, m, l, is_partial)  # lines 9 and 10
            j0 = j1

        row_bytes = uint64(4 * W)
        to = parts_O + uint64(here.part) * uint64(R) * row_bytes
        to_ml = parts_ml + uint64(here.part) * uint64(8 * R)
        line = cuda.local.array(words, float32)
        for r in range(R):
            m_both = ptx.max_f32(m[r], ptx.shfl_bfly_f32(m[r], 16))
            correction = softmax.exp(m[r] - softmax.shift_of(m_both))
            l_half = correction * l[r]
            l_both = l_half + ptx.shfl_bfly_f32(l_half, 16)
            for x in range(words):
                O_half = correction * O[r * words + x]
                line[x] = O_half + ptx.shfl_bfly_f32(O_half, 16)
            is_row = has_row(here, r)
            if half == 0 and is_row:
                store(to + uint64(r) * row_bytes, part, line)
            if lane == 0 and is_row:
                ptx.st_global_f32(to_ml + uint64(4 * r), m_both)
                ptx.st_global_f32(to_ml + uint64(4 * (R + r)), l_both)

    return multiply_adds


@cache
def _tensor_cores(made_for: Variant) -> Callable[..., None]:
    """Return the 16-bit kernel: tiles of 8 keys, spread over the lanes as in ``DecodeTiles``."""
    W, dtype, R, options, stored = made_for
    tiles = 4 if W <= 64 else 2
    step = 8 * tiles
    layout = fragments.DecodeTiles(W, dtype, R, step, stored)
    sides, q_words, v_words = layout.sides, layout.q_words, layout.v_words
    is_ahead = W * R <= 128 * 8  # registers suffice for the next keys too
    fetch_keys, fetch_values = fragments.load_keys(layout), fragments.load_values(layout)
    load, store = load_row(q_words, 4, GLOBAL_U32, stored // 2), store_row(v_words, 8, 2)
    locate, describe, score = _locator(R, step), _describer(options), score_query(options)
    multiply_keys = fragments.transposed_keys(layout)
    multiply_values = fragments.transposed_values(layout)
    nonfinite, zero_nonfinite = special.nonfinite_in(dtype), special.zero_nonfinite_in(dtype)
    add_nonfinite = special.add_nonfinite_rows(layout, describe, score)
    update_softmax, total = softmax.update_transposed(layout), softmax.sum_over(1, 2)
    hides_keys = options.hide_keys
    Q_size, K_size, V_size = 2 * q_words, tiles * q_words, 2 * tiles * v_words
    S_size, P_size, O_size = 4 * tiles, sides * tiles, 4 * v_words * sides
    line_size = 2 * v_words

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
        m = cuda.local.array(sides, float32)
        l = cuda.local.array(sides, float32)
        start, stop = cuda.local.array(sides, int32), cuda.local.array(sides, int32)
        position, slope = cuda.local.array(sides, int64), cuda.local.array(sides, float32)
        mask_at, bias_at = cuda.local.array(sides, uint64), cuda.local.array(sides, uint64)
        rows = QueryOptions(start, stop, position, slope, mask_at, bias_at)
        for x in range(O_size):
            O[x] = float32(0)
        for x in range(Q_size):
            Q[x] = uint32(0)
        for side in range(sides):
            m[side], l[side] = softmax.LOWEST, float32(0)
            r = int32(g + 8 * side)
            put_row(rows, side, describe(r, here, mask, bias, o))
            if has_row(here, r):
                i, h = query_of(here, r)
                load(row_address(q, here.b, h, i, 2), t, Q, side * q_words)
        K, V = row_address(k, here.b, here.kv, 0, 2), row_address(v, here.b, here.kv, 0, 2)
        K_row, V_row = uint64(2 * k.row), uint64(2 * v.row)

        has_nonfinite = uint32(0)
        j0 = here.start
        if is_ahead and j0 < here.stop:
            fetch_keys(K, K_row, j0, here.stop, g, t, K_j)
        while j0 < here.stop:
            if is_ahead:
                fetch_values(V, V_row, j0, here.stop, g, t, V_j)
            else:
                fetch_keys(K, K_row, j0, here.stop, g, t, K_j)
            multiply_keys(Q, K_j, S)
            j1 = int32(j0 + step)
            if is_ahead and j1 < here.stop:
                fetch_keys(K, K_row, j1, here.stop, g, t, K_j)
            is_partial = hides_keys or j0 < here.full_start or j1 > here.full_stop
            for side in range(sides):
                row = row_at(rows, side)
                for n in range(tiles):
                    for x in range(2):
                        e, j = 4 * n + 2 * side + x, int32(j0 + 8 * n + 2 * t + x)
                        S[e] = score(S[e], j, row, is_partial, mask, bias, o)
            update_softmax(S, O, m, l, P_upper, P_rest, t)  # line 9
            is_visible = uint32(0)
            for x in range(P_size):
                is_visible |= P_upper[x] | P_rest[x]
            if is_ahead or ptx.ballot(is_visible) != uint32(0):
                if not is_ahead:
                    fetch_values(V, V_row, j0, here.stop, g, t, V_j)
                if is_partial:
                    for x in range(V_size):
                        has_nonfinite |= nonfinite(V_j[x])
                        V_j[x] = zero_nonfinite(V_j[x])
                multiply_values(V_j, P_upper, P_rest, O)
            j0 = j1

        row_bytes = uint64(4 * W)
        to = parts_O + uint64(here.part) * uint64(R) * row_bytes
        to_ml = parts_ml + uint64(here.part) * uint64(8 * R)
        line = cuda.local.array(line_size, float32)
        for side in range(sides):
            for x in range(2):
                for M in range(v_words):
                    line[2 * M] = O[4 * (side * v_words + M) + x]
                    line[2 * M + 1] = O[4 * (side * v_words + M) + 2 + x]
                r = int32(8 * side + 2 * t + x)
                if has_row(here, r):
                    store(to + uint64(r) * row_bytes, g, line)
            l_all = total(l[side])
            r = int32(8 * side + g)
            if t == 0 and has_row(here, r):
                ptx.st_global_f32(to_ml + uint64(4 * r), m[side])
                ptx.st_global_f32(to_ml + uint64(4 * (r + R)), l_all)
        if ptx.ballot(has_nonfinite) != uint32(0):
            cuda.syncwarp()
            there = min(int32(R), int32(here.rows - here.first_row))
            add_nonfinite(lane, V, V_row, here.start, here.stop, to, there, here, mask, bias, o)

    return tensor_cores


@cache
def _merge(width: int, dtype: str, R: int, stored: int) -> Callable[..., None]:
    """Return the kernel that merges the splits and the sink, with one block per row of O."""
    columns = -(-width // 32)
    is_wide = dtype == "float32"
    pack = None if is_wide else fragments.FORMATS[dtype].pack
    maximum = softmax.maximum_over(16, 8, 4, 2, 1)

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
        m = maximum(m)
        shift = softmax.shift_of(m)

        l = float32(0)
        line = cuda.local.array(columns, float32)
        for c in range(columns):
            line[c] = float32(0)
        for s in range(warp, splits, MERGERS):
            at = ml + uint64(s) * uint64(8 * R)
            correction = softmax.exp(ptx.ld_global_nc_f32(at) - shift)
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
        l = softmax.exp(sink - shift)
        for w in range(MERGERS):
            l += totals[w]
        if thread < stored:
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
            ptx.st_global_f32(to, m + softmax.log(l))

    return merge
