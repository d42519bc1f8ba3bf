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

# For later architectures NVVM has another optimizer, which leaves loops over registers as they are.
NEWEST = (9, 0)


class MachineCode(NamedTuple):
    """The ``name`` and the machine ``code`` of a kernel, and what the assembler reports."""

    name: str
    code: bytes
    report: str


class Intermediate(NamedTuple):
    """A kernel's LTO-IR for ``arch``, and the most ``registers`` of a thread or None.

    ``newer`` is an architecture after ``NEWEST``, for which the PTX for ``arch`` is assembled.
    """

    code: bytes
    arch: str
    registers: int | None
    newer: str | None = None

    def machine_code(self) -> MachineCode:
        """Return the kernel as a GPU executes it."""
        if self.newer is None:
            code, report = self._optimized("cubin")
        else:
            source = ObjectCode.from_ptx(self.ptx().encode())
            code, report = self._linked(source, "cubin", arch=self.newer)
        # The kernel has the one section of instructions that is not NVIDIA's.
        (name,) = set(re.findall(rb"\.text\.(?!__cuda)([\w$]+)\0", code))
        return MachineCode(name.decode(), code, report)

    def ptx(self) -> str:
        """Return the PTX that the linker would assemble."""
        return self._optimized("ptx", ptx=True)[0].rstrip(b"\0").decode()

    def _optimized(self, kind: str, **how: Any) -> tuple[bytes, str]:
        source = ObjectCode.from_ltoir(self.code)
        return self._linked(source, kind, arch=self.arch, link_time_optimization=True, **how)

    def _linked(self, source: ObjectCode, kind: str, **how: Any) -> tuple[bytes, str]:
        options = LinkerOptions(max_register_count=self.registers, verbose=True, **how)
        linker = Linker(source, options=options)
        return bytes(linker.link(kind).code), str(linker.get_info_log())


def compiled(launch: Launch, cc: tuple[int, int] = (9, 0)) -> Intermediate:
    """Return the kernel of ``launch`` for compute capability ``cc``."""
    how = {"device": False, "abi": "numba", "launch_bounds": (launch.threads, 1)}
    target = (*cc, "a") if launch.is_arch_specific else min(cc, NEWEST)
    run = partial(cuda.compile, launch.function, launch.signature, cc=target, **how)
    code, _ = in_another_thread(partial(run, output="ltoir"))
    newer = arch_of(launch, cc) if cc > NEWEST else None
    return Intermediate(bytes(code), arch_of(launch, min(cc, NEWEST)), launch.registers, newer)
