"""Each problem of the bench once, on this machine's GPU, to be profiled.

    python carried.py -m calls [TEXT]

calls the rungs that the backend chooses, and for a GPU that has them the rungs that it chooses only
if they are named; of these calls, those whose name contains TEXT.
"""

import os
import sys
from importlib import import_module

from minimha.bench.gpu import SHAPES
from minimha.equations.problem import Problem, stand_in
from minimha.kernels.cuda import backend
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.ladder import ALSO, IF_NAMED


def outline(shape):
    """The problem of a shape, whose numbers are all zero and take no memory."""
    dtype = getattr(import_module("ml_dtypes"), shape.dtype, shape.dtype)
    q = stand_in((shape.B, shape.H, shape.Lq, shape.D), dtype)
    k = stand_in((shape.B, shape.Hkv, shape.Lk, shape.D), dtype)
    return Problem.of(q, k, k, is_causal=shape.mask == "causal")


def rungs(problem):
    """The rungs that take ``problem`` on this GPU, and the problem as each of them takes it."""
    found = {}
    for named in ("", *IF_NAMED):
        os.environ[ALSO] = named
        name, taken = backend.rung_for(problem, gpu.current())
        found.setdefault(name, taken)
    del os.environ[ALSO]
    return found


def main(only=""):
    """Call them."""
    for shape in SHAPES:
        wanted = [name for name in rungs(outline(shape)) if only in f"{name} {shape}"]
        if wanted:
            arrays = (x.astype(outline(shape).dtype) for x in shape.inputs().arrays)
            given = rungs(Problem.of(*arrays, is_causal=shape.mask == "causal"))
        for name in wanted:
            print(name, shape, flush=True)
            backend.solve(name, given[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
