"""As much of CuPy as minimha uses, in the stand-in's memory."""

import ctypes
import sys
from math import prod
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from cuda.bindings import driver

from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.arguments import contiguous
from minimha.kernels.cuda.interop import _DLTensor

CODES = {"f": 2, "V": 4, "i": 0, "b": 6}  # DLPack's, by NumPy's kind; bfloat16 is of kind V
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p


class Array:
    """An array on the current GPU, exported by DLPack; freed with its last reference."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.device = gpu.current().ordinal
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.address = int(gpu.call(driver.cuMemAllocAsync, self.nbytes, 0))
        self.data = SimpleNamespace(ptr=self.address)
        self.strides = tuple(step * self.dtype.itemsize for step in contiguous(self.shape))
        n, bits = len(self.shape), 8 * self.dtype.itemsize
        shape, strides = ((ctypes.c_int64 * n)(*x) for x in (self.shape, contiguous(self.shape)))
        code = CODES[self.dtype.kind]
        self.tensor = _DLTensor(
            self.address, 2, self.device, n, code, bits, 1, shape, strides, 0
        )  # fmt: skip

    def __del__(self):
        driver.cuMemFreeAsync(self.address, 0)

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, stream):
        if int(driver.cuCtxGetDevice()[1]) != self.device:  # as torch does
            raise BufferError("Can't export tensors on a different CUDA device index")
        return new_capsule(ctypes.addressof(self.tensor), b"dltensor", None)

    def set(self, array):
        """Copy a NumPy array here."""
        array = np.ascontiguousarray(array, self.dtype)
        gpu.call(driver.cuMemcpyHtoDAsync, self.address, array.ctypes.data, self.nbytes, 0)

    def get(self):
        """A copy as a NumPy array."""
        array = np.empty(self.shape, self.dtype)
        gpu.call(driver.cuMemcpyDtoHAsync, array.ctypes.data, self.address, self.nbytes, 0)
        return array


Array.__module__ = "cupy"
current = SimpleNamespace(ptr=0)  # stream
sys.modules["cupy"] = SimpleNamespace(
    ndarray=Array, empty=Array, cuda=SimpleNamespace(get_current_stream=lambda: current)
)


def array(values):
    """A NumPy array on the current GPU."""
    there = Array(values.shape, values.dtype)
    there.set(values)
    return there


def numbers(*shape, dtype="float32", seed=0):
    """Random numbers on the current GPU."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return array(np.random.default_rng(seed).normal(size=shape).astype(dtype))
