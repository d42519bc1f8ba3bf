"""attention() on dask arrays in one process: every option, what has a task, what is refused."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import assert_as_good_as_plain, random_problems

da = pytest.importorskip("dask.array", reason="dask is not installed (extra dask)")

import dask  # noqa: E402
from dask.utils import key_split  # noqa: E402

from minimha import block_mask  # noqa: E402
from minimha.distributed import attention, striped, unstriped  # noqa: E402

X = np.random.default_rng(0).normal(size=(2, 4, 12, 3))


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def computed(*arguments, **options):
    return dask.compute(*attention(*arguments, **options, return_lse=True), scheduler="synchronous")


def tasks(x):
    """How many tasks of each name would run."""
    with dask.config.set({"optimization.fuse.active": False}):
        counts = Counter(map(key_split, dict(dask.optimize(x)[0].__dask_graph__())))
    del counts["getitem"]  # between two dimensions and four
    return counts


def assert_whole(problem, found):
    """O and L of a problem that was computed in parts of one key or more."""
    assert_as_good_as_plain(*problem, *found, merges=problem[1].shape[2])


@given(problem=random_problems(np.float64), data=st.data())
def test_every_option_in_chunks_of_any_size(problem, data):
    q, k, v, options = problem
    size = {name: data.draw(st.integers(1, 4)) for name in ("B", "Hkv", "Lq", "Lk")}
    group = q.shape[1] // k.shape[1]
    qd = da.from_array(q, chunks=(size["B"], group * size["Hkv"], size["Lq"], -1))
    kd, vd = (da.from_array(x, chunks=(size["B"], size["Hkv"], size["Lk"], -1)) for x in (k, v))
    for name in ("attn_mask", "attn_bias"):
        if options[name] is not None and data.draw(st.booleans()):
            options[name] = da.from_array(options[name], chunks=data.draw(st.integers(1, 3)))
    found = computed(qd, kd, vd, **options)
    options |= {n: None if options[n] is None else np.array(options[n]) for n in MASKS}
    assert_whole((q, k, v, options), found)


MASKS = ("attn_mask", "attn_bias")


@given(problem=random_problems(np.float64, has_functions=False), count=st.integers(2, 3))
def test_stripes_give_the_whole_back(problem, count):
    q, k, v, options = problem
    if min(q.shape[2], k.shape[2]) < count:
        return
    options |= {"q_offset": int(np.ravel(options["q_offset"])[0])}
    if not options["is_causal"] and (options["window_size"] or (None, None))[1] != 0:
        options |= {"alibi_slopes": None}
    of_stripes = dict(options)
    for name in MASKS:
        if options[name] is not None:
            full = np.broadcast_to(options[name], (*q.shape[:3], k.shape[2]))
            of_stripes[name] = striped(striped(full, count, axis=-1), count)
    found = computed(*(striped(x, count) for x in (q, k, v)), **of_stripes, stripes=count)
    O, L = unstriped(found[0], count), unstriped(found[1], count, axis=-1)
    assert_whole(problem, dask.compute(O, L, scheduler="synchronous"))


@pytest.mark.parametrize("q_offset", [0, -2, 5])
def test_causal_stripes_have_alibis_slopes(q_offset):
    options = {"is_causal": True, "q_offset": q_offset, "alibi_slopes": np.array([1, 0.5, -0.3, 0])}
    striped_X = striped(X, 5)
    O, L = attention(*(striped_X,) * 3, **options, stripes=5, return_lse=True)
    assert_whole((X, X, X, options), dask.compute(unstriped(O, 5), unstriped(L, 5, axis=-1)))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks_and_chunks_come_out_as_they_came(rank):
    x = da.from_array(X[(0,) * (4 - rank)], chunks=(*(-1,) * (rank - 2), 5, -1))
    output, lse = attention(x, x, x, return_lse=True)
    assert output.chunks == x.chunks
    assert lse.chunks == x.chunks[:-1]
    assert_whole((X, X, X, {}), [np.broadcast_to(r, X.shape[: r.ndim]) for r in computed(X, X, X)])
    np.testing.assert_allclose(output.compute(), computed(X, X, X)[0][(0,) * (4 - rank)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64"])
def test_dtypes_are_those_of_attention(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    x = X.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    output, lse = attention(x, da.from_array(x, chunks=(1, 2, 5, -1)), x, return_lse=True)
    wide = {"float32": np.float32, "int64": np.float64}
    assert output.dtype == output.compute().dtype == wide.get(dtype, x.dtype)
    assert lse.dtype == lse.compute().dtype == (np.float64 if dtype == "int64" else np.float32)


def test_16_bit_numbers_are_rounded_once():
    q, k, v = np.random.default_rng(1).normal(size=(3, 1, 1, 60, 4)).astype(np.float16)
    found = attention(q, da.from_array(k, chunks=(1, 1, 2, 4)), v).compute()
    exact, _ = computed(*(x.astype(np.float64) for x in (q, k, v)))
    assert (abs(found - exact) <= abs(exact) * 2**-11 + 1e-6).all()


def test_chunks_that_no_query_sees_have_no_task():
    q, k = da.ones((4, 2)), da.ones((100, 2), chunks=(10, -1))
    every = tasks(attention(q, k, k))
    assert every["attend-to-keys"] == 10
    assert every["merge-parts"] == 3
    window = tasks(attention(q, k, k, window_size=(12, 0), q_offset=40))
    assert window["attend-to-keys"] == 3
    assert window["ones_like"] == 1 + 3
    nothing = tasks(attention(q, k, k, is_causal=True, q_offset=-9))
    assert nothing == {"attention": 1, "merge-output": 1}
    sinks = computed(np.ones((1, 4, 2)), k[None], k[None], kv_lengths=0, sinks=[1.5])
    np.testing.assert_array_equal(sinks[1], 1.5)


def test_causal_stripes_have_as_many_tasks_for_each_chunk_of_queries():
    x = striped(da.ones((64, 2)), 4)
    assert tasks(attention(x, x, x, is_causal=True, stripes=4))["attend-to-keys"] == 16


def test_the_same_call_has_the_same_names_and_another_option_has_others():
    x = da.ones((4, 2), chunks=(2, 2))
    assert attention(x, x, x).name == attention(x, x, x).name
    others = [{"scale": 1.0}, {"softcap": 1.0}, {"is_causal": True}, {"backend": "dense"}]
    names = {attention(x, x, x, **options).name for options in ({}, *others)}
    assert len(names) == 5


def adding(table):
    return lambda s, b, h, i, j: s + table[j]


def test_equal_functions_have_the_same_names_and_other_contents_others():
    x, table = da.ones((4, 2), chunks=(2, 2)), np.arange(4.0)
    first = attention(x, x, x, score_mod=adding(table)).name
    assert attention(x, x, x, score_mod=adding(np.arange(4.0))).name == first
    table[3] = 0
    assert attention(x, x, x, score_mod=adding(table)).name != first
    assert attention(x, x, x).name != first


def test_functions_are_one_task():
    x = da.ones((12, 2), chunks=(2, 2))
    mask_mod = block_mask(lambda b, h, i, j: i >= j, 12, 12)
    every = tasks(attention(x, x, x, mask_mod=mask_mod, score_mod=adding(np.zeros(12))))
    assert (every["attend-to-keys"], every["take-functions"]) == (36, 1)
    nothing = attention(x, x, x, mask_mod=mask_mod, kv_lengths=0)
    assert "take-functions" not in tasks(nothing)


def test_a_function_is_compiled_once_for_all_chunks(monkeypatch):
    functions = pytest.importorskip("minimha.kernels.cpu.functions", reason="numba is missing")
    x = da.from_array(X, chunks=(1, 2, 5, 3))
    compiled, compile_one = [], functions._compile
    monkeypatch.setattr(functions, "_compile", lambda f, x: compiled.append(f) or compile_one(f, x))
    options = {
        "score_mod": adding(np.cos(X[0, 0, :, 0])),
        "mask_mod": lambda b, h, i, j: i != j + h,
    }
    found = computed(x, x, x, **options, backend="cpu")
    assert [f.name for f in compiled] == ["score_mod", "mask_mod"]
    assert_whole((X, X, X, options), found)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_a_function_that_fails_in_a_chunk_says_so(backend):
    x = da.from_array(X, chunks=(1, 2, 5, 3))
    with pytest.raises(IndexError, match="is out of bounds for axis 0 with size 5"):
        computed(x, x, x, score_mod=adding(np.zeros(5)), backend=backend)
    with pytest.raises(TypeError, match="mask_mod returned int64: expected bool, True where a"):
        computed(x, x, x, mask_mod=lambda b, h, i, j: j - i, backend=backend)


def test_stores_of_zarr_keep_their_chunks(tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra zarr)")
    k = zarr.create_array(tmp_path / "k", data=X, chunks=(1, 2, 5, 3))
    output = attention(X, k, k)
    assert output.chunks == ((1, 1), (2, 2), (12,), (3,))
    np.testing.assert_allclose(output, computed(X, X, X)[0])


def chunked(*sizes):
    return da.from_array(X, chunks=sizes)


K = chunked(1, 2, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        ((X, K, chunked(1, 2, 4, 3)), {}, ValueError,
         r"v is chunked along Lk as \(4, 4, 4\), but k as \(5, 5, 2\): every chunk of keys needs"),
        ((X, K, chunked(1, 4, 5, 3)), {}, ValueError, r"v is chunked along Hkv as \(4,\), but k"),
        ((chunked(2, 2, 5, 3), K, K), {}, ValueError, r"q is chunked along B as \(2,\), but k as"),
        ((chunked(1, 1, 5, 3), K, K), {}, ValueError,
         r"q is chunked along H as \(1, 1, 1, 1\), but k along Hkv as \(2, 2\): expected \(2, 2\)"),
        ((X, chunked(1, 2, 5, 2), K), {}, ValueError, r"k is chunked along its last axis, \(2, 1"),
        ((X, K, K[:, :, :11]), {}, ValueError, "v has Lk=11 but k has Lk=12"),
        ((X[:, :, :5], K, K), {"is_causal": True}, ValueError, "Lq=5 and Lk=12 needs q_offset"),
        ((X, K, K), {"attn_mask": da.ones((12, 11), dtype=bool)}, ValueError,
         r"attn_mask has shape \(12, 11\): expected"),
        ((X, K, K), {"attn_mask": da.ones((12, 12))}, TypeError, "attn_mask has dtype float64"),
        ((X, K, K), {"backend": "gpu"}, ValueError, "backend is 'gpu': expected auto"),
        ((X, K, K), {"return_lse": 1}, TypeError, "return_lse is 1: expected True or False"),
        ((X, K[K[:, 0, 0, 0] > 9], K), {}, ValueError, "k has chunks of unknown sizes: call its"),
        ((K, K, K), {"stripes": 2}, ValueError, r"q has chunks \(5, 5, 2\) of 2 stripes: expected"),
        ((K, K, K), {"stripes": 0}, ValueError, "stripes is 0: expected an integer of at least 1"),
        ((X, X, X), {"stripes": 2, "alibi_slopes": np.ones(4)}, ValueError,
         "alibi_slopes with stripes needs is_causal=True: among keys on both sides"),
        ((X, X, X), {"stripes": 2, "q_offset": [0, 1]}, ValueError, r"q_offset is \[0, 1\]: with"),
        ((X, X, X), {"stripes": 2, "score_mod": lambda s, b, h, i, j: s}, ValueError,
         "score_mod is given with stripes: expected tokens in their original order"),
        ((X, K, K), {"score_mod": lambda s: s}, TypeError, r"score_mod takes \(s\): expected 5"),
        ((X, K, K), {"mask_mod": block_mask(lambda b, h, i, j: i > j, 12, 9)}, ValueError,
         "mask_mod is a BlockMask for"),
        ((X, K, K), {"tap": print}, TypeError, "tap is no option for keys in files or on clusters"),
        ((X, K, K), {"k_scale": 1.0}, TypeError, "k_scale is no option on clusters"),
        (([["a"]], K, K), {}, TypeError, "q has dtype <U1: expected integers, float16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(arguments, options, error, sentence):
    with pytest.raises(error, match=sentence):
        attention(*arguments, **options)


def test_more_stripes_than_tokens_are_refused():
    with pytest.raises(ValueError, match="count is 5: expected at most 4, the number of tokens"):
        striped(np.ones((4, 1)), 5)
