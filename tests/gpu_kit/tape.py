"""What a call does with NVIDIA's driver, so that it can be done again where minimha cannot run.

A call is made with the tests' stand-in for the driver, which executes no kernel here. Its launches
are noted with the memory that they are given: addresses become (block, offset), and what was
uploaded is kept once, whatever the number of cases. So ``check`` knows nothing of the rungs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from cuda.bindings import driver as bindings
from numba import types

from minimha.kernels.cuda import driver as gpu

LARGE = 4096  # bytes: options are smaller, and are kept
GRANULE = 256  # bytes: the stand-in leaves one free behind each block of memory


class Tape:
    """Everything that was recorded; ``contents`` of memory by their digests.

    ``ask`` receives each launch whose kernel must be in the kit, and returns the kernel's file.
    """

    def __init__(self, standin: Any, ask: Callable[[Any, tuple[int, int]], str]) -> None:
        self.contents: dict[str, np.ndarray] = {}
        self.is_timed = False  # whether the numbers of a call need not be kept
        self._ask, self.cc = ask, gpu.current().cc
        self._standin, self._files = standin, {}
        self._events: list[dict[str, Any]] = []
        self._blocks: dict[int, int] = {}  # where each begins, and its number on the tape
        self._sizes: list[list[Any]] = []  # bytes, and what is there at first
        self._downloads: list[list[int]] = []
        standin.execute = self._launch
        gpu.cubin = self._named
        for name in ("cuMemcpyDtoH", "cuMemcpyDtoHAsync"):
            setattr(bindings, name, self._noting(getattr(bindings, name)))

    def record(self, call: Any) -> dict[str, Any]:
        """What ``call()`` does: blocks of memory, launches and downloads."""
        self._events, self._blocks, self._sizes, self._downloads = [], {}, [], []
        call()
        return {"blocks": self._sizes, "launches": self._events, "downloads": self._downloads}

    def _named(self, launch: Any, cc: tuple[int, int]) -> tuple[str, bytes]:
        """Ask for the kernel; to the stand-in it is a name and its parameters."""
        file = self._ask(launch, cc)
        name = "kernel_" + file.removesuffix(".code").rpartition("-")[2]
        self._files[name] = file
        parameters = ", ".join(f".param .b64 p{i}" for i in range(_slots(launch.signature)))
        return name, f".visible .entry {name}({parameters})\0".encode()

    def _launch(self, image: int, name: bytes, dimensions: Any, shared: int, slots: Any) -> None:
        count = ctypes.string_at(image).count(b".param")
        values = [ctypes.c_uint64.from_address(slots[i]).value for i in range(count)]
        places = [[i, *place] for i, x in enumerate(values) if (place := self._place(x))]
        self._events.append({
            "file": self._files[name.decode()], "dimensions": list(dimensions[:4]),
            "shared": int(shared), "values": values, "places": places,
        })  # fmt: skip

    def _noting(self, download: Any) -> Any:
        def noted(to: Any, address: Any, size: int, *stream: Any) -> Any:
            place = self._place(int(address))
            if place:
                self._downloads.append([*place, int(size)])
            return download(to, address, size, *stream)

        noted.__name__ = download.__name__
        return noted

    def _place(self, address: int) -> list[int] | None:
        """The block in which an address is, which then is on the tape, and the offset in it."""
        memory = self._standin.memory
        at = address - memory.start
        if not 0 <= at < memory.data.size or not memory.valid[at // GRANULE]:
            return None
        first = last = at // GRANULE
        while memory.valid[first - 1]:
            first -= 1
        while memory.valid[last + 1]:
            last += 1
        start, end = first * GRANULE, last * GRANULE + int(memory.valid[last])
        if start not in self._blocks:
            self._blocks[start] = len(self._sizes)
            self._sizes.append([end - start, self._kept(memory.data[start:end])])
        return [self._blocks[start], at - start]

    def _kept(self, there: np.ndarray) -> str:
        """The name of what is there; what a timed call is given is "numbers", and 0 here."""
        if self.is_timed and there.size >= LARGE:
            return "nan" if there.any() else "numbers"
        content = there.copy()
        digest = sha256(content.tobytes()).hexdigest()[:16]
        self.contents[digest] = content
        return digest


def _slots(signature: Any) -> int:
    """How many slots the parameters of a kernel fill, eight bytes each."""
    count = 0
    for kind in signature:
        if isinstance(kind, types.Array):
            count += 5 + 2 * kind.ndim
        elif isinstance(kind, types.BaseTuple):
            count += _slots(tuple(kind))
        else:
            count += 1
    return count
