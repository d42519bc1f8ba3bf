"""Generate vector code for the inner loops, which numba alone would not vectorize well.

numba leaves vectorization to LLVM, which uses only half the width of an AVX-512 register and never
keeps a tile of sums in registers. The primitives here generate LLVM's vector instructions. Each
takes whole arrays and offsets in elements. Tests compare each with plain numba code in
``tests/kernels/cpu/plain_simd.py``.

A *panel* is up to ``VECTORS`` vectors side by side: ``VECTORS`` · width lanes, one query per lane.
A tile product keeps ``ROWS`` × ``VECTORS`` vectors of sums in registers over the whole depth: with
32 registers (AVX-512, NEON) 8 × 3 sums, 3 vectors of B and one broadcast of A take 28; with 16
(AVX2, SSE) 4 × 3 + 3 + 1 take 16. ROWS = 8 divides every common head width.
"""
