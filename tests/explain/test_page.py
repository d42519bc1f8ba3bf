"""The page as text: it asks nobody for anything, and refuses what it cannot hold."""

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from minimha import attention
from minimha.examples import EXAMPLES, sentences
from minimha.explain import Trace, page
from minimha.explain.catalogue import CATALOGUE
from minimha.explain.mathml import mathml
from minimha.explain.origins import OPERATIONS

CAT = EXAMPLES["the-cat-sat"].trace()
FOLDER = Path(page.__file__).parent


def trace_in(text):
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text)
    return json.loads(found[1])


def test_every_operation_of_a_trace_is_one_of_the_page():
    written = (FOLDER / "operations.js").read_text(encoding="utf-8")
    table = written.partition("const OPERATIONS = {")[2]
    known = re.findall(r'^  "?([a-z ]+)"?: \{', table, flags=re.MULTILINE)
    assert sorted(known) == sorted(OPERATIONS)


def test_style_and_script_are_those_that_the_policy_names():
    text = page.page(CAT, 3)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy


def test_tokens_end_no_script_and_labels_are_kept_once():
    text = page.page(sentences.sentence(["</script>", "a"]).trace(), 3)
    assert text.count("</script>") == 3
    assert trace_in(text)["labels"].count(["</script>", "a"]) == 1


def test_a_small_run_travels_whole_and_a_large_one_as_what_is_given():
    small = trace_in(page.page(CAT, 3))
    assert small["isSmall"]
    assert all(step["at"] is not None for step in small["steps"])
    trace = Trace()
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 128, 4))
    attention(q, k, v, is_causal=True, tap=trace)
    large = trace_in(page.page(trace, 3))
    travels = {step["title"].split(",")[0] for step in large["steps"] if step["at"] is not None}
    assert travels == {"q", "k", "v"}
    masks = [step["mask"] for step in large["steps"] if step["mask"]]
    assert masks == [{"offset": 0, "pattern": None}] * 2


def test_chosen_steps_bring_what_they_are_computed_from_and_show_themselves_alone():
    record = trace_in(page.page(CAT.selected(["row_max"]), 3))
    assert [group["name"] for group in record["groups"]] == ["row_max", "row_max[divided]"]
    assert {step["title"] for step in record["steps"]} >= {"row_max", "masked", "scores", "x"}
    assert "weights" not in {step["title"] for step in record["steps"]}


def test_a_run_that_is_too_large_is_refused_with_its_limit(monkeypatch):
    monkeypatch.setattr(page, "LARGEST", 10)
    with pytest.raises(ValueError, match=r"a page would hold [\d,]+ numbers where 10 can be"):
        page.page(CAT, 3)


@pytest.mark.parametrize("name", CATALOGUE)
def test_formulas_are_mathml(name):
    for tex in (CATALOGUE[name].tex, CATALOGUE[name].tex_symbol):
        words = "".join(ET.fromstring(mathml(tex)).itertext())
        assert words
        assert not set(words) & set("\\{}^_")


def test_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match=r"\\overline has no MathML here"):
        mathml(r"\overline{x}")


def test_the_page_of_three_tokens_is_small():
    assert len(page.page(CAT, 3).encode()) <= 120_000


@pytest.mark.parametrize(
    ("trace", "first"),
    [
        (CAT, ("weights", "cat", "The")),
        (CAT.selected(cell="sat,cat"), ("weights", "sat", "cat")),
        (CAT.selected(["scores"]), ("scores", "The", "The")),
        (CAT.selected(["x"]), ("x", "The", None)),
    ],
)
def test_it_opens_on_a_weight_or_on_what_was_asked_for(trace, first):
    record = trace_in(page.page(trace, 3))
    step, row, column = record["first"]
    shown = record["steps"][step]
    named = [
        None if labels is None else record["labels"][labels][n]
        for labels, n in ((shown["rowLabels"], row), (shown["columnLabels"], column))
    ]
    assert (shown["title"], *named) == first


def test_a_chart_has_at_most_30_boxes_before_its_stages_fold():
    text = page.page(EXAMPLES["translation"].trace(), 3)
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    flows = [chart.count('class="box"') for chart in charts]
    assert 2 <= max(flows) <= 30
    assert text.count("<details>") + text.count("<details open>") > 10
    assert "<details" not in re.sub(r'<details id="\w+">', "", page.page(CAT, 3))
