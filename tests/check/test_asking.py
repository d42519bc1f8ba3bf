"""Which problems a function is asked, and what they cover."""

from itertools import combinations

import numpy as np
import pytest
from check.forgetful import crossings as forgotten
from check.forgetful import forgets, how_found
from thorough import thorough_after

import minimha
from minimha.check import assert_attention
from minimha.check.asking import Limits
from minimha.check.catalogue import DEVIATIONS
from minimha.check.conditions import OPPOSITES, conditions
from minimha.check.crossed import (
    OPTIONS,
    SWITCHES,
    _candidates,
    alone,
    crossed,
    crossings,
    present,
    rows,
    shown,
)
from minimha.check.prepared import Prepared
from minimha.check.problems import graded
from minimha.check.search import known
from minimha.check.sized import sized
from minimha.layers import MultiHeadAttention

EVERY = frozenset(SWITCHES)


def uncovered(taken, seed):
    """The crossings that a candidate could show and that no chosen row shows."""
    covered, possible = set(), set()
    for on in rows(taken, seed=seed):
        problem = crossed(on, seed=seed)
        covered |= crossings(problem.arguments, shown(problem))
    for on in _candidates(taken, frozenset()):
        given = crossed(on, seed=seed).arguments
        possible |= crossings(given, present(given))
    return possible - covered


@pytest.mark.parametrize("seed", [0, 1])
def test_every_crossing_is_covered(seed):
    assert not uncovered(EVERY, seed)


@pytest.mark.thorough
def test_every_crossing_is_covered_if_three_options_are_refused():
    every = list(combinations(OPTIONS, 3))
    for refused in every[::17]:
        left = uncovered(EVERY - set(refused), 3)
        assert len(left) <= 2, (refused, left)


def test_every_condition_but_the_usual_ones_meets_every_option():
    """The pairs are those of the options and shapes, with nothing left out by mistake."""
    asked = set()
    for on in rows(EVERY):
        given = crossed(on).arguments
        asked |= {(c, name) for some, name in crossings(given, shown(crossed(on))) for c in some}
    assert set(forgotten()) <= asked


def test_no_row_sees_no_key():
    for on in (*alone(), *rows(EVERY)):
        assert not Prepared(crossed(on).arguments).sees_nothing.any(), on


def test_problems_are_drawn_anew_from_another_seed():
    on = frozenset({"softcap"})
    one, same, other = (crossed(on, seed=seed).arguments for seed in (1, 1, 2))
    assert np.array_equal(one["q"], same["q"])
    assert not np.array_equal(one["q"], other["q"])
    assert {p.name for p in sized(1)} != {p.name for p in sized(2)}  # of their magnitudes
    shapes = [[p.arguments["q"].shape for p in sized(seed)] for seed in (1, 2)]
    assert shapes[0] == shapes[1]


def test_conditions_are_known_ones():
    for problem in graded():
        found = conditions(problem.arguments)
        assert found <= {*OPPOSITES, *OPPOSITES.values()}


@pytest.mark.parametrize(("condition", "option"), thorough_after(1, list(forgotten())[::33]))
def test_a_kernel_that_forgets_an_option_beside_another_is_named(condition, option):
    found, report = how_found(condition, option)
    assert found == "named", str(report)
    assert f"where {condition}" in str(report)
    assert report.explains[0] == report.explains[1]


@pytest.mark.parametrize(("condition", "option"), thorough_after(0, list(forgotten())[::41]))
def test_it_is_named_by_a_kernel_that_refuses_three_options_too(condition, option):
    free = [name for name in OPTIONS if name != option and not condition.startswith(name)]
    found, report = how_found(condition, option, refused=free[:3])
    assert found != "missed", str(report)


def attention(q, k, v, is_causal=False, q_offset=0):
    return minimha.attention(q, k, v, is_causal=is_causal, q_offset=q_offset, backend="dense")


def without_offset(q, k, place, kv_lengths=None):
    if place == "at the first keys":
        return 0
    Lk = k.shape[2] if kv_lengths is None or place == "at the last keys" else kv_lengths
    return Lk - q.shape[2]


@pytest.mark.parametrize(
    "place",
    thorough_after(1, ["at the last keys", "at the first keys", "at the last keys of each length"]),
)
def test_a_kernel_without_an_offset_is_asked_where_its_queries_stand(place):
    """It gets the problems whose queries stand there, and is right or wrong in those."""

    def right(q, k, v, is_causal=False, window_size=None, kv_lengths=None):
        return minimha.attention(
            q, k, v, is_causal=is_causal, window_size=window_size, backend="dense",
            kv_lengths=kv_lengths, q_offset=without_offset(q, k, place, kv_lengths),
        )  # fmt: skip

    def decoding_without_window(q, k, v, is_causal=False, window_size=None, kv_lengths=None):
        window = None if q.shape[2] == 1 else window_size
        return right(q, k, v, is_causal=is_causal, window_size=window, kv_lengths=kv_lengths)

    report = minimha.check(right)
    assert report.verdict == "right"
    tried = [r.problem.options for r in report.findings.results if not r.is_refused]
    assert any("q_offset" in options for options in tried)
    assert any({"is_causal", "kv_lengths"} <= {*options} for options in tried)
    report = minimha.check(decoding_without_window)
    assert report.deviations == ("window_ignored",), str(report)
    assert report.findings.conditions == {"window_ignored": "Lq = 1"}


def test_a_kernel_that_needs_pages_is_asked_in_pages():
    def right(q, k, v, *, block_table, kv_lengths, is_causal=False, q_offset=None, softcap=None):
        return minimha.attention(
            q, k, v, block_table=block_table, kv_lengths=kv_lengths, is_causal=is_causal,
            q_offset=q_offset, softcap=softcap, backend="dense",
        )  # fmt: skip

    def decoding_without_cap(q, k, v, softcap=None, **options):
        return right(q, k, v, softcap=None if q.shape[2] == 1 else softcap, **options)

    report = minimha.check(right)
    assert report.verdict == "right"
    assert report.explains[1] > 60
    report = minimha.check(decoding_without_cap)
    assert report.deviations == ("softcap_ignored",), str(report)
    assert report.findings.conditions == {"softcap_ignored": "Lq = 1"}
    assert report.smallest.problem.arguments["block_table"].size < 10


@pytest.mark.thorough
def test_masks_and_biases_of_two_axes_are_refused_or_misread():
    def dense(q, k, v, **options):
        return minimha.attention(q, k, v, backend="dense", **options)

    def of_four_axes(q, k, v, attn_mask=None, attn_bias=None, **options):
        for array in (attn_mask, attn_bias):
            if array is not None and array.ndim < 4:
                raise ValueError("expected four axes")
        return dense(q, k, v, attn_mask=attn_mask, attn_bias=attn_bias, **options)

    def of_rows(q, k, v, attn_bias=None, **options):
        if attn_bias is not None and attn_bias.ndim == 2:
            attn_bias = attn_bias[:, None, None, :][: len(q)]
        return dense(q, k, v, attn_bias=attn_bias, **options)

    assert minimha.check(of_four_axes).verdict == "right"
    report = minimha.check(of_rows)
    assert (report.verdict, report.deviations) == ("differs", ("two_axes_misread",))


def test_a_kernel_that_is_wrong_at_one_width_is_told_so():
    def at_128(q, k, v, **options):
        return attention(q, k, v * (1.1 if q.shape[-1] == 128 else 1), **options).astype(q.dtype)

    report = minimha.check(at_128)
    assert (report.verdict, report.deviations) == ("wrong", ())
    assert "wrong where D is 128" in str(report)


@pytest.mark.thorough
def test_a_kernel_that_is_wrong_for_many_heads_is_told_so():
    def many(q, k, v, **options):
        return attention(q, k, v * (1.1 if q.shape[1] > 16 else 1), **options).astype(q.dtype)

    assert "wrong where H is 17 or more; it is right up to 16" in str(minimha.check(many))

    def reversed_(q, k, v, **options):
        return attention(q, k[:, ::-1] if q.shape[1] > 16 else k, v, **options)

    report = minimha.check(reversed_)
    assert report.deviations == ("kv_heads_misread",)
    assert "group's, where H > 16" in str(report)


def tiles(q, k, v, is_causal=False, softcap=None):
    """Attention that takes whole tiles alone, and forgets the cap if it is causal."""
    if q.shape[2] % 64 or q.shape != k.shape or q.shape[3] != 64:
        raise ValueError("whole tiles alone")
    cap = None if is_causal else softcap
    return minimha.attention(q, k, v, is_causal=is_causal, softcap=cap, backend="dense")


def test_a_kernel_of_whole_tiles_is_met_where_it_is():
    report = minimha.check(tiles)
    assert report.deviations == ("softcap_ignored",)
    assert "where is_causal is given" in str(report)
    assert report.covers["sizes"]["D"] == [64]


def test_declared_shapes_are_asked_alone():
    seen = []

    def watched(q, k, v, **options):
        seen.append((q.shape, k.shape))
        return attention(q, k, v, **options)

    report = minimha.check(
        watched, head_dims=[128], multiple_of=32, max_heads=4, is_square=True
    )  # fmt: skip
    assert report.verdict == "right"
    assert report.covers["not_asked"] > 90
    assert seen
    for q, k in seen:
        assert q[3] == 128
        assert q[1] <= 4
        assert q[2] == k[2]
        assert q[2] % 32 == 0


def test_a_declaration_that_excludes_everything_is_one_sentence():
    with pytest.raises(ValueError, match="multiple_of is 999983: expected at most 1024; no prob"):
        minimha.check(attention, multiple_of=999_983)
    with pytest.raises(ValueError, match="are for attention functions, not for layers"):
        minimha.check(MultiHeadAttention, is_layer=True, max_heads=2)
    with pytest.raises(ValueError, match="multiple_of is 0: expected an integer of at least 1"):
        minimha.check(attention, multiple_of=0)


def test_limits_exclude_what_they_do_not_name():
    plain = crossed(frozenset())
    assert not Limits().exclude(plain)
    assert Limits(head_dims=(64,)).exclude(plain)
    assert not Limits(head_dims=(8,)).exclude(plain)
    assert Limits(is_square=True).exclude(crossed(frozenset({"one query"})))


def leaky(q, k, v, attn_mask=None):
    S = q @ k.repeat(q.shape[1] // k.shape[1], 1).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        S = np.where(attn_mask, S, -1e30)
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True) @ v.repeat(q.shape[1] // v.shape[1], 1)


def test_a_kernel_that_only_differs_passes_unless_strict():
    report = minimha.check(leaky)
    assert report.verdict == "differs"
    assert set(report.deviations) == {"nan_leaks", "dead_rows_mean"}
    assert_attention(leaky)
    with pytest.raises(AssertionError, match="is right but for this"):
        assert_attention(leaky, strict=True)


def test_a_real_bug_is_shown_before_a_difference():
    def inverted(q, k, v, attn_mask=None):
        return leaky(q, k, v, None if attn_mask is None else ~attn_mask)

    report = minimha.check(inverted)
    assert report.verdict == "wrong"
    assert "NaN" not in report.smallest.problem.name


def test_what_is_wrong_in_a_bug_of_two_conditions_is_right_elsewhere():
    report = minimha.check(forgets("Lq = 1", "sinks"))
    (where,) = report.findings.conditions.values()
    assert where == "Lq = 1"
    assert "sinks_ignored" in DEVIATIONS


def test_the_seed_is_in_the_report():
    report = minimha.check(minimha.gated_delta_rule, speaks="gated_delta_rule", seed=7)
    assert report.seed == 7
    with pytest.raises(TypeError, match="seed is 'x': expected an integer"):
        minimha.check(attention, seed="x")


@pytest.mark.thorough
def test_each_problem_is_prepared_once():
    known.cache_clear()
    report = minimha.check(lambda q, k, v, **o: minimha.attention(q, k, v, backend="dense", **o))
    assert report.verdict == "right"
    assert known.cache_info().misses == len(report.findings.results)


@pytest.mark.parametrize("dtype", thorough_after(1, ["bfloat16", "float16"]))
def test_a_kernel_that_takes_16_bits_alone_is_asked_in_them(dtype):
    def function(q, k, v):
        if q.dtype.name != dtype:
            raise TypeError(f"{q.dtype} is not {dtype}")
        return minimha.attention(q, k, v)

    report = minimha.check(function)
    assert (report.verdict, report.dtype) == ("right", dtype)
    with pytest.raises(ValueError, match=f"is not {dtype}"):
        minimha.check(function, dtype="float32")


@pytest.mark.parametrize("layout", thorough_after(1, ["LBHD", "BLHD", "BHDL"]))
def test_axes_may_have_another_order(layout):
    there = ["BHLD".index(axis) for axis in layout]
    back = [layout.index(axis) for axis in "BHLD"]

    def function(q, k, v, is_causal=False, q_offset=None, return_lse=False):
        inputs = (x.transpose(back) for x in (q, k, v))
        found = minimha.attention(
            *inputs, is_causal=is_causal, q_offset=q_offset, return_lse=return_lse,
            backend="dense",
        )  # fmt: skip
        return (found[0].transpose(there), found[1]) if return_lse else found.transpose(there)

    assert minimha.check(function, layout=layout).verdict == "right"
    if layout == "BHDL":  # each of them is wrong otherwise; one of them shows it
        assert minimha.check(function).verdict == "wrong"


def test_a_layout_has_four_letters_and_is_for_functions_without_their_own():
    for layout in ("BHL", "BHLE", "BHLDD"):
        with pytest.raises(ValueError, match="expected the letters B, H, L and D"):
            minimha.check(minimha.attention, layout=layout)
    with pytest.raises(ValueError, match="that speaks jax has a layout of its own"):
        minimha.check(minimha.attention, speaks="jax", layout="BLHD")
