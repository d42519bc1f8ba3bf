"""A trace keeps every intermediate that passes a tap, and presents it as steps to be shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from minimha.explain.catalogue import AXES, Entry, entry
from minimha.explain.printed import Comparison, PrintedMatrix

TOKEN_AXES = ("L", "Lq", "Lk", "Lc")
QUERY_AXES, KEY_AXES = (("L",), ("Lq",), ("B_r",)), ("Lk", "B_c")
LONGEST_ROW, MOST = 32, 16  # entries of one query's row, and how many are shown of a longer one
# What a formula is about, and the step that takes its place where it is normalised first.
NORMALISED = {
    "q": ("X", "normed"), "k": ("X", "normed"), "v": ("X", "normed"), "gate": ("X", "normed"),
    "added": ("Y", "output_normed"), "residual": ("F", "feed_forward_normed"),
}  # fmt: skip
UNNAMED = {"Lq": "q", "Lk": "k"}  # what numbers tokens without labels have before them
DRAWINGS = ("heatmap", "picks")  # what is drawn beside the steps, which ``only`` may name too
BLOCK = re.compile(r"\[i=(\d+)(?:,j=(\d+))?\]")
SCORES_OF = {"weights": "masked", "P": "S"}  # where it can be seen which weights a mask hides
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, bidirectional ones among them; separators
JOINERS = "\u200c\u200d"  # without which Persian words and many emoji fall apart
NOT_IN_XML = "\ufffe\uffff"


@dataclass(frozen=True, eq=False)
class Step:
    """One matrix of one head, ready to be shown: nothing else is needed to show it.

    Attributes
    ----------
    name, symbol, formula, note, source : str
    tex_symbol, tex : str
        Symbol and formula for a page.
    axes : tuple of str
        The name of each axis of ``value``.
    value : ndarray, read-only
    batch, head, kv_head : int or None
        Which slice of the traced array this is, counted from 0; None where there is only one. K and
        V carry ``kv_head`` where several query heads share one key/value head.
    rows, columns : tuple of str, or None
        Labels of the last two axes, where the axis counts tokens.
    hidden : ndarray of bool or None
        Which weights belong to keys that a mask hides; None where nothing is hidden.
    printed : tuple of Comparison
        The numbers that a document prints for this step.
    made : tuple of str
        How its cells come about, as in the catalogue; empty where they are given.
    is_blank : bool
        The numbers are left out, for a reader to find: ``value`` is NaN throughout.
    whole : tuple of int
        The shape of the matrix of which ``value`` is a part; empty where it is all of it.
    """

    name: str
    symbol: str
    tex_symbol: str
    axes: tuple[str, ...]
    formula: str
    tex: str
    note: str
    source: str
    value: NDArray[Any]
    batch: int | None = None
    head: int | None = None
    kv_head: int | None = None
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    hidden: NDArray[np.bool_] | None = None
    printed: tuple[Comparison, ...] = ()
    made: tuple[str, ...] = ()
    is_blank: bool = False
    whole: tuple[int, ...] = ()

    @property
    def size(self) -> str:
        """How many rows and columns: ``3 × 3``, or of a part ``1 of 64 × 16 of 64``."""
        pairs = zip(self.value.shape, self.whole or self.value.shape, strict=True)
        return " × ".join(str(n) if n == of else f"{n} of {of}" for n, of in pairs)

    @property
    def base(self) -> str:
        """The name without its block or variant: ``S`` for ``S[i=0,j=1]``."""
        return self.name.partition("[")[0]

    @property
    def variant(self) -> str:
        """What follows the name in brackets, a stage or a block: ``encoder`` for ``q[encoder]``."""
        return self.name.partition("[")[2].rstrip("]")

    @property
    def place(self) -> str:
        """Batch entry and head in words; empty where there is only one."""
        parts = (("batch", self.batch), ("head", self.head), ("key/value head", self.kv_head))
        return ", ".join(f"{word} {number}" for word, number in parts if number is not None)

    @property
    def title(self) -> str:
        """The name, and the batch entry and head: ``weights, head 1``."""
        return ", ".join(part for part in (self.name, self.place) if part)

    @property
    def names(self) -> set[str]:
        """What a reader may call it: with its head or block, or without."""
        drawn = ", ".join(part for part in (self.base, self.variant, self.place) if part)
        return {self.name, self.base, self.title, drawn}


@dataclass(eq=False)
class Trace:
    """A tap that remembers: call it, or pass it to ``attention(…, tap=trace)``.

    Parameters
    ----------
    example, source : str, optional
        What is traced, and where it comes from.
    labels : mapping from axis name to labels, optional
        Usually made by ``token_labels``. Labels of one variant's axis, ``Lk[cross]``, take
        precedence over those of the axis.
    notes : mapping from step name to str, optional
        What to say about a step, or about one head of it (``weights, head 1``), beyond the
        catalogue's sentence.
    printed : sequence of PrintedMatrix, optional
        The numbers that a document prints for these steps.
    blocks : (B_r, B_c), optional
        Block sizes, where tiles are traced, so that their rows can be labelled.
    given : collection of str, optional
        Names of steps that are given where the catalogue has a formula.
    computed : collection of str, optional
        Names of steps that the run has, and that are not kept here: an export holds some alone.
    hidden : mapping from step name to ndarray of bool, optional
        Which weights a mask hides, where the masked scores are not kept here.
    num_heads : int, optional
        Of the queries, where the run has some that are not kept here.
    kept : mapping from step name to (str, sequence of int), optional
        "head" or "kv_head", and which of them are kept, where the run has more.
    only : sequence of str, optional
        The steps to show, with or without their block or head, and ``DRAWINGS``. Default is all.
    head : int, optional
        The query head to show, with the keys and values that it reads. Default is all.
    query : str, optional
        Label or number of the query whose rows alone are shown, and how it picks its values.
        Default is all rows, and the last one picks.
    cell : str, optional
        Labels or numbers of the cell to write out, ``sat,cat``, alone or beside the steps that
        ``only`` names.
    blank : sequence of str, optional
        The steps whose numbers are left out.

    Examples
    --------
    >>> from minimha import attention
    >>> trace = Trace(labels=token_labels(["cat", "sat"]))
    >>> output = attention([[1, 0], [0, 1]], [[1, 0], [0, 1]], [[1], [3]], scale=1, tap=trace)
    >>> trace["weights"].round(3)
    array([[0.731, 0.269],
           [0.269, 0.731]])
    >>> [step.name for step in trace.steps]
    ['q', 'k', 'v', 'scores', 'row_max', 'exponentials', 'row_sum', 'weights', 'output']
    """

    example: str = "attention"
    source: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    printed: Sequence[PrintedMatrix] = ()
    blocks: tuple[int, int] | None = None
    given: Collection[str] = ()
    computed: Collection[str] = ()
    hidden: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    num_heads: int | None = None
    kept: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)
    only: Sequence[str] = ()
    head: int | None = None
    query: str = ""
    cell: str = ""
    blank: Sequence[str] = ()
    _repr_html_: ClassVar[Callable[[Trace], str]]  # for notebooks, set by the package
    _values: dict[str, NDArray[Any]] = field(default_factory=dict, init=False, repr=False)
    _sources: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.example, self.source = printable(self.example), printable(self.source)
        self.labels = {axis: tuple(map(printable, names)) for axis, names in self.labels.items()}

    def __call__(self, name: str, value: Any) -> Any:
        """Keep a read-only copy of ``value`` under ``name`` and return ``value`` itself.

        Text, the source of a function, is no step: it is a note to the step that the function made.
        """
        if isinstance(value, str):
            self._sources[name] = value
            return value
        if name in self._values:
            raise ValueError(
                f"this trace already holds {name!r}: a trace follows one run, use a new one"
            )
        kept = np.array(value)
        kept.setflags(write=False)
        self._values[name] = kept
        for made in ("steps", "shown", "by_name"):  # of the steps kept before
            self.__dict__.pop(made, None)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were computed."""
        return iter(self._values)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the array kept under ``name``, without batch and head axes of length 1."""
        if name not in self._values:
            raise KeyError(f"no step {name!r}; this trace holds {', '.join(self)}")
        value = self._values[name]
        axes = self._axes(name)
        single = tuple(
            n for n, axis in enumerate(axes) if axis in ("B", "H", "Hkv") and value.shape[n] == 1
        )
        return value.squeeze(single)

    def selected(self, names: Sequence[str] = (), **others: Any) -> Trace:
        """Return a trace of the same run that shows these steps alone, or all if none are named.

        ``others`` are the attributes that say what is shown: head, query, cell and blank.
        """
        only = tuple(name.replace(" · ", ", ") for name in names)  # as the headings have it
        chosen = replace(self, only=only, **others)
        chosen._values, chosen._sources = dict(self._values), dict(self._sources)
        return chosen

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step in order, one for each batch entry and head; only the chosen, if ``only``."""
        self._check_names()
        only = set(self.only)
        return tuple(step for step in self._of_head() if not only or step.names & only)

    @cached_property
    def shown(self) -> tuple[Step, ...]:
        """What of ``steps`` is printed as matrices: of one query its row, of one cell nothing.

        Steps that ``only`` names are printed beside the cell. Of a long vocabulary those tokens are
        printed that the last query, or the chosen one, has the largest logits for.
        """
        if self.cell and not self.only:
            return ()
        parts = map(self._of_query, self.steps) if self.query else self.steps
        return tuple(self._likeliest(part) for part in parts if part is not None)

    def _likeliest(self, step: Step) -> Step:
        """The columns of the likeliest tokens, where the columns are a long vocabulary."""
        if step.axes[-1:] != ("V",) or step.value.shape[-1] <= LONGEST_ROW:
            return step
        logits = self._values.get(_beside(step.name, "logits"), step.value)
        row = logits.reshape(-1, logits.shape[-1])[-1]
        kept = np.argsort(-row, kind="stable")[:MOST].tolist()
        labels = step.columns or [str(n) for n in range(len(row))]
        return replace(
            step, value=step.value[..., kept], columns=tuple(labels[n] for n in kept),
            whole=step.value.shape,
        )  # fmt: skip

    def _of_query(self, step: Step) -> Step | None:
        """The row of the chosen query, if there is one, or what is largest in it."""
        row = self.number(step, 0, self.query) if step.axes[:1] in QUERY_AXES else None
        if row is None:
            return None
        value, columns, kept = step.value[row : row + 1], step.columns, [[row]]
        if value.ndim == 2:
            kept += [largest(value[0] if step.axes[1] in KEY_AXES else abs(value[0]))]
            value, is_cut = value[:, kept[1]], len(kept[1]) < step.value.shape[1]
            if columns or is_cut:
                columns = tuple(columns[n] if columns else str(n) for n in kept[1])
        elif columns:
            columns = (columns[row],)
        return replace(
            step, value=value, columns=columns, whole=step.value.shape,
            rows=step.rows and (step.rows[row],),
            hidden=None if step.hidden is None else step.hidden[np.ix_(*kept)],
            printed=tuple(
                replace(c, index=tuple(k.index(n) for k, n in zip(kept, c.index, strict=True)))
                for c in step.printed
                if all(n in k for k, n in zip(kept, c.index, strict=True))
            ),
        )  # fmt: skip

    def number(self, step: Step, axis: int, label: str) -> int | None:
        """The number of the row (axis 0) or column with this label, or number; None: no such.

        Raises
        ------
        ValueError
            The label is there twice.
        """
        labels = [step.rows, step.columns][-step.value.ndim :][axis] or ()
        found = [n for n, name in enumerate(labels) if name == label]
        if len(found) > 1:
            raise ValueError(
                f"{label!r} is there {len(found)} times, at {', '.join(map(str, found))}: give the "
                f"number of the one that is meant"
            )
        if found or not (label.isascii() and label.isdigit()):
            return found[0] if found else None
        number = int(label) - self.start(step.name, step.axes[-step.value.ndim :][axis])
        return number if 0 <= number < step.value.shape[axis] else None

    @cached_property
    def by_name(self) -> dict[str, tuple[Step, ...]]:
        """The steps of every name, one for each batch entry and head, whatever ``only`` says."""
        return {name: tuple(self._split(name)) for name in self}

    def drawn(self, drawing: str) -> tuple[Step, ...]:
        """The steps from which one of ``DRAWINGS`` is made; none where it is not to be shown."""
        if not self.only and (self.cell or self.query) and not (self.query and drawing == "picks"):
            return ()
        if self.query and drawing == "heatmap" and drawing not in self.only:
            return ()  # of all queries
        steps = self._of_head() if drawing in self.only else self.steps
        return tuple(step for step in steps if not step.is_blank)

    def _of_head(self) -> tuple[Step, ...]:
        """Every step; of the heads only the chosen one, with the keys and values that it reads."""
        every = [step for name in self for step in self.by_name[name]]
        if self.head is None:
            return tuple(every)
        heads = {step.head for step in every if step.head is not None}
        if not heads and self.head == 0:
            return tuple(every)
        if self.head not in heads:
            which = {0: "one", 1: f"head {max(heads, default=0)}"}.get(len(heads))
            here = f"there is only {which}" if which else f"the heads are 0 to {max(heads)}"
            raise ValueError(f"no head {self.head} here: {here}")
        return tuple(step for step in every if self.belongs(step, self.head))

    def belongs(self, step: Step, head: int | None) -> bool:
        """Whether ``step`` is one of query head ``head``, or of all, or a key or value it reads."""
        if step.kv_head is None:
            return step.head in (None, head)
        numbers = {other.kv_head or 0 for other in self.by_name[step.name]}
        if step.name in self.kept and len(numbers) == 1:  # with the one head that reads it
            return head is not None
        group = max(1, (self.num_query_heads(step.name) or 1) // (1 + max(numbers)))
        return head is not None and head // group == step.kv_head

    def _check_names(self) -> None:
        """Refuse a name in ``only`` and ``blank`` that no step has, and say which it might be."""
        if not self.only and not self.blank:
            return
        every = [step for steps in self.by_name.values() for step in steps]
        known = dict.fromkeys(name for step in every for name in sorted(step.names))
        for name in (*self.only, *self.blank):
            if name in known or (name in DRAWINGS and name not in self.blank):
                continue
            from difflib import get_close_matches  # here: nothing else of a start needs it

            # What stands before a head or run may be there without it.
            plain = re.split(r"[,·\[]", name[:60])[0].strip().lower()
            exact = [plain] if plain in {*known, *DRAWINGS} else []
            near = exact or get_close_matches(name[:60], [*known, *DRAWINGS], 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            stages = (re.sub(r"\[[^=]*\]", "", name) for name in self)  # the base chooses all
            shown = dict.fromkeys(re.sub(r"=\d+", "=…", name) for name in stages)
            raise ValueError(f"no step {name!r} here: {meant}the steps are {', '.join(shown)}")

    @property
    def legend(self) -> dict[str, str]:
        """What the letters of the axes shown mean."""
        shown = {
            letter for s in self.steps for axis in s.axes for letter in re.findall(r"\w+", axis)
        }
        return {letter: meaning for letter, meaning in AXES.items() if letter in shown}

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The whole array of each step shown, all heads that are shown together."""
        found = {}
        for name, steps in itertools.groupby(self.steps, key=lambda step: step.name):
            shown = list(steps)
            sizes = (
                len({getattr(s, key) for s in shown} - {None})
                for key in ("batch", "kv_head" if shown[0].head is None else "head")
            )
            lead = [size for size in sizes if size]
            found[name] = np.stack([s.value for s in shown]).reshape((*lead, *shown[0].value.shape))
        return found

    def _has(self, name: str) -> bool:
        return name in self._values or name in self.computed

    def _entry(self, name: str) -> Entry:
        base = name.partition("[")[0]
        known = entry(name)
        if base == "output" and self._has(_beside(name, "concat")):  # the heads' results, projected
            known = entry("projected")
        elif base == "output" and (
            not self._has(_beside(name, "weights")) or name == "output[tiled]"
        ):
            known = entry("normalised")
        elif base == "x" and self._has(_beside(name, "wpe")) and not self._has("embedded"):
            known = known._replace(made=entry("embedded").made)
        prefix = base.removesuffix("normed")
        if prefix != base and self._has(_beside(name, f"{prefix}mean_square")):
            known = entry(f"{prefix}rms_normed")
        elif base == "logits" and self._has(_beside(name, "uncapped_logits")):
            known = entry("capped_logits")
        if name in self.given or (base in ("q", "k", "v") and not self._has(_beside(name, "x"))):
            return known._replace(formula=known.symbol, tex=known.tex_symbol, made=())
        for old, new in self._as_computed(name).items():
            known = known._replace(
                formula=known.formula.replace(old, new[0]), tex=known.tex.replace(old, new[1])
            )
        return known

    def _as_computed(self, name: str) -> dict[str, tuple[str, str]]:
        """What a formula, plain and in TeX, has instead of the catalogue's symbols."""
        base = name.partition("[")[0].removesuffix("_combined")
        letter = {"q": "q", "k": "k", "v": "v", "output": "o", "gate": "g"}.get(base)
        changes = {}
        if base == "row_sum" and self._has(_beside(name, "sinks")):
            changes["Σ_j P_ij"] = changes[r"\sum_j P_{ij}"] = (
                "Σ_j P_ij + exp(sink - m_i)", r"\sum_j P_{ij} + e^{\mathrm{sink} - m_i}"
            )  # fmt: skip
        if base in ("k", "v") and self._has(_beside(name, "context")):
            context = entry("context")
            changes["X"] = context.symbol, context.tex_symbol
        elif base in NORMALISED and self._has(_beside(name, NORMALISED[base][1])):
            term, normed = NORMALISED[base]
            changes[term] = entry(normed).symbol, entry(normed).tex_symbol
        if base == "logits" and not self._has(_beside(name, "final_normed")):
            changes["X'"] = "X", "X"
        if letter and self._has(_beside(name, f"b_{letter}")):
            added = f"W_{letter} + b_{letter}"
            changes[f"W_{letter}"] = added, added
        return changes

    def _axes(self, name: str) -> tuple[str, ...]:
        """Names of the axes that the kept array has; a 2-D input has no batch axis to name."""
        ndim = self._values[name].ndim
        named = self._entry(name).axes
        return (tuple(f"axis {n}" for n in range(ndim)) + named)[-ndim:] if ndim else ()

    def _split(self, name: str) -> Iterator[Step]:
        value, axes = self._values[name], self._axes(name)
        split = [n for n, axis in enumerate(axes) if axis in ("B", "H", "Hkv")]
        shared = "Hkv" in axes and self.num_query_heads(name) not in (
            value.shape[axes.index("Hkv")], None
        )  # fmt: skip
        kind, numbers = self.kept.get(name, ("kv_head" if shared else "head", None))
        masked = SCORES_OF.get(name.partition("[")[0], "")
        scores = self._values.get(_beside(name, masked), np.empty(0))
        for index in itertools.product(*(range(value.shape[n]) for n in split)):
            at: list[Any] = [slice(None)] * value.ndim
            place: dict[str, int | None] = {}
            for n, i in zip(split, index, strict=True):
                at[n] = i
                key = {"B": "batch", "H": "head", "Hkv": kind}[axes[n]]
                place[key] = i if value.shape[n] > 1 else None
                if numbers and key == kind:
                    place[key] = numbers[i]
            kept = tuple(axis for n, axis in enumerate(axes) if n not in split)
            hidden = np.isneginf(scores[tuple(at)]) if scores.shape == value.shape else None
            if name in self.hidden:
                hidden = self.hidden[name][tuple(at)]
            yield self._step(name, value[tuple(at)], kept, place, hidden)

    def num_query_heads(self, name: str = "") -> int | None:
        """The number of query heads beside the step ``name``, None where there are no queries."""
        for query in (_beside(name, "q"), "q", "Q[i=0]"):
            if query in self.kept:
                return self.num_heads
            if query in self:
                return int(self._values[query].shape[self._axes(query).index("H")])
        return self.num_heads

    def _step(
        self, name: str, value: NDArray[Any], axes: tuple[str, ...],
        place: dict[str, int | None], hidden: NDArray[np.bool_] | None,
    ) -> Step:  # fmt: skip
        known = self._entry(name)
        note = self.notes.get(f"{name}, head {place.get('head')}", self.notes.get(name, ""))
        function = name.replace("modified", "score_mod", 1).replace("masked", "mask_mod", 1)
        is_written = function != name and function in self._sources
        written = f"The function is: {self._sources[function]}" if is_written else ""
        parts = (known.sentence, _row_sums(name, value), self._unseen(name, value), written, note)
        note = " ".join(part for part in parts if part)
        matrices = [p for p in self.printed if p.step == name and p.head == place.get("head")]
        labels = [
            self._axis_labels(name, axis, size)
            for axis, size in zip(axes, value.shape, strict=True)
        ]
        rows, columns = [None, None, *labels][-2:]
        printed = tuple(c for matrix in matrices for c in matrix.compare(value))
        step = Step(
            name=name, symbol=known.symbol, tex_symbol=known.tex_symbol, axes=axes,
            formula=known.formula, tex=known.tex, note=note, source=known.source, value=value,
            rows=rows, columns=columns, hidden=hidden, printed=printed, made=known.made,
            is_blank=False, whole=(), **place,
        )  # fmt: skip
        if not step.names & set(self.blank):
            return step
        blank = np.full(value.shape, np.nan)
        return replace(step, value=blank, hidden=None, printed=(), is_blank=True)

    def _unseen(self, name: str, value: NDArray[Any]) -> str:
        """What the largest score of a row without any is, in words; empty elsewhere."""
        sums = self._values.get(_beside(name, "row_sum"))
        if name.partition("[")[0] != "row_max" or sums is None or (sums != 0).all():
            return ""
        return "A query that sees no key has 0, by convention."

    def start(self, name: str, axis: str) -> int:
        """The number of the first token along an axis of the step ``name``: a block's, or 0."""
        block = BLOCK.search(name)
        if axis not in ("B_r", "B_c") or block is None or self.blocks is None:
            return 0
        n = ("B_r", "B_c").index(axis)
        return int(block[n + 1]) * self.blocks[n]

    def _axis_labels(self, name: str, axis: str, size: int) -> tuple[str, ...] | None:
        """Labels along one axis: tokens, or their numbers; None where an axis counts none."""
        start = self.start(name, axis)
        if axis in ("B_r", "B_c"):
            if BLOCK.search(name) is None or self.blocks is None:
                return None
            axis = "Lq" if axis == "B_r" else "Lk"
        if axis not in (*TOKEN_AXES, *self.labels):
            return None
        own = self.labels.get(_beside(name, axis))
        labels = (self.labels.get(axis, ()) if own is None else own)[start : start + size]
        if axis not in TOKEN_AXES:
            return labels if len(self.labels[axis]) == size else None
        unnamed = UNNAMED.get(axis, "")
        return (
            labels if len(labels) == size else tuple(f"{unnamed}{start + n}" for n in range(size))
        )


def _beside(name: str, base: str) -> str:
    """The step ``base`` of the same variant: ``x[encoder]`` beside ``q[encoder]``."""
    return base + name[len(name.partition("[")[0]) :]


def largest(row: NDArray[Any]) -> list[int]:
    """The places of all entries of ``row``, in order, or of the ``MOST`` largest of a long one.

    >>> largest(np.zeros(3)), largest(np.arange(40))[:3]
    ([0, 1, 2], [24, 25, 26])
    """
    if len(row) <= LONGEST_ROW:
        return list(range(len(row)))
    return sorted(np.argsort(-row, kind="stable")[:MOST].tolist())


def _row_sums(name: str, value: NDArray[Any]) -> str:
    """What the rows of these weights sum to, in words; empty for any other step."""
    if name.partition("[")[0] != "weights" or not value.size:
        return ""
    sums = value.sum(axis=-1)
    kinds = {
        "A row sums to 1.": np.isclose(sums, 1, atol=1e-3),
        "A query that sees no key has a row of zeros.": sums == 0,
    }
    said = [sentence for sentence, rows in kinds.items() if rows.any()]
    if not np.logical_or.reduce(list(kinds.values())).all() and np.isfinite(sums).all():
        said.append("The rest of each row goes to its sink.")
    return " ".join(said)


def printable(text: str) -> str:
    """Return ``text`` with an escape for each character that acts and is not seen.

    A terminal obeys control characters, bidirectional ones show the text after them in another
    order, and XML does not allow some at all.

    >>> print(printable("a\\x1b[2J \\u202eb"))
    a\\x1b[2J \\u202eb
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if (category(c) in UNSEEN and c not in JOINERS) or c in NOT_IN_XML
        else c
        for c in text
    )


def token_labels(
    queries: Iterable[str], keys: Iterable[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Label the axes that count tokens; ``keys`` are the same tokens unless given.

    >>> token_labels(["cat", "sat"])["Lk"]
    ('cat', 'sat')
    """
    queries = tuple(queries)
    keys = queries if keys is None else tuple(keys)
    return {"L": queries, "Lq": queries, "Lk": keys, "Lc": keys}
