"""Copy tiles to shared memory and multiply them by ``wgmma``, for rung 6.

A warpgroup is four warps, which own 64 rows. A warp holds the same numbers as for ``mma``, so the
tiles are ``MmaTiles`` of 16 rows per warp. ``wgmma`` reads K_j, V_j and Q_i in shared memory, where
a descriptor gives a matrix's address and layout. In shared memory a tile is a sequence of panels of
64 columns; a panel is a sequence of rows of 128 bytes.

NVIDIA, "PTX ISA", version 9.0, 9.7.15.5: matrices in shared memory, and their descriptors.
"""

from typing import Any

from numba import int32, uint32, uint64

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device, fragments
from minimha.kernels.cuda.parts.fragments import FORMATS, MmaTiles, is_copied, row_and_chunk
from minimha.kernels.cuda.parts.nonfinite import nonfinite_in, zero_nonfinite_in

ROWS = 64  # of a warpgroup
PANEL = 64  # columns: 128 bytes, the width of the banks
ROW = 2 * PANEL  # bytes
EIGHT_ROWS = 8 * ROW  # the period of the swizzle, and the alignment of a tile
PTX_NAMES = {"float16": "f16", "bfloat16": "bf16"}


def tile_bytes(rows: int, width: int) -> int:
    """Return the size in bytes of a tile in shared memory; its last panel may be partly empty."""
    return -(-width // PANEL) * rows * ROW


def swizzled(row: int, chunk: int, rows: int) -> int:
    """Return the offset in bytes of a 16-byte chunk of a row, in a tile with ``rows`` rows.

    The index of a chunk within its panel is XORed with the row's index, which is the 128-byte
    swizzle.

    >>> [[swizzled(row, chunk, 8) // 16 % 8 for chunk in range(4)] for row in (0, 1, 2)]
    [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1]]
    """
    return chunk // 8 * rows * ROW + row * ROW + 16 * ((chunk ^ row) & 7)


offset_in_tile = device(swizzled)


def chunk_of(tiles: MmaTiles) -> Any:
    """Return a device function that returns row and address of thread t's chunk in pass r.

    The tile is at address ``at`` and has ``rows`` rows. The index of a thread's first row and the
    increments in later passes have no common bit. So an exclusive or with a constant, and the sum
    with another, convert the address in the first pass to that in a later one.
    """
    at_once, own = tiles.rows_at_once, row_and_chunk(tiles)

    @device
    def chunk_of(at, t, r, rows):
        first, chunk = own(t)
        below = int32(r * at_once)
        place = uint32(at + offset_in_tile(first, chunk, rows))
        return first + below, (place ^ uint32(16 * (below & 7))) + uint32(below * ROW)

    return chunk_of


def fetch_tile(tiles: MmaTiles) -> Any:
    """Return a device function that starts to copy thread t's chunks of a tile, for ``wgmma``.

    The arguments are those of ``fragments.prefetch_tile``.
    """
    at_once, own = tiles.rows_at_once, row_and_chunk(tiles)
    chunk, copies, copy = chunk_of(tiles), is_copied(tiles), fragments.copy_chunk(tiles)

    @device
    def fetch(t, to, X, row_bytes, rows, present):
        first, chunk_of_row = own(t)
        left = int32(present - first)
        for r in range(-(-rows // at_once)):
            row, at = chunk(to, t, r, rows)
            if copies(t, row, rows):
                copy(at, X, chunk_of_row, r * at_once < left)
            X += at_once * row_bytes

    return fetch


def zero_nonfinite_tile(tiles: MmaTiles) -> Any:
    """Return a device function that zeroes the nonfinite values that thread t copied to V_j.

    That function returns 0 if there are none, else a nonzero number.
    """
    B_c, at_once = tiles.B_c, tiles.rows_at_once
    chunk, copies = chunk_of(tiles), is_copied(tiles)
    nonfinite, zeroed = nonfinite_in(tiles.dtype), zero_nonfinite_in(tiles.dtype)

    @device
    def zero_nonfinite(t, V_j):
        found = uint32(0)
        for r in range(-(-B_c // at_once)):
            row, at = chunk(V_j, t, r, B_c)
            if copies(t, row, B_c):
                a, b, c, d = ptx.ld_shared_v4_u32(at)
                here = nonfinite(a) | nonfinite(b) | nonfinite(c) | nonfinite(d)
                if here:
                    ptx.st_shared_v4_u32(at, zeroed(a), zeroed(b), zeroed(c), zeroed(d))
                found |= here
        return found

    return zero_nonfinite


def descriptor_of(panel: int) -> Any:
    """Return a device function that computes the ``wgmma`` descriptor of a matrix at ``at``.

    The matrix consists of panels of ``panel`` bytes, in which rows follow each other. ``wgmma``
    uses the distance between panels only for V_j, whose rows lie across the direction of the sum.
    """
    constant = 1 << 62 | EIGHT_ROWS >> 4 << 32 | panel >> 4 << 16

    @device
    def descriptor(at):
        return uint64(constant) | uint64((uint32(at) & uint32(0x3FFFF)) >> uint32(4))

    return descriptor


def start_keys(tiles: MmaTiles) -> Any:
    """Return a device function that starts the product S_ij = Q_i K_jᵀ, but does not wait for it.

    A warpgroup computes the product, which is line 8 of Algorithm 1.
    """
    Q_panel, K_panel = tiles.B_r * ROW, tiles.B_c * ROW
    describe_Q, describe_K = descriptor_of(Q_panel), descriptor_of(K_panel)
    # 16 columns are 32 bytes of a panel's row; descriptors count 16.
    steps = [
        (x // 4 * (Q_panel >> 4) + 2 * (x % 4), x // 4 * (K_panel >> 4) + 2 * (x % 4))
        for x in range(tiles.width // 16)
    ]
    start = ptx.wgmma_shared(PTX_NAMES[tiles.dtype], tiles.B_c, steps)

    @device
    def start_keys(Q, K_j, S):
        start(S, describe_Q(Q), describe_K(K_j))

    return start_keys


def start_values(tiles: MmaTiles) -> Any:
    """Return a device function that starts O_i += P_ij V_j, but does not wait for the result.

    A warpgroup computes the product, which is in line 10 of Algorithm 1.
    """
    describe = descriptor_of(tiles.B_c * ROW)
    steps = [x * (16 * ROW >> 4) for x in range(tiles.B_c // 16)]
    start = ptx.wgmma_registers(PTX_NAMES[tiles.dtype], tiles.width, steps)

    @device
    def start_values(P, V_j, O):
        start(O, P, describe(V_j))

    return start_values


def rescale_and_pack(tiles: MmaTiles) -> Any:
    """Return a device function that rescales O_i and rounds the weights in S to 16-bit P_ij."""
    P_size, chunks, pack = tiles.B_c // 4, tiles.chunks, FORMATS[tiles.dtype].pack

    @device
    def rescale_and_pack(S, P, O, correction):
        for half in range(2):
            for d in range(chunks):
                O[4 * d + 2 * half] *= correction[half]
                O[4 * d + 2 * half + 1] *= correction[half]
        for x in range(P_size):
            P[x] = pack(S[2 * x], S[2 * x + 1])

    return rescale_and_pack
