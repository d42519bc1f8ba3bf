"""What the machine itself can do: its bandwidth of reading, and the rate of its matrix product."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.bench.shapes import Shape

MATRIX = 2048  # rows and columns of the sgemm that attention is compared with
STREAM = 1 << 25  # float32 numbers that are read to measure the bandwidth


def yardstick(shape: Shape) -> tuple[float, Callable[[], Any]]:
    """The work of one call, and the call: bytes read for a decode shape, else operations."""
    if shape.is_decode:
        from minimha.kernels.cpu.simd.memory import read_memory

        numbers = np.ones(STREAM, np.float32)
        read: Callable[[NDArray[np.float32]], Any] = read_memory
        return 4.0 * STREAM, lambda: read(numbers)
    matrix = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    return 2.0 * MATRIX**3, lambda: matrix @ matrix
