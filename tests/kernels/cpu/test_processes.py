"""Forks, other libraries' threads, Ctrl-C: nobody hangs. Each process here has a time limit."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from minimha import attention
from minimha.kernels import forks
from minimha.kernels.cpu import kernel

LIMIT = 240  # seconds; a cold machine compiles first
COMMON = '''
import multiprocessing, os, sys, threading, time
import numpy as np
import minimha
rng = np.random.default_rng(0)
many, few = (
    [rng.standard_normal((2, 4, L, 32), np.float32) for L in (Lq, 3000, 3000)] for Lq in (300, 2)
)

def compute(_=None):
    return [minimha.attention(*x, backend="cpu") for x in (many, few)]

def check(results, expected):
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)

def end_of(child):
    """The status of a forked process, which is killed if it hangs."""
    deadline = time.monotonic() + 100
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os._exit(1)
        time.sleep(0.001)
    return ended[1]

def in_child(task):
    """Let a forked process do it, which must end well."""
    child = os.fork()
    if not child:
        task()
        os._exit(0)
    assert end_of(child) == 0
'''


def finishes(code, **settings):
    """Run Python code in a process of its own, which must end well within ``LIMIT``."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=LIMIT, **settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


POOL = """
if __name__ == "__main__":
    {parent}
    expected = None if {unused} else compute()
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        results = pool.map_async(compute, range(4)).get({limit})
    for result in results:
        check(result, expected or compute())
"""
PARENTS = {
    "nothing": "pass",
    "torch": "import torch; a = torch.ones(512, 512); a @ a",
    "numba's prange": "from tests_prange import run; run()",
}
PRANGE = """
import numba, numpy as np

@numba.njit(parallel=True)
def total(x):
    s = 0.0
    for i in numba.prange(x.size):
        s += x[i]
    return s

def run():
    total(np.ones(1_000_000))
"""


@pytest.mark.parametrize(
    ("parent", "unused"),
    [("nothing", True), *((parent, False) for parent in PARENTS)],
    ids=["parent unused", *(f"parent used beside {parent}" for parent in PARENTS)],
)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_pool_of_processes(method, parent, unused, tmp_path):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"{method} is not a way to start a process here")
    if parent == "torch" and not find_spec("torch"):
        pytest.skip("torch is not installed")
    (tmp_path / "tests_prange.py").write_text(PRANGE)
    main = tmp_path / "main.py"
    main.write_text(
        COMMON + POOL.format(parent=PARENTS[parent], method=method, unused=unused, limit=LIMIT / 2)
    )
    root = os.getcwd()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, str(main)], env=environment,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_workers_of_torchs_data_loader():
    if not find_spec("torch"):
        pytest.skip("torch is not installed")
    finishes("""
        import torch

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, n):
                return torch.from_numpy(compute()[n % 2].copy())

        torch.ones(512, 512) @ torch.ones(512, 512)
        loader = torch.utils.data.DataLoader(
            Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120
        )
        for n, got in enumerate(loader):
            np.testing.assert_array_equal(got.numpy(), compute()[n % 2])
    """)


def test_a_fork_while_another_thread_compiles(tmp_path):
    finishes(
        """
        thread = threading.Thread(target=compute)
        thread.start()
        while "numba.core.ccallback" not in sys.modules:
            time.sleep(0.01)
        for _ in range(5):
            time.sleep(0.4)
            in_child(compute)
        thread.join()
        """,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )


def test_a_fork_while_another_thread_imports_the_backend():
    finishes("""
        thread = threading.Thread(target=compute)
        thread.start()
        while "numba" not in sys.modules:
            time.sleep(0.001)
        in_child(compute)
        thread.join()
    """)


def test_a_fork_while_another_thread_is_in_llvm():
    """As after a compilation, when what is not needed any more is deleted."""
    finishes("""
        from llvmlite import binding

        def stay():
            with binding.ffi.lib._lock:
                entered.set()
                time.sleep(0.5)

        entered = threading.Event()
        threading.Thread(target=stay).start()
        entered.wait()
        in_child(binding.get_process_triple)
    """)


def test_two_threads_that_fork_at_once_release_their_own_locks(monkeypatch):
    class Slow:
        """A lock of which another thread has time to take hold before ``release`` returns."""

        def __init__(self):
            self.lock = threading.RLock()
            self.acquire = self.lock.acquire

        def release(self):
            self.lock.release()
            time.sleep(0.1)

    compiler = SimpleNamespace(global_compiler_lock=SimpleNamespace(_lock=Slow()))
    monkeypatch.setitem(sys.modules, "numba.core.compiler_lock", compiler)
    failed = []

    def fork():
        try:
            forks._hold()
            time.sleep(0.5)
            forks._release()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


def test_many_forks_while_other_threads_compute():
    finishes("""
        expected = compute()
        stop = False

        def keep_computing():
            while not stop:
                compute()

        threads = [threading.Thread(target=keep_computing) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(60):
            in_child(lambda: check(compute(), expected))
        stop = True
    """)


def test_a_grandchild():
    finishes("""
        expected = compute()
        for _ in range(3):
            child = os.fork()
            if child:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        check(compute(), expected)
    """)


def test_calls_from_many_threads_while_helpers_are_wanted_by_all():
    finishes("""
        from concurrent.futures import ThreadPoolExecutor

        expected = compute()
        with ThreadPoolExecutor(8) as pool:
            for result in pool.map(compute, range(80)):
                check(result, expected)
    """)


def test_helpers_without_a_futex_sleep_in_python():
    """As on systems other than Linux."""
    finishes("""
        import platform, numba
        platform.machine = lambda: "unknown"
        from minimha.kernels.cpu import pool
        assert pool.FUTEX is None and pool.PAUSE is None
        from concurrent.futures import ThreadPoolExecutor

        expected = [minimha.attention(*x, backend="dense") for x in (many, few)]
        with ThreadPoolExecutor(4) as executor:
            for result in executor.map(compute, range(30)):
                for got, wanted in zip(result, expected, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        in_child(compute)
    """)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.usefixtures("signals_that_arrive")
def test_ctrl_c_is_answered_while_a_kernel_runs():
    code = COMMON + textwrap.dedent("""
        compute()
        x = np.ones((1, 32, 16384, 64), np.float32)
        print("ready", flush=True)
        try:
            minimha.attention(x, x, x, backend="cpu")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            check(compute(), compute())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert said == "interrupted\n", error
    assert process.returncode == 0


def test_a_long_call_where_the_system_gives_no_more_threads(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 16), np.float32)
    expected = attention(q, k, v, backend="cpu")
    monkeypatch.setattr(kernel, "LONG", 1)
    monkeypatch.setattr(threading.Thread, "start", refused)
    got = attention(q, k, v, is_causal=False, scale=0.25, backend="cpu")
    np.testing.assert_array_equal(got, expected)
