"""Runs a program with the stand-in for NVIDIA's driver: see the package."""

import os
import runpy
import sys
from contextlib import suppress

from kernels.cuda import standin

if __name__ == "__main__":
    arguments = sys.argv[1:]
    emulation = arguments[0] != "--no-emulation"
    standin.driver = standin.start(emulation)
    with suppress(ModuleNotFoundError):  # without numba-cuda nothing is compiled
        standin.machine_code_is_ptx()
    sys.argv = arguments[0 if emulation else 1 :]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
