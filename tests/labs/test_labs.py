"""The experiments: numbers against plain arithmetic, conclusions that follow from their rows."""

import builtins
import math
from importlib.util import find_spec

import numpy as np
import pytest

from minimha import labs
from minimha.equations import tiled
from minimha.equations.problem import Problem
from minimha.labs import (
    masking,
    memory,
    parallel,
    pytorch,
    removed,
    rope,
    scale,
    similarity,
    temperature,
    two_patterns,
)

NAMES = [name for name in labs.EXPERIMENTS if name != "pytorch" or find_spec("torch")]


@pytest.fixture
def short(monkeypatch):
    """Nothing is timed at lengths that take long, and the shipped model is asked little."""
    monkeypatch.setattr(memory, "TIMED_LENGTHS", (8, 16))
    monkeypatch.setattr(removed, "NUM_QUESTIONS", 1)
    monkeypatch.setattr(parallel, "LENGTH", 8)


@pytest.fixture
def shorter(short, monkeypatch):
    """What heads answer is drawn, but not so often that their shares are near the expected ones."""
    monkeypatch.setattr(two_patterns, "NUM_SEQUENCES", 16)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_tables_figures_and_one_sentence(shorter, name):
    result = labs.run(name, 3)
    assert (result.name, result.seed) == (name, 3)
    assert result.figures
    assert result.conclusion.endswith(".")
    assert "\n" not in result.conclusion
    for table in result.tables:
        assert all(isinstance(x, str) for row in table.written() for x in row.values())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("memory", "parallel")])
def test_a_seed_repeats_what_is_drawn_and_another_one_changes_it(shorter, name):
    first, again, other = (labs.run(name, seed) for seed in (5, 5, 6))
    assert str([table.rows for table in first.tables]) == str([t.rows for t in again.tables])
    if name != "masking":  # whose verdicts do not depend on what is drawn
        assert first.tables[0].rows != other.tables[0].rows


def test_progress_has_the_announced_number_of_steps(shorter, monkeypatch):
    monkeypatch.setattr(memory, "TIMED_LENGTHS", (8, 8, 8, 8))  # four, as without the fixture
    for name in NAMES:
        steps = []
        labs.run(name, 1, steps.append)
        assert len(steps) == labs.EXPERIMENTS[name].steps


@pytest.mark.parametrize(
    ("name", "seed", "words"),
    [
        ("scales", 1, "no experiment 'scales' (did you mean scale?): there are scale, similarity"),
        ("x", 1, "no experiment 'x': there are scale"),
        ("scale", -1, "seed is -1: expected an integer of at least 0"),
        ("scale", 1.5, "seed is 1.5: expected an integer"),
        ("scale", True, "seed is True: expected an integer"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(name, seed, words):
    with pytest.raises((ValueError, TypeError)) as error:
        labs.run(name, seed)
    assert words in str(error.value)


# scale


def test_the_spread_grows_as_the_root_of_the_width_and_scaled_weights_stay():
    rows = [scale.Row(*row) for row in labs.run("scale").tables[0].rows]
    for row in rows:
        # The variance of q·k is D; 4096 products, of which 16 share a query, estimate it.
        assert row.std == pytest.approx(math.sqrt(row.D), rel=0.15)
        assert 1 / 16 < row.scaled_largest < 0.3
        assert row.entropy <= row.scaled_entropy < 4
    assert [row.slope for row in rows] == sorted((row.slope for row in rows), reverse=True)


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        ([0.0] * 16, (1 / 16, 4, 15 / 16)),
        ([1e4] + [0.0] * 15, (1, 0, 0)),
        ([0.0] * 2, (0.5, 1, 0.5)),
    ],
)
def test_largest_weight_entropy_and_slope_of_rows_known_by_heart(scores, found):
    assert scale._weights(np.array([scores])) == pytest.approx(found)


def test_scales_conclusion_says_what_its_rows_say_even_against_expectation():
    rows = (
        scale.Row(4, 8.0, 2.0, 0, 0, 0.1, 0, 0, 0.9),
        scale.Row(16, 4.0, 4.0, 0, 0, 0.4, 0, 0, 0.2),
    )
    assert scale.conclude(rows) == (
        "From D = 4 to 16 the standard deviation of q·k is multiplied by 0.5, and √D by 2; the "
        "softmax's slope rises from 0.10 to 0.40 without the division and falls from 0.90 to 0.20 "
        "with it."
    )


# similarity


def test_the_far_keys_weight_is_the_logistic_function_of_the_difference_of_scores():
    for row in labs.run("similarity", 9).tables[0].rows:
        one = similarity.Row(*row)
        dot = one.length * one.cosine_far
        by_dot = 1 / (1 + math.exp((one.cosine_near - dot) / math.sqrt(2)))
        by_cosine = 1 / (1 + math.exp(one.cosine_near - one.cosine_far))
        by_learned = 1 / (1 + math.exp(10 * (one.cosine_near - one.cosine_far)))
        expected = (one.length, one.cosine_near, dot, by_dot, one.cosine_near, one.cosine_far,
                    by_cosine, by_learned)  # fmt: skip
        assert row == pytest.approx(expected, abs=1e-9)


def test_similaritys_conclusion_follows_its_rows():
    won = similarity.Row(1, 0, 0, 0.2, 0, 0, 0.3, 0), similarity.Row(2, 0, 0, 0.6, 0, 0, 0.3, 0)
    assert "than the near one from length 2 on" in similarity.conclude(won)
    assert "is 0.300 at every length" in similarity.conclude(won)
    lost = won[0], won[1]._replace(by_dot=0.4, by_cosine=0.5)
    assert "than the near one never up to length 2" in similarity.conclude(lost)
    assert "goes from 0.300 to 0.500" in similarity.conclude(lost)


# heads


def test_what_is_asked_is_the_previous_content_and_that_of_the_other_token_of_the_kind():
    task = two_patterns.draw(np.random.default_rng(0))
    for x, asked in zip(task.x[:20], task.asked[:20], strict=True):
        contents = x[:, : two_patterns.NUM_CONTENTS].argmax(1).tolist()
        end = two_patterns.NUM_CONTENTS + two_patterns.NUM_KINDS
        kinds = x[:, two_patterns.NUM_CONTENTS : end].argmax(1).tolist()
        assert sorted(kinds) == sorted([*range(two_patterns.NUM_KINDS)] * 2)
        for i, (previous, matching) in enumerate(asked.tolist()):
            (other,) = (j for j, kind in enumerate(kinds) if kind == kinds[i] and j != i)
            assert previous == contents[i - 1]
            assert matching == contents[other]


def test_a_heads_scores_are_highest_at_what_its_pattern_looks_for():
    x = two_patterns.draw(np.random.default_rng(0)).x[0]
    kinds = x[:, two_patterns.NUM_CONTENTS : two_patterns.NUM_CONTENTS + two_patterns.NUM_KINDS]
    for strengths, expected in (
        ((20, 0), np.roll(np.arange(two_patterns.LENGTH), 1)),
        ((0, 20), (kinds @ kinds.T - np.eye(two_patterns.LENGTH)).argmax(1)),
    ):
        S = x @ two_patterns.query_weights(*strengths) @ x.T
        assert S.argmax(1).tolist() == expected.tolist()
        assert (np.sort(S, axis=1)[:, -1] - np.sort(S, axis=1)[:, -2] == 20).all()


def test_one_head_is_at_best_a_guess_at_the_order_and_two_heads_are_right(short):
    *single, two, first, second = (
        two_patterns.Row(*row) for row in labs.run("heads", 4).tables[0].rows
    )
    assert two[1:] == (1, 1, 1)
    # 3072 answers: four standard deviations of a share are at most 0.036.
    assert max(row.both for row in single) == pytest.approx(two_patterns.GUESSED, abs=0.036)
    assert (first.previous, second.matching) == pytest.approx((1 / 8, 1 / 8), abs=0.036)
    assert (first.matching, second.previous) == (1, 1)


def test_the_chance_to_guess_the_order_is_what_drawing_gives():
    asked = np.concatenate([two_patterns.draw(np.random.default_rng(n)).asked for n in range(40)])
    alike = (asked[..., 0] == asked[..., 1]).mean()
    assert pytest.approx(alike, abs=0.01) == two_patterns.ALIKE


def test_heads_conclusion_does_not_claim_what_its_rows_contradict():
    rows = [
        two_patterns.Row("one", 1, 1, 0.9),
        two_patterns.Row("two", 0.9, 0.8, 0.7),
        two_patterns.Row("without the first", 0.9, 0.2, 0.1),
        two_patterns.Row("without the second", 0.9, 0.8, 0.7),
    ]
    words = two_patterns.conclude(rows)
    assert "in 90.0% of the cases" in words
    assert "two heads in 70.0%" in words
    assert "without the first the matching token falls to 20.0%" in words
    assert "without the second neither falls" in words


# masking

# By IEEE 754: minimha's, then −∞, −1e9, −65504 and −1e4. float16 rounds −1e9 to −∞, and a sum that
# is 16 or more below −65504; a row of nothing but −∞ is 0 / 0.
NAN = math.nan
LEAKS = {
    "float32, scores near 0": (0, 0, 0, 0, 0),
    "float32, visible near −2e4": (0, 0, 0, 0, 1),
    "float32, visible near −2e9": (0, 0, 1, 1, 1),
    "float32, every key hidden": (0, NAN, 1, 1, 1),
    "float16, scores near 0": (0, 0, 0, 0, 0),
    "float16, visible near −2e4": (0, 0, 0, 0, 1),
    "float16, every key hidden": (0, NAN, NAN, 1, 1),
    "float16, added, every key hidden": (0, NAN, NAN, NAN, 1),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_who_leaks_where(seed):
    rows = {name: leaks for name, *leaks in labs.run("masking", seed).tables[0].rows}
    assert list(rows) == list(LEAKS)
    for name, leaks in LEAKS.items():
        np.testing.assert_allclose(rows[name], leaks, atol=2e-3, err_msg=name)


def test_a_number_leaks_from_where_the_visible_scores_are_as_low():
    (figure,) = labs.run("masking").figures
    for name, leaks in figure.series.items():
        lowest = {"−∞": math.inf, "−1e9": 1e9, "−65504": 65504, "−1e4": 1e4}[name]
        for level, leak in zip(figure.places, leaks, strict=True):
            if level != lowest:
                assert leak == pytest.approx(float(level > lowest), abs=1e-6)


def test_maskings_conclusion_counts_its_rows():
    rows = ("a", 0.5, 0.0, 0.0, 0.0, math.nan), ("b", 0.0, 0.0, math.nan, 0.1, 0.0)
    assert masking.conclude(rows) == (
        "Of 2 cases: minimha leaks in 1; −∞ hides every key; −1e9 gives NaN in 1; −65504 leaks in "
        "1; −1e4 gives NaN in 1."
    )


# memory


def moved(B_r, n, D):
    """Numbers that the tiled algorithm loads and writes, as a tap receives them."""
    total = 0

    def tap(name, value):
        nonlocal total
        if name.startswith(("Q[", "K[", "V[")) or name == "output":
            total += value.size
        return value

    x = np.random.default_rng(0).standard_normal((1, 1, n, D))
    _, L = tiled.forward(Problem.of(x, x, x), tap, B_r=B_r, B_c=B_r)
    return total + L.size


@pytest.mark.parametrize("n", [64, 300])
def test_tiled_attention_moves_what_its_algorithm_loads_and_writes(monkeypatch, n):
    monkeypatch.setattr(memory, "BLOCK_ROWS", 32)
    assert memory.tiled_bytes(n) == 4 * moved(32, n, memory.WIDTH)


def test_naive_attention_moves_the_scores_four_times():
    q = k = v = o = 8 * memory.WIDTH
    s = p = 8 * 8
    assert memory.naive_bytes(8) == 4 * ((q + k + s) + (s + p) + (p + v + o))


def test_the_cache_by_groups_is_arithmetic():
    per_head = 2 * 32 * 128 * 8192 * 2  # keys and values, layers, width, tokens, bytes
    assert memory._cache() == tuple((g, g * per_head) for g in (32, 16, 8, 4, 2, 1))


def test_a_machine_without_the_cpu_backend_compares_no_times(short, monkeypatch):
    monkeypatch.setattr(memory, "backends", lambda: {"dense": None, "cpu": "numba is missing"})
    result = labs.run("memory")
    assert list(result.tables[2].columns) == ["n", "dense"]
    assert "cpu cannot run here" in result.conclusion


def test_the_table_has_the_length_that_document_004_names(short):
    rows = {row["n"]: row for row in labs.run("memory").tables[0].written()}
    assert list(rows)[5:7] == ["8,192", "10,000"]
    assert rows["10,000"]["scores held"] == "381 MiB"  # 4 · 10⁸ bytes


def test_memorys_conclusion_follows_its_rows():
    words = memory.conclude([(8, 1024, 4096, 0)], [(32, 100), (8, 50)], [(16, 2.0, 3.0)])
    assert words == (
        "At n = 8 naive attention moves 1.00 KiB and tiled attention 4.00 KiB; 8 key/value heads "
        "in place of 32 need 50% of the cache; here cpu takes 150% of dense's time at 16 tokens."
    )


# temperature


def test_probabilities_at_a_temperature_are_ratios_of_exponentials():
    logits = [2.0, 0.5, -1.0]
    for T in (0.25, 1.0, 4.0):
        exponentials = [math.exp(x / T) for x in logits]
        expected = [x / math.fsum(exponentials) for x in exponentials]
        assert temperature.probabilities(np.array(logits), T).tolist() == pytest.approx(expected)


def test_a_cold_distribution_is_greedy_and_a_hot_one_uniform():
    rows = [temperature.Row(*row) for row in labs.run("temperature").tables[0].rows]
    assert (rows[0].largest, rows[0].greedy) == pytest.approx((1, 1))
    assert rows[-1].largest == pytest.approx(1 / 8, abs=0.01)
    for row in rows:  # four standard deviations of a share of 1000 draws
        assert row.greedy == pytest.approx(row.largest, abs=0.065)


def test_temperatures_conclusion_follows_its_rows():
    rows = (temperature.Row(1, 0.7, 0.1, 2.0, 4, 0.7), temperature.Row(2, 0.6, 0.1, 1.5, 3, 0.6))
    words = temperature.conclude(rows)
    assert "At T = 1 not every draw is the greedy choice" in words
    assert "it does not rise with every step" in words


# parallel


def test_one_product_and_one_for_each_head_give_the_same(short):
    for row in labs.run("parallel").tables[0].rows:
        assert row[-1] < 1e-5
        assert all(time > 0 for time in row[1:-1])


def test_parallels_conclusion_follows_its_rows():
    rows = [(1, 1.0, 1.0, 1.0, 1.0, 0.0), (4, 2.0, 1.0, 2.0, 5.0, 1e-7)]
    assert parallel.conclude(rows) == (
        "With 4 heads, 4 products take 0.50 times as long as one, and attention head by head 2.50 "
        "times as long as all heads together; the results differ by 1e-07 at most."
    )
    assert parallel.conclude(rows[:1]).endswith("the results are equal to the last bit.")


# pytorch


def test_the_pytorch_class_computes_the_same():
    pytest.importorskip("torch")
    result = labs.run("pytorch")
    for mask, output, weights, largest, output_off, weights_off in result.tables[0].rows:
        assert (output, weights) == ("2 × 10 × 512", "2 × 8 × 10 × 10"), mask
        assert output_off < 1e-5 * largest
        assert weights_off < 1e-5
    assert result.conclusion.startswith("With 3 kinds of mask outputs differ by")


def test_without_torch_the_experiment_says_what_it_needs(monkeypatch):
    real = builtins.__import__

    def without_torch(name, *others):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ValueError, match=r"needs torch: pip install 'minimha\[peers\]'"):
        pytorch.run(1, lambda doing: None)


# rope


def test_rope_turns_each_pair_in_its_plane_and_keeps_scores_at_a_distance():
    result = labs.run("rope")
    for position, pair, degrees, x, y, *after, length in result.tables[0].rows:
        assert degrees == pytest.approx(math.degrees(position / 100**pair))
        angle = math.radians(degrees)
        wanted = (
            x * math.cos(angle) - y * math.sin(angle),
            x * math.sin(angle) + y * math.cos(angle),
        )
        assert tuple(after) == pytest.approx(wanted)
        assert length == pytest.approx(math.hypot(x, y))
    here, later = result.figures[-1].series.values()
    assert here == pytest.approx(later, abs=1e-12)
    assert "Each position turns pair 0 by 57.3° and pair 1 by 0.573°" in result.conclusion


def test_an_arrow_for_every_position_is_drawn():
    for plane in labs.run("rope").figures[:2]:
        picture = plane.svg("")
        assert picture.count("tip-two") - picture.count(".tip-two") == rope.POSITIONS - 1
        assert picture.count('class="one"') == 1
