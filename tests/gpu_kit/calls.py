"""Each problem of the bench once, on this machine's GPU, to be profiled.

    python carried.py -m calls [TEXT]

calls the rungs that the backend chooses; of these calls, those whose name contains TEXT.
"""

import sys
from importlib import import_module

from minimha.bench.gpu import SHAPES
from minimha.equations.problem import Problem, stand_in
from minimha.kernels.cuda import backend
from minimha.kernels.cuda import driver as gpu


def outline(shape):
    """The problem of a shape, whose numbers are all zero and take no memory."""
    dtype = getattr(import_module("ml_dtypes"), shape.dtype, shape.dtype)
    q = stand_in((shape.B, shape.H, shape.Lq, shape.D), dtype)
    k = stand_in((shape.B, shape.Hkv, shape.Lk, shape.D), dtype)
    return Problem.of(q, k, k, is_causal=shape.mask == "causal")


def main(only=""):
    """Call them."""
    for shape in SHAPES:
        small = outline(shape)
        name, _ = backend.rung_for(small, gpu.current())
        if only in f"{name} {shape}":
            print(name, shape, flush=True)
            arrays = (x.astype(small.dtype) for x in shape.inputs().arrays)
            problem = Problem.of(*arrays, is_causal=shape.mask == "causal")
            backend.solve(*backend.rung_for(problem, gpu.current()))


if __name__ == "__main__":
    main(*sys.argv[1:])
