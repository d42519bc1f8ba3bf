"""Attention in other libraries' conventions, each translated into minimha's own.

Arrays may be of NumPy, torch or JAX, on the CPU, and results are arrays of the query's library.
"""

from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

__all__ = ["flash_attention", "jax", "keras", "onnx", "torch", "transformers"]
