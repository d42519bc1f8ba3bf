"""A tap is an identity that someone may listen to.

The equations pass every intermediate through ``tap(name, value)`` and go on with what comes back,
so a line with a tap still reads as mathematics. ``no_tap`` listens to nothing; ``explain.Trace``
keeps what passes.
"""

from collections.abc import Callable
from typing import Any

Tap = Callable[[str, Any], Any]


def no_tap(name: str, value: Any) -> Any:
    """Return ``value`` as it came; nobody listens."""
    return value


def renamed(tap: Tap, **names: str) -> Tap:
    """Return a tap that hears ``old`` as ``new`` for each ``old="new"``.

    A layer uses it where the result of one equation is a middle step of its own.

    >>> heard = []
    >>> tap = renamed(lambda name, value: heard.append(name) or value, output="head_output")
    >>> tap("output", 1.0), tap("weights", 0.5), heard
    (1.0, 0.5, ['head_output', 'weights'])
    """
    return lambda name, value: tap(names.get(name, name), value)
