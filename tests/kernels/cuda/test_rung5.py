"""What concerns rung 5 alone: rows folded from heads, splits of the keys, and their merge.

That it computes attention, with every option, is tested with the other rungs that take addresses.
"""

from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from problems import naive_attention

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
from gpu_problems import download, upload

from minimha.equations.problem import Problem
from minimha.kernels.cuda import ptxas, rung5_decode
from minimha.kernels.cuda.parts.mask import ScoreOptions

inf = np.inf
DTYPES = [np.float32, ml_dtypes.bfloat16]  # a kernel for float32, and one for 16 bits


def ragged(Lq=2, Lk=75, H=4, Hkv=2, D=13, Dv=16, B=2, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def decode(q, k, v, *, order=None, change=None, splits=3, **options):
    """O and L, in float64, from the emulator."""
    launches = partial(rung5_decode.launches, splits=splits)
    rung = SimpleNamespace(launches=launches, ROW_UNIT=rung5_decode.ROW_UNIT)
    O, L = emulator.forward(rung, Problem.of(q, k, v, **options), order, change=change)
    return O.astype(np.float64), L.astype(np.float64)


def assert_right(q, k, v, O, L, **options):
    """What is computed in float32 and rounded once differs by that rounding, and little more."""
    exact_O, exact_L = naive_attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    hidden = np.isneginf(exact_L)
    np.testing.assert_array_equal(np.isneginf(L), hidden)
    np.testing.assert_array_equal(O[hidden], 0)
    largest = float(abs(v).max(initial=0))
    rounding = 0 if q.dtype == np.float32 else float(ml_dtypes.finfo(q.dtype).eps) / 2
    np.testing.assert_allclose(O, exact_O, rtol=rounding, atol=1e-6 * largest)
    np.testing.assert_allclose(L[~hidden], exact_L[~hidden], rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("H", "Hkv", "Lq"), [(1, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 4), (6, 2, 7), (2, 2, 5)]
)
def test_queries_of_a_group_are_rows_of_one_warp(H, Hkv, Lq, dtype):
    q, k, v = ragged(H=H, Hkv=Hkv, Lq=Lq, Lk=50, dtype=dtype)
    options = {"is_causal": True, "q_offset": np.array([50 - Lq, 20])}
    assert_right(q, k, v, *decode(q, k, v, **options), **options)


@pytest.mark.parametrize(("D", "dtype"), [(48, np.float32), (240, np.float32), (112, np.float16)])
def test_a_row_of_any_width_is_shared_by_the_lanes(D, dtype):
    q, k, v = ragged(D=D, Dv=D, Lk=37, B=1, dtype=dtype)
    assert_right(q, k, v, *decode(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Lk", [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 200])
def test_any_number_of_keys(Lk, dtype):
    q, k, v = ragged(Lk=Lk, dtype=dtype)
    options = {"kv_lengths": np.array([Lk, Lk // 2])}
    assert_right(q, k, v, *decode(q, k, v, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_splits_do_not_matter(splits, dtype):
    q, k, v = ragged(Lk=203, dtype=dtype)
    options = {"window_size": (150, 3), "q_offset": np.array([90, 200]), "sinks": np.arange(4.0)}
    assert_right(q, k, v, *decode(q, k, v, splits=splits, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [0, 1])
def test_the_order_of_warps_does_not_matter(order, dtype):
    q, k, v = ragged(dtype=dtype)
    for warps, lockstep in zip(decode(q, k, v, order=order), decode(q, k, v), strict=True):
        np.testing.assert_array_equal(warps, lockstep)


def test_the_merge_needs_its_barrier():
    barrier = "bar.sync \t0;"

    def without(text):
        changed.append(barrier in text)
        return text.replace(barrier, "")

    changed = []
    with pytest.raises(emulator.PTXError, match=r"never written|unsynchronised"):
        decode(*ragged(), order=0, change=without)
    assert any(changed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_no_row_sees_are_not_read(dtype):
    q, k, v = ragged(B=1, H=2, Hkv=1, Lk=64, dtype=dtype)
    options = {"is_causal": True, "window_size": (9, 0), "q_offset": 20}  # keys 11 to 21
    problem = Problem.of(q, k, v, **options)
    memory = emulator.Arena()
    whole = upload(problem, memory)

    def only(array, first, last):
        """Rows at their addresses in an array of which the emulator knows no other rows."""
        array = np.pad(array, ((0, 0), (0, 0), (0, 0), (0, 16 - array.shape[3])))
        part = memory.put(array[:, :, first:last])
        return whole.k._replace(address=part - first * 16 * array.itemsize)

    def run(first, last):
        arguments = whole._replace(k=only(k, first, last), v=only(v, first, last))
        for launch, given in rung5_decode.launches(problem, arguments, memory.scratch, splits=2):
            emulator.run(launch, given, memory)
        return (x.astype(np.float64) for x in download(problem, whole, memory))

    assert_right(q, k, v, *run(11, 22), **options)
    for first, last in [(12, 22), (11, 21)]:
        with pytest.raises(emulator.PTXError, match="is in no array"):
            run(first, last)


HIDING = {
    "causal": {"is_causal": True, "q_offset": 30},
    "mask": {"attn_mask": np.tri(5, 40, 30, dtype=bool)},
    "bias": {"attn_bias": np.where(np.tri(5, 40, 30), 0.5, -inf)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, inf, -inf])
@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
def test_a_row_is_touched_only_by_keys_that_it_sees(options, poison, dtype):
    q, k, v = ragged(Lq=5, Lk=40, dtype=dtype)
    expected, _ = decode(q, k, v, **options)
    k[1, 0, 33], k[0, 1, 39] = poison, poison
    v[1, 1, 32, 0], v[1, 1, 34, 3], v[1, 1, 31, 15], v[0, 0, 36:] = [poison] * 4
    O, _ = decode(q, k, v, **options)
    touched = np.zeros(O.shape, bool)  # query i sees the keys up to 30 + i
    if not np.isinf(poison):  # an infinite key may get all the weight or none
        touched[1, :2, 3:] = True
    touched[1, 2:, 2:, 0] = touched[1, 2:, 4:, 3] = touched[1, 2:, 1:, 15] = True
    same = ~touched
    same[1, :2, 3:] = False
    assert not np.isfinite(O[touched]).any()
    np.testing.assert_array_equal(O[same], expected[same])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_value_is_the_output_of_the_rows_that_see_it(dtype):
    q, k, v = ragged(Lq=2, dtype=dtype)
    v[0, 0, 3, 0], v[0, 0, 74, 1], v[0, 0, 74, 2] = inf, -inf, inf
    O, _ = decode(q, k, v, is_causal=True, q_offset=73)
    assert (O[0, :2, :, 0] == inf).all()
    assert (O[0, :2, 1, 1] == -inf).all()
    assert (O[0, :2, 1, 2] == inf).all()
    assert np.isfinite(O[0, :2, 0, 1:]).all()


@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        ({"B": 16, "H": 32, "Hkv": 8, "Lk": 8192}, 8),  # 128 heads, 132 × 8 warps run at once
        ({"B": 1, "H": 8, "Hkv": 8, "Lk": 8192}, 128),  # no fewer than 64 keys per split
        ({"B": 1, "H": 8, "Hkv": 8, "Lk": 63}, 1),
        ({"B": 600, "H": 4, "Hkv": 4, "Lk": 8192}, 2),  # one for each warp of a block
    ],
)
def test_splits_are_as_many_as_run_at_once(problem, splits):
    sizes = {"Lq": 1, "D": 128, **problem}
    once = np.zeros((1, 1, 1, 1), np.float16)
    q, k, v = (
        np.broadcast_to(once, (sizes["B"], sizes[heads], sizes[length], sizes["D"]))
        for heads, length in (("H", "Lq"), ("Hkv", "Lk"), ("Hkv", "Lk"))
    )
    shapes = []
    (split, given), _ = rung5_decode.launches(
        Problem.of(q, k, v), (None,) * 8, lambda shape: shapes.append(shape) or 0
    )
    assert given[-1] == splits
    assert [shape[1] for shape in shapes] == [splits] * 2
    assert split.grid[1] * split.threads // 32 >= splits


@pytest.mark.parametrize(
    ("D", "dtype", "Lq", "options"),
    [
        (64, np.float16, 1, {"softcap": 2.0, "attn_mask": np.ones((1, 90), bool)}),
        (64, np.float16, 4, {}),
        (64, np.float32, 1, {"attn_bias": np.ones((1, 90))}),
        (128, np.float16, 4, {}),
        (128, np.float16, 1, {"softcap": 2.0, "attn_bias": np.ones((1, 90))}),
        (128, np.float32, 1, {}),
    ],
)
def test_as_many_blocks_run_at_once_as_it_says(D, dtype, Lq, options):
    q, k, v = ragged(Lq=Lq, Lk=90, H=32, Hkv=8, D=D, Dv=D, B=1, dtype=dtype)
    problem = Problem.of(q, k, v, **options)
    (split, _), _ = rung5_decode.launches(problem, (None,) * 8, lambda shape: 0)
    made_for = rung5_decode.Variant(
        D, q.dtype.name, rung5_decode.rows_of_warp(4 * Lq, D, dtype().itemsize),
        ScoreOptions.of(problem), D,
    )  # fmt: skip
    found = ptxas.statistics(emulator.compiled(split).machine_code())
    of_warp = 32 * -(-found["registers"] // 8) * 8
    warps = 4 * (65536 // 4 // of_warp)  # each of four schedulers has a quarter of the registers
    assert rung5_decode.blocks_at_once(made_for) <= 32 * warps // split.threads


def test_it_says_what_it_does_not_support():
    wide, narrow = np.ones((2, 257), np.float32), np.ones((2, 256), np.float32)
    assert "272 wide" in rung5_decode.unsupported(Problem.of(wide, wide, wide))
    assert "float64" in rung5_decode.unsupported(Problem.of(*np.ones((3, 2, 4))))
    assert rung5_decode.unsupported(Problem.of(narrow, narrow, narrow)) is None


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Lq": 0}])
def test_without_a_query_nothing_is_launched(sizes):
    problem = Problem.of(*ragged(**sizes))
    assert rung5_decode.launches(problem, (None,) * 8, None) == []
