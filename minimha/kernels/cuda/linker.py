"""Compile a kernel to machine code, without a GPU or a driver: numba's compiler, then nvJitLink.

The compiler writes LTO-IR, an intermediate representation, for link time optimization. nvJitLink
makes a whole program of it. Of PTX nvJitLink makes code to be linked with other code, as
``ptxas -c`` does: that ignores ``setmaxnreg`` and serializes ``wgmma``.

Reference: NVIDIA, "nvJitLink", sections on compatibility and on link time optimization.
"""

import re
from functools import partial
from typing import Any, NamedTuple

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda

from minimha.kernels.cuda.launch import Launch, arch_of
from minimha.kernels.os_threads import in_another_thread


class MachineCode(NamedTuple):
    """The ``name`` and the machine ``code`` of a kernel, and what the assembler reports."""

    name: str
    code: bytes
    report: str


class Intermediate(NamedTuple):
    """A kernel's LTO-IR for one architecture, and the most ``registers`` of a thread or None."""

    code: bytes
    arch: str
    registers: int | None

    def machine_code(self) -> MachineCode:
        """Return the kernel as a GPU executes it."""
        code, report = self._linked("cubin")
        (name,) = set(re.findall(rb"\.text\.([\w$]+)\0", code))  # its one section of instructions
        return MachineCode(name.decode(), code, report)

    def ptx(self) -> str:
        """Return the PTX that the linker would assemble."""
        return self._linked("ptx", ptx=True)[0].rstrip(b"\0").decode()

    def _linked(self, kind: str, **how: Any) -> tuple[bytes, str]:
        options = LinkerOptions(
            arch=self.arch, max_register_count=self.registers, link_time_optimization=True,
            verbose=True, **how,
        )  # fmt: skip
        linker = Linker(ObjectCode.from_ltoir(self.code), options=options)
        return bytes(linker.link(kind).code), str(linker.get_info_log())


def compiled(launch: Launch, cc: tuple[int, int] = (9, 0)) -> Intermediate:
    """Return the kernel of ``launch`` for compute capability ``cc``."""
    how = {"device": False, "abi": "numba", "launch_bounds": (launch.threads, 1)}
    target = (*cc, "a") if launch.is_arch_specific else cc
    run = partial(cuda.compile, launch.function, launch.signature, cc=target, **how)
    code, _ = in_another_thread(partial(run, output="ltoir"))
    return Intermediate(bytes(code), arch_of(launch, cc), launch.registers)
