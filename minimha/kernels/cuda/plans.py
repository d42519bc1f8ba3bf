"""Prepare a call's launches once, for reuse by later calls with equal shapes and options.

Calls with the same ``Plan`` also have equal strides and dtypes. To create a plan, a call allocates
and launches in a ``Draft`` instead of on the device. In a draft, an address in an array of the
call or in the workspace is a placeholder (``Address``). It records the array's name, or
"workspace", and the offset in bytes. The kernels' parameters are packed once. Each call writes its
real addresses into them and launches. Small options, such as sinks, are copied to the device once
and stay there.
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
    """A placeholder for an address: ``start`` bytes after the beginning of the array ``origin``.

    ``origin`` is the name of an array of the call, such as "q", or ``WORKSPACE``.
    """

    origin: str
    start: int

    @classmethod
    def of(cls, origin: str, start: int, value: int) -> Address:
        """Return a placeholder that is equal to the integer ``value``."""
        address = cls(value)
        address.origin, address.start = origin, start
        return address


class Draft:
    """A recording of the memory, the constants and the launches of a call."""

    def __init__(self, device: gpu.Device) -> None:
        self.device = device
        self.size = 0  # of the workspace, in bytes
        self.constants: list[gpu.Constant] = []
        self.launches: list[tuple[Launch, list[Any]]] = []

    def brought(self, name: str, array: DeviceArray) -> DeviceArray:
        """Return ``array`` with a placeholder for the address of the call's array ``name``."""
        return array._replace(address=Address.of(name, 0, array.address))

    def scratch(self, shape: tuple[int, ...]) -> int:
        """Reserve float32 memory in the workspace; return a placeholder for its address."""
        return self.scratch_array(shape, np.dtype(np.float32)).address

    def scratch_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Reserve a contiguous array in the workspace; an empty array has address 0."""
        size = prod(shape) * dtype.itemsize
        address = Address.of(WORKSPACE, self.size, self.size) if size else 0
        self.size += -(-size // gpu.ALIGNMENT) * gpu.ALIGNMENT
        return DeviceArray(address, shape, contiguous(shape), dtype)

    def put(self, array: NDArray[Any]) -> int:
        """Copy ``array`` to a buffer that stays on the device and return its address."""
        return self.put_together([array])[0]

    def put_together(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Copy small arrays into one buffer that stays on the device and return their addresses."""
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
        """Raise NotImplementedError, because a draft computes nothing."""
        raise NotImplementedError

    def launch(self, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """Record a launch unless its grid is empty; raise ValueError if the grid is too large."""
        if prod(launch.grid):
            gpu.check_grid(launch)
            self.launches.append((launch, list(_flat(arguments))))


class Step(NamedTuple):
    """A launch, its loaded function, and the slot of its first parameter."""

    launch: Launch
    function: Any
    first: int


class Parameters:
    """The packed parameters of a plan's launches, in slots of eight bytes, and pointers to them."""

    def __init__(self, packed: bytes) -> None:
        count = len(packed) // 8
        self.slots = (ctypes.c_uint64 * count).from_buffer_copy(packed)
        first = ctypes.addressof(self.slots)
        self._pointers = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self._pointers)


class Plan:
    """The launches that a ``Draft`` recorded, ready to run in any number of threads."""

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
        """Launch the kernels on the stream of ``memory``; ``addresses`` has the arrays' by name."""
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
