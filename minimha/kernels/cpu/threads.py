"""How many threads a parallel kernel may use, and where it must run alone or serially.

GNU's OpenMP, with which numba runs its parallel loops on Linux, aborts a forked child that starts a
parallel loop if its parent had already run one. In a forked child the kernels therefore run
serially. numba's own work queue, its choice where there is neither OpenMP nor TBB, aborts a process
in which two threads start parallel loops at once. There a lock serializes the launches.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

import numba

TASKS_PER_THREAD = 4  # at least, so that threads finish together

_lock = threading.Lock()
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def num_workers() -> int:
    """Threads that ``numba.set_num_threads`` allows; 0 where only serial code is safe."""
    return 0 if _is_forked else int(numba.get_num_threads())


def launch_lock() -> AbstractContextManager[object]:
    """What to hold during a parallel loop: a lock where only one may run at a time."""
    try:
        is_threadsafe = numba.threading_layer() in ("omp", "tbb")
    except ValueError:  # numba chooses the layer with the first parallel loop
        is_threadsafe = False
    return nullcontext() if is_threadsafe else _lock


def set_workers(number: int) -> None:
    """Set the number of threads that kernels may use.

    Raises
    ------
    ValueError
        ``number`` is not between 1 and the number of cores.
    """
    most = int(numba.config.NUMBA_NUM_THREADS)
    if not 1 <= number <= most:
        raise ValueError(f"threads is {number}: expected 1 to {most}, the cores of this machine")
    numba.set_num_threads(number)
