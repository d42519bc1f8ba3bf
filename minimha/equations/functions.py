"""A caller's ``score_mod`` and ``mask_mod``: functions of one score and of one pair of positions.

They are written on numbers. Kernels compile them; here they are called with arrays of indices, and
number by number where they take no arrays, because of an ``if`` or a function of ``math``.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Hashable
from functools import lru_cache
from hashlib import sha256
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import name_of, rectangular

PARAMETERS = {"score_mod": ("score", "b", "h", "i", "j"), "mask_mod": ("b", "h", "i", "j")}
LIBRARIES = ("numpy", "numba", "math", "torch", "jax")  # whose functions do not change


class Place(NamedTuple):
    """Where a problem begins within the one that its functions are written for.

    ``b`` and ``h`` are what they get for its first batch entry and query head, and ``key`` is the j
    of its first key: positions of queries count from there too.
    """

    b: int = 0
    h: int = 0
    key: int = 0


WHOLE = Place()


class Placed(NamedTuple):
    """A caller's function for a part of the problem that it is written for.

    It stands in for the function in a call of ``attention``, and ``Problem.of`` takes it apart, so
    that kernels are compiled for the function and serve it at every place.
    """

    function: Any
    place: Place


def taken_apart(score_mod: Any, mask_mod: Any) -> tuple[Any, Any, Place]:
    """Both functions, of which either may be ``Placed``, or None, and their place."""
    places = [x.place for x in (score_mod, mask_mod) if isinstance(x, Placed)]
    functions = (x.function if isinstance(x, Placed) else x for x in (score_mod, mask_mod))
    return *functions, places[0] if places else WHOLE


def checked(name: str, function: Any) -> Any:
    """``function`` if it can be called with the parameters of ``name``, or None.

    Raises
    ------
    TypeError
        It cannot be called, or takes other parameters.
    """
    if function is None:
        return None
    wanted = f"{name_of(name)}({', '.join(PARAMETERS[name])})"
    if not callable(function):
        raise TypeError(f"{name_of(name)} is {function!r}: expected a function {wanted}, or None")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return function
    try:
        signature.bind(*PARAMETERS[name])
    except TypeError:
        raise TypeError(
            f"{name_of(name)} takes {signature}: expected {len(PARAMETERS[name])} parameters, as "
            f"it is called with {wanted}"
        ) from None
    return function


def modified(
    score_mod: Callable[..., Any], S: NDArray[Any], indices: tuple[NDArray[Any], ...]
) -> NDArray[Any]:
    """``score_mod`` of the scores ``S`` (B, H, Lq, Lk) and their ``indices`` b, h, i and j."""
    if not S.size:
        return S
    read_only = S.view()
    read_only.flags.writeable = False
    result = _called("score_mod", score_mod, (read_only, *indices), S.shape)
    if result.dtype.kind not in "iuf" and result.dtype.name != "bfloat16":
        raise TypeError(refusal("score_mod", str(result.dtype)))
    return result.astype(S.dtype, copy=False)


def allowed(
    mask_mod: Callable[..., Any], indices: tuple[NDArray[Any], ...], shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """``mask_mod`` of the ``indices`` b, h, i and j: True where a query may attend to a key."""
    if 0 in shape:
        return np.empty(shape, bool)
    result = _called("mask_mod", mask_mod, indices, shape)
    if result.dtype != np.bool_:
        raise TypeError(refusal("mask_mod", str(result.dtype)))
    return result


def refusal(name: str, returned: str) -> str:
    """What is wrong with a function that returned something of another kind."""
    if name == "mask_mod":
        expected = (
            f"bool, True where a query may attend to a key; scores are changed in "
            f"{name_of('score_mod')}"
        )
    else:
        expected = f"a real number, the new score; True and False go into {name_of('mask_mod')}"
    return f"{name_of(name)} returned {returned}: expected {expected}"


def _called(
    name: str, function: Callable[..., Any], arguments: tuple[NDArray[Any], ...],
    shape: tuple[int, ...],
) -> NDArray[Any]:  # fmt: skip
    """What the function returns, broadcast to the shape of the scores."""
    try:
        returned = function(*arguments)
    except (TypeError, ValueError, DeprecationWarning):  # of math, for arrays of one number
        result = _number_by_number(name, function, arguments)
    else:
        result = rectangular(f"what {name_of(name)} returned", returned)
    if result.dtype == object:
        is_none = result.ndim == 0 and result.item() is None
        raise TypeError(refusal(name, "None" if is_none else "objects"))
    try:
        return np.broadcast_to(result, shape)
    except ValueError:
        raise ValueError(
            f"{name_of(name)} returned shape {result.shape}: expected one that broadcasts to "
            f"(B, H, Lq, Lk) = {shape}"
        ) from None


def _number_by_number(
    name: str, function: Callable[..., Any], arguments: tuple[NDArray[Any], ...]
) -> NDArray[Any]:
    """What the function returns for each pair alone, whose indices are Python's integers."""
    whole = np.broadcast_arrays(*arguments)
    numbers = (x.ravel() if x.dtype.kind == "f" else x.ravel().tolist() for x in whole)
    results = []
    for pair in zip(*numbers, strict=True):
        result = function(*pair)
        if not isinstance(result, (bool, int, float, complex, np.generic)):
            raise TypeError(refusal(name, "None" if result is None else type(result).__name__))
        results.append(result)
    return np.array(results).reshape(whole[0].shape)


def source(function: Any) -> str:
    """The lines in which ``function`` is written, or its name where there are none."""
    try:
        return inspect.cleandoc(inspect.getsource(function))
    except (OSError, TypeError):
        return getattr(function, "__name__", repr(function))


def uses(function: Any, index: int) -> bool:
    """Whether ``function`` reads its parameter at ``index``, as far as its bytecode shows."""
    code = getattr(function, "__code__", None)
    return code is None or _reads(code, index)


@lru_cache(256)
def _reads(code: CodeType, index: int) -> bool:
    if index >= code.co_argcount:
        return True
    name = code.co_varnames[index]
    read = (x.argval if isinstance(x.argval, tuple) else (x.argval,) for x in dis.Bytecode(code))
    return any(name in names for names in read)


class Same:
    """Equal to another one that holds the same object; both keep it alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def contents(value: Any) -> Hashable:
    """What a function computes with: its code, and the values that it captures.

    Two functions of equal contents compute the same. Numbers and arrays count by value, so that the
    contents change when a captured array is written to; other objects count as themselves. Whatever
    captures others is described once, in the order in which it is found: helper functions that call
    each other have many more paths than members.
    """
    numbers: dict[int, int] = {}  # of functions, tuples and lists, by id
    found: list[Any] = []  # which also keeps them alive, and so their ids their own

    def described(value: Any) -> Hashable:
        value = getattr(value, "py_func", value)  # of numba's dispatchers
        if isinstance(value, (np.ndarray, np.generic)):
            digest = sha256(value.tobytes()).digest()  # a large table is not to be kept
            return type(value), value.dtype.str, value.shape, digest
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            return type(value), repr(value)
        library = str(getattr(value, "__module__", None)).split(".")[0]  # exec may leave it None
        is_function = isinstance(value, FunctionType) and library not in LIBRARIES
        if not is_function and not isinstance(value, (tuple, list)):
            return Same(value)
        if id(value) not in numbers:
            numbers[id(value)] = len(found)
            found.append(value)
        return type(value), numbers[id(value)]

    whole = [described(value)]
    for one in found:  # which grows
        code = one.__code__ if isinstance(one, FunctionType) else None
        whole.append((code, *map(described, one if code is None else captured(one))))
    return tuple(whole)


def captured(function: FunctionType) -> list[Any]:
    """The values that a function finds outside of its parameters."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [_content(cell) for cell in function.__closure__ or ()]
    names = sorted(_names(function.__code__))
    for value in (function.__globals__[name] for name in names if name in function.__globals__):
        found.append(value)
        if isinstance(value, ModuleType):  # whose attributes are compiled as constants, too
            # Not by getattr: of some names that a module lacks it would warn.
            found += [vars(value)[name] for name in names if name in vars(value)]
    return found


def _content(cell: CellType) -> Any:
    """What a cell holds, or itself while nothing was assigned to its variable."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _names(code: CodeType) -> set[str]:
    """Names of the globals and attributes that a function and the functions in it read."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
