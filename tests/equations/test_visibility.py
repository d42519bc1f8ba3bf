"""Which query sees which key: masks drawn by hand, ranges compared with brute force."""

import numpy as np
import pytest

from minimha.equations.problem import Problem
from minimha.equations.visibility import UNBOUNDED, key_range, query_range, sees

DRAWN = {
    "causal": ({"is_causal": True}, ["#....", "##...", "###..", "####.", "#####"]),
    "window (1, 0)": ({"window_size": (1, 0)}, ["#....", "##...", ".##..", "..##.", "...##"]),
    "window (1, 1)": ({"window_size": (1, 1)}, ["##...", "###..", ".###.", "..###", "...##"]),
    "window (None, 1)": ({"window_size": (None, 1)}, ["##...", "###..", "####.", "#####", "#####"]),
    "window (0, None)": ({"window_size": (0, None)}, ["#####", ".####", "..###", "...##", "....#"]),
    "causal, window (1, 2)": (
        {"is_causal": True, "window_size": (1, 2)},
        ["#....", "##...", ".##..", "..##.", "...##"],
    ),
    "causal, q_offset -2": (
        {"is_causal": True, "q_offset": -2},
        [".....", ".....", "#....", "##...", "###.."],
    ),
    "causal, q_offset 3": (
        {"is_causal": True, "q_offset": 3},
        ["####.", "#####", "#####", "#####", "#####"],
    ),
    "window (1, 0), q_offset 2": (
        {"window_size": (1, 0), "q_offset": 2},
        [".##..", "..##.", "...##", "....#", "....."],
    ),
    "kv_lengths 2": ({"kv_lengths": 2}, ["##..."] * 5),
    "kv_lengths 2, causal": (
        {"kv_lengths": 2, "is_causal": True},
        ["#....", "##...", "##...", "##...", "##..."],
    ),
    "kv_lengths 0": ({"kv_lengths": 0}, ["....."] * 5),
}


@pytest.mark.parametrize(("options", "drawing"), DRAWN.values(), ids=DRAWN.keys())
def test_the_visible_pairs_are_those_drawn(options, drawing):
    x = np.zeros((5, 1))
    seen = Problem.of(x, x, x, **options).visible(slice(0, 5), slice(0, 5))[0, 0]
    assert ["".join(".#"[int(cell)] for cell in row) for row in seen] == drawing


def test_a_bias_of_minus_infinity_hides_like_a_mask():
    x = np.zeros((2, 1))
    bias = np.array([[0.0, -np.inf], [-np.inf, 5.0]])
    seen = Problem.of(x, x, x, attn_bias=bias).visible(slice(0, 2), slice(0, 2))[0, 0]
    assert seen.tolist() == [[True, False], [False, True]]


def test_a_block_is_that_part_of_the_whole():
    x, rng = np.zeros((1, 2, 9, 1)), np.random.default_rng(0)
    problem = Problem.of(
        x, x, x, window_size=(3, 1), q_offset=1, attn_mask=rng.random((1, 2, 9, 9)) < 0.7
    )
    whole = problem.visible(slice(0, 9), slice(0, 9))
    part = problem.visible(slice(2, 5), slice(4, 9))
    np.testing.assert_array_equal(part, whole[..., 2:5, 4:9])


@pytest.mark.parametrize("q_offset", [-3, 0, 2])
@pytest.mark.parametrize(("left", "right"), [(UNBOUNDED, 0), (2, 1), (0, UNBOUNDED)])
def test_key_range_spans_exactly_the_keys_from_first_to_last_seen(q_offset, left, right):
    for start in range(5):
        for stop in range(start + 1, 6):
            seen = [
                j for j in range(7)
                if any(sees(i, j, q_offset, left, right, 5) for i in range(start, stop))
            ]  # fmt: skip
            first, end = key_range(start, stop, q_offset, left, right, 5)
            assert list(range(first, end)) == seen


@pytest.mark.parametrize("q_offset", [-3, 0, 2])
@pytest.mark.parametrize(("left", "right"), [(UNBOUNDED, 0), (2, 1), (0, UNBOUNDED)])
def test_query_range_spans_exactly_the_queries_that_see_a_key(q_offset, left, right):
    for j in range(8):
        seen = [i for i in range(20) if sees(i, j, q_offset, left, right, 6)]
        start, stop = query_range(j, q_offset, left, right, 6)
        assert list(range(start, min(stop, 20))) == seen
