"""Find out whether CUDA can run here, without slow imports."""

import ctypes
import os
import sys
from functools import cache
from importlib.util import find_spec

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def reason_without_cuda() -> str | None:
    """Return why no CUDA kernel can run, and the remedy, or None if kernels can run.

    The function never raises, even if the driver is broken.
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
    """Return why the driver finds no GPU, or None if it finds one.

    The result is cached, because the driver starts slowly.
    """
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
