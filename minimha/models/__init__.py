"""Run whole transformers, from text to the next token: embeddings, layers, logits, checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "Encoder", "EncoderDecoder", "Transformer", "attribution", "checkpoints", "interpretability",
    "load", "repeats", "sizes", "world",
]  # fmt: skip

if TYPE_CHECKING:
    from minimha.models import (
        attribution,
        checkpoints,
        interpretability,
        repeats,
        sizes,
        world,
    )  # fmt: skip
    from minimha.models.checkpoints import load
    from minimha.models.encoder import Encoder
    from minimha.models.encoder_decoder import EncoderDecoder
    from minimha.models.transformer import Transformer
else:
    HOMES = {
        "Encoder": "encoder", "EncoderDecoder": "encoder_decoder", "Transformer": "transformer",
        "load": "checkpoints",
    }  # fmt: skip

    def __getattr__(name):
        """Import a name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{HOMES.get(name, name)}")
        return getattr(module, name) if name in HOMES else module


def __dir__() -> list[str]:
    return __all__
