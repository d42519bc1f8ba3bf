"""Name the files of the CPU kernels' machine code by a digest of all that it depends on."""

from __future__ import annotations

import sys
from functools import cache

import llvmlite
import numba
import numpy as np
from numba.core.registry import cpu_target

from minimha.kernels import disk
from minimha.kernels.disk import PACKAGE

# Sources of the kernels outside this package.
SOURCES = (
    "kernels/options.py", "kernels/score.py", "equations/visibility.py", "equations/block_mask.py",
)  # fmt: skip
SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO_DEFAULT",
    "DEBUG_NRT", "NRT_STATS", "LLVM_REFPRUNE_PASS", "DISABLE_INTEL_SVML", "INTEL_SVML",
)  # fmt: skip


class File(disk.File):
    """A file that stores a function's machine code for one signature, pickled by numba."""

    def __init__(self, name: str, signature: str) -> None:
        super().__init__(name, f"{digest_of_all()} {name} {signature}")


@cache
def digest_of_all() -> str:
    """Return a digest of all sources, versions and settings that determine machine code."""
    facts = [
        sys.implementation.cache_tag, sys.platform, numba.__version__, llvmlite.__version__,
        np.__version__, cpu_target.target_context.codegen().magic_tuple(),
        [getattr(numba.config, name, None) for name in SETTINGS],
    ]  # fmt: skip
    kernels = sorted((PACKAGE / "kernels" / "cpu").rglob("*.py"))
    return disk.digest(facts, [*kernels, *(PACKAGE / source for source in SOURCES)])
