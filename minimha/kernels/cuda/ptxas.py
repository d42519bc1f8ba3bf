"""Compile the CUDA kernels without a GPU or a driver, and count registers, spills and instructions.

ptxas, NVIDIA's assembler, is a part of nvJitLink, which also compiles the kernels that run on a
GPU. So the machine code is the same.

References: NVIDIA, "PTX ISA"; "CUDA Compiler Driver NVCC", section on ptxas; "CUDA Binary
Utilities", section on nvdisasm.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from minimha.equations.problem import Problem
from minimha.kernels.cuda import sass
from minimha.kernels.cuda.launch import Launch, launches_of
from minimha.kernels.cuda.linker import MachineCode, compiled
from minimha.kernels.ladder import CUDA_LADDER

ARCHS = {"sm_80": (8, 0), "sm_90": (9, 0)}
HEAD_DIMS = (64, 128)
IN_REPORT = {  # of ptxas
    "stack": r"(\d+) bytes stack frame",
    "spill": r"(\d+) bytes spill (?:stores|loads)",
    "registers": r"Used (\d+) registers",
}
IN_CODE = ("per_product", "tile_local", "all_local")  # as nvdisasm lists it
IN_PTX = {
    "local": r"\.local\b", "mma": r"mma(?:\.|_async\.)sync", "ldmatrix": r"ldmatrix",
    "cp_async": r"cp\.async\.c[ag]",
}  # fmt: skip
WARNING = re.compile(r"^ptxas (?:warning|info\s*: \(C\d+\))", re.MULTILINE)  # info: lost speed


class Assembled(NamedTuple):
    """Statistics of one kernel for one architecture, dtype and head width.

    ptxas reports ``registers`` per thread, bytes of ``stack`` and ``spill``, and the number of
    ``warnings``. ``local``, ``mma``, ``ldmatrix`` and ``cp_async`` count these words in the PTX.
    ``per_product``, ``tile_local`` and ``all_local`` come from the machine code and are None
    without nvdisasm. ``per_product`` is the number of instructions in a whole tile per product on
    the tensor cores, or None without such products. ``tile_local`` counts loads and stores of
    spilled registers in that tile, and ``all_local`` counts them in all code.
    """

    rung: str
    kernel: str
    arch: str
    dtype: str
    head_dim: int
    registers: int
    stack: int
    spill: int
    warnings: int
    per_product: float | None
    tile_local: int | None
    all_local: int | None
    local: int
    mma: int
    ldmatrix: int
    cp_async: int


@cache
def nvdisasm() -> str | None:
    """Return the path of nvdisasm, NVIDIA's disassembler, or None if it is not installed."""
    found = shutil.which("nvdisasm")
    spec = None if found else find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("**/bin/nvdisasm")):
            return str(path)
    return found


def assembled(rungs: tuple[str, ...] = tuple(CUDA_LADDER)) -> Iterator[Assembled]:
    """Yield the statistics of each kernel of ``rungs`` for each architecture, dtype and width."""
    for rung in rungs:
        for head_dim in HEAD_DIMS:
            for dtype, launch in _kernels(rung, head_dim):
                for arch, cc in archs_of(launch).items():
                    kernel, name = compiled(launch, cc), launch.function.__name__
                    text = kernel.ptx()
                    counts = {key: len(re.findall(p, text)) for key, p in IN_PTX.items()}
                    found = statistics(kernel.machine_code()) | counts
                    yield Assembled(rung, name, arch, dtype, head_dim, **found)


def archs_of(launch: Launch) -> dict[str, tuple[int, int]]:
    """Return the architectures for which to compile a kernel, with their compute capabilities.

    They are ``ARCHS``, or only sm_90a if the kernel is for one architecture.
    """
    return {"sm_90a": (9, 0)} if launch.is_arch_specific else ARCHS


def _kernels(rung: str, head_dim: int) -> Iterator[tuple[str, Launch]]:
    """Yield each kernel of ``rung`` once, with the first dtype that uses it."""
    module = import_module(f"minimha.kernels.{rung}")
    known = set()
    dtypes: list[DTypeLike] = [np.float32, np.float64, np.float16]
    if find_spec("ml_dtypes"):
        dtypes.append(import_module("ml_dtypes").bfloat16)
    for dtype in dtypes:
        Lq = 1 if "decode" in rung else 256
        q, k = np.zeros((1, 32, Lq, head_dim), dtype), np.zeros((1, 8, 4096, head_dim), dtype)
        problem = Problem.of(q, k, k)
        if module.unsupported(problem):
            continue
        for launch in launches_of(rung, problem):
            if (launch.function, launch.signature) not in known:
                known.add((launch.function, launch.signature))
                yield np.dtype(dtype).name, launch


def statistics(kernel: MachineCode) -> dict[str, Any]:
    """Return the statistics of a kernel's machine code by name.

    The names are those of ``IN_REPORT``, "warnings" and those of ``IN_CODE``. Without nvdisasm,
    values of ``IN_CODE`` are None.
    """
    report = kernel.report
    found = {name: sum(map(int, re.findall(p, report))) for name, p in IN_REPORT.items()}
    return found | {"warnings": len(WARNING.findall(report))} | _in_code(listing(kernel))


def listing(kernel: MachineCode) -> str:
    """Return the kernel's machine instructions as text, or "" without nvdisasm."""
    program = nvdisasm()
    if program is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.code)
        command = [program, "-c", str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _in_code(text: str) -> dict[str, Any]:
    if not text:
        return dict.fromkeys(IN_CODE)
    instructions = sass.parse(text)
    tile = sass.whole_tile(instructions)
    every = _local([one.name for one in instructions])
    return dict(zip(IN_CODE, (sass.per_product(tile), _local(tile), every), strict=True))


def _local(names: list[str]) -> int:
    return sum(name in sass.LOCAL for name in names)
