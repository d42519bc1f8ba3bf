"""Compute attention fast, by two series of kernels, one for the CPU and one for CUDA."""
