"""Print a command's result or write it to ``--output``, in the requested format.

Text for readers is limited in size. A file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minimha.cli.arguments import decimals, natural
from minimha.explain import render
from minimha.explain.result import Result
from minimha.explain.trace import Trace

TRACE_FORMATS = ("text", "json", "markdown", "latex", "csv", "npz", "xlsx", "svg", "png", "html")
TABLE_FORMATS = ("text", "json", "markdown", "csv")
REPORT_FORMATS = ("text", "json", "markdown", "html")
RESULT_FORMATS = ("text", "json", "markdown", "csv", "svg", "png")
KINDS = {
    TRACE_FORMATS: "a trace", TABLE_FORMATS: "a table", REPORT_FORMATS: "a report",
    RESULT_FORMATS: "a result",
}  # fmt: skip
ENDINGS = {
    "": "text",
    ".txt": "text", ".json": "json", ".md": "markdown", ".tex": "latex", ".csv": "csv",
    ".npz": "npz", ".xlsx": "xlsx", ".svg": "svg", ".png": "png", ".html": "html",
}  # fmt: skip
WORKSHEETS = ("text", "markdown", "latex", "csv", "xlsx", "svg", "png", "html")
NAME = f"Name: {'_' * 24} Date: {'_' * 10}"
FOR_READERS = ("text", "markdown", "latex", "svg", "png")  # html shows a step when asked
LARGEST_MATRIX = 32 * 32  # numbers; more in one matrix cannot be read, only processed
LARGEST_RUN = 16 * LARGEST_MATRIX
STEP_FILE = re.compile(r"\d\d+_\w+\.csv")  # 03_W_q_head0.csv
IN_USE = ".minimha-new"  # in a folder while a process writes into it


def add_output(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    """Add ``--format``, with the choices ``formats``, ``--output`` and ``--force`` to a command."""
    what, output = KINDS[formats], "write a file"
    if formats is TRACE_FORMATS:
        output = "write a file; csv writes a folder of steps"

    def known(text: str) -> str:
        if text not in formats:
            raise argparse.ArgumentTypeError(
                f"the formats of {what} are {', '.join(formats)}, got {text!r}"
            )
        return text

    parser.set_defaults(formats=formats)
    add, choices = parser.add_argument, f"{{{','.join(formats)}}}"
    add("--format", type=known, metavar=choices, help="default: text, or the ending of --output")
    add("--output", metavar="PATH", help=output)
    add("--force", action="store_true", help="replace an existing --output")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the steps of a trace, show them and write them to a file."""
    add = parser.add_argument
    which = "show this step only, by its name or heading, or heatmap or picks (may be repeated)"
    add("--only", action="append", default=[], metavar="STEP", help=which)
    add("--head", type=natural, metavar="N", help="show this head only, counted from 0")
    rows = "show the rows of this query only, and how it picks values"
    add("--query", default="", metavar="WORD", help=rows)
    entry = "write out one cell of each step, by words or numbers: sat,cat; --only adds matrices"
    add("--cell", default="", metavar="ROW,COLUMN", help=entry)
    blank = "leave this step blank, as a worksheet; --output adds a key beside it (may be repeated)"
    add("--hide", action="append", default=[], metavar="STEP", help=blank)
    answer = "check these numbers of the hidden step; status 1 if one is wrong or missing"
    add("--answer", metavar="CSV", help=answer)
    how = "decimals of numbers that are not whole (default 3)"
    add("--decimals", type=decimals, default=3, metavar="N", help=how)
    add_output(parser, TRACE_FORMATS)


def deliver(args: argparse.Namespace, trace: Trace) -> int:
    """Print ``trace`` in the requested format, or write it to ``--output``.

    With ``--hide``, the trace becomes a worksheet, and ``--output`` also writes a file of answers.
    With ``--answer``, print a table of the reader's numbers. Return the exit status: 1 if
    ``--answer`` lacks a number or has a wrong one, else 0.
    """
    kind = format_of(args)
    if args.answer is not None:
        from minimha.cli.worksheet import checked

        if kind not in TABLE_FORMATS:
            raise ValueError(f"--answer gives a table: {', '.join(TABLE_FORMATS)}, not {kind}")
        title, wrong, records = checked(args, trace)
        deliver_table(args, records, {title: wrong})
        return 1 if wrong else 0
    if args.hide and kind not in WORKSHEETS:
        raise ValueError(
            f"--hide makes a worksheet, which is {', '.join(WORKSHEETS[:-1])} or {WORKSHEETS[-1]}, "
            f"and not {kind}"
        )
    if args.hide and args.cell:
        raise ValueError("--cell writes out what --hide leaves blank: take one of the two")
    only = args.only
    if args.hide and kind in ("svg", "png"):
        only = only or list(trace)  # the matrices, and not the figures
    chosen = {"head": args.head, "query": args.query, "cell": args.cell}
    sheet = trace.selected(only, **chosen, blank=args.hide)
    if args.hide:
        sheet = sheet.selected(only, source=f"{NAME}. {trace.source}")
    if not sheet.steps and kind not in FOR_READERS:
        raise ValueError(f"--only {only[0]} is a drawing: {kind} holds steps")
    if kind in FOR_READERS or args.hide:
        _check_readable(sheet)
    if args.hide and args.output is not None:
        if kind != "csv":
            check_free(args.output, force=args.force)
        words = f"Key: {', '.join(args.hide)}. {trace.source}"
        key = trace.selected(only, **chosen, source=words)
        beside = os.path.splitext(args.output)
        _deliver(argparse.Namespace(**{**vars(args), "output": "-key".join(beside)}), key, kind)
    _deliver(args, sheet, kind)
    return 0


def _deliver(args: argparse.Namespace, trace: Trace, kind: str) -> None:
    """Print the steps that ``trace`` shows as ``kind``, or write them to ``--output``."""
    if kind == "text":
        _show(args, lambda *how: render.text(trace, args.decimals, *how))
        return
    from minimha.explain import export

    put(args, export.trace_as(kind, trace, args.decimals, answers=args.hide))


def deliver_table(
    args: argparse.Namespace,
    records: list[dict[str, str]],
    titled: dict[str, list[dict[str, str]]] | None = None,
    exact: Any = None,
) -> None:
    """Print a table in the requested format, or write it to ``--output``.

    ``records`` are the rows, which have the same keys. If ``titled`` is given, text shows its
    tables in place of ``records``; it maps titles to rows. If ``exact`` is given, JSON has it in
    place of ``records``.
    """
    kind = format_of(args)
    if kind == "text" and titled is not None:
        _show(args, lambda width, ramp: render.tables(titled, width, _encoding(args)))
        return
    if kind == "text":
        _show(args, lambda width, ramp: render.table(records, _encoding(args)))
        return
    from minimha.explain import export

    if kind == "json":
        put(args, export.table_as_json(records if exact is None else exact))
    else:
        as_text = export.table_as_csv if kind == "csv" else export.table_as_markdown
        put(args, as_text(records))


def deliver_result(args: argparse.Namespace, result: Result) -> None:
    """Print a result in the requested format, or write it to ``--output``."""
    kind = format_of(args)
    if kind == "text":
        _show(args, lambda width, ramp: render.result(result, width, ramp, _encoding(args)))
        return
    from minimha.explain import export

    put(args, export.result_as(kind, result))


def grouped(records: list[dict[str, str]], key: str) -> dict[str, list[dict[str, str]]]:
    """Return a dictionary from each value of ``key`` to its records, without ``key`` in them."""
    found: dict[str, list[dict[str, str]]] = {}
    for record in records:
        rest = {name: value for name, value in record.items() if name != key}
        found.setdefault(record[key], []).append(rest)
    return found


def check_output(args: argparse.Namespace) -> None:
    """Raise ValueError, before a long computation, if the result could not be written."""
    format_of(args)
    if args.output:
        check_free(args.output, force=args.force)


def format_of(args: argparse.Namespace) -> str:
    """Return the format that ``--format`` or the ending of ``--output`` names, by default text.

    Raise ValueError if the command lacks the format, or if it needs ``--output``.
    """
    is_trace = args.formats is TRACE_FORMATS
    kind = asked_format(args)
    is_folder = is_trace and kind == "csv"  # whose name has no ending
    if kind not in args.formats or (is_folder and args.format is None):
        ending = os.path.splitext(args.output)[1].lower()
        raise ValueError(
            f"--output {args.output} ends in {ending!r}, which names no format of "
            f"{KINDS[args.formats]}: add --format, one of "
            f"{', '.join(args.formats)}{' (csv writes a folder of steps)' * is_trace}"
        )
    if (is_folder or kind in ("npz", "xlsx", "png")) and args.output is None:
        what = "a folder" if is_folder else "a file"
        raise ValueError(f"--format {kind} needs --output: the name of {what} to write")
    return kind


def asked_format(args: argparse.Namespace) -> str:
    """Return the format that ``--format`` or the ending of ``--output`` names, by default "text".

    The command may lack this format. Return "" for an unknown ending.
    """
    ending = os.path.splitext(args.output or "")[1].lower()
    return args.format or ENDINGS.get(ending, "")


def _show(args: argparse.Namespace, as_text: Callable[[int | None, str], Any]) -> None:
    """Show text, on a terminal in its width and colours."""
    console = render.console_for(sys.stdout)
    if args.output is not None:
        put(args, render.plain(as_text(None, "blocks")))
    elif console.is_terminal:
        console.print(as_text(console.width, render.ramp_for(console)), soft_wrap=True)
    else:
        put(args, render.plain(as_text(None, render.ramp_for(console))))


def _encoding(args: argparse.Namespace) -> str:
    """Return the encoding of the output stream."""
    return "utf-8" if args.output is not None else sys.stdout.encoding or "utf-8"


def put(args: argparse.Namespace, content: str | bytes | dict[str, str]) -> None:
    """Print ``content`` or write it to ``--output``; a dictionary becomes a folder of files."""
    if args.output is None:
        print(content, end="")
        return
    if isinstance(content, dict):
        write_folder(args.output, content, force=args.force)
    else:
        encoded = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        write_file(args.output, encoded, force=args.force)


def _check_readable(trace: Trace) -> None:
    """Raise ValueError if a step, or all steps together, are too large to read."""
    steps = trace.shown
    instead = (
        "export it with --format json, npz or csv and --output PATH, or choose a smaller step "
        "with --only, one token with --query or one entry with --cell"
    )
    for step in steps:
        if step.value.size > LARGEST_MATRIX:
            raise ValueError(
                f"{step.name} is too large to print, {step.size} = {step.value.size:,} numbers "
                f"where {LARGEST_MATRIX:,} can be read: {instead}"
            )
    total = sum(step.value.size for step in steps)
    if total > LARGEST_RUN:
        raise ValueError(
            f"all steps together are too large to print, {total:,} numbers where {LARGEST_RUN:,} "
            f"can be read: {instead}"
        )


def check_free(name: str, *, force: bool) -> None:
    """Raise ValueError if the file ``name`` cannot be written, or exists and ``force`` is False."""
    _target(name)
    with _in_a_sentence(name):
        found = _status(name or os.curdir)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            raise ValueError(f"--output {name} is a folder: expected the name of a file")
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"--output {name} is not a regular file: it will not be replaced")
        if not force:
            raise FileExistsError


def write_file(name: str, content: bytes, *, force: bool) -> None:
    """Write ``content`` to the file ``name``, whole or not at all; follow a symbolic link.

    A replaced file keeps its mode and owner. A file with several hard links is overwritten in
    place, to keep the links, and only then can an interruption leave part of a file. If several
    processes write the same new file without ``force``, all but one get a ValueError.
    """
    check_free(name, force=force)
    path = _target(name)
    with _in_a_sentence(name), _undisturbed(), _staging(path.parent) as staging:
        if force:
            _replace_all(path.parent, {path.name: content}, staging)
        else:
            _save(staging / path.name, content)
            _create(staging / path.name, path)


def write_folder(name: str, files: Mapping[str, str | bytes], *, force: bool) -> None:
    """Write ``files`` into the folder ``name``, which is created if its parent exists.

    Other files in the folder stay. Raises ValueError if the folder holds steps of another run, or
    if another process is writing into it.
    """
    path = _target(name)
    contents = {f: c if isinstance(c, bytes) else c.encode() for f, c in files.items()}
    with _in_a_sentence(name), _undisturbed():
        if path.is_dir():
            with _staging(path, IN_USE) as staging:
                _check_folder(name, path, files, force=force)
                _replace_all(path, contents, staging)
        elif path.exists():
            raise ValueError(f"--output {name} is a file: expected a folder, for one file per step")
        else:
            with _staging(path.parent) as staging:
                new = staging / path.name
                new.mkdir()
                for file, content in contents.items():
                    _save(new / file, content)
                os.rename(new, path)  # fails where another process has written meanwhile


def _check_folder(name: str, path: Path, files: Collection[str], *, force: bool) -> None:
    held = sorted(set(os.listdir(path)) - {IN_USE})
    if held and not force:
        raise ValueError(f"--output {name} is not empty: add --force to write into it")
    for file in held:
        if file in files and not stat.S_ISREG((path / file).lstat().st_mode):
            raise ValueError(f"--output {name} holds {file}, which is not a regular file")
        if file not in files and STEP_FILE.fullmatch(file):
            raise ValueError(
                f"--output {name} holds {file}, which this run does not write: remove it first, "
                f"or choose another folder, so that the steps of two runs are not mixed"
            )


def _replace_all(folder: Path, contents: Mapping[str, bytes], staging: Path) -> None:
    """Write all files into ``staging`` first, then move them."""
    for file, content in contents.items():
        old = _status(folder / file)
        _save(staging / file, content, 0o666 if old is None else stat.S_IMODE(old.st_mode))
    for file, content in contents.items():
        path, old = folder / file, _status(folder / file)
        if old is not None and old.st_nlink > 1:
            (staging / file).unlink()  # it showed that there is room
            _save(path, content)
            continue
        if old is not None:
            with suppress(AttributeError, OSError):  # on Windows, or another user's file
                os.chown(staging / file, old.st_uid, old.st_gid)
            os.chmod(staging / file, stat.S_IMODE(old.st_mode))
        os.replace(staging / file, path)


def _create(written: Path, path: Path) -> None:
    """Move ``written`` to ``path`` unless that exists: linking never replaces a file."""
    try:
        os.link(written, path)
    except FileExistsError:
        raise
    except OSError:  # a filesystem without links, as on a memory card
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(written, path)


def _save(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file and flush it to disk, so that a crash after renaming leaves it whole."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _target(name: str) -> Path:
    """Return the path that ``name`` leads to, through any symbolic links."""
    path = Path(os.path.realpath(name))
    if not path.parent.is_dir():
        raise ValueError(
            f"--output {name}: the folder {Path(name).parent} does not exist, make it first"
        )
    return path


@contextmanager
def _staging(folder: Path, name: str | None = None) -> Iterator[Path]:
    """Make a temporary folder in ``folder``; a ``name`` allows one process at a time."""
    staging = folder / (name or f".minimha-{os.urandom(8).hex()}")
    try:
        staging.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{staging} exists: another process is writing into this folder, or was killed while "
            f"it did (remove {staging.name} then)"
        ) from None
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP, which would leave temporary files or half a result."""
    handlers: dict[int, Any] = {}
    caught: list[int] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")):
                if number is not None:
                    handlers[number] = signal.signal(number, lambda n, frame: caught.append(n))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in caught[:1]:
            signal.raise_signal(number)


@contextmanager
def _in_a_sentence(name: str) -> Iterator[None]:
    """Convert the system's errors to errors about ``--output``."""
    try:
        yield
    except FileExistsError:
        raise ValueError(f"--output {name} exists already: add --force to replace it") from None
    except OSError as error:
        raise ValueError(f"--output {name} cannot be written: {error.strerror}") from None
