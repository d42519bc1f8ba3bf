"""What a reader changes on the page: numbers, keys, words, the scale; and the address keeps it."""

import re

import numpy as np
import pytest

from minimha import attention
from minimha.examples import EXAMPLES, sentences
from minimha.explain import Trace
from minimha.explain.page import page
from minimha.explain.trace import token_labels
from minimha.layers import MultiHeadAttention, RoPE
from minimha.layers.norms import layer_norm

FOX = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
CAT = EXAMPLES["the-cat-sat"].trace()
NOW = "T.steps.map((step, n) => [...matrix(n).data].map(String))"
LONG_ENOUGH = 400  # milliseconds after which the address has followed a change
TRIED = -2.25


def fox(**settings):
    return sentences.sentence(FOX, num_heads=4, d_model=8, **settings).trace()


def numbers(values):
    return np.array([float(v.replace("Infinity", "inf").replace("NaN", "nan")) for v in values])


def go(shown, name):
    n = shown.evaluate("name => T.groups.findIndex((group) => group.name === name)", name)
    assert n >= 0
    shown.evaluate("n => go(n)", n)


def reopen(shown):
    """Open the page's address in another tab, once it has followed the changes."""
    shown.wait_for_timeout(LONG_ENOUGH)
    other = shown.context.new_page()
    other.goto(shown.url)
    other.wait_for_selector("body[data-ready]", state="attached")
    return other


def cell(shown, name, i, j, head=0):
    n = shown.evaluate(
        "([name, head]) => T.groups.find((g) => g.name === name).steps[head]", [name, head]
    )
    return f'#matrices td[data-at="{n},{i},{j}"]'


def steps_of(trace):
    return [step for steps in trace.by_name.values() for step in steps]


def drawn(length, *, is_causal=None, is_scaled=None, **settings):
    """A drawn sentence's trace, and another one with other embeddings."""

    def run(x, monkeypatch):
        example = sentences.of_length(length, **settings)
        if x is not None:
            with monkeypatch.context() as patch:
                patch.setattr(sentences, "embeddings", lambda *_: x)
                return example.trace(is_causal, is_scaled)
        return example.trace(is_causal, is_scaled)

    return "x", run


def layer(x, _, **options):
    options = {"num_heads": 4, "num_kv_heads": 2, "gate": "elementwise", **options}
    trace = Trace(labels=token_labels("abc"))
    x = np.linspace(-1, 1, 24).reshape(3, 8) if x is None else x
    MultiHeadAttention(8, rope=RoPE(2), seed=3, **options)(x, is_causal=True, tap=trace)
    return trace


def cross(x, _):
    trace = Trace(labels=token_labels("abc", "de"))
    x, context = np.linspace(-1, 1, 12).reshape(3, 4) if x is None else x, np.eye(2, 4)
    MultiHeadAttention(4, num_heads=2, seed=3)(x, context, tap=trace)
    return trace


def options(q, _):
    random = np.random.default_rng(5)
    own, k, v, bias = (random.normal(size=(4, 3)) for _ in range(4))
    trace = Trace()
    attention(
        own if q is None else q, k, v, window_size=(1, 1), alibi_slopes=[0.5], softcap=2.0,
        sinks=[0.5], attn_bias=bias @ bias.T, return_lse=True, tap=trace,
    )  # fmt: skip
    return trace


def norm(x, _):
    trace, random = Trace(), np.random.default_rng(6)
    gain, bias, *own = random.normal(size=(5, 20))
    layer_norm(trace("x", np.array(own) if x is None else x), gain, bias, 1e-5, trace)
    return trace


EDITED = {
    "one head": drawn(3, num_heads=1),
    "two heads": drawn(5),
    "not causal": drawn(6, is_causal=False),
    "not scaled": drawn(7, is_scaled=False),
    "four heads": drawn(9, num_heads=4, d_model=8),
    "shared keys": drawn(6, num_heads=4, num_kv_heads=2, d_model=8),
    "rotary": drawn(4, d_model=8, rope=True),
    "a layer": ("x", layer),
    "cross": ("x", cross),
    "options": ("q", options),
    "norm": ("x", norm),
}


@pytest.mark.parametrize("name", EDITED)
def test_what_follows_from_an_edited_number_is_what_the_engine_computes(opened, name, monkeypatch):
    step, run = EDITED[name]
    before = run(None, monkeypatch)
    edited = np.array(before[step], dtype=np.float64)
    edited[1, 2] = TRIED
    after = run(edited, monkeypatch)
    shown = opened(page(before, 3))
    go(shown, step)
    shown.click(cell(shown, step, 1, 2))
    shown.fill("#number", str(TRIED))
    followed = 0
    for old, new, found in zip(
        steps_of(before), steps_of(after), shown.evaluate(NOW), strict=True
    ):  # fmt: skip
        np.testing.assert_allclose(
            numbers(found), np.ravel(new.value), rtol=1e-12, atol=1e-12, err_msg=new.title
        )
        followed += not np.array_equal(old.value, new.value, equal_nan=True)
    assert followed >= 4
    assert shown.locator("#matrices td.changed").count() == 1
    assert shown.text_content("#was").startswith("it was ")


def test_what_no_operation_reproduces_says_that_it_does_not_follow(opened):
    shown = opened(page(layer(None, None, qk_norm="head"), 3))  # its norms have an epsilon
    go(shown, "x")
    shown.click(cell(shown, "x", 1, 2))
    shown.fill("#number", "5")
    for name, follows in (("q", True), ("q_normed", False), ("weights", False), ("v", True)):
        go(shown, name)
        assert shown.is_visible("#stale") is not follows


def test_a_number_is_typed_at_its_cell_and_the_keyboard_comes_back(opened):
    shown = opened(page(fox(), 3))
    go(shown, "x")
    shown.click(cell(shown, "x", 3, 2))
    shown.keyboard.type("2,5")  # the first key moves to the field, and the comma is a point
    assert shown.text_content("#value") == "2.500"
    assert shown.input_value("#number") == "2,5"
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.matches('td.here')")
    for typed in ("", "abc", "-"):  # no number: nothing changes
        shown.fill("#number", typed)
        assert shown.text_content("#value") == "2.500"
    shown.fill("#number", "-∞")
    assert shown.text_content("#value") == "-∞"
    shown.fill("#number", "1")  # what it was
    assert shown.text_content("#changed") == ""
    shown.locator("#drag").focus()
    shown.keyboard.press("End")
    assert shown.text_content("#value") == "3"


def test_only_a_given_number_can_be_typed_over(opened):
    shown = opened(page(fox(), 3))
    for name, can_type in (("x", True), ("W_q", True), ("q", False), ("weights", False)):
        go(shown, name)
        assert shown.is_visible("#number") is can_type


def test_a_hidden_key_and_a_shown_one_are_those_of_the_engine(opened):
    q, k, v = np.random.default_rng(1).normal(size=(3, 2, 4, 3))
    trace, other = Trace(), Trace()
    attention(q, k, v, is_causal=True, tap=trace)
    mask = np.tril(np.ones((4, 4), bool))
    mask[3, 1], mask[0, 2] = False, True
    attention(q, k, v, attn_mask=mask, tap=other)
    shown = opened(page(trace, 3))
    for i, j, words in ((3, 1, "Hide “k1” from “q3”"), (0, 2, "Show “k2” to “q0”")):
        shown.click(cell(shown, "weights", i, j))
        assert shown.text_content("#hide") == words
        shown.click("#hide")
    for step, found in zip(steps_of(trace), shown.evaluate(NOW), strict=True):
        [expected] = [s for s in steps_of(other) if s.title == step.title]
        np.testing.assert_allclose(numbers(found), np.ravel(expected.value), rtol=1e-12)
    assert shown.text_content("#changed") == "Changed: 2 cells of the mask"
    shown.click(cell(shown, "weights", 3, 1))
    shown.click("#hide")
    assert shown.text_content("#changed") == "Changed: 1 cell of the mask"


def test_another_word_changes_labels_and_no_number(opened):
    shown = opened(page(fox(), 3))
    before = shown.evaluate(NOW)
    shown.click(cell(shown, "weights", 3, 1))
    shown.click("#names summary")
    shown.fill("#row-word", "<b>wolf</b> & 1=2,3:4#%")
    word = shown.input_value("#row-word")
    assert shown.text_content("#cell") == f"A[{word},quick]"
    assert shown.locator("#queries button").nth(3).text_content() == word
    assert shown.locator("#matrices tbody th").nth(3).text_content() == word
    assert shown.evaluate(NOW) == before
    shown = reopen(shown)
    assert shown.text_content("#cell") == f"A[{word},quick]"
    assert shown.text_content("#changed") == "Changed: 1 word"
    shown.click("#reset")
    assert shown.text_content("#cell") == "A[fox,quick]"


def test_a_link_reproduces_every_change_and_reset_undoes_them_bit_for_bit(opened):
    shown = opened(page(fox(), 3))
    before = shown.evaluate(NOW)
    go(shown, "W_k")
    shown.click("#heads [role=tab]:nth-child(3)")
    shown.click(cell(shown, "W_k", 1, 1, head=2))
    shown.fill("#number", "0.1234567890123")
    shown.fill("#scale", "1.25")
    go(shown, "weights")
    shown.click(cell(shown, "weights", 5, 2, head=2))
    shown.click("#hide")
    after = shown.evaluate(NOW)
    where = {id: shown.text_content(f"#{id}") for id in ("heading", "cell", "value", "changed")}
    assert where["changed"].startswith("Changed: 1 number, scale 1.682 instead of 0.707")
    assert after != before
    shown = reopen(shown)
    assert shown.evaluate(NOW) == after
    assert {id: shown.text_content(f"#{id}") for id in where} == where
    shown.click("#reset")
    assert shown.evaluate(NOW) == before
    assert shown.text_content("#changed") == ""
    shown.wait_for_timeout(LONG_ENOUGH)
    assert re.fullmatch(r"#\d+,5,2", shown.evaluate("location.hash"))


MALFORMED = [
    "#",
    "#,",
    "#-1,0,0",
    "#999,0,0",
    "#1.5,0,0",
    "#9,99,0",
    "#9,0,99",
    "#NaN,1,1",
    "#1e0,0,0",
    "#0x1,0,0",
    "#%",
    "#%E0%A4%A",
    "#=&=",
    "#<script>",
    "#&scale=0",
    "#&scale=1e999",
    "#&scale=-1",
    "#&scale=abc",
    "#&causal=2",
    "#&causal=",
    "#&set=0:0",
    "#&set=0:9999:1",
    "#&set=0:0:x",
    "#&set=0:0:NaN",
    "#&set=999:0:1",
    "#&set=30:0:5",
    "#&set=0::1",
    "#&set=-1:0:1",
    "#&set=0:0.5:1",
    "#&mask=0:0:0:2",
    "#&mask=0:99:0:1",
    "#&mask=7:0:0:1",
    "#&mask=0:0",
    "#&mask=:::",
    "#&word=0:99:a",
    "#&word=9:0:a",
    "#&word=a",
    "#&word=0:0:",
    "#&word=__proto__:length:1",
    "#overviews",
    "#&set=0:0:1&set",
    "#&&&&",
]


def test_a_malformed_address_is_ignored(opened):
    shown = opened(page(fox(), 3))
    first, before = shown.text_content("#cell"), shown.evaluate(NOW)
    shown.evaluate("changes.cells.set('0:1', 7)")  # an address brings its own changes alone
    for address in MALFORMED:
        shown.evaluate("to => (history.replaceState(null, '', to), fromAddress())", address)
        state = [shown.text_content(f"#{id}") for id in ("heading", "cell", "changed")]
        if address != "#&set=0:0:1&set":  # its first half is well-formed
            assert (address, state) == (address, ["weights", first, ""])
    shown.evaluate("(history.replaceState(null, '', '#'), fromAddress())")
    assert shown.evaluate(NOW) == before


def test_an_address_whose_commas_were_encoded_on_the_way_still_leads_there(opened):
    shown = opened(page(fox(), 3))
    address = "#0%2C3%2C2&set=0%3A26%3A-2.25&word=0%3A3%3Aa%252C%20b"
    shown.evaluate("to => (history.replaceState(null, '', to), fromAddress())", address)
    assert shown.text_content("#cell") == "X[a%2C b,2]"
    assert shown.text_content("#value") == "-2.250"


def test_the_browser_goes_back_to_a_changed_page(opened):
    shown = opened(page(fox(), 3))
    go(shown, "x")
    shown.click(cell(shown, "x", 0, 0))
    shown.fill("#number", "9")
    shown.wait_for_timeout(LONG_ENOUGH)
    go(shown, "v")
    shown.click("#reset")
    shown.wait_for_timeout(LONG_ENOUGH)
    shown.go_back()
    assert shown.text_content("#cell") == "X[the,0]"
    assert shown.text_content("#value") == "9"


def test_the_scale_moves_the_scores_that_nothing_divides(opened):
    shown = opened(page(CAT, 3))
    assert shown.text_content("#heading") == "weights"
    shown.fill("#scale", "1")
    assert shown.text_content("#changed") == "Changed: scale 2 instead of 1"
    scores = 2 * (CAT["q"] @ CAT["k"].T) + np.where(np.tri(3), 0, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    found = dict(zip((s.title for s in steps_of(CAT)), shown.evaluate(NOW), strict=True))
    np.testing.assert_allclose(numbers(found["weights"]), weights.ravel(), rtol=1e-12)
    np.testing.assert_allclose(numbers(found["output"]), (weights @ CAT["v"]).ravel(), rtol=1e-12)
    divided = 2 * CAT["scaled[divided]"].ravel()
    np.testing.assert_allclose(numbers(found["scaled[divided]"]), divided, rtol=1e-12)
    assert shown.locator("#matrices td.changed").count() == 5  # not the first row, nor hidden keys


def test_a_hidden_weight_is_a_cross_that_is_read_out(opened):
    shown = opened(page(CAT, 3))
    texts = shown.locator("#matrices td[data-at]").all_text_contents()
    assert texts == ["1.000", "×", "×", "0.269", "0.731", "×", "0.212", "0.212", "0.576"]
    hidden = shown.locator("#matrices td.hidden")
    assert {c.get_attribute("aria-label") for c in hidden.all()} == {"0.000, hidden by the mask"}
    shown.hover(cell(shown, "weights", 0, 2))
    assert shown.text_content("#value") == "×"
    assert shown.text_content("#sentence") == "The mask hides “sat” from “The”."
    go(shown, "masked")
    assert shown.locator("#matrices td.hidden").all_text_contents() == ["-∞"] * 3
    shown.uncheck("#causal")
    assert shown.locator("#matrices td.hidden").count() == 0


def test_lines_are_as_strong_as_the_weights(opened):
    trace = fox()
    shown = opened(page(trace, 3))
    shown.click("#heads [role=tab]:nth-child(2)")
    weights = trace["weights"][1]

    def strengths():
        found = shown.evaluate(
            "[...$('lines').children].map((line) => line.getAttribute('stroke-opacity'))"
        )
        return [float(x) for x in found]

    row, column = shown.text_content("#cell").removeprefix("A[").removesuffix("]").split(",")
    first = strengths()  # of the row that is pointed at
    assert first in [weights[n].tolist() for n, word in enumerate(FOX) if word == row]
    for k in range(9):
        shown.hover(f"#queries button:nth-child({k + 1})")
        assert strengths() == weights[k].tolist()
        shown.hover(f"#keys button:nth-child({k + 1})")
        assert strengths() == weights[:, k].tolist()
    shown.mouse.move(0, 0)
    assert strengths() == first
    shown.focus("#queries button:nth-child(5)")
    shown.keyboard.press("ArrowLeft")
    assert strengths() == weights[3].tolist()
    shown.keyboard.press("Enter")  # a click chooses the row
    assert shown.text_content("#cell") == f"A[fox,{column}]"
    middle = (
        "(line) => (line.getBoundingClientRect().left + line.getBoundingClientRect().right) / 2"
    )
    first, word = (shown.locator(at) for at in ("#lines line:nth-child(4)", "#queries button.here"))
    assert abs(first.evaluate(middle) - word.evaluate(middle)) < 2  # from a word to itself
