"""CUDA rungs 1 and 2, executed thread by thread in numba's simulator: no GPU is needed.

One process runs all cases. With blocks of a few rows even the small problems of the feature grid
have several blocks of threads and several tiles, whole ones and cut ones.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from problems import assert_as_good_as_plain, assert_close_to_exact
from test_backends import ALONE, small

from minimha.equations.problem import Problem
from minimha.kernels import cuda1_rows, cuda2_tiles

RUNGS = ("cuda1_rows", "cuda2_tiles")
HERE = Path(__file__).parent
DTYPES = (np.float32, np.float64)
inf = np.inf


def ragged(Lq, Lk, D=3, Dv=2):
    rng = np.random.default_rng(7)
    shapes = ((1, 2, Lq, D), (1, 1, Lk, D), (1, 1, Lk, Dv))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def poisoned():
    """Keys and values that no query sees are NaN."""
    q, k, v = small()
    k[:, :, 3:], v[:, :, 3:] = np.nan, inf
    return q, k, v


GRID = {
    (name, dtype.__name__, rung): (rung, True, small(dtype=dtype), options)
    for name, options in ALONE.items()
    for dtype in DTYPES
    for rung in RUNGS
}
EDGES = {
    (name, rung): (rung, True, small(**sizes), options)
    for name, sizes, options in (
        ("no keys", {"Lk": 0}, {}),
        ("no queries", {"Lq": 0}, {}),
        ("no batch", {"B": 0}, {}),
        ("no value width", {"Dv": 0}, {}),
        ("far", {}, {"is_causal": True, "q_offset": 2**31 - 1}),
        ("far before", {}, {"window_size": (0, None), "q_offset": 1 - 2**31}),
        ("more keys", {"Lk": 9}, {"is_causal": True, "q_offset": 4, "window_size": (3, None)}),
        ("more queries", {"Lq": 9}, {"is_causal": True, "q_offset": np.array([-4, 0])}),
    )
    for rung in RUNGS
}
OTHERS = {
    **{("whole blocks", rung): (rung, False, ragged(67, 70), {"is_causal": True, "q_offset": 3})
       for rung in RUNGS},
    **{("poison", rung): (rung, True, poisoned(), {"window_size": (None, 0), "kv_lengths": [3, 2]})
       for rung in RUNGS},
}  # fmt: skip
CASES = GRID | EDGES | OTHERS


@pytest.fixture(scope="module")
def results():
    """What the simulator returned for each of the cases, by their names."""
    program = [sys.executable, "-W", "error", str(HERE / "cuda_simulator.py")]
    same = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    cases = pickle.dumps(list(CASES.values()))
    done = subprocess.run(program, input=cases, capture_output=True, check=False, env=same)
    assert done.returncode == 0, done.stderr.decode()
    return dict(zip(CASES, pickle.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", [*GRID, *EDGES], ids=lambda case: ", ".join(case))
def test_every_option_and_every_edge(case, results):
    _, _, (q, k, v), options = CASES[case]
    O, L = results[case]
    assert O.dtype == L.dtype == q.dtype
    assert_as_good_as_plain(q, k, v, options, O, L)


@pytest.mark.parametrize("rung", RUNGS)
def test_blocks_of_their_usual_size(rung, results):
    _, _, (q, k, v), options = CASES["whole blocks", rung]
    assert_close_to_exact(q, k, v, options, *results["whole blocks", rung])


@pytest.mark.parametrize("rung", RUNGS)
def test_what_no_query_sees_may_be_anything(rung, results):
    _, _, (q, k, v), options = CASES["poison", rung]
    kept = {"window_size": (None, 0), "kv_lengths": [3, 2]}
    clean = [q, np.where(np.isfinite(k), k, 0), np.where(np.isfinite(v), v, 0)]
    assert options == kept
    assert_as_good_as_plain(*clean, options, *results["poison", rung])


def test_a_width_that_a_rung_cannot_hold_is_refused_with_the_limit():
    wide = Problem.of(*(np.zeros((1, 5000), np.float32),) * 3)
    assert "D=5000 and Dv=5000 exceed 4096" in cuda1_rows.unsupported(wide)
    wider = Problem.of(*(np.zeros((1, 7000), np.float32),) * 3)
    assert "49152 bytes of shared memory" in cuda2_tiles.unsupported(wider)
    assert cuda2_tiles.unsupported(Problem.of(*(np.zeros((1, 6000), np.float32),) * 3)) is None


@pytest.mark.parametrize(("D", "itemsize"), [(3, 4), (64, 4), (128, 8), (256, 4), (3000, 8)])
def test_a_tile_fits_into_shared_memory(D, itemsize):
    B_c = cuda2_tiles.block_size(D, D, itemsize)
    assert B_c in (1, 2, 4, 8, 16, 32)
    assert B_c * (2 * D + cuda2_tiles.B_R) * itemsize <= 49152
