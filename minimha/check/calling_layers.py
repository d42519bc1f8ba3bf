"""Call a class of whole layers like a function; every call passes the matrices.

A class that you wrote is called as ``Layer(W_q=…, W_k=…, W_v=…, W_o=…, num_heads=H)``. Problems may
add ``num_kv_heads``, ``b_q`` to ``b_o``, ``rope_base`` and ``rope_interleaved``. An instance is
called as ``layer(x)``, or with ``is_causal``, ``attn_mask`` (True = may attend) and ``cache``. The
cache is a dictionary that starts empty and is passed again with the next tokens. Matrices are
applied as x @ W.

A class that ``speaks="lightning_indexer"`` is called as ``Indexer(W_iq=…, W_ik=…, g_ik=…, b_ik=…,
W_iw=…, num_heads=Hi, top_k=K, rope_base=…, rope_dim=R, rope_interleaved=…)``. If it has a parameter
``rope``, it is called like ``minimha.layers.LightningIndexer``, with a dictionary of weights and a
``RoPE``. An instance is called as ``indexer(x, latents)``, or with ``is_causal=True``. It returns
the indices of the picked keys, as ``LightningIndexer`` does; -1 is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from minimha.check.adapted import results
from minimha.check.calling import Array, Axes, Caller, NotAnArray, numbers_of
from minimha.check.problems import spans
from minimha.check.translation import Refused
from minimha.layers import KVCache, MultiHeadAttention, RoPE

SPOKEN = ("minimha", "torch", "lightning_indexer")
BIASES: tuple[str, ...] = ("b_q", "b_k", "b_v", "b_o")


class LayerCaller(Caller):
    """A checked class of layers, called by the conventions of ``speaks``; see ``Caller``."""

    def __init__(self, cls: Callable[..., Any], speaks: str, *settings: Any, **more: Any) -> None:
        super().__init__(function_of(cls, speaks), speaks, *settings, **more)

    def _translated(
        self, cast: Mapping[str, Any], wants_lse: bool
    ) -> tuple[list[Array], Mapping[str, Any]]:
        return [cast["x"]], {name: value for name, value in cast.items() if name != "x"}

    def _axes(self, cast: Mapping[str, Any]) -> Axes:
        if self.speaks == "lightning_indexer":
            B, L, _ = cast["x"].shape
            return ("(B, L, L)", (B, L, L)), ("()", ())
        return ("(B, L, E)", cast["x"].shape), ("()", ())

    def _is_in_dtype(self, name: str) -> bool:
        return True


def function_of(cls: Callable[..., Any], speaks: str) -> Callable[..., Any]:
    """Return a ``function(x, **arguments)`` that makes a layer of ``cls`` and calls it on x."""
    if speaks not in SPOKEN:
        raise ValueError(f"speaks is {speaks!r}: expected one of {SPOKEN}, for a layer")
    if speaks == "lightning_indexer":
        return _indexer(cls)
    if isinstance(cls, type) and issubclass(cls, MultiHeadAttention):
        return _ours(cls)
    return _torch(cls) if speaks == "torch" else _plain(cls)


def _plain(cls: Callable[..., Any]) -> Callable[..., Any]:
    def function(
        x: Any, chunks: Sequence[int] = (), is_causal: bool = False, attn_mask: Any = None,
        **layer: Any,
    ) -> Any:  # fmt: skip
        made, options = cls(**layer), _given(is_causal, attn_mask)
        if not chunks:
            return made(x, **options)
        cache: dict[Any, Any] = {}
        return _in_chunks(x, chunks, lambda tokens: made(tokens, **options, cache=cache))

    return function


def _ours(cls: type[MultiHeadAttention]) -> Callable[..., Any]:
    def function(
        x: Any, chunks: Sequence[int] = (), is_causal: bool = False, attn_mask: Any = None,
        rope_base: float | None = None, rope_interleaved: bool = False, **layer: Any,
    ) -> Any:  # fmt: skip
        D = np.shape(layer["W_q"])[1] // layer["num_heads"]
        if rope_base is not None:
            layer["rope"] = RoPE(D, rope_base, interleaved=rope_interleaved)
        made = cls.from_combined(**layer)
        if not chunks:
            return made(x, **_given(is_causal, attn_mask))
        shape = len(x), made.num_kv_heads, sum(chunks), made.head_dim
        cache = KVCache(*shape, value_dim=made.value_dim, dtype=made.dtype)
        return _in_chunks(x, chunks, lambda tokens: made(tokens, cache=cache))  # a cache is causal

    return function


def _torch(cls: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``cls`` like torch.nn.MultiheadAttention: load a state dict; True in a mask hides."""

    def function(
        x: Any, chunks: Sequence[int] = (), is_causal: bool = False, attn_mask: Any = None,
        num_heads: int = 1, **layer: Any,
    ) -> Any:  # fmt: skip
        import torch

        matrices = {f"W_{name}": layer.pop(f"W_{name}") for name in "qkvo"}
        biases = {name: layer.pop(name) for name in BIASES if name in layer}
        if layer or chunks:
            raise Refused(f"torch has no {' and no '.join(layer) or 'cache'}")
        state = {
            "in_proj_weight": torch.cat([matrices[f"W_{name}"].mT for name in "qkv"]),
            "out_proj.weight": matrices["W_o"].mT,
        }
        if biases:
            state["in_proj_bias"] = torch.cat([biases[f"b_{name}"] for name in "qkv"])
            state["out_proj.bias"] = biases["b_o"]
        module = cls(x.shape[-1], num_heads, bias=bool(biases), batch_first=True)
        module.load_state_dict(state)
        hidden = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        if is_causal:
            hidden |= torch.ones_like(hidden).triu(1)
        if attn_mask is not None:
            hidden |= ~attn_mask
        options = {"attn_mask": hidden} if is_causal or attn_mask is not None else {}
        with torch.no_grad():
            return module.to(x).eval()(x, x, x, **options)

    return function


def _indexer(cls: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``cls`` like ``LightningIndexer`` if it takes ``rope``, or else with keywords alone.

    Its indices (B, L, K) or (B, 1, L, K) become ones in zeros (B, L, L), of the dtype of x.
    """

    def function(x: Any, latents: Any, is_causal: bool = False, **layer: Any) -> Array:
        if "rope" in signature(cls).parameters:
            base, R = layer.pop("rope_base"), layer.pop("rope_dim")
            pairs = layer.pop("rope_interleaved")
            sizes = {name: layer.pop(name) for name in ("num_heads", "top_k")}
            rope = RoPE(layer["W_ik"].shape[1], base, interleaved=pairs, rotary_dim=R)
            made: Any = cls(layer, **sizes, rope=rope)
        else:
            made = cls(**layer)
        indices = numbers_of(made(x, latents, **_given(is_causal, None)))
        B, L = x.shape[:2]
        if indices.dtype.kind not in "iu" or indices.size % (B * L) or indices.ndim not in (3, 4):
            raise NotAnArray(
                f"it returned {indices.dtype} of shape {indices.shape}: expected integers (B, L, K)"
            )
        indices = indices.reshape(B, L, -1)
        if indices.size and not -1 <= indices.min() <= indices.max() < L:
            raise NotAnArray(f"an index is not in -1 to {L - 1}, the last token")
        picked = np.zeros((B, L, L + 1), numbers_of(x).dtype)  # an index of -1 is the last column
        np.put_along_axis(picked, indices.astype(np.int64), picked.dtype.type(1), -1)
        return np.ascontiguousarray(picked[..., :-1])

    return function


def _given(is_causal: bool, attn_mask: Any) -> dict[str, Any]:
    options = {"is_causal": True} if is_causal else {}
    return options if attn_mask is None else {**options, "attn_mask": attn_mask}


def _in_chunks(x: Any, chunks: Sequence[int], call: Callable[[Any], Any]) -> Array:
    """Concatenate the outputs of successive calls with chunks[0], chunks[1], … tokens."""
    outputs = [numbers_of(results(call(x[:, start:end]))[0]) for start, end in spans(chunks)]
    return np.concatenate(outputs, axis=1)
