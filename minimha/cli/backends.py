"""List the backends and, for those that cannot run here, the reason: the command ``backends``."""

import argparse

from minimha.api import backends
from minimha.cli.output import TABLE_FORMATS, add_output, deliver_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``backends`` to its parser."""
    parser.description = "Say which backends can run here, and why the others cannot."
    add_output(parser, TABLE_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Show a table of the backends: whether each can run here, and why not."""
    rows = [
        {"backend": name, "runs": "no" if reason else "yes", "why not": reason or ""}
        for name, reason in backends().items()
    ]
    deliver_table(args, rows)
