"""Compute attention fast: two ladders of kernels, for the CPU and for CUDA."""
