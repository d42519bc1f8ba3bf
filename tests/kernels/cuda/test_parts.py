"""The parts of the CUDA kernels, each in a separate kernel in the emulator."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
import ml_dtypes
from numba import cuda, float32, types, uint64

from minimha.equations.problem import Problem, stand_in
from minimha.equations.visibility import sees
from minimha.kernels.cuda import arguments
from minimha.kernels.cuda import ptx as instructions
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.parts import fragments, mask, nonfinite, online_softmax, rows

inf, nan = np.inf, np.nan
NUMBERS = {
    "float16": np.float16([0, -0.0, 1, -65504, 6e-8, inf, -inf, nan]),
    "bfloat16": np.array([0, -0.0, 1, -3e38, 1e-40, inf, -inf, nan], ml_dtypes.bfloat16),
}


def execute(kernel, given, size, dtype=np.float32):
    """What 32 threads of ``kernel(address of given, address of the result)`` leave."""
    memory = emulator.Arena()
    at, to = memory.put(np.asarray(given)), memory.put(np.zeros(size, dtype))
    launch = Launch(kernel, (types.uint64, types.uint64), (1, 1, 1), 32)
    emulator.run(launch, (at, to), memory)
    return memory.get(to, (size,), dtype)


def of_words(function):
    """The kernel that applies ``function`` to one word per lane."""

    def kernel(at, to):
        lane = uint64(4 * cuda.threadIdx.x)
        instructions.st_global_u32(to + lane, function(instructions.ld_global_u32(at + lane)))

    return kernel


def of_numbers(function):
    """The kernel that applies ``function`` to one float32 per lane."""

    def kernel(at, to):
        lane = uint64(4 * cuda.threadIdx.x)
        instructions.st_global_f32(to + lane, function(instructions.ld_global_f32(at + lane)))

    return kernel


def pairs(dtype):
    """Two 16-bit numbers per lane: the interesting ones beside each other."""
    x = NUMBERS[dtype]
    return np.stack([np.repeat(x, 8), np.tile(x, 8)], axis=-1)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_each_half_of_a_word_is_known_to_be_finite_or_not(dtype):
    found, zeroed = nonfinite.nonfinite_in(dtype), nonfinite.zero_nonfinite_in(dtype)
    for given in np.split(pairs(dtype), 2):
        is_finite = np.isfinite(given.astype(np.float32))
        expected = (~is_finite).astype(np.uint32) @ np.array([1 << 15, 1 << 31], np.uint32)
        np.testing.assert_array_equal(execute(of_words(found), given, 32, np.uint32), expected)
        left = execute(of_words(zeroed), given, 32, np.uint32).view(np.uint16).reshape(32, 2)
        np.testing.assert_array_equal(left, np.where(is_finite, given.view(np.uint16), 0))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_word_is_widened_to_its_two_numbers(dtype):
    halves = fragments.widen(dtype)

    def kernel(at, to):
        lane = uint64(cuda.threadIdx.x)
        low, high = halves(instructions.ld_global_u32(at + uint64(4) * lane))
        instructions.st_global_v2_f32(to + uint64(8) * lane, low, high)

    for given in np.split(pairs(dtype), 2):
        np.testing.assert_array_equal(
            execute(kernel, given, 64).reshape(32, 2), given.astype(np.float32)
        )


@pytest.mark.parametrize("bits", [(1,), (1, 2), (8, 4, 2, 1), (16, 8, 4, 2, 1)])
def test_lanes_share_the_maximum_and_the_sum_of_their_row(bits):
    x = np.random.default_rng(0).integers(-50, 50, 32).astype(np.float32)
    row = np.arange(32) & ~sum(bits)
    same = row == row[:, None]
    largest = execute(of_numbers(online_softmax.maximum_over(*bits)), x, 32)
    np.testing.assert_array_equal(largest, np.where(same, x, -inf).max(axis=1))
    total = execute(of_numbers(online_softmax.sum_over(*bits)), x, 32)
    np.testing.assert_array_equal(total, np.where(same, x, 0).sum(axis=1))


def test_a_sink_joins_the_sum_and_completes_the_row():
    with_sink, log = online_softmax.with_sink, online_softmax.log

    def kernel(at, to):
        lane = uint64(cuda.threadIdx.x)
        m, l, sink, _ = instructions.ld_global_nc_v4_f32(at + uint64(16) * lane)
        m, l, factor = with_sink(m, l, sink)
        instructions.st_global_v2_f32(to + uint64(8) * lane, m + log(l), factor)

    lines = [(1, 2, -inf), (1, 2, 3), (5, 2, -100), (-inf, 0, 2), (-inf, 0, -inf), (-80, 1, 90)]
    given = np.zeros((32, 4), np.float32)
    given[: len(lines), :3] = lines
    L, factor = execute(kernel, given, 64).reshape(32, 2)[: len(lines)].T
    m, l, sink = np.array(lines, float).T
    with np.errstate(divide="ignore"):
        exact_L = np.logaddexp(m + np.log(l), sink)
    np.testing.assert_allclose(L, exact_L, rtol=1e-6)
    has_key = np.isfinite(m)
    exact_factor = np.exp(m[has_key] - exact_L[has_key])
    np.testing.assert_allclose(factor[has_key], exact_factor, rtol=1e-6, atol=1e-30)
    assert (factor[~has_key] == 0).all()


@pytest.mark.parametrize("words", range(1, 9))
@pytest.mark.parametrize("lanes", [4, 16, 32])
def test_a_row_is_spread_over_lanes_and_stored_as_it_was(words, lanes):
    load = rows.load_row(words, lanes, rows.GLOBAL_F32)
    store = rows.store_row(words, lanes, 1)

    def kernel(at, to):
        row = uint64(4 * words * lanes) * uint64(cuda.threadIdx.x // lanes)
        line = cuda.local.array(words, float32)
        load(at + row, cuda.threadIdx.x % lanes, line, 0)
        store(to + row, cuda.threadIdx.x % lanes, line)

    given = np.arange(32 * words, dtype=np.float32)
    np.testing.assert_array_equal(execute(kernel, given, 32 * words), given)


OPTIONS = {
    "softcap": ((True, False, False, False), lambda s, j, added: 2 * np.tanh(s / 2)),
    "slopes": ((False, True, False, False), lambda s, j, added: s - 0.5 * abs(j - 7)),
    "mask": ((False, False, True, False), lambda s, j, added: np.where(j % 2 == 1, s, -inf)),
    "bias": ((False, False, False, True), lambda s, j, added: s + added),
    "all": (
        (True, True, True, True),
        lambda s, j, added: np.where(
            j % 2 == 1, 2 * np.tanh(s / 2) + added - 0.5 * abs(j - 7), -inf
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_score_with_its_options(name):
    """Key j is the lane; those from 30 on are hidden, and those that are odd are in the mask."""
    options, expected = OPTIONS[name]
    score = mask.score_pair(mask.ScoreOptions(*options))
    s = np.linspace(-5, 5, 32, dtype=np.float32)
    added = np.where(np.arange(32) % 5 == 0, -inf, s[::-1]).astype(np.float32)
    is_odd = np.arange(32, dtype=np.uint8) % 2

    def kernel(at, to, o):
        lane = cuda.threadIdx.x
        s = instructions.ld_global_f32(at + uint64(4 * lane))
        bias_at, mask_at = at + uint64(128 + 4 * lane), at + uint64(256 + lane)
        s = score(s, lane < 30, 7 - lane, float32(0.5), mask_at, bias_at, o)
        instructions.st_global_f32(to + uint64(4 * lane), s)

    memory = emulator.Arena()
    given = np.concatenate([x.view(np.uint8) for x in (s, added, is_odd)])
    at, to = memory.put(given), memory.put(np.zeros(32, np.float32))
    o = arguments.Numbers(1, 1, 1, 32, 0, 0, 0, 0, 0, 0, 1.0, 2.0)
    signature = (types.uint64, types.uint64, arguments.NUMBERS)
    launch = Launch(kernel, signature, (1, 1, 1), 32)
    emulator.run(launch, (at, to, o), memory)
    exact = np.where(np.arange(32) < 30, expected(s.astype(float), np.arange(32), added), -inf)
    np.testing.assert_allclose(memory.get(to, (32,), np.float32), exact, rtol=1e-6, atol=1e-6)


def test_options_are_those_of_the_problem():
    x = np.ones((1, 2, 3, 4))
    given = {"softcap": 1.0, "alibi_slopes": np.ones(2), "attn_mask": np.ones((3, 3), bool)}
    given["attn_bias"] = np.zeros((3, 3))
    for i, (name, value) in enumerate(given.items()):
        options = mask.ScoreOptions.of(Problem.of(x, x, x, **{name: value}))
        assert options == tuple(n == i for n in range(4))
        assert options.change_scores == (name != "attn_mask")
        assert options.hide_keys == (name in ("attn_mask", "attn_bias"))


def test_full_tiles_are_those_that_every_query_sees():
    """Tiles of two queries and two keys: query 2, and the key that is the lane."""
    is_full = mask.is_full

    def kernel(at, to):
        j = cuda.threadIdx.x
        full = is_full(2, 4, j, j + 2, 3, 4, 1, 7)
        instructions.st_global_u32(to + uint64(4 * j), full)

    expected = [
        all(sees(i, j, q_offset=3, left=4, right=1, length=7) for i in (2, 3) for j in (k, k + 1))
        for k in range(32)
    ]
    assert any(expected)
    np.testing.assert_array_equal(execute(kernel, [0.0], 32, np.uint32), expected)


@pytest.mark.parametrize("Lk", [0, 1000, 6000, 100_000])
def test_blocks_of_the_heads_that_fit_into_the_cache_start_from_the_last_queries(Lk):
    """Three batch entries of six heads over two; a key and its value have 1024 bytes."""
    B, H, Hkv, Lq, B_r, D = 3, 6, 2, 300, 128, 256
    q, k = (stand_in((B, heads, L, D), np.float16) for heads, L in ((H, Lq), (Hkv, Lk)))
    grid, block = rows.grid_of(Problem.of(q, k, k), B_r, 4 * D), rows.block_of(B_r)

    def kernel(to, o):
        place = block(o)
        first = cuda.blockIdx.x + cuda.gridDim.x * (
            cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z
        )
        for x in range(4):
            instructions.st_global_u32(to + uint64(16 * first + 4 * x), place[x])

    memory, count = emulator.Arena(), B * H * 3
    to = memory.put(np.zeros((count, 4), np.uint32))
    o = arguments.Numbers(H, Hkv, Lq, Lk, 0, 0, 0, 0, 0, 0, 1.0, 0.0)
    launch = Launch(kernel, (types.uint64, arguments.NUMBERS), grid, 32)
    emulator.run(launch, (to, o), memory)
    at_once = {0: 18, 1000: 18, 6000: 6, 100_000: 3}[Lk]  # heads, in groups of three
    expected = [
        (i_start, head % H, head // H, head % H // 3)
        for first in range(0, B * H, at_once)
        for i_start in (256, 128, 0)
        for head in range(first, first + at_once)
    ]
    assert memory.get(to, (count, 4), np.uint32).tolist() == [list(x) for x in expected]
