"""Find how each traced array was computed: the operation and its operands.

For each step, the catalogue names an operation and its operands (``Entry.made``). ``Origins`` finds
the operands among the steps of the same batch entry and head, and computes the step from them. If
the result differs from the step's numbers, the step has no origin.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.explain.catalogue import QUERIES, base_of
from minimha.explain.entry import FORMULA
from minimha.explain.steps import Step

Matrix = NDArray[Any]
HALF_SPLIT, INTERLEAVED = 0.0, 1.0  # the constant of "rotated": which columns are a pair
# The constant of "activation".
ACTIVATIONS = RELU, GELU, GELU_TANH, SILU, QUICK_GELU, RELU_SQUARED = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0
EPSILONS = 1e-5, 1e-6, 1e-8, 1e-12  # used by models


def _plus(value: Matrix, other: Matrix | None) -> Matrix:
    return value if other is None else np.add(value, other)


def _finite(m: Matrix) -> Matrix:
    """Return the maxima ``m``, with 0 for rows without visible keys."""
    return np.where(np.isneginf(m), 0.0, m)


def _max(S: Matrix, other: Matrix | None = None) -> Matrix:
    m: Matrix = S.max(axis=-1, keepdims=True, initial=-np.inf)
    return m if other is None else np.maximum(m, other)


def _sum(x: Matrix) -> Matrix:
    return np.asarray(x.sum(axis=-1, keepdims=True))


def _mean(x: Matrix) -> Matrix:
    return np.asarray(x.mean(axis=-1, keepdims=True))


def _share(P: Matrix, total: Matrix) -> Matrix:
    return np.asarray(P / np.where(total == 0, 1.0, total))


def _unit(x: Matrix) -> Matrix:
    return _share(x, np.sqrt(_sum(np.square(x))))


def _softmax(x: Matrix) -> Matrix:
    P = np.exp(x - _finite(_max(x)))
    return _share(P, _sum(P))


def _by_blocks(operation: Callable[[Matrix, Matrix], Matrix]) -> Callable[..., Matrix]:
    """Return a function that applies ``operation`` to each row of blocks and joins the results."""

    def rows(*blocks: Matrix) -> Matrix:
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        return np.concatenate([operation(a, b) for a, b in pairs])

    return rows


def _products(x: Matrix, *heads: Matrix) -> Matrix:
    W, b = ([M for M in heads if M.ndim == ndim] for ndim in (2, 1))
    return _plus(np.matmul(x, np.concatenate(W, axis=1)), np.concatenate(b) if b else None)


def _norm(x: Matrix, square: Matrix, gain: Matrix, *rest: Any) -> Matrix:
    *others, epsilon = rest
    mean, bias = others or (0.0, 0.0)
    return np.asarray(gain * (x - mean) / np.sqrt(square + epsilon) + bias)


def _activation(x: Matrix, kind: float) -> Matrix:
    if kind in (RELU, RELU_SQUARED):
        return np.maximum(x, 0) ** (1 if kind == RELU else 2)
    if kind in (SILU, QUICK_GELU):
        return np.asarray(x / (1 + np.exp(-x * (1 if kind == SILU else 1.702))))
    if kind == GELU:
        erf = np.vectorize(math.erf, otypes=[float])
        return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


def _rotated(x: Matrix, cos: Matrix, sin: Matrix, layout: float) -> Matrix:
    y: Matrix = x.copy()
    a, b = pairs(cos.shape[-1], layout)
    y[:, a], y[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return y


def pairs(num_pairs: int, layout: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the columns of the first and of the second numbers in RoPE's pairs.

    ``layout`` is ``HALF_SPLIT`` or ``INTERLEAVED``.

    >>> [columns.tolist() for columns in pairs(2, HALF_SPLIT)]
    [[0, 1], [2, 3]]
    >>> [columns.tolist() for columns in pairs(2, INTERLEAVED)]
    [[0, 2], [1, 3]]
    """
    n = np.arange(num_pairs)
    return (2 * n, 2 * n + 1) if layout == INTERLEAVED else (n, n + num_pairs)


# Operation → a function of its operands (None if missing) and its constant, if any.
OPERATIONS: dict[str, Callable[..., Matrix]] = {
    "product": lambda A, B, bias=None: _plus(A @ B, bias),
    "products": _products,
    "columns": lambda W, first: W[..., int(first) :],  # to the end, beyond the step's
    "rows": lambda x, first: x[int(first) :],  # to the end, beyond the step's
    "dot": lambda Q, K: Q @ K.T,
    "cosine": lambda Q, K: _unit(Q) @ _unit(K).T,
    "scale": lambda S, factor: S * factor,
    "cap": lambda S, cap: cap * np.tanh(S / cap),
    "sum": np.add,
    "times": np.multiply,
    "alibi": lambda slope, d, bias=None: _plus(-slope * d, bias),
    "mask": lambda S: S,  # except hidden scores
    "row max": lambda S, sink=None: _finite(_max(S, sink)),
    "exp": lambda S, m: np.exp(S - _finite(m)),
    "total": lambda P, sink, m: _plus(_sum(P), None if sink is None else np.exp(sink - m)),
    "share": _share,
    "softmax": _softmax,
    "concat": lambda *heads: np.concatenate(heads, axis=-1),
    "lse": _by_blocks(lambda m, l: m + np.log(l)),
    "unit": _unit,
    "rms": lambda x, gain: x / np.sqrt(_mean(np.square(x))) * gain,
    "mean": _mean,
    "mean square": lambda x, mean=None: _mean(np.square(x if mean is None else x - mean)),
    "norm": _norm,
    "activation": _activation,
    "rotated": _rotated,
    "sigmoid": lambda x, W, bias=None: 1 / (1 + np.exp(-_plus(x @ W, bias))),
    "tanh": lambda Q, K, bias=None: np.tanh(_plus(Q[:, None] + K, bias)),
    "pairs": lambda hidden, w, K: hidden @ w,  # the length of K is the number of keys
    "block": lambda Q, K, scale: scale * (Q @ K.T),  # except hidden scores
    "running max": _max,
    "decay": lambda m, old=None: np.exp((-np.inf if old is None else old) - _finite(m)),
    "running sum": lambda P, f, old=None: _plus(_sum(P), None if old is None else f * old),
    "running product": lambda P, V, f, old=None: _plus(P @ V, None if old is None else f * old),
    "normalise": _by_blocks(_share),
}
PRODUCTS = ("product", "running product")


class Origin(NamedTuple):
    """The computation of a traced matrix: an operation, its operands, and its constant if any."""

    operation: str  # a key of ``OPERATIONS``
    # In the order of the operation's arguments; None for a missing optional argument.
    # "concat" has the heads. "products" has x, the matrix of each head, then the bias of each.
    # "normalise" has O and l after the last block of each row of blocks, and "lse" m and l.
    operands: tuple[Step | None, ...]
    # The factor of "scale" and "block", the layout of "rotated", the first of "columns" or "rows",
    # the ε of "norm", the kind of "activation"; None elsewhere.
    constant: float | None = None

    def computed(self) -> Matrix:
        """Return the step's numbers, computed from its operands in float64."""
        values = [None if s is None else np.asarray(s.value, np.float64) for s in self.operands]
        constant = [] if self.constant is None else [self.constant]
        with np.errstate(all="ignore"):
            added = self._seen_alone(values)
            return np.asarray(OPERATIONS[self.operation](*values, *constant)) + added

    def hides(self, i: int, j: int) -> bool:
        """Return whether a mask hides key j from query i, so that key j's NaN and ∞ are ignored.

        Return False if the operation is no product with attention weights.
        """
        weights = self.operands[0]
        if self.operation not in PRODUCTS or weights is None or weights.hidden is None:
            return False
        return bool(weights.hidden[i, j])

    def _seen_alone(self, values: list[Matrix | None]) -> Matrix | float:
        """Set nonfinite values of a product to 0; return their effect on rows that see them."""
        if self.operation not in PRODUCTS:
            return 0.0
        A, B = values[:2]
        if A is None or B is None:
            return 0.0
        finite = np.isfinite(B)
        if finite.all() or A.shape[-1] != len(B) or B.ndim != 2:
            return 0.0
        values[1] = np.where(finite, B, 0)
        added = np.zeros((len(A), B.shape[1]))
        for j in np.flatnonzero(~finite.all(axis=1)):
            seen = [i for i in range(len(A)) if not self.hides(i, int(j))]
            added[seen] += np.where(finite[j], 0, A[seen, j, None] * B[j])
        return added


class Origins:
    """A mapping from each step to its ``Origin``, or to None if the step is an input of the run."""

    def __init__(self, by_name: Mapping[str, Sequence[Step]]) -> None:
        self.by_name = by_name  # the steps of each name, in the order of the computation
        self._found: dict[Step, Origin | None] = {}

    def __getitem__(self, step: Step) -> Origin | None:
        if step not in self._found:
            made = (made for made in self._candidates(step) if _gives(made, step))
            self._found[step] = next(made, None)
        return self._found[step]

    def follows(self, step: Step) -> bool:
        """Return whether ``step`` is computed from other steps, by an operation or its formula.

        A step of rows copied from another step counts as an input.
        """
        if step.made == FORMULA:
            return True
        operation, *names = step.made or ("rows",)
        sources = {name.strip("?<*") for part in names for name in part.split("|")}
        return operation != "rows" and not sources.isdisjoint(map(base_of, self.by_name))

    def _candidates(self, step: Step) -> Iterator[Origin]:
        if not step.made or step.made == FORMULA:
            return
        operation, *names = step.made
        if operation == "rows":
            yield from self._rows(step, names[0])
            return
        operands = self._operands(step, operation, names)
        if operands is None:
            return
        constants: Iterable[float | None] = (None,)
        if operation in ("scale", "block"):
            unscaled = Origin(operation, operands, 1.0).computed()
            constants = (_factor(step, unscaled, self._operand(step, f"Q|{QUERIES}")),)
        elif operation == "rotated":
            constants = (HALF_SPLIT, INTERLEAVED)
        elif operation == "activation":
            constants = _activations(step, operands)
        elif operation == "norm":
            constants = _epsilons(step, operands)
        elif operation == "columns":
            constants = (_first_column(step, operands[0]),)
        for constant in constants:
            yield Origin(operation, operands, constant)

    def _operands(
        self, step: Step, operation: str, names: Sequence[str]
    ) -> tuple[Step | None, ...] | None:
        """Return the steps called ``names``, or None if a required step is missing."""
        if operation == "concat":
            return tuple(self._all_heads(step, names[0])) or None
        if operation == "products":
            heads = (self._all_heads(step, name.removesuffix("?")) for name in names[1:])
            return (self._operand(step, names[0]), *(s for found in heads for s in found))
        if operation == "normalise":
            return tuple(self._last_blocks(step, names)) or None
        found = [self._operand(step, name.removesuffix("?")) for name in names]
        if operation == "lse" and None in found:  # computed in blocks
            return tuple(self._last_blocks(step, ("m", "l"))) or None
        required = (s for s, name in zip(found, names, strict=True) if not name.endswith("?"))
        return None if None in required else tuple(found)

    def _operand(self, step: Step, name: str) -> Step | None:
        found = (s for steps in self._named(step, name) for s in steps if _is_beside(s, step))
        return next(found, None)

    def _all_heads(self, step: Step, name: str) -> list[Step]:
        """Return all heads of the step ``name`` in the batch entry of ``step``."""
        heads = next(self._named(step, name), ())
        return [head for head in heads if head.batch in (None, step.batch)]

    def _named(self, step: Step, names: str) -> Iterator[Sequence[Step]]:
        """Yield the steps that ``a|b`` may name, likeliest first, for all batch entries and heads.

        For ``[cross, step 1]``, steps of the same stage come first, then those of ``[cross]``, then
        those without a stage. ``m<`` is in the nearest earlier block, ``a*`` is the latest.
        """
        known = list(self.by_name)
        before = known[: known.index(step.name)]
        if names.endswith("*"):
            bases = names.removesuffix("*").split("|")
            yield from (self.by_name[name] for name in before[::-1] if base_of(name) in bases)
            return
        bracket = step.name[len(step.base) :]
        brackets = [bracket, re.sub(r",[^,]*]$", "]", bracket), ""]
        if names.endswith("<"):
            j = re.search(r"j=(\d+)", bracket)
            earlier = range(int(j[1]) - 1, -1, -1) if j else ()
            brackets = [re.sub(r"j=\d+", f"j={n}", bracket) for n in earlier]
        for bracket in dict.fromkeys(brackets):
            for base in names.removesuffix("<").split("|"):
                if base + bracket in before:
                    yield self.by_name[base + bracket]

    def _last_blocks(self, step: Step, names: Sequence[str]) -> Iterator[Step]:
        """Yield the steps ``names`` of the last block in each row of blocks."""
        last: dict[str, str] = {}  # row of blocks → its last block
        for name in self.by_name:
            block = re.fullmatch(rf"{names[0]}(\[i=(\d+),j=\d+\])", name)
            if block:
                last[block[2]] = block[1]
        for bracket in last.values():
            for base in names:
                yield from (s for s in self.by_name[base + bracket] if _is_beside(s, step))

    def _rows(self, step: Step, names: str) -> Iterator[Origin]:
        """Yield possible origins of ``step`` as rows of the steps ``names``, latest first."""
        for other in (s for steps in self._named(step, names) for s in steps):
            fits = other.value.ndim == 2 and other.value.shape[-1:] == step.value.shape[-1:]
            if fits and _is_beside(other, step):
                for first in range(len(other.value) - len(step.value) + 1):
                    yield Origin("rows", (other,), float(first))


def _is_beside(other: Step, step: Step) -> bool:
    """Return whether ``other`` belongs to the batch entry and head of ``step``."""
    if other.batch not in (None, step.batch):
        return False
    is_same = other.kv_head is not None and other.kv_head == step.kv_head
    return is_same or other.is_of(step.head)


def _gives(made: Origin, step: Step) -> bool:
    try:
        computed = made.computed()
    except ValueError:  # the shapes do not fit
        return False
    value = np.asarray(step.value, np.float64)
    if made.operation == "columns":
        computed = computed[..., : value.shape[-1]]
    elif made.operation == "rows":
        computed = computed[: len(value)]
    if computed.size != value.size:
        return False
    if made.operation in ("mask", "block"):
        computed = np.where(np.isneginf(value), value, computed)
    tolerance = 1e-10 if step.value.dtype == np.float64 else 1e-4
    largest = abs(value[np.isfinite(value)]).max(initial=0)
    return np.allclose(
        computed.reshape(value.shape), value, rtol=tolerance, atol=tolerance * largest,
        equal_nan=True,
    )  # fmt: skip


def _factor(step: Step, before: Matrix, queries: Step | None) -> float:
    """Return the factor from ``before`` to ``step``, exactly 1/√D if it is close to that."""
    usual = 1.0 if queries is None else float(1 / np.sqrt(queries.value.shape[-1]))
    after = np.asarray(step.value, np.float64)
    size = np.where(np.isfinite(after) & np.isfinite(before), abs(before), 0)
    if not size.any():
        return usual
    at = np.unravel_index(size.argmax(), size.shape)
    factor = float(after[at] / before[at])
    return usual if abs(factor - usual) < 1e-4 * usual else factor


def _activations(step: Step, operands: tuple[Step | None, ...]) -> list[float]:
    """Return the constants of all activations, best match first."""

    def distance(kind: float) -> float:
        computed = Origin("activation", operands, kind).computed()
        return float(abs(computed - step.value).max(initial=0))

    return sorted(ACTIVATIONS, key=distance)


def _epsilons(step: Step, operands: Sequence[Step | None]) -> tuple[float, ...]:
    """Return candidates for the ε of a norm, likeliest first.

    The largest number of the step gives an estimate. Candidates are models' usual values within
    rounding of the estimate, the estimate with one digit, 0, and the estimate.
    """
    bias = operands[-1].value if len(operands) > 3 and operands[-1] is not None else 0.0
    square = np.asarray(operands[1].value, np.float64) if operands[1] is not None else np.zeros(1)
    after = np.asarray(step.value, np.float64) - bias
    before = Origin("norm", tuple(operands), 0.0).computed() - bias
    at = np.unravel_index(abs(after).argmax(), after.shape)
    if not after[at]:
        return (0.0,)
    epsilon = max(0.0, float(square[at[0], 0] * ((before[at] / after[at]) ** 2 - 1)))
    open_by = 16 * square[at[0], 0] * np.finfo(step.value.dtype).eps
    usual = [one for one in EPSILONS if abs(one - epsilon) <= open_by]
    return *usual, float(f"{epsilon:.1g}"), 0.0, epsilon


def _first_column(step: Step, combined: Step | None) -> float:
    """Return the head's first column in a matrix of all queries, keys and values."""
    total = 0 if combined is None else combined.value.shape[-1]
    before = "qkv".index(step.base[-1]) * total // 3
    return float(before + (step.head or 0) * step.value.shape[-1])
