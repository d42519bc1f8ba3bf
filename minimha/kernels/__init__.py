"""Compute attention with compiled kernels, one series for CPUs and one for NVIDIA GPUs."""
