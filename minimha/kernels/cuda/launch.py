"""Describe a kernel and its launch, for the linker, the driver and the emulator in tests."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from minimha.equations.problem import Problem
from minimha.kernels.cuda.arguments import PLACEHOLDERS


class Launch(NamedTuple):
    """A kernel's Python function, the types of its arguments, and the sizes of its launch."""

    function: Callable[..., None]  # it captures block sizes and options as constants
    signature: tuple[Any, ...]  # numba types
    grid: tuple[int, int, int]  # thread blocks
    threads: int  # per block
    shared: int = 0  # bytes of dynamic shared memory per block
    blocks: int = 1  # that a multiprocessor must be able to run at once, which limits registers
    is_arch_specific: bool = False  # whether it is for one architecture only: sm_90a, not sm_90


Launches = list[tuple[Launch, tuple[Any, ...]]]  # each with the kernel's arguments
Scratch = Callable[[tuple[int, ...]], int]  # the address of float32 memory of that shape


def launches_of(rung: str, problem: Problem) -> list[Launch]:
    """Return the launches of the kernel ``rung`` for ``problem``, to be compiled, not started."""
    launches = import_module(f"minimha.kernels.{rung}").launches
    return [launch for launch, _ in launches(problem, PLACEHOLDERS, lambda shape: 0)]


def arch_of(launch: Launch, cc: tuple[int, int]) -> str:
    """Return the architecture for which the kernel is compiled, such as "sm_90" or "sm_90a"."""
    return f"sm_{cc[0]}{cc[1]}{'a' if launch.is_arch_specific else ''}"
