"""The table of conventions says what the dialects compute.

Queries are 0, so that an output is the mean of the values 2, 4 and 9 of the keys that it sees.
"""

import numpy as np
import pytest

from minimha import attention, dialects
from minimha.dialects.conventions import BY_FUNCTION
from minimha.dialects.transformers import AttentionModule, DynamicCache

RNG = np.random.default_rng(0)
V = np.array([2.0, 4.0, 9.0]).reshape(1, 1, 3, 1)
SEEN = np.array([[True, True, False]] * 2)
LOWEST = np.finfo(np.float32).min
LAYOUTS = {  # from (B, H, L, D)
    "(B, H, L, D)": lambda x: x,
    "(..., H, L, D)": lambda x: x[None],
    "(B, L, H, D)": lambda x: x.swapaxes(1, 2),
    "(B, L, E)": lambda x: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1),
    "(L, B, E)": lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], -1),
}
MASKS = {"jax": "mask", "keras": "attention_mask", "flash_attention": "key_padding_mask"}
FLAGS = {"keras": "use_causal_mask", "flash_attention": "causal"}
WINDOWS = {"onnx": "left_window_size", "jax": "local_window_size", "keras": "sliding_window"}


def call(name, q, k, v, *, causal=False, mask=None, window=None, **options):
    """Every result of a function; q, k and v are (B, H, L, D), and a matrix is the identity."""
    H, D = q.shape[1], q.shape[3]
    library, function = name.rsplit(".", 1)
    if causal:
        options[FLAGS.get(library, "is_causal")] = True
    if window is not None:
        inclusive = (window, 0) if library not in ("onnx", "keras") else window
        options[WINDOWS.get(library, "window_size")] = inclusive
    if mask is not None and function == "flex_attention":
        options["mask_mod"] = lambda b, h, i, j: mask[i, j]
    elif mask is not None:
        options[MASKS.get(library, "attn_mask")] = mask[None] if library == "keras" else mask
    inputs = [LAYOUTS[BY_FUNCTION[name].arrays](x) for x in (q, k, v)]
    if name == "minimha.attention":
        return attention(*inputs, **options)
    if name == "torch.multihead_attention":
        params = {
            "in_proj_weight": np.tile(np.eye(H * D), (3, 1)),
            "out_proj.weight": np.eye(H * D),
        }
        return dialects.torch.multihead_attention(params, *inputs, num_heads=H, **options)
    if name == "keras.multi_head_attention":
        params = {f"{x}/kernel": np.eye(H * D).reshape(-1, H, D) for x in ("query", "key", "value")}
        params["attention_output/kernel"] = np.eye(H * D).reshape(H, D, -1)
        q, k, v = inputs
        sizes = {"num_heads": H, "key_dim": D, "use_bias": False}
        return dialects.keras.multi_head_attention(params, q, v, k, **sizes, **options)
    return getattr(getattr(dialects, library), function)(*inputs, **options)


def module(width=1, heads=1, cls="BertSelfAttention", names=("query", "key", "value"), **settings):
    params = {f"{name}.weight": np.eye(width) for name in names}
    config = {"num_attention_heads": heads, "num_heads": heads, "d_kv": width // heads}
    return AttentionModule(cls, params, config | settings, is_causal=True)


def first(results):
    """The output of a function, which may have other results."""
    return np.ravel(results[0] if isinstance(results, tuple) else results)


def averages(name, Lq=2, **options):
    """What the queries see, as means of values."""
    return first(call(name, np.zeros((1, 1, Lq, 1)), np.zeros((1, 1, 3, 1)), V, **options))


FACTS = {name: facts for name, facts in BY_FUNCTION.items() if "transformers" not in name}
every_function = pytest.mark.parametrize(("name", "facts"), FACTS.items(), ids=list(FACTS))


@every_function
def test_arrays_scale_and_log_sum_exp(name, facts):
    q, k, v = RNG.normal(size=(3, 2, 3, 4, 5))
    options = {"return_lse": True} if name in ("minimha.attention", "torch.flex_attention") else {}
    results = call(name, q, k, v, **options)
    wanted, lse = attention(q, k, v, return_lse=True)
    assert facts.scale == "1/√D"
    np.testing.assert_allclose(first(results), LAYOUTS[facts.arrays](wanted).ravel(), rtol=1e-6)
    has_lse = isinstance(results, tuple) and len(results) == 2 and np.shape(results[1]) == lse.shape
    assert has_lse == (facts.lse == "(B, H, Lq)") == (facts.lse != "no")
    if has_lse:
        np.testing.assert_allclose(results[1], lse, rtol=1e-6)


@every_function
def test_causal_alignment(name, facts):
    if facts.causal in ("q_offset decides", "the mask decides"):
        word = "q_offset" if "offset" in facts.causal else "attn_mask"
        with pytest.raises(ValueError, match=word):
            averages(name, causal=True)
    elif name == "torch.flex_attention":
        assert facts.causal == "top left"
        assert averages(name, mask=np.tri(2, 3, dtype=bool)).tolist() == [2, 3]
    else:
        wanted = [3, 5] if facts.causal == "bottom right" else [2, 3]
        assert facts.causal in ("top left", "bottom right", "after the past")
        assert averages(name, causal=True).tolist() == wanted
    if facts.causal == "after the past":
        zeros, past = (
            np.zeros((1, 1, 2, 1)),
            {"past_key": V[:, :, :1] * 0, "past_value": V[:, :, :1]},
        )
        assert first(call(name, zeros, zeros, V[:, :, 1:], causal=True, **past)).tolist() == [3, 5]


@every_function
def test_masks(name, facts):
    assert facts.true in ("may attend", "ignore", "keep")
    mask = SEEN[0][None] if facts.true == "keep" else SEEN
    assert averages(name, mask=~mask if facts.true == "ignore" else mask).tolist() == [3, 3]
    added = np.where(mask, 0.0, -np.inf)
    if facts.numbers == "added":
        assert averages(name, mask=added).tolist() == [3, 3]
    else:
        assert facts.numbers == "refused"
        with pytest.raises((TypeError, ValueError), match=r"mask"):
            averages(name, mask=added)


@every_function
def test_a_query_that_sees_no_key(name, facts):
    mask = np.zeros((1, 3), bool) if facts.true == "keep" else SEEN & [[False], [True]]
    found = averages(name, mask=~mask if facts.true == "ignore" else mask)[0]
    assert found == {"0": 0, "mean of V": 5}[facts.empty_row]


@every_function
def test_windows(name, facts):
    if facts.window == "no window":
        with pytest.raises(TypeError, match="window"):
            averages(name, 3, window=1)
        return
    size = {"the keys before": 1, "its own key too": 2}[facts.window]
    causal = name.startswith(("onnx", "keras"))
    assert averages(name, 3, window=size, causal=causal).tolist() == [2, 3, 6.5]


@every_function
def test_shared_heads(name, facts):
    q, (k, v) = RNG.normal(size=(1, 4, 3, 2)), RNG.normal(size=(2, 1, 2, 3, 2))
    wanted = LAYOUTS[facts.arrays](attention(q, k, v)).ravel()
    if facts.shared_heads == "by shapes":
        np.testing.assert_allclose(first(call(name, q, k, v)), wanted, rtol=1e-6)
        return
    with pytest.raises(ValueError, match=r"head|width|shape"):
        call(name, q, k, v)
    if facts.shared_heads == "enable_gqa":
        got = first(call(name, q, k, v, enable_gqa=True))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    else:
        has_another = hasattr(dialects.keras, "grouped_query_attention") and "keras" in name
        assert facts.shared_heads == ("another function" if has_another else "no")


def test_modules_of_transformers():
    facts = BY_FUNCTION["transformers.AttentionModule"]
    x = RNG.normal(size=(2, 3, 4))
    q = x.reshape(2, 3, 2, 2).swapaxes(1, 2)
    wanted = LAYOUTS[facts.arrays](attention(q, q, q, is_causal=True))
    np.testing.assert_allclose(module(4, 2)(x)[0], wanted, rtol=1e-6)
    assert (facts.lse, facts.window) == ("no", "no window")
    # The scale is that of the class.
    assert facts.scale == "by class"
    mask = np.where(np.tri(3), 0, LOWEST)[None, None]
    t5 = module(4, 2, "T5Attention", "qkvo", is_decoder=True)
    wanted = LAYOUTS[facts.arrays](attention(q, q, q, is_causal=True, scale=1))
    np.testing.assert_allclose(t5(x, mask=mask)[0], wanted, rtol=1e-6)
    # Queries come after the past, and see all of it.
    assert facts.causal == "after the past"
    tokens, past = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1), DynamicCache()
    module()(tokens[:, :1], past_key_values=past)
    later = module()(tokens[:, 1:], past_key_values=past)[0]
    np.testing.assert_allclose(later, module()(tokens)[0][:, 1:], rtol=1e-6)
    # Masks, and what is left if they hide everything.
    assert (facts.true, facts.numbers, facts.empty_row) == ("may attend", "added", "mean of V")
    seen = np.array([[[[True, True, False]]]])
    params = {f"{name}.weight": np.eye(1) * (name == "value") for name in ("query", "key", "value")}
    plain = AttentionModule("BertSelfAttention", params, {"num_attention_heads": 1})
    added = np.where(seen, 0, LOWEST)
    for mask, wanted in ((seen, 3), (added, 3), (0 * added + LOWEST, 5)):
        np.testing.assert_allclose(plain(V[0], attention_mask=mask)[0], wanted)
    assert facts.shared_heads == "by config"
