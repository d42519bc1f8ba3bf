"""Delay ``os.fork`` while another thread compiles or imports a backend.

A forked child has only the thread that forked. A lock that another thread held stays locked for
ever, and data that another thread was changing stays half changed. numba compiles under one lock,
llvmlite calls LLVM under another, and the child needs both. So a fork waits until no other thread
compiles, but at most a minute per lock. It also waits until no other thread imports a backend,
because the child could not finish the import.

``before`` handlers run in reverse order of registration. So handlers of modules that are imported
here, before ``_hold`` is registered, run after it. One such module is logging. Its handler takes
the lock of logging, and an import that ``_hold`` waits for may need that lock. Another is
concurrent.futures. If it were first imported while ``_hold`` waits, its handlers after the fork
would release a lock that was never acquired.

NumPy's OpenBLAS has no such lock: a fork may hang while a thread multiplies large matrices, as
"dense" does.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (to register its handlers)
import logging  # noqa: F401
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

from minimha.kernels.os_threads import RLock

WAIT = 60  # seconds for each lock
# In the order in which numba takes them.
LOCKS = {
    "numba.core.compiler_lock": "global_compiler_lock._lock",
    "llvmlite.binding.ffi": "lib._lock._lock",
}

_importing = RLock()
_held = threading.local()  # the locks of a thread that forks: others may fork at the same time


def imported(name: str) -> Any:
    """Import and return the module ``name``, and delay forks until the import has ended.

    If importing a package fails, Python removes the package from ``sys.modules``, but not its
    modules. The modules would make a later import fail, so this function removes them too.
    """
    found = sys.modules.get(name)
    if not getattr(getattr(found, "__spec__", None), "_initializing", True):
        return found  # whole: no thread is importing it
    with _importing:
        before = set(sys.modules)
        try:
            return import_module(name)
        except BaseException:
            for module in sorted(sys.modules.keys() - before):
                package, _, _ = module.rpartition(".")
                if package and package not in sys.modules:
                    del sys.modules[module]
            raise


def _locks() -> Iterator[Any]:
    yield _importing
    for module, path in LOCKS.items():
        with suppress(AttributeError):  # not imported, or a version without this lock
            yield attrgetter(path)(sys.modules.get(module))


def _hold() -> None:
    _held.locks = []
    for lock in _locks():
        if lock.acquire(timeout=WAIT):
            _held.locks.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
