"""Whole problems in the memory of the simulator or the emulator, which run a rung by itself."""

import numpy as np

from minimha.kernels.cuda.arguments import (
    as_addresses,
    as_arrays,
    host_arrays,
    row_width,
    to_device,
)


def upload_arrays(problem, put):
    """The arguments for ``problem``, each array as ``put`` returns it; O and L are 0."""
    (B, H, Lq, _), Dv = problem.q.shape, problem.v.shape[3]
    given = host_arrays(problem, problem.compute)
    given["O"] = np.zeros((B, H, Lq, Dv), problem.compute)
    given["L"] = np.zeros((B, H, Lq), problem.compute)
    return as_arrays(problem, {name: put(array) for name, array in given.items()}, put)


def upload(problem, memory, unit=16):
    """Upload ``problem``, float32 or 16-bit, and return the arguments for it; O and L are 0.

    ``unit`` is the ``ROW_UNIT`` of the rung.
    """
    B, H, Lq, _ = problem.q.shape
    width = row_width(problem, unit)
    given = host_arrays(problem, problem.dtype, width)
    given["O"] = np.zeros((B, H, Lq, width), problem.dtype)
    given["L"] = np.zeros((B, H, Lq), np.float32)
    return as_addresses(
        problem,
        {name: to_device(array, memory) for name, array in given.items()},
        lambda lines: [memory.put(line) for line in lines],
    )


def download(problem, arguments, memory):
    """Download O, in the problem's dtype, and L."""
    B, H, Lq, _ = problem.q.shape
    O = memory.get(arguments.O.address, (B, H, Lq, arguments.O.row), problem.dtype)
    L = memory.get(arguments.L, (B, H, Lq), np.float32)
    return O[..., : problem.v.shape[3]], L
