"""Keep matrices as files store them, in 16 bits or quantised, and widen some rows when needed.

A row is a sequence of *blocks*, of one number or of up to 256 that share scales. ``FORMATS`` says
what the bytes of a block mean. All numbers are computed in float32.

The quantised formats are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h), and MXFP4
of Open Compute Project, "OCP Microscaling Formats", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
FLOAT32 = np.dtype(np.float32)
AT_ONCE = 1 << 20  # numbers that are widened at once
# The numbers of four bits: a sign, two bits of exponent, one of mantissa.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _half(blocks: Bytes, at: int) -> Array:
    """Return the float16 at byte ``at`` of each block as float32 (n, 1)."""
    two = np.ascontiguousarray(blocks[:, at : at + 2])
    return two.view("<f2").astype(np.float32)


def _nibbles(blocks: Bytes, at: int, number: int) -> Array:
    """Return the lower halves of ``number`` bytes, then the upper halves, (n, 2 · number)."""
    both = blocks[:, at : at + number]
    return np.concatenate([both & 15, both >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Array:
    """Return the 32 bits at byte ``at``, the lowest first, as 0 or 16, (n, 32)."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks: Bytes) -> Array:
    return blocks[:, 2:].view(np.int8) * _half(blocks, 0)


def _q4_0(blocks: Bytes) -> Array:
    return (_nibbles(blocks, 2, 16).astype(np.float32) - 8) * _half(blocks, 0)


def _q4_1(blocks: Bytes) -> Array:
    return _nibbles(blocks, 4, 16) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Array:
    q = (_nibbles(blocks, 6, 16) | _fifth_bits(blocks, 2)).astype(np.float32)
    return (q - 16) * _half(blocks, 0)


def _q5_1(blocks: Bytes) -> Array:
    q = _nibbles(blocks, 8, 16) | _fifth_bits(blocks, 4)
    return q * _half(blocks, 0) + _half(blocks, 2)


def _scales_and_minima(blocks: Bytes) -> tuple[Array, Array]:
    """Return the scales and minima (n, 8, 1) of Q4_K and Q5_K, 16 numbers of 6 bits in 12 bytes."""
    low, mid, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    d, least = _half(blocks, 0), _half(blocks, 2)
    return (d * scales)[..., None], (least * minima)[..., None]


def _q4_k(blocks: Bytes) -> Array:
    scales, minima = _scales_and_minima(blocks)
    q = _nibbles(blocks[:, 16:].reshape(-1, 32), 0, 32).reshape(-1, 8, 32)
    return np.reshape(q * scales - minima, (len(blocks), 256))


def _q5_k(blocks: Bytes) -> Array:
    scales, minima = _scales_and_minima(blocks)
    q = _nibbles(blocks[:, 48:].reshape(-1, 32), 0, 32).reshape(-1, 8, 32)
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    return np.reshape((q | fifth << 4) * scales - minima, (len(blocks), 256))


def _q6_k(blocks: Bytes) -> Array:
    low = _nibbles(blocks[:, :128].reshape(-1, 64), 0, 64).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return np.reshape(q * scales[..., None], (len(blocks), 256))


def _mxfp4(blocks: Bytes) -> Array:
    """Widen 32 numbers from 16 bytes, each with the lower half first, and the scale 2^(x - 127)."""
    pairs = np.stack([blocks[:, :16] & 15, blocks[:, :16] >> 4], axis=-1)
    exponents = blocks[:, 16:].astype(np.int32) - 127
    return np.ldexp(FP4[pairs].reshape(-1, 32), exponents)


class Format(NamedTuple):
    """How blocks are stored: ``size`` numbers in ``nbytes`` bytes, which ``widen`` converts."""

    size: int
    nbytes: int
    widen: Callable[[Bytes], Array]


FORMATS = {
    "float32": Format(1, 4, lambda blocks: blocks.view("<f4").astype(np.float32)),
    "float16": Format(1, 2, lambda blocks: blocks.view("<f2").astype(np.float32)),
    "bfloat16": Format(
        1, 2, lambda blocks: (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    ),
    "Q8_0": Format(32, 34, _q8_0), "Q4_0": Format(32, 18, _q4_0), "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0), "Q5_1": Format(32, 24, _q5_1), "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k), "Q6_K": Format(256, 210, _q6_k),
    "MXFP4": Format(32, 16, _mxfp4),  # and a scale of one byte in another array
}  # fmt: skip


class Stored:
    """A matrix of which the rows are stored one by one, or the transpose of such a matrix.

    It behaves like a read-only float32 array where a layer needs that: ``shape``, ``T``, rows by
    their numbers, slices of rows, and ``np.asarray``, which widens all of it.

    Parameters
    ----------
    format : str
        A key of ``FORMATS``.
    data : ndarray of shape (bytes,), uint8
        For example a mapped file.
    starts : ndarray of shape (rows,), int64
        Where each row begins in ``data``.
    columns : int
        Numbers in a row, a multiple of the format's block.
    scales : ndarray of shape (bytes,), uint8, optional
        The scales of MXFP4: a row that starts at byte s of ``data`` has its first one at s / 16.
    is_transposed : bool, default False
        Whether the matrix is the transpose of the stored one.
    is_rounded : bool, default False
        Whether a product may round rows x and the matrix to bfloat16, where that is faster.
    """

    ndim, dtype = 2, FLOAT32

    def __init__(
        self, format: str, data: Bytes, starts: NDArray[np.int64], columns: int,
        scales: Bytes | None = None, is_transposed: bool = False, is_rounded: bool = False,
    ) -> None:  # fmt: skip
        self.format, self.data, self.scales = format, data, scales
        self.starts, self.columns = starts, columns
        self.is_transposed, self.is_rounded = is_transposed, is_rounded

    @classmethod
    def of_rows(cls, format: str, rows: Bytes, scales: Bytes | None = None) -> Stored:
        """Return the matrix whose rows are those of ``rows`` (n, bytes), contiguous uint8."""
        size, nbytes, _ = FORMATS[format]
        starts = np.arange(len(rows), dtype=np.int64) * rows.shape[1]
        flat = None if scales is None else scales.reshape(-1)
        return cls(format, rows.reshape(-1), starts, rows.shape[1] // nbytes * size, flat)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        shape = len(self.starts), self.columns
        return shape[::-1] if self.is_transposed else shape

    @property
    def size(self) -> int:
        """The number of rows times the number of columns."""
        return len(self.starts) * self.columns

    @property
    def nbytes(self) -> int:
        """The bytes that the numbers take where they are stored."""
        size, nbytes, _ = FORMATS[self.format]
        return self.size // size * (nbytes + (self.scales is not None))

    @property
    def T(self) -> Stored:
        """The transposed matrix, with the same memory."""
        return self._with(is_transposed=not self.is_transposed)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Stored({self.format}, shape={self.shape})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a stored matrix is widened into a new array: copy=False cannot be")
        rows = np.empty((len(self.starts), self.columns), np.float32)
        for first, some in self.blocks():
            rows[first : first + len(some)] = some
        whole = rows.T if self.is_transposed else rows
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """Return the matrix itself if ``dtype`` is float32, else an array of ``dtype``."""
        return self if np.dtype(dtype) == FLOAT32 else np.asarray(self).astype(dtype)

    def reshape(self, *shape: Any) -> Array:
        """Return all numbers as a float32 array of another shape."""
        return np.asarray(self).reshape(*shape)

    def copy(self) -> Array:
        """Return all numbers as a float32 array."""
        return np.asarray(self)

    def __getitem__(self, key: Any) -> Any:
        """Return a ``Stored`` for a slice of rows or columns, else an array of widened numbers."""
        is_rows = isinstance(key, slice) and not self.is_transposed
        if is_rows:
            return self._with(starts=self.starts[key])
        if isinstance(key, tuple) and key[0] == slice(None) and isinstance(key[1], slice):
            return self.T[key[1]].T if self.is_transposed else self._columns(key[1])
        if self.is_transposed or isinstance(key, tuple):
            return np.asarray(self)[key]
        chosen = np.asarray(key)
        return self.widened(chosen.reshape(-1)).reshape(*chosen.shape, self.columns)

    def _columns(self, key: slice) -> Any:
        """Return some numbers of each stored row, as a ``Stored`` if these are whole blocks.

        The numbers are copied, as they are stored, if they do not follow each other.
        """
        first, stop, step = key.indices(self.columns)
        size, nbytes, _ = FORMATS[self.format]
        if step == 1 and not first % size and not stop % size and first <= stop:
            return self._with(starts=self.starts + first // size * nbytes, columns=stop - first)
        if size > 1 or (np.diff(self.starts) != self.columns * nbytes).any():
            return np.asarray(self)[:, key]
        rows = self.data[self.starts[0] :][: self.size * nbytes].reshape(len(self), -1, nbytes)
        some = np.ascontiguousarray(rows[:, key])
        copied = Stored.of_rows(self.format, some.reshape(len(self), -1))
        return copied.rounded() if self.is_rounded else copied

    def reordered(self, rows: NDArray[np.int64]) -> Stored:
        """Return the matrix with stored rows ``rows``, without a copy of the numbers."""
        return self._with(starts=self.starts[rows])

    def rounded(self) -> Stored:
        """Return the matrix as one that products may round to bfloat16."""
        return self._with(is_rounded=True)

    def widened(self, rows: Any) -> Array:
        """Return some of the stored rows, chosen by numbers or by a slice, in float32."""
        starts = self.starts[rows]
        size, nbytes, widen = FORMATS[self.format]
        blocks = self.columns // size
        row = blocks * nbytes
        if len(starts) and (np.diff(starts) == row).all():
            own = self.data[starts[0] : starts[0] + len(starts) * row]
        else:
            own = np.empty((len(starts), row), np.uint8)
            for to, start in zip(own, starts, strict=True):
                to[:] = self.data[start : start + row]
        stored = np.ascontiguousarray(own.reshape(-1, nbytes))
        if self.scales is not None:
            first = starts // nbytes
            scales = self.scales[first[:, None] + np.arange(blocks)]
            stored = np.concatenate([stored, scales.reshape(-1, 1)], axis=1)
        with np.errstate(all="ignore"):
            numbers = widen(stored)
        return np.asarray(numbers.reshape(len(starts), self.columns), np.float32)

    def blocks(self) -> Any:
        """Yield all stored rows in float32, some at a time, each with the first one's number."""
        step = max(1, AT_ONCE // max(1, self.columns))
        for first in range(0, len(self.starts), step):
            yield first, self.widened(slice(first, first + step))

    def _with(self, **others: Any) -> Stored:
        return Stored(
            self.format, self.data, **{name: getattr(self, name) for name in KEPT} | others
        )


KEPT = ("starts", "columns", "scales", "is_transposed", "is_rounded")
