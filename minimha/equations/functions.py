"""Check, call and compare the functions ``score_mod`` and ``mask_mod`` that a caller passes.

Kernels compile these functions for single numbers. For the NumPy backends, they are called here
with arrays of indices. A function that takes no arrays, because of an ``if`` or a function of
``math``, is called once per pair.
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
from minimha.equations.elementwise import substitute

PARAMETERS = {"score_mod": ("score", "b", "h", "i", "j"), "mask_mod": ("b", "h", "i", "j")}
LIBRARIES = ("numpy", "numba", "math", "torch", "jax")  # their functions do not change


class Corner(NamedTuple):
    """The first batch entry, head and key of a part of a problem, as indices of the whole problem.

    ``score_mod`` and ``mask_mod`` get indices of the whole problem. The position of a query counts
    from the first key of the part, so ``key`` is also added to that position.
    """

    b: int = 0
    h: int = 0
    key: int = 0


WHOLE = Corner()


class Reading(NamedTuple):
    """The code and the captured values of a function, read when ``attention`` is called.

    Machine code is stored under ``key``: the code, the names and kinds of captured numbers and
    arrays, and the other captured values.
    """

    key: tuple[Any, ...]
    values: tuple[Any, ...] = ()  # the numbers and arrays, which machine code gets as arguments

    @property
    def contents(self) -> Hashable:
        """Return a hashable value that is equal for equal code and equal captured values."""
        return self.key, contents(self.values)


class Placed(NamedTuple):
    """A ``score_mod`` or ``mask_mod`` with the ``Corner`` of the part of a problem that calls it.

    ``attention`` accepts a Placed in place of the function, so that one compiled kernel serves
    every corner. ``reading`` is the function's code and captured values (``Reading``); if it is
    given, they are not read again.
    """

    function: Any
    corner: Corner = WHOLE
    reading: Any = None


def taken(**given: Any) -> dict[str, Placed]:
    """Wrap each function that is not None in a ``Placed``, with its captured values read."""
    found = {}
    for name, function in given.items():
        if function is not None:
            placed = function if isinstance(function, Placed) else Placed(function)
            held = getattr(placed.function, "mask_mod", placed.function)  # if it is a BlockMask
            found[name] = placed if placed.reading else placed._replace(reading=read(held))
    return found


def checked(name: str, function: Any) -> Any:
    """Return ``function``; raise TypeError unless it is None or has the parameters of ``name``.

    ``name`` is "score_mod" or "mask_mod".
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
    """Return ``score_mod(S, b, h, i, j)`` for scores ``S`` (B, H, Lq, Lk) and their indices.

    The result has the dtype of ``S``. Raises TypeError unless the function returns real numbers.
    """
    if not S.size:
        return S
    read_only = S.view()
    read_only.flags.writeable = False
    result = _called("score_mod", score_mod, (read_only, *indices), S.shape)
    if result.dtype.kind not in "iuf" and result.dtype.name != "bfloat16":
        raise TypeError(refusal("score_mod", str(result.dtype)))
    return result.astype(S.dtype, copy=False)


def visible_pairs(
    mask_mod: Callable[..., Any], indices: tuple[NDArray[Any], ...], shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return ``mask_mod(b, h, i, j)`` as a bool mask of ``shape``, True = visible.

    ``indices`` are b, h, i and j. Raises TypeError unless the function returns bool.
    """
    if 0 in shape:
        return np.empty(shape, bool)
    result = _called("mask_mod", mask_mod, indices, shape)
    if result.dtype != np.bool_:
        raise TypeError(refusal("mask_mod", str(result.dtype)))
    return result


def refusal(name: str, returned: str) -> str:
    """Return the error message for a ``score_mod`` or ``mask_mod`` that returned a wrong type."""
    expected = f"a real number, the new score; True and False go into {name_of('mask_mod')}"
    if name == "mask_mod":
        expected = "bool, True where a query may attend to a key; scores are changed in "
        expected += name_of("score_mod")
    return f"{name_of(name)} returned {returned}: expected {expected}"


def _called(
    name: str, function: Callable[..., Any], arguments: tuple[NDArray[Any], ...],
    shape: tuple[int, ...],
) -> NDArray[Any]:  # fmt: skip
    """Call ``function`` and return its result, broadcast to ``shape``, the shape of the scores."""
    function = for_numpy(function)
    try:
        returned = function(*arguments)
    except (TypeError, ValueError, DeprecationWarning):  # DeprecationWarning: math, one number
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
    """Call ``function`` for one query and key at a time, with Python's integers as indices."""
    whole = np.broadcast_arrays(*arguments)
    numbers = (x.ravel() if x.dtype.kind == "f" else x.ravel().tolist() for x in whole)
    results = []
    for pair in zip(*numbers, strict=True):
        result = function(*pair)
        if isinstance(result, np.ndarray) and not result.ndim:  # from np.where
            result = result[()]
        if not isinstance(result, (bool, int, float, complex, np.generic)):
            raise TypeError(refusal(name, "None" if result is None else type(result).__name__))
        results.append(result)
    return np.array(results).reshape(whole[0].shape)


def source(function: Any) -> str:
    """Return the source code of ``function``, or its name if the source is not available."""
    try:
        return inspect.cleandoc(inspect.getsource(function))
    except (OSError, TypeError):
        return getattr(function, "__name__", repr(function))


def uses(function: Any, index: int) -> bool:
    """Return whether ``function`` reads parameter ``index``, counted from 0; True if unknown."""
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
    """A hashable wrapper that compares objects by identity, and keeps its object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def read(function: Any) -> Reading:
    """Return the code and the present captured values of ``function`` as a ``Reading``.

    Raises TypeError if ``function`` captures an array of another library that NumPy cannot read.
    """
    function = getattr(function, "py_func", function)  # if it is numba's dispatcher
    if not isinstance(function, FunctionType):
        return Reading((contents(function),))
    kinds: list[Any] = []
    values: list[Any] = []
    others: list[Any] = []
    inner, found = _inner_names(function.__code__), captured(function)
    paths = [path for path, _ in found]  # twice if a global has the name of an attribute
    for path, value in found:
        value = substitute(".".join(path), value)
        kind = _kind(value)
        if kind is None or paths.count(path) > 1 or not inner.isdisjoint(path):
            others.append(value)
        else:
            kinds.append((path, kind))
            values.append(value)
    return Reading((function.__code__, tuple(kinds), contents(others)), tuple(values))


def _kind(value: Any) -> Any:
    """Return the kind of a number or array that machine code takes as argument, else None."""
    kind = type(value)
    if kind is float or (kind is int and -(1 << 63) <= value < 1 << 63):
        return kind
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "biufc":
        return kind, value.dtype, value.ndim, value.flags.c_contiguous
    is_number = isinstance(value, np.generic) and value.dtype.char in "bBhHiIlLqQfd"
    return value.dtype if is_number else None


def contents(value: Any) -> Hashable:
    """Return a function's code and captured values as one hashable value.

    Two functions with equal contents return equal results. Numbers and arrays are compared by
    value: writing to a captured array changes the contents. Other objects are compared by identity.
    Each function, tuple and list is described once, because functions may call each other.
    """
    numbers: dict[int, int] = {}  # of functions, tuples and lists, by id
    found: list[Any] = []  # keeps them alive, so that their ids stay unique

    def described(value: Any) -> Hashable:
        value = getattr(value, "py_func", value)  # if it is numba's dispatcher
        if isinstance(value, (np.ndarray, np.generic)):
            digest = sha256(value.tobytes()).digest()  # small, also for a large table
            return type(value), value.dtype, value.shape, digest
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
    for one in found:  # the list grows
        code = one.__code__ if isinstance(one, FunctionType) else None
        values = one if code is None else [substitute(".".join(x), y) for x, y in captured(one)]
        whole.append((code, *map(described, values)))
    return tuple(whole)


def captured(function: FunctionType) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, value) for each default, closure variable and global that ``function`` reads.

    A path is a tuple of names: (name,), or (module, attribute) for an attribute of a caller's
    module. Attributes are looked up in ``vars``, since ``getattr`` would warn for some names.
    """
    code = function.__code__
    found: list[tuple[tuple[str, ...], Any]] = [
        ((name,), value) for name, value in defaults_of(function).items()
    ]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found += [((name,), _content(cell)) for name, cell in cells]
    names, known = _names(code), function.__globals__
    found += [((name,), known[name]) for name in names if name in known]
    modules = set()
    for path, value in found:  # the list grows
        if _is_callers_module(value):
            inside = vars(value)
            if value not in modules:
                found += [((*path, name), inside[name]) for name in names if name in inside]
            modules.add(value)
    return found


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the default values of the parameters of ``function``, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def for_numpy(function: Any) -> Any:
    """Return ``function`` with its captured torch and JAX values replaced by NumPy's."""
    if not isinstance(function, FunctionType):
        return function
    found = captured(function)
    changed = [path for path, value in found if substitute(".".join(path), value) is not value]
    if not changed:
        return function
    # A module is replaced only if necessary: kernels take no replacement.
    swap = _for_numpy if max(map(len, changed)) > 1 else substitute
    code, known = function.__code__, function.__globals__
    swapped = {name: swap(name, known[name]) for name in _names(code) if name in known}
    cells = [_content(cell) for cell in function.__closure__ or ()]
    cells = [
        x if isinstance(x, CellType) else CellType(swap(name, x))
        for name, x in zip(code.co_freevars, cells, strict=True)
    ]
    given = {name: swap(name, value) for name, value in defaults_of(function).items()}
    keywords = {name: given.pop(name) for name in function.__kwdefaults__ or {}}
    new = FunctionType(code, known | swapped, None, tuple(given.values()), tuple(cells))
    new.__kwdefaults__ = keywords
    return new


def _for_numpy(name: str, value: Any) -> Any:
    return _Module(value) if _is_callers_module(value) else substitute(name, value)


class _Module:
    """A caller's module whose attributes of other libraries are replaced by NumPy's."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _for_numpy(name, getattr(self._module, name))


def _is_callers_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.split(".")[0] not in LIBRARIES


def _content(cell: CellType) -> Any:
    """Return the value of a closure cell, or the cell itself if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@lru_cache(256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function and its inner functions read."""
    return tuple(sorted({*code.co_names} | _inner_names(code)))


@lru_cache(256)
def _inner_names(code: CodeType) -> frozenset[str]:
    """Return the names that inner functions read; numba compiles their values as constants."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset().union(*map(_names, inner))
