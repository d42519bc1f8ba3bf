"""Check arguments that several libraries' attention functions share; errors name the argument."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_floating, as_integers

Array = NDArray[Any]


def with_axes(name: str, value: ArrayLike, axes: str) -> Array:
    """Return ``value`` as floats; raise ValueError unless it has the axes that ``axes`` names.

    ``axes`` is a text such as "(B, L, H, D)", of which only the number of names counts.
    """
    array = as_floating(name, value)
    count = axes.count(",") + 1
    if array.ndim != count:
        raise ValueError(f"{name} has shape {array.shape}: expected {count} axes {axes}")
    return array


def heads_first(name: str, value: ArrayLike) -> Array:
    """Return a view (B, H, L, D) of an array (B, L, H, D)."""
    return np.asarray(with_axes(name, value, "(B, L, H, D)").swapaxes(1, 2))


def of_one_rank(
    given: Mapping[str, ArrayLike], ranks: Container[int], expected: str
) -> dict[str, Array]:
    """Return the arrays of ``given`` as floats; raise ValueError unless all have equally many axes.

    ``given`` maps names to arrays, queries first. The number of axes must be in ``ranks``.
    ``expected`` describes the expected axes in the error.
    """
    arrays = {name: as_floating(name, value) for name, value in given.items()}
    first, queries = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.ndim not in ranks or array.ndim != queries.ndim:
            raise ValueError(
                f"{name} has shape {array.shape}, {first} {queries.shape}: expected {expected}"
            )
    return arrays


def integers(name: str, value: ArrayLike, axes: Mapping[str, int]) -> NDArray[np.int64]:
    """Return ``value`` as integers; raise ValueError unless it has the sizes in ``axes``.

    ``axes`` maps the name of each axis to its size.
    """
    array = as_integers(name, value)
    sizes = tuple(axes.values())
    if array.shape != sizes:
        letters = ", ".join(axes) + "," * (len(axes) == 1)
        raise ValueError(f"{name} has shape {array.shape}: expected ({letters}) = {sizes}")
    return array


def check_within(name: str, array: NDArray[np.int64], low: int, high: int, why: str) -> None:
    """Raise ValueError with the reason ``why`` unless all integers are from ``low`` to ``high``."""
    if array.size and not (low <= array.min() and array.max() <= high):
        raise ValueError(
            f"{name} is {array.tolist()}: expected integers from {low} to {high}, because {why}"
        )


def check_mapping(params: Any) -> None:
    """Raise TypeError unless ``params`` is a mapping from names to arrays."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params is of type {type(params).__name__}: expected a mapping of names to arrays"
        )


def parameter(
    name: str, value: ArrayLike, shape: tuple[int, ...], dtype: np.dtype[Any], layout: str
) -> Array:
    """Return a weight as ``dtype``; raise ValueError unless it has ``shape``.

    If it looks transposed, the error ends in ``layout``, a hint on the order of axes.
    """
    array = as_floating(name, value)
    if array.shape != shape:
        is_transposed = sorted(array.shape) == sorted(shape)
        hint = f"; it looks transposed, {layout}" if is_transposed else ""
        raise ValueError(f"{name} has shape {array.shape}: expected {shape}{hint}")
    return array.astype(dtype, copy=False)


def refuse_dropout(name: str, dropout: float) -> None:
    """Raise ValueError unless ``dropout`` is 0."""
    if np.ndim(dropout) or dropout != 0:
        raise ValueError(
            f"{name} is {dropout!r}: expected 0, minimha computes inference, where nothing is "
            f"dropped"
        )
