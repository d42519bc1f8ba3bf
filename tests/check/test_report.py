"""The report: its fields, its sentences, and its pages in three formats."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from thorough import thorough_after

import minimha
from minimha import attention
from minimha.check import assert_attention
from minimha.check.answer import Answer
from minimha.check.page import WIDTH, as_html, as_markdown, as_text
from minimha.check.problems import Graded
from minimha.check.readings import Reading
from minimha.check.report import Report
from minimha.check.verdict import Findings, Result

x = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4) / 8
QKV = {"q": x, "k": x, "v": x}
FIELDS = [
    "function", "speaks", "dtype", "verdict", "deviations", "alternatives", "explains", "refused",
    "readings", "problems", "covers", "seed", "conditions",
]  # fmt: skip


def result(name="plain", is_right=True, refusal=None, change=0.0, output=True, **options):
    arguments = {**QKV, **options}
    expected, lse = attention(**{**arguments, "return_lse": True})
    got = None if refusal or not output else expected + np.float32(change)
    is_refused = refusal is not None
    answer = Answer(got, None, refusal, () if output else ("crashes",), "float32", "it broke")
    error = np.inf if got is None else float(abs(got - expected).max())
    return Result(
        Graded(name, arguments, "something"), answer, expected, lse, error, 1e-5, is_right,
        is_refused,
    )  # fmt: skip


def report(*results, speaks="minimha", **fields):
    found = {
        "verdict": "wrong", "deviations": (), "alternatives": (), "explains": (1, 2),
        "refused": (), "readings": (), "tell_apart": None,
    }  # fmt: skip
    return Report.of(Findings(results=results, **found | fields), "k.py:f", speaks, "float32")


WRONG = (
    result(),
    result("causal", False, change=0.25, is_causal=True),
    result("scale", False, change=np.nan, scale=2.0),
    result("sinks", False, refusal="TypeError: no sinks", sinks=np.zeros(1, np.float32)),
)


def test_json_has_exactly_the_fields_that_are_promised():
    written = json.loads(report(*WRONG, deviations=("causal_ignored",)).to_json())
    assert list(written) == FIELDS
    plain, causal, scale, sinks = written["problems"]
    assert plain == {
        "name": "plain", "options": {}, "error": 0.0, "is_right": True, "is_refused": False
    }  # fmt: skip
    assert causal["options"] == {"is_causal": True}
    assert causal["error"] == pytest.approx(0.25)
    assert scale["error"] == "nan"
    assert sinks["error"] is None
    assert sinks["is_refused"] is True
    assert sinks["options"] == {"sinks": [0.0]}


def test_the_verdict_is_two_sentences():
    found = report(*WRONG, deviations=("causal_ignored", "scale_missing"), explains=(3, 3))
    assert found.sentences == (
        "k.py:f is wrong: is_causal is ignored; the scores are not scaled.",
        "This explains all 3 problems that it takes.",
    )
    assert report(
        result(), verdict="right", explains=(1, 1), refused=("sinks", "scale")
    ).sentences == (
        "k.py:f is right in all 1 problems that it takes.",
        "It does not take sinks and scale.",
    )
    _, evidence = report(*WRONG, explains=(79, 86)).sentences
    assert evidence == "2 of 86 problems show it."
    names = ("not_deterministic",)  # which explains no output
    _, evidence = report(*WRONG, deviations=names, explains=(79, 86)).sentences
    assert evidence == "79 of the 86 problems come out right."
    first, _ = report(*WRONG, verdict="cannot tell").sentences
    assert first == "k.py:f is wrong in 2 of 2 problems, and no known deviation explains how."


def test_what_differs_by_a_hidden_nan_alone_is_right_but_for_it():
    names = {"deviations": ("nan_leaks",), "explains": (2, 2), "verdict": "differs"}
    found = report(result(), result("NaN", False, change=np.nan, is_causal=True), **names)
    assert found.passes()
    assert not found.passes(strict=True)
    assert str(found) == (
        "k.py:f is right but for this: a NaN in a hidden key or value reaches the output. "
        "This explains all 2 problems that it takes. It takes every option."
    )


def test_a_librarys_own_convention_is_right():
    failing = result("decoding", False, change=1.0, is_causal=True, q_offset=0)
    names = {"deviations": ("causal_top_left",), "explains": (2, 2)}
    found = report(result(is_causal=True), failing, speaks="torch", **names)
    assert found.verdict == "right"
    assert found.deviations == ("causal_top_left",)
    assert "causal is aligned top-left, as torch does" in as_text(found)
    assert str(found).endswith("as torch does. It takes every option.")
    assert report(result(), failing, **names).verdict == "wrong"
    more = {"deviations": ("causal_top_left", "scale_missing"), "explains": (2, 2)}
    assert report(result(), failing, speaks="torch", **more).verdict == "wrong"
    less = {"deviations": ("causal_top_left",), "explains": (1, 2)}
    assert report(result(), failing, speaks="torch", **less).verdict == "wrong"


def test_the_smallest_problem_has_fewest_scores_then_fewest_options():
    many = result("many", False, change=1.0, **{name: np.tile(x, (1, 1, 2, 1)) for name in "qkv"})
    two = result("two options", False, change=1.0, is_causal=True, scale=1.0)
    one = result("one option", False, change=1.0, is_causal=True)
    silent = result("no output", False, output=False)
    assert report(silent, many, two, one).smallest.problem.name == "one option"
    assert report(silent).smallest.problem.name == "no output"
    assert report(result()).smallest is None


def test_options_are_right_refused_or_blamed():
    rows = report(
        result(is_causal=True),
        result("offset", False, change=1.0, is_causal=True, q_offset=1),
        result("sinks", False, refusal="ValueError: no sinks", sinks=np.zeros(1, np.float32)),
        deviations=("causal_top_left",),
    ).conformance()
    assert {row["option"]: row[""] for row in rows} == {
        "is_causal": "right", "q_offset": "deviates", "sinks": "refused"
    }  # fmt: skip
    assert rows[1]["how"] == "causality is aligned to the first key: q_offset is ignored"
    assert rows[2]["how"] == "ValueError: no sinks"


def test_a_crash_is_blamed_on_its_option_and_is_no_refusal():
    crashed = result("mask", False, output=False, attn_mask=np.ones((2, 2), bool))
    found = report(result(), crashed, deviations=("crashes",))
    assert {"option": "attn_mask", "": "deviates", "how": "it broke"} in found.conformance()
    assert found.problems[1]["is_refused"] is False


def test_what_was_not_asked_is_not_refused():
    hung = result("causal", False, output=False, is_causal=True)
    never = result("scale", False, refusal="not asked, after it had failed: it hung", scale=2.0)
    refusal = result("sinks", False, refusal="no sinks", sinks=np.zeros(1, np.float32))
    names = ("is_causal", "scale", "sinks")
    more = result("offset", False, refusal="no q_offset", is_causal=True)
    results = result(), result(), hung, more, never, refusal
    found = report(*results, deviations=("hangs",), refused=names)
    assert found.refused == ("sinks",)
    assert [(row[""], row["how"]) for row in found.conformance()] == [
        ("right", ""), ("deviates", "it broke"), ("not asked", ""), ("refused", "no sinks")
    ]  # fmt: skip


def test_a_log_sum_exp_that_never_comes_is_refused():
    assert report(result(return_lse=True)).refused == ("return_lse",)
    assert "return_lse" not in report(result()).refused


def test_clauses_begin_in_lower_case_unless_with_a_name():
    found = report(*WRONG, deviations=("dead_rows_mean", "k_reshaped_not_transposed", "alibi_sign"))
    assert "is wrong: a query that sees no key" in found.sentences[0]
    assert "; K is reshaped" in found.sentences[0]
    assert "; ALiBi raises" in found.sentences[0]
    found = report(*WRONG, deviations=("w_o_transposed", "w_q_transposed"))
    assert "is wrong: W_o is transposed; W_q, or other" in found.sentences[0]


def test_differing_cells_are_marked_in_every_format():
    one = result("causal", False, is_causal=True)
    got = one.expected.copy()
    got[0, 0, 1, 2] += 1
    found = report(replace(one, answer=Answer(got, dtype="float32"), error=1.0))
    assert re.findall(r"\S+\*", as_text(found).split("differs)")[1]) == [f"{got[0, 0, 1, 2]:.4f}*"]
    assert as_markdown(found).count("**") == 2
    assert as_html(found).count("<mark>") == 1


def test_text_fits_80_columns_and_html_is_well_formed():
    wide = result("a" * 60, False, change=1e7, **{n: np.tile(x, (1, 1, 6, 2)) for n in "qkv"})
    found = report(wide, *WRONG, deviations=("hidden_score_small", "dead_rows_nan"))
    assert max(map(len, as_text(found).splitlines())) <= WIDTH
    for name in ("scale", "causal weights at an offset (q_offset 3)"):
        reading = Reading(name, "a constant added to a row's scores changes the output by 0.0029")
        found = report(*WRONG, readings=(reading,))
        text = as_text(found, taken=16)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert len(text.splitlines()[0]) <= WIDTH - 16
        assert "changes the output by 0.0029" in " ".join(text.split())
    page = as_html(found)
    body = re.search(r"<body>.*</body>", page, re.DOTALL)[0]
    ET.fromstring(body)
    assert "http" not in page


def test_what_a_function_says_is_text_and_no_markup():
    row = result("x", False, refusal="ValueError: <b> | \x1b[2J", softcap=1.0)
    found = report(result(), row)
    assert "&lt;b&gt;" in as_html(found)
    assert "\\<b\\> \\|" in as_markdown(found)
    assert "\x1b" not in as_text(found) + as_html(found) + as_markdown(found)


def test_a_crash_is_told():
    found = report(result(output=False, is_right=False), deviations=("crashes",))
    assert "It broke." in as_text(found)
    assert found.failure == "k.py:f gives no output that can be compared: it broke"
    assert report(*WRONG).failure is None


# minimha.check


def without_scale(q, k, v):
    weights = np.exp(q @ k.swapaxes(-1, -2))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def plain(q, k, v):
    return attention(q, k, v)


def test_the_module_is_the_function():
    assert minimha.check(plain).verdict == "right"
    assert "check" in dir(minimha)
    assert dir(minimha.check) == ["Report", "assert_attention", "check"]
    from minimha.check import check

    assert check(plain, dtype="bfloat16").verdict == "right"


def test_assert_attention_fails_with_the_verdict():
    assert_attention(plain)
    with pytest.raises(AssertionError, match="without_scale is wrong: the scores are not scaled"):
        assert_attention(without_scale)
    with pytest.raises(
        AssertionError, match=r"gives no output\s+that can be compared: it returned NoneType"
    ):
        assert_attention(lambda q, k, v: None)


@pytest.mark.parametrize("returned", thorough_after(1, [lambda A: A, lambda A: A[0, 0, 0, :3]]))
def test_weights_in_place_of_the_log_sum_exp_are_named(returned):
    def with_weights(q, k, v, return_lse=False):
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        A = np.exp(S - S.max(axis=-1, keepdims=True))
        A = A / A.sum(axis=-1, keepdims=True)
        return (A @ v, returned(A)) if return_lse else A @ v

    found = minimha.check(with_weights)
    assert found.verdict == "wrong"
    assert re.search(r"its log-sum-exp has shape .*: expected \(B, H, Lq\) = ", str(found))
    assert "The output has the wrong shape" not in as_text(found)
    (row,) = (row for row in found.conformance() if row["option"] == "return_lse")
    assert "its log-sum-exp has shape" in row["how"]


def test_progress_receives_every_problem():
    received = []
    found = minimha.check(plain, progress=received.append)
    assert [problem["name"] for problem in found.problems] == received[: len(found.problems)]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((3,), TypeError, "function is of type int: expected something that can be called"),
        ((attention, "pytorch"), ValueError, "speaks is 'pytorch': expected one of 'minimha'"),
        ((attention, "torch", "float64"), ValueError, "dtype is 'float64': expected one of"),
        ((lambda q, k, v, mask: q,), ValueError,
         r"takes none of the problems; on the plainest, 'one head': TypeError: .* missing 1 "
         r"required positional argument: 'mask'"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_one_sentence(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        minimha.check(*arguments)


def sinks_of_another_head_in_the_lse(q, k, v, sinks=None, return_lse=False, scale=None):
    result = minimha.attention(q, k, v, sinks=sinks, return_lse=return_lse, scale=scale)
    if sinks is None or not return_lse:
        return result
    other = sinks[np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])]
    _, lse = minimha.attention(q, k, v, scale=scale, return_lse=True)
    return result[0], np.logaddexp(lse, other[:, None])


def test_a_bug_without_a_name_is_located():
    report = minimha.check(sinks_of_another_head_in_the_lse)
    assert (report.verdict, report.deviations) == ("wrong", ())
    where, shown = report.sentences
    assert where.endswith(": no deviation explains how.")
    for condition in ("heads are grouped", "return_lse is given", "sinks is given"):
        assert condition in where
    assert shown.endswith(f"of {report.explains[1]} problems show it.")
