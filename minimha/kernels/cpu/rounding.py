"""O in 16 bits: NumPy rounds one number after another, which takes as long as the kernels do."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.equations.arguments import cast
from minimha.kernels.cpu.arguments import address
from minimha.kernels.cpu.compiler import Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import jit_inline


def rounded(O: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """``cast(O, dtype)``."""
    if O.dtype != np.float32 or dtype.itemsize != 2:
        return cast(O, dtype)
    O, result = np.ascontiguousarray(O), np.empty(O.shape, dtype)
    prepared().call(address(O), address(result), O.size, dtype.name == "bfloat16")
    return result


@cache
def prepared() -> Compiled:
    """``round_numbers``, compiled."""
    signature = types.void(
        types.CPointer(types.uint32), types.CPointer(types.uint16), types.int64, types.int64
    )
    return compiled(round_numbers, signature, File("round_numbers", str(signature)))


def round_numbers(words, halves, n, is_bfloat16):
    """Round n numbers, the words of float32, to the nearest of 16 bits, or to the even one."""
    if is_bfloat16:
        for x in range(n):
            halves[x] = to_bfloat16(words[x])
    else:
        for x in range(n):
            halves[x] = to_float16(words[x])


# In integers, of which LLVM makes vector code on every CPU: what is added to the digits that go
# carries into the last digit that stays, and on into the exponent.


@jit_inline
def to_bfloat16(word):
    """The bits of the bfloat16 next to a float32."""
    upper = np.uint32(word >> np.uint32(16))
    nearest = np.uint32(word + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(upper | np.uint32(0x40) if is_nan else nearest)


@jit_inline
def to_float16(word):
    """The bits of the float16 next to a float32."""
    size = np.uint32(word & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13)) & np.uint32(1)
    # 112 less in the exponent, whose bias is 15 instead of 127.
    normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
    # A sum with 1/2 has its last digit where those of subnormal numbers have it, at 2^-24.
    moved = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32)
    nearest = normal if size >= np.uint32(113 << 23) else np.uint32(moved - np.uint32(126 << 23))
    infinite = np.uint32(0x7E00 if size > np.uint32(0x7F800000) else 0x7C00)
    nearest = infinite if size >= np.uint32(143 << 23) else nearest
    return np.uint16(nearest | np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(0x8000)))
