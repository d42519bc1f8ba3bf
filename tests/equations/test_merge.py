"""merge(): any split of the keys, with every option, gives the whole back."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import assert_as_good_as_plain, naive_merge, random_problems

from minimha import attention, merge

PER_SCORE = ("attn_mask", "attn_bias")


def of_keys(options, start, stop, Lk):
    """The options for the keys from ``start`` to ``stop`` alone, as a caller would write them."""
    part = options | {"q_offset": np.asarray(options["q_offset"]) - start}
    if options["kv_lengths"] is not None:
        part["kv_lengths"] = np.clip(options["kv_lengths"] - start, 0, stop - start)
    for name in PER_SCORE:
        if options[name] is not None and options[name].shape[-1] == Lk:
            part[name] = options[name][..., start:stop]
    if options["key_indices"] is not None:
        picks = options["key_indices"]
        part["key_indices"] = np.where((picks >= start) & (picks < stop), picks - start, -1)
    if start > 0:
        part["sinks"] = None
    return part


def split(problem, cuts):
    q, k, v, options = problem
    Lk = k.shape[2]
    edges = [0, *sorted(min(cut, Lk) for cut in cuts), Lk]
    spans = list(dict.fromkeys(pairwise(edges)))
    firsts = [span for span in spans if span[0] == 0][-1:]  # the sinks' part, and once alone
    spans = firsts + [span for span in spans if span[0] > 0]
    return [
        attention(
            q, k[:, :, a:b], v[:, :, a:b], return_lse=True, **of_keys(options, a, b, Lk)
        )
        for a, b in spans
    ]  # fmt: skip


def assert_whole(problem, merged):
    """O and L of a problem of at most nine keys, which was cut into parts, some of no key."""
    assert_as_good_as_plain(*problem, *merged, merges=20)


@given(
    problem=random_problems(np.float64, has_functions=False),
    cuts=st.lists(st.integers(0, 9), max_size=4),
)
def test_keys_split_at_any_points_give_the_whole_back(problem, cuts):
    assert_whole(problem, merge(split(problem, cuts)))


@given(
    problem=random_problems(np.float64, has_functions=False),
    cuts=st.lists(st.integers(1, 8), min_size=3),
)
def test_merging_is_associative_and_the_order_does_not_matter(problem, cuts):
    first, *rest = split(problem, cuts)
    from_the_left = first
    for part in rest:
        from_the_left = merge([from_the_left, part])
    assert_whole(problem, from_the_left)
    assert_whole(problem, merge([merge(rest[::-1]), first] if rest else [first]))


def test_it_agrees_with_the_oracle_on_parts_of_any_kind():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4), scale=9)) for _ in "abc"]
    parts[1][1][0], parts[1][0][0] = -np.inf, 0
    for found, expected in zip(merge(parts), naive_merge(parts), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)


def test_a_query_that_sees_no_key_in_any_part_gets_0_and_minus_infinity():
    nothing = np.zeros((2, 3)), np.full(2, -np.inf)
    output, lse = merge([nothing, nothing])
    np.testing.assert_array_equal(output, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a_part_that_sees_no_key_brings_no_nan():
    seen = np.full((1, 1), 3.0), np.zeros(1)
    nothing = np.full((1, 1), np.nan), np.full(1, -np.inf)
    np.testing.assert_array_equal(merge([nothing, seen])[0], 3)


def test_a_nan_that_was_seen_stays():
    good, bad = (np.ones((1, 1)), np.zeros(1)), (np.ones((1, 1)), np.full(1, np.nan))
    assert all(np.isnan(x).all() for x in merge([good, bad]))


def test_huge_log_sum_exps_neither_overflow_nor_lose_the_smaller_part():
    O, L = merge([(np.array([[2.0]]), np.array([1e300])), (np.array([[4.0]]), np.array([1e300]))])
    assert (O.item(), L.item()) == (3, 1e300)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_come_out_as_they_came(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    part = np.ones((2, 3), dtype), np.zeros(2, np.float32)
    output, lse = merge([part, part])
    assert (output.dtype, lse.dtype) == (dtype, np.float32)


def test_what_is_computed_in_between_is_float64():
    step = np.finfo(np.float32).eps / 2
    parts = [(np.full((1, 1), x, np.float32), np.zeros(1, np.float32)) for x in (1, *[step] * 8)]
    assert merge(parts)[0] == np.float32((1 + 8 * step) / 9)


def test_results_are_of_the_library_of_the_first_output():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    part = torch.ones(2, 3), torch.zeros(2)
    assert all(isinstance(x, torch.Tensor) for x in merge([part, part]))


ONE = np.ones((2, 3)), np.ones(2)


@pytest.mark.parametrize(
    ("parts", "error", "sentence"),
    [
        ([], ValueError, r"parts is empty: expected at least one pair \(output, lse\)"),
        ([ONE[0]], TypeError, r"parts\[0\] is of type ndarray: expected a pair \(output, lse\)"),
        ([ONE, (*ONE, 1)], TypeError, r"parts\[1\] is of type tuple: expected a pair"),
        ([(ONE[0], ONE[0])], ValueError, r"parts\[0\] has an output of shape \(2, 3\) and an lse"),
        ([ONE, (np.ones((2, 4)), ONE[1])], ValueError, r"parts\[1\] has an output of shape \(2, 4"),
        ([ONE, (ONE[0].astype(complex), ONE[1])], TypeError, r"the output of parts\[1\] has dtype"),
        ([("ab", "c")], TypeError, r"the output of parts\[0\] has dtype <U2: expected"),
    ],
)
def test_bad_parts_get_a_sentence(parts, error, sentence):
    with pytest.raises(error, match=sentence):
        merge(parts)
