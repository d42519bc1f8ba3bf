"""Define ``Config``, the sizes and settings of a transformer."""

from __future__ import annotations

from dataclasses import dataclass

from minimha.layers.feed_forward import Activation
from minimha.layers.rope import RoPE


@dataclass(frozen=True)
class Config:
    """The sizes and settings of a transformer.

    Attributes
    ----------
    architecture : str
        The family's name: ``model_type`` in config.json.
    vocabulary : int
        V, the number of different tokens.
    num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff : int
        The number of layers, the width of the model, the numbers of heads and of key/value heads,
        the width of a head, and the width inside the feed-forward.
    max_length : int
        The largest number of tokens that the model can read.
    epsilon : float
        The ε that every norm adds to the variance or mean square.
    activation : {"relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"}
        The activation of the feed-forward.
    is_tied : bool
        Whether the token embedding is also the unembedding.
    ropes : tuple of RoPE or None, one per layer
        The layer's rotary embedding, or None if it has none.
    windows : tuple of int or None, one per layer
        The largest number of tokens that a query attends to, its own included; None for all.
    scale : float, optional
        The factor of the scores. Default is 1/√head_dim.
    softcap, logit_softcap : float, optional
        The cap c in c · tanh(x / c), for scores and for logits. Default is no cap.
    eos : tuple of int
        The ids of the tokens that end a text.
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
