"""Compute the gated delta rule on the CPU, four tokens at a time, by the WY form.

For each group of four tokens, the kernel multiplies keys and queries by the state, solves for u
(see ``minimha.equations.delta_rule``), and updates the state once. For each token and each number
of the state, that takes 3.25 multiply-adds; computing token by token takes 4. A NaN reaches no
earlier token, since each token has separate sums. Columns of the state are independent. A task is a
range of columns of one head, in blocks that stay in the L1 cache. A call with one token reads and
writes the states in place.

A group's decay F is applied as S + (F - 1) S if F is near 1, else as F S. So if g is constant, the
rounding of exp(g) to float32 does not add up, in one call or in one call per token.

In the functions below, t is ``Arguments``, w is ``Work``, o is ``Storage``, s is a sequence in
batch entry ``entry``, h is a head, and i is a token.

Measured: (B, H, L, D) = (1, 16, 2048, 128) takes 43 ms on one core, and 48 ms with a decay per
channel. Token by token it takes 49 and 55 ms (AMD EPYC, AVX-512, 2026-11-24).
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from minimha.equations.delta_problem import EPSILON, DeltaProblem
from minimha.kernels import os_threads
from minimha.kernels.cpu.arguments import AXES, CACHE_LINE, HEADER, address, array_at
from minimha.kernels.cpu.jit import jit_inline
from minimha.kernels.cpu.kernel import (
    CANCELLED,
    LONG,
    Kernel,
    Sizes,
    is_readable,
)
from minimha.kernels.cpu.pool import pool
from minimha.kernels.cpu.simd.memory import bits_of, fetch_add, flat
from minimha.kernels.cpu.simd.product import ROWS, register_tile, tile_product
from minimha.kernels.cpu.simd.softmax import lanes_exp
from minimha.kernels.cpu.simd.state import GROUP, NARROW, WIDE, advance, advance_one
from minimha.kernels.cpu.simd.vector import INT, VECTORS, panel_width
from minimha.kernels.cpu.storage import float_rows, start_of, write_numbers
from minimha.kernels.cpu.threads import get_num_threads

TOKENS = 64  # whose q, k and decays are prepared at once
WORTH_SHARING = 1 << 18  # numbers of states, times tokens; fewer are faster than waking a thread
TASKS_PER_THREAD = 4  # at least, before heads are split
FAST = 0.5  # from here on 1 - exp(g) is a fast decay
COEFFICIENTS = GROUP + 2 * GROUP * GROUP  # of a group: β, A and B
read_one = register_tile(WIDE, adds=False, rows=2)


class Arguments(NamedTuple):
    """The arguments of ``delta_rule``, in the compute dtype unless a comment says otherwise."""

    q: Any  # (B, Hk, L, D), and k and v, read in place: any strides except the last
    k: Any
    v: Any
    O: Any  # (B, H, L, Dv), stored like v
    g: Any  # (B, H, L, 1 or D)
    beta: Any  # (B, H, L, 1)
    state: Any  # (n, H, D, Dv), before the first token, or of size 0
    last: Any  # (n, H, D, Dv), after the last token, or of size 0
    memory: Any  # each thread's ``room``
    powers: Any  # each thread's exp(g), float64
    scalars: Any  # scale; epsilon, or -1 not to normalise; both float64
    rows: Any  # (n, 3), int64: batch entry, first token, number of tokens
    sizes: Any  # int64: is_bfloat16, columns per task, room, number of powers
    counter: Any  # (1,), int64: of tasks


class Storage(NamedTuple):
    """The format of 16-bit numbers, bfloat16 or float16."""

    is_bfloat16: bool


FOUR, FLOAT64, INT64 = Arguments._fields[:8], ("powers", "scalars"), ("rows", "sizes", "counter")


@intrinsic
def unpack(typing, line):
    """Read the ``Arguments`` from a line of integers: header addresses, shapes and strides."""
    storage = line.dtype
    real = types.float64 if storage == types.float64 else types.float32
    items = dict.fromkeys(Arguments._fields, real) | dict.fromkeys("qkv", storage)
    items |= {"O": storage if storage == types.uint16 else real}
    items |= dict.fromkeys(FLOAT64, types.float64) | dict.fromkeys(INT64, types.int64)
    kinds = [
        types.Array(item, *((4, "A") if name in FOUR else (2 if name == "rows" else 1, "C")))
        for name, item in items.items()
    ]

    def generate(context, builder, signature, arguments):
        line = builder.bitcast(arguments[0], INT.as_pointer())

        def at(n):
            return builder.load(builder.gep(line, [INT(n)]))

        values = []
        for n, kind in enumerate(kinds):
            header = builder.inttoptr(builder.add(at(n), INT(HEADER)), INT.as_pointer())
            data = builder.inttoptr(builder.load(header), INT.as_pointer())
            first = len(kinds) + 2 * AXES * n
            shape = [at(first + axis) for axis in range(kind.ndim)]
            strides = [at(first + AXES + axis) for axis in range(kind.ndim)]
            values.append(array_at(context, builder, kind, data, shape, strides))
        return context.make_tuple(builder, signature.return_type, values)

    return types.NamedTuple(kinds, Arguments)(line), generate


def delta_rule(line, worker):
    """Run thread number ``worker``, which computes columns of states until no task is left."""
    t = unpack(line)
    H, Dv, width = t.v.shape[1], t.v.shape[3], t.sizes[1]
    pieces = -(-Dv // width)
    own = flat(t.memory, worker * t.sizes[2])
    powers = flat(t.powers, worker * t.sizes[3])
    while True:
        task = fetch_add(t.counter, 0)
        if task >= len(t.rows) * H * pieces:
            return
        first = task % pieces * width
        s, h = task // (pieces * H), task // pieces % H
        compute_columns(t, own, powers, s, h, first, min(Dv, first + width))


class Work(NamedTuple):
    """The arrays in a thread's memory, for at most ``TOKENS`` tokens of one head."""

    S: Any  # blocks of columns (D, width), one after the other
    R: Any  # X S, for the rows of X of one group
    ones: Any
    C: Any  # β, A and B of each group
    V: Any  # values, then outputs
    W: Any  # (tokens, D): E k, decayed to the end of the group
    X: Any  # (2 tokens, D): F k and F q, which multiply the state before the group
    e: Any  # (groups, D): the decay of each group, see ``simd.state``
    wide: Any  # numbers of 16 bits, widened
    query: Any  # (D,)


@jit_inline
def work_of(own, D, columns, tokens):
    """Divide a thread's memory ``own`` into the arrays of ``Work``.

    ``columns`` is the number of columns of the state, and ``tokens`` that of tokens at once.
    """
    groups, lanes = -(-tokens // GROUP), panel_width(own.itemsize) // VECTORS
    S, R = own, flat(own, columns * D)
    ones = flat(R, (2 * GROUP + ROWS) * WIDE * lanes)
    C = flat(ones, WIDE * lanes)
    V = flat(C, groups * COEFFICIENTS)
    W = flat(V, groups * GROUP * columns)
    X = flat(W, groups * GROUP * D)
    e = flat(X, 2 * groups * GROUP * D)
    query = flat(e, 2 * groups * D)
    return Work(S, R, ones, C, V, W, X, e, flat(query, D), query)


@jit_inline
def compute_columns(t, own, powers, s, h, first, stop):
    """Compute columns ``first`` to ``stop`` of the outputs and state of head h of sequence s."""
    D, lanes, (entry, begin, L) = t.q.shape[3], panel_width(own.itemsize) // VECTORS, t.rows[s]
    width, o, tokens = NARROW * lanes, Storage(t.sizes[0] != 0), min(L, TOKENS)
    columns, plane = -(-(stop - first) // width) * width, -(-tokens // GROUP) * D
    w = work_of(own, D, columns, tokens)
    for x in range(WIDE * lanes):
        w.ones[x] = 1
    is_one = L == 1 and t.state.size > 0 and t.last.size > 0 and columns % (WIDE * lanes) == 0
    is_one = is_one and columns == stop - first
    if not is_one:
        load_state(t.state, s, h, first, stop, w.S, D, width)
    for i in range(0, L, TOKENS):
        m = min(TOKENS, L - i)
        load_tokens(t, w, plane, powers, o, entry, h, begin + i, m)
        load_values(t.v, w, o, entry, h, begin + i, m, first, stop, columns)
        if is_one:
            one_token(t, w, plane, s, h, first, stop, WIDE * lanes)
        else:
            for c in range(0, columns, width):
                for j in range(0, m, GROUP):
                    n, block, group = min(GROUP, m - j), c * D, j // GROUP
                    tile_product(
                        w.X, 2 * j * D, D, 1, w.S, block, width, w.R, 0, width, w.ones, 2 * n,
                        NARROW, D,
                    )  # fmt: skip
                    advance(
                        w.S, block, width, w.S, block, width, w.R, w.V, j * columns + c, columns,
                        w.C, group * COEFFICIENTS, w.W, j * D, w.e, group * D, plane, n, D,
                    )  # fmt: skip
        for j in range(m):
            at = start_of(t.O, entry, h, begin + i + j) + first
            write_numbers(w.V, j * columns, flat(t.O, 0), at, stop - first, o)
    if L > 0 and t.last.size and not is_one:
        for x in range(first, stop):
            for d in range(D):
                t.last[s, h, d, x] = w.S[
                    ((x - first) // width * D + d) * width + (x - first) % width
                ]


@jit_inline
def one_token(t, w, plane, s, h, first, stop, width):
    """Compute columns ``first`` to ``stop`` of output and state for one token.

    Old and new state are read and written in place, in rows of ``width`` numbers at a time.
    """
    S, T, D, itemsize = t.state, t.last, t.q.shape[3], w.V.itemsize
    s_row, t_row = S.strides[2] // itemsize, T.strides[2] // itemsize
    old, new = flat(S, start_of(S, s, h, 0)), flat(T, start_of(T, s, h, 0))
    for c in range(first, stop, width):
        read_one(w.X, 0, D, 1, old, c, s_row, w.R, 0, width, w.ones, 2, D)
        advance_one(
            old, c, s_row, new, c, t_row, w.R, w.V, c - first, 0, w.C, 0, w.W, 0, w.e, 0, plane, 1,
            D,
        )  # fmt: skip


@jit_inline
def load_state(state, s, h, first, stop, S, D, width):
    """Copy columns of the initial state, or zeros without one, to S in blocks of ``width``."""
    for c in range(first, stop, width):
        for d in range(D):
            for x in range(width):
                is_given = state.size > 0 and c + x < stop
                S[(c - first) * D + d * width + x] = state[s, h, d, c + x] if is_given else 0


@jit_inline
def load_values(v, w, o, entry, h, i, m, first, stop, columns):
    """Copy the values of m tokens from token i on, padded with zeros to whole blocks of columns."""
    V = float_rows(v, entry, h, i, m, o, w.wide)
    for j in range(m):
        row, values = flat(w.V, j * columns), flat(V.line, V.start + j * V.stride + first)
        for x in range(stop - first):
            row[x] = values[x]
        for x in range(stop - first, columns):
            row[x] = 0


@jit_inline
def load_tokens(t, w, plane, powers, o, entry, h, i, m):
    """Write to w the inputs of ``simd.state.advance`` for m tokens, starting at token i."""
    D, channels, head = t.q.shape[3], t.g.shape[3], h // (t.v.shape[1] // t.k.shape[1])
    real, lanes = w.V.dtype.type, panel_width(8) // VECTORS
    load_exponentials(t.g, entry, h, i, m, powers, lanes)
    total = flat(powers, 2 * lanes + -(-m * channels // lanes) * lanes)  # F, (1 or D,)
    K = float_rows(t.k, entry, head, i, m, o, w.wide)
    for j in range(m):
        factor = real(norm_factor(K, j, D, t.scalars[1]))
        for d in range(D):
            w.W[j * D + d] = K.line[K.start + j * K.stride + d] * factor
    Q = float_rows(t.q, entry, head, i, m, o, w.wide)
    for j in range(m):
        first, a = j // GROUP * GROUP, flat(powers, 2 * lanes + j * channels)
        for c in range(channels):
            total[c] = a[c] if j == first else total[c] * a[c]
        factor = real(t.scalars[0] * norm_factor(Q, j, D, t.scalars[1]))
        x = flat(w.X, 2 * j * D)
        for d in range(D):
            w.query[d] = Q.line[Q.start + j * Q.stride + d] * factor
        key = flat(w.W, j * D)
        C = flat(w.C, j // GROUP * COEFFICIENTS)
        C[j - first] = t.beta[entry, h, i + j, 0]
        for d in range(D):
            F = real(total[d if channels > 1 else 0])
            x[d], x[D + d] = F * key[d], F * w.query[d]
        for before in range(first, j + 1):
            W, k_w, q_w = flat(w.W, before * D), real(0), real(0)
            for d in range(D if before < j else 0):
                W[d] *= real(a[d if channels > 1 else 0])
            for d in range(D):
                k_w += key[d] * W[d]
                q_w += w.query[d] * W[d]
            place = GROUP + (j - first) * GROUP + before - first
            C[place], C[GROUP * GROUP + place] = k_w, q_w
        if j + 1 == m or j + 1 == first + GROUP:
            load_decay(w, total, channels, j // GROUP * D, plane, D)
    for x in range(m * D, -(-m // GROUP) * GROUP * D):
        w.W[x] = 0


@jit_inline
def load_decay(w, total, channels, at, plane, D):
    """Write the decay ``total`` of a group of tokens as inputs of ``simd.state.advance``.

    These are ``e``, as numbers from w.e[at] on, and ``keep``, as bits from w.e[at + plane] on.
    """
    real, keep = w.e.dtype.type, flat(bits_of(w.e), plane)
    none = keep.dtype.type(0)
    for d in range(D):
        F = total[d if channels > 1 else 0]
        is_slow = abs(F - 1) < FAST
        w.e[at + d] = real(F - 1 if is_slow else F)
        keep[at + d] = keep.dtype.type(~none) if is_slow else none


@jit_inline
def load_exponentials(g, entry, h, i, m, powers, lanes):
    """Write exp(min(g, 700)) of m tokens to ``powers``, after two vectors for ``lanes_exp``."""
    channels = g.shape[3]
    vectors = -(-m * channels // lanes)
    for x in range((2 + vectors) * lanes):
        powers[x] = 0
    for j in range(m):
        for c in range(channels):
            exponent = g[entry, h, i + j, c]
            powers[2 * lanes + j * channels + c] = 700 if exponent > 700 else exponent
    lanes_exp(powers, 2 * lanes, vectors, 1, 1, powers, flat(powers, lanes))


@jit_inline
def norm_factor(rows, r, D, epsilon):
    """Return 1 / √(Σ x² + epsilon) of row r, or 1 if epsilon is negative."""
    if epsilon < 0:
        return 1.0
    total = rows.line.dtype.type(0)
    for d in range(D):
        x = rows.line[rows.start + r * rows.stride + d]
        total += x * x
    return 1 / math.sqrt(total + epsilon)


def sizes(problem: DeltaProblem) -> Sizes:
    """Return the columns per task, the lengths of a thread's buffers, and the number of threads.

    The lengths are in numbers of the compute dtype ("memory") and in float64 ("powers").
    """
    (n, H, D, Dv), itemsize = problem.state_shape, problem.compute.itemsize
    lengths, lanes = problem.rows[:, 2], panel_width(itemsize) // VECTORS
    total, tokens = int(lengths.sum()), min(TOKENS, int(lengths.max(initial=0)))
    workers = get_num_threads() if total * H * D * Dv >= WORTH_SHARING else 1
    groups, width = -(-tokens // GROUP), WIDE * lanes
    blocks = -(-Dv // width) if n * H >= TASKS_PER_THREAD * workers else 1
    columns, is_wide = max(1, blocks) * width, problem.dtype.itemsize < itemsize
    room = (columns + 1) * D + (2 * GROUP + ROWS + 1) * width
    room += groups * (COEFFICIENTS + GROUP * columns + (3 * GROUP + 2) * D)
    room += is_wide * tokens * max(D, Dv)
    powers = 3 * panel_width(8) + (tokens + 1) * problem.g.shape[3]
    rooms = {"memory": -(-room // PAGE) * PAGE, "powers": -(-powers // PAGE) * PAGE}
    return Sizes((columns,), rooms, workers)


PAGE = 1 << 9  # numbers, so that no two threads write to one page
KERNEL = Kernel(delta_rule, {}, sizes, widens=True)
NONE = np.empty((0, 0, 0, 0))


class Plan:
    """A reusable call of the kernel for problems of equal shapes, strides, dtypes and options."""

    def __init__(self, problem: DeltaProblem, has_state: bool) -> None:
        (columns,), rooms, self._workers = KERNEL.sizes(problem)
        self._storage, self._problem = _storage(problem), problem.without_numbers()
        self._has_state = has_state
        self._rooms = [self._workers * length for length in rooms.values()]
        sizes = [problem.dtype.name == "bfloat16", columns, *rooms.values()]
        scalars = [problem.scale, EPSILON if problem.normalize else -1]
        self._constants = np.array(scalars, float), problem.rows, np.array(sizes, np.int64)
        lengths, (B, _, L) = problem.rows[:, 2], problem.v.shape[:3]
        self._is_long = lengths.sum() * math.prod(problem.state_shape[1:]) >= LONG
        self._is_whole, self._has_empty = lengths.sum() == B * L, bool((lengths == 0).any())
        self._kernel = KERNEL.compile(self._storage)
        arrays = self._arrays([None if x is None else _readable(x) for x in problem.arrays])
        self._line = array("q", bytes(8 * len(arrays)))
        for x in arrays:
            rest = (0,) * (AXES - x.ndim)
            self._line.extend((*x.shape, *rest, *x.strides, *rest))

    def __call__(self, problem: DeltaProblem) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the output and the final states of ``problem``."""
        return self.run([None if x is None else _readable(x) for x in problem.arrays])

    def run(self, given: Sequence[NDArray[Any] | None]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output and final states for ``DeltaProblem.arrays`` of the planned shapes."""
        arrays, line = self._arrays(given), self._line[:]
        line[: len(arrays)] = array("q", map(id, arrays))
        if self._is_long and threading.current_thread() is threading.main_thread():
            # Ctrl-C reaches only the main thread while it runs Python.
            cancel = partial(arrays[-1].__setitem__, 0, CANCELLED)
            os_threads.call([partial(self._launch, line, arrays)], cancel)
        else:
            self._launch(line, arrays)
        O, state, last = arrays[3], arrays[6], arrays[7]
        if self._has_empty and self._has_state:
            empty = self._problem.rows[:, 2] == 0
            last[empty] = state[empty] if state.size else 0
        return O.view(self._problem.dtype), last

    def fits(self, problem: DeltaProblem, given: Sequence[NDArray[Any] | None]) -> bool:
        """Return whether ``run`` can read arrays like ``given`` without a conversion."""
        return all(
            x is None or y is None or (x.dtype == y.dtype and _readable(y) is y)
            for x, y in zip(given, problem.arrays, strict=True)
        )

    def _arrays(self, given: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
        """Return the arrays of ``Arguments``, with new arrays for the results and buffers."""
        q, k, v, g, beta, state = (NONE if x is None else x for x in given)
        problem, compute, size = self._problem, self._problem.compute, self._storage.itemsize
        new = np.empty if self._is_whole else np.zeros  # rows beyond a sequence's length are 0
        O = new(problem.v.shape, problem.dtype if size == 2 else compute)
        last = np.empty(problem.state_shape if self._has_state else (1, 1, 1, 0), compute)
        memory, powers = (_aligned(*x) for x in zip(self._rooms, (compute, float), strict=True))
        counter = np.zeros(1, np.int64)
        return [q, k, v, O, g, beta, state, last, memory, powers, *self._constants, counter]

    def _launch(self, line: array[int], held: Any) -> None:
        """Call the kernel, while ``held`` keeps alive all memory to which ``line`` points."""
        at, _ = line.buffer_info()
        if self._workers == 1:
            self._kernel.call(at, 0)
        else:
            pool().run(self._kernel.address, at, self._workers)


def _readable(x: NDArray[Any]) -> NDArray[Any]:
    """Return ``x``, or a copy if the kernel cannot read ``x`` in place."""
    return x if is_readable(x, x.itemsize) else np.require(x, None, ["C", "ALIGNED"])


def _aligned(number: int, dtype: Any) -> NDArray[Any]:
    block = np.empty(number * np.dtype(dtype).itemsize + CACHE_LINE, np.uint8)
    start = -address(block) % CACHE_LINE
    return block[start : start + len(block) - CACHE_LINE].view(dtype)


def _storage(problem: DeltaProblem) -> np.dtype[Any]:
    return np.dtype(np.uint16) if problem.dtype.itemsize == 2 else problem.dtype


def is_ready(problem: DeltaProblem) -> bool:
    """Return whether this process has compiled the kernel for ``problem``."""
    return _storage(problem) in KERNEL.compiled


def is_stored(problem: DeltaProblem) -> bool:
    """Return whether the machine code of the kernel for ``problem`` is on disk."""
    return KERNEL.file(_storage(problem)).read() is not None
