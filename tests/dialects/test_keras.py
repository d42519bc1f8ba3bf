"""Keras's two attention layers: conventions, corner cases, errors, and Keras itself."""

import itertools
import math
import os

import numpy as np
import pytest
from conformance import adaptor

from minimha.dialects.keras import grouped_query_attention, multi_head_attention

rng = np.random.default_rng(0)

MHA = {"num_heads": 2, "key_dim": 3}
GQA = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 3}


def layer_of(cfg):
    return grouped_query_attention if "head_dim" in cfg else multi_head_attention


def drawn_weights(cfg, query, value, key):
    """Random weights for a layer and its inputs, by the names that Keras gives them."""
    H = cfg.get("num_heads") or cfg["num_query_heads"]
    Hkv = cfg.get("num_key_value_heads", H)
    D = cfg.get("key_dim") or cfg["head_dim"]
    Dv = cfg.get("value_dim") or D
    E, Ev, Ek = (x.shape[-1] for x in (query, value, key))
    out = cfg.get("output_shape") or E
    out = (out,) if isinstance(out, int) else tuple(out)
    shapes = {"query": (E, H, D), "key": (Ek, Hkv, D), "value": (Ev, Hkv, Dv)}
    shapes["attention_output"] = (H, Dv, *out)
    if cfg.get("use_gate"):
        shapes["gate"] = (E, H, Dv)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}/kernel"] = rng.normal(size=shape) / 2
        if cfg.get("use_bias", True):
            is_last = name == "attention_output"
            weights[f"{name}/bias"] = rng.normal(size=out if is_last else shape[1:])
    return weights


def loops(weights, query, value, key, visible, empty="mean"):
    """One layer by sums in Python; inputs are (B, L, E), ``visible`` is asked (b, h, i, j)."""

    def projected(name, x):  # (B, L, H, D)
        kernel = weights[f"{name}/kernel"]
        bias = weights.get(f"{name}/bias", np.zeros(kernel.shape[1:]))
        return np.einsum("ble,ehd->blhd", x, kernel) + bias

    q, k, v = projected("query", query), projected("key", key), projected("value", value)
    B, Lq, H, D = q.shape
    Lk, group = k.shape[1], H // k.shape[2]
    heads, scores = np.zeros((B, Lq, H, v.shape[3])), np.zeros((B, H, Lq, Lk))
    for b, h, i in itertools.product(range(B), range(H), range(Lq)):
        seen = [j for j in range(Lk) if visible(b, h, i, j)]
        e = {j: math.exp(math.fsum(q[b, i, h] * k[b, j, h // group]) / math.sqrt(D)) for j in seen}
        if not seen and empty == "mean":
            e = dict.fromkeys(range(Lk), 1.0)
        for j, weight in e.items():
            scores[b, h, i, j] = weight / math.fsum(e.values())
            heads[b, i, h] += scores[b, h, i, j] * v[b, j, h // group]
    if "gate/kernel" in weights:
        heads = heads / (1 + np.exp(-projected("gate", query)))
    kernel = weights["attention_output/kernel"]
    out = kernel.shape[2:]
    y = np.einsum("blhd,hdo->blo", heads, kernel.reshape(*kernel.shape[:2], -1))
    y = y.reshape(B, Lq, *out) + weights.get("attention_output/bias", np.zeros(out))
    return y, scores


def inputs(B=2, Lq=4, Lk=5):
    """query (B, Lq, 5), value (B, Lk, 4) and key (B, Lk, 3)."""
    return rng.normal(size=(B, Lq, 5)), rng.normal(size=(B, Lk, 4)), rng.normal(size=(B, Lk, 3))


MASK = rng.random((2, 4, 5)) < 0.5
MASK[0, 1] = False  # a query that sees nothing


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, lambda b, h, i, j: True),
        ({"use_causal_mask": True}, lambda b, h, i, j: j <= i),
        ({"sliding_window": 1}, lambda b, h, i, j: i == j),
        ({"sliding_window": 2, "use_causal_mask": True}, lambda b, h, i, j: i - 2 < j <= i),
        ({"attention_mask": MASK}, lambda b, h, i, j: MASK[b, i, j]),
        ({"attention_mask": MASK[0].astype(int)}, lambda b, h, i, j: MASK[0, i, j]),
        ({"attention_mask": MASK[:, :1]}, lambda b, h, i, j: MASK[b, 0, j]),
        (
            {"attention_mask": MASK[:, None, :, :1], "sliding_window": 3},
            lambda b, h, i, j: MASK[b, i, 0] and abs(i - j) < 3,
        ),
        (
            {"attention_mask": MASK[:, None], "value_mask": MASK[:, 2], "use_causal_mask": True},
            lambda b, h, i, j: MASK[b, i, j] and MASK[b, 2, j] and j <= i,
        ),
        (
            {"query_mask": [[1, 0, 1, 1], [1, 1, 1, 1]], "key_mask": MASK[:, 3]},
            lambda b, h, i, j: (b, i) != (0, 1) and MASK[b, 3, j],
        ),
        ({"value_mask": np.zeros((2, 5), bool)}, lambda b, h, i, j: False),
        ({"use_gate": True}, lambda b, h, i, j: True),
        (
            {"use_gate": True, "use_bias": False, "attention_mask": MASK},
            lambda b, h, i, j: MASK[b, i, j],
        ),
    ],
)
@pytest.mark.parametrize("sizes", [MHA, {**MHA, "value_dim": 2, "output_shape": (3, 2)}, GQA])
@pytest.mark.parametrize("backend", ["dense", "tiled", "cpu"])
@pytest.mark.parametrize("empty", ["mean", "zero"])
def test_options_are_those_of_sums_in_loops(options, visible, sizes, backend, empty):
    query, value, key = inputs()
    cfg = {**sizes, **options}
    weights = drawn_weights(cfg, query, value, key)
    y, scores = layer_of(cfg)(
        weights, query, value, key, **cfg,
        return_attention_scores=True, empty_rows=empty, backend=backend,
    )  # fmt: skip
    want_y, want_scores = loops(weights, query, value, key, visible, empty)
    np.testing.assert_allclose(y, want_y, 1e-11, 1e-12)
    np.testing.assert_allclose(scores, want_scores, 1e-11, 1e-12)


def test_an_attention_mask_may_differ_from_head_to_head():
    query, value, key = inputs()
    mask = rng.random((2, 4, 4, 5)) < 0.5
    weights = drawn_weights(GQA, query, value, key)
    y = grouped_query_attention(weights, query, value, key, **GQA, attention_mask=mask)
    want, _ = loops(weights, query, value, key, lambda b, h, i, j: mask[b, h, i, j])
    np.testing.assert_allclose(y, want, 1e-11, 1e-12)


@pytest.mark.parametrize(("Lq", "Lk"), [(2, 5), (5, 2)])
@pytest.mark.parametrize("cfg", [MHA, GQA])
def test_causality_begins_at_the_top_left(cfg, Lq, Lk):
    query, value, key = inputs(1, Lq, Lk)
    weights = drawn_weights(cfg, query, value, key)
    y = layer_of(cfg)(weights, query, value, key, **cfg, use_causal_mask=True)
    want, _ = loops(weights, query, value, key, lambda b, h, i, j: j <= i)
    np.testing.assert_allclose(y, want, 1e-11, 1e-12)


@pytest.mark.parametrize("cfg", [MHA, GQA])
def test_a_key_that_is_not_given_is_the_value(cfg):
    query, value, _ = inputs()
    weights = drawn_weights(cfg, query, value, value)
    np.testing.assert_array_equal(
        layer_of(cfg)(weights, query, value, **cfg),
        layer_of(cfg)(weights, query, value, value, **cfg),
    )


@pytest.mark.parametrize("cfg", [MHA, GQA])
@pytest.mark.parametrize("empty", [None, "mean", "zero"])
def test_asking_for_scores_never_changes_the_output(cfg, empty):
    query, value, key = inputs()
    weights = drawn_weights(cfg, query, value, key)
    given = {**cfg, "attention_mask": MASK, "empty_rows": empty}
    alone = layer_of(cfg)(weights, query, value, key, **given)
    y, _ = layer_of(cfg)(weights, query, value, key, **given, return_attention_scores=True)
    np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize(("lengths", "empty"), [((4,), "mean"), ((4, 1), "zero")])
def test_a_query_that_sees_nothing_gets_the_mean_unless_lengths_fill_several_axes(lengths, empty):
    query, value, key = (x.reshape(2, -1, *lengths[1:], x.shape[-1]) for x in inputs())
    weights = drawn_weights(MHA, query, value, key)
    nothing = np.zeros((4, *lengths[1:], 5, *lengths[1:]), bool)
    y = multi_head_attention(weights, query, value, key, **MHA, attention_mask=nothing)
    flat = (x.reshape(2, -1, x.shape[-1]) for x in (query, value, key))
    want, _ = loops(weights, *flat, lambda b, h, i, j: False, empty)
    np.testing.assert_allclose(y.reshape(want.shape), want, 1e-11, 1e-12)


@pytest.mark.parametrize(("axes", "order"), [(None, (1, 2)), ([1, 2], (1, 2)), ((-2, 1), (2, 1))])
def test_attention_over_several_axes_is_that_over_all_their_positions(axes, order):
    query, value, key = (rng.normal(size=(2, *L, 3)) for L in ((3, 2), (2, 4), (2, 4)))
    mask = rng.random((2, *(query.shape[a] for a in order), *(key.shape[a] for a in order))) < 0.7
    weights = drawn_weights(MHA, query, value, key)
    y, scores = multi_head_attention(
        weights, query, value, key, **MHA,
        attention_axes=axes, attention_mask=mask, return_attention_scores=True,
    )  # fmt: skip
    assert scores.shape == (2, 2, *mask.shape[1:])
    flat = [x.transpose(0, *order, 3).reshape(2, -1, 3) for x in (query, value, key)]
    flat_mask = mask.reshape(2, 6, 8)
    want_y, want_scores = loops(weights, *flat, lambda b, h, i, j: flat_mask[b, i, j], empty="zero")
    got = y.transpose(0, *order, 3).reshape(2, 6, 3)
    np.testing.assert_allclose(got, want_y, 1e-11, 1e-12)
    np.testing.assert_allclose(scores.reshape(2, 2, 6, 8), want_scores, 1e-11, 1e-12)


@pytest.mark.parametrize("axis", [1, 2, -2, -3])
def test_attention_over_one_axis_leaves_the_other_a_batch(axis):
    over = axis % 4
    other = 3 - over
    query, value, key = (np.moveaxis(rng.normal(size=(2, 3, L, 4)), 2, over) for L in (5, 6, 6))
    mask = rng.random((2, 3, 5, 6)) < 0.7
    queries, keys = rng.random((2, 5)) < 0.8, rng.random((2, 3, 6)) < 0.8
    weights = drawn_weights(MHA, query, value, key)
    y, scores = multi_head_attention(
        weights, query, value, key, **MHA, attention_axes=axis, attention_mask=mask,
        query_mask=queries, value_mask=keys, return_attention_scores=True,
    )  # fmt: skip
    for n in range(3):
        taken = (x.take(n, axis=other) for x in (query, value, key))
        want_y, want_scores = loops(
            weights,
            *taken,
            lambda b, h, i, j, n=n: mask[b, n, i, j] and queries[b, i] and keys[b, n, j],
            empty="zero",
        )
        np.testing.assert_allclose(y.take(n, axis=other), want_y, 1e-11, 1e-12)
        np.testing.assert_allclose(scores[:, n], want_scores, 1e-11, 1e-12)


def test_causality_over_one_axis_of_several():
    query, value, key = (rng.normal(size=(1, L, 3, 4)) for L in (5, 6, 6))
    weights = drawn_weights(MHA, query, value, key)
    y = multi_head_attention(
        weights, query, value, key, **MHA, attention_axes=(1,), use_causal_mask=True
    )
    for n in range(3):
        taken = (x[:, :, n] for x in (query, value, key))
        want, _ = loops(weights, *taken, lambda b, h, i, j: j <= i)
        np.testing.assert_allclose(y[:, :, n], want, 1e-11, 1e-12)


def test_weights_may_come_by_their_whole_paths():
    query, value, key = inputs()
    weights = drawn_weights(GQA, query, value, key)
    paths = {f"model/grouped_query_attention_1/{name}": array for name, array in weights.items()}
    np.testing.assert_array_equal(
        grouped_query_attention(paths, query, value, key, **GQA),
        grouped_query_attention(weights, query, value, key, **GQA),
    )


def test_a_hidden_nan_stays_hidden():
    query, value, key = inputs()
    weights = drawn_weights(MHA, query, value, key)
    seen = np.array([True, True, False, True, True])
    want = multi_head_attention(weights, query, value, key, **MHA, value_mask=[seen, seen])
    value[:, 2] = key[:, 2] = np.nan
    got = multi_head_attention(weights, query, value, key, **MHA, value_mask=[seen, seen])
    np.testing.assert_array_equal(got, want)


def test_without_keys_the_output_is_its_bias():
    query, value, key = inputs(Lk=0)
    weights = drawn_weights(MHA, query, value, key)
    y, scores = multi_head_attention(
        weights, query, value, key, **MHA, return_attention_scores=True
    )
    assert (y == weights["attention_output/bias"]).all()
    assert scores.shape == (2, 2, 4, 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_output_has_the_inputs_dtype_and_is_rounded_once(dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    query, value, key = (x.astype(dtype) for x in inputs())
    weights = drawn_weights(MHA, query, value, key)
    y, scores = multi_head_attention(
        weights, query, value, key, **MHA, return_attention_scores=True
    )
    assert (y.dtype, scores.dtype) == (dtype, dtype)
    wide = (x.astype(np.float64) for x in (query, value, key))
    want, _ = loops(weights, *wide, lambda b, h, i, j: True)
    unit = 2.0 ** -{"float16": 11, "bfloat16": 8, "float32": 24}[dtype.name]
    np.testing.assert_allclose(y.astype(np.float64), want, 1.01 * unit, 8e-6)


def test_nothing_is_written_to():
    query, value, key = inputs()
    weights = drawn_weights(MHA, query, value, key)
    for array in (query, value, key, *weights.values()):
        array.setflags(write=False)
    multi_head_attention(weights, query, value, key, **MHA, attention_mask=MASK)


X = np.ones((1, 3, 4))
W = drawn_weights(MHA, X, X, X)
W_GQA = drawn_weights(GQA, X, X, X)
X4 = np.ones((1, 3, 2, 4))


def without(name):
    return {other: array for other, array in W.items() if other != name}


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"dropout": 0.1}, ValueError, "dropout is 0.1: expected 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads is 2.0"),
        ({"key_dim": 0}, ValueError, "key_dim is 0"),
        ({"value_dim": -1}, ValueError, "value_dim is -1"),
        ({"use_bias": 1}, TypeError, "use_bias is 1"),
        ({"use_gate": None}, TypeError, "use_gate is None"),
        ({"use_causal_mask": "yes"}, TypeError, "use_causal_mask is 'yes'"),
        ({"return_attention_scores": 1}, TypeError, "return_attention_scores is 1"),
        ({"output_shape": ()}, ValueError, "output_shape is .*one size at least"),
        ({"output_shape": 2.5}, TypeError, "output_shape is 2.5"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0"),
        ({"sliding_window": True}, TypeError, "sliding_window is True"),
        ({"empty_rows": "none"}, ValueError, "empty_rows is 'none'"),
        ({"attention_axes": 0}, ValueError, "attention_axes is 0: expected different axes"),
        ({"attention_axes": -1}, ValueError, "attention_axes is -1: .* from 1 to 1"),
        ({"attention_axes": ()}, ValueError, "one at least"),
        ({"attention_axes": (1, -2)}, ValueError, "expected different axes"),
        ({"attention_axes": 1.0}, TypeError, "attention_axes is 1.0"),
        ({"query": X4, "value": X4, "use_causal_mask": True}, ValueError, "use_causal_mask with"),
        ({"query": X4, "value": X4, "sliding_window": 2}, ValueError, "sliding_window with"),
        (
            {"query": X4, "value": X4, "value_mask": np.ones((1, 3), bool)},
            ValueError,
            "value_mask with attention over 2 axes",
        ),
        ({"query": X[0]}, ValueError, r"query has shape \(3, 4\)"),
        ({"value": X4}, ValueError, r"value has shape \(1, 3, 2, 4\), query \(1, 3, 4\)"),
        ({"key": np.ones((1, 2, 4))}, ValueError, "every key needs one value"),
        ({"value": np.ones((2, 3, 4))}, ValueError, "value has size 2 in axis 0 but query has 1"),
        (
            {"query": X4, "value": np.ones((1, 3, 5, 4)), "attention_axes": 1},
            ValueError,
            "value has size 5 in axis 2 but query has 2",
        ),
        ({"query": [["a"]]}, TypeError, "query has dtype"),
        ({"attention_mask": np.ones((2, 3), bool)}, ValueError, "attention_mask has shape"),
        ({"attention_mask": np.ones(3, bool)}, ValueError, r"expected \(3, 3\), \(1, 3, 3\) or"),
        ({"attention_mask": np.ones((1,) * 5, bool)}, ValueError, "attention_mask has shape"),
        (
            {"attention_mask": np.array([[0.0, -np.inf, 0.0]] * 3)},
            TypeError,
            "attention_mask has dtype float64 .* Keras adds no mask",
        ),
        ({"query_mask": np.ones((1, 2), bool)}, ValueError, "query_mask has shape"),
        ({"value_mask": np.ones((3,), bool)}, ValueError, r"expected \(B, L\) = \(1, 3\)"),
        ({"key_mask": [[1, 2, 3]]}, TypeError, "key_mask has dtype int64"),
        ({"params": [W]}, TypeError, "params is of type list"),
        ({"params": without("query/bias")}, ValueError, r"no query/bias: .*\(2, 3\).*use_bias"),
        ({"use_bias": False}, ValueError, "params has query/bias, which this layer does not"),
        ({"use_gate": True}, ValueError, "params has no gate/kernel"),
        ({"params": {**W, "a/key/bias": W["key/bias"]}}, ValueError, "weights of one layer"),
        (
            {"params": {**W, "query/kernel": W["query/kernel"].T}},
            ValueError,
            r"query/kernel has shape \(3, 2, 4\): expected \(4, 2, 3\); it looks transposed",
        ),
        (
            {"params": {**W, "attention_output/kernel": np.ones((4, 2, 3))}},
            ValueError,
            r"looks transposed, Keras has \(heads, width, out\)",
        ),
        (
            {"num_heads": 4},
            ValueError,
            r"query/kernel has shape \(4, 2, 3\): expected \(4, 4, 3\)$",
        ),
        ({"params": {**W, "key/bias": W["key/bias"] > 0}}, TypeError, "key/bias has dtype bool"),
    ],
)
def test_errors_name_the_argument(change, error, sentence):
    arguments = {"params": W, "query": X, "value": X, **MHA, **change}
    with pytest.raises(error, match=sentence):
        multi_head_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"num_key_value_heads": 3}, ValueError, "H must be a multiple of Hkv"),
        ({"num_query_heads": 0}, ValueError, "num_query_heads is 0"),
        ({"head_dim": "3"}, TypeError, "head_dim is '3'"),
        ({"query": X4, "value": X4}, ValueError, "expected 3 axes"),
        ({"dropout": 0.5}, ValueError, "dropout is 0.5"),
        ({"num_key_value_heads": 1}, ValueError, r"key/kernel .*: expected \(4, 1, 3\)"),
    ],
)
def test_errors_of_the_grouped_layer_name_the_argument(change, error, sentence):
    arguments = {"params": W_GQA, "query": X, "value": X, **GQA, **change}
    with pytest.raises(error, match=sentence):
        grouped_query_attention(**arguments)


def test_inputs_without_a_common_dtype_are_refused():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with pytest.raises(TypeError, match="query is bfloat16, value is float16"):
        multi_head_attention(W, X.astype(bfloat16), X.astype(np.float16), **MHA)


@pytest.mark.parametrize("cfg", [MHA, GQA])
@pytest.mark.parametrize("asks", [False, True])
def test_the_conformance_adaptor_gives_what_keras_gives_on_either_of_its_ways(cfg, asks):
    query, value, key = inputs()
    weights = drawn_weights(cfg, query, value, key)
    meta = {
        "cfg": {**cfg, "use_bias": True, "dropout": 0.0, "name": "layer"},
        "call": {"use_causal_mask": False, "return_attention_scores": asks},
    }
    given = {"query": query, "value": value, "key": key, "attention_mask": MASK}
    y, scores = adaptor.keras_layer(meta, weights, given)
    want_y, want_scores = loops(
        weights, query, value, key, lambda b, h, i, j: MASK[b, i, j], "zero" if asks else "mean"
    )
    np.testing.assert_allclose(y, want_y, 1e-11, 1e-12)
    if asks:
        np.testing.assert_allclose(scores, want_scores, 1e-11, 1e-12)
    else:
        assert scores is None


@pytest.fixture(scope="module")
def keras():
    # On NumPy: JAX compiles for every shape. KERAS_BACKEND chooses another.
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    return pytest.importorskip("keras", reason="keras, or the backend it runs on, is not installed")


def drawn_arrays(r, rank):
    """query, value and maybe key, whose lengths fill ``rank`` - 2 axes."""
    B = int(r.integers(1, 4))
    Lq, Lk = (tuple(int(n) for n in r.integers(1, 6, rank - 2)) for _ in range(2))
    E, Ev, Ek = (int(n) for n in r.integers(1, 6, 3))
    arrays = {"query": (B, *Lq, E), "value": (B, *Lk, Ev), "key": (B, *Lk, Ek)}
    arrays = {name: r.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}
    if r.random() < 0.3:
        del arrays["key"]
    return arrays


def drawn_masks(r, arrays, H):
    """Masks for inputs of three axes; a 4-D one goes without padding, which Keras misplaces."""
    (B, Lq, _), (_, Lk, _) = arrays["query"].shape, arrays["value"].shape
    masks = {}
    if r.random() < 0.5:
        shape = [(Lq, Lk), (B, Lq, Lk), (1, Lq, Lk), (B, 1, Lk), (B, 1, Lq, Lk), (B, H, Lq, Lk)]
        mask = r.random(shape[r.integers(len(shape))]) < 0.6
        masks["attention_mask"] = mask.astype([np.bool_, np.int32][r.integers(2)])
        if mask.ndim == 4:
            return masks
    for name, L in (("query_mask", Lq), ("value_mask", Lk), ("key_mask", Lk)):
        if r.random() < 0.2:
            masks[name] = r.random((B, L)) < 0.7
    return masks


def drawn_options(r):
    options = {
        "use_bias": bool(r.integers(2)),
        "use_gate": bool(r.integers(2)),
        "sliding_window": int(r.integers(1, 5)),
    }
    options = {name: value for name, value in options.items() if r.random() < 0.5}
    call = {
        name: True for name in ("use_causal_mask", "return_attention_scores") if r.random() < 0.4
    }
    return options, call


def assert_keras_gives_the_same(keras, layer, arrays, masks, cfg, call, r, seed):
    shapes = [arrays[name].shape for name in ("query", "value", "key") if name in arrays]
    layer.build(*shapes)
    for weight in layer.weights:
        weight.assign(r.normal(size=weight.shape) / 2)
    weights = {weight.path: np.asarray(weight) for weight in layer.weights}
    given = {**arrays, **masks}
    if "num_heads" in cfg and "query_mask" in given:
        # This layer reads a query's mask off the query, where Masking leaves it.
        given["query"] = given["query"] * given.pop("query_mask")[..., None]
        arrays = {**arrays, "query": given["query"]}
        given["query"] = keras.layers.Masking()(given["query"])
    want = layer(**given, **call)
    asks = "return_attention_scores" in call
    got = layer_of(cfg)(
        weights,
        **arrays,
        **masks,
        **cfg,
        **call,
        empty_rows="zero" if asks else None,
        backend=["dense", "cpu"][seed % 2],
    )
    pairs = zip(("output", "scores"), got, want, strict=True) if asks else [("output", got, want)]
    for name, one, other in pairs:
        other = np.asarray(other)
        assert one.shape == other.shape
        np.testing.assert_allclose(
            one, other, 5e-5, 1e-5, err_msg=f"seed {seed}: {name}, {cfg}, {call}, {list(masks)}"
        )


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis")  # where Lk is 1
@pytest.mark.parametrize("draw", range(300))
def test_keras_gives_the_same_for_multi_head_attention(keras, draw):
    seed = int(rng.integers(2**32))
    r = np.random.default_rng(seed)
    rank = 3 if r.random() < 0.7 else 4
    arrays = drawn_arrays(r, rank)
    options, call = drawn_options(r)
    cfg = {"num_heads": int(r.integers(1, 4)), "key_dim": int(r.integers(1, 5)), **options}
    if r.random() < 0.3:
        cfg["output_shape"] = [3, (2,), (2, 3)][r.integers(3)]
    if rank == 3:
        masks = drawn_masks(r, arrays, cfg["num_heads"])
        if r.random() < 0.3:
            cfg["attention_axes"] = [1, (1,), -2][r.integers(3)]
        # On JAX only the way that returns scores takes values with a width of their own.
        if "return_attention_scores" in call or keras.config.backend() != "jax":
            cfg["value_dim"] = int(r.integers(1, 5))
    else:
        cfg["value_dim"] = int(r.integers(1, 5))
        masks = several_axes(r, arrays, cfg, call)
    layer = keras.layers.MultiHeadAttention(**cfg, kernel_initializer="zeros")
    assert_keras_gives_the_same(keras, layer, arrays, masks, cfg, call, r, seed)


def several_axes(r, arrays, cfg, call):
    """Draw ``attention_axes`` for inputs of four axes, make the sizes fit, and draw a mask."""
    axes = [None, 1, 2, (2, 1), (-3,), (1, 2)][r.integers(6)]
    cfg["attention_axes"] = axes
    over = {None: (1, 2), (-3,): (1,), 1: (1,), 2: (2,)}.get(axes, axes)
    for name in ("value", "key"):
        for axis in {1, 2} - set(over):
            size = arrays["query"].shape[axis]
            if name in arrays:
                arrays[name] = np.repeat(arrays[name].take([0], axis), size, axis)
                arrays[name] += r.normal(size=arrays[name].shape).astype(np.float32)
    if over != (1,):  # Keras counts positions along axis 1
        call.pop("use_causal_mask", None)
        cfg.pop("sliding_window", None)
    if r.random() < 0.5:
        return {}
    q, v = arrays["query"].shape, arrays["value"].shape
    lengths = tuple(q[axis] for axis in over) + tuple(v[axis] for axis in over)
    shape = lengths if r.random() < 0.5 else (q[0], *lengths)
    if "use_causal_mask" in call or "sliding_window" in cfg:
        shape = lengths  # which Keras broadcasts with a mask of positions
    return {"attention_mask": r.random(shape) < 0.6}


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis")  # where Lk is 1
@pytest.mark.parametrize("draw", range(300))
def test_keras_gives_the_same_for_grouped_query_attention(keras, draw):
    seed = int(rng.integers(2**32))
    r = np.random.default_rng(seed)
    arrays = drawn_arrays(r, 3)
    options, call = drawn_options(r)
    Hkv, group, D = (int(n) for n in r.integers(1, 4, 3))
    cfg = {"num_query_heads": Hkv * group, "num_key_value_heads": Hkv, "head_dim": D, **options}
    masks = drawn_masks(r, arrays, Hkv * group)
    layer = keras.layers.GroupQueryAttention(**cfg, kernel_initializer="zeros")
    assert_keras_gives_the_same(keras, layer, arrays, masks, cfg, call, r, seed)
