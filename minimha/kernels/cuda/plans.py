"""Prepare launches, as a ``Plan``, for calls with equal shapes, strides, dtypes and options.

To create a plan, a call allocates and launches in a ``Draft`` instead of on the device. Each
address of a draft records which array it belongs to: an array of the call, or the workspace. The
kernels' parameters are packed once; each later call replaces the draft's addresses with real ones
and launches. The small options stay on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.arguments import DeviceArray, contiguous
from minimha.kernels.cuda.launch import Launch

WORKSPACE = "workspace"  # the temporary memory of a call, one allocation
SPARES = 4  # sets of packed parameters that are kept for later calls

_in_graphs: set[Plan] = set()


class Address(int):
    """An address of a draft: ``start`` bytes after the beginning of the array ``origin``."""

    origin: str
    start: int

    @classmethod
    def of(cls, origin: str, start: int, value: int) -> Address:
        """Return an address equal to ``value``, which each call replaces by a real address."""
        address = cls(value)
        address.origin, address.start = origin, start
        return address


class Draft:
    """A recorder of the memory, constants and launches of a call."""

    def __init__(self, device: gpu.Device) -> None:
        self.device = device
        self.size = 0  # of the workspace, in bytes
        self.constants: list[gpu.Constant] = []
        self.launches: list[tuple[Launch, list[Any]]] = []

    def brought(self, name: str, array: DeviceArray) -> DeviceArray:
        """Return ``array`` with an address that each call replaces by its array called ``name``."""
        return array._replace(address=Address.of(name, 0, array.address))

    def scratch(self, shape: tuple[int, ...]) -> int:
        """Return the address of uninitialized float32 memory in the workspace."""
        return self.scratch_array(shape, np.dtype(np.float32)).address

    def scratch_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Return an uninitialized contiguous array in the workspace, at address 0 if empty."""
        size = prod(shape) * dtype.itemsize
        address = Address.of(WORKSPACE, self.size, self.size) if size else 0
        self.size += -(-size // gpu.ALIGNMENT) * gpu.ALIGNMENT
        return DeviceArray(address, shape, contiguous(shape), dtype)

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` to a buffer that stays on the device, and return its address."""
        return self.put_together([array])[0]

    def put_together(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Copy small arrays into one buffer that stays on the device; return their addresses."""
        starts: list[int] = []
        whole = bytearray()
        for array in arrays:
            starts.append(len(whole))
            whole += array.tobytes()
            whole += bytes(-len(whole) % gpu.ALIGNMENT)
        if not whole:
            return [0] * len(arrays)
        constant = gpu.constant(self.device, bytes(whole))
        self.constants.append(constant)
        return [constant.address + start for start in starts]

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Raise NotImplementedError, because a draft computes nothing that could be read."""
        raise NotImplementedError

    def launch(self, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """Add a launch unless its grid is empty; raise if no GPU can start the grid."""
        if prod(launch.grid):
            gpu.check_grid(launch)
            self.launches.append((launch, list(_flat(arguments))))


class Step(NamedTuple):
    """A launch with its loaded function and the slot of its first parameter."""

    launch: Launch
    function: Any
    first: int


class Parameters:
    """The parameters of a plan's launches, in slots of eight bytes, and pointers to the slots."""

    def __init__(self, packed: bytes) -> None:
        count = len(packed) // 8
        self.slots = (ctypes.c_uint64 * count).from_buffer_copy(packed)
        first = ctypes.addressof(self.slots)
        self._pointers = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self._pointers)


class Plan:
    """The launches that a ``Draft`` recorded; several threads may run them at once."""

    def __init__(self, draft: Draft) -> None:
        self._size, self._constants = draft.size, draft.constants
        self._steps: list[Step] = []
        self._patches: list[tuple[int, str, int]] = []
        packed = b""
        for launch, values in draft.launches:
            first = len(packed) // 8
            function, layout = gpu.loaded_kernel(launch, draft.device)
            self._steps.append(Step(launch, function, first))
            packed += layout.pack(*values)
            for slot, value in enumerate(values, first):
                if isinstance(value, Address):
                    self._patches.append((slot, value.origin, value.start))
        self._packed = packed
        self._spares: list[Parameters] = []

    def run(self, addresses: dict[str, int], memory: gpu.DeviceMemory) -> None:
        """Launch the kernels on the stream of ``memory``, for arrays with these ``addresses``."""
        if self._size:
            addresses = addresses | {WORKSPACE: memory.allocate(self._size)}
        parameters = self._parameters()
        slots = parameters.slots
        for slot, origin, start in self._patches:
            slots[slot] = addresses[origin] + start
        for step in self._steps:
            memory.launch(step.launch, step.function, parameters, step.first)
        if len(self._spares) < SPARES:  # the driver has copied the parameters
            self._spares.append(parameters)

    def keep_for_graphs(self) -> None:
        """Keep the plan's constants until the process ends, because CUDA graphs read them again."""
        _in_graphs.add(self)

    def _parameters(self) -> Parameters:
        try:
            return self._spares.pop()  # another thread may take the last one
        except IndexError:
            return Parameters(self._packed)


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value
