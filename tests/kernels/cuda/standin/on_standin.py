"""Tests that run with the stand-in, in a process of their own: ``test_standin.py`` starts it."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from cuda.bindings import driver
from kernels.cuda import standin
from problems import run

from minimha import attention, backends
from minimha.kernels.cuda import driver as gpu

CAPTURE = driver.CUstreamCaptureMode
EXCLUSIVE = driver.CUstream_flags.CU_STREAM_NON_BLOCKING


@pytest.fixture
def memory():
    with gpu.DeviceMemory(gpu.current()) as memory:
        yield memory


def test_a_gpu_is_found_and_nothing_of_it_is_left_behind():
    assert backends()["cuda"] is None
    device = gpu.current()
    assert (device.cc, device.multiprocessors, device.shared) == ((9, 0), 132, 227 << 10)


@pytest.mark.parametrize(
    ("dtype", "Lq", "tolerance", "kernel"),
    [
        ("float32", 20, 1e-5, "rung3_register_tiles"),
        ("bfloat16", 20, 2e-2, "rung6_warpgroups"),
        ("float16", 2, 2e-3, "rung5_decode"),
    ],
)
def test_a_call_goes_through_the_driver(dtype, Lq, tolerance, kernel):
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (rng.normal(size=(1, h, n, 24)).astype(dtype) for h, n in ((2, Lq), (1, 33), (1, 33)))
    given = {"is_causal": True, "q_offset": 13, "sinks": [0.5, -np.inf]}
    standin.driver.launches.clear()
    attention(q, k, v, **given, backend="cuda")  # which leaves the options there
    before = standin.driver.in_use
    output, lse = attention(q, k, v, **given, return_lse=True, backend="cuda")
    expected = run("dense", *(x.astype(np.float64) for x in (q, k, v)), **given)
    np.testing.assert_allclose(output.astype(np.float64), expected[0], atol=tolerance)
    np.testing.assert_allclose(lse, expected[1], atol=tolerance)
    assert kernel in standin.driver.launches[-1][0]
    assert standin.driver.in_use == before


def test_memory_that_is_new_or_freed_is_nan(memory):
    address = memory.empty((3,), np.float32)
    assert np.isnan(memory.get(address, (3,), np.float32)).all()
    gpu.call(driver.cuMemcpyHtoD, address, np.ones(3, np.float32).ctypes.data, 12)
    gpu.call(driver.cuMemFreeAsync, address, 0)
    assert np.isnan((ctypes.c_float * 3).from_address(address)).all()
    memory._held.clear()


@pytest.mark.parametrize("beyond", [1, 300])
def test_what_is_outside_of_an_array_is_refused(beyond, memory):
    address = memory.put(np.zeros(300, np.uint8))
    with pytest.raises(gpu.DeviceError, match=r"cuMemcpyDtoHAsync failed .*INVALID_VALUE"):
        memory.get(address + beyond, (300,), np.uint8)


def test_a_planned_failure_comes_once(memory):
    standin.driver.fail("cuMemAllocFromPoolAsync", driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match=r"\(3,\).* does not fit"):
        memory.empty((3,), np.float32)
    memory.empty((3,), np.float32)


def test_memory_has_an_end(memory):
    standin.driver.configure(memory=1 << 20)
    try:
        with pytest.raises(MemoryError, match="does not fit into the GPU's memory"):
            memory.empty((1 << 18,), np.float32)
    finally:
        standin.driver.configure()


def test_a_stream_belongs_to_its_gpu():
    standin.driver.configure(devices=2)
    try:
        gpu.current()
        stream = gpu.call(driver.cuStreamCreate, EXCLUSIVE)
        other = gpu.call(driver.cuDevicePrimaryCtxRetain, 1)
        gpu.call(driver.cuCtxPushCurrent, other)
        assert gpu.current().ordinal == 1
        assert not gpu.is_stream_of(int(stream), gpu.current())
        with pytest.raises(gpu.DeviceError, match="INVALID_HANDLE"):
            gpu.synchronize(stream)
        gpu.call(driver.cuCtxPopCurrent)
        assert gpu.current().ordinal == 0
        assert gpu.is_stream_of(int(stream), gpu.current())
    finally:
        standin.driver.configure()


# capture


@pytest.fixture
def stream():
    gpu.current()
    return gpu.call(driver.cuStreamCreate, EXCLUSIVE)


def captured(stream, work, mode=CAPTURE.CU_STREAM_CAPTURE_MODE_GLOBAL):
    gpu.call(driver.cuStreamBeginCapture, stream, mode)
    try:
        work()
    finally:
        status, graph = driver.cuStreamEndCapture(stream)
    gpu.call(lambda: (status, graph))
    return gpu.call(driver.cuGraphInstantiate, graph, 0)


def test_a_graph_copies_what_the_host_has_when_it_is_launched(stream, memory):
    source = np.arange(4.0)
    address = memory.put(np.zeros(4))
    graph = captured(
        stream, lambda: gpu.call(driver.cuMemcpyHtoDAsync, address, source.ctypes.data, 32, stream)
    )
    np.testing.assert_array_equal(memory.get(address, (4,), float), 0)
    for source[:] in ([1, 2, 3, 4], [5, 6, 7, 8]):
        gpu.call(driver.cuGraphLaunch, graph, stream)
        np.testing.assert_array_equal(memory.get(address, (4,), float), source)


def test_memory_of_a_graph_lives_while_it_runs(stream):
    def work():
        with gpu.DeviceMemory(gpu.current(), int(stream)) as memory:
            addresses.append(memory.empty((4,), np.float32))
            gpu.call(driver.cuMemsetD8Async, addresses[0], 1, 16, stream)

    addresses = []
    graph = captured(stream, work)
    gpu.call(driver.cuGraphLaunch, graph, stream)
    (address,) = addresses
    assert np.isnan((ctypes.c_float * 4).from_address(address)).all()
    with gpu.DeviceMemory(gpu.current()) as memory:
        assert memory.empty((4,), np.float32) != address


def test_what_cannot_be_captured_ends_the_capture(stream, memory):
    for function, *arguments in (
        (driver.cuStreamSynchronize, stream),
        (driver.cuMemAlloc, 16),
    ):
        with pytest.raises(gpu.DeviceError, match="STREAM_CAPTURE_INVALIDATED"):
            captured(stream, lambda f=function, a=arguments: f(*a))


def test_a_stream_that_waits_for_a_capture_is_part_of_it(stream, memory):
    side = gpu.call(driver.cuStreamCreate, EXCLUSIVE)
    address = memory.put(np.zeros(4, np.uint8))

    def work():
        gpu.wait_for(side, stream)
        gpu.call(driver.cuMemsetD8Async, address, 7, 4, side)
        gpu.wait_for(stream, side)

    graph = captured(stream, work)
    assert not memory.get(address, (4,), np.uint8).any()
    gpu.call(driver.cuGraphLaunch, graph, stream)
    assert (memory.get(address, (4,), np.uint8) == 7).all()
