"""How many threads a parallel kernel may use, and when it must not use any.

GNU's OpenMP, on which numba runs its parallel loops on Linux, ends a process that forks after a
parallel loop and then starts one itself. In a forked child the kernels therefore run serially.
Numba's own work queue, which it takes where there is neither OpenMP nor TBB, ends a process in
which two threads start parallel loops at once. There they take turns.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

import numba

_turn = threading.Lock()

_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def num_workers() -> int:
    """Threads that ``numba.set_num_threads`` allows; 0 where only serial code is safe."""
    return 0 if _is_forked else int(numba.get_num_threads())


def turn() -> AbstractContextManager[object]:
    """What to hold during a parallel loop: a lock where only one may run at a time."""
    try:
        runs_many = numba.threading_layer() in ("omp", "tbb")
    except ValueError:  # numba chooses with the first parallel loop
        runs_many = False
    return nullcontext() if runs_many else _turn


def set_workers(number: int) -> None:
    """Allow the kernels so many threads.

    Raises
    ------
    ValueError
        There are not so many.
    """
    most = int(numba.config.NUMBA_NUM_THREADS)
    if not 1 <= number <= most:
        raise ValueError(f"threads is {number}: expected 1 to {most}, the cores of this machine")
    numba.set_num_threads(number)
