"""Define ``Problem``, the checked arguments of ``attention`` with all defaults filled in.

Arrays are 4-D and of one dtype, and every option has its final form. So equations and kernels need
no checks.
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
    cast,
    compute_dtype,
    counted,
    flag,
    name_of,
    number,
    of_one_dtype,
)
from minimha.equations.block_mask import BlockMask
from minimha.equations.eight_bits import SCALES, eight_bit_arrays, scales_of, widened
from minimha.equations.functions import (
    WHOLE,
    Corner,
    Placed,
    Reading,
    checked,
    taken,
    visible_pairs,
)
from minimha.equations.option_arrays import Shape, option_arrays, per_batch
from minimha.equations.selection import picked, selection
from minimha.equations.sequences import ONE_PAGE, Sequences, check_pages, sequences_of
from minimha.equations.tap import Tap, no_tap
from minimha.equations.visibility import UNBOUNDED, sees

FLOATS = {np.dtype(name) for name in ("float16", "float32", "float64")}  # that have no scale
MAX_OFFSET = 1 << 31  # keeps position arithmetic far inside UNBOUNDED


class Relative(NamedTuple):
    """A ``q_offset`` (B,) of any size, which counts from the first key of a part of a problem."""

    offset: NDArray[np.int64]


RANKS = {2: "(L, D)", 3: "(H, L, D)", 4: "(B, H, L, D)"}


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked arguments of ``attention``, with every default filled in.

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``D`` head width, ``Dv`` value width.

    Attributes
    ----------
    q : ndarray of shape (B, H, Lq, D), ``dtype``
    k : ndarray of shape (B, Hkv, Lk, D), ``dtype``, or 8-bit with ``k_scale``
    v : ndarray of shape (B, Hkv, Lk, Dv), ``dtype``, or 8-bit with ``v_scale``
    left, right : int
        Query i sees keys from i + q_offset - left to i + q_offset + right; if causal, right is 0.
    q_offset : ndarray of shape (B,), int64
    kv_lengths : ndarray of shape (B,), int64
        Number of existing keys; Lk by default.
    attn_mask : ndarray of shape (B, H, Lq, Lk), bool, or None
        True = may attend. A read-only view, broadcast from the argument.
    attn_bias : ndarray of shape (B, H, Lq, Lk), compute dtype, or None
    key_indices : ndarray of shape (B, 1 or Hkv, Lq, K), int32, or None
        Each query sees at most these keys; -1 is none.
    alibi_slopes, sinks : ndarray of shape (H,), compute dtype, or None
    scale : float
    softcap : float or None
    dtype : numpy.dtype
        The dtype of q and the output, and of k and v unless these are 8-bit.
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
    k_scale, v_scale : ndarray of shape (B, Hkv, Lk), compute dtype, or None
        The factors of 8-bit k and v; read-only views. ``widened`` multiplies.
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
    key_indices: NDArray[np.int32] | None = None
    corner: Corner = WHOLE
    readings: dict[str, Reading] = field(default_factory=dict)
    k_scale: NDArray[Any] | None = None
    v_scale: NDArray[Any] | None = None

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
        block_table: ArrayLike | None = None, key_indices: ArrayLike | None = None,
        k_scale: ArrayLike | None = None, v_scale: ArrayLike | None = None,
    ) -> Problem:  # fmt: skip
        """Check the arguments of ``attention``; raise TypeError or ValueError if one is invalid."""
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        arrays = {"q": q, "k": k, "v": v} | scales
        rank, (q4, k4, v4) = _arrays(arrays, is_paged=block_table is not None)
        shape = (*q4.shape[:3], k4.shape[2])
        compute, H = compute_dtype(q4.dtype), shape[1]
        sequences = sequences_of(q4.shape, k4.shape, cu_seqlens_q, cu_seqlens_k, block_table)
        lengths = lengths_of(kv_lengths, shape, sequences, len(k4))
        pairs = _pairs(shape, sequences, lengths, attn_mask=attn_mask, attn_bias=attn_bias)
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
        if isinstance(blocks := given.get("mask_mod"), BlockMask):
            if sequences is None:
                blocks.check(shape, offset)
            else:
                blocks.check_sequences(H, sequences.queries[:, 2], lengths, offset)
        return cls(
            q=q4, k=k4, v=v4, left=left, right=right, q_offset=offset, kv_lengths=lengths,
            key_indices=None if key_indices is None
            else selection(key_indices, q4.shape, k4.shape, sequences),
            scale=1 / math.sqrt(q4.shape[3]) if scale is None else number("scale", scale, compute),
            **option_arrays(
                *pairs, compute, attn_mask=attn_mask, attn_bias=attn_bias,
                alibi_slopes=alibi_slopes, sinks=sinks, softcap=softcap,
            ),
            dtype=q4.dtype, compute=compute, rank=rank, sequences=sequences,
            corner=next((x.corner for x in functions.values()), WHOLE),
            readings={name: x.reading for name, x in functions.items()}, **given,
            **_scales(scales, {"k": k4, "v": v4}, rank, compute),
        )  # fmt: skip

    def each_sequence(self) -> Iterator[tuple[tuple[slice, slice, slice], Problem]]:
        """Yield (index, problem) for each sequence; ``index`` selects its rows of q and results."""
        assert self.sequences is not None
        for s, length in enumerate(self.kv_lengths.tolist()):
            rows, one = self.sequences.rows(s), slice(s, s + 1)
            k, v = (self.sequences.keys(X, s, length) for X in (self.k, self.v))
            scales: dict[str, Any] = {
                scale: self.sequences.keys(getattr(self, scale)[..., None], s, length)[..., 0]
                for scale in SCALES.values() if self.k_scale is not None
            }  # fmt: skip
            each = {name: getattr(self, name) for name in ("key_indices", "attn_mask", "attn_bias")}
            picks, mask, bias = (None if x is None else x[rows] for x in each.values())
            yield rows, replace(
                self, q=self.q[rows], k=k, v=v, **scales, q_offset=self.q_offset[one],
                kv_lengths=self.kv_lengths[one], sequences=None, key_indices=picks,
                attn_mask=None if mask is None else mask[..., :length],
                attn_bias=None if bias is None else bias[..., :length],
                corner=Corner(b=int(self.sequences.ids[s])),
            )  # fmt: skip

    def by_sequence(
        self, forward: Callable[[Problem, int], tuple[NDArray[Any], NDArray[Any]]]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output and log-sum-exp, by calling ``forward(problem, s)`` for each sequence s."""
        O = np.empty((*self.q.shape[:3], self.v.shape[3]), self.compute)
        L = np.empty(self.q.shape[:3], self.compute)
        for s, (rows, problem) in enumerate(self.each_sequence()):
            O[rows], L[rows] = forward(problem, s)
        return O, L

    @property
    def num_queries(self) -> NDArray[np.int64]:
        """The number of queries (n,) of each sequence or, without ``sequences``, batch entry."""
        if self.sequences is None:
            return np.array([self.q.shape[2]] * len(self.q), np.int64)
        return self.sequences.queries[:, 2]

    @property
    def num_pairs(self) -> int:
        """The number of scores: pairs of a query and a key, over all sequences and query heads."""
        B, H, Lq, _ = self.q.shape
        if self.sequences is None:
            return int(B * H * Lq * self.k.shape[2])
        return int(H * (self.sequences.queries[:, 2] @ self.kv_lengths))

    def visible(self, rows: slice, keys: slice, tap: Tap = no_tap) -> NDArray[np.bool_]:
        """Return a bool mask (B, 1 or H, rows, keys), True where a query may attend to a key.

        ``tap`` receives picked, which is 1 for keys in ``key_indices`` and 0 for others.
        """
        i = np.arange(rows.start, rows.stop)[:, None]
        j = np.arange(keys.start, keys.stop)
        q_offset, length = (x[:, None, None, None] for x in (self.q_offset, self.kv_lengths))
        visible: NDArray[np.bool_] = sees(i, j, q_offset, self.left, self.right, length)
        if self.attn_mask is not None:
            visible = visible & self.attn_mask[..., rows, keys]
        if self.attn_bias is not None:
            visible = visible & ~np.isneginf(self.attn_bias[..., rows, keys])
        if self.key_indices is not None:
            J = picked(self.key_indices[:, :, rows], keys)
            J = J if tap is no_tap else tap("picked", J.astype(self.compute)) != 0
            visible = visible & np.repeat(J, self.q.shape[1] // J.shape[1], axis=1)
        if self.mask_mod is not None:
            shape = *self.q.shape[:2], len(i), len(j)
            visible = visible & visible_pairs(self.mask_mod, self.indices(rows, keys), shape)
        return visible

    def indices(self, rows: slice, keys: slice) -> tuple[NDArray[np.int64], ...]:
        """Return b, h, i and j of the scores of ``rows`` and ``keys``, as arrays that broadcast.

        ``score_mod`` and ``mask_mod`` receive these indices, which count from ``corner``. i is the
        query's position among the keys.
        """
        (B, H), (first_b, first_h, first_key) = self.q.shape[:2], self.corner
        b = np.arange(first_b, first_b + B)[:, None, None, None]
        h = np.arange(first_h, first_h + H)[None, :, None, None]
        offset = self.q_offset[:, None, None, None] + first_key
        i = np.arange(rows.start, rows.stop)[:, None] + offset
        return b, h, i, np.arange(keys.start, keys.stop)[None, None, None] + first_key

    @cached_property
    def hides(self) -> bool:
        """Whether an option other than ``score_mod`` may hide a key. If so, scores need a mask."""
        return (
            self.left < UNBOUNDED
            or self.right < UNBOUNDED
            or self.attn_mask is not None
            or self.key_indices is not None
            or self.mask_mod is not None
            or bool((self.kv_lengths < self.k.shape[2]).any())
            or (self.attn_bias is not None and bool(np.isneginf(self.attn_bias).any()))
        )

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The given ``score_mod`` and ``mask_mod`` by name; of a ``BlockMask``, its function."""
        given = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {
            name: function.mask_mod if isinstance(function, BlockMask) else function
            for name, function in given.items()
            if function is not None
        }

    @property
    def taken(self) -> dict[str, Placed]:
        """The given ``score_mod`` and ``mask_mod`` by name, as ``Placed`` with this ``corner``."""
        each = self.functions.items()
        return {name: Placed(x, self.corner, self.readings[name]) for name, x in each}

    @cached_property
    def contents(self) -> dict[str, Hashable]:
        """A dict from names of functions to hashable values that are equal for equal functions."""
        return {name: reading.contents for name, reading in self.readings.items()}

    def without_numbers(self, dtype: np.dtype[Any] | None = None) -> Problem:
        """Return a copy whose q, k and v are zeros that take no memory, in ``dtype`` if given."""
        q, k, v = (stand_in(x.shape, dtype or self.dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, dtype=dtype or self.dtype, k_scale=None, v_scale=None)

    def widened(self) -> Problem:
        """Return this problem with 8-bit k and v times their scales, all in the compute dtype.

        Returns the problem itself if k and v are not 8-bit.
        """
        if self.k_scale is None or self.v_scale is None:
            return self
        return replace(
            self, q=cast(self.q, self.compute), k=widened(self.k, self.k_scale, self.compute),
            v=widened(self.v, self.v_scale, self.compute), dtype=self.compute, k_scale=None,
            v_scale=None,
        )  # fmt: skip

    def as_given(self, O: NDArray[Any], L: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output ``O`` and log-sum-exp ``L`` with the caller's axes, ``O`` in q's dtype."""
        leading = (0,) * (4 - self.rank)
        return cast(O[leading], self.dtype), L[leading]


def stand_in(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return read-only zeros of ``shape`` and ``dtype`` that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def factor_against_overflow(V: NDArray[Any], total: int) -> float:
    """Return a power of 2 that, multiplied with weights, keeps weighted sums of values finite.

    ``V`` has the values, in the compute dtype. The weights of a query are not yet normalised, and
    add up to at most ``total``. So a sum can overflow although the mean of the values does not.
    Returns 1 if no sum can overflow.
    """
    largest = abs(V).max(initial=0, where=np.isfinite(V))
    total *= 2  # a margin for rounding
    is_safe = total == 0 or largest <= np.finfo(V.dtype).max / total
    return 1.0 if is_safe else 2.0 ** -total.bit_length()


def _arrays(
    given: dict[str, Any], is_paged: bool
) -> tuple[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Return the rank, and 4-D q, k and v of one dtype; axis 0 of paged k and v counts pages.

    k and v remain 8-bit if they have scales.
    """
    qkv = {name: given[name] for name in "qkv"}
    is_plain = all(getattr(x, "dtype", None) in FLOATS for x in qkv.values())
    is_plain &= given["k_scale"] is None and given["v_scale"] is None
    arrays = (None if is_plain else eight_bit_arrays(given)) or of_one_dtype(**qkv)
    rank, (q4, k4, v4) = of_one_rank(arrays)
    _check_shapes(q4, k4, v4, is_paged)
    return rank, (q4, k4, v4)


def _scales(
    given: dict[str, Any], stored: dict[str, NDArray[Any]], rank: int, compute: np.dtype[Any]
) -> dict[str, Any]:
    """Return k_scale and v_scale, checked, for the 8-bit arrays ``stored``; both may be None."""
    return {
        scale: given[scale] if given[scale] is None
        else scales_of(scale, given[scale], stored[name], rank, compute)
        for name, scale in SCALES.items()
    }  # fmt: skip


def of_one_rank(given: dict[str, NDArray[Any]]) -> tuple[int, list[NDArray[Any]]]:
    """Return the common number of dimensions of q, k and v, and 4-D views of them.

    Raises ValueError unless all have the same number, 2, 3 or 4.
    """
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


def _pairs(
    shape: Shape, sequences: Sequences | None, lengths: NDArray[np.int64], **given: Any
) -> tuple[Shape, int]:
    """Return the shape of a mask or bias over all pairs, and the fewest keys that it may have.

    With pages these are the keys of a whole row of the table, and those of the longest sequence.
    Raises ValueError for packed keys: most pairs belong to different sequences.
    """
    if sequences is None:
        return shape, shape[3]
    for name, value in given.items():
        if value is not None and sequences.page_size == ONE_PAGE:
            raise ValueError(
                f"{name_of(name)} is for one Lq and one Lk, but with cu_seqlens each sequence has "
                f"other lengths: is_causal, window_size, kv_lengths, alibi_slopes and key_indices "
                f"apply to each sequence"
            )
    return (*shape[:3], int(sequences.room.max(initial=0))), int(lengths.max(initial=0))


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
    """Return the number of keys of each sequence or, without ``sequences``, of each batch entry.

    ``shape`` is (B, H, Lq, Lk), and ``num_pages`` the length of axis 0 of k. Raises ValueError or
    TypeError for invalid ``kv_lengths``, and ValueError for pages that do not exist.
    """
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
