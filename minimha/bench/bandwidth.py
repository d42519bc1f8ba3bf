"""Measure the machine: how fast it reads memory, and how fast it multiplies matrices."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.bench.shapes import Shape

MATRIX = 2048  # rows and columns of the sgemm that attention is compared with
STREAM = 1 << 25  # float32 numbers that are read to measure the bandwidth


def yardstick(shape: Shape) -> tuple[float, Callable[[], Any]]:
    """Return the work of a reference call, in bytes or operations, and a function that runs it.

    The call reads memory if ``shape`` has one query, and multiplies matrices otherwise.
    """
    if shape.is_decode:
        numbers = np.ones(STREAM, np.float32)
        return 4.0 * STREAM, lambda: read_memory(numbers)
    matrix = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    return 2.0 * MATRIX**3, lambda: matrix @ matrix


def read_memory(numbers: NDArray[Any]) -> NDArray[Any]:
    """Read a 1-D array once, with vector instructions and all threads of the kernels.

    Returns the largest number of each thread in each lane of its vectors: (threads, lanes).
    """
    from minimha.kernels.cpu.simd.softmax import lanes_max
    from minimha.kernels.cpu.simd.vector import VECTORS, panel_width
    from minimha.kernels.cpu.threads import get_num_threads

    threads, width = get_num_threads(), panel_width(numbers.itemsize) // VECTORS
    rows, largest = numbers.size // width, np.empty((threads, width), numbers.dtype)

    def read_part(thread: int) -> None:
        first, last = thread * rows // threads, (thread + 1) * rows // threads
        lanes_max(numbers, first * width, last - first, 1, largest[thread])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read_part, range(threads)))
    return largest
