"""Tokens in stripes, every n-th one: with a causal mask all chunks then have equal work.

Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from minimha.equations.arguments import integer


def striped(x: Any, count: int, axis: int = -2) -> Any:
    """``x`` with its tokens in ``count`` stripes, one chunk each: 0, count, 2 · count, …; 1, …

    Parameters
    ----------
    x : dask array, or array_like
    count : int
        The number of stripes, at most the number of tokens.
    axis : int, default -2
        The axis of the tokens: of queries, keys and values the last but one. A mask has two.

    Returns
    -------
    dask array of the shape of ``x``

    Examples
    --------
    >>> striped(np.arange(7)[:, None], 3).compute().ravel()
    array([0, 3, 6, 1, 4, 2, 5])
    """
    x = da.asarray(x)
    order = _order(x.shape[axis], count)
    sizes = tuple(len(range(n, len(order), count)) for n in range(count))
    return da.take(x, order, axis=axis).rechunk({axis % x.ndim: sizes})


def unstriped(x: Any, count: int, axis: int = -2) -> Any:
    """``x``, whose tokens are in ``count`` stripes, with its tokens in their order.

    Parameters
    ----------
    x : dask array, or array_like
    count : int
    axis : int, default -2
        Of a log-sum-exp, -1.

    Returns
    -------
    dask array of the shape of ``x``

    Examples
    --------
    >>> unstriped(striped(np.arange(7)[:, None], 3), 3).compute().ravel()
    array([0, 1, 2, 3, 4, 5, 6])
    """
    x = da.asarray(x)
    return da.take(x, np.argsort(_order(x.shape[axis], count)), axis=axis)


def _order(length: int, count: int) -> Any:
    """The tokens in the order of the stripes."""
    if integer("count", count) > max(1, length):
        raise ValueError(f"count is {count}: expected at most {length}, the number of tokens")
    return np.concatenate([np.arange(n, length, count) for n in range(count)])
