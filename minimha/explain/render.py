"""Render traces, tables and results as lines of text for a terminal; only this module uses rich.

If a width is given, matrices that are wider are split into groups of columns.
"""

import io
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from minimha.explain import wording
from minimha.explain.numbers import cells, limits
from minimha.explain.printed import Status
from minimha.explain.ramp import RAMPS, Ramp
from minimha.explain.result import Result
from minimha.explain.spelling import as_written
from minimha.explain.trace import Step, Trace

if TYPE_CHECKING:
    from minimha.explain.chart import Grid

INDENT = 4
GAP = 2
NO_BREAK = "\N{NO-BREAK SPACE}"
CELL_SIZES = (5, 3, 1)  # of a heatmap: for 0.27, for .27, for a shade without a number
SCALE_SIZE = 15  # cells of the scale above the heatmaps
LONGEST_BAR = 40  # characters for a weight of 1, if the width allows
LONGEST_ROW = 16  # weights; a longer row is scaled by its largest weight
LABEL_WIDTH = 10  # in a heatmap; a matrix shows its labels whole
EXPORT_WIDTH = 100
STYLES = {
    Status.EXACT: "green",
    Status.TRUNCATED: "magenta",
    Status.FROM_ROUNDED: "magenta",
    Status.WRONG: "bold red",
    Status.ASSUMED: "magenta",
    Status.ILLUSTRATIVE: "magenta",
}


def console_for(stream: IO[str]) -> Console:
    """Return a rich console for ``stream`` that prints text verbatim, without markup."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def ramp_for(console: Console) -> str:
    """Return the name of the best heatmap ramp (key of ``RAMPS``) that ``console`` can show.

    The environment variable COLORFGBG, such as 0;15 (black on white), shows whether the terminal's
    background is light.
    """
    try:
        "█∞".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return "ascii"
    depth = None if console.no_color or not console.is_terminal else console.color_system
    if not depth:
        return "blocks"
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    is_light = ground in ("7", *map(str, range(9, 16)))
    return (depth if depth in RAMPS else "standard") + " on light" * is_light


def text(trace: Trace, decimals: int, width: int | None, ramp: str) -> Text:
    """Return ``trace`` as text: its steps, heatmaps, and the values that a query averages.

    ``decimals`` is the number of decimals of numbers that are not whole. If ``width`` is None,
    lines are not broken. ``ramp`` is a key of ``RAMPS``, the shades of heatmaps.
    """
    shades = RAMPS[ramp]
    lines = _paragraph(trace.example, width, "bold", indent=0)
    lines += _paragraph(trace.source, width, "", indent=0) if trace.source else []
    steps = trace.shown
    if steps and wording.legend(trace):
        lines += _paragraph(wording.legend(trace), width, "", indent=0)
    for number, (step, is_new) in enumerate(wording.news(steps), 1):
        place = f" · {step.place}" if step.place else ""
        axes = f"   {' × '.join(step.axes)} = {step.size}" if step.axes else ""
        lines += [Text(), Text(f"{number:>2}  ").append(step.name + place, "bold").append(axes)]
        if is_new:
            if step.formula not in (step.symbol, step.name):
                lines += _paragraph(step.formula, width)
            lines += [*_paragraph(step.note, width), Text()]
        lines += _matrix(step, decimals, width, shades.infinity)
        if step.printed:
            lines += [Text(), *_printed(step, width)]
    drawn = wording.heatmaps(trace.drawn("heatmap"))
    if drawn:
        lines += [Text(), Text("heatmap", "bold"), *_legend(drawn, width, shades), Text()]
        lines += _heatmaps(drawn, width or EXPORT_WIDTH, shades)
    for pick in wording.picks(trace):
        lines += _pick(pick, decimals, width or EXPORT_WIDTH, shades.bar)
    lines += _story(trace, decimals, width) if trace.cell else []
    return Text("\n").join(lines)


def table(records: Sequence[Mapping[str, str]], encoding: str = "utf-8") -> Table:
    """Return ``records`` as a rich table, with the keys of the first record as its header.

    Signs that ``encoding`` lacks are replaced by letters.
    """
    shown = Table(
        *(as_written(key, encoding) for key in records[0]),
        box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold",
    )  # fmt: skip
    shown.columns[0].no_wrap = True  # a reader may copy names
    shown.columns[0].overflow = "ignore"
    for record in records:
        shown.add_row(*(as_written(text, encoding) for text in record.values()))
    return shown


def tables(
    titled: Mapping[str, Sequence[Mapping[str, str]]], width: int | None, encoding: str = "utf-8"
) -> Group:
    """Return tables one below the other, each below its title, a key of ``titled``.

    All columns except the first are right-aligned.
    """
    parts: list[RenderableType] = []
    for title, records in titled.items():
        parts += [Text(), *_paragraph(title, width, "bold" if records else "", indent=0)]
        if records:
            shown = table(records, encoding)
            for column in shown.columns[1:]:
                column.justify, column.overflow = "right", "fold"  # no digit is lost
            parts.append(shown)
    return Group(*parts[1:])


def result(found: Result, width: int | None, ramp: str, encoding: str = "utf-8") -> Group:
    """Return the tables, charts and conclusion of an experiment as a rich group."""
    from minimha.explain.chart import Bars, Grid, Lines
    from minimha.explain.plot import plot

    parts: list[RenderableType] = [*_paragraph(found.title, width, "bold", indent=0)]
    parts += _paragraph(found.about, width or EXPORT_WIDTH, indent=0) if found.about else []
    if found.tables:
        written = {table.title: table.written() for table in found.tables}
        parts += [Text(), tables(written, width, encoding)]
    for figure in found.figures:
        if isinstance(figure, Lines | Bars):
            lines = plot(figure, width or EXPORT_WIDTH, is_ascii=ramp == "ascii")
            parts += [Text(), Text(figure.title, "bold"), *map(Text, lines)]
        elif isinstance(figure, Grid):
            parts += [Text(), Text(figure.title, "bold"), Text(), *_grid(figure, RAMPS[ramp])]
    return Group(*parts, Text(), *_paragraph(found.conclusion, width or EXPORT_WIDTH, "bold", 0))


def _grid(data: "Grid", ramp: Ramp) -> Iterator[Text]:
    """Yield the lines of a grid: numbers on coloured shades, or beside characters as shades."""
    margin = INDENT + max(map(cell_len, data.rows)) + GAP
    widths = [max(cell_len(name), 7) for name in data.columns]
    heads = zip(data.columns, widths, strict=True)
    yield Text(" " * margin + " ".join(name.center(size) for name, size in heads).rstrip())
    for name, row in zip(data.rows, data.values, strict=True):
        line = Text(set_cell_size(" " * INDENT + name, margin))
        for n, (value, size) in enumerate(zip(row, widths, strict=True)):
            shade, style = ramp.shade(value)
            words = data.written(value) + ("" if ramp.in_color else f" {shade * 2}")
            line.append(" " if n else "").append(words.center(size), style)
        line.rstrip()
        yield line


@contextmanager
def busy(stream: IO[str], doing: str) -> Iterator[None]:
    """Show ``doing`` beside a spinner during the ``with`` block, if ``stream`` is a terminal."""
    console = Console(file=stream, markup=False, highlight=False)
    with console.status(doing) if console.is_terminal else nullcontext():
        yield


@contextmanager
def progress(stream: IO[str], steps: int | None) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each step's name before the step begins.

    If ``stream`` is a terminal, the call advances a progress bar. ``steps`` is the total number of
    steps, or None if it is unknown.
    """
    console = Console(file=stream, markup=False, highlight=False)
    if not console.is_terminal:  # older rich ends even a disabled bar with a newline
        yield lambda doing: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def advance(doing: str) -> None:
            bar.update(task, advance=1, description=doing)

        yield advance


def plain(shown: RenderableType) -> str:
    """Return ``shown`` as plain text of ``EXPORT_WIDTH`` columns, without trailing blanks."""
    if isinstance(shown, Text):
        lines = shown.plain
    else:
        stream = io.StringIO()
        console = Console(
            file=stream, width=EXPORT_WIDTH, markup=False, emoji=False, highlight=False
        )
        console.print(shown)
        lines = stream.getvalue().rstrip("\n")
    return "".join(f"{line.rstrip()}\n" for line in lines.split("\n"))


def _matrix(step: Step, decimals: int, width: int | None, infinity: str) -> list[Text]:
    numbers = wording.numbers(step, decimals)
    body = [[number.replace("∞", infinity) for number in row] for row in numbers]
    if not body or not body[0]:
        return [Text(" " * INDENT + "(empty)")]
    names = step.rows or [""] * len(body)
    margin = INDENT + max(map(cell_len, names)) + (GAP if step.rows else 0)
    heads = step.columns or [str(n) for n in range(len(body[0]))]
    widths = [max(cell_len(cell) for cell in column) for column in zip(heads, *body, strict=True)]
    groups = _column_groups(widths, None if width is None else width - margin)
    if len(groups) == 1 and step.columns is None:  # columns are numbered only if they are split
        heads = [""] * len(body[0])
    lines: list[Text] = []
    for group in groups:
        lines += [Text()] if lines else []
        for name, row in [("", heads), *zip(names, body, strict=True)]:
            start = set_cell_size(" " * INDENT + name, margin)
            columns = (" " * (widths[n] - cell_len(row[n])) + row[n] for n in group)
            line = (start + (" " * GAP).join(columns)).rstrip()
            lines += [Text(line)] if line else []
    return lines


def _column_groups(widths: Sequence[int], available: int | None, gap: int = GAP) -> list[list[int]]:
    """Return the column numbers in groups that fit into ``available`` characters."""
    groups: list[list[int]] = [[]]
    used = 0
    for column, size in enumerate(widths):
        if groups[-1] and available is not None and used + size > available:
            groups.append([])
            used = 0
        groups[-1].append(column)
        used += size + gap
    return groups


def _printed(step: Step, width: int | None) -> list[Text]:
    lines: list[Text] = []
    for source, numbers, remarks in wording.printed(step):
        unbroken = numbers.replace(" ", NO_BREAK).replace(f"]{NO_BREAK}[", "] [")
        lines += _paragraph(f"printed in {source}: {unbroken}", width)
        for status, sentence in remarks:
            lines += _paragraph(sentence, width, STYLES[status], indent=INDENT + 2)
    return lines


def _limits(drawn: Sequence[tuple[str, Step]], is_weights: bool) -> tuple[float, float]:
    if is_weights:
        return 0.0, 1.0
    return limits(step.value for _, step in drawn if step.base != "weights")


def _is_long(drawn: Sequence[tuple[str, Step]]) -> bool:
    """Return whether each row of weights has its own scale, because there are many keys."""
    return any(s.base == "weights" and s.value.shape[-1] > LONGEST_ROW for _, s in drawn)


def _heatmaps(drawn: Sequence[tuple[str, Step]], width: int, ramp: Ramp) -> list[Text]:
    """Return the heatmaps side by side, with the largest cells that fit ``width``."""
    blocks: list[list[Text]] = []
    for size in CELL_SIZES:
        blocks = [
            _heatmap(
                title, step, size, ramp, _limits(drawn, step.base == "weights"), _is_long(drawn)
            )
            for title, step in drawn
        ]
        if max(map(_width, blocks)) <= width:
            break
    return _side_by_side(blocks, width)


def _heatmap(
    title: str, step: Step, size: int, ramp: Ramp, limits: tuple[float, float], is_long: bool
) -> list[Text]:
    value = np.asarray(step.value, np.float64)
    rows = [_short(label, LABEL_WIDTH) for label in step.rows or ()]
    margin = max(map(cell_len, rows)) + 1
    heads = " ".join(set_cell_size(label, size) for label in step.columns or ())
    lines = [Text(title), Text((" " * margin + heads).rstrip())]
    shown = np.where(_hidden(step), -np.inf, value)
    for label, row, texts in zip(rows, shown.tolist(), cells(value, 2), strict=True):
        if is_long and step.base == "weights":
            limits = 0.0, max(filter(math.isfinite, row), default=0.0)
        drawn = [
            _heat(number, text, size, ramp, limits) for number, text in zip(row, texts, strict=True)
        ]
        lines.append(Text(set_cell_size(label, margin)).append_text(Text(" ").join(drawn)))
    return lines


def _heat(number: float, text: str, size: int, ramp: Ramp, limits: tuple[float, float]) -> Text:
    """Return one cell: a number on a colour, or without colours a shade."""
    if not np.isfinite(number):
        return Text((ramp.hidden if np.isneginf(number) else "?").center(size))
    low, high = limits
    character, style = ramp.shade((number - low) / (high - low) if high > low else 0.0)
    if not ramp.in_color:
        return Text(character * size)
    if len(text) > size:  # 1.00 and 0.27 as 1 and .27
        text = text.removesuffix(".00").removeprefix("0" if number else "")
    return Text((text if len(text) <= size else "").center(size), style)


def _pick(pick: wording.Pick, decimals: int, width: int, bar: str) -> list[Text]:
    weights, values, output = pick.weights, pick.values, pick.output
    row, rows = cells(weights.value[pick.query], decimals)[0], cells(values.value, decimals)
    picked = [f"{row[n]} · [{' '.join(rows[n])}]" for n in pick.keys]
    shares = [float(weights.value[pick.query, n]) for n in pick.keys]
    labels = [_short((weights.columns or ())[n], LABEL_WIDTH) for n in pick.keys]
    number, share = pick.rest
    if number:
        [[text]] = cells(np.array(share), decimals, like=weights.value[pick.query])
        labels, picked, shares = [*labels, f"{number} more"], [*picked, text], [*shares, share]
    margin = max(map(cell_len, labels)) + GAP
    total = f"sum: [{' '.join(cells(output.value, decimals)[pick.query])}]"
    longest = width - INDENT - margin - GAP - max(map(len, [*picked, total]))
    if longest < 10:
        return []
    bars = [bar * round(share * min(longest, LONGEST_BAR)) for share in np.nan_to_num(shares)]
    length = max(map(len, bars)) + GAP
    lines = [Text(), Text(pick.title, "bold"), Text()]
    for label, drawn, text in zip(labels, bars, picked, strict=True):
        start = " " * INDENT + set_cell_size(label, margin)
        lines.append(Text(start + drawn.ljust(length) + text))
    return [*lines, Text(" " * (INDENT + margin + length) + total)]


def _story(trace: Trace, decimals: int, width: int | None) -> list[Text]:
    from minimha.explain.story import story

    lines = [Text(), Text(f"cell {trace.cell}", "bold"), Text()]
    for written in story(trace, decimals):
        lines += _paragraph(written.line, width)
    return lines


def _legend(drawn: Sequence[tuple[str, Step]], width: int | None, ramp: Ramp) -> list[Text]:
    lines = []
    for name, is_weights in (("scores", False), ("weights", True)):
        if not any((step.base == "weights") == is_weights for _, step in drawn):
            continue
        low, high = cells(np.array(_limits(drawn, is_weights)), 2)[0]
        high = "the row's largest" if is_weights and _is_long(drawn) else high
        line = Text(" " * INDENT + f"{name:<{GAP + len('weights')}}{low} ")
        line.append("" if ramp.in_color else "[")
        for n in range(SCALE_SIZE):
            line.append(*ramp.shade(n / (SCALE_SIZE - 1)))
        lines.append(line.append(f"{'' if ramp.in_color else ']'} {high}"))
    values = [step.value[~np.isneginf(step.value)] for _, step in drawn]
    gap = "" if all(np.isfinite(value).all() for value in values) else "? is infinite or NaN. "
    is_any = any(_hidden(step).any() for _, step in drawn)
    hidden = f"{ramp.hidden} is hidden: score -∞, weight 0. " if is_any else ""
    return [*lines, *_paragraph(f"{hidden}{gap}Rows are queries, columns keys.", width)]


def _hidden(step: Step) -> NDArray[np.bool_]:
    return np.isneginf(step.value) if step.hidden is None else step.hidden


def _side_by_side(blocks: Sequence[list[Text]], width: int) -> list[Text]:
    widths = [_width(block) for block in blocks]
    lines: list[Text] = []
    for group in _column_groups(widths, width, gap=0):
        lines += [Text()] if lines else []
        for row in zip_longest(*(blocks[n] for n in group), fillvalue=Text()):
            line = Text()
            for n, part in zip(group, row, strict=True):
                line.append(" " * INDENT).append_text(part)
                if n != group[-1]:
                    line.append(" " * (widths[n] - INDENT - part.cell_len))
            lines.append(line)
    return lines


def _width(block: Sequence[Text]) -> int:
    return INDENT + max(line.cell_len for line in block)


def _paragraph(words: str, width: int | None, style: str = "", indent: int = INDENT) -> list[Text]:
    lines = [words] if width is None else textwrap.wrap(words, max(20, width - indent)) or [""]
    return [Text(" " * indent).append(line.replace(NO_BREAK, " "), style) for line in lines]


def _short(label: str, size: int) -> str:
    return label if cell_len(label) <= size else set_cell_size(label, size - 1) + "…"
