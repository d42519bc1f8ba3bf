"""What of a trace is shown: steps, heads, one query, one cell."""

import csv
import json

import numpy as np
import pytest
from command_line import refused, shown

from minimha.examples import EXAMPLES


def titles(run, line, *more):
    steps = json.loads(shown(run, f"{line} --format json", *more))["steps"]
    return [(s["name"], s.get("head", s.get("kv_head"))) for s in steps]


HEADS = "example --tokens 4"


@pytest.mark.parametrize("name", ["weights, head 1", "weights · head 1"])
def test_only_takes_names_as_they_are_displayed(run, name):
    assert titles(run, HEADS, "--only", name) == [("weights", 1)]


def test_only_takes_the_title_of_a_heatmap(run):
    found = titles(run, "example translation", "--only", "weights, encoder, head 0")
    assert found == [("weights[encoder]", 0)]


def test_one_head_and_what_it_shares(run):
    found = titles(run, "example --tokens 4 --heads 4 --kv-heads 2 --d-model 8 --head 3")
    assert {name for name, head in found if head == 3} >= {"W_q", "q", "weights", "head_output"}
    assert {name for name, head in found if head == 1} == {"W_k", "W_v", "k", "v"}
    assert ("concat", None) in found
    assert titles(run, "example --head 0") == titles(run, "example")
    assert not [name for name, head in found if head in (0, 2)]


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_the_heatmap_alone(run, format):
    out = shown(run, f"{HEADS} --only heatmap --format {format}")
    assert "softmax(S)" not in out
    if format == "text":
        assert "weights, head 0" in out
        assert "weights, head 1" in out


def test_one_query_picks_its_values(run):
    out = shown(run, f"{HEADS} --only picks --query quality")
    assert "how query quality picks values, head 0" in out
    assert "how query quality picks values, head 1" in out
    assert "how query cat picks values\n" in shown(run, "example --query cat")
    assert "how query q1 picks values\n" in shown(run, "example 004 --query 1")
    every = shown(run, "example given-qkv --only picks")
    assert [f"how query q{n} picks values\n" in every for n in range(3)] == [True] * 3


def test_a_cell_comes_alone_or_beside_what_is_named(run):
    out = shown(run, "example --cell sat,cat")
    assert "cell sat,cat\n\n    scores: S[sat,cat] = " in out
    assert not {"Axes:", "heatmap", "picks"} & set(out.split())
    out = shown(run, "example --cell sat,cat --only weights")
    assert "cat  0.269  0.731  0.000" in out
    assert "weights: A[sat,cat] = 0.368 / 1.736 = 0.212" in out
    assert "picks" in shown(run, "example --cell sat,cat --query sat")


@pytest.mark.parametrize("format", ["text", "svg"])
def test_a_legend_says_what_hidden_cells_look_like_where_there_are_some(run, format):
    for name, is_masked in (("bert", False), ("gpt2", True)):
        out = shown(run, f"example {name} --only heatmap --format {format}")
        assert ("is hidden" in out) == is_masked
        assert "Rows are queries" in out


@pytest.mark.parametrize("format", ["text", "markdown", "latex", "svg"])
def test_one_query_is_its_rows(run, format):
    out = shown(run, f"example --query cat --format {format}")
    assert "0.731" in out
    assert "0.576" not in out  # of sat
    if format == "text":
        assert "Lq × Lk = 1 of 3 × 3\n" in out
        assert "printed in 'Step 3: Softmax Normalization': [0.268 0.731 0]" in out


def test_one_query_of_many_tokens_shows_what_is_largest(run, tmp_path):
    rows = [[n % 7, n % 5] for n in range(64)]
    (tmp_path / "p.json").write_text(json.dumps({"q": rows, "k": rows, "v": rows}))
    assert "with --only, one token with --query" in refused(run, "attend p.json")
    out = shown(run, "attend p.json --query 34 --only weights")
    assert "Lq × Lk = 1 of 64 × 16 of 64" in out
    [heads] = [line.split() for line in out.splitlines() if line.split()[:1] == ["k4"]]
    best = sorted(range(64), key=lambda n: -(6 * (n % 7) + 4 * (n % 5)))[:16]
    assert heads == [f"k{n}" for n in sorted(best)]
    assert "heatmap" not in out  # which is of all queries
    assert "heatmap" in shown(run, "attend p.json --query 34 --only weights --only heatmap")
    assert "48 more" in shown(run, "attend p.json --query q34")
    assert "output: " in shown(run, "attend p.json --cell 34,3")
    drawn = shown(run, "attend p.json --query 34 --only weights --format svg")
    assert "weights, 1 of 64 × 16 of 64" in drawn


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("example --only wieghts", "no step 'wieghts' here: did you mean 'weights'? the steps are"),
        ("example --only heatmpa", "did you mean 'heatmap'?"),
        ("example --only Weights", "did you mean 'weights'?"),
        ("example --only weights·head1", "did you mean 'weights'?"),
        ("example --hide wieghts", "did you mean 'weights'?"),
        ("example --hide heatmap", "no step 'heatmap' here"),
        ("example --head 1", "no head 1 here: there is only one"),
        (f"{HEADS} --head 2", "no head 2 here: the heads are 0 to 1"),
        ("example --query dog", "no query 'dog' here: the queries are The, cat, sat"),
        ("example --only heatmap --format json", "--only heatmap is a drawing: json holds steps"),
        ("example --cell sat,dog", "no cell 'sat,dog' here: scores has rows The, cat, sat"),
        ("example --hide weights --cell 0,0", "--cell writes out what --hide leaves blank"),
        ("example --hide weights --format json", "--hide makes a worksheet, which is text, mark"),
        ("example --answer a.csv", "--answer needs --hide: the step whose numbers it holds"),
        ("example --hide weights --answer no.csv", "no.csv cannot be read"),
    ],
)
def test_what_cannot_be_chosen(run, line, sentence):
    assert sentence in refused(run, line)


def test_a_cell_of_ones_own_numbers(run, tmp_path):
    (tmp_path / "p.json").write_text('{"q": [[1, 2]], "k": [[3, 4], [1, 0]], "v": [[1], [2]]}')
    out = shown(run, "attend p.json --cell q0,k1")
    assert "scores: S[q0,k1] = 1·1 + 2·0 = 1" in out
    assert "its part of O[q0]" in out
    assert "scores: S[q0,k1] = 1·1 + 2·0 = 1" in shown(run, "attend p.json --cell 0,1")
    assert "S_ij[q0,k1]" in shown(run, "attend p.json --cell 0,1 --backend tiled")


def test_a_cell_of_a_block(run):
    out = shown(run, "flash --cell yesterday,loan")
    assert "factor[i=2,j=2]: α_i[yesterday] = exp(0.707 - 2.121) = 0.243" in out


def test_the_letters_of_the_axes_have_one_legend(run):
    out = shown(run, "example --tokens 4 --heads 4 --kv-heads 2")
    [line] = [line for line in out.splitlines() if line.startswith("Axes: ")]
    for words in (
        "L tokens",
        "Lq queries",
        "D head width (d_k in the papers)",
    ):
        assert words in line
    assert "B_r" not in line


@pytest.mark.parametrize("name", EXAMPLES)
def test_formulas_have_the_letters_of_the_axes(name):
    for steps in EXAMPLES[name].trace().by_name.values():
        for step in steps:
            assert not {"D", "E"} & set(step.axes) or "d_" not in step.formula
            assert "d_k" not in step.formula or step.axes in ((), ("axes",), ("model",))


def test_notes_state_their_condition(run):
    assert "no key can get more than e²" in shown(run, "example cosine")
    assert "no key can get more than e²" not in shown(run, "example cosine --causal")
    assert "its example does not" not in shown(run, "example --scale")
    assert "read each other" not in shown(run, "example heads-001 --causal")
    for flags in ("", "--causal", "--no-scale"):
        assert "the first itself" in shown(run, f"example heads-002 {flags}")


def test_exported_and_shown_again(run, tmp_path):
    for line in ("flash --tokens 4", "example translation"):
        out = shown(run, line)
        for name in ("t.json", "t.npz"):
            shown(run, f"{line} --force --output {name}")
            assert shown(run, f"attend {name}") == out
    assert "cell q" not in shown(run, "attend t.json --cell le,puppy --only scores")
    assert "--causal cannot change it" in refused(run, "attend t.npz --causal")
    assert "--labels cannot change it" in refused(run, "attend t.json --labels a")
    (tmp_path / "bad.json").write_text('{"steps": []}')
    assert "bad.json has steps, but it is no trace" in refused(run, "attend bad.json")
    np.savez(tmp_path / "bad.npz", trace=np.array("{"))
    assert "bad.npz is refused" in refused(run, "attend bad.npz")


# What is read, and what is misspelt


@pytest.mark.parametrize(
    "text",
    [
        "1,0.5\n-2,3\n",
        "1;0,5\n-2;3\n",
        "# a comment\n1,0.5 # another\n\n−2,3\n",
        "1;0.5\n−2;3\n",
    ],
)
def test_numbers_as_people_write_them(run, tmp_path, text):
    (tmp_path / "q.csv").write_text(text)
    (tmp_path / "k.csv").write_text("1,1\n")
    line = "attend --q q.csv --k k.csv --v k.csv"
    steps = json.loads(shown(run, f"{line} --format json"))["steps"]
    assert steps[0]["value"] == [[1, 0.5], [-2, 3]]
    assert "q.csv (2 × 2), k.csv (1 × 2)" in shown(run, line)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1,2\n3\n", "q.csv is ragged: line 2 has 1 number, line 1 has 2"),
        ("1\n1,2\n", "q.csv is ragged: line 2 has 2 numbers, line 1 has 1"),
        ("1e999,0\n", "line 1, field 1 is '1e999': expected at most 1.8e308, the largest float64"),
        ("1,0\n0,NaN\n", "line 2, field 2 is 'NaN': expected a number (a NaN that is meant can"),
        ('"1,5",2\n', "field 1 is '1,5': expected a decimal point, or semicolons between numbers"),
        ("# nothing\n", "q.csv is empty: expected rows of numbers"),
    ],
)
def test_csv_files_that_are_not_numbers(run, tmp_path, text, sentence):
    (tmp_path / "q.csv").write_text(text)
    assert sentence in refused(run, "attend --q q.csv --k q.csv --v q.csv")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"q": {"a": 1}, "k": [[1]], "v": [[1]]}', "q is an object, {…}: expected rows of number"),
        ('{"q": [[1e999]], "k": [[1]], "v": [[1]]}', "1e999 is too large: expected at most 1.8e30"),
    ],
)
def test_json_files_that_are_not_numbers(run, tmp_path, text, sentence):
    (tmp_path / "p.json").write_text(text)
    assert sentence in refused(run, "attend p.json")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("example --d_model 8", "unrecognized arguments: --d_model (did you mean --d-model?)"),
        ("example --num-heads 2", "--num-heads (did you mean --heads?)"),
        ("example --num_kv_heads 2", "--num_kv_heads (did you mean --kv-heads?)"),
        ("example --dance", "unrecognized arguments: --dance\n"),
        ("example --sentence The cat sat", 'in quotes: --sentence "The cat sat")'),
        ("flash --sentence The cat sat", 'in quotes: --sentence "The cat sat")'),
        ("attend --q q --k k --v v --labels a b", "(--labels takes several words in quotes)"),
        (
            "flash --d-model 5",
            "d-model is 5: the head shown is one of 2, so the model width must be",
        ),
    ],
)
def test_misspelt_lines_are_answered_to_the_point(run, line, sentence):
    assert sentence in refused(run, line)


def test_abbreviated_options_are_taken(run):
    assert "Axes" in shown(run, "example --dec 2 --only q")


def test_the_list_of_examples_says_what_is_left_out_and_each_sentence_once(run):
    out = shown(run, "examples")
    assert out.count("bank approved the loan") == 1 + ("heads-002" in out)
    for words in ("'quick'", "[0.1, 0.9", "40"):
        assert words in out
    assert json.loads(shown(run, "examples --format json"))[0]["sentence"] == "X = [1, 2, 3, 4]"


def test_csv_of_labels(run, tmp_path):
    shown(run, "example --format csv --output there")
    with open(tmp_path / "there" / "labels.csv", encoding="utf-8") as file:
        assert ["08_scores.csv", "columns", "The", "cat", "sat"] in list(csv.reader(file))
