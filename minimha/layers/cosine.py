"""Cosine attention: scores are the cosines of the angles between queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.equations.arguments import as_floating, cast, flag
from minimha.equations.arrays import like
from minimha.equations.option_types import Masks, Positions
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, no_tap, renamed, safe_tap

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CosineOptions(Masks, Positions, total=False):
    """Types of the options that ``cosine_attention`` passes to ``minimha.attention``."""

    attn_bias: ArrayLike | None
    softcap: float | None


def cosine_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    return_lse: bool = False,
    tap: Tap = no_tap,
    **options: Unpack[CosineOptions],
) -> Any:
    """Return cosine attention softmax(scale · cos) V, with cos_ij = q_i · k_j / (|q_i| |k_j|).

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width. As in ``minimha.attention``, arrays may be 2-D or 3-D.

    The cosine of a zero vector and any other vector is defined as 0. Libraries divide x by
    max(|x|, ε), not by |x|, which reduces the cosines of vectors shorter than ε. In torch, ε is
    1e-12 in ``normalize`` and 1e-8 in ``cosine_similarity``.

    A softmax over plain cosines is nearly flat. With the default scale of 1, weights of a row
    differ by a factor of at most e² ≈ 7.4. Models therefore learn a scale. Swin Transformer V2
    learns 1/τ for each head, with τ ≥ 0.01. Henry et al. learn one scale per layer, initially
    log2(L² - L) for sequences of L tokens.

    Parameters
    ----------
    q : array_like of shape (B, H, Lq, D)
        Integers are computed in float64; float16 and bfloat16 are computed in float32.
    k : array_like of shape (B, Hkv, Lk, D)
        Query head h reads key/value head h // (H // Hkv).
    v : array_like of shape (B, Hkv, Lk, Dv)
    scale : float or array_like of shape (H,), default 1.0
        The factor of the cosines, finite: one number, or one per head.
    return_lse : bool, default False
        Whether to return the log-sum-exp of the scores too.
    tap : callable ``tap(name, value) -> value``, optional
        Receives q, k, q_unit, k_unit, cosine (unless each head has a scale) and scaled_cosine,
        then the intermediates of the attention.
    **options
        Further options of ``minimha.attention``: masks, biases, windows, sinks, backend.

    Returns
    -------
    output : array of shape (B, H, Lq, Dv), the inputs' common dtype, float64 for integers
    lse : array of shape (B, H, Lq), float32 or float64, if ``return_lse``

    Raises
    ------
    TypeError, ValueError
        Shapes or dtypes do not fit each other, or ``scale`` is not finite.
    BackendUnavailable
        As in ``minimha.attention``.

    References
    ----------
    Henry et al., "Query-Key Normalization for Transformers", 2020; Liu et al., "Swin Transformer
    V2", 2022, section 3.3.

    Examples
    --------
    The output does not depend on the length of the query vector.

    >>> k, v = [[1, 0], [0, 5]], [[1], [3]]
    >>> cosine_attention([[1, 0], [10, 0]], k, v, scale=2).round(4)
    array([[1.2384],
           [1.2384]])
    """
    problem, tap = Problem.of(q, k, v), safe_tap(tap)
    factors = _factors(scale, problem)
    Q, K, V = (x.astype(problem.compute, copy=False) for x in (problem.q, problem.k, problem.v))
    q_unit, k_unit = (tap(f"{name}_unit", _unit(tap(name, x))) for name, x in (("q", Q), ("k", K)))
    if factors.ndim:  # attention takes one scale for all heads
        q_unit, scale, names = q_unit * factors[:, None, None], 1.0, {"scores": "scaled_cosine"}
    else:
        scale, names = float(factors), {"scores": "cosine", "scaled": "scaled_cosine"}
    units = (x[(0,) * (4 - problem.rank)] for x in (q_unit, k_unit, V))
    inner = renamed(tap, q=None, k=None, **names)
    result = attention(*units, scale=scale, return_lse=return_lse, tap=inner, **options)
    if not flag("return_lse", return_lse):
        return like(q, cast(result, problem.dtype))
    output, lse = result
    return like(q, cast(output, problem.dtype)), like(q, lse)


def _unit(x: NDArray[Any]) -> NDArray[Any]:
    """Return x / |x| for each vector, 0 for a vector of zeros."""
    with np.errstate(all="ignore"):  # dividing by the largest entry first avoids overflow
        largest = abs(x).max(axis=-1, keepdims=True)
        x = x / np.where(largest == 0, x.dtype.type(1), largest)
        length = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
        return np.asarray(x / np.where(length == 0, x.dtype.type(1), length))


def _factors(scale: ArrayLike, problem: Problem) -> NDArray[Any]:
    """Return ``scale`` in the compute dtype: one number, or one per query head."""
    array, H = as_floating("scale", scale), problem.q.shape[1]
    if array.shape not in ((), (H,)):
        raise ValueError(
            f"scale has shape {array.shape}: expected one number, or (H,) = ({H},), one per "
            f"query head"
        )
    with np.errstate(over="ignore"):
        factors = np.asarray(array.astype(problem.compute))
    if not np.isfinite(factors).all():
        raise ValueError(f"scale is {scale!r}: expected finite numbers, in {problem.compute} too")
    return factors
