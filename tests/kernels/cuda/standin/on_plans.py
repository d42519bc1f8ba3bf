"""Tests of plans that run with the stand-in: what a second call asks of the driver, and graphs."""

import ctypes
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from cuda.bindings import driver
from kernels.cuda import standin
from kernels.cuda.standin.arrays import Array, array, current, numbers
from kernels.cuda.standin.on_standin import EXCLUSIVE, captured

from minimha import attention
from minimha.kernels import remembered
from minimha.kernels.cuda import cubins
from minimha.kernels.cuda import driver as gpu

INSIDE = "the current stream is being captured into a CUDA graph, but "
Lk = 33


@pytest.fixture(autouse=True)
def stream():
    """The current stream, on a GPU that remembers nothing."""
    remembered.forget()
    gpu.current()
    current.ptr = int(gpu.call(driver.cuStreamCreate, EXCLUSIVE))
    yield current.ptr
    current.ptr = 0


@pytest.fixture
def two_gpus():
    standin.driver.configure(devices=2)
    yield
    standin.driver.configure()


def problem(Lq=2, dtype="float32", B=2):
    """q, k, v on the GPU, for few queries."""
    return [
        numbers(B, h, n, 16, dtype=dtype, seed=seed)
        for seed, (h, n) in enumerate(((4, Lq), (2, Lk), (2, Lk)))
    ]


def check(q, k, v, output, **options):
    wide = [x.get().astype(np.float64) for x in (q, k, v)]
    expected = attention(*wide, **options, backend="dense")
    np.testing.assert_allclose(output.get().astype(np.float64), expected, atol=1e-5)


def counts():
    names = "cuLaunchKernel", "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemcpyHtoDAsync"
    return np.array([standin.driver.count(name) for name in names])


OPTIONS = {
    "none": {},
    "lengths": {"kv_lengths": [Lk, 20]},
    "all small ones": {
        "window_size": (9, 3), "q_offset": np.array([13, 2]), "alibi_slopes": (1, 0.5, 0.25, 0),
        "sinks": [0, 1.5, 2, -np.inf], "softcap": 3.0, "scale": 0.4,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_second_call_only_launches(options):
    first = problem()
    check(*first, attention(*first, **options), **options)
    q, k, v = problem()
    q.set(np.float32(2) * q.get())
    before = counts()
    output = attention(q, k, v, **options)
    assert (counts() - before).tolist() == [2, 1, 1, 0]  # the splits' results are the allocation
    check(q, k, v, output, **options)


def test_a_second_call_asks_the_driver_once(stream, monkeypatch):
    monkeypatch.setattr(sys.modules["cupy"], "empty", cache(Array))  # which asks the driver, too
    q, k, v = problem()
    attention(q, k, v)
    expected = {
        "cuCtxGetDevice": 1, "cuStreamGetCtx": 1, "cuStreamIsCapturing": 1,
        "cuMemAllocFromPoolAsync": 1, "cuMemFreeAsync": 1, "cuLaunchKernel": 2,
    }  # fmt: skip
    before = [standin.driver.count(name) for name in (*expected, None)]
    attention(q, k, v)
    after = [standin.driver.count(name) for name in (*expected, None)]
    asked = [b - a for a, b in zip(before, after, strict=True)]
    assert asked == [*expected.values(), sum(expected.values())]


def test_threads_that_call_at_once_do_not_mix_their_arrays(monkeypatch):
    problems = [problem(Lq=20) for _ in range(4)]
    attention(*problems[0])
    seen = []

    def look(image, name, dimensions, shared, slots):
        addresses = (ctypes.c_uint64.from_address(slots[i]).value for i in (0, 4, 8))
        seen.append(tuple(addresses))  # of q, k and v, each of which has three strides, too

    monkeypatch.setattr(standin.driver, "execute", look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet
    try:
        with ThreadPoolExecutor(len(problems)) as pool:
            list(pool.map(lambda given: attention(*given), problems * 500, timeout=60))
    finally:
        sys.setswitchinterval(interval)
    expected = [tuple(array.address for array in given) for given in problems]
    assert Counter(seen) == Counter(expected * 500)


def test_other_options_shapes_and_strides_have_other_plans():
    q, k, v = problem()
    for options in ({}, {"scale": 1.0}, {"kv_lengths": [Lk, 20]}, {"kv_lengths": [20, Lk]}):
        check(q, k, v, attention(q, k, v, **options), **options)
    q, k, v = problem(Lq=3)
    check(q, k, v, attention(q, k, v))


def test_types_of_options_count():
    q, k, v = problem()
    attention(q, k, v, window_size=(1, 1), q_offset=0)
    with pytest.raises(TypeError, match="window_size"):
        attention(q, k, v, window_size=(True, 1), q_offset=0)


def test_options_are_found_by_their_content():
    q, k, v = problem()
    options = {"kv_lengths": [Lk, 20]}
    attention(q, k, v, **options)
    before = counts()
    attention(q, k, v, **options, scale=2.0)  # another plan
    assert (counts() - before)[3] == 0


def test_constants_that_nothing_refers_to_are_freed_in_the_end(monkeypatch):
    monkeypatch.setattr(gpu, "MOST_CONSTANTS", 2)
    monkeypatch.setattr(gpu, "MOST_UNUSED", 4)
    gpu._constants.clear()
    q, k, v = problem()
    in_use = []
    for length in range(1, 30):
        remembered.forget()
        check(q, k, v, attention(q, k, v, kv_lengths=length), kv_lengths=length)
        in_use.append(standin.driver.in_use)
    assert max(in_use[10:]) == max(in_use[20:])


# graphs


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_graph_computes_again(options, stream):
    q, k, v = problem()
    attention(q, k, v, **options)
    outputs = []
    graph = captured(stream, lambda: outputs.append(attention(q, k, v, **options)))
    remembered.forget()  # and other calls take the memory that is free
    for length in range(1, 5):
        attention(q, k, v, kv_lengths=length)
    for factor in (1, -2):
        q.set(np.float32(factor) * q.get())
        gpu.call(driver.cuGraphLaunch, graph, stream)
        check(q, k, v, outputs[0], **options)


def test_what_cannot_be_captured_is_refused(stream):
    q, k, v = problem()
    lengths = array(np.array([Lk, 20]))
    function = {"score_mod": lambda score, b, h, i, j: score + h}
    refused = {
        "this call must first compile kernels or copy options: call": {},
        "kv_lengths is on the GPU and would have": {"kv_lengths": lengths},
        "score_mod's captured values are re-read on every call": function,
    }
    for reason, options in refused.items():
        with pytest.raises(ValueError, match=INSIDE + reason):
            captured(stream, lambda given=options: attention(q, k, v, **given))
    attention(q, k, v)
    captured(stream, lambda: attention(q, k, v))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_capture_elsewhere_goes_on_while_kernels_and_options_are_loaded(
    is_first, stream, monkeypatch
):
    q, k, v = problem()
    attention(q, k, v)
    if is_first:  # and modules that nobody needs any more are unloaded
        remembered.forget()
        monkeypatch.setattr(gpu, "_kernels", {})
        unused = gpu._unused[gpu.current().ordinal]
        unused.append(gpu.call(driver.cuModuleLoadData, b".visible .entry kernel()\0"))

    def work():
        current.ptr = 0
        check(q, k, v, attention(q, k, v, kv_lengths=7), kv_lengths=7)

    captured(gpu.call(driver.cuStreamCreate, EXCLUSIVE), work)
    assert not gpu._unused[gpu.current().ordinal]


# several GPUs


def test_the_gpu_of_the_arrays_need_not_be_current(two_gpus):
    current.ptr = 0
    gpu.current()
    near = problem()
    with gpu.made_current(1):
        far = problem()
    for q, k, v in (near, far, near, far):
        output = attention(q, k, v)
        assert output.device == q.device
        assert gpu.current().ordinal == 0
        with gpu.made_current(q.device):
            check(q, k, v, output)
    with pytest.raises(ValueError, match="k is on GPU 1 but q is on GPU 0: all arrays must be on"):
        attention(near[0], far[1], near[2])
    with pytest.raises(ValueError, match="v has Lk=33 but k has Lk=2"):
        attention(far[0], far[0], far[2])
    assert gpu.current().ordinal == 0


# what the driver cannot do, in sentences


def test_memory_that_does_not_suffice_is_reported():
    q, k, v = problem()
    attention(q, k, v)
    standin.driver.fail("cuMemAllocFromPoolAsync", driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match=r"the workspace of a call \(\d+ bytes\) does not fit"):
        attention(q, k, v)
    check(q, k, v, attention(q, k, v))


@pytest.mark.parametrize("status", ["INVALID_IMAGE", "NO_BINARY_FOR_GPU", "INVALID_PTX"])
def test_a_kernel_on_disk_that_the_driver_refuses_is_compiled_anew(status, monkeypatch):
    q, k, v = problem()
    attention(q, k, v)  # now it is on disk
    remembered.forget()
    monkeypatch.setattr(gpu, "_kernels", {})
    monkeypatch.setattr(cubins, "_made_here", set())
    compiled = []
    compile_it = cubins._compiled
    monkeypatch.setattr(cubins, "_compiled", lambda *how: compiled.append(how) or compile_it(*how))
    standin.driver.fail("cuModuleLoadData", getattr(driver.CUresult, f"CUDA_ERROR_{status}"))
    check(q, k, v, attention(q, k, v))
    assert len(compiled) == 1


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    attention(*problem())
    remembered.forget()
    monkeypatch.setattr(gpu, "_kernels", {})
    monkeypatch.setattr(gpu, "cubin_instead", lambda *given: None)  # it was compiled here
    standin.driver.fail("cuModuleLoadData", driver.CUresult.CUDA_ERROR_INVALID_IMAGE)
    sentence = (
        r"NVIDIA's driver, which is for CUDA 13\.0, does not load code that a newer CUDA compiled "
        r"for compute capability 9\.0 \(CUDA_ERROR_INVALID_IMAGE\): update it to 580 or later, or "
        r"install the extra cuda12 in place of cuda, which takes drivers from 525 on"
    )
    with pytest.raises(gpu.DeviceError, match=sentence):
        attention(*problem())
    attention(*problem())


def test_a_gpu_without_pools_is_named(two_gpus):
    gpu._device.cache_clear()
    standin.driver.fail("cuMemPoolCreate", driver.CUresult.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(gpu.DeviceError, match="GPU 0 has no memory pools, which minimha needs"):
        gpu.current()
    gpu.current()
