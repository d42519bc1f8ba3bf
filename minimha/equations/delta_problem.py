"""Define ``DeltaProblem``, the checked arguments of ``gated_delta_rule`` with all defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import (
    argument_names,
    as_floating,
    cast,
    compute_dtype,
    counted,
    flag,
    name_of,
    number,
    of_one_dtype,
)
from minimha.equations.problem import lengths_of, of_one_rank, stand_in
from minimha.equations.sequences import one_per_entry, sequences_of

Array = NDArray[Any]
EPSILON = 1e-6  # added to the sum of squares under the root, as in flash-linear-attention
NONE = np.empty((0, 0, 0, 0))


@dataclass(frozen=True, eq=False)
class DeltaProblem:
    """The checked arguments of ``gated_delta_rule``, with every default filled in.

    Axes: ``B`` batch, ``Hk`` key heads, ``H`` value heads, ``L`` tokens, ``D`` key width, ``Dv``
    value width, ``n`` sequences (B if none are packed). g, beta and state have dtype ``compute``.
    """

    q: Array  # (B, Hk, L, D)
    k: Array  # (B, Hk, L, D)
    v: Array  # (B, H, L, Dv)
    g: Array  # (B, H, L, 1 or D)
    beta: Array  # (B, H, L, 1)
    state: Array | None  # (n, H, D, Dv)
    scale: float
    normalize: bool
    rows: NDArray[np.int64]  # (n, 3): batch entry, first token and number of tokens
    dtype: np.dtype[Any]  # of q, k, v and the output
    compute: np.dtype[Any]  # float64 for float64, else float32
    rank: int  # dimensions of the caller's q, 2 to 4

    @classmethod
    def of(
        cls, q: ArrayLike, k: ArrayLike, v: ArrayLike, g: ArrayLike, beta: ArrayLike, *,
        initial_state: ArrayLike | None = None, scale: Any = None, normalize: bool = True,
        kv_lengths: ArrayLike | None = None, cu_seqlens: ArrayLike | None = None,
    ) -> DeltaProblem:  # fmt: skip
        """Check the arguments of ``gated_delta_rule``; raise TypeError or ValueError if invalid."""
        rank, (q4, k4, v4) = of_one_rank(of_one_dtype(q=q, k=k, v=v))
        _check_shapes(q4, k4, v4)
        (B, _, L, D), (H, Dv) = q4.shape, v4.shape[1::2]
        compute = compute_dtype(q4.dtype)
        if cu_seqlens is not None and rank < 4:
            raise ValueError(
                f"{name_of('cu_seqlens')} is given with {name_of('q')} of {rank} dimensions: "
                f"expected 4, (1, Hk, L, D), because the state is (n, H, D, Dv), one per sequence"
            )
        with argument_names(cu_seqlens_q=name_of("cu_seqlens")):
            sequences = sequences_of(q4.shape, k4.shape, cu_seqlens, None, None)
        rows = np.array((sequences or one_per_entry(B, L, L)).queries)
        rows[:, 2] = lengths_of(kv_lengths, (B, H, L, L), sequences, B)
        tokens = {"B": B, "H": H, "L": L}
        states = {"n" if sequences else "B": len(rows), "H": H, "D": D, "Dv": Dv}
        decay = _fitting("g", g, compute, rank, tokens, tokens | {"D": D})
        state = initial_state
        if state is not None:
            state = _fitting("initial_state", state, compute, rank, states)
        return cls(
            q=q4, k=k4, v=v4, g=decay if decay.ndim == 4 else decay[..., None],
            beta=_fitting("beta", beta, compute, rank, tokens)[..., None], state=state,
            scale=1 / math.sqrt(D) if scale is None else number("scale", scale, compute),
            normalize=flag("normalize", normalize), rows=rows, dtype=q4.dtype, compute=compute,
            rank=rank,
        )  # fmt: skip

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape (n, H, D, Dv) of the states of all sequences and heads."""
        return len(self.rows), self.v.shape[1], self.q.shape[3], self.v.shape[3]

    @property
    def is_even(self) -> bool:
        """Whether each batch entry is one sequence of L tokens. If so, all are computed at once."""
        return len(self.rows) == len(self.q) and bool((self.rows[:, 2] == self.q.shape[2]).all())

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array, Array | None]:
        """The arrays q, k, v, g, beta and state, in this order."""
        return self.q, self.k, self.v, self.g, self.beta, self.state

    def without_numbers(self) -> DeltaProblem:
        """Return a copy without g, beta and state; its q, k and v are zeros that take no memory."""
        q, k, v = (stand_in(x.shape, self.dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, g=NONE, beta=NONE, state=None)

    def sequences(self) -> Iterator[tuple[tuple[slice, slice, slice], slice]]:
        """Yield a pair of indices for each sequence, which select its tokens and its state.

        If ``is_even``, yields only one pair of indices, which selects everything.
        """
        if self.is_even:
            yield (slice(None), slice(None), slice(None)), slice(None)
            return
        for s, (entry, first, length) in enumerate(self.rows.tolist()):
            yield (
                (slice(entry, entry + 1), slice(None), slice(first, first + length)),
                slice(s, s + 1),
            )

    def as_given(self, O: Array, S: Array) -> tuple[Array, Array]:
        """Return output ``O`` and states ``S`` with the caller's axes, ``O`` in q's dtype."""
        leading = (0,) * (4 - self.rank)
        return cast(O[leading], self.dtype), S[leading]


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    for axis, letter in enumerate(("B", "Hk", "L", "D")):
        for name, array in (("k", k), ("v", v)):
            size, expected = array.shape[axis], q.shape[axis]
            if size != expected and (name == "k" or letter in "BL"):
                raise ValueError(
                    f"{name_of(name)} has {letter}={size} but {name_of('q')} has "
                    f"{letter}={expected}: each token has a query, a key and a value"
                )
    if q.shape[3] == 0:
        raise ValueError(f"{name_of('q')} has D=0: the key width D must be at least 1")
    Hk, H = q.shape[1], v.shape[1]
    if not (H and Hk) or H % Hk:
        raise ValueError(
            f"{name_of('v')} has {counted(H, 'head')} but {name_of('q')} has {Hk}: H must be a "
            f"multiple of Hk, and both at least 1"
        )


def _fitting(
    name: str, value: ArrayLike, compute: np.dtype[Any], rank: int, *shapes: dict[str, int]
) -> Array:
    """Return ``value`` with every axis, in the dtype ``compute``.

    It must have one of the ``shapes``, which map axes to sizes, without the axes that q of ``rank``
    dimensions lacks.
    """
    array, missing = as_floating(name, value), 4 - rank
    expected = {tuple(shape)[missing:]: tuple(shape.values())[missing:] for shape in shapes}
    if array.shape not in expected.values():
        listed = " or ".join(
            f"({', '.join(letters)}) = {sizes}" for letters, sizes in expected.items()
        )
        raise ValueError(f"{name_of(name)} has shape {array.shape}: expected {listed}")
    return cast(array, compute)[(None,) * missing]
