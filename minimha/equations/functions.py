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
from minimha.equations.elementwise import substitute

PARAMETERS = {"score_mod": ("score", "b", "h", "i", "j"), "mask_mod": ("b", "h", "i", "j")}
LIBRARIES = ("numpy", "numba", "math", "torch", "jax")  # whose functions do not change


class Corner(NamedTuple):
    """Where a problem begins within the one that its functions are written for.

    ``b`` and ``h`` are what they get for its first batch entry and query head, and ``key`` is the j
    of its first key: positions of queries count from there too.
    """

    b: int = 0
    h: int = 0
    key: int = 0


WHOLE = Corner()


class Reading(NamedTuple):
    """What a function computes with at the time of a call.

    Attributes
    ----------
    key : hashable
        Its code, which values it captures and of which kinds, and of what is no number and no
        array the value. Machine code is found by it.
    values : tuple
        The numbers and arrays, which machine code gets as arguments.
    """

    key: tuple[Any, ...]
    values: tuple[Any, ...] = ()

    @property
    def contents(self) -> Hashable:
        """As ``contents`` of the function: two of equal contents compute the same."""
        return self.key, contents(self.values)


class Placed(NamedTuple):
    """A caller's function for a part of the problem that it is written for.

    It stands in for the function in a call of ``attention``, and ``Problem.of`` takes it apart, so
    that kernels are compiled for the function and serve it at every place. It may hold what the
    function captures, so that this is read once in a call.
    """

    function: Any
    corner: Corner = WHOLE
    reading: Any = None


def taken(**given: Any) -> dict[str, Placed]:
    """The functions that are not None, which may be ``Placed``, with their readings."""
    found = {}
    for name, function in given.items():
        if function is not None:
            placed = function if isinstance(function, Placed) else Placed(function)
            held = getattr(placed.function, "mask_mod", placed.function)  # of a BlockMask
            found[name] = placed if placed.reading else placed._replace(reading=read(held))
    return found


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


def visible_pairs(
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
    function = for_numpy(function)
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
        if isinstance(result, np.ndarray) and not result.ndim:  # of np.where
            result = result[()]
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


def read(function: Any) -> Reading:
    """What ``function`` computes with now.

    Raises
    ------
    TypeError
        It captures an array of another library that NumPy cannot read.
    """
    function = getattr(function, "py_func", function)  # of numba's dispatchers
    if not isinstance(function, FunctionType):
        return Reading((contents(function),))
    kinds: list[Any] = []
    values: list[Any] = []
    others: list[Any] = []
    inner, found = _inner_names(function.__code__), captured(function)
    paths = [path for path, _ in found]  # a global may have the name of an attribute
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
    """What machine code must know of a number or array; None of what is compiled in."""
    kind = type(value)
    if kind is float or (kind is int and -(1 << 63) <= value < 1 << 63):
        return kind
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "biufc":
        return kind, value.dtype, value.ndim, value.flags.c_contiguous, value.flags.aligned
    is_number = isinstance(value, np.generic) and value.dtype.char in "bBhHiIlLqQfd"
    return value.dtype if is_number else None


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
    for one in found:  # which grows
        code = one.__code__ if isinstance(one, FunctionType) else None
        values = one if code is None else [substitute(".".join(x), y) for x, y in captured(one)]
        whole.append((code, *map(described, values)))
    return tuple(whole)


def captured(function: FunctionType) -> list[tuple[tuple[str, ...], Any]]:
    """The values that a function finds outside of its parameters, and by which names.

    Of a module whose functions may change they are the attributes too, once for all of its names,
    which numba compiles as constants; not by ``getattr``, which would warn of some names.
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
    for path, value in found:  # which grows
        if _is_callers_module(value):
            inside = vars(value)
            if value not in modules:
                found += [((*path, name), inside[name]) for name in names if name in inside]
            modules.add(value)
    return found


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """The values of parameters that need not be given, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def for_numpy(function: Any) -> Any:
    """``function`` with what NumPy takes in place of what it captures of other libraries."""
    if not isinstance(function, FunctionType):
        return function
    found = captured(function)
    changed = [path for path, value in found if substitute(".".join(path), value) is not value]
    if not changed:
        return function
    # Kernels take modules only as they are.
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
    """A caller's module, with what NumPy takes in place of its attributes."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _for_numpy(name, getattr(self._module, name))


def _is_callers_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.split(".")[0] not in LIBRARIES


def _content(cell: CellType) -> Any:
    """What a cell holds, or itself while nothing was assigned to its variable."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@lru_cache(256)
def _names(code: CodeType) -> tuple[str, ...]:
    """Names of the globals and attributes that a function and the functions in it read."""
    return tuple(sorted({*code.co_names} | _inner_names(code)))


@lru_cache(256)
def _inner_names(code: CodeType) -> frozenset[str]:
    """Those that the functions in it read, which are compiled as they are then."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset().union(*map(_names, inner))
