"""Write the computation of one cell as text, with the numbers of the trace.

    S[sat,cat] = 1·0 + 1·1 = 1

``origins`` has checked that the operation reproduces the numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minimha.explain.entry import FORMULA
from minimha.explain.numbers import term
from minimha.explain.origins import GELU, QUICK_GELU, RELU, RELU_SQUARED, SILU, Origin, pairs
from minimha.explain.trace import Step, Trace

Index = tuple[int, ...]
MOST = 16  # terms of a sum that are written out
FEW = 3  # terms of a softmax with more terms, where a few are most of the sum
NO_KEY = "no key is seen: 0 by convention"
# Texts in place of a formula: the cell is copied, hidden, or 0 by convention.
NO_FORMULA = ("hidden by the mask", "not hidden", "not rotated", NO_KEY)


class Cell(NamedTuple):
    """The cell of ``step`` at the index ``at``."""

    step: Step
    at: Index

    @property
    def value(self) -> float:
        """The number in the cell."""
        return float(self.step.value[self.at])

    @property
    def labels(self) -> tuple[str, ...]:
        """The label or the index of the cell along each axis, except axes named "1"."""
        names = [self.step.rows, self.step.columns][-self.step.value.ndim :]
        axes = self.step.axes[-self.step.value.ndim :]
        return tuple(
            known[n] if known else str(n)
            for axis, known, n in zip(axes, names, self.at, strict=False)
            if axis != "1"
        )

    @property
    def text(self) -> str:
        """The symbol and the labels, such as ``S[sat,cat]``."""
        return self.step.symbol + (f"[{','.join(self.labels)}]" if self.labels else "")


Cells = tuple[Cell, ...]


class Say:
    """A function that formats a cell's number like the other numbers of its matrix."""

    def __init__(self, decimals: int) -> None:
        self.decimals = decimals
        self.steps: dict[Step, Callable[[float], str]] = {}

    def __call__(self, cell: Cell) -> str:
        """Return the number of ``cell`` as text."""
        if cell.step not in self.steps:
            self.steps[cell.step] = term(cell.step.value, self.decimals)
        return self.steps[cell.step](cell.value)


class Parts(NamedTuple):
    """The cells from which a cell is computed, and the computation as text.

    ``row`` and ``column`` are cells of the first and the second operand, and ``others`` further
    cells.
    """

    row: Cells
    column: Cells
    others: Cells
    text: str


class Written(NamedTuple):
    """The computation of one cell, as cells and as text.

    ``row``, ``column`` and ``others`` are as in ``Parts``. ``text`` is the whole computation, and
    ``right`` its part between the cell's name and its value.
    """

    cell: Cell
    operation: str  # a key of ``origins.OPERATIONS``, or "given"
    # Cells of the first and the second operand; for a product a row and a column, in the order of
    # summation.
    row: Cells
    column: Cells
    others: Cells  # a bias, a sink, the sum of earlier blocks
    right: str  # the text between the cell and its value; empty if given
    text: str

    @property
    def line(self) -> str:
        """The title of the step, followed by the computation as text."""
        return f"{self.cell.step.title}: {self.text}"


def how_of(step: Step) -> str:
    """Return how a step without an origin came about: "computed" by its formula, or "given"."""
    return "computed" if step.made == FORMULA else "given"


def cell(trace: Trace, step: Step, index: Index, decimals: int = 3) -> Written:
    """Return the computation of the cell ``index`` of ``step``, a step of ``trace``.

    >>> from minimha import attention
    >>> from minimha.explain.trace import token_labels
    >>> trace = Trace(labels=token_labels(["cat", "sat"]))
    >>> output = attention([[0, 1], [1, 1]], [[0, 1], [1, 1]], [[2], [4]], scale=1, tap=trace)
    >>> [scores] = trace.by_name["scores"]
    >>> cell(trace, scores, (1, 0)).text
    'S[sat,cat] = 1·0 + 1·1 = 1'
    """
    made, say, this = trace.origins[step], Say(decimals), Cell(step, index)
    value = say(this)
    if made is None:
        return Written(this, "given", (), (), (), "", f"{this.text} = {value}, {how_of(step)}")
    i, j = (0, 0, *index)[-2:]
    parts = WRITERS[made.operation](Operands(made, i, j, say))
    if made.operation in ("mask", "block") and np.isneginf(this.value):
        parts = parts._replace(text="hidden by the mask")
    is_formula = parts.text not in NO_FORMULA
    equals = f"{parts.text} = {value}" if is_formula else f"{value}, {parts.text}"
    return Written(this, made.operation, *parts, f"{this.text} = {equals}")


class Operands(NamedTuple):
    """The operands of the cell (i, j) of a step, as cells and as text."""

    made: Origin
    i: int
    j: int
    say: Say

    def step(self, n: int) -> Any:
        """Return operand n, or None if an optional operand is missing."""
        return self.made.operands[n] if n < len(self.made.operands) else None

    def at(self, n: int, i: int | None = None, j: int | None = None) -> Cells:
        """Return cell (i, j) of operand n, broadcast as in NumPy; () if the operand is missing."""
        step = self.step(n)
        if step is None:
            return ()
        index = (self.i if i is None else i, self.j if j is None else j)[2 - step.value.ndim :]
        sizes = step.value.shape
        return (Cell(step, tuple(min(n, s - 1) for n, s in zip(index, sizes, strict=True))),)

    def row(self, n: int, i: int | None = None) -> Cells:
        """Return the cells in row i of operand n."""
        step, i = self.step(n), self.i if i is None else i
        return tuple(Cell(step, (i, d)) for d in range(step.value.shape[1]))

    def row_and_column(self) -> tuple[Cells, Cells]:
        """Return the row of operand 0 and the column of operand 1 that are multiplied.

        Pairs of a hidden key whose number in the column is NaN or ∞ are left out.
        """
        B = self.step(1)
        column = (Cell(B, (d, self.j)) for d in range(len(B.value)))
        pairs = zip(self.row(0), column, strict=True)
        seen = [(a, b) for a, b in pairs if np.isfinite(b.value) or not self.made.hides(*a.at)]
        return tuple(a for a, _ in seen), tuple(b for _, b in seen)

    def constant(self) -> str:
        """Return the constant of the operation, such as the scale, as text."""
        value = self.made.constant or 0.0
        return _factor(term(np.array(value), self.say.decimals)(value))

    def numbers(self, *cells: Cell) -> list[str]:
        """Return the number of each cell as text, negative numbers in parentheses."""
        return [_factor(self.say(cell)) for cell in cells]

    def sum(self, cells: Cells, form: str = "{}") -> str:
        """Return the sum of ``cells`` as text; ``form`` formats each number."""
        terms = [form.format(number) for number in self.numbers(*cells)]
        return _joined(terms, [abs(cell.value) for cell in cells])

    def sum_of_products(self, row: Cells, column: Cells) -> str:
        """Return the sum of the products of ``row`` and ``column``, cell by cell, as text."""
        pairs = list(zip(row, column, strict=True))
        terms = ["·".join(self.numbers(*pair)) for pair in pairs]
        return _joined(terms, [abs(a.value * b.value) for a, b in pairs]) or "0"

    def length(self, cells: Cells) -> str:
        """Return the Euclidean length of the vector ``cells`` as text: √(a² + b² + …)."""
        return f"√({self.sum(cells, '{}²')})"


def _factor(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def _joined(
    terms: Sequence[str], sizes: Sequence[float], by: str = " + ", few: bool = False
) -> str:
    """Return the terms joined by ``by``; of too many terms, only the largest, with ellipses.

    With ``few``, only the ``FEW`` largest are written, and the number of the others.
    """
    if len(terms) <= MOST:
        return by.join(terms)
    order = sorted(range(len(terms)), key=lambda n: -np.inf if np.isnan(sizes[n]) else -sizes[n])
    if few:
        return by.join([*(terms[n] for n in order[:FEW]), f"{len(terms) - FEW} smaller ones"])
    kept = set(order[:MOST])
    texts: list[str] = []
    for n, text in enumerate(terms):
        if n in kept or texts[-1:] != ["…"]:
            texts.append(text if n in kept else "…")
    return by.join(texts)


def _product(x: Operands) -> Parts:
    (row, column), bias = x.row_and_column(), x.at(2)
    return Parts(row, column, bias, " + ".join([x.sum_of_products(row, column), *x.numbers(*bias)]))


def _products(x: Operands) -> Parts:
    first, *heads = x.made.operands
    W, b = ([M for M in heads if M is not None and M.value.ndim == ndim] for ndim in (2, 1))
    head, j = divmod(x.j, W[0].value.shape[1])
    made = x.made._replace(operands=(first, W[head], *b[head : head + 1]))
    return _product(x._replace(made=made, j=j))


def _sigmoid(x: Operands) -> Parts:
    parts = _product(x)
    return parts._replace(text=f"1 / (1 + exp(-({parts.text})))")


def _dot(x: Operands) -> Parts:
    row, column = x.row(0), x.row(1, x.j)
    return Parts(row, column, (), x.sum_of_products(row, column))


def _block(x: Operands) -> Parts:
    parts = _dot(x)
    return parts._replace(text=f"({parts.text}) · {x.constant()}")


def _cosine(x: Operands) -> Parts:
    parts = _dot(x)
    lengths = f"{x.length(parts.row)} · {x.length(parts.column)}"
    return parts._replace(text=f"({parts.text}) / ({lengths})")


def _pairs(x: Operands) -> Parts:
    w = x.step(1)
    row = x.row(0, x.i * len(x.step(2).value) + x.j)
    column = tuple(Cell(w, (d,)) for d in range(w.value.size))
    return Parts(row, column, (), x.sum_of_products(row, column))


def _columns(x: Operands) -> Parts:
    row = x.at(0, j=x.j + int(x.made.constant or 0))
    return Parts(row, (), (), row[0].text)


def _rows(x: Operands) -> Parts:
    row = x.at(0, i=x.i + int(x.made.constant or 0))
    return Parts(row, (), (), f"{row[0].text} of {row[0].step.stage or row[0].step.name}")


def _concat(x: Operands) -> Parts:
    head, j = divmod(x.j, x.step(0).value.shape[-1])
    row = x.at(head, j=j)
    of = f" of {row[0].step.place}" if row[0].step.place else ""
    return Parts(row, (), (), f"{row[0].text}{of}")


def _two(form: str) -> Callable[[Operands], Parts]:
    """Return the writer of an operation on two cells, in a form such as ``{} / {}``."""

    def write(x: Operands) -> Parts:
        row, column = x.at(0), x.at(1)
        return Parts(row, column, (), form.format(x.say(row[0]), *x.numbers(*column)))

    return write


def _share(x: Operands) -> Parts:
    parts = _two("{} / {}")(x)
    return parts if parts.column[0].value else parts._replace(text=NO_KEY)


def _cap(x: Operands) -> Parts:
    row, others = x.at(0), x.at(1)
    score, cap = x.numbers(*row, *others)
    return Parts(row, (), others, f"{cap} · tanh({score} / {cap})")


def _alibi(x: Operands) -> Parts:
    row, column, others = x.at(0), x.at(1), x.at(2)
    slope, distance, *before = x.numbers(*row, *column, *others)
    return Parts(row, column, others, f"{f'{before[0]} - ' if before else '-'}{slope}·{distance}")


def _max(x: Operands) -> Parts:
    row, others = x.row(0), x.at(1, j=0)
    cells = (*row, *others)
    values = [cell.value for cell in cells]
    if x.made.operation == "row max" and np.isneginf(values).all():
        return Parts(row, (), others, NO_KEY)
    return Parts(row, (), others, f"max({_joined([*map(x.say, cells)], values, ', ')})")


def _softmax(x: Operands) -> Parts:
    row = x.row(0)
    powers = [f"exp({x.say(cell)})" for cell in row]
    total = _joined(powers, [p.value for p in row], few=True)
    return Parts(row, (), (), f"{powers[x.j]} / ({total})")


def _total(x: Operands) -> Parts:
    row, sink = x.row(0), x.at(1, j=0)
    if not sink:
        return Parts(row, (), (), x.sum(row))
    m = x.at(2, j=0)
    text = f"{x.sum(row)} + exp({x.say(sink[0])} - {x.numbers(*m)[0]})"
    return Parts(row, (), (*sink, *m), text)


def _block_of(x: Operands, i: int) -> tuple[int, int]:
    """Return the number of the first operand, and the row in it, of row ``i`` of all blocks."""
    n = 0
    while i >= len(x.step(n).value):
        i, n = i - len(x.step(n).value), n + 2
    return n, i


def _lse(x: Operands) -> Parts:
    n, i = _block_of(x, x.j)
    row, column = x.at(n, i, 0), x.at(n + 1, i, 0)
    return Parts(row, column, (), f"{x.say(row[0])} + log {x.say(column[0])}")


def _normalise(x: Operands) -> Parts:
    n, i = _block_of(x, x.i)
    row, column = x.at(n, i), x.at(n + 1, i, 0)
    text = " / ".join(x.numbers(*row, *column)) if column[0].value else NO_KEY
    return Parts(row, column, (), text)


def _unit(x: Operands) -> Parts:
    row = x.row(0)
    return Parts(row, (), (), f"{x.numbers(row[x.j])[0]} / {x.length(row)}")


def _rms(x: Operands) -> Parts:
    row, column = x.row(0), x.at(1)
    entry, gain = x.numbers(row[x.j], *column)
    return Parts(row, column, (), f"{gain} · {entry} / √(({x.sum(row, '{}²')}) / {len(row)})")


def _mean(x: Operands) -> Parts:
    row = x.row(0)
    return Parts(row, (), (), f"({x.sum(row)}) / {len(row)}")


def _mean_square(x: Operands) -> Parts:
    row, mean = x.row(0), x.at(1, j=0)
    if not mean:
        return Parts(row, (), (), f"({x.sum(row, '{}²')}) / {len(row)}")
    [middle] = x.numbers(*mean)
    terms = [f"({number.strip('()')} - {middle})²" for number in x.numbers(*row)]
    sizes = [abs(cell.value - mean[0].value) for cell in row]
    return Parts(row, (), mean, f"({_joined(terms, sizes)}) / {len(row)}")


def _norm(x: Operands) -> Parts:
    row, column = x.at(0), x.at(2)
    others = (*x.at(1, j=0), *x.at(3, j=0), *x.at(4))
    entry, gain, square, *rest = x.numbers(*row, *column, *others)
    entry = f"({entry.strip('()')} - {rest[0]})" if rest else entry
    bias = f" + {rest[1]}" if rest else ""
    root = f"√({square} + {x.made.constant:g})"
    return Parts(row, column, others, f"{gain} · {entry} / {root}{bias}")


def _activation(x: Operands) -> Parts:
    row = x.at(0)
    [a] = x.numbers(*row)
    forms = {
        RELU: f"max({a.strip('()')}, 0)", SILU: f"{a} / (1 + exp(-{a}))",
        GELU: f"{a} · (1 + erf({a} / √2)) / 2", RELU_SQUARED: f"max({a.strip('()')}, 0)²",
        QUICK_GELU: f"{a} / (1 + exp(-1.702 · {a}))",
    }  # fmt: skip
    tanh = f"{a} · (1 + tanh(√(2/π) · ({a} + 0.044715 · {a}³))) / 2"
    return Parts(row, (), (), forms.get(x.made.constant or RELU, tanh))


def _rotated(x: Operands) -> Parts:
    first, second = pairs(x.step(1).value.shape[-1], x.made.constant or 0)
    if x.j not in (*first, *second):
        return Parts(x.at(0), (), (), "not rotated")
    n = int(np.flatnonzero((first == x.j) | (second == x.j))[0])
    row = (*x.at(0, j=int(first[n])), *x.at(0, j=int(second[n])))
    column = (*x.at(1, j=n), *x.at(2, j=n))
    a, b, c, s = x.numbers(*row, *column)
    return Parts(row, column, (), f"{a}·{c} - {b}·{s}" if x.j in first else f"{b}·{c} + {a}·{s}")


def _tanh(x: Operands) -> Parts:
    query, key = divmod(x.i, len(x.step(1).value))
    row, column, others = x.at(0, query), x.at(1, key), x.at(2)
    return Parts(row, column, others, f"tanh({' + '.join(x.numbers(*row, *column, *others))})")


def _decay(x: Operands) -> Parts:
    m, old = x.at(0, j=0), x.at(1, j=0)
    before = x.say(old[0]) if old else "-∞"
    return Parts(old, m, (), f"exp({before} - {x.numbers(*m)[0]})")


def _running(x: Operands, parts: Parts, factor: int) -> Parts:
    """Add the sum of earlier blocks, times operand ``factor``; the first block has none."""
    others = (*x.at(factor, j=0), *x.at(factor + 1)) if x.step(factor + 1) else ()
    before = f"{x.sum_of_products(others[:1], others[1:])} + " if others else ""
    return parts._replace(others=others, text=before + parts.text)


def _running_product(x: Operands) -> Parts:
    row, column = x.row_and_column()
    return _running(x, Parts(row, column, (), x.sum_of_products(row, column)), 2)


WRITERS: dict[str, Callable[[Operands], Parts]] = {
    "product": _product,
    "products": _products,
    "columns": _columns,
    "rows": _rows,
    "dot": _dot,
    "cosine": _cosine,
    "scale": lambda x: Parts(x.at(0), (), (), f"{x.numbers(*x.at(0))[0]} · {x.constant()}"),
    "cap": _cap,
    "sum": _two("{} + {}"),
    "times": _two("{} · {}"),
    "alibi": _alibi,
    "mask": lambda x: Parts(x.at(0), (), (), "not hidden"),
    "row max": _max,
    "exp": _two("exp({} - {})"),
    "total": _total,
    "share": _share,
    "softmax": _softmax,
    "concat": _concat,
    "lse": _lse,
    "unit": _unit,
    "rms": _rms,
    "mean": _mean,
    "mean square": _mean_square,
    "norm": _norm,
    "activation": _activation,
    "rotated": _rotated,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "pairs": _pairs,
    "block": _block,
    "running max": _max,
    "decay": _decay,
    "running sum": lambda x: _running(x, Parts(x.row(0), (), (), x.sum(x.row(0))), 1),
    "running product": _running_product,
    "normalise": _normalise,
}
