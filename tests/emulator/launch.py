"""A launch: the blocks of its grid, batch by batch, with warps in lockstep or one by one."""

from __future__ import annotations

from functools import cache

import numpy as np

from emulator.decode import Program
from emulator.memory import Arena, Local, Shared
from emulator.parse import constant, kind_of
from emulator.team import WARP, PTXError, Team
from emulator.waits import refuse_deadlock, release_barriers

BATCH = 4096  # threads of the blocks that are run together


class Emulator:
    """One kernel, decoded once for several launches by ``run``.

    It raises NotImplementedError if something in the kernel is not emulated.
    """

    def __init__(self, text):
        self.program = Program(text)

    def run(self, launch, arguments, memory, order=None):
        """Execute a ``Launch`` with global memory ``memory``, an ``Arena``.

        ``arguments`` are numbers, or nested tuples of them. ``order`` is the seed of a random order
        of warps between barriers; None is lockstep. It raises PTXError if the kernel does something
        that PTX forbids or leaves undefined.
        """
        kernel = self.program.kernel
        values = flattened(arguments)
        if len(values) != len(kernel.parameters):
            raise TypeError(f"{len(kernel.parameters)} parameters, {len(values)} arguments")
        if launch.threads % WARP:
            raise NotImplementedError(f"{launch.threads} threads are not a multiple of {WARP}")
        given = {}
        for (kind, name), value in zip(kernel.parameters, values, strict=True):
            given[name] = constant(kind_of(kind), value)
        for name, table in kernel.tables.items():
            given[name] = memory.put(table)
        grid = (*launch.grid, 1, 1)[:3]
        end, together = int(np.prod(grid)), max(1, BATCH // launch.threads)
        with np.errstate(all="ignore"):
            for first in range(0, end, together):
                blocks = min(together, end - first)
                self._run_blocks(launch, grid, first, blocks, given, memory, order)

    def _run_blocks(self, launch, grid, first, blocks, given, memory, order):
        """Run ``blocks`` of the grid from ``first``: in lockstep as one team, else a team per warp.

        A warp's team has that warp of every block.
        """
        kernel = self.program.kernel
        warps = launch.threads // WARP
        shared = Shared(
            blocks, kernel.static + launch.shared, kernel.granule, warps, order is not None,
            has_products=bool(kernel.watched),
        )  # fmt: skip
        block, thread = np.divmod(np.arange(blocks * launch.threads), launch.threads)
        members = [slice(None)] if order is None else [thread // WARP == i for i in range(warps)]
        teams = []
        for those in members:
            local = Local(len(thread[those]), kernel.local_size)
            memories = {"global": memory, "const": memory, "shared": shared, "local": local}
            teams.append(
                Team(
                    self.program, launch, grid, first, block[those], thread[those], given, memories
                )
            )
        rng = None if order is None else np.random.default_rng((order, first))
        while True:
            for i in [0] if rng is None else rng.permutation(len(teams)):
                teams[i].advance()
            if not any(team.is_alive.any() for team in teams):
                break
            if release_barriers(self.program.votes, teams, blocks):
                continue
            if not any(team.may_be_woken for team in teams):
                if not shared.arrivals:
                    refuse_deadlock(teams)
                shared.arrivals.pop(0).happen()
        if any(team.products for team in teams):
            raise PTXError("the kernel ends before its wgmma were waited for")


def flattened(arguments):
    """The numbers in nested tuples, in order."""
    if isinstance(arguments, (tuple, list)):
        return [number for one in arguments for number in flattened(one)]
    return [arguments]


def compiled(launch, cc=(9, 0)):
    """A launch's kernel, compiled once whatever the grid and the shared memory."""
    return _compiled(launch._replace(grid=(1, 1, 1), shared=0), cc)


@cache
def _compiled(launch, cc):
    from minimha.kernels.cuda import linker  # needs numba-cuda

    return linker.compiled(launch, cc)


@cache
def _ptx(kernel):
    return kernel.ptx()


def ptx_of(launch, cc=(9, 0)):
    """The PTX of a launch's kernel, which is the text that becomes its machine code."""
    return _ptx(compiled(launch, cc))


decoded = cache(Emulator)  # from its text


def run(launch, arguments, memory, order=None, *, change=None):
    """Compile a launch's kernel and execute it: see ``Emulator.run``.

    ``change``, a function of the PTX, is applied to it first if given.
    """
    text = ptx_of(launch)
    emulator = decoded(text) if change is None else Emulator(change(text))
    emulator.run(launch, arguments, memory, order)


def forward(module, problem, order=None, *, change=None):
    """O and L of ``problem`` from a rung that takes addresses; the options are those of ``run``."""
    from gpu_problems import download, upload

    memory = Arena()
    arguments = upload(problem, memory, module.ROW_UNIT)
    for launch, given in module.launches(problem, arguments, memory.scratch):
        run(launch, given, memory, order, change=change)
    return download(problem, arguments, memory)
