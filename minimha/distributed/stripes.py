"""Reorder tokens into stripes of every n-th token, so that causal chunks have equal work.

Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from minimha.equations.arguments import integer


def striped(x: Any, count: int, axis: int = -2) -> Any:
    """Reorder tokens into ``count`` stripes, one chunk each; stripe s has tokens s, s + count, ….

    Parameters
    ----------
    x : dask array, or array_like
    count : int
        The number of stripes. Raises ValueError if it exceeds the number of tokens.
    axis : int, default -2
        The axis of tokens, which is -2 for queries, keys and values. A mask has two such axes.

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
    """Return ``x`` with its tokens in the original order, the inverse of ``striped``.

    Parameters
    ----------
    x : dask array, or array_like
    count : int
        The number of stripes.
    axis : int, default -2
        The axis of tokens, which is -1 for a log-sum-exp.

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
    if integer("count", count) > max(1, length):
        raise ValueError(f"count is {count}: expected at most {length}, the number of tokens")
    return np.concatenate([np.arange(n, length, count) for n in range(count)])
