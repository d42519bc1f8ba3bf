"""Load the model and the sentences for the commands ``next`` and ``heads``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimha.explain import render

if TYPE_CHECKING:
    from minimha.models.transformer import Transformer

LARGEST_TEXT = 2**20  # bytes of a file of sentences
SHIPPED = "world", "repeats"  # modules of ``minimha.models`` whose models ship


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--model``, the path or the name of a language model."""
    where = (
        "a folder with config.json, a .gguf file, or a model that ships: world (default), repeats"
    )
    parser.add_argument("--model", metavar="PATH", help=where)


def add_sentences(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--sentences``, a file with one sentence per line."""
    which = "one per line (default: what a shipped model was made for)"
    parser.add_argument("--sentences", metavar="FILE", help=which)


def load(args: argparse.Namespace) -> Transformer:
    """Return the model that ``--model`` names, by default the small world model.

    Raise ValueError unless it is a decoder with a tokenizer.
    """
    if args.model is None or args.model in SHIPPED:
        return _shipped(args).load()  # type: ignore[no-any-return]
    from minimha.models import Transformer, load

    with render.busy(sys.stderr, f"reading {args.model}"):
        try:
            model = load(args.model)
        except MemoryError:
            raise ValueError(f"the weights of {args.model} do not fit into memory") from None
    if not isinstance(model, Transformer):
        raise ValueError(
            f"{args.model} holds a {model.config.architecture}, which does not continue a text: "
            f"expected a decoder, such as GPT-2 or LLaMA"
        )
    if model.tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer (in a folder, tokenizer.json), so there is nothing to "
            f"read text with: the library takes the tokens' numbers, model.logits([1, 2])"
        )
    return model


def _shipped(args: argparse.Namespace) -> Any:
    return import_module(f"minimha.models.{args.model or SHIPPED[0]}")


def sentences(args: argparse.Namespace) -> list[str]:
    """Return the lines of the file ``--sentences`` that are not blank.

    By default, return random texts for the model "repeats", else passages about the small world.
    """
    if args.sentences is None:
        if args.model == "repeats":
            return _shipped(args).texts()  # type: ignore[no-any-return]
        from minimha.models.world.questions import passages

        return passages()
    name, path = args.sentences, Path(args.sentences)
    if path.is_file() and path.stat().st_size > LARGEST_TEXT:
        raise ValueError(f"--sentences {name} has more than {LARGEST_TEXT:,} bytes")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"--sentences {name} is not text in UTF-8") from None
    if not any(lines):
        raise ValueError(f"--sentences {name} has no sentence: expected one per line")
    return [line for line in lines if line]


def labels(model: Transformer, ids: list[int]) -> tuple[str, ...]:
    """Return a printable name for each token of ``ids``."""
    assert model.tokenizer is not None  # which load checked
    return tuple(map(model.tokenizer.label, ids))
