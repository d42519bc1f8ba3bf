"""How many threads a parallel kernel may use, and when it must not use any.

GNU's OpenMP, on which numba runs its parallel loops on Linux, ends a process that forks after a
parallel loop and then starts one itself. In a forked child the kernels therefore run serially.
"""

from __future__ import annotations

import os

import numba

_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def num_workers() -> int:
    """Threads that ``numba.set_num_threads`` allows; 0 where only serial code is safe."""
    return 0 if _is_forked else int(numba.get_num_threads())
