"""What a terminal of some width shows."""

import io
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from minimha import attention
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace, render
from minimha.explain.numbers import cells

TRACES = {name: example.trace() for name, example in EXAMPLES.items()}
TRACES |= {f"{n} tokens": sentences.of_length(n).trace() for n in (5, 12)}
TRACES["flash"] = blocks.of_length(6).trace()
TRACES["8 heads"] = sentences.of_length(8, num_heads=8, num_kv_heads=2, d_model=16).trace()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("ramp", ["truecolor", "blocks"])
def test_no_line_is_wider_than_the_terminal(trace, width, ramp):
    for line in render.text(trace, 3, width, ramp).plain.splitlines():
        assert cell_len(line) <= width, line


def test_columns_that_do_not_fit_are_shown_below_under_the_same_labels():
    trace = sentences.of_length(12).trace().selected(["weights"])
    narrow, wide = (render.text(trace, 3, width, "blocks").plain for width in (80, None))
    head = " ".join(trace.labels["L"])
    assert any(" ".join(line.split()) == head for line in wide.splitlines())
    assert narrow.count("Self-attention") > wide.count("Self-attention")
    numbers = [x for line in wide.splitlines() for x in line.split() if x.startswith("0.")]
    assert sorted(numbers) == sorted(
        x for line in narrow.splitlines() for x in line.split() if x.startswith("0.")
    )


def test_without_a_terminal_no_line_is_broken_or_padded():
    shown = render.text(TRACES["given-qkv"], 3, None, "blocks")
    lines = render.plain(shown).splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert any(len(line) > 120 for line in lines)
    assert "\x1b" not in render.plain(shown)


def test_statuses_are_in_words():
    text = render.text(TRACES["the-cat-sat"], 3, None, "blocks").plain
    assert "row cat, column The: printed 0.268, exact 0.268941: truncated, not rounded" in text
    assert "the other 6 are exact, correctly rounded" in text
    text = render.text(TRACES["given-qkv"], 3, None, "blocks").plain
    assert "printed 1.198, exact 1.000000: does not follow from the printed weights and V" in text


def test_raw_masked_and_softmax_side_by_side_for_one_head():
    lines = render.text(TRACES["the-cat-sat"], 3, 80, "blocks").plain.splitlines()
    titles = [line.split() for line in lines]
    at = titles.index(["raw", "scores", "masked", "softmax", "weights"])
    assert titles[at + 1] == ["The", "cat", "sat"] * 3
    assert titles[at + 2] == [
        "The",
        "▒▒▒▒▒",
        "▒▒▒▒▒",
        "The",
        "▒▒▒▒▒",
        "×",
        "×",
        "The",
        "█████",
        "×",
        "×",
    ]


def test_hidden_is_what_a_mask_hides_and_not_what_is_merely_small():
    trace = Trace()
    attention([[1000.0]], [[1.0], [-1.0]], [[1.0], [2.0]], tap=trace)
    assert trace["weights"].tolist() == [[1.0, 0.0]]
    assert "█████" in render.text(trace, 3, 80, "blocks").plain
    assert "q0 █████   ×" not in render.text(trace, 3, 80, "blocks").plain
    masked = Trace()
    attention([[1.0]], [[1.0], [-1.0]], [[1.0], [2.0]], attn_mask=[[True, False]], tap=masked)
    assert "q0 █████   ×" in render.text(masked.selected(["weights"]), 3, 80, "blocks").plain


def test_shades_are_the_nearest_from_blank_to_full():
    trace = Trace()
    attention([[1.0]], np.log([[1], [2], [3], [14]]), np.ones((4, 1)), scale=1, tap=trace)
    last = render.text(trace.selected(["weights"]), 3, 80, "blocks").plain.splitlines()[-1]
    assert last.split() == ["q0", "░░░░░", "▓▓▓▓▓"]  # 1/20 and 2/20 are nearest to none
    last = render.text(trace.selected(["weights"]), 3, 80, "ascii").plain.splitlines()[-1]
    assert last.split() == ["q0", ".....", "+++++"]


def test_how_one_query_picks_its_values():
    lines = render.text(TRACES["given-qkv"], 3, 80, "blocks").plain.splitlines()
    at = lines.index("how query q2 picks values")
    assert [line.split() for line in lines[at + 2 :]] == [
        ["k0", "█" * 10, "0.248", "·", "[1", "0]"],
        ["k1", "█" * 20, "0.503", "·", "[0", "2]"],
        ["k2", "█" * 10, "0.248", "·", "[3", "1]"],
        ["sum:", "[0.993", "1.255]"],
    ]
    assert "picks values" not in render.text(TRACES["8 heads"], 3, 80, "blocks").plain


def test_one_heatmap_a_head():
    text = render.text(TRACES["8 heads"], 3, 80, "blocks").plain
    assert [text.count(f"weights, head {h}") for h in range(8)] == [1] * 8


def test_a_heatmap_in_colour_writes_its_numbers_on_grounds_of_its_own():
    for ramp, one, quarter in (
        ("truecolor", "38;2;0;0;0;48;2;135;255;255", "38;2;255;255;255;48;2;0;59;150"),
        ("256", "38;5;16;48;5;123", "38;5;231;48;5;24"),
        ("standard", "30;106", "97;44"),
    ):
        shown = render.text(TRACES["the-cat-sat"], 3, 80, ramp)
        stream = io.StringIO()
        Console(file=stream, force_terminal=True, color_system=ramp, width=80).print(shown)
        assert f"\x1b[{one}m 1.00" in stream.getvalue()
        assert f"\x1b[{quarter}m 0.27" in stream.getvalue()


def test_cells_are_legible_before_maps_stand_side_by_side():
    trace = sentences.of_length(8, num_heads=8, num_kv_heads=2, d_model=16).trace()
    for width in (80, 120, 200):
        shown = render.text(trace, 3, width, "256").plain
        assert len(re.findall(r"\b[01]\.\d\d\b", shown.partition("\nheatmap")[2])) == 8 * 36


def test_the_scale_is_drawn_beside_the_maps():
    lines = render.text(TRACES["the-cat-sat"], 3, 80, "blocks").plain.splitlines()
    at = lines.index("heatmap")
    assert lines[at + 1 : at + 3] == [
        "    scores   0 [  ░░░░▒▒▒▓▓▓▓██] 2",
        "    weights  0 [  ░░░░▒▒▒▓▓▓▓██] 1",
    ]


class Windows(io.StringIO):
    encoding = "cp1252"


def test_a_stream_without_blocks_gets_ascii():
    assert render.ramp_for(render.console_for(Windows())) == "ascii"
    assert render.ramp_for(render.console_for(io.StringIO())) == "blocks"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("settings", [{}, {"num_heads": 4, "d_model": 8}])
def test_every_visible_weight_is_painted_however_narrow_its_cell(width, settings):
    trace = sentences.of_length(12, **settings).trace()
    shown = render.text(trace, 3, width, "truecolor")
    grounds = [span for span in shown.spans if " on rgb" in str(span.style)]
    assert len(grounds) == np.count_nonzero(trace["weights"]) + render.SCALE_SIZE


def test_tokens_are_text_and_not_markup():
    trace = sentences.sentence(["[bold]", ":smile:"]).trace()
    stream = io.StringIO()
    console = render.console_for(stream)
    console.print(render.text(trace, 3, 80, "blocks"))
    assert "[bold]" in stream.getvalue()
    assert ":smile:" in stream.getvalue()


def test_empty_matrices_say_so():
    trace = Trace()
    attention(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)), tap=trace)
    assert "(empty)" in render.text(trace, 3, 80, "blocks").plain


def test_scores_that_are_all_hidden_or_not_numbers_are_drawn():
    trace = Trace()
    q, hidden = np.array([[np.nan], [1.0]]), np.zeros((2, 2), bool)
    attention(q, q, q, attn_mask=hidden, tap=trace)
    text = render.text(trace, 3, 80, "blocks").plain
    assert "NaN" in text
    assert "×" in text


@pytest.mark.parametrize(
    ("value", "decimals", "texts"),
    [
        ([[1.0, 2.0]], 3, [["1", "2"]]),
        ([[1.0, 0.5]], 1, [["1.0", "0.5"]]),
        ([[0.5]], 0, [["0"]]),
        ([[-0.0, 3]], 2, [["0", "3"]]),
        ([[np.nan, np.inf, -np.inf]], 2, [["NaN", "∞", "-∞"]]),
        ([[1e7, 1.5]], 2, [["1.00e+07", "1.50e+00"]]),
    ],
)
def test_numbers_as_text(value, decimals, texts):
    assert cells(np.array(value), decimals) == texts


def test_a_table_is_aligned_and_its_words_are_wrapped_without_a_terminal():
    records = [{"name": "a", "why": "x " * 50}, {"name": "long name", "why": "[y]"}]
    lines = render.plain(render.table(records)).splitlines()
    assert lines[0] == "name       why"
    assert lines[1] == "a          " + " ".join("x" * 45)
    assert lines[2:] == [" " * 11 + " ".join("x" * 5), "long name  [y]"]


def test_a_table_is_laid_out_as_its_encoding_spells_it():
    records = [{"√D": "2", "score": "1 · 2"}, {"√D": "16", "score": "3"}]
    shown = render.plain(render.tables({"": records}, 80, "ascii"))
    assert shown.splitlines()[1:] == ["sqrt D  score", "2       1 * 2", "16          3"]


@pytest.mark.parametrize(
    ("set_to", "ramp"),
    [("0;15", "256 on light"), ("0;default;7", "256 on light"), ("15;0", "256"), ("", "256"),
     ("0;x", "256")],
)  # fmt: skip
def test_a_light_terminal_gets_a_ramp_that_grows_darker(monkeypatch, set_to, ramp):
    monkeypatch.setenv("COLORFGBG", set_to)
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="256")
    assert render.ramp_for(console) == ramp


def test_a_long_row_is_shaded_by_its_own_largest_weight():
    def heatmap(num_keys):
        trace = Trace()
        attention(np.zeros((1, 2)), np.zeros((num_keys, 2)), np.ones((num_keys, 1)), tap=trace)
        return render.text(trace.selected(["heatmap"]), 3, 100, "blocks").plain

    assert "█" not in heatmap(16).split("softmax weights")[1]
    long = heatmap(17)
    assert long.splitlines()[-1].split()[1:] == ["███"] * 17
    assert "0 [  ░░░░▒▒▒▓▓▓▓██] the row's largest" in long
