"""The backend "cuda" without a GPU: what it refuses, what it chooses, and whole calls, emulated.

``emulated`` replaces the driver by the PTX emulator, and CuPy by a small library of arrays in the
emulator's memory. That a real driver does the same is tested in ``test_driver.py``.
"""

import ctypes
import gc
import re
import struct
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from gpu_problems import upload, upload_arrays
from test_backends import ALONE, small

from minimha import BackendUnavailable, attention
from minimha.equations import dense
from minimha.equations.arrays import ordinal_of
from minimha.equations.problem import Problem
from minimha.kernels import remembered
from minimha.kernels.cuda import interop

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from emulator import ARENA, Arena, Emulator, flattened

from minimha.kernels.cuda import backend as cuda
from minimha.kernels.cuda import (
    copies,
    plans,
    rung1_rows,
    rung2_tiles,
    rung3_register_tiles,
    rung4_tensor_cores,
    rung5_decode,
    rung6_warpgroups,
)
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.arguments import (
    Arrays,
    address_types,
    array_at,
    array_types,
    row_alignment,
    row_width,
    to_device,
    to_host,
)
from minimha.kernels.cuda.cubins import cubin
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.linker import compiled

HOPPER = gpu.Device(0, (9, 0), 2, 227 << 10, "pool", 1234)
TURING = gpu.Device(0, (7, 5), 2, 64 << 10, "pool", 1234)
DTYPES = {np.dtype(t).name: np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, "f4", "f8")}
MODULES = {
    "cuda.rung1_rows": rung1_rows,
    "cuda.rung2_tiles": rung2_tiles,
    "cuda.rung3_register_tiles": rung3_register_tiles,
    "cuda.rung4_tensor_cores": rung4_tensor_cores,
    "cuda.rung5_decode": rung5_decode,
    "cuda.rung6_warpgroups": rung6_warpgroups,
}


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# which rung


@pytest.mark.parametrize(
    ("dtype", "device", "Lq", "D", "rung", "taken_as"),
    [
        ("float32", HOPPER, 100, 64, "cuda.rung3_register_tiles", "float32"),
        ("float64", HOPPER, 100, 64, "cuda.rung2_tiles", "float64"),
        ("bfloat16", HOPPER, 100, 64, "cuda.rung6_warpgroups", "bfloat16"),
        ("float16", HOPPER, 100, 256, "cuda.rung6_warpgroups", "float16"),
        ("float16", HOPPER, 1, 64, "cuda.rung5_decode", "float16"),
        ("float32", HOPPER, 8, 64, "cuda.rung5_decode", "float32"),
        ("float64", HOPPER, 1, 64, "cuda.rung2_tiles", "float64"),
        ("float16", TURING, 100, 64, "cuda.rung3_register_tiles", "float32"),
        ("float32", TURING, 100, 256, "cuda.rung2_tiles", "float32"),
        ("bfloat16", TURING, 1, 64, "cuda.rung5_decode", "float32"),
        ("float16", HOPPER, 100, 2000, "cuda.rung2_tiles", "float32"),
        ("float64", HOPPER, 100, 4000, "cuda.rung2_tiles", "float64"),
        ("float32", HOPPER, 1, 20000, "cuda.rung2_tiles", "float32"),
    ],
)
def test_the_best_rung_that_takes_a_problem(dtype, device, Lq, D, rung, taken_as):
    q, k = (np.broadcast_to(np.zeros((), DTYPES[dtype]), (2, 1, n, D)) for n in (Lq, 100))
    name, given = cuda.rung_for(Problem.of(q, k, k), device)
    assert (name, given.dtype.name) == (rung, taken_as)
    assert given.q.base is not None
    assert given.q.shape == q.shape
    assert not any(given.q.strides), "a stand-in stays one number"
    assert cuda.unsupported(given) is None


@pytest.mark.parametrize(
    ("device", "Lq", "rung"),
    [
        (HOPPER, 100, "cuda.rung6_warpgroups"),
        (HOPPER, 8, "cuda.rung5_decode"),
        (HOPPER._replace(cc=(8, 0)), 100, "cuda.rung4_tensor_cores"),
        (HOPPER._replace(cc=(10, 0)), 100, "cuda.rung4_tensor_cores"),
    ],
)
def test_warpgroups_are_chosen_on_hopper_for_more_than_a_few_queries(device, Lq, rung):
    q, k = (np.broadcast_to(np.zeros((), np.float16), (2, 1, n, 64)) for n in (Lq, 100))
    name, given = cuda.rung_for(Problem.of(q, k, k), device)
    assert (name, given.dtype) == (rung, np.float16)
    single = Problem.of(*(x.astype(np.float32) for x in (q, k, k)))
    assert cuda.rung_for(single, device)[0] != "cuda.rung6_warpgroups"


# an emulated driver


class EmulatedMemory(gpu.DeviceMemory):
    """A device's memory in the emulator's arena."""

    arena = None

    def allocate(self, size, what="the workspace of a call"):
        return self.arena.put(np.full(size, 0xFF, np.uint8))

    def put(self, array):
        return self.arena.put(array)

    def get(self, address, shape, dtype):
        return self.arena.get(address, shape, dtype)

    def launch(self, launch, function, parameters, first):
        values = gpu.layout(launch.signature).unpack_from(parameters.slots, 8 * first)
        if hasattr(launch.function, "stand_in"):
            launch.function.stand_in(values)
        else:
            emulate(launch, values, self.arena)


def stand_in(name, problem, arguments, draft, settings):
    """What ``cuda._launches`` returns, with the equations as kernel: kernels have their own tests.

    Every array is found by what a kernel is called with: addresses, strides, numbers.
    """
    takes_arrays = isinstance(arguments, Arrays)
    find = of_arrays if takes_arrays else of_addresses

    def solve(values):
        launched.append(name)
        given = rebuilt(arguments, iter(values))
        found, O, L = find(problem, given, EmulatedMemory.arena)
        functions = {"score_mod": problem.score_mod, "mask_mod": problem.mask_mod}
        O[:], L[:] = dense.forward(replace(found, **functions))

    signature = array_types(problem) if takes_arrays else address_types(problem)
    return [(Launch(SimpleNamespace(stand_in=solve), signature, (1, 1, 1), 32), arguments)]


def rebuilt(like, values):
    """``values`` in nested tuples as in ``like``."""
    if not isinstance(like, tuple):
        return next(values)
    items = [rebuilt(item, values) for item in like]
    return type(like)(*items) if hasattr(like, "_fields") else tuple(items)


def view(arena, address, shape, strides, dtype):
    """Memory of the arena as an array that can be written; None where there is none."""
    if not np.prod(shape):
        return None if 0 in shape[:2] else np.zeros(shape, dtype)
    if not address:
        return None
    at, dtype = address - ARENA, np.dtype(dtype)
    return np.lib.stride_tricks.as_strided(
        arena.data[at : at + dtype.itemsize].view(dtype), shape, strides
    )


def of_arrays(problem, given, arena):
    o, real = given.o, problem.compute

    def array(there, dtype=real):
        assert there.itemsize == np.dtype(dtype).itemsize or not there.size
        assert there.size == np.prod(there.shape)
        return view(arena, there.address, there.shape, there.strides, dtype)

    found = Problem(
        **{name: array(getattr(given, name)) for name in ("q", "k", "v")},
        left=o.left,
        right=o.right,
        q_offset=array(o.q_offset, "i8"),
        kv_lengths=array(o.kv_lengths, "i8"),
        attn_mask=array(given.mask, "?"),
        attn_bias=array(given.bias),
        alibi_slopes=array(o.slopes),
        sinks=array(o.sinks),
        scale=o.scale,
        softcap=o.softcap or None,
        dtype=real,
        compute=real,
        rank=4,
    )
    return found, array(given.O), array(given.L)


def of_addresses(problem, given, arena):
    o, B = given.o, problem.q.shape[0]
    width = row_width(problem, MODULES[launched[-1]].ROW_UNIT)
    size = problem.dtype.itemsize

    def rows(there, heads, length):
        assert not any(x * size % row_alignment(width, size) for x in there)
        strides = (*[step * size for step in there[1:]], size)
        return view(arena, there.address, (B, heads, length, width), strides, problem.dtype)

    def pairs(there, dtype, size):
        strides = [step * size for step in there[1:]]
        return view(arena, there.address, (B, o.H, o.Lq, o.Lk), strides, dtype)

    def line(address, count, dtype):
        return view(arena, address, (count,), (np.dtype(dtype).itemsize,), dtype)

    found = Problem(
        q=rows(given.q, o.H, o.Lq),
        k=rows(given.k, o.Hkv, o.Lk),
        v=rows(given.v, o.Hkv, o.Lk),
        left=o.left,
        right=o.right,
        q_offset=line(o.q_offset, B, "i8"),
        kv_lengths=line(o.kv_lengths, B, "i8"),
        attn_mask=pairs(given.mask, "?", 1),
        attn_bias=pairs(given.bias, "f4", 4),
        alibi_slopes=line(o.slopes, o.H, "f4"),
        sinks=line(o.sinks, o.H, "f4"),
        scale=o.scale,
        softcap=o.softcap or None,
        dtype=problem.dtype,
        compute=problem.compute,
        rank=4,
    )
    shape = (B, o.H, o.Lq)
    L = view(arena, given.L, shape, (o.H * o.Lq * 4, o.Lq * 4, 4), "f4")
    return found, rows(given.O, o.H, o.Lq), L


def emulate(launch, arguments, arena):
    """Compile and execute one launch."""
    launched.append(launch.function.__module__.removeprefix("minimha.kernels."))
    emulator(launch._replace(grid=(1, 1, 1))).run(launch, arguments, arena)


@cache
def emulator(launch):
    return Emulator(compiled(launch, HOPPER.cc).ptx())


def constant(device, content):
    return SimpleNamespace(address=EmulatedMemory.arena.put(np.frombuffer(content, np.uint8)))


launched = []


class Array:
    """An array in the arena, of a library without DLPack."""

    def __init__(self, array, device=0, **also):
        arena = EmulatedMemory.arena
        owner = array if array.base is None else array.base
        whole = np.lib.stride_tricks.as_strided(owner, (owner.size,), (owner.itemsize,))
        first = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        self.address = arena.put(whole) + first
        self.shape, self.dtype, self.strides, self.device = (
            array.shape, array.dtype, array.strides, device,
        )  # fmt: skip
        self.also = also

    @property
    def __cuda_array_interface__(self):
        data = {"shape": self.shape, "typestr": self.dtype.str, "strides": self.strides}
        return data | {"data": (self.address, False), "version": 3} | self.also

    def on_host(self):
        return EmulatedMemory.arena.get(self.address, self.shape, self.dtype)


Array.__module__ = "cupy"


class Capsule(Array):
    """The same, exported by DLPack."""

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, stream):
        assert stream == interop.NO_SYNC
        code = {"f": 2, "b": 6, "i": 0, "V": 4, "u": 1}[self.dtype.kind]
        shape, strides = (
            (ctypes.c_int64 * len(self.shape))(*values)
            for values in (self.shape, [step // self.dtype.itemsize for step in self.strides])
        )
        bits = 8 * self.dtype.itemsize
        self.tensor = interop._DLTensor(
            self.address, 2, self.device, len(shape), code, bits, 1, shape, strides, 0
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


Capsule.__module__ = "cupy"


@pytest.fixture
def emulated(monkeypatch):
    """An H200 of NumPy, and CuPy's names for it."""
    launched.clear()
    monkeypatch.setattr(EmulatedMemory, "arena", Arena())
    remembered.forget()
    monkeypatch.setattr(gpu, "current", lambda: HOPPER)
    monkeypatch.setattr(gpu, "constant", constant)
    monkeypatch.setattr(
        gpu, "loaded_kernel", lambda launch, _: gpu.LoadedKernel(0, gpu.layout(launch.signature))
    )
    monkeypatch.setattr(gpu, "is_capturing", lambda stream: False)
    monkeypatch.setattr(gpu, "is_stream_of", lambda stream, device: stream == 77)
    monkeypatch.setattr(gpu, "device_at", lambda address: 0)
    monkeypatch.setattr(gpu, "DeviceMemory", EmulatedMemory)
    monkeypatch.setattr("minimha.api.reason_without_cuda", lambda: None)
    stream = SimpleNamespace(ptr=77)
    cupy = SimpleNamespace(
        ndarray=None,  # so that DLPack is asked
        empty=lambda shape, dtype: Capsule(np.full(shape, 99, dtype)),
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return SimpleNamespace(stream=stream)


@pytest.fixture
def stood_in(emulated, monkeypatch):
    """The same, with the equations instead of the kernels: quicker, and float64 too."""
    monkeypatch.setattr(cuda, "_launches", stand_in)
    return emulated


def check(q, k, v, output, lse, options=None, tolerance=1e-5):
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = attention(*wide, **(options or {}), return_lse=True, backend="dense")
    np.testing.assert_allclose(output.astype(np.float64), expected[0], atol=tolerance)
    np.testing.assert_allclose(lse.astype(np.float64), expected[1], atol=tolerance)


TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}


EMULATED = pytest.mark.parametrize(
    ("dtype", "Lq", "rung"),
    [
        ("float32", 20, "cuda.rung3_register_tiles"),
        ("bfloat16", 20, "cuda.rung6_warpgroups"),
        ("bfloat16", 2, "cuda.rung5_decode"),
    ],
)


@EMULATED
@pytest.mark.parametrize("kind", [np.asarray, Capsule])
def test_a_call_from_the_door_to_the_machine_and_back(kind, dtype, Lq, rung, emulated):
    q, k, v = (numbers(2, h, n, 24, dtype=DTYPES[dtype]) for h, n in ((4, Lq), (2, 33), (2, 33)))
    options = {"is_causal": True, "q_offset": 13, "sinks": [0, 1, 2, -np.inf]}
    given = [kind(x) for x in (q, k, v)]
    output, lse = attention(*given, **options, backend="cuda", return_lse=True)
    if kind is Capsule:
        output, lse = output.on_host(), lse.on_host()
    check(q, k, v, output, lse, options, TOLERANCE[dtype])
    assert set(launched) - {"cuda.copies"} == {rung}


@EMULATED
def test_rows_that_see_no_key_are_written(dtype, Lq, rung, emulated):
    q, k, v = (numbers(2, h, n, 24, dtype=DTYPES[dtype]) for h, n in ((4, Lq), (2, 0), (2, 0)))
    output, lse = attention(q, k, v, backend="cuda", return_lse=True)
    assert (output == 0).all()
    assert (lse == -np.inf).all()
    assert set(launched) == {rung}


@pytest.mark.parametrize("rung", cuda.TAKE_ARRAYS)
@pytest.mark.parametrize(("D", "Dv"), [(24, 16), (81, 131)])
def test_rungs_that_take_arrays_run_in_the_emulator_too(D, Dv, rung, emulated):
    q, k, v = numbers(2, 4, 70, D), numbers(2, 2, 33, D, seed=1), numbers(2, 2, 33, Dv, seed=2)
    mask = np.random.default_rng(0).random((2, 1, 70, 33)) < 0.7
    options = {
        "window_size": (20, 3), "q_offset": [-30, 2], "kv_lengths": [33, 20], "attn_mask": mask,
        "softcap": 3.0, "alibi_slopes": [1, 0.5, 0.25, 0], "sinks": [0, 1, 2, -np.inf],
    }  # fmt: skip
    check(q, k, v, *cuda.solve(rung, Problem.of(q, k, v, **options)), options)
    assert launched == [rung]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_are_uploaded_and_the_result_is_downloaded(dtype, stood_in):
    q, k, v = (numbers(2, h, n, 24, dtype=DTYPES[dtype]) for h, n in ((4, 20), (2, 33), (2, 33)))
    options = {"window_size": (5, 9), "q_offset": [13, 2], "alibi_slopes": [1, 0.5, 0.25, 0]}
    output, lse = attention(q, k, v, **options, backend="cuda", return_lse=True)
    assert isinstance(output, np.ndarray)
    assert output.dtype == DTYPES[dtype]
    check(q, k, v, output, lse, options, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Array, "float32"), (Array, "float64"), (Array, "float16"), *[(Capsule, x) for x in DTYPES]],
)
@pytest.mark.parametrize("D", [16, 20])
def test_the_output_is_an_array_of_the_inputs_library(dtype, D, kind, stood_in):
    # (B, L, H, D) in memory, seen as (B, H, L, D)
    q, k, v = (
        numbers(2, n, h, D, dtype=DTYPES[dtype], seed=s).transpose(0, 2, 1, 3)
        for s, (h, n) in enumerate(((4, 17), (2, 33), (2, 33)))
    )
    options = {"kv_lengths": [33, 20], "softcap": 3.0, "scale": 0.4}
    given = [kind(x) for x in (q, k, v)]
    output, lse = attention(*given, **options, return_lse=True)
    assert type(output) is type(lse) is Capsule
    assert output.dtype == DTYPES[dtype]
    check(q, k, v, output.on_host(), lse.on_host(), options, TOLERANCE[dtype])
    for array, before in zip(given, (q, k, v), strict=True):
        held = EmulatedMemory.arena.get(array.address, before.size, before.dtype)
        np.testing.assert_array_equal(held, before.transpose(0, 2, 1, 3).ravel())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name)
        for name, options in ALONE.items()
        if "key_indices" not in options  # which no GPU kernel takes
    ],
)
def test_every_option_on_the_device(options, dtype, stood_in):
    q, k, v = small(dtype=DTYPES[dtype])
    there = {
        name: Capsule(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    output, lse = attention(Capsule(q), Capsule(k), Capsule(v), **there, return_lse=True)
    check(q, k, v, output.on_host(), lse.on_host(), options, 1e-5)


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 20), (1, 2, 1, 20), (2, 1, 9, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bias_of_any_dtype_and_shape_is_read_on_the_device(dtype, shape, bias_dtype, stood_in):
    q, k, v = (numbers(2, 2, n, 8, dtype=DTYPES[dtype], seed=n) for n in (9, 20, 20))
    bias = numbers(*shape, dtype=DTYPES[bias_dtype], seed=9)
    mask = np.random.default_rng(1).random((20, 9)).T < 0.7
    options = {"attn_bias": Capsule(bias), "attn_mask": Capsule(mask)}
    output, lse = attention(Capsule(q), Capsule(k), Capsule(v), **options, return_lse=True)
    wide = {"attn_bias": bias.astype(np.float64), "attn_mask": mask}
    check(q, k, v, output.on_host(), lse.on_host(), wide, 1e-5)


def test_a_matrix_comes_back_as_a_matrix(stood_in):
    q, k, v = numbers(20, 16), numbers(9, 16, seed=1), numbers(9, 16, seed=2)
    output, lse = attention(Capsule(q), Capsule(k), Capsule(v), return_lse=True, backend="cuda")
    assert output.shape == (20, 16)
    assert lse.shape == (20,)
    check(q, k, v, output.on_host(), lse.on_host())
    assert isinstance(attention(Capsule(q), Capsule(k), Capsule(v)), Capsule)


def test_what_can_be_read_in_place_is_not_copied(stood_in):
    q, k, v = (numbers(1, n, 2, 32).transpose(0, 2, 1, 3) for n in (20, 40, 40))
    attention(*(Capsule(x) for x in (q, k, v)))
    assert launched == ["cuda.rung3_register_tiles"]
    launched.clear()
    narrow = numbers(1, 2, 40, 33)[..., 1:]  # rows do not begin at multiples of 16 bytes
    attention(Capsule(q), Capsule(narrow), Capsule(v))
    assert launched == ["cuda.copies", "cuda.rung3_register_tiles"]


@pytest.mark.parametrize(
    ("dtype", "rung"),
    [("float32", "cuda.rung3_register_tiles"), ("bfloat16", "cuda.rung6_warpgroups")],
)
@pytest.mark.parametrize(("D", "copies"), [(40, 0), (72, 0), (41, 4)])
def test_widths_that_16_does_not_divide_are_not_copied(dtype, rung, D, copies, stood_in):
    q, k, v = (numbers(1, 2, n, D, dtype=DTYPES[dtype]) for n in (20, 40, 40))
    attention(*(Capsule(x) for x in (q, k, v)))
    assert sorted(launched) == ["cuda.copies"] * copies + [rung]


def test_a_broadcast_axis_is_copied_once(stood_in):
    array = np.broadcast_to(numbers(1, 1, 5, 20), (2, 4, 5, 20))
    memory, draft = EmulatedMemory(HOPPER), plans.Draft(HOPPER)
    given = to_device(array, memory)
    padded = cuda._readable(draft.brought("q", given), DTYPES["bfloat16"], 32, draft)
    assert padded.shape == (2, 4, 5, 32)
    assert padded.strides == (0, 0, 32, 1)
    assert draft.size == 512
    address = ARENA + memory.arena.end  # of the workspace, which is all that the plan allocates
    plans.Plan(draft).run({"q": given.address}, memory)
    expected = np.pad(array.astype(DTYPES["bfloat16"]), ((0, 0),) * 3 + ((0, 12),))
    np.testing.assert_array_equal(to_host(padded._replace(address=address), memory), expected)


def test_an_axis_of_length_1_may_have_any_stride(stood_in):
    q, k, v = (numbers(1, n, 32, 1, seed=n).transpose(0, 3, 1, 2) for n in (20, 40, 40))
    assert q.strides[1] % 16, "the head's stride is that of a number"
    output, lse = attention(Capsule(q), Capsule(k), Capsule(v), return_lse=True)
    check(q, k, v, output.on_host(), lse.on_host())
    assert launched == ["cuda.rung3_register_tiles"]


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_empty_axes(sizes, stood_in):
    Lq, Lk = sizes
    q, k, v = numbers(2, 2, Lq, 16), numbers(2, 2, Lk, 16), numbers(2, 2, Lk, 16)
    for given in ((q, k, v), (Capsule(q), Capsule(k), Capsule(v))):
        output, lse = attention(*given, return_lse=True, backend="cuda")
        if isinstance(output, Capsule):
            output, lse = output.on_host(), lse.on_host()
        assert output.shape == (2, 2, Lq, 16)
        assert (output == 0).all()
        assert (lse == -np.inf).all()


def test_small_options_may_be_on_host_or_device_with_any_stride(stood_in):
    q, k, v = (numbers(3, 2, n, 16) for n in (12, 9, 9))
    lengths = np.array([9, 0, 4, 0, 7, 0])[::2]
    backwards = np.array([2.0, 1.0], np.float32)[::-1]
    there = {"kv_lengths": Capsule(lengths), "sinks": Capsule(backwards), "alibi_slopes": [1, 0.5]}
    options = {"kv_lengths": lengths, "sinks": backwards, "alibi_slopes": [1, 0.5], "q_offset": 2}
    given = there | {"q_offset": Capsule(np.array(2))}
    output, lse = attention(Capsule(q), Capsule(k), Capsule(v), **given, return_lse=True)
    check(q, k, v, output.on_host(), lse.on_host(), options)


# what is refused


def test_arrays_on_both_sides_are_refused(stood_in):
    x = numbers(3, 4)
    with pytest.raises(TypeError, match=r"q is on a GPU but k \(ndarray\) is on the host: q, k, v"):
        attention(Capsule(x), x, x)
    with pytest.raises(TypeError, match=r"q is on a GPU but attn_mask \(list\) is on the host"):
        attention(Capsule(x), Capsule(x), Capsule(x), attn_mask=[[True] * 3] * 3)
    with pytest.raises(TypeError, match=r"sinks is on a GPU but q \(ndarray\) is on the host"):
        attention(x, x, x, sinks=Capsule(numbers(1)))


def test_arrays_on_several_devices_are_refused(stood_in):
    x = Capsule(numbers(3, 4))
    with pytest.raises(ValueError, match="k is on GPU 1 but q is on GPU 0: all arrays must be on"):
        attention(x, Capsule(numbers(3, 4), device=1), x)


def test_devices_are_checked_before_a_library_exports_an_array(stood_in, monkeypatch):
    give = Capsule.__dlpack__

    def from_the_current_device(self, stream):  # as torch does
        if self.device:
            raise BufferError("Can't export tensors on a different CUDA device index")
        return give(self, stream)

    monkeypatch.setattr(Capsule, "__dlpack__", from_the_current_device)
    near, far = Capsule(numbers(3, 4)), Capsule(numbers(3, 4), device=1)
    with pytest.raises(ValueError, match="k is on GPU 1 but q is on GPU 0: all arrays must be on"):
        attention(near, far, near)


def test_an_array_without_dlpack_is_found_by_its_address(stood_in, monkeypatch):
    near, far = Array(numbers(3, 4)), Array(numbers(3, 4))
    monkeypatch.setattr(gpu, "device_at", lambda address: int(address == far.address))
    with pytest.raises(ValueError, match="v is on GPU 1 but q is on GPU 0: all arrays must be on"):
        attention(near, near, far)


def test_a_stream_of_another_device_is_refused(stood_in):
    stood_in.stream.ptr = 78
    x = Capsule(numbers(3, 4))
    with pytest.raises(ValueError, match="the current stream belongs to another device than GPU 0"):
        attention(x, x, x)


def test_dtypes_that_differ_or_are_not_computed_with_are_refused(stood_in):
    x, half = Capsule(numbers(3, 4)), Capsule(numbers(3, 4, dtype=np.float16))
    with pytest.raises(TypeError, match="v has dtype float16 but q has float32: on a GPU"):
        attention(x, x, half)
    whole = Capsule(np.arange(12).reshape(3, 4))
    with pytest.raises(TypeError, match="q has dtype int64: on a GPU float16, bfloat16"):
        attention(whole, whole, whole)
    with pytest.raises(TypeError, match="attn_bias has dtype int64: on a GPU floating"):
        attention(x, x, x, attn_bias=Capsule(np.zeros((3, 3), int)))


def test_the_doors_own_checks_hold_for_device_arrays(stood_in):
    q, k = Capsule(numbers(3, 4)), Capsule(numbers(3, 5))
    with pytest.raises(ValueError, match="k has D=5 but q has D=4: a score is a product over D"):
        attention(q, k, q)
    with pytest.raises(TypeError, match="attn_mask has dtype float32: expected bool"):
        attention(q, q, q, attn_mask=Capsule(numbers(3, 3)))
    with pytest.raises(TypeError, match="attn_bias has dtype bool: expected numbers"):
        attention(q, q, q, attn_bias=Capsule(np.ones((3, 3), bool)))
    with pytest.raises(ValueError, match=r"kv_lengths is array\(\[9\]\): expected integers from"):
        attention(q, q, q, kv_lengths=Capsule(np.array([9])))
    with pytest.raises(ValueError, match=r"sinks has shape \(2, 2\): expected"):
        attention(q, q, q, sinks=Capsule(numbers(2, 2)))


def test_why_a_library_does_not_export_an_array_is_reported(stood_in, monkeypatch):
    def refuse(self, stream):
        raise BufferError("it requires grad")

    monkeypatch.setattr(Capsule, "__dlpack__", refuse)
    x = Capsule(numbers(3, 4))
    with pytest.raises(TypeError, match="q cannot be read in place: it requires grad"):
        attention(x, x, x)


def test_an_unknown_library_is_named(stood_in, monkeypatch):
    bead = type("Bead", (Array,), {"__module__": "abacus.arrays"})
    monkeypatch.setattr(Array, "__module__", "abacus.arrays")
    x = bead(numbers(3, 4))
    monkeypatch.setattr(gpu, "is_stream_of", lambda stream, device: True)
    with pytest.raises(TypeError, match="q is an array of abacus: arrays on a GPU are accepted"):
        attention(x, x, x)


def test_a_function_that_cannot_be_compiled_is_refused_wherever_the_arrays_are(stood_in):
    def raising(s, b, h, i, j):
        raise KeyError("here")

    x = numbers(3, 4)
    for array in (x, Capsule(x)):
        with pytest.raises(BackendUnavailable, match="'cuda' cannot run: numba cannot compile sc"):
            attention(array, array, array, score_mod=raising, backend="cuda")
        with pytest.raises(TypeError, match="score_mod returned bool: expected a real number"):
            attention(array, array, array, score_mod=lambda s, b, h, i, j: i > j, backend="cuda")


def test_device_arrays_take_no_tap_and_no_other_backend(stood_in):
    x = Capsule(numbers(3, 4))
    with pytest.raises(BackendUnavailable, match="'cuda' cannot run: it keeps no steps to tap"):
        attention(x, x, x, tap=lambda name, value: value)
    with pytest.raises(BackendUnavailable, match="backend 'cpu' cannot run: q is on a GPU"):
        attention(x, x, x, backend="cpu")
    with pytest.raises(ValueError, match="backend is 'gpu': expected auto"):
        attention(x, x, x, backend="gpu")


def test_a_producers_stream_is_waited_for(stood_in, monkeypatch):
    waited = []
    monkeypatch.setattr(gpu, "wait_for", lambda stream, other: waited.append((stream, other)))
    x = numbers(3, 4)
    attention(Array(x, stream=5), Array(x, stream=77), Array(x))
    assert waited == [(77, 5)]


# DLPack and CUDA Array Interface


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(bool), np.dtype(np.int32)])
def test_dlpack_s_description_of_an_array_is_understood(dtype, stood_in):
    whole = np.zeros((4, 3, 5), dtype)
    array = whole[::2, ::-1, 1:4]
    there = Capsule(array)
    found = interop.as_device_array("q", there)
    assert found.dtype == dtype
    assert found.shape == (2, 3, 3)
    assert found.strides == (30, -5, 1)
    assert found.address == there.address
    assert found.nbytes == 18 * dtype.itemsize


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(bool), np.dtype(np.int32)])
def test_plain_arrays_of_cupy_are_not_exported(dtype, stood_in, monkeypatch):
    there = Capsule(np.zeros((4, 3, 5), dtype)[::2, ::-1, 1:4])
    there.data = SimpleNamespace(ptr=there.address)
    described = interop.as_device_array("q", there)
    monkeypatch.setattr(sys.modules["cupy"], "ndarray", Capsule)
    monkeypatch.delattr(Capsule, "__dlpack__")
    found = interop.as_device_array("q", there)
    assert found[:4] == described[:4]
    assert found.owner is there


@pytest.mark.parametrize("odd", [{"strides": (13, 4)}, {"dtype": np.dtype(">f4")}])
def test_odd_arrays_of_cupy_are_left_to_dlpack(odd, stood_in, monkeypatch):
    there = Capsule(numbers(2, 3))
    vars(there).update(odd)
    monkeypatch.setattr(sys.modules["cupy"], "ndarray", Capsule)
    assert interop._from_cupy(there) is None


def test_plain_tensors_of_torch_are_read_as_torch_describes_them():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in ("float16", "bfloat16", "float32", "float64", "int64", "bool"):
        tensor = torch.zeros(4, 3, 5, dtype=getattr(torch, name))[::2, :, 1:4]
        found = interop._from_tensor("q", tensor)
        assert found[:3] == (tensor.data_ptr(), (2, 3, 3), (30, 5, 1))
        assert found.dtype.name == name
    assert interop._from_tensor("q", torch.zeros(3, dtype=torch.complex64)) is None
    assert interop._from_tensor("q", torch.zeros(3, requires_grad=True)) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3)])
def test_numpys_own_capsules_are_understood(shape):
    array = np.zeros(shape, np.float32)
    found = interop._from_capsule("q", array.__dlpack__(), array)
    assert found.address == array.ctypes.data
    assert found.shape == shape
    assert found.dtype == np.float32


def test_an_interface_without_strides_is_contiguous_and_a_mask_is_refused(stood_in):
    there = Array(numbers(2, 3), strides=None)
    assert interop.as_device_array("q", there).strides == (3, 1)
    with pytest.raises(TypeError, match="q is a masked array, whose mask would be lost"):
        interop.as_device_array("q", Array(numbers(2, 3), mask=there))
    with pytest.raises(TypeError, match="q has dtype >f4: a GPU reads numbers in its own byte"):
        interop.as_device_array("q", Array(numbers(2, 3), typestr=">f4"))


def test_host_arrays_are_not_device_arrays():
    for value in (None, 1, 1.5, [[1]], np.zeros(3), np.float32(1), memoryview(b"abc"), "text"):
        assert ordinal_of(value) is None


# memory and launches, with a driver in Python


class Driver:
    """As much of ``cuda.bindings.driver`` as ``DeviceMemory`` uses, in host memory."""

    CUresult = gpu.driver.CUresult
    ok = (CUresult.CUDA_SUCCESS,)

    def __init__(self, size):
        self.size, self.held, self.launched = size, {}, []

    def cuMemAllocFromPoolAsync(self, size, pool, stream):
        if size > self.size - sum(map(len, self.held.values())):
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        buffer = ctypes.create_string_buffer(size)
        self.held[ctypes.addressof(buffer)] = buffer
        return *self.ok, ctypes.addressof(buffer)

    def cuMemFreeAsync(self, address, stream):
        del self.held[address]
        return self.ok

    def cuMemGetInfo(self):
        return *self.ok, self.size - sum(map(len, self.held.values())), self.size

    def cuMemcpyHtoDAsync(self, target, source, size, stream):
        ctypes.memmove(target, source, size)
        return self.ok

    def cuMemcpyDtoHAsync(self, target, source, size, stream):
        ctypes.memmove(target, source, size)
        return self.ok

    def cuStreamSynchronize(self, stream):
        return self.ok

    def cuGetErrorString(self, status):
        return *self.ok, b"it is Sunday"

    def cuLaunchKernel(self, function, gx, gy, gz, tx, ty, tz, shared, stream, parameters, extra):
        count = len(function.sizes)
        pointers = (ctypes.c_void_p * count).from_address(parameters)
        read = [
            ctypes.string_at(at, size) for at, size in zip(pointers, function.sizes, strict=True)
        ]
        self.launched.append(((gx, gy, gz), (tx, ty, tz), shared, stream, b"".join(read)))
        return self.ok


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(size=100_000)
    monkeypatch.setattr(gpu, "driver", driver)
    return driver


def test_running_out_of_memory_is_reported_with_the_sizes_and_everything_is_freed(driver):
    for _ in range(3):
        with gpu.DeviceMemory(HOPPER) as memory:
            memory.put(numbers(100, 100))
            sentence = (
                r"an array of shape \(200, 100\) and dtype float32 \(80000 bytes\) does not fit "
                r"into the GPU's memory: 40000 bytes are in use by this call, 60000 of 100000"
            )
            with pytest.raises(MemoryError, match=sentence):
                memory.empty((200, 100), np.float32)
        assert not driver.held
    with gpu.DeviceMemory(HOPPER) as memory:
        memory.empty((200, 100), np.float32)


def test_what_is_put_is_what_is_got(driver):
    with gpu.DeviceMemory(HOPPER) as memory:
        array = numbers(3, 4).T
        np.testing.assert_array_equal(memory.get(memory.put(array), (4, 3), "f4"), array)
        assert memory.put(np.zeros((0, 3))) == 0
        spread = np.broadcast_to(numbers(3, 1), (2, 3, 4))
        there = to_device(spread, memory)
        assert array_at(there).strides == (0, 4, 0)
        assert there.shape == (2, 3, 4)
        np.testing.assert_array_equal(memory.get(there.address, (3,), "f4"), spread[0, :, 0])
        np.testing.assert_array_equal(to_host(there, memory), spread)


def test_a_failure_of_the_driver_has_its_name(driver):
    driver.cuStreamSynchronize = lambda stream: (gpu.driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    driver.cuStreamSynchronize.__name__ = "cuStreamSynchronize"
    sentence = "cuStreamSynchronize failed on the GPU: CUDA_ERROR_LAUNCH_FAILED, it is Sunday"
    with pytest.raises(gpu.DeviceError, match=sentence):
        gpu.synchronize(0)


SIZES = {"u64": 8, "s64": 8, "b64": 8, "f64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u8": 1,
         "b8": 1, "s8": 1}  # fmt: skip


@pytest.mark.parametrize("rung", MODULES)
def test_parameters_are_packed_as_the_kernel_declares_them(rung, driver, monkeypatch):
    is_16_bits = rung in ("cuda.rung4_tensor_cores", "cuda.rung6_warpgroups")
    dtype = ml_dtypes.bfloat16 if is_16_bits else np.float32
    q, k, v = (numbers(2, h, 9, 16, dtype=dtype) for h in (4, 2, 2))
    problem = Problem.of(q, k, v, softcap=3.0, alibi_slopes=[1, 2, 3, 4])
    with gpu.DeviceMemory(HOPPER, stream=7) as memory:
        if rung in cuda.TAKE_ARRAYS:
            arguments = upload_arrays(problem, lambda x: array_at(to_device(x, memory)))
        else:
            arguments = upload(problem, memory)
        launches = MODULES[rung].launches(problem, arguments, lambda shape: 1 << 40)
        draft, sizes = plans.Draft(HOPPER), {}
        for launch, values in launches:
            names = ", ".join(f"a{number}" for number in range(len(launch.signature)))
            text = compiled(launch._replace(function=eval(f"lambda {names}: None"))).ptx()
            head = text[text.index(".entry") : text.index("{")]
            sizes[launch] = [SIZES[x] for x in re.findall(r"\.param \.(\w+)", head)]
            draft.launch(launch, values)
        monkeypatch.setattr(
            gpu,
            "loaded_kernel",
            lambda launch, _: gpu.LoadedKernel(
                SimpleNamespace(sizes=sizes[launch]), gpu.layout(launch.signature)
            ),
        )
        plans.Plan(draft).run({}, memory)
    for (launch, values), launched in zip(launches, driver.launched, strict=True):
        grid, block, shared, stream, packed = launched
        assert grid == launch.grid
        assert block == (launch.threads, 1, 1)
        assert shared == launch.shared
        assert stream == 7
        flat = flattened(values)
        assert len(flat) == len(sizes[launch])
        formats = "".join(gpu._formats(launch.signature)).replace("4x", "").replace("7x", "")
        assert packed == b"".join(
            struct.pack("<" + code, value) for code, value in zip(formats, flat, strict=True)
        )


def test_kernels_are_loaded_once_and_unloaded_when_nobody_holds_them(driver, monkeypatch):
    loaded = []
    driver.cuModuleLoadData = lambda code: (*driver.ok, loaded.append(code) or code)
    driver.cuModuleGetFunction = lambda module, name: (*driver.ok, SimpleNamespace(sizes=[]))
    driver.cuModuleUnload = lambda module: loaded.remove(module) or driver.ok
    driver.cuCtxSynchronize = lambda: driver.ok
    driver.cuThreadExchangeStreamCaptureMode = lambda mode: (*driver.ok, mode)
    monkeypatch.setattr(gpu, "cubin", lambda launch, cc: ("name", launch.threads))
    monkeypatch.setattr(gpu, "_unused", {})

    def planned(kernel, threads):
        draft = plans.Draft(HOPPER)
        draft.launch(Launch(kernel, (), (1, 1, 1), threads), ())
        return plans.Plan(draft)

    kernels = [lambda: None, lambda: None]
    for threads in (32, 32, 64):
        plan = planned(kernels[0], threads)
    assert loaded == [32, 64]
    del kernels[0]
    gc.collect()
    planned(kernels[0], 96)
    assert loaded == [32, 64, 96]  # the last plan may be run again
    del plan
    gc.collect()
    planned(kernels[0], 128)
    assert loaded == [96, 128]


def test_an_empty_grid_launches_nothing():
    draft = plans.Draft(HOPPER)
    draft.launch(Launch(lambda: None, (), (0, 1, 1), 32), ())
    assert not draft.launches


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ((1 << 31, 1, 1), "2147483648 thread blocks of kernel copies along x, and a GPU"),
        (
            (1, 65536, 1),
            "65536 thread blocks of kernel copies along y, and a GPU starts",
        ),
    ],
)
def test_more_thread_blocks_than_a_gpu_starts_are_refused(grid, reason):
    launch = Launch(copies.kernel("float32", "float32"), (), grid, 32)
    with pytest.raises(ValueError, match=f"the problem takes {reason}"):
        plans.Draft(HOPPER).launch(launch, ())


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_machine_code_is_made_without_a_gpu(cc):
    problem = Problem.of(*(numbers(1, 2, 9, 16),) * 3)
    ((launch, _),) = rung1_rows.launches(problem, None, None)
    name, code = cubin(launch._replace(blocks=8), cc)
    assert code.startswith(b"\x7fELF")
    assert name.encode() in code


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_copies_convert_and_widen(source, target):
    array = np.array([[np.nan, np.inf, -np.inf, 1e300, -1e300, 6e-8, -0.0, 1.00390625, 1 / 3]])
    with np.errstate(over="ignore"):
        array = array.astype(DTYPES[source])[None, None]
        expected = np.zeros((1, 1, 1, 12), DTYPES[target])
        finite = np.isfinite(array.astype(np.float64))
        limit = float(np.finfo(np.float32).max)
        wide = array.astype(np.float64)
        near = np.where(finite, np.clip(wide, -limit, limit), wide)
        expected[..., :9] = near.astype(DTYPES[target]) if target != "float64" else array
    arena = Arena()
    given, to = (to_device(x, arena) for x in (array, np.ones_like(expected)))
    emulate(*copies.copying(given, to), arena)
    got = to_host(to, arena)
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))
