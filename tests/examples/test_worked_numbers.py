"""Every number of the five documents: what they print, what is exact, and what it is called.

The expected values are written out here, to six decimals, independently of the examples' data.
"""

from dataclasses import replace

import numpy as np
import pytest

from minimha import attention
from minimha.examples import DOCUMENTS, EXAMPLES
from minimha.examples.sentences import SENTENCES
from minimha.explain.printed import Status
from minimha.layers.multihead import MultiHeadAttention

inf = float("inf")
E, T, R, W, A = (
    Status.EXACT, Status.TRUNCATED, Status.FROM_ROUNDED, Status.WRONG, Status.ASSUMED
)  # fmt: skip
TRACES = {example.document or name: example.trace() for name, example in EXAMPLES.items()}

# (document, step, head): the exact value
EXACT = {
    ("000", "x", None): [[1, 2, 3, 4]],
    ("000", "q", 0): [[5, 2]],
    ("000", "q", 1): [[5, 5]],
    ("000", "k", 0): [[4, 7]],
    ("000", "k", 1): [[6, 3]],
    ("000", "v", 0): [[4, 11]],
    ("000", "v", 1): [[6, 9]],
    ("000", "scores", 0): [[34]],
    ("000", "scores", 1): [[45]],
    ("000", "scaled", 0): [[24.041631]],
    ("000", "scaled", 1): [[31.819805]],
    ("000", "weights", 0): [[1]],
    ("000", "weights", 1): [[1]],
    ("000", "head_output", 0): [[4, 11]],
    ("000", "head_output", 1): [[6, 9]],
    ("000", "concat", None): [[4, 11, 6, 9]],
    ("000", "concat[assumed]", None): [[0.5, 1.2, -0.4, 2.3]],
    ("000", "output", None): [[10, 20, -2, 2]],
    ("000", "output[assumed]", None): [[0.1, 3.5, 0.9, -1.1]],
    ("001", "head_width", None): 64,
    ("001", "x_shape", None): [2, 10, 512],
    ("001", "output_shape", None): [2, 10, 512],
    ("001", "weights_shape", None): [2, 8, 10, 10],
    ("001", "d_k", None): [64, 64, 64, 64, 128],
    ("003", "q", None): [[1, 0], [0, 1], [1, 1]],
    ("003", "k", None): [[1, 0], [0, 1], [1, 1]],
    ("003", "v", None): [[1, 2], [3, 0], [0, 1]],
    ("003", "scores", None): [[1, 0, 1], [0, 1, 1], [1, 1, 2]],
    ("003", "masked", None): [[1, -inf, -inf], [0, 1, -inf], [1, 1, 2]],
    ("003", "weights", None): [
        [1, 0, 0], [0.268941, 0.731059, 0], [0.211942, 0.211942, 0.576117]
    ],
    ("003", "output", None): [[1, 2], [2.462117, 0.537883], [0.847766, 1.0]],
    ("003", "weights[divided]", None): [
        [1, 0, 0], [0.330238, 0.669762, 0], [0.248255, 0.248255, 0.503490]
    ],
    ("003", "output[divided]", None): [[1, 2], [2.339523, 0.660477], [0.993020, 1.0]],
    ("004", "scores", None): [[1, 1, 0], [0, 1, 1], [1, 2, 1]],
    ("004", "sqrt_d_k", None): 1.414214,
    ("004", "scaled", None): [
        [0.707107, 0.707107, 0], [0, 0.707107, 0.707107], [0.707107, 1.414214, 0.707107]
    ],
    ("004", "weights", None): [
        [0.401112, 0.401112, 0.197776], [0.197776, 0.401112, 0.401112],
        [0.248255, 0.503490, 0.248255],
    ],
    ("004", "output", None): [[0.994440, 1.0], [1.401112, 1.203336], [0.993020, 1.255235]],
    ("004", "cosine", None): [[1, 0.707107, 0], [0, 0.707107, 1], [0.707107, 1, 0.707107]],
}  # fmt: skip

# (document, step, head, a part of where it is printed): the printed numbers and their statuses
PRINTED = {
    ("000", "head_output", 0, "Head 1"): ([0.5, 1.2], [A, A]),
    ("000", "head_output", 1, "Head 2"): ([-0.4, 2.3], [A, A]),
    ("000", "concat", None, "Concatenate"): ([0.5, 1.2, -0.4, 2.3], [A] * 4),
    ("001", "head_width", None, "Step-by-Step"): ([64], [E]),
    ("001", "output_shape", None, "PyTorch"): ([2, 10, 512], [E] * 3),
    ("001", "weights_shape", None, "PyTorch"): ([2, 8, 10, 10], [E] * 4),
    ("001", "d_k", None, "Typical"): ([64, 64, 64, 64, 128], [E] * 5),
    ("001", "illustration", None, "Visualization"): (
        [0.2, 0.8, 0.1, 0.5, 0.3, 0.2, 0.0, 0.9], [Status.ILLUSTRATIVE] * 8
    ),
    ("003", "v", None, "Input"): ([1, 2, 3, 0, 0, 1], [E, W, W, W, W, E]),
    ("003", "scores", None, "Step 1"): ([1, 0, 1, 0, 1, 1, 1, 1, 2], [E] * 9),
    ("003", "masked", None, "Step 2"): ([1, -inf, -inf, 0, 1, -inf, 1, 1, 2], [E] * 9),
    ("003", "weights", None, "Step 3"): (
        [1, 0, 0, 0.268, 0.731, 0, 0.211, 0.211, 0.576], [E, E, E, T, E, E, T, T, E]
    ),
    ("004", "scores", None, "toy"): ([1, 1, 0, 0, 1, 1, 1, 2, 1], [E] * 9),
    ("004", "scores", None, "Setup"): ([1, 1, 0, 0, 1, 1, 1, 2, 1], [E] * 9),
    ("004", "sqrt_d_k", None, "toy"): ([1.4142], [E]),
    ("004", "sqrt_d_k", None, "Setup"): ([1.414], [E]),
    ("004", "scaled", None, "toy"): (
        [0.7071, 0.7071, 0, 0, 0.7071, 0.7071, 0.7071, 1.4142, 0.7071], [E] * 9
    ),
    ("004", "scaled", None, "Setup"): (
        [0.71, 0.71, 0, 0, 0.71, 0.71, 0.71, 1.41, 0.71], [E] * 9
    ),
    ("004", "weights", None, "toy"): (
        [0.4011, 0.4011, 0.1978, 0.1978, 0.4011, 0.4011, 0.2483, 0.5035, 0.2483], [E] * 9
    ),
    ("004", "weights", None, "Setup"): (
        [0.401, 0.401, 0.198, 0.198, 0.401, 0.401, 0.248, 0.503, 0.248], [E] * 9
    ),
    ("004", "output", None, "Setup"): (
        [0.995, 1.198, 1.401, 1.604, 1.997, 2.005], [R, W, E, W, W, W]
    ),
}  # fmt: skip


def step(document, name, head):
    return next(s for s in TRACES[document].steps if (s.name, s.head) == (name, head))


@pytest.mark.parametrize(("row", "value"), EXACT.items(), ids=map(str, EXACT))
def test_exact_values(row, value):
    np.testing.assert_allclose(step(*row).value, value, rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(("row", "expected"), PRINTED.items(), ids=map(str, PRINTED))
def test_printed_values_and_their_statuses(row, expected):
    *where, source = row
    found = [c for c in step(*where).printed if source in c.source]
    assert [c.value for c in found] == expected[0]
    assert [c.status for c in found] == expected[1]


def test_no_printed_number_is_left_out_of_this_list():
    listed = {(document, name, head): 0 for document, name, head, _ in PRINTED}
    for (document, name, head, _), (values, _) in PRINTED.items():
        listed[document, name, head] += len(values)
    shown = {
        (document, s.name, s.head): len(s.printed)
        for document, trace in TRACES.items() for s in trace.steps if s.printed
    }  # fmt: skip
    assert shown == listed


def wrong_statuses(example):
    """The printed numbers whose stated status is not what the numbers themselves say."""
    comparisons = (c for s in example.trace().steps for c in s.printed)
    return [c.sentence for c in comparisons if c.status is not c.computed]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_every_status_is_what_the_numbers_say(example):
    assert wrong_statuses(example) == []


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_wrongly_given_status_fails(example):
    """Each printed matrix in turn gets each other status for its first number."""
    for n, matrix in enumerate(example.printed):
        [step] = [
            s for s in example.trace().steps if (s.name, s.head) == (matrix.step, matrix.head)
        ]
        first = matrix.compare(step.value)[0]
        for status in set(Status) - {first.status}:
            mistaken = replace(matrix, but={**matrix.but, first.index: status})
            printed = (*example.printed[:n], mistaken, *example.printed[n + 1 :])
            assert len(wrong_statuses(replace(example, printed=printed))) == 1


def test_wrong_outputs_follow_from_neither_printed_matrix_of_weights():
    example, trace = EXAMPLES["given-qkv"], TRACES["004"]
    printed = next(p for p in example.printed if p.step == "output")
    for weights in (p.values for p in example.printed if p.step == "weights"):
        for comparison in replace(printed, rounded=weights @ trace["v"]).compare(trace["output"]):
            assert comparison.computed is W or comparison.status is not W


def test_an_average_of_values_stays_between_them():
    """Why 004's last output cannot be right, whatever the weights are."""
    assert TRACES["004"]["v"][:, 1].max() == 2 < 2.005


def test_000_one_token_attends_to_itself_whatever_the_scale():
    unscaled = EXAMPLES["two-heads"].trace(is_scaled=False)
    np.testing.assert_array_equal(unscaled["head_output"], TRACES["000"]["v"])


def test_001_a_mask_entry_of_zero_is_blocked_and_any_other_may_be_attended():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 3)), rng.integers(0, 3, (4, 4)) + np.eye(4, dtype=int)
    scores = np.where(mask == 0, -inf, x @ x.T / np.sqrt(3))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(attention(x, x, x, attn_mask=mask != 0), weights @ x)


def test_001_every_configuration_satisfies_d_model_is_heads_times_d_k():
    trace = TRACES["001"]
    assert (trace["d_model"] == trace["num_heads"] * trace["d_k"]).all()
    assert trace["d_model"].tolist() == [768, 1024, 768, 1280, 12288]
    assert trace["num_heads"].tolist() == [12, 16, 12, 20, 96]


def test_002_prints_no_numbers_and_names_its_relations():
    assert EXAMPLES["bank-drawn"].sentence == "The bank approved the loan yesterday"
    assert not any(s.printed for s in TRACES["002"].steps)
    assert "bank ↔ loan, approved ↔ bank, yesterday ↔ approved" in step("002", "weights", 0).note


def test_003_eight_query_heads_share_two_key_value_heads():
    rng = np.random.default_rng(0)
    x, W_q = TRACES["003"]["x"], rng.normal(size=(8, 2, 2))
    W_k, W_v = rng.normal(size=(2, 2, 2, 2))
    shared = MultiHeadAttention.from_heads(W_q, W_k, W_v, np.eye(16))(x)
    own = (np.stack([W[0]] * 4 + [W[1]] * 4) for W in (W_k, W_v))
    np.testing.assert_allclose(shared, MultiHeadAttention.from_heads(W_q, *own, np.eye(16))(x))


def test_004_512_wide_in_eight_heads_of_64_is_512_wide_again():
    rng = np.random.default_rng(0)
    x, W = rng.normal(size=(5, 512)), rng.normal(size=(3, 8, 512, 64)) / 23
    steps = {}
    MultiHeadAttention.from_heads(*W, np.eye(512))(x, tap=lambda n, v: steps.setdefault(n, v))
    shapes = [steps[name].shape for name in ("x", "q", "concat", "output")]
    assert shapes == [(5, 512), (1, 8, 5, 64), (5, 512), (5, 512)]


def test_a_document_s_number_is_that_of_its_example():
    numbers = {example.document: name for name, example in EXAMPLES.items() if example.document}
    assert numbers == DOCUMENTS
    assert all(example.name == name for name, example in EXAMPLES.items())


def test_the_documents_have_a_sentence_of_every_length():
    assert list(SENTENCES) == list(range(1, 13))
    assert all(len(words.split()) == n for n, (words, _) in SENTENCES.items())


def test_numbers_are_not_compared_once_the_example_is_changed():
    changed = EXAMPLES["the-cat-sat"].trace(is_scaled=True)
    assert not any(s.printed for s in changed.steps)
    assert "changed" in changed.example
    np.testing.assert_array_equal(changed["output"], TRACES["003"]["output[divided]"])
    np.testing.assert_array_equal(
        EXAMPLES["the-cat-sat"].trace(is_causal=True, is_scaled=False)["output"],
        TRACES["003"]["output"],
    )


def test_an_example_without_these_settings_refuses_them():
    with pytest.raises(
        ValueError, match=r"example shapes \(document 001\) has neither a causal mask nor scaling"
    ):
        EXAMPLES["shapes"].trace(is_causal=True)
