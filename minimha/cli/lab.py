"""Run experiments, each with tables, figures and a conclusion: the command ``lab``."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from minimha.cli import output
from minimha.cli.arguments import natural
from minimha.explain import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``lab`` to its parser."""
    parser.description = (
        "Run an experiment and show its tables, its figures and the sentence that "
        "follows from the numbers. Without a name, list the experiments."
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="EXPERIMENT", help="such as scale (default: list all)")
    add("--seed", type=natural, metavar="N", help="seed of the random numbers (default 1)")
    output.add_output(parser, output.RESULT_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Run an experiment and show its results, or list all experiments."""
    from minimha import labs

    if args.name is None:
        _list(args, labs.EXPERIMENTS)
        return
    output.check_output(args)
    seed = 1 if args.seed is None else args.seed
    steps = labs.EXPERIMENTS[args.name].steps if args.name in labs.EXPERIMENTS else 0
    if steps:
        with render.progress(sys.stderr, steps) as progress:
            found = labs.run(args.name, seed, progress)
    else:
        with render.busy(sys.stderr, "computing"):
            found = labs.run(args.name, seed)
    output.deliver_result(args, found)


def _list(args: argparse.Namespace, experiments: Mapping[str, Any]) -> None:
    if args.seed is not None:
        raise ValueError(f"--seed needs an experiment: name one of {', '.join(experiments)}")
    if output.format_of(args) not in output.TABLE_FORMATS:
        raise ValueError(
            f"a list of experiments has no picture: name one of {', '.join(experiments)}"
        )
    rows = [{"experiment": name, "asks": known.question} for name, known in experiments.items()]
    output.deliver_table(args, rows)
