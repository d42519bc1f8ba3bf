"""The tensors of a checkpoint, taken one by one: none is missing, misshapen or left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, cast
from minimha.layers.norms import LayerNorm

Array = NDArray[Any]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # the upper half of a float32
# What old checkpoints hold although it is no weight: masks, and the angles of rotary embedding.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Tensors:
    """The tensors that are still to be taken.

    Parameters
    ----------
    tensors : mapping of str to array_like
    """

    def __init__(self, tensors: Mapping[str, ArrayLike]) -> None:
        self._left = {name: array for name, array in tensors.items() if not name.endswith(BUFFERS)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Array:
        """Take the tensor of that name and shape, float32.

        Raises
        ------
        ValueError
            There is none, or it has another shape or no floating dtype.
        """
        if name not in self._left:
            raise ValueError(f"tensor {name} is missing: expected shape {shape}")
        given: Any = self._left.pop(name)
        is_stored = getattr(given, "dtype", None) == BFLOAT16
        array: Array = given["bfloat16"] if is_stored else as_floating(f"tensor {name}", given)
        if array.shape != shape:
            raise ValueError(f"tensor {name} has shape {array.shape}: expected {shape}")
        if is_stored:
            array = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
        return cast(array, np.dtype(np.float32))

    def with_prefix(self, prefix: str, name: str) -> bool:
        """Put ``prefix`` before all names if ``name`` lacks it: it was saved without a head."""
        if name not in self:
            return False
        self._left = {prefix + name: array for name, array in self._left.items()}
        return True

    def leave(self, *names: str) -> None:
        """Leave out tensors that what is made from the checkpoint does not need."""
        for name in names:
            self._left.pop(name, None)

    def linear(
        self, ours: str, name: str, rows: int, columns: int, has_bias: bool = False
    ) -> dict[str, Array]:
        """Take ``name.weight`` and ``name.bias`` as W_ours (rows, columns) and b_ours (columns,).

        torch stores W as (columns, rows) and computes x Wᵀ; here it is a view, applied as x @ W.
        """
        taken = {f"W_{ours}": self.take(f"{name}.weight", columns, rows).T}
        if has_bias:
            taken[f"b_{ours}"] = self.take(f"{name}.bias", columns)
        return taken

    def layer_norm(self, name: str, E: int, epsilon: float) -> LayerNorm:
        """A normalisation; the first checkpoints call its gain gamma, its bias beta."""
        parts = ("gamma", "beta") if f"{name}.gamma" in self else ("weight", "bias")
        gain, bias = (self.take(f"{name}.{part}", E) for part in parts)
        return LayerNorm(gain, bias, epsilon)

    def tied(self, name: str, other: Array, is_tied: bool = True) -> Array:
        """``other``, if the tensor of that name is tied to it and no other one, or the tensor."""
        if is_tied and name not in self:
            return other
        own = self.take(name, *other.shape)
        if is_tied and not np.array_equal(own, other, equal_nan=True):
            why = "the one that tie_word_embeddings says it repeats"
            raise ValueError(f"tensor {name} differs from {why}")
        return other if is_tied else own

    def check_all_taken(self) -> None:
        """Refuse a checkpoint with a tensor that nothing has asked for."""
        if self._left:
            first, *others = self._left
            more = f" and {len(others)} more are" if others else " is"
            raise ValueError(f"tensor {first}{more} left over: the architecture has no use for it")
