"""Pass tiles of K and V from the copying warpgroup to the multiplying warpgroups, for rung 6.

Copies come in steps: Q_i and the first tile of K; the next tile of K and the first tile of V; and
so on. Two mbarriers, ``full``, alternate: a thread arrives at one when its copies are complete. K
and V have two buffers each in shared memory, which alternate too. Each buffer has an mbarrier,
``empty``, at which every multiplying warp arrives after using the tile. Tile or step n uses the
mbarrier n % 2 of a pair, whose phase n // 2 a thread waits for. Successive phases are distinguished
by their parity.

Shah et al., "FlashAttention-3", 2024, Algorithm 1.
"""

from typing import Any

from numba import cuda

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.fragments import MmaTiles, first_chunk
from minimha.kernels.cuda.parts.warpgroups import fetch_tile, tile_bytes, zero_nonfinite_tile

PRODUCERS = 128  # threads that copy: a warpgroup
# Offsets in bytes from the two ``full`` on: K's two ``empty``, V's two ``empty``, a word that is
# not 0 if a value was nonfinite, and the end.
OF_K, OF_V, FOUND, BYTES = 16, 32, 48, 56


def start(consumers: int) -> Any:
    """Return a device function that initializes the barriers of ``consumers`` multiplying warps."""

    @device
    def start(t, barriers):
        if t == 0:
            for x in (0, 8):
                ptx.mbarrier_init(barriers + x, PRODUCERS)
                ptx.mbarrier_init(barriers + OF_K + x, consumers)
                ptx.mbarrier_init(barriers + OF_V + x, consumers)
            ptx.st_shared_u32(barriers + FOUND, 0)
        cuda.syncthreads()

    return start


@device
def wait_for_phase(barriers, n, of_before):
    """Wait until the phase of tile or step n is over, in a pair of mbarriers at ``barriers``.

    If ``of_before`` is 1, wait for the mbarrier's phase before that one instead.
    """
    while not ptx.mbarrier_try_wait(barriers + 8 * (n & 1), (n >> 1 & 1) ^ of_before):
        pass


@device
def wait_until_full(barriers, step):
    """Wait until the copies of ``step`` are complete, and make them visible to ``wgmma``."""
    wait_for_phase(barriers, step, 0)
    ptx.fence_proxy_async()


@device
def release(barriers, n, lane):
    """Signal, once per warp, that the buffer of tile n may be overwritten.

    ``barriers`` is the address of the two ``empty`` of K or of V.
    """
    if lane == 0:
        ptx.mbarrier_arrive(barriers + 8 * (n & 1))


def copy_tiles(tiles: MmaTiles, hides_keys: bool) -> Any:
    """Return a device function that copies Q_i and all tiles of K and V to shared memory.

    The threads of the copying warpgroup run it (lines 4 and 7 of FlashAttention-2's Algorithm 1).
    ``bounds`` is the result of ``mask.tile_bounds``, and its first range must have at least one
    key. Nonfinite values become 0 in partial tiles of V. ``hides_keys`` means that options may hide
    single keys; then they become 0 in all tiles of V.
    """
    B_r, B_c = tiles.B_r, tiles.B_c
    tiles = tiles._replace(warps=PRODUCERS // 32)
    first, fetch, zero_nonfinite = first_chunk(tiles), fetch_tile(tiles), zero_nonfinite_tile(tiles)
    stage = tile_bytes(B_c, tiles.width)

    @device
    def copy(t, Q_i, K, V, barriers, q, k, v, o, b, h, kv, i_start, bounds):
        j, j_stop, full_start, full_stop = bounds
        K_at, V_at = first(t, k, b, kv, j), first(t, v, b, kv, j)
        fetch(t, Q_i, first(t, q, b, h, i_start), 2 * q.row, B_r, o.Lq - i_start)
        fetch(t, K, K_at, 2 * k.row, B_c, j_stop - j)
        ptx.cp_async_mbarrier_arrive_noinc(barriers)
        n = 0
        while j < j_stop:
            full = barriers + 8 * (n + 1 & 1)
            K_at += 2 * B_c * k.row
            # Wait even if no keys follow: a phase of ``full`` may end only after all saw the last.
            wait_for_phase(barriers + OF_K, n + 1, 1)
            if j + B_c < j_stop:
                fetch(t, K + (n + 1 & 1) * stage, K_at, 2 * k.row, B_c, j_stop - j - B_c)
            wait_for_phase(barriers + OF_V, n, 1)
            fetch(t, V + (n & 1) * stage, V_at, 2 * v.row, B_c, j_stop - j)
            if hides_keys or j < full_start or j + B_c > full_stop:
                ptx.cp_async_wait_all()
                if zero_nonfinite(t, V + (n & 1) * stage):
                    ptx.red_shared_or_u32(barriers + FOUND, 1)
                ptx.mbarrier_arrive(full)
            else:
                ptx.cp_async_mbarrier_arrive_noinc(full)
            V_at += 2 * B_c * v.row
            j += B_c
            n += 1
        ptx.cp_async_wait_all()  # a thread may not exit with copies in flight

    return copy
