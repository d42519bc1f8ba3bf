"""Add nonfinite values to the outputs of queries that see them, and to no others.

A hidden key has the weight 0, but 0 · NaN and 0 · inf are NaN. So if a tile hides some key from
some query, rungs 3 to 5 first look for nonfinite values (``has_nonfinite``). Rung 6 looks for them
in every block. For the product, rungs 3, 4 and 6 set all values of a key that has one to 0
(``zero_nonfinite``). Then they add the original values to the queries that see the key
(``add_nonfinite``). Rung 5 sums over the keys that each query sees (``add_visible_values``).
"""

from __future__ import annotations

import math

from minimha.kernels.cpu.arguments import NONFINITE
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.simd.memory import bits_of
from minimha.kernels.cpu.storage import Rows


@jit
def has_nonfinite(V_j, n, Dv):
    """Return whether any number in the first n rows of ``V_j`` is NaN or infinite."""
    if V_j.stride == Dv:  # contiguous rows are one long row, since the end of each row is slow
        n, Dv = 1, n * Dv
    # Without its sign, a nonfinite number has an exponent of ones; adding one carries into the
    # sign. LLVM vectorizes this integer arithmetic.
    bits = bits_of(V_j.line)
    word, itemsize = bits.dtype.type, V_j.line.itemsize
    sign, one = word(1 << (8 * itemsize - 1)), word(1 << (23 if itemsize == 4 else 52))
    found = word(0)
    for j in range(n):
        first = V_j.start + j * V_j.stride
        for d in range(Dv):
            found = word(found | word(word(bits[first + d] & word(~sign)) + one))
    return word(found & sign) != 0


@jit_inline
def is_nonfinite(number):
    """Return whether ``number`` is NaN or infinite, by a test that no compiler removes."""
    return not abs(number) < math.inf


@jit_inline
def is_nonfinite_key(V_j, j, Dv):
    """Return whether row j of ``V_j``, the value of one key, has a NaN or infinity."""
    found = False
    for d in range(Dv):
        found |= is_nonfinite(V_j.line[V_j.start + j * V_j.stride + d])
    return found


@jit_inline
def note_nonfinite(row, n, counters):
    """Set ``counters[NONFINITE]`` to 1 if a number of the output ``row`` is NaN or infinite."""
    if is_nonfinite_key(row, 0, n):
        counters[NONFINITE] = 1


@jit
def zero_nonfinite(V_j, n, Dv, copy):
    """Copy n rows of ``V_j`` to ``copy``, with zeros for each row that has a NaN or infinity.

    Returns the copy as ``Rows``.
    """
    for j in range(n):
        is_zeroed = is_nonfinite_key(V_j, j, Dv)
        for d in range(Dv):
            copy[j * Dv + d] = 0 if is_zeroed else V_j.line[V_j.start + j * V_j.stride + d]
    return Rows(copy, 0, Dv)


@jit
def add_nonfinite(O, P, visible, V_j, n, Dv, rows, lanes):
    """Add the rows of ``V_j`` that have NaN or infinity, weighted by P, where they are visible.

    P and ``visible`` have n rows of ``lanes``, and O, which is added to, has Dv rows of ``lanes``.
    """
    for j in range(n):
        if is_nonfinite_key(V_j, j, Dv):
            for r in range(rows):
                if visible[j * lanes + r]:
                    for d in range(Dv):
                        O[d * lanes + r] += (
                            P[j * lanes + r] * V_j.line[V_j.start + j * V_j.stride + d]
                        )


@jit_inline
def add_visible_values(P, visible, V, O, first, n):
    """Add P[:, first:first + n] V to O, omitting the keys that a row's query does not see."""
    for r in range(O.shape[0]):
        for j in range(n):
            if visible[r, first + j]:
                for d in range(O.shape[1]):
                    O[r, d] += P[r, first + j] * V.line[V.start + j * V.stride + d]
