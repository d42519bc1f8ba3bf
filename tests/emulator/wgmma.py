"""``wgmma``: PTX ISA 9.0, section 9.7.15, with matrices in the 128-byte swizzle.

A product is computed when it is started. Until it has been waited for nobody may access registers
that it reads or changes, nor overwrite shared memory that it reads. Registers that another
instruction accessed must be passed by ``wgmma.fence`` first, shared memory that one wrote by
``fence.proxy.async`` in the thread that wrote it.

Each warp computes its own 16 rows, but reads all 64 of its warpgroup, since the ISA does not say
who reads what; that all four warps of a warpgroup take part is not checked.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from emulator.instructions import eight_by_eight, instruction, widened
from emulator.parse import components
from emulator.team import FREE, WARP

SHAPE = re.compile(r"m64n(\d+)k16")
SWIZZLE_128 = 1 << 14  # of a descriptor from bit 48 on, without which there is no other
ROW, CHUNK = 128, 16  # bytes


class Product(NamedTuple):
    """A product under way."""

    threads: np.ndarray  # the threads that take part, as indices into their team
    group: np.ndarray  # the number of groups that each had committed before
    at: np.ndarray  # (threads, chunks of each): starts of their chunks in shared memory's data


@instruction("wgmma")
def _wgmma(kernel, words, operands):
    if words[1] in ("fence", "commit_group"):
        return {"fence": pass_fence, "commit_group": commit}[words[1]]
    if words[1] == "wait_group":
        return lambda team: finish(team, int(operands[0]))
    N, kind = int(SHAPE.fullmatch(words[4])[1]), words[-1]
    is_in_registers = operands[1].startswith("{")
    others = ["1", "1", "1"] if is_in_registers else ["1", "1", "0", "0"]
    if kind not in ("f16", "bf16") or words[5:] != ["f32", kind, kind] or N % 16:
        raise NotImplementedError("forms of wgmma")
    if operands[4:] != others:
        raise NotImplementedError("signs and orders of wgmma")
    A_kind = "u32" if is_in_registers else "u64"
    D = [kernel.operand(name, "f32") for name in components(operands[0])]
    A = [kernel.operand(name, A_kind) for name in components(operands[1])]
    B, adds = kernel.operand(operands[2], "u64"), kernel.predicate(operands[3])
    used = [kernel.watch(i) for i in (D + A if is_in_registers else D)]

    def run(team):
        warps = team.collective()
        start(team, used)
        if is_in_registers:
            corners = [eight_by_eight(team, i, warps, kind) for i in A]
            a = np.block([[corners[0], corners[2]], [corners[1], corners[3]]])
            b, at = matrix(team, B, warps, kind, by_columns(N))
        else:
            first = 16 * (team.by_warp(team.warp, warps)[:, :1] % 4)
            a, at_A = matrix(team, A[0], warps, kind, by_rows(np.arange(64)[None]))
            a = np.take_along_axis(a, (first + np.arange(16))[..., None], axis=1)
            b, at = matrix(team, B, warps, kind, by_rows(np.arange(N)[None]))
            b, at = b.transpose(0, 2, 1), np.hstack([at_A, at])
        team.products.append(Product(team.lanes, team.product_groups[team.lanes], at))
        add(team, warps, D, team.holds(adds), a @ b)

    return run


def start(team, used):
    """Let the active threads' registers in those rows of ``used_by`` be used from now on."""
    rows = np.ix_(used, team.lanes)
    is_unfenced = (team.used_by[rows] == FREE) & ~team.is_fenced[rows]
    if is_unfenced.any():
        team.fail(is_unfenced.any(axis=0), "uses a register that no wgmma.fence was passed with")
    team.used_by[rows] = team.product_groups[team.lanes]


def add(team, warps, D, adds, product):
    """D = product, or D + product: (warps, 16, N) in fragments as those of ``mma``."""
    adds = team.by_warp(adds, warps)
    for n, (e, to) in [(i // 4, (i % 4, to)) for i, to in enumerate(D)]:
        rows = product[:, 8 * (e // 2) : 8 * (e // 2) + 8, 8 * n : 8 * n + 8]
        number = rows.reshape(-1, WARP, 2)[:, :, e % 2]
        register = team.registers["f32"][to]
        before = np.where(adds, team.by_warp(register, warps), np.float32(0))
        team.write_by_warp(register, warps, before + number)


# ---- matrices in shared memory: 9.7.15.5


def by_rows(rows):
    """Chunks of ``rows``, (warps, rows), of 16 numbers each: (warps, rows, 2) offsets."""

    def offsets(leading, stride):
        return (rows // 8 * stride + rows % 8 * ROW)[..., None] + CHUNK * np.arange(2)

    return offsets


def by_columns(N):
    """Chunks of 16 rows of ``N`` numbers each; 64 of them are followed by the next panel."""
    row, chunk = np.arange(16)[:, None], np.arange(N // 8)

    def offsets(leading, stride):
        leading, stride = leading[..., None], stride[..., None]
        return row // 8 * stride + row % 8 * ROW + chunk // 8 * leading + chunk % 8 * CHUNK

    return offsets


def matrix(team, register, warps, kind, offsets):
    """The matrix that each warp's descriptor describes, and where its chunks are.

    ``offsets`` gives the (rows, chunks of a row) before the swizzle, from the descriptor's leading
    and stride offsets.
    """
    descriptors = team.by_warp(team.registers["u64"][register], warps)
    team.check(descriptors.ravel(), (descriptors != descriptors[:, :1]).ravel(), "is of one lane")
    start, leading, stride, mode = (
        (descriptors[:, :1] >> np.uint64(shift)).astype(np.int64) & 0xFFFF
        for shift in (0, 16, 32, 48)
    )
    if (mode != SWIZZLE_128).any():
        raise NotImplementedError("descriptors without the 128-byte swizzle")
    at = CHUNK * start[..., None] + offsets(CHUNK * leading, CHUNK * stride)
    at ^= (at >> 7 & 7) << 4
    warps_here, rows, chunks = at.shape
    shared = team.memories["shared"]
    of_threads = at.reshape(warps_here, -1, WARP).transpose(1, 0, 2).reshape(-1, len(team.lanes))
    places = np.stack([shared.locate(team, some, CHUNK) for some in of_threads], axis=1)
    shared.note_product(team, places, CHUNK)
    place = places.reshape(warps_here, WARP, -1).transpose(0, 2, 1).reshape(at.shape)
    bits = shared.data.view(np.uint16)[place[..., None] // 2 + np.arange(8)]
    return widened(bits.reshape(warps_here, rows, 8 * chunks), kind), places


# ---- in order


def pass_fence(team):
    team.collective()
    team.is_fenced[:, team.lanes] = True


def commit(team):
    team.collective()
    team.product_groups[team.lanes] += 1


def finish(team, pending):
    """Let all but the last ``pending`` groups of the active threads come to an end."""
    team.collective()
    oldest = team.product_groups - pending
    rows = np.ix_(np.arange(len(team.used_by)), team.lanes)
    team.used_by[rows] = np.where(team.used_by[rows] < oldest[team.lanes], FREE, team.used_by[rows])
    is_active, before, kept = team.is_active, team.mask, []
    shared = team.memories["shared"]
    for product in team.products:
        is_due = is_active[product.threads] & (product.group < oldest[product.threads])
        if is_due.any():
            due = np.zeros(team.size, bool)
            due[product.threads[is_due]] = True
            team.activate(due)
            shared.end_product(team, product.at[is_due], CHUNK)
        if not is_due.all():
            kept.append(Product(*(column[~is_due] for column in product)))
    team.products = kept
    team.activate(before)


def watched(action, rows):
    """An instruction that names registers in those rows of ``used_by``."""

    def run(team):
        here = np.ix_(rows, team.lanes)
        is_used = team.used_by[here] != FREE
        if is_used.any():
            team.fail(is_used.any(axis=0), "uses a register of a wgmma that was not waited for")
        team.is_fenced[here] = False
        action(team)

    return run
