"""Read other libraries' arrays on a GPU without copying, and allocate arrays for the output.

Plain arrays of torch and CuPy are read directly, which is faster. Other arrays are read by DLPack
or, if they lack it, by ``__cuda_array_interface__``. No array library is imported here: a caller
who passes a torch tensor has imported torch.

References: the DLPack specification, C API, ``DLManagedTensor``; CUDA Array Interface, version 3.
"""

import ctypes
import sys
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minimha.equations.arrays import LIBRARIES, bfloat16, library_of
from minimha.kernels.cuda.arguments import DeviceArray, contiguous

LEGACY_STREAM = 1  # the default stream in DLPack and CUDA Array Interface
NO_SYNC = -1  # DLPack: the array is used on its library's own stream
KINDS = {0: "int", 1: "uint", 2: "float", 6: "bool"}  # those of DLPack's type codes that NumPy has
BFLOAT = 4
TORCH = ("float16", "float32", "float64", "bool", "int32", "int64")  # dtypes named as NumPy's


def stream_of(value: Any, device: int) -> int:
    """Return the current stream of torch or CuPy, or 0, the default stream, for other arrays."""
    library = library_of(value)
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def as_device_array(name: str, value: Any) -> DeviceArray:
    """Return a view of ``value``, an array on a GPU; raise TypeError if no view is possible."""
    library = library_of(value)
    if library == "torch" and (array := _from_tensor(name, value)):
        return array
    if library == "cupy" and (array := _from_cupy(value)):
        return array
    if not hasattr(value, "__dlpack__"):
        return _from_interface(name, value.__cuda_array_interface__, value)
    has_stream = library in ("torch", "cupy")
    try:
        capsule = value.__dlpack__(stream=NO_SYNC if has_stream else LEGACY_STREAM)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be read in place: {error}") from None
    return _from_capsule(name, capsule, value)


def empty_like(value: Any, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Any:
    """Allocate an array of ``shape`` in the library and on the GPU of ``value``.

    The dtype is by default that of ``value``. Raises TypeError unless the library is torch, CuPy,
    JAX or numba.
    """
    library = library_of(value)
    module = sys.modules.get(library)
    if library == "torch":
        name = None if dtype is None else getattr(module, np.dtype(dtype).name)
        return value.new_empty(shape, dtype=name)
    if library == "cupy":
        return module.empty(shape, dtype=dtype or value.dtype)  # type: ignore[union-attr]
    if library == "jax":
        # nothing else refers to these zeros yet, so they may be overwritten
        zeros = module.numpy.zeros  # type: ignore[union-attr]
        return zeros(shape, dtype=dtype or value.dtype, device=value.device)
    if library == "numba":
        from numba import cuda

        return cuda.device_array(shape, dtype or value.dtype)
    raise TypeError(
        f"q is an array of {library}: arrays on a GPU are accepted from {', '.join(LIBRARIES)}"
    )


def must_synchronize(value: Any) -> bool:
    """Return whether the host must wait for the result: JAX, unlike others, exposes no stream."""
    return library_of(value) == "jax"


def _from_tensor(name: str, value: Any) -> DeviceArray | None:
    """Return a view of a plain torch tensor, or None; DLPack then gives the reason for the rest."""
    torch: Any = sys.modules["torch"]
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    if value.requires_grad or value.is_neg():
        return None
    dtype = _dtype_of_torch(name, value.dtype)
    if dtype is None:
        return None
    return DeviceArray(value.data_ptr(), tuple(value.shape), value.stride(), dtype, value)


@cache  # bfloat16 takes an import
def _dtype_of_torch(name: str, dtype: Any) -> np.dtype[Any] | None:
    own = str(dtype).removeprefix("torch.")
    if own == "bfloat16":
        return bfloat16(name)
    return np.dtype(own) if own in TORCH else None


def _from_cupy(value: Any) -> DeviceArray | None:
    """Return a view of a plain CuPy array, or None for any other array."""
    if type(value) is not sys.modules["cupy"].ndarray or not value.dtype.isnative:
        return None
    strides = _in_elements(value.strides, value.dtype.itemsize)
    if strides is None:
        return None
    return DeviceArray(value.data.ptr, value.shape, strides, value.dtype, value)


@lru_cache(maxsize=1024)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Convert strides in bytes to elements; return None if they are not multiples."""
    if any(step % itemsize for step in strides):
        return None
    return tuple(step // itemsize for step in strides)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _from_capsule(name: str, capsule: Any, value: Any) -> DeviceArray:
    """Return a view of the array in a DLPack ``capsule``, whose destructor releases the array."""
    tensor = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    n, steps = tensor.ndim, tensor.strides
    shape = tuple(tensor.shape[:n])
    strides = tuple(steps[:n]) if steps else contiguous(shape)
    address, owner = tensor.data + tensor.byte_offset, (capsule, value)
    dtype = _dtype(name, tensor.code, tensor.bits, tensor.lanes)
    return DeviceArray(address, shape, strides, dtype, owner)


def _from_interface(name: str, interface: dict[str, Any], value: Any) -> DeviceArray:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, whose mask would be lost: pass attn_mask")
    if not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype}: a GPU reads numbers in its own byte order")
    steps = interface.get("strides")
    strides = contiguous(shape) if steps is None else _in_elements(tuple(steps), dtype.itemsize)
    if strides is None:
        raise TypeError(
            f"{name} has strides {steps}: expected multiples of the {dtype.itemsize} bytes "
            f"of {dtype}"
        )
    address = interface["data"][0] or 0
    return DeviceArray(address, shape, strides, dtype, value, ready_on=interface.get("stream"))


@cache  # bfloat16 takes an import
def _dtype(name: str, code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and code == BFLOAT and bits == 16:
        return bfloat16(name)
    kind = KINDS.get(code)
    if lanes != 1 or kind is None:
        raise TypeError(
            f"{name} has DLPack's type code {code} with {bits} bits: expected float16, "
            f"bfloat16, float32 or float64"
        )
    return np.dtype(bool if kind == "bool" else f"{kind}{bits}")
