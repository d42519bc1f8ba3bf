"""What a kernel needs to be launched, and its PTX; no GPU and no driver are needed for either.

The driver, the offline compiler and the tests' emulator all accept a ``Launch`` as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda


class Launch(NamedTuple):
    """One kernel, ready to be compiled and started.

    Attributes
    ----------
    function : callable
        The kernel's Python function, its block sizes and options closed over as constants.
    signature : tuple of numba types
    grid : (int, int, int)
        Thread blocks.
    threads : int
        Per block.
    shared : int, default 0
        Bytes of dynamic shared memory.
    registers : int, optional
        The most that one thread may use. Unlimited by default.
    """

    function: Callable[..., None]
    signature: tuple[Any, ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    registers: int | None = None


def ptx(launch: Launch, cc: tuple[int, int] = (9, 0)) -> str:
    """Return the kernel's PTX for compute capability ``cc``; no GPU and no driver are needed."""
    text, _ = cuda.compile(
        launch.function,
        launch.signature,
        device=False,
        abi="numba",
        cc=cc,
        launch_bounds=(launch.threads, 1),
        output="ptx",
    )
    return str(text)
