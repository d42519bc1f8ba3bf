"""List the worked examples in a table: the command ``examples``."""

import argparse

from minimha.cli.output import TABLE_FORMATS, add_output, deliver_table
from minimha.examples import EXAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``examples`` to its parser."""
    parser.description = (
        "List the worked examples. An example with a document's number reproduces that "
        "document's numbers. The documents are five texts that teach attention: 000, 001 and 002, "
        "'Multi-Head Attention'; 003, 'A Deep Dive into the Multi-Head Attention Mechanism'; 004, "
        "'Multi-head Attention'."
    )
    add_output(parser, TABLE_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Show a table of the worked examples."""
    keys = "name", "document", "title", "source", "sentence", "left_out"
    exact = [{key: getattr(EXAMPLES[name], key) for key in keys} for name in EXAMPLES]
    rows = [
        {key: row[key] for key in keys[:3]}  # a title has the sentence
        | {"source": row["source"] + f" (left out: {row['left_out']})" * bool(row["left_out"])}
        for row in exact
    ]
    deliver_table(args, rows, exact=exact)
