"""What a command shows: its format, what is too large to read, and --output, written atomically."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minimha.explain import render
from minimha.explain.trace import Trace

TRACE_FORMATS = ("text", "json", "markdown", "latex", "csv", "npz", "svg", "html")
TABLE_FORMATS = ("text", "json", "markdown", "csv")
ENDINGS = {
    "": "text",
    ".txt": "text", ".json": "json", ".md": "markdown", ".tex": "latex", ".csv": "csv",
    ".npz": "npz", ".svg": "svg", ".html": "html",
}  # fmt: skip
FOR_READERS = ("text", "markdown", "latex", "svg", "html")
LARGEST_MATRIX = 32 * 32  # numbers; more in one matrix cannot be read, only processed
LARGEST_RUN = 16 * LARGEST_MATRIX


def add_output(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    """Add ``--format``, ``--output`` and ``--force``, for a command with these ``formats``."""
    what, output = "a table", "write a file"
    if formats is TRACE_FORMATS:
        what, output = "a trace", "write a file; csv writes a folder of steps"

    def known(text: str) -> str:
        if text not in formats:
            raise argparse.ArgumentTypeError(
                f"the formats of {what} are {', '.join(formats)}, got {text!r}"
            )
        return text

    parser.set_defaults(formats=formats)
    parser.add_argument(
        "--format",
        type=known,
        metavar=f"{{{','.join(formats)}}}",
        help="default text, or what the ending of --output names",
    )
    parser.add_argument("--output", metavar="PATH", help=output)
    parser.add_argument("--force", action="store_true", help="replace what --output names")


def deliver(args: argparse.Namespace, trace: Trace) -> None:
    """Print ``trace`` in the requested format, or write it to ``--output``."""
    trace = trace.selected(args.only)
    kind = format_of(args)
    if kind in FOR_READERS:
        _check_readable(trace)
    if kind == "text":
        _show(args, lambda *how: render.text(trace, args.decimals, *how))
        return
    from minimha.explain import export

    _put(args, export.trace_as(kind, trace, args.decimals))


def deliver_table(
    args: argparse.Namespace,
    records: list[dict[str, str]],
    titled: dict[str, list[dict[str, str]]] | None = None,
    exact: Any = None,
) -> None:
    """Print a table in the requested format, or write it to ``--output``.

    Parameters
    ----------
    args : Namespace
    records : list of dict
        The rows, with the same keys.
    titled : dict from title to records, optional
        Tables of numbers to show as text. Default is ``records``, as one table of words.
    exact : optional
        What to write as JSON. Default is ``records``.
    """
    kind = format_of(args)
    if kind == "text":
        _show(
            args,
            lambda width, in_color: (
                render.table(records) if titled is None else render.tables(titled, width)
            ),
        )
        return
    from minimha.explain import export

    if kind == "json":
        _put(args, export.table_as_json(records if exact is None else exact))
    else:
        as_text = export.table_as_csv if kind == "csv" else export.table_as_markdown
        _put(args, as_text(records))


def grouped(records: list[dict[str, str]], key: str) -> dict[str, list[dict[str, str]]]:
    """Return the records under each value of ``key``, which they no longer have."""
    found: dict[str, list[dict[str, str]]] = {}
    for record in records:
        rest = {name: value for name, value in record.items() if name != key}
        found.setdefault(record[key], []).append(rest)
    return found


def format_of(args: argparse.Namespace) -> str:
    """Return the format that ``--format`` names, or else the ending of ``--output``.

    Raises
    ------
    ValueError
        The ending names no format of the command, or the format cannot be printed.
    """
    is_trace = args.formats is TRACE_FORMATS
    ending = os.path.splitext(args.output or "")[1].lower()
    kind: str = args.format or ENDINGS.get(ending, "")
    is_folder = is_trace and kind == "csv"  # whose name has no ending
    if kind not in args.formats or (is_folder and args.format is None):
        raise ValueError(
            f"--output {args.output} ends in {ending!r}, which names no format of "
            f"{'a trace' if is_trace else 'a table'}: add --format, one of "
            f"{', '.join(args.formats)}{' (csv writes a folder of steps)' * is_trace}"
        )
    if is_trace and kind in ("csv", "npz") and args.output is None:
        what = "a folder" if is_folder else "a file"
        raise ValueError(f"--format {kind} needs --output: the name of {what} to write")
    return kind


def _show(args: argparse.Namespace, as_text: Callable[[int | None, bool], Any]) -> None:
    """Text fits a terminal's width and has its colours; elsewhere it has neither."""
    console = render.console_for(sys.stdout)
    if args.output is None and console.is_terminal:
        in_color = console.color_system in ("256", "truecolor") and not console.no_color
        console.print(as_text(console.width, in_color), soft_wrap=True)
    else:
        _put(args, render.plain(as_text(None, False)))


def _put(args: argparse.Namespace, content: str | bytes | dict[str, str]) -> None:
    """Print the content or write it where ``--output`` says; a dictionary is a folder's files."""
    if args.output is None:
        print(content, end="")
        return
    if isinstance(content, dict):
        write_folder(args.output, content, force=args.force)
    else:
        encoded = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        write_file(args.output, encoded, force=args.force)


def _check_readable(trace: Trace) -> None:
    """Refuse to print what nobody can read, and say what to do instead."""
    steps = trace.steps
    instead = (
        "export it with --format json, npz or csv and --output PATH, or choose a smaller step "
        "with --only"
    )
    for step in steps:
        if step.value.size > LARGEST_MATRIX:
            size = " × ".join(str(n) for n in step.value.shape)
            raise ValueError(
                f"{step.name} is too large to print, {size} = {step.value.size:,} numbers where "
                f"{LARGEST_MATRIX:,} can be read: {instead}"
            )
    total = sum(step.value.size for step in steps)
    if total > LARGEST_RUN:
        raise ValueError(
            f"all steps together are too large to print, {total:,} numbers where {LARGEST_RUN:,} "
            f"can be read: {instead}"
        )


def check_free(name: str, *, force: bool) -> None:
    """Refuse a file that cannot be written, before the work for it is done.

    Raises
    ------
    ValueError
        The folder does not exist, ``name`` is a folder or a device, or it exists and ``force`` is
        False.
    """
    path = _target(name)
    if path.is_dir():
        raise ValueError(f"--output {name} is a folder: expected the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"--output {name} is not a regular file: it will not be replaced")
    if path.exists() and not force:
        raise ValueError(f"--output {name} exists already: add --force to replace it")


def write_file(name: str, content: bytes, *, force: bool) -> None:
    """Write ``content`` to the file ``name``, whole or not at all; a link is followed.

    Raises
    ------
    ValueError
        As ``check_free``, or it cannot be written.
    """
    check_free(name, force=force)
    path = _target(name)
    _write(name, path.parent, {path.name: content})


def write_folder(name: str, files: Mapping[str, str], *, force: bool) -> None:
    """Write every file into the folder ``name``, which is created if its parent exists.

    Other files in the folder stay as they are.

    Raises
    ------
    ValueError
        The parent does not exist, ``name`` is a file, the folder holds something already and
        ``force`` is False, or it cannot be written.
    """
    path = _target(name)
    contents = {file: text.encode() for file, text in files.items()}
    if not path.exists():
        _write(name, path.parent, contents, new_folder=path.name)
        return
    if not path.is_dir():
        raise ValueError(f"--output {name} is a file: expected a folder, for one file per step")
    if any(path.iterdir()) and not force:
        raise ValueError(f"--output {name} is not empty: add --force to write into it")
    for file in files:
        if (path / file).exists() and not (path / file).is_file():
            raise ValueError(f"--output {name} holds {file}, which is not a regular file")
    _write(name, path, contents)


def _target(name: str) -> Path:
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise ValueError(
            f"--output {name}: the folder {Path(name).parent} does not exist, make it first"
        )
    return path


def _write(
    name: str,
    folder: Path,
    contents: Mapping[str, bytes],
    new_folder: str | None = None,
) -> None:
    """Write everything to a temporary folder, then move it: a result is never half written."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".minimha-") as temporary:
            written = Path(temporary) / (new_folder or "")
            written.mkdir(exist_ok=True)
            for file, content in contents.items():
                (written / file).write_bytes(content)
            if new_folder:
                os.replace(written, folder / new_folder)
                return
            for file in contents:
                os.replace(written / file, folder / file)
    except OSError as error:
        raise ValueError(f"--output {name} cannot be written: {error.strerror}") from None
