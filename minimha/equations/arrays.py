"""Arrays of other libraries on the CPU: read without copying, and made of the results; files.

No array library is imported here: a caller who passes a torch tensor has imported torch. Arrays on
a GPU are accepted by ``minimha.kernels.cuda.interop``.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

LIBRARIES = ("torch", "cupy", "jax", "numba")

Numbers = NDArray[Any] | Sequence[Any]  # for these, results are NumPy arrays


class DLPackArray(Protocol):
    """An array of torch or CuPy, for type checkers: results have its own type.

    So do those for arrays of JAX, which does not declare these methods: their type is Any.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


Given = TypeVar("Given", bound=DLPackArray)


def library_of(value: Any) -> str:
    """The name of the library whose array ``value`` is."""
    if isinstance(value, np.ndarray):  # most are, and every argument of every call is asked
        return "numpy"
    kind: Any = type(value)
    return _library_of(kind)


@cache
def _library_of(kind: Any) -> str:
    roots = [base.__module__.split(".")[0] for base in kind.__mro__]
    named = ["jax" if root == "jaxlib" else root for root in roots]
    return next((name for name in named if name in LIBRARIES), named[0])


def is_stored(value: Any) -> bool:
    """Whether an array is in a file, a map of it or a store of zarr's, and need not fit memory."""
    return isinstance(value, np.memmap) or library_of(value) == "zarr"


def check_file(name: str, value: Any) -> None:
    """Refuse a map of a file that has become shorter: reading it would end the process.

    Raises
    ------
    ValueError
        The file ends before the array does.
    """
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
    """An array of one of ``LIBRARIES`` as NumPy's, in the same memory if that is on the CPU.

    Raises
    ------
    TypeError
        It requires grad, its library refuses to export it (it is traced, sparse, on a GPU), or
        NumPy does not have its dtype.
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
    """``result`` as an array of the library of ``given``, if that is torch or JAX.

    torch shares the result's memory; so does JAX if it is aligned to 64 bytes, and copies it
    otherwise.
    """
    library = library_of(given)
    if library == "torch":
        torch = sys.modules["torch"]
        if result.dtype.kind == "V":  # bfloat16; asking for its name takes longer
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if library == "jax":
        return sys.modules["jax"].device_put(result, given.device)
    return result


def bfloat16(name: str) -> np.dtype[Any]:
    """The dtype bfloat16, for argument ``name``.

    Raises
    ------
    TypeError
        ml_dtypes, which adds it to NumPy, is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"{name} is bfloat16, which NumPy knows only through ml_dtypes: pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
