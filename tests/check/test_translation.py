"""Translated calls: the dialects' functions compute minimha's attention with them."""

import numpy as np
import pytest

from minimha import attention, dialects
from minimha.check.calling import Caller
from minimha.check.problems import graded
from minimha.check.translation import Refused, translated

FUNCTIONS = {
    "minimha": attention,
    "torch": dialects.torch.scaled_dot_product_attention,
    "jax": dialects.jax.dot_product_attention,
    "flash_attention": dialects.flash_attention.flash_attn_func,
    "flash_attention_varlen": dialects.flash_attention.flash_attn_varlen_func,
    "flash_attention_paged": dialects.flash_attention.flash_attn_with_kvcache,
    "onnx": dialects.onnx.attention,
}
# Where a library means something else by the same word, and how many problems show it.
OTHERWISE = {
    "torch": "causal_top_left",
    "jax": "causal_top_left or dead_rows_mean",
    "flash_attention": "causal_bottom_right",
}
x = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
QKV = {"q": x, "k": x, "v": x}


def is_otherwise(speaks, problem):
    """Whether the library's own convention makes this problem another one."""
    options = problem.arguments
    Lq, Lk = options["q"].shape[2], options["k"].shape[2]
    if options.get("is_causal") and speaks not in ("minimha", "onnx"):
        own = options.get("kv_lengths", Lk) - Lq if speaks.startswith("flash_attention") else 0
        if np.any(np.asarray(options.get("q_offset", own)) != own):
            return True
    hides_rows = np.isneginf(attention(**{**options, "return_lse": True})[1]).any()
    return speaks == "jax" and hides_rows and "attn_bias" not in options


@pytest.mark.parametrize("speaks", FUNCTIONS)
def test_a_dialects_function_computes_what_minimha_does(speaks):
    caller = Caller(FUNCTIONS[speaks], speaks, "float32", arrays="numpy")
    num_taken = 0
    for problem in graded():
        answer = caller.answer(problem.arguments)
        if answer.refusal is not None:
            continue
        num_taken += 1
        assert not answer.faults, problem.name
        output, lse = attention(**{**problem.arguments, "return_lse": True})
        is_close = np.allclose(answer.output, output, 1e-4, 1e-5, equal_nan=True)
        assert is_close != is_otherwise(speaks, problem), problem.name
        if answer.lse is not None:
            np.testing.assert_allclose(answer.lse, lse, 1e-5, 1e-5)
    assert num_taken > 45


@pytest.mark.parametrize(
    ("speaks", "options", "words"),
    [
        ("torch", {"scale": 0.5}, {"scale": 0.5}),
        ("torch", {"is_causal": True, "q_offset": 2}, {"is_causal": True}),
        ("flash_attention", {"is_causal": True, "window_size": (2, None)},
         {"causal": True, "window_size": (2, -1)}),
        ("flash_attention", {"softcap": 2.0, "scale": 0.5}, {"softcap": 2.0, "softmax_scale": 0.5}),
        ("jax", {"window_size": (2, None)}, {"local_window_size": (2, 6)}),
        ("keras", {"softcap": 2.0}, {"attn_logits_soft_cap": 2.0}),
        ("onnx", {"is_causal": True, "window_size": (2, None)},
         {"is_causal": 1, "left_window_size": 2, "right_window_size": -1}),
        ("minimha", {"is_causal": True, "q_offset": 2}, {"is_causal": True, "q_offset": 2}),
        ("minimha", {"return_lse": True}, {"return_lse": True}),
        ("flash_attention", {"return_lse": True}, {"return_attn_probs": True}),
        ("torch", {"return_lse": True}, {}),
    ],
)  # fmt: skip
def test_keyword_arguments(speaks, options, words):
    assert translated(speaks, {**QKV, **options}, wants_lse=True)[1] == words


def test_onnx_is_given_a_past_where_queries_stand_later():
    (_, k, v), words = translated(
        "onnx", {**QKV, "is_causal": True, "q_offset": 1}, wants_lse=False
    )
    np.testing.assert_array_equal(words["past_key"], x[:, :, :1])
    np.testing.assert_array_equal(k, x[:, :, 1:])
    assert words["past_value"].shape == (1, 1, 1, 4)
    assert v.shape == (1, 1, 2, 4)


def test_a_mask_and_a_bias_become_one_argument():
    mask, bias = np.array([[True, False, True]]), np.ones((1, 3), np.float32)
    for speaks in ("torch", "onnx"):
        words = translated(speaks, {**QKV, "attn_mask": mask, "attn_bias": bias}, wants_lse=False)[
            1
        ]
        assert words["attn_mask"].tolist() == [[1, -np.inf, 1]]


@pytest.mark.parametrize("speaks", ["flash_attention", "jax", "keras"])
def test_tokens_come_before_heads_where_the_dialect_says_so(speaks):
    q = np.zeros((2, 3, 4, 5), np.float32)
    given, _ = translated(speaks, {"q": q, "k": q, "v": q}, wants_lse=False)
    assert [array.shape for array in given] == [(2, 4, 3, 5)] * 3


@pytest.mark.parametrize(
    ("speaks", "options"),
    [
        ("torch", {"softcap": 2.0}),
        ("torch", {"is_causal": True, "q_offset": np.array([1])}),
        ("jax", {"sinks": np.ones(1)}),
        ("jax", {"window_size": (1, 1), "q_offset": 1}),
        ("keras", {"kv_lengths": np.array([1])}),
        ("flash_attention", {"attn_mask": np.ones((3, 3), bool)}),
        ("flash_attention", {"kv_lengths": np.array([1]), "is_causal": True}),
        ("onnx", {"alibi_slopes": np.ones(1)}),
        ("onnx", {"is_causal": True, "q_offset": -1}),
    ],
)
def test_an_option_that_the_library_lacks_is_refused(speaks, options):
    with pytest.raises(Refused, match=r"has no |there is no |counts positions"):
        translated(speaks, {**QKV, **options}, wants_lse=False)
