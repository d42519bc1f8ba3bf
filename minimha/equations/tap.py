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


def renamed(tap: Tap, **names: str | None) -> Tap:
    """Return a tap that hears ``old`` as ``new`` for each ``old="new"``, not at all for None.

    A layer uses it where the result of one equation is a middle step of its own.

    >>> heard = []
    >>> tap = renamed(lambda name, value: heard.append(name) or value, output="head_output", q=None)
    >>> tap("q", 2.0), tap("output", 1.0), tap("weights", 0.5), heard
    (2.0, 1.0, 0.5, ['head_output', 'weights'])
    """
    if tap is no_tap:  # nobody listens to the new names either, which lets any backend compute
        return no_tap

    def hear(name: str, value: Any) -> Any:
        new = names.get(name, name)
        return value if new is None else tap(new, value)

    return hear


def staged(tap: Tap, stage: str) -> Tap:
    """Return a tap that hears every name as ``name[stage]``, so that layers may follow each other.

    >>> heard = []
    >>> staged(lambda name, value: heard.append(name) or value, "decoder")("q", 2.0), heard
    (2.0, ['q[decoder]'])
    """
    return no_tap if tap is no_tap else lambda name, value: tap(f"{name}[{stage}]", value)
