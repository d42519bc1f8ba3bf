"""What holds for all tests."""

import importlib
import os
import secrets
import shutil
import signal

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core, each with one thread of BLAS
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # which NumPy reads when it is imported

import numpy as np
import pytest
from hypothesis import settings

from minimha.kernels import auto
from minimha.layers import linear

# Everybody tests the same problems. ``--hypothesis-profile fresh`` draws as many others, "explore"
# four times as many; tests with counts of their own multiply ``settings.default.max_examples``.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("fresh", deadline=None, database=None)
settings.register_profile("explore", deadline=None, database=None, max_examples=400)
settings.load_profile("same")

FLOAT32 = np.dtype(np.float32)
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")

# Programs, and tests for a process of their own: importing them replaces numba's CUDA or torch.
collect_ignore = [
    "gpu_kit/check.py", "kernels/cuda/simulator.py", "kernels/cuda/standin/on_tensors.py",
    "world/train.py",
]  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Choose the seed of fresh problems before Hypothesis does, once for all workers."""
    option = config.option
    if option.hypothesis_profile in ("fresh", "explore"):
        option.hypothesis_seed = option.hypothesis_seed or str(secrets.randbelow(2**32))
        option.timeout = option.timeout or 1800


def pytest_sessionstart(session):
    """Show the seed, also of a run that does not end."""
    seed = session.config.option.hypothesis_seed
    if seed and not hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer().line(f"--hypothesis-seed={seed}")


def pytest_collection_modifyitems(items):
    """Take the longest tests first: at the end, a worker with one would let the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def dense_by_default(monkeypatch):
    """Which kernels other tests have compiled must not decide what this one computes with."""
    monkeypatch.setattr(auto, "choose", lambda problem: "dense")
    monkeypatch.setattr(linear, "_by_kernel", lambda name, rows, W: None)


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


@pytest.fixture(scope="session")
def browser():
    """A browser, Debian's Chromium driven by Playwright, or a reason why there is none."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install '.[browser-test]')"
    )
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"no browser on this machine: one of {', '.join(BROWSERS)} is needed")
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def compiled_decoding():
    """Load or compile all that a token of weights in some formats needs, as a long text would."""
    sublayer = pytest.importorskip("minimha.kernels.cpu.sublayer")
    if not sublayer.IS_POSSIBLE:
        pytest.skip("helpers sleep in Python here, where compiled code cannot wake them")
    backend = pytest.importorskip("minimha.kernels.cpu.backend")
    backend.rungs(FLOAT32)[1].KERNEL.compile(FLOAT32)
    for name in ("bfloat16", "float32", "Q8_0", "Q4_K", "Q6_K"):
        importlib.import_module(linear.KERNEL).compile(name)
    sublayer.compile()
