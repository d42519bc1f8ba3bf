"""ONNX's operators: ONNX's own node tests, corner cases of its conventions, refused arguments."""

import importlib
import warnings
from math import sqrt

import naive
import numpy as np
import pytest

from minimha.dialects import onnx

CALLS = {
    "Attention": ("attention", onnx.attention, 93),
    "RotaryEmbedding": ("rotaryembedding", onnx.rotary_embedding, 8),
    "TensorScatter": ("tensorscatter", onnx.tensor_scatter, 3),
}
LOW = {"float16": 2e-3, "bfloat16": 8e-3}  # one unit in the last place of numbers below 2


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def node_cases(module, operator):
    """ONNX's own cases for one operator, except those that expand it into a graph."""
    node = pytest.importorskip(
        "onnx.backend.test.case.node", reason="the node tests come with the onnx package"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases provoke NaN and overflow on purpose
        importlib.import_module(f"onnx.backend.test.case.node.{module}")
    cases = [c for c in node._NodeTestCases if "_expanded" not in c.name]
    return [case for case in cases if case.model.graph.node[0].op_type == operator]


def check(case, function, **options):
    """Fail if an output of ``function`` differs from what a node test expects."""
    from onnx import helper

    node = case.model.graph.node[0]
    schema = importlib.import_module("onnx.defs").get_schema(node.op_type)
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attrs = {name: a.decode() if isinstance(a, bytes) else a for name, a in attrs.items()}
    (inputs, outputs), *_ = case.data_sets
    names = [(declared.name, used) for declared, used in zip(schema.inputs, node.input)]  # noqa: B905
    given = dict(zip([name for name, used in names if used], inputs, strict=True))
    result = function(**given, **attrs, **options)
    results = result if isinstance(result, tuple) else (result,)
    got = [array for array, used in zip(results, node.output) if used]  # noqa: B905
    for array, want in zip(got, outputs, strict=True):
        want = np.asarray(want)
        low = LOW.get(want.dtype.name)
        np.testing.assert_equal(array.dtype, want.dtype)
        np.testing.assert_allclose(
            array.astype(float), want.astype(float), low or case.rtol, low or case.atol
        )


@pytest.mark.parametrize("operator", CALLS)
def test_every_node_test_of_onnx_passes(operator):
    module, function, at_least = CALLS[operator]
    options = {"return_qk_matmul_output": True} if operator == "Attention" else {}
    cases = node_cases(module, operator)
    assert len(cases) >= at_least
    for case in cases:
        try:
            check(case, function, **options)
        except Exception as error:
            raise AssertionError(f"{case.name}: {error}") from error


def oracle(q, k, v, sees, **options):
    """The pure-Python attention over the keys for which ``sees(b, i, j)``."""
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    mask = [
        [[[sees(b, i, j) for j in range(Lk)] for i in range(Lq)] for _ in range(H)]
        for b in range(B)
    ]
    arrays = (array.tolist() for array in (q, k, v))
    return np.array(naive.attention(*arrays, attn_mask=mask, **options)[0])


Q, K, V = normal(2, 4, 3, 5), normal(2, 2, 6, 5), normal(2, 2, 6, 7)
PAST_K, PAST_V = normal(2, 2, 4, 5, seed=1), normal(2, 2, 4, 7, seed=1)
NONPAD = np.array([5, 2])  # the second is shorter than Lq: its first query sees no key


@pytest.mark.parametrize("backend", ["auto", "tiled", "cpu"])
@pytest.mark.parametrize(
    ("attributes", "left", "right"),
    [
        ({"is_causal": 1}, 99, 0),
        ({"is_causal": 1, "left_window_size": 1}, 1, 0),
        ({"left_window_size": 2, "right_window_size": 1}, 2, 1),
        ({"is_causal": 1, "right_window_size": 3}, 99, 0),
    ],
)
def test_positions_follow_the_cache(attributes, left, right, backend):
    if backend == "cpu":
        pytest.importorskip("numba", reason="the cpu backend is compiled by numba")
    options = {**attributes, "scale": 0.7, "softcap": 1.5, "backend": backend}
    with_past = {"past_key": PAST_K, "past_value": PAST_V}
    long_K, long_V = np.concatenate([PAST_K, K], 2), np.concatenate([PAST_V, V], 2)
    for inputs, keys, values, offset, length in (
        ({}, K, V, [0, 0], [6, 6]),
        (with_past, long_K, long_V, [4, 4], [10, 10]),
        ({"nonpad_kv_seqlen": NONPAD}, K, V, [2, -1], [5, 2]),
    ):

        def sees(b, i, j, offset=offset, length=length):
            return -left <= j - (i + offset[b]) <= right and j < length[b]

        want = oracle(Q, keys, values, sees, scale=0.7, softcap=1.5)
        got = onnx.attention(Q, K, V, **inputs, **options)
        np.testing.assert_allclose(got.Y, want, atol=1e-12)
        np.testing.assert_array_equal(got.present_key, keys)
        np.testing.assert_array_equal(got.present_value, values)


def test_a_query_without_keys_gets_zero_and_zero_weights():
    got = onnx.attention(
        Q, K, V, nonpad_kv_seqlen=NONPAD, is_causal=1, qk_matmul_output_mode=3,
        return_qk_matmul_output=True,
    )  # fmt: skip
    assert not got.Y[1, :, 0].any()
    assert not got.qk_matmul_output[1, :, 0].any()
    np.testing.assert_allclose(got.qk_matmul_output[0].sum(-1), 1)


def test_three_dimensions_hold_the_heads_side_by_side():
    flat = [np.concatenate(list(np.moveaxis(a, 1, 0)), axis=-1) for a in (Q, K, V)]
    Y = onnx.attention(*flat, q_num_heads=4, kv_num_heads=2).Y
    want = oracle(Q, K, V, lambda b, i, j: True)
    np.testing.assert_allclose(Y, np.concatenate(list(np.moveaxis(want, 1, 0)), -1), atol=1e-12)


def test_a_mask_of_three_dimensions_is_one_of_heads():
    mask = np.zeros((4, 3, 6))
    mask[1, :, 2:] = -np.inf
    Y = onnx.attention(Q, K, V, mask).Y
    hidden = oracle(Q, K, V, lambda b, i, j: j < 2)
    np.testing.assert_allclose(Y[:, 1], hidden[:, 1], atol=1e-12)
    np.testing.assert_allclose(Y[:, 0], oracle(Q, K, V, lambda b, i, j: True)[:, 0], atol=1e-12)


@pytest.mark.parametrize("reach", [1, 2, 5])
@pytest.mark.parametrize("mask", [np.ones((3, 6), bool), np.zeros((1, 3, 6)), np.zeros(6, int)])
def test_keys_after_a_short_mask_are_hidden(mask, reach):
    Y = onnx.attention(Q, K, V, mask[..., :reach]).Y
    np.testing.assert_allclose(Y, oracle(Q, K, V, lambda b, i, j: j < reach), atol=1e-12)


def test_integers_in_a_mask_are_added():
    Y = onnx.attention(Q, K, V, np.array([[3, 1, 0, 0, 0, 2]] * 3, np.uint8)).Y
    bias = [[[[3, 1, 0, 0, 0, 2]] * 3] * 4] * 2
    want = oracle(Q, K, V, lambda b, i, j: True, attn_bias=bias)
    np.testing.assert_allclose(Y, want, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_each_mode_shows_one_step(scale):
    bias, cap = normal(3, 6, seed=2), 0.5
    bias[0, 1] = -np.inf
    raw = np.einsum("bhid,bhjd->bhij", Q, K[:, [0, 0, 1, 1]])
    raw = raw * (1 / sqrt(5) if scale is None else scale)
    capped = cap * np.tanh(raw / cap)
    powers = np.exp(capped + bias)
    steps = [raw, capped, capped + bias, powers / powers.sum(-1, keepdims=True)]
    plain = onnx.attention(Q, K, V, bias, softcap=cap, scale=scale)
    assert plain.qk_matmul_output is None
    for mode, want in enumerate(steps):
        got = onnx.attention(
            Q, K, V, bias, softcap=cap, scale=scale, qk_matmul_output_mode=mode,
            return_qk_matmul_output=True,
        )  # fmt: skip
        np.testing.assert_allclose(got.qk_matmul_output, want, atol=1e-12)
        np.testing.assert_array_equal(got.Y, plain.Y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_output_has_the_dtype_of_q_whatever_the_softmax_has(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is a dtype of ml_dtypes")
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (a.astype(narrow) for a in (Q, K, V))
    want = oracle(*(a.astype(float) for a in (q, k, v)), lambda b, i, j: True)
    for precision in (None, 1, 10, 11, 16):
        got = onnx.attention(
            q, k, v.astype(float), softmax_precision=precision, return_qk_matmul_output=True
        )
        assert (got.Y.dtype, got.qk_matmul_output.dtype) == (narrow, narrow)
        assert got.present_value.dtype == np.float64
        np.testing.assert_array_equal(got.Y, want.astype(narrow))


def rotated(x, cos, sin, pairs):
    """One vector, each pair rotated by hand."""
    y = list(x)
    for (a, b), c, s in zip(pairs, cos, sin, strict=True):
        y[a], y[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return y


@pytest.mark.parametrize(
    ("interleaved", "width", "pairs"),
    [(0, 0, [(0, 3), (1, 4), (2, 5)]), (1, 0, [(0, 1), (2, 3), (4, 5)]), (0, 4, [(0, 2), (1, 3)]),
     (1, 4, [(0, 1), (2, 3)])],
)  # fmt: skip
def test_rotation_turns_every_pair_by_its_position(interleaved, width, pairs):
    X, angle = normal(2, 3, 4, 6), normal(9, len(pairs), seed=3)
    places = np.array([[0, 8, 3, 3], [1, 2, 7, 0]])
    tables = np.cos(angle), np.sin(angle)
    want = [
        [[rotated(X[b, h, i], *(t[places[b, i]] for t in tables), pairs) for i in range(4)]
         for h in range(3)] for b in range(2)
    ]  # fmt: skip
    options = {"interleaved": interleaved, "rotary_embedding_dim": width}
    got = onnx.rotary_embedding(X, *tables, places, **options)
    np.testing.assert_allclose(got, want, atol=1e-12)
    flat = np.concatenate(list(np.moveaxis(X, 1, 0)), -1)
    rows = [t[places] for t in tables]
    flat = onnx.rotary_embedding(flat, *rows, num_heads=3, **options)
    np.testing.assert_array_equal(flat, np.concatenate(list(np.moveaxis(got, 1, 0)), -1))


@pytest.mark.parametrize("axis", [1, 2, -1, -2])
@pytest.mark.parametrize(("mode", "starts"), [("linear", [0, 2]), ("circular", [3, 9])])
def test_scatter_writes_entry_after_entry(axis, mode, starts):
    cache, shape = normal(2, 4, 4), [2, 4, 4]
    shape[axis] = 2
    update, want = normal(*shape, seed=4), cache.copy()
    for b in range(2):
        for n in range(2):
            to, of = np.moveaxis(want, axis, 1), np.moveaxis(update, axis, 1)
            to[b, (starts[b] + n) % 4] = of[b, n]
    before = cache.copy()
    got = onnx.tensor_scatter(cache, update, starts, axis=axis, mode=mode)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(cache, before)


def test_scatter_without_indices_writes_at_the_start_of_any_dtype():
    got = onnx.tensor_scatter(np.array([[["a"], ["b"]]]), np.array([[["c"]]]))
    assert got.tolist() == [[["c"], ["b"]]]


FLAT = np.ones((2, 3, 8))
MASKED = np.ma.masked_array(np.ones((3, 6), int), mask=True)
REFUSED = [
    ({"is_causal": 2}, ValueError, "is_causal is 2: expected an integer from 0 to 1"),
    ({"is_causal": 0.5}, TypeError, "is_causal is 0.5: expected an integer"),
    ({"qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode is 4: expected an integer f"),
    ({"left_window_size": -2}, ValueError, "left_window_size is -2: expected an integer of at lea"),
    ({"right_window_size": -2}, ValueError, "right_window_size is -2"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0: expected a number of at least 0"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan"),
    ({"scale": -1.0}, ValueError, "scale is -1.0: expected a number of at least 0"),
    ({"scale": "1"}, TypeError, "scale is '1': expected a number"),
    ({"softmax_precision": 7}, ValueError, "softmax_precision is 7: expected 1 (float), 10 (float"),
    ({"q_num_heads": 3}, ValueError, "q_num_heads is 3 but Q has 4 heads, shape (2, 4, 3, 5)"),
    ({"q_num_heads": 0}, ValueError, "q_num_heads is 0: expected an integer of at least 1"),
    ({"kv_num_heads": 4}, ValueError, "kv_num_heads is 4 but K has 2 heads"),
    ({"past_key": PAST_K}, ValueError, "past_value is missing: past_key and past_value go togeth"),
    ({"past_value": PAST_V}, ValueError, "past_key is missing"),
    ({"past_key": PAST_K[0], "past_value": PAST_V}, ValueError, "past_key has shape (2, 4, 5)"),
    ({"past_key": PAST_K, "past_value": PAST_V[:, :, 1:]}, ValueError,
     "past_value has shape (2, 2, 3, 7): expected (B, Hkv, P, width) = (2, 2, 4, 7)"),
    ({"past_key": PAST_K.astype("f4"), "past_value": PAST_V}, TypeError,
     "past_key has dtype float32 but K has float64"),
    ({"past_key": PAST_K, "past_value": PAST_V, "nonpad_kv_seqlen": NONPAD}, ValueError,
     "nonpad_kv_seqlen is given with past_key"),
    ({"nonpad_kv_seqlen": [1, 7]}, ValueError, "nonpad_kv_seqlen is [1, 7]: expected integers fr"),
    ({"nonpad_kv_seqlen": [1]}, ValueError, "nonpad_kv_seqlen has shape (1,): expected (B,) = (2,"),
    ({"nonpad_kv_seqlen": [1.0, 2.0]}, TypeError, "nonpad_kv_seqlen has dtype float64"),
    ({"attn_mask": np.ones((3, 7), bool)}, ValueError, "attn_mask has shape (3, 7): expected 1 to"),
    ({"attn_mask": np.ones((2, 3, 6))}, ValueError, "attn_mask has shape (2, 3, 6)"),
    ({"attn_mask": [[1, 0], [1]]}, ValueError, "attn_mask is not a rectangular array of numbers: "),
    ({"attn_mask": np.float64(1)}, ValueError, "attn_mask has shape ()"),
    ({"attn_mask": np.ones((3, 4)), "nonpad_kv_seqlen": NONPAD}, ValueError,
     "attn_mask has shape (3, 4), a last axis of 4: expected at least 5, the largest nonpad_kv"),
    ({"K": K.astype("f4")}, TypeError, "K has dtype float32 but Q has float64"),
    ({"K": FLAT}, ValueError, "K has shape (2, 3, 8), Q (2, 4, 3, 5): expected (B, H, L"),
    ({"Q": FLAT, "K": FLAT, "V": FLAT}, ValueError, "q_num_heads is missing: Q has shape (2, 3, 8"),
    ({"Q": FLAT, "K": FLAT, "V": FLAT, "q_num_heads": 2}, ValueError, "kv_num_heads is missing"),
    ({"Q": FLAT, "K": FLAT, "V": FLAT, "q_num_heads": 3, "kv_num_heads": 2}, ValueError,
     "Q has a last axis of 8, shape (2, 3, 8): expected a multiple of q_num_heads=3"),
    ({"return_qk_matmul_output": 1}, TypeError, "return_qk_matmul_output is 1: expected True or"),
    ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ({"Q": Q[:, :3]}, ValueError, "K has 2 heads but Q has 3: H must be a multiple of Hkv"),
    ({"attn_mask": MASKED}, TypeError, "attn_mask is a masked array, whose mask would be lost"),
    ({"nonpad_kv_seqlen": MASKED[0, :2]}, TypeError, "nonpad_kv_seqlen is a masked array"),
    ({"past_key": [[1], []], "past_value": PAST_V}, ValueError, "past_key is not a rectangular ar"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "sentence"), REFUSED)
def test_refused_attention_is_a_sentence(changes, kind, sentence):
    with pytest.raises(kind) as error:
        onnx.attention(**{"Q": Q, "K": K, "V": V, **changes})
    assert sentence in str(error.value)


X, TABLE = np.ones((2, 3, 4, 6)), np.ones((9, 3))


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"interleaved": 2}, ValueError, "interleaved is 2: expected an integer from 0 to 1"),
        ({"rotary_embedding_dim": 8}, ValueError, "rotary_embedding_dim is 8: expected an integer"),
        ({"rotary_embedding_dim": 3}, ValueError, "R must be even, a rotation turns pairs"),
        ({"num_heads": 2}, ValueError, "num_heads is 2 but X has 3 heads"),
        ({"X": X[0]}, ValueError, "num_heads is missing: X has shape (3, 4, 6)"),
        ({"X": X[0, 0]}, ValueError, "X has shape (4, 6): expected (B, H, L, D) or (B, L, H · D)"),
        ({"sin_cache": TABLE[:, :2]}, ValueError, "sin_cache has shape (9, 2): expected (positio"),
        ({"cos_cache": TABLE[:5]}, ValueError, "because cos_cache has 5 rows"),
        ({"position_ids": None}, ValueError, "cos_cache has shape (9, 3): expected (B, L, R / 2)"),
        ({"position_ids": np.full((2, 4), -1)}, ValueError, "expected integers from 0 to 8"),
        ({"position_ids": np.full((4,), 1)}, ValueError, "position_ids has shape (4,): expected"),
    ],
)
def test_refused_rotation_is_a_sentence(changes, kind, sentence):
    given = {"X": X, "cos_cache": TABLE, "sin_cache": TABLE, "position_ids": np.full((2, 4), 8)}
    with pytest.raises(kind) as error:
        onnx.rotary_embedding(**{**given, **changes})
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"mode": "ring"}, ValueError, "mode is 'ring': expected 'linear' or 'circular'"),
        ({"axis": 0}, ValueError, "axis is the batch's"),
        ({"axis": -3}, ValueError, "axis is the batch's"),
        ({"axis": 3}, ValueError, "axis is 3: expected an integer from -3 to 2"),
        ({"write_indices": [0, 3]}, ValueError, "write_indices is [0, 3]: expected integers from"),
        ({"write_indices": [-1, 0]}, ValueError, "because 2 entries must fit into 4"),
        ({"write_indices": [0]}, ValueError, "write_indices has shape (1,): expected (B,) = (2,)"),
        ({"update": np.ones((2, 5, 3))}, ValueError, "update has shape (2, 5, 3) but past_cache"),
        ({"update": np.ones((2, 2, 2))}, ValueError, "they may differ in axis 1 only"),
        ({"update": np.ones((2, 2, 3), "f4")}, TypeError, "update has dtype float32 but past_cac"),
        ({"update": [[1], [1, 2]]}, ValueError, "update is not a rectangular array of numbers: "),
        ({"past_cache": np.ones(2)}, ValueError, "past_cache has shape (2,): expected a batch"),
        ({"update": np.ma.ones((2, 2, 3))}, TypeError, "update is a masked array"),
    ],
)
def test_refused_scatter_is_a_sentence(changes, kind, sentence):
    given = {"past_cache": np.ones((2, 4, 3)), "update": np.ones((2, 2, 3))}
    with pytest.raises(kind) as error:
        onnx.tensor_scatter(**{**given, **changes})
    assert sentence in str(error.value)
