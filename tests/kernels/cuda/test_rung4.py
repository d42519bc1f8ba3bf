"""What concerns rung 4 alone: swizzled tiles, strides, nonfinite values, and its instructions.

That it computes attention, with every option, is tested with the other rungs that take addresses.
"""

import numpy as np
import pytest
from problems import run

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
import ml_dtypes
from gpu_problems import download, upload

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as cuda_entry
from minimha.kernels.cuda import ptxas, rung4_tensor_cores
from minimha.kernels.cuda.parts import fragments

inf, nan = np.inf, np.nan
WIDTHS = range(16, 257, 16)


def given(Lq=40, Lk=90, D=16, H=2, Hkv=1, B=1, dtype=ml_dtypes.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def solve(q, k, v, order=None, place=upload, **options):
    """O and L, in float64, from the emulator; ``place`` puts the problem into its memory."""
    problem, memory = Problem.of(q, k, v, **options), emulator.Arena()
    arguments = place(problem, memory)
    for launch, with_what in rung4_tensor_cores.launches(problem, arguments, memory.scratch):
        emulator.run(launch, with_what, memory, order)
    return [x.astype(np.float64) for x in download(problem, arguments, memory)]


def exact(q, k, v, **options):
    """O and L in float64."""
    with np.errstate(invalid="ignore"):
        return run("dense", *(x.astype(np.float64) for x in (q, k, v)), **options)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_two_chunks_share_a_place(width):
    chunks = width // 8
    places = {
        fragments.swizzled(row, chunk, chunks) for row in range(64) for chunk in range(chunks)
    }
    assert places == set(range(0, 64 * width * 2, 16))


@pytest.mark.parametrize("width", WIDTHS)
def test_eight_rows_of_one_column_are_in_different_banks(width):
    for chunk in range(width // 8):
        for first in range(0, 64, 8):
            places = [fragments.swizzled(row, chunk, width // 8) for row in range(first, first + 8)]
            assert len({place % 128 for place in places}) == 8


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chunk_is_found_from_the_first_of_its_row_or_of_one_above(width):
    chunks = width // 8
    for row in range(64):
        for first in range(2):
            for d in range(0, chunks - first, 2):
                tile = 3 * fragments.ALIGNMENT
                place = tile + fragments.swizzled(row % 16, first, chunks)
                below = row // 16 * 16 * 2 * width
                expected = tile + fragments.swizzled(row, first + d, chunks)
                assert fragments.moved(place, d, chunks) + below == expected


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}])
def test_tiles_begin_where_their_chunks_can_be_found(width, options):
    made_for = rung4_tensor_cores.variant(Problem.of(*given(D=width), **options))
    group = 16 * (width // 8 & -(width // 8))  # bytes
    assert fragments.ALIGNMENT % group == 0
    for rows in rung4_tensor_cores.blocks(made_for):
        assert rows * width * 2 % group == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"attn_mask": np.ones((1, 9), bool)}])
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_fit_into_99_kilobytes_and_whole_warps(width, options, dtype):
    q, k, v = given(Lq=1, Lk=9, D=width, dtype=np.dtype(dtype))
    made_for = rung4_tensor_cores.variant(Problem.of(q, k, v, **options))
    B_r, B_c = rung4_tensor_cores.blocks(made_for)
    assert B_r % (16 * rung4_tensor_cores.WARPS) == 0
    assert B_c % 16 == 0
    assert B_c <= 64  # ``visible`` has 32 bits, 4 for every 8 keys
    assert rung4_tensor_cores.shared_bytes(made_for) <= 99 * 1024


@pytest.mark.parametrize("order", [None, 0])
def test_two_blocks_with_tiles_of_32_keys_fit_into_a_multiprocessor_of_sm_80(order):
    q, k, v = given(Lq=150, Lk=200, D=128)
    problem, memory = Problem.of(q, k, v, is_causal=True, q_offset=50), emulator.Arena()
    arguments = upload(problem, memory)
    ((launch, values),) = rung4_tensor_cores.launches(
        problem, arguments, memory.scratch, B_c=32
    )  # fmt: skip
    registers = ptxas.statistics(emulator.compiled(launch, (8, 0)).machine_code())["registers"]
    assert launch.threads * registers * 2 <= 65536
    assert 2 * (launch.shared + 1024) <= 164 * 1024  # of which the system takes 1 KB per block
    emulator.run(launch, values, memory, order)
    O, L = (x.astype(np.float64) for x in download(problem, arguments, memory))
    exact_O, exact_L = exact(q, k, v, is_causal=True, q_offset=50)
    np.testing.assert_allclose(O, exact_O, atol=2e-2)
    np.testing.assert_allclose(L, exact_L, atol=1e-5)
    found = ptxas.statistics(emulator.compiled(launch, (8, 0)).machine_code())
    assert found["spill"] == found["stack"] == 0


@pytest.mark.parametrize("order", [None, 0])
def test_rows_may_be_stored_in_any_order(order):
    q, k, v = given(B=2, H=4, Hkv=2)
    options = {"is_causal": True, "q_offset": 50}

    def place_lengths_first(problem, memory):
        """As (L, B, H, D): O too."""
        arguments = upload(problem, memory)

        def moved(array):
            B, H, _, D = array.shape
            address = memory.put(np.ascontiguousarray(array.transpose(2, 0, 1, 3)))
            return cuda_entry.Rows(address, H * D, D, B * H * D)

        names = {name: moved(getattr(problem, name)) for name in "qkv"}
        return arguments._replace(**names)

    for ours, theirs in zip(
        solve(q, k, v, order, place_lengths_first, **options),
        solve(q, k, v, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_that_begin_between_16_bytes_are_refused():
    problem = Problem.of(*given())
    arguments = upload(problem, emulator.Arena())
    for wrong in (
        arguments.k._replace(address=arguments.k.address + 8),
        arguments.k._replace(row=20),
    ):
        with pytest.raises(ValueError, match=r"^k begins at .* multiples of 16 bytes"):
            rung4_tensor_cores.launches(problem, arguments._replace(k=wrong), None)


def assert_nonfinite_values_add_up(rung, order, **sizes):
    """Those of many tiles reach the rows that see them, and no others."""
    q, k, v = given(Lk=300, **sizes)
    seen = np.random.default_rng(1).random((40, 300)) < 0.7
    seen[:, 60] = seen[:, 200] = np.arange(40) < 20
    seen[:, 130] = np.arange(40) >= 10
    seen[:, 299] = np.arange(40) == 7
    v[0, 0, 60, 3], v[0, 0, 130, 3] = inf, -inf  # NaN where both are seen
    v[0, 0, 200, [5, 6]], v[0, 0, 299, 6] = inf, nan
    v[0, 0, ~seen.any(0)] = nan
    found = emulator.forward(rung, Problem.of(q, k, v, attn_mask=seen), order)
    O, L = (x.astype(np.float64) for x in found)
    exact_O, exact_L = exact(q, k, v, attn_mask=seen)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(O), kind(exact_O))
    finite = np.isfinite(exact_O)
    assert abs(O - np.where(finite, exact_O, 0))[finite].max() < 2.0**-7
    np.testing.assert_allclose(L, exact_L, atol=1e-5)


@pytest.mark.parametrize("order", [None, 0])
def test_nonfinite_values_of_many_tiles_add_up_where_they_are_seen(order):
    assert_nonfinite_values_add_up(rung4_tensor_cores, order)


@pytest.mark.parametrize("spread", [1e-3, 1, 1e6])
@pytest.mark.parametrize("softcap", [2.0**-100, 0.5, 1e4, 1e30])
def test_a_softcap_is_exact_however_small_or_large_its_scores_are(softcap, spread):
    q, k, v = given(Lq=8, Lk=16, dtype=np.float16)
    options = {"softcap": softcap, "scale": spread}
    _, L = solve(q, k, v, **options)
    _, exact_L = exact(q, k, v, **options)
    largest = min(softcap, spread * 100)
    np.testing.assert_allclose(L, exact_L, rtol=2e-6, atol=2e-6 * largest + 1e-6)


def assert_only_partial_tiles_are_masked(rung, Lk, **sizes):
    """Not those of queries that see all keys; with one key hidden from the first query they are."""
    problem = given(Lq=128, Lk=Lk, **sizes)
    masking = "ld.global.s64"  # only there lengths and offsets are read again

    def trapped(text):
        assert masking in text
        return text.replace(masking, f"trap; {masking}")

    def forward(q_offset):
        causal = Problem.of(*problem, is_causal=True, q_offset=q_offset)
        emulator.forward(rung, causal, change=trapped)

    forward(q_offset=Lk - 1)
    with pytest.raises(emulator.PTXError, match="trap"):
        forward(q_offset=Lk - 2)


@pytest.mark.parametrize("Lk", [64, 192])
def test_only_partial_tiles_are_masked(Lk):
    assert_only_partial_tiles_are_masked(rung4_tensor_cores, Lk)


MOST = {64: 5.36, 128: 3.9}  # machine instructions per product on the tensor cores, by width


def test_the_instructions_are_those_that_the_tiles_need():
    for found in ptxas.assembled(("cuda.rung4_tensor_cores",)):
        W, M, B_c = found.head_dim, 2, 64
        # O stays in registers only if the loop over its columns is unrolled, and addresses are
        # immediates only if that over the columns of K is. In the rare tiles with nonfinite values
        # all loops are left as they are.
        scores, values, marks = M * B_c // 8 * W // 16, M * W // 8 * B_c // 16, 2
        assert found.mma == scores + values + marks
        assert found.ldmatrix == (M + B_c // 16) * W // 16 + W // 16 * B_c // 16 + 1
        # Q_i, and K_j and V_j before and in the loop, 16 bytes per thread.
        assert found.cp_async == (128 + 4 * B_c) * W * 2 // 16 // 128
        assert found.local == 0
        # O_i and S_ij of a width of 128 are 192 registers: what only partial tiles use is spilled.
        assert found.stack <= (0 if W == 64 else 16)
        assert found.tile_local in (0, None)
        assert found.registers <= 255
        assert found.warnings == 0
        assert found.per_product is None or found.per_product <= MOST[W]
    if ptxas.nvdisasm() is None:
        pytest.skip("compiled, but nvdisasm, which lists a tile's instructions, is not found")
