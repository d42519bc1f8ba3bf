"""Where things stand on the page: the explanation in view, tabs, a phone, folds, and paper."""

import numpy as np
import pytest

from minimha import attention
from minimha.cli import main
from minimha.examples import EXAMPLES, sentences
from minimha.explain import Trace
from minimha.explain.page import page

FOX = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
CAT = page(EXAMPLES["the-cat-sat"].trace(), 3)
DESK = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
OUTSIDE = """() => {
  const panel = $("explanation").getBoundingClientRect(), reach = 0.5;
  const isIn = (inner, outer) =>
    inner.left >= outer.left - reach && inner.right <= outer.right + reach &&
    inner.top >= outer.top - reach && inner.bottom <= outer.bottom + reach;
  const found = ["where", "cell", "value", "sentence", "says"].filter((id) =>
    $(id).textContent && !isIn($(id).getBoundingClientRect(), panel));
  const screen = { left: 0, top: 0, right: innerWidth, bottom: innerHeight };
  return isIn(panel, screen) && $("explanation").scrollTop === 0 ? found : ["explanation"];
}"""
MIDDLE = """(cell) => {
  cell.scrollIntoView({ block: "center", inline: "center" });
  const { left, right, top, bottom } = cell.getBoundingClientRect();
  return [(left + right) / 2, (top + bottom) / 2];
}"""


@pytest.fixture(scope="module")
def fox():
    return page(sentences.sentence(FOX, num_heads=4, d_model=8).trace(), 3)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    path = tmp_path_factory.mktemp("next") / "next.html"
    assert main(["next", "the cat sat on the", "--trace", "--output", str(path)]) in (0, None)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_the_explanation_of_every_cell_of_every_head_is_in_the_window(opened, fox, screen):
    shown = opened(fox, **screen)
    assert shown.text_content("#heading") == "weights"
    assert shown.text_content("#cell") == "A[quick,the]"  # one is explained from the start
    assert shown.evaluate(OUTSIDE) == []
    for head in range(4):
        tab = shown.locator("#heads [role=tab]").nth(head)
        tab.tap() if screen is PHONE else tab.click()
        assert shown.text_content("#where") == f"weights, head {head}"
        cells = shown.query_selector_all("#matrices td[data-at]")
        assert len(cells) == 81
        for n, cell in enumerate(cells):
            x, y = cell.evaluate(MIDDLE)
            (shown.touchscreen.tap if screen is PHONE else shown.mouse.move)(x, y)
            found = shown.text_content("#cell")
            assert found == f"A[{FOX[n // 9]},{FOX[n % 9]}]"
            assert shown.evaluate(OUTSIDE) == []
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_step_explains_itself_in_the_window(opened, fox):
    shown = opened(fox, **DESK)
    for n in range(shown.evaluate("T.groups.length")):
        shown.evaluate("n => go(n)", n)
        assert shown.evaluate(OUTSIDE) == []


def test_hover_focus_click_and_tap_explain_the_same(opened, fox):
    found = set()
    for how in ("hover", "focus", "click", "tap"):
        shown = opened(fox, **(PHONE if how == "tap" else DESK))
        getattr(shown.locator("#matrices td[data-at$=',7,1']"), how)()
        found.add(tuple(shown.text_content(f"#{id}") for id in ("cell", "value", "says", "made")))
    assert len(found) == 1


def test_a_second_click_lets_a_cell_go(opened, fox):
    shown = opened(fox, **DESK)
    shown.click("#matrices td[data-at$=',7,1']")
    shown.hover("#matrices td[data-at$=',0,0']")
    assert shown.text_content("#cell") == "A[lazy,quick]"
    shown.click("#matrices td[data-at$=',7,1']")
    shown.hover("#matrices td[data-at$=',0,0']")
    assert shown.text_content("#cell") == "A[the,the]"


def test_tabs_answer_the_arrows_home_and_end_and_steps_keep_the_head(opened, fox):
    shown = opened(fox, **DESK)
    assert shown.locator("#heads [role=tab] canvas").count() == 4
    shown.locator("#heads [aria-selected=true]").focus()
    keys = ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"]
    for key, head in zip(keys, [1, 2, 1, 3, 0, 0, 3], strict=True):
        shown.keyboard.press(key)
        assert shown.evaluate("document.activeElement.textContent") == f"head {head}"
        assert shown.locator("#heads [aria-selected=true]").count() == 1
        assert shown.locator("#heads [tabindex='0']").count() == 1
        assert shown.text_content("#where") == f"weights, head {head}"
    shown.keyboard.press("n")
    assert shown.text_content("#where") == "head_output, head 3"
    shown.keyboard.press("n")
    assert shown.text_content("#where") == "concat"  # of all heads
    shown.keyboard.press("p")
    assert shown.text_content("#where") == "head_output, head 3"


def test_one_link_is_current(opened, fox):
    shown = opened(fox, **DESK)
    for at, name in (("#list a >> nth=0", "1. x"), ("#chart", "Flow chart"), ("#first a", None)):
        shown.locator(at).first.click()
        [current] = shown.locator("nav [aria-current]").all_text_contents()
        assert current == (name or "14. weights")


@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_words_are_for_a_pointer_or_for_fingers(opened, screen):
    shown = opened(CAT, **screen)
    text = shown.inner_text("body")
    assert ("Tap a cell" in text, "Tap a word" in text) == (screen is PHONE,) * 2
    assert ("Click a cell" in text, "Point at a word" in text) == (screen is DESK,) * 2


def test_a_box_of_the_flow_chart_leads_to_its_step(opened, fox):
    shown = opened(fox, **DESK)
    shown.click("#chart")
    assert not shown.is_visible("#explanation")
    shown.locator("#overview text.bold", has_text="row_sum").click()
    assert shown.text_content("#heading") == "row_sum"


def test_a_chart_with_many_boxes_folds(opened):
    shown = opened(page(EXAMPLES["translation"].trace(), 3), **DESK)
    shown.click("#chart")
    summaries = shown.locator("#overview summary").all_text_contents()
    assert summaries[:3] == ["encoder", "decoder", "cross, from decoder and encoder"]
    assert shown.locator("#overview details[open]").count() == 1
    boxes = shown.evaluate(
        "[...$('overview').querySelectorAll('svg')].map((s) => s.querySelectorAll('.box').length)"
    )
    assert 1 < min(boxes) <= max(boxes) <= 30
    assert len(boxes) >= 3
    assert shown.locator("#list > li").count() < 15
    assert shown.locator("#list a:visible").count() < 30


def test_a_model_opens_on_its_prediction_and_folds_its_layers(opened, predicted):
    shown = opened(predicted, **DESK)
    assert shown.text_content("#heading") == "probabilities"
    assert shown.text_content("#cell").startswith("p[the,")
    likeliest = shown.locator("#likeliest li").all_text_contents()
    assert likeliest[0].startswith(shown.text_content("#cell")[6:-1])
    assert shown.locator("#first a").all_text_contents() == [
        "Prediction", "Attention", "Flow chart",
    ]  # fmt: skip
    assert shown.locator("#list summary").all_text_contents() == ["layer 0", "layer 1", "layer 2"]
    assert shown.locator("#list a:visible").count() < 15
    shown.click("#first a >> nth=1")
    assert shown.text_content("#heading") == "weights[layer 0]"
    assert shown.locator("#list details[open] summary").all_text_contents() == ["layer 0"]
    shown.click("#chart")
    assert shown.locator("#overview svg").count() == 4
    for chart in shown.locator("#overview svg").all():
        assert chart.locator(".box").count() <= 30


def test_what_is_not_shown_has_no_link(opened):
    trace = EXAMPLES["the-cat-sat"].trace().selected(["row_max"])
    shown = opened(page(trace, 3), **DESK)
    assert shown.text_content("#heading") == "row_max"
    assert shown.locator("#operands h3").first.text_content() == "masked row The"
    assert shown.locator("#explanation a").count() == 0


def test_an_empty_trace_has_a_page(opened):
    assert opened(page(Trace(), 3)).is_visible("#overview")


def test_pictures_of_large_heads_wait_until_they_are_looked_at(opened):
    q, k, v = np.random.default_rng(0).normal(size=(3, 3, 800, 2))
    trace = Trace()
    attention(q, k, v, tap=trace)
    shown = opened(page(trace, 3))
    known = "T.groups[group].steps.map((n) => values.original.has(n))"
    assert shown.text_content("#heading") == "weights"
    assert shown.evaluate(known) == [True, False, False]
    shown.click("#heads [role=tab]:nth-child(2)")
    assert shown.evaluate(known) == [True, True, False]


def test_on_paper_headings_stay_with_their_figures(opened, fox):
    shown = opened(fox, **DESK)
    shown.evaluate("go(0)")
    shown.fill("#number", "3")
    shown.emulate_media(media="print")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.text_content("#paper > p") == "Changed: 1 number"
    for at in ("#paper h2", "#overview h2", "#paper .formula", "#paper figcaption"):
        assert "avoid" in shown.locator(at).first.evaluate("(e) => getComputedStyle(e).breakAfter")
    together = shown.locator("#paper .together")
    assert together.count() == shown.evaluate("T.groups.length")
    for part in together.all():
        assert part.locator("h2").count() == part.locator("figure").count() == 1
        assert part.evaluate("(e) => getComputedStyle(e).breakInside") == "avoid"
    assert not shown.is_visible("#explanation")
    assert shown.is_visible("#paper td.hidden >> nth=0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_nothing_stands_in_the_way_of_anybody(opened, fox, predicted, screen, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for text in (fox, predicted):
        shown = opened(text, color_scheme=scheme, bypass_csp=True, **screen)
        for to in ("", "#0,0,0&set=0:0:5", "#29,2,1", "#overview"):
            if to:
                shown.evaluate("to => (history.replaceState(null, '', to), fromAddress())", to)
            violations = axe.run(shown).response["violations"]
            assert [(v["id"], v["nodes"][0]["html"]) for v in violations] == []
