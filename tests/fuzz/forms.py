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
from minimha import BlockMask, block_mask

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
    scales = [name for name in ("k_scale", "v_scale") if name in arrays]
    arrays["q"] = _end_to_end(case.arrays["q"])
    arrays["cu_seqlens_q"] = np.cumsum([0, *(number for _, _, number in sequences)])
    arrays["q_offset"] = np.array([offsets[b] + first for b, first, _ in sequences])
    its_lengths = np.array([lengths[b] for b, _, _ in sequences])
    if case.form == "packed":
        arrays["cu_seqlens_k"] = np.cumsum([0, *its_lengths])
        for name in ["k", "v", *scales]:
            parts = [case.arrays[name][b, :, : lengths[b]] for b, _, _ in sequences]
            arrays[name] = np.concatenate(parts, axis=1)[None]
        room = np.array(lengths)
    else:
        pooled = {name: case.arrays[name] for name in ["k", "v", *scales]}
        arrays |= _in_pages(rng, pooled, lengths)
        room = np.full(B, arrays["block_table"].shape[1] * arrays["k"].shape[2])
        arrays["block_table"] = arrays["block_table"][[b for b, _, _ in sequences]]
        arrays["kv_lengths"] = its_lengths
    for name in {"attn_mask", "attn_bias"} & set(arrays):
        pairs = np.broadcast_to(arrays[name], (B, H, Lq, Lk))[..., : room.max(initial=0)]
        arrays[name] = _end_to_end(pairs)
    if "key_indices" in arrays:
        picks = arrays["key_indices"]
        picks = picks[(None,) * (4 - picks.ndim)]
        picks = np.broadcast_to(picks, (B, picks.shape[1], Lq, picks.shape[3]))
        arrays["key_indices"] = _end_to_end(np.where(picks < room[:, None, None, None], picks, -1))
    if "mask_mod" in options and rng.random() < 0.5 and abs(arrays["q_offset"]).max() < FAR // 2:
        options["mask_mod"] = _with_blocks(options["mask_mod"], sequences, arrays["q_offset"], Lk)

    def back(output: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            output.reshape(H, B, Lq, Dv).swapaxes(0, 1), lse.reshape(H, B, Lq).swapaxes(0, 1)
        )  # fmt: skip

    return replace(case, arrays=arrays, options=options, layouts={}, rank=4, form="batch"), back


def _end_to_end(x: np.ndarray) -> np.ndarray:
    """The batch entries of ``x`` (B, H, L, any) one after another along L."""
    return np.concatenate(list(x), axis=1)[None]


def _with_blocks(
    mask_mod: Any, sequences: list[tuple[int, int, int]], offsets: np.ndarray, Lk: int
) -> BlockMask:
    """A ``BlockMask`` that covers the queries of all sequences."""
    first, stop = offsets.min(), (offsets + [number for _, _, number in sequences]).max()
    return block_mask(mask_mod, int(stop - first), Lk, q_offset=int(first))


def _in_pages(
    rng: np.random.Generator, arrays: dict[str, np.ndarray], lengths: list[int]
) -> dict[str, Any]:
    """The keys and values of each entry in a pool of pages in random order, garbage elsewhere."""
    size = int(rng.choice([1, 7, 16, 64, 300]))
    needed = [-(-length // size) for length in lengths]
    order = rng.permutation(sum(needed) + 1)
    table = np.full((len(lengths), max(needed) + 1), -1)
    pools = {
        name: np.full((len(order), x.shape[1], size, *x.shape[3:]), _garbage(x)).astype(x.dtype)
        for name, x in arrays.items()
    }
    for b, length in enumerate(lengths):
        table[b, : needed[b]], order = order[: needed[b]], order[needed[b] :]
        for page, first in enumerate(range(0, length, size)):
            stop = min(first + size, length)
            for name, x in arrays.items():
                pools[name][table[b, page], :, : stop - first] = x[b, :, first:stop]
    return pools | {"block_table": table}


def _garbage(array: np.ndarray) -> float:
    """What may lie where no key is: NaN, or the largest int8, or a scale that is legal."""
    if array.ndim == 3:
        return 1.0
    return 127.0 if array.dtype.kind == "i" else np.nan
