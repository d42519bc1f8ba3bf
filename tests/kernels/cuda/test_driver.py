"""The CUDA rungs and the backend on a GPU: skipped, with the reason, where there is none."""
# ruff: noqa: E402  (what needs a GPU is imported only where there is one)

import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from gpu_problems import upload
from kernels.cpu.test_rungs import options, ragged
from problems import assert_as_good_as_plain, assert_close_to_exact
from test_backends import ALONE, small

from minimha import attention, backends
from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.ladder import CUDA_LADDER

NO_GPU = backends()["cuda"]
if NO_GPU:
    pytest.skip(f"CUDA kernels cannot run here: {NO_GPU}", allow_module_level=True)

from cuda.bindings import driver

from minimha.kernels.cuda import backend as cuda
from minimha.kernels.cuda import copies, plans
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.arguments import to_device, to_host
from minimha.kernels.cuda.linker import compiled

inf = np.inf
SIXTEEN = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUNDED = {"float16": 1e-3, "bfloat16": 8e-3}  # two units in the last place of a number near 1


def on_rung(name, q, k, v, **given):
    """O and L from that rung, or a skip with the reason why it cannot take the problem."""
    problem = Problem.of(q, k, v, **given)
    cc = gpu.current().cc
    if cc != cuda.ONLY_ON.get(name, cc):
        pytest.skip(f"{name} is for GPUs of another compute capability")
    module = cuda._module(name)
    if module.unsupported(problem) and problem.dtype != problem.compute:
        problem = cuda.widened(problem)
    if reason := module.unsupported(problem):
        pytest.skip(f"{name}: {reason}")
    return cuda.solve(name, problem)


def assert_near(q, k, v, given, output, lse, tolerance):
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected, expected_lse = dense.forward(Problem.of(*wide, **given))
    got = output.astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)
    if expected.size and np.ptp(expected) > 0:
        assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.9999


# every rung


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("given", ALONE.values(), ids=ALONE)
def test_each_option_alone(given, dtype, name):
    q, k, v = small(dtype=dtype)
    assert_as_good_as_plain(q, k, v, given, *on_rung(name, q, k, v, **given))


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("Lq", [1, 8, 131, 300])
@pytest.mark.parametrize("option", options())
def test_every_option_on_ragged_sizes(option, Lq, name):
    q, k, v = ragged(Lq=Lq)
    given = options(Lq=Lq)[option]
    assert_close_to_exact(q, k, v, given, *on_rung(name, q, k, v, **given))


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("option", options())
def test_every_option_in_16_bits(option, dtype, name):
    q, k, v = (x.astype(SIXTEEN[dtype]) for x in ragged())
    given = options()[option]
    output, lse = on_rung(name, q, k, v, **given)
    assert_near(q, k, v, given, output, lse, ROUNDED[dtype])


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN])
@pytest.mark.parametrize("D", [1, 16, 33, 64, 80, 128, 192, 256])
def test_any_head_width(D, dtype, name):
    q, k, v = ragged(Lq=70, Lk=150, D=D, Dv=max(1, D - 3), B=1)
    q, k, v = (x.astype(SIXTEEN.get(dtype, np.float32)) for x in (q, k, v))
    output, lse = on_rung(name, q, k, v)
    assert_near(q, k, v, {}, output, lse, ROUNDED.get(dtype, 2e-5))


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN])
@pytest.mark.parametrize("given", [{}, {"is_causal": True}], ids=["all", "causal"])
def test_thousands_of_keys(given, dtype, name):
    Lq = 4 if name == "cuda.rung5_decode" else 2048
    q, k, v = ragged(Lq=Lq, Lk=2048, H=8, Hkv=2, D=64, Dv=64, B=1)
    q, k, v = (x.astype(SIXTEEN.get(dtype, np.float32)) for x in (q, k, v))
    if given:
        given = given | {"q_offset": 2048 - Lq}
    output, lse = on_rung(name, q, k, v, **given)
    assert_near(q, k, v, given, output, lse, ROUNDED.get(dtype, 2e-5))


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
def test_what_no_query_sees_may_be_anything(poison, name):
    q, k, v = ragged()
    given = {"kv_lengths": [150, 97], "window_size": (40, 3), "q_offset": 5}
    expected = on_rung(name, q, k, v, **given)
    k[0, :, 150:], v[0, :, 150:], k[1, :, 97:], v[1, :, 97:] = (poison,) * 4
    k[:, :, 140:], v[:, :, 140:] = poison, poison  # after the last query's window
    for got, wanted in zip(on_rung(name, q, k, v, **given), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", CUDA_LADDER)
@pytest.mark.parametrize("Lk", [0, 5])
def test_queries_that_see_nothing(Lk, name):
    q, k, v = ragged(Lk=Lk)
    given = {"attn_mask": np.zeros((131, Lk), bool)}
    output, lse = on_rung(name, q, k, v, **given)
    assert (output == 0).all()
    assert (lse == -inf).all()
    _, lse = on_rung(name, q, k, v, **given, sinks=[1, 2, -inf, 4])
    np.testing.assert_allclose(lse[0, :, 0], [1, 2, -inf, 4])


# the backend


@pytest.mark.parametrize("dtype", ["float32", "float64", *SIXTEEN])
@pytest.mark.parametrize("Lq", [0, 1, 64])
def test_numpy_arrays_are_uploaded_and_the_result_is_downloaded(Lq, dtype):
    q, k, v = (x.astype(SIXTEEN.get(dtype, dtype)) for x in ragged(Lq=Lq))
    output, lse = attention(q, k, v, return_lse=True, backend="cuda")
    assert output.dtype == q.dtype
    assert_near(q, k, v, {}, output, lse, ROUNDED.get(dtype, 2e-5))


def test_a_kernel_is_compiled_once():
    q, k, v = ragged(Lq=40)
    attention(q, k, v, backend="cuda")
    compiled = set(gpu._kernels)
    attention(q[:, :, :33], k[:, :, :70], v[:, :, :70], backend="cuda")
    assert set(gpu._kernels) == compiled


def test_several_threads_may_call_at_once():
    q, k, v = ragged()
    expected = attention(q, k, v, backend="cuda")
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(attention, q, k, v, backend="cuda") for _ in range(32)]
    for call in calls:
        np.testing.assert_array_equal(call.result(), expected)


def free_bytes():
    gpu.synchronize(0)
    return gpu.call(driver.cuMemGetInfo)[0]


def test_running_out_of_memory_is_reported_and_nothing_leaks():
    q, k, v = ragged()
    attention(q, k, v, backend="cuda")
    before = free_bytes()
    for _ in range(5):
        with gpu.DeviceMemory(gpu.current()) as memory:
            memory.empty((1 << 26,), np.float32)
            with pytest.raises(MemoryError, match=r"bytes\) does not fit into the GPU's memory"):
                memory.empty((1 << 40,), np.float32)
    for _ in range(50):
        attention(q, k, v, backend="cuda")
    assert free_bytes() >= before - 2 * gpu.KEPT
    attention(q, k, v, backend="cuda")


@pytest.mark.parametrize("source", ["float32", "float64", *SIXTEEN])
@pytest.mark.parametrize("target", ["float32", "float64", *SIXTEEN])
def test_copies_convert(source, target):
    source, target = (SIXTEEN.get(name) or np.dtype(name) for name in (source, target))
    array = np.random.default_rng(0).normal(size=(2, 3, 5, 7)).astype(source)
    expected = np.zeros((2, 3, 5, 16), target)
    expected[..., :7] = array.astype(np.float64).astype(target)
    with gpu.DeviceMemory(gpu.current()) as memory:
        to, draft = to_device(np.ones_like(expected), memory), plans.Draft(memory.device)
        draft.launch(*copies.copying(to_device(array, memory), to))
        plans.Plan(draft).run({}, memory)
        got = to_host(to, memory)
    np.testing.assert_array_equal(got.astype("f8"), expected.astype("f8"))


def test_the_launch_that_the_device_runs_is_the_one_that_is_compiled_offline():
    q, k, v = ragged()
    problem = Problem.of(q, k, v)
    name, given = cuda.rung_for(problem, gpu.current())
    with gpu.DeviceMemory(gpu.current()) as memory:
        arguments = upload(given, memory)
        launches = cuda._module(name).launches(given, arguments, lambda shape: 0)
    for launch, _ in launches:
        assert compiled(launch, gpu.current().cc).machine_code().code.startswith(b"\x7fELF")


# torch


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def tensors(torch, dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def host(tensor):
    return tensor.double().cpu().numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64", *SIXTEEN])
@pytest.mark.parametrize(("Lq", "D"), [(100, 64), (100, 40), (1, 128), (0, 64)])
def test_tensors_come_back_as_tensors(Lq, D, dtype, torch):
    q, k, v = tensors(torch, dtype, (2, Lq, 8, D), (2, 120, 2, D), (2, 120, 2, D))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given = {"is_causal": True, "q_offset": 120 - Lq}
    output, lse = attention(q, k, v, **given, return_lse=True)
    assert isinstance(output, torch.Tensor)
    assert output.dtype == q.dtype
    assert output.device == q.device
    expected = attention(*(host(x) for x in (q, k, v)), **given, return_lse=True, backend="dense")
    tolerance = ROUNDED.get(dtype, 2e-5)
    np.testing.assert_allclose(host(output), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(host(lse), expected[1], rtol=tolerance, atol=tolerance)


def test_options_may_be_tensors(torch):
    q, k, v = tensors(torch, "bfloat16", (2, 4, 90, 64), (2, 2, 100, 64), (2, 2, 100, 64))
    mask = torch.rand(90, 100, device="cuda") < 0.8
    bias = torch.randn(1, 4, 1, 100, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 60], device="cuda")
    output = attention(q, k, v, attn_mask=mask, attn_bias=bias, kv_lengths=lengths)
    expected = attention(
        *(host(x) for x in (q, k, v)),
        attn_mask=mask.cpu().numpy(),
        attn_bias=host(bias),
        kv_lengths=[100, 60],
        backend="dense",
    )
    np.testing.assert_allclose(host(output), expected, atol=1.6e-2)


def test_the_callers_stream_is_kept(torch):
    q, k, v = tensors(torch, "float32", (1, 4, 512, 64), (1, 4, 512, 64), (1, 4, 512, 64))
    expected = attention(2 * q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = q
        torch.cuda._sleep(200_000_000)  # the doubled queries are not there yet when we are called
        late = 2 * late
        output = attention(late, k, v)
        result = output + 0
    side.synchronize()
    torch.testing.assert_close(result, expected)


def test_nothing_leaks_from_torchs_memory(torch):
    q, k, v = tensors(torch, "bfloat16", (2, 8, 256, 64), (2, 8, 256, 64), (2, 8, 256, 64))
    attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        attention(q, k, v)
    assert torch.cuda.memory_allocated() == before


def test_what_a_tensor_cannot_be(torch):
    (q,) = tensors(torch, "float32", (1, 2, 16, 32))
    with pytest.raises(TypeError, match=r"q is on a GPU but k \(Tensor\) is on the host"):
        attention(q, q.cpu(), q)
    with pytest.raises(TypeError, match="v has dtype float16 but q has float32"):
        attention(q, q, q.half())
    with pytest.raises(TypeError, match="q cannot be read in place"):
        attention(q.clone().requires_grad_(), q, q)
    with pytest.raises(ValueError, match="k has D=16 but q has D=32"):
        attention(q, q[..., :16], q)


def test_several_devices(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    (q,) = tensors(torch, "float32", (1, 2, 16, 32))
    other = q.to("cuda:1")
    with pytest.raises(ValueError, match="k is on GPU 1 but q is on GPU 0"):
        attention(q, other, q)
    np.testing.assert_allclose(host(attention(other, other, other)), host(attention(q, q, q)))
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        np.testing.assert_allclose(host(attention(other, other, other)), host(attention(q, q, q)))


# other libraries


@pytest.mark.parametrize("library", ["cupy", "jax", "numba"])
def test_other_libraries_arrays(library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    q, k, v = ragged(D=32, Dv=32)
    if library == "numba":
        from numba import cuda as numba_cuda

        there, back = numba_cuda.to_device, lambda array: array.copy_to_host()
    elif library == "cupy":
        there, back = sys.modules["cupy"].asarray, sys.modules["cupy"].asnumpy
    else:
        jax = sys.modules["jax"]
        if jax.default_backend() != "gpu":
            pytest.skip("this jax has no GPU")
        there, back = jax.numpy.asarray, np.asarray
    given = [there(x) for x in (q, k, v)]
    output, lse = attention(*given, is_causal=True, q_offset=72, return_lse=True)
    assert type(output) is type(given[0])
    assert_near(q, k, v, {"is_causal": True, "q_offset": 72}, back(output), back(lse), 2e-5)
    for array, before in zip(given, (q, k, v), strict=True):
        np.testing.assert_array_equal(back(array), before)
