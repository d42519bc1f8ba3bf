"""Load tiles into fragments of ``mma`` and multiply them, for rungs 4 and 5.

A fragment is the part of a matrix in one lane of a warp; ``ptx.mma_f16`` lists its numbers. A chunk
is 16 bytes of a row, which a thread copies at once.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, types, uint32, uint64

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.arguments import row_alignment
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.rows import GLOBAL_U32, load_row, row_address


class Format(NamedTuple):
    """A 16-bit floating format: the bits of infinity and of 1, and its instructions.

    ``pack`` rounds two float32 to one register. ``mma`` takes registers, and ``mma_in`` takes local
    arrays (``ptx.mma_f16``).
    """

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
    """Return a device function that converts a register's lower and upper number to float32."""
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

    Each warp owns 16 · ``M`` queries. Its S_ij is (M, ``N``) fragments of (16, 8) scores, and its
    O_i is (M, ``chunks``) fragments of 16 rows and 8 columns. A lane holds four numbers of each
    fragment. Rows have ``stored`` columns in global memory. In shared memory they have ``width``
    columns, of which those from ``stored`` on are 0.
    """

    width: int
    dtype: str
    B_r: int
    B_c: int
    warps: int
    stored: int

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
    def row_threads(self) -> int:
        """Return the number of threads that copy a row.

        It is ``chunks`` rounded up to a power of 2. The last threads may thus have no chunk.
        """
        return 1 << (self.chunks - 1).bit_length()

    @property
    def rows_at_once(self) -> int:
        """Return the number of rows that the threads copy in one pass."""
        return 32 * self.warps // self.row_threads


ALIGNMENT = 512  # of a tile in shared memory, in bytes: the longest group of chunks


def swizzled(row: int, chunk: int, chunks: int) -> int:
    """Return the offset in bytes of a chunk of a row, in a tile of shared memory.

    Eight chunks are as wide as all banks. The same chunk of eight successive rows must be in eight
    different bank groups. Let ``spread`` be the largest power of 2, at most 8, that divides
    ``chunks``, the number of chunks per row. Without the swizzle, a chunk's bank group repeats
    every 8 / spread rows. So chunk indices are XORed with row // (8 / spread), modulo ``spread``,
    which exchanges chunks within groups of ``spread``.

    >>> [[swizzled(row, chunk, 4) // 16 % 8 for chunk in range(4)] for row in range(4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [1, 0, 3, 2], [5, 4, 7, 6]]
    """
    spread = min(chunks & -chunks, 8)
    return 16 * (row * chunks + (chunk ^ ((row // (8 // spread)) & (spread - 1))))


offset_in_tile = device(swizzled)


def moved(place: int, d: int, chunks: int) -> int:
    """Return the address of the chunk that is d chunks after the chunk at ``place`` in its row.

    ``place`` must be the address of chunk 0 or 1, and d must be even. Rows consist of groups, whose
    number of chunks is a power of 2. Within a group, the address follows by one exclusive or. From
    group to group, and from a row to the row 16 further on, addresses differ by a constant, which
    is the load's immediate offset.

    >>> [moved(swizzled(1, 0, 4), d, 4) == swizzled(1, d, 4) for d in (0, 2)]
    [True, True]
    """
    in_group = d % (chunks & -chunks)
    return (place ^ (16 * in_group)) + 16 * (d - in_group)


move = device(moved)


def lane_and_row(tiles: MmaTiles) -> Any:
    """Return a device function that finds the lane of thread t and the first row of its warp."""
    rows = 16 * tiles.M

    @device
    def lane_and_row(t):
        t = ptx.optimization_barrier(t)
        return t & 31, (t >> 5) * rows

    return lane_and_row


def is_copied(tiles: MmaTiles) -> Any:
    """Return a device function that returns whether thread t copies a chunk of ``row``.

    A thread copies nothing if ``row`` is not below ``rows``, the tile's number of rows, or if the
    thread has no chunk (``MmaTiles.row_threads``).
    """
    chunks, threads = tiles.chunks, tiles.row_threads
    is_even, is_long = chunks == threads, tiles.B_c % tiles.rows_at_once == 0

    @device
    def is_copied(t, row, rows):
        return (is_even or uint32(t) % uint32(threads) < chunks) and (is_long or row < rows)

    return is_copied


def row_and_chunk(tiles: MmaTiles) -> Any:
    """Return a device function that returns thread t's first row, and its chunk of each row."""
    threads = tiles.row_threads

    @device
    def row_and_chunk(t):
        return int32(uint32(t) // uint32(threads)), int32(uint32(t) % uint32(threads))

    return row_and_chunk


def first_chunk(tiles: MmaTiles) -> Any:
    """Return a device function that finds the address of thread t's first chunk of X[b, h, i:]."""
    own = row_and_chunk(tiles)

    @device
    def first_chunk(t, X, b, h, i):
        row, chunk = own(t)
        return row_address(X, b, h, i + row, 2) + 16 * chunk

    return first_chunk


def copy_chunk(tiles: MmaTiles) -> Any:
    """Return a device function that starts to copy a chunk from address X to shared address ``at``.

    ``chunk`` is its index in the row. Columns from ``stored`` on become 0. If ``has_row`` is False,
    the whole chunk becomes 0.
    """
    stored, is_whole = tiles.stored, tiles.stored == tiles.width
    piece = row_alignment(stored, 2)
    copy = ptx.cp_async(piece)

    @device
    def copy_chunk(at, X, chunk, has_row):
        for x in range(0, 16, piece):
            is_inside = is_whole or 16 * chunk + x < 2 * stored
            copy(at + uint32(x), X + uint64(x), piece if has_row and is_inside else 0)

    return copy_chunk


def prefetch_tile(tiles: MmaTiles) -> Any:
    """Return a device function that starts to copy thread t's chunks of a tile to shared memory.

    The tile's address in shared memory is ``to``. ``X`` is the address of the thread's
    ``first_chunk``, in rows ``row_bytes`` apart. The tile has ``rows`` rows; those from row
    ``present`` on become 0.
    """
    chunks, at_once, tile_row = tiles.chunks, tiles.rows_at_once, tiles.row_bytes
    copies, own, copy = is_copied(tiles), row_and_chunk(tiles), copy_chunk(tiles)
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
                copy(at, X, chunk, further < left)
            X += at_once * row_bytes

    return prefetch


def mma_keys(tiles: MmaTiles) -> Any:
    """Return a device function that computes a warp's S_ij = Q_i K_jᵀ (Algorithm 1, line 8).

    ``Q_i`` and ``K_j`` are the addresses of tiles in shared memory, and ``S`` is a local array.
    """
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
    """Return a device function that computes a warp's O_i += P_ij V_j (Algorithm 1, line 10).

    ``V_j`` is the address of a tile in shared memory. The weights P are float32 and are rounded to
    16 bits.
    """
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

    The rows are in ``tile``, in shared memory. In O, the block's ``rows`` rows begin at the address
    ``to``.
    """
    M, chunks, stored = tiles.M, tiles.chunks, tiles.stored
    whole = stored // 8 if row_alignment(stored, 2) == 16 else 0  # chunks to store at once

    @device
    def store(lane, first_row, tile, to, row_bytes, rows):
        cuda.syncwarp()  # no other warp writes these rows
        for c in range(16 * M * chunks // 32):
            place = lane + 32 * c
            r, chunk = first_row + place // chunks, place % chunks
            at, O_at = tile + offset_in_tile(r, chunk, chunks), to + r * row_bytes + 16 * chunk
            if r < rows and (whole == chunks or chunk < whole):
                w0, w1, w2, w3 = ptx.ld_shared_v4_u32(at)
                ptx.st_global_v4_u32(O_at, w0, w1, w2, w3)
            if r < rows and whole == 0:
                for x in range(4):
                    if 8 * chunk + 2 * x < stored:
                        ptx.st_global_u32(O_at + 4 * x, ptx.ld_shared_u32(at + 4 * x))

    return store


# ---- fragments straight from global memory: rung 5


class DecodeTiles(NamedTuple):
    """The layout of a warp's tile of ``rows`` rows (8 or 16) and ``keys`` keys, for rung 5.

    Lane 4 g + t of the warp is called (g, t). A and B are the factors of ``mma``, as in
    ``ptx.mma_f16``.

    S = Q Kᵀ: in lane (g, t), A holds rows g and g + 8 of Q, and B holds key g of each 8 keys. A row
    is loaded in four parts; the lane loads part t. It receives columns 2t and 2t + 1 of S in rows g
    and g + 8.

    Oᵀ = Vᵀ Pᵀ: P of row g and 16 keys already has the layout of B. Rows of V are loaded in eight
    parts; the lane loads part g of keys 2t and 2t + 1 of each 8 keys. It receives rows 2t and
    2t + 1 of O, in the columns of part g.
    """

    width: int
    dtype: str
    rows: int
    keys: int
    stored: int  # columns of a row in memory, as in ``MmaTiles``

    @property
    def sides(self) -> int:
        """Return the number of rows of S in which a lane has scores: 2 of 16 rows, or 1 of 8."""
        return self.rows // 8

    @property
    def q_words(self) -> int:
        """Return the number of 32-bit words that a lane holds of each row of Q or K."""
        return self.width // 8

    @property
    def v_words(self) -> int:
        return self.width // 16


def load_keys(tiles: DecodeTiles) -> Any:
    """Return a device function that loads a lane's part of a tile of keys, from key j on.

    The lane is (g, t) of ``DecodeTiles``. In place of keys from ``stop`` on, key ``stop`` - 1 is
    loaded again. K is the address of key 0, and keys are ``K_row`` bytes apart.
    """
    tiles_of_8, words = tiles.keys // 8, tiles.q_words
    load_row_of_K = load_row(words, 4, GLOBAL_U32, tiles.stored // 2)

    @device
    def load(K, K_row, j, stop, g, t, K_j):
        for n in range(tiles_of_8):
            key = min(int32(j + 8 * n + g), int32(stop - 1))
            load_row_of_K(K + uint64(key) * K_row, t, K_j, n * words)

    return load


def load_values(tiles: DecodeTiles) -> Any:
    """Return a device function that loads a lane's part of a tile of values, from key j on.

    The arguments are as in ``load_keys``.
    """
    tiles_of_8, words = tiles.keys // 8, tiles.v_words
    load_row_of_V = load_row(words, 8, GLOBAL_U32, tiles.stored // 2)

    @device
    def load(V, V_row, j, stop, g, t, V_j):
        for n in range(tiles_of_8):
            for x in range(2):
                key = min(int32(j + 8 * n + 2 * t + x), int32(stop - 1))
                load_row_of_V(V + uint64(key) * V_row, g, V_j, (2 * n + x) * words)

    return load


def transposed_keys(tiles: DecodeTiles) -> Any:
    """Return a device function that computes S = Q Kᵀ in registers (Algorithm 1, line 8).

    Q, K_j and S are in the layout of ``DecodeTiles``.
    """
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
    """Return a device function that computes Oᵀ += Vᵀ Pᵀ in registers (Algorithm 1, line 10).

    P is the sum of ``P_upper`` and ``P_rest``, which are 16-bit numbers.
    """
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
