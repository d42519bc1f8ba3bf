"""What concerns rung 6 alone: tiles as ``wgmma`` reads them, nonfinite values, its instructions.

That it computes attention, with every option, is tested with the other rungs that take addresses;
that the emulator would notice if it were wrong, in ``tests/emulator/test_broken_warpgroups.py``.
"""

import re

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda, which compiles the kernels, is not installed")

import emulator
from kernels.cuda.test_rung4 import (
    assert_nonfinite_values_add_up,
    assert_only_partial_tiles_are_masked,
    given,
)

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as kernel_arguments
from minimha.kernels.cuda import ptxas, rung4_tensor_cores, rung6_warpgroups
from minimha.kernels.cuda.launch import arch_of
from minimha.kernels.cuda.parts import warpgroups

WIDTHS = range(16, 257, 16)
OPTIONS = [{}, {"softcap": 1.0}, {"attn_mask": np.ones((1, 9), bool)}]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chunk_is_where_the_128_byte_swizzle_has_it(width):
    rows, places = 64, []
    for row in range(rows):
        for chunk in range(width // 8):
            panel, column = divmod(chunk, 8)
            plain = panel * rows * 128 + row * 128 + column * 16
            # Bits 4 to 6 of an address are XORed with bits 7 to 9.
            assert warpgroups.swizzled(row, chunk, rows) == plain ^ (plain >> 7 & 7) << 4
            places.append(warpgroups.swizzled(row, chunk, rows))
    assert len(set(places)) == len(places)
    assert max(places) < warpgroups.tile_bytes(rows, width)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_block_fits_into_a_multiprocessor_of_hopper(width, options):
    problem = Problem.of(*given(Lq=1, Lk=9, D=width), **options)
    B_r, B_c = rung6_warpgroups.blocks(rung6_warpgroups.variant(problem))
    ((launch, _),) = rung6_warpgroups.launches(problem, kernel_arguments.PLACEHOLDERS, None)
    assert launch.threads == B_r // 64 * 128 + 128  # a warpgroup has 64 rows, or copies
    assert B_c % 16 == 0
    assert B_c <= 128  # ``visible`` is two times 32 bits, 4 for every 8 keys
    assert launch.shared <= 227 * 1024
    at_first, copying, multiplying = rung6_warpgroups.registers(B_r)
    assert 128 * copying + 2 * B_r * multiplying <= at_first * launch.threads <= 65536
    assert arch_of(launch, (9, 0)) == "sm_90a"


@pytest.mark.parametrize("width", [128, 144])
@pytest.mark.parametrize("options", [*OPTIONS[1:], {"scale": -1.0}, {"attn_bias": np.ones((1, 9))}])
def test_options_of_single_scores_leave_wide_heads_to_rung_4(options, width):
    problem = Problem.of(*given(Lq=1, Lk=9, D=width), **options)
    reason = rung6_warpgroups.unsupported(problem)
    assert (reason is None) == (width == 128)
    assert reason is None or "144 wide" in reason
    assert rung4_tensor_cores.unsupported(problem) is None


@pytest.mark.parametrize("order", [None, 0])
def test_nonfinite_values_of_many_tiles_add_up_where_they_are_seen(order):
    assert_nonfinite_values_add_up(rung6_warpgroups, order, D=64)


def test_only_partial_tiles_are_masked():
    assert_only_partial_tiles_are_masked(rung6_warpgroups, Lk=256, D=64)  # two tiles of keys


def test_the_instructions_are_those_that_the_tiles_need():
    for found in ptxas.assembled(("cuda.rung6_warpgroups",)):
        W = found.head_dim
        B_r, B_c = {64: (192, 128), 128: (128, 128)}[W]
        # The keys of the first tile and of the next, the values of this tile and of the last one.
        assert found.mma == 2 * (W // 16) + 2 * (B_c // 16)
        assert found.arch == "sm_90a"
        assert found.ldmatrix == found.local == 0
        assert found.stack == found.spill == 0
        assert found.warnings == 0, "ptxas would say that it serializes products"
        assert found.registers * (2 * B_r + 128) <= 65536
        assert found.all_local in (0, None)
        assert found.per_product is None or found.per_product <= {64: 40, 128: 33}[W]


def test_exponentials_are_computed_between_the_two_waits():
    if ptxas.nvdisasm() is None:
        pytest.skip("nvdisasm, which says in what order instructions are, is not found")
    ((launch, _),) = rung6_warpgroups.launches(
        Problem.of(*given(Lq=9, D=64)), kernel_arguments.PLACEHOLDERS, None
    )
    listing = ptxas.listing(emulator.compiled(launch).machine_code())
    order = re.findall(r"HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR.* gsb0, 0x\d", listing)
    shorter = ["wait" + name[-1] if "DEPBAR" in name else name for name in order]
    (first,) = (i for i, name in enumerate(shorter) if name == "wait1")
    loop = shorter[first - 4 - 8 : first], shorter[first : shorter.index("wait0", first)]
    assert loop[0] == ["HGMMA"] * (64 // 16 + 128 // 16)  # both products are under way
    assert loop[1].count("MUFU.EX2") >= 128 // 2  # of 64 × 128 scores, by 128 threads
