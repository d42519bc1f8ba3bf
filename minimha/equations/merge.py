"""Merge attention results for separate sets of keys into attention over all these keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, cast, common_dtype
from minimha.equations.arrays import DLPackArray, Given, like

Pair = tuple[Any, Any]
Lse = TypeVar("Lse", bound=DLPackArray)


@overload
def merge(parts: Iterable[tuple[Given, Lse]]) -> tuple[Given, Lse]: ...
@overload
def merge(parts: Iterable[tuple[ArrayLike, ArrayLike]]) -> Pair: ...
def merge(parts: Iterable[Pair]) -> Pair:
    """Merge attention over different keys: O = Σ_p exp(L_p - L) O_p with L = log Σ_p exp L_p.

    Each part p is the result of ``attention(…, return_lse=True)`` for some of the keys. Up to
    rounding, the order of parts does not matter, and a merged part can be merged again. Sums are in
    float64, and each merge rounds once.

    Give ``sinks`` to one part only, because each part adds its sinks to the log-sum-exp. All other
    options are the same for every part, except that key positions and key axes start at the part's
    first key. For the keys from ``start`` to ``stop`` use ``q_offset - start``, ``kv_lengths -
    start`` (clipped to 0 and ``stop - start``), ``attn_mask[..., start:stop]`` and ``key_indices -
    start`` (-1 for keys of other parts). A ``score_mod`` or ``mask_mod`` written for all keys needs
    ``i + start`` and ``j + start``. If keys are in files, ``attention`` itself splits and merges.

    Axes: ``B`` batch, ``H`` query heads, ``Lq`` queries, ``Dv`` value width.

    Parameters
    ----------
    parts : iterable of pair (output, lse)
        At least one. ``output`` is array_like of shape (B, H, Lq, Dv), (H, Lq, Dv) or (Lq, Dv)
        and floating dtype. ``lse`` has that shape without Dv. All outputs have the same shape.

    Returns
    -------
    output : array of the shape of each given output, in their common dtype
        An ndarray, or an array of the first output's library. Queries that see no key get 0.
    lse : array of shape (B, H, Lq), the common dtype of the log-sum-exps
        -inf for a query that sees no key in any part.

    Raises
    ------
    TypeError, ValueError
        There are no parts, a part is not a pair, or shapes differ or dtypes have no common dtype.

    References
    ----------
    Dao, "FlashAttention-2", 2023, section 2.3.1; Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018, which proves that merging is associative.

    Examples
    --------
    >>> from minimha import attention
    >>> q, k, v = [[1, 0]], [[1, 0], [1, 1], [0, 1]], [[1, 0], [0, 2], [3, 1]]
    >>> first = attention(q, k[:2], v[:2], return_lse=True)
    >>> second = attention(q, k[2:], v[2:], return_lse=True)
    >>> merge([first, second])[0].round(6), attention(q, k, v).round(6)
    (array([[0.99444, 1.     ]]), array([[0.99444, 1.     ]]))
    """
    parts = list(parts)
    if not parts:
        raise ValueError("parts is empty: expected at least one pair (output, lse)")
    outputs, lses = zip(*(_pair(n, part) for n, part in enumerate(parts)), strict=True)
    for n, output in enumerate(outputs):
        if output.shape != outputs[0].shape:
            raise ValueError(
                f"parts[{n}] has an output of shape {output.shape}, but parts[0] one of shape "
                f"{outputs[0].shape}: parts must have the same queries, and only other keys"
            )
    dtypes = [
        common_dtype({f"the {kind} of parts[{n}]": x.dtype for n, x in enumerate(arrays)})
        for kind, arrays in (("output", outputs), ("lse", lses))
    ]
    O, L = _merged(outputs, lses)
    output, lse = cast(O, dtypes[0]), cast(L, dtypes[1])
    return like(parts[0][0], output), like(parts[0][0], lse)


def _merged(
    outputs: tuple[NDArray[Any], ...], lses: tuple[NDArray[Any], ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return O and L in float64; a part whose queries see no key adds nothing, not even 0 · NaN."""
    with np.errstate(all="ignore"):
        top: NDArray[np.float64] = np.maximum.reduce(lses).astype(np.float64)
        top = np.where(np.isneginf(top), 0, top)
        shares = [np.exp(lse.astype(np.float64) - top) for lse in lses]
        total = np.add.reduce(shares)
        O = np.zeros(outputs[0].shape)
        for output, lse, share in zip(outputs, lses, shares, strict=True):
            weight = (share / np.where(total == 0, 1, total))[..., None]
            O += np.where(np.isneginf(lse)[..., None], 0, weight * output)
        return O, top + np.log(total)


def _pair(n: int, part: Any) -> Pair:
    """Return output and log-sum-exp of ``part``, the ``n``-th, as arrays; raise if invalid."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise TypeError(
            f"parts[{n}] is of type {type(part).__name__}: expected a pair (output, lse), which "
            f"attention(…, return_lse=True) returns"
        )
    output = as_floating(f"the output of parts[{n}]", part[0])
    lse = as_floating(f"the lse of parts[{n}]", part[1])
    if output.ndim < 2 or lse.shape != output.shape[:-1]:
        raise ValueError(
            f"parts[{n}] has an output of shape {output.shape} and an lse of shape {lse.shape}: "
            f"expected (…, Lq, Dv) and (…, Lq)"
        )
    return output, lse
