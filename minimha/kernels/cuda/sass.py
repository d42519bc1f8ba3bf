"""Count a kernel's machine instructions (SASS) per tile, as nvdisasm lists them.

The tile is a whole one: the body of the loop with the most products on the tensor cores, or else
with the most fused multiply-adds, from its head to the branch back. With tensor cores, code that a
branch can skip is not counted if it has a selection (SEL, FSEL) and no copy (LDGSTS): such code
masks partial tiles or shifts scores that are far from 0. Other code that can be skipped counts,
such as the copy of the next tile or the rescaling of O_i. ptxas puts the retry loops of mbarriers
at the end of the program; a branch from there back into the tile is not a loop.

References: NVIDIA, "CUDA Binary Utilities", section on nvdisasm.
"""

import re
from typing import NamedTuple

TENSOR_CORE = ("HMMA", "HGMMA")  # mma.sync, wgmma
MULTIPLY_ADD = ("FFMA", "DFMA")
LOCAL = ("LDL", "STL")  # loads and stores of spilled registers
SELECT, COPY = {"SEL", "FSEL"}, {"LDGSTS"}
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);")
LABEL = re.compile(r"(\.L_\w+):")


class Instruction(NamedTuple):
    """A machine instruction: its name, such as "HMMA", and its branch target's index or None."""

    name: str
    target: int | None


def parse(listing: str) -> list[Instruction]:
    """Return the machine instructions in ``listing``, the output of nvdisasm.

    >>> parse('''
    ... .L_x_1:
    ...         /*0000*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
    ...         /*0010*/               @P0 BRA `(.L_x_1) ;
    ... ''')
    [Instruction(name='HMMA', target=None), Instruction(name='BRA', target=0)]
    """
    found: list[tuple[str, ...]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            found.append(instruction.groups())
    return [
        Instruction(name.split(".")[0], _target(name, operands, labels)) for name, operands in found
    ]


def _target(name: str, operands: str, labels: dict[str, int]) -> int | None:
    # BRA.DIV goes to a copy of the code for warps whose lanes have diverged.
    label = re.search(r"\.L_\w+", operands)
    is_branch = name.startswith("BRA") and ".DIV" not in name
    return labels.get(label[0]) if label and is_branch else None


def whole_tile(instructions: list[Instruction]) -> list[str]:
    """Return the names of the instructions of one whole tile, or [] if no loop has products."""
    has_tensor_cores = any(one.name in TENSOR_CORE for one in instructions)
    products = TENSOR_CORE if has_tensor_cores else MULTIPLY_ADD
    loops = [
        (-sum(one.name in products for one in instructions[one.target : last]), last, one.target)
        for last, one in enumerate(instructions)
        if one.target is not None and one.target <= last
        if instructions[last - 1].target != last - 2
    ]
    if not loops or min(loops)[0] == 0:
        return []
    _, last, at = min(loops)
    names = []
    while at <= last:
        name, target = instructions[at]
        names.append(name)
        at += 1
        if has_tensor_cores and target is not None and at < target <= last:
            skipped = {one.name for one in instructions[at:target]}
            at = target if skipped & SELECT and not skipped & COPY else at
    return names


def per_product(names: list[str]) -> float | None:
    """Return the number of instructions per product on the tensor cores, or None without any."""
    products = sum(name in TENSOR_CORE for name in names)
    return round(len(names) / products, 2) if products else None
