"""A caller's ``score_mod`` and ``mask_mod`` as device functions, which a kernel is compiled with.

Rungs 1 and 2 take them; a kernel of its own is compiled for each. Unlike on the CPU, indices of
captured arrays are not checked, and nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from minimha.equations.block_mask import BlockMask
from minimha.equations.functions import allowed, contents, modified
from minimha.equations.problem import Problem
from minimha.kernels.cuda.parts import device


class DeviceFunction:
    """A function that is compiled when it is first needed; equal to others of equal contents."""

    def __init__(self, function: Any) -> None:
        function = function.mask_mod if isinstance(function, BlockMask) else function
        self.function = getattr(function, "py_func", function)  # of numba's dispatchers
        self.contents = contents(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceFunction) and self.contents == other.contents

    def __hash__(self) -> int:
        return hash(self.contents)

    @cached_property
    def compiled(self) -> Any:
        """What a kernel calls."""
        return device(self.function)


def device_functions(problem: Problem) -> tuple[DeviceFunction | None, DeviceFunction | None]:
    """``score_mod`` and ``mask_mod`` of ``problem``, called once to see what they return."""
    score_mod, mask_mod = problem.score_mod, problem.mask_mod
    one, shape = (np.zeros((1, 1, 1, 1), np.int64),) * 4, (1, 1, 1, 1)
    if score_mod is not None:
        modified(score_mod, np.zeros(shape, problem.compute), one)
    if mask_mod is not None:
        allowed(mask_mod, one, shape)
    return _device(score_mod), _device(mask_mod)


def _device(function: Callable[..., Any] | None) -> DeviceFunction | None:
    return None if function is None else DeviceFunction(function)


def refused(problem: Problem) -> str | None:
    """Why a rung that takes no functions does not support ``problem``, or None."""
    if problem.score_mod is None and problem.mask_mod is None:
        return None
    return "score_mod and mask_mod are compiled into rungs 1 and 2 alone"
