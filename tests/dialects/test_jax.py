"""jax.nn.dot_product_attention's conventions: errors, corner cases, and JAX itself."""

import math

import ml_dtypes
import numpy as np
import pytest

from minimha.dialects.jax import dot_product_attention

rng = np.random.default_rng(0)


def loops(q, k, v, visible):
    """Attention (L, H, D) by sums in Python; the mean of all values where nothing is visible."""
    (Lq, H, D), (Lk, Hkv, _) = q.shape, k.shape
    out = np.zeros((Lq, H, v.shape[2]))
    for h in range(H):
        g = h // (H // Hkv)
        for i in range(Lq):
            seen = [j for j in range(Lk) if visible(i, j)]
            e = {
                j: math.exp(math.fsum(q[i, h] * k[j, g]) / math.sqrt(D)) if seen else 1.0
                for j in seen or range(Lk)
            }
            for j, weight in e.items():
                out[i, h] += weight / math.fsum(e.values()) * v[j, g]
    return out


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, lambda i, j: True),
        ({"is_causal": True}, lambda i, j: j <= i),
        ({"local_window_size": 1}, lambda i, j: abs(i - j) <= 1),
        ({"local_window_size": (2, 0)}, lambda i, j: i - 2 <= j <= i),
        ({"local_window_size": (0, 1), "is_causal": True}, lambda i, j: i == j),
        ({"key_value_seq_lengths": [2]}, lambda i, j: j < 2),
        ({"key_value_seq_lengths": [0]}, lambda i, j: False),
    ],
)
@pytest.mark.parametrize("Lk", [3, 5, 7])
def test_options_show_each_query_its_keys_from_the_top_left(options, visible, Lk):
    q, k, v = (rng.normal(size=(L, H, 3)) for L, H in ((5, 4), (Lk, 2), (Lk, 2)))
    np.testing.assert_allclose(
        dot_product_attention(q, k, v, **options), loops(q, k, v, visible), 1e-12, 1e-13
    )


def test_queries_beyond_their_length_get_zero():
    x = rng.normal(size=(2, 3, 1, 2))
    output = dot_product_attention(x, x, x, query_seq_lengths=[1, 3])
    assert not output[0, 1:].any()
    assert output[0, :1].all()
    assert output[1].all()


def test_a_masked_nan_stays_hidden_where_some_key_is_seen():
    q, k = np.ones((1, 1, 1)), np.array([1.0, np.nan]).reshape(2, 1, 1)
    mask = np.array([True, False]).reshape(1, 1, 1, 2)
    assert dot_product_attention(q, k, k, mask=mask).ravel() == [1.0]


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"query": np.zeros((2, 2))}, ValueError, "query has shape"),
        ({"query": np.zeros((1, 3, 4, 4)) > 0}, TypeError, "query has dtype bool"),
        (
            {"query": np.zeros((1, 3, 4, 0)), "key": np.zeros((1, 3, 2, 0))},
            ValueError,
            "query has D=0: the head width D must be at least 1",
        ),
        (
            {
                "query": np.zeros((1, 3, 4, 4), np.float16),
                "key": np.zeros((1, 3, 2, 4), ml_dtypes.bfloat16),
            },
            TypeError,
            "query is float16, key is bfloat16, value is float64: no common dtype",
        ),
        ({"key": np.zeros((1, 3, 2, 5))}, ValueError, "key has D=5 but query has D=4"),
        ({"key": np.zeros((2, 3, 2, 4))}, ValueError, "batches must be equal"),
        ({"value": np.zeros((1, 4, 2, 4))}, ValueError, "every key needs one value"),
        (
            {"key": np.zeros((1, 3, 3, 4)), "value": np.zeros((1, 3, 3, 4))},
            ValueError,
            "key has 3 heads but query has 4",
        ),
        ({"mask": np.zeros((3, 3))}, TypeError, "as bias$"),
        ({"mask": np.eye(3)}, TypeError, "bias; it looks like Hugging Face's attention_mask, wher"),
        ({"mask": np.log(np.eye(3) + 1e-99)}, TypeError, "like the float masks of torch and ONNX"),
        ({"mask": np.ma.ones((3, 3), bool)}, TypeError, "mask is a masked array, whose mask would"),
        ({"mask": [[True], [True, False]]}, ValueError, "mask is not a rectangular array"),
        ({"mask": np.zeros((3, 2), bool)}, ValueError, r"^mask has shape \(3, 2\): expected one"),
        ({"mask": np.zeros((2, 1, 1, 1), bool)}, ValueError, r"^mask has shape \(2, 1, 1, 1\): ex"),
        ({"mask": np.zeros((1, 3), bool)[None, None, None]}, ValueError, "^mask has shape"),
        ({"bias": np.zeros((3, 2))}, ValueError, r"^bias has shape \(3, 2\): expected one that br"),
        ({"bias": np.zeros((3, 3), bool)}, TypeError, "^bias has dtype bool"),
        ({"scale": math.nan}, ValueError, "scale is nan"),
        ({"is_causal": 1}, TypeError, "is_causal is 1: expected True or False"),
        ({"query_seq_lengths": [1.5]}, TypeError, "query_seq_lengths has dtype float64"),
        ({"key_value_seq_lengths": [1, 2]}, ValueError, r"expected \(B,\) = \(1,\)"),
        ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size is"),
        ({"local_window_size": 1.5}, TypeError, "local_window_size is"),
        ({"local_window_size": True}, TypeError, "local_window_size is True"),
    ],
)
def test_errors_name_the_argument(change, error, sentence):
    x = np.zeros((1, 3, 2, 4))
    arguments = {"query": np.zeros((1, 3, 4, 4)), "key": x, "value": x}
    with pytest.raises(error, match=sentence):
        dot_product_attention(**{**arguments, **change})


@pytest.mark.parametrize("draw", range(300))
def test_jax_gives_the_same(draw):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    seed = int(rng.integers(2**32))
    r = np.random.default_rng(seed)
    B, Hkv, group, Lq, Lk, D = (int(r.integers(1, n)) for n in (4, 4, 4, 9, 9, 9))
    H = Hkv * group
    q, k, v = (
        r.normal(size=(B, L, heads, D)).astype(np.float32)
        for L, heads in ((Lq, H), (Lk, Hkv), (Lk, Hkv))
    )
    shape = tuple(int(r.choice([1, size])) for size in (B, H, Lq, Lk))
    options = {
        "bias": r.normal(size=shape).astype(np.float32),
        "mask": r.random(shape) < 0.6,
        "scale": float(r.normal()),
        "is_causal": True,
        "query_seq_lengths": r.integers(0, Lq + 1, B).astype(np.int32),
        "key_value_seq_lengths": r.integers(0, Lk + 1, B).astype(np.int32),
        "local_window_size": (int(r.integers(4)), int(r.integers(4))),
    }
    options = {name: value for name, value in options.items() if r.random() < 0.4}
    want = np.asarray(jax.nn.dot_product_attention(q, k, v, **options))
    got = dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(got, want, 2e-5, 4e-6, err_msg=f"seed {seed}: {list(options)}")
