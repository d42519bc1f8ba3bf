"""As much of torch as the GPU tests use, in the stand-in's memory."""

import ctypes
import sys
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
from cuda.bindings import driver

from minimha.kernels.cuda import driver as gpu

KINDS = ("float32", "float64", "float16", "bfloat16", "bool", "int64")


def on_gpu(array):
    """A copy in memory of the current GPU, which the host can access here."""
    gpu.current()  # whose context is needed
    address = int(gpu.call(driver.cuMemAllocAsync, max(1, array.nbytes), 0))
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address)
    weakref.finalize(memory, driver.cuMemFreeAsync, address, 0).atexit = False
    there = np.frombuffer(memory, array.dtype).reshape(array.shape)
    there[...] = array
    return there


class Tensor:
    """A view of an array on the GPU, or on the host after ``cpu``."""

    layout, requires_grad = "strided", False

    def __init__(self, array, is_cuda=True):
        self.array, self.shape, self.is_cuda = array, array.shape, is_cuda
        self.dtype, self.device = f"torch.{array.dtype.name}", SimpleNamespace(index=0)
        self.data_ptr = lambda: array.ctypes.data
        self.stride = lambda: tuple(step // array.itemsize for step in array.strides)
        self.numpy = lambda: array

    def is_neg(self):
        return False

    def to(self, dtype):
        name = dtype.removeprefix("torch.")
        return Tensor(on_gpu(self.array.astype(getattr(ml_dtypes, name, name))))

    def new_empty(self, shape, dtype=None):
        return Tensor(on_gpu(np.empty(shape, self.array.dtype))).to(dtype or self.dtype)

    def double(self):
        return self.to("float64")

    def cpu(self):
        return Tensor(self.array.copy(), is_cuda=False)

    def transpose(self, a, b):
        return Tensor(self.array.swapaxes(a, b))

    def __lt__(self, number):
        return Tensor(on_gpu(self.array < number))

    def __rmul__(self, number):
        return Tensor(on_gpu(number * self.array))


Tensor.__module__ = "torch"


def install():
    """Be the torch that is imported from here on."""
    torch, rng = ModuleType("torch"), np.random.default_rng(0)
    torch.__spec__ = ModuleSpec("torch", None)
    torch.Tensor, torch.strided, torch.manual_seed = Tensor, "strided", lambda seed: None
    for name in KINDS:
        setattr(torch, name, f"torch.{name}")

    def normal(*shape, dtype="float32", device):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return Tensor(on_gpu(rng.normal(size=shape))).to(dtype)

    torch.randn = normal
    torch.rand = lambda *shape, **device: Tensor(on_gpu(rng.random(shape, "float32")))
    torch.tensor = lambda values, **device: Tensor(on_gpu(np.array(values)))
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, synchronize=lambda: None,
        memory_allocated=lambda: 0, current_stream=lambda device: SimpleNamespace(cuda_stream=0),
    )  # fmt: skip
    sys.modules["torch"] = torch
