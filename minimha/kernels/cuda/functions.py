"""Functions that CUDA kernels call, compiled into them: whom a query sees, what a score becomes.

They are the functions of ``equations/visibility.py`` and ``score.py`` as they stand there.
``device`` compiles others likewise.
"""

from __future__ import annotations

from numba import cuda

from minimha.equations import visibility
from minimha.kernels import score

device = cuda.jit(device=True, inline="always")  # a call that is left can only a driver link

sees = device(visibility.sees)
key_range = device(visibility.key_range)
head_of = device(score.head_of)
is_hidden = device(score.is_hidden)
final_score = device(score.final_score)
