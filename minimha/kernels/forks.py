"""What a fork must wait for, so that the child finds it whole.

A child has only the thread that forked. A lock that another thread held then is held for ever in
the child, and what that thread was changing stays half changed. numba compiles under one lock, and
the child needs it, so a fork waits until no other thread compiles: at most some seconds.
"""

from __future__ import annotations

import os
import sys
import threading

WAIT = 60  # seconds

_held = threading.local()  # the lock of a thread that forks: others may fork at the same time


def _hold() -> None:
    _held.locks = []
    module = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(getattr(module, "global_compiler_lock", None), "_lock", None)
    if lock is not None and lock.acquire(timeout=WAIT):
        _held.locks.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
