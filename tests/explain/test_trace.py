"""A trace keeps what passes, and presents it matrix by matrix."""

import numpy as np
import pytest

from minimha import attention
from minimha.explain import Trace
from minimha.explain.catalogue import CATALOGUE, entry
from minimha.explain.printed import PrintedMatrix
from minimha.explain.trace import token_labels

RNG = np.random.default_rng(0)


def traced(*shapes, **settings):
    options = settings.pop("options", {})
    trace = Trace(**settings)
    attention(*(RNG.normal(size=shape) for shape in shapes), tap=trace, **options)
    return trace


def test_copies_are_read_only_and_independent():
    trace, value = Trace(), np.ones(3)
    assert trace("x", value) is value
    value[0] = 5
    assert trace["x"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        trace["x"][0] = 7


def test_a_trace_follows_one_run():
    trace = traced((2, 3), (2, 3), (2, 3))
    with pytest.raises(ValueError, match="this trace already holds 'q'"):
        attention([[1]], [[1]], [[1]], tap=trace)


def test_a_missing_step_is_named_with_those_that_are_there():
    with pytest.raises(KeyError, match=r"no step 'masked'; this trace holds q, k, v, scores"):
        traced((2, 3), (2, 3), (2, 3))["masked"]


@pytest.mark.parametrize(
    ("shapes", "places"),
    [
        ([(2, 3)] * 3, [(None, None)]),
        ([(1, 2, 3)] * 3, [(None, None)]),
        ([(2, 2, 3)] * 3, [(None, 0), (None, 1)]),
        ([(2, 2, 2, 3)] * 3, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([(2, 1, 2, 3)] * 3, [(0, None), (1, None)]),
    ],
)
def test_one_step_for_each_batch_entry_and_head(shapes, places):
    steps = [step for step in traced(*shapes).steps if step.name == "weights"]
    assert [(step.batch, step.head) for step in steps] == places
    assert all(step.axes == ("Lq", "Lk") and step.value.shape == (2, 2) for step in steps)


def test_slices_are_those_of_the_whole():
    trace = traced((2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 1))
    for step in trace.steps:
        head = step.kv_head if step.name in "kv" else step.head
        np.testing.assert_array_equal(step.value, trace[step.name][step.batch, head])


def test_shared_keys_are_named_by_their_key_value_head():
    steps = traced((4, 2, 3), (2, 2, 3), (2, 2, 3)).steps
    assert [s.place for s in steps if s.name == "k"] == ["key/value head 0", "key/value head 1"]
    assert [s.place for s in steps if s.name == "q"] == [f"head {h}" for h in range(4)]
    assert [s.place for s in traced((4, 2, 3), (1, 2, 3), (1, 2, 3)).steps if s.name == "k"] == [""]


def test_tokens_label_rows_and_columns_and_numbers_do_where_there_are_none():
    trace = traced((2, 3), (4, 3), (4, 3), labels=token_labels(["a", "b"], ["p", "q", "r", "s"]))
    labels = {step.name: (step.rows, step.columns) for step in trace.steps}
    assert labels["scores"] == (("a", "b"), ("p", "q", "r", "s"))
    assert labels["k"] == (("p", "q", "r", "s"), None)
    unnamed = {
        step.name: (step.rows, step.columns) for step in traced((2, 3), (1, 3), (1, 3)).steps
    }
    assert unnamed["scores"] == (("q0", "q1"), ("k0",))


def test_labels_of_another_length_give_way_to_numbers():
    steps = traced((3, 2), (3, 2), (3, 2), labels=token_labels(["a", "b"])).steps
    assert next(step for step in steps if step.name == "weights").rows == ("q0", "q1", "q2")


def test_a_place_is_named_by_batch_entry_and_head():
    steps = traced((2, 2, 2, 3), (2, 2, 2, 3), (2, 2, 2, 3)).steps
    places = [step.place for step in steps if step.name == "weights"]
    assert places == [f"batch {batch}, head {head}" for batch in (0, 1) for head in (0, 1)]


def test_tiles_name_their_shared_keys_too():
    shapes = (4, 2, 3), (2, 2, 3), (2, 2, 3)
    steps = traced(*shapes, options={"backend": "tiled"}, blocks=(128, 128)).steps
    places = [step.place for step in steps if step.base == "K"]
    assert places == ["key/value head 0", "key/value head 1"]


def test_numbers_printed_of_no_head_are_not_shown_at_every_head():
    printed = [PrintedMatrix("weights", ("1 0",), "")]
    steps = traced((2, 1, 3), (2, 2, 3), (2, 2, 3), printed=printed).steps
    assert not any(step.printed for step in steps)


def test_only_takes_names_with_or_without_their_block():
    trace = traced((3, 2), (3, 2), (3, 2), options={"backend": "tiled"}, blocks=(128, 128))
    assert [step.name for step in trace.selected(["S"]).steps] == ["S[i=0,j=0]"]
    chosen = trace.selected(["S[i=0,j=0]", "output"])
    assert [step.name for step in chosen.steps] == ["S[i=0,j=0]", "output"]
    assert list(chosen.arrays) == ["S[i=0,j=0]", "output"]
    chosen = trace.selected(["softmax"])
    with pytest.raises(
        ValueError, match=r"no step 'softmax' here: the steps are Q\[i=…\], K\[i=…,j=…\]"
    ):
        _ = chosen.steps
    assert len(trace.selected([]).steps) == len(trace.steps) > 2


def test_steps_are_made_once_and_again_after_another_one_was_kept():
    trace = Trace()
    trace("a", np.ones(2))
    first = trace.steps
    assert trace.steps is first
    chosen = trace.selected(["a"])
    trace("b", np.ones(2))
    assert [step.name for step in trace.steps] == ["a", "b"]
    assert list(chosen) == ["a"]


def test_a_given_q_is_not_said_to_be_projected():
    steps = {step.name: step.formula for step in traced((2, 3), (2, 3), (2, 3)).steps}
    assert steps["q"] == "Q"


def test_a_tap_of_ones_own_is_shown_too():
    trace = Trace()
    trace("entropy", np.ones((2, 3)))
    [step] = trace.steps
    assert (step.symbol, step.axes) == ("entropy", ("axis 0", "axis 1"))


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_says_something(name):
    known = entry(name)
    assert known.symbol
    assert known.formula
    assert known.tex
    assert known.sentence.endswith(".")
    assert known.tex.count("{") == known.tex.count("}")


def test_the_source_of_a_function_stands_beside_the_scores_that_it_made():
    def score_mod(score, b, h, i, j):
        return score - 0.5 * abs(i - j)

    options = {"score_mod": score_mod, "mask_mod": lambda b, h, i, j: i >= j}
    trace = traced((3, 2), (3, 2), (3, 2), options=options)
    names = list(trace)
    assert names[names.index("scaled") + 1 : names.index("row_max")] == ["modified", "masked"]
    distance = abs(np.arange(3)[:, None] - np.arange(3))
    np.testing.assert_allclose(trace["modified"], trace["scaled"] - 0.5 * distance)
    notes = {step.name: step.note for step in trace.steps}
    assert "return score - 0.5 * abs(i - j)" in notes["modified"]
    assert "lambda b, h, i, j: i >= j" in notes["masked"]
    assert "lambda" not in notes["weights"]
