"""Exports hold what the trace holds."""

import csv
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from minimha import attention
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace, export

CAT = EXAMPLES["the-cat-sat"].trace()
HEADS = sentences.of_length(5).trace()
AWKWARD = sentences.sentence(
    [
        "50%",
        "a_b",
        "$x$",
        "{c}",
        "#&",
        "~^",
        "\\d",
        "<b>",
        "|",
        "garçon",
        "œ",
        "ħ",
        "猫",
        "😀",
        "[i]",
    ]
).trace()


def test_json_has_the_documented_form():
    record = json.loads(export.as_json(CAT))
    assert list(record) == [
        "example", "source", "axes", "labels", "notes", "given", "blocks", "num_heads", "computed",
        "steps",
    ]  # fmt: skip
    assert record["labels"]["Lk"] == ["The", "cat", "sat"]
    assert record["axes"]["D"] == "head width (d_k in the papers)"
    names = [step["name"] for step in record["steps"]]
    assert names[:14] == [
        "x", "W_q", "W_k", "W_v", "q", "k", "v", "scores", "masked", "row_max", "exponentials",
        "row_sum", "weights", "output",
    ]  # fmt: skip
    masked = record["steps"][8]
    assert masked["value"] == [[1, "-inf", "-inf"], [0, 1, "-inf"], [1, 1, 2]]
    assert masked["axes"] == ["Lq", "Lk"]
    assert masked["shape"] == [3, 3]
    weights = record["steps"][12]
    assert set(weights) == {
        "name", "symbol", "axes", "formula", "note", "shape", "value", "printed", "rows", "columns",
        "hidden",
    }  # fmt: skip
    assert weights["rows"] == weights["columns"] == ["The", "cat", "sat"]
    truncated = weights["printed"][3]
    assert truncated == {
        "value": 0.268, "exact": CAT["weights"][1, 0], "decimals": 3, "status": "truncated",
        "index": [1, 0], "text": "0.268", "source": "'Step 3: Softmax Normalization'",
        "origin": "the document's own inputs", "exactly": "exact",
    }  # fmt: skip
    assert "printed" not in record["steps"][0]


def test_json_keeps_every_bit():
    for step, record in zip(HEADS.steps, json.loads(export.as_json(HEADS))["steps"], strict=True):
        value = np.array([[float(x) for x in row] for row in record["value"]])
        np.testing.assert_array_equal(value, step.value)


def test_json_names_heads_only_where_there_are_several():
    heads = [s.get("head") for s in json.loads(export.as_json(HEADS))["steps"] if s["name"] == "q"]
    assert heads == [0, 1]
    assert not any("head" in step for step in json.loads(export.as_json(CAT))["steps"])
    grouped = sentences.sentence(["a"], num_heads=2, num_kv_heads=1, d_model=2).trace()
    assert [s.get("head") for s in json.loads(export.as_json(grouped))["steps"]][:5] == [
        None, 0, 1, None, None
    ]  # fmt: skip


def test_json_writes_a_picture_number_without_an_exact_one():
    steps = json.loads(export.as_json(EXAMPLES["shapes"].trace()))["steps"]
    assert steps[-1]["printed"][0]["exact"] is None
    assert steps[-1]["printed"][0]["status"] == "illustrative"


def test_npz_holds_whole_arrays():
    with np.load(io.BytesIO(export.as_npz(HEADS)), allow_pickle=False) as archive:
        assert archive.files == [*HEADS, "trace"]
        said = json.loads(str(archive["trace"]))
        assert said["labels"]["L"] == list(HEADS.labels["L"])
        assert "value" not in said["steps"][0]
        for name in HEADS:
            np.testing.assert_array_equal(archive[name], HEADS[name])
        assert archive["weights"].shape == (2, 5, 5)


def test_npz_and_csv_of_bfloat16_can_be_read_by_anyone():
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    trace = Trace()
    trace("x", np.array([[1.5, -np.inf]], dtype))
    with np.load(io.BytesIO(export.as_npz(trace)), allow_pickle=False) as archive:
        assert archive["x"].tolist() == [[1.5, -np.inf]]
    assert export.as_csv(trace)["01_x.csv"] == "1.5,-inf\n"


def test_taps_of_ones_own_export_whatever_their_name():
    trace = Trace()
    for name in ("file", "my_step", "a&b"):
        trace(name, np.ones((1, 2)))
    with np.load(io.BytesIO(export.as_npz(trace))) as archive:
        assert archive.files == ["file", "my_step", "a&b", "trace"]
    assert r"\textbf{my\_step}" in export.as_latex(trace, 3)


def test_csv_has_one_file_per_step_and_head_at_full_precision():
    found = export.as_csv(HEADS)
    assert list(found)[:4] == [
        "01_x.csv",
        "02_W_q_head0.csv",
        "03_W_q_head1.csv",
        "04_W_k_head0.csv",
    ]
    labels = list(csv.reader(io.StringIO(found.pop("labels.csv"))))
    assert labels[0] == ["01_x.csv", "rows", *HEADS.labels["L"]]
    assert ["14_scores_head0.csv", "columns", *HEADS.labels["L"]] in labels
    assert len(found) == len(HEADS.steps)
    for text, step in zip(found.values(), HEADS.steps, strict=True):
        rows = [[float(cell) for cell in row] for row in csv.reader(io.StringIO(text))]
        np.testing.assert_array_equal(rows, step.value)


def test_a_listing_of_many_csv_files_has_the_order_of_the_steps():
    trace = EXAMPLES["translation"].trace()
    steps = [name for name in export.as_csv(trace) if name != "labels.csv"]
    assert steps == sorted(steps)
    assert len(steps) == len(trace.steps) > 99


def test_csv_of_scalars_vectors_and_blocks():
    found = export.as_csv(blocks.of_length(3).trace())
    assert any(name.endswith("_kept_naive.csv") and text == "18\n" for name, text in found.items())
    assert any("S_i_1_j_0" in name for name in found)
    trace = Trace()
    attention([[1], [2]], [[1]], [[1]], return_lse=True, tap=trace)
    assert export.as_csv(trace)["10_lse.csv"] == "1.0,2.0\n"


@pytest.mark.parametrize("trace", [CAT, HEADS, AWKWARD], ids=["003", "heads", "awkward"])
def test_markdown_tables_hold_together(trace):
    text = export.as_markdown(trace, 3)
    assert text.count("\n## ") == len(trace.steps)
    tables = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    assert len(tables) == len(trace.steps)
    for table in tables:
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1


def test_formulas_and_sources_are_those_of_the_papers():
    formulas = {
        step["name"]: step["formula"] for step in json.loads(export.as_json(HEADS))["steps"]
    }
    assert formulas["q"] == "Q = X W_q"
    assert formulas["scores"] == "S = Q Kᵀ"
    assert formulas["weights"] == "A = softmax(S), row by row: A_ij = P_ij / l_i"
    assert formulas["head_output"] == "O = A V"
    assert formulas["output"] == "Y = C W_o"
    page, tex = export.as_markdown(HEADS, 3), export.as_latex(HEADS, 3)
    assert "```math\nS = Q K^\\top\n```" in page
    assert r"{$ S = Q K^\top $}" in tex
    for text in (page, tex):
        assert "Source: Vaswani et al. 2017, section 3.2." in text


def test_markdown_says_what_is_printed():
    text = export.as_markdown(CAT, 3)
    assert "| cat | 0.269 | 0.731 | 0.000 |" in text
    assert "- row cat, column The: printed 0.268, exact 0.268941: truncated, not rounded" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
@pytest.mark.parametrize(
    "trace",
    [CAT, HEADS, AWKWARD, EXAMPLES["shapes"].trace(), blocks.of_length(4).trace()],
    ids=["003", "heads", "awkward", "001", "flash"],
)
def test_latex_compiles_as_it_is(trace, tmp_path):
    (tmp_path / "page.tex").write_text(export.as_latex(trace, 3), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_three_tokens_with_their_figures_take_two_pages(tmp_path):
    (tmp_path / "page.tex").write_text(export.as_latex(CAT, 3), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert "(2 pages" in done.stdout
    assert "Overfull" not in done.stdout


def test_markdown_and_latex_have_the_figures():
    page = export.as_markdown(CAT, 3)
    pictures = re.findall(r"!\[(.*?)\]\(data:image/svg\+xml,([^)\s]*)\)", page)
    assert [name for name, _ in pictures] == ["flow of data", "heatmaps", "values picked"]
    for _, picture in pictures:
        ET.fromstring(unquote(picture))
    tex = export.as_latex(CAT, 3)
    assert tex.count(r"\begin{picture}") == 2
    assert r"how query sat picks values" in tex


def test_latex_is_a_whole_document_with_every_matrix():
    text = export.as_latex(CAT, 3)
    assert text.startswith(r"\documentclass")
    assert text.count(r"\begin{tabular}") == len(CAT.steps)
    shades = (
        r"{cat} & \cellcolor[HTML]{BDC7D7}$0.269$ & \cellcolor[HTML]{4A6893}\color{white}$0.731$"
    )
    assert shades in text
    assert r"-\infty" in text
    escaped = export.as_latex(AWKWARD, 3)
    assert r"{50\%} & " in escaped
    assert r"\DeclareUnicodeCharacter{732B}{[U+732B]}" in escaped


@pytest.mark.parametrize("trace", [CAT, AWKWARD], ids=["003", "awkward"])
def test_svg_is_xml_and_shows_the_numbers(trace):
    picture = export.trace_as("svg", trace, 3)
    words = " ".join(ET.fromstring(picture).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "weights" in words
    assert "1.000" in words


OUTSIDE = re.compile(r"https?:|//\w|@import|@font-face|url\((?!#)|<link|<img|src=", re.I)


@pytest.mark.parametrize("kind", ["svg", "html", "markdown", "latex"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_pages_fetch_nothing(name, kind):
    page = export.trace_as(kind, EXAMPLES[name].trace(), 3)
    page = page.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, never fetched
    page = re.sub(r'id="data">[^<]*<', "", page)  # numbers in base64
    assert not OUTSIDE.findall(page)
    assert kind == "html" or "<script" not in page


@pytest.mark.parametrize("kind", ["svg", "html", "markdown", "latex", "json"])
def test_what_acts_unseen_is_escaped_in_every_export(kind):
    unseen = "\x1b\x07\x9b\u061c\u200e\u202a\u202e\u2066\u2069\u2028\ufeff\ufffe"
    page = export.trace_as(kind, sentences.sentence([f"a{c}b" for c in unseen]).trace(), 3)
    assert not set(unseen) & set(page)
    assert "u202e" in page
    if kind == "svg":
        ET.fromstring(page)


def test_words_and_emoji_that_need_joiners_keep_them():
    words = ["می\u200cخواهم", "👩\u200d🔬"]
    assert sentences.sentence(words).trace().labels["L"] == tuple(words)


def test_html_shows_the_numbers_and_escapes_tokens():
    class Reader(HTMLParser):
        words = ""

        def handle_data(self, data):
            self.words += data

    reader = Reader()
    reader.feed(export.trace_as("html", AWKWARD, 3))
    assert "<b>" in reader.words
    assert "softmax" in reader.words


WORDS = (
    "=cmd|'/C", "@SUM(1)", "+1", "-1", "\t=1", "\r=1", "\n", "'=1", "''+", "'", "it's", "a=b", "1"
)  # fmt: skip


def test_no_spreadsheet_runs_a_word_of_a_csv_file():
    trace = Trace(labels={"Lq": WORDS, "Lk": WORDS})
    eye = np.eye(len(WORDS)) * -1.0
    attention(eye, eye, eye, tap=trace)
    found = export.as_csv(trace)
    rows = list(csv.reader(io.StringIO(found["labels.csv"], newline="")))
    written = next(row[2:] for row in rows if row[:2] == ["04_scores.csv", "columns"])
    assert not any(word.startswith(tuple("=+-@\t\r\n")) for word in written)
    read = [re.sub(r"\A'(?='*[=+\-@\t\r\n])", "", word) for word in written]
    assert read == list(next(step for step in trace.steps if step.name == "scores").columns)
    assert found["01_q.csv"].startswith("-1.0,")


def test_numbers_of_a_table_stay_numbers_in_csv():
    rows = [{"word": "=1+1", "number": -0.5}, {"word": "-1+1", "number": "-2.5e-07"}]
    rows += [{"word": "-", "number": "-inf"}, {"word": "@a", "number": "−1"}]
    written = list(csv.reader(io.StringIO(export.table_as_csv(rows))))
    assert written[1:] == [["'=1+1", "-0.5"], ["'-1+1", "-2.5e-07"], ["-", "-inf"], ["'@a", "−1"]]
