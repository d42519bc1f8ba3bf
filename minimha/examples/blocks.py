"""An example that compares naive attention with FlashAttention, block by block."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minimha.equations import dense, tiled
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, renamed
from minimha.examples import sentences
from minimha.examples.example import Example
from minimha.examples.sentences import DEFAULT_SEED
from minimha.explain.trace import token_labels

NUM_HEADS = 2  # of ``sentences.sentence``, whose head 0 is shown here


def of_length(num_tokens: int, **settings: Any) -> Example:
    """Return the example ``block_by_block`` for the built-in sentence of ``num_tokens`` tokens.

    ``num_tokens`` is from 1 to 12, and ``settings`` are the options of ``block_by_block``.
    """
    return block_by_block(sentences.SENTENCES[num_tokens][0].split(), **settings)


def block_by_block(
    tokens: Sequence[str], *, B_r: int = 2, B_c: int = 2, d_model: int = 4, seed: int = DEFAULT_SEED
) -> Example:
    """Return an example that computes one causal head with whole matrices and in blocks.

    A block has ``B_r`` queries and ``B_c`` keys. The head is head 0 of
    ``sentences.sentence(tokens)`` with the same ``d_model``, which must be even, and the same
    ``seed``.
    """
    if d_model % NUM_HEADS:
        raise ValueError(
            f"d-model is {d_model}: the head shown is one of {NUM_HEADS}, so the model width must "
            f"be even"
        )
    sentences.check(tokens, NUM_HEADS, NUM_HEADS, d_model, seed)
    for name, size in (("block-queries", B_r), ("block-keys", B_c)):
        if size < 1:
            raise ValueError(f"{name} is {size}: a block holds at least one row")

    def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
        x = sentences.embeddings(tokens, d_model, seed)
        W_q, W_k, W_v, _ = sentences.draw_weights(d_model, NUM_HEADS, NUM_HEADS, seed)
        scale = None if is_scaled else 1.0
        head = Problem.of(x @ W_q[0], x @ W_k[0], x @ W_v[0], is_causal=is_causal, scale=scale)
        whole, _ = dense.forward(head, tap)
        blockwise, _ = tiled.forward(head, renamed(tap, output="output[tiled]"), B_r=B_r, B_c=B_c)
        skipped = skipped_blocks(head, B_r, B_c)
        if skipped:
            tap("skipped", np.array(skipped))
        tap("difference", np.array(abs(whole - blockwise).max()))
        D = d_model // NUM_HEADS
        naive, in_tiles = numbers_kept(len(tokens), D=D, B_r=B_r, B_c=B_c)
        tap("kept[naive]", np.array(naive))
        tap("kept[tiled]", np.array(in_tiles))

    text = " ".join(tokens)
    naive, in_tiles = numbers_kept(4096, D=64, B_r=64, B_c=64)
    return Example(
        name="flash",
        title=f"{text}, whole matrices against blocks of {B_r} queries and {B_c} keys",
        source="document 004, section 'Flash Attentions'; Dao 2023 (FlashAttention-2), "
        f"Algorithm 1; embeddings and weights drawn with seed {seed}",
        sentence=text, run=run, labels=token_labels(tokens), is_causal=True,
        notes={
            "output": "This is the end of the naive way; the blocks follow.",
            "kept[naive]": "Whole matrices: S and A.",
            "kept[tiled]": "One block: Q_i, K_j, V_j, S_ij, m_i, l_i and O_i, however many tokens "
            "there are. With 4,096 tokens, head width 64 and blocks of 64: "
            f"{naive:,} numbers whole, {in_tiles:,} in blocks.",
        },
        blocks=(B_r, B_c),
    )  # fmt: skip


def numbers_kept(L: int, *, D: int, B_r: int, B_c: int) -> tuple[int, int]:
    """Return the two counts of numbers that naive and tiled attention store besides Q, K, V and O.

    Naive attention stores scores and weights, L × L each. Tiled attention stores one block at a
    time: its queries, keys, values and scores, and a maximum, a sum and an output row for each of
    its queries.

    >>> numbers_kept(4096, D=64, B_r=64, B_c=64)
    (33554432, 20608)
    """
    B_r, B_c = min(B_r, L), min(B_c, L)
    return 2 * L * L, B_r * D + 2 * B_c * D + B_r * B_c + 2 * B_r + B_r * D


def skipped_blocks(problem: Problem, B_r: int, B_c: int) -> list[tuple[int, int]]:
    """Return the indices (i, j) of blocks in which a mask hides all keys from all queries.

    Block (i, j) has the i-th ``B_r`` queries and the j-th ``B_c`` keys.
    """
    L = problem.q.shape[2]
    loaded = {
        (i, j)
        for i, start in enumerate(range(0, L, B_r))
        for j, _ in tiled.visible_blocks(problem, slice(start, min(start + B_r, L)), B_c)
    }
    everywhere = ((i, j) for i in range(-(-L // B_r)) for j in range(-(-L // B_c)))
    return [block for block in everywhere if block not in loaded]
