"""Check the arguments of ``attention`` and fill in every default: the class ``Problem``.

Arrays are 4-D and of one dtype, and every option has its final form, so that equations and kernels
check nothing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import (
    as_floating,
    cast,
    compute_dtype,
    counted,
    flag,
    name_of,
    number,
    of_one_dtype,
    rectangular,
)
from minimha.equations.block_mask import BlockMask
from minimha.equations.functions import (
    WHOLE,
    Corner,
    Placed,
    Reading,
    checked,
    taken,
    visible_pairs,
)
from minimha.equations.sequences import ONE_PAGE, Sequences, check_pages, sequences_of
from minimha.equations.visibility import UNBOUNDED, sees

MAX_OFFSET = 1 << 31  # keeps position arithmetic far inside UNBOUNDED
Shape = tuple[int, int, int, int]


class Relative(NamedTuple):
    """A part's ``q_offset`` (B,), relative to the part's first key. Its range is not checked."""

    offset: NDArray[np.int64]


RANKS = {2: "(L, D)", 3: "(H, L, D)", 4: "(B, H, L, D)"}
MASK_SHAPES = "(Lq, Lk), or 4-D and broadcastable to (B, H, Lq, Lk)"


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked arguments of ``attention``, with every default filled in.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width.

    Attributes
    ----------
    q : ndarray of shape (B, H, Lq, D), ``dtype``
    k : ndarray of shape (B, Hkv, Lk, D), ``dtype``
    v : ndarray of shape (B, Hkv, Lk, Dv), ``dtype``
    left, right : int
        Query i sees keys from i + q_offset - left to i + q_offset + right; causal is right = 0.
    q_offset : ndarray of shape (B,), int64
    kv_lengths : ndarray of shape (B,), int64
        Number of filled keys; Lk by default.
    attn_mask : ndarray of shape (B, H, Lq, Lk), bool, or None
        True = may attend. A read-only view, broadcast from the argument.
    attn_bias : ndarray of shape (B, H, Lq, Lk), compute dtype, or None
    alibi_slopes, sinks : ndarray of shape (H,), compute dtype, or None
    scale : float
    softcap : float or None
    dtype : numpy.dtype
        The dtype of q, k, v and the output.
    compute : numpy.dtype
        The dtype of intermediates: float64 for float64, else float32. 16-bit numbers are widened
        when read, and the output is rounded once.
    rank : int
        Dimensions of the caller's arrays, 2 to 4.
    score_mod : callable ``score_mod(score, b, h, i, j) -> score``, or None
    mask_mod : callable ``mask_mod(b, h, i, j) -> bool``, which may be a ``BlockMask``, or None
    sequences : Sequences or None
        The rows of each sequence, if sequences are packed or keys are paged. Then ``q_offset`` and
        ``kv_lengths`` have one item per sequence. With pages, axis 0 of k and v counts pages, and
        Lk is the page size.
    readings : dict of str to Reading
        The code and captured values of ``score_mod`` and ``mask_mod``, by name, if given.
    corner : Corner
        The b, h and j that ``score_mod`` and ``mask_mod`` get for batch entry 0, head 0 and key 0.
        Not 0 if this problem is part of a larger problem, or one of several sequences.
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    left: int
    right: int
    q_offset: NDArray[np.int64]
    kv_lengths: NDArray[np.int64]
    attn_mask: NDArray[np.bool_] | None
    attn_bias: NDArray[Any] | None
    alibi_slopes: NDArray[Any] | None
    sinks: NDArray[Any] | None
    scale: float
    softcap: float | None
    dtype: np.dtype[Any]
    compute: np.dtype[Any]
    rank: int
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    sequences: Sequences | None = None
    corner: Corner = WHOLE
    readings: dict[str, Reading] = field(default_factory=dict)

    @classmethod
    def of(
        cls, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, is_causal: bool = False,
        q_offset: ArrayLike | None = None,
        window_size: tuple[int | None, int | None] | None = None,
        attn_mask: ArrayLike | None = None, attn_bias: ArrayLike | None = None,
        kv_lengths: ArrayLike | None = None, alibi_slopes: ArrayLike | None = None,
        scale: float | None = None, softcap: float | None = None, sinks: ArrayLike | None = None,
        score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
        cu_seqlens_q: ArrayLike | None = None, cu_seqlens_k: ArrayLike | None = None,
        block_table: ArrayLike | None = None,
    ) -> Problem:  # fmt: skip
        """Return the checked arguments of ``minimha.attention``; errors name the argument."""
        rank, (q4, k4, v4) = _arrays(q, k, v, is_paged=block_table is not None)
        shape = (*q4.shape[:3], k4.shape[2])
        compute, H = compute_dtype(q4.dtype), shape[1]
        sequences = sequences_of(q4.shape, k4.shape, cu_seqlens_q, cu_seqlens_k, block_table)
        if sequences is not None:
            _refuse_over_scores(attn_mask=attn_mask, attn_bias=attn_bias)
        lengths = lengths_of(kv_lengths, shape, sequences, len(k4))
        functions = taken(score_mod=score_mod, mask_mod=mask_mod)
        given = {name: checked(name, x.function) for name, x in functions.items()}
        left, right = _window(window_size)
        has_window = (left, right) != (UNBOUNDED, UNBOUNDED)
        if flag("is_causal", is_causal):
            right = 0
        options = {
            "is_causal": is_causal, "window_size": has_window,
            "alibi_slopes": alibi_slopes is not None,
        }  # fmt: skip
        positional = [*(name for name, is_given in options.items() if is_given), *given]
        offset = _offset(q_offset, shape, sequences, lengths, positional)
        if isinstance(given.get("mask_mod"), BlockMask):
            given["mask_mod"].check(shape, offset, has_sequences=sequences is not None)
        return cls(
            q=q4, k=k4, v=v4, left=left, right=right, q_offset=offset, kv_lengths=lengths,
            attn_mask=_mask(attn_mask, shape),
            attn_bias=_bias(attn_bias, shape, compute),
            alibi_slopes=_per_head("alibi_slopes", alibi_slopes, H, compute),
            sinks=_per_head("sinks", sinks, H, compute, may_be_none=True),
            scale=1 / math.sqrt(q4.shape[3]) if scale is None else number("scale", scale, compute),
            softcap=_softcap(softcap, compute),
            dtype=q4.dtype, compute=compute, rank=rank, sequences=sequences,
            corner=next((x.corner for x in functions.values()), WHOLE),
            readings={name: x.reading for name, x in functions.items()}, **given,
        )  # fmt: skip

    def each_sequence(self) -> Iterator[tuple[tuple[slice, slice, slice], Problem]]:
        """Yield (index, problem) for each sequence. The index selects its rows in q and results."""
        assert self.sequences is not None
        for s, length in enumerate(self.kv_lengths.tolist()):
            rows, one = self.sequences.rows(s), slice(s, s + 1)
            k, v = (self.sequences.keys(X, s, length) for X in (self.k, self.v))
            yield rows, replace(
                self, q=self.q[rows], k=k, v=v, q_offset=self.q_offset[one],
                kv_lengths=self.kv_lengths[one], sequences=None,
                corner=Corner(b=int(self.sequences.ids[s])),
            )  # fmt: skip

    def by_sequence(
        self, forward: Callable[[Problem, int], tuple[NDArray[Any], NDArray[Any]]]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output and log-sum-exp of all sequences. ``forward(problem, s)`` computes one."""
        O = np.empty((*self.q.shape[:3], self.v.shape[3]), self.compute)
        L = np.empty(self.q.shape[:3], self.compute)
        for s, (rows, problem) in enumerate(self.each_sequence()):
            O[rows], L[rows] = forward(problem, s)
        return O, L

    @property
    def num_queries(self) -> NDArray[np.int64]:
        """The number of queries in each sequence, or without sequences in each batch entry."""
        if self.sequences is None:
            return np.array([self.q.shape[2]] * len(self.q), np.int64)
        return self.sequences.queries[:, 2]

    @property
    def num_pairs(self) -> int:
        """The number of pairs of query and key, visible or not, in all sequences and heads."""
        B, H, Lq, _ = self.q.shape
        if self.sequences is None:
            return int(B * H * Lq * self.k.shape[2])
        return int(H * (self.sequences.queries[:, 2] @ self.kv_lengths))

    def visible(self, rows: slice, keys: slice) -> NDArray[np.bool_]:
        """Return the mask (B, 1 or H, rows, keys), True where a query of ``rows`` sees the key."""
        i = np.arange(rows.start, rows.stop)[:, None]
        j = np.arange(keys.start, keys.stop)
        q_offset, length = (x[:, None, None, None] for x in (self.q_offset, self.kv_lengths))
        visible: NDArray[np.bool_] = sees(i, j, q_offset, self.left, self.right, length)
        if self.attn_mask is not None:
            visible = visible & self.attn_mask[..., rows, keys]
        if self.attn_bias is not None:
            visible = visible & ~np.isneginf(self.attn_bias[..., rows, keys])
        if self.mask_mod is not None:
            shape = *self.q.shape[:2], len(i), len(j)
            visible = visible & visible_pairs(self.mask_mod, self.indices(rows, keys), shape)
        return visible

    def indices(self, rows: slice, keys: slice) -> tuple[NDArray[np.int64], ...]:
        """Return b, h, i and j of a grid of scores, as arrays that broadcast.

        A caller's functions get these. They count from ``corner``; i is a position among the keys.
        """
        (B, H), (first_b, first_h, first_key) = self.q.shape[:2], self.corner
        b = np.arange(first_b, first_b + B)[:, None, None, None]
        h = np.arange(first_h, first_h + H)[None, :, None, None]
        offset = self.q_offset[:, None, None, None] + first_key
        i = np.arange(rows.start, rows.stop)[:, None] + offset
        return b, h, i, np.arange(keys.start, keys.stop)[None, None, None] + first_key

    @cached_property
    def hides(self) -> bool:
        """True if an option may hide a key, so that the scores need a mask."""
        return (
            self.left < UNBOUNDED
            or self.right < UNBOUNDED
            or self.attn_mask is not None
            or self.mask_mod is not None
            or bool((self.kv_lengths < self.k.shape[2]).any())
            or (self.attn_bias is not None and bool(np.isneginf(self.attn_bias).any()))
        )

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The given functions by name. For a ``BlockMask`` it is the ``mask_mod`` inside."""
        given = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {
            name: function.mask_mod if isinstance(function, BlockMask) else function
            for name, function in given.items()
            if function is not None
        }

    @property
    def taken(self) -> dict[str, Placed]:
        """The given functions by name, as ``Placed`` with ``corner`` and captured values."""
        each = self.functions.items()
        return {name: Placed(x, self.corner, self.readings[name]) for name, x in each}

    @cached_property
    def contents(self) -> dict[str, Hashable]:
        """Map each function's name to its code and captured values, as one value to compare."""
        return {name: reading.contents for name, reading in self.readings.items()}

    def without_numbers(self, dtype: np.dtype[Any] | None = None) -> Problem:
        """Return a copy whose q, k and v are zeros that take no memory, in ``dtype`` if given."""
        q, k, v = (stand_in(x.shape, dtype or self.dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, dtype=dtype or self.dtype)

    def as_given(self, O: NDArray[Any], L: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output ``O`` and log-sum-exp ``L`` in the caller's rank, ``O`` in ``dtype``."""
        leading = (0,) * (4 - self.rank)
        return cast(O[leading], self.dtype), L[leading]


def stand_in(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that take no memory, for code that reads only their shape and dtype."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def factor_against_overflow(V: NDArray[Any], total: int) -> float:
    """Return a power of 2 to multiply weights by, so that no weighted sum of values overflows.

    ``V`` has the values, in the compute dtype. The weights of a query are not yet normalised, and
    add up to ``total`` at most. So a sum may overflow although the mean of the values does not.
    Returns 1 if no sum can overflow.
    """
    largest = abs(V).max(initial=0, where=np.isfinite(V))
    total *= 2  # a margin for rounding
    is_safe = total == 0 or largest <= np.finfo(V.dtype).max / total
    return 1.0 if is_safe else 2.0 ** -total.bit_length()


def _arrays(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, is_paged: bool
) -> tuple[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Return the rank, and 4-D q, k and v of one dtype; axis 0 of paged k and v counts pages."""
    rank, (q4, k4, v4) = of_one_rank(of_one_dtype(q=q, k=k, v=v))
    _check_shapes(q4, k4, v4, is_paged)
    return rank, (q4, k4, v4)


def of_one_rank(given: dict[str, NDArray[Any]]) -> tuple[int, list[NDArray[Any]]]:
    """Return the number of dimensions of q, k and v, which must be equal, and 4-D views."""
    rank = given["q"].ndim
    for name, array in given.items():
        if array.ndim not in RANKS:
            raise ValueError(
                f"{name_of(name)} has {counted(array.ndim, 'dimension')}, shape {array.shape}: "
                f"expected 2 (L, D), 3 (H, L, D) or 4 (B, H, L, D)"
            )
        if array.ndim != rank:
            Q, K, V = map(name_of, "qkv")
            raise ValueError(
                f"{name_of(name)} has {counted(array.ndim, 'dimension')}, shape {array.shape}, but "
                f"{Q} has {rank}: {Q}, {K} and {V} must all be {RANKS[rank]}"
            )
    return rank, [array[(None,) * (4 - rank)] for array in given.values()]


def _check_shapes(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], is_paged: bool) -> None:
    (B, H, _, D), (pages, Hkv, Lk, _) = q.shape, k.shape
    Q, K, V = map(name_of, "qkv")
    if is_paged and len(v) != pages:
        raise ValueError(
            f"{V} has {counted(len(v), 'page')} but {K} has {pages}: they must be equal"
        )
    for name, array in ((K, k), (V, v)):
        if array.shape[0] != B and not is_paged:
            raise ValueError(
                f"{name} has B={array.shape[0]} but {Q} has B={B}: batches must be equal"
            )
    if D == 0:
        raise ValueError(f"{Q} has D=0: the head width D must be at least 1")
    if k.shape[3] != D:
        raise ValueError(f"{K} has D={k.shape[3]} but {Q} has D={D}: a score is a product over D")
    if v.shape[2] != Lk:
        raise ValueError(f"{V} has Lk={v.shape[2]} but {K} has Lk={Lk}: every key needs one value")
    if v.shape[1] != Hkv:
        raise ValueError(
            f"{V} has {counted(v.shape[1], 'head')} but {K} has {Hkv}: they must be equal"
        )
    if H == 0 or Hkv == 0 or H % Hkv:
        raise ValueError(
            f"{K} has {counted(Hkv, 'head')} but {Q} has {H}: "
            + (f"H must be a multiple of Hkv (H={H}, Hkv={Hkv})" if H and Hkv else "0 is too few")
        )


def _softcap(value: Any, compute: np.dtype[Any]) -> float | None:
    if value is None:
        return None
    cap = number("softcap", value, compute)
    smallest = float(np.finfo(compute).tiny)
    if cap < smallest:
        raise ValueError(
            f"{name_of('softcap')} is {value!r}: expected a positive number, at least "
            f"{smallest:.1e}, or None for no cap"
        )
    return cap


def _window(window_size: Any) -> tuple[int, int]:
    """Return ``(left, right)``, where a side without a limit is ``UNBOUNDED``."""
    if window_size is None:
        return UNBOUNDED, UNBOUNDED
    sentence = "expected a pair (left, right) of counts of keys, None for a side without a limit"
    is_sequence = isinstance(window_size, (tuple, list)) or np.ndim(window_size) == 1
    if not is_sequence or len(window_size) != 2:
        raise ValueError(f"{name_of('window_size')} is {window_size!r}: {sentence}")
    for side in window_size:
        whole = isinstance(side, numbers.Integral) and not isinstance(side, bool)
        if side is not None and not whole:
            raise TypeError(f"{name_of('window_size')} is {window_size!r}: {sentence}")
        if side is not None and side < 0:
            raise ValueError(
                f"{name_of('window_size')} is {window_size!r}: {sentence}, and none below 0"
            )
    left, right = (UNBOUNDED if s is None else min(int(s), UNBOUNDED) for s in window_size)
    return left, right


def _refuse_over_scores(**given: Any) -> None:
    """Raise ValueError for a mask or bias: most of its pairs belong to different sequences."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name_of(name)} is for one Lq and one Lk, but with cu_seqlens or block_table "
                f"each sequence has other lengths: is_causal, window_size, kv_lengths and "
                f"alibi_slopes apply to each sequence"
            )


def _offset(
    q_offset: ArrayLike | None, shape: Shape, sequences: Sequences | None,
    lengths: NDArray[np.int64], positional: list[str],
) -> NDArray[np.int64]:  # fmt: skip
    Lq, Lk = shape[2:]
    if isinstance(q_offset, Relative):
        return q_offset.offset
    if q_offset is not None:
        return per_batch("q_offset", q_offset, len(lengths), (1 - MAX_OFFSET, MAX_OFFSET - 1))
    unequal, of_sequence = Lq != Lk, ""
    if sequences is not None:
        num_queries, num_keys = sequences.queries[:, 2], sequences.room
        if sequences.page_size != ONE_PAGE:
            num_keys = lengths
        unequal = bool((num_queries != num_keys).any())
        s = int((num_queries != num_keys).argmax()) if unequal else 0
        of_sequence = f" in sequence {s}"
        Lq, Lk = (int(x[s]) if unequal else 0 for x in (num_queries, num_keys))
    if unequal and positional:
        raise ValueError(
            f"{name_of(positional[0])} with Lq={Lq} and Lk={Lk}{of_sequence} needs q_offset: query "
            f"i is at key position i + q_offset; q_offset=0 aligns the first query with the first "
            f"key, q_offset={Lk - Lq} the last with the last"
        )
    return np.zeros(len(lengths), np.int64)


def lengths_of(
    kv_lengths: ArrayLike | None, shape: Shape, sequences: Sequences | None, num_pages: int
) -> NDArray[np.int64]:
    """Return the number of keys of each sequence, or of each batch entry."""
    B, _, _, Lk = shape
    if sequences is None:
        if kv_lengths is None:
            return np.array([Lk] * B, np.int64)  # several times as fast as np.full
        return per_batch("kv_lengths", kv_lengths, B, (0, Lk))
    is_paged, n = sequences.page_size != ONE_PAGE, len(sequences.room)
    if kv_lengths is None and not is_paged:
        return sequences.room
    if kv_lengths is None:
        raise ValueError(
            f"{name_of('block_table')} needs kv_lengths, the number of keys of each sequence"
        )
    lengths = per_batch("kv_lengths", kv_lengths, n, (0, int(sequences.room.max(initial=0))))
    beyond = np.flatnonzero(lengths > sequences.room)
    if beyond.size:
        s = beyond[0]
        raise ValueError(
            f"{name_of('kv_lengths')} is {lengths[s]} for sequence {s}: it has "
            f"{sequences.room[s]} keys"
        )
    if is_paged:
        check_pages(sequences, lengths, num_pages)
    return lengths


def per_batch(name: str, value: ArrayLike, B: int, limits: tuple[int, int]) -> NDArray[np.int64]:
    """Return ``value``, one integer or one per batch entry, as an array (B,) within ``limits``."""
    array = rectangular(name, value)
    items = array.ravel().tolist()  # Python's integers, which do not wrap around
    if not all(type(item) is int for item in items):
        raise TypeError(f"{name_of(name)} is {value!r}: expected an integer, or B={B} integers")
    if array.shape not in ((), (B,)):
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected one integer, or shape (B,) = ({B},)"
        )
    low, high = limits
    if any(not low <= item <= high for item in items):
        raise ValueError(f"{name_of(name)} is {value!r}: expected integers from {low} to {high}")
    return np.full(B, items if array.ndim else items[0], np.int64)


def _per_head(
    name: str, value: ArrayLike | None, H: int, compute: np.dtype[Any], may_be_none: bool = False
) -> NDArray[Any] | None:
    """Return ``value`` as finite numbers (H,), or None; if ``may_be_none``, -inf means no sink."""
    if value is None:
        return None
    array = as_floating(name, value)
    if array.shape != (H,):
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected (H,) = ({H},), one number "
            f"per query head"
        )
    array = _narrowed(array, compute)
    if not (np.isfinite(array) | (may_be_none & np.isneginf(array))).all():
        or_none = ", or -inf for no sink" * may_be_none
        raise ValueError(f"{name_of(name)} is {value!r}: expected finite numbers{or_none}")
    return array


def _narrowed(array: NDArray[Any], compute: np.dtype[Any]) -> NDArray[Any]:
    """Return ``array`` in the dtype ``compute``; finite numbers are clipped to its range."""
    if array.dtype.itemsize <= compute.itemsize:
        return cast(array, compute)
    limit = np.finfo(compute).max
    narrow = cast(array, compute)
    overflowed = np.isinf(narrow) & np.isfinite(array)
    return np.where(overflowed, np.copysign(limit, narrow), narrow) if overflowed.any() else narrow


def _mask(attn_mask: ArrayLike | None, shape: Shape) -> NDArray[np.bool_] | None:
    if attn_mask is None:
        return None
    array = rectangular("attn_mask", attn_mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"{name_of('attn_mask')} has dtype {array.dtype}: expected bool, True where a "
            f"query may attend to a key; numbers to be added to the scores go into attn_bias"
        )
    return _over_scores("attn_mask", array, shape)


def _bias(attn_bias: ArrayLike | None, shape: Shape, compute: np.dtype[Any]) -> NDArray[Any] | None:
    if attn_bias is None:
        return None
    array = rectangular("attn_bias", attn_bias)
    if array.dtype == np.bool_:
        raise TypeError(
            f"{name_of('attn_bias')} has dtype bool: expected numbers, which are added to the "
            f"scores; True and False go into attn_mask"
        )
    return _over_scores("attn_bias", _narrowed(as_floating("attn_bias", array), compute), shape)


def _over_scores(name: str, array: NDArray[Any], shape: Shape) -> NDArray[Any]:
    """Return a read-only view of ``array`` with the shape (B, H, Lq, Lk) of the scores."""
    fits = array.ndim == 4 and all(
        size in (1, whole) for size, whole in zip(array.shape, shape, strict=True)
    )
    if not fits and array.shape != shape[2:]:
        B, H, Lq, Lk = shape
        raise ValueError(
            f"{name_of(name)} has shape {array.shape}: expected {MASK_SHAPES}, "
            f"here ({Lq}, {Lk}) or ({B}, {H}, {Lq}, {Lk})"
        )
    return np.broadcast_to(array, shape)
