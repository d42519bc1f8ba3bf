"""Copy and multiply tiles in registers, for rung 3: 8 queries × up to 8 keys per thread."""

import math
from typing import Any, NamedTuple

from numba import cuda, float32

from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.rows import SHARED_F32, load_row


class RegisterTiles(NamedTuple):
    """The tile sizes of ``threads`` threads that multiply B_r queries by B_c keys.

    A warp is ``columns`` lanes wide and ``row_step`` = 32 / columns lanes high. A lane owns
    ``rows`` queries, one every ``row_step``, and ``keys`` keys, one every ``columns``. Of the
    ``width`` columns of O, a lane has ``own`` = width / columns. In shared memory, rows of Q_i and
    K_j are ``long_row`` numbers apart, and rows of P_ij are ``weights_row`` apart. P_ij overwrites
    K_j, and ``keys_or_weights`` is the size of the larger of the two, in numbers.
    """

    width: int
    columns: int
    rows: int
    B_c: int
    threads: int

    @property
    def B_r(self) -> int:
        return self.rows * self.threads // self.columns

    @property
    def row_step(self) -> int:
        return 32 // self.columns

    @property
    def keys(self) -> int:
        return self.B_c // self.columns

    @property
    def own(self) -> int:
        return self.width // self.columns

    @property
    def long_row(self) -> int:
        """Return the width plus 4, so that lanes reading 16 bytes of 8 rows use different banks."""
        return self.width + 4

    @property
    def weights_row(self) -> int:
        return self.B_c + self.columns

    @property
    def keys_or_weights(self) -> int:
        return max(self.B_c * self.long_row, self.B_r * self.weights_row)

    @property
    def bytes(self) -> int:
        """Return the bytes of shared memory for Q_i, for K_j or P_ij, and for V_j."""
        V_j = self.B_c * self.width
        return 4 * (self.B_r * self.long_row + self.keys_or_weights + V_j)


def copy_to_shared(tiles: RegisterTiles, rows: int, stored: int) -> Any:
    """Return a device function that copies ``rows`` rows to shared memory.

    It returns whether thread t copied a nonfinite number. Rows from row ``length`` on and columns
    from ``stored`` on become 0. ``X`` is the address of the first row, in rows ``row_stride``
    numbers apart. In shared memory, at ``to``, rows are ``row_length`` numbers apart.
    """
    is_whole = stored == tiles.width
    threads, chunks = tiles.threads, tiles.width // 4
    # The number of reads that a thread issues at once. With more, ptxas spills registers.
    most = 8 if tiles.width <= 64 else 4
    at_once = max(n for n in range(1, most + 1) if rows * chunks // threads % n == 0)

    @device
    def copy(t, to, row_length, X, row_stride, length):
        x = cuda.local.array((8, 4), float32)
        found = False
        for start in range(t, rows * chunks, at_once * threads):
            for n in range(at_once):
                place = start + n * threads
                row = place // chunks
                for e in range(4):
                    x[n, e] = 0
                if row < length and (is_whole or 4 * (place % chunks) < stored):
                    x[n, 0], x[n, 1], x[n, 2], x[n, 3] = ptx.ld_global_nc_v4_f32(
                        X + 4 * (row * row_stride) + 16 * (place % chunks)
                    )
            for n in range(at_once):
                place = start + n * threads
                for e in range(4):
                    found |= not abs(x[n, e]) < math.inf
                ptx.st_shared_v4_f32(
                    to + 4 * row_length * (place // chunks) + 16 * (place % chunks),
                    x[n, 0], x[n, 1], x[n, 2], x[n, 3],
                )  # fmt: skip
        return found

    return copy


def fma_keys(tiles: RegisterTiles) -> Any:
    """Return a device function that computes a thread's S_ij = Q_i K_jᵀ (Algorithm 1, line 8)."""
    width, columns, rows, keys = tiles.width, tiles.columns, tiles.rows, tiles.keys
    row_step, long_row = tiles.row_step, tiles.long_row

    @device
    def multiply_keys(Q_at, K_at, S):
        K = cuda.local.array((keys, 4), float32)
        for i in range(rows):
            for j in range(keys):
                S[i, j] = 0
        for d in range(0, width, 4):
            for j in range(keys):
                K[j, 0], K[j, 1], K[j, 2], K[j, 3] = ptx.ld_shared_v4_f32(
                    K_at + 4 * (d + j * columns * long_row)
                )
            for i in range(rows):
                q0, q1, q2, q3 = ptx.ld_shared_v4_f32(Q_at + 4 * (d + i * row_step * long_row))
                for j in range(keys):
                    S[i, j] += q0 * K[j, 0]
                    S[i, j] += q1 * K[j, 1]
                    S[i, j] += q2 * K[j, 2]
                    S[i, j] += q3 * K[j, 3]

    return multiply_keys


def fma_values(tiles: RegisterTiles) -> Any:
    """Return a device function that adds P_ij V_j to a thread's O_i (Algorithm 1, line 10)."""
    width, rows, B_c, own = tiles.width, tiles.rows, tiles.B_c, tiles.own
    row_step, weights_row = tiles.row_step, tiles.weights_row
    few = 2 if 64 < width < 240 else 4  # weights of a row at once: with more ptxas spills
    load = load_row(own, tiles.columns, SHARED_F32)

    @device
    def multiply_values(P_at, V_j, column, O):
        P = cuda.local.array((rows, 4), float32)
        V = cuda.local.array(own, float32)
        for j in range(0, B_c, few):
            for i in range(rows):
                at = P_at + 4 * (j + i * row_step * weights_row)
                if few == 4:
                    P[i, 0], P[i, 1], P[i, 2], P[i, 3] = ptx.ld_shared_v4_f32(at)
                else:
                    P[i, 0], P[i, 1] = ptx.ld_shared_v2_f32(at)
            for n in range(few):
                load(V_j + 4 * (j + n) * width, column, V, 0)
                for i in range(rows):
                    for x in range(own):
                        O[i, x] += P[i, n] * V[x]

    return multiply_values
