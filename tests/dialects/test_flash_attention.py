"""flash-attention's conventions: errors and corner cases."""

import math
import tracemalloc

import numpy as np
import pytest
from problems import naive_attention

from minimha.dialects.flash_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

Q = np.zeros((1, 2, 1, 1))
V = np.array([2.0, 4.0, 9.0]).reshape(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 5]),
        ({"causal": True}, [3, 5]),
        ({"window_size": (0, -1)}, [6.5, 9]),
        ({"window_size": (0, 0), "sink_token_length": 1}, [3, 5.5]),
        ({"key_padding_mask": [[True, True, False]], "causal": True}, [2, 3]),
        ({"query_padding_mask": [[True, False]], "causal": True}, [5, 0]),
        ({"key_leftpad": [1]}, [6.5, 6.5]),
        ({"attention_chunk": 2}, [3, 9]),
    ],
)
def test_equal_scores_average_the_values_that_are_seen(options, expected):
    output, _ = flash_attn_func(Q, V * 0, V, **options)
    np.testing.assert_allclose(output.ravel(), expected, 1e-12)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"q": Q[0]}, ValueError, "q has shape (2, 1, 1): expected 4 axes (B, L, H, D)"),
        ({"k": V > 0}, TypeError, "k has dtype bool: expected integers, float16"),
        ({"k": V[:, :2]}, ValueError, "v has Lk=3 but k has Lk=2: every key needs one value"),
        ({"v": np.ones((1, 3, 2, 1))}, ValueError, "v has 2 heads but k has 1"),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale is 'big': expected a number"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf: expected a finite number"),
        ({"causal": 1}, TypeError, "causal is 1: expected True or False"),
        ({"window_size": 3}, ValueError, "window_size is 3: expected a pair (left, right)"),
        ({"window_size": (-2, 0)}, ValueError, "a side of window_size is -2: expected an integer"),
        ({"window_size": (1.5, 0), "sink_token_length": 1}, TypeError,
         "a side of window_size is 1.5: expected an integer"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0: expected a positive number"),
        ({"learnable_sink": [1.0, 2.0]}, ValueError, "learnable_sink has shape (2,): expected"),
        ({"learnable_sink": [math.nan]}, ValueError, "learnable_sink is [nan]: expected finite"),
        ({"query_padding_mask": [[True]]}, ValueError,
         "query_padding_mask has shape (1, 1): expected (B, L) = (1, 2)"),
        ({"key_padding_mask": [[1, 1, 0]]}, TypeError,
         "key_padding_mask has dtype int64: expected bool, True = keep; it looks like Hugging "
         "Face's attention_mask, where 1 = may attend"),
        ({"key_padding_mask": [[0, 0, -math.inf]]}, TypeError,
         "; it looks like the float masks of torch and ONNX, which are added: 0 = may attend"),
        ({"key_padding_mask": np.ones((1, 1, 2, 3), bool)}, ValueError,
         "; it looks like scaled_dot_product_attention's attn_mask, where True = may attend"),
        ({"key_padding_mask": np.ma.ones((1, 3), bool)}, TypeError,
         "key_padding_mask is a masked array, whose mask would be lost"),
        ({"key_padding_mask": [[True], [True, False]]}, ValueError,
         "key_padding_mask is not a rectangular array"),
        ({"key_leftpad": [4]}, ValueError, "key_leftpad is [4]: expected integers from 0 to 3,"),
        ({"key_leftpad": 1}, ValueError, "key_leftpad has shape (): expected (B,) = (1,)"),
        ({"key_leftpad": [1.0]}, TypeError, "key_leftpad has dtype float64: expected integers"),
        ({"key_leftpad": [[1], [1, 2]]}, ValueError, "key_leftpad is not a rectangular array"),
        ({"alibi_slopes": [1.0, 2.0]}, ValueError, "alibi_slopes has shape (2,): expected (H,) = "),
        ({"alibi_slopes": [math.inf]}, ValueError, "alibi_slopes is [inf]: expected finite"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk is -1: expected an integer of"),
        ({"sink_token_length": 0.5}, TypeError, "sink_token_length is 0.5: expected an integer"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(options, error, sentence):
    with pytest.raises(error) as caught:
        flash_attn_func(**{"q": Q, "k": V, "v": V, **options})
    assert sentence in str(caught.value)


def seen_by_definition(Lq, Lk, queries, keys, leftpad, causal, window, chunk, num_first):
    """flash-attention's rules for one batch entry, one pair at a time, in its own coordinates."""
    offset = sum(keys) - sum(queries)
    left, right = window
    seen = np.zeros((Lq, Lk), bool)
    for row in range(Lq):
        for column in range(Lk):
            i, j = row + offset, column - leftpad
            seen[row, column] = (
                queries[row]
                and keys[column]
                and j >= 0
                and not (causal and j > i)
                and (right < 0 or causal or j <= i + right)
                and (left < 0 or j >= i - left or j < num_first)
                and (not chunk or j // chunk == i // chunk)
            )
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_every_option_against_its_definition(seed):
    rng = np.random.default_rng(seed)
    B, Lq, Lk, Hkv, H = 2, *rng.integers(1, 9, 2).tolist(), *((1, 2), (2, 2))[seed % 2]
    q, k, v = (rng.normal(size=(B, L, h, 3)) for L, h in ((Lq, H), (Lk, Hkv), (Lk, Hkv)))
    causal, window = bool(rng.integers(2)), tuple(rng.integers(-1, 4, 2).tolist())
    chunk, num_first = (int(rng.choice([0, 0, 2, 5])) for _ in range(2))
    leftpad = rng.integers(0, Lk + 1, B) if rng.random() < 0.5 else np.zeros(B, int)
    masks = {}
    if rng.random() < 0.5:
        masks["query_padding_mask"] = rng.random((B, Lq)) < 0.7
    if rng.random() < 0.6:  # on the right, or anywhere
        ragged = np.arange(Lk) < rng.integers(0, Lk + 1, (B, 1))
        masks["key_padding_mask"] = ragged if rng.random() < 0.5 else rng.random((B, Lk)) < 0.7
    slopes = rng.random((B, H))
    queries = masks.get("query_padding_mask", np.ones((B, Lq), bool))
    keys = masks.get("key_padding_mask", np.ones((B, Lk), bool))
    seen = [
        seen_by_definition(
            Lq, Lk, queries[b], keys[b], leftpad[b], causal, window, chunk, num_first
        )
        for b in range(B)
    ]
    distance = np.arange(Lq)[:, None] - np.arange(Lk)
    offset = (keys.sum(1) - queries.sum(1) + leftpad)[:, None, None, None]
    bias = -slopes[:, :, None, None] * abs(distance + offset)
    sinks = rng.normal(size=H)
    expected = naive_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), attn_mask=np.array(seen)[:, None], attn_bias=bias,
        sinks=sinks, softcap=3.0,
    )  # fmt: skip
    output, lse = flash_attn_func(
        q, k, v, causal=causal, window_size=window, key_leftpad=leftpad, attention_chunk=chunk,
        sink_token_length=num_first, alibi_slopes=slopes, learnable_sink=sinks, softcap=3.0,
        **masks,
    )  # fmt: skip
    np.testing.assert_allclose(output.swapaxes(1, 2), expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("slopes", [None, (4,), (4, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_those_of_separate_calls(is_paged, slopes, causal):
    rng = np.random.default_rng(0)
    num_queries, num_keys = [3, 0, 1, 5], [3, 2, 7, 4]
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (num_queries, num_keys))
    q, k, v = (rng.normal(size=(n, h, 3)) for n, h in ((9, 4), (16, 2), (16, 2)))
    options = {"causal": causal, "window_size": (4, -1), "softcap": 2.0}
    slopes = None if slopes is None else rng.random(slopes)
    given, keys = {}, (k, v)
    if is_paged:  # pages of 4, the first two keys of the second sequence in page 2, and so on
        table = np.array([[0, -1], [2, -1], [5, 1], [4, -1]])
        keys = np.full((2, 6, 4, 2, 3), np.nan)
        for s, length in enumerate(num_keys):
            for j in range(length):
                for pool, x in zip(keys, (k, v), strict=True):
                    pool[table[s, j // 4], j % 4] = x[cu_k[s] + j]
        given = {"block_table": table}
    output, lse = flash_attn_varlen_func(
        q, *keys, cu_q, cu_k, 5, 7, alibi_slopes=slopes, **options, **given
    )
    for s in range(4):
        rows, its = slice(*cu_q[s : s + 2]), slice(*cu_k[s : s + 2])
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[s]
        alone = flash_attn_func(
            q[None, rows], k[None, its], v[None, its], alibi_slopes=own, **options
        )
        np.testing.assert_allclose(output[rows], alone[0][0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(lse[:, rows], alone[1][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"q": Q}, ValueError, "q has shape (1, 2, 1, 1): expected 3 axes (Lq, H, D)"),
        ({"k": Q}, ValueError, "k has shape (1, 2, 1, 1): expected 3 axes (L, H, D)"),
        ({"cu_seqlens_q": [0, 1]}, ValueError, "cu_seqlens_q ends with 1 but q has Lq=2"),
        ({"cu_seqlens_k": [0, 1, 3]}, ValueError, "cu_seqlens_k has 3 entries but cu_seqlens_q"),
        ({"cu_seqlens_k": [1, 3]}, ValueError, "cu_seqlens_k begins with 1"),
        ({"cu_seqlens_k": [0.0, 3]}, TypeError, "cu_seqlens_k has dtype float64"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q is 1 but a sequence of cu_seqlens_q has"),
        ({"alibi_slopes": [[1.0], [1.0]]}, ValueError,
         "alibi_slopes has shape (2, 1): expected (H,) = (1,) or (B, H) = (1, 1)"),
    ],
)  # fmt: skip
def test_packed_sequences_that_do_not_fit_are_named(options, error, sentence):
    given = {"q": Q[0], "k": V[0], "v": V[0], "cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 3]}
    with pytest.raises(error) as caught:
        flash_attn_varlen_func(**given | options)
    assert sentence in str(caught.value)


def test_no_mask_of_all_pairs_is_built():
    L, H, D = 4096, 1, 4
    q = np.ones((1, L, H, D), np.float32)
    flash_attn_func(q, q, q, causal=True, window_size=(8, 0), backend="cpu")
    tracemalloc.start()
    flash_attn_func(
        q, q, q, causal=True, window_size=(8, 0), key_leftpad=[5], alibi_slopes=[[0.5]],
        attention_chunk=1024, sink_token_length=4, key_padding_mask=np.ones((1, L), bool),
        backend="cpu",
    )  # fmt: skip
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < L * L / 8


def turned(x, cos, sin, positions, interleaved):
    """x (..., L, D) with its first numbers rotated, pair by pair as complex numbers."""
    y, R = np.array(x), 2 * cos.shape[1]
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (
        slice(0, R // 2), slice(R // 2, R)
    )  # fmt: skip
    pairs = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin)[positions]
    y[..., first], y[..., second] = pairs.real, pairs.imag
    return y


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("seed", range(40))
def test_a_cache_is_written_and_attended_to(seed, backend):
    rng = np.random.default_rng(seed)
    B, H, Hkv, D, page, pages = 3, 4, 2, 4, 5, 4
    kind = ("entries", "chosen entries", "padded entries", "pages")[seed % 4]
    Lq, L = (int(n) for n in rng.integers(1, 5, 2))
    room = page * pages
    shape = (B * pages + 2, page, Hkv, D) if kind == "pages" else (B + 2, room, Hkv, D)
    caches = rng.normal(size=(2, *shape))
    table, given = np.arange(B)[:, None], {}
    if kind == "pages":
        table = given["block_table"] = rng.permutation(shape[0])[: B * pages].reshape(B, pages)
    elif kind == "chosen entries":
        given["cache_batch_idx"] = rng.permutation(B + 2)[:B]
        table = given["cache_batch_idx"][:, None]
    lengths = rng.integers(0, room - max(L, Lq), B)
    leftpad = rng.integers(0, 3, B) if kind == "padded entries" else np.zeros(B, int)
    if leftpad.any():
        given["cache_leftpad"] = leftpad
    q, new = rng.normal(size=(B, Lq, H, D)), rng.normal(size=(2, B, L, Hkv, D))
    slopes = rng.random((B, H) if seed % 3 else H)
    causal, window = bool(rng.integers(2)), ((-1, -1), (3, -1), (2, 1), (99, 99))[seed % 7 % 4]
    rotated, q_rotated, k_rotated, interleaved = {}, q, new[0], bool(seed % 2)
    is_local = causal or 0 <= min(window) < room or 0 <= max(window) < room
    if rng.random() < 0.6:
        angles = rng.random((room, D // 4))
        rotated = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
        q_at = lengths[:, None] + np.arange(Lq) * is_local
        k_at = lengths[:, None] + np.arange(L)
        tables = rotated["rotary_cos"], rotated["rotary_sin"]
        q_rotated, k_rotated = (
            turned(x.swapaxes(1, 2), *tables, at[:, None], interleaved).swapaxes(1, 2)
            for x, at in ((q, q_at), (new[0], k_at))
        )
    expected = caches.copy()
    for b in range(B):
        for t in range(L):
            at = table[b, (lengths[b] + t) // shape[1]], (lengths[b] + t) % shape[1]
            expected[0][at], expected[1][at] = k_rotated[b, t], new[1, b, t]
    output, lse = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths.astype(np.int32), causal=causal, window_size=window,
        alibi_slopes=slopes, rotary_interleaved=interleaved, return_softmax_lse=True,
        backend=backend, **rotated, **given,
    )  # fmt: skip
    np.testing.assert_allclose(caches, expected, rtol=1e-12)
    for b in range(B):
        k, v = expected[:, table[b]].reshape(2, -1, Hkv, D)
        total = int(lengths[b]) + L
        bias = np.zeros((1, 1, 1, room))
        bias[..., : leftpad[b]] = -np.inf
        wanted = naive_attention(
            *(x[None].swapaxes(1, 2) for x in (q_rotated[b], k, v)), kv_lengths=[total],
            is_causal=causal, q_offset=total - Lq, attn_bias=bias,
            window_size=tuple(None if side < 0 else side for side in window),
            alibi_slopes=slopes if slopes.ndim == 1 else slopes[b],
        )  # fmt: skip
        np.testing.assert_allclose(output[b].swapaxes(0, 1), wanted[0][0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(lse[b], wanted[1][0], rtol=1e-9, atol=1e-12)


CACHES = np.zeros((2, 2, 4, 1, 1))  # two entries of four tokens, or two pages


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"v": None}, ValueError, "k and v go together: every new key needs one value"),
        ({"cache_seqlens": None}, ValueError, "k needs cache_seqlens"),
        ({"cache_seqlens": 3}, ValueError, "cache_seqlens is 3: expected integers from 0 to 2, "
         "since the cache has room for 4 keys with 2 new keys"),
        ({"cache_seqlens": [0, -1]}, ValueError, "cache_seqlens has shape (2,)"),
        ({"cache_seqlens": 0.0}, TypeError, "cache_seqlens has dtype float64: expected integers"),
        ({"k_cache": CACHES[0].tolist()}, TypeError, "k_cache cannot be written to"),
        ({"v_cache": np.broadcast_to(0.0, (2, 4, 1, 1))}, TypeError,
         "v_cache cannot be written to"),
        ({"k": np.ones((1, 2, 1, 1), "f4")}, TypeError,
         "k has dtype float32 but k_cache has float64: convert it first"),
        ({"k": np.ones((1, 2, 2, 1))}, ValueError,
         "k has shape (1, 2, 2, 1): expected (B, L, Hkv, D) = (1, 2, 1, 1)"),
        ({"cache_batch_idx": [2]}, ValueError,
         "cache_batch_idx asks for entry 2 of k_cache, which has the entries 0 to 1"),
        ({"cache_batch_idx": 0}, ValueError, "cache_batch_idx has shape (): expected (B,) = (1,)"),
        ({"q": np.zeros((3, 2, 1, 1)), "k": None, "v": None}, ValueError,
         "q asks for entry 2 of k_cache, which has the entries 0 to 1"),
        ({"block_table": [[0]], "cache_batch_idx": [0]}, ValueError,
         "cache_batch_idx is given with block_table"),
        ({"block_table": [[0]], "cache_leftpad": [1]}, ValueError,
         "cache_leftpad is given with block_table"),
        ({"block_table": [[7]]}, ValueError, "block_table[0, 0] is 7: expected a page from 0 to 1"),
        ({"block_table": [0]}, ValueError, "block_table has shape (1,): expected (B, pages)"),
        ({"rotary_cos": [[1.0]]}, ValueError, "rotary_cos and rotary_sin go together, and need k"),
        ({"rotary_cos": [[1.0]], "rotary_sin": [[0.0]]}, ValueError,
         "rotary_cos has 1 angles per row"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0: expected a positive number"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ],
)  # fmt: skip
def test_a_cache_that_does_not_fit_is_not_written_to(options, error, sentence):
    caches = CACHES.copy()
    x = np.ones((1, 2, 1, 1))
    given = {"q": x, "k_cache": caches[0], "v_cache": caches[1], "k": x, "v": x, "cache_seqlens": 0}
    with pytest.raises(error) as caught:
        flash_attn_with_kvcache(**given | options)
    assert sentence in str(caught.value)
    assert not caches.any()
