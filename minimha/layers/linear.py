"""Multiply rows by a matrix, with the operands in the order that is fastest."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.stored import Stored
from minimha.kernels import auto

Array = NDArray[Any]
FEW = 256  # with fewer rows, the transposed product is faster
BLOCK = 2048  # columns whose transposed product stays in the processor's cache
KERNEL = "minimha.kernels.cpu.weights"
LARGE = 1 << 16  # numbers of a matrix from which on a kernel is faster than its call
DECODING = 16  # rows of x up to which a kernel computes float32 matrices, too
WIDENED, READ = 2e8, 3e9  # numbers per second that NumPy widens and multiplies, about
COMPILING = 4.0  # seconds


def product(x: Array, W: Array | Stored) -> Array:
    """Return the matrix product of x (..., L, rows) and W (rows, columns).

    Both have the same dtype, unless W is ``Stored``.

    Checkpoints store most matrices transposed, so W is a transposed view. For x @ W, BLAS would
    copy the large W into packed blocks; for (Wᵀ xᵀ)ᵀ it packs the small x instead. This is 1.3
    times as fast for 2 to 128 rows of 576 numbers, and equally fast from 512 rows on (OpenBLAS
    0.3.31, AVX-512). The result is transposed back in blocks. For an unembedding, that is 1.4 times
    as fast as transposing it whole.

    A ``Stored`` matrix is widened block by block, or by a kernel in registers. The kernel is used
    once enough time was spent without it to be worth its preparation. If x has few rows, the kernel
    also multiplies large float32 matrices.
    """
    rows = x.reshape(-1, x.shape[-1])
    name = _format(rows, W)
    y = None if name is None else _by_kernel(name, rows, W)
    if y is None:
        start = time.perf_counter()
        with np.errstate(all="ignore"):
            y = _by_blocks(rows, W) if isinstance(W, Stored) else _by_blas(rows, W)
        if name is not None:
            auto.spent(time.perf_counter() - start, name)
    return np.reshape(y, (*x.shape[:-1], W.shape[1]))


class Joined:
    """Matrices (rows, columns of each) that multiply the same rows, in few calls of a kernel.

    While decoding, a call costs about as much as reading 1 MB of weights: threads have to wake.
    Matrices of a group are sorted by address, the order in which a kernel reads them fastest.
    """

    def __init__(self, *matrices: Array | Stored) -> None:
        self.matrices = matrices
        groups: dict[Any, list[int]] = {}
        for n, W in enumerate(matrices):
            groups.setdefault(_kind(W) or n, []).append(n)
        for some in groups.values():
            some.sort(key=lambda n: _place(matrices[n]))
        self.groups = [Group(tuple(matrices[n] for n in some), some) for some in groups.values()]

    def __reduce__(self) -> tuple[type[Joined], tuple[Array | Stored, ...]]:
        return Joined, self.matrices  # addresses are those of this process

    def products(self, x: Array) -> list[Array]:
        """Return the product of x (..., L, rows) and each matrix, as ``product`` does."""
        rows, found = x.reshape(-1, x.shape[-1]), dict[int, Array]()
        for group in self.groups:
            y = group.product(rows)
            if y is None:
                each = [product(rows, W.astype(x.dtype, copy=False)) for W in group.matrices]
            else:
                each = [y[:, own] for own in group.columns]
            found.update(zip(group.numbers, each, strict=True))
        return [found[n].reshape(*x.shape[:-1], W.shape[1]) for n, W in enumerate(self.matrices)]

    def has_kernels(self) -> bool | None:
        """Return whether kernels multiply one row by all matrices now; None means never."""
        row = np.empty((1, 0), np.float32)
        names = {_format(row, W) for W in self.matrices}
        if None in names:
            return None
        return all(_kernel(str(name), 0.0) is not None for name in names)


class Group:
    """Matrices of one kind among those of ``Joined``, at ``numbers`` there."""

    def __init__(self, matrices: tuple[Array | Stored, ...], numbers: list[int]) -> None:
        self.matrices, self.numbers, self._weights = matrices, numbers, None
        widths = (W.shape[1] for W in matrices)
        self.size = sum(W.size for W in matrices)
        self.columns = [slice(*ends) for ends in pairwise(accumulate(widths, initial=0))]

    def product(self, rows: Array) -> Array | None:
        """Return rows (n, K) times all matrices side by side, or None if no kernel is used."""
        names = {_format(rows, W) for W in self.matrices}
        name = names.pop()
        return None if name is None or names else _by_kernel(name, rows, self)

    def of_kernel(self, kernel: Any) -> Any:
        """Return what a kernel takes for one matrix that has the columns of all."""
        if self._weights is None:
            self._weights = kernel.weights_of(*self.matrices)
        return self._weights


def _place(W: Array | Stored) -> int:
    """Return the address of the first number of W."""
    if isinstance(W, Stored):
        return int(W.data.ctypes.data) + int(W.starts.min(initial=0))
    return int(W.ctypes.data)


def _kind(W: Array | Stored) -> Any:
    """Return a value that is equal for matrices that a kernel can join, or None."""
    if not isinstance(W, Stored):
        return "float32"
    return (W.format, W.is_rounded) if W.is_transposed and W.scales is None else None


def _by_blas(rows: Array, W: Array) -> Array:
    if not W.flags.fnc or not 1 < len(rows) < FEW:
        return np.asarray(rows @ W)
    y = np.empty((len(rows), W.shape[1]), rows.dtype)
    for start in range(0, W.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        y[:, block] = (W.T[block] @ rows.T).T
    return y


def _by_blocks(rows: Array, W: Stored) -> Array:
    """Return the product with a stored matrix, of which some rows at a time become float32."""
    y = np.zeros((len(rows), W.shape[1]), np.result_type(rows.dtype, np.float32))
    for first, some in W.blocks():
        own, stored = slice(first, first + len(some)), some.astype(y.dtype, copy=False)
        if W.is_transposed:
            y[:, own] = _by_blas(rows, stored.T)
        else:
            y += rows[:, own] @ stored
    return y


def _format(rows: Array, W: Array | Stored) -> str | None:
    """Return how W is stored, if a kernel may multiply these ``rows`` by it, or else None."""
    if rows.dtype != np.float32:
        return None
    if isinstance(W, Stored):
        return W.format
    is_read = W.dtype == np.float32 and W.flags.fnc and W.size >= LARGE
    return "float32" if is_read and len(rows) <= DECODING else None


def _by_kernel(name: str, rows: Array, W: Array | Stored | Group) -> Array | None:
    """Return the product computed by a kernel, or None if preparing it is not worth it yet."""
    seconds = len(rows) * W.size / READ + (0 if name == "float32" else W.size / WIDENED)
    kernel = _kernel(name, seconds)
    if kernel is None:
        return None
    try:
        return np.asarray(kernel.product(rows, W.of_kernel(kernel) if type(W) is Group else W))
    except kernel.CompilationFailed as error:
        auto.give_up(error)
        return None


def _kernel(name: str, seconds: float) -> Any:
    """Return the module of kernels if that for a format is ready, or worth preparing by now.

    ``seconds`` is the time that NumPy would take.
    """
    return auto.worthwhile(KERNEL, name, seconds, compiling=COMPILING, kind=name)
