"""Every number of attention, from a three-token sentence on paper to a fast kernel."""

from minimha.api import BackendUnavailable, attention, backends

__all__ = ["BackendUnavailable", "attention", "backends"]
__version__ = "0.1.0"
