"""Other libraries' attention functions with their conventions, computed by ``minimha.attention``.

Arrays may be NumPy's, torch's or JAX's, on the CPU. Results are arrays of the query's library. An
argument that does not fit raises a ValueError or a TypeError that names it.
"""

from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

__all__ = ["flash_attention", "jax", "keras", "onnx", "torch", "transformers"]
