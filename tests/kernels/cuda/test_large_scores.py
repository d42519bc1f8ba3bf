"""Softmax of scores that are far from 0, in every CUDA rung, without a GPU.

Scores are exact in float32, so that nothing but the softmax can go wrong. ``dense`` in float64 is
the oracle. Weights in float32 are those of the parts; outputs of 16 bits are rounded once more.
"""

from importlib import import_module

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
import ml_dtypes
from gpu_problems import upload_arrays
from numba import cuda, float32, types

from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cuda import ptx
from minimha.kernels.cuda.arguments import array_at, to_device
from minimha.kernels.cuda.backend import TAKE_ARRAYS
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.parts import online_softmax
from minimha.kernels.cuda.parts.fragments import MmaTiles

inf, nan = np.inf, np.nan
bfloat16 = np.dtype(ml_dtypes.bfloat16)
RUNGS = [
    ("cuda.rung1_rows", np.float32), ("cuda.rung2_tiles", np.float32),
    ("cuda.rung3_register_tiles", np.float32), ("cuda.rung4_tensor_cores", bfloat16),
    ("cuda.rung5_decode", np.float32), ("cuda.rung5_decode", bfloat16),
    ("cuda.rung6_warpgroups", bfloat16),
]  # fmt: skip
ERROR = {np.float32: 4e-6, bfloat16: 8e-3}  # of means of values below 1
# From here on the rungs on tensor cores shift scores in another way, and until there they round.
FAR, TWICE = (2.0**n / np.log2(np.e) for n in (20, 21))
NEAR = [  # what the scores of a row are near to: ordinary, far and nonfinite rows side by side
    0, 1e5, -1e5, 1e6, -1e6, nan, FAR, -FAR, TWICE, -TWICE, 1e7, -1e10, 3e18, -3e18, 1e30, -1e30,
]  # fmt: skip


def scores_near(places, dtype, Lk, is_rising, is_equal=False):
    """q, k, v of scores that are multiples of 1/8 near ``places``, or that are all equal in a row.

    A row has the sum of a coarse and a fine number in q, and a key less than 8 in k.
    """
    q, k = np.zeros((len(places), 16)), np.zeros((Lk, 16))
    coarse = np.asarray(places, float).astype(bfloat16).astype(float)
    is_near = abs(coarse) < 2**21
    q[:, 0], q[:, 1] = coarse, np.where(is_near, np.round((places - coarse) / 64) * 64, 0)
    q[:, 2] = is_near & (not is_equal)
    k[:, :2] = 1
    k[:, 2] = np.random.default_rng(0).integers(-63, 64, Lk) / 8
    if is_rising:
        k[:, 2] = np.sort(k[:, 2])
    v = np.random.default_rng(1).uniform(-1, 1, (Lk, 16))
    return [x.astype(dtype)[None, None] for x in (q, k, v)]


def forward(name, problem):
    """O and L of a rung in the emulator."""
    module = import_module(f"minimha.kernels.{name}")
    assert module.unsupported(problem) is None
    if name not in TAKE_ARRAYS:
        return emulator.forward(module, problem)
    memory = emulator.Arena()
    arguments = upload_arrays(problem, lambda array: array_at(to_device(array, memory)))
    for launch, values in module.launches(problem, arguments, memory.scratch):
        emulator.run(launch, values, memory)
    return (memory.get(x.address, x.shape, problem.compute) for x in (arguments.O, arguments.L))


def check(name, dtype, places, Lk=300, scale=1.0, is_rising=True, **how):
    if "decode" in name:  # which takes few queries, and rows of one warp
        places = places[:8]
    q, k, v = scores_near(places, dtype, Lk, is_rising, **how)
    O, L = forward(name, Problem.of(q, k, v, scale=scale))
    with np.errstate(all="ignore"):
        exact = dense.forward(Problem.of(*(x.astype(float) for x in (q, k, v)), scale=scale))
    np.testing.assert_allclose(O.astype(float), exact[0], rtol=0, atol=ERROR[dtype])
    np.testing.assert_allclose(L, exact[1], rtol=3e-7, atol=1e-5)


@pytest.mark.parametrize("is_rising", [False, True])
@pytest.mark.parametrize(("name", "dtype"), RUNGS)
def test_outputs_of_large_scores(name, dtype, is_rising):
    check(name, dtype, NEAR, is_rising=is_rising)
    check(name, dtype, NEAR[::-1], is_rising=is_rising)
    check(name, dtype, np.array(NEAR) * 64, scale=1 / 64, is_rising=is_rising)


@pytest.mark.parametrize(("name", "dtype"), RUNGS)
def test_equal_scores_have_equal_weights_however_their_scale_rounds_them(name, dtype):
    check(name, dtype, NEAR, scale=0.3, is_equal=True)
    check(name, dtype, NEAR[::-1], scale=0.7, is_equal=True)


@pytest.mark.parametrize(("name", "dtype"), RUNGS)
def test_rows_whose_scores_only_the_scale_makes_infinite_see_nothing(name, dtype):
    q, k, v = scores_near([0, -1e37, 2.0, -3e37], dtype, 300, False, is_equal=True)
    O, L = forward(name, Problem.of(q, k, v, scale=100.0))
    np.testing.assert_array_equal(O[0, 0, [1, 3]], 0)
    np.testing.assert_array_equal(L[0, 0, [1, 3]], -inf)
    mean = v.astype(float).mean((0, 1, 2))
    np.testing.assert_allclose(O[0, 0, [0, 2]].astype(float), [mean, mean], atol=ERROR[dtype])
    np.testing.assert_allclose(L[0, 0, [0, 2]], np.log(300) + np.array([0, 200]), rtol=3e-7)


def two_tiles(takes_fragments):
    """A kernel that updates 16 rows with two tiles of 16 keys, and writes weights and factors."""
    tiles = MmaTiles(16, "bfloat16", 16, 16, 1, 16)
    fragments = online_softmax.update_fragments(tiles, True)
    scores = online_softmax.update_scores(tiles, True)

    def kernel(at, to, scale):
        lane = cuda.threadIdx.x
        factor = np.float32(online_softmax.LOG2_E) * scale
        S, O = cuda.local.array(8, float32), cuda.local.array(8, float32)
        m, l = cuda.local.array((1, 2), float32), cuda.local.array((1, 2), float32)
        correction = cuda.local.array(2, float32)
        for half in range(2):
            m[0, half], l[0, half] = online_softmax.LOWEST, 0
        for tile in range(2):
            for e in range(8):
                S[e] = ptx.ld_global_nc_f32(at + 4 * (8 * (32 * tile + lane) + e))
                O[e] = 1
            if takes_fragments:
                fragments(S, O, m, l, factor)
                correction[0], correction[1] = O[0], O[2]
            else:
                scores(S, correction, m, l, factor)
            for e in range(8):
                ptx.st_global_f32(to + 4 * (8 * (32 * tile + lane) + e), S[e])
        for e in range(8):
            ptx.st_global_f32(to + 4 * (8 * (64 + lane) + e), correction[(e >> 1) & 1])

    return kernel


@pytest.mark.parametrize("takes_fragments", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.3])
def test_weights_are_exact_wherever_the_scores_are(takes_fragments, scale):
    rng, memory = np.random.default_rng(2), emulator.Arena()
    starts = np.nan_to_num(NEAR)[:, None] / scale
    steps = rng.integers(-63, 64, (16, 32)) / 8
    S = (starts + steps).astype(np.float32)  # rounded here, and exact from here on
    # A lane has of its rows g and g + 8, in each tile, columns 8 n + 2 t + x.
    in_lanes = S.reshape(2, 8, 2, 2, 4, 2).transpose(2, 1, 4, 3, 0, 5)
    at, to = memory.put(np.ascontiguousarray(in_lanes)), memory.put(np.zeros(768, np.float32))
    signature = (types.uint64, types.uint64, types.float32)
    launch = Launch(two_tiles(takes_fragments), signature, (1, 1, 1), 32)
    emulator.run(launch, (at, to, np.float32(scale)), memory)
    first, second, factor = memory.get(to, (3, 8, 4, 2, 2, 2), np.float32).astype(float)
    found = np.stack([first * factor, second])
    found = found.transpose(4, 1, 0, 3, 2, 5).reshape(16, 32)
    exact = S.astype(float) * np.float64(np.float32(scale))
    exact = np.exp(exact - exact.max(axis=1, keepdims=True))
    found, exact = (x / x.sum(axis=1, keepdims=True) for x in (found, exact))
    is_heard = exact > 1e-9
    np.testing.assert_allclose(found[is_heard], exact[is_heard], rtol=2e-6)
    np.testing.assert_allclose(found[~is_heard], 0, atol=1.1e-9)
