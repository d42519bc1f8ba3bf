"""One cell through all steps, in every export."""

import csv
import io
import json

import pytest

from minimha import attention
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace, export, render
from minimha.explain.story import story

CAT = EXAMPLES["the-cat-sat"].trace()
FLASH = blocks.of_length(6).trace()
HEADS = sentences.of_length(6).trace()
LINES = [
    "scores: S[sat,cat] = 1·0 + 1·1 = 1",
    "masked: S[sat,cat] = 1, not hidden",
    "row_max: m[sat] = max(1, 1, 2) = 2",
    "exponentials: P[sat,cat] = exp(1 - 2) = 0.368",
    "row_sum: l[sat] = 0.368 + 0.368 + 1 = 1.736",
    "weights: A[sat,cat] = 0.368 / 1.736 = 0.212",
    "output: 0.212 · [3 0] = [0.636 0.000], its part of O[sat] = [0.848 1.000]",
]


def lines(trace, cell, only=(), **others):
    chosen = trace.selected(only, cell=cell, **others)
    return [f"{w.cell.step.title}: {w.text}" for w in story(chosen)]


@pytest.mark.parametrize("cell", ["sat,cat", "sat, cat", "2,1", "sat,1"])
def test_from_a_score_to_its_part_of_the_output(cell):
    assert lines(CAT, cell)[:7] == LINES
    assert [line.partition(":")[0] for line in lines(CAT, cell)[7:]] == [
        f"{name}[divided]"
        for name in ("scaled", "masked", "row_max", "exponentials", "row_sum", "weights", "output")
    ]


def test_one_step_may_be_any():
    assert lines(CAT, "sat,1", ["q"]) == ["q: Q[sat,1] = 1·0 + 1·1 = 1"]
    assert lines(CAT, "sat", ["row_max[divided]"])[0].startswith("row_max[divided]: m[sat] = max(")
    assert lines(CAT, "sat,0", ["output"])[0].startswith("output: O[sat,0] = 0.212·1 + 0.212·3 +")


def test_the_log_sum_exp_of_the_row_comes_last():
    trace = Trace()
    attention([[1], [2]], [[2], [2]], [[3], [5]], scale=1, return_lse=True, tap=trace)
    assert lines(trace, "1,0")[-1] == "lse: L[q1] = 4 + log 2 = 4.693"


def test_numbers_are_those_that_the_matrices_print():
    trace = Trace()
    attention([[1]], [[-1e-17], [0.5]], [[3e-9], [1]], scale=1, tap=trace)
    texts = [line.partition(" = ")[2] for line in lines(trace, "0,0")]
    assert texts == [
        "1·0.000 = 0.000", "max(0.000, 0.500) = 0.500", "exp(0.000 - 0.500) = 0.607",
        "0.607 + 1 = 1.607", "0.607 / 1.607 = 0.378",
        "[0.000], its part of O[q0] = [0.622]",
    ]  # fmt: skip


def test_the_largest_of_many_terms_are_written_out():
    trace = Trace()
    keys = [[n] for n in range(20)]
    attention([[1]], keys, keys, scale=1, tap=trace)
    [row_max] = [line for line in lines(trace, "0,0") if line.startswith("row_max")]
    assert row_max == f"row_max: m[q0] = max(…, {', '.join(map(str, range(4, 20)))}) = 19"


def test_one_head():
    found = lines(HEADS, "the,bank", head=1)
    assert all(line.partition(":")[0].endswith("head 1") for line in found)
    assert found[0] == "scores, head 1: S[the,bank] = 0·1 + (-2)·0 = 0"


def test_tiles_show_the_block_of_the_cell_alone():
    found = lines(FLASH, "loan,bank")
    names = [line.partition(":")[0] for line in found]
    assert names[-6:] == [f"{base}[i=2,j=0]" for base in ("S", "m", "P", "factor", "l", "O")]
    assert found[-1].startswith("O[i=2,j=0]: 1 · [0 -1] = [0.000 -1.000], its part of O_i[loan] = ")
    assert lines(FLASH, "4,1") == found


@pytest.mark.parametrize(
    ("trace", "cell", "sentence"),
    [
        (CAT, "sat,cta", "no cell 'sat,cta' here: did you mean 'sat,cat'? scores has rows The"),
        (CAT, "3,0", "no cell '3,0' here: scores has rows The, cat, sat, columns The, cat, sat"),
        (CAT, "1,1,1", "cell '1,1,1' has 3 parts: expected a row and a column"),
        (EXAMPLES["shapes"].trace(), "0,0", "no step shown has a query per row and a key per"),
        (sentences.sentence(["a", "b", "a"]).trace(), "a,b", "'a' is there 2 times, at 0, 2: give"),
    ],
)
def test_a_cell_that_is_not_there(trace, cell, sentence):
    with pytest.raises(ValueError, match=r"cell|times") as caught:
        lines(trace, cell)
    assert sentence in str(caught.value)


def test_every_export_has_the_lines():
    trace = CAT.selected(cell="sat,cat")
    assert next(w["text"] for w in json.loads(export.as_json(trace))["cell"]) == LINES[0][8:]
    rows = list(csv.reader(io.StringIO(export.as_csv(trace)["cell.csv"])))
    assert ": ".join(rows[0]) == LINES[0]
    assert LINES[0] in render.text(trace, 3, 80, "blocks").plain
    assert r"S\[sat,cat\] = 1·0 + 1·1 = 1" in export.as_markdown(trace, 3)
    assert r"scores: S[sat,cat] = 1\(\cdot\)0 + 1\(\cdot\)1 = 1" in export.as_latex(trace, 3)
