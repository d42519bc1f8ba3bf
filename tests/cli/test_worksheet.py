"""Worksheets: what ``--hide`` leaves blank, the key beside it, and the answers that are checked."""

import html.parser
import json

import numpy as np
import openpyxl
import pytest
from command_line import refused, shown

ANSWERS = ("0.269", "0.731", "0.576", "0.330", "0.268")  # weights of "The cat sat"


@pytest.mark.parametrize("format", ["text", "markdown", "latex", "html", "svg"])
def test_a_worksheet_has_blanks_and_no_answer(run, format):
    out = shown(run, f"example --hide weights --format {format}")
    assert "Name: " in out
    if format in ("text", "markdown", "latex"):
        assert ("______" in out) or (r"\_\_\_\_\_\_" in out)
    for answer in ANSWERS:
        assert answer not in out
    assert "1.736" in out


def test_a_worksheet_as_csv_is_filled_and_checked(run, tmp_path):
    shown(run, "example --hide weights --format csv --output sheet")
    path = tmp_path / "sheet" / "13_weights.csv"
    assert path.read_text() == ",,\n,,\n,,\n"
    path.write_text("1,0,0\n0.27,0.7311,0\n0.211,,0.6\n")
    status, out, _ = run(f"example --hide weights --answer {path}")
    assert status == 1
    assert out.startswith("7 of 9 numbers are right\n")
    rows = [" ".join(line.split()) for line in out.splitlines()[2:]]
    assert rows == [
        "weights: A[sat,The] 0.211 truncated, not rounded", "weights: A[sat,cat] left blank",
    ]  # fmt: skip
    records = json.loads(run(f"example --hide weights --answer {path} --format json")[1])
    assert len(records) == 9
    assert list(records[0]) == ["cell", "given", "verdict"]


def test_answers_may_be_written_as_documents_write_them(run, tmp_path):
    (tmp_path / "a.csv").write_text("1;−∞;−∞\n0;1;-inf\n1;1;2,0 # the last row\n")
    out = shown(run, "example --hide masked --answer a.csv")
    assert out == "9 of 9 numbers are right\n"


@pytest.mark.parametrize(
    ("answer", "right"), [("0\n-inf\n1\n", 3), ("0\n0\n1\n", 3), ("-inf\n-inf\n-inf\n", 1)]
)
def test_the_largest_of_no_scores_may_be_minus_infinity(run, tmp_path, answer, right):
    (tmp_path / "p.json").write_text(
        '{"q": [[0], [0], [1]], "k": [[1]], "v": [[1]], "attn_mask": [[1], [0], [1]]}'
    )
    (tmp_path / "a.csv").write_text(answer)
    status, out, _ = run("attend p.json --hide row_max --answer a.csv")
    assert status == (right < 3)
    assert out.startswith(f"{right} of 3 numbers are right\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1,0\n1,1\n", "a.csv has 2 rows: weights has 3 rows of 3"),
        ("The,1,0,0\nsat,1,1,1\ncat,1,1,1\n", "line 2 begins with 'sat': expected 'cat'"),
        ("1,0\n1,1\n1,1\n", "a.csv, line 1 has 2 fields: weights has 3 columns"),
        (
            "1\t0\t0\n1\t1\t1\n1\t1\t1\n",
            "line 1 has 1 field (commas separate numbers): weights has 3",
        ),
        ("1 0 0\n1 1 1\n1 1 1\n", "line 1 has 1 field (commas separate numbers): weights has 3"),
        ("1,0,0\n1,cat,1\n1,1,1\n", "a.csv, line 2, field 2 is 'cat': expected a number, or not"),
    ],
)
def test_an_answer_that_does_not_fit(run, tmp_path, text, sentence):
    (tmp_path / "a.csv").write_text(text)
    assert sentence in refused(run, "example --hide weights --answer a.csv")


@pytest.mark.parametrize("kind", ["text", "markdown", "latex", "html", "svg"])
def test_the_key_is_a_second_file(run, tmp_path, kind):
    shown(run, f"example --hide weights --format {kind} --output sheet.x")
    sheet, key = ((tmp_path / name).read_text() for name in ("sheet.x", "sheet-key.x"))
    assert not any(answer in sheet for answer in ANSWERS)
    assert "0.269" in key
    assert "Key: weights" in key


def test_the_key_replaces_no_file(run, tmp_path):
    (tmp_path / "sheet-key.html").write_text("mine")
    assert "sheet-key.html exists" in refused(run, "example --hide weights --output sheet.html")
    assert (tmp_path / "sheet-key.html").read_text() == "mine"
    assert not (tmp_path / "sheet.html").exists()


class Tables(html.parser.HTMLParser):
    """Name of each table → its class, and the texts of its cells; and all elements."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.kinds, self.elements, self.name = {}, {}, set(), None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        given = dict(attrs)
        if tag == "table":
            self.name = given["aria-label"]
            self.tables[self.name], self.kinds[self.name] = [], given["class"]
        if tag == "td" and "class" not in given:
            self.tables[self.name].append("")

    def handle_data(self, data):
        if self.name and self.get_starttag_text() == "<td>" and data.strip():
            self.tables[self.name][-1] += data


def test_a_page_to_print_has_boxes_and_no_script(run, tmp_path):
    words = ["--sentence", "<b> & cats", "--heads", "2", "--seed", "5"]
    shown(run, "example --hide weights --output sheet.html", *words)
    sheet = Tables((tmp_path / "sheet.html").read_text())
    key = Tables((tmp_path / "sheet-key.html").read_text())
    assert sheet.elements.isdisjoint({"script", "b", "link", "img"})
    for title, kind in sheet.kinds.items():
        is_hidden = title.startswith("weights, head")
        assert (kind, key.kinds[title]) == (("blank", "answer") if is_hidden else ("", ""))
        assert set(sheet.tables[title]) == {""} if is_hidden else key.tables[title]
    assert len(sheet.tables["weights, head 1"]) == 9


def numbers_of(path, name):
    """The values and formulas of a named range of a workbook."""
    found = []
    for has_values in (True, False):
        book = openpyxl.load_workbook(path, data_only=has_values)
        [(sheet, area)] = book.defined_names[name].destinations
        cells = book[sheet][area.replace("$", "")]
        rows = cells if isinstance(cells, tuple) else ((cells,),)
        found.append([[cell.value for cell in row] for row in rows])
    return found


def test_a_workbook_has_empty_cells_and_its_key_formulas(run, tmp_path):
    pytest.importorskip("xlsxwriter")
    shown(run, "example --hide weights --output sheet.xlsx")
    values, formulas = numbers_of(tmp_path / "sheet.xlsx", "weights")
    assert values == formulas == [[None] * 3] * 3
    values, formulas = numbers_of(tmp_path / "sheet.xlsx", "output")  # nothing to follow from
    assert values == formulas
    assert np.allclose(values[1], [2.462, 0.538], atol=1e-3)
    values, formulas = numbers_of(tmp_path / "sheet-key.xlsx", "weights")
    assert np.allclose(values[1], [0.269, 0.731, 0], atol=1e-3)
    assert str(formulas[1][0]).startswith("=")


def test_the_blank_head_of_a_workbook_has_no_formula(run, tmp_path):
    pytest.importorskip("xlsxwriter")
    shown(run, "example --tokens 4 --output sheet.xlsx --hide", "masked, head 1")
    assert numbers_of(tmp_path / "sheet.xlsx", "masked_head_1")[1] == [[None] * 4] * 4
    values, formulas = numbers_of(tmp_path / "sheet.xlsx", "masked_head_0")
    assert values == formulas


def test_boxes_of_a_picture_are_empty(run):
    out = shown(run, "example --hide masked --hide weights --format svg")
    assert "? is infinite" not in out
    assert "nan" not in out.lower()


def test_a_seed_makes_another_sheet(run):
    line = "example --tokens 4 --hide weights --format html --seed"
    first, again, other = (shown(run, f"{line} {seed}") for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("start", ["", "weights\n", ",The,cat,sat\n", "weights,,,\nThe,cat,sat\n"])
def test_answers_with_titles_and_labels(run, tmp_path, start):
    rows = "The,1,0,0\ncat,0.269,0.731,0\nsat,0.212,0.212,0.576\n"
    (tmp_path / "a.csv").write_text(start + rows)
    assert "9 of 9" in shown(run, "example --hide weights --answer a.csv")


def test_labelled_answers_of_several_heads(run, tmp_path):
    key = json.loads(shown(run, "example --tokens 4 --only weights --format json"))["steps"]
    lines = []
    for n, step in enumerate(key):
        lines += [f"weights,head {n}", ",".join(["", *step["columns"]])]
        lines += [f"{label},{','.join(f'{x:.2f}' for x in row)}"
                  for label, row in zip(step["rows"], step["value"], strict=True)]  # fmt: skip
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert "32 of 32" in shown(run, "example --tokens 4 --hide weights --answer a.csv")


def test_a_missing_row_or_number_is_not_right(run, tmp_path):
    (tmp_path / "a.csv").write_text("The,1,0,0\ncat,0.269,,0\nsat,0.212,0.212,0.576\n")
    status, out, _ = run("example --hide weights --answer a.csv")
    assert (status, "left blank" in out) == (1, True)
    (tmp_path / "a.csv").write_text("The,1,0,0\nsat,0.212,0.212,0.576\n")
    assert "has 2 rows" in refused(run, "example --hide weights --answer a.csv")
