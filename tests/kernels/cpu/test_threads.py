"""How many threads: what the user sets, the environment, the affinity mask, the container."""

import os
import subprocess
import sys

import numpy as np
import pytest

from minimha import attention
from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cpu import kernel, rung4_parallel, rung5_decode, rung6_matrix_unit, threads
from minimha.kernels.cpu.arguments import AXES

CPUS = threads.usable_cpus()


@pytest.fixture
def restored():
    yield
    threads._chosen = None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"NUMBA_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4096", "NUMBA_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1,2"}, 1),
        ({"OMP_NUM_THREADS": "4096"}, CPUS),
        ({"OMP_NUM_THREADS": "0"}, CPUS),
        ({"OMP_NUM_THREADS": "many"}, CPUS),
        ({}, CPUS),
    ],
)
def test_the_environment_says_how_many(environment, expected):
    clean = {name: x for name, x in os.environ.items() if not name.endswith("_NUM_THREADS")}
    told = subprocess.run(
        [sys.executable, "-c", "import minimha; print(minimha.get_num_threads())"],
        env=clean | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(told.stdout) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_a_process_on_one_cpu_has_one_thread():
    code = "import os, minimha; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    told = subprocess.run(
        [sys.executable, "-c", code + "print(minimha.get_num_threads())"],
        env={name: x for name, x in os.environ.items() if not name.endswith("_NUM_THREADS")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(told.stdout) == 1


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/app/job\n", {"app/job/cpu.max": "150000 100000\n"}, 2),
        ("0::/app/job\n", {"app/job/cpu.max": "max 100000\n", "app/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/not/seen/from/inside\n", {"cpu.max": "300000 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
             "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n"}, None),
        ("4:cpu:/job\n", {}, None),
    ],
)  # fmt: skip
def test_a_container_has_as_many_cpus_as_its_quota_pays_for(
    cgroup, files, expected, tmp_path, monkeypatch
):
    (tmp_path / "self").write_text(cgroup)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUP", tmp_path / "self")
    quotas = list(threads._quotas())
    assert (min(quotas) if quotas else None) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "an integer of at least 1"), (-1, "an integer of at least 1"), (CPUS + 1, f"1 to {CPUS}")],
)
def test_too_few_or_too_many_threads(number, expected):
    with pytest.raises(ValueError, match=f"number is {number}: expected {expected}"):
        threads.set_num_threads(number)


def test_a_number_of_threads_is_an_integer():
    with pytest.raises(TypeError, match=r"number is 1\.5: expected an integer"):
        threads.set_num_threads(1.5)


@pytest.mark.parametrize("Lq", [2, 131])
@pytest.mark.usefixtures("restored")
def test_kernels_use_as_many_threads_as_are_set(Lq, monkeypatch):
    asked = []
    run = kernel.pool().run
    monkeypatch.setattr(kernel.pool(), "run", lambda *job: (asked.append(job[-1]), run(*job))[1])
    x = np.random.default_rng(0).standard_normal((2, 4, 2000, 32), np.float32)
    for number in range(1, CPUS + 1):
        threads.set_num_threads(number)
        for _ in range(2):  # planned, then remembered
            attention(x[:, :, :Lq], x, x, backend="cpu")
    assert asked == [number for number in range(2, CPUS + 1) for _ in range(2)]  # one needs no pool


@pytest.mark.parametrize("rung", [rung4_parallel, rung5_decode, rung6_matrix_unit])
def test_no_two_threads_write_to_one_page(rung, monkeypatch):
    """Rung 6 is only planned: no CPU without a matrix unit can compile it."""
    monkeypatch.setattr(threads, "_chosen", 3)
    monkeypatch.setattr(rung6_matrix_unit, "is_made_for", lambda dtype: True)
    monkeypatch.setattr(kernel.Kernel, "compile", lambda made, storage: None)
    q = np.zeros((2, 4, 131, 32), np.float16)
    plan, last = rung.plan(Problem.of(q, q, q)), -1
    for worker in range(3):
        pages = set()
        for name, buffer in rung.KERNEL.buffers.items():
            slot = rung.KERNEL.slots[name]
            start, length, itemsize, stride = (
                plan._line[slot + n] for n in (0, 1, 1 + AXES, 2 + AXES)
            )
            if not buffer.is_shared and length:
                first = start + worker * stride
                pages |= {first // 4096, (first + length * itemsize - 1) // 4096}
        assert min(pages) > last
        last = max(pages)


@pytest.mark.parametrize("present", [[0], [2], [1, 2]])
@pytest.mark.parametrize("rung", [rung4_parallel, rung5_decode, rung6_matrix_unit])
def test_whoever_comes_computes_the_others_shares_too(rung, present, monkeypatch):
    monkeypatch.setattr(threads, "_chosen", 3)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 131, 32)).astype(np.float16)
    problem = Problem.of(q, k, v, is_causal=True)
    plan = rung.plan(problem)

    def run(line, arrays):
        for worker in present:
            plan._kernel.call(line.buffer_info()[0], worker)

    monkeypatch.setattr(plan, "_run", run)
    O, L = plan(problem)
    expected_O, expected_L = dense.forward(problem)
    np.testing.assert_allclose(O, expected_O.astype(np.float16), rtol=2**-10, atol=2**-14)
    np.testing.assert_allclose(L, expected_L, atol=1e-5)
