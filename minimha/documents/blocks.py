"""Naive attention against FlashAttention, block by block: document 004 offers it, and stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minimha.documents import sentences
from minimha.documents.example import Example
from minimha.equations import dense, tiled
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, renamed
from minimha.explain.trace import token_labels


def of_length(num_tokens: int, **settings: Any) -> Example:
    """``block_by_block`` over the documents' own sentence of ``num_tokens`` tokens, 1 to 12."""
    return block_by_block(sentences.SENTENCES[num_tokens][0].split(), **settings)


def block_by_block(
    tokens: Sequence[str], *, B_r: int = 2, B_c: int = 2, d_model: int = 2, seed: int = 0
) -> Example:
    """One causal head over ``tokens``, first with whole matrices, then in blocks of B_r × B_c.

    Parameters
    ----------
    tokens : sequence of str
    B_r, B_c : int
        Queries and keys in a block.
    d_model : int
        Width of the one head.
    seed : int
        Of embeddings and weights, at least 0.

    Raises
    ------
    ValueError
        No tokens, or a count below 1.
    """
    sentences.check(tokens, 1, 1, d_model, seed)
    for name, size in (("block-queries", B_r), ("block-keys", B_c)):
        if size < 1:
            raise ValueError(f"{name} is {size}: a block holds at least one row")
    x = sentences.embeddings(tokens, d_model, seed)
    W_q, W_k, W_v, _ = sentences.draw_weights(d_model, 1, 1, seed)
    q, k, v = x @ W_q[0], x @ W_k[0], x @ W_v[0]

    def problem(is_causal: bool, is_scaled: bool) -> Problem:
        return Problem.of(q, k, v, is_causal=is_causal, scale=None if is_scaled else 1.0)

    def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
        whole, _ = dense.forward(problem(is_causal, is_scaled), tap)
        tiles = renamed(tap, output="output[tiled]")
        blockwise, _ = tiled.forward(problem(is_causal, is_scaled), tiles, B_r=B_r, B_c=B_c)
        tap("difference", np.array(abs(whole - blockwise).max()))
        naive, in_tiles = numbers_kept(len(tokens), d_model, B_r, B_c)
        tap("kept[naive]", np.array(naive))
        tap("kept[tiled]", np.array(in_tiles))

    text = " ".join(tokens)
    return Example(
        name="flash",
        title=f"{text}, whole matrices against blocks of {B_r} queries and {B_c} keys",
        source="document 004, section 'Flash Attentions'; Dao 2023 (FlashAttention-2), "
        f"Algorithm 1; embeddings and weights drawn with seed {seed}",
        sentence=text,
        run=run,
        labels=token_labels(tokens),
        is_causal=True,
        notes=_notes(problem(True, True), d_model, B_r, B_c),
        blocks=(B_r, B_c),
    )


def numbers_kept(L: int, D: int, B_r: int, B_c: int) -> tuple[int, int]:
    """How many numbers each way keeps between Q, K, V and O: whole matrices, blocks.

    Whole: S and A, L × L each. In blocks: Q_i, K_j, V_j, S_ij, m_i, l_i and O_i, whatever L is.

    >>> numbers_kept(4096, 64, 64, 64)
    (33554432, 20608)
    """
    B_r, B_c = min(B_r, L), min(B_c, L)
    return 2 * L * L, B_r * D + 2 * B_c * D + B_r * B_c + 2 * B_r + B_r * D


def _notes(problem: Problem, D: int, B_r: int, B_c: int) -> dict[str, str]:
    L = problem.q.shape[2]
    loaded = {
        (i, j)
        for i, start in enumerate(range(0, L, B_r))
        for j, _ in tiled.visible_blocks(problem, slice(start, min(start + B_r, L)), B_c)
    }
    skipped = [
        f"[i={i},j={j}]"
        for i in range(-(-L // B_r))
        for j in range(-(-L // B_c))
        if (i, j) not in loaded
    ]
    naive, in_tiles = (f"{number:,}" for number in numbers_kept(4096, 64, 64, 64))
    return {
        "output": "Here the naive way ends; the blocks follow.",
        "output[tiled]": "Each O_i divided by its l_i, line 12."
        + (
            f" Never loaded, as no query in it sees a key: {', '.join(skipped)}." if skipped else ""
        ),
        "kept[naive]": f"S and A are whole, {L} × {L} each.",
        "kept[tiled]": "Q_i, K_j, V_j, S_ij, m_i, l_i and O_i of one block; more tokens need no "
        f"more. With 4,096 tokens, head width 64 and blocks of 64: {naive} against {in_tiles}.",
    }
