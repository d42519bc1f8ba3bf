"""A cache changes when keys are computed, never what attention gives."""

import naive
import numpy as np
import pytest

from minimha import attention
from minimha.layers.cache import KVCache

RNG = np.random.default_rng(0)
B, H, HKV, L, D, DV = 2, 4, 2, 12, 8, 6
Q = RNG.normal(size=(B, H, L, D))
K = RNG.normal(size=(B, HKV, L, D))
V = RNG.normal(size=(B, HKV, L, DV))
CHUNKS = [[12], [5, 7], [1] * 12, [3, 1, 1, 4, 3], [0, 6, 0, 6]]
OPTIONS = [
    {},
    {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    {"softcap": 2.0, "sinks": [0.0, 1.0, -1.0, 0.5], "scale": 0.3},
]


def new(**options):
    return KVCache(**{
        "batch": B, "num_kv_heads": HKV, "capacity": L, "head_dim": D, "value_dim": DV,
        "dtype": np.float64,
    } | options)  # fmt: skip


def in_chunks(cache, chunks, q=Q, k=K, v=V, **options):
    outputs, start = [], 0
    for size in chunks:
        part = np.s_[:, :, start : start + size]
        cache.append(k[part], v[part])
        outputs.append(cache.attend(q[part], **options))
        start += size
    return np.concatenate(outputs, axis=2)


def close(got, expected, dtype=np.float64):
    """Equal but for the order of sums: outputs are means of values of size 1."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
def test_any_chunks_give_the_full_forward(chunks, options, backend):
    full = attention(Q, K, V, is_causal=True, backend=backend, **options)
    close(in_chunks(new(), chunks, backend=backend, **options), full)


@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
def test_one_chunk_is_the_full_forward_bit_for_bit(backend):
    full = attention(Q, K, V, is_causal=True, backend=backend)
    np.testing.assert_array_equal(in_chunks(new(), [L], backend=backend), full)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_narrow_dtypes(dtype, chunks):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    got = in_chunks(new(dtype=dtype), chunks, q, k, v)
    assert got.dtype == dtype
    close(got, attention(q, k, v, is_causal=True), dtype)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_decoding_against_loops(window):
    cache = new(window=window)
    limits = (None, 0) if window is None else (window - 1, 0)
    expected, _ = naive.attention(Q.tolist(), K.tolist(), V.tolist(), window_size=limits)
    close(in_chunks(cache, [1] * L), expected)


@pytest.mark.parametrize(
    ("window", "capacity", "chunks"),
    [
        (1, 1, [1] * 12),
        (4, 4, [1] * 12),
        (4, 4, [4] + [1] * 8),
        (4, 6, [3, 3, 3, 3]),
        (4, 6, [6, 1, 3, 2]),
        (3, 7, [5, 5, 2]),
        (12, 12, [5, 7]),
    ],
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
def test_a_ring_of_limited_size_gives_the_full_forward_with_a_window(
    window, capacity, chunks, options, backend
):
    full = attention(Q, K, V, window_size=(window - 1, 0), backend=backend, **options)
    cache = new(window=window, capacity=capacity)
    close(in_chunks(cache, chunks, backend=backend, **options), full)
    assert cache.lengths.tolist() == [12, 12]


@pytest.mark.parametrize(("window", "capacity"), [(None, 12), (4, 8)])
def test_batch_entries_of_different_lengths(window, capacity):
    cache, steps = new(window=window, capacity=capacity), [([5, 2], 5), ([1, 1], 1), ([0, 3], 3)]
    padding = np.full((B, HKV, 5, D), np.nan)
    done = np.zeros(B, int)
    limits = None if window is None else (window - 1, 0)
    for counts, size in steps:
        q, k, v = np.zeros((B, H, size, D)), padding[:, :, :size].copy(), padding[:, :, :size, :DV]
        v = v.copy()
        for b, n in enumerate(counts):
            part = slice(done[b], done[b] + n)
            q[b, :, :n], k[b, :, :n], v[b, :, :n] = Q[b, :, part], K[b, :, part], V[b, :, part]
        cache.append(k, v, lengths=counts)
        output = cache.attend(q)
        for b, n in enumerate(counts):
            whole = slice(0, done[b] + n)
            full = attention(
                Q[b, :, whole], K[b, :, whole], V[b, :, whole], is_causal=True, window_size=limits
            )
            close(output[b, :, :n], full[:, done[b] :])
        done += counts
    assert cache.lengths.tolist() == [6, 6]


def test_padding_sees_no_more_than_the_tokens_that_are_there():
    cache = new()
    cache.append(K[:, :, :5], V[:, :, :5], lengths=[5, 2])
    output = cache.attend(np.zeros((B, H, 5, D)))
    close(output[1, :, 4], V[1, :, :2].mean(axis=1).repeat(2, axis=0))


@pytest.mark.parametrize("window", [None, 4])
def test_padding_takes_no_room(window):
    full = attention(Q, K, V, window_size=(None if window is None else window - 1, 0))
    cache = new(window=window, capacity=window or L)
    in_chunks(cache, [1] * 9)
    for t in range(9, L):
        k, v = np.full((B, HKV, 4, D), np.nan), np.full((B, HKV, 4, DV), np.nan)
        k[:, :, 0], v[:, :, 0] = K[:, :, t], V[:, :, t]
        cache.append(k, v, lengths=[1, 1])
        output = cache.attend(Q[:, :, [t] * 4])
        close(output[:, :, 0], full[:, :, t])


def test_log_sum_exp_and_steps_come_along():
    cache, names = new(), []
    cache.append(K, V)
    output, lse = cache.attend(
        Q, return_lse=True, tap=lambda name, value: names.append(name) or value
    )
    expected = attention(Q, K, V, is_causal=True, return_lse=True)
    close(output, expected[0])
    close(lse, expected[1])
    assert names[:4] == ["q", "k", "v", "scores"]


def test_a_mask_covers_the_keys_at_key_positions():
    hidden = 9
    cache = new(window=4, capacity=5)
    for t in range(L):
        cache.append(K[:, :, t : t + 1], V[:, :, t : t + 1])
    assert cache.key_positions.tolist() == [[7, 8, 9, 10, 11]] * 2
    got = cache.attend(Q[:, :, -1:], attn_mask=cache.key_positions[:1] != hidden)
    mask = np.arange(L) != hidden
    full = attention(Q, K, V, window_size=(3, 0), attn_mask=np.broadcast_to(mask, (L, L)))
    close(got, full[:, :, -1:])


def test_positions_of_ragged_entries():
    cache = new()
    cache.append(K[:, :, :3], V[:, :, :3], lengths=[3, 1])
    assert cache.key_positions.tolist() == [[0, 1, 2], [0, -1, -1]]


def test_what_is_given_is_copied():
    k, v, cache = K.copy(), V.copy(), new()
    cache.append(k, v)
    k[:], v[:] = 0, 0
    cache.lengths[:] = 0
    close(cache.attend(Q), attention(Q, K, V, is_causal=True))


@pytest.mark.parametrize(("window", "capacity", "held"), [(None, L, 5), (4, 7, 5), (4, 6, 9)])
def test_a_tap_cannot_erase_what_is_kept(window, capacity, held):
    def erase(name, value):
        if name in ("k", "v") and value.flags.writeable:
            value *= 0
        return value

    cache = new(window=window, capacity=capacity)
    in_chunks(cache, [3, 1, 1, 1, 1, 1, 1][: held - 2])
    last = np.s_[:, :, held - 1 : held]
    before = cache.attend(Q[last])
    cache.attend(Q[last], tap=erase)
    np.testing.assert_array_equal(cache.attend(Q[last]), before)


def undone(cache, size):
    """``cache`` after another chunk came and went."""
    junk = np.full((B, HKV, size, D), 1e9)
    cache.append(junk, junk[..., :DV])
    cache.undo()
    return cache


@pytest.mark.parametrize(
    ("window", "capacity", "chunks"),
    [(None, L, [3, 4, 5]), (4, 4, [1] * 12), (4, 6, [3, 3, 3, 3]), (4, 6, [6, 1, 3, 2])],
)
def test_a_chunk_that_is_taken_back_leaves_no_trace(window, capacity, chunks):
    full = attention(Q, K, V, is_causal=True, window_size=window and (window - 1, 0))
    cache, start = new(window=window, capacity=capacity), 0
    for size in chunks:
        part = np.s_[:, :, start : start + size]
        undone(cache, size)
        assert cache.lengths.tolist() == [start] * B
        cache.append(K[part], V[part])
        close(cache.attend(Q[part]), full[part])
        start += size


def test_only_the_last_chunk_is_taken_back_and_has_no_queries():
    cache = new()
    cache.undo()
    cache.append(K[:, :, :3], V[:, :, :3], lengths=[3, 2])
    undone(undone(cache, 2), 1).undo()
    assert cache.lengths.tolist() == [3, 2]
    assert cache.key_positions.tolist() == [[0, 1, 2], [0, 1, -1]]
    with pytest.raises(ValueError, match="with L=0, the queries of the chunk"):
        cache.attend(Q[:, :, :3])


@pytest.mark.parametrize(
    ("options", "held", "k", "v", "how", "error", "sentence"),
    [
        ({"capacity": 8}, 5, K[:, :, :4], V[:, :, :4], {}, ValueError,
         "k has 4 tokens for batch entry 0, which holds 5: together they exceed capacity=8"),
        ({"capacity": 8}, 5, K[:, :, :4], V[:, :, :4], {"lengths": [3, 4]}, ValueError,
         "k has 4 tokens for batch entry 1, which holds 5"),
        ({"capacity": 6, "window": 4}, 5, K[:, :, :4], V[:, :, :4], {}, ValueError,
         "which holds 3 that a window of 4 still sees: together they exceed capacity=6"),
        ({"capacity": 6, "window": 4}, 0, K[:, :, :7], V[:, :, :7], {}, ValueError,
         "k has 7 tokens for batch entry 0: they exceed capacity=6"),
        ({}, 5, K.astype("f4"), V, {}, TypeError, "k has dtype float32 but the cache has float64"),
        ({}, 5, K[:, :, :4], V[:, :, :4].astype("f2"), {}, TypeError, "v has dtype float16 but"),
        ({}, 5, Q, V, {}, ValueError, "k has Hkv=4 but the cache has Hkv=2: expected (2, 2, L, 8)"),
        ({}, 5, K[:1], V, {}, ValueError, "k has B=1 but the cache has B=2"),
        ({}, 5, K, K, {}, ValueError, "v has Dv=8 but the cache has Dv=6"),
        ({}, 5, K[0], V[0], {}, ValueError, "k has shape (2, 12, 8): expected (B, Hkv, L, D)"),
        ({}, 5, K[:, :, :3], V[:, :, :2], {}, ValueError, "v has L=2 but k has L=3: every key"),
        ({}, 5, K[:, :, :3], V[:, :, :3], {"lengths": [4, 0]}, ValueError, "expected integers fro"),
        ({}, 5, K[:, :, :3], V[:, :, :3], {"lengths": [1]}, ValueError, "lengths has shape (1,)"),
        ({}, 5, K[:, :, :3], V[:, :, :3], {"lengths": [1.0, 2]}, TypeError,
         "lengths has dtype float64: expected integers"),
        ({}, 5, K[:, :, :3], V[:, :, :3], {"lengths": [[1], [1, 2]]}, ValueError,
         "lengths is not a rectangular array of numbers"),
    ],
)  # fmt: skip
def test_a_refused_chunk_loses_nothing(options, held, k, v, how, error, sentence):
    cache = new(**options)
    cache.append(K[:, :, :held], V[:, :, :held])
    before = cache.attend(Q[:, :, :held])
    with pytest.raises(error) as raised:
        cache.append(k, v, **how)
    assert sentence in str(raised.value)
    assert cache.lengths.tolist() == [held] * B
    np.testing.assert_array_equal(cache.attend(Q[:, :, :held]), before)


@pytest.mark.parametrize(
    ("q", "options", "error", "sentence"),
    [
        (Q, {}, ValueError, "expected (B, H, L, D) with L=5, the queries of the chunk"),
        (Q[0, 0, :5], {}, ValueError, "q has shape (5, 8): expected (B, H, L, D)"),
        (Q[:, :3, :5], {}, ValueError, "k has 2 heads but q has 3"),
        (Q[:, :, :5], {"is_causal": False}, TypeError, "is_causal is no option of attend"),
        (
            Q[:, :, :5],
            {"q_offset": 0},
            TypeError,
            "q_offset is no option of attend: the cache decides",
        ),
    ],
)
def test_queries_that_do_not_fit(q, options, error, sentence):
    cache = new()
    cache.append(K[:, :, :5], V[:, :, :5])
    with pytest.raises(error) as raised:
        cache.attend(q, **options)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"capacity": 0}, ValueError, "capacity is 0: expected an integer of at least 1"),
        ({"batch": 1.0}, TypeError, "batch is 1.0: expected an integer"),
        ({"window": True}, TypeError, "window is True: expected an integer"),
        ({"window": 13}, ValueError, "window is 13 but capacity is 12"),
        ({"dtype": np.int64}, TypeError, "dtype is int64: expected one of float16, bfloat16"),
        ({"dtype": "floot"}, TypeError, "dtype is floot: expected one of float16, bfloat16"),
    ],
)
def test_a_cache_that_cannot_be(options, error, sentence):
    with pytest.raises(error) as raised:
        new(**options)
    assert sentence in str(raised.value)


def test_functions_of_positions_are_refused_where_a_window_slides():
    x = np.ones((1, 1, 1, 2), np.float32)
    cache, sliding = KVCache(1, 1, 10, 2), KVCache(1, 1, 10, 2, window=10)
    for one in (cache, sliding):
        one.append(x, x)
    cache.attend(x, score_mod=lambda s, b, h, i, j: s + i)
    with pytest.raises(ValueError, match="score_mod is given to a cache with a window"):
        sliding.attend(x, score_mod=lambda s, b, h, i, j: s + i)


def test_dropping_old_tokens_moves_the_others_once_in_a_capacity(monkeypatch):
    slides, slide = [], KVCache._slide
    monkeypatch.setattr(KVCache, "_slide", lambda cache: slides.append(slide(cache)))
    cache = KVCache(1, 1, 10, 2, window=10)
    x = np.ones((1, 1, 1, 2), np.float32)
    for _ in range(100):
        cache.append(x, x)
        cache.attend(x)
    assert len(slides) == 8  # at 20 tokens, and then whenever 10 more have come


def test_what_is_attended_to_is_not_copied():
    cache, x = KVCache(2, 1, 64, 32, window=64), np.ones((2, 1, 1, 32), np.float32)
    steps = {}
    for _ in range(150):
        cache.append(x, x)
    cache.attend(x, tap=lambda name, value: steps.setdefault(name, value))
    assert np.shares_memory(steps["k"], cache._arrays[0])
