"""Compile a caller's ``score_mod`` or ``mask_mod`` into code that a kernel calls once per tile.

One kernel serves all functions, because a function's address is one of the kernel's arguments. The
code is a loop over a tile with the caller's function inside, which LLVM inlines and vectorizes::

    tile(S, failed, line, b, h, i, j, lines, length, stride, is_transposed)

A function is passed as a ``line`` of memory: the address of its loop, then the numbers and arrays
that it captures. These are arguments, so that one compilation serves all values. A function that
numba compiles only with captured values as constants is compiled again for each value.

A tile has ``lines`` rows of ``length`` items. Item x of row y, ``S[y * stride + x]``, belongs to
query i + y and key j + x. With ``is_transposed``, it belongs to query i + x and key j + y. For
``mask_mod`` the items are bytes, 1 where the key is visible. Indices of captured arrays are
checked. Machine code cannot pass on an exception: the loop ends and sets ``failed[0]`` to 1, and
``raise_again`` raises the exception.
"""

from __future__ import annotations

import inspect
import sys
from array import array
from collections.abc import Hashable, Sequence
from functools import partial
from struct import pack
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import ir as numba_ir
from numba.core.bytecode import ByteCode, FunctionIdentity
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler import Flags, compile_ir
from numba.core.compiler_lock import global_compiler_lock
from numba.core.interpreter import Interpreter
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload, register_jitable

from minimha.equations.arguments import name_of
from minimha.equations.elementwise import COMPOSED, TORCH, Unknown, substitute, where
from minimha.equations.functions import Reading, captured, defaults_of, modified, visible_pairs
from minimha.equations.problem import Problem
from minimha.kernels import remembered
from minimha.kernels.cpu.arguments import address, array_at
from minimha.kernels.cpu.compiler import undisturbed
from minimha.kernels.cpu.jit import FASTMATH, jit
from minimha.kernels.cpu.simd.vector import INT, pointer_to
from minimha.kernels.functions import (
    I64,
    NotNow,
    Refused,
    check_returned,
    compiled_function,
    is_fitting,
)

OPTIONS = {
    "fastmath": FASTMATH, "error_model": "numpy", "boundscheck": True, "nopython": True,
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
MOST = 32  # functions in memory, of 1 MB each
CONSTANTS = "numba compiles it with constants only"  # stored in place of such a function's code
CALLED = 128  # queries and keys of the tiles in which ``raise_again`` looks for the exception

WORD = slice(8) if sys.byteorder == "little" else slice(1, 9)  # of 9 bytes

_kept: dict[Hashable, Any] = {}


class Function(NamedTuple):
    """A caller's ``score_mod`` or ``mask_mod``, its captured values, and the scores' dtype."""

    name: str
    given: Any
    compute: np.dtype[Any]
    reading: Reading

    @property
    def key(self) -> Hashable:
        """The key of the machine code; that of a ``mask_mod`` does not depend on the dtype."""
        return self.name, self.reading.key, self.compute.name if self.name == "score_mod" else None


for _function in COMPOSED:
    register_jitable(_function)


@overload(where)
def _where(condition, input, other):
    return lambda condition, input, other: input if condition else other


def given(problem: Problem) -> list[Function]:
    """Return the caller's ``score_mod`` and ``mask_mod``, if any, each as a ``Function``."""
    return [
        Function(name, function, problem.compute, problem.readings[name])
        for name, function in problem.functions.items()
    ]


def unsupported(problem: Problem) -> str | None:
    """Return why numba cannot compile ``score_mod`` or ``mask_mod``, or None if it can."""
    try:
        for function in given(problem):
            _compiled(function)
    except Refused as error:
        return str(error)
    except Unknown:  # the call raises this error on every backend
        pass
    return None


def is_ready(problem: Problem) -> bool:
    """Return whether all functions of ``problem``, ``score_mod`` and ``mask_mod``, are compiled."""
    return all(function.key in _kept for function in given(problem))


class Tile:
    """Machine code that calls a caller's function once for each score of a tile.

    The function has ``num_values`` captured values as arguments, and returns the numba type
    ``returned``. The code is freed together with this object.
    """

    def __init__(self, library: Any, address: int, num_values: int, returned: Any) -> None:
        self._library, self._address = library, address  # the library holds the code
        self.num_values, self.returned = num_values, returned

    def takes(self, values: tuple[Any, ...]) -> bool:
        """Return whether the machine code takes captured ``values`` as arguments, not constants."""
        return self.num_values == len(values)

    def line(self, values: tuple[Any, ...]) -> array[int]:
        """Pack the code's address and the captured ``values`` into integers.

        Arrays are packed as addresses and sizes, so they must stay alive.
        """
        line = array("q", [self._address])
        for value in values if self.num_values else ():
            if isinstance(value, np.ndarray):
                line.extend((address(value), *value.shape, *value.strides))
            elif isinstance(value, (float, np.floating)):
                line.frombytes(pack("=d", value))
            else:
                line.frombytes(int(value).to_bytes(9, sys.byteorder, signed=True)[WORD])
        return line


def tile_function(function: Function) -> Tile:
    """Return the machine code of ``function`` as a ``Tile``, compiled on first use.

    Raises ``Refused`` if numba cannot compile the function, TypeError for a result of a wrong type.
    """
    tile = _compiled(function)
    check_returned(function.name, tile.returned)
    return tile


def raise_again(problem: Problem) -> NoReturn:
    """Call ``score_mod`` and ``mask_mod`` in Python, to raise the exception that ended a kernel.

    Raises RuntimeError if they raise no exception in Python.
    """
    is_whole = problem.sequences is None
    for part in [problem] if is_whole else [part for _, part in problem.each_sequence()]:
        _call_everywhere(part)
    raise RuntimeError(
        f"{' or '.join(map(name_of, problem.functions))} raised an exception in machine code, but "
        f"raises none in Python"
    )


def _call_everywhere(problem: Problem) -> None:
    """Call the functions of ``problem`` in Python for every pair, one tile at a time."""
    Lq, Lk = problem.q.shape[2], problem.k.shape[2]
    for i in range(0, Lq, CALLED):
        for j in range(0, Lk, CALLED):
            rows, keys = slice(i, min(Lq, i + CALLED)), slice(j, min(Lk, j + CALLED))
            shape = *problem.q.shape[:2], rows.stop - i, keys.stop - j
            indices = problem.indices(rows, keys)
            if problem.mask_mod is not None:
                visible_pairs(problem.mask_mod, indices, shape)
            if problem.score_mod is not None:
                modified(problem.score_mod, np.zeros(shape, problem.compute), indices)


@intrinsic
def call_tile(
    typing, function, X, offset, failed, b, h, i, j, lines, length, stride, is_transposed
):  # fmt: skip
    """Call the ``Tile`` whose line is at address ``function``, for X from ``offset`` on.

    X and the other arguments are those of ``tile`` in the module's docstring, where X is S.
    """

    def generate(context, builder, signature, arguments):
        line, X, offset, failed, *numbers = arguments
        line = builder.inttoptr(line, INT.as_pointer())

        def pointer(kind, value, offset):
            if isinstance(kind, types.CPointer):
                return builder.gep(value, [offset])
            return pointer_to(context, builder, kind, value, offset)

        pointers = [
            pointer(signature.args[1], X, offset), pointer(signature.args[3], failed, INT(0)), line
        ]  # fmt: skip
        kinds = [pointer.type for pointer in pointers] + [INT] * len(numbers)
        kind = ir.FunctionType(ir.VoidType(), kinds).as_pointer()
        builder.call(builder.inttoptr(builder.load(line), kind), [*pointers, *numbers])
        return context.get_dummy_value()

    return types.void(I64, X, I64, failed, *[I64] * 8), generate


@jit
def call_function(function, X, offset, o, b, h, i, j, lines, length, stride, is_transposed):
    """Call ``score_mod`` or ``mask_mod`` for a tile from query i and key j on.

    b is a sequence and h a query head. ``function`` and the rest are as in ``call_tile``.
    """
    s, h, i, j = o.ids[b], h + o.first_head, i + o.q_offset[b] + o.first_key, j + o.first_key
    call_tile(function, X, offset, o.failed, s, h, i, j, lines, length, stride, is_transposed)


def _keep(key: Hashable, value: Any) -> Any:
    """Store ``value`` under ``key``, after deleting all others if there are ``MOST``."""
    if len(_kept) >= MOST:
        remembered.forget()  # plans hold functions
        _kept.clear()
    _kept[key] = value
    return value


def _compiled(function: Function) -> Tile:
    """Return the ``Tile`` of a caller's function, whatever type the function returns."""
    found = _found_or_kept(function.key, function, function.reading.values)
    if found is CONSTANTS:
        found = _found_or_kept((function.key, function.reading.contents), function, ())
    if isinstance(found, Exception):
        raise type(found)(*found.args)  # a copy: the traceback of ``found`` would hold q, k, v
    tile: Tile = found
    return tile


def _found_or_kept(key: Hashable, function: Function, values: tuple[Any, ...]) -> Any:
    """Return the result stored under ``key``, or compile ``function`` and store the result.

    Returns ``CONSTANTS`` if numba compiles the function only with constants, as some tuples need.
    """

    def kept() -> Any:
        return _kept.get(key) or _keep(key, _compile(function, values))

    return _kept.get(key) or undisturbed(kept)


def _compile(function: Function, values: tuple[Any, ...]) -> Any:
    """Return a ``Tile``, or ``CONSTANTS``, or the exception that numba raised."""
    name, given, compute, reading = function
    kinds = dict(reading.key[1]) if values else {}
    try:
        with global_compiler_lock:
            return compiled_function(name, given, compute, partial(_tile, name, compute, kinds))[0]
    except NotNow:
        raise
    except (Refused, Unknown) as error:
        if values and isinstance(error, Refused):
            return CONSTANTS
        return type(error)(*error.args)  # without the traceback, which holds captured values


def _tile(
    name: str, compute: np.dtype[Any], kinds: dict[tuple[str, ...], Any],
    function: FunctionType, arguments: tuple[Any, ...],
) -> tuple[Tile, Any]:  # fmt: skip
    """Compile a loop over a tile around ``function``; return the loop and its return type."""
    types_of = [_type_of(kind) for kind in kinds.values()]
    context = cpu_target.target_context
    # Deleting an engine frees its machine code, so each function has a separate engine.
    context = context.subtarget(_internal_codegen=JITCPUCodegen("minimha"))
    code, flags = _with_arguments(function, len(arguments), list(kinds)), Flags()
    cpu_target.options.parse_as_flags(flags, OPTIONS)
    result = compile_ir(
        cpu_target.typing_context, context, code, (*arguments, *types_of), None, flags, {}
    )
    context.remove_user_function(result.entry_point)  # numba would keep it
    returned = result.signature.return_type
    if not is_fitting(name, returned):
        return Tile(None, 0, 0, returned), returned
    library = context.codegen().create_library("tile")
    module = library.create_ir_module("tile")
    item = numba.from_dtype(compute) if name == "score_mod" else types.uint8
    pointers = context.get_data_type(item).as_pointer(), INT.as_pointer(), INT.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [*pointers, *[INT] * 8])
    loop = ir.Function(module, kind, "minimha_tile")
    for pointer in loop.args[:2]:  # captured arrays are not in S
        pointer.add_attribute("noalias")
    _generate_loop(context, loop, result, item, len(arguments) == 5, types_of)
    library.add_ir_module(module)
    library.add_linking_library(result.library)
    address = library.get_pointer_to_function(loop.name)
    return Tile(library, address, len(kinds), returned), returned


def _generate_loop(
    context: Any, loop: Any, result: Any, item: Any, is_score: bool, kinds: Sequence[Any]
) -> None:
    """Generate the body of a tile function, which calls the function of ``result``."""
    S, failed, line, b, h, i, j, lines, length, stride, is_transposed = loop.args
    builder = ir.IRBuilder(loop.append_basic_block())
    values, returned = _read_values(context, builder, line, kinds), result.signature.return_type
    function = context.declare_function(builder.module, result.fndesc)

    def call(x: Any, y: Any, i: Any, j: Any) -> None:
        place = builder.gep(S, [builder.add(builder.mul(y, stride), x)])
        old = builder.load(place)
        given = [*([old] if is_score else []), b, h, i, j, *values]
        status, new = context.call_conv.call_function(
            builder, function, returned, result.signature.args, given
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(INT(1), failed)
            builder.ret_void()
        new = context.cast(builder, new, returned, item)
        builder.store(new if is_score else builder.and_(old, new), place)

    is_normal = builder.icmp_signed("==", is_transposed, INT(0))
    for is_this, turned in ((is_normal, False), (builder.not_(is_normal), True)):
        with (
            builder.if_then(is_this),
            cgutils.for_range(builder, lines) as outer,
            cgutils.for_range(builder, length) as inner,
        ):
            x, y = inner.index, outer.index
            row, column = (x, y) if turned else (y, x)
            call(x, y, builder.add(i, row), builder.add(j, column))
    builder.ret_void()


def _type_of(kind: Any) -> Any:
    """Return numba's type of a captured value of this ``kind``, from ``Reading.key``."""
    if isinstance(kind, tuple):
        _, dtype, ndim, is_contiguous = kind
        layout, item = "C" if is_contiguous else "A", numba.from_dtype(dtype)
        return types.Array(item, ndim, layout, readonly=True, aligned=False)
    return I64 if kind is int else numba.from_dtype(np.dtype(kind))  # not C's long


def _read_values(context: Any, builder: Any, line: Any, kinds: Sequence[Any]) -> list[Any]:
    """Generate code that reads the captured values, which follow the address in a line."""
    at, values = 1, []

    def read() -> Any:
        nonlocal at
        at += 1
        return builder.load(builder.gep(line, [INT(at - 1)]))

    for kind in kinds:
        value = read()
        if isinstance(kind, types.Array):
            shape, strides = ([read() for _ in range(kind.ndim)] for _ in range(2))
            pointer = builder.inttoptr(value, INT.as_pointer())
            value = array_at(context, builder, kind, pointer, shape, strides)
        elif isinstance(kind, types.Float):
            value = builder.bitcast(value, ir.DoubleType())
            value = context.cast(builder, value, types.float64, kind)
        else:
            value = context.cast(builder, value, I64, kind)
        values.append(value)
    return values


def _with_arguments(function: FunctionType, number: int, paths: list[tuple[str, ...]]) -> Any:
    """Return numba's IR of ``function``, whose captured values at ``paths`` become parameters.

    The new parameters follow the first ``number``; other captured values and defaults are constant.
    """
    defaults = defaults_of(function)
    identity = FunctionIdentity.from_function(function)
    code = Interpreter(identity).interpret(ByteCode(identity))
    written = function.__code__
    known = written.co_varnames[: written.co_argcount + written.co_kwonlyargcount]
    if known != tuple(code.arg_names) or len(known) < number or {*known[number:]} - {*defaults}:
        raise TypeError(f"it takes {inspect.signature(function)}: expected {number} parameters")
    found = reversed(captured(function))  # of a module's two names, only the first has attributes
    firsts = {module: path for path, module in found if isinstance(module, ModuleType)}
    modules: dict[str, tuple[tuple[str, ...], Any]] = {}  # by the variable that holds them
    read = {path[:-1] for path in paths}  # modules of which an attribute is an argument
    for block in code.blocks.values():
        for step in block.body:
            value: Any = getattr(step, "value", None)
            module = None
            if isinstance(value, (numba_ir.Global, numba_ir.FreeVar)):
                path, old = (value.name,), value.value
            elif isinstance(value, numba_ir.Arg) and value.index >= number:
                path, old = (value.name,), defaults[value.name]
            elif getattr(value, "op", None) == "getattr" and value.value.name in modules:
                root, module = modules[value.value.name]
                path, old = (*root, value.attr), getattr(module, value.attr)
            else:
                if any(modules.get(x.name, ((),))[0] in read - {()} for x in step.list_vars()):
                    raise TypeError("it does more with a module than to read its attributes")
                continue
            new = substitute(".".join(path), old)
            if path in paths:
                at = paths.index(path)
                step.value = numba_ir.Arg(f"captured.{at}", number + at, value.loc)
            elif isinstance(new, ModuleType) or new is TORCH:
                modules[step.target.name] = firsts.get(old, path), new
            elif new is not old or isinstance(value, numba_ir.Arg) or module is TORCH:
                step.value = numba_ir.Global(path[-1], new, value.loc)
            code._definitions[step.target.name] = [step.value]
    names = [f"captured.{at}" for at in range(len(paths))]
    code.arg_names = (*code.arg_names[:number], *names)
    code.arg_count = len(code.arg_names)
    return code
