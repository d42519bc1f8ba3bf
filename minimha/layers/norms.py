"""Normalisations: layer norm and division by the root mean square, row by row.

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
Norm = Callable[[Array, Tap], Array]  # called with x (..., L, E) and a tap


def layer_norm(x: Array, gain: Array, bias: Array, epsilon: float, tap: Tap = no_tap) -> Array:
    """Return g · (x - μ) / √(σ² + ε) + b, with mean μ and variance σ² of each row of ``x``.

    ``x`` is (..., E), g is ``gain`` and b ``bias``. ``tap`` receives norm_gain, norm_bias, mean,
    variance and normed. Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 4.

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
    """Return g · x / √(mean(x²) + ε) for each row of ``x`` (..., E), where g is ``gain``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. ``tap`` receives
    norm_gain, mean_square and normed.

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


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """A norm that divides by the root mean square, with a gain of shape (E,)."""

    gain: Array
    epsilon: float

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return x (..., L, E), normalised."""
        return rms_norm(x, self.gain, self.epsilon, tap)
