"""A trace of every step, what each name means, and ways to show it."""

from minimha.explain.trace import Step, Trace

__all__ = ["Step", "Trace"]
