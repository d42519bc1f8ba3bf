"""Normalisations: every token's row of numbers is brought to one size.

Axes: ``L`` tokens, ``E`` model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, no_tap, safe_tap

Array = NDArray[Any]
Norm = Callable[[Array, Tap], Array]  # of x (..., L, E), and a tap


def layer_norm(x: Array, gain: Array, bias: Array, epsilon: float, tap: Tap = no_tap) -> Array:
    """g · (x - μ) / √(σ² + ε) + b, with the mean μ and the variance σ² of each row.

    Parameters
    ----------
    x : ndarray of shape (..., L, E), float32 or float64
    gain, bias : ndarray of shape (E,), x's dtype
    epsilon : float
        Keeps a row of equal numbers from being divided by 0.
    tap : callable ``tap(name, value) -> value``, optional
        Receives norm_gain, norm_bias, mean, variance and normed.

    Returns
    -------
    ndarray of shape (..., L, E), x's dtype

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 4.

    Examples
    --------
    >>> layer_norm(np.array([[1.0, 3.0]]), np.array([1.0, 2.0]), np.array([0.0, 5.0]), epsilon=0)
    array([[-1.,  7.]])
    """
    tap = safe_tap(tap)
    gain, bias = tap("norm_gain", gain), tap("norm_bias", bias)
    mean = tap("mean", x.mean(axis=-1, keepdims=True))
    centred = x - mean
    variance = tap("variance", np.square(centred).mean(axis=-1, keepdims=True))
    root = np.sqrt(variance + x.dtype.type(epsilon))
    return np.asarray(tap("normed", gain * (centred / root) + bias))


def rms_norm(x: Array, gain: Array, epsilon: float, tap: Tap = no_tap) -> Array:
    """g · x / √(mean(x²) + ε), row by row.

    Parameters
    ----------
    x : ndarray of shape (..., L, E), float32 or float64
    gain : ndarray of shape (E,), x's dtype
    epsilon : float
        Keeps a row of zeros from being divided by 0.
    tap : callable ``tap(name, value) -> value``, optional
        Receives norm_gain, mean_square and normed.

    Returns
    -------
    ndarray of shape (..., L, E), x's dtype

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> rms_norm(np.array([[1.0, 7.0]]), np.array([1.0, 10.0]), epsilon=0)
    array([[ 0.2, 14. ]])
    """
    tap = safe_tap(tap)
    gain = tap("norm_gain", gain)
    mean_square = tap("mean_square", np.square(x).mean(axis=-1, keepdims=True))
    return np.asarray(tap("normed", gain * (x / np.sqrt(mean_square + x.dtype.type(epsilon)))))


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """``layer_norm`` with a gain and a bias (E,) of its own."""

    gain: Array
    bias: Array
    epsilon: float

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return x (..., L, E), normalised."""
        return layer_norm(x, self.gain, self.bias, self.epsilon, tap)


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """``rms_norm`` with a gain (E,) of its own."""

    gain: Array
    epsilon: float

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return x (..., L, E), normalised."""
        return rms_norm(x, self.gain, self.epsilon, tap)
