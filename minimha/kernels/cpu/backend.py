"""The backend "cpu": for each problem the fastest rung of the ladder."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu import rung4_parallel, rung5_decode
from minimha.kernels.ladder import FEW_QUERIES


def unsupported(problem: Problem) -> str | None:
    """Return why this backend does not support ``problem``: it supports all, so None."""
    return None


def forward(problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.dense.forward``.

    float32 and float64 are read in place if their last axis is contiguous; so are float16 and
    bfloat16, which are widened to float32 one block at a time. The first call for a dtype compiles
    for some seconds, once per machine.
    """
    if problem.q.shape[2] <= FEW_QUERIES:
        return rung5_decode.forward(problem)
    return rung4_parallel.forward(problem)
