"""Compile the CUDA kernels without GPU or driver: numba generates PTX, ptxas machine code.

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
from minimha.kernels.cuda.launch import Launch, launches_of, ptx
from minimha.kernels.ladder import CUDA_LADDER

ARCHS = {"sm_80": (8, 0), "sm_90": (9, 0)}
HEAD_DIMS = (64, 128)
IN_REPORT = {  # of ptxas -v
    "stack": r"(\d+) bytes stack frame",
    "spill": r"(\d+) bytes spill (?:stores|loads)",
    "registers": r"Used (\d+) registers",
}
IN_TILE = ("per_product", "tile_local")  # of ``sass.whole_tile``
IN_PTX = {
    "local": r"\.local\b", "mma": r"mma(?:\.|_async\.)sync", "ldmatrix": r"ldmatrix",
    "cp_async": r"cp\.async\.c[ag]",
}  # fmt: skip
WARNING = re.compile(r"^ptxas (?:warning|info\s*: \(C\d+\))", re.MULTILINE)  # info: lost speed


class Assembled(NamedTuple):
    """Statistics of one kernel for one architecture, dtype and head width.

    ptxas reports ``registers`` per thread, ``stack`` and ``spill`` in bytes, and the number of
    ``warnings``, which are None without ptxas. ``local``, ``mma``, ``ldmatrix`` and ``cp_async``
    count occurrences in the PTX. Of a whole tile, ``per_product`` is the number of machine
    instructions per product on the tensor cores. ``tile_local`` counts the tile's loads and stores
    of spilled registers. Both are None without nvdisasm or without tensor cores.
    """

    rung: str
    kernel: str
    arch: str
    dtype: str
    head_dim: int
    registers: int | None
    stack: int | None
    spill: int | None
    warnings: int | None
    per_product: float | None
    tile_local: int | None
    local: int
    mma: int
    ldmatrix: int
    cp_async: int


@cache
def program(name: str) -> str | None:
    """Return the path of ptxas or nvdisasm, from PATH or NVIDIA's Python packages, or None."""
    found = shutil.which(name)
    spec = None if found else find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob(f"**/bin/{name}")):
            return str(path)
    return found


def assembled(rungs: tuple[str, ...] = tuple(CUDA_LADDER)) -> Iterator[Assembled]:
    """Yield statistics of every kernel of ``rungs``, for every architecture, dtype and width."""
    for rung in rungs:
        for head_dim in HEAD_DIMS:
            for dtype, launch in _kernels(rung, head_dim):
                for arch, cc in archs_of(launch).items():
                    text, name = ptx(launch, cc), launch.function.__name__
                    counts = {key: len(re.findall(p, text)) for key, p in IN_PTX.items()}
                    found = by_ptxas(text, arch, launch.registers) | counts
                    yield Assembled(rung, name, arch, dtype, head_dim, **found)


def archs_of(launch: Launch) -> dict[str, tuple[int, int]]:
    """Return the architectures for which to assemble a kernel: ``ARCHS``, or only sm_90a."""
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


def by_ptxas(text: str, arch: str, registers: int | None) -> dict[str, Any]:
    """Assemble a kernel's PTX; map ``IN_REPORT``, "warnings" and ``IN_TILE`` to its statistics.

    All are None without ptxas, and ``IN_TILE`` is None without nvdisasm. ``arch`` is an
    architecture such as "sm_90", and one thread may use at most ``registers``. Raises RuntimeError
    with ptxas's message if ptxas refuses the kernel.
    """
    ptxas = program("ptxas")
    if ptxas is None:
        return dict.fromkeys((*IN_REPORT, "warnings", *IN_TILE))
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        limit = [] if registers is None else [f"-maxrregcount={registers}"]
        command = [ptxas, f"-arch={arch}", "-v", *limit, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas refuses a kernel for {arch}: {report.strip()}")
        found = {name: sum(map(int, re.findall(p, report))) for name, p in IN_REPORT.items()}
        return found | {"warnings": len(WARNING.findall(report))} | _in_whole_tile(cubin)


def _in_whole_tile(cubin: Path) -> dict[str, Any]:
    nvdisasm = program("nvdisasm")
    names = sass.whole_tile(sass.disassemble(nvdisasm, cubin)) if nvdisasm else []
    if not names:
        return dict.fromkeys(IN_TILE)
    per_product = round(sass.per_product(names), 2)
    return dict(zip(IN_TILE, (per_product, sum(name in sass.LOCAL for name in names)), strict=True))
