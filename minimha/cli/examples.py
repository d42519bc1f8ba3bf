"""``examples``: the worked examples in a table."""

from __future__ import annotations

import argparse
from typing import Any

from minimha.cli.output import TABLE_FORMATS, add_output, deliver_table
from minimha.examples import EXAMPLES


def add_parser(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser("examples", help="list the documents' worked examples")
    parser.set_defaults(run=run)
    add_output(parser, TABLE_FORMATS)


def run(args: argparse.Namespace) -> None:
    """List the worked examples."""
    deliver_table(
        args,
        [
            {"name": e.name, "title": e.title, "sentence": e.sentence, "source": e.source}
            for e in EXAMPLES.values()
        ],
    )
