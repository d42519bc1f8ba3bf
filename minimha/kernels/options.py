"""Convert options of a problem, except masks and functions, to arguments of kernels."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem

NO_MASK = np.empty((0, 0, 0, 0), bool)
NO_BIAS = {
    np.dtype(real): np.empty((0, 0, 0, 0), real) for real in (np.float32, np.float64)
}  # fmt: skip
NO_SCALE = {real: np.empty((0, 0, 0), real) for real in NO_BIAS}


class Options(NamedTuple):
    """The options of a problem, except mask, bias and functions, as arguments of a kernel.

    Without a soft cap ``softcap`` is 0, without sinks ``sinks`` is all -inf, and without ALiBi
    ``slopes`` is empty. 16-bit numbers are float16 unless ``is_bfloat16``; for 8-bit keys and
    values, ``is_bfloat16`` tells the dtype of the caller's q.
    """

    left: int
    right: int
    q_offset: Any
    kv_lengths: Any
    slopes: Any
    sinks: Any
    scale: float
    softcap: float
    is_bfloat16: bool


def options(problem: Problem) -> Options:
    """Return the ``Options`` of ``problem``, with neutral values for absent options."""
    compute, H = problem.compute, problem.q.shape[1]
    slopes, sinks = problem.alibi_slopes, problem.sinks
    return Options(
        left=problem.left, right=problem.right,
        q_offset=problem.q_offset, kv_lengths=problem.kv_lengths,
        slopes=_neutral(0, compute) if slopes is None else np.array(slopes),
        sinks=_neutral(H, compute) if sinks is None else np.array(sinks),
        scale=problem.scale, softcap=problem.softcap or 0.0,
        is_bfloat16=problem.dtype.itemsize == 2 and problem.dtype.name == "bfloat16",
    )  # fmt: skip


@cache
def _neutral(number: int, compute: np.dtype[Any]) -> NDArray[Any]:
    """Return ``number`` items of -inf, cached because a new array costs 1 µs per call."""
    return np.full(number, -np.inf, compute)
