"""Compute attention with NumPy or with CPU and GPU kernels, and show every intermediate number."""

from importlib import import_module
from typing import TYPE_CHECKING

from minimha.api import (
    BackendUnavailable,
    BlockMask,
    attention,
    backends,
    block_mask,
    compile,
    get_num_threads,
    set_num_threads,
)
from minimha.equations.merge import merge

__all__ = [
    "BackendUnavailable", "BlockMask", "assert_close", "attention", "backends", "block_mask",
    "check", "compile", "dialects", "error_bound", "explain", "gated_delta_rule",
    "get_num_threads", "layers", "merge", "models", "set_num_threads",
]  # fmt: skip
__version__ = "0.1.0"

if TYPE_CHECKING:
    from minimha import dialects, explain, layers, models
    from minimha import distributed as distributed
    from minimha.check import check
    from minimha.check.bounds import assert_close, error_bound
    from minimha.delta_rule import gated_delta_rule
else:

    def __getattr__(name):
        """Import an attribute of this package on first use, so that ``import minimha`` is fast."""
        if name == "gated_delta_rule":
            return import_module(f"{__name__}.delta_rule").gated_delta_rule
        if name in ("assert_close", "error_bound"):
            return getattr(import_module(f"{__name__}.check.bounds"), name)
        if name in (*__all__, "distributed"):  # not in __all__, since it needs dask
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
