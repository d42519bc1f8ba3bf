"""The GPU through CUDA's driver: which one is current, its memory, its streams, and launches.

numba compiles kernels to PTX, the very text that is tested without a GPU; everything else calls
the CUDA Driver API by its own names, through ``cuda.bindings``. No undocumented attribute of numba
is used, and a launch costs one call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np
from cuda.bindings import driver
from numba import types
from numpy.typing import DTypeLike, NDArray

from minimha.kernels.cuda.arguments import DeviceArray, contiguous
from minimha.kernels.cuda.cubins import cubin
from minimha.kernels.cuda.launch import Launch

ALIGNMENT = 256  # bytes: of every allocation, and of each array that is copied with others
KEPT = 64 << 20  # bytes that stay reserved between calls
DEFAULT_STREAMS = (0, 1, 2)  # the legacy and the per-thread default stream belong to any device
FORMATS = {  # a parameter of a kernel, in a slot of eight bytes
    types.boolean: "B7x", types.int32: "i4x", types.int64: "q", types.uint64: "Q",
    types.float32: "f4x", types.float64: "d",
}  # fmt: skip
DYNAMIC_SHARED = 48 << 10  # bytes of shared memory beyond which a kernel must opt in


class DeviceError(RuntimeError):
    """The driver refused or failed, in its own words."""


class Device(NamedTuple):
    """A GPU: its number, its size, and the pool that memory is allocated from."""

    ordinal: int
    cc: tuple[int, int]
    multiprocessors: int
    shared: int  # bytes per block, at most
    pool: Any
    context: int


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """The result of a function of the driver, or a ``DeviceError`` with its name for the failure.

    Several results are a tuple.
    """
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _failure(function.__name__, status)
    return results[0] if len(results) == 1 else tuple(results)


def _failure(name: str, status: Any) -> DeviceError:
    _, text = driver.cuGetErrorString(status)
    reason = text.decode() if text else "no description"
    return DeviceError(f"{name} failed on the GPU: {status.name}, {reason}")


def current() -> Device:
    """The device that is current in this thread; if none is, the first one is made current."""
    call(driver.cuInit, 0)
    status, handle = driver.cuCtxGetDevice()
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        handle = call(driver.cuDeviceGet, 0)
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, handle))
    elif status != driver.CUresult.CUDA_SUCCESS:
        raise _failure("cuCtxGetDevice", status)
    return _device(int(handle))


@cache
def _device(ordinal: int) -> Device:
    handle, attribute = call(driver.cuDeviceGet, ordinal), driver.CUdevice_attribute
    attributes = (
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    )
    major, minor, count, shared = (
        int(call(driver.cuDeviceGetAttribute, x, handle)) for x in attributes
    )
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    pool = call(driver.cuMemPoolCreate, properties)
    kept = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    call(driver.cuMemPoolSetAttribute, pool, kept, driver.cuuint64_t(KEPT))
    context = int(call(driver.cuDevicePrimaryCtxRetain, handle))
    return Device(ordinal, (major, minor), count, shared, pool, context)


def device_at(address: int) -> int:
    """The ordinal of the device whose memory holds ``address``."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call(driver.cuPointerGetAttribute, attribute, address))


def is_stream_of(stream: int, device: Device) -> bool:
    """Whether ``stream`` belongs to ``device``; the default streams belong to the current one."""
    return stream in DEFAULT_STREAMS or int(call(driver.cuStreamGetCtx, stream)) == device.context


def wait_for(stream: int, other: int) -> None:
    """Let ``stream`` wait for the work that has been queued on ``other`` so far."""
    event = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        call(driver.cuEventRecord, event, other)
        call(driver.cuStreamWaitEvent, stream, event, 0)
    finally:
        call(driver.cuEventDestroy, event)


def synchronize(stream: int) -> None:
    """Wait until all work on ``stream`` is done."""
    call(driver.cuStreamSynchronize, stream)


class DeviceMemory:
    """Memory of one call on one stream: see ``arguments.Memory``. On exit all of it is freed.

    Memory is freed in stream order: it is used again only after the work that was queued before,
    so nothing needs to be synchronized.
    """

    def __init__(self, device: Device, stream: int = 0) -> None:
        self.device = device
        self.stream = stream
        self._held: dict[int, int] = {}

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            address = self._held.popitem()[0]
            driver.cuMemFreeAsync(address, self.stream)  # fails only after a worse failure

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Allocate memory for an array and return its address; 0 for an empty array.

        A MemoryError says what does not fit, with the sizes.
        """
        size = prod(shape) * np.dtype(dtype).itemsize
        if size == 0:
            return 0
        status, address = driver.cuMemAllocFromPoolAsync(size, self.device.pool, self.stream)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = call(driver.cuMemGetInfo)
            raise MemoryError(
                f"an array of shape {shape} and dtype {np.dtype(dtype)} ({size} bytes) does not "
                f"fit into the GPU's memory: {sum(self._held.values())} bytes are in use by this "
                f"call, {free} of {total} bytes are free"
            )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise _failure("cuMemAllocFromPoolAsync", status)
        self._held[int(address)] = size
        return int(address)

    def scratch(self, shape: tuple[int, ...]) -> int:
        """Allocate float32 memory and return its address; its contents are undefined."""
        return self.empty(shape, np.float32)

    def scratch_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Allocate a contiguous array; its contents are undefined."""
        return DeviceArray(self.empty(shape, dtype), shape, contiguous(shape), dtype)

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` to the device, contiguous, and return its address."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.shape, array.dtype)
        if array.nbytes:
            call(driver.cuMemcpyHtoDAsync, address, array.ctypes.data, array.nbytes, self.stream)
        return address

    def put_together(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Copy small arrays to the device in one piece and return their addresses."""
        starts: list[int] = []
        whole = bytearray()
        for array in arrays:
            starts.append(len(whole))
            whole += array.tobytes()
            whole += bytes(-len(whole) % ALIGNMENT)
        first = self.put(np.frombuffer(whole, np.uint8))
        return [first + start for start in starts]

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a copy of the contiguous array at ``address`` and synchronize the stream."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            call(driver.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self.stream)
        synchronize(self.stream)
        return array

    def launch(self, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel on the stream; an empty grid launches nothing."""
        if not prod(launch.grid):
            return
        function = _function(launch, self.device)
        packed = _layout(launch.signature).pack(*_flat(arguments))
        slots = ctypes.create_string_buffer(packed, len(packed))
        first = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * (len(packed) // 8))(*range(first, first + len(packed), 8))
        block = (launch.threads, 1, 1)
        settings = (*launch.grid, *block, launch.shared, self.stream)
        call(driver.cuLaunchKernel, function, *settings, ctypes.addressof(pointers), 0)


# What is loaded of each kernel that somebody holds. Rungs let go of those that were compiled with a
# caller's functions; their modules, by the ordinal of the device, are unloaded before the next one
# is loaded, since a garbage collector may be in the midst of anything.
_functions: WeakKeyDictionary[Callable[..., None], dict[Any, Any]] = WeakKeyDictionary()
_unused: dict[int, list[Any]] = {}
_lock = threading.Lock()


def _function(launch: Launch, device: Device) -> Any:
    """The kernel in the device's memory, compiled and loaded on first use."""
    key = (device.ordinal, launch.signature, launch.threads, launch.shared, launch.registers)
    loaded = _functions.setdefault(launch.function, {})
    if key not in loaded:
        with _lock:
            if key not in loaded:
                loaded[key] = _loaded(launch, device)
    return loaded[key]


def _loaded(launch: Launch, device: Device) -> Any:
    name, code = cubin(launch, device.cc)
    _unload_unused(device)
    module = call(driver.cuModuleLoadData, code)
    finalize(launch.function, _unused[device.ordinal].append, module).atexit = False
    function = call(driver.cuModuleGetFunction, module, name.encode())
    if launch.shared > DYNAMIC_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, function, attribute, launch.shared)
    return function


def _unload_unused(device: Device) -> None:
    """Unload the modules that nobody can launch any more, after all work on the device."""
    modules = _unused.setdefault(device.ordinal, [])
    if modules:
        call(driver.cuCtxSynchronize)
    while modules:
        call(driver.cuModuleUnload, modules.pop())


@cache
def _layout(signature: tuple[Any, ...]) -> struct.Struct:
    """How the parameters of a kernel are packed: one slot of eight bytes per parameter."""
    return struct.Struct("<" + "".join(_formats(signature)))


def _formats(signature: tuple[Any, ...]) -> Iterator[str]:
    for kind in signature:
        if isinstance(kind, types.Array):
            yield "QQqqQ" + "qq" * kind.ndim
        elif isinstance(kind, types.BaseTuple):
            yield from _formats(tuple(kind))
        else:
            yield FORMATS[kind]


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value
