"""Plans of problems that were seen before, so that the next call need not check and plan again.

A plan is found by everything that it depends on. Only plain arrays and options that are numbers are
remembered; types count, because True is no width of a window although it equals 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MOST = 1024  # plans
NUMBERS = (type(None), bool, int, float)

_plans: dict[Any, Any] = {}


def key_of(q: Any, k: Any, v: Any, backend: Any, *options: Any) -> tuple[Any, ...] | None:
    """What a plan for these arguments is found by, or None if there can be none."""
    for array in (q, k, v):
        if type(array) is not np.ndarray or array.ndim != 4 or not array.flags.aligned:
            return None
    if type(backend) is not str:
        return None
    kinds = tuple(map(type, options))
    for kind in kinds:
        if kind not in NUMBERS:
            return None
    return (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        backend, options, kinds,
    )  # fmt: skip


def recall(key: tuple[Any, ...] | None) -> Any:
    """The plan for a key, or None."""
    return _plans.get(key)


def remember(key: tuple[Any, ...], plan: Any) -> None:
    """Keep a plan; when there are too many, all others are forgotten."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = plan


def forget() -> None:
    """Forget all plans, because what they depend on has changed."""
    _plans.clear()
