"""The smallest problem that fails as a larger one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fuzz.cases import Case
from fuzz.run import check

AXES = {"q": "BHiD", "k": "BGjD", "v": "BGjE", "attn_mask": "BHij", "attn_bias": "BHij",
        "key_indices": "BGiK", "k_scale": "BGj", "v_scale": "BGj", "alibi_slopes": "H",
        "sinks": "H", "q_offset": "B", "kv_lengths": "B"}  # fmt: skip


def reduced(case: Case, backend: str) -> Case:
    """``case`` with all left out that its first fault does not need."""
    kind = _kind(check(case, backend))
    found = bool(kind)
    while found:
        found = False
        for smaller in _smaller(case):
            try:
                is_same = _kind(check(smaller, backend)) == kind
            except (ValueError, TypeError):  # no legal problem
                continue
            if is_same:
                case, found = smaller, True
                break
    return case


def _kind(faults: list[str]) -> str:
    return faults[0].partition(":")[0] if faults else ""


def _smaller(case: Case) -> Iterator[Case]:
    if case.errstate != "ignore":
        yield replace(case, errstate="ignore")
    if case.form != "batch":
        yield replace(case, form="batch")
    if case.layouts:
        yield replace(case, layouts={})
        for name in case.layouts:
            yield replace(case, layouts={n: x for n, x in case.layouts.items() if n != name})
    for name in case.options:
        yield replace(case, options={n: x for n, x in case.options.items() if n != name})
    for name in sorted(set(case.arrays) - set("qkv")):
        yield replace(case, arrays={n: x for n, x in case.arrays.items() if n != name})
    sizes = {axis: n for x in "qkv" for axis, n in zip(AXES[x], case.arrays[x].shape, strict=True)}
    group = sizes["H"] // sizes["G"]
    for axis in "BGijDE":
        n = sizes[axis]
        for start, stop in ((0, n // 2), (n // 2, n), (1, n), (0, n - 1)):
            if 0 < stop - start < n:
                yield _cut(case, axis, slice(start, stop), group)
    if group > 1:
        arrays = {
            name: array[:, ::group] if name == "q" else array
            for name, array in case.arrays.items()
            if "H" not in AXES[name] or name == "q"
        }
        yield replace(case, arrays=arrays)
    for name in "qkv":
        array = case.arrays[name]
        is_finite = np.isfinite(array)
        if len(set(array[is_finite].tolist()) | {0.0, 1.0}) > 2:
            for value in (0, 1):
                simple = np.where(is_finite, array.dtype.type(value), array)
                yield replace(case, arrays=case.arrays | {name: simple})


def _cut(case: Case, axis: str, part: slice, group: int) -> Case:
    """``case`` with a part of one axis; head axis H follows the axis G of key/value heads."""
    arrays = {}
    for name, array in case.arrays.items():
        axes = AXES[name][-array.ndim :]
        heads = slice(part.start * group, part.stop * group)
        for letter, cut in ((axis, part), ("H", heads if axis == "G" else slice(None))):
            if letter in axes and array.shape[axes.index(letter)] > 1:
                array = array[(slice(None),) * axes.index(letter) + (cut,)]
        if name == "key_indices" and axis == "j":
            is_left = (array >= part.start) & (array < part.stop)
            array = np.where(is_left, array - part.start, -1)
        arrays[name] = array
    return replace(case, arrays=arrays)
