"""``backends``: which can run here, and why the others cannot."""

import argparse
from typing import Any

from minimha.api import backends
from minimha.cli.output import TABLE_FORMATS, add_output, deliver_table


def add_parser(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser("backends", help="say which backends can run here")
    parser.set_defaults(run=run)
    add_output(parser, TABLE_FORMATS)


def run(args: argparse.Namespace) -> None:
    """List the backends."""
    rows = [
        {"backend": name, "runs": "no" if reason else "yes", "why not": reason or ""}
        for name, reason in backends().items()
    ]
    deliver_table(args, rows)
