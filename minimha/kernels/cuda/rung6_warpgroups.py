"""CUDA rung 6, warpgroups: both products of a tile by Hopper's ``wgmma``, float16 or bfloat16.

What changed from rung 4: four warps together, a warpgroup, multiply (64, 16) by (16, B_c) with one
instruction, ``wgmma``. It reads Q_i, K_j and V_j from shared memory, not from registers, and does
not wait. So the tensor cores compute S of the next tile and P V of this tile, while other units
compute the next tile's exponentials. Within a warpgroup the order is that of
FlashAttention-3's Algorithm 2:

    start S of the next tile; start P V of this one; wait for S; its softmax; wait for O; rescale O

Why it should be faster: with operands from registers, by ``mma``, Hopper's tensor cores reach less
than two thirds of their rate. The exponentials, which at a width of 128 take half as long as the
two products, overlap with the products.

One warpgroup only copies: Q_i and, two at a time, the tiles of K and V to shared memory. It waits
at mbarriers for empty buffers, and the other warpgroups wait for full ones: see ``parts/pipeline``.
So the warps never all wait at once, and multiplying warps hold no addresses of copies. Copying
takes few registers, and ``setmaxnreg`` gives the rest to the multiplying warps. ``cp.async`` and
``wgmma`` use different paths to memory. So after waiting for a tile, a thread executes a fence
before it starts ``wgmma``.

A thread that copies nonfinite values of a partial tile sets them to 0. If there were any, each warp
reads the values again at the end and adds nonfinite ones to the rows that see them.

This rung needs a GPU of compute capability 9.0, such as an H100 or H200; later ones lack ``wgmma``.
The time is 1.7 µs per tile of 128 keys, at width 128, and 4.4 µs per thread block: nothing overlaps
with its start and its end. Letting the warpgroups take turns with the tensor cores, by barriers as
in FlashAttention-3, was 1 to 3 % slower.

Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2; the lines below are those of
FlashAttention-2's Algorithm 1.

Measured: 453 TFLOP/s for heads 64 wide, 610 for 128 (4 × 16 heads, 4096 tokens, bfloat16; H200,
2026-11-26): 1.50 and 1.70 × FlashAttention-2, 0.94 and 0.91 × cuDNN in torch 2.11; causal 375 and
543: 1.41 and 1.76 ×, 0.90 and 0.94 ×.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as kernel_arguments
from minimha.kernels.cuda import ptx, rung4_tensor_cores
from minimha.kernels.cuda.launch import Launch, Launches, Scratch
from minimha.kernels.cuda.parts import device, fragments, nonfinite, pipeline, warpgroups
from minimha.kernels.cuda.parts import mask as masks
from minimha.kernels.cuda.parts import online_softmax as softmax
from minimha.kernels.cuda.parts.pipeline import release, wait_until_full
from minimha.kernels.cuda.parts.rows import block_of, grid_of, row_address
from minimha.kernels.cuda.rung4_tensor_cores import Variant, variant

ROW_UNIT = rung4_tensor_cores.ROW_UNIT
REGISTERS = 65536  # of a multiprocessor, all used by one block


def unsupported(problem: Problem) -> str | None:
    """Return why this kernel cannot compute ``problem``, or None if it can."""
    reason = rung4_tensor_cores.unsupported(problem)
    if reason is None and is_tight(made_for := variant(problem)) and made_for.width > 128:
        return (
            f"heads are {made_for.width} wide: beyond 128 no registers are left for a mask, a "
            f"bias, ALiBi, a soft cap or a scale that is not positive"
        )
    return reason


def is_tight(made_for: Variant) -> bool:
    """Return whether options change or hide single scores, which makes registers scarce."""
    return made_for.options.has_mask or not made_for.is_plain


def blocks(made_for: Variant) -> tuple[int, int]:
    """Return the tile sizes: B_r queries and B_c keys.

    Q_i and two tiles each of K and V fit into 227 KB of shared memory. S_ij, P_ij and O_i fit into
    the registers of the 2 or 3 warpgroups that multiply: 3 B_c / 4 + W / 2 per thread (W: head
    width).
    """
    if is_tight(made_for):
        return 128, 64
    if made_for.width <= 64:
        return 192, 128
    return 128, 128 if made_for.width <= 128 else 80


def shared_bytes(made_for: Variant) -> int:
    """Return the bytes of shared memory for Q_i, two tiles each of K and V, and the mbarriers."""
    B_r, B_c = blocks(made_for)
    return warpgroups.tile_bytes(B_r + 4 * B_c, made_for.width) + pipeline.BYTES


def registers(B_r: int) -> tuple[int, int, int]:
    """Return the registers per thread at the start, while copying, and while multiplying.

    ``B_r`` is the number of queries per block: 128 or 192.
    """
    copying, multiplying = (40, 232) if B_r == 128 else (32, 160)
    return REGISTERS // threads(B_r) // 8 * 8, copying, multiplying


def threads(B_r: int) -> int:
    """Return the number of threads of a block: a warp per 16 queries, and the copying warpgroup."""
    return 2 * B_r + pipeline.PRODUCERS


def launches(problem: Problem, arguments: kernel_arguments.Arguments, scratch: Scratch) -> Launches:
    """Return the launch that computes ``problem``, or no launch if there is no query."""
    made_for = variant(problem)
    kernel_arguments.check_alignment(arguments, made_for.stored, 2)
    if problem.q.shape[0] * problem.q.shape[2] == 0:
        return []
    B_r, _ = blocks(made_for)
    launch = Launch(
        kernel(made_for), kernel_arguments.ADDRESSES, grid_of(problem, B_r, 4 * made_for.stored),
        threads(B_r), shared_bytes(made_for), is_arch_specific=True,
    )  # fmt: skip
    return [(launch, arguments)]


def masked_softmax(tiles: fragments.MmaTiles, is_plain: bool, options: masks.ScoreOptions) -> Any:
    """Return a device function that applies options to a tile's scores and updates the softmax.

    The tile has up to 128 keys. If ``is_partial``, hidden scores become -inf. If ``is_plain``, no
    option but the scale changes scores, and ``factor`` has the scale.
    """
    first, second = min(64, tiles.B_c), tiles.B_c - 64
    visible_in_first = masks.visible_bits(tiles._replace(B_c=first), options)
    visible_in_second = masks.visible_bits(tiles._replace(B_c=second), options)
    apply_options = masks.apply_softcap_and_bias(tiles, options)
    update_softmax = softmax.update_scores(tiles, is_plain)

    @device
    def update(t, S, correction, m, l, mask, bias, o, b, h, i_start, j, is_partial, factor):
        if not is_plain:
            apply_options(t, S, bias, o, b, h, i_start, j)
        if is_partial:
            visible = visible_in_first(t, mask, bias, o, b, h, i_start, j, 0)
            for x in range(first // 2):
                if not (visible >> x) & 1:
                    S[x] = softmax.LOWEST
            if second > 0:
                visible = visible_in_second(t, mask, bias, o, b, h, i_start, j + 64, 0)
                for x in range(second // 2):
                    if not (visible >> x) & 1:
                        S[32 + x] = softmax.LOWEST
        update_softmax(S, correction, m, l, factor)

    return update


@cache
def kernel(made_for: Variant) -> Callable[..., None]:
    """Return the kernel for the width, the dtype and the options in ``made_for``."""
    W, dtype, is_plain, options, stored, _ = made_for
    B_r, B_c = blocks(made_for)
    tiles = fragments.MmaTiles(W, dtype, B_r, B_c, B_r // 16, stored)
    S_size, P_size, O_size = B_c // 2, B_c // 4, W // 2  # registers of a thread
    Q_bytes, stage = warpgroups.tile_bytes(B_r, W), warpgroups.tile_bytes(B_c, W)
    hides_keys = options.hide_keys
    block, place = block_of(B_r), fragments.lane_and_row(tiles)
    store = fragments.store_tile(tiles)
    start_keys, start_values = warpgroups.start_keys(tiles), warpgroups.start_values(tiles)
    wait_for_S, wait_for_older_S = (ptx.wgmma_wait_group(n, S_size) for n in range(2))
    wait_for_O = ptx.wgmma_wait_group(0, O_size)
    update_softmax = masked_softmax(tiles, is_plain, options)
    rescale_and_pack = warpgroups.rescale_and_pack(tiles)
    add_nonfinite = nonfinite.add_nonfinite_to_output(tiles, options)
    finish = rung4_tensor_cores.epilogue(tiles, is_plain)
    start_pipeline, copy = pipeline.start(B_r // 16), pipeline.copy_tiles(tiles, hides_keys)
    _, copying, multiplying = registers(B_r)
    keep_few, take_many = ptx.setmaxnreg("dec", copying), ptx.setmaxnreg("inc", multiplying)
    wait_for_multipliers = ptx.bar_sync(1, 2 * B_r)

    @device
    def is_partial(j, full_start, full_stop):
        return hides_keys or j < full_start or j + B_c > full_stop

    def wgmma(q, k, v, mask, bias, o, O, L):
        t = cuda.threadIdx.x
        i_start, h, b, kv = block(o)
        bounds = masks.tile_bounds(i_start, min(i_start + B_r, o.Lq), b, o)
        j, j_stop, full_start, full_stop = bounds

        # Tiles are aligned to the period of the swizzle, which is a pattern of addresses.
        Q_i = ptx.shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
        K, V = Q_i + Q_bytes, Q_i + Q_bytes + 2 * stage
        barriers = V + 2 * stage
        K_empty, V_empty = barriers + pipeline.OF_K, barriers + pipeline.OF_V
        start_pipeline(t, barriers)
        if t >= 2 * B_r:
            keep_few()
            if j < j_stop:
                copy(t - 2 * B_r, Q_i, K, V, barriers, q, k, v, o, b, h, kv, i_start, bounds)
            return
        take_many()

        Q_own = Q_i + (t >> 7) * (warpgroups.ROWS * warpgroups.ROW)  # the warpgroup's rows
        lane, first_row = place(t)
        S_ij = cuda.local.array(S_size, types.float32)
        P_ij = cuda.local.array(P_size, types.uint32)
        O_i = cuda.local.array(O_size, types.float32)
        m_i = cuda.local.array((1, 2), types.float32)
        l_i = cuda.local.array((1, 2), types.float32)
        correction = cuda.local.array(2, types.float32)
        for half in range(2):  # line 5
            m_i[0, half] = -math.inf
            l_i[0, half] = 0
        for e in range(O_size):
            O_i[e] = 0

        unit = o.scale if is_plain else np.float32(1)  # the scale that m_i still lacks
        factor = np.float32(softmax.LOG2_E) * unit
        if j < j_stop:
            wait_until_full(barriers, 0)
            start_keys(Q_own, K, S_ij)  # line 8
            wait_for_S(S_ij)
            release(K_empty, 0, lane)
            update_softmax(
                t, S_ij, correction, m_i, l_i, mask, bias, o, b, h, i_start, j,
                is_partial(j, full_start, full_stop), factor,
            )  # fmt: skip
            rescale_and_pack(S_ij, P_ij, O_i, correction)

            n = 0
            while j + B_c < j_stop:  # line 6
                j += B_c
                wait_until_full(barriers, n + 1)
                start_keys(Q_own, K + (n + 1 & 1) * stage, S_ij)
                start_values(P_ij, V + (n & 1) * stage, O_i)  # line 10
                wait_for_older_S(S_ij)
                release(K_empty, n + 1, lane)
                update_softmax(
                    t, S_ij, correction, m_i, l_i, mask, bias, o, b, h, i_start, j,
                    is_partial(j, full_start, full_stop), factor,
                )  # fmt: skip
                for half in range(2):  # l_i is not negative: it is computed before the wait
                    ptx.st_shared_f32_if_negative(Q_i, l_i[0, half])
                wait_for_O(O_i)
                release(V_empty, n, lane)
                rescale_and_pack(S_ij, P_ij, O_i, correction)
                n += 1
            wait_until_full(barriers, n + 1)
            start_values(P_ij, V + (n & 1) * stage, O_i)
            wait_for_O(O_i)

        row = i_start + first_row + (lane >> 2)
        sink = ptx.ld_global_nc_f32(o.sinks + 4 * h)
        L_at = L + 4 * o.Lq * (b * o.H + h)
        O_at, rows = row_address(O, b, h, i_start, 2), o.Lq - i_start
        wait_for_multipliers()  # then all have read Q_i
        finish(lane, row, first_row, Q_i, O_i, m_i, l_i, unit, sink, o, L_at)
        store(lane, first_row, Q_i, O_at, 2 * O.row, rows)
        if ptx.ld_shared_u32(barriers + pipeline.FOUND):
            cuda.syncwarp()
            add_nonfinite(
                lane, row_address(v, b, kv, 0, 2), 2 * v.row, bounds[0], j_stop,
                O_at + first_row * 2 * O.row, 2 * O.row, min(rows - first_row, 16),
                b, h, i_start + first_row, mask, bias, o,
            )  # fmt: skip

    return wgmma
