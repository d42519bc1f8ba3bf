"""How a problem is passed to a compiled kernel, and how a kernel is compiled.

Every CPU rung is one function with the same arguments::

    rung(q, k, v, mask, bias, o, O, L, *sizes)

q, k, v   (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), read in place: any strides except the
          last, which is one item. float32, float64, or 16-bit numbers as their bits (uint16).
mask      (B, H, Lq, Lk) bool, any strides; of size 0 if there is none
bias      (B, H, Lq, Lk), compute dtype, any strides; of size 0 if there is none
o         ``Options``: everything that is small
O, L      (B, H, Lq, Dv) and (B, H, Lq), written; float32 or float64, the compute dtype
sizes     integers that are the rung's own, such as block sizes
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu.simd.vector import FASTMATH
from minimha.kernels.cpu.threads import launch_lock
from minimha.kernels.options import NO_BIAS, NO_MASK, Options, options

jit = numba.njit(fastmath=FASTMATH, nogil=True)
jit_inline = numba.njit(fastmath=FASTMATH, nogil=True, inline="always")


class Kernel:
    """A rung's function, compiled for each storage dtype when it is first needed.

    Compiled code is cached on disk beside the source, or in the user's cache folder; where neither
    is writable, each process compiles for itself. ``compiled`` has this process's dtypes.
    """

    def __init__(
        self, function: Callable[..., None], num_sizes: int, parallel: bool, widens: bool
    ) -> None:
        self.function = function
        self.num_sizes = num_sizes
        self.parallel = parallel
        self.widens = widens
        self.compiled: dict[np.dtype[Any], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, problem: Problem, *sizes: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Run on ``problem``; return O and L in the compute dtype."""
        storage = problem.dtype if self.widens else problem.compute
        given = (problem.q, problem.k, problem.v)
        q, k, v = (_storage(array.astype(storage, copy=False)) for array in given)
        run = self.compiled.get(q.dtype) or self._compile(q.dtype)
        B, H, Lq, _ = q.shape
        O = np.empty((B, H, Lq, v.shape[3]), problem.compute)
        L = np.empty((B, H, Lq), problem.compute)
        if O.size or L.size:
            mask = NO_MASK if problem.attn_mask is None else problem.attn_mask
            bias = NO_BIAS[problem.compute] if problem.attn_bias is None else problem.attn_bias
            with launch_lock() if self.parallel else nullcontext():
                run(q, k, v, mask, bias, options(problem), O, L, *sizes)
        return O, L

    def _compile(self, storage: np.dtype[Any]) -> Any:
        with self._lock:
            if storage not in self.compiled:
                settings: dict[str, Any] = {
                    "fastmath": FASTMATH,
                    "nogil": True,
                    "parallel": self.parallel,
                }
                wanted = [_signature(storage, self.num_sizes)]
                try:
                    run = numba.njit(wanted, cache=True, **settings)(self.function)
                except RuntimeError:  # numba's "no locator available": no folder can be written
                    run = numba.njit(wanted, **settings)(self.function)
                self.compiled[storage] = run
            return self.compiled[storage]


def kernel(
    num_sizes: int = 0, parallel: bool = False, widens: bool = False
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator that makes a rung's function a ``Kernel``.

    Parameters
    ----------
    num_sizes : int, default 0
        Number of ``sizes``, the last of its arguments.
    parallel : bool, default False
        Whether it has parallel loops.
    widens : bool, default False
        Whether it reads 16-bit numbers itself; for other rungs they are widened first.
    """
    return lambda function: Kernel(function, num_sizes, parallel, widens)


def _signature(storage: np.dtype[Any], num_sizes: int) -> Any:
    item = numba.from_dtype(storage)
    real = types.float64 if storage == np.float64 else types.float32

    def strided(dtype: Any, ndim: int, is_read: bool = True) -> Any:
        return types.Array(dtype, ndim, "A", readonly=is_read)

    def line(dtype: Any) -> Any:
        return types.Array(dtype, 1, "C")

    small = [types.int64, types.int64, line(types.int64), line(types.int64), line(real), line(real),
             types.float64, types.float64, types.boolean]  # fmt: skip
    arrays = [*[strided(item, 4)] * 3, strided(types.boolean, 4), strided(real, 4)]
    outputs = [strided(real, 4, False), strided(real, 3, False)]
    sizes = [types.int64] * num_sizes
    return types.void(*arrays, types.NamedTuple(small, Options), *outputs, *sizes)


def _storage(array: NDArray[Any]) -> NDArray[Any]:
    """``array`` as a kernel reads it: in place if its last axis is contiguous, else copied."""
    if array.dtype.itemsize == 2:
        array = array.view(np.uint16)
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    size = array.itemsize
    in_place = array.flags.aligned and (array.shape[3] <= 1 or array.strides[3] == size)
    if in_place and not any(stride % size for stride in array.strides):
        return array
    return np.ascontiguousarray(array)
