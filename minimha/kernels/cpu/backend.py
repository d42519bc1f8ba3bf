"""Define the backend "cpu", which computes each problem with the fastest CPU kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cpu import (
    delta_rule,
    functions,
    rung4_parallel,
    rung5_decode,
    rung6_matrix_unit,
)
from minimha.kernels.cpu.kernel import CompilationFailed, Kernel, Plan
from minimha.kernels.cpu.pool import pool
from minimha.kernels.cpu.threads import get_num_threads
from minimha.kernels.ladder import FEW_QUERIES

__all__ = ["CompilationFailed", "compile_ahead", "forward", "plan", "unsupported"]
STORAGE = {
    "float32": "float32", "float64": "float64", "float16": "uint16", "bfloat16": "uint16",
    "int8": "int8", "float8_e4m3fn": "uint8",
}  # fmt: skip
Job = tuple[Kernel, np.dtype[Any]]  # to compile, for that dtype of storage


def unsupported(problem: Problem) -> str | None:
    """Return why numba cannot compile ``score_mod`` or ``mask_mod``, or None if it can."""
    return functions.unsupported(problem)


def forward(problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O and log-sum-exp L of ``problem``; see ``minimha.equations.dense.forward``.

    Arrays are read in place if their last axis is contiguous. The CPU's matrix unit, if it has one,
    multiplies float16 and bfloat16. Otherwise these are widened to float32 block by block. The
    first call for a dtype on a machine compiles a kernel, which takes about ten seconds.
    """
    return plan(problem)(problem)


def plan(problem: Problem) -> Plan | Parts:
    """Compile the fastest kernel for ``problem``, and return a ``Plan`` that runs it.

    If only some packed sequences have few queries (``FEW_QUERIES``), two kernels are planned and
    the result is ``Parts``.
    """
    is_few = problem.num_queries <= FEW_QUERIES
    if problem.sequences is not None and is_few.any() and not is_few.all():
        return Parts(problem, is_few)
    planned: Plan = _rung(problem).plan(problem)
    return planned


class Parts:
    """Two plans for packed sequences: one for sequences with few queries, one for the others.

    ``is_few`` (n,) tells for each sequence which plan computes it.
    """

    def __init__(self, problem: Problem, is_few: NDArray[np.bool_]) -> None:
        assert problem.sequences is not None
        self._is_few_row = np.repeat(is_few, problem.num_queries)
        self._plans: list[Plan] = []
        for chosen in (~is_few, is_few):
            part = replace(
                problem, sequences=problem.sequences.some(chosen),
                q_offset=problem.q_offset[chosen], kv_lengths=problem.kv_lengths[chosen],
            )  # fmt: skip
            self._plans.append(_rung(part).plan(part))

    def __call__(self, problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return O and L of a problem, like ``Plan``."""
        return self._together([plan(problem) for plan in self._plans])

    def run(self, *given: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Run both plans, and return output O and log-sum-exp L; see ``Plan.run``."""
        return self._together([plan.run(*given) for plan in self._plans])

    def fits(self, problem: Problem, given: Sequence[NDArray[Any]]) -> bool:
        """Return whether both plans can serve later calls with arrays like ``given``."""
        return all(plan.fits(problem, given) for plan in self._plans)

    def _together(
        self, results: Sequence[tuple[NDArray[Any], NDArray[Any]]]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        (O, L), (O_few, L_few) = results
        rows = self._is_few_row
        O[:, :, rows], L[:, :, rows] = O_few[:, :, rows], L_few[:, :, rows]
        return O, L


def is_ready(problem: Problem) -> bool:
    """Return whether this process has loaded or compiled kernel and functions of ``problem``."""
    kernel: Kernel = _rung(problem).KERNEL
    return kernel.storage(problem) in kernel.compiled and functions.is_ready(problem)


def is_stored(problem: Problem) -> bool:
    """Return whether the machine code of the kernel for ``problem`` is on disk."""
    kernel: Kernel = _rung(problem).KERNEL
    return kernel.file(kernel.storage(problem)).read() is not None


def compile_ahead(
    dtypes: Sequence[str], progress: Callable[[str], None] = lambda doing: None
) -> dict[str, Path | None]:
    """Compile the kernels for ``dtypes``; return the file of each kernel, by its name.

    The file is None if the kernel could not be stored on disk. This process and others that it
    starts share the work. If another process could not store a kernel, this process compiles it
    again. ``progress`` is called with the name of each kernel that this process compiles or loads.
    """
    wanted = [
        (module.KERNEL, np.dtype(storage))
        for storage in dict.fromkeys(STORAGE[dtype] for dtype in dtypes)
        for module in (*rungs(np.dtype(storage)), delta_rule)
        if module is not delta_rule or np.dtype(storage).itemsize > 1
    ]
    missing = [(kernel, dtype) for kernel, dtype in wanted if not kernel.file(dtype).read()]
    threads = get_num_threads()
    own, *others = [missing[n::threads] for n in range(threads)]

    def compile_here(jobs: Sequence[Job]) -> None:
        for kernel, dtype in jobs:
            progress(kernel.name(dtype))
            kernel.compile(dtype, is_ahead=True)

    with _compiled_elsewhere([share for share in others if share]):
        compile_here(own)
    compile_here([job for job in wanted if job not in own])
    pool()  # compiles the code of its threads
    return {kernel.name(dtype): kernel.file(dtype).path() for kernel, dtype in wanted}


@contextmanager
def _compiled_elsewhere(shares: Sequence[Sequence[Job]]) -> Iterator[None]:
    """Compile each share in a background process, ignoring errors: a later use raises them."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    processes = []
    try:
        if sys.executable and not getattr(sys, "frozen", False):  # frozen: without Python
            for share in shares:
                command = [sys.executable, "-c", _program(share)]
                with suppress(OSError):  # not enough memory or processes
                    processes.append(subprocess.Popen(command, env=environment, **silent))
        yield
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _program(jobs: Sequence[Job]) -> str:
    """Return Python source that compiles the kernels of ``jobs`` and the code of helper threads."""
    lines = [
        f"from {kernel.function.__module__} import KERNEL\n"
        f"KERNEL.compile(np.dtype({dtype.name!r}))\n"
        for kernel, dtype in jobs
    ]
    return f"import numpy as np\n{''.join(lines)}from {pool.__module__} import pool\npool()"


def rungs(dtype: np.dtype[Any]) -> tuple[ModuleType, ModuleType]:
    """Return the modules of the kernels for many queries and for few queries of ``dtype``.

    The dtype uint16 stands for float16 and bfloat16.
    """
    has_matrix_unit = rung6_matrix_unit.is_made_for(dtype)
    return rung6_matrix_unit if has_matrix_unit else rung4_parallel, rung5_decode


def _rung(problem: Problem) -> ModuleType:
    # 8-bit keys and values are computed in the compute dtype, whatever the dtype of q.
    dtype = problem.dtype if problem.k_scale is None else problem.compute
    return rungs(dtype)[rung5_decode.longest_q(problem) <= FEW_QUERIES]
