"""A deviated computation is the right one of a problem that was changed in the same way."""

import numpy as np
import pytest

from minimha import attention
from minimha.check.catalogue import DEVIATIONS
from minimha.check.prepared import Impossible, Prepared
from minimha.check.problems import graded
from minimha.check.wrong_attention import attend, deviate

PROBLEMS = {problem.name: problem.arguments for problem in graded()}


def right(name, **changed):
    """Output and log-sum-exp of a problem, in float64, with some arguments changed."""
    arguments = {**PROBLEMS[name], **changed, "return_lse": True, "backend": "dense"}
    wide = {n: arguments[n].astype(np.float64) for n in "qkv"}
    return attention(**{**arguments, **wide})


def softmax(S, axis=-1):
    E = np.exp(S - S.max(axis=axis, keepdims=True))
    return E / E.sum(axis=axis, keepdims=True)


def scores(name):
    x = PROBLEMS[name]
    q, k = x["q"].astype(np.float64), x["k"].astype(np.float64)
    return q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])


@pytest.mark.parametrize("name", PROBLEMS)
def test_without_deviations_it_is_the_dense_equations(name):
    output, lse = attend(PROBLEMS[name])
    expected, expected_lse = right(name)
    np.testing.assert_allclose(output, expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-10)


def mask_of(name):
    mask = PROBLEMS[name]["attn_mask"]
    return mask[0, 0] if mask.shape[:2] == (1, 1) else mask


def bias_of(name):
    return PROBLEMS[name]["attn_bias"]


def as_if_at(positions):
    """A mask for heads of six queries in groups of two that stand at these positions."""
    mask = np.arange(6) <= np.reshape(positions, (2, 6, 1))
    return {"is_causal": False, "attn_mask": np.tile(mask, (1, 2, 1, 1))}


def keys_from(first):
    """The arguments of "window, 301 keys" if all rows see keys from ``first`` on."""
    seen = np.arange(301) >= first
    return {"window_size": None, "is_causal": True, "attn_mask": np.tile(seen, (3, 1))}


def zero_from(first, name):
    """K or V of "301 keys" with 320 rows, of which those from ``first`` on are 0."""
    x = np.pad(PROBLEMS["301 keys"][name], [(0, 0), (0, 0), (0, 19), (0, 0)])
    x[:, :, first:] = 0
    return x[:, :, : 301 if first < 301 else 320]


def zero_behind(name, which):
    """K or V of a problem with zeros behind the lengths."""
    x = PROBLEMS[name]
    seen = np.arange(x["k"].shape[2]) < x["kv_lengths"][:, None, None]
    return np.where(seen[..., None], x[which], 0)


def masked(visible):
    """A mask over 64 tokens in place of causality."""
    return {"is_causal": False, "attn_mask": visible(*np.indices((64, 64)))}


AS = {  # a deviation, a problem, and the arguments that have the same effect
    "scale_missing": ("one head", {"scale": 1.0}),
    "scale_1_over_d": ("one head", {"scale": 0.25}),
    "scale_sqrt_d": ("one head", {"scale": 2.0}),
    "scale_twice": ("scale", {"scale": 0.3125**2}),
    "scale_model_width": ("heads and batch", {"scale": 12**-0.5}),
    "scale_padded_width": ("one head", {"scale": 0.25}),
    "scale_from_dv": ("narrow values", {"scale": 3**-0.5}),
    "scale_from_length": ("one head", {"scale": 7**-0.5}),
    "scale_of_0_ignored": ("scale of 0", {"scale": None}),
    "window_of_0_ignored": ("window without a past", {"window_size": (None, 2)}),
    "kv_batch_0_for_all": (
        "heads and batch", {n: PROBLEMS["heads and batch"][n][[0, 0]] for n in "kv"},
    ),
    "scores_ignored": ("one head", {"scale": 0.0}),
    "scale_argument_ignored": ("scale", {"scale": None}),
    "softcap_ignored": ("softcap", {"softcap": None}),
    "bias_ignored": ("bias", {"attn_bias": None}),
    "bias_subtracted": ("bias", {"attn_bias": -bias_of("bias")}),
    "bias_before_scale": ("bias", {"attn_bias": bias_of("bias") / 2}),
    "bias_transposed": ("bias", {"attn_bias": bias_of("bias").swapaxes(2, 3)}),
    "bias_head_0_for_all": (
        "bias for each head", {"attn_bias": bias_of("bias for each head")[:, :1]},
    ),
    "bias_batch_0_for_all": (
        "bias for each head", {"attn_bias": bias_of("bias for each head")[:1]},
    ),
    "bias_by_kv_head": (
        "bias for each head, grouped heads",
        {"attn_bias": bias_of("bias for each head, grouped heads")[:, [0, 0, 1, 1]]},
    ),
    "bias_row_0_for_all": ("bias", {"attn_bias": np.tile(bias_of("bias")[:, :, :1], (6, 1))}),
    "bias_in_base_2": ("sinks", {"sinks": PROBLEMS["sinks"]["sinks"] * np.log2(np.e)}),
    "added_twice": ("sinks", {"sinks": 2 * PROBLEMS["sinks"]["sinks"]}),
    "alibi_ignored": ("ALiBi", {"alibi_slopes": None}),
    "alibi_sign": ("ALiBi", {"alibi_slopes": -PROBLEMS["ALiBi"]["alibi_slopes"]}),
    "alibi_before_scale": ("ALiBi", {"alibi_slopes": PROBLEMS["ALiBi"]["alibi_slopes"] / 2}),
    "alibi_ignores_offset": ("ALiBi, more keys than queries", {"q_offset": 0}),
    "alibi_slope_0_for_all": ("ALiBi", {"alibi_slopes": np.full(3, 0.5, np.float32)}),
    "alibi_by_kv_head": (
        "ALiBi, grouped heads", {"alibi_slopes": np.array([0.5, 0.5, 0.125, 0.125])},
    ),
    "causal_ignored": ("causal", {"is_causal": False}),
    "causal_always": ("square", {"is_causal": True}),
    "causal_sees_one_ahead": ("causal", {"q_offset": 1}),
    "causal_top_left": ("causal, amid the keys", {"q_offset": 0}),
    "causal_bottom_right": ("causal, amid the keys", {"q_offset": 5}),
    "causal_by_length": ("lengths, causal", {"q_offset": np.array([-3, -1])}),
    "offset_batch_0_for_all": ("causal, an offset for each batch entry", {"q_offset": 1}),
    "offset_subtracted": ("causal, amid the keys", {"q_offset": -2}),
    "offset_added_twice": ("causal, amid the keys", {"q_offset": 4}),
    "offset_moved": ("causal, amid the keys", {"q_offset": 3}),
    "causal_in_blocks": ("causal, 64 tokens", masked(lambda i, j: j // 64 <= i // 64)),
    "causal_reversed": (
        "causal", {"is_causal": False, "attn_mask": np.triu(np.ones((6, 6), bool))},
    ),
    "causal_loop_ignores_offset": ("causal, 301 keys", {"kv_lengths": np.array([64])}),
    "packed_rows_confused": (
        "causal, grouped heads", as_if_at([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    ),
    "window_ignored": ("window", {"window_size": None}),
    "window_left_short": ("window", {"window_size": (2, 1)}),
    "window_left_long": ("window", {"window_size": (4, 1)}),
    "window_right_short": ("window", {"window_size": (3, 0)}),
    "window_right_long": ("window", {"window_size": (3, 2)}),
    "window_left_ignored": ("window", {"window_size": (None, 1)}),
    "window_right_ignored": ("window", {"window_size": (3, None)}),
    "window_sides_swapped": ("window", {"window_size": (1, 3)}),
    "window_halved": ("window", {"window_size": (1, 0)}),
    "window_symmetric": ("window", {"window_size": (3, 3)}),
    "window_hides_future": ("window", {"window_size": (3, 0)}),
    "window_ignores_offset": ("window, more keys than queries", {"q_offset": 0}),
    "window_left_in_blocks": ("window, 301 keys", keys_from(192)),  # not from 228 on
    "window_starts_from_last_row": ("window, 301 keys", keys_from(256)),
    "mask_ignored": ("mask", {"attn_mask": None}),
    "mask_inverted": ("mask", {"attn_mask": ~mask_of("mask")}),
    "mask_transposed": ("mask", {"attn_mask": mask_of("mask").T}),
    "mask_head_0_for_all": (
        "mask for each head", {"attn_mask": mask_of("mask for each head")[:, :1]},
    ),
    "mask_batch_0_for_all": (
        "mask for each head", {"attn_mask": mask_of("mask for each head")[:1]},
    ),
    "mask_by_kv_head": (
        "mask for each head, grouped heads",
        {"attn_mask": mask_of("mask for each head, grouped heads")[:, [0, 0, 1, 1]]},
    ),
    "mask_row_0_for_all": ("mask", {"attn_mask": np.tile(mask_of("mask")[:1], (6, 1))}),
    "hides_only_together": (
        "mask, causal",
        {"is_causal": False, "attn_mask": mask_of("mask, causal") | np.tri(6, dtype=bool)},
    ),
    "mask_added_as_number": (
        "mask", {"attn_mask": None, "attn_bias": mask_of("mask").astype(np.float32)},
    ),
    "hidden_score_small": (
        "mask", {"attn_mask": None,
                 "attn_bias": np.where(mask_of("mask"), 0, -10 - scores("mask")[0, 0])},
    ),
    "hidden_score_zero": (
        "mask", {"attn_mask": None,
                 "attn_bias": np.where(mask_of("mask"), 0, -scores("mask")[0, 0])},
    ),
    "lengths_ignored": ("lengths", {"kv_lengths": None}),
    "lengths_one_too_long": ("lengths", {"kv_lengths": np.array([6, 4, 8])}),
    "lengths_one_too_short": ("lengths", {"kv_lengths": np.array([4, 2, 6])}),
    "lengths_rounded_down": ("lengths, 301 keys", {"kv_lengths": np.array([64, 128, 288])}),
    "lengths_shared": ("lengths", {"kv_lengths": np.array([7, 7, 7])}),
    "lengths_from_left": (
        "lengths",
        {"kv_lengths": None,
         "attn_mask": np.arange(8) >= np.array([3, 5, 1])[:, None, None, None]},
    ),
    "hidden_read_as_zeros": (
        "lengths", {"kv_lengths": None, **{n: zero_behind("lengths", n) for n in "kv"}},
    ),
    "lengths_rounded_up": ("lengths, 301 keys", {"kv_lengths": np.array([80, 144, 301])}),
    "lengths_batch_0_for_all": ("lengths", {"kv_lengths": np.array([5, 5, 5])}),
    "softmax_base_2": ("one head", {"scale": 0.5 * np.log(2)}),
    "last_block_zeroed": ("301 keys", {"k": zero_from(256, "k"), "v": zero_from(256, "v")}),
    "padding_seen": ("301 keys", {"k": zero_from(301, "k"), "v": zero_from(301, "v")}),
    "bias_not_in_base_2": ("bias", {"attn_bias": bias_of("bias") * np.log(2)}),
    "sinks_ignored": ("sinks", {"sinks": None}),
    "sink_0_for_all": ("sinks", {"sinks": np.full(3, 1.5, np.float32)}),
    "sink_capped": ("sinks and softcap, 64 tokens", {"sinks": 1.5 * np.tanh(np.ones(1))}),
    "sink_scaled": ("sinks", {"sinks": np.array([0.75, -0.5, 2.0])}),
    "sink_in_each_part": ("sinks", {"sinks": PROBLEMS["sinks"]["sinks"] + np.log(2)}),
    "sink_exponentiated": ("sinks", {"sinks": np.exp(PROBLEMS["sinks"]["sinks"])}),
    "denominator_enlarged": ("sinks", {"sinks": np.logaddexp(PROBLEMS["sinks"]["sinks"], 0)}),
    "sinks_by_kv_head": ("sinks, grouped heads", {"sinks": np.array([1.5, 1.5, -1.0, -1.0])}),
    "v_is_k": ("one head", {"v": PROBLEMS["one head"]["k"]}),
    "k_v_swapped": (
        "one head", {"k": PROBLEMS["one head"]["v"], "v": PROBLEMS["one head"]["k"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("identifier", AS)
def test_a_deviation_is_the_right_answer_to_another_problem(identifier):
    name, changed = AS[identifier]
    output, _ = attend(PROBLEMS[name], [identifier])
    expected, _ = right(name, **changed)
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-9)
    assert not np.allclose(output, right(name)[0], atol=1e-5)


def test_heads_are_tiled_or_all_the_first():
    x = PROBLEMS["grouped heads"]
    for identifier, heads in (("kv_heads_tiled", [0, 1, 2] * 2), ("kv_head_0_for_all", [0] * 6)):
        output, _ = attend(x, [identifier])
        expected, _ = right("grouped heads", k=x["k"][:, heads], v=x["v"][:, heads])
        np.testing.assert_allclose(output, expected, rtol=1e-10)


@pytest.mark.parametrize("which", ["k", "v"])
def test_heads_of_keys_or_of_values_alone_are_misread(which):
    x = PROBLEMS["grouped heads"]
    for name, value, heads in (
        ("kv_heads_tiled", which, [0, 1, 2] * 2),
        ("kv_head_0_for_all", which, [0] * 6),
        ("kv_heads_misread", (which, "at most Hkv - 1"), [0, 1, 2, 2, 2, 2]),
        ("kv_heads_misread", (which, "reversed"), [2, 2, 1, 1, 0, 0]),
    ):
        output, _ = attend(x, {name: value})
        other = "v" if which == "k" else "k"
        read = {which: x[which][:, heads], other: np.repeat(x[other], 2, 1)}
        np.testing.assert_allclose(output, right("grouped heads", **read)[0], rtol=1e-10)


def test_packed_rows_are_confused_in_another_way():
    name = "causal, grouped heads"
    output, _ = attend(PROBLEMS[name], {"packed_rows_confused": "row mod Lq"})
    expected, _ = right(name, **as_if_at([0, 2, 4, 0, 2, 4, 1, 3, 5, 1, 3, 5]))
    np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_products_are_swapped_or_reshaped():
    x = {n: a.astype(np.float64) for n, a in PROBLEMS["square"].items()}
    output, _ = attend(PROBLEMS["square"], ["q_k_swapped"])
    S = scores("square").swapaxes(-1, -2)
    np.testing.assert_allclose(output, softmax(S) @ x["v"], rtol=1e-10)
    output, _ = attend(PROBLEMS["square"], ["k_reshaped_not_transposed"])
    S = x["q"] @ x["k"].reshape(1, 1, 4, 6) / 2
    np.testing.assert_allclose(output, softmax(S) @ x["v"], rtol=1e-10)
    with pytest.raises(Impossible, match="Lq is not Lk"):
        attend(PROBLEMS["one head"], ["q_k_swapped"])


def test_blocks_of_rows_share_the_windows_first_key():
    name, (i, j) = "window, 64 tokens", np.indices((64, 64))
    for identifier, value, first in (
        ("window_left_in_blocks", (16, 16), (i // 16 * 16 - 9) // 16 * 16),
        (
            "window_starts_from_last_row",
            ("whole", 32, 32),
            np.maximum(i - 9, np.where(i < 32, 0, 32)),
        ),
    ):
        output, _ = attend(PROBLEMS[name], {identifier: value})
        mask = (first <= j) & (j <= i + 3)
        expected, _ = right(name, window_size=None, attn_mask=mask)
        np.testing.assert_allclose(output, expected, rtol=1e-10)
        assert not np.allclose(output, right(name)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("identifier", "axis"),
    [("softmax_over_queries", 2), ("softmax_over_heads", 1), ("softmax_over_all", (2, 3))],
)
def test_the_softmax_runs_over_another_axis(identifier, axis):
    name = "heads and batch"
    output, _ = attend(PROBLEMS[name], [identifier])
    expected = softmax(scores(name), axis) @ PROBLEMS[name]["v"]
    np.testing.assert_allclose(output, expected, rtol=1e-6)


def online(S, V, B_c, rescales_output, rescales_sum):
    """The online softmax over blocks of B_c keys, as a kernel would forget parts of it."""
    m = np.full((*S.shape[:-1], 1), -np.inf)
    l, O = np.zeros_like(m), np.zeros((*S.shape[:-1], V.shape[-1]))
    for j in range(0, S.shape[-1], B_c):
        m_new = np.maximum(m, S[..., j : j + B_c].max(-1, keepdims=True))
        alpha, P = np.exp(m - m_new), np.exp(S[..., j : j + B_c] - m_new)
        l = (alpha if rescales_sum else 1) * l + P.sum(-1, keepdims=True)
        O = (alpha if rescales_output else 1) * O + P @ V[..., j : j + B_c, :]
        m = m_new
    return O / l


@pytest.mark.parametrize("B_c", [1, 16, 64])
def test_running_sums_are_not_rescaled(B_c):
    name = "301 keys"
    S, V = scores(name), PROBLEMS[name]["v"].astype(np.float64)
    for identifier, rescaled in (
        ("online_output_not_rescaled", (False, True)), ("online_sum_not_rescaled", (True, False)),
    ):  # fmt: skip
        output, _ = attend(PROBLEMS[name], {identifier: B_c})
        np.testing.assert_allclose(output, online(S, V, B_c, *rescaled), rtol=1e-9, atol=1e-12)


def test_the_last_block_is_dropped():
    x = PROBLEMS["301 keys"]
    output, _ = attend(x, {"online_last_block_dropped": 64})
    expected, _ = right("301 keys", k=x["k"][:, :, :256], v=x["v"][:, :, :256])
    np.testing.assert_allclose(output, expected, rtol=1e-10)


@pytest.mark.parametrize(("name", "option"), [("ALiBi", "alibi_slopes"), ("sinks", "sinks")])
def test_what_is_added_is_not_in_base_2(name, option):
    output, _ = attend(PROBLEMS[name], ["bias_not_in_base_2"])
    given = PROBLEMS[name][option].astype(np.float64)
    expected, _ = right(name, **{option: given * np.log(2)})
    np.testing.assert_allclose(output, expected, rtol=1e-10)
    assert not np.allclose(output, right(name)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("split", "starts"),
    [(("parts", 2), [0, 151]), (("parts", 4), [0, 76, 152, 228]), (("keys", 128), [0, 128, 256])],
)
def test_parts_are_merged_by_a_log_sum_exp_of_base_2(split, starts):
    x = PROBLEMS["301 keys"]
    parts = [
        right("301 keys", k=x["k"][:, :, i:j], v=x["v"][:, :, i:j])
        for i, j in zip(starts, [*starts[1:], 301], strict=True)
    ]
    L = np.stack([L for _, L in parts]) / np.log(2)
    W = softmax(L, axis=0)
    expected = sum(w[..., None] * O for w, (O, _) in zip(W, parts, strict=True))
    output, lse = attend(x, {"lse_base_2_merged": split})
    np.testing.assert_allclose(output, expected, rtol=1e-10)
    np.testing.assert_allclose(lse, np.log(np.exp(L).sum(0)), rtol=1e-10)


@pytest.mark.parametrize("way", ["mean", "sums", "all"])
def test_parts_are_merged_without_their_log_sum_exp(way):
    x, starts = PROBLEMS["301 keys"], [0, 64, 128, 192, 256]
    S = [scores("301 keys")[..., i : i + 64] for i in starts]
    O = [softmax(s) @ x["v"][:, :, i : i + 64] for i, s in zip(starts, S, strict=True)]
    sums = [np.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True) for s in S]
    weights = sums if way == "sums" else [1] * 5
    expected = sum(w * o for w, o in zip(weights, O, strict=True)) / sum(weights)
    output, _ = attend(x, {"parts_merged_wrongly": (way, ("keys", 64))})
    np.testing.assert_allclose(output, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("identifier", "cap"),
    [
        ("softcap_not_divided", lambda S: 2 * np.tanh(S)),
        ("softcap_clips", lambda S: np.clip(S, -2, 2)),
    ],
)
def test_scores_are_capped_in_another_way(identifier, cap):
    output, _ = attend(PROBLEMS["softcap"], [identifier])
    expected = softmax(cap(scores("softcap"))) @ PROBLEMS["softcap"]["v"]
    np.testing.assert_allclose(output, expected, rtol=1e-7)


def test_what_is_added_to_a_denominator_or_counted_twice():
    name = "sinks"
    S, x = scores(name), PROBLEMS[name]
    top = np.maximum(S.max(-1), x["sinks"][:, None])
    l = np.exp(S - top[..., None]).sum(-1)
    output, _ = attend(x, ["sink_not_exponentiated"])
    expected = np.exp(S - top[..., None]) @ x["v"] / (l + x["sinks"][:, None])[..., None]
    np.testing.assert_allclose(output, expected, rtol=1e-9)
    output, _ = attend(x, {"denominator_enlarged": 0.1})
    expected = np.exp(S - top[..., None]) @ x["v"]
    total = l + np.exp(x["sinks"][:, None] - top) + 0.1
    np.testing.assert_allclose(output, expected / total[..., None], rtol=1e-9)


def test_padding_has_a_weight_that_a_mask_may_hide():
    j = np.arange(8)
    mask = np.pad(mask_of("mask"), [(0, 0), (0, 2)])
    x = {n: np.pad(PROBLEMS["mask"][n], [(0, 0), (0, 0), (0, 2), (0, 0)]) for n in "kv"}
    for when, seen in (("seen", mask | (j >= 6)), ("masked", mask), ("always", mask | (j >= 6))):
        output, _ = attend(PROBLEMS["mask"], {"padding_seen": (when, 4)})
        np.testing.assert_allclose(output, right("mask", **x, attn_mask=seen)[0], rtol=1e-9)


def test_an_output_in_float16_is_added_up_in_steps():
    output, _ = attend(PROBLEMS["4096 equal keys"], ["output_in_float16"])
    unit = np.float16(1) / np.float16(4096)
    assert output[0, 0, 0, 0] == np.add.accumulate(np.full(4096, unit))[-1] != 1


def test_rows_that_see_no_key_of_some_part_are_nan():
    expected, _ = right("causal")
    for split, lost in ((("parts", 2), 3), (("keys", 4), 4), (("first", 4), 0)):
        output, _ = attend(PROBLEMS["causal"], {"part_without_keys_nan": split})
        assert np.isnan(output[:, :, :lost]).all()
        np.testing.assert_allclose(output[:, :, lost:], expected[:, :, lost:], rtol=1e-10)
    output, _ = attend(PROBLEMS["window"], {"part_without_keys_nan": ("first", 4)})
    np.testing.assert_array_equal(np.isnan(output).any((0, 1, 3)), np.arange(9) - 3 >= 4)


def test_only_the_first_are_computed():
    q, k = (PROBLEMS["wide heads"][n] for n in "qk")
    expected, _ = right("wide heads", q=q[..., :64], k=k[..., :64], scale=160**-0.5)
    output, _ = attend(PROBLEMS["wide heads"], {"only_first_computed": ("columns of Q and K", 64)})
    np.testing.assert_allclose(output, expected, rtol=1e-10)
    output, _ = attend(PROBLEMS["wide heads"], {"only_first_computed": ("columns", 64)})
    np.testing.assert_allclose(output[..., :64], expected[..., :64], rtol=1e-10)
    assert not output[..., 64:].any()
    x = PROBLEMS["301 keys"]
    output, _ = attend(x, {"only_first_computed": ("keys", 64)})
    expected, _ = right("301 keys", k=x["k"][:, :, :64], v=x["v"][:, :, :64])
    np.testing.assert_allclose(output, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("axis", "size", "kept"),
    [
        ("batch entries", 1, np.s_[:1]),
        ("heads", 2, np.s_[:, :2]),
        ("rows", 4, np.s_[:, :, :4]),
        ("whole blocks of rows", 3, np.s_[:, :, :3]),
    ],
)
def test_what_is_not_computed_is_0(axis, size, kept):
    expected = np.zeros_like(right("heads and batch")[0])
    expected[kept] = right("heads and batch")[0][kept]
    output, _ = attend(PROBLEMS["heads and batch"], {"only_first_computed": (axis, size)})
    np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_the_log_sum_exp_has_another_base_or_lacks_something():
    output, L = right("sinks, log-sum-exp")
    x = PROBLEMS["sinks, log-sum-exp"]
    S = scores("sinks, log-sum-exp")
    expected = {
        "lse_base_2": L / np.log(2),
        "lse_without_sink": np.log(np.exp(S).sum(-1)),
        "lse_unscaled": np.log(np.exp(2 * S).sum(-1)),
        "lse_negated": -L,
        "lse_scaled": L / 2,
        "lse_is_no_logarithm": np.maximum(S.max(-1), x["sinks"][:, None]),
        "lse_without_maximum": L - np.maximum(S.max(-1), x["sinks"][:, None]),
    }
    for identifier, wanted in expected.items():
        same, lse = attend(x, [identifier])
        np.testing.assert_allclose(lse, wanted, rtol=1e-6)
        np.testing.assert_allclose(same, output, rtol=1e-6)


def test_rows_that_see_nothing_may_hold_what_is_named():
    x = PROBLEMS["mask that hides rows"]
    mean = x["v"].mean(axis=2)
    for identifier, wanted in (
        ("dead_rows_nan", np.full_like(mean, np.nan)),
        ("dead_rows_mean", mean),
        ("dead_rows_first_value", x["v"][:, :, 0]),
    ):
        found = deviate(Prepared(x), {identifier: 1})
        assert any(np.allclose(o[:, :, 1], wanted, equal_nan=True) for o in found.others)
        np.testing.assert_array_equal(found.output[:, :, 1], 0)


def test_exponentials_overflow_without_a_maximum():
    output, _ = attend(PROBLEMS["large scores"], ["softmax_no_maximum"])
    assert np.isnan(output).all()


def test_exponentials_underflow_if_the_maximum_starts_from_0():
    name = "scores far below 0"
    found = deviate(Prepared(PROBLEMS[name]), {"first_maximum_0": 1})
    assert np.isnan(found.others[0]).all()  # 0 / 0
    assert not found.output.any()  # or 0, if the division is guarded
    assert abs(right(name)[0]).min() > 0
    output, _ = attend(PROBLEMS["large scores"], ["first_maximum_0"])
    np.testing.assert_allclose(output, right("large scores")[0], rtol=1e-10)


def test_hidden_keys_may_raise_the_maximum():
    name = "causal, low scores"  # of -160, beside hidden ones of 0
    found = deviate(Prepared(PROBLEMS[name]), {"maximum_of_hidden": 1})
    assert found.is_free[:, :, 0].all()  # exp(-160) is 0 in float32, and not in float64
    output, _ = attend(PROBLEMS["causal"], ["maximum_of_hidden"])
    np.testing.assert_allclose(output, right("causal")[0], rtol=1e-10)


@pytest.mark.parametrize(
    ("identifier", "name", "weights"),
    [
        ("scores_in_float16", "scores of 2049", [0.5, 0.5]),
        ("scores_in_bfloat16", "scores of 257", [0.5, 0.5]),
        ("inputs_in_bfloat16", "1 + 2^-9", [0.5, 0.5]),
        ("inputs_in_tf32", "1 + 2^-12", [0.5, 0.5]),
    ],
)
def test_numbers_that_few_bits_cannot_hold_become_equal(identifier, name, weights):
    output, _ = attend(PROBLEMS[name], [identifier])
    np.testing.assert_array_equal(output[0, 0, 0, :2], weights)
    assert right(name)[0][0, 0, 0, 0] > 0.7


def test_a_sum_in_float16_loses_its_small_terms():
    output, _ = attend(PROBLEMS["1 + e^-8"], ["sum_in_float16"])
    assert output[0, 0, 0, 1] == 1 + np.exp(-8)
    output, _ = attend(PROBLEMS["4096 equal keys"], ["sum_in_float16"])
    np.testing.assert_array_equal(output[0, 0, 0], [2, 1])


def test_what_is_wrong_and_what_to_change_are_sentences():
    for deviation in DEVIATIONS.values():
        for sentence in (deviation.wrong, deviation.change):
            assert sentence.endswith(".")
            assert sentence[0].isupper() or "(" in sentence or sentence.split()[0].islower()


def seen_by(name, *, visible):
    """A problem's answer with a mask in place of causality, windows and lengths."""
    i, j = np.indices((PROBLEMS[name]["q"].shape[2], PROBLEMS[name]["k"].shape[2]))
    mask = visible(i, j)
    return right(name, is_causal=False, window_size=None, kv_lengths=None, attn_mask=mask)[0]


def halved_columns(x):
    """Q whose columns 96 to 127 of 160 count twice, as if 64 of them were moved back."""
    return x["q"] * np.where(np.isin(np.arange(160), np.arange(96, 128)), 2, 1).astype(np.float32)


OFFSETS = np.array([40, 298, 150])[:, None, None, None]
THREE = "causal, groups of three, 100 queries"
SHORTER = "lengths, causal, groups of three, 100 tokens"
SAME = [  # a deviation, its value, a problem, and the answer by other means
    ("last_columns_count_twice", 64, "wide heads",
     lambda: right("wide heads", q=halved_columns(PROBLEMS["wide heads"]))[0]),
    ("causal_masked_in_last_block", (128, 64), THREE,
     lambda: seen_by(THREE, visible=lambda i, j: (j <= i) | (j < 64))),
    ("causal_masked_in_last_block", (128, 32, 2), THREE,
     lambda: seen_by(THREE, visible=lambda i, j: (j <= i) | (j < 64))),
    ("lengths_ignored_before_diagonal", (64, 64), SHORTER,
     lambda: seen_by(SHORTER, visible=lambda i, j: (j <= i) & ((j < 50) | (i >= 64) & (j < 64)))),
    ("window_left_of_entry_0", 1, "window, an offset for each entry, 301 keys",
     lambda: seen_by("window, an offset for each entry, 301 keys", visible=lambda i, j: (
         (j >= i + 40 - 70) & (j <= i + OFFSETS + 5)))),
    ("only_first_computed", ("keys in the first half of each step", 32), "301 keys",
     lambda: seen_by("301 keys", visible=lambda i, j: j % 64 < 32)),
    ("last_whole_block_dropped", 64, "whole pages, 301 keys",
     lambda: right("whole pages, 301 keys", kv_lengths=np.array([0, 64, 48]))[0]),
    ("last_whole_block_dropped", 16, "64 tokens",
     lambda: right("64 tokens", kv_lengths=np.array([48]))[0]),
    ("scale_from_dv", "if Dv < D", "narrow values",
     lambda: right("narrow values", scale=3**-0.5)[0]),
    ("sink_unshifted", "of keys and sink", "sinks", lambda: with_sink(lambda top: 1 + 0 * top)),
    ("sink_unshifted", "of keys", "sinks", lambda: with_sink(np.exp, of_keys=True)),
    ("denominator_of_half_tiles", (32, 16), "301 keys",
     lambda: by_terms("301 keys", lambda E: E[..., np.arange(301) % 32 < 16].sum(-1))),
    ("exponential_approximated", "linear", "one head", lambda: linear("one head")),
    ("parts_merged_wrongly", ("sums", ("every", 2)), "301 keys", lambda: interleaved("301 keys")),
    ("parts_merged_wrongly", ("L of the last", ("keys", 64)), "301 keys",
     lambda: merged_in_turn("301 keys", 64)),
]  # fmt: skip


def exponentials(name):
    S = scores(name)
    return np.exp(S - S.max(-1, keepdims=True))


def by_terms(name, denominator):
    """The output with another denominator."""
    E = exponentials(name)
    return E @ PROBLEMS[name]["v"].astype(np.float64) / denominator(E)[..., None]


def with_sink(term, *, of_keys=False):
    """The output of "sinks" with exp(sink) or another term added to the denominator."""
    S, sinks = scores("sinks"), PROBLEMS["sinks"]["sinks"].astype(np.float64)[:, None, None]
    top = S.max(-1, keepdims=True)
    E = np.exp(S - (top if of_keys else np.maximum(top, sinks)))
    return (
        E @ PROBLEMS["sinks"]["v"].astype(np.float64) / (E.sum(-1, keepdims=True) + np.exp(sinks))
    )


def linear(name):
    """The output with 2^x taken for 2^floor(x) · (1 + x - floor(x))."""
    y = np.log2(exponentials(name))
    E = 2 ** np.floor(y) * (1 + y - np.floor(y))
    return E @ PROBLEMS[name]["v"].astype(np.float64) / E.sum(-1, keepdims=True)


def interleaved(name):
    """The output of even and of odd keys, each with its own maximum, whose sums are added."""
    S, V = scores(name), PROBLEMS[name]["v"].astype(np.float64)
    E = np.concatenate(
        [np.exp(S[..., n::2] - S[..., n::2].max(-1, keepdims=True)) for n in (0, 1)], -1
    )
    V = np.concatenate([V[..., n::2, :] for n in (0, 1)], -2)
    return E @ V / E.sum(-1, keepdims=True)


def merged_in_turn(name, size):
    """The output of parts of the keys, merged one after another by the last part's log-sum-exp."""
    S, V = scores(name), PROBLEMS[name]["v"].astype(np.float64)
    O, last = 0.0, np.full((*S.shape[:-1], 1), -np.inf)
    for j in range(0, S.shape[-1], size):
        L = np.log(np.exp(S[..., j : j + size]).sum(-1, keepdims=True))
        o = np.exp(S[..., j : j + size] - L) @ V[..., j : j + size, :]
        both = np.logaddexp(last, L)
        O, last = O * np.exp(last - both) + o * np.exp(L - both), L
    return O


@pytest.mark.parametrize(("identifier", "value", "name", "expected"), SAME)
def test_a_deviation_is_what_such_a_kernel_computes(identifier, value, name, expected):
    output, _ = attend(PROBLEMS[name], {identifier: value})
    np.testing.assert_allclose(output, expected(), rtol=1e-6, atol=1e-9)
    assert not np.allclose(output, right(name)[0], atol=1e-5)


def test_heads_of_a_group_of_8_are_computed_in_two_passes():
    rng = np.random.default_rng(0)
    x = {n: rng.normal(size=(1, h, 5, 4)) for n, h in (("q", 16), ("k", 2), ("v", 2))}
    output, _ = attend(x, {"kv_heads_misread": ("kv", "block of 4 heads, mod Hkv")})
    heads = np.repeat([0, 1, 0, 1], 4)
    expected = attention(x["q"], x["k"][:, heads], x["v"][:, heads], backend="dense")
    np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_rows_of_a_group_of_three_are_taken_for_rows_of_four():
    name = "causal, groups of three, 65 queries"
    x, (g, i) = PROBLEMS[name], np.indices((3, 65))
    output, _ = attend(x, {"packed_rows_confused": "r >> ceil log2 G"})
    mask = np.arange(x["k"].shape[2]) <= ((3 * i + g) >> 2)[..., None]
    expected, _ = right(name, is_causal=False, attn_mask=mask[None])
    np.testing.assert_allclose(output, expected, rtol=1e-10)
    output, _ = attend(x, {"only_first_computed": ("rows of groups of a power of 2", 1)})
    is_computed = (4 * i + g < 3 * 65)[None, ..., None]
    np.testing.assert_allclose(output, np.where(is_computed, right(name)[0], 0), rtol=1e-10)


def test_batch_entries_are_sorted_by_length_but_not_their_masks_and_biases():
    for name in ("bias for each entry, lengths", "mask for each entry, lengths"):
        x, what = PROBLEMS[name], f"attn_{name[:4]}"  # lengths 3, 8, 5: entries 1, 2, 0 in order
        output, _ = attend(x, {f"{name[:4]}_by_order_of_lengths": "longest first"})
        expected, _ = right(name, **{what: x[what][[2, 0, 1]]})
        np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_later_columns_are_not_rescaled():
    name, rng = "64 tokens", np.random.default_rng(0)
    x = {**PROBLEMS[name], "v": rng.normal(size=(1, 1, 64, 24))}
    output, _ = attend(x, {"columns_not_rescaled": ("D", 16)})
    whole = online(scores(name), x["v"], 64, True, True)
    stale = online(scores(name), x["v"], 16, False, True)
    np.testing.assert_allclose(output[..., :16], whole[..., :16], rtol=1e-9)
    np.testing.assert_allclose(output[..., 16:], stale[..., 16:], rtol=1e-9, atol=1e-12)


def test_even_blocks_get_the_values_of_the_next():
    name = "301 keys"
    x, block = PROBLEMS[name], np.arange(301) // 32
    output, _ = attend(x, {"values_of_other_block": (32, 1, "even")})
    later = np.where(block % 2 == 0, np.arange(301) + 32, np.arange(301))
    V = np.where((later < 301)[:, None], x["v"][:, :, np.minimum(later, 300)], 0)
    np.testing.assert_allclose(output, right(name, v=V)[0], rtol=1e-10)
