"""What a kernel needs to be launched, and its PTX, without a GPU or a driver.

The driver, the offline compiler and the tests' emulator all accept a ``Launch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda


class Launch(NamedTuple):
    """One kernel, ready to be compiled and launched.

    Attributes
    ----------
    function : callable
        The kernel's Python function, its block sizes and options closed over as constants.
    signature : tuple of numba types
    grid : (int, int, int)
        Thread blocks.
    threads : int
        Threads per block.
    shared : int, default 0
        Bytes of dynamic shared memory per block.
    registers : int, optional
        The most that one thread may use. Default is no limit.
    """

    function: Callable[..., None]
    signature: tuple[Any, ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    registers: int | None = None


def ptx(launch: Launch, cc: tuple[int, int] = (9, 0)) -> str:
    """The kernel's PTX for compute capability ``cc``, by default (9, 0)."""
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
