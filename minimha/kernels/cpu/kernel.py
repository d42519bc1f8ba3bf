"""Define ``Kernel``, which compiles a CPU kernel on first use, and ``Plan``, which calls it.

Every CPU rung is a function of two arguments. The first is a line of memory, which holds all other
arguments. The second is the number of the thread, 0 for the caller. A rung begins with ``unpack``
(see ``arguments``)::

    q, k, v, mask, bias, o, O, L, memory, sizes = unpack(line, worker)

q, k, v   (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), read in place: any strides except the
          last, which is one item. float32, float64, or 16-bit numbers as their bits (uint16). k and
          v may be int8, or float8_e4m3fn as its bits (uint8); q is then float32.
mask      (B, H, Lq, Lk) bool, any strides; of size 0 if there is none
bias      (B, H, Lq, Lk), compute dtype, any strides; of size 0 if there is none
o         the fields of ``CPUOptions``: options, the caller's functions, and the rows of each
          sequence. B above is the arrays' first axis, not the number of sequences,
          ``len(o.queries)``. ``o.k_scale`` and ``o.v_scale`` (B, Hkv, Lk) are the scales of 8-bit
          k and v, any strides; of size 0 if there are none
O, L      the results: (B, H, Lq, Dv), stored like v, and (B, H, Lq), the compute dtype
memory    the rung's buffers, 1-D arrays, one per thread unless shared; ``counters``, which all
          threads share; ``worker``, the number of the thread; ``workers``, the number of threads
sizes     two integers of the rung, such as block sizes
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from minimha.equations.arguments import cast
from minimha.equations.eight_bits import SCALES
from minimha.equations.functions import Placed
from minimha.equations.problem import Problem, factor_against_overflow
from minimha.equations.sequences import one_per_entry
from minimha.kernels import os_threads
from minimha.kernels.cpu import functions
from minimha.kernels.cpu.arguments import (
    AXES,
    BYTE,
    CACHE_LINE,
    DOUBLE,
    FAILED,
    HEADERS,
    INDEX,
    NONFINITE,
    NUMBERS,
    REAL,
    SMALL,
    TASKS,
    Buffer,
    CPUOptions,
    Layout,
    address,
    pack,
    slots,
)
from minimha.kernels.cpu.blocks import blocks_of, no_blocks
from minimha.kernels.cpu.compiler import ONCE, Compiled, compiled
from minimha.kernels.cpu.disk import File
from minimha.kernels.cpu.pool import pool
from minimha.kernels.cpu.selection import selection_of
from minimha.kernels.options import NO_BIAS, NO_MASK, NO_SCALE, options

LONG = 1 << 33  # products: some tenths of a second, so that Ctrl-C must end the call
PAGE = 1 << 12  # bytes
LARGEST_REMEMBERED = 1 << 16  # bytes that a remembered plan holds at most
FLOAT64, UINT8, INT64 = np.dtype(np.float64), np.dtype(np.uint8), np.dtype(np.int64)
CANCELLED = 1 << 62  # a task that does not exist
SPARES, LARGEST_SPARE = 4, 1 << 23  # blocks of memory kept for later calls, and their bytes


class CompilationFailed(RuntimeError):  # noqa: N818  (it states a fact about the machine)
    """Raised if a kernel cannot be compiled on this machine."""


class Sizes(NamedTuple):
    """Block sizes, buffer lengths (in items) and number of threads of a kernel for a problem."""

    blocks: tuple[int, ...]
    lengths: dict[str, int]
    workers: int = 1


class Kernel:
    """A kernel: a Python function and its machine code for each dtype of stored q, k and v.

    Besides O and L the kernel writes temporary ``buffers``. ``sizes(problem, **chosen)`` returns
    its ``Sizes``. If ``widens`` is True, the kernel reads 16-bit numbers; otherwise these are
    widened before the call. If ``skips`` is True, the kernel skips blocks that a ``mask_mod`` hides
    completely, provided that K and V together have at least ``worth_skipping`` numbers. For fewer,
    finding such blocks takes longer than reading them. If ``gathers`` is True, the kernel reads
    only the keys in ``key_indices``; otherwise it reads all keys and hides the others. Weights
    before normalisation are at most ``largest_weight``, up to rounding.
    """

    def __init__(
        self, function: Callable[..., None], buffers: dict[str, Buffer],
        sizes: Callable[..., Sizes], widens: bool = False, scales: bool = False,
        skips: bool = False, worth_skipping: int = 0, gathers: bool = False,
        largest_weight: int = 1,
    ) -> None:  # fmt: skip
        self.function, self.widens, self.buffers, self.sizes = function, widens, buffers, sizes
        self.scales = scales
        self.skips, self.worth_skipping = skips, worth_skipping
        self.gathers, self.largest_weight = gathers, largest_weight
        self.slots = slots(buffers)
        self.compiled: dict[np.dtype[Any], Compiled] = {}

    def plan(self, problem: Problem, **chosen: int) -> Plan:
        """Return a ``Plan`` for ``problem``; ``chosen`` overrides sizes, such as ``B_c``."""
        problem = self.readable(problem)
        return Plan(self, problem, self.sizes(problem, **chosen))

    def forward(self, problem: Problem, **chosen: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output O and log-sum-exp L of ``problem``; see ``equations.tiled.forward``."""
        return self.plan(problem, **chosen)(problem)

    def readable(self, problem: Problem) -> Problem:
        """Return ``problem`` with 8-bit k and v widened, unless the kernel reads 8-bit numbers.

        Either way, q is cast to the compute dtype. A problem without 8-bit k and v is returned
        unchanged.
        """
        if problem.k_scale is None or not self._reads_bytes(problem):
            return problem.widened()
        return replace(problem, q=cast(problem.q, problem.compute))

    def _reads_bytes(self, problem: Problem) -> bool:
        return self.scales and problem.compute == np.float32

    def storage(self, problem: Problem) -> np.dtype[Any]:
        """Return the dtype in which the kernel reads k and v of ``problem``."""
        if problem.k_scale is not None and self._reads_bytes(problem):
            return np.dtype(np.int8 if problem.k.dtype.kind == "i" else np.uint8)
        if not self.widens:
            return problem.compute
        return np.dtype(np.uint16) if problem.dtype.itemsize == 2 else problem.dtype

    def compile(self, storage: np.dtype[Any], is_ahead: bool = False) -> Compiled:
        """Load or compile the machine code for dtype ``storage`` of q, k and v.

        Logs a compilation unless ``is_ahead``. Raises CompilationFailed if numba or LLVM fails.
        """
        if storage not in self.compiled:
            name = self.name(storage)
            try:
                notice = None if is_ahead else f"{ONCE}; minimha.compile() does it ahead"
                self.compiled[storage] = compiled(
                    self.function, _signature(storage), self.file(storage), notice
                )
            except Exception as error:  # numba and LLVM raise errors of many types
                summary = str(error).strip().splitlines() or [""]
                raise CompilationFailed(
                    f"{name} cannot be compiled here: {type(error).__name__}: {summary[0]}"
                ) from error
        return self.compiled[storage]

    def file(self, storage: np.dtype[Any]) -> File:
        """Return the file of the machine code for dtype ``storage`` of q, k and v."""
        return File(self.name(storage), str(_signature(storage)))

    def name(self, storage: np.dtype[Any]) -> str:
        """Return the kernel's name in the log and on disk, such as "tiles-float32"."""
        return f"{self.function.__name__}-{storage.name}"


class Ready(NamedTuple):
    """A call of a kernel on fixed arrays, which compiled code can repeat.

    Before each call, the integers of ``line`` from ``counters`` on must be 0. Afterwards,
    ``line[counters + NONFINITE]`` is 1 if the output is not finite. ``q_offset`` and ``kv_lengths``
    (B,) are read anew. ``held`` keeps alive what ``line`` points to.
    """

    address: int
    line: array[int]
    counters: int
    workers: int
    O: NDArray[Any]
    q_offset: NDArray[np.int64]
    kv_lengths: NDArray[np.int64]
    held: Any


class Plan:
    """A reusable call of a kernel for problems of equal shapes, strides, dtypes and options.

    A plan does not depend on the numbers in q, k and v. Several threads may call it at once.
    """

    def __init__(self, kernel: Kernel, problem: Problem, sizes: Sizes) -> None:
        (B, H, Lq, D), Dv = problem.q.shape, problem.v.shape[3]
        self.compute, self.storage = problem.compute, kernel.storage(problem)
        self._of_kernel = kernel.readable
        sizes_of = [self.storage.itemsize] * 3
        if problem.k_scale is not None:
            sizes_of[0] = problem.compute.itemsize
        self._itemsizes = dict(zip("qkv", sizes_of, strict=True))
        blocks, lengths, self.workers = sizes
        self._rows, self.shape = (B, H, Lq), (B, H, Lq, Dv)
        is_narrow = self.storage == np.uint16
        self._result = problem.dtype if is_narrow else problem.compute
        self.is_long = problem.num_pairs * (D + Dv) >= LONG
        self._largest_sum = int(problem.kv_lengths.max(initial=0)) * kernel.largest_weight
        self._tiles = {
            function.name: functions.tile_function(function)
            for function in functions.given(problem)
        }
        # A plan may live longer than the arrays and functions of its first call.
        light = replace(problem.without_numbers(), score_mod=None, mask_mod=None, readings={})
        self._problem = light if self._tiles else None
        o = self._options(kernel, problem)
        self._held = {
            "mask": NO_MASK if problem.attn_mask is None else problem.attn_mask,
            "bias": NO_BIAS[problem.compute] if problem.attn_bias is None else problem.attn_bias,
        } | {name: getattr(o, name) for name in SMALL}
        scales = {name: getattr(problem, name) for name in SCALES.values()}
        self._brings_scales = problem.k_scale is not None
        if not self._brings_scales:
            self._held |= dict.fromkeys(scales, NO_SCALE[problem.compute])
        every = scales | self._held
        layouts = {name: Layout(array.shape, array.strides) for name, array in every.items()}
        layouts |= {name: self._layout(name, getattr(problem, name)) for name in "qkv"}
        layouts |= {"O": _contiguous(self.shape, self._result.itemsize)}
        layouts |= {"L": _contiguous(self._rows, problem.compute.itemsize)}
        starts = self._place(kernel.buffers, lengths, layouts)
        num_counters = TASKS + lengths.get("counters", 0)
        self._line = pack(layouts, kernel.slots, o, blocks, self.workers, num_counters)
        for name, held in self._held.items():
            self._line[kernel.slots[name]] = address(held)
        for name, start in starts.items():
            self._line[kernel.slots[name]] = start
        first = kernel.slots["v"] + 1 + AXES
        self._strides_of_v = slice(first, first + AXES)
        self._scales = [kernel.slots[name] for name in scales]
        self._counters = kernel.slots["counters"]
        self._numbers = kernel.slots["numbers"]
        self._kernel = kernel.compile(self.storage)

    def _place(
        self, buffers: dict[str, Buffer], lengths: dict[str, int], layouts: dict[str, Layout]
    ) -> dict[str, int]:
        """Return the offset of each buffer in a call's memory, and add its layout to ``layouts``.

        Each thread's buffers are on separate pages. A core prefetches the rest of a page that it
        reads, and would otherwise take cache lines from a core that writes there.
        """
        dtypes = {REAL: self.compute, DOUBLE: FLOAT64, BYTE: UINT8, INDEX: INT64}
        itemsizes = {name: dtypes[buffer.kind].itemsize for name, buffer in buffers.items()}
        sizes = {name: _rounded(lengths[name] * itemsizes[name], CACHE_LINE) for name in buffers}
        own = sum(size for name, size in sizes.items() if not buffers[name].is_shared)
        per_thread = _rounded(own, PAGE)
        ends = {False: 0, True: self.workers * per_thread}  # so far, by ``is_shared``
        starts = {}
        for name, buffer in buffers.items():
            layouts[name] = Layout((lengths[name],), (itemsizes[name], per_thread))
            starts[name] = ends[buffer.is_shared]
            ends[buffer.is_shared] += sizes[name]
        self._size = ends[True]
        return starts

    def _options(self, kernel: Kernel, problem: Problem) -> Any:
        """Return the ``CPUOptions`` of ``problem``, without addresses of functions."""
        (B, H, Lq, _), Lk, (b, h, key) = problem.q.shape, problem.k.shape[2], problem.corner
        rows = problem.sequences or one_per_entry(B, Lq, Lk)
        is_large = problem.k.size + problem.v.size >= kernel.worth_skipping
        is_gathering = kernel.gathers and problem.key_indices is not None
        is_skipping = kernel.skips and problem.mask_mod is not None and is_large
        is_skipping = is_skipping and not is_gathering
        hidden = blocks_of(problem) if is_skipping else no_blocks(H)
        return CPUOptions(  # type: ignore[call-arg]  # mypy wants literals
            *options(problem), queries=np.ascontiguousarray(rows.queries),
            pages=np.ascontiguousarray(rows.pages), first_keys=rows.first_keys,
            ids=rows.ids + b, page_size=rows.page_size, score_mod=0, mask_mod=0, first_head=h,
            first_key=key, **hidden._asdict(), failed=None,
            **selection_of(problem, kernel.gathers)._asdict(),
        )  # fmt: skip

    def __call__(self, problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return output O and log-sum-exp L of ``problem``.

        L has the compute dtype. O has the dtype of ``problem`` if the kernel reads 16-bit numbers,
        else the compute dtype.
        """
        problem = self._of_kernel(problem)
        given = {"q": problem.q, "k": problem.k, "v": problem.v}
        q, k, v = (x if self._is_readable(n, x) else self._copy(n, x) for n, x in given.items())
        scales = [x for x in (problem.k_scale, problem.v_scale) if x is not None]
        return self.run(q, k, v, problem.taken, scales)

    def run(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], called: dict[str, Placed],
        scales: Sequence[NDArray[Any]] = (),
    ) -> tuple[NDArray[Any], NDArray[Any]]:  # fmt: skip
        """Return output O and log-sum-exp L for arrays of the planned shapes, strides and dtypes.

        ``called`` maps "score_mod" and "mask_mod" to functions. Each must have the code of the
        planned function, but may have captured other numbers and arrays. ``scales`` are those of
        8-bit k and v, (B, Hkv, Lk) each; q then has the compute dtype.
        """
        O, L, is_finite = self._launch(self._line_with(scales), q, k, v, called)
        if not is_finite:
            with np.errstate(all="ignore"):
                V = v.astype(self.compute, copy=False)
                factor = factor_against_overflow(V, self._largest_sum)
                if factor < 1:
                    small = v * v.dtype.type(factor)
                    line = self._line_with(scales)
                    line[self._strides_of_v] = array("q", small.strides)
                    again, _, _ = self._launch(line, q, k, small, called)
                    O = np.where(np.isfinite(O), O, again / factor)
        return O, L

    def ready(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> Ready:
        """Return a call on these arrays, which the kernel reads in place.

        Outputs that are not finite are not computed again, as in ``run``.
        """
        O, L = np.empty(self.shape, self._result), np.empty(self._rows, self.compute)
        arrays, line = (q, k, v, O, L, memory_of(self._size)), self._line[:]
        HEADERS.pack_into(line, 0, *map(id, arrays))
        at, lengths = self._held["q_offset"], self._held["kv_lengths"]
        return Ready(
            self._kernel.address, line, self._counters, self.workers, O, at, lengths, (self, arrays)
        )

    def _line_with(self, scales: Sequence[NDArray[Any]]) -> array[int]:
        """Return a copy of the plan's line with the addresses of ``scales``, if there are any."""
        line = self._line[:]
        for slot, factors in zip(self._scales, scales, strict=False):
            line[slot] = address(factors)
        return line

    def _launch(
        self, line: array[int], q: NDArray[Any], k: NDArray[Any], v: NDArray[Any],
        called: dict[str, Placed],
    ) -> tuple[NDArray[Any], NDArray[Any], bool]:  # fmt: skip
        """Complete ``line`` and call the kernel; return O, L, and whether all of O is finite."""
        O, L = np.empty(self.shape, self._result), np.empty(self._rows, self.compute)
        if not L.size:
            return O, L, True
        memory = memory_of(self._size)
        arrays = q, k, v, O, L, memory
        HEADERS.pack_into(line, 0, *map(id, arrays))
        held: list[Any] = [arrays, called]
        for name, placed in called.items():
            captured = self._tiles[name].line(placed.reading.values)
            line[self._numbers + NUMBERS.index(name)] = captured.buffer_info()[0]
            held.append(captured)
        if self.is_long and threading.current_thread() is threading.main_thread():
            # Ctrl-C reaches only the main thread while it runs Python.
            tasks = slice(self._counters + TASKS, None)
            none_left = array("q", [CANCELLED]) * len(line[tasks])
            cancel = partial(line.__setitem__, tasks, none_left)  # one step
            os_threads.call([partial(self._run, line, held)], cancel)
        else:
            self._run(line, held)
        give_back(memory)
        if self._problem is not None and line[self._counters + FAILED]:
            given: dict[str, Any] = {name: placed.function for name, placed in called.items()}
            functions.raise_again(replace(self._problem, **given))
        return O, L, not line[self._counters + NONFINITE]

    def _run(self, line: array[int], held: Any) -> None:
        """Call the kernel, while ``held`` keeps alive all memory to which ``line`` points."""
        at, _ = line.buffer_info()
        if self.workers == 1:
            self._kernel.call(at, 0)
        else:
            pool().run(self._kernel.address, at, self.workers)

    def fits(self, problem: Problem, given: Sequence[NDArray[Any]]) -> bool:
        """Return whether the plan can be stored for later calls with arrays like ``given``.

        True if the arrays need no conversion, the plan holds little memory, and captured values of
        ``score_mod`` are arguments of its machine code.
        """
        is_light = sum(array.nbytes for array in self._held.values()) <= LARGEST_REMEMBERED
        name, tiles = "score_mod", self._tiles
        is_general = name not in tiles or tiles[name].takes(problem.readings[name].values)
        is_direct = all(
            x.dtype == getattr(problem, n).dtype for n, x in zip("qkv", given, strict=True)
        )
        q, k, v = given
        q = cast(q, self.compute) if self._brings_scales else q  # as in every call
        is_direct &= all(self._is_readable(n, x) for n, x in zip("qkv", (q, k, v), strict=True))
        return is_light and is_general and is_direct

    def _is_readable(self, name: str, array: NDArray[Any]) -> bool:
        return is_readable(array, self._itemsizes[name])

    def _layout(self, name: str, array: NDArray[Any]) -> Layout:
        if self._is_readable(name, array):
            return Layout(array.shape, array.strides)
        return _contiguous(array.shape, self._itemsizes[name])

    def _copy(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        is_widened = array.itemsize != self._itemsizes[name]
        return np.require(array, self.storage if is_widened else None, ["C", "ALIGNED"])


def is_readable(array: NDArray[Any], size: int) -> bool:
    """Return whether a kernel can read ``array`` in place as items of ``size`` bytes.

    The array must be aligned, and its last axis contiguous. 16-bit numbers are read as their bits.
    """
    if array.itemsize != size or not array.flags.aligned:
        return False
    is_contiguous = array.shape[3] <= 1 or array.strides[3] == size
    return is_contiguous and not any(stride % size for stride in array.strides)


def _signature(storage: np.dtype[Any]) -> Any:
    return types.void(types.CPointer(numba.from_dtype(storage)), types.int64)


_spares: list[NDArray[np.uint8]] = []


def memory_of(nbytes: int) -> NDArray[np.uint8]:
    """Return at least ``nbytes``, aligned to a page; reuse memory, because new pages are slow."""
    try:
        spare = _spares.pop()
        if spare.nbytes >= nbytes:
            return spare
    except IndexError:  # none, or another thread took the last one
        pass
    block = np.empty(nbytes + PAGE, np.uint8)
    return block[-address(block) % PAGE :]


def give_back(memory: NDArray[np.uint8]) -> None:
    """Keep ``memory`` for later calls of ``memory_of``, unless it is large."""
    if len(_spares) < SPARES and memory.nbytes <= LARGEST_SPARE:
        _spares.append(memory)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> Layout:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return Layout(shape, tuple(strides))


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
