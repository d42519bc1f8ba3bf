"""What `judge` says of functions with one deviation, with several, with none, and with others."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from check import wrong
from check.mutants import DTYPES, ROUNDED_BY, answered_by, answers
from check.pairs import of_attention, verdict_on
from check.right import random_kernel
from check.wrong import WRONG
from thorough import in_turn, thorough_after

import minimha
from minimha.check.answer import Answer
from minimha.check.catalogue import DEVIATIONS
from minimha.check.prepared import Prepared
from minimha.check.problems import graded, layer_problems
from minimha.check.verdict import DIFFERENCES, judge
from minimha.layers import KVCache, MultiHeadAttention, RoPE

OF_ATTENTION = [deviation.identifier for deviation in of_attention()]


@cache
def problems_in(dtype):
    return graded(dtype)


@cache
def prepared_in(dtype):
    return [Prepared(p.arguments, dtype, p.is_exact) for p in problems_in(dtype)]


def judged(deviations, dtype="float32"):
    problems = problems_in(dtype)
    return judge(problems, answers(problems, deviations, dtype, prepared_in(dtype)), dtype=dtype)


def answered(function, dtype="float32"):
    return answered_by(function, problems_in(dtype))


@pytest.mark.parametrize("identifier", thorough_after(20, in_turn(OF_ATTENTION)))
def test_one_deviation_is_named(identifier):
    found = judged({identifier: DEVIATIONS[identifier].values[0]})
    verdict = "differs" if identifier in DIFFERENCES else "wrong"
    assert (found.verdict, found.deviations) == (verdict, (identifier,))
    assert found.alternatives == ()
    assert found.explains == (len(found.results) - sum(r.is_refused for r in found.results),) * 2


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_deviation_is_named_in_16_bits(dtype):
    """Every ninth; ``python -m tests.check.measure`` tries all."""
    missed = []
    expected = [name for name in OF_ATTENTION if name not in ROUNDED_BY[dtype]][::9]
    for identifier in expected:
        found = judged({identifier: DEVIATIONS[identifier].values[0]}, dtype)
        if found.deviations != (identifier,) or found.alternatives:
            missed.append((identifier, found.deviations))
    assert len(missed) <= 0.05 * len(expected), missed


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_kernels_are_right(dtype):
    rng = np.random.default_rng(11)
    for _ in range(4):
        kernel, choices = random_kernel(rng, dtype)
        found = judge(problems_in(dtype), answered(kernel, dtype), dtype=dtype)
        assert found.verdict == "right", (choices, found.deviations)
        assert not found.refused


@pytest.mark.parametrize(
    ("function", "deviations"),
    thorough_after(5, WRONG[::-1]),  # the latest ones first
)
def test_wrong_kernels_are_named(function, deviations):
    found = judge(problems_in("float32"), answered(function))
    assert set(found.deviations) == set(deviations)


@pytest.mark.parametrize(
    ("one", "other"),
    thorough_after(
        9,
        [
            ("q_k_swapped", "v_is_k"),
            ("kv_heads_tiled", "heads_not_moved_back"),
            ("scale_missing", "softmax_base_2"),
            ("scale_1_over_d", "causal_top_left"),
            ("scale_argument_ignored", "lse_base_2"),
            ("softcap_before_scale", "bias_subtracted"),
            ("bias_before_scale", "alibi_sign"),
            ("causal_excludes_self", "dead_rows_mean"),
            ("causal_sees_one_ahead", "window_left_long"),
            ("mask_inverted", "hidden_score_small"),
            ("mask_transposed", "dead_rows_nan"),
            ("hidden_after_softmax", "lengths_one_too_short"),
            ("softmax_not_normalised", "online_output_not_rescaled"),
            ("softmax_no_maximum", "sinks_ignored"),
            ("online_sum_not_rescaled", "scale_sqrt_d"),
            ("inputs_in_bfloat16", "mask_ignored"),
            ("sum_in_float16", "causal_reversed"),
            ("nan_leaks", "lse_without_maximum"),
        ],
    ),
)
def test_two_deviations_are_named_as_the_pair(one, other):
    assert verdict_on((one, other), problems_in("float32"), prepared_in("float32")) == "pair"


@pytest.mark.parametrize(
    ("function", "deviation"),
    thorough_after(
        3,
        [
            (wrong.clipped, "scores_clipped"),
            (wrong.a_mask_that_stays, "lengths_kept_from_before"),
            (wrong.blocks_of_entry_0, "lengths_end_in_block_of_entry_0"),
            (wrong.unmasked_in_even_blocks, "lengths_rounded_up"),
            (wrong.nan_where_a_window_starts, "part_without_keys_nan"),
            (wrong.clipped_before_the_softmax, "scores_clipped"),
            (wrong.tiles_of_rows_counted_from_keys, "written_as_far_as_inputs"),
        ],
    ),
)
def test_bugs_that_only_other_problems_show_are_named(function, deviation):
    report = minimha.check(function)
    assert (report.verdict, report.deviations) == ("wrong", (deviation,)), str(report)


def test_a_log_sum_exp_in_base_2_is_a_convention_only_if_it_always_is():
    report = minimha.check(wrong.lse_in_base_2_of_many_keys)
    assert (report.verdict, report.deviations) == ("wrong", ("lse_base_2",))
    assert report.findings.conditions == {"lse_base_2": "Lk > 512"}
    assert "wrong: the log-sum-exp has base 2, where Lk > 512." in str(report)


@pytest.mark.parametrize(
    "names",
    [
        ("scale_missing", "softmax_base_2", "heads_not_moved_back"),
        ("scale_1_over_d", "kv_heads_tiled", "causal_top_left", "mask_inverted"),
        pytest.param(("kv_heads_tiled", "mask_inverted", "lse_base_2"), marks=pytest.mark.thorough),
    ],
)
def test_three_and_four_deviations_are_named(names):
    found = judged({name: DEVIATIONS[name].values[0] for name in names})
    assert set(found.deviations) == set(names)


@pytest.mark.parametrize(
    ("identifier", "value"),
    thorough_after(
        15,
        in_turn(
            [
                ("hidden_score_small", ("mask", -100.0, "add")),
                ("hidden_score_small", ("positions", -20.0, "fill")),
                ("online_output_not_rescaled", 128),
                ("online_last_block_dropped", 3),
                ("last_block_zeroed", 4),
                ("padding_seen", ("plain", 128)),
                ("padding_seen", ("always", 16)),
                ("window_left_short", 2),
                ("window_left_in_blocks", (16, 16)),
                ("lengths_rounded_up", 64),
                ("causal_top_left", ("causal", "window")),
                ("softmax_global_maximum", "all"),
                ("heads_not_moved_back", "forth"),
                ("only_first_computed", ("columns of Q and K", 128)),
                ("only_first_computed", ("keys", 64)),
                ("only_first_computed", ("rows", 4)),
                ("only_first_computed", ("heads", 1)),
                ("scale_padded_width", "power of 2"),
                ("softcap_after_mask", "bias last"),
                ("softmax_base_2", "log2"),
                ("bias_not_in_base_2", ("sinks",)),
                ("lse_base_2_merged", ("keys", 64)),
                ("part_without_keys_nan", ("first", 16)),
                ("hidden_score_small", ("all", -7.0, "fill")),  # values that no list holds
                ("hidden_score_small", ("mask", -12.5, "add")),
                ("hidden_score_small", ("all", -33.0, "fill before the scale")),
                ("online_last_block_dropped", 40),
                ("online_output_not_rescaled", 37),
                ("online_sum_not_rescaled", 80),
            ]
        ),
    ),
)
def test_other_values_of_a_deviation_have_its_name(identifier, value):
    found = judged({identifier: value})
    assert found.deviations == (identifier,)
    assert found.explains[0] == found.explains[1]


def changed(change):
    """Right answers, changed."""
    return [
        Answer(change(a.output), a.lse)
        for a in answers(problems_in("float32"), {}, prepared=prepared_in("float32"))
    ]


@pytest.mark.parametrize("change", [np.zeros_like, lambda O: O * np.nan, np.ones_like])
def test_one_number_as_every_answer_has_a_name(change):
    found = judge(problems_in("float32"), changed(change))
    assert (found.verdict, found.deviations) == ("wrong", ("answer_constant",))


def test_outputs_of_another_shape_have_no_name():
    found = judge(problems_in("float32"), changed(lambda O: O[..., :1]))
    assert (found.verdict, found.deviations) == ("wrong", ())


def mean(q, k, v):
    v = np.repeat(v, q.shape[1] // v.shape[1], 1)
    return np.broadcast_to(v.mean(2, keepdims=True), (*q.shape[:3], v.shape[3]))


def of_directions(q, k, v):
    return plain(*(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v)


def capped_always(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    S = 50 * np.tanh(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) / 50)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P @ v / P.sum(-1, keepdims=True)


def test_a_mean_of_values_ignores_the_scores():
    assert judge(problems_in("float32"), answered(mean)).deviations == ("scores_ignored",)


@pytest.mark.parametrize("function", thorough_after(1, [capped_always, of_directions]))
def test_what_most_answers_contradict_is_not_named(function):
    """A few of the answers fit lost precision, as that has wide bounds."""
    found = judge(problems_in("float32"), answered(function))
    assert (found.verdict, found.deviations, found.alternatives) == ("wrong", (), ())


def test_randomness_is_read_from_relations():
    rng = np.random.default_rng(0)
    found = judge(problems_in("float32"), changed(lambda O: O * rng.random(O.shape)))
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert {"keys permuted", "weights sum to 1"} <= {r.name for r in found.readings}


def reading(found, name):
    return next(r for r in found.readings if r.name == name)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (lambda q, k: 0.49 / np.sqrt(q.shape[-1]), "0.490/sqrt(D)"),
        (lambda q, k: 0.3, "0.300"),
    ],
)
def test_an_unknown_scale_is_read(scale, text):
    def attend(q, k, v):
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
        S = q @ k.swapaxes(-1, -2) * scale(q, k)
        P = np.exp(S - S.max(-1, keepdims=True))
        return P @ v / P.sum(-1, keepdims=True)

    found = judge(problems_in("float32"), answered(attend))
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert reading(found, "scale").value == text
    assert reading(found, "scale").fit > 0.9999


def plain(q, k, v, seen=None):
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    S = S if seen is None else np.where(seen, S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P @ v / P.sum(-1, keepdims=True)


def test_who_sees_whom_is_read():
    def attend(q, k, v, is_causal=False):
        i, j = np.indices((q.shape[2], k.shape[2]))
        return plain(q, k, v, (j <= i) & (j >= i - 5) if is_causal else None)

    found = judge(problems_in("float32"), answered(attend))
    assert found.verdict == "wrong"
    assert reading(found, "causal weights").value == "query i sees keys i - 5 <= j <= i"


def test_keys_lost_at_tile_edges_are_read():
    def attend(q, k, v):
        return plain(q, k, v, np.arange(k.shape[2]) % 64 != 63)

    found = judge(problems_in("float32"), answered(attend))
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert reading(found, "keys without weight").value == "63, 127, 191, 255 of 301"


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_is_read_from_the_weights(rate):
    rng = np.random.default_rng(2)

    def attend(q, k, v):
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        P = np.exp(S - S.max(-1, keepdims=True))
        P /= P.sum(-1, keepdims=True)
        return P * (rng.random(P.shape) >= rate) / (1 - rate) @ v

    found = judge(problems_in("float32"), answered(attend))
    assert found.deviations == ("weights_dropped_out",)
    assert f"× {1 / (1 - rate):.3f}" in reading(found, "dropout").value


def test_a_key_that_is_always_lost_is_not_dropped_out():
    """Dropout makes the other weights larger, or at least differs from run to run."""

    def attend(q, k, v):
        return plain(q, k, np.where(np.arange(k.shape[2])[:, None] == k.shape[2] - 1, 0, v))

    given = answered(attend)
    found = judge(problems_in("float32"), given)
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert "dropout" not in {r.name for r in found.readings}
    random = [replace(a, faults=("not_deterministic",)) for a in given]
    assert judge(problems_in("float32"), random).deviations == ("weights_dropped_out",)


def test_sets_that_no_problem_tells_apart_are_named():
    """Where scale is refused, 1/D and 1/sqrt(D) applied twice are the same."""

    def attend(q, k, v):
        return plain(q / np.sqrt(q.shape[-1]), k, v)

    found = judge(problems_in("float32"), answered(attend))
    assert {found.deviations, *found.alternatives} == {("scale_1_over_d",), ("scale_twice",)}
    assert found.tell_apart == "to tell them apart, accept scale"


def test_refusals_are_no_evidence():
    found = judge(problems_in("float32"), answered(plain))
    assert found.verdict == "right"
    assert {"sinks", "softcap", "is_causal"} <= set(found.refused)
    nothing = [Answer(None, refusal="no") for _ in problems_in("float32")]
    assert judge(problems_in("float32"), nothing).verdict == "cannot tell"


def test_faults_of_the_run_are_deviations_but_for_a_wider_dtype():
    right = answers(problems_in("float32"), {}, prepared=prepared_in("float32"))
    writes = [Answer(a.output, a.lse, faults=("writes_into_inputs",)) for a in right]
    found = judge(problems_in("float32"), writes)
    assert (found.verdict, found.deviations) == ("wrong", ("writes_into_inputs",))
    wide = [Answer(a.output, a.lse, faults=("wrong_dtype",), dtype="float64") for a in right]
    found = judge(problems_in("float32"), wide)
    assert (found.verdict, found.deviations) == ("right", ())
    assert reading(found, "dtype").value == "returns float64 for float32"
    narrow = [Answer(a.output, a.lse, faults=("wrong_dtype",), dtype="float16") for a in right]
    assert judge(problems_in("float32"), narrow).deviations == ("wrong_dtype",)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_an_output_that_is_rounded_is_no_other_lost_precision(name):
    given = answered(lambda q, k, v: plain(q, k, v).astype(DTYPES[name]))
    found = judge(problems_in("float32"), given)
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert reading(found, "output").value == f"is rounded to {name}"
    narrow = [replace(a, faults=("wrong_dtype",) * (a.output is not None)) for a in given]
    found = judge(problems_in("float32"), [replace(a, dtype=name) for a in narrow])
    assert found.deviations == ("wrong_dtype",)
    assert found.explains[0] == found.explains[1]


def test_a_rounded_output_does_not_hide_a_deviation():
    def attend(q, k, v):
        return plain(q * np.sqrt(q.shape[-1]), k, v).astype(np.float16)

    found = judge(problems_in("float32"), answered(attend))
    assert found.deviations == ("scale_missing",)
    assert found.explains[0] == found.explains[1]


def test_a_fault_that_follows_from_a_deviation_is_not_named_beside_it():
    given = answers(problems_in("float32"), {"v_is_k": 1}, prepared=prepared_in("float32"))
    shapes = [p.arguments["v"].shape[3] for p in problems_in("float32")]
    faulty = [
        a if a.output is None or a.output.shape[3] == Dv else replace(a, faults=("wrong_shape",))
        for a, Dv in zip(given, shapes, strict=True)
    ]
    assert any(a.faults for a in faulty)
    assert judge(problems_in("float32"), faulty).deviations == ("v_is_k",)


def test_an_imprecise_exponential_is_wrong_and_its_bits_are_read():
    def attend(q, k, v):
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        P = np.maximum(1 + (S - S.max(-1, keepdims=True)) / 4096, 0) ** 4096
        return P @ v / P.sum(-1, keepdims=True)

    found = judge(problems_in("float32"), answered(attend))
    assert (found.verdict, found.deviations) == ("wrong", ())
    assert "bits are right" in reading(found, "precision").value


def test_answers_and_problems_must_belong_together():
    with pytest.raises(ValueError, match="0 answers to"):
        judge(problems_in("float32"), [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_own_layer_is_right(dtype):
    problems = layer_problems(dtype)
    found = judge(problems, [layer_answer(p, DTYPES[dtype]) for p in problems], dtype=dtype)
    assert found.verdict == "right"


def layer_answer(problem, dtype):
    made = {n: x.astype(dtype) if np.ndim(x) else x for n, x in problem.layer.items()}
    base, interleaved = made.pop("rope_base", None), made.pop("rope_interleaved", None)
    D = made["W_q"].shape[1] // made["num_heads"]
    rope = None if base is None else RoPE(D, base, interleaved=interleaved)
    layer = MultiHeadAttention.from_combined(**made, rope=rope)
    call = {n: x for n, x in problem.arguments.items() if n != "x"}
    x = problem.arguments["x"].astype(dtype)
    if not problem.chunks:
        return Answer(np.asarray(layer(x, **call), np.float32))
    cache = KVCache(len(x), layer.num_kv_heads, x.shape[1], D, dtype=dtype)
    parts = np.split(x, np.cumsum(problem.chunks)[:-1], axis=1)
    outputs = [layer(part, cache=cache) for part in parts]
    return Answer(np.asarray(np.concatenate(outputs, axis=1), np.float32))


OF_LAYERS = [
    "w_o_transposed", "w_o_ignored", "w_q_transposed", "w_k_transposed", "w_v_transposed",
    "bias_q_ignored", "bias_v_ignored", "bias_o_ignored", "rope_ignored", "rope_interleaved",
    "rope_half", "rope_over_heads", "rope_sign", "rope_on_queries_only", "rope_base",
    "rope_on_values", "rope_ignores_offset", "cache_written_one_late", "concat_heads_reversed",
    "concat_heads_interleaved", "heads_interleaved", "heads_not_moved_back", "heads_not_split",
    "kv_heads_tiled", "residual_added", "scale_missing", "scale_model_width", "causal_ignored",
    "mask_inverted", "softmax_over_heads", "q_k_swapped", "v_is_k", "scale_padded_width",
    "packed_rows_confused", "lse_base_2_merged", "padding_seen",
]  # fmt: skip


@pytest.mark.parametrize(
    ("identifier", "value"),
    thorough_after(
        20,
        [
            ("last_block_zeroed", 4),
            ("part_without_keys_nan", ("parts", 2)),
            ("only_first_computed", ("heads", 1)),
            *((name, DEVIATIONS[name].values[0]) for name in in_turn(OF_LAYERS)),
        ],
    ),
)
def test_a_deviation_of_a_layer_is_named(identifier, value):
    problems = layer_problems()
    found = judge(problems, answers(problems, {identifier: value}))
    assert found.deviations == (identifier,)
    assert found.alternatives == ()
