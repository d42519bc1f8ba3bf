"""Attention functions with the names and conventions of other libraries, computed by minimha.

Arrays may be NumPy, torch or JAX arrays on the CPU. Results are arrays of the query's library.
Invalid arguments raise ValueError or TypeError, which name the argument.
"""

from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

__all__ = ["flash_attention", "jax", "keras", "onnx", "torch", "transformers"]
