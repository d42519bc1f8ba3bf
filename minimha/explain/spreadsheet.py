"""Export a trace as a spreadsheet, in which each computed cell is a live formula.

Each matrix is a labelled range, and inputs are yellow. If a reader changes an input, the sheet
recomputes every cell that depends on it. Heads are side by side, and each step is below the steps
before it. There are no macros.

The package XlsxWriter stores a value with each formula, which openpyxl does not, so previews show
the numbers too. Words are written as strings, so a token such as ``=1+1`` is never a formula.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.explain import wording
from minimha.explain.catalogue import beside
from minimha.explain.entry import FORMULA
from minimha.explain.labels import BLOCK, TOKEN_AXES
from minimha.explain.numbers import as_matrix, needs_exponent
from minimha.explain.origins import GELU, QUICK_GELU, RELU, RELU_SQUARED, SILU, Origin, pairs
from minimha.explain.story import story
from minimha.explain.trace import Step, Trace

SHEET = "attention"
LARGEST_TOKENS = 64
LARGEST_SHEET = 2**18  # numbers
WIDEST_SHEET = 2**14  # columns: the format has no more
LONGEST_WORD, LONGEST_LINE = 255, 110  # characters
NARROWEST, WIDEST_LABEL = 8, 24  # characters that a column shows
HIDDEN = "-∞"  # text, which MAX and SUM pass over
YELLOW, GREY = "#FFF2CC", "#666666"
FRAME = {"border": 1, "border_color": "#BBBBBB", "align": "right"}
LEGEND = "Yellow cells are given: change one, and everything below follows."
FROZEN = "Numbers as they were exported: they do not follow a change above."
INSTEAD = "export it with --format json, npz or csv"
CELL_LIKE = re.compile(r"\d.*|[a-z]{1,3}\d+|r\d*c?\d*|c\d*", re.IGNORECASE)

Formula = Callable[[int, int], str]  # of entry (i, j)


class Panel(NamedTuple):
    """The range of a matrix in a sheet: its first row and column, from 0, and its size.

    Along an axis of length 1, every index means the same cell, as in NumPy's broadcasting.
    """

    top: int
    left: int
    rows: int
    columns: int

    def cell(self, i: int, j: int) -> str:
        """Return the address of entry (i, j), such as ``B7``."""
        row = self.top + (i if self.rows > 1 else 0)
        return f"{_letters(self.left + (j if self.columns > 1 else 0))}{row + 1}"

    def row(self, i: int) -> str:
        """Return the range of row i, such as ``B7:D7``."""
        return f"{self.cell(i, 0)}:{self.cell(i, self.columns - 1)}"

    def column(self, j: int) -> str:
        """Return the range of column j, such as ``B7:B9``."""
        return f"{self.cell(0, j)}:{self.cell(self.rows - 1, j)}"

    @property
    def area(self) -> str:
        """The range of all cells, such as ``B7:D9``."""
        return f"{self.cell(0, 0)}:{self.cell(self.rows - 1, self.columns - 1)}"


Setting = Panel | float


def _letters(column: int) -> str:
    """Return the name of a column: 0 is A, 26 is AA."""
    more, letter = divmod(column, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + letter)


def _product(i: int, j: int, x: Panel, W: Panel, b: Panel | None = None) -> str:
    return f"MMULT({x.row(i)},{W.column(j)})" + (f"+{b.cell(i, j)}" if b else "")


def _products(i: int, j: int, x: Panel, *heads: Any) -> str:
    """Return the formula; ``heads`` has each head's matrix, then each bias, then their number."""
    *parts, num_heads = heads
    head, column = divmod(j, parts[0].columns)
    return _product(i, column, x, parts[head], *parts[num_heads + head :: num_heads])


def _sum(i: int, j: int, x: Panel, y: Panel, hides: bool) -> str:
    a, b = x.cell(i, j), y.cell(i, j)
    return f'IF(COUNT({a},{b})=2,{a}+{b},"{HIDDEN}")' if hides else f"{a}+{b}"


def _alibi(i: int, j: int, slope: Panel, d: Panel, given: Panel | None, hides: bool) -> str:
    part = f"-{slope.cell(i, j)}*{d.cell(i, j)}"
    b = given.cell(i, j) if given else ""
    return f'IF(ISNUMBER({b}),{b}{part},"{HIDDEN}")' if hides else b + part


def _softmax(i: int, j: int, x: Panel) -> str:
    top = f"MAX({x.row(i)})"
    return f"EXP({x.cell(i, j)}-{top})/SUMPRODUCT(EXP({x.row(i)}-{top}))"


def _concat(i: int, j: int, *heads: Panel) -> str:
    head, column = divmod(j, heads[0].columns)
    return heads[head].cell(i, column)


def _rotated(i: int, j: int, x: Panel, cos: Panel, sin: Panel, layout: float) -> str:
    first, second = (columns.tolist() for columns in pairs(cos.columns, layout))
    if j not in first + second:
        return x.cell(i, j)
    n, sign = (first.index(j), "-") if j in first else (second.index(j), "+")
    other = second[n] if j in first else first[n]
    return f"{x.cell(i, j)}*{cos.cell(i, n)}{sign}{x.cell(i, other)}*{sin.cell(i, n)}"


def _mean_square(i: int, j: int, x: Panel, mean: Panel | None = None) -> str:
    centred = f"{x.row(i)}-{mean.cell(i, 0)}" if mean else x.row(i)
    return f"SUMPRODUCT(({centred})^2)/{x.columns}"


def _norm(i: int, j: int, x: Panel, square: Panel, gain: Panel, *rest: Any) -> str:
    *others, epsilon = rest
    a, root = x.cell(i, j), f"SQRT({square.cell(i, 0)}+{epsilon:G})"
    if not others:
        return f"{gain.cell(i, j)}*{a}/{root}"
    mean, bias = others
    return f"{gain.cell(i, j)}*({a}-{mean.cell(i, 0)})/{root}+{bias.cell(i, j)}"


def _activation(i: int, j: int, x: Panel, kind: float) -> str:
    a = x.cell(i, j)
    forms = {
        RELU: f"MAX({a},0)", GELU: f"{a}*(1+ERF({a}/SQRT(2)))/2", SILU: f"{a}/(1+EXP(-{a}))",
        QUICK_GELU: f"{a}/(1+EXP(-1.702*{a}))", RELU_SQUARED: f"MAX({a},0)^2",
    }  # fmt: skip
    return forms.get(kind, f"{a}*(1+TANH(SQRT(2/PI())*({a}+0.044715*{a}^3)))/2")


def _cosine(i: int, j: int, q: Panel, k: Panel) -> str:
    lengths = f"SUMSQ({q.row(i)})*SUMSQ({k.row(j)})"
    return f"IF({lengths}=0,0,SUMPRODUCT({q.row(i)},{k.row(j)})/SQRT({lengths}))"


def _tanh(n: int, a: int, q: Panel, k: Panel, b: Panel | None) -> str:
    i, j = divmod(n, k.rows)
    return f"TANH({q.cell(i, a)}+{k.cell(j, a)}" + (f"+{b.cell(0, a)})" if b else ")")


# Writes entry (i, j) of each operation of ``origins``, from the ranges of its operands and setting.
FORMULAS: dict[str, Callable[..., str]] = {
    "product": _product,
    "products": _products,
    "columns": lambda i, j, W, first: W.cell(i, int(first) + j),
    "rows": lambda i, j, x, first: x.cell(int(first) + i, j),
    "dot": lambda i, j, q, k: f"SUMPRODUCT({q.row(i)},{k.row(j)})",
    "scale": lambda i, j, S, scale: f"{S.cell(i, j)}*{scale.cell(i, j)}",
    "cap": lambda i, j, S, c: f"{c.cell(i, j)}*TANH({S.cell(i, j)}/{c.cell(i, j)})",
    "mask": lambda i, j, S, seen: f'IF({seen.cell(i, j)}=1,{S.cell(i, j)},"{HIDDEN}")',
    "row max": lambda i, j, S, sink: f"MAX({S.row(i)}{f',{sink.cell(i, j)}' if sink else ''})",
    "exp": lambda i, j, S, m: f"IF(ISNUMBER({S.cell(i, j)}),EXP({S.cell(i, j)}-{m.cell(i, j)}),0)",
    "total": lambda i, j, P, sink, m: (
        f"SUM({P.row(i)})" + (f"+EXP({sink.cell(i, j)}-{m.cell(i, j)})" if sink else "")
    ),
    "share": lambda i, j, P, l: f"IF({l.cell(i, j)}=0,0,{P.cell(i, j)}/{l.cell(i, j)})",
    "softmax": _softmax,
    "lse": lambda _, i, m, l: f'IF({l.cell(i, 0)}=0,"{HIDDEN}",{m.cell(i, 0)}+LN({l.cell(i, 0)}))',
    "concat": _concat,
    "sum": _sum,
    "alibi": _alibi,
    "times": lambda i, j, x, y: f"{x.cell(i, j)}*{y.cell(i, j)}",
    "sigmoid": lambda i, j, x, W, b=None: f"1/(1+EXP(-({_product(i, j, x, W, b)})))",
    "mean": lambda i, j, x: f"AVERAGE({x.row(i)})",
    "mean square": _mean_square,
    "norm": _norm,
    "activation": _activation,
    "rotated": _rotated,
    "rms": lambda i, j, x, g: f"{x.cell(i, j)}/SQRT(SUMSQ({x.row(i)})/{x.columns})*{g.cell(i, j)}",
    "block": lambda i, j, q, k, scale: f"{scale!r}*SUMPRODUCT({q.row(i)},{k.row(j)})",
    "unit": lambda i, j, x: f"IF(SUMSQ({x.row(i)})=0,0,{x.cell(i, j)}/SQRT(SUMSQ({x.row(i)})))",
    "cosine": _cosine,
    "tanh": _tanh,
    "pairs": lambda i, j, Z, w, k: f"SUMPRODUCT({Z.row(i * k.rows + j)},{w.row(0)})",
}


def as_workbook(trace: Trace, decimals: int) -> bytes:
    """Return ``trace`` as an xlsx file.

    ``decimals`` is the number of decimals of computed numbers. The cells of blank steps are empty,
    and steps computed from them have no formulas. Raises ValueError if the extra ``sheets`` is not
    installed, or if a sheet cannot hold the trace. These are traces with blocks, more than 64
    tokens, NaN, ∞, or a step whose operands or formula are missing.
    """
    try:
        import xlsxwriter
    except ImportError:
        raise ValueError(
            "XlsxWriter, which writes spreadsheets, is not installed: pip install 'minimha[sheets]'"
        ) from None
    blank = {step.title for step in trace.steps if step.is_blank}
    trace = trace.selected(trace.only, blank=())
    _check(trace)
    origins = {step.title: trace.origins[step] for step in trace.steps}
    _check_origins(trace, origins)
    origins = {title: _without(blank, title, made) for title, made in origins.items()}
    stream = io.BytesIO()
    with xlsxwriter.Workbook(stream, {"in_memory": True}) as book:
        _Sheet(book, trace, decimals, origins, blank).write()
    return stream.getvalue()


def _check(trace: Trace) -> None:
    """Raise ValueError if a sheet cannot hold the trace."""
    for step in trace.steps:
        if BLOCK.search(step.name):
            raise ValueError(
                f"{step.name} is one of many blocks, and a sheet holds whole matrices: "
                f"FlashAttention is not written as xlsx, {INSTEAD}"
            )
        for axis, size in zip(step.axes, step.value.shape, strict=True):
            if axis in TOKEN_AXES and size > LARGEST_TOKENS:
                raise ValueError(
                    f"{step.name} has {axis}={size}, and a sheet holds at most {LARGEST_TOKENS} "
                    f"tokens: {INSTEAD}"
                )
        if not step.value.size:
            raise ValueError(f"{step.name} has no numbers: {INSTEAD}")
        if np.isnan(step.value).any() or np.isposinf(step.value).any():
            raise ValueError(f"{step.name} holds NaN or ∞, which no cell can: {INSTEAD}")
    total = sum(step.value.size for step in trace.steps)
    if total > LARGEST_SHEET:
        raise ValueError(
            f"all steps together have {total:,} numbers, and a sheet holds at most "
            f"{LARGEST_SHEET:,}: {INSTEAD}"
        )
    for name, steps in trace.by_name.items():
        width = (
            len(steps) * _stride(trace) if len(steps) > 1 else as_matrix(steps[0].value).shape[1]
        )
        if width >= WIDEST_SHEET:
            raise ValueError(
                f"{name} would be {width:,} columns wide, and a sheet has {WIDEST_SHEET:,}: "
                f"{INSTEAD}"
            )


def _stride(trace: Trace) -> int:
    """Return the number of columns from one head to the next: the widest matrix and its labels."""
    return 1 + max(
        (as_matrix(step.value).shape[1] for step in trace.steps if step.place), default=0
    )


def _check_origins(trace: Trace, origins: dict[str, Origin | None]) -> None:
    """Raise ValueError for a computed step without formula, or with operands that are not shown."""
    for step in trace.steps:
        made = origins[step.title]
        has_formula = made is not None and made.operation in FORMULAS
        if not has_formula and trace.origins.follows(step) and step.made != FORMULA:
            raise ValueError(
                f"{step.name} is computed from the steps before it, but a sheet has no formula "
                f"for it: {INSTEAD}"
            )
        for operand in () if made is None else made.operands:
            if operand is not None and operand.title not in origins:
                raise ValueError(
                    f"{step.title} is computed from {operand.name}, which is not shown: a sheet "
                    f"holds every step, so leave out --only and --head"
                )
    if not any(origins.values()):
        raise ValueError(f"no step here is computed from another: {INSTEAD}")


def _without(blank: Collection[str], title: str, made: Origin | None) -> Origin | None:
    """Return a step's origin, or None if one of its heads or of their operands is ``blank``."""
    names = {name.partition(",")[0] for name in blank}
    used = [title] if made is None else [title, *(s.title for s in made.operands if s is not None)]
    return None if names & {name.partition(",")[0] for name in used} else made


class Matrix(NamedTuple):
    """A matrix to write; ``formula`` returns the formula of an entry, or is None for an input."""

    title: str
    place: str
    values: NDArray[Any]
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    formula: Formula | None = None
    is_given: bool = True  # if it has no formula


class _Sheet:
    """A writer of a trace from top to bottom, which keeps the range of each matrix."""

    def __init__(
        self, book: Any, trace: Trace, decimals: int, origins: dict[str, Origin | None],
        blank: Collection[str],
    ) -> None:  # fmt: skip
        self.book, self.trace, self.decimals, self.origins = book, trace, decimals, origins
        self.blank = blank
        self.sheet = book.add_worksheet(SHEET)
        self.panels: dict[str, Panel] = {}
        self.styles: dict[str, Any] = {}
        self.names: set[str] = set()
        self.widths: dict[int, int] = {}
        self.top = 0
        self.stride = _stride(trace)

    def write(self) -> None:
        """Write the title, a legend and all steps."""
        self._line(self.trace.example, bold=True)
        self._line(self.trace.source, font_color=GREY)
        self._line(wording.legend(self.trace), font_color=GREY)
        self._line(LEGEND, bg_color=YELLOW)
        for _, steps in groupby(self.trace.steps, key=lambda step: step.name):
            self._step(list(steps))
        if self.trace.cell:
            self._story()
        for column, width in self.widths.items():
            self.sheet.set_column(column, column, width)
        self.sheet.hide_gridlines(2)
        self.sheet.set_landscape()
        self.sheet.fit_to_pages(1, 0)

    def _story(self) -> None:
        """Write the computation of one cell, as text that does not follow changes."""
        self.top += 1
        self._line(f"cell {self.trace.cell}, with the numbers as they were exported", bold=True)
        for written in story(self.trace, self.decimals):
            self._line(written.line)

    def _step(self, steps: list[Step]) -> None:
        """Write the matrices of one name, below the settings that their formulas read."""
        settings = self._settings(steps)
        notes = list(dict.fromkeys(step.note for step in steps))
        if len(notes) > 1:
            notes = [f"{step.place}: {step.note}" for step in steps]
        if steps[0].made == FORMULA:
            notes.append(FROZEN)
        name, formula = steps[0].name, steps[0].formula
        self._band(name if formula == steps[0].symbol else f"{name}:  {formula}", notes, [
            Matrix(
                step.title, step.place, step.value, step.rows, step.columns,
                self._formula(step, setting), step.made != FORMULA,
            )
            for step, setting in zip(steps, settings, strict=True)
        ])  # fmt: skip
        if steps[0].base == "weights":
            for step in steps:
                self._shade(self.panels[step.title])

    def _formula(self, step: Step, setting: tuple[Setting, ...]) -> Formula | None:
        made = self.origins[step.title]
        if made is None:
            return None
        operands = [known and self.panels[known.title] for known in made.operands]
        return lambda i, j: FORMULAS[made.operation](i, j, *operands, *setting)

    def _settings(self, steps: Sequence[Step]) -> list[tuple[Setting, ...]]:
        """Return the further arguments of each step's formula; a scale and a mask are cells."""
        made, name = self.origins[steps[0].title], steps[0].name
        if made is None:
            return [()] * len(steps)
        if made.operation == "scale":
            return [(self._scale(beside(name, "scale"), steps),)] * len(steps)
        if made.operation == "mask":
            return [(panel,) for panel in self._visible(beside(name, "visible"), steps)]
        if made.operation in ("rotated", "columns", "rows", "norm", "activation", "block"):
            found = [self.origins[step.title] for step in steps]
            return [((made and made.constant) or 0.0,) for made in found]
        if made.operation == "products":
            return [(sum(s is not None and s.base[0] == "W" for s in made.operands),)] * len(steps)
        if made.operation in ("sum", "alibi"):
            return [(bool(np.isneginf(step.value).any()),) for step in steps]
        return [()] * len(steps)

    def _scale(self, name: str, steps: Sequence[Step]) -> Panel:
        """Write one scale for all heads, that of the step with the largest scores."""
        made = self.origins[max(steps, key=lambda step: abs(step.value).max()).title]
        scale = Matrix(name, "", np.array(made.constant if made else None))
        self._band(name, ["1/√D, unless another is given."], [scale])
        return self.panels[name]

    def _visible(self, name: str, steps: Sequence[Step]) -> list[Panel]:
        """Write which keys each query attends to, once if all heads have the same mask."""
        seen = [np.isfinite(step.value) for step in steps]
        is_one = all(np.array_equal(seen[0], other) for other in seen)
        matrices = [
            Matrix(f"{name}, {step.place}", step.place, see, step.rows, step.columns)
            for step, see in zip(steps, seen, strict=True)
        ]
        if is_one:
            matrices = [matrices[0]._replace(title=name, place="")]
        self._band(name, ["1 where a query (row) may see a key (column), 0 where not."], matrices)
        return [self.panels[matrix.title] for matrix in matrices] * (len(steps) if is_one else 1)

    def _band(self, heading: str, notes: Sequence[str], matrices: Sequence[Matrix]) -> None:
        """Write matrices side by side, below their heading and notes."""
        self.top += 1
        self._line(heading, bold=True)
        for note in notes:
            self._line(note, font_color=GREY)
        self.top += any(matrix.place or matrix.columns for matrix in matrices)
        for n, matrix in enumerate(matrices):
            self._matrix(matrix, n * self.stride)
        self.top += max(self.panels[matrix.title].rows for matrix in matrices)

    def _matrix(self, matrix: Matrix, left: int) -> None:
        values = as_matrix(np.asarray(matrix.values, np.float64))
        panel = Panel(self.top, left + 1, *values.shape)
        self.panels[matrix.title] = panel
        self._label(self.top - 1, left, matrix.place, indent=1)
        for j, label in enumerate(matrix.columns or ()):
            self._label(self.top - 1, left + 1 + j, label)
        for i, label in enumerate(matrix.rows or ()):
            self._label(self.top + i, left, label, indent=1)
        number_format = _number_format(values, self.decimals)
        is_blank = matrix.title in self.blank
        is_given = matrix.formula is None and matrix.is_given and not is_blank
        look = {"bg_color": YELLOW} if is_given else {"num_format": number_format}
        style = self._style(**FRAME, **look)
        for (i, j), value in np.ndenumerate(values):
            if is_blank:
                self.sheet.write_blank(panel.top + i, panel.left + j, None, style)
                continue
            formula = matrix.formula and matrix.formula(i, j)
            self._cell(panel.top + i, panel.left + j, float(value), formula, style)
        digits = (
            1
            if "E" in number_format
            else len(f"{abs(values[np.isfinite(values)]).max(initial=0):.0f}")
        )
        for column in range(panel.left, panel.left + panel.columns):
            self._widen(column, max(NARROWEST, len(number_format) + digits + 2))
        self._name(matrix.title, panel)

    def _cell(self, row: int, column: int, value: float, formula: str | None, style: Any) -> None:
        shown = HIDDEN if value == -np.inf else value
        if formula is None and shown is HIDDEN:
            self.sheet.write_string(row, column, HIDDEN, style)
        elif formula is None:
            self.sheet.write_number(row, column, value, style)
        elif "MMULT" in formula:  # which Excel allows in array formulas only
            self.sheet.write_array_formula(row, column, row, column, f"={formula}", style, shown)
        else:
            self.sheet.write_formula(row, column, f"={formula}", style, shown)

    def _label(self, row: int, column: int, label: str, indent: int = 0) -> None:
        if label:
            style = self._style(font_color=GREY, align="right", indent=indent)
            self.sheet.write_string(row, column, _word(label), style)
            self._widen(column, min(len(label) + 2, WIDEST_LABEL))

    def _widen(self, column: int, width: int) -> None:
        self.widths[column] = max(width, self.widths.get(column, 0))

    def _line(self, text: str, **style: Any) -> None:
        """Write text, in several rows if it is long."""
        for row in textwrap.wrap(text, LONGEST_LINE):
            self.sheet.write_string(self.top, 0, row, self._style(**style))
            self.top += 1

    def _shade(self, panel: Panel) -> None:
        """Make a cell darker the larger its weight is."""
        self.sheet.conditional_format(
            panel.area,
            {
                "type": "2_color_scale", "min_type": "num", "max_type": "num", "min_value": 0,
                "max_value": 1, "min_color": "#FFFFFF", "max_color": "#6FA8DC",
            },
        )  # fmt: skip

    def _name(self, title: str, panel: Panel) -> None:
        """Name the range as spreadsheets list it, such as ``weights_head_0``."""
        name = re.sub(r"\W+", "_", title).strip("_")[:LONGEST_WORD]
        name = f"_{name}" if not name or CELL_LIKE.fullmatch(name) else name
        if name.casefold() not in self.names:
            self.names.add(name.casefold())
            absolute = re.sub(r"([A-Z]+)(\d+)", r"$\1$\2", panel.area)
            self.book.define_name(name, f"={SHEET}!{absolute}")

    def _style(self, **properties: Any) -> Any:
        key = str(properties)
        if key not in self.styles:
            self.styles[key] = self.book.add_format(properties)
        return self.styles[key]


def _number_format(values: NDArray[Any], decimals: int) -> str:
    """Return the number format of ``numbers.cells``, but with decimals for whole numbers too."""
    fixed = f"0.{'0' * decimals}" if decimals else "0"
    return f"{fixed}E+00" if needs_exponent(values, decimals) else fixed


def _word(text: str) -> str:
    return text if len(text) <= LONGEST_WORD else f"{text[: LONGEST_WORD - 1]}…"
