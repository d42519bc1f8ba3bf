"""A workbook's formulas give the trace's numbers, and those of a new trace once cells are changed.

LibreOffice computes them, from a copy in which the values beside the formulas are left out.
"""

import io
import re
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from minimha import attention
from minimha.examples import EXAMPLES, sentences, translation
from minimha.explain import Trace, spreadsheet
from minimha.explain.trace import token_labels
from minimha.layers.additive import additive_attention
from minimha.layers.cosine import cosine_attention
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.rope import RoPE

pytest.importorskip("xlsxwriter", reason="the extra sheets is not installed")
openpyxl = pytest.importorskip("openpyxl", reason="openpyxl, which reads sheets, is not installed")

SOFFICE = shutil.which("soffice")
WORDS = ("The", "cat", "sat", "down")
RNG = np.random.default_rng(15)
X, CONTEXT = sentences.embeddings(WORDS, 8, seed=1), RNG.normal(size=(3, 8))
BIASES = {f"b_{name}": RNG.normal(size=n) for name, n in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
Q, K, V = (RNG.normal(size=shape) for shape in ((2, 4, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3)))
BIAS = np.where(RNG.random((1, 4, 3, 4)) < 0.2, -np.inf, RNG.normal(size=(1, 4, 3, 4)))
OPTIONS = {
    "attn_bias": BIAS, "softcap": 2.0, "sinks": [0.5, -1, 0, 3], "alibi_slopes": [1, 0.5, 0.25, 0],
    "kv_lengths": [4, 0], "is_causal": True, "q_offset": [1, 0], "return_lse": True, "scale": 0.75,
}  # fmt: skip
HIDDEN = {"W_q": RNG.normal(size=(4, 5)), "W_k": RNG.normal(size=(4, 5)), "w": RNG.normal(size=5)}


def layer(x=X, context=None, *, heads=4, rope=None, biases=None, **options):
    """The trace of a layer of heads on two key/value heads, its output projected."""
    trace = Trace("a layer", labels=token_labels(WORDS, None if context is None else WORDS[:3]))
    weights = sentences.draw_weights(8, heads, 2, seed=1)
    made = MultiHeadAttention.from_heads(*weights, rope=rope, **(biases or {}))
    made(x, context, tap=trace, **options)
    return trace


def core(q=Q, k=K, v=V, function=attention, **options):
    """The trace of one of the attentions by itself."""
    trace = Trace("the core")
    function(q, k, v, tap=trace, **options)
    return trace


def translated(english):
    """The trace of the translation, an encoder and a decoder that reads it, of other meanings."""
    with mock.patch.object(translation, "IN_ENGLISH", english):
        return translation.EXAMPLE.trace()


def with_number(array, index, number):
    array = np.array(array, float)
    array[index] = number
    return array


# The trace that is exported, the cells that are changed (range, row, column, number), and the trace
# that the sheet must show then.
SEEN = np.tril(np.ones((4, 4), bool))
CASES = {
    "causal, grouped, projected": (
        layer(is_causal=True),
        [("x", 2, 5, -2.5)], layer(with_number(X, (2, 5), -2.5), is_causal=True),
    ),
    "another mask": (
        layer(is_causal=True),
        [("visible", 0, 3, 1), ("visible", 3, 3, 0)],
        layer(attn_mask=with_number(with_number(SEEN, (0, 3), 1), (3, 3), 0).astype(bool)),
    ),
    "another scale": (layer(), [("scale", 0, 0, 1.25)], layer(scale=1.25)),
    "crossed, biased": (
        layer(X, CONTEXT, biases=BIASES),
        [("context", 0, 0, 3), ("x", 3, 7, 0.1)],
        layer(with_number(X, (3, 7), 0.1), with_number(CONTEXT, (0, 0), 3), biases=BIASES),
    ),
    "rotated in halves": (
        layer(rope=RoPE(2)), [("x", 3, 0, 1.5)], layer(with_number(X, (3, 0), 1.5), rope=RoPE(2)),
    ),
    "rotated in pairs": (
        layer(heads=2, rope=RoPE(4, interleaved=True)),
        [("x", 3, 0, 1.5)],
        layer(with_number(X, (3, 0), 1.5), heads=2, rope=RoPE(4, interleaved=True)),
    ),
    "rotated in part": (
        layer(heads=2, rope=RoPE(4, rotary_dim=2)),
        [("x", 3, 0, 1.5)],
        layer(with_number(X, (3, 0), 1.5), heads=2, rope=RoPE(4, rotary_dim=2)),
    ),
    "batch, every option": (
        core(**OPTIONS),
        [("q_batch_0_head_3", 2, 1, 0.5), ("sinks_head_1", 0, 0, 2), ("softcap", 0, 0, 3)],
        core(
            with_number(Q, (0, 3, 2, 1), 0.5),
            **OPTIONS | {"sinks": [0.5, 2, 0, 3], "softcap": 3.0},
        ),
    ),
    "cosine of heads": (
        core(Q[0], K[0], V[0], cosine_attention, scale=3),
        [("k_key_value_head_1", 3, 3, 4)],
        core(Q[0], with_number(K[0], (1, 3, 3), 4), V[0], cosine_attention, scale=3),
    ),
    "additive, biased": (
        core(Q[0], K[0], V[0], additive_attention, **HIDDEN, b=HIDDEN["w"]),
        [("w", 0, 4, 2)],
        core(Q[0], K[0], V[0], additive_attention, b=HIDDEN["w"],
            **HIDDEN | {"w": with_number(HIDDEN["w"], 4, 2)}),
    ),
    "one layer reads another": (
        EXAMPLES["translation"].trace(),
        [("x_encoder", 1, 1, 0.75)],
        translated(with_number(translation.IN_ENGLISH, (1, 1), 0.75)),
    ),
}  # fmt: skip
# Examples as they are; the others compute nothing, or in blocks.
COMPUTED = {name: example.trace() for name, example in EXAMPLES.items() if name != "shapes"}
ALL = CASES | {name: (trace, [], trace) for name, trace in COMPUTED.items()}


def names_of(trace):
    """The step under the name of each range."""
    return {re.sub(r"\W+", "_", step.title).strip("_"): step for step in trace.steps}


def ranges(book):
    """The cells under each name."""
    cells = {}
    for name, found in book.defined_names.items():
        area = book["attention"][found.attr_text.partition("!")[2].replace("$", "")]
        cells[name] = area if isinstance(area, tuple) else ((area,),)
    return cells


def assert_shows(book, trace):
    """Every number of ``trace`` stands in ``book``, an opened file, under its step's name."""
    cells = ranges(book)
    for name, step in names_of(trace).items():
        shown = [
            [-np.inf if c.value == "-∞" else float(c.value) for c in row] for row in cells[name]
        ]
        np.testing.assert_allclose(
            np.reshape(shown, step.value.shape), step.value, rtol=0, atol=1e-12, err_msg=name
        )


@pytest.fixture(scope="module")
def recalculated(tmp_path_factory):
    """Every workbook as LibreOffice computes it, as exported and changed; (case, which) → book."""
    if SOFFICE is None:
        pytest.skip("LibreOffice, which recalculates sheets, is not installed")
    bare, full = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("full")
    for n, (before, changes, _) in enumerate(ALL.values()):
        book = openpyxl.load_workbook(io.BytesIO(spreadsheet.as_workbook(before, 3)))
        book.save(bare / f"{n}-exported.xlsx")
        for name, i, j, number in changes:
            ranges(book)[name][i][j].value = number
        book.save(bare / f"{n}-changed.xlsx")
    profile = (full / "profile").as_uri()
    subprocess.run(
        [SOFFICE, f"-env:UserInstallation={profile}", "--headless", "--convert-to", "xlsx",
         "--outdir", str(full), *map(str, bare.iterdir())],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    return {
        (case, which): openpyxl.load_workbook(full / f"{n}-{which}.xlsx", data_only=True)
        for n, case in enumerate(ALL)
        for which in ("exported", "changed")
    }


@pytest.mark.parametrize("case", ALL)
def test_libreoffice_computes_the_numbers_of_the_trace(recalculated, case):
    assert_shows(recalculated[case, "exported"], ALL[case][0])


@pytest.mark.parametrize("case", CASES)
def test_changed_cells_give_the_numbers_of_a_new_trace(recalculated, case):
    _, changes, after = CASES[case]
    cells = ranges(recalculated[case, "changed"])
    assert all(cells[name][i][j].value == number for name, i, j, number in changes)
    assert_shows(recalculated[case, "changed"], after)


@pytest.mark.parametrize("case", ALL)
def test_readers_that_compute_nothing_see_the_numbers_too(case):
    book = openpyxl.load_workbook(
        io.BytesIO(spreadsheet.as_workbook(ALL[case][0], 3)), data_only=True
    )
    assert_shows(book, ALL[case][0])


def opened(trace):
    return openpyxl.load_workbook(io.BytesIO(spreadsheet.as_workbook(trace, 3)))


def formula(cell):
    return getattr(cell.value, "text", cell.value)  # of an array formula, or of another


def test_formulas_read_as_the_equations():
    cells = ranges(opened(EXAMPLES["the-cat-sat"].trace()))
    second = {name: area[-2] for name, area in cells.items() if len(area) > 1}  # of three rows
    found = {name: formula(row[0]) for name, row in second.items()}
    row = {name: f"{row[0].coordinate}:{row[-1].coordinate}" for name, row in second.items()}
    at = {name: row[0].coordinate for name, row in second.items()}
    column = {name: f"{a[0][0].coordinate}:{a[-1][0].coordinate}" for name, a in cells.items()}
    first_key = f"{cells['k'][0][0].coordinate}:{cells['k'][0][-1].coordinate}"
    assert found["q"] == f"=MMULT({row['x']},{column['W_q']})"
    assert found["scores"] == f"=SUMPRODUCT({row['q']},{first_key})"
    assert found["masked"] == f'=IF({at["visible"]}=1,{at["scores"]},"-∞")'
    assert found["row_max"] == f"=MAX({row['masked']})"
    assert found["exponentials"] == (
        f"=IF(ISNUMBER({at['masked']}),EXP({at['masked']}-{at['row_max']}),0)"
    )
    assert found["row_sum"] == f"=SUM({row['exponentials']})"
    assert found["weights"] == f"=IF({at['row_sum']}=0,0,{at['exponentials']}/{at['row_sum']})"
    assert found["output"] == f"=MMULT({row['weights']},{column['v']})"
    assert found["scaled_divided"] == f"={at['scores']}*{cells['scale_divided'][0][0].coordinate}"


def test_what_is_given_is_yellow_and_all_else_is_a_formula():
    given = set()
    for name, area in ranges(opened(layer(is_causal=True, biases=BIASES))).items():
        kinds = {
            (c.fill.fgColor.rgb == "FFFFF2CC", str(formula(c))[0] == "=") for r in area for c in r
        }
        assert kinds in ({(True, False)}, {(False, True)}), name
        given |= {re.sub(r"_(key_value_)?head_\d", "", name)} if (True, False) in kinds else set()
    weights = {f"{kind}_{letter}" for kind in "Wb" for letter in "qkvo"}
    assert given == {"x", "scale", "visible"} | weights


def test_words_are_never_formulas_links_or_anything_but_words():
    words = [
        "=1+1",
        "+1",
        "-1",
        "@SUM(1)",
        "{=1}",
        "http://x.y",
        "=cmd|'/c calc'!A1",
        "<b>&",
        "7" * 999,
    ]
    book = opened(sentences.sentence(words).trace())
    cells = [
        cell for row in book["attention"].iter_rows() for cell in row if cell.value is not None
    ]
    shown = [cell for cell in cells if cell.value in words]
    assert {cell.value for cell in shown} == set(words[:-1])
    assert {(cell.data_type, cell.hyperlink) for cell in shown} == {("s", None)}
    assert all(len(str(cell.value)) <= 255 for cell in cells if cell.data_type == "s")
    allowed = {"MMULT", "SUMPRODUCT", "IF", "ISNUMBER", "EXP", "MAX", "SUM"}
    for cell in cells:
        if cell.data_type == "f":
            assert set(re.findall(r"[A-Z]+(?=\()", formula(cell))) <= allowed
    assert len(ranges(book)) == len(book.defined_names)


def test_ranges_have_names_that_no_cell_has():
    trace = core()
    for name in ("q1", "R", "rc", "Q", "7", "ma sk", "ma_sk"):
        trace(name, np.ones(2))
    names = set(opened(trace).defined_names)
    assert {"_q1", "_R", "_rc", "_7", "ma_sk"} <= names
    assert len({name.casefold() for name in names}) == len(names)


def test_a_mask_that_differs_between_heads_is_written_for_each():
    mask = np.ones((1, 4, 3, 4), bool)
    mask[0, 2, 0, 0] = False
    names = {name for name in ranges(opened(core(attn_mask=mask))) if "visible" in name}
    assert len(names) == 8
    assert "visible" in ranges(opened(core(is_causal=True, q_offset=1)))


def long(num_tokens, d_model=2):
    return sentences.sentence([str(n) for n in range(num_tokens)], d_model=d_model).trace()


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (lambda: long(65), "x has L=65, and a sheet holds at most 64 tokens: export it with"),
        (lambda: long(3, 512), "all steps together have 1,0"),
        (lambda: core(backend="tiled"), "Q[i=0] is one of many blocks, and a sheet"),
        (lambda: long(3).selected(["weights"]), "which is not shown: a sheet holds every step,"),
        (lambda: core(with_number(Q, 0, np.nan)), "q holds NaN or ∞, which no cell can"),
        (lambda: core(Q, K[..., :0, :], V[..., :0, :]), "k has no numbers: export it with"),
        (EXAMPLES["shapes"].trace, "no step here is computed from another: export it"),
        (lambda: core(np.ones((1, 4096, 1, 4)), K[:1, :1], V[:1, :1]), "q would be 20,480 columns"),
    ],
)  # fmt: skip
def test_what_a_sheet_cannot_hold_is_refused(trace, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        spreadsheet.as_workbook(trace(), 3)


def test_a_step_that_no_formula_gives_is_refused():
    trace = Trace()
    made = MultiHeadAttention(8, 2, qk_norm="full")
    made(X, tap=trace)
    with pytest.raises(ValueError, match="q_normed is computed from the steps before it, but"):
        spreadsheet.as_workbook(trace, 3)


def test_sixty_four_tokens_fit():
    assert len(ranges(opened(long(64)))["weights_head_1"]) == 64


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'minimha[sheets]'")):
        spreadsheet.as_workbook(core(), 3)


def test_a_cell_is_written_out_below():
    trace = EXAMPLES["the-cat-sat"].trace().selected(cell="sat,cat")
    lines = [str(row[0].value) for row in opened(trace)["attention"].iter_rows()]
    heading = lines.index("cell sat,cat, with the numbers as they were exported")
    assert lines[heading + 1] == "scores: S[sat,cat] = 1·0 + 1·1 = 1"
    assert lines[2].startswith("Axes: ")


def test_decimals_and_large_numbers_have_their_formats():
    book = openpyxl.load_workbook(io.BytesIO(spreadsheet.as_workbook(core(Q * 1e9), 1)))
    formats = {name: area[0][0].number_format for name, area in ranges(book).items()}
    assert formats["scores_batch_0_head_0"] == "0.0E+00"
    assert formats["weights_batch_0_head_0"] == "0.0"
