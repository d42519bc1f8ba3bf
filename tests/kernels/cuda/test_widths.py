"""Rows narrower than a tile: read in place, by copies of 16, 8 or 4 bytes, without a GPU."""

import re
from importlib import import_module

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
import ml_dtypes
from gpu_problems import upload

from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cuda.arguments import PLACEHOLDERS, Rows, row_alignment, row_width

bfloat16 = np.dtype(ml_dtypes.bfloat16)
KERNELS = [
    ("cuda.rung3_register_tiles", np.float32, (40, 72)),
    ("cuda.rung4_tensor_cores", bfloat16, (40, 72, 44, 42)),
    ("cuda.rung5_decode", np.float32, (40,)),
    ("cuda.rung5_decode", bfloat16, (40, 72)),
    ("cuda.rung6_warpgroups", bfloat16, (72, 44, 42)),
]  # fmt: skip
BESIDE = 8  # numbers between two rows, which no kernel may read or write


def place(problem, memory, unit):
    """The arguments for ``problem``, with NaN between rows of q, k and v, and 7 in all of O."""
    arguments = upload(problem, memory, unit)

    def rows(array, fill):
        *outer, D = array.shape
        apart = np.full((*outer, D + BESIDE), fill, problem.dtype)
        apart[..., :D] = array
        row = D + BESIDE
        return Rows(memory.put(apart), outer[1] * outer[2] * row, outer[2] * row, row)

    O = np.full((*problem.q.shape[:3], problem.v.shape[3]), 7)
    named = {name: rows(getattr(problem, name), np.nan) for name in "qkv"}
    return arguments._replace(**named, O=rows(O, 7))


@pytest.mark.parametrize(
    ("name", "dtype", "D"), [(name, dtype, D) for name, dtype, widths in KERNELS for D in widths]
)
@pytest.mark.parametrize("order", [None, 0])
def test_rows_narrower_than_a_tile_are_read_in_place(name, dtype, D, order):
    module, memory = import_module(f"minimha.kernels.{name}"), emulator.Arena()
    rng, Lq = np.random.default_rng(D), 3 if "decode" in name else 70
    q, k, v = (rng.normal(size=(1, h, n, D)) for h, n in ((4, Lq), (2, 150), (2, 150)))
    v[0, 0, 140, D - 1], v[0, 1, 20, 0] = np.nan, np.inf  # which some queries do not see
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    problem = Problem.of(q, k, v, is_causal=True, q_offset=120)
    assert row_width(problem, module.ROW_UNIT) == D
    arguments = place(problem, memory, module.ROW_UNIT)
    for launch, values in module.launches(problem, arguments, memory.scratch):
        emulator.run(launch, values, memory, order)
    O = memory.get(arguments.O.address, (1, 4, Lq, D + BESIDE), dtype).astype(float)
    exact, _ = dense.forward(Problem.of(*map(wide, (q, k, v)), is_causal=True, q_offset=120))
    np.testing.assert_allclose(O[..., :D], exact, atol=2e-2 if dtype == bfloat16 else 1e-5)
    np.testing.assert_array_equal(O[..., D:], 7)


def wide(x):
    return x.astype(float)


@pytest.mark.parametrize("D", [40, 42, 44, 48])
def test_copies_are_as_long_as_the_rows_are_aligned(D):
    q = np.zeros((1, 1, 256, D), bfloat16)
    for rung in ("rung4_tensor_cores", "rung6_warpgroups"):
        module = import_module(f"minimha.kernels.cuda.{rung}")
        ((launch, _),) = module.launches(Problem.of(q, q, q), PLACEHOLDERS, None)
        size = {40: 16, 42: 4, 44: 8, 48: 16}[D]
        text = emulator.ptx_of(launch)
        assert set(re.findall(r"cp\.async\.c[ag].*\], (\d+), ", text)) == {str(size)}
        assert row_alignment(D, 2) == size


@pytest.mark.parametrize(("D", "Dv"), [(33, 33), (40, 48), (16, 8)])
def test_other_rows_are_padded(D, Dv):
    q, v = np.zeros((1, 1, 2, D), bfloat16), np.zeros((1, 1, 2, Dv), bfloat16)
    padded = -(-max(D, Dv) // 16) * 16
    assert row_width(Problem.of(q, q, v), 4) == padded
