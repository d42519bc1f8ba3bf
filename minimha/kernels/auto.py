"""Choose the backend for "auto": "dense" first, then "cpu" when preparing its kernels pays off.

The CPU kernels are fastest at every size once they are compiled. But importing numba and loading
kernels takes half a second, and compiling them about ten seconds. Until calls with "dense" have
taken that long in all, "auto" uses "dense". A toy problem therefore never waits, and a series of
problems takes at most twice the shortest possible time. Where numba is imported already, a kernel
on disk is loaded sooner. A model's products, which use numba, also slow down beside threads of
BLAS, which spin after each product of "dense".
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
LOADING_MORE = 0.05  # seconds until it is read from disk, if numba is imported already
DENSE_RATE = 5e9  # products per second, about, of the dense backend
DENSE_MEMORY = 1 << 30  # bytes of scores; for more, the kernels are compiled at once

_spent: dict[str, float] = {}  # seconds that "auto" has spent without kernels, by kind of work
_broken = False
_warned: set[str] = set()  # reasons why functions could not be compiled


def choose(problem: Problem) -> str:
    """Return the name of the backend that "auto" uses for ``problem``: "cpu" or "dense"."""
    D, Dv = problem.q.shape[3], problem.v.shape[3]
    scores = problem.num_pairs * problem.compute.itemsize
    seconds = problem.num_pairs * (D + Dv) / DENSE_RATE
    backend = worthwhile(BACKEND, problem, seconds, is_large=scores >= DENSE_MEMORY)
    return "dense" if backend is None else _supporting(backend, problem)


def worthwhile(
    name: str, problem: Any, seconds: float, *, is_large: bool = False,
    compiling: float = COMPILING, kind: str = "attention",
) -> ModuleType | None:  # fmt: skip
    """Return the kernel module ``name`` if preparing its kernel pays off by now, else None.

    ``seconds`` estimates the time that NumPy takes for ``problem``. ``is_large`` means that NumPy
    needs much memory; then the kernel is compiled as soon as loading one would pay off.
    """
    if _broken:
        return None
    # A module that another thread is importing is in sys.modules too; importing it waits.
    loaded = _imported(name) if name in sys.modules else None
    if loaded and loaded.is_ready(problem):
        return loaded
    cost = _spent.get(kind, 0.0) + seconds
    if cost < (LOADING_MORE if "numba" in sys.modules else LOADING):
        return None
    backend = _imported(name)
    if backend is None:
        return None
    pays_off = cost >= (LOADING if is_large else compiling)
    return backend if pays_off or backend.is_stored(problem) else None


def spent(seconds: float, kind: str = "attention") -> None:
    """Add ``seconds`` to the total time that "auto" has computed with NumPy, by kind of work."""
    _spent[kind] = _spent.get(kind, 0.0) + seconds


def give_up(error: Exception) -> None:
    """Log ``error`` of the CPU kernels, and let "auto" use only NumPy from now on."""
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
