"""Provide the building blocks of the CUDA kernels: device functions, and factories of them.

A factory runs on the host: it takes a kernel's constants (width, dtype and options) and returns a
device function. The names in a factory's docstring are arguments of that device function. Algorithm
1 is that of FlashAttention-2 (Dao, 2023).

rows             addresses of rows, and vector loads and stores that spread them over lanes
register_tiles   tiles multiplied in registers: copies and products of rung 3
fragments        tiles multiplied by ``mma``: copies and products of rungs 4 and 5
warpgroups       tiles multiplied by ``wgmma``: copies and products of rung 6
pipeline         barriers between the warpgroup that copies and those that multiply: rung 6
mask             visible keys, and the options of scores
nonfinite        NaN and infinity among the values, added only to rows that see them
online_softmax   row maxima, exponentials, rescaling, and the log-sum-exp at the end
"""

from numba import cuda

device = cuda.jit(device=True, inline="always")  # only a driver could link a call
