"""Caches in pages of one pool, against lists of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import naive_attention

from minimha.layers import MultiHeadAttention, PagedKVCache, PagePool

H, HKV, D, DV = 4, 2, 3, 2


def pool(num_pages=40, page_size=4, dtype=np.float64):
    return PagePool(num_pages, HKV, page_size, D, DV, dtype)


def tokens(rng, batch, length):
    shapes = (batch, H, length, D), (batch, HKV, length, D), (batch, HKV, length, DV)
    return [rng.normal(size=shape) for shape in shapes]


class Lists:
    """What a cache should hold: the keys and values of each sequence."""

    def __init__(self, batch):
        self.k = [np.zeros((HKV, 0, D)) for _ in range(batch)]
        self.v = [np.zeros((HKV, 0, DV)) for _ in range(batch)]

    def append(self, k, v, lengths):
        self.k = [
            np.concatenate([x, y[:, :n]], 1) for x, y, n in zip(self.k, k, lengths, strict=True)
        ]
        self.v = [
            np.concatenate([x, y[:, :n]], 1) for x, y, n in zip(self.v, v, lengths, strict=True)
        ]

    def fork(self, lengths, entries):
        other = Lists(len(entries))
        other.k = [self.k[b][:, :n] for b, n in zip(entries, lengths, strict=True)]
        other.v = [self.v[b][:, :n] for b, n in zip(entries, lengths, strict=True)]
        return other

    def attend(self, q, added):
        """The output of the queries that are no padding, of each sequence."""
        for b, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            offset = k.shape[1] - added[b]
            given = {"is_causal": True, "q_offset": int(offset)}
            yield naive_attention(q[b : b + 1, :, : added[b]], k[None], v[None], **given)[0][0]


@settings(max_examples=3 * settings.default.max_examples // 10)
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 5))
def test_any_sequence_of_operations(seed, page_size):
    rng, shared = np.random.default_rng(seed), pool(page_size=page_size, num_pages=300)
    caches = [(PagedKVCache(shared, 2), Lists(2))]
    for _ in range(12):
        at = int(rng.integers(len(caches)))
        cache, lists = caches[at]
        B = len(lists.k)
        what = rng.choice(["append", "append", "append", "fork", "undo", "free"])
        if what == "append":
            q, k, v = tokens(rng, B, int(rng.integers(1, 7)))
            added = rng.integers(0, q.shape[2] + 1, B)
            cache.append(k, v, added)
            lists.append(k, v, added)
            output = cache.attend(q, backend="cpu" if seed % 2 else "dense")
            for b, wanted in enumerate(lists.attend(q, added)):
                np.testing.assert_allclose(output[b, :, : added[b]], wanted, 1e-9, 1e-12)
        elif what == "fork":
            entries = rng.integers(0, B, rng.integers(1, 4))
            lengths = rng.integers(0, cache.lengths[entries] + 1)
            caches.append((cache.fork(lengths, entries), lists.fork(lengths, entries)))
        elif what == "undo":
            _, k, v = tokens(rng, B, 3)
            cache.append(k, v)
            cache.undo()
        elif len(caches) > 1:
            cache.free()
            del caches[at]
        assert cache.lengths.tolist() == [x.shape[1] for x in lists.k] or what == "free"
    used = {page for cache, _ in caches for page in cache.block_table.ravel() if page >= 0}
    assert shared.num_free == 300 - len(used)
    for cache, _ in caches:
        cache.free()
    assert shared.num_free == 300


def test_a_prompt_is_stored_once_for_all_its_answers():
    rng, shared = np.random.default_rng(0), pool(num_pages=10, page_size=4)
    prompt = PagedKVCache(shared)
    prompt.append(*tokens(rng, 1, 10)[1:])  # two full pages, and one of two tokens
    assert shared.num_free == 7
    answers = prompt.fork(entries=[0, 0, 0])
    assert shared.num_free == 7
    answers.append(*tokens(rng, 3, 1)[1:])
    assert shared.num_free == 4  # the third page is copied by each
    assert (answers.block_table[:, :2] == prompt.block_table[:, :2]).all()


def test_the_last_user_of_a_page_does_not_copy_it():
    rng, shared = np.random.default_rng(0), pool(num_pages=3, page_size=4)
    prompt = PagedKVCache(shared)
    prompt.append(*tokens(rng, 1, 2)[1:])
    answers = prompt.fork(entries=[0, 0, 0])
    prompt.free()
    answers.append(*tokens(rng, 3, 1)[1:])  # two copies, and the page itself
    assert shared.num_free == 0


def test_a_layer_decodes_with_it():
    rng = np.random.default_rng(0)
    layer, x = MultiHeadAttention(12, H, HKV), rng.normal(size=(2, 7, 12)).astype(np.float32)
    cache = PagedKVCache(PagePool(10, HKV, 3, 3), 2)
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 7))]
    np.testing.assert_allclose(np.concatenate(parts, 1), layer(x, is_causal=True), atol=1e-6)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("name", ["key_indices", "attn_mask", "attn_bias"])
def test_options_count_the_keys_of_a_sequence(name, backend):
    rng = np.random.default_rng(0)
    q, k, v = tokens(rng, 1, 10)
    given = {
        "key_indices": rng.integers(-1, 10, (1, HKV, 10, 3)),
        "attn_mask": rng.random((10, 10)) < 0.5,
        "attn_bias": rng.normal(size=(1, H, 10, 10)),
    }[name]
    cache = PagedKVCache(pool(page_size=4))
    cache.append(k, v)
    output = cache.attend(q, backend=backend, **{name: given})
    expected, _ = naive_attention(q, k, v, is_causal=True, **{name: given})
    np.testing.assert_allclose(output, expected, rtol=1e-9, atol=1e-12)


K, V = np.zeros((1, HKV, 9, D)), np.zeros((1, HKV, 9, DV))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda c: c.append(K, V), ValueError,
         "the chunk needs 2 pages but the pool has 1 free of 2"),
        (lambda c: c.append(K[:, :1], V), ValueError, "k has Hkv=1 but the cache has Hkv=2"),
        (lambda c: c.append(K, V[:, :, :1]), ValueError,
         "v has L=1 but k has L=9: every key needs"),
        (lambda c: c.append(K.astype("f4"), V), TypeError, "k has dtype float32 but the cache has"),
        (lambda c: c.append(K, V, [10]), ValueError,
         "lengths is [10]: expected integers from 0 to"),
        (lambda c: c.fork(4), ValueError, "length is 4: expected integers from 0 to the lengths of "
         "the sequences, [3]"),
        (lambda c: c.fork(-1), ValueError, "length is -1: expected integers"),
        (lambda c: c.fork([1, 1]), ValueError, "length has shape (2,): expected one integer, or"),
        (lambda c: c.fork(1.5), TypeError, "length has dtype float64: expected integers"),
        (lambda c: c.fork(entries=[1]), ValueError,
         "entries is [1]: expected integers from 0 to 0"),
        (lambda c: c.attend(K), ValueError,
         "q has shape (1, 2, 9, 3): expected (B, H, L, D) with L=3"),
        (lambda c: c.attend(K[:, :, :3], is_causal=True), TypeError, "is_causal is no option"),
        (lambda c: c.attend(K[:, :, :3], attn_mask=np.ones((3, 2), bool)), ValueError,
         "attn_mask has shape (3, 2): expected (Lq, Lk)"),
        (lambda c: PagePool(0, 1, 1, 1), ValueError, "num_pages is 0: expected an integer of"),
        (lambda c: PagePool(1, 1, 1, 1, dtype="i4"), TypeError, "dtype is int32: expected one of"),
        (lambda c: PagedKVCache(c.pool, 0), ValueError, "batch is 0: expected an integer of"),
    ],
)  # fmt: skip
def test_refused_in_a_sentence_and_nothing_written(call, error, sentence):
    cache = PagedKVCache(pool(num_pages=2))
    cache.append(K[:, :, :3], V[:, :, :3])
    with pytest.raises(error) as caught:
        call(cache)
    assert sentence in str(caught.value)
    assert cache.lengths.tolist() == [3]
    assert cache.pool.num_free == 1
