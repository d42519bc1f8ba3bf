"""Run CUDA rungs in numba's simulator: read cases from standard input, write O and L to the output.

A separate program, because the simulator is switched on for good before numba is imported.
"""

import os
import pickle
import sys
import threading
import time

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from gpu_problems import upload_arrays
from numba import cuda
from numba.cuda.simulator.kernel import BlockThread

from minimha.equations.problem import Problem
from minimha.kernels.cuda import rung1_rows, rung2_tiles

SMALL = {
    (rung1_rows, "THREADS"): 8,
    (rung1_rows, "WIDE"): 8,
    (rung2_tiles, "B_R"): 4,
    (rung2_tiles, "B_C"): 2,
    (rung2_tiles, "WIDE"): 8,
}


def start_alone(thread):
    """Let a thread reach its first barrier, or its end, before the next one starts.

    Two that start together may both make a shared array, each its own: the simulator has no lock.
    """
    threading.Thread.start(thread)
    while thread.is_alive() and not thread.syncthreads_blocked:
        time.sleep(0)


def solve(rung, arrays, options):
    """O and L from a rung, at whatever block sizes it has now."""
    problem = Problem.of(*arrays, **options)
    assert rung.unsupported(problem) is None
    arguments = upload_arrays(problem, lambda array: np.array(array, order="C"))
    for launch, given in rung.launches(problem, arguments, None):
        if launch.grid[0]:
            cuda.jit(launch.function)[launch.grid, launch.threads](*given)
    return arguments.O, arguments.L


def main():
    BlockThread.start = start_alone
    sys.setswitchinterval(1e-5)  # the simulator waits for its threads in a busy loop
    rungs = {"cuda.rung1_rows": rung1_rows, "cuda.rung2_tiles": rung2_tiles}
    usual = {(module, name): getattr(module, name) for module, name in SMALL}
    results = []
    for name, has_small_blocks, arrays, options in pickle.load(sys.stdin.buffer):
        for (module, constant), size in (SMALL if has_small_blocks else usual).items():
            setattr(module, constant, size)
        for rung in rungs.values():
            rung.kernel.cache_clear()
        results.append(solve(rungs[name], arrays, options))
    pickle.dump(results, sys.stdout.buffer)


if __name__ == "__main__":  # the doctests of all files are collected by importing them
    main()
