"""Results as arrays of the library whose arrays came, for every dialect."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import numpy as np

from minimha.equations.arrays import like

P = ParamSpec("P")
R = TypeVar("R")


def like_argument(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function whose results are of the library of its argument ``name``.

    The function itself returns NumPy's arrays, one or a tuple of them.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        place = list(signature(function).parameters).index(name)

        @wraps(function)
        def outer(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            found: R = _like(kwargs[name] if name in kwargs else args[place], result)
            return found

        return outer

    return decorated


def _like(given: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        parts = [_like(given, part) for part in result]
        return getattr(result, "_make", tuple)(parts)
    return like(given, result) if isinstance(result, np.ndarray) else result
