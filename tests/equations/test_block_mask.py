"""Which blocks a function hides: counted pair by pair, and by the compiled function."""

import numpy as np
import pytest
from problems import MASK_MODS, over_pairs

import minimha
from minimha import attention, block_mask
from minimha.equations import block_mask as blocks
from minimha.equations import dense
from minimha.equations.problem import Problem
from minimha.kernels.cpu import rung5_decode
from minimha.kernels.cpu.blocks import block_states, blocks_of

SIZES = [(1, 1), (16, 32), (17, 33), (50, 70), (0, 5), (5, 0)]


def counted(mask_mod, shape, q_offset):
    """States of blocks of 16 × 32, from every pair."""
    B, H, Lq, Lk = shape
    seen = over_pairs(mask_mod, shape, {"q_offset": q_offset}, bool)
    states = np.zeros((B, H, -(-Lq // 16), -(-Lk // 32)), np.uint8)
    for b, h, row, column in np.ndindex(states.shape):
        block = seen[b, h, 16 * row : 16 * row + 16, 32 * column : 32 * column + 32]
        states[b, h, row, column] = 2 if block.all() else int(block.any())
    return states


@pytest.mark.parametrize("find", [blocks.states, block_states])
@pytest.mark.parametrize(("Lq", "Lk"), SIZES)
@pytest.mark.parametrize("mask_mod", MASK_MODS)
def test_states(mask_mod, Lq, Lk, find):
    offset = np.array([0, 20])
    expected = counted(mask_mod, (2, 3, Lq, Lk), offset)
    np.testing.assert_array_equal(find(mask_mod, 2, 3, Lq, Lk, offset), expected)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_it_computes_what_its_function_does(backend):
    x = np.random.default_rng(0).normal(size=(2, 2, 100, 4))
    mask = block_mask(lambda b, h, i, j: i >= j, 100, 100)
    assert repr(mask) == "BlockMask(Lq=100, Lk=100, 43% of the blocks hidden)"
    got = attention(x, x, x, mask_mod=mask, backend=backend)
    np.testing.assert_allclose(got, attention(x, x, x, is_causal=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("Lq", [64, 2])
def test_the_cpu_kernel_skips_what_it_says_is_hidden(Lq, monkeypatch):
    monkeypatch.setattr(rung5_decode.KERNEL, "worth_skipping", 0)
    q, x = (np.random.default_rng(0).normal(size=(1, 1, n, 4)) for n in (Lq, 160))
    states = np.zeros((1, 1, -(-Lq // 16), 5), np.uint8)
    states[..., 1], states[..., 3] = 2, 2
    mask = minimha.BlockMask(lambda b, h, i, j: i >= 0, states, Lq, 160, (0,))
    got = attention(q, x, x, mask_mod=mask, q_offset=0, backend="cpu")
    kept = x[:, :, [*range(32, 64), *range(96, 128)]]
    seen = attention(q, kept, kept) if Lq == 2 else attention(q, x[:, :, 32:128], x[:, :, 32:128])
    np.testing.assert_allclose(got, seen, rtol=1e-9)


def far_apart(b, h, i, j):
    return (j < 40 * (h % 2) + 3) | (i - j < 50 + 30 * h) & (i - j > 20 * b)


@pytest.mark.parametrize("score_mod", [None, lambda s, b, h, i, j: s - 0.01 * j * h])
@pytest.mark.parametrize("mask_mod", [far_apart, lambda b, h, i, j: j > i, *MASK_MODS])
def test_decoding_skips_only_what_is_hidden(mask_mod, score_mod, monkeypatch):
    monkeypatch.setattr(rung5_decode.KERNEL, "worth_skipping", 0)
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, h, n, 4)) for h, n in ((4, 3), (2, 1500), (2, 1500)))
    options = {"mask_mod": mask_mod, "score_mod": score_mod, "q_offset": [1490, 700]}
    for B_c in (None, 100):
        problem = Problem.of(q, k, v, **options, kv_lengths=[1500, 900])
        found = rung5_decode.forward(problem, splits=3, B_c=B_c)
        for ours, exact in zip(found, dense.forward(problem), strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_what_it_captures_may_not_change(backend):
    x, array = np.zeros((1, 2, 40, 4)), np.zeros(40)
    mask = block_mask(lambda b, h, i, j: array[j] == 0, 40, 40)
    for _ in range(2):  # planned, then remembered
        attention(x, x, x, mask_mod=mask, backend=backend)
    array[3] = 1
    with pytest.raises(ValueError, match="captures a value that has changed since"):
        attention(x, x, x, mask_mod=mask, backend=backend)


def of_sequence(b, h, i, j):
    return (i >= j) and (b == 2 or j % 40 > h)


def windowed(b, h, i, j):
    return abs(i - j) < 20


@pytest.mark.parametrize("mask_mod", [of_sequence, windowed])
@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_and_paged_sequences_have_blocks_of_their_own(mask_mod, page_size):
    Lq, Lk, offset = [40, 17, 40, 0, 70], [70, 33, 70, 5, 70], np.array([30, 0, 30, 5, -3])
    starts, ends = (np.cumsum([0, *lengths]) for lengths in (Lq, Lk))
    q, k = np.zeros((1, 2, starts[-1], 4)), np.zeros((1, 2, ends[-1], 4))
    given = {"cu_seqlens_k": ends}
    if page_size is not None:
        table = np.arange(5 * 5).reshape(5, 5)
        k, given = np.zeros((25, 2, 16, 4)), {"block_table": table, "kv_lengths": Lk}
    problem = Problem.of(q, k, k, cu_seqlens_q=starts, q_offset=offset, mask_mod=mask_mod, **given)
    found = blocks_of(problem)
    for s, h in np.ndindex(5, 2):
        expected = counted(
            lambda b, h, i, j, s=s: mask_mod(s, h, i, j), (1, 2, Lq[s], Lk[s]), offset[s : s + 1]
        )[0, h]
        assert found.block_columns[s] == expected.shape[1]
        first = found.first_blocks[s, h]
        np.testing.assert_array_equal(
            found.blocks[first : first + expected.size], expected.ravel(), err_msg=f"{s}, {h}"
        )


def test_the_cpu_kernel_skips_blocks_of_packed_sequences(monkeypatch):
    x = np.random.default_rng(0).normal(size=(1, 1, 100, 4))

    def found(mask_mod, kinds, heads, corner):
        states = [[0, 2] * 4 if Lq == 64 else [0] * 6 for _, Lq, _, _ in kinds]
        return np.concatenate(states).astype(np.uint8)

    monkeypatch.setattr("minimha.kernels.cpu.blocks._found", found)
    given = {"mask_mod": lambda b, h, i, j: i + j >= 0, "cu_seqlens_q": [0, 64, 100]}
    got = attention(x, x, x, **given, backend="cpu")
    keys = x[:, :, 32:64]
    np.testing.assert_allclose(got[:, :, :64], attention(x[:, :, :64], keys, keys), rtol=1e-9)
    np.testing.assert_array_equal(got[:, :, 64:], 0)


def test_a_block_mask_for_another_problem_is_refused():
    x, array = np.zeros((1, 2, 40, 4)), np.zeros(40)
    for arguments, sentence in (
        ({"Lk": 41}, r"a BlockMask for \(B, H, Lq, Lk\) = \(1, 1, 40, 41\): expected one for"),
        ({"H": 3}, r"a BlockMask for \(B, H, Lq, Lk\) = \(1, 3, 40, 40\)"),
        ({"q_offset": 2}, r"a BlockMask with q_offset=\(2,\): expected \(0,\)"),
    ):
        mask = block_mask(lambda b, h, i, j: i >= j, **{"Lq": 40, "Lk": 40, **arguments})
        with pytest.raises(ValueError, match=sentence):
            attention(x, x, x, mask_mod=mask)
    mask = block_mask(lambda b, h, i, j: array[j] == 0, 40, 40)
    array[3] = 1
    with pytest.raises(ValueError, match="captures a value that has changed since"):
        attention(x, x, x, mask_mod=mask)


def test_one_made_from_another_holds_its_function():
    array = np.zeros(40)
    small = block_mask(lambda b, h, i, j: array[j] == 0, 20, 20)
    mask = block_mask(small, 40, 40)
    assert mask.mask_mod is small.mask_mod
    array[3] = 1
    with pytest.raises(ValueError, match="captures a value that has changed since"):
        attention(np.zeros((40, 4)), np.zeros((40, 4)), np.zeros((40, 4)), mask_mod=mask)


@pytest.mark.parametrize(
    ("function", "sizes", "error", "sentence"),
    [
        (None, {}, TypeError, "mask_mod is None: expected a function"),
        (lambda b, h, i, j: b > j, {}, ValueError, "B is None: expected a number, because mask_"),
        (lambda b, h, i, j: h > j, {"B": 2}, ValueError, "H is None"),
        (lambda b, h, i, j: j - i, {}, TypeError, "mask_mod returned int64: expected bool"),
        (lambda b, h, i, j: True, {"Lq": 4.0}, TypeError, "Lq is 4.0: expected an integer"),
    ],
)
def test_wrong_arguments(function, sizes, error, sentence):
    with pytest.raises(error, match=sentence):
        block_mask(function, **{"Lq": 4, "Lk": 4, **sizes})
