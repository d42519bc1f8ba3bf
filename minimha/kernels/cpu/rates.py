"""What the machine itself can do: the rate at which all threads together read memory."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from minimha.kernels.cpu.rung3_vector_tiles import full_panel
from minimha.kernels.cpu.simd import FASTMATH, VECTORS, lanes_max


def read(numbers: NDArray[np.float32]) -> Any:
    """Read every number of a line once, with all of numba's threads."""
    return _read(numbers, numba.get_num_threads())


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _read(numbers, workers):
    lanes = full_panel(numbers.itemsize)
    rows = numbers.size // lanes
    largest = np.empty((workers, lanes), numbers.dtype)
    for worker in numba.prange(workers):
        first, last = worker * rows // workers, (worker + 1) * rows // workers
        lanes_max(numbers, first * lanes, last - first, VECTORS, largest[worker])
    return largest
