"""The deviations that ``check`` knows: what is wrong, and what to change.

Deviations of different stages compose; of one stage, a function has at most one. A deviation that
real code has in several forms (a fill of -10 or of -100, a block of 16 keys or of 64) has one
identifier and several values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MASKS = ("attn_mask",)
POSITIONS = ("is_causal", "window_size")
LAYER = ("num_heads",)
HIDING = ("attn_mask", "is_causal", "window_size", "kv_lengths")
BLOCKS = (64, 32, 16, 128, 8, 4, 2, 1, 3, 5, 6, 7, 10, 12, 24, 48, 96, 100, 256)
KINDS = ("all", "mask", "positions", "lengths")
WAYS = ("fill", "add", "fill before the scale")
FILLS = (-10.0, -2.0, -5.0, -15.0, -20.0, -30.0, -50.0, -100.0)


@dataclass(frozen=True)
class Deviation:
    """One way in which attention goes wrong."""

    identifier: str
    stage: str
    wrong: str  # a sentence
    change: str  # a sentence: what to change
    needs: tuple[str, ...] = ()  # options without any of which it changes nothing, if it needs any
    values: tuple[Any, ...] = (1,)  # the forms it takes, the usual one first


def _stage(stage: str, *rows: tuple[Any, ...], needs: tuple[str, ...] = ()) -> list[Deviation]:
    """Deviations of one stage: identifier, what is wrong, what to change, and perhaps values."""
    return [
        Deviation(identifier, stage, wrong, change, needs, *values)
        for identifier, wrong, change, *values in rows
    ]


_ALL = [
    *_stage(
        "products",
        ("q_k_swapped", "Q and K are swapped: the scores are transposed.",
         "Compute Q Kᵀ, one row for each query."),
        ("k_reshaped_not_transposed", "K is reshaped to (D, Lk) where it must be transposed.",
         "Swap K's last two axes; reshape keeps the order of the numbers."),
        ("k_v_swapped", "K and V are swapped: queries are compared with values, and keys weighed.",
         "Compute Q Kᵀ, and multiply the weights by V."),
    ),
    *_stage(
        "values",
        ("v_is_k", "K is used in place of V.", "Multiply the weights by V."),
    ),
    *_stage(
        "key/value heads",
        ("kv_heads_tiled", "Query head h reads key/value head h mod Hkv.",
         "Query head h reads key/value head h // (H // Hkv): repeat heads, do not tile them."),
        ("kv_head_0_for_all", "Every query head reads key/value head 0.",
         "Query head h reads key/value head h // (H // Hkv)."),
    ),
    *_stage(
        "heads joined",
        ("heads_not_moved_back",
         "The output's heads and tokens are confused: (B, H, L, D) is read as (B, L, H, D).",
         "Swap the axes of heads and tokens before reshaping.", ("back", "forth")),
    ),
    *_stage(
        "heads split",
        ("heads_not_split",
         "The inputs' heads and tokens are confused: they are reshaped without being transposed.",
         "Reshape to (B, L, H, D) and then swap the axes of heads and tokens.",
         ("back", "forth")),
    ),
    *_stage(
        "scale",
        ("scale_missing", "The scores are not scaled.", "Multiply the scores by 1/sqrt(D).",
         (1, "given too")),
        ("scale_1_over_d", "The scores are scaled by 1/D.", "Scale by 1/sqrt(D)."),
        ("scale_sqrt_d", "The scores are multiplied by sqrt(D).", "Divide by sqrt(D)."),
        ("scale_twice", "The scale is applied twice.", "Scale queries or scores, not both."),
        ("scale_model_width", "The scores are scaled by 1/sqrt(H · D), the width of the model.",
         "Scale by 1/sqrt(D), with D the width of a head."),
    ),
    *_stage(
        "the argument scale",
        ("scale_argument_ignored", "The argument scale is ignored.",
         "Use scale in place of 1/sqrt(D) where it is given."),
        needs=("scale",),
    ),
    *_stage(
        "softcap",
        ("softcap_ignored", "softcap is ignored.", "Replace scores s by c · tanh(s / c)."),
        ("softcap_not_multiplied_back", "tanh(s / c) is not multiplied by c.",
         "Replace scores s by c · tanh(s / c)."),
        needs=("softcap",),
    ),
    *_stage(
        "the cap's turn",
        ("softcap_before_scale", "Scores are capped before they are scaled.",
         "Scale first, then cap."),
        ("softcap_after_bias", "Scores are capped after the bias was added.",
         "Cap first, then add the bias."),
        ("softcap_after_mask", "Scores are capped after the mask, which makes -inf a finite -c.",
         "Cap first, then mask.", ("bias first", "bias last")),
        needs=("softcap",),
    ),
    *_stage(
        "bias",
        ("bias_ignored", "attn_bias is ignored.", "Add attn_bias to the scaled scores."),
        ("bias_subtracted", "attn_bias is subtracted.", "Add attn_bias to the scaled scores."),
        needs=("attn_bias",),
    ),
    *_stage(
        "the bias's turn",
        ("bias_before_scale", "attn_bias is added before the scores are scaled.",
         "Scale first, then add the bias."),
        needs=("attn_bias",),
    ),
    *_stage(
        "the bias's axes",
        ("bias_transposed", "attn_bias is transposed.", "Its rows are queries, its columns keys."),
        ("bias_head_0_for_all", "Head 0's attn_bias is used for all heads.",
         "Index attn_bias by head."),
        needs=("attn_bias",),
    ),
    *_stage(
        "the bias's batch",
        ("bias_batch_0_for_all", "Batch entry 0's attn_bias is used for all.",
         "Index attn_bias by batch entry."),
        needs=("attn_bias",),
    ),
    *_stage(
        "alibi",
        ("alibi_ignored", "alibi_slopes are ignored.", "Add -slope · |i + q_offset - j|."),
        ("alibi_sign", "ALiBi raises the scores of distant keys.",
         "Subtract slope · distance from the scores."),
        needs=("alibi_slopes",),
    ),
    *_stage(
        "distance",
        ("alibi_ignores_offset", "ALiBi's distances ignore q_offset.",
         "The distance of query i and key j is |i + q_offset - j|."),
        ("alibi_signed_distance", "ALiBi's distance has a sign: keys that follow get more.",
         "The distance of query i and key j is |i + q_offset - j|."),
        needs=("alibi_slopes",),
    ),
    *_stage(
        "ALiBi's turn",
        ("alibi_before_scale", "ALiBi is added before the scores are scaled.",
         "Scale first, then add ALiBi."),
        needs=("alibi_slopes",),
    ),
    *_stage(
        "slopes",
        ("alibi_slope_0_for_all", "Head 0's slope is used for all heads.",
         "Use one slope for each head."),
        ("alibi_by_kv_head", "Query heads that share a key/value head share its number's slope.",
         "Index alibi_slopes by query head, not by key/value head."),
        needs=("alibi_slopes",),
    ),
    *_stage(
        "causal",
        ("causal_ignored", "is_causal is ignored.", "Hide the keys j > i + q_offset.",
         (1, "with a mask")),
        ("causal_excludes_self", "A query does not see its own key: j < i + q_offset.",
         "Keep j = i + q_offset visible."),
        ("causal_sees_one_ahead", "A query sees keys of the future: j <= i + q_offset + 1.",
         "Hide every key j > i + q_offset.", (1, 2)),
        ("causal_reversed", "A query sees the future and not the past.",
         "Hide the keys j > i + q_offset, not those below.", (0, 1)),
        needs=POSITIONS,
    ),
    *_stage(
        "causal",
        ("causal_always", "Keys of the future are hidden though is_causal was not given.",
         "Hide the keys j > i + q_offset where is_causal is true, and only there.",
         ("from the first key", "to the last key")),
    ),
    *_stage(
        "where causality stands",
        ("causal_top_left", "Causality is aligned to the first key: q_offset is ignored.",
         "Query i stands at key position i + q_offset.",
         (("causal",), ("causal", "window"), ("causal", "window", "alibi"))),
        ("causal_bottom_right",
         "Causality is aligned to the last key, as if q_offset were Lk - Lq.",
         "Query i stands at key position i + q_offset.", (("causal",), ("causal", "window"))),
        needs=POSITIONS,
    ),
    *_stage(
        "window",
        ("window_ignored", "window_size is ignored.", "Hide the keys outside the window."),
        needs=("window_size",),
    ),
    *_stage(
        "the window's left side",
        ("window_left_short", "The window's left side is too short.",
         "Both sides are inclusive: keys from i + q_offset - left on are seen.", (1, 2)),
        ("window_left_long", "The window's left side is too long.",
         "Both sides are inclusive: keys from i + q_offset - left on are seen.", (1, 2)),
        ("window_left_ignored", "The window's left side is ignored.",
         "Hide the keys below i + q_offset - left."),
        needs=("window_size",),
    ),
    *_stage(
        "the window's right side",
        ("window_right_short", "The window's right side is too short.",
         "Both sides are inclusive: keys up to i + q_offset + right are seen."),
        ("window_right_long", "The window's right side is too long.",
         "Both sides are inclusive: keys up to i + q_offset + right are seen.", (1, 2)),
        ("window_right_ignored", "The window's right side is ignored.",
         "Hide the keys above i + q_offset + right."),
        needs=("window_size",),
    ),
    *_stage(
        "where the window stands",
        ("window_ignores_offset", "The window's position ignores q_offset.",
         "Query i stands at key position i + q_offset."),
        needs=("window_size",),
    ),
    *_stage(
        "mask",
        ("mask_ignored", "attn_mask is ignored.", "Hide the keys whose mask is False.",
         (1, "with causality")),
        ("mask_inverted", "attn_mask is inverted: True hides.", "True means: may attend."),
        ("mask_added_as_number", "attn_mask is added to the scores as 0 and 1.",
         "Put -inf where the mask is False.", ("to scaled scores", "before the scale")),
        needs=MASKS,
    ),
    *_stage(
        "the mask's axes",
        ("mask_transposed", "attn_mask is transposed.", "Its rows are queries, its columns keys."),
        ("mask_head_0_for_all", "Head 0's mask is used for all heads.", "Index the mask by head."),
        needs=MASKS,
    ),
    *_stage(
        "the mask's batch",
        ("mask_batch_0_for_all", "Batch entry 0's mask is used for all.",
         "Index the mask by batch entry."),
        needs=MASKS,
    ),
    *_stage(
        "hiding",
        ("hidden_after_softmax",
         "Hidden keys get weight 0 after the softmax: they stay in the denominator.",
         "Put -inf into the scores before the softmax.", KINDS),
        ("hidden_score_zero", "Hidden keys get score 0, as if scores were multiplied by the mask.",
         "Put -inf into the scores.", KINDS),
        ("hidden_score_small", "Hidden keys get a finite score that is too large to hide them.",
         "Put -inf into the scores.",
         tuple((kind, fill, way) for way in WAYS for kind in KINDS for fill in FILLS)),
        needs=HIDING,
    ),
    *_stage(
        "lengths",
        ("lengths_ignored", "kv_lengths are ignored.", "Hide the keys j >= length."),
        ("lengths_one_too_long", "One key beyond kv_lengths is seen.", "Hide the keys j >= length.",
         (1, 2)),
        ("lengths_one_too_short", "The last key within kv_lengths is hidden.",
         "Keys j < length are seen."),
        needs=("kv_lengths",),
    ),
    *_stage(
        "whose length",
        ("lengths_batch_0_for_all", "Batch entry 0's length is used for all.",
         "Use one length for each batch entry."),
        needs=("kv_lengths",),
    ),
    *_stage(
        "softmax",
        ("softmax_over_queries", "The softmax runs over the queries.",
         "Normalise each row over its keys, the last axis."),
        ("softmax_over_heads", "The softmax runs over the heads.",
         "Normalise each row over its keys, the last axis."),
        ("softmax_over_all", "The softmax runs over queries and keys together.",
         "Normalise each row over its keys, the last axis."),
    ),
    *_stage(
        "denominator",
        ("softmax_not_normalised", "Weights are not divided by their sum.",
         "Divide by the sum of a row's exponentials."),
    ),
    *_stage(
        "exponential",
        ("softmax_base_2", "2^s is computed in place of e^s.",
         "Multiply the scores by log2(e) before exp2.", ("ln", "log2", "consistent")),
    ),
    *_stage(
        "maximum",
        ("softmax_no_maximum", "The row's maximum is not subtracted: exponentials overflow.",
         "Subtract each row's maximum before the exponential."),
        ("softmax_global_maximum",
         "One maximum is used for many rows: exponentials of the others underflow.",
         "Subtract each row's own maximum.", ("head", "batch", "all")),
    ),
    *_stage(
        "dropout",
        ("weights_dropped_out", "Dropout is left on: some weights are 0, the others larger.",
         "Switch dropout off."),
    ),
    *_stage(
        "online output",
        ("online_output_not_rescaled",
         "The running output is not rescaled when the running maximum grows.",
         "Multiply O by exp(m_old - m_new) at each block.", BLOCKS),
    ),
    *_stage(
        "online sum",
        ("online_sum_not_rescaled",
         "The running sum is not rescaled when the running maximum grows.",
         "Multiply l by exp(m_old - m_new) at each block.", BLOCKS),
    ),
    *_stage(
        "last block",
        ("online_last_block_dropped", "Keys beyond the last whole block are dropped.",
         "Visit ceil(Lk / B_c) blocks, and mask what the last one lacks.", BLOCKS),
    ),
    *_stage(
        "sinks",
        ("sinks_ignored", "sinks are ignored.", "Add exp(sink - maximum) to the denominator."),
        ("sink_0_for_all", "Head 0's sink is used for all heads.", "Use one sink for each head."),
        ("sinks_by_kv_head", "Query heads that share a key/value head share its number's sink.",
         "Index sinks by query head, not by key/value head."),
        needs=("sinks",),
    ),
    *_stage(
        "the size of sinks",
        ("sink_scaled", "Sinks are scaled as scores are.", "Use sinks as they are given."),
        needs=("sinks",),
    ),
    *_stage(
        "sinks and the maximum",
        ("sink_not_in_maximum",
         "The maximum leaves the sink out: exp(sink - maximum) may overflow.",
         "Include the sink in the row's maximum."),
        ("sink_unshifted", "exp(sink) is added to a sum of exp(s - maximum).",
         "Subtract the row's maximum from the sink too."),
        needs=("sinks",),
    ),
    *_stage(
        "rows that see nothing",
        ("dead_rows_nan", "A query that sees no key gets NaN.", "Return 0 where the sum is 0."),
        ("dead_rows_mean", "A query that sees no key gets a mean of values.",
         "Hide with a real -inf, and return 0 where the sum is 0."),
        ("dead_rows_first_value", "A query that sees no key gets the first value.",
         "Return 0 where the sum is 0."),
        ("lse_of_dead_rows", "The log-sum-exp of a query that sees no key is not -inf.",
         "Return -inf where the sum is 0."),
        needs=(*HIDING, "attn_bias"),
    ),
    *_stage(
        "leaks",
        ("nan_leaks", "A NaN in a hidden key or value reaches the output.",
         "Select with where; 0 · NaN is NaN."),
        needs=HIDING,
    ),
    *_stage(
        "output",
        ("residual_added", "The input is added to the output.", "Return the attention alone."),
    ),
    *_stage(
        "lse",
        ("lse_base_2", "The log-sum-exp has base 2.", "Multiply it by ln 2."),
        ("lse_without_maximum", "The log-sum-exp lacks the maximum.",
         "Add the row's maximum to the logarithm of the sum."),
        ("lse_unscaled", "The log-sum-exp is that of the scores before the scale.",
         "Take it of the final scores."),
        needs=("return_lse",),
    ),
    *_stage(
        "lse and sinks",
        ("lse_without_sink", "The log-sum-exp leaves the sink out.",
         "The sink is part of the sum."),
        needs=("return_lse",),
    ),
    *_stage(
        "precision of inputs",
        ("inputs_in_bfloat16", "Inputs are rounded to bfloat16.", "Multiply in float32."),
        ("inputs_in_tf32", "Inputs are rounded to TF32.",
         "Switch TF32 off, or accept 11 significant bits."),
        ("inputs_in_float16", "Inputs are rounded to float16.", "Multiply in float32."),
    ),
    *_stage(
        "precision of scores",
        ("scores_in_float16", "Scores are kept or added up in float16.",
         "Accumulate and keep scores in float32.", ("accumulated", "rounded")),
        ("scores_in_bfloat16", "Scores are kept or added up in bfloat16.",
         "Accumulate and keep scores in float32.", ("accumulated", "rounded")),
    ),
    *_stage(
        "precision of the sum",
        ("sum_in_float16", "The denominator is kept or added up in float16.",
         "Accumulate it in float32.", ("accumulated", "rounded")),
        ("sum_in_bfloat16", "The denominator is kept or added up in bfloat16.",
         "Accumulate it in float32.", ("accumulated", "rounded")),
    ),
    *_stage(
        "precision of weights",
        ("weights_in_float16", "Weights are rounded to float16.",
         "Keep weights in float32 until they are summed."),
        ("weights_in_bfloat16", "Weights are rounded to bfloat16.",
         "Keep weights in float32 until they are summed."),
    ),
    *_stage(
        "columns of heads",
        ("heads_interleaved", "Heads are split as (D, H), not as (H, D).",
         "Head h is the columns h · D to (h + 1) · D - 1."),
        needs=LAYER,
    ),
    *_stage(
        "output matrix",
        ("w_o_transposed", "W_o is transposed.", "Multiply by W_o, not by its transpose."),
        ("w_o_ignored", "W_o is left out.", "Multiply the concatenated heads by W_o."),
        needs=LAYER,
    ),
    *_stage(
        "query matrix",
        ("w_q_transposed", "W_q, or other matrices beside it, are transposed.",
         "Multiply x by W, not by its transpose.", ("q", "qk", "qkv")),
        needs=LAYER,
    ),
    *_stage(
        "key matrix",
        ("w_k_transposed", "W_k is transposed.", "Multiply x by W_k, not by its transpose."),
        needs=LAYER,
    ),
    *_stage(
        "value matrix",
        ("w_v_transposed", "W_v is transposed.", "Multiply x by W_v, not by its transpose."),
        needs=LAYER,
    ),
    *_stage(
        "query bias",
        ("bias_q_ignored", "b_q, or other biases beside it, are ignored.",
         "Add the biases to the products.", ("q", "qk", "qkv")),
        needs=("b_q",),
    ),
    *_stage(
        "value bias",
        ("bias_v_ignored", "b_v is ignored.", "Add b_v to x W_v."),
        needs=("b_v",),
    ),
    *_stage(
        "output bias",
        ("bias_o_ignored", "b_o is ignored.", "Add b_o to the output."),
        needs=("b_o",),
    ),
    *_stage(
        "rotation",
        ("rope_ignored", "Queries and keys are not rotated.", "Rotate them by their positions."),
        ("rope_interleaved", "Neighbours are rotated, (2i, 2i + 1), in place of halves.",
         "Rotate the pairs (i, i + D/2)."),
        ("rope_half", "Halves are rotated, (i, i + D/2), in place of neighbours.",
         "Rotate the pairs (2i, 2i + 1)."),
        ("rope_over_heads", "Rotation takes the number of the head for the position.",
         "Rotate along the axis of tokens."),
        needs=("rope_base",),
    ),
    *_stage(
        "direction of rotation",
        ("rope_sign", "The rotation has the wrong sign.",
         "Rotate by (x1 cos - x2 sin, x2 cos + x1 sin)."),
        ("rope_on_queries_only", "Queries are rotated and keys are not.", "Rotate both."),
        needs=("rope_base",),
    ),
    *_stage(
        "base of rotation",
        ("rope_base", "The rotation has another base than rope_base.",
         "The angles are position · base^(-2i/D).",
         (500000.0, 10000.0, 1000.0, 100.0, 100000.0, 1000000.0)),
        needs=("rope_base",),
    ),
    *_stage(
        "rotated values",
        ("rope_on_values", "Values are rotated too.", "Rotate queries and keys alone."),
        needs=("rope_base",),
    ),
    *_stage(
        "positions of rotation",
        ("rope_ignores_offset", "Positions start from 0 at every call.",
         "Count positions from the cache's length."),
        needs=("cache",),
    ),
    *_stage(
        "cache",
        ("cache_written_one_late", "A new key is written too late: its own query misses it.",
         "Append keys and values before attending."),
        needs=("cache",),
    ),
    *_stage(
        "concatenation",
        ("concat_heads_reversed", "Heads are concatenated in reverse order.",
         "Concatenate heads 0 to H - 1."),
        ("concat_heads_interleaved", "Heads are interleaved: (B, L, D, H) is read as (B, L, H, D).",
         "Move the axis of heads before that of D."),
        needs=LAYER,
    ),
    *_stage(
        "run",
        ("not_deterministic", "Two runs differ.", "Look for dropout, or for a race."),
        ("writes_into_inputs", "The function writes into its inputs.", "Copy what is changed."),
        ("wrong_dtype", "The output has another dtype than the inputs.",
         "Round once, to the inputs' dtype."),
        ("wrong_shape", "The output has the wrong shape.", "Return (B, H, Lq, Dv)."),
        ("returns_its_input", "The output is a view of an input.", "Return an array of its own."),
        ("not_an_array", "It returns something that is no array.", "Return an array of numbers."),
        ("crashes", "It ends its process.", "Raise an exception for what it does not take."),
        ("hangs", "It does not return in time.", "Look for a loop that has no end."),
        ("exhausts_memory", "It takes ever more memory.", "Look for a list that only grows."),
    ),
]  # fmt: skip


DEVIATIONS: dict[str, Deviation] = {deviation.identifier: deviation for deviation in _ALL}
