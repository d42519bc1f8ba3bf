"""The command line: one module per command. No other package prints."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from minimha import BackendUnavailable, __version__
from minimha.cli import attend, backends, bench, example, examples, flash, kernels, sizes

COMMANDS = (examples, example, attend, flash, sizes, bench, kernels, backends)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 after a sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ∞ shows ? instead of failing
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.run is None:
            parser.print_help()
        else:
            args.run(args)
        if sys.stdout is not None:  # it may have been closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        return _refuse("the problem does not fit into memory: take fewer tokens or heads")
    except OSError as error:
        return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
    except (ValueError, TypeError, BackendUnavailable) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _refuse(sentence: str) -> int:
    print("minimha:", " ".join(sentence.split()), file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence and never a page of usage."""

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            message += " (one that begins with a minus sign is joined on: --option=-1,0)"
        raise ValueError(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; ``args.run`` is the command's function."""
    parser = Parser(prog="minimha", description="Every number of attention, step by step.")
    parser.add_argument("--version", action="version", version=f"minimha {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(prog="minimha", metavar="command", title="commands")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
