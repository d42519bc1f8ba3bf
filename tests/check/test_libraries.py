"""Other libraries and our own kernels, described truly; each where it is installed."""

import json
import os
from functools import partial
from itertools import cycle

import numpy as np
import pytest
from check import conventions, libraries
from problems import run

import minimha
from minimha import attention
from minimha.kernels.ladder import LADDER

TOP_LEFT, MEAN, LEAKS = "causal_top_left", "dead_rows_mean", "nan_leaks"
READ_16_BITS = ("dense", *list(LADDER)[3:])  # other rungs get widened arrays


@pytest.fixture
def module():
    """A library, if it is installed."""

    def module(name):
        return pytest.importorskip(name, reason=f"{name}, which is described, is not installed")

    return module


@pytest.fixture
def keras(module, monkeypatch):
    module("torch")
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    return module("keras")


def assert_is(report, verdict, *deviations):
    assert (report.verdict, set(report.deviations)) == (verdict, set(deviations)), str(report)
    assert report.explains[0] == report.explains[1]
    assert report.explains[1] > 30


def test_torch_sdpa_is_right_by_its_own_conventions(module):
    sdpa = module("torch").nn.functional.scaled_dot_product_attention
    report = minimha.check(sdpa, "torch")
    assert_is(report, "right", TOP_LEFT, LEAKS)
    assert "causal is aligned top-left, as torch does" in report.sentences[0]
    assert {"sinks", "softcap", "window_size"} < set(report.refused)


def test_torch_multi_head_attention_hides_where_the_mask_is_true(module):
    module("torch")
    report = minimha.check(libraries.torch_multi_head_attention)
    assert_is(report, "wrong", "mask_inverted")


def test_flex_attention_is_right_but_for_hidden_nan(module):
    module("torch.nn.attention.flex_attention")
    assert_is(minimha.check(libraries.flex_attention), "differs", LEAKS)


def test_keras_is_right_by_its_own_conventions(keras):
    report = minimha.check(keras.ops.dot_product_attention, "keras")
    assert_is(report, "right", TOP_LEFT, MEAN, LEAKS)
    assert "softcap" in report.refused


@pytest.mark.parametrize(
    "layer", [libraries.keras_multi_head_attention, libraries.keras_grouped_query_attention]
)
def test_keras_layers_are_as_its_function(keras, layer):
    assert_is(minimha.check(layer), "wrong", TOP_LEFT, MEAN, LEAKS)


def test_jax_is_right_by_its_own_conventions(module):
    report = minimha.check(module("jax").nn.dot_product_attention, "jax")
    assert (report.verdict, set(report.deviations)) == ("right", {TOP_LEFT, MEAN, LEAKS})


def test_onnxruntimes_attention_ignores_causality_for_one_query(module):
    """With a past of 7 keys, the standard hides the new keys that follow a single query."""
    module("onnxruntime")
    report = minimha.check(libraries.onnxruntime_attention, "onnx")
    wrong = [r.problem for r in report.findings.results if not (r.is_right or r.only_differs)]
    wrong = [p.arguments for p in wrong if p.name in answered(report)]
    assert wrong
    assert all(given["is_causal"] and given["q"].shape[2] == 1 for given in wrong)


def answered(report):
    return {r.problem.name for r in report.findings.results if not r.is_refused}


def test_onnxruntimes_multi_head_attention_shows_its_last_query_every_key(module):
    """Its ``unidirectional`` is aligned top-left, but for the last query: no deviation is that."""
    module("onnxruntime")
    report = minimha.check(libraries.onnxruntime_multi_head_attention)
    assert report.verdict == "wrong"
    assert report.deviations == ()
    problems = {problem["name"]: problem["is_right"] for problem in report.problems}
    assert problems["causal"]
    assert problems["decoding"]
    assert not problems["causal, amid the keys"]


def test_onnxruntimes_grouped_query_attention_is_right_in_what_it_takes(module):
    module("onnxruntime")
    report = minimha.check(libraries.onnxruntime_grouped_query_attention)
    assert (report.verdict, report.deviations) == ("right", ())


def test_transformers_gives_a_mean_where_nothing_is_seen(module):
    module("torch")
    module("transformers")
    assert_is(minimha.check(libraries.transformers_eager), "differs", MEAN, LEAKS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("dense", "tiled", *LADDER)),
        *zip(READ_16_BITS, cycle(("float16", "bfloat16"))),
    ],
)
def test_our_equations_and_rungs_are_right_in_everything(name, dtype):
    def function(q, k, v, return_lse=False, **options):
        output, lse = run(name, q, k, v, **options)
        return output.astype(q.dtype), lse

    report = minimha.check(function, dtype=dtype)
    assert_is(report, "right")
    assert not report.refused


@pytest.mark.thorough
def test_our_backend_for_the_cpu_is_right_in_everything():
    report = minimha.check(partial(attention, backend="cpu"))
    assert_is(report, "right")
    assert not report.refused


def test_the_table_of_conventions_has_a_row_for_each_installed_function(capsys, tmp_path):
    path = tmp_path / "reports.json"
    conventions.main(["--only", "minimha", "--json", str(path), "--seed", "0"])
    row = "| minimha: attention | any offset | visible | 0 | ignored |  | right |"
    assert row in capsys.readouterr().out
    (record,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert (record["verdict"], record["seed"]) == ("right", 0)


def test_a_row_shows_the_conventions_of_a_function_with_another_mask():
    def function(q, k, v, attn_mask=None):
        O = attention(q, k, v, attn_mask=None if attn_mask is None else ~attn_mask)
        return np.where((O == 0).all(-1, keepdims=True), v.mean(2, keepdims=True), O)

    other = conventions.negated(function)
    row = conventions.Row("ours", "attention", lambda: function)
    cells = conventions.cells(row, minimha.check(function), minimha.check(other))
    assert cells[1:5] == ["–", "hidden", "mean", "ignored"]
    assert cells[-1] == "right"
