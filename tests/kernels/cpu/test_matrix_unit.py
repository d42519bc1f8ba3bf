"""Rung 6 and its primitives, where the CPU has a matrix unit: products and parts of numbers."""

import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numba
import numpy as np
import pytest
from kernels.cpu.test_rungs import options, ragged
from problems import run

from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cpu import backend, rung4_parallel, rung6_matrix_unit
from minimha.kernels.cpu.simd import matrix_unit
from minimha.kernels.cpu.simd.matrix_unit import TILE, configure_tiles, matrix_product
from minimha.kernels.cpu.simd.parts import WIDTH, pack_rows, split_rows

needs_matrix_unit = pytest.mark.skipif(
    not matrix_unit.is_usable(),
    reason="this CPU has no matrix unit, or this process may not use it",
)
DTYPES = [ml_dtypes.bfloat16, np.float16]
RNG = np.random.default_rng(0)
inf = np.inf


def wide(*arrays):
    with np.errstate(invalid="ignore"):
        return [x.astype(np.float64) for x in arrays]


def floats(parts_):
    """The numbers whose bfloat16 parts have these bits, added up."""
    with np.errstate(invalid="ignore"):
        return sum(x.view(ml_dtypes.bfloat16).astype(np.float64) for x in parts_)


@needs_matrix_unit
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 32), (32, 48, 64), (40, 32, 160)])
def test_a_matrix_product(rows, columns, depth, parts, adds):
    a_parts, b_parts = parts
    more = -(-rows // TILE) * TILE

    @numba.njit
    def product(A, B, C, adds):
        configure_tiles()
        matrix_product(
            A, 2, depth + 6, more * (depth + 6), a_parts, B, 3, 2 * columns, columns, b_parts,
            C, 5, columns + 1, rows, columns, depth, adds,
        )  # fmt: skip
        matrix_unit.release_tiles()

    A = RNG.normal(size=(a_parts, more, depth + 6)).astype(ml_dtypes.bfloat16)
    B = RNG.normal(size=(b_parts, depth, columns)).astype(ml_dtypes.bfloat16)
    C = RNG.normal(size=(more, columns + 1)).astype(np.float32)
    pairs = B.reshape(b_parts, depth // 2, 2, columns).transpose(1, 0, 3, 2)
    packed = np.zeros((depth // 2, 2, columns, 2), ml_dtypes.bfloat16)
    packed[:, :b_parts] = pairs
    line_A = np.concatenate([np.zeros(2, A.dtype), A.ravel()]).view(np.uint16)
    line_B = np.concatenate([np.zeros(3, np.float32), packed.ravel().view(np.float32)])
    line_C = np.concatenate([np.zeros(5, np.float32), C.ravel()])
    product(line_A, line_B, line_C, adds)
    expected = wide(A[:, :, :depth])[0].sum(0) @ wide(B)[0].sum(0)
    got = line_C[5:].reshape(C.shape)[:rows, :columns]
    np.testing.assert_allclose(got, (expected + adds * C[:, :columns])[:rows], atol=1e-4)


def packed(numbers, is_bfloat16):
    """Rows of 16-bit numbers as parts, and whether one of them is not finite."""
    rows, columns = numbers.shape
    row = -(-columns // 32) * 32
    to = np.full((2, rows, row), 0x7FC0, np.uint16)
    is_nonfinite = pack_rows(
        numbers.view(np.uint16).ravel(), 0, columns, to.ravel(), row, rows * row, rows, columns,
        is_bfloat16, np.zeros(WIDTH, np.uint16),
    )  # fmt: skip
    return to[: 1 if is_bfloat16 else 2], is_nonfinite


@needs_matrix_unit
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 16, 33, 80])
def test_rows_become_parts_filled_up_with_zeros(columns, dtype):
    numbers = RNG.normal(size=(5, columns)).astype(dtype)
    to, is_nonfinite = packed(numbers, dtype is not np.float16)
    np.testing.assert_array_equal(floats(to)[:, :columns].astype(np.float32), numbers.astype("f4"))
    assert not to[:, :, columns:].any()
    assert not is_nonfinite


@needs_matrix_unit
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_16_bit_numbers_are_the_sum_of_their_parts(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(-1, 64)
    to, is_nonfinite = packed(numbers, dtype is not np.float16)
    exact = numbers.astype(np.float32)
    np.testing.assert_allclose(floats(to).astype(np.float32), exact, rtol=0, atol=2.0**-126)
    assert is_nonfinite
    some = to[:, exact != 0].view(ml_dtypes.bfloat16).astype(np.float32)
    parts = abs(some[:, ~np.isnan(some[0])])
    assert (parts >= 2.0**-126).all()  # so that infinity times a part is no NaN


@needs_matrix_unit
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_not_finite_is_found(dtype):
    for x in (inf, -inf, np.nan, ml_dtypes.finfo(dtype).max):
        for place in ((0, 0), (4, 36)):
            numbers = np.ones((5, 37), dtype)
            numbers[place] = x
            assert packed(numbers, dtype is not np.float16)[1] == (not np.isfinite(x))


@needs_matrix_unit
def test_weights_become_pairs_of_two_parts():
    n, lanes = 6, TILE
    S = RNG.random((n, lanes), np.float32)
    S[0, :4], S[3, :2] = (
        [0, 1, 2.0**-126, np.nan],
        np.array([-1, 2**31 - 1]).astype("i4").view("f4"),
    )

    @numba.njit
    def split(S):
        split_rows(S, 0, n, lanes)

    line = S.ravel().copy()
    split(line)
    pairs = line.view(ml_dtypes.bfloat16).reshape(n // 2, 2, lanes, 2).astype(np.float64)
    got = pairs.sum(1).transpose(0, 2, 1).reshape(n, lanes)
    np.testing.assert_allclose(got, S, rtol=2.0**-16)


def assert_rounded_once(O, exact, v):
    """O is ``exact`` but for its own rounding and for weights of 16 binary digits."""
    half_step = float(ml_dtypes.finfo(O.dtype).eps) / 2
    size = abs(wide(v)[0])
    atol = 2.0**-16 * size.max(where=np.isfinite(size), initial=0)
    np.testing.assert_allclose(wide(O)[0], exact, rtol=half_step, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", options().values(), ids=options())
def test_every_option_on_ragged_sizes_of_16_bits(given, dtype):
    q, k, v = (x.astype(dtype) for x in ragged())
    O, L = rung6_matrix_unit.forward(Problem.of(q, k, v, **given))
    exact, exact_lse = run("dense", *wide(q, k, v), **given)
    assert_rounded_once(O, exact, v)
    np.testing.assert_allclose(L, exact_lse, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 2, 15, 16, 17, 64, 80, 256])
@pytest.mark.parametrize("Dv", [1, 64, 100])
def test_any_head_width_of_16_bits(D, Dv, dtype):
    q, k, v = (x.astype(dtype) for x in ragged(Lq=13, Lk=50, D=D, Dv=Dv, B=1))
    O, _ = rung6_matrix_unit.forward(Problem.of(q, k, v))
    exact, _ = run("dense", *wide(q, k, v))
    assert_rounded_once(O, exact, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_panels_nor_blocks_matter_for_16_bits(dtype):
    q, k, v = (x.astype(dtype) for x in ragged(D=64, Dv=33))
    problem = Problem.of(q, k, v, window_size=(90, 3), q_offset=30)
    exact = dense.forward(Problem.of(*wide(q, k, v), window_size=(90, 3), q_offset=30))
    for panels, B_c in [(1, 8), (2, 96), (3, 7), (9, 300)]:
        O, L = rung6_matrix_unit.forward(problem, panels=panels, B_c=B_c)
        assert_rounded_once(O, exact[0], v)
        np.testing.assert_allclose(L, exact[1], rtol=1e-5, atol=6e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 7, 30, -7])
@pytest.mark.parametrize("scale", [0.25, 0, -0.25])
def test_scores_that_grow_from_block_to_block(scale, step, dtype):
    """By less than the slack of m or by more, or with a scale that turns them around."""
    q, k, v = (x.astype(dtype) for x in ragged(Lq=60, Lk=200, D=8))
    q[..., 0], k[..., 0] = 4, step * (np.arange(200) // 32)
    problem = {"scale": scale, "sinks": RNG.normal(size=q.shape[1])}
    O, L = rung6_matrix_unit.forward(Problem.of(q, k, v, **problem), B_c=32)
    exact, exact_lse = run("dense", *wide(q, k, v), **problem)
    assert_rounded_once(O, exact, v)
    np.testing.assert_allclose(L, exact_lse, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("size", [1e9, 1e37])
def test_scores_that_are_far_from_0(size):
    """What rounding leaves of the largest score, less the maximum, must not overflow in exp."""
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in ragged(Lq=60, Lk=70, D=5))
    q = (q.astype(np.float32) * np.float32(size)).astype(q.dtype)
    O, L = rung6_matrix_unit.forward(Problem.of(q, k, v, scale=0.3), B_c=32)
    exact, exact_lse = run("dense", *wide(q, k, v), scale=0.3)
    assert_rounded_once(O, exact, v)
    np.testing.assert_allclose(L, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("sinks", [None, [2.0]])
@pytest.mark.parametrize("at", [3, 40, 60])
def test_a_score_that_only_its_scale_makes_infinite(at, sinks):
    """Its weight is NaN, as in the equations, in whichever block it is; no other key is lost."""
    q, k, v = (np.ones((1, 1, n, 1), ml_dtypes.bfloat16) for n in (9, 64, 64))
    k[...], k[..., at, :] = 0, 1e20
    O, L = rung6_matrix_unit.forward(Problem.of(q, k, v, scale=1e20, sinks=sinks), B_c=32)
    assert np.isnan(wide(O)[0]).all()
    assert np.isnan(L).all()


def test_the_mean_of_large_values_is_finite_though_weights_exceed_1():
    q, k, v = (np.ones((1, 1, n, 4), ml_dtypes.bfloat16) for n in (9, 64, 64))
    k[..., 32:, :] = 7  # beyond the first block, the scores of which are m: less than the slack
    v[...] = ml_dtypes.finfo(v.dtype).max
    O, _ = rung6_matrix_unit.forward(Problem.of(q, k, v, scale=0.25), B_c=32)
    np.testing.assert_array_equal(O, v[..., :9, :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("poison", [inf, -inf, np.nan, "payload"])
@pytest.mark.parametrize("given", [{}, {"is_causal": True, "q_offset": 3}], ids=["all", "causal"])
def test_what_is_not_finite_acts_as_in_the_equations(given, poison, name, dtype):
    arrays = dict(zip("qkv", (x.astype(dtype) for x in ragged(Lq=70, Lk=90, D=33)), strict=True))
    if poison == "payload":
        arrays[name].view(np.uint16)[:, 1, 40:43, 5:7] = 0xFFFF, 0x7F81
    else:
        arrays[name][:, 1, 40:43, 5:7] = poison
    q, k, v = arrays.values()
    with np.errstate(invalid="ignore"):
        exact, _ = run("dense", *wide(q, k, v), **given)
    O, _ = rung6_matrix_unit.forward(Problem.of(q, k, v, **given))
    assert_rounded_once(O, exact, v)


def test_infinity_times_a_number_below_the_normal_ones_is_infinity():
    q, k = (
        np.full((1, 1, 9, 8), 1e-40, ml_dtypes.bfloat16),
        np.ones((1, 1, 2, 8), ml_dtypes.bfloat16),
    )
    k[..., 1, :] = -inf
    O, L = rung6_matrix_unit.forward(Problem.of(q, k, np.full_like(k, 3)))
    np.testing.assert_array_equal(O, 3)
    np.testing.assert_allclose(L, 0, atol=1e-6)  # of the first key alone, whose score is 0


@pytest.mark.parametrize("dtype", [*DTYPES, np.float32])
def test_many_queries_of_16_bits_take_the_matrix_unit(dtype, monkeypatch):
    taken = []
    for rung in (rung4_parallel, rung6_matrix_unit):
        monkeypatch.setattr(rung, "plan", lambda problem, rung=rung: taken.append(rung))
    backend.plan(Problem.of(*(x.astype(dtype) for x in ragged(Lq=9))))
    is_taken = dtype is not np.float32 and matrix_unit.is_usable()
    assert taken == [rung6_matrix_unit if is_taken else rung4_parallel]


def test_without_a_matrix_unit_rung_4_computes():
    """What a machine without one chooses, forced on this one."""
    code = (
        "from minimha.kernels.cpu import backend, rung6_matrix_unit as rung6\n"
        "import numpy as np\n"
        "bits = np.dtype(np.uint16)\n"
        "print(backend.rungs(bits)[0].__name__, rung6.is_made_for(bits))"
    )
    less = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=os.environ | less, capture_output=True, text=True, check=True
    )
    assert done.stdout == "minimha.kernels.cpu.rung4_parallel False\n"


def test_the_system_may_refuse_the_matrix_unit(monkeypatch):
    refusing = SimpleNamespace(syscall=lambda *request: -1)
    monkeypatch.setattr(matrix_unit.ctypes, "CDLL", lambda name: refusing)
    assert not matrix_unit.is_usable.__wrapped__()
