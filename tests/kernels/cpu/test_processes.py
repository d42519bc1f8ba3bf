"""Forks, other libraries' threads, Ctrl-C: nobody hangs. Each process here has a time limit."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from thorough import thorough_after

from minimha import attention, block_mask
from minimha.equations.block_mask import FULL, HIDDEN, PARTIAL
from minimha.kernels import forks, os_threads
from minimha.kernels.cpu import blocks, kernel
from minimha.kernels.cpu.arguments import HEADERS

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
@pytest.mark.parametrize("method", thorough_after(2, ["fork", "spawn", "forkserver"]))
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


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX's")
@pytest.mark.parametrize("is_imported", [False, True])
def test_a_refusal_for_want_of_open_files_is_not_remembered(is_imported):
    """Neither of the backend nor of a function that numba could not compile then."""
    finishes(f"""
        import resource
        if {is_imported}:
            compute()
        score_mod, mask_mod = (lambda s, b, h, i, j: s + i), (lambda b, h, i, j: i >= j)
        calls = {{}}, {{"score_mod": score_mod}}, {{"mask_mod": mask_mod}}

        def results():
            for options in calls:
                try:
                    yield minimha.attention(*few, q_offset=9, **options, backend="cpu")
                except minimha.BackendUnavailable as refused:
                    yield refused

        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, limit), most))
        held = [open(os.devnull)]
        try:
            while True:
                held.append(open(os.devnull))
        except OSError:
            pass
        first = list(results())
        for file in held:
            file.close()
        assert any(isinstance(result, minimha.BackendUnavailable) for result in first)
        for options, result in zip(calls, results(), strict=True):
            expected = minimha.attention(*few, q_offset=9, **options, backend="dense")
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    """)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_import_that_fails_is_tried_again(error):
    """As for want of open files, or after Ctrl-C: numba would be half imported for ever."""
    finishes(f"""
        class Failing:
            def find_spec(name, path, target=None):
                if name == "numba.core.registry":
                    sys.meta_path.remove(Failing)
                    raise {error.__name__}(24, "Too many open files")

        sys.meta_path.insert(0, Failing)
        try:
            compute()
        except (minimha.BackendUnavailable, KeyboardInterrupt):
            compute()
        else:
            raise AssertionError("nothing has failed")
    """)


FORKS = """
    from minimha.kernels import forks

    def fork():
        while not is_imported:
            in_child(lambda: None)

    is_imported = False
    threads = [threading.Thread(target=fork) for _ in range(2)]
    with forks._importing:
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        {imports}
    is_imported = True
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    "imports",
    ["import concurrent.futures.thread", "forks.imported('minimha.kernels.cpu.backend')"],
)
def test_forks_while_another_thread_imports(imports):
    """Its at-fork handlers were not called before, and must not be called after the fork."""
    assert "Exception ignored" not in finishes(FORKS.format(imports=imports)).stderr


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


PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
    "refused": """
        import _thread
        def refused(*arguments):
            raise AssertionError("a thread that Python starts")
        _thread.start_new_thread = threading._start_new_thread = threading.Thread.start = refused
    """,
}
PATCHED = """
    if {is_imported}:
        import minimha.kernels.cpu.backend
{patch}
    from minimha.kernels.cpu import blocks, kernel
    blocks.get_num_threads = lambda: 2
    made = minimha.block_mask(lambda b, h, i, j: i >= j, 4096, 4096)
    kernel.LONG = 1 << 24
    for turn in range(3):
        got = compute()
        time.sleep(0)
    for a, b in zip(got, [minimha.attention(*x, backend="dense") for x in (many, few)]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/task")) >= minimha.get_num_threads()
    in_child(compute)
"""


@pytest.mark.parametrize("is_imported", [False, True], ids=["before", "after the import"])
@pytest.mark.parametrize("patch", PATCHES)
def test_threads_are_the_systems_whatever_patches_python(patch, is_imported):
    """A greenlet that computes never yields: all others, and the process, would wait for it."""
    if patch != "refused" and not find_spec(patch):
        pytest.skip(f"{patch} is not installed")
    patching = textwrap.indent(textwrap.dedent(PATCHES[patch]), "    ")
    finishes(PATCHED.format(patch=patching, is_imported=is_imported))


def test_other_processes_compile_where_gevent_patches_python(tmp_path):
    if not find_spec("gevent"):
        pytest.skip("gevent is not installed")
    finishes(
        """
        from minimha.kernels.cpu import backend
        from gevent import monkey; monkey.patch_all()
        with backend._compiled_elsewhere([[]]):
            pass
        """,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )


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


INTERRUPTED = """
    import random, signal

    def interrupt(number, frame):
        if is_armed and frame.f_code.co_filename != "<string>":  # which handles it
            raise KeyboardInterrupt

    is_armed, num_interrupted, draw = False, 0, random.Random(0)
    signal.signal(signal.SIGALRM, interrupt)
    x = rng.standard_normal((1, 1, 8200, 64), np.float32)
    expected, _ = minimha.attention(x, x, x, backend="cpu"), compute()
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        try:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(20e-6, 400e-6), {again})
            minimha.attention(x, x, x, backend="cpu")
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        check(compute(), compute())
    check([minimha.attention(x, x, x, backend="cpu")], [expected])
    assert num_interrupted
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("again", thorough_after(1, [30e-6, 0]), ids=["again and again", "once"])
def test_an_exception_may_arrive_at_any_moment_of_a_call(again):
    """As when a thread has just been started: it must not write into memory that is free."""
    finishes(INTERRUPTED.format(again=again))


@contextmanager
def signal_that_raises(exception):
    """SIGUSR1 raises the exception in the main thread."""

    def handler(number, frame):
        raise exception

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.usefixtures("signals_that_arrive")
@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_an_exception_cancels_the_tasks_and_waits_for_their_threads(exception):
    cancelled, ended = threading.Event(), []

    def task():
        os.kill(os.getpid(), signal.SIGUSR1)
        cancelled.wait(20)
        time.sleep(0.1)
        ended.append(True)

    with signal_that_raises(exception), pytest.raises(exception):
        os_threads.call([task], cancelled.set)
    assert cancelled.is_set()
    assert ended


def test_what_a_thread_raises_its_caller_raises():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        os_threads.call([fail])


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_a_second_exception_ends_the_wait_for_threads():
    entered, end, ended = threading.Event(), threading.Event(), threading.Event()

    def task():
        os.kill(os.getpid(), signal.SIGUSR1)
        entered.wait(20)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        end.wait(20)
        ended.set()

    with signal_that_raises(KeyboardInterrupt):
        try:
            with pytest.raises(KeyboardInterrupt):
                os_threads.call([task], entered.set)
            assert not ended.is_set()
        finally:
            end.set()
    assert ended.wait(20)


def test_a_thread_holds_what_it_writes_where_its_caller_is_gone(monkeypatch):
    tasks = []

    def interrupted(given, cancel):
        tasks.extend(given)
        raise KeyboardInterrupt

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 400, 16), np.float32)
    attention(q[:, :, :40], k, v, backend="cpu")  # which compiles
    monkeypatch.setattr(kernel, "LONG", 1)
    monkeypatch.setattr(kernel, "_spares", [])
    monkeypatch.setattr(os_threads, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attention(q, k, v, backend="cpu")
    assert kernel._spares == []
    expected = attention(q, k, v, backend="dense")
    line, (arrays, *_) = tasks[0].args
    del q, k, v
    tasks[0]()
    assert HEADERS.unpack_from(line) == tuple(map(id, arrays))
    np.testing.assert_allclose(arrays[3], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_a_signals_handler_may_compute_while_helpers_are_made():
    finishes("""
        import signal
        from minimha.kernels.cpu import pool

        signal.signal(signal.SIGUSR1, lambda number, frame: compute())
        with pool._making:
            os.kill(os.getpid(), signal.SIGUSR1)
        made = pool.pool()
        made._helpers.clear()
        with made._lock:
            os.kill(os.getpid(), signal.SIGUSR1)
    """)


def refused(target, arguments):
    raise RuntimeError("can't start new thread")


def test_a_long_call_where_the_system_gives_no_more_threads(monkeypatch):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 16), np.float32)
    expected = attention(q, k, v, backend="cpu")
    monkeypatch.setattr(kernel, "LONG", 1)
    monkeypatch.setattr(os_threads._thread, "start_new_thread", refused)
    got = attention(q, k, v, is_causal=False, scale=0.25, backend="cpu")
    np.testing.assert_array_equal(got, expected)


def test_a_block_mask_where_the_system_gives_no_more_threads(monkeypatch):
    monkeypatch.setattr(blocks, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os_threads._thread, "start_new_thread", refused)
    made = block_mask(lambda b, h, i, j: i >= j, 4096, 4096)
    first_row, first_key = np.arange(0, 4096, 16)[:, None], np.arange(0, 4096, 32)
    sees_some, sees_all = first_row + 15 >= first_key, first_row >= first_key + 31
    states = np.select([sees_all, sees_some], [FULL, PARTIAL], HIDDEN)
    np.testing.assert_array_equal(made.states, states[None, None])
