"""Choose the backend of "auto": "dense" at first, "cpu" once preparing its kernels is worth it.

The CPU kernels are fastest at every size once they are compiled. But importing numba and loading
kernels takes half a second, and compiling them some seconds. So "dense" computes until its calls
have taken that long. So a toy problem never waits, and a series of problems takes at most twice
the shortest possible time.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from minimha.equations.problem import Problem
from minimha.kernels.forks import imported

LOG = logging.getLogger("minimha")
BACKEND = "minimha.kernels.cpu.backend"
LOADING, COMPILING = 0.5, 10.0  # seconds until a kernel is ready, from disk and from its source
DENSE_RATE = 5e9  # products per second, about, of the dense backend
DENSE_MEMORY = 1 << 30  # bytes of scores; for more, the kernels are compiled at once

_spent = 0.0  # seconds that "auto" has spent in the dense backend
_broken = False
_warned: set[str] = set()  # reasons why functions could not be compiled


def choose(problem: Problem) -> str:
    """Return the backend for ``problem``: "cpu" or "dense"."""
    D, Dv = problem.q.shape[3], problem.v.shape[3]
    scores = problem.num_pairs * problem.compute.itemsize
    seconds = problem.num_pairs * (D + Dv) / DENSE_RATE
    backend = worthwhile(BACKEND, problem, seconds, is_large=scores >= DENSE_MEMORY)
    return "dense" if backend is None else _supporting(backend, problem)


def worthwhile(
    name: str, problem: Any, seconds: float, *, is_large: bool = False
) -> ModuleType | None:
    """Return the module ``name`` if its kernel is worth preparing for ``problem``, or else None.

    NumPy takes about ``seconds``, and too much memory if the problem ``is_large``.
    """
    if _broken:
        return None
    # A module that another thread is importing is in sys.modules too; importing it waits.
    loaded = _imported(name) if name in sys.modules else None
    if loaded and loaded.is_ready(problem):
        return loaded
    cost = _spent + seconds
    if cost < LOADING:
        return None
    backend = _imported(name)
    if backend is None:
        return None
    if cost < COMPILING and not is_large and not backend.is_stored(problem):
        return None
    return backend


def spent(seconds: float) -> None:
    """Add ``seconds`` to the time that the dense backend has taken for "auto"."""
    global _spent
    _spent += seconds


def give_up(error: Exception) -> None:
    """Stop using the CPU kernels, because compiling them raised ``error``."""
    global _broken
    _broken = True
    LOG.warning("minimha: the CPU kernels cannot run here, NumPy computes instead: %s", error)


def _supporting(backend: ModuleType, problem: Problem) -> str:
    """Return "cpu", or "dense" if a function of ``problem`` cannot be compiled."""
    reason = backend.unsupported(problem)
    if reason is None:
        return "cpu"
    if reason not in _warned:
        _warned.add(reason)
        LOG.warning("minimha: the CPU kernels are not used, NumPy computes instead: %s", reason)
    return "dense"


def _imported(name: str) -> ModuleType | None:
    try:
        module: ModuleType = imported(name)
        return module
    except Exception as error:  # a numba that is broken may raise anything
        give_up(error)
        return None
