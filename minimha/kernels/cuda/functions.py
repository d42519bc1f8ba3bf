"""Compile a caller's ``score_mod`` and ``mask_mod`` to device functions, which kernels call.

Only rungs 1 to 3 support such functions. Each function needs a separately compiled kernel, and a
rung caches ``KEPT`` kernels. Unlike on the CPU, indices into captured arrays are not checked, and
tiles that a function hides entirely are not skipped.
"""

from __future__ import annotations

import dis
import re
from functools import cached_property, lru_cache, partial
from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba import cuda, float32
from numba.core.errors import UnsupportedError
from numba.core.ir import Loc

from minimha.equations.arguments import name_of
from minimha.equations.elementwise import TORCH
from minimha.equations.functions import for_numpy
from minimha.equations.problem import Problem
from minimha.kernels.cuda.parts import device
from minimha.kernels.cuda.parts.online_softmax import LOWEST
from minimha.kernels.functions import Refused, check_returned, compiled_function, plain
from minimha.kernels.os_threads import in_another_thread

# The number of kernels that a rung keeps, the last used ones. A model has few functions, but
# each change of a captured number makes a new function. 64 kernels take about 6 MB of code.
KEPT = 64
EXTERNAL = r"\.extern \.func (?!.*\bvprintf\b)"  # a function outside of the PTX
TO_BE_LINKED = "it calls a function of NumPy or Python that only a driver could link"


class DeviceFunction:
    """A caller's function, compiled on first use.

    ``contents`` describes the function's code and captured values. Two objects are equal if their
    contents are equal.
    """

    def __init__(self, function: Any, contents: Any) -> None:
        self.function = for_numpy(plain(function))
        self.contents = contents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceFunction) and self.contents == other.contents

    def __hash__(self) -> int:
        return hash(self.contents)

    @cached_property
    def compiled(self) -> Any:
        """Return the function compiled to a device function, which kernels can call."""
        return device(with_device_functions(self.function))


def device_functions(problem: Problem) -> tuple[DeviceFunction | None, DeviceFunction | None]:
    """Return ``score_mod`` and ``mask_mod`` of ``problem``; each is None if not given."""
    found = {name: function for name, function, _ in _given(problem)}
    return found.get("score_mod"), found.get("mask_mod")


@device
def indices(o, b, h, i, j):
    """Convert indices in a part of a problem to indices in the whole, by the ``Corner`` in o.

    b, h, i and j are the indices of batch entry, query head, query position and key.
    """
    return b + o.first_b, h + o.first_head, i + o.first_key, j + o.first_key


def modifying(score_mod: DeviceFunction | None) -> Any:
    """Return a device function that calls ``score_mod``, or None if ``score_mod`` is None."""
    if score_mod is None:
        return None
    function = score_mod.compiled

    @device
    def modified(s, o, b, h, i, j):
        b, h, i, j = indices(o, b, h, i, j)
        return function(s, b, h, i, j)

    return modified


def masking(mask_mod: DeviceFunction | None) -> Any:
    """Return a device function that calls ``mask_mod``, or None if ``mask_mod`` is None."""
    if mask_mod is None:
        return None
    function = mask_mod.compiled

    @device
    def is_pair_visible(o, b, h, i, j):
        b, h, i, j = indices(o, b, h, i, j)
        return function(b, h, i, j)

    return is_pair_visible


def call_functions(score_mod: DeviceFunction | None, mask_mod: DeviceFunction | None) -> Any:
    """Return a device function that applies both functions to a score; hidden scores become -inf.

    Either function may be None. Neither function is called if the key is already hidden, because
    arrays that the function captures may have no item for that key.
    """
    modified, is_pair_visible = modifying(score_mod), masking(mask_mod)
    is_modified, is_masked = score_mod is not None, mask_mod is not None

    @device
    def call(s, is_visible, o, b, h, i, j):
        if is_masked and is_visible:
            is_visible = is_pair_visible(o, b, h, i, j)
        if is_modified and is_visible:
            s = float32(modified(s, o, b, h, i, j))
        return s if is_visible else LOWEST

    return call


def unsupported(problem: Problem) -> str | None:
    """Return why a GPU cannot run the functions of ``problem``, or None if it can."""
    found = (in_another_thread(partial(_returned, *given)) for given in _given(problem))
    return next((reason for reason in found if isinstance(reason, str)), None)


def check(problem: Problem) -> None:
    """Check that ``score_mod`` and ``mask_mod`` compile for a GPU and return the right types.

    Raises ``Refused`` if a function cannot be compiled for a GPU, and TypeError if a ``score_mod``
    returns no real number or a ``mask_mod`` no bool.
    """
    for name, function, compute in _given(problem):
        returned = in_another_thread(partial(_returned, name, function, compute))
        if isinstance(returned, str):
            raise Refused(returned)
        check_returned(name, returned)


def refused(problem: Problem) -> str | None:
    """Return why a kernel that calls no functions cannot compute ``problem``, or None if it can."""
    if not problem.contents:
        return None
    names = " and ".join(map(name_of, problem.contents))
    return f"this rung takes no functions: rung 3 is used for {names}"


def with_device_functions(function: FunctionType) -> FunctionType:
    """Return a copy of ``function`` that calls device functions in place of ``numba.njit`` ones.

    Otherwise the kernel would call functions outside of it. Only a GPU's driver could link such
    calls, so the kernel could not be compiled without a GPU. Raises UnsupportedError if
    ``function`` has a statement that raises, and TypeError if it uses torch.
    """
    _refuse_exceptions(function)

    def swapped(value: Any) -> Any:
        if value is TORCH:
            raise TypeError("functions of torch are not there: expected functions of math")
        is_compiled = isinstance(getattr(value, "py_func", None), FunctionType)
        return device(with_device_functions(value.py_func)) if is_compiled else value

    known = function.__globals__
    used = {name: swapped(known[name]) for name in function.__code__.co_names if name in known}
    cells = tuple(CellType(swapped(cell.cell_contents)) for cell in function.__closure__ or ())
    code, defaults = function.__code__, function.__defaults__
    return FunctionType(code, known | used, function.__name__, defaults, cells)


def _refuse_exceptions(function: FunctionType) -> None:
    """Raise UnsupportedError with the line if ``function`` has a statement that raises."""
    code = function.__code__
    for step in dis.get_instructions(code):
        if step.opname == "RAISE_VARARGS":
            _, line = max(x for x in dis.findlinestarts(code) if x[0] <= step.offset)
            raise UnsupportedError(
                "an exception on a GPU could not be caught", Loc(code.co_filename, line)
            )


def _given(problem: Problem) -> list[tuple[str, DeviceFunction, np.dtype[Any]]]:
    """Return name, function and dtype of the scores for each function of ``problem``."""
    return [
        (name, DeviceFunction(function, problem.contents[name]), problem.compute)
        for name, function in problem.functions.items()
    ]


@lru_cache(KEPT)
def _returned(name: str, function: DeviceFunction, compute: np.dtype[Any]) -> Any:
    """Return the type that ``function`` returns, or a message that says why a GPU cannot run it."""
    try:
        return compiled_function(name, function.function, compute, _for_gpu, " for a GPU")[1]
    except Refused as error:
        return str(error)


def _for_gpu(function: FunctionType, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """Compile a call of ``function`` to PTX; return it and the function's return type."""
    inlined = device(with_device_functions(function))

    def of_pair(b, h, i, j):
        return inlined(b, h, i, j)

    def of_score(s, b, h, i, j):
        return inlined(s, b, h, i, j)

    call = of_score if len(arguments) == 5 else of_pair
    how = {"cc": (9, 0), "device": True, "abi": "numba", "output": "ptx"}
    try:
        text, returned = cuda.compile(call, arguments, **how)
    except cuda.CudaSupportError:  # numba looked for a GPU, to compile a call for
        raise TypeError(TO_BE_LINKED) from None
    except KeyError as error:
        (ufunc,) = error.args
        if not isinstance(ufunc, np.ufunc):
            raise
        raise TypeError(f"np.{ufunc.__name__} is not there: expected functions of math") from None
    if re.search(EXTERNAL, text):
        raise TypeError(TO_BE_LINKED)
    return text, returned
