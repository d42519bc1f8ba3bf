"""Products of rows and a matrix, in the order in which BLAS is fastest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FEW = 256  # rows
BLOCK = 2048  # columns whose transposed product stays in the processor's cache


def product(x: Array, W: Array) -> Array:
    """Compute x (..., L, rows) times W (rows, columns), of one dtype, as one matrix product.

    A checkpoint stores most matrices transposed, and W is a view. For a few rows BLAS then packs
    the large W to read it once. With the product transposed, (Wᵀ xᵀ)ᵀ, it packs x instead: 1.3
    times as fast from 2 to 128 rows of 576 numbers, as fast from 512 on (OpenBLAS 0.3.31, AVX-512).
    A vocabulary's product is transposed back in blocks, 1.4 times as fast as at once.
    """
    rows = x.reshape(-1, x.shape[-1])
    with np.errstate(all="ignore"):
        if W.flags.fnc and 1 < len(rows) < FEW:
            y = np.empty((len(rows), W.shape[1]), x.dtype)
            for start in range(0, W.shape[1], BLOCK):
                block = slice(start, start + BLOCK)
                y[:, block] = (W.T[block] @ rows.T).T
        else:
            y = rows @ W
    return np.reshape(y, (*x.shape[:-1], W.shape[1]))
