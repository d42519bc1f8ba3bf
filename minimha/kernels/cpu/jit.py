"""How every function of the CPU kernels is compiled."""

from __future__ import annotations

import numba

# Without nnan and ninf: NaN and infinity are legal values here.
FASTMATH = {"nsz", "arcp", "contract", "afn", "reassoc"}
# The arrays of a kernel are its caller's: nothing is allocated, no references are counted. A view
# knows no length, so no bound is checked. A division by zero gives what IEEE 754 says instead of
# raising where nobody could catch it.
OPTIONS = {"fastmath": FASTMATH, "nogil": True, "error_model": "numpy", "_nrt": False,
           "boundscheck": False}  # fmt: skip

jit = numba.njit(**OPTIONS)
# numba compiles each function as a library of its own, and again in each of its callers. What is
# large and called once is therefore inlined before it is compiled at all.
jit_inline = numba.njit(**OPTIONS, inline="always")
