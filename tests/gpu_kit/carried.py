"""Runs a program, ``python carried.py -m MODULE [ARGUMENT …]``, with this folder's kernels.

They are looked for by the versions of the toolkit that compiled them, whatever is installed here.
What was not carried is compiled here if it can be.
"""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDED = ("numpy", "numba", "numba_cuda", "cuda", "ml_dtypes", "rich")


def install():
    """Let minimha find the carried kernels, or exit with what is lacking."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        print(f"lacking here: {', '.join(missing)}; check.py needs none of them but NumPy")
        raise SystemExit(2)
    os.environ["NUMBA_CACHE_DIR"] = str(HERE / "cubins")  # for further processes
    sys.path[:0] = [str(HERE / "src"), str(HERE / "src" / "tests")]
    import numba
    import numpy as np

    numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]  # numba may have been imported before
    if not hasattr(np, "row_stack"):  # numba-cuda 0.30.4 asks for what NumPy 2.5 dropped
        np.row_stack = np.vstack
    from minimha.kernels.cuda import cubins

    toolkit = (HERE / "toolkit.txt").read_text()
    cubins.toolkit = lambda: toolkit


def main():
    """Run the program."""
    install()
    _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
