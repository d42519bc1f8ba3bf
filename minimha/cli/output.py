"""What a command shows: its format, where it goes, and what is too large to be read."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from minimha.explain import render
from minimha.explain.trace import Trace

FORMATS = ("text", "json", "markdown", "latex", "csv", "npz", "svg", "html")
SUFFIXES = {
    "": "text",
    ".txt": "text", ".json": "json", ".md": "markdown", ".tex": "latex", ".npz": "npz",
    ".svg": "svg", ".html": "html",
}  # fmt: skip
FOR_READERS = ("text", "markdown", "latex", "svg", "html")
LARGEST_MATRIX = 32 * 32  # numbers; more in one matrix cannot be read, only processed
LARGEST_RUN = 16 * LARGEST_MATRIX


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="(text, or by the ending of --output)")
    parser.add_argument(
        "--output", metavar="PATH", help="write a file; csv writes a folder of steps"
    )
    parser.add_argument("--force", action="store_true", help="replace what --output names")


def deliver(args: argparse.Namespace, trace: Trace) -> None:
    """Print ``trace`` in the asked format, or write it to ``--output``."""
    trace.only = args.only
    kind = format_of(args, only_to_disk=("csv", "npz"))
    if kind in FOR_READERS:
        _check_readable(trace)
    if kind == "text":
        _show(args, lambda *how: render.text(trace, args.decimals, *how))
        return
    from minimha.explain import export

    _put(args, export.trace_as(kind, trace, args.decimals))


def deliver_table(args: argparse.Namespace, title: str, records: list[dict[str, str]]) -> None:
    """Print a list of records in the asked format, or write it to ``--output``."""
    kind = format_of(args, only_to_disk=("npz",))
    if kind == "text":
        _show(args, lambda *how: render.table(records))
        return
    from minimha.explain import export

    _put(args, export.table_as(kind, title, records))


def deliver_numbers(
    args: argparse.Namespace,
    exact: Any,
    tables: dict[str, list[dict[str, str]]],
    title: str,
    records: list[dict[str, str]],
) -> None:
    """``exact`` as JSON, ``tables`` as text, ``records`` in any other format."""
    kind = format_of(args, only_to_disk=("npz",))
    if kind == "json":
        import json

        _put(args, json.dumps(exact, ensure_ascii=False, indent=1) + "\n")
    elif kind == "text":
        _show(args, lambda *how: render.tables(tables, how[0]))
    else:
        deliver_table(args, title, records)


def format_of(args: argparse.Namespace, only_to_disk: Sequence[str]) -> str:
    ending = os.path.splitext(args.output or "")[1].lower()
    kind: str | None = args.format or SUFFIXES.get(ending)
    if kind is None and ending == ".csv" and "csv" not in only_to_disk:
        kind = "csv"
    if kind is None:
        raise ValueError(
            f"--output {args.output} ends in {ending!r}, which names no format: add --format, one "
            f"of {', '.join(FORMATS)} (csv writes a folder of steps)"
        )
    if kind in only_to_disk and args.output is None:
        what = "a folder" if kind == "csv" else "a file"
        raise ValueError(f"--format {kind} needs --output: the name of {what} to write")
    return kind


def _show(args: argparse.Namespace, as_text: Callable[[int | None, bool], Any]) -> None:
    """Text fits a terminal's width and colours; elsewhere it has neither."""
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
    from minimha.cli import files

    if isinstance(content, dict):
        files.write_folder(args.output, content, force=args.force)
    else:
        encoded = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        files.write_file(args.output, encoded, force=args.force)


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
