"""Which backend "auto" takes, and that it goes on where the kernels cannot run."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kernels.cpu.test_rungs import ragged

from minimha import BackendUnavailable, attention
from minimha.equations.problem import Problem
from minimha.kernels import auto, remembered
from minimha.kernels.auto import choose  # before other tests are kept to "dense"
from minimha.kernels.cpu import backend, kernel

SMALL = Problem.of(*ragged(Lq=20, Lk=30))


@pytest.fixture
def cold(monkeypatch):
    """As in a process that has compiled nothing yet and spent no time."""
    monkeypatch.setattr(auto, "_spent", {})
    monkeypatch.setattr(auto, "_broken", False)
    monkeypatch.setattr(auto, "choose", choose)
    remembered.forget()
    for module in backend.rungs(SMALL.dtype):
        monkeypatch.setattr(module.KERNEL, "compiled", {})


def test_a_kernel_that_is_compiled_is_taken_at_every_size():
    attention(SMALL.q, SMALL.k, SMALL.v, backend="cpu")
    assert choose(SMALL) == "cpu"


@pytest.mark.parametrize(
    ("spent", "is_stored", "expected"),
    [
        (0, True, "dense"),
        (0, False, "dense"),
        (auto.LOADING_MORE, True, "cpu"),  # numba is imported here
        (auto.LOADING, True, "cpu"),
        (auto.LOADING, False, "dense"),
        (auto.COMPILING, False, "cpu"),
    ],
)
@pytest.mark.usefixtures("cold")
def test_a_kernel_is_made_ready_once_that_costs_less_than_was_spent(
    spent, is_stored, expected, monkeypatch
):
    monkeypatch.setattr(backend, "is_stored", lambda problem: is_stored)
    auto.spent(spent)
    assert choose(SMALL) == expected


@pytest.mark.usefixtures("cold")
def test_scores_that_need_too_much_memory_are_worth_a_compilation(monkeypatch):
    monkeypatch.setattr(backend, "is_stored", lambda problem: False)
    x = np.broadcast_to(np.float32(1), (1, 1, 40_000, 1))
    assert choose(Problem.of(x[:, :, :10_000], x, x)) == "dense"
    assert choose(Problem.of(x, x, x)) == "cpu"


def fail(*given, **options):
    raise ValueError("this machine has no such instruction\nand more")


@pytest.mark.usefixtures("cold")
def test_where_a_kernel_cannot_be_compiled_auto_goes_on_and_a_named_backend_says_why(
    monkeypatch, caplog
):
    monkeypatch.setattr(kernel, "compiled", fail)
    q, k, v = SMALL.q, SMALL.k, SMALL.v
    sentence = "backend 'cpu' cannot run: tiles-float32 cannot be compiled here: ValueError: this "
    with pytest.raises(BackendUnavailable, match=f"{sentence}machine has no such instruction$"):
        attention(q, k, v, backend="cpu")
    auto.spent(auto.COMPILING)
    for _ in range(2):
        np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, backend="dense"))
    assert caplog.text.count("cannot be compiled here") == 1


@pytest.mark.usefixtures("cold")
def test_with_keys_in_a_file_auto_counts_its_time_and_gives_up_once_too(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(kernel, "compiled", fail)
    q, v = SMALL.q, SMALL.v
    SMALL.k.tofile(tmp_path / "k")
    k = np.memmap(tmp_path / "k", SMALL.k.dtype, "r", shape=SMALL.k.shape)
    attention(q, k, v)
    assert auto._spent["attention"] > 0
    auto.spent(auto.COMPILING)
    expected = attention(q, SMALL.k, v, backend="dense")
    for _ in range(2):
        np.testing.assert_allclose(attention(q, k, v), expected, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("cannot be compiled here") == 1


CODE = """
import sys
{first}
import numpy as np, minimha
from minimha.kernels import auto, remembered
x = np.random.default_rng(0).standard_normal((1, 2, 20, 8), np.float32)
right = minimha.attention(x, x, x, backend="dense")
auto.spent({spent})
np.testing.assert_allclose(minimha.attention(x, x, x), right, rtol=1e-5, atol=1e-6)
try:
    minimha.attention(x, x, x, backend="cpu")
    print("cpu runs")
except minimha.BackendUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("first", "environment", "expected"),
    [
        ("sys.modules['llvmlite'] = None", {}, "llvmlite"),
        ("", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT forbids"),
        ("", {"NUMBA_THREADING_LAYER": "tbb"}, "cpu runs"),
        ("", {"NUMBA_BOUNDSCHECK": "1"}, "cpu runs"),
    ],
)
def test_a_numba_that_is_broken_or_restricted(first, environment, expected):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(first=first, spent=1000)],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_a_toy_problem_does_not_even_import_numba():
    code = CODE.format(first="", spent=0).split("try:")[0] + "print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
