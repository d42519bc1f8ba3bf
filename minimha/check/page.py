"""Format a report as text, Markdown or HTML, from the same parts."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.catalogue import DEVIATIONS
from minimha.check.report import Report, options_of
from minimha.check.verdict import Result
from minimha.explain.numbers import cells
from minimha.explain.trace import printable

Array = NDArray[Any]

WIDTH = 80
WIDEST = 32  # the most characters of a table's column, except the last
LARGEST = 8  # the most rows and columns of a matrix
MOST_SIZES = 8  # of one kind that are listed
DECIMALS = 4
MARK = "*"
INDENT = "    "


@dataclass(frozen=True)
class Heading:
    """The heading of the parts that follow."""

    words: str


@dataclass(frozen=True)
class Matrices:
    """Expected and returned numbers, shown side by side; ``differs`` marks wrong numbers."""

    expected: Sequence[Sequence[str]]
    got: Sequence[Sequence[str]]
    differs: NDArray[np.bool_]


Part = Heading | str | list[dict[str, str]] | Matrices  # a list is a table of records


def as_text(report: Report, taken: int = 0) -> str:
    """Return the report as text in lines of 80 characters.

    The first line is shorter by ``taken`` characters, for words that precede it.
    """
    first, *others = parts(report)
    assert isinstance(first, str)
    verdict = _filled(first, taken)[taken:]
    return "\n\n".join([verdict, *map(_text, others)]) + "\n"


def as_markdown(report: Report) -> str:
    """Return the report as a Markdown page, with differing numbers in bold."""
    return "\n\n".join(_markdown(part) for part in parts(report)) + "\n"


def as_html(report: Report) -> str:
    """Return the report as a self-contained HTML page, with differing numbers marked."""
    body = "\n".join(_html(part) for part in parts(report))
    title = html.escape(printable(report.function))
    return PAGE.format(title=title, body=body)


def parts(report: Report) -> Iterator[Part]:
    """Yield the parts of a report: verdict, evidence, what to change, and table of options."""
    yield " ".join(report.sentences)
    if report.alternatives:
        others = ", or ".join(" with ".join(names) for names in report.alternatives)
        yield f"As likely: {others}. {_sentence(report.findings.tell_apart or '')}"
    smallest = report.smallest
    if smallest is not None:
        yield from _shown(smallest, report.deviations)
    known = [DEVIATIONS[name] for name in report.deviations if name in DEVIATIONS]
    if known and report.verdict != "right":
        yield Heading("what to change")
        yield [{"deviation": d.identifier, "change": report.change(d)} for d in known]
    if report.readings:
        yield Heading("what its outputs show")
        yield [
            {"reading": r["name"], "fit": f"{r['fit']:.4g}", "value": r["value"]}
            for r in report.readings
        ]
    if report.findings.results[0].problem.kind == "attention":
        yield Heading("what was tried")
        yield list(_tried(report))
    yield Heading("option by option")
    yield report.conformance()


def _tried(report: Report) -> Iterator[dict[str, str]]:
    """Yield what the verdict covers, one record for each kind."""
    covers = report.covers
    ranges = [
        f"{name} {', '.join(map(str, some)) if len(some) <= MOST_SIZES else _range(some)}"
        for name, some in covers["sizes"].items()
    ]
    options = len([name for name in covers["options"] if name not in report.refused])
    crossings = "not counted, because the function is wrong"
    if "crossings" in covers:
        tried, of = covers["crossings"]
        crossings = f"{tried} of {of} pairs of a condition and an option that is ignored there"
    for what, how in (
        ("problems", f"{report.explains[1]} answered, {covers['refused']} refused, "
                     f"{covers['not_asked']} not asked; repeat them with seed {report.seed}"),
        ("options", f"{options} kinds of problem, those below that are not refused"),
        ("packed, paged, functions", _states(covers["packed, paged, functions"])),
        ("crossings", crossings),
        ("sizes", "; ".join(ranges)),
        ("dtype", f"{report.dtype}; no other"),
    ):  # fmt: skip
        yield {"tried": what, "": how}


def _states(covered: Mapping[str, str]) -> str:
    """List options by their state: ``tried: block_table; refused: score_mod``."""
    states = dict.fromkeys(covered.values())
    return "; ".join(
        f"{state}: {', '.join(name for name, its in covered.items() if its == state)}"
        for state in states
    )


def _range(some: Sequence[int]) -> str:
    return f"{some[0]} to {some[-1]} ({len(some)} values)"


def _shown(result: Result, named: Sequence[str]) -> Iterator[Part]:
    """Yield the smallest failing problem, and its first head that differs."""
    yield Heading(f"the smallest problem that shows it: {result.problem.name}")
    yield f"{_arguments(result)}. It shows {result.problem.shows}."
    answer = result.answer
    if answer.note and (answer.output is None or set(answer.faults) & set(named)):
        yield _sentence(answer.note)
    if answer.output is None or answer.output.shape != result.expected.shape:
        return
    name, pair = "output", (result.expected, answer.output)
    if not _differs(*pair, result.bound).any() and answer.lse is not None:
        if result.expected_lse is None or answer.lse.shape != result.expected_lse.shape:
            return  # the note describes it
        name, pair = "log-sum-exp", (result.expected_lse[..., None], answer.lse[..., None])
    if result.problem.layer is not None:  # a layer mixes its heads
        pair = pair[0][:, None], pair[1][:, None]
    yield from _side_by_side(name, *pair, result.bound)


def _side_by_side(name: str, expected: Array, got: Array, bound: float) -> Iterator[Part]:
    """Yield at most ``LARGEST`` rows and columns of the first head that differs."""
    wrong = _differs(expected, got, bound)
    b, h = next(zip(*np.nonzero(wrong.any(axis=(2, 3))), strict=True), (0, 0))
    first = int(wrong[b, h].any(axis=-1).argmax()) if expected.shape[2] > LARGEST else 0
    where = (b, h, slice(first, first + LARGEST), slice(0, LARGEST))
    words = f"Rows {first} to {first + LARGEST - 1} of the {name}" if first else name.capitalize()
    if expected.shape[0] * expected.shape[1] > 1:
        words += f", batch entry {b}, head {h}"
    yield f"{words} (one row per query; {MARK} differs)"
    yield Matrices(cells(expected[where], DECIMALS), cells(got[where], DECIMALS), wrong[where])


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def _differs(expected: NDArray[Any], got: NDArray[Any], bound: float) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        close = (abs(expected - got) <= bound) | (expected == got)
    wrong: NDArray[np.bool_] = ~(close | (np.isnan(expected) & np.isnan(got)))
    return wrong


def _arguments(result: Result) -> str:
    """Return sizes and options: ``q (1, 1, 3, 4), k and v (1, 1, 5, 4), is_causal=True``."""
    given, layer = result.problem.arguments, result.problem.layer
    if layer is not None:
        sizes = f"x {given['x'].shape}, num_heads={layer['num_heads']}"
    else:
        q, k, v = (given[name].shape for name in ("q", "k", "v"))
        sizes = f"q {q}, k and v {k}" if k == v else f"q {q}, k {k}, v {v}"
    return ", ".join([sizes, *(_option(*item) for item in options_of(result).items())])


def _option(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        is_short = value.size <= LARGEST and value.ndim == 1
        return f"{name}={value.tolist()}" if is_short else f"{name} {value.shape}"
    return f"{name}={value}"


def _text(part: Part) -> str:
    match part:
        case Heading(words):
            return _filled(words)
        case str():
            return _filled(part)
        case list():
            return "\n".join(_text_table(part))
        case Matrices():
            return "\n".join(_text_matrices(part))


def _filled(words: str, indent: int = 0) -> str:
    front = " " * indent
    return textwrap.fill(printable(words), WIDTH, initial_indent=front, break_on_hyphens=False)


def _text_table(records: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield lines of a table; cells wrap at ``WIDEST``, and in the last column at ``WIDTH``."""
    *names, last = records[0]
    widths = [min(WIDEST, max(len(n), *(len(r[n]) for r in records))) + 2 for n in names]
    start = len(INDENT) + sum(widths)
    has_last = any(record[last] for record in records)
    for record in [{n: n for n in records[0]}, *records]:
        columns = [
            [line.ljust(w) for line in textwrap.wrap(printable(record[n]), w - 2) or [""]]
            for n, w in zip(names, widths, strict=True)
        ]
        words = printable(record[last]) if has_last else ""
        room = max(20, WIDTH - start)
        columns.append(textwrap.wrap(words, room, max_lines=4, placeholder=" …") or [""])
        for n in range(max(map(len, columns))):
            row = [
                column[n] if n < len(column) else " " * w
                for column, w in zip(columns, [*widths, 0], strict=True)
            ]
            yield (INDENT + "".join(row)).rstrip()


def _text_matrices(part: Matrices) -> Iterator[str]:
    marks = [[MARK if cell else " " for cell in row] for row in part.differs]
    got = [
        [number + mark for number, mark in zip(row, line, strict=True)]
        for row, line in zip(part.got, marks, strict=True)
    ]
    left, right = _aligned("expected", part.expected), _aligned("got", got)
    width = len(INDENT) + max(map(len, left)) + 4
    if width + max(map(len, right)) > WIDTH:
        yield from (INDENT + line for line in [*left, "", *right])
        return
    for one, other in zip(left, right, strict=True):
        yield ((INDENT + one).ljust(width) + other).rstrip()


def _aligned(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [title] + [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    ]


def _markdown(part: Part) -> str:
    match part:
        case Heading(words):
            return f"## {_escaped(words)}"
        case str():
            return _escaped(part)
        case list():
            rows = [[_escaped(cell) for cell in record.values()] for record in part]
            return _piped([[*part[0]], ["---"] * len(part[0]), *rows])
        case Matrices():
            width = len(part.expected[0])
            head = [["expected", *[""] * (width - 1), "got", *[""] * (width - 1)]]
            return _piped([*head, ["---:"] * 2 * width, *_paired(part, "**{}**".format)])


def _piped(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _paired(part: Matrices, marked: Callable[[str], str]) -> list[list[str]]:
    """Return rows of expected and returned cells; ``marked`` formats those that differ."""
    return [
        [*row, *(marked(cell) if bad else cell for cell, bad in zip(got, wrong, strict=True))]
        for row, got, wrong in zip(part.expected, part.got, part.differs, strict=True)
    ]


def _escaped(words: str) -> str:
    for character in "\\`*_[]<>|":
        words = words.replace(character, "\\" + character)
    return printable(words)


def _html(part: Part) -> str:
    match part:
        case Heading(words):
            return f"<h2>{_quoted(words)}</h2>"
        case str():
            return f"<p>{_quoted(part)}</p>"
        case list():
            rows = [_row("th", [_quoted(name) for name in part[0]])]
            rows += [_row("td", [_quoted(cell) for cell in record.values()]) for record in part]
            return f"<table>{''.join(rows)}</table>"
        case Matrices():
            width = len(part.expected[0])
            head = "".join(f'<th colspan="{width}">{name}</th>' for name in ("expected", "got"))
            rows = [f"<tr>{head}</tr>"]
            rows += [_row("td", row) for row in _paired(part, "<mark>{}</mark>".format)]
            return f'<table class="matrices">{"".join(rows)}</table>'


def _row(tag: str, row: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in row)}</tr>"


def _quoted(words: str) -> str:
    return html.escape(printable(words))


PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }}
table {{ border-collapse: collapse }}
td, th {{ padding: .2rem .8rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid #ccc }}
.matrices td {{ text-align: right; font-family: monospace }}
mark {{ background: #ffd9d4; color: #7a0000; font-weight: bold }}
</style>
<body>
{body}
</body>
</html>
"""
