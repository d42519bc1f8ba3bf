"""CUDA rung 4, tensor cores: both products of a tile by ``mma.sync``, float16 or bfloat16.

What changed from rung 3: a warp multiplies a (16, 16) by a (16, 8) matrix with one instruction. A
warp owns 16 or 32 rows of Q_i. Their S_ij, P_ij, m_i, l_i and O_i stay in its registers for all
keys: S_ij, packed in pairs, has the layout that ``mma`` expects of P_ij. Shared memory holds Q_i
and two tiles each of K and V. While the warps multiply one tile, ``cp.async`` copies the next,
bypassing registers. One barrier per tile separates copies from products. ``ldmatrix`` reads the
same 16-byte chunk of eight rows at a time, and these chunks would be in the same banks. So the
chunks of a row are swizzled: a chunk's index is XORed with the row's. A lane computes the address
of its first chunk. The other addresses follow by an exclusive or and an immediate.

Why it should be faster: one instruction of a tensor core replaces 64 fused multiply-adds of a warp.
Each number read from shared memory is used more often. No thread waits for the next tile's copy.

Tiles in which no query of the block sees a key are skipped, and full tiles, which are most of them,
are not masked. In partial tiles scores are masked one by one, and nonfinite values are handled
separately (``parts/nonfinite.py``), at the cost of two more products.

Rows of q, k, v and O have the same even width; other rows are first copied and padded. ``cp.async``
copies 16 bytes, or 8 or 4 if rows do not begin at multiples of 16. In shared memory, columns of 0
follow up to a multiple of 16.

Dao, "FlashAttention-2", 2023, Algorithm 1, whose lines are named below.

Measured: 304 TFLOP/s for heads 64 wide, 354 for 128 (4 × 16 heads, 4096 tokens, bfloat16; H200,
2026-11-26): 0.99 × FlashAttention-2 in torch 2.11. Instructions per mma: 5.3 and 3.8 (4.4 and 3.5).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as kernel_arguments
from minimha.kernels.cuda import functions, ptx
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts import device, fragments, nonfinite
from minimha.kernels.cuda.parts import mask as masks
from minimha.kernels.cuda.parts import online_softmax as softmax
from minimha.kernels.cuda.parts.rows import block_of, grid_of, row_address

ROW_UNIT = 4  # bytes, of which rows in memory are a multiple: see ``row_width``
WARPS = 4
THREADS = 32 * WARPS
wait_for_all = ptx.cp_async_wait_group(0)


class Variant(NamedTuple):
    """The constants of a compiled kernel; ``is_plain`` means that scores are only scaled.

    Rows have ``stored`` numbers in global memory (``row_width``), and ``width`` in shared memory.
    If ``B_c`` is not 0, it replaces the default of ``blocks``.
    """

    width: int
    dtype: str
    is_plain: bool
    options: masks.ScoreOptions
    stored: int
    B_c: int = 0


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    if problem.dtype.name not in fragments.FORMATS:
        return f"tensor cores take float16 and bfloat16 here, and q, k, v are {problem.dtype}"
    reason = kernel_arguments.refused(problem) or functions.refused(problem)
    return reason or kernel_arguments.too_wide(problem)


def blocks(made_for: Variant) -> tuple[int, int]:
    """Return B_r queries and B_c keys per tile that fit 255 registers and 99 KB of shared memory.

    S_ij and O_i take (B_c + W) · B_r / 64 registers of a thread (W: head width). Options that
    change or hide single scores need extra registers.
    """
    width, _, is_plain, options, _, B_c = made_for
    is_tight = options.has_mask or not is_plain
    if width > 128:
        return 64, B_c or (16 if is_tight else 32)
    return 64 if is_tight and width > 64 else 128, B_c or (32 if is_tight else 64)


def shared_bytes(made_for: Variant) -> int:
    """Return the bytes of shared memory for Q_i and two tiles each of K and V."""
    B_r, B_c = blocks(made_for)
    return (B_r + 4 * B_c) * made_for.width * 2


def variant(problem: Problem, B_c: int = 0) -> Variant:
    """Return the constants with which the kernel for ``problem`` is compiled.

    ``B_c`` is the number of keys per tile; 0 stands for the default of ``blocks``.
    """
    options = masks.ScoreOptions.of(problem)
    # The largest product is the largest score only if the scale is positive.
    is_positive = problem.scale >= float(np.finfo(np.float32).tiny)
    is_plain = is_positive and not options.change_scores
    width = kernel_arguments.padded_width(problem)
    stored = kernel_arguments.row_width(problem, ROW_UNIT)
    return Variant(width, problem.dtype.name, is_plain, options, stored, B_c)


def launches(
    problem: Problem, arguments: kernel_arguments.Arguments, scratch: Scratch, B_c: int = 0
) -> Launches:
    """Return the launch that computes ``problem``, or no launch if there is no query.

    There is one thread block per B_r queries of a head. ``B_c`` (16, 32 or 64) replaces the default
    number of keys per tile, 64 in most cases. With 32, two blocks of heads 128 wide fit into a
    multiprocessor of sm_80, where nobody has measured them; on an H200 they are 14 % slower.
    """
    made_for = variant(problem, B_c)
    kernel_arguments.check_alignment(arguments, made_for.stored, 2)
    if problem.q.shape[0] * problem.q.shape[2] == 0:
        return []
    grid = grid_of(problem, blocks(made_for)[0], 4 * made_for.stored)
    function, shared = kernel(made_for), shared_bytes(made_for)
    launch = Launch(function, kernel_arguments.ADDRESSES, grid, THREADS, shared)
    return [(launch, arguments)]


def epilogue(tiles: fragments.MmaTiles, is_plain: bool) -> Any:
    """Return a device function that computes L_i and O_i / l_i (Algorithm 1, lines 12 and 13).

    L_i goes to global memory. O_i / l_i replaces Q_i in shared memory. If ``is_plain``, scores are
    only scaled, and m_i still lacks the scale.
    """
    M, chunks, pack = tiles.M, tiles.chunks, fragments.FORMATS[tiles.dtype].pack
    total = softmax.sum_over(1, 2)

    @device
    def epilogue(lane, row, first_row, Q_i, O, m, l, unit, sink, o, L_at):
        for i in range(M):
            for half in range(2):
                exact = np.float32(1)
                if is_plain:
                    factor = np.float32(softmax.LOG2_E) * unit
                    exact = ptx.ex2_approx(-softmax.rounding(m[i, half], factor))
                l_exact = total(l[i, half]) * exact
                m_i, l_i, inverse = softmax.with_sink(m[i, half] * unit, l_exact, sink)
                inverse *= exact
                r = 16 * i + 8 * half
                if lane & 3 == 0 and row + r < o.Lq:
                    ptx.st_global_f32(L_at + 4 * (row + r), m_i + softmax.log(l_i))
                for d in range(chunks):
                    e = 4 * (i * chunks + d) + 2 * half
                    to = Q_i + fragments.offset_in_tile(first_row + r + (lane >> 2), d, chunks)
                    ptx.st_shared_u32(to + 4 * (lane & 3), pack(O[e] * inverse, O[e + 1] * inverse))

    return epilogue


@cache
def kernel(made_for: Variant) -> Callable[..., None]:
    """Return the kernel for the width, the dtype and the options in ``made_for``."""
    W, dtype, is_plain, options, stored, _ = made_for
    B_r, B_c = blocks(made_for)
    tiles = fragments.MmaTiles(W, dtype, B_r, B_c, WARPS, stored)
    M = tiles.M
    S_size, O_size = 4 * M * tiles.N, 4 * M * tiles.chunks  # numbers of a thread
    step = np.int32(B_c)  # in 32 bits, like the numbers computed from j
    stage = B_c * W * 2  # bytes of a tile of K or V
    hides_keys, alignment = options.hide_keys, fragments.ALIGNMENT
    block, place, first = block_of(B_r), fragments.lane_and_row(tiles), fragments.first_chunk(tiles)
    prefetch, store = fragments.prefetch_tile(tiles), fragments.store_tile(tiles)
    multiply_keys, multiply_values = fragments.mma_keys(tiles), fragments.mma_values(tiles)
    visible_in = masks.visible_bits(tiles, options)
    apply_options, hide = masks.apply_softcap_and_bias(tiles, options), masks.hide_keys(tiles)
    has_nonfinite = nonfinite.has_nonfinite_tile(tiles)
    zero_nonfinite = nonfinite.zero_nonfinite_tile(tiles)
    mark_nonfinite = nonfinite.mark_nonfinite_tile(tiles)
    add_nonfinite = nonfinite.add_nonfinite_marks(tiles)
    update_softmax = softmax.update_fragments(tiles, is_plain)
    finish = epilogue(tiles, is_plain)

    def tensor_cores(q, k, v, mask, bias, o, O, L):
        t = cuda.threadIdx.x
        i_start, h, b, kv = block(o)
        i_stop = min(i_start + B_r, o.Lq)
        j_start, j_stop, full_start, full_stop = masks.tile_bounds(i_start, i_stop, b, o)

        Q_i = ptx.shared_address(cuda.shared.array(0, types.uint8, alignment=alignment))
        K, V = Q_i + B_r * W * 2, Q_i + B_r * W * 2 + 2 * stage
        O_at = row_address(O, b, h, i_start, 2)

        S_ij = cuda.local.array(S_size, types.float32)
        O_i = cuda.local.array(O_size, types.float32)
        m_i = cuda.local.array((M, 2), types.float32)
        l_i = cuda.local.array((M, 2), types.float32)
        visible = cuda.local.array(M, types.uint32)
        for i in range(M):  # line 5
            for half in range(2):
                m_i[i, half] = -math.inf
                l_i[i, half] = 0
        for e in range(O_size):
            O_i[e] = 0

        unit = o.scale if is_plain else np.float32(1)  # the scale that m_i still lacks
        factor = np.float32(softmax.LOG2_E) * unit
        remaining = j_stop - j_start
        K_at, V_at = first(t, k, b, kv, j_start), first(t, v, b, kv, j_start)
        if remaining > 0:
            prefetch(t, Q_i, first(t, q, b, h, i_start), 2 * q.row, B_r, o.Lq - i_start)  # line 4
            prefetch(t, K, K_at, 2 * k.row, B_c, remaining)  # line 7
            prefetch(t, V, V_at, 2 * v.row, B_c, remaining)
            ptx.cp_async_commit_group()
        # Loaded here, the sink keeps ptxas from spilling other registers in the tile.
        sink = ptx.ld_global_nc_f32(o.sinks + 4 * h)
        now, has_marks = 0, False
        for j in range(j_start, j_stop, step):  # line 6
            j_next = np.int32(j + B_c)
            K_j, V_j = K + now, V + now
            now = stage - now
            is_partial = hides_keys or j < full_start or j_next > full_stop
            wait_for_all()
            # From here on all threads see K_j and V_j, and none reads the other two tiles.
            cuda.syncthreads()
            if j_next < j_stop:
                # Recompute addresses for each tile, so that none stays in a register.
                t_now = ptx.optimization_barrier(t)
                K_at += 2 * B_c * k.row
                prefetch(t_now, K + now, K_at, 2 * k.row, B_c, j_stop - j_next)
                V_at += 2 * B_c * v.row
                prefetch(t_now, V + now, V_at, 2 * v.row, B_c, j_stop - j_next)
            ptx.cp_async_commit_group()
            if is_partial:
                visible[0] = visible_in(t, mask, bias, o, b, h, i_start, j, 0)
                if M == 2:
                    visible[M - 1] = visible_in(t, mask, bias, o, b, h, i_start, j, 1)
                if cuda.syncthreads_or(has_nonfinite(ptx.optimization_barrier(t), V_j)):
                    for sign in range(2):
                        mark_nonfinite(
                            t, V_j, visible, sign << 15, has_marks, O_at, 2 * O.row, o.Lq - i_start
                        )
                        has_marks = True
                    cuda.syncthreads()
                    zero_nonfinite(ptx.optimization_barrier(t), V_j)
                    cuda.syncthreads()
            multiply_keys(t, Q_i, K_j, S_ij)
            if not is_plain:
                apply_options(t, S_ij, bias, o, b, h, i_start, j)
            if is_partial:
                hide(S_ij, visible)
            update_softmax(S_ij, O_i, m_i, l_i, factor)
            multiply_values(t, V_j, S_ij, O_i)

        if has_marks:
            add_nonfinite(t, O_i, O_at, 2 * O.row, o.Lq - i_start)
        lane, first_row = place(t)
        row = i_start + first_row + (lane >> 2)
        L_at = L + 4 * o.Lq * (b * o.H + h)
        cuda.syncwarp()  # then all lanes have read these rows of Q_i, and no other warp reads them
        finish(lane, row, first_row, Q_i, O_i, m_i, l_i, unit, sink, o, L_at)
        store(lane, first_row, Q_i, O_at, 2 * O.row, o.Lq - i_start)

    return tensor_cores
