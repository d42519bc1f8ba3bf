"""CPU kernels: numba on vector registers and every core."""
