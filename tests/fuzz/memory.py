"""Arrays of any layout, each against a page that ends the process when it is touched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import numpy as np

from fuzz.cases import Layout

IS_GUARDED = sys.platform == "linux"  # where mprotect is called as below


def placed(values: np.ndarray, layout: Layout) -> np.ndarray:
    """``values`` laid out as ``layout`` says, between two pages that no one may touch.

    Writing to the array ends the process, too.
    """
    strides, length = [0] * values.ndim, values.itemsize
    first = 0  # offset of the item with all indices 0
    for axis in reversed(layout.order):
        n, step = values.shape[axis], layout.steps[axis]
        strides[axis] = step * length
        reach = max(0, n - 1) * abs(strides[axis])
        first += reach if step < 0 else 0
        length += reach
    if not values.size:
        length = first = 0
    pages = -(-(length + layout.shift) // mmap.PAGESIZE) or 1
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = mmap.PAGESIZE
    if layout.is_last:
        start += pages * mmap.PAGESIZE - length
    start += -layout.shift if layout.is_last else layout.shift
    array: np.ndarray = np.ndarray(values.shape, values.dtype, memory, start + first, strides)
    array[...] = values
    _protect(memory, 0, 1, mmap_none=True)
    _protect(memory, pages + 1, 1, mmap_none=True)
    _protect(memory, 1, pages, mmap_none=False)
    array.flags.writeable = False
    return array


@cache
def _mprotect() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _protect(memory: mmap.mmap, page: int, count: int, *, mmap_none: bool) -> None:
    if not IS_GUARDED:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page * mmap.PAGESIZE
    access = 0 if mmap_none else mmap.PROT_READ
    if _mprotect()(address, count * mmap.PAGESIZE, access):
        raise OSError(ctypes.get_errno(), "mprotect failed")
