"""attention() on a cluster of two workers with 700 MB each: 2^20 keys, and what may go wrong."""

import os
import signal
import threading
import time

import numpy as np
import pytest

pytest.importorskip("distributed.client", reason="dask's distributed is not installed (extra dask)")

import dask
import dask.array as da
import distributed
from distributed import Client, LocalCluster

import minimha
from minimha.distributed import attention, striped, unstriped

LIMIT = 240  # seconds, for any one test
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # dask's, of ports in use and of closing
    pytest.mark.skipif(
        not hasattr(signal, "SIGALRM"), reason="limits and lost workers need signals"
    ),
]
LK, CHUNK, D = 1 << 20, 1 << 16, 64
RNG = np.random.default_rng(0)
Q = RNG.normal(size=(1, 8, 4, D)).astype(np.float32)


MEMORY = {f"distributed.worker.memory.{n}": x for n, x in (("target", 0.25), ("spill", 0.5))}


@pytest.fixture(autouse=True)
def _limited():
    """End a test that hangs."""

    def give_up(number, frame):
        raise TimeoutError(f"the test took longer than {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def client(_limited):
    """Two workers, each in a process with 700 MB; new for each test, since some are killed."""
    with (
        dask.config.set(MEMORY),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="700MB", dashboard_address=None,
            host="127.0.0.1",
        ) as cluster,
        Client(cluster, timeout=LIMIT) as client,
    ):  # fmt: skip
        yield client


def keys(seed, on_chunk=lambda start: None):
    """2^20 keys of two heads, 512 MiB, made chunk by chunk where they are needed."""

    def chunk(block_info=None):
        start = block_info[None]["array-location"][2][0]
        on_chunk(start)
        rng = np.random.default_rng([seed, start])
        return rng.standard_normal((1, 2, CHUNK, D), np.float32)

    return da.map_blocks(chunk, chunks=((1,), (2,), (CHUNK,) * (LK // CHUNK), (D,)), dtype="f4")


def expected():
    """Plain float64 NumPy over the same numbers, a chunk at a time."""
    l, O = np.zeros((1, 8, 4, 1)), np.zeros((1, 8, 4, D))
    for start in range(0, LK, CHUNK):
        k, v = (
            np.random.default_rng([seed, start])
            .standard_normal((1, 2, CHUNK, D), np.float32)
            .astype(np.float64)
            .repeat(4, axis=1)
            for seed in (1, 2)
        )
        p = np.exp(Q.astype(np.float64) @ k.swapaxes(-1, -2) / 8)
        l, O = l + p.sum(-1, keepdims=True), O + p @ v
    return O / l


@pytest.fixture(scope="module")
def exact():
    return expected()


def result(client, x, **how):
    return client.compute(x, **how).result(timeout=LIMIT)


def test_a_million_keys_that_fit_no_worker(client, exact):
    found = result(client, attention(Q, keys(1), keys(2), backend="dense"))
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_a_worker_that_is_killed_changes_nothing(client, exact, tmp_path):
    def on_chunk(start):
        if start >= LK // 2 and not (tmp_path / "half").exists():
            (tmp_path / "half").write_text(str(os.getpid()))
        time.sleep(0.1)

    future = client.compute(attention(Q, keys(1, on_chunk), keys(2), backend="dense"))
    before = set(client.scheduler_info(n_workers=-1)["workers"])
    wait_for(lambda: (tmp_path / "half").exists() and (tmp_path / "half").read_text())
    os.kill(int((tmp_path / "half").read_text()), signal.SIGKILL)
    np.testing.assert_allclose(future.result(timeout=LIMIT), exact, atol=1e-6)
    wait_for(lambda: set(client.scheduler_info(n_workers=-1)["workers"]) - before)


def test_a_chunk_that_fails_is_read_again(client, exact, tmp_path):
    def on_chunk(start):
        if start == 5 * CHUNK and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("the file server is away")

    x = attention(Q, keys(1, on_chunk), keys(2), backend="dense")
    np.testing.assert_allclose(result(client, x, retries=2), exact, atol=1e-6)
    assert (tmp_path / "failed").exists()


def test_a_chunk_that_always_fails_says_why(client):
    def on_chunk(start):
        raise OSError("the file server is away")

    with pytest.raises(OSError, match="the file server is away"):
        result(client, attention(Q, keys(1, on_chunk), keys(2), backend="dense"), retries=1)


def test_chunks_that_were_spilled_to_disk(client, exact):
    k = client.persist(keys(1))  # 256 MiB for each worker, of which 175 MB stay in memory
    distributed.wait(k, timeout=LIMIT)
    spilled = client.run(lambda dask_worker: dask_worker.data.spilled_total.memory)
    assert sum(spilled.values()) > 0
    found = result(client, attention(Q, k, keys(2), backend="dense"))
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_prefill_in_stripes_where_keys_and_queries_are_chunked(client):
    q, k, v = RNG.normal(size=(3, 1, 2, 2048, 16))
    options = {"is_causal": True, "backend": "dense"}
    found = attention(*(striped(x, 4) for x in (q, k, v)), **options, stripes=4)
    s = np.where(np.tri(2048, dtype=bool), q @ k.swapaxes(-1, -2) / 4, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    whole = p @ v / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(result(client, unstriped(found, 4)), whole, atol=1e-12)


def test_functions_are_compiled_once_on_each_worker(client):
    pytest.importorskip("minimha.kernels.cpu.backend", reason="numba is not installed")
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, 1, 4, 640, 8))
    table, documents = np.cos(np.arange(640)), np.arange(640) // 100

    def options():
        return {
            "score_mod": lambda s, b, h, i, j: s + table[i] * table[j] * h,
            "mask_mod": lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]),
        }

    def compiled():
        from minimha.kernels.cpu import functions

        return sorted(key[0] for key in functions._kept if key[0] != "tile")

    x = [da.from_array(a, chunks=(1, 2, 128, 8)) for a in (q, k, v)]
    expected = minimha.attention(q, k, v, **options(), backend="dense")
    for _ in range(2):  # the second time with new functions that are equal
        found = result(client, attention(*x, **options(), backend="cpu"))
        np.testing.assert_allclose(found, expected, atol=1e-12)
    assert list(client.run(compiled).values()) == [["mask_mod", "score_mod"]] * 2


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_a_function_that_fails_says_so_from_the_cluster(client, backend):
    x, table = da.from_array(np.ones((1, 1, 40, 4)), chunks=(1, 1, 20, 4)), np.zeros(30)
    far = attention(x, x, x, score_mod=lambda s, b, h, i, j: s + table[j], backend=backend)
    with pytest.raises(IndexError, match="index 30 is out of bounds for axis 0 with size 30"):
        result(client, far)
    wrong = attention(x, x, x, mask_mod=lambda b, h, i, j: i - j, backend=backend)
    with pytest.raises(TypeError, match="mask_mod returned int64: expected bool, True where a"):
        result(client, wrong)


def wait_for(condition):
    """Wait until ``condition()`` holds, but not longer than a test may take."""
    stop, pause = time.monotonic() + LIMIT, threading.Event()
    while not condition():
        assert time.monotonic() < stop, "nothing happened within the limit"
        pause.wait(0.05)
