"""Finds whether CUDA can run and whether an array is on a GPU; called often, so light."""

import ctypes
import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from minimha.equations.arrays import library_of

ON_CUDA = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
UNSAID = -1  # in place of an ordinal that only the driver knows
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def reason_without_cuda() -> str | None:
    """Why no CUDA kernel can run, and what to do about it; None if one can.

    It never raises, even if the driver is broken.
    """
    if not (find_spec("numba_cuda") and find_spec("numba")):
        return (
            "numba-cuda, which compiles the CUDA kernels, is not installed: "
            "pip install 'minimha[cuda]'"
        )
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        return "NUMBA_ENABLE_CUDASIM is set: numba's simulator compiles nothing; unset it"
    return reason_without_gpu()


@cache
def reason_without_gpu() -> str | None:
    """Why the driver finds no GPU, or None; cached, because the driver starts slowly."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(LIBRARY)
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        return f"no GPU is found: NVIDIA's driver ({LIBRARY}) is not installed; use 'cpu'"
    except AttributeError:
        return f"{LIBRARY} is not NVIDIA's driver: see what nvidia-smi says"
    if status not in (0, NO_DEVICE):
        return f"NVIDIA's driver does not start (CUDA error {status}): see what nvidia-smi says"
    return None if count.value else "no GPU is found by NVIDIA's driver; use 'cpu'"


def is_device_array(value: Any) -> bool:
    """Whether ``value`` is an array on a CUDA device.

    >>> is_device_array(np.zeros(3))
    False
    """
    return ordinal_of(value) is not None


def ordinal_of(value: Any) -> int | None:
    """The ordinal of an array's CUDA device; None on the host.

    It is ``UNSAID`` if only the driver knows, by the array's address.
    """
    if value is None or isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        return None
    if library_of(value) == "torch":  # called for every argument: DLPack takes 4 µs
        return int(value.device.index) if value.is_cuda else None
    if hasattr(value, "__dlpack_device__"):
        try:
            kind, ordinal = value.__dlpack_device__()
            return ordinal if kind in ON_CUDA else None
        except Exception:  # a tracer or a meta tensor is on no device; NumPy will refuse it
            return None
    return UNSAID if hasattr(value, "__cuda_array_interface__") else None
