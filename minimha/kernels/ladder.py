"""List the kernels, called rungs, from simple to fast: each is a file that adds one idea.

A rung is a module. A CPU rung has ``forward(problem)``, and supports every problem. A CUDA rung has
``unsupported(problem)`` and ``launches(…)``, see ``cuda/arguments.py``. All rungs pass the same
tests as the equations. No rung is imported before it is used, because numba is slow to import.

The last paragraph of a rung's module docstring is the measured speed.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Rung(NamedTuple):
    """The idea of a kernel, and the problems that the kernel supports."""

    idea: str
    takes: str = "every problem"


LADDER = {
    "cpu.rung1_rows": Rung("one query and one key at a time, the online softmax"),
    "cpu.rung2_tiles": Rung("blocks of queries against blocks of keys: Algorithm 1"),
    "cpu.rung3_vector_tiles": Rung("queries across the lanes of vectors, sums in registers"),
    "cpu.rung4_parallel": Rung("every core; only the tiles that some query sees"),
    "cpu.rung5_decode": Rung(
        "few queries: the keys are split, K and V are read once",
        "every problem; made for few queries",
    ),
    "cpu.rung6_matrix_unit": Rung(
        "16-bit products in the CPU's matrix unit, Intel AMX",
        "every problem; made for float16 and bfloat16 on CPUs with AMX",
    ),
}
CUDA_LADDER = {
    "cuda.rung1_rows": Rung(
        "one thread per query, the online softmax",
        "every problem but key_indices; 16 bits are widened first",
    ),
    "cuda.rung2_tiles": Rung(
        "a block of threads shares tiles of keys and values",
        "every problem but key_indices; 16 bits are widened first",
    ),
    "cuda.rung3_register_tiles": Rung(
        "8 × 8 scores per thread, in registers: each number read is used eight times",
        "float32, heads up to 256 wide; 16 bits are widened first",
    ),
    "cuda.rung4_tensor_cores": Rung(
        "mma.sync: 16-bit products on the tensor cores, loads that overlap with them",
        "float16 and bfloat16, heads up to 256 wide; GPUs from sm_80 on",
    ),
    "cuda.rung5_decode": Rung(
        "few queries: the keys are split among warps, K and V are read once",
        "float32 and 16 bits, heads up to 256 wide; made for few queries",
    ),
    "cuda.rung6_warpgroups": Rung(
        "wgmma: four warps multiply at once, while they compute the next softmax and others copy",
        "float16 and bfloat16, heads up to 256 wide; sm_90a alone",
    ),
}
FEW_QUERIES = 8  # at most: reading K and V then takes all the time, and a panel is mostly padding


def measured(rung: str) -> str:
    """Return the measured speed of ``rung``: the last paragraph of its module's docstring.

    The module is not imported.
    """
    spec = find_spec(f"minimha.kernels.{rung}")
    source = spec and spec.origin and Path(spec.origin).read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(source or "")) or ""
    return " ".join(header.rpartition("\n\n")[2].removeprefix("Measured: ").split())
