"""Arrays that lie on a GPU, whoever made them: found, described and made, without a copy.

DLPack is asked first, ``__cuda_array_interface__`` where a library has no DLPack. No array library
is imported here: whoever gives a torch tensor has imported torch.

References: the DLPack specification, C API, ``DLManagedTensor``; CUDA Array Interface, version 3.
"""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

LEGACY_STREAM = 1  # the default stream, as DLPack and CUDA Array Interface call it
NO_SYNC = -1  # DLPack: the array is used on the stream that its library uses
KINDS = {0: "int", 1: "uint", 2: "float", 6: "bool"}  # DLPack's type codes that NumPy has
BFLOAT = 4
LIBRARIES = ("torch", "cupy", "jax", "numba")


class DeviceArray(NamedTuple):
    """Where an array lies on a GPU. Strides count elements.

    ``owner`` is kept so that the memory stays; ``ready_on`` is the stream that fills the array
    where it was not said that it is ready.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any = None
    ready_on: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def library_of(value: Any) -> str:
    """Name of the library that ``value`` is an array of."""
    roots = [base.__module__.split(".")[0] for base in type(value).__mro__]
    named = ["jax" if root == "jaxlib" else root for root in roots]
    return next((name for name in named if name in LIBRARIES), named[0])


def stream_of(value: Any, device: int) -> int:
    """The stream on which the library of ``value`` computes now; 0, the default, if it has none."""
    library = library_of(value)
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def described(name: str, value: Any) -> DeviceArray:
    """Where ``value`` lies, ready to be used on ``stream_of(value)``.

    Raises
    ------
    TypeError
        It has a dtype that NumPy has not, or its library does not give it away.
    """
    if not hasattr(value, "__dlpack__"):
        return _from_interface(name, value.__cuda_array_interface__, value)
    has_stream = library_of(value) in ("torch", "cupy")
    try:
        capsule = value.__dlpack__(stream=NO_SYNC if has_stream else LEGACY_STREAM)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be read where it lies: {error}") from None
    return _from_capsule(name, capsule, value)


def empty_like(value: Any, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Any:
    """A new array of the library and on the device of ``value``; its dtype too, unless given.

    Raises
    ------
    TypeError
        Its library is none of ``LIBRARIES``.
    """
    library = library_of(value)
    module = sys.modules.get(library)
    if library == "torch":
        name = None if dtype is None else getattr(module, np.dtype(dtype).name)
        return value.new_empty(shape, dtype=name)
    if library == "cupy":
        return module.empty(shape, dtype=dtype or value.dtype)  # type: ignore[union-attr]
    if library == "jax":
        # nobody else has seen these zeros yet, so that they may be written over
        zeros = module.numpy.zeros  # type: ignore[union-attr]
        return zeros(shape, dtype=dtype or value.dtype, device=value.device)
    if library == "numba":
        from numba import cuda

        return cuda.device_array(shape, dtype or value.dtype)
    raise TypeError(
        f"q is an array of {library}: arrays on a GPU are taken from {', '.join(LIBRARIES)}"
    )


def needs_to_wait(value: Any) -> bool:
    """Whether what was written must be finished, since the library has no stream to tell it."""
    return library_of(value) == "jax"


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
    """What a capsule tells; it is not consumed, so its own destructor gives the array back."""
    tensor = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _contiguous(shape)
    return DeviceArray(
        address=tensor.data + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_dtype(name, tensor.code, tensor.bits, tensor.lanes),
        owner=(capsule, value),
    )


def _from_interface(name: str, interface: dict[str, Any], value: Any) -> DeviceArray:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if interface.get("mask") is not None:
        raise TypeError(f"{name} is a masked array, whose mask would be lost: give attn_mask")
    if not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype}: a GPU reads numbers in its own byte order")
    steps = interface.get("strides") or [step * dtype.itemsize for step in _contiguous(shape)]
    if any(step % dtype.itemsize for step in steps):
        raise TypeError(f"{name} has strides {tuple(steps)}, which are no multiples of its dtype's")
    return DeviceArray(
        address=interface["data"][0] or 0,
        shape=shape,
        strides=tuple(step // dtype.itemsize for step in steps),
        dtype=dtype,
        owner=value,
        ready_on=interface.get("stream"),
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _dtype(name: str, code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and code == BFLOAT and bits == 16:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"{name} holds bfloat16, which NumPy knows through ml_dtypes alone: "
                f"pip install ml_dtypes"
            ) from None
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    kind = KINDS.get(code)
    if lanes != 1 or kind is None:
        raise TypeError(
            f"{name} holds numbers of DLPack's type {code} with {bits} bits: expected float16, "
            f"bfloat16, float32 or float64"
        )
    return np.dtype(bool if kind == "bool" else f"{kind}{bits}")
