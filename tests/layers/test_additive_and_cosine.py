"""What additive and cosine attention have in common."""

from functools import partial

import numpy as np
import pytest

from minimha.explain import Trace
from minimha.layers.additive import additive_attention
from minimha.layers.cosine import cosine_attention

RNG = np.random.default_rng(0)
B, H, HKV, LQ, LK, D, DV, A = 2, 4, 2, 3, 5, 6, 2, 8
QKV = [RNG.normal(size=s) for s in ((B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV))]
WEIGHTS = [RNG.normal(size=s) for s in ((D, A), (D, A), A)]
LAYERS = pytest.mark.parametrize(
    ("layer", "weights"),
    [
        pytest.param(additive_attention, WEIGHTS, id="additive"),
        pytest.param(cosine_attention, [], id="cosine"),
        pytest.param(partial(cosine_attention, scale=7), [], id="7 cosine"),
    ],
)


@LAYERS
@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_lengths": 3},
        {"attn_mask": np.broadcast_to(np.arange(LK) < 3, (LQ, LK))},
        {"attn_bias": np.broadcast_to(np.where(np.arange(LK) < 3, 0, -np.inf), (LQ, LK))},
    ],
    ids=lambda o: next(iter(o)),
)
def test_nothing_of_a_hidden_key_reaches_the_output(layer, weights, options, backend):
    q, k, v = (x.copy() for x in QKV)
    k[0, :, 3], k[0, :, 4], v[:, :, 3:] = np.nan, np.inf, np.nan
    k[1, :, 3, 0], k[1, :, 4, 1] = np.nan, np.inf
    got = layer(q, k, v, *weights, backend=backend, **options)
    seen = layer(q, k[:, :, :3], v[:, :, :3], *weights)
    np.testing.assert_allclose(got, seen, rtol=1e-12)


@LAYERS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_listening_changes_no_bit(layer, weights, dtype):
    given = [x.astype(dtype) for x in (*QKV, *weights)]
    np.testing.assert_array_equal(layer(*given, tap=Trace()), layer(*given))


@LAYERS
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_half_precision_is_computed_in_float32_and_rounded_once(layer, weights, name, backend):
    dtype = getattr(np, name, None) or getattr(pytest.importorskip("ml_dtypes"), name)
    given = [x.astype(dtype) for x in (*QKV, *weights)]
    got, lse = layer(*given, return_lse=True, backend=backend)
    wide = (x.astype(np.float32) for x in given)
    exact, exact_lse = layer(*wide, return_lse=True, backend=backend)
    assert (got.dtype, lse.dtype) == (dtype, np.float32)
    np.testing.assert_array_equal(got.astype(float), exact.astype(dtype).astype(float))
    np.testing.assert_array_equal(lse, exact_lse)


@LAYERS
@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (lambda q, k, v: (q[:0], k[:0], v[:0]), (0, H, LQ, DV)),
        (lambda q, k, v: (q[:, :, :0], k, v), (B, H, 0, DV)),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), (B, H, LQ, DV)),
    ],
)
def test_where_there_is_nothing_the_output_is_empty_or_0(layer, weights, cut, shape):
    output = layer(*cut(*QKV), *weights)
    assert output.shape == shape
    assert not output.any()
