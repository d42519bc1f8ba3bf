"""Packed and paged sequences on every backend, against the oracle called once for each sequence."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import MASK_MODS, SCORE_MODS, earlier, naive_attention, near, of_parity, run

from minimha import BackendUnavailable, attention, block_mask
from minimha.equations.problem import Problem
from minimha.explain import Trace
from minimha.kernels.cpu import backend, rung4_parallel, rung5_decode
from minimha.kernels.ladder import LADDER

BACKENDS = ("dense", "tiled", *LADDER)
inf = np.inf


def cumulative(lengths):
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def in_pages(rng, keys, values, page_size):
    """The sequences' keys and values in a pool of pages in random order, NaN where nothing is."""
    needed = [-(-k.shape[1] // page_size) for k in keys]
    pages = rng.permutation(sum(needed) + 2)
    table = np.full((len(keys), max(needed, default=0) + 1), -1)
    pool_k, pool_v = (
        np.full((len(pages), x[0].shape[0], page_size, x[0].shape[2]), np.nan, x[0].dtype)
        for x in (keys, values)
    )
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        table[s, : needed[s]], pages = pages[: needed[s]], pages[needed[s] :]
        for j in range(k.shape[1]):
            at = table[s, j // page_size], slice(None), j % page_size
            pool_k[at], pool_v[at] = k[:, j], v[:, j]
    return pool_k, pool_v, table


def one_by_one(q, keys, values, starts, offsets, options):
    """The oracle's output and log-sum-exp of each sequence, put together again."""
    output, lse = np.zeros((*q.shape[:2], values[0].shape[2])), np.zeros(q.shape[:2])
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(starts[s], starts[s + 1])
        given = options | {"q_offset": int(offsets[s])} | _of_sequence(s, options)
        if options["key_indices"] is not None:
            given["key_indices"] = options["key_indices"][:, :, rows]
        found = naive_attention(q[None, :, rows], k[None], v[None], **given)
        output[:, rows], lse[:, rows] = (x[0] for x in found)
    return output[None], lse[None]


def _of_sequence(s, options):
    """The functions of ``options``, which get the number of the sequence as b."""
    score_mod, mask_mod = options["score_mod"], options["mask_mod"]
    return {
        "score_mod": score_mod and (lambda x, b, h, i, j: score_mod(x, s, h, i, j)),
        "mask_mod": mask_mod and (lambda b, h, i, j: mask_mod(s, h, i, j)),
    }


@st.composite
def sequences(draw, most=4, longest=9, dtype=np.float64):
    """q (H, L, D), the keys and values of each sequence, their starts in q, offsets, options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_queries = draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))
    num_keys = [draw(st.integers(0, longest + 3)) for _ in num_queries]
    Hkv, group, D, Dv = (draw(st.integers(1, n)) for n in (2, 3, 5, 4))
    H = Hkv * group
    q = rng.normal(size=(H, sum(num_queries), D)).astype(dtype)
    keys = [rng.normal(size=(Hkv, n, D)).astype(dtype) for n in num_keys]
    values = [rng.normal(size=(Hkv, n, Dv)).astype(dtype) for n in num_keys]
    offsets = np.subtract(num_keys, num_queries)
    side = st.none() | st.integers(0, 4)
    shape = draw(st.sampled_from([1, Hkv])), draw(st.integers(0, 6))
    picks = [
        rng.integers(-1, n, (shape[0], m, shape[1]))
        for m, n in zip(num_queries, num_keys, strict=True)
    ]
    options = {
        "key_indices": np.concatenate(picks, axis=1)[None] if draw(st.booleans()) else None,
        "is_causal": draw(st.booleans()),
        "window_size": draw(st.none() | st.tuples(side, side)),
        "alibi_slopes": rng.random(H).astype(dtype) if draw(st.booleans()) else None,
        "sinks": rng.normal(size=H).astype(dtype) if draw(st.booleans()) else None,
        "softcap": draw(st.none() | st.just(2.0)),
        "scale": draw(st.none() | st.just(-0.5)),
        "score_mod": draw(st.none() | st.sampled_from(SCORE_MODS)),
        "mask_mod": draw(st.none() | st.sampled_from(MASK_MODS)),
    }
    return rng, q, keys, values, cumulative(num_queries), offsets, options


def together(rng, keys, values, page_size=None):
    """k and v of all sequences, packed or in pages, and the options that say where each one is."""
    lengths = [k.shape[1] for k in keys]
    if page_size is None:
        k, v = (np.concatenate(x, axis=1)[None] for x in (keys, values))
        return k, v, {"cu_seqlens_k": cumulative(lengths)}
    k, v, table = in_pages(rng, keys, values, page_size)
    return k, v, {"block_table": table, "kv_lengths": np.array(lengths)}


def assert_as_one_by_one(name, problem, page_size=None):
    rng, q, keys, values, starts, offsets, options = problem
    expected = one_by_one(q, keys, values, starts, offsets, options)
    k, v, given = together(rng, keys, values, page_size)
    given |= options | {"cu_seqlens_q": starts, "q_offset": offsets}
    eps = np.finfo(q.dtype).eps
    for got, wanted in zip(run(name, q[None], k, v, **given), expected, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e4 * eps, atol=1e3 * eps)


@pytest.mark.parametrize("name", BACKENDS)
@given(problem=sequences())
def test_packed_sequences_do_not_see_each_other(name, problem):
    assert_as_one_by_one(name, problem)


@pytest.mark.parametrize("name", BACKENDS)
@given(problem=sequences(), page_size=st.integers(1, 8))
def test_paged_keys_are_found_wherever_they_are(name, problem, page_size):
    assert_as_one_by_one(name, problem, page_size)


def ragged(dtype=np.float32):
    """Sequences of less than a tile and of several, one without queries, one without keys."""
    rng = np.random.default_rng(0)
    num_queries, num_keys = [70, 0, 1, 9, 203], [70, 5, 900, 0, 400]
    q = rng.normal(size=(4, sum(num_queries), 20)).astype(dtype)
    keys, values = (
        [rng.normal(size=(2, n, width)).astype(dtype) for n in num_keys] for width in (20, 13)
    )
    return rng, q, keys, values, cumulative(num_queries), np.subtract(num_keys, num_queries)


OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (30, 5)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0], np.float32)},
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [None, 16, 200])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sequences_of_many_tiles(options, page_size, name):
    rng, q, keys, values, starts, offsets = ragged()
    exact = [
        run("dense", q[:, a:b].astype("f8"), k.astype("f8"), v.astype("f8"), q_offset=o, **options)
        for a, b, k, v, o in zip(starts, starts[1:], keys, values, offsets.tolist(), strict=False)
    ]
    k, v, given = together(rng, keys, values, page_size)
    given |= options | {"cu_seqlens_q": starts, "q_offset": offsets}
    output, lse = run(name, q[None], k, v, **given)
    np.testing.assert_allclose(output[0], np.concatenate([o for o, _ in exact], 1), atol=2e-6)
    np.testing.assert_allclose(lse[0], np.concatenate([l for _, l in exact], 1), atol=2e-5)


@pytest.mark.parametrize(
    "name", ["cpu.rung4_parallel", "cpu.rung5_decode", "cpu.rung6_matrix_unit"]
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("page_size", [None, 24, 5])
def test_16_bits_are_widened_page_by_page(page_size, dtype, name):
    rng, q, keys, values, starts, _ = ragged(dtype)
    exact = [
        run("dense", q[:, a:b].astype("f8"), k.astype("f8"), v.astype("f8"))[0]
        for a, b, k, v in zip(starts, starts[1:], keys, values, strict=False)
    ]
    k, v, given = together(rng, keys, values, page_size)
    output, _ = run(name, q[None], k, v, cu_seqlens_q=starts, **given)
    assert output.dtype == dtype
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    wanted = np.concatenate(exact, axis=1)
    atol = 2e-6
    if name == "cpu.rung6_matrix_unit":  # whose weights have 16 binary digits
        atol = 2.0**-16 * max(abs(x.astype("f4")).max(initial=0) for x in values)
    np.testing.assert_allclose(output[0].astype("f8"), wanted, rtol=half_step, atol=atol)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 64])
@pytest.mark.parametrize(("H", "Lq"), [(2, 1), (8, 1), (6, 2)])
def test_few_queries_decode_over_pages(H, Lq, page_size, dtype):
    rng, num_keys = np.random.default_rng(0), [2500, 2, 255, 272, 1001]
    q = rng.normal(size=(H, Lq * len(num_keys), 40)).astype(dtype)
    keys, values = (
        [rng.normal(size=(2, n, width)).astype(dtype) for n in num_keys] for width in (40, 36)
    )
    starts, offsets = np.arange(len(num_keys) + 1) * Lq, np.subtract(num_keys, Lq)
    exact = [
        run(
            "dense", q[:, a : a + Lq].astype("f8"), k.astype("f8"), v.astype("f8"),
            q_offset=o, is_causal=Lq > 1,
        )[0]
        for a, k, v, o in zip(starts, keys, values, offsets.tolist(), strict=False)
    ]  # fmt: skip
    k, v, given = together(rng, keys, values, page_size)
    given |= {"cu_seqlens_q": starts, "q_offset": offsets, "is_causal": Lq > 1}
    output, _ = run("cpu.rung5_decode", q[None], k, v, **given)
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    wanted = np.concatenate(exact, axis=1)
    np.testing.assert_allclose(output[0].astype("f8"), wanted, rtol=half_step, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pages_of_more_than_a_cache_holds(dtype):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 8, 1, 128)).astype(dtype)
    k, v = rng.normal(size=(2, 8, 8192, 128)).astype(dtype)
    pool = rng.permutation(512)
    pools = [np.empty((512, 8, 16, 128), dtype) for _ in range(2)]
    for X, pages in zip((k, v), pools, strict=True):
        pages[pool] = X.reshape(8, 512, 16, 128).swapaxes(0, 1)
    given = {"block_table": pool[None], "kv_lengths": [8190]}
    output, _ = run("cpu.rung5_decode", q, *pools, **given)
    wanted, _ = run("dense", *(x.astype("f8") for x in (q[0], k[:, :8190], v[:, :8190])))
    half_step = float(ml_dtypes.finfo(dtype).eps) / 2
    np.testing.assert_allclose(output[0].astype("f8"), wanted, rtol=half_step, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_that_are_not_finite_stay_in_their_sequence(name):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 300, 8)).astype(np.float32)
    starts = [0, 100, 150, 300]
    expected, _ = run(name, q, k, v, cu_seqlens_q=starts, is_causal=True)
    q[:, 120], k[:, 120], v[:, 120] = np.nan, inf, -inf
    output, _ = run(name, q, k, v, cu_seqlens_q=starts, is_causal=True)
    is_spoiled = np.zeros(300, bool)
    is_spoiled[120:150] = True
    np.testing.assert_array_equal(output[:, ~is_spoiled], expected[:, ~is_spoiled])
    assert not np.isfinite(output[:, is_spoiled]).all(-1).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_large_values_of_a_sequence_do_not_overflow_where_their_mean_does_not(name):
    q, k, v = np.zeros((3, 1, 64, 8), np.float32)
    v[:] = 3e38
    output, _ = run(name, q, k, v, cu_seqlens_q=[0, 4, 64])
    np.testing.assert_allclose(output, v, rtol=1e-6)
    paged = v.reshape(8, 1, 8, 8)
    table = np.arange(8)[None]
    output, _ = run(name, q[None], paged * 0, paged, block_table=table, kv_lengths=64)
    np.testing.assert_allclose(output, v[None], rtol=1e-6)


def test_rows_are_read_in_place_whatever_their_strides():
    rng, q, keys, values, starts, offsets = ragged()
    k, v, table = in_pages(rng, keys, values, 16)
    lengths = [k.shape[1] for k in keys]
    given = {"cu_seqlens_q": starts, "block_table": table, "kv_lengths": lengths,
             "q_offset": offsets, "is_causal": True, "backend": "cpu"}  # fmt: skip
    expected = attention(q[None], k, v, **given)
    by_row = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q[None], k, v)]
    np.testing.assert_array_equal(attention(*by_row, **given), expected)


def test_batch_entries_may_share_pages():
    q, pool = np.random.default_rng(0).normal(size=(2, 3, 2, 4, 5)).astype(np.float32)
    table, lengths = [[0, 1], [0, 2], [0, 0]], [8, 6, 3]
    output = attention(q, pool, pool, block_table=table, kv_lengths=lengths, backend="cpu")
    for b, (pages, length) in enumerate(zip(table, lengths, strict=True)):
        k = np.concatenate([pool[page] for page in pages], axis=1)[:, :length]
        np.testing.assert_allclose(output[b], attention(q[b], k, k), atol=1e-6)


def test_the_steps_of_a_sequence_have_its_number():
    q, k, v = np.random.default_rng(0).normal(size=(3, 5, 2))
    trace = Trace()
    output = attention(q, k, v, cu_seqlens_q=[0, 2, 5], is_causal=True, tap=trace)
    alone = Trace()
    attention(q[2:], k[2:], v[2:], is_causal=True, tap=alone)
    np.testing.assert_array_equal(trace["weights[sequence 1]"], alone["weights"])
    np.testing.assert_array_equal(trace["output"], output)


Q, K = np.ones((1, 2, 5, 3)), np.ones((1, 1, 6, 3))
PAGES = np.ones((4, 1, 2, 3))
REFUSED = [
    ({"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [1, 2, 6]}, ValueError,
     "cu_seqlens_k begins with 1: the first sequence begins at row 0"),
    ({"cu_seqlens_q": [0, 3, 2, 5], "cu_seqlens_k": [0, 2, 4, 6]}, ValueError,
     "cu_seqlens_q decreases from 3 to 2: it must be the running total of lengths, and sequence 1 "
     "would have -1 rows"),
    ({"cu_seqlens_q": [0, 2, 7], "cu_seqlens_k": [0, 2, 6]}, ValueError,
     "cu_seqlens_q ends with 7 but q has Lq=5: the last sequence ends with the last row"),
    ({"cu_seqlens_q": [0, 2, 5]}, ValueError, "cu_seqlens_q ends with 5 but k has Lk=6"),
    ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 1, 6]}, ValueError,
     "cu_seqlens_k has 3 entries but cu_seqlens_q has 2: both have one for each sequence"),
    ({"cu_seqlens_q": [0.0, 5]}, TypeError, "cu_seqlens_q has dtype float64: expected integers"),
    ({"cu_seqlens_q": [[0, 5]]}, ValueError, "cu_seqlens_q has shape (1, 2): expected (n + 1,)"),
    ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q has shape (0,): expected (n + 1,)"),
    ({"cu_seqlens_k": [0, 6]}, ValueError, "cu_seqlens_k is given without cu_seqlens_q"),
    ({"q": np.ones((2, 2, 5, 3)), "k": np.ones((2, 1, 6, 3)), "cu_seqlens_q": [0, 5]}, ValueError,
     "q has B=2: with cu_seqlens_q the sequences are packed one after another along Lq"),
    ({"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 6], "is_causal": True}, ValueError,
     "is_causal with Lq=3 and Lk=4 in sequence 1 needs q_offset"),
    ({"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 6], "q_offset": [1, 2, 3]}, ValueError,
     "q_offset has shape (3,)"),
    ({"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 6], "kv_lengths": [3, 3]}, ValueError,
     "kv_lengths is 3 for sequence 0: it has 2 keys"),
    ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6], "attn_mask": np.ones((5, 6), bool)},
     ValueError, "attn_mask is for one Lq and one Lk, but with cu_seqlens each sequence has other"),
    ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6], "attn_bias": np.ones((5, 6))},
     ValueError, "attn_bias is for one Lq"),
    ({"k": PAGES, "block_table": [[0, 9]], "kv_lengths": 3}, ValueError,
     "block_table[0, 1] is 9: expected a page from 0 to 3, since the 3 keys of sequence 0 take 2 "
     "pages of 2"),
    ({"k": PAGES, "block_table": [[-1, 0]], "kv_lengths": 1}, ValueError,
     "block_table[0, 0] is -1: expected a page from 0 to 3, since the 1 key of sequence 0 takes 1 "
     "page of 2"),
    ({"k": PAGES, "block_table": [[-(2**60), 0]], "kv_lengths": 1}, ValueError,
     "block_table[0, 0] is -1152921504606846976"),
    ({"k": PAGES, "block_table": [[0, 1]], "kv_lengths": 5}, ValueError,
     "kv_lengths is 5: expected integers from 0 to 4"),
    ({"k": PAGES, "block_table": [[0, 1]]}, ValueError, "block_table needs kv_lengths"),
    ({"k": PAGES, "block_table": [0, 1], "kv_lengths": 3}, ValueError,
     "block_table has shape (2,): expected (n, pages), the pages of each of n=1 sequences"),
    ({"k": PAGES, "block_table": [[0.5]], "kv_lengths": 1}, TypeError,
     "block_table has dtype float64: expected integers"),
    ({"k": PAGES[:, :, :0], "block_table": [[0]], "kv_lengths": 0}, ValueError,
     "k has pages of 0 keys: a page holds at least 1"),
    ({"k": PAGES, "block_table": [[0, 1]], "kv_lengths": 3, "cu_seqlens_q": [0, 5],
      "cu_seqlens_k": [0, 3]}, ValueError, "cu_seqlens_k is given with block_table"),
    ({"k": PAGES, "v": PAGES[:3], "block_table": [[0, 1]], "kv_lengths": 3}, ValueError,
     "v has 3 pages but k has 4: they must be equal"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "sentence"), REFUSED)
def test_refused_in_a_sentence(given, error, sentence):
    arrays = {"q": Q, "k": K} | given
    with pytest.raises(error) as caught:
        attention(**{"v": arrays["k"], **arrays})
    assert sentence in str(caught.value)


def test_a_batch_of_single_queries_is_decoded(monkeypatch):
    taken = []
    for rung in (rung4_parallel, rung5_decode):
        monkeypatch.setattr(rung, "plan", lambda problem, rung=rung: taken.append(rung))
    x = np.ones((1, 1, 20, 4), np.float32)
    for starts in (np.arange(21), [0, 8, 16, 20], [0, 9, 20], [0, 9, 12, 20]):
        backend.plan(Problem.of(x, x, x, cu_seqlens_q=starts))
    both = [rung4_parallel, rung5_decode]
    assert taken == [rung5_decode, rung5_decode, rung4_parallel, *both]


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("mask_mod", [None, of_parity])
def test_some_sequences_are_decoded_while_others_are_not(page_size, mask_mod):
    rng, q, keys, values, starts, offsets = ragged()
    lengths = [k.shape[1] for k in keys]
    given = {"cu_seqlens_q": starts, "q_offset": offsets, "is_causal": True, "mask_mod": mask_mod}
    k, v = (np.concatenate(x, axis=1)[None] for x in (keys, values))
    packed = given | {"cu_seqlens_k": cumulative(lengths)}
    expected = run("dense", q[None], k, v, **packed)
    if page_size is not None:
        k, v, table = in_pages(rng, keys, values, page_size)
        packed = given | {"block_table": table, "kv_lengths": lengths}
    for got, wanted in zip(run("cpu.backend", q[None], k, v, **packed), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_gpu_takes_one_sequence_after_another(monkeypatch):
    pytest.importorskip("cuda.core", reason="needs numba-cuda and cuda-core")
    cuda = pytest.importorskip("minimha.kernels.cuda.backend")
    from minimha.equations import dense

    monkeypatch.setattr(cuda, "rung_for", lambda problem, device: ("", problem))
    monkeypatch.setattr(cuda.gpu, "current", lambda: None)
    monkeypatch.setattr(cuda, "solve", lambda name, problem: dense.forward(problem))
    q, k, v = np.random.default_rng(0).normal(size=(3, 5, 2))
    given = {"cu_seqlens_q": [0, 2, 2, 5], "is_causal": True, "mask_mod": of_parity}
    for got, wanted in zip(
        run("cuda.backend", q, k, v, **given), run("dense", q, k, v, **given), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", [list, np.array])
def test_packed_calls_are_planned_once_for_equal_starts(kind, monkeypatch):
    backend = pytest.importorskip("minimha.kernels.cpu.backend", reason="numba is not installed")
    planned, plan = [], backend.plan
    monkeypatch.setattr(backend, "plan", lambda problem: planned.append(1) or plan(problem))
    x = np.random.default_rng(3).normal(size=(1, 2, 45, 8))
    starts, few = kind([0, 20, 45]), kind([0, 43, 45])
    for n, cu_seqlens_q in enumerate((starts, few, starts, few)):  # the last has queries to decode
        x = x + n
        given = {"cu_seqlens_q": cu_seqlens_q, "is_causal": True, "return_lse": True}
        found, exact = (attention(x, x, x, **given, backend=name) for name in ("cpu", "dense"))
        for ours, wanted in zip(found, exact, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-9, atol=1e-12)
    assert len(planned) == 2
    starts[1] = 21
    given["cu_seqlens_q"] = starts
    found, exact = (attention(x, x, x, **given, backend=name) for name in ("cpu", "dense"))
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-9, atol=1e-12)
    assert len(planned) == 3


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("mask_mod", [earlier, near, of_parity])
def test_a_block_mask_covers_all_sequences(mask_mod, page_size, name):
    rng, q, keys, values, starts, offsets = ragged()
    k, v, given = together(rng, keys, values, page_size)
    given |= {"cu_seqlens_q": starts, "q_offset": offsets + 203}
    expected = run(name, q[None], k, v, mask_mod=mask_mod, **given)
    sizes = {} if mask_mod is not of_parity else {"B": 5, "H": 4}
    # rows of the mask from -3 on: all sequences begin in the middle of a block of 16 queries
    blocks = block_mask(mask_mod, 1200, 900, q_offset=-3, **sizes)
    found = run(name, q[None], k, v, mask_mod=blocks, **given)
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


def test_a_block_mask_that_lacks_positions_of_a_sequence_is_refused():
    given = {"cu_seqlens_q": [0, 2, 5], "q_offset": [0, 4]}
    for sizes in ((6, 3, 0), (7, 2, 0), (7, 3, 1)):
        with pytest.raises(ValueError, match="mask_mod is a BlockMask for queries at positions"):
            attention(Q, Q, Q, mask_mod=block_mask(earlier, *sizes[:2], q_offset=sizes[2]), **given)
    attention(Q, Q, Q, mask_mod=block_mask(earlier, 7, 3), **given)
    with pytest.raises(ValueError, match="BlockMask for B=3 and H=1: expected B=2, the number of"):
        attention(Q, Q, Q, mask_mod=block_mask(earlier, 7, 3, B=3), **given)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_over_pages_count_the_keys_of_a_sequence(is_packed, name):
    rng = np.random.default_rng(0)
    lengths, Lk = [20, 7, 0], 33  # the table has room for 40
    q = rng.normal(size=(3, 4, 6, 5))
    keys, values = ([rng.normal(size=(2, n, 5)) for n in lengths] for _ in range(2))
    k, v, table = in_pages(rng, keys, values, 8)
    table = np.pad(table, ((0, 0), (0, 5 - table.shape[1])))
    mask, bias = rng.random((3, 4, 6, Lk)) < 0.6, rng.normal(size=(3, 1, 6, Lk))
    bias[rng.random(bias.shape) < 0.1] = -inf
    given = {"block_table": table, "kv_lengths": lengths, "is_causal": True, "q_offset": [14, 1, 0]}
    pairs = {"attn_mask": mask, "attn_bias": bias}
    if is_packed:
        q, pairs = end_to_end(q), {name: end_to_end(x) for name, x in pairs.items()}
        given["cu_seqlens_q"] = [0, 6, 12, 18]
    output, lse = run(name, q, k, v, **pairs, **given)
    for s, length in enumerate(lengths):
        at = (slice(0, 1), slice(None), slice(6 * s, 6 * s + 6)) if is_packed else slice(s, s + 1)
        of_sequence = {
            name: np.broadcast_to(x, (*x.shape[:1], 4, *x.shape[2:]))[at][..., :length]
            for name, x in pairs.items()
        }
        expected = naive_attention(
            q[at], keys[s][None], values[s][None], is_causal=True, q_offset=given["q_offset"][s],
            **of_sequence,
        )  # fmt: skip
        np.testing.assert_allclose(output[at], expected[0], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(lse[at], expected[1], rtol=1e-10)


def end_to_end(x):
    """The batch entries of x (B, H, L, any) one after another along L."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


@pytest.mark.parametrize("last", [1, 3, 4])
def test_a_mask_over_pages_may_end_with_the_longest_sequence_or_with_the_table(last):
    given = {"block_table": [[0, 1]], "kv_lengths": 3}
    mask = np.arange(last) < 2
    output = attention(Q, PAGES, PAGES, attn_mask=np.broadcast_to(mask, (1, 1, 5, last)), **given)
    np.testing.assert_allclose(output, 1)
    for short in (2, 5):
        sentence = f"attn_mask has shape \\(5, {short}\\): .* here \\(5, 4\\)"
        with pytest.raises(ValueError, match=sentence):
            attention(Q, PAGES, PAGES, attn_mask=np.ones((5, short), bool), **given)


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@pytest.mark.parametrize("poison", [np.nan, inf])
def test_keys_in_pages_that_no_query_picks_are_not_read(poison, backend):
    rng, q, keys, values, _, _ = ragged(np.float64)
    k, v, given = together(rng, keys[2:3], values[2:3], 16)
    picks = rng.integers(0, 900, (1, 2, 1, 40))
    given |= {"key_indices": picks, "backend": backend}
    expected = attention(q[None, :, :1], k, v, **given)
    others = np.setdiff1d(np.arange(900), picks)
    pages, at = given["block_table"][0][others // 16], others % 16
    k[pages, :, at], v[pages, :, at] = poison, poison
    np.testing.assert_allclose(attention(q[None, :, :1], k, v, **given), expected, rtol=1e-12)


def test_indices_count_the_keys_of_their_sequence():
    given = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 6]}
    attention(Q, K, K, key_indices=[[1], [0], [3], [-1], [2]], **given)
    sentence = "key_indices has 2 for query 1: expected -1 for no key, or a key from 0 to 1"
    with pytest.raises(ValueError, match=sentence):
        attention(Q, K, K, key_indices=[[1], [2], [3], [-1], [2]], **given)
    with pytest.raises(ValueError, match="key_indices has 0 for query 4: expected -1"):
        attention(Q, K, K, key_indices=[[0]] * 5, cu_seqlens_q=[0, 4, 5], cu_seqlens_k=[0, 6, 6])


def test_what_a_function_raises_for_a_sequence_is_raised():
    table = np.zeros(1)
    with pytest.raises(IndexError, match="index 1 is out of bounds"):
        attention(
            Q, Q, Q, cu_seqlens_q=[0, 2, 5], backend="cpu",
            score_mod=lambda s, b, h, i, j: s + table[b],
        )  # fmt: skip


def test_a_traced_function_has_its_source_in_each_sequence():
    trace = Trace()
    attention(Q, Q, Q, cu_seqlens_q=[0, 2, 5], alibi_slopes=[1, 2], mask_mod=of_parity, tap=trace)
    step = next(step for step in trace.steps if step.name == "masked[sequence 1]")
    assert "return (i + j + b) % 2 == h % 2" in step.note
    assert "distances[sequence 1]" in trace
    seen = np.isfinite(trace["masked[sequence 1]"][0])
    np.testing.assert_array_equal(seen, [[0, 1, 0], [1, 0, 1], [0, 1, 0]])  # i + j + 1 is even


def test_arrays_on_a_gpu_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("minimha.equations.arrays.ordinal_of", lambda x: 0 if x is Q else None)
    with pytest.raises(BackendUnavailable, match="cu_seqlens_q needs one launch for each sequence"):
        attention(Q, Q, Q, cu_seqlens_q=[0, 5])
    with pytest.raises(
        BackendUnavailable, match="key_indices needs a kernel that reads only some keys"
    ):
        attention(Q, Q, Q, key_indices=[[0]] * 5)


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_what_a_table_holds_after_the_last_key_is_not_read(backend, dtype):
    q, kv = np.random.default_rng(5).normal(size=(2, 4, 1, 2, 3))
    largest = np.iinfo(dtype).max
    for table in ([[0, largest], [1, 3]], [[0, largest - 2**62], [1, 3]]):
        found = attention(
            q[:2], kv, kv, block_table=np.array(table, dtype), kv_lengths=[2, 3], backend=backend
        )
        first = attention(q[:1], kv[:1], kv[:1], backend=backend)
        np.testing.assert_allclose(found[:1], first, rtol=1e-12)
