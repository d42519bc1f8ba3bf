"""Compute attention by FlashAttention-2's Algorithm 1 in NumPy, as a model for the kernels.

Dao, "FlashAttention-2", 2023. The full matrix of scores is never stored. Each block of B_r queries
visits the keys and values, B_c at a time. Each row has a maximum m, a sum l of exponentials and an
output O, all relative to the maximum so far. A larger maximum rescales the sums:

    exp(s - m_new) = exp(s - m_old) · exp(m_old - m_new)

O is a sum, which may overflow although the mean of the values does not. If O could overflow, P and
the l that divides O are multiplied by the same small power of 2, which changes no digit.

Batch and heads are leading axes throughout. Line 10 as printed in the paper multiplies O by the
*inverse* of diag(exp(m_old - m_new)). That is a slip: line 9 rescales l without the inverse, and O
and l must be rescaled by the same factor.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.dense import scores, weighted_sum
from minimha.equations.problem import Problem, factor_against_overflow
from minimha.equations.tap import Tap, no_tap, staged
from minimha.equations.visibility import key_range

BLOCK_ROWS = 128  # default B_r
BLOCK_COLUMNS = 128  # default B_c


def unsupported(problem: Problem) -> str | None:
    """Return None, because this backend supports every problem."""
    return None


def forward(
    problem: Problem, tap: Tap = no_tap, *, B_r: int = BLOCK_ROWS, B_c: int = BLOCK_COLUMNS
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O and log-sum-exp L, computed in blocks of ``B_r`` queries and ``B_c`` keys.

    For a block of queries, a block of keys is skipped if position and length hide all its keys from
    all the queries, in every batch entry. ``attn_mask`` and ``attn_bias`` do not skip blocks.

    O has shape (B, H, Lq, Dv), L (B, H, Lq), and both have the compute dtype. ``tap`` receives
    ``Q[i=0]``, and for each block of keys ``K[i=0,j=1]``, ``V[…]``, ``S[…]``, ``m[…]``, ``P[…]``,
    ``factor[…]`` (which multiplies the previous l and O), ``l[…]`` and ``O[…]``.
    """
    for name, size in (("B_r", B_r), ("B_c", B_c)):
        if size < 1:
            raise ValueError(f"{name} is {size}: a block holds at least one row")
    if problem.sequences is not None:
        O, L = problem.by_sequence(
            lambda part, s: forward(part, staged(tap, f"sequence {s}"), B_r=B_r, B_c=B_c)
        )
        return tap("output", O), L
    problem = problem.widened()
    B, H, Lq, _ = problem.q.shape
    O = np.empty((B, H, Lq, problem.v.shape[3]), problem.compute)
    L = np.empty((B, H, Lq), problem.compute)
    with np.errstate(all="ignore"):
        shrink = factor_against_overflow(
            problem.v.astype(problem.compute, copy=False), problem.k.shape[2]
        )
        for i, start in enumerate(range(0, Lq, B_r)):  # line 3
            rows = slice(start, min(start + B_r, Lq))
            O[..., rows, :], L[..., rows] = _row_block(problem, i, rows, B_c, shrink, tap)
    return tap("output", O), L


def _row_block(
    problem: Problem, i: int, rows: slice, B_c: int, shrink: float, tap: Tap
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return O and L of block ``i`` of queries: lines 4 to 15 of Algorithm 1."""
    compute = problem.compute
    Q_i = tap(f"Q[i={i}]", problem.q[..., rows, :].astype(compute, copy=False))  # line 4
    m = np.full((*Q_i.shape[:3], 1), -np.inf, compute)  # line 5
    if problem.sinks is not None:  # a sink acts like a first key of value 0
        m = np.maximum(m, problem.sinks[:, None, None])
    l, O = (~np.isneginf(m)).astype(compute), np.zeros((*m.shape[:3], problem.v.shape[3]), compute)
    for j, keys in visible_blocks(problem, rows, B_c):  # line 6
        at = f"[i={i},j={j}]"
        K_j = tap(f"K{at}", problem.k[..., keys, :].astype(compute, copy=False))  # line 7
        V_j = tap(f"V{at}", problem.v[..., keys, :].astype(compute, copy=False))
        S, visible = scores(problem, Q_i, K_j, rows, keys)  # line 8, with the options
        S = tap(f"S{at}", S)
        m_old, m = m, tap(f"m{at}", np.maximum(m, S.max(axis=-1, keepdims=True)))  # line 9
        shift = np.where(np.isneginf(m), S.dtype.type(0), m)
        P = tap(f"P{at}", np.exp(S - shift))
        factor = tap(f"factor{at}", np.exp(m_old - shift))
        l = tap(f"l{at}", factor * l + P.sum(axis=-1, keepdims=True))
        O = tap(f"O{at}", factor * O + weighted_sum(shrink * P, V_j, visible))  # line 10
    O = O / np.where(l == 0, l.dtype.type(1), shrink * l)  # line 12
    return O, (m + np.log(l))[..., 0]  # line 13


def visible_blocks(problem: Problem, rows: slice, B_c: int) -> list[tuple[int, slice]]:
    """Return (j, slice of keys) for each block of ``B_c`` keys that a query in ``rows`` may see."""
    ranges = [
        key_range(rows.start, rows.stop, int(offset), problem.left, problem.right, int(length))
        for offset, length in zip(problem.q_offset, problem.kv_lengths, strict=True)
    ]
    Lk = problem.k.shape[2]
    blocks = [(j, slice(start, min(start + B_c, Lk))) for j, start in enumerate(range(0, Lk, B_c))]
    return [
        (j, keys)
        for j, keys in blocks
        if any(max(first, keys.start) < min(end, keys.stop) for first, end in ranges)
    ]
