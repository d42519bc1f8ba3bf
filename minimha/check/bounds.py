"""Compute bounds on the rounding error of attention, and test an output against them.

The bounds of ``check`` are larger. There, all roundings of a sum may have the same sign and, in 16
bits, scores may be rounded too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.check.calling import DTYPES, numbers_of
from minimha.check.prepared import SMALLEST, UNITS, Prepared
from minimha.check.wrong_attention import deviate
from minimha.equations.arguments import choice
from minimha.equations.arrays import bfloat16

Array = NDArray[Any]

OPTIONS = (
    "is_causal", "q_offset", "window_size", "kv_lengths", "attn_mask", "attn_bias", "alibi_slopes",
    "scale", "softcap", "sinks",
)  # fmt: skip


def error_bound(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: str | None = None, **options: Any
) -> tuple[Array, Array]:
    """Return bounds on the rounding error of a correct kernel that accumulates in float32.

    The kernel may round P, its exponentials or weights, once to the inputs' dtype. References that
    round the scores too, or every step, may exceed these bounds.

    Parameters
    ----------
    q, k, v : array_like
        As in ``minimha.attention``. They are rounded to ``dtype`` first.
    dtype : {"float32", "float16", "bfloat16"}, optional
        The dtype of the kernel's inputs and output. Default is the dtype of ``q`` if it is one of
        these, else float32.
    **options
        Options of ``minimha.attention``, except functions and packed or paged sequences.

    Returns
    -------
    output_bound : ndarray of the output's shape, float64
        The largest difference from exact attention; NaN where exact attention is NaN.
    lse_bound : ndarray of shape (B, H, Lq), float64
        The largest difference of a float32 log-sum-exp from the exact log-sum-exp.

    Raises
    ------
    TypeError, ValueError
        As in ``minimha.attention``, and ValueError for an option that is not supported here.

    Notes
    -----
    Let ε be 2⁻²⁴ and u half an eps of ``dtype``. The roundings of a sum are taken as independent.
    Then a sum of n terms has an error of at most s(n) = ε (2√n + 8) times the sum of magnitudes.
    This is six standard deviations if all terms are equal. The worst case is n ε. No kernel shows
    it on data of random signs, but a loop that adds thousands of equal numbers may.

    1. A score has an error δ ≤ s(D) |scale| Σ |q_d k_d| + 2ε |score|; a cap, a bias and ALiBi add a
       few ε of their magnitudes. δ multiplies a weight w by at most 1 + r, r = exp(δ) - 1.
    2. Weights sum to 1, so this moves the output o by Σ w r |v - o|. This is at most
       √(Σ w r · Σ w r (v - o)²), by Cauchy and Schwarz, over 1 - Σ w r.
    3. exp, its sum, the division and W V add (2ε + s(Lk)) Σ w |v|, and the output's float32 2ε |o|.
    4. In 16 bits, P and the output are rounded once: u (Σ w |v| + |o|), and the smallest number
       of ``dtype`` for numbers below its normal range.
    5. A kernel may compute weights as exp(s - L), with a log-sum-exp L that was rounded to float32.
       Its error of 2ε |L| is common to a row's weights, and moves the output by 2ε |L| |o|. With
       scores of 1000 this is the largest term.
    6. The log-sum-exp L has an error of Σ w r + ε (|L| + 1) + s(Lk).

    Memory is about 100 bytes for each of B · H · Lq · Lk scores.

    References
    ----------
    Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, for s(n).

    Examples
    --------
    >>> x = np.linspace(-1, 1, 12).reshape(3, 4)
    >>> for dtype in ("float32", "float16", "bfloat16"):
    ...     print(f"{error_bound(x, x, x, dtype=dtype)[0].max():.0e}")
    1e-06
    7e-04
    6e-03
    """
    _, bound, _, lse_bound = _bounded(q, k, v, dtype, options)
    return bound, lse_bound


def assert_close(
    output: Any, q: Any, k: Any, v: Any, *, lse: Any = None, dtype: str | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Raise AssertionError if an output differs from attention by more than rounding explains.

    Parameters
    ----------
    output : array_like
        A kernel's output for q, k and v. It must have NaN and infinities exactly where exact
        attention has them.
    q, k, v, **options
        As in ``error_bound``.
    lse : array_like of shape (B, H, Lq), optional
        The kernel's log-sum-exp; by default it is not compared.
    dtype : {"float32", "float16", "bfloat16"}, optional
        The dtype of the kernel's inputs. Default is the dtype of ``output`` if it is one of these,
        else float32.

    Raises
    ------
    AssertionError
        A shape differs, or a number exceeds ``error_bound``. The message has the worst number.
    TypeError, ValueError
        As in ``error_bound``.

    Examples
    --------
    >>> from minimha.api import attention
    >>> x = np.eye(3, dtype=np.float32)
    >>> assert_close(attention(x, x, x), x, x, x)
    >>> assert_close(attention(x, x, x, scale=1), x, x, x)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: 9 of 9 numbers of the output exceed the bound; the worst is at index ...
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    got = numbers_of(output)
    expected, bound, log_sum, lse_bound = _bounded(q, k, v, dtype or _dtype_of(got), options)
    _compare("output", got, expected, bound)
    if lse is not None:
        _compare("log-sum-exp", numbers_of(lse), log_sum, lse_bound)


def _bounded(
    q: Any, k: Any, v: Any, dtype: str | None, options: dict[str, Any]
) -> tuple[Array, Array, Array, Array]:
    """Return output, its bound, log-sum-exp and its bound, with as many axes as q has."""
    for name in options:
        choice("an option", name, OPTIONS)
    given = {name: numbers_of(a) for name, a in (("q", q), ("k", k), ("v", v))}
    dtype = choice("dtype", dtype or _dtype_of(given["q"]), DTYPES)
    narrow = bfloat16("dtype") if dtype == "bfloat16" else np.dtype(dtype)
    arguments = options | {n: a.astype(narrow).astype(np.float32) for n, a in given.items()}
    x = Prepared(arguments, is_likely=True)
    right = deviate(x, {})
    bound = np.where(np.isnan(right.output), np.nan, right.bound)
    if dtype != "float32":
        sizes = deviate(Prepared(arguments | {"v": abs(arguments["v"])}), {}).output
        values = abs(x.v[:, x.heads])
        total = np.where(np.isfinite(values), values, 0).sum(-2, keepdims=True)
        bound = bound + UNITS[dtype] * (sizes + abs(right.output)) + SMALLEST[dtype] * (1 + total)
    first = (0,) * (4 - x.problem.rank)
    return right.output[first], bound[first], right.lse[first], right.lse_bound[first]


def _dtype_of(a: Array) -> str:
    return a.dtype.name if a.dtype.name in DTYPES else "float32"


def _compare(what: str, got: Array, expected: Array, bound: Array) -> None:
    __tracebackhide__ = True
    if got.shape != expected.shape:
        raise AssertionError(f"the {what} has shape {got.shape}: expected {expected.shape}")
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = abs(got - expected) / bound
    excess = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, excess)
    excess = np.where(np.isnan(excess), np.inf, excess)
    if (excess <= 1).all():
        return
    worst = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{int((excess > 1).sum())} of {excess.size} numbers of the {what} exceed the bound; the "
        f"worst is at index {worst}: got {got[worst]:.6g}, expected {expected[worst]:.6g} within "
        f"{bound[worst]:.2g}"
    )
