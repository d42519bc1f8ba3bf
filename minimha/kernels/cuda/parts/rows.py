"""Address, load and store rows of D contiguous numbers, spread over the lanes of a warp."""

from typing import Any

from numba import cuda, int32, uint32, uint64

from minimha.equations.problem import Problem
from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device

GLOBAL_F32 = (ptx.ld_global_nc_f32, ptx.ld_global_nc_v2_f32, ptx.ld_global_nc_v4_f32)
GLOBAL_U32 = (ptx.ld_global_nc_u32, ptx.ld_global_nc_v2_u32, ptx.ld_global_nc_v4_u32)
CACHE = 16 << 20  # bytes: a third of the L2 cache of an H100, less than half of an A100's
SHARED_F32 = (ptx.ld_shared_f32, ptx.ld_shared_v2_f32, ptx.ld_shared_v4_f32)


@device
def row_address(X, b, h, i, itemsize):
    """Return the address of the row X[b, h, i], whose numbers have ``itemsize`` bytes."""
    return X.address + uint64((b * X.batch + h * X.head + i * X.row) * itemsize)


def grid_of(problem: Problem, B_r: int, key_bytes: int) -> tuple[int, int, int]:
    """Return the grid in which ``block_of`` finds its place: heads, blocks of queries, and parts.

    A part is a number of heads whose keys and values the L2 cache holds together. It divides B · H,
    and is a multiple of the query heads that share keys. A key and its value have ``key_bytes``
    bytes.
    """
    (B, H, Lq, _), (_, Hkv, Lk, _) = problem.q.shape, problem.k.shape
    most = min(CACHE // max(Lk * key_bytes, 1), B * Hkv)
    heads = H // Hkv * next((n for n in range(most, 0, -1) if B * Hkv % n == 0), 1)
    return heads, -(-Lq // B_r), B * H // heads


def block_of(B_r: int) -> Any:
    """Return a device function that returns which B_r queries a thread block computes.

    It returns the first query, the query head, the batch entry and the key/value head. A GPU starts
    the blocks along the first axis of ``grid_of`` first. The last queries of a causal problem see
    the most keys, so their blocks start first, and those of all heads in a part start together.
    """

    @device
    def block(o):
        head = uint32(cuda.blockIdx.z) * uint32(cuda.gridDim.x) + uint32(cuda.blockIdx.x)
        # Not //, which branches in case it divides by 0. Results of a branch, or of a minimum on
        # sm_80, take registers of each thread. These numbers take registers of the warp only.
        b = ptx.div_u32(head, o.H)
        h = int32(head - b * uint32(o.H))
        i_start = int32((uint32(cuda.gridDim.y) - 1 - uint32(cuda.blockIdx.y)) * B_r)
        return i_start, h, int32(b), int32(ptx.div_u32(h, ptx.div_u32(o.H, o.Hkv)))

    return block


def is_inside(words: int, lanes: int, stored: int | None) -> Any:
    """Return a device function that returns whether ``count`` words of a lane are in memory.

    A row in memory has its first ``stored`` words, by default all ``words`` · ``lanes``. ``before``
    is the number of words that each lane has already loaded or stored.
    """
    end = words * lanes if stored is None else stored
    is_whole = end == words * lanes

    @device
    def inside(before, count, lane):
        return is_whole or lanes * before + count * int32(lane) < end

    return inside


def load_row(
    words: int, lanes: int, instructions: tuple[Any, Any, Any], stored: int | None = None
) -> Any:
    """Return a device function that loads a lane's ``words`` 32-bit words of a row.

    ``lanes`` lanes share the row. Each lane reads 16 bytes at a time while enough are left for all
    lanes, then 8, then 4, so that neighbours read adjacent bytes. The first ``stored`` words of the
    row, a multiple of 4, are in memory, by default all. Missing words become 0. ``instructions``
    load one, two and four words.
    """
    one, two, four = instructions
    fours, has_two, has_one = words // 4, words & 2, words & 1
    inside = is_inside(words, lanes, stored)

    @device
    def load(address, lane, into, first):
        lane = uint64(lane)
        for x in range(words):  # the compiler drops this where all words are in memory
            into[first + x] = 0
        for piece in range(fours):
            at = first + 4 * piece
            if inside(4 * piece, 4, lane):
                a, b, c, d = four(address + uint64(16 * lanes * piece) + lane * uint64(16))
                into[at], into[at + 1], into[at + 2], into[at + 3] = a, b, c, d
        if has_two and inside(4 * fours, 2, lane):
            at = first + 4 * fours
            a, b = two(address + uint64(16 * lanes * fours) + lane * uint64(8))
            into[at], into[at + 1] = a, b
        if has_one and inside(words - 1, 1, lane):
            beyond = uint64(4 * lanes * (words - 1))
            into[first + words - 1] = one(address + beyond + lane * uint64(4))

    return load


def store_row(words: int, lanes: int, numbers: int, stored: int | None = None) -> Any:
    """Return a device function that stores a lane's part of a row as float32.

    ``words``, ``lanes`` and ``stored`` are as in ``load_row``. For each word of that row, the lane
    has ``numbers`` float32 to store: 1, or 2 if a word held two 16-bit numbers.
    """
    fours, has_two, has_one = words // 4, words & 2, words & 1
    inside = is_inside(words, lanes, stored)

    @device
    def store(address, lane, values):
        lane = uint64(lane)
        for piece in range(fours):
            to = address + uint64(16 * numbers) * (uint64(lanes * piece) + lane)
            for quarter in range(numbers):
                x, at = 4 * (numbers * piece + quarter), to + uint64(16 * quarter)
                if inside(4 * piece, 4, lane):
                    ptx.st_global_v4_f32(at, values[x], values[x + 1], values[x + 2], values[x + 3])
        if has_two and inside(4 * fours, 2, lane):
            x = 4 * numbers * fours
            to = address + uint64(4 * x * lanes) + uint64(8 * numbers) * lane
            for half in range(numbers):
                ptx.st_global_v2_f32(
                    to + uint64(8 * half), values[x + 2 * half], values[x + 2 * half + 1]
                )
        if has_one and inside(words - 1, 1, lane):
            x = numbers * (words - 1)
            to = address + uint64(4 * x * lanes) + uint64(4 * numbers) * lane
            for item in range(numbers):
                ptx.st_global_f32(to + uint64(4 * item), values[x + item])

    return store
