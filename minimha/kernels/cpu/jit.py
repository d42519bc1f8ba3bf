"""How every function of the CPU kernels is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba

# Without nnan and ninf: NaN and infinity are legal values here.
FASTMATH = {"nsz", "arcp", "contract", "afn", "reassoc"}
# The arrays of a kernel are its caller's: nothing is allocated, no references are counted. A view
# knows no length, so no bound is checked. A division by zero gives what IEEE 754 says instead of
# raising where nobody could catch it.
OPTIONS = {"fastmath": FASTMATH, "nogil": True, "error_model": "numpy", "_nrt": False,
           "boundscheck": False}  # fmt: skip

# Only compiled functions call these, so that none gets the wrappers with which Python or C would
# call it: a sixth of the time that a kernel takes to compile. From Python such a call would crash.
INNER = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

jit = numba.njit(**INNER)
# numba compiles each function as a library of its own, and again in each of its callers. What is
# large and called once is therefore inlined before it is compiled at all.
jit_inline = numba.njit(**INNER, inline="always")


@cache
def from_python(function: Any) -> Callable[..., Any]:
    """One of these functions, to be called from Python."""
    return numba.njit(lambda *arguments: function(*arguments))  # type: ignore[no-any-return]
