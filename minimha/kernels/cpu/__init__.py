"""Compute attention with CPU kernels that use vector registers and every core."""
