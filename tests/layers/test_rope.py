"""A rotary embedding rotates pairs, keeps lengths, and leaves only relative positions in scores."""

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest
from problems import spoiling

from minimha.layers.rope import RoPE, rotate_by_table
from minimha.layers.scalings import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    YaRNScaling,
)

RNG = np.random.default_rng(0)
Q, K = RNG.normal(size=(2, 3, 5, 8)), RNG.normal(size=(2, 3, 5, 8))
POSITIONS = np.array([0, 3, 4, 70, 1000])
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])
SCALINGS = [
    None,
    LinearScaling(4),
    DynamicNTKScaling(4, 16),
    YaRNScaling(4, 16),
    Llama3Scaling(8, 128),
]


def turned(vector, position, base, interleaved):
    """Each pair as a complex number, times e^(i m θ), as the paper defines it."""
    R = len(vector)
    result = list(vector)
    for i in range(R // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
        z = complex(vector[a], vector[b]) * cmath.exp(1j * position * base ** (-2 * i / R))
        result[a], result[b] = z.real, z.imag
    return result


@LAYOUTS
def test_pairs_rotate_as_complex_numbers_do(interleaved):
    rotated = RoPE(8, base=500.0, interleaved=interleaved).rotate(Q, POSITIONS)
    for index in np.ndindex(2, 3, 5):
        expected = turned(Q[index], int(POSITIONS[index[2]]), 500.0, interleaved)
        np.testing.assert_allclose(rotated[index], expected, rtol=0, atol=1e-12)


@LAYOUTS
@pytest.mark.parametrize("scaling", [s for s in SCALINGS if not isinstance(s, DynamicNTKScaling)])
def test_scores_depend_on_relative_position_only(interleaved, scaling):
    rope = RoPE(8, interleaved=interleaved, scaling=scaling)
    for shift in (-7, 1, 900):
        here = rope.rotate(Q, POSITIONS) @ rope.rotate(K, POSITIONS).swapaxes(-1, -2)
        moved = POSITIONS + shift
        there = rope.rotate(Q, moved) @ rope.rotate(K, moved).swapaxes(-1, -2)
        np.testing.assert_allclose(there, here, rtol=0, atol=1e-11)


def test_scores_do_depend_on_relative_position():
    rope = RoPE(8)
    rotated = rope.rotate(Q, POSITIONS) @ rope.rotate(K, POSITIONS + 1).swapaxes(-1, -2)
    assert abs(rotated - Q @ K.swapaxes(-1, -2)).max() > 0.1


def test_layouts_are_a_permutation_of_each_other():
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # half-split pairs (i, i + 4), laid side by side
    half = RoPE(8).rotate(Q, POSITIONS)
    side_by_side = RoPE(8, interleaved=True).rotate(Q[..., order], POSITIONS)
    np.testing.assert_array_equal(side_by_side, half[..., order])


@LAYOUTS
def test_partial_width_leaves_the_rest_alone(interleaved):
    rotated = RoPE(8, rotary_dim=4, interleaved=interleaved).rotate(Q, POSITIONS)
    np.testing.assert_array_equal(rotated[..., 4:], Q[..., 4:])
    narrow = RoPE(4, interleaved=interleaved).rotate(Q[..., :4], POSITIONS)
    np.testing.assert_array_equal(rotated[..., :4], narrow)
    assert abs(rotated[..., :4] - Q[..., :4]).max() > 0.1


@LAYOUTS
@pytest.mark.parametrize("scaling", SCALINGS)
def test_lengths_stay_or_grow_by_the_attention_factor(interleaved, scaling):
    rotated = RoPE(8, interleaved=interleaved, scaling=scaling).rotate(Q, POSITIONS)
    factor = 0.1 * math.log(4) + 1 if isinstance(scaling, YaRNScaling) else 1
    lengths = factor * np.linalg.norm(Q, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), lengths, rtol=1e-13)


def test_positions_may_differ_between_batch_entries():
    positions = np.array([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    rope = RoPE(8)
    rotated = rope.rotate(Q, positions)
    for b in range(2):
        np.testing.assert_array_equal(rotated[b], rope.rotate(Q[b], positions[b]))


@LAYOUTS
def test_tables_hold_each_angle_once_or_twice(interleaved):
    rope = RoPE(8, interleaved=interleaved)
    for once, twice, f in zip(
        rope.tables(POSITIONS), rope.tables(POSITIONS, repeated=True), (math.cos, math.sin),
        strict=True,
    ):  # fmt: skip
        assert (once.shape, twice.shape, once.dtype) == ((5, 4), (5, 8), np.float64)
        for p, m in enumerate(POSITIONS):
            for d in range(8):
                i = d // 2 if interleaved else d % 4
                assert twice[p, d] == once[p, i]
                assert math.isclose(once[p, i], f(m * 10000 ** (-i / 4)), abs_tol=1e-12)


@LAYOUTS
@pytest.mark.parametrize("repeated", [False, True])
def test_a_table_rotates_as_the_formula_does(interleaved, repeated):
    rope = RoPE(8, rotary_dim=6, interleaved=interleaved)
    how = {"interleaved": interleaved, "repeated": repeated}
    positions = np.array([[4, 0, 1, 3, 3], [0, 1, 2, 3, 4]])
    expected = rope.rotate(Q, positions)
    looked_up = rotate_by_table(Q, *rope.tables(range(5), repeated=repeated), positions, **how)
    np.testing.assert_array_equal(looked_up, expected)
    given = rotate_by_table(Q, *rope.tables(positions, repeated=repeated), **how)
    np.testing.assert_array_equal(given, expected)


def by_loop(scaling, R, base, length):
    """θ_i pair by pair, in the words of the published rules."""
    result = []
    for i in range(R // 2):
        theta = 1 / base ** (2 * i / R)
        if isinstance(scaling, LinearScaling):
            theta /= scaling.factor
        if isinstance(scaling, DynamicNTKScaling) and length > scaling.original_length:
            s = scaling.factor
            ratio = s * length / scaling.original_length - s + 1
            theta = 1 / (base * ratio ** (R / (R - 2))) ** (2 * i / R)
        if isinstance(scaling, YaRNScaling):
            ends = []
            for turns in (scaling.beta_fast, scaling.beta_slow):
                wave = scaling.original_length / turns
                ends.append(R / 2 * math.log(wave / (2 * math.pi), base))
            if scaling.truncate:
                ends = math.floor(ends[0]), math.ceil(ends[1])
            low, high = max(0, ends[0]), min(R - 1, ends[1])
            if low == high:
                high += 0.001
            ramp = min(1, max(0, (i - low) / (high - low)))
            theta = theta * (1 - ramp) + theta / scaling.factor * ramp
        if isinstance(scaling, LongRoPEScaling):
            is_long = length > scaling.original_length
            theta /= (scaling.long_factors if is_long else scaling.short_factors)[i]
        if isinstance(scaling, Llama3Scaling):
            wave = 2 * math.pi / theta
            old, low, high = (
                scaling.original_length, scaling.low_freq_factor, scaling.high_freq_factor
            )  # fmt: skip
            if wave > old / low:
                theta /= scaling.factor
            elif wave > old / high:
                smooth = (old / wave - low) / (high - low)
                theta = (1 - smooth) * theta / scaling.factor + smooth * theta
        result.append(theta)
    return result


@pytest.mark.parametrize(
    ("scaling", "R", "base", "length"),
    [
        (LinearScaling(2.5), 64, 10000.0, 1),
        (DynamicNTKScaling(2, 2048), 128, 10000.0, 2048),
        (DynamicNTKScaling(2, 2048), 128, 10000.0, 5000),
        (YaRNScaling(16, 4096), 128, 10000.0, 1),
        (YaRNScaling(4, 32768, beta_fast=16, beta_slow=2), 64, 1e6, 1),
        (YaRNScaling(32, 4096, truncate=False), 64, 150000.0, 1),  # GPT-OSS
        (YaRNScaling(4, 10**6, beta_fast=1e4), 8, 100.0, 1),  # the ramp ends at R - 1
        (YaRNScaling(4, 10**9), 4, 10000.0, 1),  # the ends meet
        (YaRNScaling(4, 1), 4, 2.0, 1),  # they cross, 0 over -5
        (YaRNScaling(4, 10**15), 4, 10000.0, 1),  # and 6 over 3
        (Llama3Scaling(8, 8192), 128, 500000.0, 1),
        (Llama3Scaling(32, 8192), 64, 500000.0, 1),
        (LongRoPEScaling([1, 2], [3.0, 40.5], 8), 4, 10000.0, 8),
        (LongRoPEScaling([1, 2], [3.0, 40.5], 8), 4, 10000.0, 9),
    ],
)
def test_scaled_frequencies_follow_the_published_rules(scaling, R, base, length):
    frequencies = RoPE(R, base, scaling=scaling).frequencies(length)
    np.testing.assert_allclose(frequencies, by_loop(scaling, R, base, length), rtol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "base", "parameters", "length"),
    [
        (LinearScaling(2.5), 1e4, {"rope_type": "linear", "factor": 2.5}, 1),
        (DynamicNTKScaling(2, 64), 1e4, {"rope_type": "dynamic", "factor": 2.0}, 200),
        *(
            (YaRNScaling(4, n), base, {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": n,
            }, 1)
            for n, base in ((4096, 1e4), (1, 2.0), (3, 1e4), (10**9, 1e4), (10**15, 1e4))
        ),
        (YaRNScaling(32, 4096, truncate=False), 1.5e5, {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "truncate": False,
        }, 1),
        (Llama3Scaling(8, 128), 5e5, {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }, 1),
        *(
            (LongRoPEScaling([1.5] * pairs, [7.0] * pairs, 32, factor), 1e4, {
                "rope_type": "longrope", "short_factor": [1.5] * pairs,
                "long_factor": [7.0] * pairs, "factor": factor,
                "original_max_position_embeddings": 32,
            }, length)
            for pairs, factor, length in ((2, 1.0, 32), (2, 6.0, 33), (32, 1.5, 33))
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("R", [4, 64])
def test_scaled_frequencies_are_those_of_transformers(scaling, base, parameters, length, R):
    reason = "transformers, to compare with, is not installed"
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason=reason)
    from transformers import LlamaConfig

    config = LlamaConfig(
        head_dim=R, max_position_embeddings=64, rope_parameters={"rope_theta": base, **parameters}
    )
    if isinstance(scaling, LongRoPEScaling) and len(scaling.long_factors) != R // 2:
        pytest.skip("these factors are for another width")
    compute = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, magnitude = compute(config, seq_len=length)
    ours = RoPE(R, base, scaling=scaling).frequencies(length)
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=1e-5)
    assert math.isclose(scaling.magnitude, magnitude)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    plain, scaled = RoPE(128).frequencies(), RoPE(128, scaling=YaRNScaling(16, 4096)).frequencies()
    np.testing.assert_allclose(scaled[:20], plain[:20], rtol=1e-15)  # pair 20 turns 37 times
    np.testing.assert_allclose(scaled[46:], plain[46:] / 16, rtol=1e-15)  # pair 46, 0.9 times


def test_yarn_takes_a_given_attention_factor():
    given = YaRNScaling(4, 16, attention_factor=2.0)
    np.testing.assert_array_equal(RoPE(4, scaling=given).tables([0])[0], [[2.0, 2.0]])


def test_where_every_pair_is_fast_none_is_slowed():
    step = YaRNScaling(4, 10**9)
    np.testing.assert_array_equal(RoPE(4, scaling=step).frequencies(), RoPE(4).frequencies())


def test_dynamic_scaling_takes_the_length_from_the_positions_or_as_given():
    rope = RoPE(8, scaling=DynamicNTKScaling(2, 4))
    np.testing.assert_array_equal(rope.tables([0, 9])[0][1], rope.tables([9], length=10)[0][0])
    np.testing.assert_array_equal(rope.tables([2])[0], RoPE(8).tables([2])[0])
    longer = rope.rotate(Q, range(5), length=50)
    assert abs(longer - rope.rotate(Q, range(5))).max() > 1e-3
    assert [r.is_dynamic for r in (rope, RoPE(8), RoPE(8, scaling=LinearScaling(2)))] == [
        True, False, False,
    ]  # fmt: skip


def test_dynamic_scaling_goes_by_the_longest_entry_of_a_batch():
    rope = RoPE(8, scaling=DynamicNTKScaling(2, 4))
    x = Q[:, :, :2]
    together = rope.rotate(x, [[0, 1], [0, 9]])
    np.testing.assert_array_equal(together[0], rope.rotate(x[0], [0, 1], length=10))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_stays(dtype):
    x = Q.astype(dtype)
    rotated = RoPE(8).rotate(x, POSITIONS)
    assert rotated.dtype == dtype
    exact = RoPE(8).rotate(x.astype(np.float64), POSITIONS)
    np.testing.assert_allclose(rotated, exact, rtol=0, atol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_rounded_once(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes has bfloat16")
    x = Q.astype(getattr(ml_dtypes, dtype, dtype))
    wide = x.astype(np.float32)
    for got, expected in (
        (RoPE(8).rotate(x, POSITIONS), RoPE(8).rotate(wide, POSITIONS)),
        (rotate_by_table(x, *RoPE(8).tables(range(5))), RoPE(8).rotate(wide, range(5))),
    ):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, expected.astype(x.dtype))


@pytest.mark.parametrize(
    ("rotate", "expected"),
    [
        (lambda: RoPE(2).rotate(np.float16([[60000, 60000]]), [1]), [-18080, np.inf]),
        (lambda: RoPE(2).rotate(np.float32([[3e38, 3e38]]), [1]), [-9.035e37, np.inf]),
        (lambda: RoPE(2).rotate([[np.inf, np.inf]], [1]), [np.nan, np.inf]),
        (lambda: rotate_by_table(np.float32([[1, 0]]), [[1e39]], [[0.0]]), [np.inf, np.nan]),
    ],
)
def test_what_overflows_does_so_without_a_warning(rotate, expected):
    np.testing.assert_allclose(rotate(), [expected], rtol=1e-3)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (lambda: RoPE(8, np.float16(10000)), lambda: RoPE(8, 10000.0)),
        (lambda: RoPE(np.int8(8), rotary_dim=np.uint8(4)), lambda: RoPE(8, rotary_dim=4)),
        (lambda: LinearScaling(np.float16(100)), lambda: LinearScaling(100)),
        (
            lambda: DynamicNTKScaling(np.int8(100), np.int8(4)),
            lambda: DynamicNTKScaling(100, 4),
        ),
        (
            lambda: YaRNScaling(*np.int8([100, 4, 99, 1, 2])),
            lambda: YaRNScaling(100, 4, 99, 1, 2),
        ),
        (lambda: Llama3Scaling(*np.int8([100, 4, 1, 99])), lambda: Llama3Scaling(100, 4, 1, 99)),
    ],
)
def test_numpys_narrow_numbers_do_not_overflow(narrow, wide):
    both = (narrow(), wide())
    pair = [made if isinstance(made, RoPE) else RoPE(8, scaling=made) for made in both]
    assert pair[0] == pair[1]
    np.testing.assert_array_equal(*(rope.frequencies(100) for rope in pair))
    kinds = {type(value) for value in vars(narrow()).values()}
    assert kinds <= {int, float, bool, type(None), np.uint8}  # rotary_dim stays as it was given


def test_dynamic_scaling_of_any_length_does_not_overflow():
    frequencies = RoPE(4, scaling=DynamicNTKScaling(1e300, 4)).frequencies(100)
    np.testing.assert_array_equal(frequencies, [1.0, 1e-2 / (1e300 * 24 + 1)])


def test_a_width_is_equal_however_it_is_given():
    assert RoPE(8) == RoPE(8, rotary_dim=8)
    assert hash(RoPE(8)) == hash(RoPE(8, rotary_dim=8))
    assert RoPE(8) != RoPE(8, rotary_dim=4)
    assert replace(RoPE(8), head_dim=16).width == 16


def test_the_input_is_not_written_to_and_no_tokens_are_no_trouble():
    x = Q.copy()
    x.flags.writeable = False
    RoPE(8).rotate(x, POSITIONS)
    assert RoPE(8).rotate(x[:, :, :0], []).shape == (2, 3, 0, 8)


def test_every_step_is_tapped():
    trace = []
    rotated = RoPE(8).rotate(Q, POSITIONS, lambda name, value: trace.append((name, value)) or value)
    assert [name for name, _ in trace] == ["cos", "sin", "rotated"]
    np.testing.assert_array_equal(trace[-1][1], rotated)


@pytest.mark.parametrize("name", ["cos", "sin", "rotated"])
def test_what_a_tap_returns_is_what_goes_on(name):
    assert np.isnan(RoPE(8).rotate(Q, POSITIONS, spoiling(name))).all()
    tables = RoPE(8).tables(range(5))
    assert np.isnan(rotate_by_table(Q, *tables, tap=spoiling(name))).all()


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: RoPE(7), ValueError, "head_dim is 7: pairs are rotated, so it must be even"),
        (lambda: RoPE(8, rotary_dim=3), ValueError, "rotary_dim is 3: pairs are rotated"),
        (lambda: RoPE(8, rotary_dim=10), ValueError, "rotary_dim is 10: expected at most"),
        (lambda: RoPE(8.0), TypeError, "head_dim is 8.0: expected an integer"),
        (lambda: RoPE(0), ValueError, "head_dim is 0: expected an integer of at least 1"),
        (lambda: RoPE(8, 1), ValueError, "base is 1: expected more than 1"),
        (lambda: RoPE(8, "big"), TypeError, "base is 'big': expected a number"),
        (lambda: RoPE(8, interleaved=1), TypeError, "interleaved is 1: expected True or False"),
        (lambda: RoPE(8, scaling="yarn"), TypeError, "scaling is 'yarn': expected None or one"),
        (lambda: LinearScaling(0.5), ValueError, "factor is 0.5: expected a number of at"),
        (lambda: DynamicNTKScaling(2, 0), ValueError, "original_length is 0: expected an in"),
        (lambda: YaRNScaling(2, 8, beta_fast=0.5), ValueError, "beta_fast is 0.5: expected a"),
        (lambda: YaRNScaling(2, 8, attention_factor=0), ValueError, "attention_factor is 0: expec"),
        (lambda: LongRoPEScaling([0.0], [1.0], 8), ValueError, "short_factors[0] is 0.0: expected"),
        (lambda: LongRoPEScaling([1.0], [1.0, 2.0], 8), ValueError, "has 1 numbers but long"),
        (lambda: LongRoPEScaling([1.0], [1.0], 1), ValueError, "original_length is 1: expected"),
        (lambda: RoPE(8, scaling=LongRoPEScaling([1.0], [1.0], 4)).frequencies(5), ValueError,
         "long_factors has 1 numbers: expected one for each of 4 pairs"),
        (lambda: Llama3Scaling(2, 8, 4, 4), ValueError, "high_freq_factor is 4.0: expected mor"),
        (lambda: Llama3Scaling(math.nan, 8), ValueError, "factor is nan: expected a finite number"),
        (lambda: RoPE(8, 10**400), ValueError, "expected a finite number"),
        (lambda: YaRNScaling(2, 10**400), ValueError, "expected a finite number"),
        (lambda: RoPE(8).frequencies(10**400), ValueError, "expected a finite number"),
        (lambda: RoPE(8).tables([100], length=5), ValueError,
         "length is 5 but positions go to 100: expected at least 101"),
        (lambda: RoPE(8).rotate(Q[0, :, :1], np.array([2**64 - 1], np.uint64)), ValueError,
         "positions has numbers from 18446744073709551615"),
        (lambda: rotate_by_table(Q[0, :, :1], *RoPE(8).tables(range(5)), [-(2**63)]), ValueError,
         "positions has numbers from -9223372036854775808"),
        (lambda: RoPE(8).rotate(Q, np.ma.masked_array(range(5), [0, 0, 0, 0, 1])), TypeError,
         "positions is a masked array, whose mask would be lost"),
        (lambda: RoPE(2, scaling=DynamicNTKScaling(2, 4)).rotate(Q[..., :2], POSITIONS), ValueError,
         "rotary_dim is 2: dynamic NTK"),
        (lambda: RoPE(6).rotate(Q, POSITIONS), ValueError, "expected (..., L, D) with head_dim D"),
        (lambda: RoPE(8).rotate(Q.astype(str), POSITIONS), TypeError, "x has dtype <U"),
        (lambda: RoPE(8).rotate(Q, POSITIONS / 2), TypeError, "positions has dtype float64: expec"),
        (lambda: RoPE(8).rotate(Q, [[0], [1, 2]]), ValueError, "positions is not a rectangular"),
        (lambda: RoPE(8).rotate(Q, range(4)), ValueError,
         "positions has shape (4,) but x has shape (2, 3, 5, 8): expected (L,) = (5,) or (B, L) ="),
        (lambda: RoPE(8).rotate(Q[0], [range(5)] * 3), ValueError, "expected (L,) = (5,)"),
        (lambda: rotate_by_table(Q, *RoPE(8).tables(range(5)), [0, 1, 2, 3, 5]), ValueError,
         "positions go from 0 to 5: the table has the positions 0 to 4"),
        (lambda: rotate_by_table(Q, *RoPE(8).tables(range(5)), [-1, 1, 2, 3, 4]), ValueError,
         "positions go from -1 to 4: the table"),
        (lambda: rotate_by_table(Q, *RoPE(10).tables(range(5))), ValueError,
         "cos has 5 angles per row, shape (5, 5): expected"),
        (lambda: rotate_by_table(Q, *RoPE(8).tables(range(4))), ValueError,
         "cos has shape (4,), before the angles, but x has shape"),
        (lambda: rotate_by_table(Q, np.ones((5, 4)), np.ones((5, 3))), ValueError,
         "sin has shape (5, 3) but cos has (5, 4)"),
        (lambda: rotate_by_table(Q, *RoPE(8).tables(range(5), repeated=True), repeated=True,
                                 interleaved=True), ValueError,
         "cos does not hold every angle twice in the interleaved layout"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(make, error, sentence):
    with pytest.raises(error) as raised:
        make()
    assert sentence in str(raised.value)
