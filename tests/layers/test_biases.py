"""ALiBi's slopes and T5's buckets, against numbers and code that others published."""

import math

import numpy as np
import pytest

from minimha import attention
from minimha.layers.biases import alibi_slopes, t5_bias, t5_buckets

RNG = np.random.default_rng(0)
SETTINGS = [
    (32, 128, True),
    (32, 128, False),
    (8, 20, True),
    (8, 20, False),
    (4, 3, True),
    (2, 2, False),
    (7, 50, False),
    (64, 1000, True),
]


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [0.5 * h for h in range(1, 17)]),
    ],
)
def test_slopes_of_the_paper(num_heads, exponents):
    slopes = alibi_slopes(num_heads)
    assert (slopes.shape, slopes.dtype) == ((num_heads,), np.float64)
    np.testing.assert_allclose(slopes, [0.5**e for e in exponents], rtol=1e-15)


def test_slopes_are_what_attention_takes():
    q, k, v = RNG.normal(size=(3, 4, 5, 2))
    bias = [[[-abs(i - j) / 4**h for j in range(5)] for i in range(5)] for h in range(1, 5)]
    np.testing.assert_allclose(
        attention(q, k, v, alibi_slopes=alibi_slopes(4)),
        attention(q, k, v, attn_bias=[bias]),
        rtol=1e-13,
    )


def bucket(relative, num_buckets, max_distance, bidirectional):
    """One bucket, walked to from 0: borders are compared as powers of whole numbers."""
    start = 0
    if bidirectional:
        num_buckets //= 2
        start = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = -min(relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return start + distance
    far, steps = num_buckets - exact, 0
    while steps + 1 < far and (
        distance**far * exact ** (steps + 1) >= max_distance ** (steps + 1) * exact**far
    ):
        steps += 1
    return start + exact + steps


@pytest.mark.parametrize(("num_buckets", "max_distance", "bidirectional"), SETTINGS)
def test_buckets_one_by_one(num_buckets, max_distance, bidirectional):
    setting = (num_buckets, max_distance, bidirectional)
    q, k = [0, 7, 3000], [0, 1, 6, 7, 8, *range(20, 300, 3), 2000, 2990, 4000]
    expected = [[bucket(j - i, *setting) for j in k] for i in q]
    np.testing.assert_array_equal(t5_buckets(q, k, *setting), expected)


@pytest.mark.parametrize(
    ("bidirectional", "first_of_bucket"),
    [
        (True, [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]),
        (False, [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]),
    ],
)
def test_borders_of_t5(bidirectional, first_of_bucket):
    distances = np.arange(400)
    buckets = t5_buckets([1000], 1000 - distances, bidirectional=bidirectional)[0]
    assert [int(np.argmax(buckets == b)) for b in range(buckets.max() + 1)] == first_of_bucket
    assert (np.diff(buckets) >= 0).all()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5_in_float32(bidirectional):
    """As T5 computes them: the logarithm in single precision, cut to an integer."""
    relative = np.arange(-1000, 1001)
    N = 16 if bidirectional else 32
    d = abs(relative) if bidirectional else -np.minimum(relative, 0)
    e = N // 2
    ratio = np.log(np.maximum(d, 1).astype(np.float32) / np.float32(e))
    far = e + (ratio / np.float32(math.log(128 / e)) * np.float32(N - e)).astype(int)
    expected = np.where(d < e, d, np.minimum(far, N - 1))
    expected = expected + (N * (relative > 0) if bidirectional else 0)
    np.testing.assert_array_equal(
        t5_buckets([0], relative, bidirectional=bidirectional)[0], expected
    )


def test_the_farthest_positions_do_not_wrap_around():
    assert t5_buckets([-(2**53)], [2**53]).tolist() == [[31]]
    assert t5_buckets([2**53], [-(2**53)]).tolist() == [[15]]


def test_keys_after_the_query_have_the_second_half_or_bucket_0():
    assert t5_buckets([5], [6, 9], bidirectional=True).tolist() == [[17, 20]]
    assert t5_buckets([5], [6, 9], bidirectional=False).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"),
     ("float64", "float64"), ("int8", "float64")],
)  # fmt: skip
def test_a_bias_is_looked_up_for_each_head(given, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes has bfloat16")
    given, dtype = (np.dtype(getattr(ml_dtypes, name, name)) for name in (given, dtype))
    table = RNG.normal(size=(8, 3), scale=9).astype(given)
    q, k = [4, 5], [0, 3, 4, 5, 30]
    bias = t5_bias(table, q, k, max_distance=20)
    assert (bias.shape, bias.dtype) == ((3, 2, 5), dtype)
    for h, i, j in np.ndindex(3, 2, 5):
        assert bias[h, i, j] == table[bucket(k[j] - q[i], 8, 20, True), h]


def test_a_bias_is_what_attention_takes():
    q, k, v = RNG.normal(size=(3, 1, 3, 5, 2))
    bias = t5_bias(RNG.normal(size=(32, 3)), range(5), range(5))
    scores = q @ k.swapaxes(-1, -2) + bias
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        attention(q, k, v, attn_bias=bias[None], scale=1), weights @ v, rtol=1e-13
    )


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: alibi_slopes(0), ValueError, "num_heads is 0: expected an integer of at least 1"),
        (lambda: alibi_slopes(8.0), TypeError, "num_heads is 8.0: expected an integer"),
        (
            lambda: t5_buckets([0], [0], 31),
            ValueError,
            "num_buckets is 31: expected an even number",
        ),
        (
            lambda: t5_buckets([0], [0], 2),
            ValueError,
            "num_buckets is 2: expected an integer of at",
        ),
        (
            lambda: t5_buckets([0], [0], 32, 8),
            ValueError,
            "max_distance is 8: expected an integer of",
        ),
        (lambda: t5_buckets([0.5], [0]), TypeError, "q_positions has dtype float64: expected int"),
        (
            lambda: t5_buckets([[0], [1, 2]], [0]),
            ValueError,
            "q_positions is not a rectangular array of numbers",
        ),
        (
            lambda: t5_buckets([-(2**63)], [2**63 - 1]),
            ValueError,
            "q_positions has numbers from -9223372036854775808",
        ),
        (
            lambda: t5_buckets([0], np.array([2**64 - 1], np.uint64)),
            ValueError,
            "k_positions has numbers from 18446744073709551615",
        ),
        (
            lambda: t5_buckets(np.ma.masked_array([0, 1], [0, 1]), [0]),
            TypeError,
            "q_positions is a masked array, whose mask would be lost",
        ),
        (lambda: t5_buckets([0], 3), ValueError, "k_positions has shape (): expected one row"),
        (lambda: t5_buckets([0], [0], bidirectional=1), TypeError, "bidirectional is 1: expected"),
        (lambda: t5_bias([1, 2], [0], [0]), ValueError, "table has shape (2,): expected (num_buck"),
        (lambda: t5_bias([["a"] * 2] * 4, [0], [0]), TypeError, "table has dtype <U1: expected"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(make, error, sentence):
    with pytest.raises(error) as raised:
        make()
    assert sentence in str(raised.value)
