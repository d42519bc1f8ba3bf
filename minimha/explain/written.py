"""One cell written out: the numbers that made it, and what they give.

    S[sat,cat] = 1·0 + 1·1 = 1

The numbers are those of the trace, and ``origins`` has checked that the operation gives them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minimha.explain.numbers import term
from minimha.explain.origins import GELU, RELU, SILU, Origin, pairs
from minimha.explain.trace import Step, Trace

Index = tuple[int, ...]
MOST = 16  # terms of a sum that are written out, as on the page
NO_KEY = "no key is seen: 0 by convention"
# Of a number that stays, or does not, and of one that nothing gives.
FATES = ("hidden by the mask", "not hidden", "not rotated", NO_KEY)


class Place(NamedTuple):
    """One cell of a step."""

    step: Step
    at: Index

    @property
    def value(self) -> float:
        """The number there."""
        return float(self.step.value[self.at])

    @property
    def labels(self) -> tuple[str, ...]:
        """A label for each axis: a token, or the number; none along a column of one number."""
        names = [self.step.rows, self.step.columns][-self.step.value.ndim :]
        axes = self.step.axes[-self.step.value.ndim :]
        return tuple(
            known[n] if known else str(n)
            for axis, known, n in zip(axes, names, self.at, strict=False)
            if axis != "1"
        )

    @property
    def text(self) -> str:
        """Symbol and labels: ``S[sat,cat]``."""
        return self.step.symbol + (f"[{','.join(self.labels)}]" if self.labels else "")


Places = tuple[Place, ...]


class Say:
    """Writes the numbers of cells as their matrices print them."""

    def __init__(self, decimals: int) -> None:
        self.decimals = decimals
        self.steps: dict[Step, Callable[[float], str]] = {}

    def __call__(self, place: Place) -> str:
        """The number of a cell."""
        if place.step not in self.steps:
            self.steps[place.step] = term(place.step.value, self.decimals)
        return self.steps[place.step](place.value)

    def constant(self, made: Origin) -> str:
        """The factor of an operation, which is in no matrix."""
        factor = made.constant or 0.0
        return term(np.array(factor), self.decimals)(factor)


class Parts(NamedTuple):
    """What a cell is made from: a row, a column, further cells, and how they are written."""

    row: Places
    column: Places
    others: Places
    text: str


class Written(NamedTuple):
    """How one cell comes about."""

    place: Place
    operation: str  # as in ``origins``; "given" where the number is given
    # The cells of the first and of the second operand that it is made from: for a product the row
    # and the column, whose products are summed in this order.
    row: Places
    column: Places
    others: Places  # a bias, a sink, what was summed before
    right: str  # what stands between the cell and its value; empty where it is given
    text: str  # the whole line


def cell(trace: Trace, step: Step, index: Index, decimals: int = 3) -> Written:
    """Write out the cell ``index`` of ``step``, which is one of the steps of ``trace``.

    >>> from minimha import attention
    >>> from minimha.explain.trace import token_labels
    >>> trace = Trace(labels=token_labels(["cat", "sat"]))
    >>> output = attention([[0, 1], [1, 1]], [[0, 1], [1, 1]], [[2], [4]], scale=1, tap=trace)
    >>> [scores] = trace.by_name["scores"]
    >>> cell(trace, scores, (1, 0)).text
    'S[sat,cat] = 1·0 + 1·1 = 1'
    """
    return cell_of(trace.origins[step], step, index, decimals)


def cell_of(made: Origin | None, step: Step, index: Index, decimals: int = 3) -> Written:
    """Write out a cell of ``step``, whose origin is ``made``."""
    say = Say(decimals)
    place = Place(step, index)
    value = say(place)
    if made is None:
        return Written(place, "given", (), (), (), "", f"{place.text} = {value}, given")
    i, j = (0, 0, *index)[-2:]
    parts = WRITERS[made.operation](made, i, j, say)
    if made.operation in ("mask", "block") and np.isneginf(place.value):
        parts = parts._replace(text="hidden by the mask")
    if parts.text in FATES:
        text = f"{place.text} = {value}, {parts.text}"
    else:
        text = f"{place.text} = {parts.text} = {value}"
    return Written(place, made.operation, *parts, text)


def _row(step: Step, i: int) -> Places:
    return tuple(Place(step, (i, n)) for n in range(step.value.shape[1]))


def _column(step: Step, j: int) -> Places:
    return tuple(Place(step, (n, j)) for n in range(step.value.shape[0]))


def _at(step: Step | None, i: int, j: int) -> Places:
    """The cell that meets (i, j): a column or a row of numbers, or a single one, is repeated."""
    if step is None:
        return ()
    shape = step.value.shape
    index = (i, j)[2 - len(shape) :]
    return (Place(step, tuple(min(n, s - 1) for n, s in zip(index, shape, strict=True))),)


def _factor(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def _joined(terms: Sequence[str], sizes: Sequence[float], by: str = " + ") -> str:
    """The terms; of too many the largest, with an ellipsis for those between."""
    if len(terms) <= MOST:
        return by.join(terms)
    order = sorted(range(len(terms)), key=lambda n: -np.inf if np.isnan(sizes[n]) else -sizes[n])
    kept = set(order[:MOST])
    texts: list[str] = []
    for n, text in enumerate(terms):
        if n in kept or texts[-1:] != ["…"]:
            texts.append(text if n in kept else "…")
    return by.join(texts)


def _plus(terms: Iterable[str]) -> str:
    return " + ".join(terms)


def _sum(places: Places, say: Say, form: str = "{}") -> str:
    """The numbers, each in ``form``."""
    return _joined([*map(form.format, _numbers(places, say))], [abs(p.value) for p in places])


def _sum_of_products(row: Places, column: Places, say: Say) -> str:
    pairs = list(zip(row, column, strict=True))
    terms = [f"{_factor(say(a))}·{_factor(say(b))}" for a, b in pairs]
    return _joined(terms, [abs(a.value * b.value) for a, b in pairs]) or "0"


def _numbers(places: Places, say: Say) -> list[str]:
    return [_factor(say(place)) for place in places]


def _length(places: Places, say: Say) -> str:
    return f"√({_sum(places, say, '{}²')})"


def _operands(made: Origin, count: int) -> list[Any]:
    """The first ``count`` operands; an optional one that is missing is None."""
    return [*made.operands, *[None] * count][:count]


def _row_and_column(made: Origin, i: int, j: int) -> tuple[Places, Places]:
    """What a product multiplies, without NaN and ∞ that the query does not see."""
    A, B = _operands(made, 2)
    pairs = zip(_row(A, i), _column(B, j), strict=True)
    seen = [(a, b) for a, b in pairs if np.isfinite(b.value) or not made.hides(i, a.at[1])]
    return tuple(a for a, _ in seen), tuple(b for _, b in seen)


def _product(made: Origin, i: int, j: int, say: Say) -> Parts:
    bias = _operands(made, 3)[2]
    (row, column), added = _row_and_column(made, i, j), _at(bias, i, j)
    terms = [_sum_of_products(row, column, say), *_numbers(added, say)]
    return Parts(row, column, added, _plus(terms))


def _products(made: Origin, i: int, j: int, say: Say) -> Parts:
    x, *heads = _operands(made, len(made.operands))
    matrices, biases = ([M for M in heads if M.value.ndim == ndim] for ndim in (2, 1))
    head, j = divmod(j, matrices[0].value.shape[1])
    of_head = made._replace(operands=(x, matrices[head], *biases[head : head + 1]))
    return _product(of_head, i, j, say)


def _columns(made: Origin, i: int, j: int, say: Say) -> Parts:
    row = _at(made.operands[0], i, j + int(made.constant or 0))
    return Parts(row, (), (), row[0].text)


def _rows(made: Origin, i: int, j: int, say: Say) -> Parts:
    row = _at(made.operands[0], i + int(made.constant or 0), j)
    return Parts(row, (), (), f"{row[0].text} of {row[0].step.variant or row[0].step.name}")


def _sigmoid(made: Origin, i: int, j: int, say: Say) -> Parts:
    parts = _product(made, i, j, say)
    return parts._replace(text=f"1 / (1 + exp(-({parts.text})))")


def _dot(made: Origin, i: int, j: int, say: Say) -> Parts:
    Q, K = _operands(made, 2)
    row, column = _row(Q, i), _row(K, j)
    return Parts(row, column, (), _sum_of_products(row, column, say))


def _block(made: Origin, i: int, j: int, say: Say) -> Parts:
    parts = _dot(made, i, j, say)
    return parts._replace(text=f"({parts.text}) · {_factor(say.constant(made))}")


def _cosine(made: Origin, i: int, j: int, say: Say) -> Parts:
    parts = _dot(made, i, j, say)
    lengths = f"{_length(parts.row, say)} · {_length(parts.column, say)}"
    return parts._replace(text=f"({parts.text}) / ({lengths})")


def _scale(made: Origin, i: int, j: int, say: Say) -> Parts:
    row = _at(made.operands[0], i, j)
    return Parts(row, (), (), f"{_factor(say(row[0]))} · {_factor(say.constant(made))}")


def _cap(made: Origin, i: int, j: int, say: Say) -> Parts:
    S, cap = _operands(made, 2)
    row, others = _at(S, i, j), _at(cap, i, j)
    score, c = _numbers((*row, *others), say)
    return Parts(row, (), others, f"{c} · tanh({score} / {c})")


def _alibi(made: Origin, i: int, j: int, say: Say) -> Parts:
    slope, distances, given = _operands(made, 3)
    row, column, others = _at(slope, i, j), _at(distances, i, j), _at(given, i, j)
    slope, distance, *before = _numbers((*row, *column, *others), say)
    return Parts(row, column, others, f"{f'{before[0]} - ' if before else '-'}{slope}·{distance}")


def _mask(made: Origin, i: int, j: int, say: Say) -> Parts:
    return Parts(_at(made.operands[0], i, j), (), (), "not hidden")


def _with(form: str) -> Callable[[Origin, int, int, Say], Parts]:
    """Return the writer of an operation on two cells, in a form such as ``{} / {}``."""

    def write(made: Origin, i: int, j: int, say: Say) -> Parts:
        A, B = _operands(made, 2)
        row, column = _at(A, i, j), _at(B, i, j)
        text = form.format(say(row[0]), _factor(say(column[0])))
        return Parts(row, column, (), text)

    return write


def _max(made: Origin, i: int, j: int, say: Say) -> Parts:
    S, other = _operands(made, 2)
    row, others = _row(S, i), _at(other, i, 0)
    if made.operation == "row max" and all(np.isneginf(p.value) for p in (*row, *others)):
        return Parts(row, (), others, NO_KEY)
    places = (*row, *others)
    numbers = _joined([*map(say, places)], [place.value for place in places], ", ")
    return Parts(row, (), others, f"max({numbers})")


def _share(made: Origin, i: int, j: int, say: Say) -> Parts:
    parts = _with("{} / {}")(made, i, j, say)
    return parts._replace(text=NO_KEY) if parts.column[0].value == 0 else parts


def _softmax(made: Origin, i: int, j: int, say: Say) -> Parts:
    row = _row(made.operands[0], i) if made.operands[0] else ()
    powers = [f"exp({say(place)})" for place in row]
    return Parts(row, (), (), f"{powers[j]} / ({_joined(powers, [p.value for p in row])})")


def _total(made: Origin, i: int, j: int, say: Say) -> Parts:
    P, sink, m = _operands(made, 3)
    row, others = _row(P, i), _at(sink, i, 0)
    of_sink = []
    if others:
        others += _at(m, i, 0)
        of_sink.append(f"exp({say(others[0])} - {_factor(say(others[1]))})")
    return Parts(row, (), others, _plus([_sum(row, say), *of_sink]))


def _concat(made: Origin, i: int, j: int, say: Say) -> Parts:
    heads = [step for step in made.operands if step is not None]
    width = heads[0].value.shape[-1]
    source = Place(heads[j // width], (i, j % width))
    of = f" of {source.step.place}" if source.step.place else ""
    return Parts((source,), (), (), f"{source.text}{of}")


def _lse(made: Origin, i: int, j: int, say: Say) -> Parts:
    (m, total), j = _block_of(made, j)
    row, column = _at(m, j, 0), _at(total, j, 0)
    text = f"{say(row[0])} + log {say(column[0])}"
    return Parts(row, column, (), text)


def _unit(made: Origin, i: int, j: int, say: Say) -> Parts:
    (x,) = _operands(made, 1)
    row = _row(x, i)
    return Parts(row, (), (), f"{_factor(say(row[j]))} / {_length(row, say)}")


def _rms(made: Origin, i: int, j: int, say: Say) -> Parts:
    x, gain = _operands(made, 2)
    row, column = _row(x, i), _at(gain, i, j)
    root = f"√(({_sum(row, say, '{}²')}) / {len(row)})"
    text = f"{_factor(say(column[0]))} · {_factor(say(row[j]))} / {root}"
    return Parts(row, column, (), text)


def _mean(made: Origin, i: int, j: int, say: Say) -> Parts:
    (x,) = _operands(made, 1)
    row = _row(x, i)
    return Parts(row, (), (), f"({_sum(row, say)}) / {len(row)}")


def _mean_square(made: Origin, i: int, j: int, say: Say) -> Parts:
    x, mean = _operands(made, 2)
    row, others = _row(x, i), _at(mean, i, 0)
    less = "".join(f" - {number}" for number in _numbers(others, say))
    terms = [f"({number.strip('()')}{less})²" if less else f"{number}²"
             for number in _numbers(row, say)]  # fmt: skip
    middle = others[0].value if others else 0.0
    sizes = [abs(place.value - middle) for place in row]
    return Parts(row, (), others, f"({_joined(terms, sizes)}) / {len(row)}")


def _norm(made: Origin, i: int, j: int, say: Say) -> Parts:
    x, square, gain, mean, bias = _operands(made, 5)
    row, column = _at(x, i, j), _at(gain, i, j)
    others = (*_at(square, i, 0), *_at(mean, i, 0), *_at(bias, i, j))
    (a, g, s), rest = _numbers((*row, *column, *others[:1]), say), _numbers(others[1:], say)
    a = f"({a.strip('()')} - {rest[0]})" if rest else a
    added = f" + {rest[1]}" if rest else ""
    return Parts(row, column, others, f"{g} · {a} / √({s} + {made.constant:g}){added}")


def _activation(made: Origin, i: int, j: int, say: Say) -> Parts:
    row = _at(made.operands[0], i, j)
    (x,) = _numbers(row, say)
    forms = {
        RELU: f"max({x.strip('()')}, 0)", SILU: f"{x} / (1 + exp(-{x}))",
        GELU: f"{x} · (1 + erf({x} / √2)) / 2",
    }  # fmt: skip
    tanh = f"{x} · (1 + tanh(√(2/π) · ({x} + 0.044715 · {x}³))) / 2"
    return Parts(row, (), (), forms.get(made.constant or RELU, tanh))


def _rotated(made: Origin, i: int, j: int, say: Say) -> Parts:
    x, cos, sin = _operands(made, 3)
    first, second = pairs(cos.value.shape[-1], made.constant or 0)
    if j not in (*first, *second):
        return Parts(_at(x, i, j), (), (), "not rotated")
    n = int(np.flatnonzero(first == j if j in first else second == j)[0])
    row = (Place(x, (i, int(first[n]))), Place(x, (i, int(second[n]))))
    column = (Place(cos, (i, n)), Place(sin, (i, n)))
    (a, b), (c, s) = _numbers(row, say), _numbers(column, say)
    return Parts(row, column, (), f"{a}·{c} - {b}·{s}" if j in first else f"{b}·{c} + {a}·{s}")


def _tanh(made: Origin, i: int, j: int, say: Say) -> Parts:
    Q, K, bias = _operands(made, 3)
    query, key = divmod(i, len(K.value))
    row, column, others = _at(Q, query, j), _at(K, key, j), _at(bias, i, j)
    return Parts(row, column, others, f"tanh({_plus(_numbers((*row, *column, *others), say))})")


def _decay(made: Origin, i: int, j: int, say: Say) -> Parts:
    m, old = _operands(made, 2)
    row, column = _at(old, i, 0), _at(m, i, 0)
    before = say(row[0]) if row else "-∞"
    return Parts(row, column, (), f"exp({before} - {_factor(say(column[0]))})")


def _before(factor: Step, old: Step | None, i: int, j: int) -> Places:
    """The factor and the sum of the blocks before; neither for the first block."""
    return () if old is None else (*_at(factor, i, 0), *_at(old, i, j))


def _running_sum(made: Origin, i: int, j: int, say: Say) -> Parts:
    P, factor, old = _operands(made, 3)
    row, others = _row(P, i), _before(factor, old, i, 0)
    terms = [_sum_of_products(others[:1], others[1:], say)] if others else []
    return Parts(row, (), others, _plus([*terms, _sum(row, say)]))


def _running_product(made: Origin, i: int, j: int, say: Say) -> Parts:
    factor, old = _operands(made, 4)[2:]
    row, column = _row_and_column(made, i, j)
    others = _before(factor, old, i, j)
    terms = [_sum_of_products(others[:1], others[1:], say)] if others else []
    return Parts(row, column, others, _plus([*terms, _sum_of_products(row, column, say)]))


def _pairs(made: Origin, i: int, j: int, say: Say) -> Parts:
    hidden, w, K = _operands(made, 3)
    row = _row(hidden, i * len(K.value) + j)
    column = tuple(Place(w, (n,)) for n in range(w.value.size))
    return Parts(row, column, (), _sum_of_products(row, column, say))


def _block_of(made: Origin, i: int) -> tuple[tuple[Step, Step], int]:
    """The two operands of the block of rows that row ``i`` belongs to, and its number there."""
    steps = _operands(made, len(made.operands))
    blocks = list(zip(steps[::2], steps[1::2], strict=True))
    while i >= len(blocks[0][0].value):
        i -= len(blocks.pop(0)[0].value)
    return blocks[0], i


def _normalise(made: Origin, i: int, j: int, say: Say) -> Parts:
    (O, total), i = _block_of(made, i)
    row, column = _at(O, i, j), _at(total, i, 0)
    text = " / ".join(_numbers((*row, *column), say)) if column[0].value else NO_KEY
    return Parts(row, column, (), text)


WRITERS: dict[str, Callable[[Origin, int, int, Say], Parts]] = {
    "product": _product,
    "products": _products,
    "columns": _columns,
    "rows": _rows,
    "dot": _dot,
    "cosine": _cosine,
    "scale": _scale,
    "cap": _cap,
    "sum": _with("{} + {}"),
    "times": _with("{} · {}"),
    "alibi": _alibi,
    "mask": _mask,
    "row max": _max,
    "exp": _with("exp({} - {})"),
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
    "running sum": _running_sum,
    "running product": _running_product,
    "normalise": _normalise,
}
