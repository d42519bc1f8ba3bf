"""Record a run: a tap that stores each intermediate array, and facts about the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain.labels import printable
from minimha.explain.printed import PrintedMatrix


@dataclass(eq=False)
class Record:
    """The recorded arrays of a run by name, in order of computation, and facts about the run.

    ``Trace`` documents the attributes.
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
    values: dict[str, NDArray[Any]] = field(default_factory=dict, init=False, repr=False)
    functions: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.example, self.source = printable(self.example), printable(self.source)
        self.labels = {axis: tuple(map(printable, names)) for axis, names in self.labels.items()}

    def __call__(self, name: str, value: Any) -> Any:
        """Store a read-only copy of ``value`` under ``name`` and return ``value`` itself.

        If ``value`` is a string, it is the source code of a ``score_mod`` or ``mask_mod``, which is
        shown in a note. Raise ValueError if ``name`` already has an array.
        """
        if isinstance(value, str):
            self.functions[name] = value
            return value
        if name in self.values:
            raise ValueError(
                f"this trace already holds {name!r}: a trace follows one run, use a new one"
            )
        kept = np.array(value)
        kept.setflags(write=False)
        self.values[name] = kept
        return value

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the computation."""
        return iter(self.values)

    def has(self, name: str) -> bool:
        """Return whether the run computed the array ``name``, even if this record lacks it."""
        return name in self.values or name in self.computed
