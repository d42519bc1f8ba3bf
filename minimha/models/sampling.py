"""Sample the next token from logits, with temperature, top-k and top-p.

Axes: ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, integer, name_of, number
from minimha.equations.dense import softmax


def probabilities(
    logits: ArrayLike,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> NDArray[np.float64]:
    """Return softmax(logits / temperature), cut to the most probable tokens and renormalised.

    Parameters
    ----------
    logits : array_like of shape (..., V)
    temperature : float, default 1.0
        Positive. Below 1 the distribution is sharper, above 1 flatter.
    top_k : int, optional
        Keep only the k most probable tokens; of equal ones, the first. 1 is greedy decoding.
        Default is all.
    top_p : float, optional
        From 0 to 1. After ``top_k``, keep the smallest set of most probable tokens whose
        probabilities sum to at least ``top_p``. Default is all.

    Returns
    -------
    ndarray of shape (..., V), float64

    Raises
    ------
    TypeError, ValueError
        A number is out of range, or logits are NaN or infinite.

    References
    ----------
    Fan, Lewis and Dauphin, "Hierarchical Neural Story Generation", 2018 (top-k); Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", 2020, section 3.1 (top-p, or nucleus).

    Examples
    --------
    >>> logits = np.log([0.5, 0.2, 0.3])
    >>> probabilities(logits).round(4)
    array([0.5, 0.2, 0.3])
    >>> probabilities(logits, top_k=2).round(4)
    array([0.625, 0.   , 0.375])
    >>> probabilities(logits, temperature=0.5).round(4)
    array([0.6579, 0.1053, 0.2368])
    """
    scores = as_floating("logits", logits).astype(np.float64)
    check(temperature, top_k, top_p)
    largest = scores.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise ValueError(f"{name_of('logits')} are NaN or infinite: they give no probabilities")
    below = scores - largest
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the largest -inf: greedy
        p, _ = softmax(below / temperature)
    if top_k is None and top_p is None:
        return np.asarray(p)
    order = np.argsort(-p, axis=-1, kind="stable")
    sorted_p = np.take_along_axis(p, order, axis=-1)
    if top_k is not None:
        sorted_p[..., top_k:] = 0
        sorted_p /= sorted_p.sum(axis=-1, keepdims=True)
    if top_p is not None:
        before = np.cumsum(sorted_p, axis=-1) - sorted_p
        before[..., 0] = -1.0  # the first is always kept
        sorted_p[before >= top_p] = 0
        sorted_p /= sorted_p.sum(axis=-1, keepdims=True)
    np.put_along_axis(p, order, sorted_p, axis=-1)
    return p


def check(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise TypeError or ValueError if an option of ``probabilities`` is invalid."""
    if number("temperature", temperature) <= 0:
        raise ValueError(
            f"{name_of('temperature')} is {temperature!r}: expected a positive number; the "
            f"likeliest token alone is {name_of('top_k')}=1"
        )
    if top_k is not None:
        integer("top_k", top_k)
    if top_p is not None and number("top_p", top_p, low=0) > 1:
        raise ValueError(f"{name_of('top_p')} is {top_p!r}: expected a number from 0 to 1")


def sampler(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
) -> Callable[[ArrayLike], int]:
    """Return a function that samples a token id from logits (V,).

    ``seed`` starts its random draws; the other options are those of ``probabilities``. Invalid
    options raise TypeError or ValueError here, not when the function is called.

    >>> sampler(top_k=1)([0.0, 3.0, 1.0])
    1
    """
    check(temperature, top_k, top_p)
    rng = np.random.default_rng(integer("seed", seed, low=0))

    def draw(logits: ArrayLike) -> int:
        p = probabilities(logits, temperature, top_k, top_p)
        return int(rng.choice(len(p), p=p))

    return draw


def generated(
    logits: Callable[[NDArray[np.int64]], NDArray[Any]], tokens: NDArray[np.int64], count: int,
    sample: Callable[[ArrayLike], int], ends: Container[int],
) -> Iterator[int]:  # fmt: skip
    """Yield up to ``count`` sampled tokens, and stop after a token in ``ends``.

    The first call of ``logits`` receives ``tokens`` (L,), and each later call the one new token. It
    returns logits (L, V), from whose last row ``sample`` draws the next token.
    """
    for _ in range(count):
        token = sample(logits(tokens)[-1])
        yield token
        if token in ends:
            return
        tokens = np.array([token])
