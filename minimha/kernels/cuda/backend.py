"""The backend "cuda": the best rung of the CUDA ladder that takes a problem, on the current GPU.

NumPy arrays are copied to the GPU and back by ``forward``. Arrays that lie on a GPU come through
``attend``: they are read where they lie, on their library's stream, and the result is an array of
that library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels.cuda import arguments as cuda_entry
from minimha.kernels.cuda import copies
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda.arguments import ArrayAt, Arrays, Pairs, Rows
from minimha.kernels.cuda.availability import is_device_array
from minimha.kernels.cuda.interop import (
    DeviceArray,
    described,
    empty_like,
    needs_to_wait,
    stream_of,
)
from minimha.kernels.cuda.launch import Launch
from minimha.kernels.ladder import CUDA_LADDER, FEW_QUERIES

TAKE_ARRAYS = ("cuda.rung1_rows", "cuda.rung2_tiles")  # the other rungs take addresses
TENSOR_CORES = (8, 0)  # since when 16-bit numbers are multiplied as a rung needs it
SHARED = 99 << 10  # bytes of shared memory with which every rung is content
SCORED = ("attn_mask", "attn_bias")
SMALL = ("q_offset", "kv_lengths", "alibi_slopes", "sinks")  # these may lie anywhere


def unsupported(problem: Problem) -> str | None:
    """None: rungs 1 and 2 take every problem."""
    return None


def forward(problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L of ``problem``; see ``minimha.equations.dense.forward``.

    Raises
    ------
    MemoryError
        The problem does not fit into the GPU's memory.
    DeviceError
        The driver failed.
    """
    B, H, Lq, _ = problem.q.shape
    if B * Lq == 0:
        O = np.zeros((B, H, Lq, problem.v.shape[3]), problem.dtype)
        return O, np.zeros((B, H, Lq), problem.compute)
    return solve(*rung_for(problem, gpu.current()))


def solve(name: str, problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """O and L from the rung of that name, which takes ``problem`` as it is."""
    (B, H, Lq, _), Dv = problem.q.shape, problem.v.shape[3]
    with gpu.DeviceMemory(gpu.current()) as memory:
        if name in TAKE_ARRAYS:
            arrays = cuda_entry.placed_arrays(problem, memory.array)
            _run(name, problem, arrays, memory)
            O = memory.get(arrays.O.address, (B, H, Lq, Dv), problem.compute)
            return O, memory.get(arrays.L.address, (B, H, Lq), problem.compute)
        arguments = cuda_entry.place(problem, memory)
        _run(name, problem, arguments, memory)
        return cuda_entry.taken(problem, arguments, memory)


def rung_for(problem: Problem, device: gpu.Device) -> tuple[str, Problem]:
    """The best rung on ``device``, and ``problem`` as that takes it.

    Few queries decode; 16-bit numbers go to the tensor cores, float32 to register tiles, float64 to
    shared tiles. 16-bit numbers that the rungs for them cannot take, or the GPU, are widened.
    """
    name, dtype = next(_rungs(problem, device.cc, device.shared))
    return name, problem if dtype == problem.dtype else widened(problem)


def _rungs(
    problem: Problem, cc: tuple[int, int], shared: int
) -> Iterator[tuple[str, np.dtype[Any]]]:
    """The rungs that take ``problem``, best first, and the dtype in which each takes it."""
    for name in reversed(CUDA_LADDER):
        if name == "cuda.rung5_decode" and problem.q.shape[2] > FEW_QUERIES:
            continue
        for given in _candidates(problem, cc):
            if name in TAKE_ARRAYS and given.dtype != given.compute:
                continue
            is_taken = _module(name).unsupported(given) is None
            if is_taken and (shared >= SHARED or _needs(name, given) <= shared):
                yield name, given.dtype


def _candidates(problem: Problem, cc: tuple[int, int]) -> Iterator[Problem]:
    """``problem`` as it is, if the GPU can take it so, then the outline of a wider one."""
    if problem.dtype == problem.compute or cc >= TENSOR_CORES:
        yield problem
    if problem.dtype != problem.compute:
        one = np.zeros((), problem.compute)
        q, k, v = (np.broadcast_to(one, x.shape) for x in (problem.q, problem.k, problem.v))
        yield replace(problem, q=q, k=k, v=v, dtype=problem.compute)


def _needs(name: str, problem: Problem) -> int:
    """Bytes of shared memory that a block of the rung asks for."""
    if name in TAKE_ARRAYS:
        return 0
    rows, pairs = Rows(0, 0, 0, 0), Pairs(0, 0, 0, 0, 0)
    o = cuda_entry.numbers(problem, lambda arrays: [0] * len(arrays))
    nothing = cuda_entry.Arguments(rows, rows, rows, pairs, pairs, o, rows, 0)
    launches = _module(name).launches(problem, nothing, lambda shape: 0)
    return max((launch.shared for launch, _ in launches), default=0)


def widened(problem: Problem) -> Problem:
    """``problem`` in the compute dtype; arrays that are one number, broadcast, stay so."""

    def wide(array: NDArray[Any]) -> NDArray[Any]:
        if array.size and not any(array.strides):
            return np.broadcast_to(array[:1, :1, :1, :1].astype(problem.compute), array.shape)
        return array.astype(problem.compute)

    q, k, v = (wide(array) for array in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v, dtype=problem.compute)


def attend(given: dict[str, Any], options: dict[str, Any], return_lse: bool) -> Any:
    """``minimha.attention`` for arrays that lie on a GPU.

    ``given`` holds every argument that may be an array, ``options`` the others.

    Raises
    ------
    TypeError, ValueError
        Arrays that lie on different devices or on one that is not current, or a stream of another
        device; dtypes that differ; and what the door says.
    MemoryError
        The problem does not fit into the GPU's memory.
    """
    _check_places(given)
    there = {name: x for name, x in given.items() if is_device_array(x)}
    device = gpu.current()
    _check_devices(there, device)  # first, since torch gives away only what lies on the current one
    arrays = {name: described(name, x) for name, x in there.items()}
    _check_dtypes(arrays)
    stream = stream_of(given["q"], device.ordinal)
    if not gpu.is_stream_of(stream, device):
        raise ValueError(
            f"the current stream belongs to another device than GPU {device.ordinal}, where q "
            f"lies: make one of its streams current"
        )
    for array in arrays.values():
        if array.ready_on not in (None, stream):
            gpu.wait_for(stream, array.ready_on)
    with gpu.DeviceMemory(device, stream) as memory:
        stand_ins = {name: _stand_in(name, x, arrays, memory) for name, x in given.items()}
        problem = Problem.of(**stand_ins, **options)
        return _attend(given["q"], arrays, problem, return_lse, memory)


def _attend(
    q: Any,
    arrays: dict[str, DeviceArray],
    problem: Problem,
    return_lse: bool,
    memory: gpu.DeviceMemory,
) -> Any:
    B, H, Lq, _ = problem.q.shape
    shape = arrays["q"].shape[:-1]
    output = empty_like(q, (*shape, problem.v.shape[3]))
    lse = empty_like(q, shape, problem.compute) if return_lse else None
    if B * Lq:
        O = _lifted(described("output", output))
        if lse is None:
            at = memory.empty((B, H, Lq), problem.compute)
            L = DeviceArray(at, (B, H, Lq), (H * Lq, Lq, 1), problem.compute)
        else:
            L = _lifted(described("lse", lse), 3)
        name, given = rung_for(problem, memory.device)
        four = {name: _lifted(arrays[name]) for name in ("q", "k", "v", *SCORED) if name in arrays}
        if name in TAKE_ARRAYS:
            _attend_arrays(name, four, given, O, L, memory)
        else:
            _attend_addresses(name, four, given, O, L, memory)
        if needs_to_wait(q):
            gpu.finish(memory.stream)
    return (output, lse) if return_lse else output


def _attend_arrays(
    name: str,
    four: dict[str, DeviceArray],
    problem: Problem,
    O: DeviceArray,
    L: DeviceArray,
    memory: gpu.DeviceMemory,
) -> None:
    """Run a rung that takes arrays; whatever their strides, they are read in place."""
    compute, scores = problem.compute, (*problem.q.shape[:3], problem.k.shape[2])

    def as_array(key: str) -> ArrayAt:
        array = four[key]
        if key != "attn_mask" and array.dtype != compute:
            array = _copied(array, compute, array.shape[3], memory)
        return _at(_spread(array, scores) if key in SCORED else array)

    none = gpu.array_at(0, (0, 0, 0, 0), (0, 0, 0, 0), 1)
    result = O if O.dtype == compute else _room(O.shape, compute, memory)
    arguments = Arrays(
        q=as_array("q"),
        k=as_array("k"),
        v=as_array("v"),
        mask=as_array("attn_mask") if "attn_mask" in four else none,
        bias=as_array("attn_bias") if "attn_bias" in four else none,
        o=cuda_entry.placed_options(problem, memory.array),
        O=_at(result),
        L=_at(L),
    )
    _run(name, problem, arguments, memory)
    if result is not O:
        _copy(result, O, memory)


def _attend_addresses(
    name: str,
    four: dict[str, DeviceArray],
    problem: Problem,
    O: DeviceArray,
    L: DeviceArray,
    memory: gpu.DeviceMemory,
) -> None:
    """Run a rung that takes addresses; what it cannot read in place is copied on the device."""
    width, scores = cuda_entry.padded_width(problem), (*problem.q.shape[:3], problem.k.shape[2])

    def rows(array: DeviceArray) -> Rows:
        if not _is_readable(array, problem.dtype, width):
            array = _copied(array, problem.dtype, width, memory)
        return Rows(array.address, *array.strides[:3])

    def pairs(key: str, dtype: Any) -> Pairs:
        if key not in four:
            return Pairs(0, 0, 0, 0, 0)
        array = four[key]
        if array.dtype != dtype:
            array = _copied(array, dtype, array.shape[3], memory)
        array = _spread(array, scores)
        return Pairs(array.address, *array.strides)

    result = O
    if not _is_readable(O, problem.dtype, width):
        result = _room((*O.shape[:3], width), problem.dtype, memory)
    arguments = cuda_entry.Arguments(
        q=rows(four["q"]),
        k=rows(four["k"]),
        v=rows(four["v"]),
        mask=pairs("attn_mask", np.dtype(bool)),
        bias=pairs("attn_bias", np.dtype(np.float32)),
        o=cuda_entry.numbers(problem, memory.put_together),
        O=Rows(result.address, *result.strides[:3]),
        L=L.address,
    )
    _run(name, problem, arguments, memory)
    if result is not O:
        _copy(result, O, memory)


def _run(name: str, problem: Problem, arguments: Any, memory: gpu.DeviceMemory) -> None:
    settings: dict[str, Any] = {}
    if name == "cuda.rung5_decode":
        settings["multiprocessors"] = memory.device.multiprocessors
    launches: list[tuple[Launch, tuple[Any, ...]]] = _module(name).launches(
        problem, arguments, memory.scratch, **settings
    )
    for launch, values in launches:
        memory.launch(launch, values)


def _module(name: str) -> ModuleType:
    return import_module(f"minimha.kernels.{name}")


def _check_places(given: dict[str, Any]) -> None:
    """q, k, v, mask and bias all lie on a GPU, since none of them is copied there in silence."""
    is_there = {name: is_device_array(x) for name, x in given.items() if x is not None}
    there = next(name for name, on in is_there.items() if on)
    for name, on in is_there.items():
        if not on and name not in SMALL:
            raise TypeError(
                f"{there} lies on a GPU but {name} is a {type(given[name]).__name__} on the host: "
                f"q, k, v, attn_mask and attn_bias must all lie on one side"
            )


def _check_devices(there: dict[str, Any], device: gpu.Device) -> None:
    found = {name: _place(value) for name, value in there.items()}
    places = {name: place for name, place in found.items() if place is not None}
    for name, place in places.items():
        if place != places.get("q", place):
            raise ValueError(
                f"{name} lies on GPU {place} but q on GPU {places['q']}: all arrays must lie on one"
            )
        if place != device.ordinal:
            raise ValueError(
                f"{name} lies on GPU {place} but GPU {device.ordinal} is current: make GPU {place} "
                f"current first"
            )


def _place(value: Any) -> int | None:
    """Number of the device that holds ``value``; None if nothing says where an empty array lies."""
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[1])
    address = value.__cuda_array_interface__["data"][0]
    return gpu.device_at(address) if address else None


def _check_dtypes(arrays: dict[str, DeviceArray]) -> None:
    first = arrays["q"].dtype
    for name in ("q", "k", "v"):
        dtype = arrays[name].dtype
        if dtype.name not in copies.STORED:
            raise TypeError(
                f"{name} has dtype {dtype}: on a GPU float16, bfloat16, float32 and float64 are "
                f"taken"
            )
        if dtype != first:
            raise TypeError(
                f"{name} has dtype {dtype} but q has {first}: on a GPU q, k and v must have one"
            )
    bias = arrays.get("attn_bias")
    if bias is not None and bias.dtype.name not in ("bool", *copies.STORED):
        raise TypeError(f"attn_bias has dtype {bias.dtype}: on a GPU floating numbers are taken")


def _stand_in(
    name: str, value: Any, arrays: dict[str, DeviceArray], memory: gpu.DeviceMemory
) -> Any:
    """What the door checks in place of a device array: small ones themselves, others their shape.

    A bias has the compute dtype, or is boolean, which the door refuses.
    """
    if name not in arrays:
        return value
    array = arrays[name]
    if name in SMALL and len(array.shape) <= 1:
        return _fetched(array, memory)
    dtype = array.dtype
    if name == "attn_bias" and dtype != np.bool_:
        is_double = arrays["q"].dtype == np.float64
        dtype = np.dtype(np.float64 if is_double else np.float32)
    return np.broadcast_to(np.zeros((), dtype), array.shape)


def _fetched(array: DeviceArray, memory: gpu.DeviceMemory) -> NDArray[Any]:
    """A copy of at most one axis on the host."""
    if not array.shape or array.strides[0] == 1:
        return memory.get(array.address, array.shape, array.dtype)
    (size,), (step,) = array.shape, array.strides
    if step == 0 or size == 0:
        return np.resize(memory.get(array.address, (min(size, 1),), array.dtype), size)
    span = (size - 1) * abs(step) + 1
    start = array.address + min(0, (size - 1) * step) * array.dtype.itemsize
    return memory.get(start, (span,), array.dtype)[::step]


def _lifted(array: DeviceArray, ndim: int = 4) -> DeviceArray:
    """``array`` with leading axes of length 1, and stride 0 along every axis that is no longer.

    Such an axis may have any stride, even one that no rung could take.
    """
    missing = ndim - len(array.shape)
    shape, strides = (1,) * missing + array.shape, (0,) * missing + array.strides
    axes = zip(shape, strides, strict=True)
    return array._replace(
        shape=shape, strides=tuple(step if size > 1 else 0 for size, step in axes)
    )


def _spread(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """``array`` broadcast to ``shape``: stride 0 along the axes that it has once."""
    axes = zip(array.shape, array.strides, strict=True)
    return array._replace(
        shape=shape, strides=tuple(0 if size == 1 else step for size, step in axes)
    )


def _is_readable(array: DeviceArray, dtype: np.dtype[Any], width: int) -> bool:
    """Whether a rung that takes addresses can read rows, 16 bytes at once, where they lie."""
    steps = [step * dtype.itemsize for step in array.strides[:3]]
    return (
        array.dtype == dtype
        and array.shape[3] == width
        and array.strides[3] == 1
        and not any(at % 16 for at in (array.address, *steps))
    )


def _room(shape: tuple[int, ...], dtype: np.dtype[Any], memory: gpu.DeviceMemory) -> DeviceArray:
    """New contiguous memory, 4-D."""
    _, H, L, D = shape
    return DeviceArray(memory.empty(shape, dtype), shape, (H * L * D, L * D, D, 1), dtype)


def _copied(
    array: DeviceArray, dtype: np.dtype[Any], width: int, memory: gpu.DeviceMemory
) -> DeviceArray:
    """A contiguous copy on the device, in another dtype and width."""
    copy = _room((*array.shape[:3], width), dtype, memory)
    _copy(array, copy, memory)
    return copy


def _copy(source: DeviceArray, target: DeviceArray, memory: gpu.DeviceMemory) -> None:
    memory.launch(*copies.copying(_at(source), source.dtype, _at(target), target.dtype))


def _at(array: DeviceArray) -> ArrayAt:
    size = array.dtype.itemsize
    strides = tuple(step * size for step in array.strides)
    return gpu.array_at(array.address, array.shape, strides, size)
