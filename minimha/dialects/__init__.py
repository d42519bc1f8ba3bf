"""Attention in other libraries' conventions, each translated into minimha's own."""

from minimha.dialects import flash_attention, jax, keras, onnx, torch, transformers

__all__ = ["flash_attention", "jax", "keras", "onnx", "torch", "transformers"]
