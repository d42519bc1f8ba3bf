"""A problem whose batch entries are packed sequences, or have their keys in pages of one pool.

The queries of an entry are cut into sequences at random, each with the keys of the entry, so that
what must come out is known from the problem as it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fuzz.cases import FAR, Case

FORMS = ("batch", "packed", "paged")
Back = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def presented(case: Case) -> tuple[Case, Back]:
    """The case as a backend gets it, and what makes of its result one for the case."""
    leading = (None,) * (4 - case.rank)
    if case.form == "batch":
        return case, lambda output, lse: (output[leading], lse[leading])
    rng = np.random.default_rng(case.arrays["q"].shape)
    B, H, Lq, _ = case.arrays["q"].shape
    Lk, Dv = case.arrays["v"].shape[2:]
    given = case.arrays | case.options
    offsets = np.broadcast_to(given.get("q_offset", 0), B).tolist()
    lengths = np.broadcast_to(given.get("kv_lengths", Lk), B).tolist()
    sequences = []  # the entry, the first query and the number of queries
    for b, offset in enumerate(offsets):
        is_far = abs(offset) > FAR // 2
        cuts = [] if is_far else sorted(rng.integers(0, Lq + 1, rng.integers(0, 3)).tolist())
        sequences += [(b, x, y - x) for x, y in zip([0, *cuts], [*cuts, Lq], strict=True)]
    arrays = {name: x for name, x in case.arrays.items() if name not in ("q_offset", "kv_lengths")}
    options = {n: x for n, x in case.options.items() if n not in ("q_offset", "kv_lengths")}
    arrays["q"] = np.concatenate(list(case.arrays["q"]), axis=1)[None]
    arrays["cu_seqlens_q"] = np.cumsum([0, *(number for _, _, number in sequences)])
    arrays["q_offset"] = np.array([offsets[b] + first for b, first, _ in sequences])
    its_lengths = np.array([lengths[b] for b, _, _ in sequences])
    if case.form == "packed":
        arrays["cu_seqlens_k"] = np.cumsum([0, *its_lengths])
        for name in "kv":
            parts = [case.arrays[name][b, :, : lengths[b]] for b, _, _ in sequences]
            arrays[name] = np.concatenate(parts, axis=1)[None]
    else:
        arrays |= _in_pages(rng, case.arrays["k"], case.arrays["v"], lengths)
        arrays["block_table"] = arrays["block_table"][[b for b, _, _ in sequences]]
        arrays["kv_lengths"] = its_lengths

    def back(output: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            output.reshape(H, B, Lq, Dv).swapaxes(0, 1), lse.reshape(H, B, Lq).swapaxes(0, 1)
        )  # fmt: skip

    return replace(case, arrays=arrays, options=options, layouts={}, rank=4, form="batch"), back


def _in_pages(
    rng: np.random.Generator, k: np.ndarray, v: np.ndarray, lengths: list[int]
) -> dict[str, Any]:
    """The keys and values of each entry in a pool of pages in random order, garbage elsewhere."""
    size = int(rng.choice([1, 7, 16, 64, 300]))
    needed = [-(-length // size) for length in lengths]
    order = rng.permutation(sum(needed) + 1)
    table = np.full((len(lengths), max(needed) + 1), -1)
    pools = {
        name: np.full((len(order), x.shape[1], size, x.shape[3]), np.nan).astype(x.dtype)
        for name, x in (("k", k), ("v", v))
    }
    for b, length in enumerate(lengths):
        table[b, : needed[b]], order = order[: needed[b]], order[needed[b] :]
        for page, first in enumerate(range(0, length, size)):
            stop = min(first + size, length)
            for name, x in (("k", k), ("v", v)):
                pools[name][table[b, page], :, : stop - first] = x[b, :, first:stop]
    return pools | {"block_table": table}
