"""The page in a browser: it computes what the trace holds, and answers pointer and keyboard."""

import json
import re

import numpy as np
import pytest

from minimha import attention
from minimha.equations import tiled
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace
from minimha.explain.numbers import cells
from minimha.explain.page import page
from minimha.explain.trace import token_labels
from minimha.explain.written import cell
from minimha.layers import MultiHeadAttention, RoPE
from minimha.layers.norms import layer_norm


def layer_with_everything():
    layer = MultiHeadAttention(
        8, num_heads=4, num_kv_heads=2, qk_norm="head", gate="elementwise", rope=RoPE(2), seed=3
    )
    trace = Trace(labels=token_labels("abc"))
    layer(np.linspace(-1, 1, 24).reshape(3, 8), is_causal=True, tap=trace)
    return trace


def attention_with_everything():
    random = np.random.default_rng(5)
    q, k, v = (random.normal(size=(2, 4, 3)) for _ in range(3))
    trace = Trace()
    attention(
        q, k, v, window_size=(1, 1), alibi_slopes=[0.5, 0.25], softcap=2.0, sinks=[0.5, -1.0],
        attn_bias=random.normal(size=(4, 4)), return_lse=True, tap=trace,
    )  # fmt: skip
    return trace


def long_rows():
    trace = Trace()
    q, k, v = np.random.default_rng(4).normal(size=(3, 20, 18))
    attention(q, k, v, is_causal=True, tap=trace)
    return trace


def tiled_with_lse():
    trace = Trace(blocks=(tiled.BLOCK_ROWS, tiled.BLOCK_COLUMNS))
    q, k, v = (np.linspace(-1, 1, n).reshape(n, 1) for n in (tiled.BLOCK_ROWS + 1, 3, 3))
    attention(q, k, v, return_lse=True, backend="tiled", tap=trace)
    return trace


def long_norms():
    """Rows of more numbers than are written out, of a norm and of a softmax."""
    trace, rng = Trace(), np.random.default_rng(6)
    gain, bias, *x = rng.normal(size=(5, 20))
    logits = trace("logits", layer_norm(trace("x", np.array(x)), gain, bias, 1e-5, trace))
    exponentials = np.exp(logits)
    trace("probabilities", exponentials / exponentials.sum(axis=-1, keepdims=True))
    return trace


TRACES = {name: example.trace() for name, example in EXAMPLES.items() if name != "shapes"}
TRACES["heads"] = sentences.of_length(6, num_heads=4, num_kv_heads=2, d_model=8).trace()
TRACES["rope"] = sentences.of_length(4, num_heads=2, d_model=8, rope=True).trace()
TRACES["blocks"] = blocks.of_length(5).trace(is_causal=True)
TRACES["tiled"] = tiled_with_lse()
TRACES["norms"] = long_norms()
TRACES["long"] = long_rows()
TRACES["layer"] = layer_with_everything()
TRACES["options"] = attention_with_everything()
CAT = TRACES["the-cat-sat"]
RECORD = "({title: step.title, values: [...%s.data].map(String)})"
NOW = f"T.steps.map((step, n) => {RECORD % 'matrix(n)'})"
COMPUTED = f"T.steps.map((step, n) => {RECORD % '(step.made ? computed(step, false) : matrix(n))'})"


def go(shown, name):
    """Turn to a step, as its link in the list does, folded or not."""
    n = shown.evaluate("name => T.groups.findIndex((group) => group.name === name)", name)
    assert n >= 0
    shown.evaluate("n => go(n)", n)


def factor(exponent):
    """What the slider multiplies the scale by: it is logarithmic."""
    return 2.0**exponent


def numbers(values):
    return np.array([float(v.replace("Infinity", "inf").replace("NaN", "nan")) for v in values])


def test_a_long_word_does_not_widen_the_page(opened):
    word = "attention" * 40
    trace = Trace(example=word, source=word)
    attention([[1.0]], [[1.0]], [[1.0]], tap=trace)
    shown = opened(page(trace, 3), viewport={"width": 600, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth") <= 600


@pytest.mark.parametrize("name", TRACES)
def test_what_the_page_computes_is_what_the_trace_holds(opened, name):
    trace = TRACES[name]
    shown = opened(page(trace, 3))
    steps = [step for steps in trace.by_name.values() for step in steps]
    found = shown.evaluate(COMPUTED)
    assert len(found) == len(steps)
    for step, record in zip(steps, found, strict=True):
        np.testing.assert_allclose(
            numbers(record["values"]), np.ravel(step.value), rtol=1e-9, atol=1e-12,
            err_msg=record["title"],
        )  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_every_cell_is_written_out_as_on_a_terminal(opened, name):
    trace = TRACES[name]
    shown = opened(page(trace, 3))
    steps = [step for steps in trace.by_name.values() for step in steps]
    found = shown.evaluate(
        "T.steps.map(({rows, cols}, n) => "
        "range(rows).map((i) => range(cols).map((j) => written(n, i, j).text)).flat())"
    )
    for step, lines in zip(steps, found, strict=True):
        expected = [cell(trace, step, at).text for at in np.ndindex(step.value.shape)]
        assert lines == expected


@pytest.mark.parametrize("decimals", [0, 3, 6])
def test_cells_show_the_numbers_as_a_terminal_does(opened, decimals):
    value = np.array([[0.0625, 2.5, -0.0625], [1e-9, -0.0, 0.1875], [np.inf, -np.inf, np.nan]])
    for made in (value, value * 1e7, value * 1e-7, np.rint(value)):
        trace = Trace()
        trace("mine", made)
        shown = opened(page(trace, decimals))
        texts = shown.locator("#matrices td[data-at]").all_text_contents()
        assert texts == [text for row in cells(made, decimals) for text in row]


def test_pointing_shows_row_column_and_product(opened):
    shown = opened(page(CAT, 3))
    go(shown, "scores")
    shown.hover("#matrices tbody tr:nth-child(3) td:nth-of-type(2)")
    assert shown.text_content("#says") == "S[sat,cat] = 1·0 + 1·1 = 1"
    marked = {kind: shown.locator(f"#operands li.{kind}") for kind in ("row", "column")}
    assert marked["row"].all_text_contents() == ["01", "11"]  # each under its column
    assert marked["column"].all_text_contents() == ["00", "11"]
    assert shown.locator("#operands a").all_text_contents() == ["q", "k"]
    assert shown.locator("#operands h3").all_text_contents() == ["q row sat", "k row cat"]


def test_links_lead_back_to_the_inputs_and_the_browser_back_again(opened):
    shown = opened(page(CAT, 3))
    go(shown, "weights")
    for title in ("exponentials", "masked", "scores", "q", "x"):
        shown.locator("#operands a").filter(has_text=re.compile(f"^{title}$")).click()
        assert shown.text_content("#heading") == title
    assert shown.text_content("#says").endswith(", given")
    shown.go_back()
    assert shown.text_content("#heading") == "q"


def test_a_cell_that_was_asked_for_is_written_out_first(opened):
    shown = opened(page(CAT.selected(cell="sat,cat"), 3))
    assert shown.text_content("#cell") == "A[sat,cat]"
    assert shown.text_content("#says").startswith("A[sat,cat] = ")
    shown.click("#chart")
    assert "S[sat,cat] = 1·0 + 1·1 = 1" in shown.text_content("#overview")
    shown.locator("#overview li a", has_text="weights").first.click()
    assert shown.text_content("#says").startswith("A[sat,cat] = ")
    assert shown.is_visible("#held")


def test_one_head_alone(opened):
    shown = opened(page(TRACES["heads"].selected(head=2), 3))
    go(shown, "weights")
    assert shown.locator("#matrices figcaption b").all_text_contents() == ["weights, head 2"]
    assert shown.locator("#operands a").first.text_content() == "exponentials, head 2"
    assert not shown.is_visible("#heads")


def test_everything_by_keyboard_alone(opened):
    shown = opened(page(CAT, 3))
    for _ in range(5):
        shown.keyboard.press("p")
    assert shown.text_content("#heading") == "scores"
    go(shown, "q")  # puts the first cell first
    shown.hover("#matrices tbody tr:nth-child(1) td:nth-of-type(1)")
    go(shown, "scores")
    while shown.evaluate("document.activeElement.tagName") != "TD":
        shown.keyboard.press("Tab")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        shown.keyboard.press(key)
    assert shown.text_content("#says") == "S[sat,sat] = 1·1 + 1·1 = 2"
    assert shown.evaluate("document.activeElement.matches('td.here:focus-visible')")
    shown.keyboard.press("Home")
    assert shown.text_content("#says").startswith("S[sat,The]")
    shown.keyboard.press("Enter")
    assert shown.is_visible("#held")
    shown.hover("#matrices tbody tr:nth-child(1) td:nth-of-type(1)")
    assert shown.text_content("#says").startswith("S[sat,The]")
    shown.keyboard.press("Escape")
    assert not shown.is_visible("#held")
    shown.keyboard.press("p")
    assert shown.text_content("#heading") == "v"


def test_scale_and_mask_recompute_and_say_so(opened):
    q, k, v = np.random.default_rng(1).normal(size=(3, 2, 4, 3))
    trace, other = Trace(), Trace()
    attention(q, k, v, is_causal=True, tap=trace)
    attention(q, k, v, scale=3**-0.5 * factor(1.5), tap=other)
    shown = opened(page(trace, 3))
    assert shown.is_checked("#causal")
    go(shown, "weights")
    before = shown.locator("#matrices td[data-at]").all_text_contents()
    shown.fill("#scale", "1.5")
    shown.uncheck("#causal")
    said = "Changed: scale 1.633 instead of 0.577, causal mask removed"
    assert shown.text_content("#changed") == said
    assert shown.locator("#matrices td.changed").count() == 16
    for name in ("weights", "output"):
        found = [record for record in shown.evaluate(NOW) if record["title"].startswith(name)]
        for record, expected in zip(found, other[name], strict=True):
            np.testing.assert_allclose(numbers(record["values"]), expected.ravel(), rtol=1e-9)
    shown.click("#reset")
    assert shown.locator("#matrices td[data-at]").all_text_contents() == before
    assert shown.text_content("#changed") == ""
    assert shown.locator("td.changed").count() == 0


UNDERFLOW = {"q": [[1.0], [1.0]], "k": [[0.0], [-2000.0]], "v": [[1.0], [np.inf]], "scale": 1}


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_infinity_counts_where_a_weight_is_0_and_nothing_is_hidden(opened, backend, is_causal):
    trace = Trace(blocks=(128, 128))
    attention(**UNDERFLOW, is_causal=is_causal, backend=backend, tap=trace)
    assert [np.isnan(x) for x in trace["output"].ravel()] == [not is_causal, True]
    [output] = trace.by_name["output" if backend == "dense" else "O[i=0,j=0]"]
    assert trace.origins[output] is not None
    shown = opened(page(trace, 3))
    for step, record in zip(
        [step for steps in trace.by_name.values() for step in steps],
        shown.evaluate(COMPUTED), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(numbers(record["values"]), np.ravel(step.value))


def test_only_what_is_computed_can_fail_to_follow_a_change(opened):
    shown = opened(page(TRACES["translation"], 3))
    before = shown.evaluate(NOW)
    shown.fill("#scale", "-1")
    changed = {
        new["title"] for new, old in zip(shown.evaluate(NOW), before, strict=True) if new != old
    }
    assert {"context[cross]", "x[cross]", "x[cross, step 5]", "probabilities[cross]"} <= changed
    for name in ("x[encoder]", "W_q[encoder]"):
        go(shown, name)
        assert not shown.is_visible("#stale")
    other = opened(page(TRACES["blocks"], 3))
    other.fill("#scale", "-1")
    go(other, "difference")
    assert other.is_visible("#stale")


def test_infinity_of_a_key_that_the_reader_hides_or_shows(opened):
    for is_causal in (True, False):
        trace, other = Trace(), Trace()
        attention(**UNDERFLOW, is_causal=is_causal, tap=trace)
        attention(**UNDERFLOW, is_causal=not is_causal, tap=other)
        shown = opened(page(trace, 3))
        shown.set_checked("#causal", not is_causal)
        found = {record["title"]: numbers(record["values"]) for record in shown.evaluate(NOW)}
        np.testing.assert_array_equal(found["output"], other["output"].ravel())


def test_the_flow_chart_says_that_it_does_not_follow_a_change(opened):
    shown = opened(page(CAT, 3))
    shown.click("#chart")
    said = shown.locator("text=These figures show the run before your changes.")
    assert not said.is_visible()
    shown.uncheck("#causal")
    assert said.is_visible()
    shown.click("#reset")
    assert not said.is_visible()


def test_a_mask_can_be_added_where_there_was_none(opened):
    q, k, v = np.random.default_rng(2).normal(size=(3, 4, 3))
    trace, other = Trace(), Trace()
    attention(q, k, v, scale=1, tap=trace)
    attention(q, k, v, scale=2, is_causal=True, tap=other)
    shown = opened(page(trace, 3))
    shown.check("#causal")
    shown.fill("#scale", "1")  # of the product itself, which nothing scales: twice as much
    found = {record["title"]: numbers(record["values"]) for record in shown.evaluate(NOW)}
    np.testing.assert_allclose(found["weights"], other["weights"].ravel(), rtol=1e-9)
    np.testing.assert_allclose(found["output"], other["output"].ravel(), rtol=1e-9)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["the-cat-sat", "heads", "blocks"])
def test_nothing_stands_in_the_way_of_anybody(opened, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    shown = opened(page(TRACES[name], 3), color_scheme=scheme, bypass_csp=True)
    for n in (None, "weights", "scores", "x" if "x" in TRACES[name] else "v"):
        if n:
            go(shown, n)
            shown.hover("#matrices td[data-at$=',1,0']")
        else:
            shown.click("#chart")
        violations = axe.run(shown).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"]) for v in violations] == []


def test_tokens_are_text(opened):
    words = ["<script>document.title='x'</script>", "</script>", "<!--", "'\"&", "]]>", "@"]
    shown = opened(page(sentences.sentence(words).trace(), 3))
    go(shown, "x")
    assert shown.locator("#matrices tbody th").all_text_contents() == words
    assert shown.title() != "x"


def test_a_large_run_is_small_and_opens(opened):
    q, k, v = np.random.default_rng(0).normal(size=(3, 12, 512, 64))
    trace = Trace(labels=token_labels([f"t{n}" for n in range(512)]))
    attention(q, k, v, is_causal=True, tap=trace)
    text = page(trace, 3)
    assert len(text.encode()) < 5e6
    shown = opened(text)
    go(shown, "weights")
    assert shown.locator("#heads [role=tab]").count() == 12
    weights = shown.evaluate("[...matrix(T.groups[group].steps[11]).data]")
    np.testing.assert_allclose(weights, trace["weights"][11].ravel(), atol=1e-4)
    shown.locator("#heads [role=tab]").nth(3).click()
    shown.locator("#matrices canvas").click(position={"x": 20, "y": 120})
    assert shown.text_content("#says").startswith("A[t")
    assert shown.locator("#matrices td[data-at]").count() == 16 * 16


def test_paper_has_every_step(opened):
    shown = opened(page(CAT, 3))
    shown.emulate_media(media="print")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("#paper section").count() == len(CAT.by_name)
    assert shown.is_visible("#paper >> text=13. weights")
    assert not shown.is_visible("nav")
    assert shown.pdf().startswith(b"%PDF")


def test_it_stands_in_a_sandboxed_frame(opened):
    frame = json.dumps(page(CAT, 3)).replace("<", "\\u003c")
    shown = opened(
        "<!doctype html><title>notebook</title><iframe sandbox='allow-scripts'></iframe>"
        f"<script>document.querySelector('iframe').srcdoc = {frame}</script>",
        ready="iframe",
    )
    inside = shown.frame_locator("iframe")
    inside.locator("body[data-ready]").wait_for()
    inside.locator("#all > summary").click()  # folded, as the frame is narrow
    inside.locator("#list a").first.click()
    inside.locator("#matrices td[data-at='0,0,0']").click()
    assert inside.locator("#says").text_content() == "X[The,0] = 1, given"
