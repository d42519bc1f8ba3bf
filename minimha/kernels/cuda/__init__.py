"""Compute attention on NVIDIA GPUs: kernels from plain loops to tensor cores, in Python and PTX."""
