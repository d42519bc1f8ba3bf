"""The machine instructions that numba does not offer: vector code for the inner loops.

numba leaves vectors to LLVM, which makes them half as wide as an AVX-512 machine has them and does
not keep a tile of sums in registers at all. The primitives here are written as LLVM vectors. Each
takes whole arrays and offsets counted in elements, and is tested against a twin in plain numba,
``tests/kernels/cpu/plain_simd.py``.

A *panel* is up to ``VECTORS`` vectors side by side: ``VECTORS`` · width lanes, each lane one query.
A tile product keeps ``ROWS`` × ``VECTORS`` vectors of sums in registers while the depth runs: with
32 registers (AVX-512, NEON) 8 × 3 sums, 3 vectors of B and one broadcast of A make 28; with 16
(AVX2, SSE) 4 × 3 + 3 + 1 make 16. ROWS = 8 divides every usual head width.
"""
