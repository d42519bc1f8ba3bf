"""Other libraries' attention functions in their own conventions, computed by ``minimha.attention``.

Arrays may be NumPy's, torch's or JAX's, on the CPU. Results are arrays of the query's library. A
ValueError or TypeError names an argument that does not fit.
"""

from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

__all__ = ["flash_attention", "jax", "keras", "onnx", "torch", "transformers"]
