"""Load tiles into fragments of ``mma`` and multiply them, for rungs 4 and 5.

A fragment is the part of a matrix in one lane of a warp; ``ptx.mma_f16`` lists its numbers. A chunk
is 16 bytes of a row, which a thread copies at once.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, types, uint32, uint64

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.rows import GLOBAL_U32, load_row, row_address


class Format(NamedTuple):
    """A 16-bit floating format: bits of infinity and of 1, and instructions for pairs."""

    infinity: int
    one: int
    pack: Any
    mma: Any
    mma_in: Any


FORMATS = {
    "float16": Format(0x7C00, 0x3C00, ptx.pack_f16x2, ptx.mma_f16, ptx.mma_f16_in),
    "bfloat16": Format(0x7F80, 0x3F80, ptx.pack_bf16x2, ptx.mma_bf16, ptx.mma_bf16_in),
}


def widen(dtype: str) -> Any:
    """Return a device function that widens both 16-bit numbers of a register, lower half first."""
    is_float16 = dtype == "float16"

    @device
    def halves(word):
        if is_float16:
            low, high = ptx.split_b32(word)
            return ptx.cvt_f32_f16(low), ptx.cvt_f32_f16(high)
        shifted = uint32(word << uint32(16))
        return ptx.bits_as_f32(shifted), ptx.bits_as_f32(word & uint32(0xFFFF0000))

    return halves


# ---- tiles for ``mma``: rung 4


class MmaTiles(NamedTuple):
    """The tile sizes of ``warps`` warps that multiply B_r queries by B_c keys.

    Each warp owns 16 · ``M`` queries. S_ij is (M, ``N``) fragments of (16, 8) scores, and O_i is
    (M, ``chunks``) fragments of (16, 8) columns. A lane holds four numbers of each fragment.
    """

    width: int
    dtype: str
    B_r: int
    B_c: int
    warps: int

    @property
    def M(self) -> int:
        return self.B_r // (16 * self.warps)

    @property
    def N(self) -> int:
        return self.B_c // 8

    @property
    def chunks(self) -> int:
        """Return the number of 16-byte chunks per row."""
        return self.width // 8

    @property
    def row_bytes(self) -> int:
        return 2 * self.width

    @property
    def rows_at_once(self) -> int:
        """Return the number of rows that the threads copy in one pass."""
        return 32 * self.warps // self.chunks


ALIGNMENT = 512  # of a tile in shared memory, in bytes: the longest group of chunks


def swizzled(row: int, chunk: int, chunks: int) -> int:
    """Return the offset in bytes of a chunk of a row, in a tile of shared memory.

    Eight chunks are as wide as all banks. The same chunk of eight successive rows must be in eight
    different bank groups. Let ``spread`` be the largest power of 2, at most 8, that divides the
    number of chunks. Without the swizzle, a chunk's bank group repeats every 8 / spread rows. So
    the chunk indices of later rows are XORed, which moves chunks within groups of ``spread``.

    >>> [[swizzled(row, chunk, 4) // 16 % 8 for chunk in range(4)] for row in range(4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [1, 0, 3, 2], [5, 4, 7, 6]]
    """
    spread = min(chunks & -chunks, 8)
    return 16 * (row * chunks + (chunk ^ ((row // (8 // spread)) & (spread - 1))))


offset_in_tile = device(swizzled)


def moved(place: int, d: int, chunks: int) -> int:
    """Return the address of the chunk d chunks after ``place``, which is chunk 0 or 1 of its row.

    d must be even. Within a group, a power of 2 of chunks, one exclusive or keeps the swizzle
    right. Between groups, and between rows 16 apart, the distance is a constant of the load.

    >>> [moved(swizzled(1, 0, 4), d, 4) == swizzled(1, d, 4) for d in (0, 2)]
    [True, True]
    """
    in_group = d % (chunks & -chunks)
    return (place ^ (16 * in_group)) + 16 * (d - in_group)


move = device(moved)


def lane_and_row(tiles: MmaTiles) -> Any:
    """Return a device function that finds the lane of thread t, and its warp's first row in Q_i."""
    rows = 16 * tiles.M

    @device
    def lane_and_row(t):
        t = ptx.optimization_barrier(t)
        return t & 31, (t >> 5) * rows

    return lane_and_row


def is_copied(tiles: MmaTiles) -> Any:
    """Return a device function that tells whether thread t copies a chunk of ``row``.

    The last pass may have fewer rows, and some threads may have no chunk.
    """
    chunks, at_once = tiles.chunks, tiles.rows_at_once
    is_even = 32 * tiles.warps % chunks == 0 and tiles.B_c % at_once == 0

    @device
    def is_copied(t, row, rows):
        return is_even or (t < at_once * chunks and row < rows)

    return is_copied


def row_and_chunk(tiles: MmaTiles) -> Any:
    """Return a device function that finds the first row and the chunk that thread t copies.

    The division is unsigned, so that it is a shift and a mask if the divisor is a power of 2.
    """
    chunks = tiles.chunks

    @device
    def row_and_chunk(t):
        return int32(uint32(t) // uint32(chunks)), int32(uint32(t) % uint32(chunks))

    return row_and_chunk


def first_chunk(tiles: MmaTiles) -> Any:
    """Return a device function that finds the address of thread t's first chunk of X[b, h, i:]."""
    own = row_and_chunk(tiles)

    @device
    def first_chunk(t, X, b, h, i):
        row, chunk = own(t)
        return row_address(X, b, h, i + row, 2) + 16 * chunk

    return first_chunk


def prefetch_tile(tiles: MmaTiles) -> Any:
    """Return a device function that starts to copy thread t's chunks of rows to shared memory.

    ``X`` is the thread's ``first_chunk``. Of ``rows`` rows, those from ``present`` on become 0.
    """
    chunks, at_once, tile_row = tiles.chunks, tiles.rows_at_once, tiles.row_bytes
    copies, own = is_copied(tiles), row_and_chunk(tiles)
    is_regular = at_once % 8 == 0  # whether all chunks of a thread have the same swizzle

    @device
    def prefetch(t, to, X, row_bytes, rows, present):
        first, chunk = own(t)
        place, left = uint32(to + offset_in_tile(first, chunk, chunks)), int32(present - first)
        for r in range(-(-rows // at_once)):
            further = int32(r * at_once)
            if copies(t, first + further, rows):
                if is_regular:
                    at = place + uint32(further * tile_row)
                else:
                    at = uint32(to + offset_in_tile(first + further, chunk, chunks))
                ptx.cp_async_16(at, X, 16 if further < left else 0)
            X += at_once * row_bytes

    return prefetch


def mma_keys(tiles: MmaTiles) -> Any:
    """Return a device function that computes S_ij = Q_i K_jᵀ (Algorithm 1, line 8)."""
    M, N, chunks, mma = tiles.M, tiles.N, tiles.chunks, FORMATS[tiles.dtype].mma_in
    A_size, S_size, row_bytes = 4 * M, 4 * M * N, tiles.row_bytes
    half = chunks // 4 * 2
    place = lane_and_row(tiles)

    @device
    def add_columns(Q_lane, K_lane, d, A, B, S):
        for i in range(M):
            ptx.ldmatrix_x4(A, 4 * i, move(Q_lane, d, chunks) + 16 * i * row_bytes)
        for n in range(0, N, 2):
            ptx.ldmatrix_x4(B, 0, move(K_lane, d, chunks) + 8 * n * row_bytes)
            for i in range(M):
                mma(S, 4 * (i * N + n), A, 4 * i, B, 0)
                mma(S, 4 * (i * N + n + 1), A, 4 * i, B, 2)

    @device
    def multiply_keys(t, Q_i, K_j, S):
        lane, first_row = place(t)
        A = cuda.local.array(A_size, types.uint32)
        B = cuda.local.array(4, types.uint32)
        for e in range(S_size):
            S[e] = 0
        Q_lane = uint32(Q_i + offset_in_tile(first_row + (lane & 15), lane >> 4, chunks))
        key = (lane & 7) + ((lane >> 4) << 3)
        K_lane = uint32(K_j + offset_in_tile(key, (lane >> 3) & 1, chunks))
        for d in range(0, half, 2):  # two loops, because LLVM does not unroll a longer one
            add_columns(Q_lane, K_lane, d, A, B, S)
        for d in range(half, chunks, 2):
            add_columns(Q_lane, K_lane, d, A, B, S)

    return multiply_keys


def mma_values(tiles: MmaTiles) -> Any:
    """Return a device function that computes O_i += P_ij V_j (Algorithm 1, line 10)."""
    M, N, chunks, row_bytes = tiles.M, tiles.N, tiles.chunks, tiles.row_bytes
    _, _, pack, _, mma = FORMATS[tiles.dtype]
    A_size = 4 * M
    place = lane_and_row(tiles)

    @device
    def multiply_values(t, V_j, P, O):
        lane, _ = place(t)
        A = cuda.local.array(A_size, types.uint32)
        B = cuda.local.array(4, types.uint32)
        V_lane = uint32(V_j + offset_in_tile(lane & 15, lane >> 4, chunks))
        for j in range(N // 2):
            for i in range(M):
                for a in range(4):
                    e = 4 * (i * N + 2 * j) + 2 * a
                    A[4 * i + a] = pack(P[e], P[e + 1])
            for d in range(0, chunks, 2):
                ptx.ldmatrix_x4_trans(B, 0, move(V_lane, d, chunks) + 16 * j * row_bytes)
                for i in range(M):
                    mma(O, 4 * (i * chunks + d), A, 4 * i, B, 0)
                    mma(O, 4 * (i * chunks + d + 1), A, 4 * i, B, 2)

    return multiply_values


def store_tile(tiles: MmaTiles) -> Any:
    """Return a device function that copies a warp's rows to O (Algorithm 1, lines 14 and 15).

    They come from ``tile`` in shared memory. The block has ``rows`` rows in O, from ``to`` on.
    """
    M, chunks = tiles.M, tiles.chunks

    @device
    def store(lane, first_row, tile, to, row_bytes, rows):
        cuda.syncwarp()  # no other warp writes these rows
        for c in range(16 * M * chunks // 32):
            place = lane + 32 * c
            r, chunk = first_row + place // chunks, place % chunks
            if r < rows:
                w0, w1, w2, w3 = ptx.ld_shared_v4_u32(tile + offset_in_tile(r, chunk, chunks))
                ptx.st_global_v4_u32(to + r * row_bytes + 16 * chunk, w0, w1, w2, w3)

    return store


# ---- fragments straight from global memory: rung 5


class DecodeTiles(NamedTuple):
    """A warp's tile of ``rows``, 8 or 16, and ``keys``; lane 4 g + t of the warp is called (g, t).

    A and B are the factors of ``mma``, as in ``ptx.mma_f16``.
    S = Q Kᵀ: A holds rows g and g + 8 of Q, and B holds key g of 8. Lane (g, t) loads part t of 4
    of these rows. It receives S[g, 2t], S[g, 2t + 1] and the same of row g + 8.
    Oᵀ = Vᵀ Pᵀ: P of row g and 16 keys already has the layout of B. Lane (g, t) loads part g of 8 of
    V, for keys 2t and 2t + 1 of each 8 keys. The lane receives O of rows 2t and 2t + 1.
    """

    width: int
    dtype: str
    rows: int
    keys: int

    @property
    def sides(self) -> int:
        """Return the number of rows per lane: 2 if the warp has rows g + 8, else 1."""
        return self.rows // 8

    @property
    def q_words(self) -> int:
        """Return the number of 32-bit words of a row of Q or K in a lane."""
        return self.width // 8

    @property
    def v_words(self) -> int:
        return self.width // 16


def load_keys(tiles: DecodeTiles) -> Any:
    """Return a device function that loads keys from j on, and key ``stop`` - 1 for later ones."""
    tiles_of_8, words = tiles.keys // 8, tiles.q_words
    load_row_of_K = load_row(words, 4, GLOBAL_U32)

    @device
    def load(K, K_row, j, stop, g, t, K_j):
        for n in range(tiles_of_8):
            key = min(int32(j + 8 * n + g), int32(stop - 1))
            load_row_of_K(K + uint64(key) * K_row, t, K_j, n * words)

    return load


def load_values(tiles: DecodeTiles) -> Any:
    """Return a device function that loads the values of the keys of ``load_keys``."""
    tiles_of_8, words = tiles.keys // 8, tiles.v_words
    load_row_of_V = load_row(words, 8, GLOBAL_U32)

    @device
    def load(V, V_row, j, stop, g, t, V_j):
        for n in range(tiles_of_8):
            for x in range(2):
                key = min(int32(j + 8 * n + 2 * t + x), int32(stop - 1))
                load_row_of_V(V + uint64(key) * V_row, g, V_j, (2 * n + x) * words)

    return load


def transposed_keys(tiles: DecodeTiles) -> Any:
    """Return a device function that computes S = Q Kᵀ (Algorithm 1, line 8)."""
    tiles_of_8, words, mma = tiles.keys // 8, tiles.q_words, FORMATS[tiles.dtype].mma

    @device
    def multiply_keys(Q, K_j, S):
        for x in range(4 * tiles_of_8):
            S[x] = float32(0)
        for x in range(words // 2):
            a0, a1, a2, a3 = Q[2 * x], Q[words + 2 * x], Q[2 * x + 1], Q[words + 2 * x + 1]
            for n in range(tiles_of_8):
                b0, b1 = K_j[n * words + 2 * x], K_j[n * words + 2 * x + 1]
                S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3] = mma(
                    a0, a1, a2, a3, b0, b1, S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3]
                )

    return multiply_keys


def transposed_values(tiles: DecodeTiles) -> Any:
    """Return a device function that computes Oᵀ += Vᵀ Pᵀ (Algorithm 1, line 10)."""
    tiles_of_8, words, sides = tiles.keys // 8, tiles.v_words, tiles.sides
    mma = FORMATS[tiles.dtype].mma

    @device
    def multiply_values(V_j, P_upper, P_rest, O):
        for n in range(0, tiles_of_8, 2):
            for M in range(words):
                a, b = V_j[2 * n * words + M], V_j[(2 * n + 1) * words + M]
                c, d = V_j[(2 * n + 2) * words + M], V_j[(2 * n + 3) * words + M]
                a0, a1 = ptx.lower_halves(a, b), ptx.upper_halves(a, b)
                a2, a3 = ptx.lower_halves(c, d), ptx.upper_halves(c, d)
                for side in range(sides):
                    x, y = 4 * (side * words + M), side * tiles_of_8 + n
                    p0, p1, rest0, rest1 = P_upper[y], P_upper[y + 1], P_rest[y], P_rest[y + 1]
                    o0, o1, o2, o3 = mma(a0, a1, a2, a3, p0, p1, O[x], O[x + 1], O[x + 2], O[x + 3])
                    O[x], O[x + 1], O[x + 2], O[x + 3] = mma(
                        a0, a1, a2, a3, rest0, rest1, o0, o1, o2, o3
                    )

    return multiply_values
