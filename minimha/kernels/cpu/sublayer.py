"""Compute a sublayer of a transformer for one token, y = r + f(x), in one call.

For one token, a sublayer is a few products with its matrices, and some steps on short rows. Called
one by one from Python, these take longer than reading the matrices of a small model. Here a
sublayer is a list of steps that one compiled function runs. The calling thread computes short rows.
Helpers join in products and in attention, and do not fall asleep between them.

A step is ``WIDTH`` integers: what to do, then its operands, which are numbers or addresses of rows.
An operand below ``BROUGHT`` stands for an address that each call brings. Rows are float32, and a
row that a product reads is followed by zeros up to whole units.

Measured with 110 million numbers in Q8_0: a token takes 4.5 ms; step by step in Python, 8.2 ms
(llama.cpp takes 4.2 ms; 60 tokens, two cores of an AMD EPYC of generation Zen 4, 2026-11-29).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.kernels.cpu import weights
from minimha.kernels.cpu.arguments import NONFINITE, address
from minimha.kernels.cpu.compiler import ONCE, Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.jit import jit, jit_inline
from minimha.kernels.cpu.kernel import CompilationFailed, Ready
from minimha.kernels.cpu.pool import HAS_FUTEX, pool, run_job
from minimha.kernels.cpu.simd.softmax import lanes_exp
from minimha.kernels.cpu.simd.vector import VECTORS, panel_width
from minimha.kernels.cpu.simd.weights import UNIT, doubles_at, floats_at, integers_at
from minimha.kernels.cpu.threads import get_num_threads

__all__ = ["CompilationFailed", "Program", "compile", "is_ready", "is_stored"]
Array = NDArray[Any]
IS_POSSIBLE = HAS_FUTEX  # otherwise helpers sleep in Python, from where no step could wake them
WIDTH = 10
# What a call brings: the input x, the residual r, the output y, the cosines and sines of the
# token's angles (float64), and the places of its key and value in the cache.
X, R, Y, COS, SIN, KEY, VALUE = range(7)
BROUGHT = 8
RMS_NORM, LAYER_NORM, CALL, ADD, PICK, ROTATE, STORE, ACTIVATE = range(8)
ACTIVATIONS = ("relu", "relu_squared", "gelu", "silu", "quick_gelu", "gelu_tanh")
RELU, RELU_SQUARED, GELU, SILU, QUICK_GELU, GELU_TANH = range(6)
LANES = panel_width(4) // VECTORS
LONGEST = 512  # numbers whose exponentials are computed at once
run_job_inside = jit(run_job)


@jit
def normalise(at, x, y):
    """Normalise each row, as ``layers.norms`` does; ``at`` is the address of the step."""
    step = integers_at(at)
    gains, shifts, rows, n, apart = step[2], step[3], step[5], step[6], step[7]
    is_centred, epsilon = step[0] == LAYER_NORM, np.float32(doubles_at(at)[8])
    for r in range(rows):
        own, to = floats_at(x + 4 * n * r), floats_at(y + 4 * n * r)
        gain, shift = floats_at(gains + 4 * apart * r), floats_at(shifts + 4 * apart * r)
        mean, square = np.float32(0), np.float32(0)
        if is_centred:
            for i in range(n):
                mean += own[i]
            mean /= np.float32(n)
        for i in range(n):
            centred = own[i] - mean
            square += centred * centred
        root = np.float32(math.sqrt(square / np.float32(n) + epsilon))
        for i in range(n):
            to[i] = gain[i] * ((own[i] - mean) / root)
        if is_centred:
            for i in range(n):
                to[i] += shift[i]


@jit
def rotate(x, cos_at, sin_at, rows, width, pairs, is_interleaved):
    """Rotate the pairs of each row by the token's angles, as ``layers.rope`` does."""
    cos, sin = doubles_at(cos_at), doubles_at(sin_at)
    for r in range(rows):
        own = floats_at(x + 4 * width * r)
        for n in range(pairs):
            first, second = (2 * n, 2 * n + 1) if is_interleaved else (n, n + pairs)
            c, s, a, b = np.float32(cos[n]), np.float32(sin[n]), own[first], own[second]
            own[first], own[second] = a * c - b * s, b * c + a * s


@jit
def multiply_by_sigmoid(kind, x_at, n, room):
    """Multiply n numbers x by the sigmoid of z: x, 1.702 x, or 2 √(2/π) (x + 0.044715 x³).

    The sigmoid is 1 / (1 + e^-z), computed as e^z / (1 + e^z) for negative z. ``room`` begins with
    a vector of zeros.
    """
    x, e, twice = floats_at(x_at), floats_at(room + 8 * LANES), np.float32(math.sqrt(8 / math.pi))
    for i in range(-(-n // LANES) * LANES):
        z = x[i] if i < n else np.float32(0)
        if kind == QUICK_GELU:
            z *= np.float32(1.702)
        elif kind == GELU_TANH:
            z = twice * (z + np.float32(0.044715) * (z * z * z))
        e[i] = -abs(z)
    lanes_exp(e, 0, -(-n // LANES), 1, 1, floats_at(room), floats_at(room + 4 * LANES))
    for i in range(n):
        e_z = np.float32(1) if x[i] >= 0 else e[i]
        x[i] *= e_z / (np.float32(1) + e[i])


@jit
def activate(kind, x_at, factor_at, y_at, n, room):
    """Write activation(x) · factor to y, with the activations of ``layers.feed_forward``."""
    x, factor, y = floats_at(x_at), floats_at(factor_at), floats_at(y_at)
    if kind >= SILU:
        for first in range(0, n, LONGEST):
            multiply_by_sigmoid(kind, x_at + 4 * first, min(LONGEST, n - first), room)
    else:
        for i in range(n):
            if kind == GELU:
                half = np.float32(math.erf(np.float64(x[i] / np.float32(math.sqrt(2)))))
                x[i] *= np.float32(0.5) + np.float32(0.5) * half
            else:
                positive = x[i] if x[i] > 0 or x[i] != x[i] else np.float32(0)
                x[i] = positive * positive if kind == RELU_SQUARED else positive
    for i in range(n):
        y[i] = x[i] * factor[i] if factor_at else x[i]


@jit_inline
def operand(program, value):
    """Return an operand, or the address that it stands for."""
    return program[value] if 0 <= value < BROUGHT else value


def sublayer(words, line, number, spins):
    """Run ``number`` steps; return 1 after attention whose output is not finite, else 0.

    ``words`` and ``spins`` are those of ``pool.run_job``.
    """
    program = integers_at(line)
    for n in range(number):
        at = line + 8 * (BROUGHT + n * WIDTH)
        step = integers_at(at)
        does, x = step[0], operand(program, step[1])
        if does in (RMS_NORM, LAYER_NORM):
            normalise(at, x, step[4])
        elif does == CALL:
            counters = integers_at(step[4])
            for c in range(step[5]):
                counters[c] = 0
            run_job_inside(words, x, step[2], step[3], spins)
            if step[6] and counters[NONFINITE]:
                return 1
        elif does == ADD:
            a, b, y = floats_at(x), floats_at(step[2]), floats_at(operand(program, step[3]))
            for i in range(step[4]):
                y[i] = a[i] + b[i]
        elif does == PICK:
            a, picks, y = floats_at(x), integers_at(step[2]), floats_at(step[3])
            for i in range(step[4]):
                y[i] = a[picks[i]]
        elif does == ROTATE:
            rotate(x, program[COS], program[SIN], step[2], step[3], step[4], step[5])
        elif does == STORE:
            for r in range(step[3]):
                a = floats_at(x + 4 * step[4] * r)
                y = floats_at(operand(program, step[2]) + step[5] * r)
                for i in range(step[4]):
                    y[i] = a[i]
        elif does == ACTIVATE:
            activate(step[6], x, step[2], step[3], step[4], step[5])
    return 0


SIGNATURE = types.int64(types.int64, types.int64, types.int64, types.int64)
_compiled: list[Compiled] = []
_looks_again = [0.0]


def file() -> File:
    """Return the file of the machine code."""
    return File("sublayer", str(SIGNATURE))


def compile() -> Compiled:
    """Load or compile the machine code; log a compilation."""
    if not _compiled:
        try:
            _compiled.append(compiled(sublayer, SIGNATURE, file(), ONCE))
        except Exception as error:  # numba and LLVM raise errors of many types
            raise CompilationFailed(f"sublayer cannot be compiled here: {error}") from error
    return _compiled[0]


def is_ready(problem: Any = None) -> bool:
    """Return whether this process has compiled the code."""
    return bool(_compiled)


def is_stored(problem: Any = None) -> bool:
    """Return whether the machine code is on disk; look once per second, since tokens are short."""
    now = time.monotonic()
    if now < _looks_again[0]:
        return False
    _looks_again[0] = now + 1
    return file().read() is not None


class Program:
    """A list of steps, and the rows that they write. One thread at a time may run it.

    Methods append a step and return the row with its result. Shapes are those of one token: a row
    of heads (H, D) is H · D numbers. Arrays that are passed must be contiguous float32; later
    changes of their numbers have effect.
    """

    def __init__(self) -> None:
        self._workers = get_num_threads()
        self._kernel, self._steps, self._held = compile(), 0, []  # type: ignore[var-annotated]
        self._line = array("q", bytes(8 * BROUGHT))

    def is_current(self) -> bool:
        """Return whether the number of threads is still that for which the program was made."""
        return self._workers == get_num_threads()

    def run(self, *brought: Array) -> bool:
        """Run the steps with the arrays that a call brings.

        Returns False if the output of attention is not finite; then y has no meaning.
        """
        self._line[: len(brought)] = array("q", map(address, brought))
        at, _ = self._line.buffer_info()
        helpers = pool()
        helpers.start(self._workers)
        return not self._kernel.call(helpers.words, at, self._steps, helpers.spins)

    def norm(
        self, x: Array | int, n: int, gain: Array, shift: Array | None, epsilon: float,
        rows: int = 1,
    ) -> Array:  # fmt: skip
        """Normalise ``rows`` rows of n numbers: an RMS norm, or a layer norm with a ``shift``.

        ``gain`` and ``shift`` have n numbers for all rows, or n for each.
        """
        y, apart = self._row(rows * n), 0 if gain.size == n else n
        bits = int(np.float64(epsilon).view(np.int64))
        does = RMS_NORM if shift is None else LAYER_NORM
        self._step(does, x, gain, gain if shift is None else shift, y, rows, n, apart, bits)
        return y

    def products(self, x: Array, groups: Sequence[Any]) -> list[Array]:
        """Multiply x by the matrices of ``groups`` of a ``layers.linear.Joined``, in its order."""
        found: dict[int, Array] = {}
        for group in groups:
            weights_of_group = group.of_kernel(weights)
            last = group.columns[-1].stop
            y = self._row(last)
            job = weights.job_of_row(weights_of_group, x[None, : x.size], y[None])
            self._held.append(job)
            at, _ = job.line.buffer_info()
            counter = job.line[weights.COUNTER]
            self._step(CALL, job.kernel.address, at, job.workers, counter, 1, 0)
            if weights_of_group.columns_of is not None:
                y = self._picked(y, weights_of_group.columns_of)
            found |= {n: y[own] for n, own in zip(group.numbers, group.columns, strict=True)}
        return [found[n] for n in range(len(found))]

    def add(self, x: Array | int, other: Array, y: Array | int | None = None) -> Any:
        """Add ``other`` to x, in place unless ``y`` is given."""
        self._step(ADD, x, other, x if y is None else y, other.size)
        return x if y is None else y

    def rotate(self, x: Array, heads: int, pairs: int, is_interleaved: bool) -> None:
        """Rotate each head's first 2 · ``pairs`` numbers by the angles that the call brings."""
        self._step(ROTATE, x, heads, x.size // heads, pairs, is_interleaved)

    def store(self, x: Array | int, to: Array | int, heads: int, D: int, stride: int) -> None:
        """Copy ``heads`` rows of D numbers to a row or to a place that a call brings.

        There they are ``stride`` bytes apart.
        """
        self._step(STORE, x, to, heads, D, stride)

    def copied(self, x: int, n: int) -> Array:
        """Copy n numbers from a place that the call brings."""
        y = self._row(n)
        self.store(x, y, 1, n, 0)
        return y

    def activated(self, activation: str, x: Array, factor: Array | None) -> Array:
        """Return activation(x), times ``factor`` if it is given; x is overwritten."""
        y, room = self._row(x.size), self._row(2 * LANES + LONGEST)
        kind = ACTIVATIONS.index(activation)
        self._step(ACTIVATE, x, 0 if factor is None else factor, y, x.size, room, kind)
        return y

    def attention(self, ready: Ready) -> Array:
        """Call an attention kernel; return the heads' outputs (H · Dv,)."""
        self._held.append(ready)
        at, _ = ready.line.buffer_info()
        counters = at + 8 * ready.counters
        number = len(ready.line) - ready.counters
        self._step(CALL, ready.address, at, ready.workers, counters, number, 1)
        y = self._row(ready.O.size)
        self.store(ready.O.reshape(-1), y, 1, y.size, 0)
        return y

    def _picked(self, x: Array, columns: Array) -> Array:
        y, picks = self._row(len(columns)), columns.astype(np.int64)
        self._step(PICK, x, picks, y, len(columns))
        return y

    def _row(self, n: int) -> Array:
        """Return a new row of n numbers, which is followed by zeros up to whole units."""
        return np.zeros(-(-n // UNIT) * UNIT, np.float32)[:n]

    def _step(self, *operands: Any) -> None:
        self._held += [x for x in operands if isinstance(x, np.ndarray)]
        numbers = [address(x) if isinstance(x, np.ndarray) else int(x) for x in operands]
        self._line.extend([*numbers, *[0] * (WIDTH - len(numbers))])
        self._steps += 1
