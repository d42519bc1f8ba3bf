"""PTX on NumPy: run a CUDA kernel where there is no GPU, and notice what a GPU would let pass.

``Emulator(text)`` reads one kernel; every instruction becomes a closure over NumPy calls that take
all threads at once. ``forward(module, problem)`` runs a whole rung.

In lockstep all threads of many blocks march together, which is fast and hides what depends on
warps being alike. With an ``order``, a seed, one warp after the other runs from barrier to barrier
in random order, and what no order may decide is a ``PTXError``:

- a byte of shared memory that another warp wrote or read since the last barrier, or another lane
  since the last ``bar.warp.sync``, and at least one of the two wrote (a race);

and in both modes

- shared memory that nobody wrote, or that a ``cp.async`` is still on its way to: what is copied
  arrives when it is waited for and no earlier;
- an address outside of every array, across two of them, or not a multiple of what is accessed;
- an instruction of a whole warp that some of its lanes do not take part in.

Threads that went different ways are brought together by running those first that are furthest
behind in the text, which is how compilers lay it out.

What it does not know: time, bank conflicts, what one block may see of another. ``ex2``, ``lg2`` and
``rcp`` are correctly rounded here and up to two units off on a GPU; ``tanh.approx`` is as coarse as
it is documented. References: PTX ISA 9.0, chapter 9.
"""

from emulator.launch import Emulator, emulator_of, flattened, forward, ptx_of
from emulator.memory import ARENA, Arena
from emulator.team import PTXError

__all__ = [
    "ARENA",
    "Arena",
    "Emulator",
    "PTXError",
    "emulator_of",
    "flattened",
    "forward",
    "ptx_of",
]
