"""Functions that take packed, paged or described problems, and a kernel in C: right and wrong."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from thorough import thorough_after

import minimha
from minimha.check.translation import Refused, translated
from minimha.dialects import flash_attention

KERNEL = Path(__file__).parents[2] / "walkthroughs" / "kernels" / "in_c"
TOP, BY_LENGTH = "causal_top_left", "causal_by_length"
MEAN, LEAKS = "dead_rows_mean", "nan_leaks"
x = np.arange(24, dtype=np.float32).reshape(2, 1, 3, 4)
QKV = {"q": x, "k": x, "v": x}


def assert_is(report, verdict, *deviations):
    assert (report.verdict, set(report.deviations)) == (verdict, set(deviations)), str(report)


def varlen_of_the_longest(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """As if all sequences of keys were as long as the first."""
    starts = np.minimum(cu_seqlens_k[1] * np.arange(len(cu_seqlens_k)), len(k)).astype(np.int32)
    return flash_attention.flash_attn_varlen_func(q, k, v, cu_seqlens_q, starts, **options)


def paged_in_order(q, k, v, block_table, **options):
    """As if the pages lay in order."""
    table = np.sort(block_table.ravel()).reshape(block_table.shape)
    return flash_attention.flash_attn_with_kvcache(q, k, v, block_table=table, **options)


@pytest.mark.parametrize(
    ("function", "speaks"),
    [
        (flash_attention.flash_attn_varlen_func, "flash_attention_varlen"),
        (flash_attention.flash_attn_with_kvcache, "flash_attention_paged"),
    ],
)
def test_packed_and_paged_functions_are_right_by_their_own_conventions(function, speaks):
    report = minimha.check(function, speaks, arrays="numpy")
    assert_is(report, "right", BY_LENGTH)
    assert not {"kv_lengths", "alibi_slopes", "softcap", "window_size"} & set(report.refused)


@pytest.mark.parametrize(
    ("function", "speaks", "problem"),
    thorough_after(
        1,
        [
            (paged_in_order, "flash_attention_paged", "batch"),
            (varlen_of_the_longest, "flash_attention_varlen", "lengths"),
        ],
    ),
)
def test_packing_and_pages_that_are_misread_are_wrong(function, speaks, problem):
    report = minimha.check(function, speaks, arrays="numpy")
    assert report.verdict == "wrong"
    wrong = {p["name"] for p in report.problems if not (p["is_right"] or p["is_refused"])}
    assert any(problem in name for name in wrong), wrong


def test_sequences_are_packed_by_their_lengths():
    options = {**QKV, "kv_lengths": np.array([3, 1])}
    (q, k, _), words = translated("flash_attention_varlen", options, wants_lse=False)
    assert q.shape == (2, 3, 1, 4)
    np.testing.assert_array_equal(k[0, :, 0], [*x[0, 0], x[1, 0, 0]])
    assert words["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert words["cu_seqlens_k"].tolist() == [0, 3, 4]
    assert (words["max_seqlen_q"], words["max_seqlen_k"]) == (3, 3)


def test_pages_lie_in_another_order_than_their_keys():
    k = np.random.default_rng(0).normal(size=(2, 1, 300, 4)).astype(np.float32)
    (_, pages, _), words = translated(
        "flash_attention_paged", {"q": x, "k": k, "v": k}, wants_lse=False
    )
    assert pages.shape == (4, 256, 1, 4)
    assert words["block_table"].tolist() == [[3, 2], [1, 0]]
    found = pages[words["block_table"]].reshape(2, 512, 1, 4)[:, :300].swapaxes(1, 2)
    np.testing.assert_array_equal(found, k)


@pytest.mark.parametrize("speaks", ["flash_attention_varlen", "flash_attention_paged"])
def test_positions_that_flash_attention_cannot_count_are_refused(speaks):
    options = {"kv_lengths": np.array([3, 1]), "is_causal": True}
    with pytest.raises(Refused, match="counts positions from the last key"):
        translated(speaks, {**QKV, **options}, wants_lse=False)
    words = translated(speaks, {**QKV, **options, "q_offset": np.array([0, -2])}, wants_lse=False)[
        1
    ]
    assert words["causal"] is True


def test_transformers_masks_are_added_numbers():
    lowest = np.finfo(np.float32).min
    words = translated("transformers", {**QKV, "is_causal": True}, wants_lse=False)[1]
    assert words["attention_mask"].shape[-2:] == (3, 3)
    assert words["attention_mask"][0, 0].tolist() == [[0, lowest, lowest], [0, 0, lowest], [0] * 3]
    assert words["scaling"] == 0.5
    half = {name: a.astype(np.float16) for name, a in QKV.items()}
    added = translated("transformers", {**half, "is_causal": True}, wants_lse=False)[1]
    assert added["attention_mask"].min() == np.finfo(np.float16).min
    assert translated("transformers", QKV, wants_lse=False)[1] == {"scaling": 0.5}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch, whose functions are described, is missing")


@pytest.mark.thorough
def test_our_flex_attention_is_right_and_takes_nearly_everything(torch):
    report = minimha.check(minimha.dialects.torch.flex_attention, "flex_attention")
    assert_is(report, "right")
    assert set(report.refused) == {"sinks"}


def test_torchs_flex_attention_is_right_by_its_own_conventions(torch):
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch is too old")
    report = minimha.check(flex.flex_attention, "flex_attention")
    assert_is(report, "right", LEAKS)
    assert set(report.refused) == {"sinks"}


def test_a_flex_attention_that_ignores_block_masks_is_wrong(torch):
    def unmasked(q, k, v, score_mod=None, block_mask=None, **options):
        return minimha.dialects.torch.flex_attention(q, k, v, score_mod, **options)

    report = minimha.check(unmasked, "flex_attention")
    assert report.verdict == "wrong"
    assert {"causal_ignored", "window_ignored", "mask_ignored"} < set(report.deviations)


@pytest.mark.parametrize(
    ("module", "name", "deviations"),
    [
        ("models.llama.modeling_llama", "eager_attention_forward",
         {"softcap_ignored", "sinks_ignored", MEAN, LEAKS}),
        ("integrations.sdpa_attention", "sdpa_attention_forward", {"sinks_ignored", MEAN, LEAKS}),
    ],
)  # fmt: skip
def test_transformers_functions_are_right_by_their_own_conventions(torch, module, name, deviations):
    pytest.importorskip("transformers", reason="transformers, which is described, is missing")
    function = getattr(pytest.importorskip(f"transformers.{module}", reason="it is older"), name)
    assert_is(minimha.check(function, "transformers"), "right", *deviations)


def test_our_function_for_transformers_reads_caps_and_sinks(torch):
    from minimha.dialects.transformers_interface import attention_forward

    report = minimha.check(attention_forward, "transformers")
    assert_is(report, "right", MEAN, LEAKS)
    assert "softcap" not in report.refused


@pytest.mark.parametrize(
    ("line", "mistake", "deviations"),
    thorough_after(
        2,
        [
            ("h / (H / Hkv)", "h / (H / Hkv)", set()),
            ("h / (H / Hkv)", "h % Hkv", {"kv_heads_tiled"}),
            ("o[d] * alpha", "o[d]", {"online_output_not_rescaled"}),
        ],
    ),
)
def test_a_kernel_in_c_is_checked_through_ctypes(tmp_path, line, mistake, deviations):
    if shutil.which("cc") is None:
        pytest.skip("cc, which compiles the kernel, is not installed")
    source = (KERNEL / "attention.c").read_text(encoding="utf-8")
    assert line in source
    (tmp_path / "attention.c").write_text(source.replace(line, mistake), encoding="utf-8")
    shutil.copy(KERNEL / "attention.py", tmp_path)
    command = ["cc", "-O2", "-shared", "-fPIC", "attention.c", "-o", "attention.so", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    report = minimha.check(f"{tmp_path / 'attention.py'}:attention")
    assert_is(report, "wrong" if deviations else "right", *deviations)
