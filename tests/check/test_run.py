"""Functions that answer without their inputs, or whose last bits vary, and right ones beside."""

import numpy as np
import pytest

import minimha


def attention(q, k, v):
    """Right attention without options, so that few problems are asked."""
    return minimha.attention(q, k, v, backend="dense")


def cached(key):
    answers = {}

    def function(q, k, v):
        found = key(q, k, v)
        if found not in answers:
            answers[found] = attention(q, k, v)
        return answers[found]

    return function


@pytest.mark.parametrize(
    "key",
    [
        lambda q, k, v: (q.shape, k.shape, v.shape),
        lambda q, k, v: (*(x.ctypes.data for x in (q, k, v)), q.shape, k.shape, v.shape),
    ],
    ids=["shape", "address"],
)
def test_an_answer_that_was_kept_is_found(key):
    report = minimha.check(cached(key))
    assert (report.verdict, report.deviations) == ("wrong", ("answer_cached",))


def test_one_number_is_no_attention():
    report = minimha.check(lambda q, k, v: np.zeros((*q.shape[:3], v.shape[3]), np.float32))
    assert report.deviations == ("answer_constant",)


def test_a_function_may_return_its_own_buffer_at_each_call():
    buffers = {}

    def function(q, k, v):
        output = attention(q, k, v)
        buffer = buffers.setdefault(output.shape, np.empty_like(output))
        buffer[...] = output
        return buffer

    assert minimha.check(function).verdict == "right"


def reordered(chooses):
    """Right attention that adds up in another order where ``chooses`` holds."""

    def function(q, k, v):
        order = slice(None, None, -1) if chooses(q) else slice(None)
        return attention(q, k[:, :, order], v[:, :, order])

    return function


def test_bits_that_vary_between_runs_or_batches_differ_and_do_not_fail():
    calls = iter(range(10**6))
    for chooses, name in (
        (lambda q: next(calls) % 2, "runs_differ_bitwise"),
        (lambda q: len(q) > 1, "batches_differ_bitwise"),
    ):
        report = minimha.check(reordered(chooses))
        assert report.verdict == "differs"
        assert name in report.deviations
        assert report.passes()
        assert not report.passes(strict=True)


def test_an_input_that_is_changed_in_place_is_named():
    def function(q, k, v):
        q *= np.float32(0.5)
        return attention(q * 2, k, v)

    assert minimha.check(function).deviations == ("writes_into_inputs",)


def test_weights_from_a_rounded_log_sum_exp_are_right():
    def function(q, k, v):
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        S = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
        m = S.max(-1, keepdims=True)
        return np.exp(S - (m + np.log(np.exp(S - m).sum(-1, keepdims=True)))) @ v

    assert minimha.check(function).verdict == "right"


def test_nan_that_becomes_0_differs():
    def function(q, k, v, is_causal=False, q_offset=0):
        output = minimha.attention(
            q, np.nan_to_num(k), np.nan_to_num(v), is_causal=is_causal, q_offset=q_offset,
            backend="dense",
        )  # fmt: skip
        return np.nan_to_num(output)

    report = minimha.check(function)
    assert (report.verdict, report.deviations) == ("differs", ("nan_becomes_number",))
