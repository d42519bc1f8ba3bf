"""Random problems, which a function gets last: any shape, any options, any values."""

import numpy as np
import pytest

import minimha
from minimha.check.conditions import OPTIONS
from minimha.check.crossed import PLAIN, SWITCHES, Sizes
from minimha.check.drawn import drawn, fewer
from minimha.equations.problem import Problem

EVERY = frozenset(SWITCHES)


def test_a_seed_repeats_them():
    one, same, other = (drawn(EVERY, frozenset(), PLAIN, seed, 3) for seed in (4, 4, 5))
    assert [p.name for p in one] == [p.name for p in same] != [p.name for p in other]
    for p, q in zip(one, same, strict=True):
        assert all(np.array_equal(x, q.arguments[name]) for name, x in p.arguments.items())


def test_every_query_sees_a_key():
    for problem in drawn(EVERY, frozenset(), PLAIN, 2, 20):
        given = {name: x for name, x in problem.arguments.items() if name != "return_lse"}
        x = Problem.of(**given)
        assert x.visible(slice(0, x.q.shape[2]), slice(0, x.k.shape[2])).any(-1).all(), problem.name


@pytest.mark.parametrize("needed", ["one query", "is_causal", "window_size"])
def test_they_have_what_a_function_takes(needed):
    taken = frozenset({needed, "softcap", "groups of 4", "fewer queries"})
    problems = drawn(taken, frozenset({needed}), Sizes(16, 64), 0, 20)
    assert {n for p in problems for n in p.options} <= {*taken, "q_offset"}
    for problem in problems:
        q, k = problem.arguments["q"], problem.arguments["k"]
        assert q.shape[0] == 1
        assert k.shape[2] % 16 == 0
        assert q.shape[2] == 1 if needed == "one query" else q.shape[2] % 16 == 0
        assert needed in (*problem.options, "one query")


def test_options_are_left_out():
    problem = next(p for p in drawn(EVERY, frozenset(), PLAIN, 0, 9) if len(p.options) > 5)
    some = frozenset(sorted({*problem.options} & {*OPTIONS})[:2])
    assert {*fewer(problem, some).options} - {"q_offset"} == some
    assert not fewer(problem, frozenset()).options


def softcap_ignored_in_wide_heads(q, k, v, is_causal=False, q_offset=0, softcap=None):
    return minimha.attention(
        q, k, v, is_causal=is_causal, q_offset=q_offset,
        softcap=None if q.shape[3] > 200 else softcap, backend="dense",
    )  # fmt: skip


def test_a_bug_that_only_they_show_is_found_and_named():
    report = minimha.check(softcap_ignored_in_wide_heads)
    assert (report.verdict, report.deviations) == ("wrong", ("softcap_ignored",)), str(report)
    assert report.findings.conditions == {"softcap_ignored": "D > 192"}
    taken = [x for x in report.findings.results if not x.is_refused]
    wrong = [x.problem.name for x in taken if not x.is_right]
    assert all(name.startswith("drawn") for name in wrong)
    assert any("fewer options" in name for name in wrong)
