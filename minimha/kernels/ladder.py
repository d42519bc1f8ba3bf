"""The ladders: how fast attention can be computed, one file per rung, one idea per rung.

A rung is a module with ``unsupported(problem)``. A CPU rung has ``forward(problem)``, a CUDA rung
``launches(…)``, see ``cuda/arguments.py``. All rungs pass the same tests as the equations. No rung
is imported before it is used, because numba is slow to import.
"""

from typing import NamedTuple


class Rung(NamedTuple):
    """A rung's idea, the problems it takes, and its speed as measured, with where and when."""

    idea: str
    takes: str
    measured: str


EPYC = "two cores of an AMD EPYC, 2026-11-21"
NO_GPU = "not measured: no GPU yet"
TFLOPS = "TFLOP/s on an H200"  # estimates: walkthroughs/8-a-ladder-on-the-gpu.md says from what

LADDER = {
    "cpu.rung1_rows": Rung(
        "one query and one key at a time, the online softmax",
        "every problem",
        f"2.5 GFLOP/s on one core; {EPYC}",
    ),
    "cpu.rung2_tiles": Rung(
        "blocks of queries against blocks of keys: Algorithm 1",
        "every problem",
        f"6 × rung 1; {EPYC}",
    ),
    "cpu.rung3_vector_tiles": Rung(
        "queries across the lanes of vectors, sums in registers",
        "every problem",
        f"9 × rung 2; {EPYC}",
    ),
    "cpu.rung4_parallel": Rung(
        "every core; only the tiles that some query sees",
        "every problem",
        f"2.1 × rung 3, 2.6 × with a causal mask; {EPYC}",
    ),
    "cpu.rung5_decode": Rung(
        "few queries: the keys are split, K and V are read once",
        "every problem; made for few queries",
        f"80 % or more of the bandwidth of reading alone; {EPYC}",
    ),
    "cpu.rung6_matrix_unit": Rung(
        "16-bit products in the CPU's matrix unit, Intel AMX",
        "every problem; made for float16 and bfloat16 on CPUs with AMX",
        "2.0 × rung 4 in bfloat16 and 1.4 × in float16, on one core; an Intel Xeon, 2026-11-22",
    ),
}
CUDA_LADDER = {
    "cuda.rung1_rows": Rung(
        "one thread per query, the online softmax",
        "every problem; 16 bits are widened first",
        f"estimate: 3 to 8 {TFLOPS}; {NO_GPU}",
    ),
    "cuda.rung2_tiles": Rung(
        "a block of threads shares tiles of keys and values",
        "every problem; 16 bits are widened first",
        f"estimate: 6 to 12 {TFLOPS}; {NO_GPU}",
    ),
    "cuda.rung3_register_tiles": Rung(
        "8 × 8 scores per thread, in registers: each number read is used eight times",
        "float32, heads up to 256 wide; 16 bits are widened first",
        f"estimate: 30 to 40 {TFLOPS}; {NO_GPU}",
    ),
    "cuda.rung4_tensor_cores": Rung(
        "mma.sync: 16-bit products on the tensor cores, loads that overlap with them",
        "float16 and bfloat16, heads up to 256 wide; GPUs from sm_80 on",
        f"estimate: 310 to 350 {TFLOPS}, from 5.2 instructions per mma for heads 64 wide, 3.8 for "
        f"128 (FlashAttention-2: 4.4 and 3.5); {NO_GPU}",
    ),
    "cuda.rung5_decode": Rung(
        "few queries: the keys are split among warps, K and V are read once",
        "float32 and 16 bits, heads up to 256 wide; made for few queries",
        f"estimate: 80 to 90 % of an H200's 4.8 TB/s; {NO_GPU}",
    ),
    "cuda.rung6_warpgroups": Rung(
        "wgmma: four warps multiply at once, while they compute the next softmax and others copy",
        "float16 and bfloat16, heads up to 256 wide; sm_90a alone, if MINIMHA_CUDA_RUNGS names it",
        NO_GPU,
    ),
}
IF_NAMED = ("cuda.rung6_warpgroups",)  # chosen only if an environment variable names it
ALSO = "MINIMHA_CUDA_RUNGS"  # that variable: rungs, joined by commas, that no GPU has run yet
FEW_QUERIES = 8  # up to here reading K and V is the work, and a panel would be mostly padding
