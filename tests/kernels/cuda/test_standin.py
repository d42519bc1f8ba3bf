"""The whole host path, with a stand-in for NVIDIA's driver under NVIDIA's own Python bindings."""

import subprocess
from pathlib import Path

import pytest
from kernels.cuda import standin

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")
if standin.missing():
    pytest.skip(standin.missing(), allow_module_level=True)

FILES = sorted(Path(standin.__file__).parent.glob("on_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_with_the_stand_in(file):
    command, environment = standin.command("-m", "pytest", "-p", "no:cacheprovider", file)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
