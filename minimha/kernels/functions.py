"""Compile a caller's ``score_mod`` or ``mask_mod`` with numba; errors name the source line."""

from __future__ import annotations

import linecache
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import types

from minimha.equations.arguments import name_of
from minimha.equations.elementwise import Unknown
from minimha.equations.functions import refusal

I64 = types.int64
Compiler = Callable[[FunctionType, tuple[Any, ...]], tuple[Any, Any]]


class Refused(Exception):  # noqa: N818  (it states a fact about a function)
    """Raised if numba cannot compile a caller's function; the message names its source line."""


class NotNow(Refused):
    """Raised if numba ran out of memory or file handles, so that a later attempt may succeed."""


def plain(function: Any) -> Any:
    """Return the Python function inside a numba function, or any other ``function`` unchanged."""
    return getattr(function, "py_func", function)


def compiled_function(
    name: str, function: Any, compute: np.dtype[Any], compiler: Compiler, target: str = ""
) -> tuple[Any, Any]:
    """Compile ``function`` for scores of dtype ``compute``; return the code and numba return type.

    ``name`` is "score_mod" or "mask_mod". ``compiler`` takes a plain function and the types of its
    arguments, and returns the code and the return type. Error messages contain ``target``, such as
    " for a GPU". Raises ``Refused``, or ``NotNow``, if numba cannot compile the function.
    """
    function = plain(function)
    if not isinstance(function, FunctionType):
        raise Refused(
            f"{name_of(name)} is a {type(function).__name__}: numba compiles plain functions, made "
            f"by def or lambda"
        )
    score = [numba.from_dtype(compute)] if name == "score_mod" else []
    try:
        machine_code, returned = compiler(function, (*score, I64, I64, I64, I64))
    except Unknown:
        raise
    except Exception as error:  # numba raises errors of many types
        kind = NotNow if _lacks_resources(error) else Refused
        raise kind(_sentence(name_of(name) + target, function, error)) from None
    if isinstance(returned, types.Array) and not returned.ndim:
        raise Refused(f"{name_of(name)} returns an array in machine code: expected a number")
    return machine_code, returned


def is_fitting(name: str, returned: Any) -> bool:
    """Return whether numba's type ``returned`` is real for a score_mod, or bool for a mask_mod."""
    fitting = types.Boolean if name == "mask_mod" else (types.Integer, types.Float)
    return isinstance(returned, fitting)


def check_returned(name: str, returned: Any) -> None:
    """Raise TypeError unless ``returned`` is a valid return type of the function ``name``."""
    if not is_fitting(name, returned):
        is_none, is_some = returned == types.none, isinstance(returned, types.Optional)
        kind = f"{returned.type} or None" if is_some else types.unliteral(returned)
        raise TypeError(refusal(name, "None" if is_none else str(kind)))


def _lacks_resources(error: BaseException | None) -> bool:
    """Return whether ``error``, or an error in its context, is an OSError or a MemoryError."""
    while error and not isinstance(error, (OSError, MemoryError)):
        error = error.__context__
    return error is not None


def _sentence(what: str, function: FunctionType, error: Exception) -> str:
    """Return an error message with the line that numba cannot compile, and the reason."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    file = function.__code__.co_filename
    number = _line(error, text, file) or function.__code__.co_firstlineno
    source = textwrap.shorten(linecache.getline(file, number), 80, placeholder=" …")
    lines = [x.strip() for x in text.splitlines()]
    reasons = [x for x in lines if x and not x.startswith(("Failed in", "During:", "File "))]
    return (
        f"numba cannot compile {what}, line {number} of {Path(file).name}"
        f"{f', {source}' * bool(source)}: {reasons[0] if reasons else type(error).__name__}"
    )


def _line(error: Exception, text: str, file: str) -> int | None:
    """Return the number of the line in ``file`` that numba's error names, or None."""
    loc = getattr(error, "loc", None)
    name = re.escape(Path(file).name)
    found = re.search(rf'(?<={name}", line )\d+|(?<={name} \()\d+(?=\))', text)
    return loc.line if loc else int(found[0]) if found else None
