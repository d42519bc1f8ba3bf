"""What is launched: the linker's machine code, of which the other tests count instructions."""

from importlib import import_module

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
pytest.importorskip("cuda.core", reason="the extra cuda is not installed")

from cuda.core import Linker, LinkerOptions, ObjectCode
from emulator import compiled

from minimha.equations.problem import Problem
from minimha.kernels import disk
from minimha.kernels.cuda import cubins, linker, ptxas, sass
from minimha.kernels.cuda.launch import arch_of, launches_of
from minimha.kernels.cuda.linker import MachineCode
from minimha.kernels.ladder import CUDA_LADDER

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
# Loads and stores of spilled registers in a whole tile, by rung, dtype, width and capability.
SPILLED = {
    # Of a thread's 255 registers 192 hold numbers of O_i and S_ij.
    ("cuda.rung4_tensor_cores", "bfloat16", 128, (12, 0)): 4,
    # Here ptxas spills two indices around the loops over 64 numbers each of Q_i and O_i.
    ("cuda.rung2_tiles", "float32", 64, (12, 0)): 2,
    ("cuda.rung2_tiles", "float32", 128, (12, 0)): 2,
    ("cuda.rung2_tiles", "float32", 256, (12, 0)): 2,
}
NEVER = ("cuda.rung6_warpgroups",)  # spills nothing outside of whole tiles either


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


def launches_at(rung, D):
    """Every kernel of a rung, with a dtype that uses it; one kind of 16 bits stands for both."""
    module, found = import_module(f"minimha.kernels.{rung}"), {}
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
        Lq = 1 if "decode" in rung else 256
        q, k = np.zeros((1, 32, Lq, D), dtype), np.zeros((1, 8, 4096, D), dtype)
        if module.unsupported(problem := Problem.of(q, k, k)) is None:
            for launch in launches_of(rung, problem):
                key = launch.function, launch.signature
                found.setdefault(key, (np.dtype(dtype).name, launch))
    return found.values()


def code_for(launch, cc):
    """What is launched on ``cc``; later architectures share the LTO-IR for ``NEWEST``."""
    kernel = compiled(launch, min(cc, linker.NEWEST))
    return kernel if cc <= linker.NEWEST else kernel._replace(newer=arch_of(launch, cc))


@pytest.mark.parametrize("rung", CUDA_LADDER)
@pytest.mark.parametrize("D", WIDTHS)
def test_whole_tiles_use_no_local_memory(rung, D):
    if ptxas.nvdisasm() is None:
        pytest.skip(NO_DISASSEMBLER)
    spilled = {}
    for dtype, launch in launches_at(rung, D):
        for cc in ARCHITECTURES:
            if launch.is_arch_specific and cc != (9, 0):
                continue
            found = ptxas.statistics(code_for(launch, cc).machine_code())
            assert found["warnings"] == 0
            if found["tile_local"] or (rung in NEVER and found["all_local"]):
                spilled[rung, dtype, D, cc] = found["tile_local"]
    assert spilled == {key: most for key, most in SPILLED.items() if key[0] == rung and key[2] == D}


@pytest.mark.parametrize(("D", "cc"), [(64, (10, 0)), (128, (12, 0)), (256, (12, 0))])
def test_arrays_stay_in_registers_on_later_architectures_too(D, cc):
    launch = launch_of("cuda.rung4_tensor_cores", D)
    whole = compiled(launch, cc)
    assert whole._replace(code=b"") == code_for(launch, cc)._replace(code=b"")
    kernel = whole.machine_code()
    found = ptxas.statistics(kernel)
    assert found["stack"] <= (24 if D == 128 else 0)
    assert found["warnings"] == 0
    assert f"for 'sm_{cc[0]}{cc[1]}'" in kernel.report


def test_the_report_of_code_to_be_linked_with_other_code_has_warnings():
    launch = launch_of("cuda.rung6_warpgroups", 64)
    options = LinkerOptions(arch="sm_90a", verbose=True)
    separate = Linker(ObjectCode.from_ptx(compiled(launch).ptx().encode()), options=options)
    code = bytes(separate.link("cubin").code)
    kernel = MachineCode("", code, separate.get_info_log())
    assert "(C7504)" in kernel.report  # setmaxnreg is ignored
    assert "(C7509)" in kernel.report  # wgmma is serialized
    assert ptxas.statistics(kernel)["warnings"] >= 2
    assert ptxas.statistics(compiled(launch).machine_code())["warnings"] == 0


def test_the_name_is_that_of_the_kernel():
    kernel = compiled(launch_of("cuda.rung4_tensor_cores", 64))
    assert f".visible .entry {kernel.machine_code().name}(" in kernel.ptx()
