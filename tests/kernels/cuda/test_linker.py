"""What is launched: the linker's machine code, of which the other tests count instructions."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from cuda.core import Linker, LinkerOptions, ObjectCode
from emulator import compiled

from minimha.equations.problem import Problem
from minimha.kernels import disk
from minimha.kernels.cuda import cubins, ptxas, sass
from minimha.kernels.cuda.launch import launches_of
from minimha.kernels.cuda.linker import MachineCode

NO_DISASSEMBLER = "nvdisasm, which lists machine instructions, is not found"
# By rung, width and compute capability: at most so many instructions of a whole tile, loads and
# stores of spilled registers in all; and so many ``setmaxnreg``.
PER_TILE = {
    ("cuda.rung6_warpgroups", 64, (9, 0)): (470, 0, 2),
    ("cuda.rung6_warpgroups", 128, (9, 0)): (525, 0, 2),
    ("cuda.rung6_warpgroups", 256, (9, 0)): (540, 0, 2),
    ("cuda.rung4_tensor_cores", 128, (8, 0)): (985, 8, 0),
}
WIDTHS = (64, 72, 80, 96, 128, 256)
ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
# 192 numbers of a thread are in 255 registers: for sm_120 three of a width of 128 are spilled.
SPILLED = {("cuda.rung4_tensor_cores", 128, (12, 0)): 3}


def launch_of(rung, D):
    q, k = (np.zeros((1, 1, n, D), ml_dtypes.bfloat16) for n in (256, 4096))
    (launch,) = launches_of(rung, Problem.of(q, k, k))
    return launch


@pytest.mark.parametrize(("rung", "D", "cc"), PER_TILE)
def test_what_a_call_launches_is_what_the_tiles_need(rung, D, cc, monkeypatch, tmp_path):
    if ptxas.nvdisasm() is None:
        pytest.skip(NO_DISASSEMBLER)
    monkeypatch.setattr(disk, "folders", lambda: [tmp_path])
    name, code = cubins.cubin(launch_of(rung, D), cc)
    kernel = MachineCode(name, code, "")
    found, names = ptxas.statistics(kernel), [one.name for one in sass.parse(ptxas.listing(kernel))]
    most, most_local, changes = PER_TILE[rung, D, cc]
    assert 0 < len(sass.whole_tile(sass.parse(ptxas.listing(kernel)))) <= most
    assert found["tile_local"] == 0
    assert found["all_local"] <= most_local
    assert names.count("USETMAXREG") == changes


@pytest.mark.parametrize("cc", ARCHITECTURES)
@pytest.mark.parametrize("D", WIDTHS)
def test_whole_tiles_use_no_local_memory(D, cc):
    if ptxas.nvdisasm() is None:
        pytest.skip(NO_DISASSEMBLER)
    for rung in ("cuda.rung4_tensor_cores", *["cuda.rung6_warpgroups"] * (cc == (9, 0))):
        found = ptxas.statistics(compiled(launch_of(rung, D), cc).machine_code())
        assert found["tile_local"] == SPILLED.get((rung, D, cc), 0)
        assert found["warnings"] == 0


@pytest.mark.parametrize(("D", "cc"), [(64, (10, 0)), (128, (12, 0)), (256, (12, 0))])
def test_arrays_stay_in_registers_on_later_architectures_too(D, cc):
    kernel = compiled(launch_of("cuda.rung4_tensor_cores", D), cc).machine_code()
    found = ptxas.statistics(kernel)
    assert found["stack"] <= (24 if D == 128 else 0)
    assert found["warnings"] == 0
    assert f"for 'sm_{cc[0]}{cc[1]}'" in kernel.report


def test_the_report_of_code_to_be_linked_with_other_code_has_warnings():
    launch = launch_of("cuda.rung6_warpgroups", 64)
    options = LinkerOptions(arch="sm_90a", max_register_count=launch.registers, verbose=True)
    linker = Linker(ObjectCode.from_ptx(compiled(launch).ptx().encode()), options=options)
    code = bytes(linker.link("cubin").code)
    kernel = MachineCode("", code, linker.get_info_log())
    assert "(C7504)" in kernel.report  # setmaxnreg is ignored
    assert "(C7509)" in kernel.report  # wgmma is serialized
    assert ptxas.statistics(kernel)["warnings"] >= 2
    assert ptxas.statistics(compiled(launch).machine_code())["warnings"] == 0


def test_the_name_is_that_of_the_kernel():
    kernel = compiled(launch_of("cuda.rung4_tensor_cores", 64))
    assert f".visible .entry {kernel.machine_code().name}(" in kernel.ptx()
