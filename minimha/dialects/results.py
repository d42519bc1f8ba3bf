"""Convert results to arrays of the caller's library, for the functions of all libraries."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from minimha.equations.arrays import like

Function = TypeVar("Function", bound=Callable[..., Any])


def like_argument(name: str) -> Callable[[Function], Function]:
    """Return a decorator for functions that return NumPy arrays, or tuples of them.

    The decorated function returns arrays of the library of its argument ``name``.
    """

    def decorated(function: Function) -> Function:
        place = list(signature(function).parameters).index(name)

        @wraps(function)
        def outer(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return _like(kwargs[name] if name in kwargs else args[place], result)

        return outer  # type: ignore[return-value]

    return decorated


def _like(given: Any, result: Any) -> Any:
    if isinstance(result, tuple):  # a named tuple has _make
        return getattr(result, "_make", tuple)([_like(given, part) for part in result])
    return like(given, result) if isinstance(result, np.ndarray) else result
