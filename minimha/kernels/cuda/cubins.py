"""Compile CUDA kernels to machine code and store it on disk; no GPU is needed.

A kernel is a function that a rung's module returns for a variant of a problem. The key of a
kernel's file is everything that distinguishes two kernels: names of functions, captured values and
constants (``facts``); the sources of all kernels; and the versions of the compilers.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from cuda.bindings import nvjitlink, nvvm

from minimha.equations.functions import LIBRARIES, captured
from minimha.kernels import disk
from minimha.kernels.cuda import linker
from minimha.kernels.cuda.launch import Launch, arch_of

COMPILERS = (  # packages of CUDA 13 and of CUDA 12; the libraries' own versions are less exact
    "numba-cuda", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)  # fmt: skip
SETTINGS = ("OPT", "DEBUGINFO_DEFAULT", "CUDA_DEBUGINFO_DEFAULT")
# Sources of kernels outside of their own folder.
SOURCES = ("kernels/options.py", "kernels/score.py", "equations/visibility.py")
KEPT = 512  # variants of one kernel in a folder
ADDRESS = " at 0x"  # in Python's default repr of objects
# Exceptions if a library of the toolkit is missing, or the driver fails.
NO_TOOLKIT = (ImportError, OSError, RuntimeError)

_made_here: set[str] = set()  # files that this process compiled


class NoFacts(Exception):  # noqa: N818  (it states a fact about a value)
    """Raised by ``facts`` if the description of a value would differ between processes."""


def cubin(launch: Launch, cc: tuple[int, int]) -> tuple[str, bytes]:
    """Return a kernel's name and its machine code for compute capability ``cc``.

    The code is read from disk if it is stored there, and compiled and stored otherwise.
    """
    try:
        return _kept(file(launch, cc), launch, cc)
    except NoFacts:
        return _parted(_compiled(launch, cc, "in this process alone"))


def cubin_instead(
    refused: tuple[str, bytes], launch: Launch, cc: tuple[int, int]
) -> tuple[str, bytes] | None:
    """Compile and store the kernel of ``launch`` again, because the driver refused its code.

    ``refused`` is the result of ``cubin`` for that code. Returns None if this process compiled the
    code, since compiling again would change nothing, or if this process cannot compile.
    """
    try:
        kept = file(launch, cc)
    except NoFacts:
        return None
    if kept.file in _made_here:
        return None
    name, code = refused
    try:
        return _kept(kept, launch, cc, f"{name}\0".encode() + code)
    except NO_TOOLKIT:
        return None


def _kept(
    kept: disk.File, launch: Launch, cc: tuple[int, int], refused: bytes | None = None
) -> tuple[str, bytes]:
    """Return the kernel's name and machine code, from disk unless missing or ``refused``."""

    def make() -> bytes:
        _made_here.add(kept.file)
        return _compiled(launch, cc, "once on this machine")

    return _parted(kept.content(make, refused))


def _parted(content: bytes) -> tuple[str, bytes]:
    name, _, code = content.partition(b"\0")
    return name.decode(), code


def file(launch: Launch, cc: tuple[int, int]) -> disk.File:
    """Return the file that stores a kernel.

    It contains the kernel's name, a zero byte and the machine code.
    """
    kernel = facts(launch.function, {})
    of_launch = [launch.signature, launch.threads, launch.blocks]
    depends_on = [_digest_of_sources(), toolkit(), kernel, of_launch, cc]
    return disk.File(_name(launch, cc), repr(depends_on), KEPT)


def _name(launch: Launch, cc: tuple[int, int]) -> str:
    """Return the name that all variants of a kernel share."""
    rung = launch.function.__module__.rpartition(".")[2]
    return f"{rung}-{launch.function.__name__}-{arch_of(launch, cc)}"


def facts(value: Any, known: dict[FunctionType, int]) -> Any:
    """Describe ``value`` by lists, numbers and strings that are equal in every process.

    A function is described by its name, its captured values and the globals that it names. For
    functions from outside of minimha, such as a caller's ``score_mod``, the instructions and the
    attributes of modules that they read are added. Functions of ``LIBRARIES`` have only a name.
    ``known`` numbers the functions described so far; a second mention is only the number. Raises
    ``NoFacts`` for a value whose repr contains an address.
    """
    function = getattr(value, "py_func", getattr(value, "__wrapped__", value))
    if isinstance(function, FunctionType):
        if function in known:
            return known[function]
        known[function] = len(known)
        name, code, named = str(function.__module__), function.__code__, function.__globals__
        if name.split(".")[0] in LIBRARIES:
            return [name, function.__qualname__]
        if not name.startswith("minimha."):
            used, place = [x for _, x in captured(function)], _instructions(code)
        else:
            place = [code.co_firstlineno]
            used = [cell.cell_contents for cell in function.__closure__ or ()]
            used.append(function.__defaults__)
            used += [named[name] for name in _names(code) if name in named]
        return [name, function.__qualname__, place, *(facts(x, known) for x in used)]
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(facts(x, known) for x in value)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.strides, sha256(value.tobytes()).hexdigest()]
    text = repr(value)
    if ADDRESS in text:
        raise NoFacts(text)
    return [type(value).__name__, text]


def _names(code: CodeType) -> list[str]:
    """Return the names of globals and attributes in ``code`` and in its inner functions."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return [*code.co_names, *(name for x in inner for name in _names(x))]


def _instructions(code: CodeType) -> list[Any]:
    """Return the instructions of ``code``, which depend on the version of Python."""
    constants = [_instructions(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return [sys.implementation.cache_tag, code.co_code, code.co_names, constants]


@cache
def _digest_of_sources() -> str:
    kernels = sorted((disk.PACKAGE / "kernels" / "cuda").rglob("*.py"))
    return disk.digest([], [*kernels, *(disk.PACKAGE / source for source in SOURCES)])


@cache
def toolkit() -> str:
    """Return the versions and the settings of the compilers, as text."""
    libraries = [_version_of(library) for library in (nvvm, nvjitlink)]
    settings = [getattr(numba.config, name, None) for name in SETTINGS]
    found = []
    for name in COMPILERS:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:  # it is from conda or a system's toolkit, or not installed
            continue
    return repr([numba.__version__, found, libraries, settings])


def _version_of(library: Any) -> Any:
    try:
        return library.version()
    except Exception:  # not installed: kernels on disk can still run
        return None


def _compiled(launch: Launch, cc: tuple[int, int], how_often: str) -> bytes:
    """Compile and log a kernel; return its name, a zero byte and its machine code."""
    seconds = disk.File(f"seconds-{_name(launch, cc)}", "")
    last = seconds.read()
    how_long = f"{last.decode()} s last time" if last else "some seconds"
    disk.LOG.warning("minimha: compiling %s, %s, %s", _name(launch, cc), how_long, how_often)
    start = time.monotonic()
    name, code, _ = linker.compiled(launch, cc).machine_code()
    seconds.write(f"{time.monotonic() - start:.0f}".encode())
    return name.encode() + b"\0" + code
