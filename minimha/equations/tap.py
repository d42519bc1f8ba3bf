"""A tap is an identity function that may record what passes through it.

The equations pass every intermediate through ``tap(name, value)`` and continue with the value that
it returns, so that a line with a tap still reads as mathematics. ``no_tap`` records nothing;
``explain.Trace`` records everything. A value is an array, or text: the source of a caller's
function, which is heard before the step that it makes.

A caller's tap goes through ``safe_tap``: it reads arrays and cannot write to them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Tap = Callable[[str, Any], Any]
Steps = Mapping[str, ArrayLike] | None  # other values of steps, by name


def no_tap(name: str, value: Any) -> Any:
    """Return ``value`` unchanged."""
    return value


def safe_tap(tap: Tap) -> Tap:
    """Return a tap that passes read-only arrays to ``tap`` and checks what it returns.

    >>> safe_tap(lambda name, value: value[0])("scores", np.zeros((1, 2)))
    Traceback (most recent call last):
    ValueError: tap's 'scores' has shape (2,) and float64: expected shape (1, 2) and float64
    """
    if tap is no_tap:
        return no_tap
    if not callable(tap):
        raise TypeError(f"tap is {tap!r}: expected a callable tap(name, value) that returns value")

    def hear(name: str, value: Any) -> Any:
        shown = value
        if isinstance(value, np.ndarray):
            shown = value.view()
            shown.flags.writeable = False
        found = tap(name, shown)
        return value if found is shown else _like("tap", name, found, value)

    return hear


@contextmanager
def replacing(tap: Tap, replace: Steps) -> Iterator[Tap]:
    """Yield ``tap``, checked, after one that gives steps other values, as a ``Trace`` shows them.

    A TypeError or ValueError names what does not fit its step and, at the end, what was no step.
    """
    if not isinstance(replace, Mapping | None):
        raise TypeError(f"replace is {replace!r}: expected a dict from names of steps to arrays")
    tap, given, names = safe_tap(tap), replace or {}, set()

    def hear(name: str, value: Any) -> Any:
        names.add(name)
        if name in given:
            other: Any = given[name]
            with suppress(TypeError, ValueError):  # no array, or one of another kind
                other = np.asarray(other).astype(value.dtype, casting="same_kind")
                if other.squeeze().shape == value.squeeze().shape:
                    other = other.reshape(value.shape)
            value = _like("replace", name, other, value)
        return tap(name, value)

    yield hear if given else tap
    for name in set(given) - names:
        from difflib import get_close_matches  # here: nothing else of a start needs it

        near = get_close_matches(str(name), names, 1, 0)[0]
        raise ValueError(f"replace has {name!r}, but there is no such step (nearest: {near})")


def _like(whose: str, name: str, found: Any, value: Any) -> Any:
    """``found``, if it has the shape and dtype of ``value``, or is a number as ``value`` is."""
    if isinstance(value, np.generic) and isinstance(found, (int, float, np.number)):
        return value.dtype.type(found)
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if isinstance(value, str) or (shape, dtype) == (value.shape, value.dtype):
        return found
    got = f"has shape {shape} and {dtype}" if dtype else f"is a {type(found).__name__}"
    raise ValueError(f"{whose}'s {name!r} {got}: expected shape {value.shape} and {value.dtype}")


def renamed(tap: Tap, **names: str | None) -> Tap:
    """Return a tap to which ``old`` is ``new`` for each ``old="new"``; None drops the name.

    A layer uses it where the result of one equation is one of its own intermediates.

    >>> heard = []
    >>> tap = renamed(lambda name, value: heard.append(name) or value, output="head_output", q=None)
    >>> tap("q", 2.0), tap("output", 1.0), tap("weights", 0.5), heard
    (2.0, 1.0, 0.5, ['head_output', 'weights'])
    """
    if tap is no_tap:  # returned as it is, since a backend that cannot be tapped accepts only this
        return no_tap

    def hear(name: str, value: Any) -> Any:
        new = names.get(name, name)
        return value if new is None else tap(new, value)

    return hear


def staged(tap: Tap, stage: str) -> Tap:
    """Return a tap to which every name is ``name[stage]``, so that several layers can share it.

    >>> heard = []
    >>> staged(lambda name, value: heard.append(name) or value, "decoder")("q", 2.0), heard
    (2.0, ['q[decoder]'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{name}[{stage}]", value)


def prefixed(tap: Tap, prefix: str) -> Tap:
    """Return a tap to which every name begins with ``prefix``, for an equation used twice.

    >>> heard = []
    >>> tap = prefixed(lambda name, value: heard.append(name) or value, "final_")
    >>> tap("normed", 2.0), heard
    (2.0, ['final_normed'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{prefix}{name}", value)
