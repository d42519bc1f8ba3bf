"""The CUDA rungs that take addresses, without a GPU: in the emulator, and as ptxas sees them.

A rung is run on problems that leave its tiles partial in every way, in lockstep and in random
orders of warps; see ``tests/emulator`` for what that detects. float32 must be as good as plain
NumPy. What 16 bits may cost is derived: an output is a mean of values with weights that were
rounded once, and is rounded once itself; scores, and with them the log-sum-exp, are as exact as in
float32.
"""

import math
import re
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
from emulator import Arena, compiled, forward
from gpu_problems import upload
from problems import (
    assert_close_to_exact,
    bounded,
    by_distance,
    in_part,
    near,
    of_parity,
    plain,
    run,
)

from minimha.equations.functions import Corner, Placed
from minimha.equations.problem import Problem

RUNGS = {  # name: dtypes, the first one for all tests; the most queries that it is tried with
    "cuda.rung3_register_tiles": (("float32",), 131),
    "cuda.rung4_tensor_cores": (("float16", "bfloat16"), 131),
    "cuda.rung5_decode": (("float16", "float32", "bfloat16"), 5),
    "cuda.rung6_warpgroups": (("bfloat16", "float16"), 200),
}
IN_ORDERS = (None, 0)
inf = np.inf


@pytest.fixture(params=RUNGS)
def rung(request):
    if not find_spec("numba_cuda"):
        pytest.skip("numba-cuda, which compiles the kernels, is not installed")
    if not find_spec(f"minimha.kernels.{request.param}"):
        pytest.skip(f"there is no rung {request.param}")
    return import_module(f"minimha.kernels.{request.param}")


def named(rung):
    return rung.__name__.removeprefix("minimha.kernels.")


def about(rung):
    return RUNGS[named(rung)]


def as_dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(pytest.importorskip("ml_dtypes", reason="no bfloat16 here").bfloat16)


def given(rung, dtype=None, B=2, H=4, Hkv=2, Lq=131, Lk=150, D=50, Dv=33, spread=1.0, seed=0):
    """q, k, v for the rung; ``Lq`` is at most what it is made for."""
    dtypes, most = about(rung)
    rng = np.random.default_rng(seed)
    shapes = ((B, H, min(Lq, most), D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    dtype = as_dtype(dtype or dtypes[0])
    return [rng.normal(size=shape, scale=spread).astype(dtype) for shape in shapes]


def check(rung, arrays, options, order=None):
    """Solve the problem and compare O and L with what is exact; return them."""
    q, k, v = arrays
    O, L = forward(rung, Problem.of(q, k, v, **options), order)
    assert O.dtype == q.dtype
    assert L.dtype == np.float32
    if q.dtype == np.float32:
        assert_close_to_exact(q, k, v, options, O, L)
        return O, L
    wide = [x.astype(np.float64) for x in arrays]
    exact, exact_L = run("dense", *wide, **options)
    _, _, size = plain(*(x.astype(np.float32) for x in arrays), **options)
    hidden = np.isneginf(exact_L)
    np.testing.assert_array_equal(np.isneginf(L), hidden)
    np.testing.assert_array_equal(O.astype(np.float32)[hidden], 0)
    size = abs(exact_L[~hidden]).max(initial=size)
    rounding = 2 * float(np.finfo(np.float32).eps) * (2 + size)
    assert abs(L[~hidden] - exact_L[~hidden]).max(initial=0) <= rounding
    half_step = 2.0**-11 if q.dtype == np.float16 else 2.0**-8
    largest = abs(wide[2]).max(initial=0)
    assert abs(O.astype(np.float64) - exact).max(initial=0) <= largest * (2 * half_step + rounding)
    return O, L


def options(Lq, Lk=150, B=2, H=4):
    """Each option alone, in sizes that leave some tiles partial and some full; and all together."""
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(1, H, Lq, Lk)).astype(np.float32)
    slopes = np.array([0.5, 0.25, 0.1, 0])
    mask = rng.random((B, 1, Lq, Lk)) < 0.7
    return {
        "nothing": {},
        "causal": {"is_causal": True, "q_offset": Lk - Lq},
        "causal, per batch entry": {"is_causal": True, "q_offset": np.array([-3, 70])},
        "window": {"window_size": (30, 5), "q_offset": np.array([0, 50])},
        "window to the left": {"window_size": (17, None), "q_offset": 60},
        "window to the right": {"window_size": (None, 20), "q_offset": 2},
        "window beyond": {"window_size": (3, 3), "q_offset": np.array([1000, -1000])},
        "lengths": {"kv_lengths": np.array([Lk, 97])},
        "lengths, causal": {"kv_lengths": np.array([0, 97]), "is_causal": True, "q_offset": 10},
        "sinks": {"sinks": np.array([0, 3, -inf, 9.0]), "is_causal": True, "q_offset": -1},
        "scale negative": {"scale": -0.7},
        "scale 0": {"scale": 0.0},
        "mask": {"attn_mask": mask},
        "mask of nothing": {"attn_mask": np.zeros((Lq, Lk), bool)},
        "mask per key": {"attn_mask": rng.random((B, 1, 1, Lk)) < 0.5},
        "mask per query": {"attn_mask": rng.random((1, H, Lq, 1)) < 0.5},
        "mask in Fortran's order": {"attn_mask": np.asfortranarray(mask[0, 0])},
        "bias": {"attn_bias": bias},
        "bias of -inf": {"attn_bias": np.where(rng.random((B, H, Lq, Lk)) < 0.3, -inf, bias)},
        "bias per key": {"attn_bias": bias[:, :1, :1]},
        "alibi": {"alibi_slopes": slopes, "q_offset": np.array([0, 70])},
        "softcap": {"softcap": 1.5},
        "everything": {
            "is_causal": True, "q_offset": np.array([20, 60]), "window_size": (90, None),
            "kv_lengths": np.array([140, 64]), "attn_mask": mask, "attn_bias": 2 * bias,
            "alibi_slopes": slopes, "softcap": 3.0, "sinks": np.array([0, 3, -inf, 9.0]),
            "scale": 0.3,
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", options(1))
def test_every_option_on_ragged_sizes(rung, name):
    arrays = given(rung)
    check(rung, arrays, options(arrays[0].shape[2])[name])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["nothing", "causal, per batch entry", "lengths", "everything"])
def test_the_order_of_warps_does_not_matter(rung, name, seed):
    arrays = given(rung)
    check(rung, arrays, options(arrays[0].shape[2])[name], order=seed)


@pytest.mark.parametrize("name", ["nothing", "everything"])
def test_other_dtypes(rung, name):
    for dtype in about(rung)[0][1:]:
        arrays = given(rung, dtype)
        check(rung, arrays, options(arrays[0].shape[2])[name])


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (130, 100), (17, 256)])
def test_narrow_and_wide_heads(rung, D, Dv):
    arrays = given(rung, Lq=40, Lk=70, D=D, Dv=Dv, B=1, H=2, Hkv=1)
    causal = {"is_causal": True, "q_offset": 70 - arrays[0].shape[2]}
    for order in IN_ORDERS:
        check(rung, arrays, causal, order)


@pytest.mark.parametrize("spread", [1e-3, 30.0])
def test_small_and_large_values(rung, spread):
    check(rung, given(rung, Lq=40, spread=spread), {})


@pytest.mark.parametrize("Lk", [0, 1, 15, 16, 17, 63, 64, 65, 128, 257])
def test_any_number_of_keys(rung, Lk):
    arrays = given(rung, Lq=9, Lk=Lk, B=1)
    for order in IN_ORDERS:
        check(rung, arrays, {}, order)


@pytest.mark.parametrize("Lq", [0, 1, 2, 15, 16, 17, 63, 64, 65, 129])
def test_any_number_of_queries(rung, Lq):
    arrays = given(rung, Lq=Lq, Lk=40, B=1)
    check(rung, arrays, {"is_causal": True, "q_offset": 0})


@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_heads_in_groups(rung, H, Hkv):
    check(rung, given(rung, H=H, Hkv=Hkv, Lq=20, Lk=30), {})


def test_no_batch_at_all(rung):
    O, L = forward(rung, Problem.of(*given(rung, B=0)))
    assert (O.size, L.size) == (0, 0)


@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
@pytest.mark.parametrize("hides", ["causal", "mask", "bias", "lengths"])
def test_whatever_hides_a_key_hides_its_nan_too(rung, hides, poison):
    q, k, v = given(rung, Lq=40, Lk=90, B=1)
    Lq = q.shape[2]
    seen = np.tri(Lq, 90, 40, dtype=bool)
    how = {
        "causal": {"is_causal": True, "q_offset": 40},
        "mask": {"attn_mask": seen},
        "bias": {"attn_bias": np.where(seen, 0.0, -inf)},
        "lengths": {"kv_lengths": np.array([41])},
    }[hides]
    clean, clean_L = forward(rung, Problem.of(q, k, v, **how))
    k, v = k.copy(), v.copy()
    k[:, 0, 41:], v[:, 1, 41:] = poison, poison
    for order in IN_ORDERS:
        O, L = forward(rung, Problem.of(q, k, v, **how), order)
        rows = slice(None) if hides == "lengths" else slice(1)  # which see no key from 41 on
        np.testing.assert_array_equal(O[:, :, rows], clean[:, :, rows])
        np.testing.assert_array_equal(L[:, :, rows], clean_L[:, :, rows])


def test_a_nonfinite_value_reaches_its_own_column_of_those_that_see_it(rung):
    q, k, v = given(rung, Lq=40, Lk=90, B=1, H=2, Hkv=1)
    v[0, 0, 41, 2], v[0, 0, 42, 5], v[0, 0, 43, 7] = np.nan, inf, -inf
    v[0, 0, 3, 1] = np.nan  # seen by all, in a tile that all see
    Lq = q.shape[2]
    O, _ = forward(rung, Problem.of(q, k, v, is_causal=True, q_offset=40))
    for column, first, kind in ((2, 1, np.isnan), (5, 2, np.isposinf), (7, 3, np.isneginf)):
        got = O[..., column].astype(np.float32)
        np.testing.assert_array_equal(kind(got), np.broadcast_to(np.arange(Lq) >= first, got.shape))
    assert np.isnan(O[..., 1].astype(np.float32)).all()
    rest = np.delete(O.astype(np.float32), [1, 2, 5, 7], axis=-1)
    assert np.isfinite(rest).all()


def test_the_farthest_offsets_and_windows_are_no_limit(rung):
    arrays = given(rung, Lq=20, Lk=70, B=1)
    unmasked, _ = forward(rung, Problem.of(*arrays))
    far = 2**31 - 1
    for same in (
        {"is_causal": True, "q_offset": far},
        {"window_size": (0, None), "q_offset": -far},
        {"window_size": (2**40, 2**40), "q_offset": 5},
    ):
        O, _ = forward(rung, Problem.of(*arrays, **same))
        np.testing.assert_array_equal(O, unmasked)
    O, L = forward(rung, Problem.of(*arrays, is_causal=True, q_offset=-far))
    assert (O.astype(np.float32) == 0).all()
    assert np.isneginf(L).all()


def test_the_longest_windows_end_where_they_end(rung):
    arrays = given(rung, Lq=20, Lk=70, B=1)
    far = 2**31 - 1
    check(rung, arrays, {"window_size": (far - 30, None), "q_offset": far})  # from key i + 30 on
    check(rung, arrays, {"window_size": (None, far + 10), "q_offset": -far})  # up to key i + 10
    check(rung, arrays, {"window_size": (2**30 + 9, 2**30 - 40), "q_offset": 2**30})


def test_it_says_what_it_does_not_support(rung):
    known = about(rung)[0]
    for dtype in ("float64", "float32", "float16"):
        q, k, v = (x.astype(dtype) for x in given(rung, Lq=2, Lk=3))
        assert (rung.unsupported(Problem.of(q, k, v)) is None) == (dtype in known)
    for D, is_supported in ((256, True), (257, False)):
        reason = rung.unsupported(Problem.of(*given(rung, Lq=2, Lk=3, D=D)))
        assert (reason is None) == is_supported
        assert reason is None or "256" in reason


# ---- a caller's functions, which rung 3 is compiled with

QUERIES, KEYS = (np.random.default_rng(2).normal(size=n) for n in (43, 70))


def from_tables(s, b, h, i, j):
    return s + QUERIES[i] * KEYS[j]  # as long as there are positions: reading beyond is noticed


def hiding(s, b, h, i, j):
    return max(s, -1.0) if j < 40 else -inf


def not_30(b, h, i, j):
    return j != 30


def long(s, b, h, i, j):
    """A function that no compiler would write down for each of 64 scores."""
    t = 0.0
    for n in range(i - j, i + 20):
        t += math.exp(-t) * math.log(1.0 + n * n) + math.tanh(s)
    for c in range(30):
        s = s * t + c * math.sqrt(abs(t))
    return s if t < 100 else math.erf(s) + math.atan2(t, s)


def with_functions():
    """What functions are combined with, in sizes that leave some tiles partial and some full."""
    return {
        "by distance": {"score_mod": by_distance, "q_offset": [3, -20]},
        "tables": {"score_mod": from_tables, "mask_mod": of_parity, "q_offset": 3},
        "everything": options(40, 70)["everything"]
        | {"score_mod": bounded, "mask_mod": near, "kv_lengths": np.array([70, 33])},
    }


@pytest.fixture
def rung3():
    pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is missing")
    return import_module("minimha.kernels.cuda.rung3_register_tiles")


@pytest.mark.parametrize("name", with_functions())
def test_functions_on_ragged_sizes(rung3, name):
    arrays = given(rung3, Lq=40, Lk=70, D=16, Dv=9)
    for order in IN_ORDERS:
        check(rung3, arrays, with_functions()[name], order)


def test_functions_of_a_part_count_from_the_beginning_of_the_whole(rung3):
    corner, arrays = Corner(1, 3, 30), given(rung3, Lq=40, Lk=40, D=16, Dv=9)
    options = {"score_mod": from_tables, "mask_mod": of_parity}
    of_part = {name: Placed(function, corner) for name, function in options.items()}
    O, L = forward(rung3, Problem.of(*arrays, **of_part, q_offset=-27))
    expected = {name: in_part(function, corner) for name, function in options.items()}
    assert_close_to_exact(*arrays, expected | {"q_offset": -27}, O, L)


@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
def test_what_a_function_hides_may_be_anything(rung3, poison):
    q, k, v = given(rung3, Lq=40, Lk=70, D=16, Dv=9)
    q, k[:, :, 20] = abs(q), -inf  # a score of -inf is a score, until a function returns it
    functions = {"score_mod": hiding, "mask_mod": not_30, "q_offset": 0}
    clean, clean_L = check(rung3, (q, k, v), functions)
    k[:, :, 40:], v[:, :, 40:], k[:, :, 30], v[:, :, 30] = (poison,) * 4
    O, L = forward(rung3, Problem.of(q, k, v, **functions))
    np.testing.assert_array_equal(O, clean)
    np.testing.assert_array_equal(L, clean_L)


# ---- as ptxas sees them

EXPECTED = {  # instructions that must be in a kernel of the rung, by dtype: at least this many
    "cuda.rung3_register_tiles": {"fma.rn.f32": 512, "ld.shared.v4.f32": 16},
    "cuda.rung4_tensor_cores": {"mma.sync": 64, "ldmatrix": 8, "cp.async.cg": 4},
    "cuda.rung6_warpgroups": {"wgmma.mma_async": 12, "fence.proxy.async": 3, "cp.async.cg": 4},
}
COMPILED = [  # head width, options, architectures; for sm_90 most have been compiled above
    (64, "nothing", ("sm_80", "sm_90")),
    (64, "everything", ("sm_90",)),
    (128, "nothing", ("sm_90",)),
    (128, "everything", ("sm_80",)),
    (256, "nothing", ("sm_90",)),
]


def assert_in_registers(launch, kernel):
    text = kernel.ptx()
    assert not re.search(r"\.local\b", text)
    report = import_module("minimha.kernels.cuda.ptxas").statistics(kernel.machine_code())
    # Rung 4 has 192 registers of O_i and S_ij: what only partial tiles need may be spilled.
    assert report["stack"] <= (16 if "ldmatrix" in text else 0)
    assert report["tile_local"] in (0, None)
    assert report["warnings"] == 0
    assert report["registers"] * launch.threads <= 65536


@pytest.mark.parametrize(("D", "name", "archs"), COMPILED)
def test_everything_stays_in_registers(rung, D, name, archs):
    assembled = import_module("minimha.kernels.cuda.ptxas")
    most = about(rung)[1]
    q, k, v = given(rung, Lq=most, D=D, Dv=D)
    problem = Problem.of(q, k, v, **options(most)[name])
    memory = Arena()
    launches = rung.launches(problem, upload(problem, memory), memory.scratch)
    for launch, _ in launches:
        assert launch.shared <= 227 * 1024
        known = assembled.archs_of(launch)
        for arch in known if launch.is_arch_specific else archs:
            kernel = compiled(launch, known[arch])
            for instruction, least in EXPECTED.get(named(rung), {}).items():
                assert kernel.ptx().count(instruction) >= least, instruction
            assert_in_registers(launch, kernel)


@pytest.mark.parametrize(
    ("D", "functions", "arch"),
    [
        (64, {"score_mod": long}, "sm_80"),
        (128, {"score_mod": bounded, "mask_mod": near}, "sm_90"),
        (256, {"score_mod": long}, "sm_90"),
    ],
)
def test_functions_leave_everything_in_registers(rung3, D, functions, arch):
    assembled = import_module("minimha.kernels.cuda.ptxas")
    problem = Problem.of(*given(rung3, D=D, Dv=D), **functions, q_offset=0)
    (launch,) = assembled.launches_of("cuda.rung3_register_tiles", problem)
    assert_in_registers(launch, compiled(launch, assembled.ARCHS[arch]))


WIDTHS = [(n, n) for n in (16, 32, 40, 64, 80, 96, 128, 160, 192, 256)] + [(24, 200), (200, 24)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["cuda.rung1_rows", "cuda.rung2_tiles"])
def test_rungs_that_take_arrays_stay_in_registers_too(name, dtype):
    pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is missing")
    assembled = import_module("minimha.kernels.cuda.ptxas")
    module = import_module(f"minimha.kernels.{name}")
    launches = {}  # several widths have one kernel
    for D, Dv in WIDTHS:
        problem = Problem.of(*(np.zeros((9, n), dtype) for n in (D, D, Dv)))
        ((launch, _),) = module.launches(problem, None, None)
        launches[launch.function] = launch
    for launch in launches.values():
        for cc in assembled.ARCHS.values():
            assert_in_registers(launch, compiled(launch, cc))
