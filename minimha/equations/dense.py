"""Compute attention as papers write it, with whole matrices and one line per equation.

This is equation 1 of Vaswani et al., "Attention Is All You Need", 2017. Options of later models are
applied in this order:

    scores → scaled → capped → biased → modified → masked
           → row_max, exponentials, row_sum → weights → output

Arithmetic follows IEEE 754 without warnings. A NaN or infinity in a key or value changes only the
rows of queries that see that key.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.functions import modified, source
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, no_tap, staged


def unsupported(problem: Problem) -> str | None:
    """Return None, because this backend supports every problem."""
    return None


def forward(problem: Problem, tap: Tap = no_tap) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O = softmax(S) V and log-sum-exp L = log Σ exp S, with the final scores S.

    O has shape (B, H, Lq, Dv), L (B, H, Lq), both in the compute dtype. ``tap`` receives every
    intermediate array. For packed or paged sequences, names end with the sequence, such as
    ``weights[sequence 0]``.
    """
    if problem.sequences is not None:
        O, L = problem.by_sequence(lambda part, s: forward(part, staged(tap, f"sequence {s}")))
        return tap("output", O), L
    problem = problem.widened()
    with np.errstate(all="ignore"):
        Q, K, V = (
            tap(name, array.astype(problem.compute, copy=False))
            for name, array in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        )
        rows, keys = slice(0, Q.shape[2]), slice(0, K.shape[2])
        S, visible = scores(problem, Q, K, rows, keys, tap)
        A, L = softmax(S, problem.sinks, tap)
        O = tap("output", weighted_sum(tap("weights", A), V, visible))
    return O, L


def scores(
    problem: Problem, Q: NDArray[Any], K: NDArray[Any], rows: slice, keys: slice, tap: Tap = no_tap
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the final scores of queries ``rows`` and keys ``keys``, and the mask of visible pairs.

    ``Q`` and ``K`` contain only these queries and keys. The mask is None if no option hides a key.
    """
    S = tap("scores", product_in_groups(Q, K.swapaxes(-1, -2)))
    if problem.scale != 1:
        S = tap("scaled", S * S.dtype.type(problem.scale))
    if problem.softcap is not None:
        cap = tap("softcap", S.dtype.type(problem.softcap))
        S = tap("capped", cap * np.tanh(S / cap))
    if problem.attn_bias is not None or problem.alibi_slopes is not None:
        S = tap("biased", S + tap("bias", bias(problem, rows, keys, tap)))
    visible = problem.visible(rows, keys, tap) if problem.hides else None
    if tap is not no_tap:
        for name, function in problem.functions.items():
            tap(name, source(function))
    if problem.score_mod is not None:
        S = tap("modified", modified(problem.score_mod, S, problem.indices(rows, keys)))
        kept = np.asarray(~np.isneginf(S))
        if not kept.all():
            visible = kept if visible is None else visible & kept
    if visible is None:
        return S, None
    return tap("masked", np.where(visible, S, S.dtype.type(-np.inf))), visible


def bias(problem: Problem, rows: slice, keys: slice, tap: Tap = no_tap) -> NDArray[Any]:
    """Return ``attn_bias`` plus ALiBi's -slope · |i + q_offset - j|, of shape (B, H, rows, keys).

    ``tap`` receives slopes and distances, and attn_bias if both are given. ALiBi: Press et al.,
    "Train Short, Test Long", 2022.
    """
    total: NDArray[Any] = np.zeros((1, 1, 1, 1), problem.compute)
    if problem.attn_bias is not None:
        total = total + problem.attn_bias[..., rows, keys]
    if problem.alibi_slopes is not None:
        if problem.attn_bias is not None:
            total = tap("attn_bias", total)
        i = np.arange(rows.start, rows.stop)[:, None]
        j = np.arange(keys.start, keys.stop)
        distance = abs(i + problem.q_offset[:, None, None, None] - j).astype(problem.compute)
        slopes, distance = tap("slopes", problem.alibi_slopes), tap("distances", distance)
        total = total - slopes[:, None, None] * distance
    return total


def softmax(
    S: NDArray[Any], sinks: NDArray[Any] | None = None, tap: Tap = no_tap
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weights exp(S) / Σ exp(S) of each row, and the row's log-sum-exp.

    The row's maximum is subtracted first, which prevents overflow and changes no weight. If a query
    sees no key, its scores are -inf, its weights 0 and its log-sum-exp -inf. ``sinks`` (H,) are
    extra scores that count in the sum and the log-sum-exp, but get no weight.
    """
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        m = np.maximum(m, tap("sinks", sinks)[:, None, None])
    m = tap("row_max", np.where(np.isneginf(m), S.dtype.type(0), m))
    P = tap("exponentials", np.exp(S - m))
    total = P.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - m)
    total = tap("row_sum", total)
    L = (m + np.log(total))[..., 0]
    return P / np.where(total == 0, S.dtype.type(1), total), L


def weighted_sum(
    P: NDArray[Any], V: NDArray[Any], visible: NDArray[np.bool_] | None
) -> NDArray[Any]:
    """Return the product P V, to which hidden keys add nothing, even if their values are NaN.

    ``visible`` is the mask of visible pairs, or None if all pairs are visible. Values with NaN or
    infinity are multiplied separately, only for the queries that see their keys.
    """
    nonfinite = ~np.isfinite(V).all(axis=-1)
    if visible is None or not nonfinite.any():
        return product_in_groups(P, V)
    O = product_in_groups(P, np.where(nonfinite[..., None], V.dtype.type(0), V))
    H = P.shape[1]
    nonfinite = for_query_heads(H, nonfinite)
    for j in np.flatnonzero((nonfinite & visible.any(axis=-2)).any(axis=(0, 1))):
        rows = visible[..., j] & nonfinite[..., j, None]
        V_j = for_query_heads(H, V[..., j, None, :])
        O += np.where(rows[..., None], P[..., j, None] * V_j, V.dtype.type(0))
    return O


def product_in_groups(X: NDArray[Any], Y: NDArray[Any]) -> NDArray[Any]:
    """Return X @ Y per head, where head h of X is multiplied by head h // (H // Hkv) of Y.

    The heads of X that share a head of Y become an extra axis, along which Y is broadcast without
    a copy. Ainslie et al., "GQA", 2023.
    """
    (B, H, rows, _), (_, Hkv, inner, columns) = X.shape, Y.shape
    group = H // Hkv
    if group == 1:
        return np.asarray(X @ Y)
    groups = X.reshape(B, Hkv, group, rows, inner)
    return np.asarray(groups @ Y[:, :, None]).reshape(B, H, rows, columns)


def for_query_heads(H: int, X: NDArray[Any]) -> NDArray[Any]:
    """Repeat each key/value head of X (B, Hkv, …) H // Hkv times, to shape (B, H, …)."""
    group = H // X.shape[1]
    return X if group == 1 else X.repeat(group, axis=1)
