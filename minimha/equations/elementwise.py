"""Replace torch functions and torch or JAX arrays in a caller's function by NumPy's.

NumPy's ``where`` and ``clip`` are replaced too, because numba cannot compile them for single
numbers. All replacements take NumPy arrays and single numbers. torch is not imported.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from minimha.equations.arrays import LIBRARIES, as_numpy, library_of

UFUNCS = (
    "abs", "absolute", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "square",
    "sin", "cos", "tan", "tanh", "floor", "ceil", "trunc", "sign", "minimum", "maximum", "isnan",
    "isinf", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not",
)  # fmt: skip
CONSTANTS = ("inf", "nan", "pi", "e")


def where(condition: Any, input: Any, other: Any) -> Any:
    """Return ``input`` where ``condition`` is true, else ``other``, like ``np.where``."""
    return np.where(condition, input, other)


def rsqrt(x: Any) -> Any:
    """Return 1 / sqrt(x), elementwise."""
    return 1 / np.sqrt(x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)), elementwise."""
    return 1 / (1 + np.exp(-x))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Clip ``x`` to the range from ``min`` to ``max``, where None means no limit."""
    if min is not None:
        x = np.maximum(x, min)
    if max is not None:
        x = np.minimum(x, max)
    return x


COMPOSED = (rsqrt, sigmoid, clamp)  # composed of functions that numba knows
KNOWN = {name: getattr(np, name) for name in (*UFUNCS, *CONSTANTS)}
KNOWN |= {x.__name__: x for x in (where, *COMPOSED)} | {"clip": clamp}


class Unknown(TypeError, AttributeError):  # noqa: N818  (it states a fact about a function)
    """Raised if a caller's function uses an attribute of torch that has no NumPy replacement."""


class Torch:
    """A replacement of the module torch whose functions take NumPy arrays."""

    def __getattr__(self, name: str) -> Any:
        try:
            return KNOWN[name]
        except KeyError:
            raise Unknown(
                f"torch.{name} is unknown to minimha: expected in a score_mod or mask_mod one of "
                f"{', '.join(KNOWN)}"
            ) from None


TORCH = Torch()


def substitute(name: str, value: Any) -> Any:
    """Return the NumPy replacement of a torch or JAX ``value``, or any other ``value`` unchanged.

    Raises TypeError for a torch function without replacement, or for an array that NumPy cannot
    read; the message names the array ``name``.
    """
    if isinstance(value, (int, float, np.ndarray)):
        return value
    if hasattr(value, "__dlpack__") and library_of(value) in LIBRARIES:
        return as_numpy(name, value)
    if isinstance(value, ModuleType):
        return TORCH if value.__name__.partition(".")[0] == "torch" else value
    called, home = (getattr(value, x, None) for x in ("__name__", "__module__"))
    if called and str(home).partition(".")[0] == "torch" and not isinstance(value, type):
        return getattr(TORCH, called)
    return where if value is np.where else clamp if value is np.clip else value
