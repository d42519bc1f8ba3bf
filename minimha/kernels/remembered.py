"""Plans of earlier calls: an equal call need not check and plan again.

A plan's key is everything that the plan depends on. Plans for the CPU are remembered if the options
are numbers, functions and starts of packed sequences; for a GPU also with lists of numbers and
small arrays, by value. Types are part of the key: True is no window's width although True == 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from minimha.equations.block_mask import BlockMask
from minimha.equations.functions import Placed, Same

MOST = 1024  # plans
NUMBERS = frozenset((type(None), bool, int, float))

_plans: dict[Any, Any] = {}


def key_of(
    q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, backend: Any, *options: Any
) -> tuple[Any, ...] | None:
    """The key of a plan for these arguments, or None if it cannot be remembered.

    The functions are ``taken``. A plan serves all numbers and arrays that ``score_mod`` captures,
    but hidden blocks depend on those of ``mask_mod``.
    """
    if not (type(q) is type(k) is type(v) is np.ndarray and type(backend) is str):
        return None
    if not (q.ndim == k.ndim == v.ndim == 4):
        return None
    if not (q.flags.aligned and k.flags.aligned and v.flags.aligned):
        return None
    kinds = tuple(map(type, options))
    if not NUMBERS.issuperset(kinds):
        return None
    return (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        backend, options, kinds,
        None if score_mod is None else (score_mod.corner, score_mod.reading.key),
        None if mask_mod is None else _computed_by(mask_mod),
    )  # fmt: skip


def _computed_by(mask_mod: Placed) -> Hashable:
    """Equal for functions that compute the same; a ``BlockMask`` is also compared by identity."""
    function, corner, reading = mask_mod
    is_block_mask = isinstance(function, BlockMask)
    return Same(function) if is_block_mask else None, corner, reading and reading.contents


def by_value(options: Iterable[Any]) -> tuple[Any, ...] | None:
    """Types and values of options, or None if an option needs full validation.

    >>> by_value([True, [1, 2.5]])
    (<class 'bool'>, True, <class 'list'>, (<class 'int'>, <class 'float'>), (1, 2.5))
    """
    found: list[Any] = []
    for option in options:
        kind = type(option)
        if kind in NUMBERS:
            found += (kind, option)
        elif kind in (list, tuple):
            kinds = tuple(map(type, option))
            if not NUMBERS.issuperset(kinds):
                return None
            found += (kind, kinds, tuple(option))
        elif kind is np.ndarray and option.dtype.kind in "biuf":
            found += (kind, option.dtype, option.shape, option.tobytes())
        else:
            return None
    return tuple(found)


def recall(key: tuple[Any, ...] | None) -> Any:
    """The plan for a key, or None."""
    return _plans.get(key)


def remember(key: tuple[Any, ...], plan: Any) -> None:
    """Keep a plan; if there are too many, forget all others."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan


def forget() -> None:
    """Forget all plans, because what they depend on has changed."""
    _plans.clear()
