"""The extras for CUDA, in fresh environments of the oldest and of the newest Python that is here.

Each takes a minute and 900 MB from the package index, so they are asked for by name:
``MINIMHA_TEST_EXTRAS=cuda,cuda12 python -m pytest tests/test_extras.py``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minimha.kernels.ladder import CUDA_LADDER

ASKED = os.environ.get("MINIMHA_TEST_EXTRAS", "")
if not ASKED:
    pytest.skip("MINIMHA_TEST_EXTRAS names no extra to be installed", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("what is loaded is read from Linux's /proc", allow_module_level=True)

ROOT = Path(__file__).parents[1]
LIMIT = 900  # seconds, for what is downloaded
COMPILE = """
import sys
from importlib import import_module
import ml_dtypes, numpy as np
from minimha.equations.problem import Problem
from minimha.kernels.cuda import cubins
from minimha.kernels.cuda.launch import launches_of
from minimha.kernels.ladder import CUDA_LADDER

for rung in CUDA_LADDER:
    module = import_module(f"minimha.kernels.{rung}")
    for dtype in (np.float32, ml_dtypes.bfloat16):
        problem = Problem.of(*(np.zeros((1, 1, 2, 16), dtype),) * 3)
        if module.unsupported(problem):
            continue
        for launch in launches_of(rung, problem):
            name, code = cubins.cubin(launch, (9, 0))
            print(rung, code[:4] == b"\\x7fELF")
for line in open("/proc/self/maps"):
    if "libnvvm." in line or "libnvJitLink." in line:
        print("library", line.split()[-1].startswith(sys.prefix))
"""


def pythons():
    """The Pythons here that can make environments, from the oldest to the newest."""
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(10, 20):
        of_pyenv = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")
        for path in (shutil.which(f"python3.{minor}"), *of_pyenv):
            if path and not run(path, "-c", "import ensurepip, venv").returncode:
                found[3, minor] = str(path)
    return [found[version] for version in sorted(found)]


def run(*command, **settings):
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, **settings)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What a package is built from, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "minimha", folder / "minimha", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


@pytest.fixture
def environment(tmp_path):
    """A folder that does not stay: pytest keeps what is in ``tmp_path`` for three runs."""
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("extra", ["cuda", "cuda12"])
@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_every_rung_compiles(which, extra, sources, environment, tmp_path):
    if extra not in ASKED.split(","):
        pytest.skip(f"MINIMHA_TEST_EXTRAS does not name {extra}")
    python = environment / "bin" / "python"
    for command in (
        (pythons()[which], "-m", "venv", environment),
        (python, "-m", "pip", "install", "--quiet", f"{sources}[{extra}]"),
        (python, "-W", "error", "-c", COMPILE),
    ):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    compiled = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert compiled == {(name, "True") for name in ("library", *CUDA_LADDER)}
