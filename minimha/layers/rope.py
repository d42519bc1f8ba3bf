"""Rotary position embedding: rotate pairs of numbers in queries and keys by position.

At position m, pair i is rotated by the angle m · θ_i, with θ_i = base^(-2i/R) for rotated width R.
The dot product of two rotated vectors then depends only on the difference of their positions.
Pairs are half-split, (i, i + R/2), as in Llama, or interleaved, (2i, 2i + 1), as in the paper and
GPT-J.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import (
    as_floating,
    as_integers,
    compute_dtype,
    flag,
    integer,
    name_of,
    number,
)
from minimha.equations.arrays import Numbers, like
from minimha.equations.tap import Tap, no_tap, safe_tap
from minimha.layers.scalings import Scaling, token_count


@dataclass(frozen=True)
class RoPE:
    """Rotary position embedding (RoPE) of the first R numbers in heads of width D.

    Parameters
    ----------
    head_dim : int
        D.
    base : float, default 10000.0
        More than 1. Position m rotates pair i by m · base^(-2i/R).
    rotary_dim : int, optional
        R, an even number of at most D. The other D - R numbers do not change. Default is D.
    interleaved : bool, default False
        Whether pairs are (2i, 2i + 1) instead of (i, i + R/2).
    scaling : Scaling, optional
        A scaling rule from ``minimha.layers.scalings``. Default is none.

    Attributes
    ----------
    width : int
        R.

    Raises
    ------
    TypeError, ValueError
        A width is odd or not an integer, ``base`` is not above 1, or ``scaling`` is unknown.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.

    Examples
    --------
    >>> RoPE(2).rotate([[1, 0], [1, 0]], [0, 1]).round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]])
    """

    head_dim: int
    base: float = 10000.0
    rotary_dim: int | None = field(default=None, kw_only=True, compare=False)  # width is, instead
    interleaved: bool = field(default=False, kw_only=True)
    scaling: Scaling | None = field(default=None, kw_only=True)
    width: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = "head_dim" if self.rotary_dim is None else "rotary_dim"
        D, R = integer("head_dim", self.head_dim), integer(name, getattr(self, name))
        if R % 2:
            raise ValueError(f"{name} is {R}: pairs are rotated, so it must be even")
        if R > D:
            raise ValueError(f"rotary_dim is {R}: expected at most head_dim={D}")
        base = number("base", self.base)
        if base <= 1:
            raise ValueError(
                f"base is {self.base!r}: expected more than 1, later pairs rotate more slowly"
            )
        if not isinstance(self.scaling, Scaling | None):
            names = ", ".join(kind.__name__ for kind in Scaling.__subclasses__())
            raise TypeError(f"scaling is {self.scaling!r}: expected None or one of {names}")
        checked = {"head_dim": D, "width": R, "base": base}
        checked["interleaved"] = flag("interleaved", self.interleaved)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the only way in a frozen dataclass

    @property
    def is_dynamic(self) -> bool:
        """True if the angles depend on the length of the sequence."""
        return self.scaling is not None and self.scaling.is_dynamic

    def frequencies(self, length: int = 1) -> NDArray[np.float64]:
        """Return each pair's angle per position, (R/2,), for a sequence of ``length`` tokens.

        ``length`` matters only if the scaling depends on it (``is_dynamic``).
        """
        length = token_count("length", length)
        theta = np.asarray(self.base ** (-np.arange(0, self.width, 2) / self.width), np.float64)
        if self.scaling is None:
            return theta
        return np.asarray(self.scaling.frequencies(theta, self.base, length), np.float64)

    def has_equal_angles(self, length: int, other: int) -> bool:
        """Return whether sequences of ``length`` and of ``other`` tokens have the same angles.

        If so, keys that were cached at one length stay valid at the other.
        """
        return not self.is_dynamic or np.array_equal(
            self.frequencies(length), self.frequencies(other)
        )

    def tables(
        self, positions: ArrayLike, *, repeated: bool = False, length: int | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return cos(m θ_i) and sin(m θ_i) for positions m, times the magnitude of the scaling.

        Parameters
        ----------
        positions : array_like of shape (...), int
        repeated : bool, default False
            Whether to store each angle twice, once for each number of its pair.
        length : int, optional
            The length of the sequence, for dynamic scaling. Default is the largest position + 1.

        Returns
        -------
        cos, sin : ndarray of shape (..., R/2), or (..., R) if ``repeated``, float64

        Examples
        --------
        >>> cos, sin = RoPE(4, base=100).tables([0, 1])
        >>> sin.round(4)
        array([[0.    , 0.    ],
               [0.8415, 0.0998]])
        >>> RoPE(4, base=100).tables([1], repeated=True)[1].round(4)
        array([[0.8415, 0.0998, 0.8415, 0.0998]])
        """
        m = as_integers("positions", positions)
        needed = int(m.max(initial=0)) + 1
        length = needed if length is None else token_count("length", length)
        if length < needed:
            raise ValueError(
                f"length is {length} but {name_of('positions')} go to {needed - 1}: expected at "
                f"least {needed}"
            )
        angles = m[..., None] * self.frequencies(length)
        if flag("repeated", repeated):
            angles = angles.repeat(2, axis=-1) if self.interleaved else np.tile(angles, 2)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return np.cos(angles) * magnitude, np.sin(angles) * magnitude

    @overload
    def rotate(
        self, x: Numbers, positions: ArrayLike, tap: Tap = ..., *, length: int | None = None
    ) -> NDArray[Any]: ...
    @overload
    def rotate(
        self, x: ArrayLike, positions: ArrayLike, tap: Tap = ..., *, length: int | None = None
    ) -> Any: ...
    def rotate(
        self,
        x: ArrayLike,
        positions: ArrayLike,
        tap: Tap = no_tap,
        *,
        length: int | None = None,
    ) -> Any:
        """Return queries or keys ``x``, with each vector rotated by the angles of its position.

        Parameters
        ----------
        x : array_like of shape (..., L, D)
            Integers become float64; 16-bit numbers are computed in float32.
        positions : array_like of shape (L,), or (B, L) for x of shape (B, H, L, D), int
        tap : callable ``tap(name, value) -> value``, optional
            Receives cos, sin and rotated.
        length : int, optional
            As in ``tables``.

        Returns
        -------
        array of shape (..., L, D), x's dtype

        Raises
        ------
        TypeError, ValueError
            ``x`` does not have width D, or positions are not integers or do not fit ``x``.
        """
        vectors = as_floating("x", x)
        if vectors.ndim < 2 or vectors.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name_of('x')} has shape {vectors.shape}: expected (..., L, D) with head_dim "
                f"D={self.head_dim}"
            )
        m = as_integers("positions", positions)
        _check_fits("positions", m.shape, vectors)
        cos, sin = _remembered_tables(self, m.tobytes(), m.shape, length)
        return like(x, _rotate(vectors, cos, sin, self.interleaved, tap))


@overload
def rotate_by_table(
    x: Numbers, cos: ArrayLike, sin: ArrayLike, positions: ArrayLike | None = None, *,
    interleaved: bool = False, repeated: bool = False, tap: Tap = ...,
) -> NDArray[Any]: ...  # fmt: skip
@overload
def rotate_by_table(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, positions: ArrayLike | None = None, *,
    interleaved: bool = False, repeated: bool = False, tap: Tap = ...,
) -> Any: ...  # fmt: skip
def rotate_by_table(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    repeated: bool = False,
    tap: Tap = no_tap,
) -> Any:
    """Apply rotary position embedding to ``x``, with angles from tables of cos and sin.

    Parameters
    ----------
    x : array_like of shape (..., L, D)
    cos, sin : array_like of shape (P, R/2), (P, R) if ``repeated``
        One row for each of P positions, with one number per pair. Without ``positions``, the tables
        have one row per token: (L, R/2), or (B, L, R/2) for x of shape (B, H, L, D).
    positions : array_like of shape (L,), or (B, L) for x of shape (B, H, L, D), int, optional
        The table row of each token, from 0 to P - 1.
    interleaved : bool, default False
        Whether pairs are (2i, 2i + 1) instead of (i, i + R/2).
    repeated : bool, default False
        Whether the tables have each angle twice, once for each number of its pair.
    tap : callable ``tap(name, value) -> value``, optional
        Receives cos, sin and rotated.

    Returns
    -------
    array of shape (..., L, D), x's dtype

    Raises
    ------
    TypeError, ValueError
        Tables do not fit each other or ``x``, or a position is outside the table.

    References
    ----------
    Su et al., "RoFormer", 2021, equation 34.

    Examples
    --------
    >>> rotate_by_table([[1, 0], [3, 4]], [[1], [0]], [[0], [1]], [1, 0])  # a quarter, none
    array([[0., 1.],
           [3., 4.]])
    """
    given = x
    x, cos, sin = as_floating("x", x), as_floating("cos", cos), as_floating("sin", sin)
    X, COS, SIN = map(name_of, ("x", "cos", "sin"))
    if cos.shape != sin.shape:
        raise ValueError(
            f"{SIN} has shape {sin.shape} but {COS} has {cos.shape}: they must be equal"
        )
    if x.ndim < 2:
        raise ValueError(f"{X} has shape {x.shape}: expected (..., L, D)")
    if flag("repeated", repeated):
        cos, sin = (_once(n, t, interleaved) for n, t in (("cos", cos), ("sin", sin)))
    if cos.ndim < 2 or not 0 < 2 * cos.shape[-1] <= x.shape[-1]:
        raise ValueError(
            f"{COS} has {cos.shape[-1] if cos.ndim else 0} angles per row, shape {cos.shape}: "
            f"expected (positions, R/2) with 0 < R and R at most {X}'s width D={x.shape[-1]}"
        )
    if positions is not None:
        m = as_integers("positions", positions)
        if cos.ndim != 2:
            raise ValueError(
                f"{COS} has shape {cos.shape}: with {name_of('positions')}, expected (P, R/2)"
            )
        if m.size and not (m.min() >= 0 and m.max() < len(cos)):
            raise ValueError(
                f"{name_of('positions')} go from {m.min()} to {m.max()}: the table has the "
                f"positions 0 to {len(cos) - 1}"
            )
        _check_fits("positions", m.shape, x)
        cos, sin = cos[m], sin[m]
    else:
        _check_fits("cos", cos.shape[:-1], x)
    return like(given, _rotate(x, cos, sin, flag("interleaved", interleaved), tap))


def _rotate(
    x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], interleaved: bool, tap: Tap
) -> NDArray[Any]:
    """Return (x_1 cos - x_2 sin, x_2 cos + x_1 sin) for each pair (x_1, x_2), in x's layout."""
    compute, tap = compute_dtype(x.dtype), safe_tap(tap)
    with np.errstate(all="ignore"):
        cos, sin = tap("cos", cos.astype(compute)), tap("sin", sin.astype(compute))
        if cos.ndim == 3:  # (B, L, R/2), for all heads
            cos, sin = cos[:, None], sin[:, None]
        first, second = _pairs(2 * cos.shape[-1], interleaved)
        y = x.astype(compute)
        x_1, x_2 = y[..., first], y[..., second]
        y[..., first], y[..., second] = x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin
        return np.asarray(tap("rotated", y.astype(x.dtype, copy=False)))


def _pairs(R: int, interleaved: bool) -> tuple[slice, slice]:
    if interleaved:
        return slice(0, R, 2), slice(1, R, 2)
    return slice(0, R // 2), slice(R // 2, R)


def _once(name: str, table: NDArray[Any], interleaved: bool) -> NDArray[Any]:
    """Return half of a table that has each angle twice; raise ValueError if the halves differ."""
    R = table.shape[-1] if table.ndim else 0
    if R % 2:
        raise ValueError(
            f"{name_of(name)} has width {R}: a table with every angle twice has even width"
        )
    first, second = _pairs(R, interleaved)
    if not np.array_equal(table[..., first], table[..., second]):
        layout = "interleaved" if interleaved else "half-split"
        raise ValueError(
            f"{name_of(name)} does not hold every angle twice in the {layout} layout: both numbers "
            f"of a pair are rotated by one angle"
        )
    return table[..., first]


@lru_cache(maxsize=4)
def _remembered_tables(
    rope: RoPE, positions: bytes, shape: tuple[int, ...], length: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``rope.tables``, cached since all layers of a model use the same positions."""
    m = np.frombuffer(positions, np.int64).reshape(shape)
    cos, sin = rope.tables(m, length=length)
    cos.flags.writeable = sin.flags.writeable = False
    return cos, sin


def _check_fits(name: str, shape: tuple[int, ...], x: NDArray[Any]) -> None:
    """Raise ValueError unless ``shape`` is (L,), or (B, L) for x (B, H, L, D)."""
    L = x.shape[-2]
    if shape == (L,) or (x.ndim == 4 and shape == (x.shape[0], L)):
        return
    per_batch = f" or (B, L) = ({x.shape[0]}, {L})" if x.ndim == 4 else ""
    rows = "" if name == "positions" else ", before the angles,"
    raise ValueError(
        f"{name_of(name)} has shape {shape}{rows} but {name_of('x')} has shape {x.shape}: "
        f"expected (L,) = ({L},){per_batch}"
    )
