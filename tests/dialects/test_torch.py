"""torch's conventions: by hand, in every refusal, and against torch itself."""

import copy
import math
from types import SimpleNamespace

import ml_dtypes
import naive
import numpy as np
import pytest

from minimha import block_mask
from minimha.dialects.torch import (
    flex_attention,
    multihead_attention,
    scaled_dot_product_attention,
)

rng = np.random.default_rng(0)
BACKENDS = ("dense", "cpu")
DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


# ---- scaled_dot_product_attention by hand -------------------------------------------------------


def one_head(q, k, v, scale=None, mask=None, added=None):
    """Attention of (L, D) matrices in Python floats."""
    arrays = ([[x.tolist()]] for x in (q, k, v))
    mask, added = (None if x is None else [[x.tolist()]] for x in (mask, added))
    options = {"attn_mask": mask, "attn_bias": added, "scale": scale, "value_width": v.shape[-1]}
    return np.reshape(naive.attention(*arrays, **options)[0], (len(q), v.shape[-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("Lk", [1, 3, 5, 7])
def test_causality_begins_at_the_top_left_and_a_mask_must_agree(Lk, backend):
    q, k, v = normal(5, 2), normal(Lk, 2), normal(Lk, 3)
    past = np.array([[j <= i for j in range(Lk)] for i in range(5)])
    odd = np.array([[(i + j) % 2 == 1 for j in range(Lk)] for i in range(5)])
    for mask, seen in ((None, past), (odd, past & odd)):
        got = scaled_dot_product_attention(q, k, v, mask, is_causal=True, backend=backend)
        np.testing.assert_allclose(got, one_head(q, k, v, mask=seen), 1e-12, 1e-13)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 2])
def test_a_float_mask_is_added_to_the_scaled_scores(scale):
    q, k, v, mask = normal(3, 4), normal(5, 4), normal(5, 2), normal(3, 5)
    mask[0, 2:] = mask[1] = -np.inf
    mask[2, :2] = np.finfo(float).min
    got = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    np.testing.assert_allclose(got, one_head(q, k, v, scale, added=mask), 1e-12, 1e-13)
    assert not got[1].any()


def test_one_finite_number_in_every_place_of_a_mask_changes_nothing():
    q, k, v = normal(3, 4), normal(5, 4), normal(5, 2)
    got = scaled_dot_product_attention(q, k, v, np.full((3, 5), -1e4))
    np.testing.assert_allclose(got, one_head(q, k, v), 1e-10)


@pytest.mark.parametrize(
    ("q", "k", "v", "mask"),
    [
        ((), (), (), ()),
        ((3,), (), (3,), (1,)),
        ((2, 3), (1, 3), (3,), (3,)),
        ((1, 3), (2, 1), (2, 3), (2, 1)),
        ((2, 1, 3), (2, 1), (1, 1, 3), (1, 2, 3)),
        ((2, 1, 1, 2, 3), (1,), (2, 1, 2, 1, 1), (2, 3)),
    ],
)
def test_any_number_of_leading_axes_broadcasts(q, k, v, mask):
    lead = np.broadcast_shapes(q, k, v, mask)
    q, k, v, mask = normal(*q, 3, 4), normal(*k, 5, 4), normal(*v, 5, 2), normal(*mask, 3, 5) < 0.5
    got = scaled_dot_product_attention(q, k, v, mask)
    assert got.shape == (*lead, 3, 2)
    whole = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (q, k, v, mask)]
    for at in np.ndindex(lead):
        want = one_head(*(x[at] for x in whole[:3]), mask=whole[3][at])
        np.testing.assert_allclose(got[at], want, 1e-12, 1e-13)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("Hk", "Hv"), [(1, 1), (2, 2), (6, 6), (3, 2), (1, 6)])
def test_query_head_h_reads_head_h_divided_by_the_group_in_keys_and_values(lead, Hk, Hv):
    q, k, v = normal(*lead, 6, 3, 4), normal(*lead, Hk, 5, 4), normal(*lead, Hv, 5, 2)
    got = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for *at, h in np.ndindex((*lead, 6)):
        want = one_head(q[(*at, h)], k[(*at, h * Hk // 6)], v[(*at, h * Hv // 6)])
        np.testing.assert_allclose(got[(*at, h)], want, 1e-12, 1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lead", "Lq", "Lk", "options"),
    [
        ((2, 3), 4, 0, {}),
        ((), 4, 0, {"is_causal": True}),
        ((2, 3), 4, 0, {"attn_mask": np.ones((4, 0), bool)}),
        ((2, 3), 0, 5, {"is_causal": True}),
        ((0, 3), 4, 5, {"attn_mask": np.zeros((0, 1, 4, 5))}),
        ((0, 3), 4, 5, {"enable_gqa": True}),
        ((0,), 4, 5, {"attn_mask": np.ones((0, 4, 1), bool)}),
        ((2, 0), 4, 5, {}),
        ((2, 0, 3), 4, 5, {}),
    ],
)
def test_without_keys_the_output_is_zero_and_other_empty_axes_stay_empty(
    lead, Lq, Lk, options, backend
):
    q, k, v = normal(*lead, Lq, 6), normal(*lead, Lk, 6), normal(*lead, Lk, 2)
    got = scaled_dot_product_attention(q, k, v, **options, backend=backend)
    np.testing.assert_array_equal(got, np.zeros((*lead, Lq, 2)))


def test_a_query_that_sees_nothing_gets_zero_and_a_hidden_nan_stays_hidden():
    q, v = np.ones((2, 1)), np.array([[2.0], [np.nan]])
    mask = np.array([[True, False], [False, False]])
    assert scaled_dot_product_attention(q, v, v, mask).ravel().tolist() == [2, 0]


# ---- flex_attention by hand ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("Hkv", "Bkv"), [(4, 2), (2, 2), (2, 1)])
def test_score_mod_changes_the_scaled_scores_and_mask_mod_hides(Hkv, Bkv, backend):
    q, k, v = normal(2, 4, 3, 5), normal(Bkv, Hkv, 6, 5), normal(Bkv, Hkv, 6, 2)

    def score_mod(s, b, h, i, j):
        return s * s / (1 + h) - b + 0.5 * (i - j)

    def mask_mod(b, h, i, j):
        return (i + b != 1) & (j <= i + h)

    got, lse = flex_attention(
        q, k, v, score_mod, mask_mod, scale=0.3, enable_gqa=True, return_lse=True, backend=backend
    )
    for b, h, i in np.ndindex(2, 4, 3):
        keys, values = k[b % Bkv, h * Hkv // 4], v[b % Bkv, h * Hkv // 4]
        seen = [j for j in range(6) if mask_mod(b, h, i, j)]
        scores = [score_mod(0.3 * math.fsum(q[b, h, i] * keys[j]), b, h, i, j) for j in seen]
        want, want_lse = naive.row(scores, values[seen].tolist(), 2)
        np.testing.assert_allclose(got[b, h, i], want, 1e-11, 1e-12)
        np.testing.assert_allclose(lse[b, h, i], want_lse, 1e-12)
    assert np.isneginf(lse[0, :, 1]).all()
    assert np.isneginf(lse[1, :, 0]).all()


def test_scores_of_another_size_than_given_do_not_lose_digits():
    q = np.full((1, 1, 1, 1), 1e9)
    v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    got = flex_attention(q, v, v, lambda s, b, h, i, j: s * 0 + j * np.log(3))
    np.testing.assert_allclose(got.ravel(), [2.5], 1e-15)


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_flex_attention_of_empty_axes(B, Lq, Lk):
    q, k, v = normal(B, 2, Lq, 4), normal(B, 2, Lk, 4), normal(B, 2, Lk, 3)
    mods = (lambda s, b, h, i, j: s + i), (lambda b, h, i, j: j <= i)
    got, lse = flex_attention(q, k, v, *mods, return_lse=True)
    np.testing.assert_array_equal(got, np.zeros((B, 2, Lq, 3)))
    np.testing.assert_array_equal(lse, np.full((B, 2, Lq), -np.inf))


def test_a_block_mask_may_be_minimhas_or_hold_its_function():
    x = normal(1, 2, 5, 3)
    causal = scaled_dot_product_attention(x, x, x, is_causal=True)
    function = lambda b, h, i, j: i >= j  # noqa: E731
    ours, theirs = block_mask(function, 5, 5), SimpleNamespace(mask_mod=function)
    for given in ({"mask_mod": ours}, {"block_mask": ours}, {"block_mask": theirs}):
        np.testing.assert_allclose(flex_attention(x, x, x, **given), causal, rtol=1e-12)
    with pytest.raises(ValueError, match="mask_mod and block_mask are both given"):
        flex_attention(x, x, x, mask_mod=function, block_mask=ours)


# ---- MultiheadAttention by hand -----------------------------------------------------------------


def linear(x, W, b=None):
    """x Wᵀ + b of a matrix, by sums."""
    bias = np.zeros(len(W)) if b is None else b
    return [[math.fsum([*(row * w), c]) for w, c in zip(W, bias, strict=True)] for row in x]


def mha_by_hand(params, query, key, value, num_heads, added, add_zero_attn=False):
    """Output (Lq, E) and weights (H, Lq, Lk + extra) of one batch entry.

    ``added`` (H, Lq, Lk) goes to the scores of the tokens; -inf hides.
    """
    E = query.shape[-1]
    D, Lk = E // num_heads, len(key)
    if "in_proj_weight" in params:
        weights = [params["in_proj_weight"][n * E : (n + 1) * E] for n in range(3)]
    else:
        weights = [params[f"{name}_proj_weight"] for name in "qkv"]
    biases = np.reshape(params.get("in_proj_bias", np.zeros(3 * E)), (3, E))
    q, k, v = map(linear, (query, key, value), weights, biases)
    if "bias_k" in params:
        k, v = [*k, params["bias_k"][0, 0]], [*v, params["bias_v"][0, 0]]
    if add_zero_attn:
        k, v = [*k, np.zeros(E)], [*v, np.zeros(E)]
    q, k, v = (np.reshape(x, (-1, E)) for x in (q, k, v))
    heads, shown = np.zeros((len(q), E)), np.zeros((num_heads, len(q), len(k)))
    for h, i in np.ndindex(num_heads, len(q)):
        part = slice(h * D, (h + 1) * D)
        scores = [
            math.fsum(q[i, part] * k[j, part]) / math.sqrt(D) + (added[h, i, j] if j < Lk else 0)
            for j in range(len(k))
        ]
        heads[i, part], lse = naive.row(scores, v[:, part].tolist(), D)
        shown[h, i] = [0 if s == -math.inf else math.exp(s - lse) for s in scores]
    return linear(heads, params["out_proj.weight"], params.get("out_proj.bias")), shown


def added_by(key_padding_mask, attn_mask, b, shape):
    """What the two masks of torch's add to the scores (H, Lq, Lk) of batch entry b."""
    added = np.zeros(shape)
    if key_padding_mask is not None:
        added = added + additive(np.atleast_2d(key_padding_mask)[b])
    if attn_mask is not None:
        own = attn_mask if attn_mask.ndim == 2 else attn_mask[b * shape[0] :][: shape[0]]
        added = added + additive(own)
    return added


def additive(mask):
    return np.where(mask, -np.inf, 0.0) if mask.dtype == bool else mask.astype(float)


def drawn_params(E, Ek, Ev, *, bias=True, bias_kv=False, seed=0):
    """A state_dict of torch.nn.MultiheadAttention(E, kdim=Ek, vdim=Ev, …) of random numbers."""
    shapes = {"out_proj.weight": (E, E)}
    if Ek == Ev == E:
        shapes["in_proj_weight"] = (3 * E, E)
    else:
        widths = {"q": E, "k": Ek, "v": Ev}
        shapes |= {f"{name}_proj_weight": (E, width) for name, width in widths.items()}
    if bias:
        shapes |= {"in_proj_bias": (3 * E,), "out_proj.bias": (E,)}
    if bias_kv:
        shapes |= {"bias_k": (1, 1, E), "bias_v": (1, 1, E)}
    r = np.random.default_rng([seed, E, Ek, Ev])
    return {name: r.normal(size=shape) for name, shape in shapes.items()}


KEY_MASK = np.array([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1]], bool)  # entry 1 sees no token
PLACES = np.indices((6, 3, 5)).sum(0)
MHA = [
    ({}, {}),
    ({"key_padding_mask": KEY_MASK}, {}),
    ({"key_padding_mask": normal(2, 5)}, {"bias": False}),
    ({"attn_mask": PLACES[0] % 2 == 0}, {"bias_kv": True}),
    ({"attn_mask": PLACES % 3 == 1, "key_padding_mask": KEY_MASK}, {"Ek": 2, "Ev": 7}),
    ({"attn_mask": np.where(PLACES % 3 == 1, -np.inf, normal(6, 3, 5))}, {"Ev": 3}),
    ({"attn_mask": normal(3, 5), "key_padding_mask": KEY_MASK}, {"bias_kv": True}),
    ({"key_padding_mask": KEY_MASK, "add_zero_attn": True}, {}),
    ({"key_padding_mask": KEY_MASK, "add_zero_attn": True}, {"bias_kv": True, "bias": False}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "module"), MHA)
def test_multihead_attention_by_hand(options, module, backend):
    E, H = 6, 3
    widths = {"E": E, "Ek": E, "Ev": E} | {n: w for n, w in module.items() if n in ("Ek", "Ev")}
    params = drawn_params(**widths, **{n: w for n, w in module.items() if n not in widths})
    query, key, value = normal(2, 3, E), normal(2, 5, widths["Ek"]), normal(2, 5, widths["Ev"])
    arguments = {"num_heads": H, "backend": backend, **options}
    got, weights = multihead_attention(
        params, query, key, value, batch_first=True, average_attn_weights=False, **arguments
    )
    masks = [options.get("key_padding_mask"), options.get("attn_mask")]
    for b in range(2):
        added = added_by(*masks, b, (H, 3, 5))
        want, shown = mha_by_hand(
            params, query[b], key[b], value[b], H, added, options.get("add_zero_attn", False)
        )
        np.testing.assert_allclose(got[b], want, 1e-11, 1e-12)
        np.testing.assert_allclose(weights[b], shown, 1e-11, 1e-13)
    turned = [x.swapaxes(0, 1) for x in (query, key, value)]
    second, mean = multihead_attention(params, *turned, **arguments)
    np.testing.assert_array_equal(second, got.swapaxes(0, 1))
    np.testing.assert_allclose(mean, weights.mean(axis=1), 1e-12, 1e-15)
    alone, nothing = multihead_attention(params, *turned, need_weights=False, **arguments)
    assert nothing is None
    np.testing.assert_array_equal(alone, second)
    of_one = dict(zip(("key_padding_mask", "attn_mask"), masks, strict=True))
    if of_one["key_padding_mask"] is not None:
        of_one["key_padding_mask"] = of_one["key_padding_mask"][0]
    if of_one["attn_mask"] is not None:
        of_one["attn_mask"] = of_one["attn_mask"][:H]
    unbatched, row = multihead_attention(
        params, query[0], key[0], value[0], average_attn_weights=False, **arguments | of_one
    )
    np.testing.assert_allclose(unbatched, got[0], 1e-12, 1e-13)
    np.testing.assert_allclose(row, weights[0], 1e-12, 1e-15)


def test_a_query_that_sees_no_key_gets_the_bias_and_no_weights():
    params, x = drawn_params(4, 4, 4), normal(3, 1, 4)
    output, weights = multihead_attention(
        params, x, x, x, num_heads=2, key_padding_mask=np.ones((1, 3), bool)
    )
    np.testing.assert_array_equal(output, np.broadcast_to(params["out_proj.bias"], (3, 1, 4)))
    assert not weights.any()


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_multihead_attention_of_empty_axes(B, Lq, Lk):
    params = drawn_params(4, 4, 4)
    query, key = normal(B, Lq, 4), normal(B, Lk, 4)
    output, weights = multihead_attention(params, query, key, key, num_heads=2, batch_first=True)
    np.testing.assert_array_equal(
        output, np.broadcast_to(params["out_proj.bias"] if Lk == 0 else 0.0, (B, Lq, 4))
    )
    assert weights.shape == (B, Lq, Lk)


def test_two_masks_of_16_bits_are_added_in_32():
    x, params = normal(2, 1, 2).astype(np.float16), drawn_params(2, 2, 2, bias=False)
    pair = np.array([1024.5, 1025.0], np.float16)  # their double needs one bit more than there is
    masks = {"key_padding_mask": pair[None] + 1, "attn_mask": np.tile(pair, (2, 1))}
    _, weights = multihead_attention(params, x, x, x, num_heads=1, **masks)
    double = {n: v.astype(float) for n, v in masks.items()}
    exact = multihead_attention(params, *[x.astype(float)] * 3, num_heads=1, **double)[1]
    np.testing.assert_allclose(weights.astype(float), exact, 2e-3)


def test_twice_the_lowest_number_hides_as_minus_infinity_does():
    params, x = drawn_params(4, 4, 4), normal(2, 1, 4).astype(np.float32)
    lowest = np.finfo(np.float32).min
    masks = {
        "key_padding_mask": np.array([[lowest, 0]], np.float32),
        "attn_mask": np.array([[lowest, 0], [0, lowest]], np.float32),
    }
    _, weights = multihead_attention(params, x, x, x, num_heads=2, **masks)
    np.testing.assert_array_equal(weights[0, 0], [0, 1])
    np.testing.assert_array_equal(weights[0, 1], [0.5, 0.5])  # both finite, both the lowest


# ---- what is refused ----------------------------------------------------------------------------

X, KEYS = np.ones((2, 4, 3, 5)), np.ones((2, 4, 6, 5))
GIVEN = {"query": X, "key": KEYS, "value": np.ones((2, 4, 6, 7))}
HALF, BRAIN = X.astype(np.float16), KEYS.astype(ml_dtypes.bfloat16)
RAGGED = [[1.0, 2.0], [1.0]]
FITTING = [
    ({"query": RAGGED}, ValueError, "query is not a rectangular array of numbers"),
    ({"key": X > 0}, TypeError, "key has dtype bool: expected integers, float16"),
    ({"value": None}, TypeError, "value has dtype object"),
    ({"query": HALF, "key": BRAIN}, TypeError, "query is float16, key is bfloat16, value is float"),
    ({"query": X[..., :0], "key": KEYS[..., :0]}, ValueError, "query has D=0: the head width D"),
    ({"key": KEYS[..., :2]}, ValueError, "key has D=2 but query has D=5: a score is a product"),
    ({"value": KEYS[:, :, :2]}, ValueError, "value has Lk=2 but key has Lk=6: every key needs one"),
    ({"key": KEYS[:, :2]}, ValueError, "without enable_gqa their batches and heads must be equal"),
    ({"key": KEYS[:, :3], "enable_gqa": True}, ValueError, "key has 3 heads but query has 4: the"),
    ({"value": KEYS[:, :0], "enable_gqa": True}, ValueError, "value has 0 heads but query has 4"),
    ({"key": np.ones((3, 4, 6, 5)), "enable_gqa": True}, ValueError, "their batches must be equal"),
    ({"query": X[:, :0], "enable_gqa": True}, ValueError, "key has 4 heads but query has 0"),
    ({"enable_gqa": 1}, TypeError, "enable_gqa is 1: expected True or False"),
    ({"scale": "big"}, TypeError, "scale is 'big': expected a number"),
    ({"scale": math.nan}, ValueError, "scale is nan: expected a finite number"),
    ({"backend": "gpu"}, ValueError, "backend is 'gpu': expected auto"),
]  # fmt: skip
SDPA = [
    *FITTING,
    ({"query": X[0, 0, 0]}, ValueError, "query has shape (5,): expected 2 axes at least"),
    ({"query": X[0, 0], "key": KEYS[0, 0], "value": KEYS[0, 0], "enable_gqa": True}, ValueError,
     "query has shape (3, 5): enable_gqa needs heads, (H, L, D)"),
    ({"is_causal": 1}, TypeError, "is_causal is 1: expected True or False"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p is 0.1: expected 0, minimha computes inference"),
    ({"dropout_p": np.zeros(2)}, ValueError, "dropout_p is array([0., 0.]): expected 0"),
    ({"attn_mask": RAGGED}, ValueError, "attn_mask is not a rectangular array"),
    ({"attn_mask": np.ma.masked_array(X[0, 0] > 0)}, TypeError, "attn_mask is a masked array"),
    ({"attn_mask": np.zeros((3, 6), int)}, TypeError,
     "attn_mask has dtype int64: expected bool, True where a query may attend to a key, or floating"
     " numbers, which are added to the scores"),
    ({"attn_mask": np.eye(3, 6, dtype=int)}, TypeError,
     "are added to the scores; it looks like Hugging Face's attention_mask, where 1 = may attend"),
    ({"attn_mask": np.full((3, 6), -10000)}, TypeError,
     "; it looks like the float masks of torch and ONNX, which are added: 0 = may attend"),
    ({"attn_mask": np.ones((3, 6), complex)}, TypeError, "attn_mask has dtype complex128"),
    ({"attn_mask": np.ones((4, 6))}, ValueError, "attn_mask has shape (4, 6): expected 2 axes at "
     "least, broadcastable to (..., Lq, Lk), here (2, 4, 3, 6)"),
    ({"attn_mask": np.ones(6, bool)}, ValueError, "attn_mask has shape (6,): expected 2 axes"),
    ({"attn_mask": np.ones((1, 2, 4, 3, 6), bool)}, ValueError, "attn_mask has shape (1, 2, 4, 3,"),
    ({"attn_mask": np.ones((2, 6), bool)}, ValueError,
     "; it looks like a padding mask, where True = ignore in torch and keep in flash-attention"),
    ({"attn_mask": np.ones((8, 3, 6), bool)}, ValueError,
     "; it looks like torch.nn.MultiheadAttention's attn_mask, where True = ignore"),
    ({"attn_mask": np.ones((2, 3, 6), bool)}, ValueError,
     "; it looks like Keras's attention_mask, where True = may attend"),
]  # fmt: skip
FLEX = [
    *FITTING,
    *(
        ({**change, "score_mod": lambda s, b, h, i, j: s}, error, sentence)
        for change, error, sentence in FITTING
    ),
    ({"query": X[0]}, ValueError, "query has shape (4, 3, 5): expected 4 axes"),
    ({"key": KEYS[None]}, ValueError, "key has shape (1, 2, 4, 6, 5): expected 4 axes (B, H"),
    ({"return_lse": 1}, TypeError, "return_lse is 1: expected True or False"),
    ({"score_mod": 3}, TypeError, "score_mod is 3: expected a function score_mod("),
    ({"mask_mod": "causal"}, TypeError, "mask_mod is 'causal': expected a function mask_mod("),
    ({"score_mod": lambda s, b, h, i, j: s[..., :2]}, ValueError,
     "score_mod returned shape (2, 4, 3, 2): expected one that broadcasts to (B, H, Lq, Lk) = "
     "(2, 4, 3, 6)"),
    ({"score_mod": lambda s, b, h, i, j: s > 0}, TypeError, "score_mod returned bool"),
    ({"score_mod": lambda s, b, h, i, j: None}, TypeError, "score_mod returned None"),
    ({"score_mod": lambda s, b, h, i, j: RAGGED}, ValueError,
     "what score_mod returned is not a rectangular array"),
    ({"mask_mod": lambda b, h, i, j: i - j}, TypeError,
     "mask_mod returned int64: expected bool, True where a query may attend to a key; scores are "
     "changed in score_mod"),
    ({"mask_mod": lambda b, h, i, j: np.ones((3, 3), bool)}, ValueError, "mask_mod returned shape"),
]  # fmt: skip

TOKENS, PARAMS = np.ones((3, 2, 4)), drawn_params(4, 4, 4)
OTHER_WIDTHS = drawn_params(4, 2, 7)


def with_params(**changes):
    """PARAMS with some replaced, or left out where None."""
    changes = {name.replace("proj__", "proj."): value for name, value in changes.items()}
    return {n: value for n, value in {**PARAMS, **changes}.items() if value is not None}


REFUSED_MHA = [
    ({"query": RAGGED}, ValueError, "query is not a rectangular array of numbers"),
    ({"key": TOKENS > 0}, TypeError, "key has dtype bool"),
    ({"query": TOKENS.astype(np.float16), "key": TOKENS.astype(ml_dtypes.bfloat16)}, TypeError,
     "query is float16, key is bfloat16, value is float64: no common dtype holds them"),
    ({"query": TOKENS[0]}, ValueError, "key has shape (3, 2, 4), query (2, 4): expected (L, E) in "
     "all three or (L, B, E) in all three"),
    ({"key": TOKENS[0], "batch_first": True}, ValueError, "key has shape (2, 4), query (3, 2, 4): "
     "expected (L, E) in all three or (B, L, E) in all three"),
    ({"key": TOKENS[:, :1]}, ValueError, "query, key and value have (B, L) = (2, 3), (1, 3) and "
     "(2, 3): all must have one B, and every key needs one value"),
    ({"value": TOKENS[:2]}, ValueError, "every key needs one value"),
    ({"value": TOKENS[..., :2]}, ValueError, "value has width 2 but in_proj_weight is for E=4: "
     "another width needs k_proj_weight and v_proj_weight"),
    ({"query": TOKENS[..., :0], "key": TOKENS[..., :0], "value": TOKENS[..., :0], "num_heads": 1,
      "params": drawn_params(0, 0, 0)}, ValueError, "query has E=0"),
    ({"num_heads": 3}, ValueError, "num_heads is 3 and query has E=4: E must be a multiple of it"),
    ({"num_heads": 0}, ValueError, "num_heads is 0: expected an integer of at least 1"),
    ({"num_heads": 2.0}, TypeError, "num_heads is 2.0: expected an integer"),
    ({"params": None}, TypeError, "params is of type NoneType: expected a mapping of names to arr"),
    ({"params": {}}, ValueError, "params has no q_proj_weight: expected one of shape (4, 4), got"),
    ({"params": with_params(out_proj__weight=None)}, ValueError, "params has no out_proj.weight"),
    ({"params": with_params(bias_k=np.ones((1, 1, 4)))}, ValueError, "params has no bias_v"),
    ({"params": with_params(bias_k=np.ones(4), bias_v=np.ones(4))}, ValueError,
     "bias_k has shape (4,): expected (1, 1, 4)"),
    ({"params": with_params(in_proj_weight=PARAMS["in_proj_weight"].T)}, ValueError,
     "in_proj_weight has shape (4, 12): expected (12, 4); it looks transposed, torch's weights are "
     "(out, in)"),
    ({"params": OTHER_WIDTHS | {"k_proj_weight": np.ones((2, 4))}, "key": TOKENS[..., :2],
      "value": np.ones((3, 2, 7))}, ValueError,
     "k_proj_weight has shape (2, 4): expected (4, 2); it looks transposed"),
    ({"params": with_params(in_proj_weight=np.ones((12, 3)))}, ValueError,
     "in_proj_weight has shape (12, 3): expected (12, 4)"),
    ({"params": with_params(in_proj_bias=np.ones(4))}, ValueError, "in_proj_bias has shape (4,)"),
    ({"params": with_params(out_proj__bias=np.ones(3))}, ValueError, "out_proj.bias has shape (3"),
    ({"params": with_params(out_proj__weight=RAGGED)}, ValueError, "out_proj.weight is not a rect"),
    *(({name: 1}, TypeError, f"{name} is 1: expected True or False") for name in (
        "need_weights", "average_attn_weights", "add_zero_attn", "batch_first", "is_causal")),
    ({"is_causal": True}, ValueError, "is_causal is True but attn_mask is None: torch's hint"),
    ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ({"key_padding_mask": RAGGED}, ValueError, "key_padding_mask is not a rectangular array"),
    ({"key_padding_mask": np.array([[1, 1, 0], [1, 0, 0]])}, TypeError,
     "key_padding_mask has dtype int64: expected bool, True where a key is ignored, or floating "
     "numbers, which are added to the scores; it looks like Hugging Face's attention_mask, where "
     "1 = may attend"),
    ({"key_padding_mask": np.ones((3, 3))}, ValueError,
     "key_padding_mask has shape (3, 3): expected (B, Lk) = (2, 3)"),
    ({"key_padding_mask": np.ones((2, 1, 1, 3), bool)}, ValueError,
     "; it looks like scaled_dot_product_attention's attn_mask, where True = may attend"),
    ({"query": TOKENS[0], "key": TOKENS[0], "value": TOKENS[0],
      "key_padding_mask": np.ones((1, 2), bool)}, ValueError,
     "key_padding_mask has shape (1, 2): expected (Lk,) = (2,)"),
    ({"attn_mask": np.ones((3, 3), int)}, TypeError, "attn_mask has dtype int64: expected bool"),
    ({"attn_mask": np.ones((2, 2))}, ValueError,
     "attn_mask has shape (2, 2): expected (Lq, Lk) = (3, 3) or (B * H, Lq, Lk) = (4, 3, 3)"),
    ({"attn_mask": np.ones((2, 3), bool)}, ValueError,
     "; it looks like a padding mask, where True = ignore in torch and keep in flash-attention"),
    ({"attn_mask": np.ones((2, 3, 3), bool)}, ValueError,
     "; it looks like Keras's attention_mask, where True = may attend"),
    ({"attn_mask": np.ones((1, 1, 3, 3), bool)}, ValueError,
     "; it looks like scaled_dot_product_attention's attn_mask, where True = may attend"),
]  # fmt: skip
REFUSED = [
    *((scaled_dot_product_attention, GIVEN, *case) for case in SDPA),
    *((flex_attention, GIVEN, *case) for case in FLEX),
    *(
        (
            multihead_attention,
            {"params": PARAMS, "query": TOKENS, "key": TOKENS, "value": TOKENS, "num_heads": 2},
            *case,
        )
        for case in REFUSED_MHA
    ),
]


@pytest.mark.parametrize(
    ("function", "given", "changes", "error", "sentence"),
    REFUSED,
    ids=[f"{function.__name__}-{sentence[:40]}" for function, *_, sentence in REFUSED],
)
def test_refusals_are_sentences_in_torchs_words(function, given, changes, error, sentence):
    with pytest.raises(error) as caught:
        function(**given | changes)
    assert sentence in str(caught.value)


# ---- torch itself -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def fresh():
    """A seed of this run's own, to be named where a draw fails, and its generator."""
    seed = int(rng.integers(2**32))
    return seed, np.random.default_rng(seed)


def draw_numbers(r, shape, dtype):
    return r.normal(size=shape).astype(dtype)


def draw_size(r, high):
    """1 to high, now and then 0."""
    return int(r.integers(1, high + 1)) if r.random() < 0.95 else 0


def draw_mask(r, shape, dtype, true_hides=False):
    """A mask of torch's of booleans or of numbers; some rows of either hide every key."""
    hides = r.random(shape) < r.choice([0.1, 0.4, 0.8])
    if r.random() < 0.3:
        hides |= r.random((*shape[:-1], 1)) < 0.4
    if r.random() < 0.5:
        return hides if true_hides else ~hides
    return np.where(hides, dtype.type(-np.inf), draw_numbers(r, shape, dtype))


def thinned(r, axes):
    """Axes that broadcast to the given ones: some are 1, some at the front are left out."""
    axes = tuple(1 if r.random() < 0.25 else size for size in axes)
    return axes[int(r.integers(len(axes) + 1)) if r.random() < 0.3 else 0 :]


def as_tensor(torch, array, wide=False):
    if array is None or array.dtype == np.bool_:
        return array if array is None else torch.tensor(array)
    dtype = getattr(torch, "float64" if wide else array.dtype.name)
    return torch.tensor(array.astype(np.float64)).to(dtype)


def as_array(tensor):
    return tensor.detach().double().numpy()


def assert_close(got, theirs, exact, size, unit, case):
    """``got`` is torch's result in the same dtype, and nearer to its result in float64.

    A score that sums up products of size s is known to s · eps, and its weight relatively as well.
    That error is in a weight's numerator and denominator, and in both implementations. At the end
    each rounds to the dtype of the output. We compute in float32 what has 16 bits.
    """
    assert got.dtype.name == str(theirs.dtype).removeprefix("torch."), case
    compute = np.promote_types(got.dtype, np.float32)
    for want, precision in ((as_array(exact), compute), (as_array(theirs), got.dtype)):
        assert got.shape == want.shape, case
        error = 4 * float(ml_dtypes.finfo(precision).eps) * (1 + size) * unit
        rounded = float(ml_dtypes.finfo(got.dtype).eps) * abs(want)
        equal = got.astype(float) == want  # infinities
        with np.errstate(invalid="ignore"):
            near = abs(got.astype(float) - want) <= error + rounded
        assert (equal | near).all(), f"{case}: {got} is not {want}"


def largest(array):
    return float(abs(array.astype(float)).max(initial=0))


def score_sizes(q, k, mask, is_causal, scale):
    """Which rows see a key, and how large the sums are whose weights count in each row."""
    q, k = q.astype(float), k.astype(float)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.swapaxes(-1, -2) * scale
    size = abs(q) @ abs(k).swapaxes(-1, -2) * abs(scale)
    seen = np.ones(scores.shape, bool)
    if is_causal:
        seen &= np.tri(*scores.shape[-2:], dtype=bool)
    if mask is not None and mask.dtype == np.bool_:
        seen = seen & mask
    elif mask is not None:
        mask = mask.astype(float)
        seen, scores = seen & (mask != -np.inf), scores + mask
        size = size + np.where(mask == -np.inf, 0, abs(mask))
    scores = np.where(seen, scores, -np.inf)
    counts = seen & (scores >= scores.max(-1, initial=-np.inf, keepdims=True) - 50)
    return seen.any(-1), np.where(counts, size, 0).max(-1, initial=0, keepdims=True)


def draw_sdpa(r):
    """query, key, value and options of scaled_dot_product_attention."""
    dtype = DTYPES[r.integers(len(DTYPES))]
    Lq, Lk = draw_size(r, 6), draw_size(r, 8)
    D, Dv = (int(n) for n in r.integers(1, 9, 2))
    batch = tuple(draw_size(r, 3) for _ in range(r.integers(4)))
    leads = [thinned(r, batch) for _ in range(3)]
    if 0 in (*batch, Lq, Lk):  # torch gives an output without entries the leading axes of query
        leads[0] = np.broadcast_shapes(*leads)
    over = np.broadcast_shapes(*leads[:2])
    enable_gqa = bool(r.random() < 0.4)
    if enable_gqa:
        H = int(r.choice([1, 2, 3, 4, 6]))
        divisors = [n for n in range(1, H + 1) if H % n == 0]
        heads = (H, *(int(n) for n in r.choice(divisors, 2)))
        leads = [(*lead, n) for lead, n in zip(leads, heads, strict=True)]
        over = (*over, H)
    ends = ((Lq, D), (Lk, D), (Lk, r.choice([D, Dv])))
    q, k, v = (draw_numbers(r, a + b, dtype) for a, b in zip(leads, ends, strict=True))
    options = {"enable_gqa": enable_gqa, "is_causal": bool(r.random() < 0.3)}
    if r.random() < 0.5:
        options["scale"] = float(r.choice([0.0, -0.5, r.normal()]))
    if not options["is_causal"] and r.random() < 0.7:
        last = tuple(1 if r.random() < 0.2 else size for size in (Lq, Lk))
        kind = DTYPES[2] if r.random() < 0.3 and dtype != np.float64 else dtype
        mask = draw_mask(r, thinned(r, over) + last, kind)
        if mask.dtype != np.bool_ and r.random() < 0.3:
            mask = np.where(r.random(mask.shape) < 0.5, ml_dtypes.finfo(kind).min, mask)
        options["attn_mask"] = mask
    return q, k, v, options


@pytest.mark.parametrize("draw", range(300))
def test_scaled_dot_product_attention_is_torchs(draw, torch):
    seed, r = fresh()
    q, k, v, options = draw_sdpa(r)
    mask, scale = options.get("attn_mask"), options.get("scale")
    case = f"seed {seed}: {q.dtype} {q.shape} {k.shape} {v.shape} {options}"
    # torch's other kernels scale what is causally hidden: -inf times no positive number is NaN.
    kernels = list(torch.nn.attention.SDPBackend.__members__.values())
    if options["is_causal"] and scale is not None and scale <= 0:
        kernels = [torch.nn.attention.SDPBackend.MATH]
    with torch.nn.attention.sdpa_kernel(kernels):
        theirs, exact = (
            torch.nn.functional.scaled_dot_product_attention(
                *(as_tensor(torch, x, wide) for x in (q, k, v)),
                **{**options, "attn_mask": as_tensor(torch, mask, wide)},
            )
            for wide in (False, True)
        )
    got = scaled_dot_product_attention(q, k, v, **options, backend=BACKENDS[draw % 2])
    repeats = q.shape[-3] // k.shape[-3] if options["enable_gqa"] else 1
    each = np.repeat(k, repeats, axis=-3) if repeats > 1 else k
    seen, size = score_sizes(q, each, mask, options["is_causal"], scale)
    assert_close(got, theirs, exact, size, largest(v), case)
    assert not got[np.broadcast_to(~seen, got.shape[:-1])].any(), case


# torch's hints of deprecation and of speed: nothing is computed otherwise.
quiet = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask",
    "ignore:flex_attention called without torch.compile",
    "ignore:return_lse is deprecated",
)


def draw_module(r, torch, dtype, is_self_attention):
    """A torch.nn.MultiheadAttention of random numbers of ``dtype``, and how it was made."""
    H, D = (int(n) for n in r.integers(1, 5, 2))
    settings = {
        name: bool(r.random() < 0.5)
        for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    }
    if not is_self_attention:
        settings |= {n: int(r.integers(1, 8)) for n in ("kdim", "vdim") if r.random() < 0.4}
    module = torch.nn.MultiheadAttention(H * D, H, **settings).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            scale = math.sqrt(parameter.shape[-1]) if parameter.ndim == 2 else 1
            parameter.copy_(torch.tensor(r.normal(size=parameter.shape) / scale))
    return module.to(getattr(torch, dtype.name)), settings


def mha_sizes(params, inputs, H, masks):
    """How large the sums are that scores are, and those that outputs are."""
    E = inputs[0].shape[-1]
    params = {name: abs(value.astype(float)) for name, value in params.items()}
    if "in_proj_weight" in params:
        weights = np.split(params["in_proj_weight"], 3)
    else:
        weights = [params[f"{name}_proj_weight"] for name in "qkv"]
    biases = np.split(params.get("in_proj_bias", np.zeros(3 * E)), 3)
    q, k, v = (
        largest(abs(x.astype(float)) @ W.T + b)
        for x, W, b in zip(inputs, weights, biases, strict=True)
    )
    k, v = (max(x, largest(params.get(n, np.zeros(1)))) for x, n in ((k, "bias_k"), (v, "bias_v")))
    added = sum(largest(m[m != -np.inf]) for m in masks if m is not None and m.dtype != np.bool_)
    out = largest(params["out_proj.weight"].sum(axis=1)) * v
    return q * k * math.sqrt(E / H) + added, out + largest(params.get("out_proj.bias", np.zeros(1)))


@quiet
@pytest.mark.parametrize("draw", range(300))
def test_multihead_attention_is_torchs(draw, torch):
    seed, r = fresh()
    dtype = DTYPES[r.integers(len(DTYPES))]
    is_self_attention, is_batched = r.random() < 0.3, r.random() < 0.8
    module, settings = draw_module(r, torch, dtype, is_self_attention)
    H, E = module.num_heads, module.embed_dim
    B, Lq, Lk = draw_size(r, 3) if is_batched else 1, draw_size(r, 5), draw_size(r, 6)
    if is_self_attention:  # not of empty axes, where torch's weights have odd shapes
        B, Lq = max(B, 1), max(Lq, 1)
        Lk = Lq
    inputs = [
        draw_numbers(r, (B, L, width), dtype)
        for L, width in ((Lq, E), (Lk, module.kdim), (Lk, module.vdim))
    ]
    inputs = inputs[:1] * 3 if is_self_attention else inputs
    call = {n: bool(r.random() < 0.5) for n in ("need_weights", "average_attn_weights")}
    masks = {"key_padding_mask": None, "attn_mask": None}
    is_empty = 0 in (B, Lq, Lk)  # then torch refuses every mask
    if r.random() < 0.5 and not is_empty:
        masks["key_padding_mask"] = draw_mask(r, (B, Lk) if is_batched else (Lk,), dtype, True)
    if r.random() < 0.5 and not is_empty:
        masks["attn_mask"] = draw_mask(r, (B * H, Lq, Lk)[r.integers(2) :], dtype, True)
    elif r.random() < 0.5 and not (
        is_empty or settings["add_bias_kv"] or settings["add_zero_attn"]
    ):
        masks["attn_mask"], call["is_causal"] = ~np.tri(Lq, Lk, dtype=bool), True
    given = [x if settings["batch_first"] else x.swapaxes(0, 1) for x in inputs]
    given = given if is_batched else [x[0] for x in inputs]
    params = {n: as_array(p).astype(dtype) for n, p in module.state_dict().items()}
    case = f"seed {seed}: {dtype} {[x.shape for x in given]} {settings} {call} {masks}"

    def of_torch(module, wide):
        # The very same tensor three times is what torch takes for self-attention.
        tensors = [as_tensor(torch, x, wide) for x in given]
        tensors = tensors[:1] * 3 if is_self_attention else tensors
        with torch.no_grad():
            return module(
                *tensors, **call, **{n: as_tensor(torch, m, wide) for n, m in masks.items()}
            )

    theirs, exact = of_torch(module, False), of_torch(copy.deepcopy(module).double(), True)
    got = multihead_attention(
        params, *given, num_heads=H, **masks, **call, backend=BACKENDS[draw % 2],
        **{name: settings[name] for name in ("add_zero_attn", "batch_first")},
    )  # fmt: skip
    size, outputs_unit = mha_sizes(params, inputs, H, masks.values())
    exactly = {name: value.astype(float) for name, value in params.items()}
    by_hand = [
        mha_by_hand(
            exactly, *(x[b].astype(float) for x in inputs), H,
            added_by(*masks.values(), b, (H, Lq, Lk)), settings["add_zero_attn"],
        )
        for b in range(B)
    ]  # fmt: skip
    # torch has NaN where a query sees no key, in most modes; ours is documented: heads of 0.
    outputs = np.reshape([output for output, _ in by_hand], (B, Lq, E))
    weights = [shown.mean(0) if call["average_attn_weights"] else shown for _, shown in by_hand]
    if is_batched and not settings["batch_first"]:
        outputs = outputs.swapaxes(0, 1)
    if not is_batched:
        outputs, weights = outputs[0], weights[0]
    instead, units = (outputs, weights), (outputs_unit, 1)
    for ours, a, b, documented, unit in zip(got, theirs, exact, instead, units, strict=True):
        if not call["need_weights"] and b is None:
            assert ours is None
            continue
        documented = torch.tensor(np.reshape(documented, tuple(b.shape)))
        a, b = (torch.where(x.isnan(), documented.to(x), x) for x in (a, b))
        assert_close(ours, a, b, size, unit, case)


SCORE_MODS = [
    lambda w: None,
    lambda w: lambda s, b, h, i, j: s + w * (j - i),
    lambda w: lambda s, b, h, i, j: s * (1 + h) * w,
    lambda w: lambda s, b, h, i, j: s - abs(w) * abs(i - j) + b,
    lambda w: lambda s, b, h, i, j: s / (1 + abs(s)),
    lambda w: lambda s, b, h, i, j: s * 0 + w * j,
]
MASK_MODS = [
    lambda n: None,
    lambda n: lambda b, h, i, j: i >= j,
    lambda n: lambda b, h, i, j: i + n >= j,
    lambda n: lambda b, h, i, j: (abs(i - j) <= n) | (j < 1),
    lambda n: lambda b, h, i, j: (i % 3 != 1) & (j <= i + h),
    lambda n: lambda b, h, i, j: (b + h + j) % 2 == 0,
]


@quiet
@pytest.mark.parametrize("draw", range(100))
def test_flex_attention_is_torchs(draw, torch, monkeypatch):
    reason = "this torch has no flex_attention"
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason=reason)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    seed, r = fresh()
    dtype = DTYPES[r.integers(len(DTYPES))]
    B, Hkv, group = draw_size(r, 3), int(r.integers(1, 4)), int(r.integers(1, 3))
    Lq, Lk = draw_size(r, 6), int(r.integers(1, 9))  # torch refuses Lk = 0
    D, Dv = (int(n) for n in r.integers(1, 9, 2))
    score, mask, n = (int(r.integers(high)) for high in (6, 6, 4))
    score, mask = (0, 0) if 0 in (B, Lq) else (score, mask)  # torch calls no mod on nothing
    w = round(8 * r.normal()) / 8  # exact in the float32 that torch makes of w times an index
    score_mod, mask_mod = SCORE_MODS[score](w), MASK_MODS[mask](n)
    Bkv = 1 if mask_mod and r.random() < 0.3 else B  # torch broadcasts with a block mask only
    H = Hkv * group
    q, k, v = (
        draw_numbers(r, shape, dtype)
        for shape in ((B, H, Lq, D), (Bkv, Hkv, Lk, D), (Bkv, Hkv, Lk, Dv))
    )
    options = {"scale": float(r.normal()) if r.random() < 0.5 else None, "enable_gqa": group > 1}
    case = (
        f"seed {seed}: {dtype} {q.shape} {k.shape} {v.shape} {options} mods {score} {mask} {w} {n}"
    )
    blocks = mask_mod and flex.create_block_mask(mask_mod, B, H, Lq, Lk, device="cpu")
    theirs, exact = (
        flex.flex_attention(
            *(as_tensor(torch, x, wide) for x in (q, k, v)), score_mod, blocks, **options,
            return_lse=True,
        )
        for wide in (False, True)
    )  # fmt: skip
    got = flex_attention(
        q, k, v, score_mod, mask_mod, **options, return_lse=True, backend=BACKENDS[draw % 2]
    )
    each = np.repeat(k, group, axis=1)
    _, sizes = score_sizes(q, each, None, False, options["scale"])
    # A mod's result may grow by (1 + h) · w with the score, and by w with each index.
    size = (1 + largest(sizes)) * max(1, (1 + H) * abs(w)) + abs(w) * (Lq + Lk) + B
    assert_close(got[0], theirs[0], exact[0], size, largest(v), case)
    if q.size:  # else torch returns None
        assert_close(got[1], theirs[1], exact[1], size, 1, case)
