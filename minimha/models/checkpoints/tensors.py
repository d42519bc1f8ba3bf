"""Take the tensors of a checkpoint one by one, and detect missing and unused ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import as_floating, cast
from minimha.equations.stored import Stored
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm, RMSNorm
from minimha.models.config import Config

Array = NDArray[Any]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # the upper half of a float32
# Tensors of old checkpoints that are no weights: masks, and the angles of rotary embedding.
BUFFERS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)  # fmt: skip


class Tensors:
    """The tensors of a checkpoint that have not been used yet.

    Methods that return a tensor, or a layer made of tensors, remove it.
    """

    def __init__(self, tensors: Mapping[str, Any], is_rounded: bool = False) -> None:
        """``is_rounded``: whether products may round matrices to bfloat16."""
        self._has_no_head, self._is_rounded = False, is_rounded
        self._left = {name: array for name, array in tensors.items() if not name.endswith(BUFFERS)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Array:
        """Remove the tensor ``name``, check that it has ``shape``, and return it as float32."""
        if name not in self._left:
            raise ValueError(f"tensor {name} is missing: expected shape {shape}")
        given: Any = self._left.pop(name)
        is_stored = getattr(given, "dtype", None) == BFLOAT16
        if isinstance(given, Stored):
            given = np.asarray(given) if given.shape == shape else given
        array: Array = given["bfloat16"] if is_stored else as_floating(f"tensor {name}", given)
        if array.shape != shape:
            raise ValueError(f"tensor {name} has shape {array.shape}: expected {shape}")
        if is_stored:
            array = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
        return cast(array, np.dtype(np.float32))

    def matrix(self, name: str, rows: int, columns: int) -> Any:
        """Remove the matrix ``name``, check its shape, and return it as its file stores it.

        It is a float32 array, or a ``Stored``, which stays in the file and is widened when it is
        used.
        """
        given: Any = self._left.get(name)
        if not isinstance(given, Stored):
            given = self._stored(given)
        if given is None or given.shape != (rows, columns):
            return self.take(name, rows, columns)
        del self._left[name]
        return given.rounded() if self._is_rounded else given

    def _stored(self, given: Any) -> Stored | None:
        """Return a matrix of contiguous 16-bit numbers as ``Stored``, or None."""
        dtype = getattr(given, "dtype", None)
        kind = "bfloat16" if dtype == BFLOAT16 else getattr(dtype, "name", "")
        kinds = ("float16", "bfloat16", "float32") if self._is_rounded else ("float16", "bfloat16")
        if kind not in kinds or type(given) is not np.ndarray or given.ndim != 2:
            return None
        if not given.size or not given.dtype.isnative or not given.flags.c_contiguous:
            return None
        return Stored.of_rows(kind, given.view(np.uint8))

    def add_prefix(self, prefix: str, name: str) -> None:
        """Add ``prefix`` to the names of all tensors if one of them is called ``name``.

        A checkpoint whose names lack the prefix has no language-model head: ``unembedding`` then
        returns None, unless it is tied.
        """
        self._has_no_head = name in self
        if self._has_no_head:
            self._left = {prefix + name: array for name, array in self._left.items()}

    def matrices(self, name: str, number: int, rows: int, columns: int) -> list[Any]:
        """Remove the tensor ``name`` (number, rows, columns); return its matrices as ``matrix``."""
        given: Any = self._left.get(name)
        fits = given is not None and np.shape(given) == (number, rows, columns)
        stored = [W for W in map(self._stored, given if fits else ()) if W is not None]
        if len(stored) < number:
            return list(self.take(name, number, rows, columns))
        del self._left[name]
        return [W.rounded() for W in stored] if self._is_rounded else stored

    def take_mxfp4(self, name: str, number: int, rows: int, columns: int) -> list[Stored]:
        """Remove ``name``_blocks and ``name``_scales, and return their ``number`` matrices.

        Each is a ``Stored`` of shape (rows, columns).
        """
        lead = number, rows
        expected = {"blocks": (*lead, columns // 32, 16), "scales": (*lead, columns // 32)}
        parts = [np.asarray(self._left.pop(f"{name}_{part}", None)) for part in expected]
        for (part, wanted), array in zip(expected.items(), parts, strict=True):
            if array.shape != wanted or array.dtype != np.uint8:
                raise ValueError(
                    f"tensor {name}_{part} has shape {array.shape} and {array.dtype}: expected "
                    f"{wanted} and uint8"
                )
        blocks, scales = map(np.ascontiguousarray, parts)
        pairs = zip(blocks.reshape(*lead, -1), scales, strict=True)
        matrices = [Stored.of_rows("MXFP4", *pair) for pair in pairs]
        return [W.rounded() for W in matrices] if self._is_rounded else matrices

    def rename(self, prefixes: Mapping[str, str | None]) -> None:
        """Replace each tensor name's prefix, a key of ``prefixes``, by its value there.

        If the value is None, the tensor is removed. If a name begins with several of the keys, the
        first of them counts.
        """
        renamed = {}
        for name, array in self._left.items():
            old = next(filter(name.startswith, prefixes), "")
            new = prefixes.get(old, "")
            if new is not None:
                renamed[f"{new}{name.removeprefix(old)}"] = array
        self._left = renamed

    def split(self, at: str, name: str, rows: Mapping[str, int], groups: int = 1) -> None:
        """Split the tensor ``at``.``name`` by rows into views, one per part.

        ``rows`` maps the name of each part to its number of rows. The tensor repeats this sequence
        of parts ``groups`` times; a part's view has its rows from all groups.
        """
        whole: Any = self._left.pop(f"{at}.{name}", None)
        expected = groups * sum(rows.values())
        if groups > 1 and (stored := self._stored(whole)) is not None:
            whole = stored
        shape = np.shape(whole)
        if whole is None or shape[:1] != (expected,):
            what = "is missing" if whole is None else f"has shape {shape}"
            raise ValueError(f"tensor {at}.{name} {what}: expected {expected} rows")
        for part, own in zip(rows, parts_of_rows(groups, *rows.values()), strict=True):
            self._left[f"{at}.{part}.{name.rpartition('.')[2]}"] = rows_of(whole, own)

    def leave(self, *names: str) -> None:
        """Remove the tensors in ``names``, which the model does not need."""
        for name in names:
            self._left.pop(name, None)

    def linear(
        self, ours: str, name: str, rows: int, columns: int, has_bias: bool = False
    ) -> dict[str, Any]:
        """Return a linear layer's weight and bias in a dictionary, as W_``ours`` and b_``ours``.

        They are the tensors ``name``.weight and, if ``has_bias``, ``name``.bias. torch stores the
        weight as (columns, rows); W_``ours`` is the transposed view.
        """
        taken = {f"W_{ours}": self.matrix(f"{name}.weight", columns, rows).T}
        if has_bias:
            taken[f"b_{ours}"] = self.take(f"{name}.bias", columns)
        return taken

    def attention(
        self, config: Config, names: Sequence[str], biases: str = "", **others: Any
    ) -> MultiHeadAttention:
        """Build an attention layer from the linear layers in ``names``, ordered q, k, v, o.

        ``biases`` lists the layers with a bias, such as "qkv". ``others`` are further arguments of
        ``MultiHeadAttention.from_combined``.
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
        """Return the LayerNorm ``name``, whose tensors are weight and bias, or gamma and beta."""
        parts = ("gamma", "beta") if f"{name}.gamma" in self else ("weight", "bias")
        gain, bias = (self.take(f"{name}.{part}", E) for part in parts)
        return LayerNorm(gain, bias, epsilon)

    def tied(self, name: str, other: Any, is_tied: bool = True) -> Any:
        """Return the tensor ``name``, or ``other`` if ``is_tied``.

        If ``is_tied`` and the checkpoint has the tensor all the same, it must equal ``other``; else
        ValueError is raised.
        """
        if is_tied and name not in self:
            return other
        own = self.take(name, *other.shape) if other.ndim < 2 else self.matrix(name, *other.shape)
        if is_tied and not _are_equal(own, other):
            raise ValueError(
                f"tensor {name} differs from the tensor that it repeats by tie_word_embeddings"
            )
        return other if is_tied else own

    def unembedding(self, tokens: Any, is_tied: bool) -> Any:
        """Return the unembedding (E, V), the transpose of lm_head.weight, or of ``tokens`` if tied.

        Returns None if the checkpoint has no head and is not tied.
        """
        if self._has_no_head and not is_tied:
            return None
        return self.tied("lm_head.weight", tokens, is_tied).T

    def check_all_taken(self) -> None:
        """Raise ValueError if any tensor has not been taken."""
        if self._left:
            first, *others = self._left
            more = f" and {len(others)} more are" if others else " is"
            raise ValueError(f"tensor {first}{more} left over: the architecture has no use for it")


def parts_of_rows(groups: int, *counts: int) -> list[Any]:
    """Return the rows of each part of a matrix that repeats parts of ``counts``, ``groups`` times.

    The rows of one group are slices, which index without a copy.

    >>> [part.tolist() for part in parts_of_rows(2, 1, 2)]
    [[0, 3], [1, 2, 4, 5]]
    """
    ends = np.cumsum(counts)
    if groups == 1:
        return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    rows = np.arange(groups * ends[-1]).reshape(groups, -1)
    return [part.ravel() for part in np.split(rows, ends[:-1], axis=1)]


def rows_of(W: Any, which: Any) -> Any:
    """Return rows of a matrix, without a copy of their numbers if it is ``Stored``."""
    is_listed = isinstance(W, Stored) and not isinstance(which, slice)
    return W.reordered(which) if is_listed else W[which]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two matrices have the same numbers, a thousand rows at a time."""
    parts = (slice(first, first + 1024) for first in range(0, len(one), 1024))
    return all(np.array_equal(one[some], other[some], equal_nan=True) for some in parts)
