"""Load the machine code of a function from disk, or compile and store it."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from numba import types
from numba.core import config
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from minimha.kernels import os_threads
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import OPTIONS, WholeCompiler

LOG = logging.getLogger("minimha")
ONCE = "some seconds, once on this machine"


class Compiled:
    """A compiled function: ``call`` calls it like a C function, with integers as arguments."""

    def __init__(self, function: CFunc) -> None:
        self._owner = function  # keeps the machine code alive
        self.address = int(function.address)
        result = None if function._sig.return_type == types.void else ctypes.c_int64
        # ctypes passes an address in half the time of a 64-bit integer.
        arguments = [ctypes.c_void_p] * len(function._sig.args)
        self.call = ctypes.CFUNCTYPE(result, *arguments)(self.address)


class _Code:
    """A cache, in numba's interface, of one function's machine code, loaded or just compiled."""

    def __init__(self, code: bytes | None) -> None:
        self.code = code

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        if self.code is None:
            return None
        target_context.refresh()
        return CompileResult._rebuild(target_context, *pickle.loads(self.code))

    def save_overload(self, signature: Any, result: Any) -> None:
        self.code = dumps(result._reduce())


_lock = os_threads.RLock()


def undisturbed(work: Callable[[], Any]) -> Any:
    """Return ``work()``, called so that neither Ctrl-C nor another thread interrupts numba."""

    def alone() -> Any:
        with _lock:
            return work()

    return os_threads.in_another_thread(alone)


def compiled(
    function: Callable[..., Any], signature: Any, file: File, notice: str | None = None
) -> Compiled:
    """Return the machine code of ``function`` for ``signature``, loaded from ``file`` or compiled.

    One process compiles and stores the code; others wait and then load it. A compilation is logged
    with ``notice``, unless that is None.
    """
    made: Compiled = undisturbed(partial(_loaded_or_made, function, signature, file, notice))
    return made


def _loaded_or_made(
    function: Callable[..., Any], signature: Any, file: File, notice: str | None
) -> Compiled:
    found = _loaded(function, signature, file)
    if found:
        return found
    with file.exclusive():
        found = _loaded(function, signature, file)
        if found:
            return found
        if notice:
            LOG.warning("minimha: compiling %s, %s", file.name, notice)
        made, code = _compile(function, signature, None)
        file.write(code)
        return made


def _loaded(function: Callable[..., Any], signature: Any, file: File) -> Compiled | None:
    code = file.read()
    if code is None:
        return None
    try:
        return _compile(function, signature, code)[0]
    except Exception as error:  # the file is unusable: compiling replaces it
        LOG.warning("minimha: %s cannot be loaded (%s): compiling it again", file.file, error)
        return None


def _compile(
    function: Callable[..., Any], signature: Any, code: bytes | None
) -> tuple[Compiled, bytes]:
    """Return ``function`` and its machine code, from ``code`` or compiled if ``code`` is None."""
    types = (signature.args, signature.return_type)
    made = CFunc(function, types, {}, dict(OPTIONS), pipeline_class=WholeCompiler)
    made._cache = _Code(code)
    with global_compiler_lock:
        before = config.BOUNDSCHECK  # NUMBA_BOUNDSCHECK would override the option
        config.BOUNDSCHECK = None
        try:
            made.compile()
        finally:
            config.BOUNDSCHECK = before
    return Compiled(made), made._cache.code


def _forget_lock() -> None:
    """Replace the lock in a forked child, where no thread would release the old one."""
    global _lock
    _lock = os_threads.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
