"""Rounding errors stay within their bounds; what exceeds them is named."""

import re

import ml_dtypes
import numpy as np
import pytest
from check.errors import KERNELS, largest_shares, shares

import minimha
from minimha import assert_close, attention, error_bound
from minimha.check.prepared import Prepared
from minimha.check.wrong_attention import deviate

LARGEST_MEDIAN = 30


def problem(dtype=np.float32, Lk=40, D=16):
    rng = np.random.default_rng(3)
    return [rng.normal(size=(2, H, L, D)).astype(dtype) for H, L in ((4, 9), (2, Lk), (2, Lk))]


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_exceeds_the_bounds_and_none_is_far_below(name):
    library = name.split()[0]
    if library in ("torch", "onnxruntime"):
        pytest.importorskip(library, reason=f"{library}, whose errors are bounded, is missing")
    found = largest_shares([name], 7, range(60))
    assert len(found) == (1 if name == "onnxruntime" else 3)
    for dtype, _ in found:
        number, output, lse = np.array(found[dtype, name]).T
        assert output.max() <= 1, number[output.argmax()]
        assert np.median(output) >= 1 / LARGEST_MEDIAN
        if name in ("dense", "tiled", "cpu"):
            assert lse.max() <= 1, number[lse.argmax()]
            assert np.median(lse) >= 1 / LARGEST_MEDIAN


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_check_allows_all_that_the_bounds_allow(dtype):
    q, k, v = problem()
    narrow = [x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for x in (q, k, v)]
    wide = dict(zip("qkv", (x.astype(np.float32) for x in narrow), strict=True))
    checked = deviate(Prepared({**wide, "is_causal": True, "q_offset": 31}, dtype), {})
    output, lse = error_bound(*narrow, is_causal=True, q_offset=31)
    assert (output <= checked.bound).all()
    assert (lse <= checked.lse_bound).all()


def test_rounded_weights_are_within_the_bound_and_rounded_scores_beyond():
    q, k, v = (x.astype(np.float64) for x in problem(ml_dtypes.bfloat16))

    def narrow(x):
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    k, v = k.repeat(2, 1), v.repeat(2, 1)
    S = 2 * (q @ k.swapaxes(-1, -2))
    bound, _ = error_bound(q, k, v, scale=2, dtype="bfloat16")
    expected = attention(q, k, v, scale=2)

    def share(S, rounds):
        P = np.exp(S - S.max(-1, keepdims=True))
        return shares(narrow(rounds(P) @ v / P.sum(-1, keepdims=True)), expected, bound).max()

    assert share(S, narrow) <= 1
    assert share(narrow(S), narrow) > 1


def test_the_bounds_have_the_shapes_of_the_results():
    q, k, v = (x[0] for x in problem())
    for given in ((q, k, v), (q[0], k[0], v[0])):
        results = attention(*given, return_lse=True)
        for bound, result in zip(error_bound(*given), results, strict=True):
            assert bound.shape == result.shape
            assert bound.dtype == np.float64


def test_assert_close_takes_a_right_output_in_its_own_dtype():
    q, k, v = problem()
    mask = np.ones((9, 40), bool)
    mask[4] = False
    options = {"is_causal": True, "q_offset": 0, "attn_mask": mask}
    output, lse = attention(q, k, v, **options, return_lse=True)
    assert_close(output, q, k, v, **options, lse=lse)
    narrow = [x.astype(np.float16) for x in (q, k, v)]
    rounded = attention(*narrow, **options)
    assert_close(rounded, *narrow, **options)
    assert_close(rounded, q, k, v, **options)
    with pytest.raises(AssertionError, match="numbers of the output exceed the bound"):
        assert_close(rounded, q, k, v, **options, dtype="float32")


def test_assert_close_names_the_worst_number():
    q, k, v = problem()
    output, lse = attention(q, k, v, return_lse=True)
    output[1, 2, 3, 4] += 0.5
    output[0, 0, 0, 0] += 0.01
    sentence = (
        r"2 of 1152 numbers of the output exceed the bound; the worst is at index "
        rf"\(1, 2, 3, 4\): got {output[1, 2, 3, 4]:.6g}, expected \S+ within \d\S+$"
    )
    with pytest.raises(AssertionError, match=sentence):
        assert_close(output, q, k, v)
    output = attention(q, k, v)
    lse[1, 0, 2] = np.nan
    with pytest.raises(AssertionError, match=r"^1 of 72 numbers of the log-sum-exp .*got nan"):
        assert_close(output, q, k, v, lse=lse)
    with pytest.raises(AssertionError, match=re.escape("has shape (2, 4, 9): expected (2, 4, 9, ")):
        assert_close(lse, q, k, v)


def test_a_visible_nan_must_be_nan_and_a_hidden_one_must_not():
    q, k, v = problem()
    v[1, 1, 7] = np.nan
    expected = attention(q, k, v, kv_lengths=[40, 30])
    assert np.isnan(expected).any()
    assert_close(expected, q, k, v, kv_lengths=[40, 30])
    assert_close(attention(q, k, v, kv_lengths=5), q, k, v, kv_lengths=5)
    with pytest.raises(AssertionError, match=f"^{np.isnan(expected).sum()} of 1152 .*expected nan"):
        assert_close(np.nan_to_num(expected), q, k, v, kv_lengths=[40, 30])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dtype": "float64"}, "dtype is 'float64': expected one of 'float32', 'float16'"),
        ({"score_mod": abs}, "an option is 'score_mod': expected one of 'is_causal', 'q_offset'"),
        ({"is_causal": True}, "q_offset"),
    ],
)
def test_what_has_no_bounds_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        error_bound(*problem(), **given)


def test_tensors_of_torch_are_taken():
    torch = pytest.importorskip("torch", reason="torch, whose tensors are taken, is missing")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in problem())
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    minimha.assert_close(output, q, k, v)
