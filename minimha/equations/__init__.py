"""Compute attention and the gated delta rule in NumPy, as the reference for faster kernels."""
