"""Define the backend "cuda", which runs the fastest CUDA kernel that supports a problem.

``forward`` uploads NumPy arrays to the current GPU and downloads the result. ``attend`` reads
arrays on a GPU in place, on their library's stream, and returns an array of that library. Both run
a ``Plan``; ``attend`` stores its plans for later calls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.arguments import compute_dtype
from minimha.equations.arrays import UNKNOWN, ordinal_of
from minimha.equations.functions import PARAMETERS
from minimha.equations.problem import Problem, stand_in
from minimha.kernels import remembered
from minimha.kernels.cuda import arguments as kernel_arguments
from minimha.kernels.cuda import driver as gpu
from minimha.kernels.cuda import functions
from minimha.kernels.cuda.arguments import DeviceArray, array_at, to_device, to_host
from minimha.kernels.cuda.copies import STORED, copying
from minimha.kernels.cuda.interop import as_device_array, empty_like, must_synchronize, stream_of
from minimha.kernels.cuda.launch import Launches, launches_of
from minimha.kernels.cuda.plans import Draft, Plan
from minimha.kernels.ladder import CUDA_LADDER, FEW_QUERIES

TAKE_ARRAYS = ("cuda.rung1_rows", "cuda.rung2_tiles")  # the other rungs take addresses
TENSOR_CORES = (8, 0)  # the first compute capability whose tensor cores the rungs can use
ONLY_ON = {"cuda.rung6_warpgroups": (9, 0)}  # rungs for a single compute capability
SHARED = 99 << 10  # bytes of shared memory that suffice for all other rungs
SMALL = ("q_offset", "kv_lengths", "alibi_slopes", "sinks")  # on the host or on the GPU
QKV = ("q", "k", "v")


def unsupported(problem: Problem) -> str | None:
    """Return why this backend cannot compute ``problem``, or None if it can.

    A problem is unsupported if it has ``key_indices`` or 8-bit k and v, or if numba cannot compile
    its ``score_mod`` or ``mask_mod``.
    """
    return kernel_arguments.refused(problem) or functions.unsupported(problem)


def forward(problem: Problem) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O and log-sum-exp L of ``problem``; see ``minimha.equations.dense.forward``.

    Raises MemoryError if the GPU's memory is too small, and DeviceError if the driver fails.
    """
    if problem.sequences is not None:  # one launch for each
        return problem.by_sequence(lambda part, s: forward(part))
    B, H, Lq, _ = problem.q.shape
    if B * Lq == 0:
        O = np.zeros((B, H, Lq, problem.v.shape[3]), problem.dtype)
        return O, np.zeros((B, H, Lq), problem.compute)
    return solve(*rung_for(problem, gpu.current()))


def solve(name: str, problem: Problem, **settings: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return output O and log-sum-exp L by the kernel ``name``, which must support ``problem``.

    ``name`` is a kernel of ``CUDA_LADDER``, such as "cuda.rung4_tensor_cores". ``settings`` are
    keywords of its function ``launches``, such as ``B_c`` of rung 4.
    """
    (B, H, Lq, _), Dv = problem.q.shape, problem.v.shape[3]
    dtype, width = _form(name, problem)
    with gpu.DeviceMemory(gpu.current()) as memory:
        on_host = kernel_arguments.host_arrays(problem, dtype, width)
        given = {key: to_device(array, memory) for key, array in on_host.items()}
        given["O"] = memory.empty_array((B, H, Lq, width or Dv), dtype)
        given["L"] = memory.empty_array((B, H, Lq), problem.compute)
        plan = _plan(name, problem, given, memory.device, **settings)
        plan.run({key: array.address for key, array in given.items()}, memory)
        return to_host(given["O"], memory)[..., :Dv], to_host(given["L"], memory)


def rung_for(problem: Problem, device: gpu.Device) -> tuple[str, Problem]:
    """Return the name of the fastest kernel for ``problem``, and ``problem`` in the kernel's dtype.

    At most ``FEW_QUERIES`` queries use rung 5. For more queries, 16-bit numbers use tensor cores
    (rung 6 on Hopper, else rung 4), float32 uses register tiles, and float64 uses shared tiles. If
    that rung does not support the problem, the next lower rung that does is used. 16-bit numbers
    are converted to float32 if ``device`` lacks tensor cores, or if no 16-bit kernel supports the
    problem. Raises the errors of ``functions.check`` for a ``score_mod`` or ``mask_mod`` that
    cannot be compiled.
    """
    functions.check(problem)
    name, dtype = next(_rungs(problem, device.cc, device.shared))
    return name, problem if dtype == problem.dtype else widened(problem)


def _rungs(
    problem: Problem, cc: tuple[int, int], shared: int
) -> Iterator[tuple[str, np.dtype[Any]]]:
    """Yield each kernel that supports ``problem``, best first, with its dtype."""
    for name in reversed(CUDA_LADDER):
        if not _is_for(name, problem.q.shape[2], cc):
            continue
        for given in _candidates(problem, cc):
            if name in TAKE_ARRAYS and given.dtype != given.compute:
                continue
            is_taken = _module(name).unsupported(given) is None
            if is_taken and (shared >= SHARED or _shared_bytes(name, given) <= shared):
                yield name, given.dtype


def _is_for(name: str, Lq: int, cc: tuple[int, int]) -> bool:
    """Return whether the kernel ``name`` is made for ``Lq`` queries and compute capability."""
    if name == "cuda.rung5_decode":
        return Lq <= FEW_QUERIES
    return name not in ONLY_ON or (cc == ONLY_ON[name] and Lq > FEW_QUERIES)


def _candidates(problem: Problem, cc: tuple[int, int]) -> Iterator[Problem]:
    """Yield ``problem``, if the GPU computes in its dtype, then zeros in the compute dtype."""
    if problem.dtype == problem.compute or cc >= TENSOR_CORES:
        yield problem
    if problem.dtype != problem.compute:
        yield problem.without_numbers(problem.compute)


def _shared_bytes(name: str, problem: Problem) -> int:
    """Return the dynamic shared memory, in bytes, of a block of the kernel ``name``."""
    return max((launch.shared for launch in launches_of(name, problem)), default=0)


def widened(problem: Problem) -> Problem:
    """Return ``problem`` with q, k and v converted to the compute dtype, float32 or float64.

    An array that repeats one number, with strides of 0, keeps these strides.
    """

    def wide(array: NDArray[Any]) -> NDArray[Any]:
        if array.size and not any(array.strides):
            return np.broadcast_to(array[:1, :1, :1, :1].astype(problem.compute), array.shape)
        return array.astype(problem.compute)

    q, k, v = (wide(array) for array in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v, dtype=problem.compute)


def attend(given: dict[str, Any], options: dict[str, Any], return_lse: bool) -> Any:
    """Compute ``minimha.attention`` on the GPU that holds the arrays; return arrays of q's library.

    Returns the output or, if ``return_lse``, the pair of output and log-sum-exp. ``given`` has the
    arguments that may be arrays, and ``options`` the other arguments, by name. Raises the errors of
    ``Problem.of``. Also raises TypeError if the dtypes of q, k and v differ, or if one of q, k, v,
    the mask and the bias is on the host. Raises ValueError if arrays are on different GPUs, or if
    the current stream belongs to another GPU.
    """
    ordinals, device = _ordinals(given), gpu.current()
    ordinal = _common(ordinals)
    if ordinal in (None, device.ordinal):
        return _attend(given, ordinals, options, return_lse, device)
    # This comes first, because torch exports only arrays on the current device.
    with gpu.made_current(ordinal) as device:
        return _attend(given, ordinals, options, return_lse, device)


def _attend(
    given: dict[str, Any],
    on_gpu: Iterable[str],
    options: dict[str, Any],
    return_lse: bool,
    device: gpu.Device,
) -> Any:
    """Compute ``attend`` on the current device, which holds all arrays."""
    arrays = {name: as_device_array(name, given[name]) for name in on_gpu}
    stream = stream_of(given["q"], device.ordinal)
    if not gpu.is_stream_of(stream, device):
        raise ValueError(
            f"the current stream belongs to another device than GPU {device.ordinal}, where q "
            f"is: make one of its streams current"
        )
    for array in arrays.values():
        if array.ready_on not in (None, stream):
            gpu.wait_for(stream, array.ready_on)
    with gpu.DeviceMemory(device, stream) as memory:
        return _computed(given, arrays, options, return_lse, memory)


def _computed(
    given: dict[str, Any],
    arrays: dict[str, DeviceArray],
    options: dict[str, Any],
    return_lse: bool,
    memory: gpu.DeviceMemory,
) -> Any:
    """Return the output, and L if ``return_lse``, from a stored or a new plan."""
    q, key = given["q"], _key(given, arrays, options, return_lse, memory.device)
    plan: Plan | None = remembered.recall(key)
    is_captured = gpu.is_capturing(memory.stream)
    if plan is None:
        if is_captured:
            raise ValueError(_why_not_captured(given, arrays, options))
        _check_dtypes(arrays)
        stand_ins = {name: _stand_in(name, x, arrays, memory) for name, x in given.items()}
        problem = Problem.of(**stand_ins, **options)
    shape, dtype = arrays["q"].shape[:-1], arrays["q"].dtype
    output = empty_like(q, (*shape, arrays["v"].shape[-1]))
    lse = empty_like(q, shape, compute_dtype(dtype)) if return_lse else None
    arrays["O"] = as_device_array("output", output)
    if lse is not None:
        arrays["L"] = as_device_array("lse", lse)
    if plan is None:
        plan = _planned(problem, arrays, memory.device)
        if key is not None:
            remembered.remember(key, plan)
    if is_captured:
        plan.keep_for_graphs()
    plan.run({name: array.address for name, array in arrays.items()}, memory)
    if must_synchronize(q):
        gpu.synchronize(memory.stream)
    return (output, lse) if return_lse else output


def _key(
    given: dict[str, Any],
    arrays: dict[str, DeviceArray],
    options: dict[str, Any],
    return_lse: bool,
    device: gpu.Device,
) -> tuple[Any, ...] | None:
    """Return the key of a stored plan, or None if the call needs full validation."""
    functions = options["score_mod"], options["mask_mod"]
    if functions != (None, None) or not arrays.keys().isdisjoint(SMALL):
        return None
    small = remembered.by_value(
        (
            given["q_offset"], given["kv_lengths"], given["alibi_slopes"], given["sinks"],
            options["is_causal"], options["window_size"], options["scale"], options["softcap"],
        )
    )  # fmt: skip
    if small is None:
        return None
    # The key has shapes, strides, dtypes and the alignment of addresses, for reading in place.
    layouts = [(array.address % 16, *array[1:4]) for array in arrays.values()]
    return (device.ordinal, return_lse, *arrays, *layouts, *small)


def _why_not_captured(
    given: dict[str, Any], arrays: dict[str, DeviceArray], options: dict[str, Any]
) -> str:
    """Return why a call without a plan cannot be captured into a CUDA graph, and the remedy."""
    about = "the current stream is being captured into a CUDA graph"
    for name in SMALL:
        if name in arrays:
            return (
                f"{about}, but {name} is on the GPU and would have to be copied to the host: give "
                f"it on the host"
            )
    for name in PARAMETERS:
        if options[name] is not None:
            return (
                f"{about}, but {name}'s captured values are re-read on every call, which a "
                f"replayed CUDA graph cannot do"
            )
    return (
        f"{about}, but this call must first compile kernels or copy options: call attention once "
        f"with the same shapes, dtypes and options before the capture"
    )


def _planned(problem: Problem, arrays: dict[str, DeviceArray], device: gpu.Device) -> Plan:
    """Return a new plan for ``problem``; ``arrays`` include "O" and, if returned, "L"."""
    B, H, Lq, _ = problem.q.shape
    shapes = {"O": (B, H, Lq, problem.v.shape[3]), "L": (B, H, Lq)}
    given = {
        name: _broadcast(array, shapes[name] if name in shapes else getattr(problem, name).shape)
        for name, array in arrays.items()
        if name not in SMALL
    }
    if B * Lq == 0:
        return Plan(Draft(device))
    return _plan(*rung_for(problem, device), given, device)


def _broadcast(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """Return ``array`` broadcast to ``shape``, with stride 0 along new axes and axes of length 1.

    An axis of length 1 may have any stride, even a stride that no kernel could use.
    """
    steps = [step if size > 1 else 0 for size, step in zip(array.shape, array.strides, strict=True)]
    missing = len(shape) - len(steps)
    return array._replace(shape=shape, strides=(*[0] * missing, *steps))


def _plan(
    name: str, problem: Problem, given: dict[str, DeviceArray], device: gpu.Device, **settings: Any
) -> Plan:
    """Return the plan by which the kernel ``name`` writes O and L, with the options of ``problem``.

    ``given`` has "q", "k", "v" and "O", with any strides and any dtype in ``copies.STORED``. It has
    "L", contiguous, in the compute dtype, if returned, and "attn_mask" and "attn_bias" if they
    exist. Shapes are those in ``problem``; rows of q, k, v and O may be padded to ``row_width``.
    Arrays that the kernel cannot use in place are copied on the device.
    """
    draft = Draft(device)
    given = {key: draft.brought(key, array) for key, array in given.items()}
    dtype, width = _form(name, problem)
    ready = given | {key: _readable(given[key], dtype, width, draft) for key in QKV}
    if "attn_bias" in given:
        ready["attn_bias"] = _readable(given["attn_bias"], problem.compute, None, draft)
    if "L" not in given:
        ready["L"] = draft.scratch_array(problem.q.shape[:3], problem.compute)
    O = given["O"]
    if not _is_readable(O, dtype, width):
        ready["O"] = draft.scratch_array((*O.shape[:3], width or O.shape[3]), dtype)
    if name in TAKE_ARRAYS:
        in_arrays = {key: array_at(array) for key, array in ready.items()}
        arguments: Any = kernel_arguments.as_arrays(
            problem, in_arrays, lambda array: array_at(to_device(array, draft))
        )
    else:
        arguments = kernel_arguments.as_addresses(problem, ready, draft.put_together)
    for launch, values in _launches(name, problem, arguments, draft, settings):
        draft.launch(launch, values)
    if ready["O"] is not O:
        draft.launch(*copying(ready["O"], O))
    return Plan(draft)


def _form(name: str, problem: Problem) -> tuple[np.dtype[Any], int | None]:
    """Return a kernel's dtype of q, k, v and O, and their ``row_width``, or None for any rows."""
    if name in TAKE_ARRAYS:
        return problem.compute, None
    return problem.dtype, kernel_arguments.row_width(problem, _module(name).ROW_UNIT)


def _is_readable(array: DeviceArray, dtype: np.dtype[Any], width: int | None) -> bool:
    """Return whether a kernel can use ``array`` in place; a width requires aligned rows."""
    if width is None:
        return array.dtype == dtype
    steps = [step * dtype.itemsize for step in array.strides[:3]]
    unit = kernel_arguments.row_alignment(width, dtype.itemsize)
    return (
        array.dtype == dtype
        and array.shape[3] == width
        and array.strides[3] == 1
        and not any(at % unit for at in (array.address, *steps))
    )


def _readable(
    array: DeviceArray, dtype: np.dtype[Any], width: int | None, draft: Draft
) -> DeviceArray:
    """Return ``array``, or a copy in ``dtype`` and ``width``; a broadcast axis is copied once."""
    if _is_readable(array, dtype, width):
        return array
    axes = zip(array.shape, array.strides, strict=True)
    *outer, inner = (size if step else min(size, 1) for size, step in axes)
    if width is not None:
        inner = array.shape[3]
    copy = draft.scratch_array((*outer, width or inner), dtype)
    draft.launch(*copying(array._replace(shape=(*outer, inner)), copy))
    return _broadcast(copy, (*array.shape[:3], width or array.shape[3]))


def _launches(name: str, problem: Problem, given: Any, draft: Draft, settings: Any) -> Launches:
    """Return the launches of the kernel ``name``."""
    if name == "cuda.rung5_decode":
        settings = settings | {"multiprocessors": draft.device.multiprocessors}
    launches: Launches = _module(name).launches(problem, given, draft.scratch, **settings)
    return launches


def _module(name: str) -> ModuleType:
    return import_module(f"minimha.kernels.{name}")


def _ordinals(given: dict[str, Any]) -> dict[str, int | None]:
    """Return the ordinals of the arrays' GPUs, by name; None for an empty array of unknown device.

    Raises for q, k, v, a mask or a bias on the host, since these are never copied silently.
    """
    ordinals: dict[str, int | None] = {}
    on_host: list[str] = []
    for name, x in given.items():
        if x is None and name not in QKV:
            continue
        ordinal = ordinal_of(x)
        if ordinal == UNKNOWN:
            address = x.__cuda_array_interface__["data"][0]
            ordinals[name] = gpu.device_at(address) if address else None
        elif ordinal is not None:
            ordinals[name] = ordinal
        elif name not in SMALL:
            on_host.append(name)
    if on_host:
        name = on_host[0]
        raise TypeError(
            f"{next(iter(ordinals))} is on a GPU but {name} ({type(given[name]).__name__}) is on "
            f"the host: q, k, v, attn_mask and attn_bias must all be on one side"
        )
    return ordinals


def _common(ordinals: dict[str, int | None]) -> int | None:
    """Return the one ordinal of all arrays, or None if all arrays are empty."""
    if len(set(ordinals.values())) == 1:
        return ordinals["q"]
    known = {name: ordinal for name, ordinal in ordinals.items() if ordinal is not None}
    first = known.get("q", next(iter(known.values()), None))
    for name, ordinal in known.items():
        if ordinal != first:
            raise ValueError(
                f"{name} is on GPU {ordinal} but q is on GPU {first}: all arrays must be on one GPU"
            )
    return first


def _check_dtypes(arrays: dict[str, DeviceArray]) -> None:
    first = arrays["q"].dtype
    for name in QKV:
        dtype = arrays[name].dtype
        if dtype.name not in STORED:
            raise TypeError(
                f"{name} has dtype {dtype}: on a GPU float16, bfloat16, float32 and float64 are "
                f"accepted"
            )
        if dtype != first:
            raise TypeError(
                f"{name} has dtype {dtype} but q has {first}: on a GPU q, k and v must have the "
                f"same dtype"
            )
    bias = arrays.get("attn_bias")
    if bias is not None and bias.dtype.name not in ("bool", *STORED):
        raise TypeError(
            f"attn_bias has dtype {bias.dtype}: on a GPU floating-point numbers are accepted"
        )


def _stand_in(
    name: str, value: Any, arrays: dict[str, DeviceArray], memory: gpu.DeviceMemory
) -> Any:
    """Return an array that ``Problem.of`` checks instead of an array on a GPU.

    Small arrays are downloaded; large ones are replaced by zeros of their shape and dtype. A bias
    has the compute dtype, or is boolean, which ``Problem.of`` refuses.
    """
    if name not in arrays:
        return value
    array = arrays[name]
    if name in SMALL and len(array.shape) <= 1:
        return to_host(array, memory)
    dtype = array.dtype
    if name == "attn_bias" and dtype != np.bool_:
        is_double = arrays["q"].dtype == np.float64
        dtype = np.dtype(np.float64 if is_double else np.float32)
    return stand_in(array.shape, dtype)
