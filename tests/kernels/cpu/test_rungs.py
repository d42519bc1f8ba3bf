"""Tests of the compiled rungs alone: sizes beyond one tile, storage, memory.

That each rung computes attention, with every option, is tested in ``tests/test_backends.py``.
"""

import ctypes
import mmap
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from problems import assert_close_to_exact, by_distance, earlier, hiding, run

from minimha import attention
from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cpu import backend as cpu
from minimha.kernels.cpu import rung4_parallel, rung5_decode, rung6_matrix_unit
from minimha.kernels.cpu.kernel import Plan
from minimha.kernels.cpu.simd import halves
from minimha.kernels.ladder import LADDER

inf = np.inf
LARGE = [name for name in LADDER if name not in ("cpu.rung1_rows", "cpu.rung2_tiles")]


def ragged(Lq=131, Lk=203, H=4, Hkv=2, D=20, Dv=13, B=2, dtype=np.float32, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    return [rng.normal(size=shape, scale=spread).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("stored", [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("Lq", [1, 3, 131])
@pytest.mark.parametrize("name", ["cpu.rung4_parallel", "cpu.rung5_decode"])
def test_8_bit_keys_and_values_of_any_strides_and_scales(name, Lq, stored):
    q, k, v = ragged(Lq=Lq)
    k, v = (np.asfortranarray((40 * x).astype(stored)).transpose(0, 1, 2, 3) for x in (k, v))
    k = np.repeat(k, 2, axis=2)[:, :, ::2]  # rows apart
    rng = np.random.default_rng(3)
    factors = rng.uniform(0.01, 0.03, (2, 2, 406))
    picks = rng.integers(-1, 203, (2, 2, Lq, 40))
    for scales in (
        (0.02, 0.01),
        (factors[0, :, 0], 0.02),
        (factors[:, :, ::2], factors[:, :, 203:]),
    ):
        given = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        for options in (
            {},
            {"kv_lengths": np.array([203, 97]), "window_size": (90, 9), "q_offset": 70},
            {"key_indices": picks},
        ):
            O, L = run(name, q, k, v, **given, **options)
            exact_O, exact_L = run("dense", q.astype(np.float64), k, v, **given, **options)
            np.testing.assert_allclose(L, exact_L, rtol=0, atol=2e-5)
            np.testing.assert_allclose(O, exact_O, rtol=0, atol=2e-5)


@pytest.mark.parametrize("stored", [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("H", "Lq", "Lk"), [(2, 1, 1), (6, 1, 257), (8, 3, 1030), (16, 1, 800)])
def test_8_bit_keys_of_16_bit_queries_lose_no_more_than_rounding_may(H, Lq, Lk, dtype, stored):
    q, k, v = ragged(H=H, Lq=Lq, Lk=Lk, D=128, Dv=64)
    q, k, v = q.astype(dtype), *((40 * x).astype(stored) for x in (k, v))
    rng = np.random.default_rng(3)
    given = {"k_scale": rng.uniform(0.01, 0.03, k.shape[:3]), "v_scale": 0.02}
    eps = float(ml_dtypes.finfo(dtype).eps)
    for options in (
        {},
        {"is_causal": True, "q_offset": Lk - Lq, "kv_lengths": np.array([Lk, Lk // 2])},
        {"key_indices": rng.integers(-1, Lk, (2, 2, Lq, 40))},
    ):
        O, L = run("cpu.rung5_decode", q, k, v, **given, **options)
        exact_O, exact_L = run("dense", q.astype(np.float64), k, v, **given, **options)
        np.testing.assert_allclose(L, exact_L, rtol=0, atol=1e-4)
        largest = np.abs(exact_O).max()
        np.testing.assert_allclose(O.astype(np.float64), exact_O, rtol=0, atol=eps * largest)


@pytest.mark.parametrize("stored", [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize("infinity", [np.inf, -np.inf, np.nan])
def test_an_infinite_query_picks_8_bit_keys_as_in_exact_attention(infinity, stored):
    q, k, v = ragged(Lq=1, Lk=9, D=64, Dv=64)
    q, k, v = q.astype(ml_dtypes.bfloat16), *((4 * x).astype(stored) for x in (k, v))
    q[:, :, :, 5] = infinity
    for kinds in ([1], [-1], [1, 2, -3], [0, 1]):
        k[..., 5] = np.resize(np.array(kinds).astype(stored), 9)
        O, L = run("cpu.rung5_decode", q, k, v, k_scale=0.02, v_scale=0.02)
        exact_O, exact_L = run("dense", q.astype(np.float64), k, v, k_scale=0.02, v_scale=0.02)
        np.testing.assert_array_equal(L, exact_L)
        np.testing.assert_allclose(O.astype(np.float64), exact_O, rtol=0, atol=1e-3)


def test_a_plan_for_8_bits_reads_the_scales_of_each_call():
    q, k, v = ragged(Lq=1, D=64, Dv=64)
    k, v = ((40 * x).astype(np.int8) for x in (k, v))
    for scale in (
        0.02,
        0.01,
        np.full(k.shape[:3], 0.03, np.float32),
        np.float32(0.04) * np.ones(k.shape[:3], np.float32),
    ):
        given = {"k_scale": scale, "v_scale": scale}
        O = attention(q, k, v, **given, backend="cpu")
        exact = attention(q.astype(np.float64), k, v, **given, backend="dense")
        np.testing.assert_allclose(O, exact, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="v_scale has the number 0"):
        attention(q, k, v, k_scale=0.02, v_scale=0.0, backend="cpu")


def test_a_nan_in_8_bits_reaches_the_queries_that_see_it():
    stored = ml_dtypes.float8_e4m3fn
    q, k, v = ragged(Lq=2)
    k, v = (40 * k).astype(stored), (40 * v).astype(stored)
    v[0, 1, 150, 5] = np.nan
    given = {"k_scale": 0.02, "v_scale": 0.02, "is_causal": True}
    for last in (149, 150):
        output, _ = run("cpu.rung5_decode", q, k, v, **given, q_offset=last - 1)
        expected, _ = run("dense", q, k, v, **given, q_offset=last - 1)
        np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
        assert np.isnan(output).any() == (last == 150)


def same_document(b, h, i, j):
    return i // 37 == j // 37


def options(B=2, H=4, Lq=131, Lk=203):
    """Each option, in sizes that make some tiles full, some partial and some skipped."""
    rng = np.random.default_rng(1)
    block = np.repeat(np.repeat(rng.random((5, 5)) < 0.5, 64, 0), 64, 1)[:Lq, :Lk]
    bias = rng.normal(size=(1, H, Lq, Lk))
    return {
        "nothing": {},
        "causal": {"is_causal": True, "q_offset": Lk - Lq},
        "causal, per batch entry": {"is_causal": True, "q_offset": np.array([-40, 7])},
        "window": {"window_size": (30, 5), "q_offset": np.array([0, 50])},
        "window to the left": {"window_size": (17, None), "q_offset": 60},
        "mask": {"attn_mask": rng.random((B, 1, Lq, Lk)) < 0.7},
        "mask of blocks": {"attn_mask": block},
        "mask per key": {"attn_mask": rng.random((B, 1, 1, Lk)) < 0.5},
        "mask per query": {"attn_mask": rng.random((1, H, Lq, 1)) < 0.5},
        "mask in Fortran order": {"attn_mask": np.asfortranarray(rng.random((Lq, Lk)) < 0.5)},
        "bias": {"attn_bias": bias},
        "bias of -inf": {"attn_bias": np.where(rng.random((B, H, Lq, Lk)) < 0.3, -inf, bias)},
        "lengths": {"kv_lengths": np.array([Lk, 97])},
        "lengths, causal": {"kv_lengths": np.array([0, 97]), "is_causal": True, "q_offset": 0},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0]), "q_offset": np.array([0, 70])},
        "softcap": {"softcap": 1.5},
        "softcap, bias, mask": {
            "softcap": 0.7, "attn_bias": 3 * bias, "attn_mask": rng.random((Lq, Lk)) < 0.5,
        },
        "sinks": {"sinks": np.array([0, 3, -inf, 9.0]), "is_causal": True, "q_offset": 0},
        "functions": {"score_mod": hiding, "mask_mod": earlier, "q_offset": np.array([-40, 60])},
        "function of documents": {
            "mask_mod": same_document, "score_mod": by_distance, "q_offset": 30,
        },
        "scale negative": {"scale": -0.7},
        "scale 0": {"scale": 0.0},
    }  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("given", options().values(), ids=options())
def test_every_option_on_ragged_sizes(given, dtype, name):
    q, k, v = ragged(dtype=dtype)
    assert_close_to_exact(q, k, v, given, *run(name, q, k, v, **given))


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_small_and_large_values(spread, name):
    q, k, v = ragged(Lq=70, Lk=150, D=32, Dv=32, spread=spread)
    assert_close_to_exact(q, k, v, {}, *run(name, q, k, v))


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("D", [1, 2, 15, 16, 17, 64, 80, 256])
@pytest.mark.parametrize("Dv", [1, 64, 100])
def test_any_head_width(D, Dv, name):
    q, k, v = ragged(Lq=13, Lk=50, D=D, Dv=Dv, B=1)
    assert_close_to_exact(q, k, v, {}, *run(name, q, k, v))


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("Lq", [1, 2, 15, 16, 17, 47, 48, 49, 96, 97, 145, 197, 400])
def test_any_number_of_queries(Lq, name):
    q, k, v = ragged(Lq=Lq, Lk=100, B=1)
    given = {"is_causal": True, "q_offset": 100 - Lq}
    assert_close_to_exact(q, k, v, given, *run(name, q, k, v, **given))


@pytest.mark.parametrize("Lk", [1, 31, 32, 33, 767, 768, 769, 2000])
def test_any_number_of_keys_when_few_queries_decode(Lk):
    q, k, v = ragged(Lq=2, Lk=Lk)
    given = {"kv_lengths": np.array([Lk, (Lk + 1) // 2])}
    assert_close_to_exact(q, k, v, given, *run("cpu.rung5_decode", q, k, v, **given))


def test_neither_panels_nor_blocks_nor_splits_matter():
    q, k, v = ragged()
    problem = Problem.of(q, k, v, is_causal=True, q_offset=30)
    expected = dense.forward(problem)
    for panels, B_c in [(1, 8), (2, 96), (3, 7), (9, 300)]:
        for got, wanted in zip(
            rung4_parallel.forward(problem, panels=panels, B_c=B_c), expected, strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    for splits in (1, 2, 7, 500):
        for got, wanted in zip(
            rung5_decode.forward(problem, splits=splits, B_c=96), expected, strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_read_as_the_numbers_they_are(dtype, name):
    q, k, v = (x.astype(dtype) for x in ragged())
    k[0, 0, :4, 0] = [6e-8, -6e-8, 0.0, -0.0]  # float16's smallest, below its normal numbers
    wide = run(name, *(x.astype(np.float32) for x in (q, k, v)))
    output, lse = run(name, q, k, v)
    assert output.dtype == dtype
    assert lse.dtype == np.float32
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    # Rung 6 multiplies weights of 16 binary digits.
    atol = 2.0**-16 * abs(v.astype("f4")).max() if name == "cpu.rung6_matrix_unit" else 1e-6
    np.testing.assert_allclose(output.astype(np.float32), wide[0], rtol=half_step, atol=atol)
    np.testing.assert_allclose(lse, wide[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "widened"),
    [(np.float16, halves.of_float16), (ml_dtypes.bfloat16, halves.of_bfloat16)],
)
def test_all_16_bit_numbers(dtype, widened):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = numbers[np.isfinite(numbers.astype(np.float32))]
    np.testing.assert_array_equal([widened(x) for x in finite.view("u2")], finite.astype("f4"))
    for x in (np.inf, -np.inf, np.nan):
        bits = np.array(x, dtype).view(np.uint16)[()]
        np.testing.assert_equal(float(widened(bits)), x)


def rounding_corners(dtype):
    """What 16 bits can say, what is half-way between two of these, neighbours, and any bits."""
    each = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    finite = np.sort(each[np.isfinite(each)])[::7]
    half_way = (finite + finite.astype(dtype).view("u2").__add__(1).view(dtype).astype("f8")) / 2
    exact = np.concatenate([finite, half_way, [65520, 65536, 3.3961775e38, 3.4028235e38, np.inf]])
    exact = exact.astype(np.float32)
    anything = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    around = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    return np.concatenate([exact, *around, -exact, anything])


@pytest.mark.parametrize(
    ("dtype", "narrowed"),
    [(np.float16, halves.to_float16), (ml_dtypes.bfloat16, halves.to_bfloat16)],
)
def test_results_of_16_bits_are_rounded_as_ieee_754_says(dtype, narrowed):
    with np.errstate(all="ignore"):
        numbers = rounding_corners(dtype)
        expected = numbers.astype(dtype)
    result = np.array([narrowed(word) for word in numbers.view("u4")], np.uint16).view(dtype)
    is_nan = np.isnan(numbers)
    assert is_nan.any()
    assert np.isnan(result[is_nan]).all()
    np.testing.assert_array_equal(result[~is_nan].view("u2"), expected[~is_nan].view("u2"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("Lq", [1, 3, 61])
def test_wide_values_of_16_bits_are_stored_piece_by_piece(dtype, Lq):
    q, k, v = (
        np.random.default_rng(0).standard_normal((1, 2, n, d)).astype(dtype)
        for n, d in ((Lq, 8), (70, 8), (70, 700))
    )
    expected = attention(*(x.astype("f4") for x in (q, k, v)), backend="dense")
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    for B_c in (32, 160):
        problem = Problem.of(q, k, v)
        for rung in (rung4_parallel, rung5_decode, rung6_matrix_unit):
            O, _ = rung.forward(problem, B_c=B_c)
            assert O.dtype == dtype
            np.testing.assert_allclose(O.astype("f4"), expected, rtol=half_step, atol=2**-14)


@pytest.mark.parametrize("name", LADDER)
def test_inputs_are_read_in_place_and_never_written(name):
    q, k, v = ragged()
    expected = run(name, q, k, v)
    packed = np.zeros((2, 203, 3, 2, 40), np.float32)  # as a fused projection returns them
    packed[:, :, 1, :, :20], packed[:, :, 2, :, 3:16] = k.swapaxes(1, 2), v.swapaxes(1, 2)
    strided = packed[:, :, 1, :, :20].swapaxes(1, 2), packed[:, :, 2, :, 3:16].swapaxes(1, 2)
    backwards = q[:, :, ::-1].copy()[:, :, ::-1]
    columns = [np.asfortranarray(x) for x in (q, k, v)]
    for arrays in ((backwards, *strided), columns):
        before = [x.copy() for x in arrays]
        for x in arrays:
            x.flags.writeable = False
        for got, wanted in zip(run(name, *arrays), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        for x, same in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(x, same)


def test_one_set_of_keys_may_stand_for_all():
    q, k, v = ragged()
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    for got, wanted in zip(run("cpu.rung4_parallel", q, k, v), run("dense", q, k, v), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_unaligned_arrays_are_copied(monkeypatch):
    read, compute = [], Plan.run
    monkeypatch.setattr(Plan, "run", lambda plan, *x: read.extend(x[:3]) or compute(plan, *x))
    q, k, v = ragged(Lq=12)
    bytes_ = np.zeros(q.nbytes + 1, np.uint8)
    unaligned = bytes_[1:].view(np.float32).reshape(q.shape)
    unaligned[:] = q
    for got, wanted in zip(
        run("cpu.backend", unaligned, k, v), run("cpu.backend", q, k, v), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    assert len(read) == 6
    assert all(x.flags.aligned for x in read)


def test_few_queries_decode_and_many_do_not(monkeypatch):
    taken = []
    for rung in (rung4_parallel, rung5_decode):
        monkeypatch.setattr(rung, "plan", lambda problem, rung=rung: taken.append(rung.__name__))
    for Lq in (1, 8, 9):
        cpu.plan(Problem.of(*ragged(Lq=Lq)))
    assert [name.split(".")[-1] for name in taken] == ["rung5_decode"] * 2 + ["rung4_parallel"]


def up_to_the_edge(array):
    """A copy whose last byte is the last of a page, followed by a page that must not be read."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    beyond = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + size
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(beyond, mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(pages, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


def read_up_to_the_edge():
    for Lq, Lk, D in [(1, 7, 17), (3, 333, 64), (17, 31, 5), (200, 100, 80), (49, 97, 16)]:
        arrays = [up_to_the_edge(x) for x in ragged(Lq=Lq, Lk=Lk, D=D, Dv=D)]
        scores = (2, 4, Lq, Lk)
        rng = np.random.default_rng(0)
        attention(*arrays, attn_mask=up_to_the_edge(rng.random(scores) < 0.7), backend="cpu")
        bias = up_to_the_edge(rng.standard_normal(scores, np.float32))
        attention(*arrays, attn_bias=bias, backend="cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called as on Linux")
def test_nothing_beyond_the_arrays_is_read():
    """Reading there ends the process, hence a child process."""
    child = multiprocessing.get_context("spawn").Process(target=read_up_to_the_edge)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("Lq", [2, 131])
def test_several_threads_may_call_at_once(Lq):
    problems = [ragged(Lq=Lq, seed=seed) for seed in range(8)]
    expected = [attention(*problem, backend="cpu") for problem in problems]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda p: attention(*p, backend="cpu"), problems * 5))
    for i, got in enumerate(results):
        np.testing.assert_array_equal(got, expected[i % 8])


def test_too_little_memory_raises_with_the_shape():
    q = np.broadcast_to(np.float32(1), (1, 1, 2**45, 8))
    k = np.ones((1, 1, 4, 8), np.float32)
    with pytest.raises(MemoryError, match=r"Unable to allocate .* shape \(1, 1, 35184372088832, 8"):
        attention(q, k, k, backend="cpu")


def test_memory_does_not_grow_with_the_keys():
    code = (
        "import resource, numpy as np, minimha\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "x = np.ones((1, 1, 16384, 8), np.float32)\n"
        "small = minimha.attention(x[:, :, :64], x[:, :, :64], x[:, :, :64], backend='cpu')\n"
        "before = peak()\n"
        "minimha.attention(x, x, x, backend='cpu')\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 1024  # KiB; the scores alone would be 1 GiB
