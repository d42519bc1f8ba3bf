"""Normalise each row: layer norm, and RMS norm, which divides by the root mean square.

Axes: ``L`` tokens, ``E`` model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, no_tap, safe_tap

Array = NDArray[Any]


def layer_norm(x: Array, gain: Array, bias: Array, epsilon: float, tap: Tap = no_tap) -> Array:
    """Return the layer norm g · (x - μ) / √(σ² + ε) + b, with mean μ and variance σ² of each row.

    Rows are those of ``x`` (..., E); g is ``gain``, b is ``bias`` and ε is ``epsilon``. ``tap``
    receives norm_gain, norm_bias, mean, variance and normed. Ba, Kiros and Hinton, "Layer
    Normalization", 2016, equation 4.

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
    """Return the RMS norm g · x / √(mean(x²) + ε) of each row of ``x`` (..., E).

    g is ``gain`` and ε is ``epsilon``. ``tap`` receives norm_gain, mean_square and normed. Zhang
    and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    >>> rms_norm(np.array([[1.0, 7.0]]), np.array([1.0, 10.0]), epsilon=0)
    array([[ 0.2, 14. ]])
    """
    tap = safe_tap(tap)
    gain = tap("norm_gain", gain)
    mean_square = tap("mean_square", np.square(x).mean(axis=-1, keepdims=True))
    return np.asarray(tap("normed", gain * (x / np.sqrt(mean_square + x.dtype.type(epsilon)))))


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """A layer norm with a gain and a bias of shape (E,)."""

    gain: Array
    bias: Array
    epsilon: float

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return x (..., L, E), normalised."""
        return layer_norm(x, self.gain, self.bias, self.epsilon, tap)

    def shares(self, x: Array, parts: Array) -> Array:
        """Return each part's share (n, E) in the normed row of x (E,).

        x is the sum of ``parts`` (n, E). Each share is g · (part - its mean) / √(σ² + ε), with the
        variance σ² of x. The shares sum to the normed row minus the bias.
        """
        centred = parts - parts.mean(axis=-1, keepdims=True)
        return np.asarray(self.gain * centred / np.sqrt(x.var() + self.epsilon))


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """An RMS norm with a gain of shape (E,)."""

    gain: Array
    epsilon: float

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return x (..., L, E), normalised."""
        return rms_norm(x, self.gain, self.epsilon, tap)

    def shares(self, x: Array, parts: Array) -> Array:
        """Return each part's share (n, E) in the normed row of x (E,).

        x is the sum of ``parts`` (n, E). Each share is g · part / √(mean(x²) + ε). The shares sum
        to the normed row.
        """
        return np.asarray(self.gain * parts / np.sqrt(np.square(x).mean() + self.epsilon))


Norm = LayerNorm | RMSNorm
