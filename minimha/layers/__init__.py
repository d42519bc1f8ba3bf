"""Attention layers with weights, caches and position embeddings, and a transformer's other parts.

A layer called with torch or JAX arrays returns arrays of the same library. Weights may be arrays of
any library. Functions that return tables of angles or biases return NumPy arrays.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "Cache",
    "DeltaCache",
    "DynamicNTKScaling",
    "GatedDeltaNet",
    "KVCache",
    "LatentAttention",
    "LatentCache",
    "LightningIndexer",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "MultiHeadAttention",
    "PagePool",
    "PagedKVCache",
    "RoPE",
    "Rotation",
    "YaRNScaling",
    "additive_attention",
    "alibi_slopes",
    "attention_weights",
    "cosine_attention",
    "rotate_by_table",
    "t5_bias",
    "t5_buckets",
]

if TYPE_CHECKING:
    from minimha.layers.additive import additive_attention
    from minimha.layers.biases import alibi_slopes, t5_bias, t5_buckets
    from minimha.layers.cache import KVCache
    from minimha.layers.cosine import cosine_attention
    from minimha.layers.delta import DeltaCache, GatedDeltaNet
    from minimha.layers.indexer import LightningIndexer
    from minimha.layers.latent import LatentAttention, LatentCache
    from minimha.layers.multihead import MultiHeadAttention, attention_weights
    from minimha.layers.pages import PagedKVCache, PagePool
    from minimha.layers.protocols import Cache, Rotation
    from minimha.layers.rope import RoPE, rotate_by_table
    from minimha.layers.scalings import (
        DynamicNTKScaling,
        LinearScaling,
        Llama3Scaling,
        LongRoPEScaling,
        YaRNScaling,
    )
else:
    MODULES = (
        "protocols", "multihead", "scalings", "rope", "cache", "pages", "latent", "biases",
        "additive", "cosine", "delta", "indexer",
    )  # fmt: skip

    def __getattr__(name):
        """Import a name when it is first used, so that one layer does not load all others."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (import_module(f"{__name__}.{module}") for module in MODULES)
        return next(vars(module)[name] for module in modules if name in vars(module))


def __dir__() -> list[str]:
    return __all__
