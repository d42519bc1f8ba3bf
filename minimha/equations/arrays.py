"""Recognise arrays of torch, JAX and CuPy, on a GPU or in a file, and convert to and from NumPy.

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

FLOAT8 = "float8_e4m3fn"  # the name of the dtype in ml_dtypes and torch
LIBRARIES = ("torch", "cupy", "jax", "numba")
ON_CUDA = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
UNKNOWN = -1  # no device's ordinal

Numbers = NDArray[Any] | Sequence[Any]  # for these, results are NumPy arrays


class DLPackArray(Protocol):
    """The static type of arrays that support DLPack, such as torch's and CuPy's.

    Type checkers infer that results have the type of q. JAX does not declare these methods, so with
    JAX's arrays the type of results is Any.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


Given = TypeVar("Given", bound=DLPackArray)


def kinds_of(given: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the name of an argument on a GPU, or None, and whether k or v is stored in a file.

    If an argument is on a GPU, the second result is False.
    """
    for name, x in given.items():  # a generator would take a call on a GPU 1 µs
        if ordinal_of(x) is not None:
            return name, False
    return None, is_stored(given["k"]) or is_stored(given["v"])


def on_host(*qkv: Any) -> tuple[Any, ...]:
    """Convert q, k and v from other libraries to NumPy, unless any of them is on a GPU."""
    for x in qkv:
        if ordinal_of(x) is not None:
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
    """Return the number of the CUDA device that holds ``value``, or None if it is on the host.

    Returns ``UNKNOWN`` if the array is on a GPU but its library does not report the number.
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
    """Raise ValueError if ``value`` is a memory map whose file has since been truncated."""
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
    """Return a NumPy view of ``value``, an array of torch, JAX, CuPy or numba.

    Raises TypeError if the array requires grad, has a dtype that NumPy lacks, or cannot be exported
    by its library because it is traced, sparse or on a GPU.
    """
    library = library_of(value)
    torch: Any = sys.modules["torch"] if library == "torch" else None
    if torch and value.requires_grad:
        raise TypeError(
            f"{name} requires grad, but minimha computes no gradients: give {name}.detach()"
        )
    dtype, integers = None, None  # torch exports bfloat16 and float8 to NumPy only as integers
    if torch and value.dtype == torch.bfloat16:
        dtype, integers = bfloat16(name), torch.int16
    elif torch and hasattr(torch, "float8_e4m3fn") and value.dtype == torch.float8_e4m3fn:
        dtype, integers = extension(name, FLOAT8), torch.uint8
    try:
        return np.asarray(value) if dtype is None else value.view(integers).numpy().view(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{name} is an array of {library} that NumPy cannot read: {reason}"
        ) from None


def like(given: Any, result: NDArray[Any]) -> Any:
    """Return ``result`` as a torch or JAX array if ``given`` is one, else unchanged.

    A torch array shares the memory of ``result``. So does a JAX array if the memory is aligned to
    64 bytes; otherwise JAX copies it.
    """
    library = library_of(given)
    if library == "torch":
        torch = sys.modules["torch"]
        if result.dtype.kind == "V" and result.dtype.itemsize == 1:
            return torch.from_numpy(result.view(np.uint8)).view(torch.float8_e4m3fn)
        if result.dtype.kind == "V":  # bfloat16; its name is slower to read
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if library == "jax":
        return sys.modules["jax"].device_put(result, given.device)
    return result


def bfloat16(name: str) -> np.dtype[Any]:
    """Return the dtype bfloat16; without ml_dtypes, raise a TypeError about the array ``name``."""
    return extension(name, "bfloat16")


def extension(name: str, dtype: str) -> np.dtype[Any]:
    """Return ``dtype`` of ml_dtypes; without it, raise a TypeError about the array ``name``."""
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"{name} is {dtype}, which NumPy knows only through ml_dtypes: pip install ml_dtypes"
        ) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return found
