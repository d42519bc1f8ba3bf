"""Call CUDA's driver: devices, memory, streams, and loading and launching kernels.

numba only compiles kernels, which is also tested without a GPU. Everything else calls the CUDA
Driver API through ``cuda.bindings``. So no undocumented attribute of numba is used, and a launch is
one call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import numpy as np
from cuda.bindings import driver
from numba import types
from numpy.typing import DTypeLike, NDArray

from minimha.kernels.cuda.arguments import DeviceArray, contiguous
from minimha.kernels.cuda.cubins import cubin, cubin_instead
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.os_threads import RLock

ALIGNMENT = 256  # bytes, of every allocation and of each array in an allocation
KEPT = 64 << 20  # bytes that stay reserved between calls
DEFAULT_STREAMS = (0, 1, 2)  # the legacy and the per-thread default stream belong to any device
FORMATS = {  # a parameter of a kernel, in a slot of eight bytes
    types.boolean: "B7x", types.int32: "i4x", types.int64: "q", types.uint64: "Q",
    types.float32: "f4x", types.float64: "d",
}  # fmt: skip
DYNAMIC_SHARED = 48 << 10  # bytes of shared memory above which a kernel must opt in
MOST_BLOCKS = {"x": (1 << 31) - 1, "y": 65535, "z": 65535}  # of a grid, along each of its axes
MOST_CONSTANTS, MOST_UNUSED = 1024, 1024  # constants cached for reuse, and waiting to be freed

NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
TOO_NEW = (
    driver.CUresult.CUDA_ERROR_INVALID_IMAGE,
    driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU,
    driver.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
)  # the errors of a driver for code from a newer toolkit
REFUSED = (*TOO_NEW, driver.CUresult.CUDA_ERROR_INVALID_PTX)  # and for code that it cannot read


class DeviceError(RuntimeError):
    """Raised, with the driver's message, if a call of the CUDA driver fails."""


class Device(NamedTuple):
    """A GPU: its ordinal, compute capability, multiprocessors, shared memory, pool and context."""

    ordinal: int
    cc: tuple[int, int]
    multiprocessors: int
    shared: int  # bytes per block, at most
    pool: Any
    context: int


class Packed(Protocol):
    """The packed parameters of a kernel, with an array of pointers to them at ``address``."""

    address: int


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of the CUDA driver and return its result; raise DeviceError if it fails.

    Returns a tuple if the function has several results, and an empty tuple if it has none.
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
    """Return this thread's current device; if there is none, make device 0 current."""
    _initialize()
    status, handle = driver.cuCtxGetDevice()
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        handle = call(driver.cuDeviceGet, 0)
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, handle))
    elif status != driver.CUresult.CUDA_SUCCESS:
        raise _failure("cuCtxGetDevice", status)
    return _device(int(handle))


@cache
def _initialize() -> None:
    call(driver.cuInit, 0)


@contextmanager
def made_current(ordinal: int) -> Iterator[Device]:
    """Make the device ``ordinal`` current inside a ``with`` block."""
    device = _device(ordinal)
    call(driver.cuCtxPushCurrent, device.context)
    try:
        yield device
    finally:
        call(driver.cuCtxPopCurrent)


@cache
def _device(ordinal: int) -> Device:
    """Return a device with a memory pool; raise DeviceError if the device supports no pools."""
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
    pool = _pool(properties)
    kept = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    call(driver.cuMemPoolSetAttribute, pool, kept, driver.cuuint64_t(KEPT))
    context = int(call(driver.cuDevicePrimaryCtxRetain, handle))
    return Device(ordinal, (major, minor), count, shared, pool, context)


def _pool(properties: Any) -> Any:
    status, pool = driver.cuMemPoolCreate(properties)
    if status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
        raise DeviceError(
            f"GPU {properties.location.id} has no memory pools, which minimha needs: drivers for "
            f"CUDA 11.2 or later have them, but some virtual GPUs do not"
        )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _failure("cuMemPoolCreate", status)
    return pool


def device_at(address: int) -> int:
    """Return the ordinal of the device whose memory holds ``address``."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call(driver.cuPointerGetAttribute, attribute, address))


def is_stream_of(stream: int, device: Device) -> bool:
    """Return whether ``stream`` belongs to ``device``; default streams belong to every device."""
    return stream in DEFAULT_STREAMS or int(call(driver.cuStreamGetCtx, stream)) == device.context


def is_capturing(stream: int) -> bool:
    """Return whether the work on ``stream`` is being captured into a CUDA graph.

    The legacy default stream, 0 or 1, cannot be captured, so the result is False for it.
    """
    if stream in DEFAULT_STREAMS[:2]:
        return False
    return bool(call(driver.cuStreamIsCapturing, stream) != NOT_CAPTURING)


def wait_for(stream: int, other: int) -> None:
    """Make ``stream`` wait for the work already queued on the stream ``other``."""
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
    """The GPU memory of one call on one stream, freed at the end of a ``with`` block.

    It implements ``arguments.Memory``. Memory is freed in the order of work on the stream, so the
    host does not wait for that work.
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
        """Allocate an uninitialized array and return its address, or 0 if it has no elements.

        Raises MemoryError with the sizes if the array does not fit.
        """
        size = prod(shape) * np.dtype(dtype).itemsize
        return self.allocate(size, f"an array of shape {shape} and dtype {np.dtype(dtype)}")

    def allocate(self, size: int, what: str = "the workspace of a call") -> int:
        """Allocate ``size`` bytes and return their address, or 0 if ``size`` is 0.

        Raises MemoryError if they do not fit. In its message, ``what`` says what the bytes are for.
        """
        if size == 0:
            return 0
        status, address = driver.cuMemAllocFromPoolAsync(size, self.device.pool, self.stream)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = call(driver.cuMemGetInfo)
            raise MemoryError(
                f"{what} ({size} bytes) does not fit into the GPU's memory: "
                f"{sum(self._held.values())} bytes are in use by this call, {free} of {total} "
                f"bytes are free"
            )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise _failure("cuMemAllocFromPoolAsync", status)
        address = int(address)
        self._held[address] = size
        return address

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Allocate an uninitialized contiguous array of ``shape`` and ``dtype``."""
        return DeviceArray(self.empty(shape, dtype), shape, contiguous(shape), dtype)

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` to contiguous memory of the device and return its address."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.shape, array.dtype)
        if array.nbytes:
            call(driver.cuMemcpyHtoDAsync, address, array.ctypes.data, array.nbytes, self.stream)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Synchronize the stream and return a copy of the contiguous array at ``address``."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            call(driver.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self.stream)
        synchronize(self.stream)
        return array

    def launch(self, launch: Launch, function: Any, parameters: Packed, first: int) -> None:
        """Launch the driver's ``function`` on the stream, with the sizes of ``launch``.

        Its parameters are in the slots of ``parameters`` from ``first`` on.
        """
        grid, at = launch.grid, parameters.address + 8 * first
        (status,) = driver.cuLaunchKernel(
            function, grid[0], grid[1], grid[2], launch.threads, 1, 1, launch.shared, self.stream,
            at, 0,
        )  # fmt: skip
        if status != driver.CUresult.CUDA_SUCCESS:
            raise _failure("cuLaunchKernel", status)


class Constant:
    """Read-only bytes in a device's memory.

    After the last reference is dropped, the bytes are freed together with those of other constants,
    once ``MOST_UNUSED`` constants are unused.
    """

    unused: ClassVar[dict[int, list[int]]] = {}  # addresses, by the ordinal of their device

    def __init__(self, device: Device, content: bytes) -> None:
        self.address = _uploaded(device, content)
        self._unused = self.unused.setdefault(device.ordinal, [])

    def __del__(self) -> None:
        if hasattr(self, "_unused"):
            self._unused.append(self.address)  # freed later: this may run in the middle of a call


_constants: dict[tuple[int, bytes], Constant] = {}


def constant(device: Device, content: bytes) -> Constant:
    """Return a ``Constant`` with ``content`` on ``device``, from the cache if it is there."""
    key = device.ordinal, content
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= MOST_CONSTANTS:
            _constants.clear()  # plans keep their constants alive
        found = _constants[key] = Constant(device, content)
    return found


def _uploaded(device: Device, content: bytes) -> int:
    """Copy ``content`` to the device and wait; return the address, valid for any stream."""
    with _beside_captures():
        stream = _stream_for_copies(device.ordinal)
        _free_unused(device.ordinal, stream)
        address = call(driver.cuMemAllocFromPoolAsync, len(content), device.pool, stream)
        call(driver.cuMemcpyHtoDAsync, address, content, len(content), stream)
        synchronize(stream)
    return int(address)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Prevent this thread's calls from invalidating a graph that another thread captures."""
    before = call(driver.cuThreadExchangeStreamCaptureMode, RELAXED)
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, before)


@cache
def _stream_for_copies(ordinal: int) -> int:
    """Return a stream of the current device that waits for no other stream."""
    return int(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def _free_unused(ordinal: int, stream: int) -> None:
    """Free unused constants after all work on the device, once there are ``MOST_UNUSED``."""
    unused = Constant.unused.get(ordinal, [])
    if len(unused) < MOST_UNUSED:
        return
    addresses = [unused.pop() for _ in range(MOST_UNUSED)]
    (status,) = driver.cuCtxSynchronize()
    if status != driver.CUresult.CUDA_SUCCESS:  # a graph is being captured: free them later
        unused += addresses
        return
    for address in addresses:
        call(driver.cuMemFreeAsync, address, stream)


def check_grid(launch: Launch) -> None:
    """Raise ValueError if an axis of the grid has more thread blocks than a GPU can start."""
    for (axis, most), number in zip(MOST_BLOCKS.items(), launch.grid, strict=True):
        if number > most:
            raise ValueError(
                f"the problem takes {number} thread blocks of kernel {launch.function.__name__} "
                f"along {axis}, and a GPU starts at most {most}: split the batch, the heads or "
                f"the queries"
            )


class LoadedKernel(NamedTuple):
    """A kernel loaded into a device's memory, and the layout of its parameters."""

    function: Any
    layout: struct.Struct


# The loaded kernels of each Python function that a rung or a plan still refers to. Rungs drop old
# kernels with a caller's functions. Their modules, by the ordinal of the device, are unloaded
# before the next one is loaded: a garbage collector may run in the middle of any call.
_kernels: WeakKeyDictionary[Callable[..., None], dict[Any, LoadedKernel]] = WeakKeyDictionary()
_unused: dict[int, list[Any]] = {}
_lock = RLock()


def loaded_kernel(launch: Launch, device: Device) -> LoadedKernel:
    """Return the kernel of ``launch`` on ``device``; compile and load it on first use."""
    # The key lacks the signature: each function has one, and hashing numba's types takes 20 µs.
    key = device.ordinal, launch.threads, launch.shared, launch.blocks
    loaded = _kernels.setdefault(launch.function, {})
    if key not in loaded:
        with _lock:
            if key not in loaded:
                with _beside_captures():
                    loaded[key] = LoadedKernel(_load(launch, device), layout(launch.signature))
    return loaded[key]


def _load(launch: Launch, device: Device) -> Any:
    """Load the kernel of ``launch`` and return the driver's function."""
    name, code = cubin(launch, device.cc)
    _unload_unused(device)
    status, module = driver.cuModuleLoadData(code)
    if status in REFUSED and (instead := cubin_instead((name, code), launch, device.cc)):
        name, code = instead
        status, module = driver.cuModuleLoadData(code)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _refusal(status, device)
    finalize(launch.function, _unused[device.ordinal].append, module).atexit = False
    function = call(driver.cuModuleGetFunction, module, name.encode())
    if launch.shared > DYNAMIC_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, function, attribute, launch.shared)
    return function


def _unload_unused(device: Device) -> None:
    """Unload modules without references, after all work on the device."""
    modules = _unused.setdefault(device.ordinal, [])
    if not modules:
        return
    (status,) = driver.cuCtxSynchronize()
    while modules and status == driver.CUresult.CUDA_SUCCESS:  # else a graph is being captured
        call(driver.cuModuleUnload, modules.pop())


def _refusal(status: Any, device: Device) -> DeviceError:
    """Return an error that explains why newly compiled machine code cannot be loaded."""
    if status not in TOO_NEW:
        return _failure("cuModuleLoadData", status)
    version = call(driver.cuDriverGetVersion)
    return DeviceError(
        f"NVIDIA's driver, which is for CUDA {version // 1000}.{version % 1000 // 10}, does "
        f"not load code that a newer CUDA compiled for compute capability {device.cc[0]}."
        f"{device.cc[1]} ({status.name}): update it to 580 or later, or install the extra cuda12 "
        f"in place of cuda, which takes drivers from 525 on"
    )


def layout(signature: tuple[Any, ...]) -> struct.Struct:
    """Return the layout of a kernel's parameters, in slots of eight bytes."""
    return struct.Struct("<" + "".join(_formats(signature)))


def _formats(signature: tuple[Any, ...]) -> Iterator[str]:
    for kind in signature:
        if isinstance(kind, types.Array):
            yield "QQqqQ" + "qq" * kind.ndim
        elif isinstance(kind, types.BaseTuple):
            yield from _formats(tuple(kind))
        else:
            yield FORMATS[kind]
