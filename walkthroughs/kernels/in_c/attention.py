"""A kernel in C, called by ctypes: copy this for a shared library of your own.

The library, ``attention.so`` beside this file, is made by ``cc -O2 -shared -fPIC attention.c -o
attention.so -lm``. It exports one function, which writes ``output``::

    void attention(const float *q, const float *k, const float *v, float *output,
                   int64_t B, int64_t H, int64_t Hkv, int64_t Lq, int64_t Lk, int64_t D,
                   int64_t Dv, float scale, int is_causal, int64_t q_offset);

Arrays are contiguous: q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) and output
(B, H, Lq, Dv). The Python function takes the options that the C function has, and no others, so
that ``check`` knows what to ask.
"""

from ctypes import CDLL, c_float, c_int, c_int64
from pathlib import Path

import numpy as np

LIBRARY = CDLL(str(Path(__file__).with_name("attention.so")))
FLOATS = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
LIBRARY.attention.argtypes = [*[FLOATS] * 4, *[c_int64] * 7, c_float, c_int, c_int64]
LIBRARY.attention.restype = None


def attention(q, k, v, *, scale=None, is_causal=False, q_offset=0):
    """Return softmax(scale · Q Kᵀ) V, as ``minimha.attention`` does."""
    B, H, Lq, D = q.shape
    Hkv, Lk, Dv = v.shape[1:]
    output = np.empty((B, H, Lq, Dv), np.float32)
    scale = D**-0.5 if scale is None else scale
    LIBRARY.attention(q, k, v, output, B, H, Hkv, Lq, Lk, D, Dv, scale, is_causal, q_offset)
    return output
