"""CUDA rungs 1 and 2, executed thread by thread in numba's simulator: no GPU is needed.

One process runs all cases. With blocks of a few rows even the small problems of the feature grid
have several thread blocks and several tiles, full and partial ones; with two numbers of a row per
thread even their narrow heads are computed in parts.
"""

import os
import pickle
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from problems import (
    assert_as_good_as_plain,
    assert_close_to_exact,
    everywhere,
    in_part,
    of_parity,
)
from test_backends import ALONE, small

from minimha.equations.functions import Corner, Placed
from minimha.equations.problem import Problem
from minimha.kernels.cuda import rung1_rows, rung2_tiles
from minimha.kernels.cuda.arguments import in_parts

RUNGS = ("cuda.rung1_rows", "cuda.rung2_tiles")
CORNER = Corner(1, 3, 20)
HERE = Path(__file__).parent
DTYPES = (np.float32, np.float64)
inf = np.inf
pytestmark = pytest.mark.long


def ragged(Lq, Lk, D=3, Dv=2):
    rng = np.random.default_rng(7)
    shapes = ((1, 2, Lq, D), (1, 1, Lk, D), (1, 1, Lk, Dv))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def poisoned():
    """Keys and values that no query sees are NaN."""
    q, k, v = small()
    k[:, :, 3:], v[:, :, 3:] = np.nan, inf
    return q, k, v


GRID = {  # dtypes and rungs take turns: the simulator takes a quarter of a second for each case
    (name, dtype.__name__, rung): (rung, True, small(dtype=dtype), options)
    for (name, options), (dtype, rung) in zip(ALONE.items(), cycle(product(DTYPES, RUNGS)))
    if "key_indices" not in options  # which GPU kernels refuse
}
EDGES = {
    (name, rung): (rung, True, small(**sizes), options)
    for name, sizes, options in (
        ("no keys", {"Lk": 0}, {}),
        ("no queries", {"Lq": 0}, {}),
        ("no batch", {"B": 0}, {}),
        ("no value width", {"Dv": 0}, {}),
        ("parts that overlap", {"D": 7, "Dv": 7}, {}),
        ("far", {}, {"is_causal": True, "q_offset": 2**31 - 1}),
        ("far before", {}, {"window_size": (0, None), "q_offset": 1 - 2**31}),
        ("more keys", {"Lk": 9}, {"is_causal": True, "q_offset": 4, "window_size": (3, None)}),
        ("more queries", {"Lq": 9}, {"is_causal": True, "q_offset": np.array([-4, 0])}),
    )
    for rung in RUNGS
}
OTHERS = {
    **{("usual blocks", rung): (rung, False, ragged(67, 70), {"is_causal": True, "q_offset": 3})
       for rung in RUNGS},
    **{("place", rung): (rung, True, small(), {
           "score_mod": Placed(everywhere, CORNER), "mask_mod": Placed(of_parity, CORNER),
       }) for rung in RUNGS},
    **{("poison", rung): (rung, True, poisoned(), {"window_size": (None, 0), "kv_lengths": [3, 2]})
       for rung in RUNGS},
}  # fmt: skip
CASES = GRID | EDGES | OTHERS


@pytest.fixture(scope="module")
def results():
    """What the simulator returned for each of the cases, by their names."""
    program = [sys.executable, "-W", "error", str(HERE / "simulator.py")]
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
    _, _, (q, k, v), options = CASES["usual blocks", rung]
    assert_close_to_exact(q, k, v, options, *results["usual blocks", rung])


@pytest.mark.parametrize("rung", RUNGS)
def test_functions_of_a_part_count_from_the_beginning_of_the_whole(rung, results):
    given = {"score_mod": everywhere, "mask_mod": of_parity}
    options = {name: in_part(function, CORNER) for name, function in given.items()}
    assert_as_good_as_plain(*small(), options, *results["place", rung])


@pytest.mark.parametrize("rung", RUNGS)
def test_what_no_query_sees_may_be_anything(rung, results):
    _, _, (q, k, v), options = CASES["poison", rung]
    kept = {"window_size": (None, 0), "kv_lengths": [3, 2]}
    clean = [q, np.where(np.isfinite(k), k, 0), np.where(np.isfinite(v), v, 0)]
    assert options == kept
    assert_as_good_as_plain(*clean, options, *results["poison", rung])


@pytest.mark.parametrize(
    ("width", "parts"), [(0, 1), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3), (7000, 110)]
)
def test_parts_of_a_row_are_as_few_as_can_be_and_each_begins_within_it(width, parts):
    found, size = in_parts(width, 64)
    assert found == parts
    assert size <= 64
    assert (parts - 1) * size < max(width, 1) <= max(parts * size, 1)


@pytest.mark.parametrize("rung", [rung1_rows, rung2_tiles])
@pytest.mark.parametrize(("dtype", "columns"), [(np.float32, 64), (np.float64, 32)])
def test_no_head_is_too_wide(rung, dtype, columns):
    for Dv in (columns, columns + 1, 7000):
        problem = Problem.of(*(np.zeros((1, 9000), dtype),) * 2, np.zeros((1, Dv), dtype))
        assert rung.unsupported(problem) is None
        ((launch, _),) = rung.launches(problem, None, None)
        assert launch.grid == (1, -(-Dv // columns), 1)
