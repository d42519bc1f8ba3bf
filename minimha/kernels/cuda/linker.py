"""Compile a kernel to machine code with numba and nvJitLink, without a GPU or a driver.

numba compiles the kernel to LTO-IR, the representation for link time optimization, and nvJitLink
compiles this to a whole program. From PTX, nvJitLink compiles code to be linked with other code, as
``ptxas -c`` does. Such code ignores ``setmaxnreg`` and serializes ``wgmma``, so PTX is assembled
only for architectures after ``NEWEST``.

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
    """A kernel's name, its machine code, and the report of the assembler."""

    name: str
    code: bytes
    report: str


class Intermediate(NamedTuple):
    """A kernel's LTO-IR for the architecture ``arch``, such as "sm_90".

    If ``newer`` is given, it is an architecture after ``NEWEST``. The machine code is then for
    ``newer``, assembled from PTX for ``arch``.
    """

    code: bytes
    arch: str
    newer: str | None = None

    def machine_code(self) -> MachineCode:
        """Return the kernel's name, its machine code, and the report of the assembler."""
        if self.newer is None:
            code, report = self._optimized("cubin")
        else:
            source = ObjectCode.from_ptx(self.ptx().encode())
            code, report = self._linked(source, "cubin", arch=self.newer)
        # The kernel has the one section of instructions that is not NVIDIA's.
        (name,) = set(re.findall(rb"\.text\.(?!__cuda)([\w$]+)\0", code))
        return MachineCode(name.decode(), code, report)

    def ptx(self) -> str:
        """Return the kernel's PTX, from which the linker assembles machine code."""
        return self._optimized("ptx", ptx=True)[0].rstrip(b"\0").decode()

    def _optimized(self, kind: str, **how: Any) -> tuple[bytes, str]:
        source = ObjectCode.from_ltoir(self.code)
        return self._linked(source, kind, arch=self.arch, link_time_optimization=True, **how)

    def _linked(self, source: ObjectCode, kind: str, **how: Any) -> tuple[bytes, str]:
        options = LinkerOptions(verbose=True, **how)
        linker = Linker(source, options=options)
        return bytes(linker.link(kind).code), str(linker.get_info_log())


def compiled(launch: Launch, cc: tuple[int, int] = (9, 0)) -> Intermediate:
    """Compile the kernel of ``launch`` to LTO-IR for compute capability ``cc``."""
    how = {"device": False, "abi": "numba", "launch_bounds": (launch.threads, launch.blocks)}
    target = (*cc, "a") if launch.is_arch_specific else min(cc, NEWEST)
    run = partial(cuda.compile, launch.function, launch.signature, cc=target, **how)
    code, _ = in_another_thread(partial(run, output="ltoir"))
    newer = arch_of(launch, cc) if cc > NEWEST else None
    return Intermediate(bytes(code), arch_of(launch, min(cc, NEWEST)), newer)
