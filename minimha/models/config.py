"""Define ``Config``, the sizes and settings of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from minimha.layers.feed_forward import Activation
from minimha.layers.rope import RoPE


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer, and the settings in which families of models differ.

    Attributes
    ----------
    architecture : str
        The family's name: ``model_type`` in config.json.
    vocabulary : int
        V, the number of different tokens.
    num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff : int
        The number of layers, and E, H, Hkv, D and F of each layer.
    max_length : int
        The largest number of tokens that the model can read.
    epsilon : float
        The ε of the norms.
    activation : {"relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"}
        The activation of the feed-forward.
    is_tied : bool
        Whether the token embedding is also the unembedding.
    ropes : tuple of RoPE or None, one per layer
        The layer's rotary embedding, if any.
    windows : tuple of int or None, one per layer
        The largest number of tokens that a query sees, itself included; None for all.
    scale : float, optional
        The scores' scale. Default is 1/√D.
    softcap, logit_softcap : float, optional
        Caps of the scores and of the logits.
    eos : tuple of int
        The tokens that end a text.
    """

    architecture: str
    vocabulary: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    epsilon: float
    activation: Activation
    is_tied: bool
    ropes: tuple[RoPE | None, ...]
    windows: tuple[int | None, ...]
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} but num_heads is {self.num_heads}: H must be "
                f"a multiple of Hkv"
            )
