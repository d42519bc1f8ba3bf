"""CUDA kernels: numba-cuda and PTX, from plain loops to the tensor cores."""
