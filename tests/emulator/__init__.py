"""A PTX emulator on NumPy: it runs CUDA kernels without a GPU and finds errors that a GPU ignores.

``Emulator(text).run(launch, arguments, memory)`` executes one launch of the kernel in ``text``;
``forward(module, problem)`` runs a whole rung. How text becomes numbers::

    parse         text to a Kernel: registers, variables, instructions as words and operands
    instructions  one instruction to a closure over NumPy calls that take all threads at once
    wgmma         instructions of warpgroups, whose products run until a wait for them
    waits         instructions at which threads wait for others: mbarriers, setmaxnreg, barriers
    decode        a Kernel to a Program: closures, branches, and where threads may meet
    team          threads with registers, which execute a Program, diverge and reconverge
    memory        the global, shared and local memory that they access
    clocks        which accesses of two warps happened one before the other
    launch        the blocks of a grid, batch by batch

Covered are what numba and NVVM write for this package's kernels, and the forms next to it: one
kernel per text; blocks of whole warps along x; integers, float32 and float64, and float16 and
bfloat16 in conversions and matrix products; predication and branches; loads and stores of scalars
and vectors, atomics, ``cp.async`` in groups and with mbarriers, whose arrivals, waits by parity and
``noinc`` are known; ``bar.sync`` and ``bar.red``, of all threads or of some; ``setmaxnreg``;
``bar.warp.sync``, ``shfl``, ``vote`` and ``activemask`` of full warps; ``ldmatrix`` and
``mma.m16n8k16``; ``wgmma`` of 16 bits with its fences, its groups and the 128-byte swizzle.

Anything else is a ``NotImplementedError`` that names the instruction before anything runs: calls of
functions, textures, carries, packed arithmetic, clusters, bulk copies, mbarriers that count them.

By default all threads of a batch of blocks run in lockstep, which is fast but hides errors that
depend on the order of warps. With an ``order``, a seed, one warp after another runs until it must
wait, in random order. Then any race for shared memory is a ``PTXError``, in every order: two warps
access a byte without a barrier or mbarrier in between, or two lanes without a ``bar.warp.sync``,
and at least one of them writes.

In both modes these are a ``PTXError``, too:

- shared memory that is read before it is written, or while a ``cp.async`` to it is in flight: a
  copy arrives only when a thread waits for it; one that arrives at an mbarrier, only when no thread
  can do anything else;
- a thread that exits while copies of its own are in flight;
- threads that wait for ever; the message names what each of them waits for;
- an address outside of every array, across two of them (gaps separate arrays), or not a multiple of
  the size of the access;
- an instruction of whole warps that some lanes do not execute;
- a register of a ``wgmma`` that is accessed before it was waited for, or without a ``wgmma.fence``
  ahead of it; shared memory that it reads and that is overwritten until then, or that has not
  passed a ``fence.proxy.async`` since it was written, in the warp that wrote it or in the one that
  reads it, between the two.

It does not find or model: races between blocks, in global memory, and of atomics; time
and bank conflicts; whether all four warps of a warpgroup execute a ``wgmma`` or ``setmaxnreg``; how
many registers a warp uses; that one lane arrives at an mbarrier for others without a
``bar.warp.sync``. Other fences do nothing, since every other access is visible at once. ``fma`` and
the approximate functions are computed in float64 and rounded once more, where a GPU's ``ex2``,
``lg2`` and ``rcp`` may be two units off, ``fma.f64`` in a longdouble; ``tanh.approx`` is as coarse
as documented.

Source: PTX ISA 9.0, chapters 4 and 5 (syntax, state spaces, types), 9 (instructions) and 10
(special registers).
"""

from emulator.launch import Emulator, compiled, flattened, forward, ptx_of, run
from emulator.memory import ARENA, Arena
from emulator.team import PTXError

__all__ = [
    "ARENA", "Arena", "Emulator", "PTXError", "compiled", "flattened", "forward", "ptx_of", "run",
]  # fmt: skip
