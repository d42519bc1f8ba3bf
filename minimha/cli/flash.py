"""Compare naive attention with FlashAttention, block by block: the command ``flash``."""

import argparse

from minimha.cli.arguments import add_changes, add_sentence, check_sizes, count
from minimha.cli.output import add_steps, deliver
from minimha.examples import blocks, sentences

LARGEST_GRID = 2**12  # blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``flash`` to its parser."""
    parser.description = (
        "One head over a sentence: first with whole matrices, then in blocks, with "
        "what is loaded and what m, l and O are after each."
    )
    add = parser.add_argument
    add_sentence(parser.add_mutually_exclusive_group(), "a sentence of that length (default 6)")
    size = "number in a block (default 2)"
    add("--block-queries", type=count, metavar="B_r", default=2, help=size)
    add("--block-keys", type=count, metavar="B_c", default=2, help=size)
    add("--d-model", type=count, metavar="E", default=4, help="model width (default 4)")
    add_changes(parser)
    add_steps(parser)


def run(args: argparse.Namespace) -> int:
    """Show naive and tiled attention over one sentence, and return the exit status."""
    settings = {
        "B_r": args.block_queries, "B_c": args.block_keys, "d_model": args.d_model,
        "seed": sentences.DEFAULT_SEED if args.seed is None else args.seed,
    }  # fmt: skip
    if args.sentence is None:
        example = blocks.of_length(args.tokens or 6, **settings)
    else:
        example = blocks.block_by_block(args.sentence.split(), **settings)
    check_sizes(example, blocks.NUM_HEADS, args.d_model)
    num_tokens = len(example.labels["L"])
    num_blocks = -(-num_tokens // args.block_queries) * -(-num_tokens // args.block_keys)
    if num_blocks > LARGEST_GRID:
        raise ValueError(
            f"{num_tokens} tokens make {num_blocks:,} blocks where {LARGEST_GRID:,} can be traced: "
            f"take larger ones, with --block-queries and --block-keys"
        )
    return deliver(args, example.trace(args.causal, args.scale))
