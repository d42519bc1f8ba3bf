"""Distinguish arrays of NumPy, of other libraries, on a GPU, and in a file.

Arrays of other libraries on the CPU are read without copying, and results become arrays of that
library. No array library is imported here: a caller who passes a torch tensor has imported torch.
``minimha.kernels.cuda.interop`` accepts arrays on a GPU.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

LIBRARIES = ("torch", "cupy", "jax", "numba")
ON_CUDA = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
UNKNOWN = -1  # no device's ordinal

Numbers = NDArray[Any] | Sequence[Any]  # for these, results are NumPy arrays


class DLPackArray(Protocol):
    """The type of torch's and CuPy's arrays; type checkers give results the same type.

    JAX does not declare these methods: for JAX's arrays the type of results is Any.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


Given = TypeVar("Given", bound=DLPackArray)


def kinds_of(given: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the name of an argument on a GPU (or None), and whether k or v is in a file."""
    on_gpu = next((name for name, x in given.items() if ordinal_of(x) is not None), None)
    return on_gpu, is_stored(given["k"]) or is_stored(given["v"])


def on_host(*qkv: Any) -> tuple[Any, ...]:
    """Convert CPU arrays of other libraries to NumPy's. If any array is on a GPU, convert none."""
    if any(ordinal_of(x) is not None for x in qkv):
        return qkv
    return tuple(
        as_numpy(name, x) if library_of(x) in LIBRARIES else x
        for name, x in zip("qkv", qkv, strict=True)
    )


def library_of(value: Any) -> str:
    """Return the name of the library that defines the type of ``value``."""
    if isinstance(value, np.ndarray):  # the fastest answer, for most arguments of most calls
        return "numpy"
    kind: Any = type(value)
    return _library_of(kind)


@cache
def _library_of(kind: Any) -> str:
    roots = [base.__module__.split(".")[0] for base in kind.__mro__]
    named = ["jax" if root == "jaxlib" else root for root in roots]
    return next((name for name in named if name in LIBRARIES), named[0])


def ordinal_of(value: Any) -> int | None:
    """Return the number of the CUDA device that holds an array, or None for an array on the host.

    If the library does not give the number, returns ``UNKNOWN``: the driver finds the device.
    """
    if value is None or isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        return None
    if library_of(value) == "torch":  # DLPack would take 4 µs per argument
        return int(value.device.index) if value.is_cuda else None
    if hasattr(value, "__dlpack_device__"):
        try:
            kind, ordinal = value.__dlpack_device__()
            return ordinal if kind in ON_CUDA else None
        except Exception:  # a tracer or a meta tensor is on no device; as_numpy refuses it
            return None
    return UNKNOWN if hasattr(value, "__cuda_array_interface__") else None


def is_stored(value: Any) -> bool:
    """Return whether ``value`` is a memory map or a zarr array, which may be larger than memory."""
    return isinstance(value, np.memmap) or library_of(value) == "zarr"


def check_file(name: str, value: Any) -> None:
    """Raise ValueError if ``value`` maps a file that is now too short: reading it would crash."""
    mapped = getattr(value, "_mmap", None) if isinstance(value, np.memmap) else None
    if not isinstance(mapped, mmap.mmap):
        return
    expected = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    if mapped.size() < expected:
        raise ValueError(
            f"{name} is a map of {value.filename}, which has become shorter than its array: "
            f"expected {expected:,} bytes, it has {mapped.size():,}"
        )


def as_numpy(name: str, value: Any) -> NDArray[Any]:
    """Return a NumPy view of ``value``, a CPU array of one of ``LIBRARIES``.

    Raises TypeError if the array requires grad or has a dtype that NumPy lacks. Also raises if the
    library does not export the array, because it is traced, sparse or on a GPU.
    """
    library = library_of(value)
    torch: Any = sys.modules["torch"] if library == "torch" else None
    if torch and value.requires_grad:
        raise TypeError(
            f"{name} requires grad, but minimha computes no gradients: give {name}.detach()"
        )
    dtype = bfloat16(name) if torch and value.dtype == torch.bfloat16 else None
    try:  # torch exports bfloat16 to NumPy only as integers
        return np.asarray(value) if dtype is None else value.view(torch.int16).numpy().view(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{name} is an array of {library} that NumPy cannot read: {reason}"
        ) from None


def like(given: Any, result: NDArray[Any]) -> Any:
    """Return ``result`` as an array of torch or JAX if ``given`` is one, else unchanged.

    torch shares the memory of ``result``, JAX only memory aligned to 64 bytes; JAX copies the rest.
    """
    library = library_of(given)
    if library == "torch":
        torch = sys.modules["torch"]
        if result.dtype.kind == "V":  # bfloat16; its name is slower to read
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if library == "jax":
        return sys.modules["jax"].device_put(result, given.device)
    return result


def bfloat16(name: str) -> np.dtype[Any]:
    """Return NumPy's bfloat16; without ml_dtypes, raise a TypeError that begins with ``name``."""
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"{name} is bfloat16, which NumPy knows only through ml_dtypes: pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
