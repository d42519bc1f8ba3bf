"""Run the command line: each command is a module, and no other package prints."""

import argparse
import codecs
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, TextIO

from minimha import __version__
from minimha.api import BackendUnavailable
from minimha.explain.spelling import spelled
from minimha.explain.trace import printable

COMMANDS = {  # module → its line in the list of commands
    "examples": "list the worked examples",
    "example": "show every matrix of a worked example",
    "attend": "show every matrix of attention over your own numbers",
    "flash": "naive attention against FlashAttention, block by block",
    "next": "the most probable next words of a text",
    "heads": "what each head of a model does",
    "lab": "experiments: what scaling, masks, heads and tiles do, in numbers",
    "check": "name the bugs of an attention function",
    "sizes": "parameters, FLOPs and KV cache of known models",
    "bench": "how fast the CPU kernels are, beside other libraries",
    "kernels": "list the kernels, rung by rung",
    "backends": "say which backends can run here",
}
LONGEST_ERROR = 2000  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    The status is 0 for success. It is 1 if ``check`` finds a bug, or if the numbers of ``--answer``
    are wrong. It is 2 after an error message, and 130 after Ctrl-C.
    """
    status = 0
    codecs.register_error("spelled", spelled)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: a file opened later must not take its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="spelled")  # a terminal without ∞ shows inf
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            parser = build_parser(words)
            args = parser.parse_args(words)
            if args.run is None:
                parser.print_help()
            else:
                status = args.run(args) or 0
        finally:
            sys.stdout.flush()  # here, where a failure is reported; at exit it is not
    except BrokenPipeError:  # the reader of our pipe has closed it
        _discard(sys.stdout)
    except MemoryError:
        return _refuse("the problem does not fit into memory: take fewer tokens or heads")
    except OSError as error:
        _discard(sys.stdout)
        return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
    except (ValueError, TypeError, OverflowError, BackendUnavailable) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return status


def _refuse(sentence: str) -> int:
    """Print an error, with control characters from file names escaped."""
    words = " ".join(sentence.split())
    if len(words) > LONGEST_ERROR:
        words = f"{words[: LONGEST_ERROR // 2]} … {words[-LONGEST_ERROR // 2 :]}"
    try:
        print("minimha:", printable(words), file=sys.stderr, flush=True)
    except OSError:  # stderr is closed: only the exit status is left
        _discard(sys.stderr)
    return 2


def _discard(stream: TextIO) -> None:
    """Redirect ``stream`` to the null device, so that flushing at exit does not fail again."""
    with suppress(OSError, ValueError):  # a test's stream has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that reports an error in one sentence, without a page of usage."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments as argparse does, but report unknown options before other errors."""
        self.given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            options = [word.partition("=")[0] for word in self.given if word.startswith("--")]
            for option in options:
                if not any(known.startswith(option) for known in self._option_string_actions):
                    self.error(f"unrecognized arguments: {option}{self._meant(option)}")
        return super().parse_known_args(args, namespace)

    def _meant(self, option: str) -> str:
        """Return a suggestion for an unknown option: ``--d-model`` for ``--d_model``."""
        known, name = self._option_string_actions, option.replace("_", "-")
        ends = [o for o in known if o.startswith("--") and f"-{name}".endswith(o[1:])]
        near = [name] if name in known else sorted(ends, key=len)[-1:]
        if not near:
            from difflib import get_close_matches  # imported here for a faster start

            near = get_close_matches(name[:40], known, 1, cutoff=0.75)
        return f" (did you mean {near[0]}?)" if near else ""

    def error(self, message: str) -> NoReturn:
        many = [o for o in ("--sentence", "--cross", "--labels") if o in self.given]
        if many and ("argument name: not allowed" in message or "unrecognized" in message):
            message += f' (several words are one argument, in quotes: {many[0]} "The cat sat")'
        if "expected one argument" in message:
            message += " (one that begins with a minus sign is joined on: --option=-1,0)"
        raise ValueError(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # which Python before 3.13 loses
            self.error(f"argument {action.option_strings[0]}: '--' is no value")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse ignores errors, such as of a full disk


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a command-line parser, which stores the chosen command's function as ``args.run``.

    ``words`` are the words of the command line. If the first is a command, the parser has only that
    command, and imports no other.
    """
    parser = Parser(prog="minimha", description="Every number of attention, step by step.")
    parser.add_argument("--version", action="version", version=f"minimha {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(prog="minimha", metavar="command", title="commands")
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        command = import_module(f"{__name__}.{name}")
        subparser = commands.add_parser(name, help=COMMANDS[name])
        subparser.set_defaults(run=command.run)
        command.add_arguments(subparser)
    return parser
