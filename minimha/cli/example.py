"""Show every matrix of a worked example, or of any sentence: the command ``example``."""

import argparse
from difflib import get_close_matches

from minimha.cli.arguments import add_changes, add_sentence, check_sizes, count
from minimha.cli.output import add_steps, deliver
from minimha.examples import DOCUMENTS, EXAMPLES, Example, sentences, translation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``example`` to its parser."""
    parser.description = (
        "Show every matrix of a worked example: one by name, as 'examples' lists them "
        "(a document's example has the numbers that the document prints beside its own), or a "
        "sentence through a multi-head attention with small weights."
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("name", nargs="?", help="an example's name, such as translation")
    add_sentence(which, "1 is document 000, 3 document 003, the others a sentence of that length")
    which.add_argument("--document", choices=tuple(DOCUMENTS), help="a document's example",
        type=lambda number: number.zfill(3) if number.isdigit() else number)  # fmt: skip
    add("--heads", type=count, metavar="H", help="query heads (default 2)")
    add("--kv-heads", type=count, metavar="H", help="key/value heads (default as --heads)")
    add("--d-model", type=count, metavar="E", help="model width (default 4)")
    add("--rope", action="store_true", help="rotate queries and keys by position")
    add("--cross", nargs="?", const=" ".join(translation.ENGLISH), metavar="WORDS",
        help="attend to another sentence (cross-attention); without WORDS, a French one attends to "
        "its English one")  # fmt: skip
    add_changes(parser)
    add_steps(parser)


def run(args: argparse.Namespace) -> int:
    """Show every matrix of a worked example or of a sentence; return the exit status."""
    example = _example(args)
    check_sizes(example, args.heads or 2, args.d_model or 4)
    return deliver(args, example.trace(args.causal, args.scale))


def _example(args: argparse.Namespace) -> Example:
    settings = {
        "num_heads": args.heads, "num_kv_heads": args.kv_heads, "d_model": args.d_model,
        "seed": args.seed, "rope": args.rope or None,
        "context": None if args.cross is None else args.cross.split(),
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    if args.sentence is not None:
        return sentences.sentence(args.sentence.split(), **given)
    name = DOCUMENTS.get(args.name or args.document, args.name)
    if name is None and not given:
        name = {None: "the-cat-sat", 1: "two-heads", 3: "the-cat-sat"}.get(args.tokens)
    if name is None and args.tokens is None and "context" in given:
        return sentences.sentence(translation.FRENCH, source="document 000", **given)
    if name is None:
        return sentences.of_length(args.tokens or 3, **given)
    if name == "bank-drawn" and given:  # a sentence, whose numbers are drawn anyway
        return sentences.of_length(6, **given)
    if name not in EXAMPLES:
        near = get_close_matches(str(name)[:40], EXAMPLES, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"no example {name!r}{meant}: there are {', '.join(EXAMPLES)}")
    if given:
        first = next(iter(given))
        flags = {"num_heads": "heads", "num_kv_heads": "kv-heads", "d_model": "d-model"}
        flag = flags.get(first, "cross" if first == "context" else first)
        raise ValueError(
            f"--{flag} cannot change example {EXAMPLES[name].label}, whose numbers are its own: "
            f"use it with --tokens N or --sentence"
        )
    return EXAMPLES[name]
