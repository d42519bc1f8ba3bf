"""Define taps, functions that receive and may replace every intermediate of the equations.

The equations continue with the value that ``tap(name, value)`` returns. So a line with a tap still
reads as mathematics. ``no_tap`` records nothing, ``explain.Trace`` records everything. A value is
an array or, before a step that calls a caller's function, that function's source code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Tap = Callable[[str, Any], Any]
Steps = Mapping[str, ArrayLike] | None  # new values of steps, by name


def no_tap(name: str, value: Any) -> Any:
    """Return ``value`` unchanged, and record nothing."""
    return value


def safe_tap(tap: Tap) -> Tap:
    """Return a tap that passes read-only arrays to ``tap`` and checks what ``tap`` returns.

    Raises TypeError if ``tap`` is not callable. The returned tap raises ValueError if a result
    differs from its value in shape or dtype.

    >>> safe_tap(lambda name, value: value[0])("scores", np.zeros((1, 2)))
    Traceback (most recent call last):
    ValueError: tap's 'scores' has shape (2,) and float64: expected shape (1, 2) and float64
    """
    if tap is no_tap:
        return no_tap
    if not callable(tap):
        raise TypeError(f"tap is {tap!r}: expected a callable tap(name, value) that returns value")

    def receive(name: str, value: Any) -> Any:
        shown = value = _as_array(value)
        if isinstance(value, np.ndarray):
            shown = value.view()
            shown.flags.writeable = False
        found = tap(name, shown)
        return value if found is shown else _like("tap", name, found, value)

    return receive


@contextmanager
def replacing(tap: Tap, replace: Steps) -> Iterator[Tap]:
    """Yield a tap that replaces the steps named in ``replace`` by new values, then calls ``tap``.

    Raises TypeError unless ``replace`` is a dict or None. Raises ValueError if a new value does not
    fit its step, and at the end of the ``with`` block if no step had a name in ``replace``.
    """
    if not isinstance(replace, Mapping | None):
        raise TypeError(f"replace is {replace!r}: expected a dict from names of steps to arrays")
    tap, given, names = safe_tap(tap), replace or {}, set()

    def receive(name: str, value: Any) -> Any:
        names.add(name)
        if name in given:
            value = _as_array(value)
            other: Any = given[name]
            with suppress(TypeError, ValueError):  # ``_like`` refuses it
                other = np.asarray(other).astype(value.dtype, casting="same_kind")
                if other.squeeze().shape == value.squeeze().shape:
                    other = other.reshape(value.shape)
            value = _like("replace", name, other, value)
        return tap(name, value)

    yield receive if given else tap
    for name in set(given) - names:
        from difflib import get_close_matches  # here: only an error needs it

        near = get_close_matches(str(name), names, 1, 0)[0]
        raise ValueError(f"replace has {name!r}, but there is no such step (nearest: {near})")


def _as_array(value: Any) -> Any:
    """Return ``value``, but a matrix that is still as its file stores it as an array."""
    is_plain = isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__array__")
    return value if is_plain else np.asarray(value)


def _like(whose: str, name: str, found: Any, value: Any) -> Any:
    """Return ``found``; raise ValueError unless its shape and dtype are those of ``value``."""
    if isinstance(value, np.generic) and isinstance(found, (int, float, np.number)):
        return value.dtype.type(found)
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if isinstance(value, str) or (shape, dtype) == (value.shape, value.dtype):
        return found
    got = f"has shape {shape} and {dtype}" if dtype else f"is a {type(found).__name__}"
    raise ValueError(f"{whose}'s {name!r} {got}: expected shape {value.shape} and {value.dtype}")


def renamed(tap: Tap, **names: str | None) -> Tap:
    """Return a tap that renames steps by ``old="new"``, and drops steps renamed to None.

    For example, a layer renames an equation's result, which is only an intermediate of the layer.

    >>> names = []
    >>> tap = renamed(lambda name, value: names.append(name) or value, output="head_output", q=None)
    >>> tap("q", 2.0), tap("output", 1.0), tap("weights", 0.5), names
    (2.0, 1.0, 0.5, ['head_output', 'weights'])
    """
    if tap is no_tap:  # not wrapped: a backend that cannot be tapped accepts only ``no_tap``
        return no_tap

    def receive(name: str, value: Any) -> Any:
        new = names.get(name, name)
        return value if new is None else tap(new, value)

    return receive


def staged(tap: Tap, stage: str) -> Tap:
    """Return a tap that adds ``[stage]`` to every name, so that several layers can share a trace.

    >>> names = []
    >>> staged(lambda name, value: names.append(name) or value, "decoder")("q", 2.0), names
    (2.0, ['q[decoder]'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{name}[{stage}]", value)


def prefixed(tap: Tap, prefix: str) -> Tap:
    """Return a tap that puts ``prefix`` before every name, for an equation that is used twice.

    >>> names = []
    >>> tap = prefixed(lambda name, value: names.append(name) or value, "final_")
    >>> tap("normed", 2.0), names
    (2.0, ['final_normed'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{prefix}{name}", value)
