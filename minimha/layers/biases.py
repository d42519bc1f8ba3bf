"""Position biases, which depend on the distance between query and key and are added to scores."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, as_integers, flag, integer, name_of


def alibi_slopes(num_heads: int) -> NDArray[np.float64]:
    """Return ALiBi's slopes 2^(-8/n), 2^(-16/n), …, 2^(-8) for n heads.

    If n is not a power of two, the result begins with the slopes for p heads, where p is the next
    smaller power. The first n - p of every second slope for 2p heads follow, as in the authors'
    code.

    Parameters
    ----------
    num_heads : int
        The number n of heads.

    Returns
    -------
    ndarray of shape (n,), float64
        An argument for ``attention(..., alibi_slopes=...)``.

    Raises
    ------
    TypeError, ValueError
        ``num_heads`` is not an integer of at least 1.

    References
    ----------
    Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", 2022, section 3.

    Examples
    --------
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    n = integer("num_heads", num_heads)
    p = 1 << (n.bit_length() - 1)
    between = _geometric(2 * p)[::2]
    return np.array(_geometric(p) + between[: n - p])


def _geometric(n: int) -> list[float]:
    """Return ALiBi's slopes of n heads, where n is a power of two."""
    return [2 ** (-8 * (h + 1) / n) for h in range(n)]


def t5_buckets(
    q_positions: ArrayLike,
    k_positions: ArrayLike,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> NDArray[np.int64]:
    """Return T5's bucket number for the distance from each query to each key.

    Each near distance has its own bucket. Far distances share buckets of equal width on a
    logarithmic scale. The last bucket includes all distances from ``max_distance`` (max) on. For a
    distance d, N buckets per direction and e = N // 2:

        bucket(d) = d                                                        d < e
                    min(e + floor((N - e) · ln(d / e) / ln(max / e)), N - 1)   d ≥ e

    Bucket borders are computed in exact integers, without rounding errors.

    Parameters
    ----------
    q_positions : array_like of shape (Lq,), int
    k_positions : array_like of shape (Lk,), int
    num_buckets : int, default 32
        At least 2; even and at least 4 if ``bidirectional``.
    max_distance : int, default 128
        An integer above e.
    bidirectional : bool, default True
        If True, keys after the query have the second half of the buckets. If False, they are in
        bucket 0, and a causal mask should hide them.

    Returns
    -------
    ndarray of shape (Lq, Lk), int64
        From 0 to num_buckets - 1.

    Raises
    ------
    TypeError, ValueError
        A count is out of range, or positions are not a 1-D array of integers.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, section 2.1; the formula is in the authors' code.

    Examples
    --------
    >>> t5_buckets([100], [0, 84, 93, 99, 100, 101, 107])
    array([[15, 10,  7,  1,  0, 17, 23]])
    """
    q, k = _positions("q_positions", q_positions), _positions("k_positions", k_positions)
    N = _one_way(num_buckets, flag("bidirectional", bidirectional))
    borders = _borders(N, integer("max_distance", max_distance, N // 2 + 1))
    relative = k - q[:, None]
    distance = abs(relative) if bidirectional else np.maximum(-relative, 0)
    buckets = np.searchsorted(borders, distance, side="right")
    return np.asarray(buckets + (N * (relative > 0) if bidirectional else 0), np.int64)


def t5_bias(
    table: ArrayLike,
    q_positions: ArrayLike,
    k_positions: ArrayLike,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> NDArray[Any]:
    """Return T5's learned bias for each head h, query and key: ``table[t5_buckets(…), h]``.

    Parameters
    ----------
    table : array_like of shape (num_buckets, H)
        T5's ``relative_attention_bias.weight``.
    q_positions, k_positions : array_like of shape (Lq,) and (Lk,), int
        As in ``t5_buckets``.
    max_distance : int, default 128
        As in ``t5_buckets``.
    bidirectional : bool, default True
        As in ``t5_buckets``.

    Returns
    -------
    ndarray of shape (H, Lq, Lk), the table's dtype, float64 for integers
        T5's attention is ``attention(..., attn_bias=bias[None], scale=1)``.

    Raises
    ------
    TypeError, ValueError
        ``table`` is not 2-D, or an argument is invalid for ``t5_buckets``.

    References
    ----------
    Raffel et al., 2020, section 2.1.

    Examples
    --------
    >>> t5_bias([[0, 0], [1, -1], [0, 0], [2, -2]], [0, 1], [0, 1])
    array([[[ 0.,  2.],
            [ 1.,  0.]],
           [[ 0., -2.],
            [-1.,  0.]]])
    """
    table = as_floating("table", table)
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"{name_of('table')} has shape {table.shape}: expected (num_buckets, H)")
    buckets = t5_buckets(q_positions, k_positions, table.shape[0], max_distance, bidirectional)
    return np.moveaxis(table[buckets], -1, 0)


def _one_way(num_buckets: int, bidirectional: bool) -> int:
    num_buckets = integer("num_buckets", num_buckets, 4 if bidirectional else 2)
    if not bidirectional:
        return num_buckets
    if num_buckets % 2:
        raise ValueError(
            f"num_buckets is {num_buckets}: expected an even number, one half for each direction"
        )
    return num_buckets // 2


def _borders(N: int, max_distance: int) -> list[int]:
    """Return the smallest distance of each bucket from 1 to N - 1."""
    e, far = N // 2, N - N // 2

    def first(m: int) -> int:
        # (N - e) · ln(d / e) / ln(max / e) ≥ m is d^far · e^m ≥ max^m · e^far, in integers exactly.
        bound = max_distance**m * e**far
        return bisect_left(range(max_distance), bound, key=lambda d: d**far * e**m)

    return [*range(1, e + 1), *(first(m) for m in range(1, far))]


def _positions(name: str, value: ArrayLike) -> NDArray[np.int64]:
    array = as_integers(name, value)
    if array.ndim != 1:
        raise ValueError(f"{name_of(name)} has shape {array.shape}: expected one row of positions")
    return array
