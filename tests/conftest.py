"""What holds for all tests."""

import os
import signal

import pytest
from hypothesis import settings

from minimha.kernels import auto

# Hypothesis draws new examples at each run, but always the same ones in CI.
settings.register_profile("fresh", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same" if os.environ.get("CI") else "fresh")

# A program that switches numba's simulator on, for good, when it is imported.
collect_ignore = ["kernels/cuda/simulator.py"]


def pytest_collection_modifyitems(items):
    """Take the longest tests first: at the end, a worker with one would let the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def dense_by_default(monkeypatch):
    """Which kernels other tests have compiled must not decide what this one computes with."""
    monkeypatch.setattr(auto, "choose", lambda problem: "dense")


@pytest.fixture
def signals_that_arrive():
    """What ``nohup`` or a shell's ``&`` ignores, every program started here would ignore too."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
