"""Memory runs out at every allocation of a kernel: the result is right, or MemoryError is raised.

A child process limits its own address space to what it has and some pages, one more each time. What
it had before and no longer uses is filled, and the C library takes all that is larger than a page
from the system, so that the pages are what a kernel can have.
"""

import mmap
import multiprocessing
import os
import sys
from collections import Counter

import numpy as np
import pytest
from thorough import thorough_after

from fuzz.cases import DTYPES
from fuzz.run import solve
from minimha.kernels.ladder import LADDER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what memory there is")

STEPS = 4000  # pages, at most
SHAPES = {  # many queries, and few; (B, H, Hkv, Lq, Lk)
    "many": (1, 4, 2, 100, 300),
    "few": (2, 8, 2, 8, 1100),
}


def with_pages(pages, call):
    """What ``call`` returns, or raises, with no more than some pages of new memory."""
    import resource

    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    file = os.open("/proc/self/statm", os.O_RDONLY)  # a buffer to read with would count, too
    size = int(os.read(file, 20).split()[0]) + pages
    os.close(file)
    resource.setrlimit(resource.RLIMIT_AS, (size * mmap.PAGESIZE, unlimited[1]))
    try:
        return call()
    except Exception as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)


def starve(connection, backend, name, queries):
    """Send what each call ended with, from no page left to twenty calls that had enough.

    And whether a result fits into what was free all the time: then a call needs no page.
    """
    B, H, Hkv, Lq, Lk = SHAPES[queries]
    rng = np.random.default_rng(0)
    shapes = {"q": (B, H, Lq, 64), "k": (B, Hkv, Lk, 64), "v": (B, Hkv, Lk, 64)}
    arrays = {x: rng.normal(size=shape).astype(DTYPES[name]) for x, shape in shapes.items()}
    given = {"is_causal": True, "q_offset": Lk - Lq}
    for _ in range(3):  # compiled, with all threads running
        expected = solve(backend, arrays, given)
    filling, outcomes = [], []
    for size in (1 << 20, 1 << 16, 1 << 13):
        while isinstance(block := with_pages(0, lambda size=size: bytearray(size)), bytearray):
            filling.append(block)
    for pages in range(STEPS):
        results = with_pages(pages, lambda: solve(backend, arrays, given))
        if isinstance(results, MemoryError):
            outcomes.append("MemoryError")
        elif isinstance(results, Exception):
            outcomes.append(repr(results))
        else:
            pairs = zip(results, expected, strict=True)
            is_right = all(got.tobytes() == wanted.tobytes() for got, wanted in pairs)
            outcomes.append("right" if is_right else "wrong")
        if outcomes[-20:] == ["right"] * 20:
            break
    n_bytes, results = results[0].nbytes, None  # what the last call held is free again
    has_room = isinstance(with_pages(0, lambda: bytearray(n_bytes)), bytearray)
    connection.send((outcomes, has_room))


@pytest.mark.parametrize("queries", SHAPES)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", thorough_after(1, ["cpu", *reversed(LADDER)]))
def test_without_memory_a_result_is_right_or_an_error(backend, name, queries, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(mmap.PAGESIZE))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # others reserve 64 MiB, which no limit counts
    context = multiprocessing.get_context("spawn")
    connection, end = context.Pipe()
    child = context.Process(target=starve, args=(end, backend, name, queries), daemon=True)
    child.start()
    end.close()
    try:
        assert connection.poll(300), "no result after 300 seconds"
        outcomes, has_room = connection.recv()
    except EOFError:
        child.join()
        pytest.fail(f"the process ended with exit code {child.exitcode}")
    finally:
        child.kill()
        child.join()
    counts = Counter(outcomes)
    assert set(counts) <= {"right", "MemoryError"}, counts
    assert has_room or counts["MemoryError"], counts
    assert outcomes[-20:] == ["right"] * 20
