"""Bugs that only the sizes of models show: their names, and the sizes from which on they show."""

import numpy as np
import pytest
from thorough import thorough_after

import minimha
from minimha.check.sized import cut, sized

NOT_PAGED = "block_table is not given"  # their k.shape[2] is the size of a page
NOT_PACKED = "cu_seqlens_q is not given"


def dense(q, k, v, **options):
    return minimha.attention(q, k, v, backend="dense", **options)


def is_plain(options):
    """Whether neither pages nor packed sequences are given, whose arrays have other sizes."""
    return not {"block_table", "cu_seqlens_q"} & {*options}


def sink_in_each_split(q, k, v, sinks=None, **options):
    """Splits of 128 keys, each of which counts the sink."""
    if sinks is not None and is_plain(options):
        sinks = sinks + np.float32(np.log(-(-k.shape[2] // 128)))
    return dense(q, k, v, sinks=sinks, **options)


def lse_without_sink_in_splits(q, k, v, return_lse=False, sinks=None, **options):
    output, lse = dense(q, k, v, return_lse=True, sinks=sinks, **options)
    if k.shape[2] > 128 and is_plain(options):
        _, lse = dense(q, k, v, return_lse=True, **options)
    return (output, lse) if return_lse else output


def tail_sees_the_future(q, k, v, is_causal=False, return_lse=False, **options):
    results = dense(q, k, v, is_causal=is_causal, return_lse=True, **options)
    whole = q.shape[2] // 128 * 128
    if is_causal and whole and is_plain(options):
        wrong = dense(q, k, v, return_lse=True, **options)
        for result, other in zip(results, wrong, strict=True):
            result[:, :, whole:] = other[:, :, whole:]
    return results if return_lse else results[0]


def many_keys(q, k, v, scale=None, **options):
    if scale is None and k.shape[2] > 1536:
        scale = 1 / q.shape[3]
    return dense(q, k, v, scale=scale, **options)


def few_queries_of_many_keys(q, k, v, scale=None, **options):
    if scale is None and q.shape[2] <= 16 and k.shape[2] > 1500:
        scale = 1 / q.shape[3]
    return dense(q, k, v, scale=scale, **options)


def many_heads(q, k, v, **options):
    if q.shape[1] > 16:
        k, v = k[:, :1], v[:, :1]
    return dense(q, k, v, **options)


@pytest.mark.parametrize(
    ("kernel", "named", "where"),
    thorough_after(
        1,
        [
            (tail_sees_the_future, "causal_ignored_in_tail", NOT_PAGED),
            (many_heads, "kv_head_0_for_all", "H > 16"),
            (sink_in_each_split, "sink_in_each_part", f"{NOT_PAGED} and {NOT_PACKED}"),
            (lse_without_sink_in_splits, "lse_without_sink", "Lk > 128"),
            (many_keys, "scale_1_over_d", f"Lk > 1536 and {NOT_PAGED}"),
            (few_queries_of_many_keys, "scale_1_over_d", f"Lk > 1025 and Lq < 33 and {NOT_PAGED}"),
        ],
    ),
)
def test_a_bug_of_large_sizes_is_named(kernel, named, where):
    report = minimha.check(kernel)
    assert report.verdict == "wrong"
    assert named in report.deviations, str(report)
    assert report.findings.conditions.get(named, "") == where
    assert report.explains[0] == report.explains[1]


def test_a_problem_is_cut_to_fewer_heads_keys_and_queries():
    problem = next(p for p in sized(0) if p.arguments["q"].shape[1] == 32)
    heads = cut(problem, "H", 17).arguments
    assert heads["q"].shape[1] == heads["k"].shape[1] == 17
    assert np.array_equal(heads["k"][:, 8], problem.arguments["k"][:, 1])  # groups of 8
    keys = cut(problem, "Lk", 40).arguments
    assert keys["k"].shape[2] == keys["v"].shape[2] == 40
