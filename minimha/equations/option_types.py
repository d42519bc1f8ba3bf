"""Types of the keyword arguments of ``attention``, which layers and models share."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Backend = Literal["auto", "dense", "tiled", "cpu", "cuda"]
# Short names for ArrayLike and functions, since mypy prints all options for one misspelt option.
Array: TypeAlias = Any
Function: TypeAlias = Any


class Masks(TypedDict, total=False):
    """Types of the keyword arguments of ``attention`` that every attention layer accepts."""

    attn_mask: Array
    key_indices: Array
    alibi_slopes: Array
    sinks: Array
    backend: Backend


class Positions(TypedDict, total=False):
    """Types of the keyword arguments of ``attention`` that depend on token positions."""

    is_causal: bool
    q_offset: Array
    window_size: tuple[int | None, int | None] | None
    kv_lengths: Array


class Scores(TypedDict, total=False):
    """Types of the keyword arguments of ``attention`` that change scores before the softmax."""

    attn_bias: Array
    scale: Array
    softcap: Array
    score_mod: Function
    mask_mod: Function


class Packing(TypedDict, total=False):
    """Types of the keyword arguments of ``attention`` for packed and paged sequences."""

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    block_table: Array


class AttentionOptions(Masks, Positions, Scores, Packing, total=False):
    """Types of all keyword arguments that a layer passes on to ``attention``."""


class Options(AttentionOptions, total=False):
    """Types of all keyword arguments of ``attention`` except ``return_lse`` and ``tap``."""

    k_scale: Array
    v_scale: Array
