"""What was exported is the same trace again, and what was not is refused."""

import io
import json

import numpy as np
import pytest

from minimha import attention
from minimha.examples import EXAMPLES, blocks, sentences
from minimha.explain import Trace, export, render
from minimha.explain.reading import trace_from

RNG = np.random.default_rng(0)


def batches(**options):
    trace = Trace(blocks=(128, 128))
    q, k, v = (RNG.normal(size=(2, heads, 3, 4)).astype(np.float32) for heads in (4, 2, 2))
    attention(q, k, v, tap=trace, return_lse=True, **options)
    return trace


def one_head_in_a_batch():
    trace = Trace()
    x = RNG.normal(size=(2, 1, 3, 4))
    attention(x, x, x, tap=trace, is_causal=True)
    return trace


TRACES = {name: example.trace() for name, example in EXAMPLES.items()}
TRACES |= {
    "grouped": sentences.of_length(4, num_heads=4, num_kv_heads=2, d_model=8, rope=True).trace(),
    "flash": blocks.of_length(5).trace(),
    "batches": batches(),
    "tiles": batches(backend="tiled"),
    "one head": one_head_in_a_batch(),
}
TRACES["some"] = TRACES["grouped"].selected(["k", "scores", "output"])
TRACES["weights"] = TRACES["grouped"].selected(["weights"])
TRACES["head 0"] = TRACES["grouped"].selected(head=0)
TRACES["head 3"] = TRACES["grouped"].selected(head=3)
TRACES["head 2 of 6"] = sentences.of_length(
    3, num_heads=6, num_kv_heads=3, d_model=12
).trace().selected(head=2)  # fmt: skip
TRACES["weights of head 1"] = TRACES["batches"].selected(["weights", "v", "output"], head=1)
TRACES["some of flash"] = TRACES["flash"].selected(["S"])


def from_json(trace):
    return trace_from(json.loads(export.as_json(trace)))


def from_npz(trace):
    with np.load(io.BytesIO(export.as_npz(trace)), allow_pickle=False) as archive:
        arrays = dict(archive)
    return trace_from(json.loads(str(arrays.pop("trace"))), arrays)


@pytest.mark.parametrize("read", [from_json, from_npz])
@pytest.mark.parametrize("name", TRACES)
def test_the_same_is_shown_again(name, read):
    trace, again = TRACES[name], read(TRACES[name])
    for step, other in zip(trace.steps, again.steps, strict=True):
        assert (step.title, step.formula, step.tex) == (other.title, other.formula, other.tex)
        assert (step.note, step.rows, step.columns) == (other.note, other.rows, other.columns)
        assert step.value.dtype == other.value.dtype or name == "shapes" or "skipped" in step.name
        np.testing.assert_array_equal(step.value, other.value)
    chosen = again.selected(head=trace.head)
    shown = (render.text(t, 3, 80, "blocks").plain for t in (trace, chosen))
    assert next(shown) == next(shown)


def test_one_head_is_computed_from_the_keys_that_it_reads():
    again = from_json(TRACES["head 2 of 6"])
    [scores] = again.by_name["scores"]
    assert [(s.head, s.kv_head) for s in again.origins[scores].operands] == [(2, None), (None, 1)]
    with pytest.raises(ValueError, match="no head 1 here: there is only head 2"):
        _ = again.selected(head=1).steps


WHOLE = json.loads(export.as_json(TRACES["the-cat-sat"]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.pop("labels"), "'labels' is missing"),
        (lambda r: r["steps"][0].pop("value"), "'value' is missing"),
        (lambda r: r["steps"][0].update(value=[[1], [1, 2]]), "inhomogeneous"),
        (lambda r: r["steps"][0].update(value="cat"), "could not convert string"),
        (lambda r: r["steps"][0].update(name="../x"), "'../x' is no name of a step"),
        (lambda r: r["steps"][0].update(shape=[7, 7]), "cannot reshape"),
        (lambda r: r["steps"][8]["printed"][0].update(status="fine"), "not a valid Status"),
        (lambda r: r["steps"][12].update(hidden=[[9, 9]]), "out of bounds"),
        (lambda r: r.update(num_heads="x"), "invalid literal"),
        (lambda r: r.update(steps=3), "not iterable"),
        (lambda r: r.update(blocks=7), "not iterable"),
    ],
)
def test_what_is_no_trace_is_refused(change, sentence):
    record = json.loads(json.dumps(WHOLE))
    change(record)
    with pytest.raises(ValueError, match="it is no trace as minimha exports it: ") as caught:
        trace_from(record)
    assert sentence in str(caught.value)


def test_what_acts_unseen_is_escaped_again():
    record = json.loads(json.dumps(WHOLE))
    record["notes"] = {"x": "a\x1b[2J"}
    record["steps"][4]["printed"] = []
    assert "\x1b" not in render.text(trace_from(record), 3, 80, "blocks").plain
