"""Call the checked function on one problem, in this process, and read its result."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from functools import cached_property
from importlib import import_module
from inspect import Parameter, signature
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minimha.check import translation
from minimha.check.adapted import results
from minimha.check.answer import Answer
from minimha.check.conditions import POSITIONAL
from minimha.check.problems import Graded
from minimha.equations.arrays import FLOAT8, as_numpy, bfloat16, library_of, like
from minimha.equations.eight_bits import is_eight_bit
from minimha.equations.functions import PARAMETERS

Array = NDArray[Any]

LAYOUT = "BHLD"
ARRAYS = ("numpy", "torch", "jax", "cupy")
DTYPES = ("float32", "float16", "bfloat16")
WIDE = ("float32", "float64")  # output dtypes that lose no precision
IN_DTYPE = ("q", "k", "v", "attn_bias")
SAME = 256  # times the dtype's epsilon: the allowed difference of two runs
MOST_KEPT = 1 << 14  # numbers of an array whose memory is used again
LONGEST_REASON = 300  # characters of the function's error


Place = Literal["first", "last", "last of each length"]
Axes = tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]


# Each shows where queries stand.
PLACING: tuple[Mapping[str, Any], ...] = (
    {"is_causal": True}, {"window_size": (1, 1)}, {"alibi_slopes": np.array([1e3])},
)  # fmt: skip
# What a function may need beside: 64 queries are one sequence, 128 keys are one sequence, one
# page, or the list of each query.
SEQUENCE = {"cu_seqlens_q": np.array([0, 64])}
PACKED = {**SEQUENCE, "cu_seqlens_k": np.array([0, 128])}
PAGE = {"block_table": np.array([[0]]), "kv_lengths": np.array([128])}
LIST = {"key_indices": np.broadcast_to(np.arange(128), (1, 1, 64, 128))}
BESIDE: tuple[Mapping[str, Any], ...] = (
    {}, PACKED, PAGE, {**SEQUENCE, **PAGE}, LIST, {**LIST, **PACKED}, {**LIST, **PAGE},
)  # fmt: skip


class NotAnArray(TypeError):  # noqa: N818
    """Raised if the function did not return an array of numbers."""


class Caller:
    """Calls a function by the conventions of ``speaks``, with arrays in ``dtype``.

    ``arrays`` names the library of its arrays, by default the dialect's usual one. If the function
    refuses those, other imported libraries are tried. Only torch's arrays have a ``device``.
    ``layout`` is the order of the axes of q, k, v and the output. A function that speaks minimha
    but has no parameter ``q_offset`` is asked where its queries stand, and then gets only problems
    whose queries stand there. If it has no ``cu_seqlens_k``, its packed sequences have as many keys
    as queries.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        speaks: str,
        dtype: str,
        arrays: str | None = None,
        device: str | None = None,
        layout: str = LAYOUT,
    ) -> None:
        self.layout = layout
        self.function = translation.DIALECTS[speaks].adapted(function)
        self.speaks, self.device = speaks, device
        known = ("q_offset", "cu_seqlens_k") if speaks == "minimha" else ()
        self.lacks = {name for name in known if _lacks(function, name)}
        self.dtype = bfloat16("dtype") if dtype == "bfloat16" else np.dtype(dtype)
        if device:
            arrays = arrays or "torch"
            _check_device(device, arrays)
        self.kinds = [arrays] if arrays else self._likely()
        self._buffers: dict[Any, Any] = {}  # that the function got before

    def _likely(self) -> list[str]:
        first = translation.DIALECTS[self.speaks].arrays
        return [first, *(kind for kind in ARRAYS if kind != first and kind in sys.modules)][:3]

    def answer(self, arguments: Mapping[str, Any]) -> Answer:
        """Call the function twice on copies of a problem's arrays, and return its answer.

        An exception counts as a refusal. Changed inputs, or different outputs, count as faults.
        """
        reasons: dict[str, str] = {}
        for kind in self.kinds:
            try:
                answer = self._asked(kind, arguments)
            except NotAnArray as error:
                return Answer(faults=("not_an_array",), note=str(error))
            except translation.Refused as error:
                return Answer(refusal=str(error))
            except SystemExit as error:
                return Answer(faults=("crashes",), note=f"it ended the process: {error!r}")
            except Exception as error:
                reasons[_reason(error)] = kind
            else:
                self.kinds = [kind]
                return answer
        each = [f"given {kind}'s arrays, {reason}" for reason, kind in reasons.items()]
        return Answer(refusal="; ".join(each if len(each) > 1 else reasons))

    def _asked(self, kind: str, arguments: Mapping[str, Any]) -> Answer:
        try:
            return self._run(kind, arguments, wants_lse=True)
        except (translation.Refused, NotAnArray):
            raise
        except Exception:
            if not arguments.get("return_lse"):
                raise
        return self._run(kind, arguments, wants_lse=False)

    def _run(self, kind: str, arguments: Mapping[str, Any], *, wants_lse: bool) -> Answer:
        cast = {name: self._cast(name, value) for name, value in arguments.items()}
        given, keywords = self._translated(cast, wants_lse)
        output, lse, faults = self._once(kind, given, keywords, self._buffers)
        again, _, _ = self._once(kind, given, keywords)
        if not _same(output, again):
            faults.append("not_deterministic")
        elif not _identical(output, again):  # the first run may have been before a compilation
            third, _, _ = self._once(kind, given, keywords)
            faults += [] if _identical(again, third) else ["runs_differ_bitwise"]
        is_asked = wants_lse and arguments.get("return_lse")
        if not (is_asked and translation.DIALECTS[self.speaks].lse):
            lse = None  # the second result is not a log-sum-exp
        return self._read(cast, output, lse, faults)

    @cached_property
    def place(self) -> Place:
        """Where queries without an offset stand: at the first keys, or at the last ones."""
        first, of_length = map(self._sees_key_9, ({}, {"kv_lengths": np.array([72])}))
        if first is False:
            return "first"
        return "last of each length" if of_length is False else "last"

    def _sees_key_9(self, options: Mapping[str, Any]) -> bool | None:
        """Return whether the first of 64 queries over 128 keys sees key 9, or None if unknown.

        It does not if it is causal, or sees little but its own key, and stands at key 0, or at the
        first of the last 64 of 72 keys. Unknown is the answer of a function that refuses the
        problem, or returns only zeros.
        """
        x = {"q": np.zeros((1, 1, 64, 64)), "k": np.zeros((1, 1, 128, 64))}
        x["v"] = np.broadcast_to(np.arange(128)[:, None] > 8, x["k"].shape).astype(float)
        unplaced = copy(self)
        unplaced.lacks = set()  # these questions leave the offset to the function
        for more, option in product(BESIDE, PLACING):
            found = unplaced.answer({**x, **more, **options, **option}).output
            if found is not None and found.shape == x["q"].shape and found.any():
                return not (found[:, :, 0] == 0).all()
        return None

    def _translated(
        self, cast: Mapping[str, Any], wants_lse: bool
    ) -> tuple[list[Array], Mapping[str, Any]]:
        """Return the positional and the keyword arguments of the call."""
        given, keywords = translation.translated(self.speaks, cast, wants_lse=wants_lse)
        if "q_offset" in self.lacks:
            keywords = dict(self._without_offset(given, keywords))
        starts = [keywords.get(f"cu_seqlens_{X}", ()) for X in "qk"]
        if "cu_seqlens_k" in self.lacks and np.array_equal(*starts):
            keywords = {n: value for n, value in keywords.items() if n != "cu_seqlens_k"}
        order = [LAYOUT.index(axis) for axis in self.layout]
        return [np.ascontiguousarray(x.transpose(order)) for x in given], keywords

    def _without_offset(self, given: list[Array], keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out the offset if it is where the queries stand anyway.

        Raises ``Refused`` if a problem without an offset has them elsewhere.
        """
        if "q_offset" not in keywords and not {*POSITIONAL, *PARAMETERS} & set(keywords):
            return keywords
        usual = self._usual_offset(given, keywords) if self.place != "first" else 0
        is_usual = np.equal(keywords.get("q_offset", 0), usual)
        if "cu_seqlens_q" in keywords:  # a sequence without queries has no first one
            is_usual = is_usual | (np.diff(keywords["cu_seqlens_q"]) == 0)
        if np.all(is_usual):
            return {n: value for n, value in keywords.items() if n != "q_offset"}
        if "q_offset" not in keywords:
            raise translation.Refused("its queries stand at the last keys of each length")
        return keywords

    def _usual_offset(self, given: list[Array], keywords: Mapping[str, Any]) -> Any:
        """Return the offset of queries at the last keys, for all entries or for each."""
        Lq, Lk = (x.shape[2] for x in given[:2])
        starts, lengths = keywords.get("cu_seqlens_q"), keywords.get("kv_lengths")
        queries = Lq if starts is None else np.diff(starts)
        if lengths is not None and ("block_table" in keywords or self.place != "last"):
            return np.asarray(lengths) - queries
        return (Lk if starts is None else np.diff(keywords.get("cu_seqlens_k", starts))) - queries

    def _axes(self, cast: Mapping[str, Any]) -> Axes:
        """Return letters and sizes of the axes, for the output and for the log-sum-exp."""
        output, lse = translation.expected_shapes(self.speaks, cast["q"], cast["v"])
        if self.layout == LAYOUT:
            return output, lse
        names = {"B": "B", "H": "H", "L": "Lq", "D": "Dv"}
        sizes = tuple(output[1][LAYOUT.index(axis)] for axis in self.layout)
        return (f"({', '.join(names[axis] for axis in self.layout)})", sizes), lse

    def _once(
        self, kind: str, given: list[Array], keywords: Mapping[str, Any],
        buffers: dict[Any, Any] | None = None,
    ) -> tuple[Array, Array | None, list[str]]:  # fmt: skip
        """Output, log-sum-exp and faults of one call on copies of the arrays.

        The copies are new, or overwrite earlier ones of the same shape in ``buffers``.
        """
        theirs = [self._theirs(kind, x) for x in given]
        if buffers is not None and kind in ("numpy", "torch"):
            theirs = [_overwritten(buffers, n, x) for n, x in enumerate(theirs)]
        options = {name: self._theirs(kind, value) for name, value in keywords.items()}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            returned, extra = results(self.function(*theirs, **options))
            output = numbers_of(returned)
            lse = None if extra is None else numbers_of(extra)
        faults = []
        for before, after in zip(
            [*given, *keywords.values()], [*theirs, *options.values()], strict=True
        ):
            if isinstance(before, np.ndarray):
                now = numbers_of(after)
                if not _identical(before, now):
                    faults = ["writes_into_inputs"]
                if kind in ("numpy", "torch") and np.shares_memory(output, now):
                    return output.copy(), lse, ["returns_its_input"]
        return output, lse, faults

    def _cast(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind in "biu" or is_eight_bit(value.dtype):
            return value
        return value.astype(self.dtype if self._is_in_dtype(name) else np.float32)

    def _is_in_dtype(self, name: str) -> bool:
        return name in IN_DTYPE  # other options stay float32

    def _theirs(self, kind: str, value: Any) -> Any:
        """Copy an array into the library ``kind``; return other values unchanged."""
        if not isinstance(value, np.ndarray):
            return value
        copy = np.array(value, order="C")
        if kind == "numpy":
            return copy
        library = import_module({"jax": "jax.numpy"}.get(kind, kind))
        if kind == "cupy":
            return library.asarray(copy)
        array = like(library.zeros(0), copy)
        return array.to(self.device) if self.device and kind == "torch" else array

    def _read(
        self, cast: Mapping[str, Any], output: Array, lse: Array | None, faults: list[str]
    ) -> Answer:
        """Return an answer with arrays in minimha's order of axes, and with all faults."""
        faults, notes, name = [*faults], [], output.dtype.name
        wide, log_sum = _wide(output).copy(), None if lse is None else _wide(lse)
        for what, array, (letters, sizes) in zip(
            ("output", "log-sum-exp"), (output, lse), self._axes(cast), strict=True
        ):
            if array is not None and array.shape != sizes:
                faults.append("wrong_shape")
                notes.append(f"its {what} has shape {array.shape}: expected {letters} = {sizes}")
        if output.dtype != self.dtype:
            faults.append("wrong_dtype")
            if name not in WIDE:
                notes.append(f"its output has dtype {name}: expected {self.dtype.name}")
        if wide.ndim == len(LAYOUT):
            wide = wide.transpose([self.layout.index(axis) for axis in LAYOUT])
        wide, log_sum = translation.heads_first(self.speaks, wide, log_sum)
        return Answer(wide, log_sum, None, tuple(dict.fromkeys(faults)), name, "; ".join(notes))


def check_layout(layout: str, speaks: str, *, is_layer: bool = False) -> None:
    """Raise ValueError unless ``layout`` consists of the letters B, H, L and D in some order.

    For a layer, and for a dialect ``speaks`` with a fixed other layout, only "BHLD" is accepted.
    """
    if sorted(layout) != sorted(LAYOUT):
        raise ValueError(f"layout is {layout!r}: expected the letters B, H, L and D in some order")
    dialect = translation.DIALECTS[speaks]
    if layout != LAYOUT and (is_layer or dialect.kind != "attention" or not dialect.heads_first):
        what = "a layer" if is_layer else f"a function that speaks {speaks}"
        raise ValueError(f"layout is {layout!r}: {what} has a layout of its own")


def _lacks(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function cannot be given a keyword argument."""
    try:
        found = signature(function).parameters
    except (TypeError, ValueError):  # of some functions in C, nobody knows
        return False
    return name not in found and all(p.kind != Parameter.VAR_KEYWORD for p in found.values())


def _check_device(device: str, arrays: str) -> None:
    if arrays != "torch":
        raise ValueError(f"device is {device!r}, but only torch's arrays have one, not {arrays}'s")
    try:
        library = import_module("torch")
        library.zeros(1).to(device)
    except Exception as error:
        raise ValueError(f"device is {device!r}: {_reason(error)}") from None


def arguments_of(problem: Graded) -> Mapping[str, Any]:
    """Return a problem's arguments for ``Caller``: with a layer's matrices, and with calls."""
    calls = {"chunks": list(problem.chunks)} if problem.chunks else {}
    return {**problem.arguments, **(problem.layer or {}), **calls}


def numbers_of(value: Any) -> Array:
    """Convert an array of any library, or nested lists, to a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    elif library_of(value) == "cupy":
        value = value.get()
    try:
        array = as_numpy("output", value)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.dtype.kind not in "biuf" and array.dtype.name not in ("bfloat16", FLOAT8):
        raise NotAnArray(f"it returned {type(value).__name__}: expected an array of numbers")
    return array


def _wide(array: Array) -> Array:
    return array if array.dtype.name in WIDE else array.astype(np.float32)


def _overwritten(buffers: dict[Any, Any], place: int, array: Any) -> Any:
    """The numbers of ``array`` in memory that held others before, so that no address is a key."""
    if not hasattr(array, "shape") or np.prod(array.shape) > MOST_KEPT:
        return array
    buffer = buffers.setdefault((place, str(array.dtype), tuple(array.shape)), array)
    buffer[...] = array
    return buffer


def _identical(a: Array, b: Array) -> bool:
    return np.array_equal(_wide(a), _wide(b), equal_nan=True)


def _same(a: Array, b: Array) -> bool:
    """Return whether two runs agree up to the order of their sums."""
    if a.shape != b.shape:
        return False
    first, second = _wide(a), _wide(b)
    epsilon = 2.0**-7 if a.dtype.name == "bfloat16" else np.finfo(first.dtype).eps
    if a.dtype == np.float16:
        epsilon = 2.0**-10
    largest = abs(first[np.isfinite(first)]).max(initial=0)
    with np.errstate(all="ignore"):
        close = abs(first - second) <= SAME * epsilon * largest
    return bool((close | (first == second) | (np.isnan(first) & np.isnan(second))).all())


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:LONGEST_REASON]}" if words else type(error).__name__
