"""Whether CUDA kernels can run, and the reason where they cannot; no GPU is needed."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from minimha import BackendUnavailable, attention, backends
from minimha.kernels.cuda import availability


def test_without_the_extra_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert "pip install 'minimha[cuda]'" in backends()["cuda"]
    x = np.zeros((3, 4))
    with pytest.raises(BackendUnavailable, match="'cuda' cannot run: numba-cuda, which compiles"):
        attention(x, x, x, backend="cuda")


@pytest.mark.parametrize(
    ("status", "count", "reason"),
    [
        (0, 0, "no GPU is found by NVIDIA's driver; use 'cpu'"),
        (100, 0, "no GPU is found by NVIDIA's driver; use 'cpu'"),
        (803, 0, "NVIDIA's driver does not start (CUDA error 803)"),
        (0, 2, None),
    ],
)
def test_the_driver_s_answer_is_translated(status, count, reason, monkeypatch):
    def devices(pointer):
        pointer._obj.value = count
        return 0

    library = SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=devices)
    monkeypatch.setattr(availability.ctypes, "CDLL", lambda name: library)
    found = availability.reason_without_gpu.__wrapped__()
    assert found is None if reason is None else reason in found


def test_a_missing_driver_is_reported(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(availability.ctypes, "CDLL", missing)
    assert "NVIDIA's driver" in availability.reason_without_gpu.__wrapped__()
    monkeypatch.setattr(availability.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert "is not NVIDIA's driver" in availability.reason_without_gpu.__wrapped__()


def test_the_simulator_is_not_a_gpu(monkeypatch):
    monkeypatch.setattr(availability, "find_spec", lambda name: True)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert "numba's simulator compiles nothing" in backends()["cuda"]


def test_asking_for_backends_imports_no_numba():
    code = "import sys, minimha; minimha.backends(); print('numba' in sys.modules)"
    same = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=same
    )
    assert done.stdout.strip() == "False"
    assert not done.stderr
