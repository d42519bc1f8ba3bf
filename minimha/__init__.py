"""Every number of attention, from a three-token sentence on paper to a fast kernel."""

from minimha.api import BackendUnavailable, attention, backends, compile
from minimha.kernels.cpu.threads import get_num_threads, set_num_threads

__all__ = [
    "BackendUnavailable",
    "attention",
    "backends",
    "compile",
    "get_num_threads",
    "set_num_threads",
]
__version__ = "0.1.0"
