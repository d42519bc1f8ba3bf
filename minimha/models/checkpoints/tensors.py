"""Take the tensors of a checkpoint one by one; a missing or unused tensor is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, cast
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm, RMSNorm
from minimha.models.config import Config

Array = NDArray[Any]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # the upper half of a float32
# The numbers of four bits: a sign, two bits of exponent, one of mantissa.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Tensors of old checkpoints that are no weights: masks, and the angles of rotary embedding.
BUFFERS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)  # fmt: skip


class Tensors:
    """The tensors of a checkpoint that no part of the model has taken yet."""

    def __init__(self, tensors: Mapping[str, ArrayLike]) -> None:
        self._has_no_head = False
        self._left = {name: array for name, array in tensors.items() if not name.endswith(BUFFERS)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Array:
        """Remove the tensor ``name``, check that it has ``shape``, and return it as float32."""
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

    def add_prefix(self, prefix: str, name: str) -> None:
        """Add ``prefix`` to all names if a tensor ``name`` shows that the file has no head."""
        self._has_no_head = name in self
        if self._has_no_head:
            self._left = {prefix + name: array for name, array in self._left.items()}

    def take_mxfp4(self, name: str, *shape: int) -> Array:
        """Remove ``name``_blocks and ``name``_scales and return their numbers (..., rows, columns).

        32 numbers of a row share a scale, 2^(byte - 127); a byte has two of them, the lower half
        first (Open Compute Project, "Microscaling Formats", 2023).
        """
        *lead, columns = shape
        expected = {"blocks": (*lead, columns // 32, 16), "scales": (*lead, columns // 32)}
        parts = [np.asarray(self._left.pop(f"{name}_{part}", None)) for part in expected]
        for (part, wanted), array in zip(expected.items(), parts, strict=True):
            if array.shape != wanted or array.dtype != np.uint8:
                raise ValueError(
                    f"tensor {name}_{part} has shape {array.shape} and {array.dtype}: expected "
                    f"{wanted} and uint8"
                )
        blocks, scales = parts
        numbers = FP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*scales.shape, 32)
        exponents = scales[..., None].astype(np.int32) - 127
        return np.asarray(np.ldexp(numbers, exponents).reshape(shape))

    def rename(self, prefixes: Mapping[str, str | None]) -> None:
        """Replace the first of ``prefixes`` that a name begins with; None drops the tensor."""
        renamed = {}
        for name, array in self._left.items():
            old = next(filter(name.startswith, prefixes), "")
            new = prefixes.get(old, "")
            if new is not None:
                renamed[f"{new}{name.removeprefix(old)}"] = array
        self._left = renamed

    def split(self, at: str, name: str, rows: Mapping[str, int]) -> None:
        """Replace ``at``.``name`` by views of its rows; ``rows`` says how many each part has."""
        whole: Any = self._left.pop(f"{at}.{name}", None)
        expected = sum(rows.values())
        shape = np.shape(whole)
        if whole is None or shape[:1] != (expected,):
            what = "is missing" if whole is None else f"has shape {shape}"
            raise ValueError(f"tensor {at}.{name} {what}: expected {expected} rows")
        stop = 0
        for part, count in rows.items():
            start, stop = stop, stop + count
            self._left[f"{at}.{part}.{name.rpartition('.')[2]}"] = whole[start:stop]

    def leave(self, *names: str) -> None:
        """Drop the tensors ``names``, which the model does not need."""
        for name in names:
            self._left.pop(name, None)

    def linear(
        self, ours: str, name: str, rows: int, columns: int, has_bias: bool = False
    ) -> dict[str, Any]:
        """Return a dictionary with ``name``'s weight as W_``ours`` and its bias as b_``ours``.

        torch stores the weight as (columns, rows); W_ours (rows, columns) is its transposed view.
        """
        taken = {f"W_{ours}": self.take(f"{name}.weight", columns, rows).T}
        if has_bias:
            taken[f"b_{ours}"] = self.take(f"{name}.bias", columns)
        return taken

    def attention(
        self, config: Config, names: Sequence[str], biases: str = "", **others: Any
    ) -> MultiHeadAttention:
        """Return an attention layer with the matrices ``names``, in the order q, k, v, o.

        ``biases`` has the letters of matrices with a bias: "qkv". ``others`` are further arguments.
        """
        E, H, Hkv = config.d_model, config.num_heads, config.num_kv_heads
        queries, keys = H * config.head_dim, Hkv * config.head_dim
        shapes = (E, queries), (E, keys), (E, keys), (queries, E)
        for letter, name, shape in zip("qkvo", names, shapes, strict=True):
            others |= self.linear(letter, name, *shape, letter in biases)
        return MultiHeadAttention.from_combined(**others, num_heads=H, num_kv_heads=Hkv)

    def rms_norm(self, name: str, E: int, epsilon: float) -> RMSNorm:
        """Return the RMSNorm whose gain, of shape (E,), is the tensor ``name``.weight."""
        return RMSNorm(self.take(f"{name}.weight", E), epsilon)

    def layer_norm(self, name: str, E: int, epsilon: float) -> LayerNorm:
        """Return the LayerNorm ``name``. Old checkpoints call its gain gamma and its bias beta."""
        parts = ("gamma", "beta") if f"{name}.gamma" in self else ("weight", "bias")
        gain, bias = (self.take(f"{name}.{part}", E) for part in parts)
        return LayerNorm(gain, bias, epsilon)

    def tied(self, name: str, other: Array, is_tied: bool = True) -> Array:
        """Return the tensor ``name``, or ``other`` if ``is_tied``; both must then be equal."""
        if is_tied and name not in self:
            return other
        own = self.take(name, *other.shape)
        if is_tied and not np.array_equal(own, other, equal_nan=True):
            raise ValueError(
                f"tensor {name} differs from the tensor that it repeats by tie_word_embeddings"
            )
        return other if is_tied else own

    def unembedding(self, tokens: Array, is_tied: bool) -> Array | None:
        """Take lm_head.weight as (E, V), or ``tokens`` if tied; return None if there is no head."""
        if self._has_no_head and not is_tied:
            return None
        return np.asarray(self.tied("lm_head.weight", tokens, is_tied).T)

    def check_all_taken(self) -> None:
        """Raise ValueError if there is a tensor that no part of the model has taken."""
        if self._left:
            first, *others = self._left
            more = f" and {len(others)} more are" if others else " is"
            raise ValueError(f"tensor {first}{more} left over: the architecture has no use for it")
