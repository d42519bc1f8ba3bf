"""The vector primitives of ``minimha.kernels.cpu.simd`` in plain numba: loops that can be read."""

import math

import numba


@numba.njit
def tile_product(A, a, a_row, a_k, B, b, b_k, C, c, c_row, factor, rows, num_lanes, depth, adds):
    """Twin of ``tile_product`` and, if ``adds``, ``tile_product_add``; flat arrays."""
    for r in range(rows):
        for lane in range(num_lanes):
            to = c + r * c_row + lane
            total = C[to] * factor[lane] if adds else C.dtype.type(0)
            for k in range(depth):
                total += A[a + r * a_row + k * a_k] * B[b + k * b_k + lane]
            C[to] = total if adds else total * factor[lane]


@numba.njit
def lanes_max(S, s, n, num_lanes, M):
    """Twin of ``lanes_max``."""
    for lane in range(num_lanes):
        M[lane] = -math.inf
        for row in range(n):
            if S[s + row * num_lanes + lane] > M[lane]:
                M[lane] = S[s + row * num_lanes + lane]


@numba.njit
def soft_cap(S, s, n, cap):
    """Twin of ``soft_cap``."""
    for x in range(s, s + n):
        S[x] = cap * math.tanh(S[x] / cap)


@numba.njit
def lanes_exp(S, s, n, num_lanes, scale, M, T):
    """Twin of ``lanes_exp``."""
    for lane in range(num_lanes):
        T[lane] = 0
        for row in range(n):
            x = s + row * num_lanes + lane
            S[x] = math.exp(scale * S[x] - M[lane])
            T[lane] += S[x]


@numba.njit
def dot_products(A, starts, a, B, b, b_row, C, c, c_row, rows, queries, depth, far):
    """Twin of ``dot_products``."""
    for g in range(queries):
        for r in range(rows):
            total = C.dtype.type(0)
            for k in range(depth):
                total += A[starts[a + r] + k] * B[b + g * b_row + k]
            C[c + g * c_row + r] = total


@numba.njit
def weighted_rows(P, p, p_row, V, starts, v, O, o, o_row, rows, columns, depth, far):
    """Twin of ``weighted_rows``."""
    for r in range(rows):
        for d in range(columns):
            for k in range(depth):
                O[o + r * o_row + d] += P[p + r * p_row + k] * V[starts[v + k] + d]


@numba.njit
def transpose(X, x, x_row, Y, y, y_row, rows, columns):
    """Twin of ``transpose``."""
    for r in range(rows):
        for c in range(columns):
            Y[y + c * y_row + r] = X[x + r * x_row + c]
