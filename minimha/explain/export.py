"""Export traces as JSON, CSV, npz, xlsx, Markdown, LaTeX, SVG or HTML, and tables as text.

The functions return the content of a file; they write no files.
"""

import csv
import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from minimha.explain import figures, spreadsheet, wording
from minimha.explain.figures import charts, latex, raster
from minimha.explain.figures.matrix import LIGHTEST_ON, scales_of, shades
from minimha.explain.numbers import as_matrix
from minimha.explain.page import page
from minimha.explain.printed import Comparison
from minimha.explain.result import Result
from minimha.explain.steps import num_query_heads
from minimha.explain.story import story
from minimha.explain.trace import Step, Trace
from minimha.explain.worksheet import worksheet

Content = str | bytes | dict[str, str]


def trace_as(kind: str, trace: Trace, decimals: int, *, answers: Collection[str] = ()) -> Content:
    """Return ``trace`` in the format ``kind``, such as "json".

    SVG and PNG have only the figures. CSV is a dictionary that maps file names to text. HTML is an
    interactive page or, if ``answers`` names steps, a worksheet to print. The worksheet is an
    exercise if those steps are blank in ``trace``, else its solution.
    """
    makers: dict[str, Callable[[], Content]] = {
        "json": lambda: as_json(trace),
        "markdown": lambda: as_markdown(trace, decimals),
        "latex": lambda: as_latex(trace, decimals),
        "csv": lambda: as_csv(trace),
        "npz": lambda: as_npz(trace),
        "xlsx": lambda: spreadsheet.as_workbook(trace, decimals),
        "svg": lambda: figures.svg(trace, decimals),
        "png": lambda: raster.png(figures.svg(trace, decimals)),
        "html": lambda: worksheet(trace, decimals, answers) if answers else page(trace, decimals),
    }
    return makers[kind]()


def as_json(trace: Trace, *, has_values: bool = True) -> str:
    """Return ``trace`` as JSON: ``{"example", "source", …, "steps": [...]}``.

    A step has name, symbol, axes, formula, note, shape and, if ``has_values``, value. It may have
    labels (``rows``, ``columns``), indices (``batch``, ``head``, ``kv_head``), ``hidden`` (the
    indices of masked weights) and ``printed`` (numbers printed in documents). If ``trace.cell``
    names a cell, ``cell`` has its computation. Infinities and NaN are strings.
    ``reading.trace_from`` reads the JSON.
    """
    record: dict[str, Any] = {
        "example": trace.example,
        "source": trace.source,
        "axes": trace.legend,
        "labels": {axis: list(names) for axis, names in trace.labels.items()},
        "notes": dict(trace.notes),
        "given": list(trace.given),
        "blocks": None if trace.blocks is None else list(trace.blocks),
        "num_heads": num_query_heads(trace),
        "computed": list(dict.fromkeys([*trace, *trace.computed])),
        "steps": [_step_record(step, has_values) for step in trace.steps],
    }
    if trace.cell:
        record["cell"] = [
            {"step": written.cell.step.title, "operation": written.operation, "text": written.text}
            for written in story(trace)
        ]
    return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def as_markdown(trace: Trace, decimals: int) -> str:
    """Return a Markdown document with a heading, a formula and a table for each step."""
    parts = [f"# {_markdown(trace.example)}"]
    parts += [_markdown(words) for words in (trace.source, _axes(trace)) if words]
    for step in trace.shown:
        parts.append(f"## {_markdown(step.title)}")
        parts.append(f"```math\n{step.tex}\n```")
        parts.append(_markdown(_description(step)))
        parts.append(_markdown_table(step, decimals))
        for source, numbers, remarks in wording.printed(step):
            items = "\n".join(f"- {_markdown(remark.sentence)}" for remark in remarks)
            parts.append(f"Printed in {_markdown(source)}: `{numbers}`\n\n{items}")
    if trace.cell:
        lines = [f"- {_markdown(written.line)}" for written in story(trace, decimals)]
        parts += [f"## {_markdown(f'cell {trace.cell}')}", "\n".join(lines)]
    for name, drawing in figures.figures(trace, decimals).items():
        if name != "matrices":
            url = quote(drawing.svg(name), safe="")
            parts += [f"### {name}", f"![{name}](data:image/svg+xml,{url})"]
    return "\n\n".join(parts) + "\n"


def as_latex(trace: Trace, decimals: int) -> str:
    """Return ``trace`` as a complete document for pdfLaTeX, XeLaTeX or LuaLaTeX.

    Narrow steps are side by side. A formula and note that an earlier step has, such as that of
    another head, are not repeated.
    """
    body = [rf"\section*{{{_latex(trace.example)}}}", _latex(trace.source), _latex(_axes(trace))]
    body.append("\n".join(_latex_step(*found, decimals) for found in wording.news(trace.shown)))
    if trace.cell:
        lines = "\n".join(rf"\item {_latex(written.line)}" for written in story(trace, decimals))
        body.append(rf"\subsection*{{cell {_latex(trace.cell)}}}")
        body.append(f"\\begin{{itemize}}\n{lines}\n\\end{{itemize}}")
    drawn = figures.figures(trace, decimals)
    pictures = (latex.picture(drawn[name], _latex) for name in FIGURES if name in drawn)
    body.append("\n".join(pictures))
    text = "\n\n".join(part for part in body if part.strip())
    start = f"{LATEX_PREAMBLE}{_unknown_characters(text)}\\begin{{document}}\n\n"
    return f"{start}{text}\n\n\\end{{document}}\n"


def _latex_step(step: Step, is_new: bool, decimals: int) -> str:
    body = wording.numbers(step, decimals)
    rows, columns = _labels(step, body)
    width = max(map(len, rows), default=0) + sum(
        max(len(text) for text in column) + 3 for column in zip(columns, *body, strict=True)
    )
    parts = [rf"\textbf{{{_latex(step.title)}}}"]
    if is_new and step.formula not in (step.symbol, step.name):
        parts.append(_fitting(rf"$ {step.tex} $"))
    parts.append(_latex_matrix(step, decimals))
    if is_new:
        parts.append(rf"{{\scriptsize {_latex(_description(step))}\par}}")
    for source, numbers, remarks in wording.printed(step):
        lines = [f"printed in {source}: {numbers}", *(remark.sentence for remark in remarks)]
        parts += [rf"{{\scriptsize {_latex(line)}\par}}" for line in lines]
    share = next((share for most, share in SHARES if width <= most), "1")
    inside = "\n\n".join(parts)
    return (
        f"\\begin{{minipage}}[t]{{{share}\\linewidth}}\\vspace{{0pt}}\\raggedright\n{inside}\n"
        r"\par\vspace{1.5ex}\end{minipage}\hspace{0.005\linewidth}"
    )


def as_csv(trace: Trace) -> dict[str, str]:
    """Return ``trace`` as a dictionary from file names to CSV text, one file per step and head.

    A matrix is written row by row; a vector is one row. Numbers have full precision, and there is
    no header. ``labels.csv`` has the row and column labels of each file. If ``trace.cell`` names a
    cell, ``cell.csv`` has its computation. A spreadsheet might run words that begin with =, +, -,
    @, a tab or a line break as a formula, so an apostrophe precedes them.
    """
    digits = max(2, len(str(len(trace.steps))))  # so that sorted file names keep the order
    files = {_file_name(f"{n:0{digits}}", step): step for n, step in enumerate(trace.steps, 1)}
    labels = [
        [name, axis, *names]
        for name, step in files.items()
        for axis, names in (("rows", step.rows), ("columns", step.columns))
        if names
    ]
    found = {name: _csv(step) for name, step in files.items()} | {"labels.csv": _lines(labels)}
    if trace.cell:
        found["cell.csv"] = _lines([[w.cell.step.title, w.text] for w in story(trace)])
    return found


def as_npz(trace: Trace) -> bytes:
    """Return an npz archive with one array per step, which has all shown batch entries and heads.

    The array ``trace`` has the result of ``as_json`` without values, as text.
    """
    arrays = {name: _plain(value) for name, value in trace.arrays.items()}
    if "trace" in arrays:
        raise ValueError(
            "a step is named 'trace', but an npz archive keeps its description under this name"
        )
    return _archive(arrays | {"trace": np.array(as_json(trace, has_values=False))})


def _step_record(step: Step, has_value: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"name": step.name}
    places = {"batch": step.batch, "head": step.head, "kv_head": step.kv_head}
    record |= {key: number for key, number in places.items() if number is not None}
    record |= {
        "symbol": step.symbol, "axes": list(step.axes), "formula": step.formula,
        "note": step.note, "shape": list(step.value.shape),
    }  # fmt: skip
    if step.hidden is not None and step.hidden.any():
        record["hidden"] = np.argwhere(step.hidden).tolist()
    labels = {"rows": step.rows, "columns": step.columns}
    record |= {key: list(names) for key, names in labels.items() if names}
    if step.value.dtype != np.float64:
        record["dtype"] = _plain(step.value).dtype.name
    if has_value:
        record["value"] = _nested(np.asarray(step.value, np.float64).tolist())
    if step.printed:
        record["printed"] = [_printed_record(comparison) for comparison in step.printed]
    return record


def _printed_record(c: Comparison) -> dict[str, Any]:
    return {
        "value": _nested(c.value), "exact": _nested(c.exact), "decimals": c.decimals,
        "status": c.status.value, "index": list(c.index), "text": c.text, "source": c.source,
        "origin": c.origin, "exactly": c.exactly,
    }  # fmt: skip


def _nested(value: Any) -> Any:
    """Return ``value`` with nonfinite numbers as strings for ``float()``, since JSON has none."""
    if isinstance(value, list):
        return [_nested(part) for part in value]
    return value if value is None or math.isfinite(value) else str(value)


def _axes(trace: Trace) -> str:
    return wording.legend(trace) if trace.shown else ""


def _description(step: Step) -> str:
    shape = f"Shape ({', '.join(step.axes)}) = ({step.size.replace(' ×', ',')})."
    source = f"Source: {step.source}."
    parts = (step.note, shape if step.axes else "", source if step.source else "")
    return " ".join(part for part in parts if part)


def _labels(step: Step, body: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    rows, columns = [""] * len(body), [""] * len(body[0] if body else ())
    return list(step.rows or rows), list(step.columns or columns)


def _markdown_table(step: Step, decimals: int) -> str:
    body = wording.numbers(step, decimals)
    rows, columns = _labels(step, body)
    lines = [["", *map(_markdown, columns)], ["---", *["---:"] * len(columns)]]
    lines += [[_markdown(label), *row] for label, row in zip(rows, body, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text)


def _latex_matrix(step: Step, decimals: int) -> str:
    body = wording.numbers(step, decimals)
    rows, columns = _labels(step, body)
    levels = shades(step, scales_of([step]))
    lines = []
    for i, row in enumerate(body):
        line = [f"{{{_latex(rows[i])}}}"]  # in braces, since \\ would take a "[" as its argument
        for j, number in enumerate(row):
            level = -math.inf if levels is None else levels[i][j]
            line.append(_latex_cell(number.replace("∞", r"\infty"), level))
        lines.append(" & ".join(line))
    head = ["", *map(_latex, columns)] if any(columns) else []
    table = " \\\\\n".join(lines) + r" \\"
    top = rf"{' & '.join(head)} \\ \midrule" if head else ""
    width = "r" * (len(columns) or 1)
    rules = rf"\begin{{tabular}}{{l{width}}}\toprule"
    return _fitting(f"{rules}\n{top}\n{table}\n\\bottomrule\\end{{tabular}}")


def _fitting(content: str) -> str:
    """Return LaTeX that shrinks ``content`` to the width of the line."""
    return rf"\resizebox{{\ifdim\width>\linewidth\linewidth\else\width\fi}}{{!}}{{{content}}}"


def _latex_cell(number: str, level: float) -> str:
    if not math.isfinite(level):
        return f"${number}$"
    ink = r"\color{white}" if level >= LIGHTEST_ON else ""
    return rf"\cellcolor[HTML]{{{latex.shade(level)}}}{ink}${number}$"


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
        "%": r"\%", "_": r"\_", "^": r"\^{}", "~": r"\~{}", "<": r"\(<\)", ">": r"\(>\)",
        "|": r"\(|\)", "∞": r"\(\infty\)", "√": r"\(\surd\)", "·": r"\(\cdot\)", "−": r"\(-\)",
        "×": r"\(\times\)", "→": r"\(\to\)",
    }  # fmt: skip
    return "".join(special.get(character, character) for character in text)


def _unknown_characters(text: str) -> str:
    """Return TeX that prints the code of each character for which pdfLaTeX has no glyph.

    pdfLaTeX would stop at such a character. XeLaTeX and LuaLaTeX print what their font has.
    """
    lines = [
        rf"\ifcsname u8:\detokenize{{{c}}}\endcsname\else"
        rf"\DeclareUnicodeCharacter{{{ord(c):04X}}}{{[U+{ord(c):04X}]}}\fi"
        for c in sorted(set(text))
        if not c.isascii()
    ]
    return "".join(["\\ifPDFTeX\n", *(f"{line}\n" for line in lines), "\\fi\n"]) if lines else ""


FORMULA = re.compile(r"\A(?='*[=+\-@\t\r\n])")  # the start of a spreadsheet formula
IN_TABLE = re.compile(rf"\A(?!-(inf|∞|[\d.]+(e-?\d+)?)?\Z){FORMULA.pattern}")  # "-" means none
FIGURES = ("flow of data", "values picked", "angles", "blocks")  # besides the matrices
SHARES = ((30, "0.32"), (48, "0.49"))  # widest step, in characters, and its share of a line
LATEX_PREAMBLE = r"""\documentclass[10pt]{article}
\usepackage[a4paper,margin=15mm]{geometry}
\usepackage{amsmath,booktabs,graphicx,iftex,pict2e}
\usepackage[table]{xcolor}
\ifPDFTeX
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\fi
\setlength{\parindent}{0pt}
\setlength{\parskip}{1ex}
\raggedright
"""


def _file_name(number: str, step: Step) -> str:
    parts = [number, re.sub(r"\W+", "_", step.name).strip("_")]
    places = (("batch", step.batch), ("head", step.head), ("kv_head", step.kv_head))
    parts += [f"{key}{n}" for key, n in places if n is not None]
    return "_".join(parts) + ".csv"


def _csv(step: Step) -> str:
    matrix = as_matrix(_plain(step.value))
    return _lines(np.full(matrix.shape, "").tolist() if step.is_blank else matrix.tolist())


def _lines(rows: Sequence[Sequence[Any]], formula: re.Pattern[str] = FORMULA) -> str:
    words = [[formula.sub("'", x) if isinstance(x, str) else x for x in row] for row in rows]
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(words)
    return stream.getvalue()


def _archive(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    # np.savez takes names as keywords, and would lose an array called "file".
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return stream.getvalue()


def _plain(value: NDArray[Any]) -> NDArray[Any]:
    """Return ``value`` in a common dtype; bfloat16 becomes float32, without loss."""
    return value if value.dtype.kind in "fiub" else value.astype(np.float32)


def table_as_json(content: Any) -> str:
    """Return ``content``, such as the records of a table, as JSON."""
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def table_as_markdown(records: Sequence[Mapping[str, str]]) -> str:
    """Return ``records`` as a Markdown table; their keys are the header."""
    lines = [[_markdown(cell) for cell in row] for row in _rows(records)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table_as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return ``records`` as CSV: a header of their keys, then one line per record."""
    return _lines(_rows(records), IN_TABLE)


def result_as(kind: str, result: Result) -> str | bytes:
    """Return an experiment's ``result`` in the format ``kind``, such as "csv".

    SVG and PNG have only the figures. JSON and CSV have exact numbers. If there are several tables,
    CSV joins them into one: each row begins with the title of its table, and is empty in columns
    that its table lacks.
    """
    if kind in ("svg", "png"):
        picture = charts.svg(result)
        return picture if kind == "svg" else raster.png(picture)
    if kind == "json":
        return _result_as_json(result)
    if kind == "markdown":
        parts = [f"# {_markdown(result.title)}\n", f"{_markdown(result.about)}\n"]
        for table in result.tables:
            parts += [f"{_markdown(table.title)}:\n", table_as_markdown(table.written())]
        return "\n".join([*parts, f"**{_markdown(result.conclusion)}**\n"])
    if len(result.tables) == 1:
        return table_as_csv(result.tables[0].records())
    columns = dict.fromkeys(name for table in result.tables for name in table.columns)
    return table_as_csv(
        [
            {"table": table.title} | {name: record.get(name) for name in columns}
            for table in result.tables
            for record in table.records()
        ]
    )


def _result_as_json(result: Result) -> str:
    """Return ``{"experiment", "title", …, "tables": [{"title", "rows"}], "conclusion"}``."""
    tables = [
        {
            "title": table.title,
            "rows": [
                {name: _nested(x) if isinstance(x, float) else x for name, x in record.items()}
                for record in table.records()
            ],
        }
        for table in result.tables
    ]
    return table_as_json(
        {
            "experiment": result.name, "title": result.title, "about": result.about,
            "seed": result.seed, "tables": tables, "conclusion": result.conclusion,
        }
    )  # fmt: skip


def _rows(records: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(records[0]), *(list(record.values()) for record in records)]
