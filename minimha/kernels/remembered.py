"""Cache the plans of calls: a plan is a kernel with checked and packed arguments.

A plan's key is everything that the plan depends on. Plans for the CPU are stored if all options are
numbers, functions or starts of packed sequences. Keys of plans for a GPU may also contain lists of
numbers and small arrays, by value. Keys include types: True equals 1, but only 1 is a valid window
width.
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
    """Return the key of the plan for these arguments, or None if their plan cannot be stored.

    Functions must be ``Placed`` or None. One plan serves all values of the numbers and arrays that
    ``score_mod`` captures. Values that ``mask_mod`` captures are part of the key, because hidden
    blocks depend on them.
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
    """Return a key that is equal only for masks that hide the same keys."""
    function, corner, reading = mask_mod
    is_block_mask = isinstance(function, BlockMask)
    return Same(function) if is_block_mask else None, corner, reading and reading.contents


def by_value(options: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the types and values of ``options`` as a key, or None if a type is unsupported.

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


def by_layout(arrays: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return what a plan depends on in ``arrays`` that each call brings, or None if unsupported.

    They may be ndarrays of floats, or numbers.

    >>> by_layout([np.ones((2, 3), np.float32), 0.5])
    ((dtype('float32'), (2, 3), (12, 4)), <class 'float'>)
    """
    found: list[Any] = []
    for x in arrays:
        if type(x) is np.ndarray and x.dtype.kind == "f":
            found.append((x.dtype, x.shape, x.strides))
        elif type(x) is float:
            found.append(float)
        else:
            return None
    return tuple(found)


def recall(key: tuple[Any, ...] | None) -> Any:
    """Return the plan stored under ``key``, or None if there is none."""
    return _plans.get(key)


def remember(key: tuple[Any, ...], plan: Any) -> None:
    """Store ``plan`` under ``key``, after deleting all plans if there are ``MOST`` already."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan


def forget() -> None:
    """Delete all stored plans."""
    _plans.clear()
