"""The machine code of CUDA kernels, for one compute capability; no GPU and no driver is needed."""

import re

from cuda.core import Program, ProgramOptions

from minimha.kernels.cuda.launch import Launch, ptx


def cubin(launch: Launch, cc: tuple[int, int]) -> tuple[str, bytes]:
    """The kernel's name and its machine code for compute capability ``cc``."""
    text = ptx(launch, cc)
    (name,) = re.findall(r"\.visible \.entry ([\w$]+)\(", text)
    return name, machine_code(text, cc, launch.registers)


def machine_code(text: str, cc: tuple[int, int], registers: int | None) -> bytes:
    """PTX as machine code; ``registers`` is the most that one thread may use."""
    options = ProgramOptions(arch=f"sm_{cc[0]}{cc[1]}", max_register_count=registers)
    return bytes(Program(text, "ptx", options).compile("cubin").code)
