"""Split each traced array into steps: one matrix for each batch entry and head."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain.catalogue import base_of, beside
from minimha.explain.entries import entry_of
from minimha.explain.labels import axis_labels, first_token
from minimha.explain.printed import Comparison
from minimha.explain.record import Record

HEAD_AXES = ("B", "H", "Hkv")  # along which an array is split into steps
SCORES_OF = {"weights": "masked", "P": "S"}  # -∞ in the latter shows which weights a mask hides


@dataclass(frozen=True, eq=False)
class Step:
    """A traced matrix of one batch entry and head, with its formula, labels and notes.

    Attributes
    ----------
    name, symbol, formula, note, source : str
    tex_symbol, tex : str
        Symbol and formula in TeX, for pages.
    axes : tuple of str
        The name of each axis of ``value``.
    value : ndarray, read-only
    batch, head, kv_head : int or None
        The indices of this matrix in the traced array; None along an axis of length 1. K and V have
        ``kv_head`` if several query heads share a key/value head.
    rows, columns : tuple of str, or None
        Labels of the last two axes, or None for an axis without labels.
    hidden : ndarray of bool or None
        True for the weights of masked keys; None if there is no mask.
    printed : tuple of Comparison
        The numbers that a document prints for this step.
    made : tuple of str
        The operation and the names of its operands, as in the catalogue; empty for an input.
    is_blank : bool
        Whether the reader of a worksheet must find the numbers; ``value`` is then all NaN.
    whole : tuple of int
        The shape of the matrix of which ``value`` is a part; empty if ``value`` is the whole.
    first : tuple of int
        The index of the first token along each axis: 0, except in a step for one block.
    group : int
        The number of query heads that share ``kv_head``, or 0 if all query heads share it.
    relation : str
        The head's label, which names what the head links: "cat → sleeps". "" without a label.
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
    first: tuple[int, ...] = ()
    group: int = 0
    relation: str = ""

    @property
    def size(self) -> str:
        """The shape as text: ``3 × 3``, or for a part of a matrix ``1 of 64 × 16 of 64``."""
        pairs = zip(self.value.shape, self.whole or self.value.shape, strict=True)
        return " × ".join(str(n) if n == of else f"{n} of {of}" for n, of in pairs)

    @property
    def base(self) -> str:
        """The name without the stage in brackets: ``S`` for ``S[i=0,j=1]``."""
        return base_of(self.name)

    @property
    def stage(self) -> str:
        """The stage, which follows the name in brackets: ``encoder`` for ``q[encoder]``."""
        return self.name.partition("[")[2].rstrip("]")

    @property
    def place(self) -> str:
        """The batch entry and the head as text, such as ``head 1``; empty if there is only one."""
        parts = (("batch", self.batch), ("head", self.head), ("key/value head", self.kv_head))
        return ", ".join(f"{word} {number}" for word, number in parts if number is not None)

    @property
    def title(self) -> str:
        """The name with batch entry and head: ``weights, head 1``."""
        return f"{self.name}, {self.place}" if self.place else self.name

    def titled(self, words: str) -> str:
        """Return ``words`` followed by stage, batch entry and head: ``masked, encoder, head 1``."""
        return ", ".join(part for part in (words, self.stage, self.place) if part)

    @property
    def names(self) -> set[str]:
        """All names that select this step, with or without stage, batch entry and head."""
        return {self.name, self.base, self.title, self.titled(self.base)}

    def number(self, axis: int, label: str) -> int | None:
        """Return the index along ``axis`` (0 row, 1 column) of the label or token number ``label``.

        Return None if it is absent. Raise ValueError if two or more rows or columns have the label.
        """
        labels = [self.rows, self.columns][-self.value.ndim :][axis] or ()
        found = [n for n, name in enumerate(labels) if name == label]
        if len(found) > 1:
            raise ValueError(
                f"{label!r} is there {len(found)} times, at {', '.join(map(str, found))}: give the "
                f"number of the one that is meant"
            )
        if found or not (label.isascii() and label.isdigit()):
            return found[0] if found else None
        number = int(label) - self.first[axis]
        return number if 0 <= number < self.value.shape[axis] else None

    def is_of(self, head: int | None) -> bool:
        """Return whether query head ``head`` computes or uses this step, or all heads share it.

        If ``head`` is None, the step must be one that all heads share.
        """
        if self.kv_head is None:
            return self.head in (None, head)
        return head is not None and (not self.group or head // self.group == self.kv_head)


def steps_of(record: Record, name: str) -> Iterator[Step]:
    """Yield the steps of the recorded array ``name``, one for each batch entry and head."""
    value, axes = record.values[name], axes_of(record, name)
    split = [n for n, axis in enumerate(axes) if axis in HEAD_AXES]
    num_heads = num_query_heads(record, name)
    num_kv_heads = value.shape[axes.index("Hkv")] if "Hkv" in axes else None
    is_shared = num_kv_heads is not None and num_heads not in (num_kv_heads, None)
    kind, numbers = record.kept.get(name, ("kv_head" if is_shared else "head", None))
    heads = numbers or range(num_kv_heads or 1)
    group = 0 if numbers and len(heads) == 1 else max(1, (num_heads or 1) // (1 + max(heads)))
    scores = record.values.get(beside(name, SCORES_OF.get(base_of(name), "")), np.empty(0))
    for index in itertools.product(*(range(value.shape[n]) for n in split)):
        at: list[Any] = [slice(None)] * value.ndim
        place: dict[str, Any] = {"group": group}
        for n, i in zip(split, index, strict=True):
            at[n] = i
            key = {"B": "batch", "H": "head", "Hkv": kind}[axes[n]]
            place[key] = i if value.shape[n] > 1 else None
            if numbers and key == kind:
                place[key] = numbers[i]
        if name in record.hidden:
            place["hidden"] = record.hidden[name][tuple(at)]
        elif scores.shape == value.shape:
            place["hidden"] = np.isneginf(scores[tuple(at)])
        kept = tuple(axis for n, axis in enumerate(axes) if n not in split)
        yield _step(record, name, value[tuple(at)], kept, place)


def axes_of(record: Record, name: str) -> tuple[str, ...]:
    """Return the axis names of the recorded array ``name``, such as ("B", "H", "Lq", "Lk")."""
    ndim = record.values[name].ndim
    named = entry_of(record, name).axes
    return (tuple(f"axis {n}" for n in range(ndim)) + named)[-ndim:] if ndim else ()


def num_query_heads(record: Record, name: str = "") -> int | None:
    """Return the number of query heads that belong to the traced array ``name``.

    Returns None if the record does not show the number.
    """
    for query in (beside(name, "q"), "q", "Q[i=0]"):
        if query in record.kept:
            return record.num_heads
        if query in record:
            shape = zip(axes_of(record, query), record.values[query].shape, strict=True)
            return next((size for axis, size in shape if axis == "H"), 1)
    return record.num_heads


def _step(
    record: Record, name: str, value: NDArray[Any], axes: tuple[str, ...], place: dict[str, Any]
) -> Step:
    known, head = entry_of(record, name), place.get("head")
    batch = f", batch {place.get('batch')}"
    names = {key.removesuffix(batch): words for key, words in record.labels.items()}
    labels = [
        axis_labels(name, axis, size, names, record.blocks)
        for axis, size in zip(axes, value.shape, strict=True)
    ]
    rows, columns = [None, None, *labels][-2:]
    relations = record.labels.get("H", ())
    matrices = (p for p in record.printed if p.step == name and p.head == head)
    return Step(
        name=name, symbol=known.symbol, tex_symbol=known.tex_symbol, axes=axes,
        formula=known.formula, tex=known.tex, note=_note(record, name, value, head),
        source=known.source, value=value, rows=rows, columns=columns,
        printed=tuple(c for matrix in matrices for c in matrix.compare(value)), made=known.made,
        first=tuple(first_token(name, axis, record.blocks) for axis in axes),
        relation="" if head is None or head >= len(relations) else relations[head], **place,
    )  # fmt: skip


def _note(record: Record, name: str, value: NDArray[Any], head: int | None) -> str:
    parts = [entry_of(record, name).sentence, _row_sums(name, value)]
    sums = record.values.get(beside(name, "row_sum"))
    if base_of(name) == "row_max" and sums is not None and (sums == 0).any():
        parts.append("A query that sees no key has 0, by convention.")
    function = name.replace("modified", "score_mod", 1).replace("masked", "mask_mod", 1)
    if function != name and function in record.functions:
        parts.append(f"The function is: {record.functions[function]}")
    parts.append(record.notes.get(f"{name}, head {head}", record.notes.get(name, "")))
    return " ".join(part for part in parts if part)


def _row_sums(name: str, value: NDArray[Any]) -> str:
    """Return a sentence about the row sums of weights, or "" for any other step."""
    if base_of(name) != "weights" or not value.size:
        return ""
    sums = value.sum(axis=-1)
    kinds = {
        "A row sums to 1.": np.isclose(sums, 1, atol=1e-3),
        "A query that sees no key has a row of zeros.": sums == 0,
    }
    found = [sentence for sentence, rows in kinds.items() if rows.any()]
    if not np.logical_or.reduce(list(kinds.values())).all() and np.isfinite(sums).all():
        found.append("The rest of each row goes to its sink.")
    return " ".join(found)
