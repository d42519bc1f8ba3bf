"""Copy and convert arrays on the GPU that a kernel cannot use in place.

Each thread copies one number, from any strides to any strides, and between floating dtypes. If the
target has longer rows than the source, they are padded with 0.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int32, types, uint16, uint32
from numba.cuda import libdevice

from minimha.kernels.cuda.arguments import DeviceArray, array_at
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.cuda.parts import device

THREADS = 256
STORED = {
    "float16": types.float16, "bfloat16": types.uint16, "float32": float32, "float64": float64
}  # fmt: skip
HIGHEST = float(np.finfo(np.float32).max)


def copying(source: DeviceArray, target: DeviceArray) -> tuple[Launch, tuple[Any, ...]]:
    """Return the launch that copies ``source`` to ``target`` on the GPU, and its arguments.

    Both arrays are 4-D, and only their last axes may differ in length. A finite float64 outside of
    float32's range becomes the largest float32 of its sign, as a bias does in ``Problem.of``.
    """
    names = source.dtype.name, target.dtype.name
    signature = tuple(types.Array(STORED[name], 4, "A") for name in names)
    blocks = -(-math.prod(target.shape) // THREADS)
    launch = Launch(kernel(*names), signature, (blocks, 1, 1), THREADS)
    return launch, (array_at(source), array_at(target))


@cache
def kernel(source: str, target: str) -> Callable[..., None]:
    """Return the kernel that copies numbers of dtype ``source`` to an array of dtype ``target``."""
    read, write = READ[source], WRITE[target]

    def copies(x, y):
        t = cuda.grid(1)
        if t >= y.size:
            return
        d = t % y.shape[3]
        row = t // y.shape[3]
        i = row % y.shape[2]
        h = row // y.shape[2] % y.shape[1]
        b = row // y.shape[2] // y.shape[1]
        if d < x.shape[3]:
            y[b, h, i, d] = write(read(x[b, h, i, d]))
        else:
            y[b, h, i, d] = write(float32(0))

    return copies


@device
def from_bfloat16(x):
    return libdevice.int_as_float(int32(uint32(x) << uint32(16)))


@device
def to_bfloat16(x):
    """Return the bits of x rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = uint32(libdevice.float_as_int(float32(x)))
    if x != x:
        return uint16(0x7FC0)
    return uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@device
def to_float32(x):
    if abs(x) < math.inf:
        return float32(min(max(x, -HIGHEST), HIGHEST))
    return float32(x)


same = device(lambda x: x)
READ = {
    "float16": device(lambda x: float32(x)), "bfloat16": from_bfloat16,
    "float32": same, "float64": same,
}  # fmt: skip
WRITE = {
    "float16": device(lambda x: types.float16(x)), "bfloat16": to_bfloat16,
    "float32": to_float32, "float64": device(lambda x: float64(x)),
}  # fmt: skip
