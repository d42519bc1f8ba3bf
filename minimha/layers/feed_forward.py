"""Feed-forward networks with one hidden layer, applied to each token separately.

Axes: ``L`` tokens, ``E`` model width, ``F`` width of the hidden layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.layers.linear import Joined, product

Array = NDArray[Any]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"]

_erf = np.frompyfunc(math.erf, 1, 1)


def relu(x: Array) -> Array:
    """Return the rectified linear unit, max(x, 0), of each number."""
    return np.asarray(np.maximum(x, x.dtype.type(0)))


def gelu(x: Array) -> Array:
    """Return x · Φ(x), with the standard normal distribution function Φ(x) = (1 + erf(x/√2)) / 2.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.

    >>> gelu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.1587,  0.    ,  0.8413])
    """
    erf = np.asarray(_erf(x / math.sqrt(2))).astype(x.dtype)
    return np.asarray(x * (0.5 + 0.5 * erf))


def gelu_tanh(x: Array) -> Array:
    """Return GPT-2's approximation of ``gelu``, x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    >>> gelu_tanh(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.1588,  0.    ,  0.8412])
    """
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def silu(x: Array) -> Array:
    """Return x · sigmoid(x) = x / (1 + exp(-x)), also called swish.

    Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units", 2017.

    >>> silu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, x / ∞ is 0
        y = np.asarray(np.exp(-x))
        y += 1
        return np.asarray(np.divide(x, y, out=y))


def quick_gelu(x: Array) -> Array:
    """Return x · sigmoid(1.702 x), a fast approximation of ``gelu``.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    >>> quick_gelu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.1542,  0.    ,  0.8458])
    """
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-1.702 * x)))


def relu_squared(x: Array) -> Array:
    """Return max(x, 0)² of each number (So et al., "Primer", 2021, section 4)."""
    return np.square(relu(x))


ACTIVATIONS = {
    "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "quick_gelu": quick_gelu,
    "relu_squared": relu_squared,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class FeedForward:
    """A feed-forward network: activation(x W_in + b_in) W_out + b_out for each token x.

    If ``W_gate`` is given, the output is (activation(x W_gate + b_gate) · (x W_in + b_in)) W_out +
    b_out.

    Parameters
    ----------
    W_in : ndarray of shape (E, F)
    W_out : ndarray of shape (F, E)
    activation : {"relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"}
    b_in, b_gate : ndarray of shape (F,), optional
    b_out : ndarray of shape (E,), optional
    W_gate : ndarray of shape (E, F), optional
        The gate's matrix: SwiGLU with silu, GEGLU with gelu. Default is no gate.
    limit : float, optional
        Clips as in gpt-oss, if there is a gate: the activation's input becomes min(x W_gate +
        b_gate, limit), and x W_in + b_in becomes 1 + clip(x W_in + b_in, -limit, limit). Default is
        neither clipping nor the added 1.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 2; Shazeer, "GLU Variants Improve
    Transformer", 2020, equation 6; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.

    Examples
    --------
    >>> I = np.eye(2)
    >>> FeedForward(I, I, "relu")(np.array([[-1.0, 2.0]]))
    array([[0., 2.]])
    """

    W_in: Array
    W_out: Array
    activation: Activation
    b_in: Array | None = None
    b_out: Array | None = None
    W_gate: Array | None = None
    b_gate: Array | None = None
    limit: float | None = None

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the output (..., L, E) for the tokens ``x`` (..., L, E).

        ``tap`` receives the weights, expanded, activated and feed_forward. With a gate it also
        receives gate_input and gated_product, and with a limit gate_limited and expanded_limited.
        """
        activate, tap = ACTIVATIONS[self.activation], safe_tap(tap)
        if self.W_gate is None:
            inner = tap("activated", activate(tap("expanded", self._linear("in", x, tap))))
        else:
            y_gate = y_in = None
            if tap is no_tap:
                y_gate, y_in = self.joined.products(x)
            gate = tap("gate_input", self._linear("gate", x, tap, y_gate))
            if self.limit is not None:
                gate = tap("gate_limited", np.minimum(gate, x.dtype.type(self.limit)))
            gate = tap("activated", activate(gate))
            factor = tap("expanded", self._linear("in", x, tap, y_in))
            if self.limit is not None:
                factor = np.clip(factor, -self.limit, self.limit) + x.dtype.type(1)
                factor = tap("expanded_limited", factor)
            inner = tap("gated_product", gate * factor)
        return np.asarray(tap("feed_forward", self._linear("out", inner, tap)))

    @cached_property
    def joined(self) -> Joined:
        """W_gate and W_in, which multiply the same rows."""
        assert self.W_gate is not None
        return Joined(self.W_gate, self.W_in)

    def _linear(self, name: str, x: Array, tap: Tap, y: Array | None = None) -> Array:
        """Return x W + b; ``y`` is x W, if it is computed already."""
        if y is None:
            y = product(x, tap(f"W_{name}", getattr(self, f"W_{name}")))
        bias = getattr(self, f"b_{name}")
        return np.asarray(y if bias is None else y + tap(f"b_{name}", bias))
