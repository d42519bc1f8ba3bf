"""Measure the speed of minimha and torch on a GPU, by CUDA events, with a cold L2 cache.

Records are those of ``bench/cpu.py``, and the other candidates are torch's backends. A candidate
whose numbers are wrong is not timed. Everything but the clock also runs on a CPU, where it is
tested.
"""

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import BackendUnavailable, attention, backends
from minimha.bench.cpu import seconds_of
from minimha.bench.report import GATE, GATE_ROWS, OURS, Record, Report, measured
from minimha.bench.shapes import Shape
from minimha.equations.option_types import Backend

SHAPES = (
    Shape(4, 16, 16, 4096, 4096, 128, "none", "bfloat16"),
    Shape(4, 16, 16, 4096, 4096, 128, "causal", "bfloat16"),
    Shape(4, 16, 16, 4096, 4096, 64, "none", "bfloat16"),
    Shape(4, 16, 16, 4096, 4096, 64, "causal", "bfloat16"),
    Shape(2, 16, 16, 4096, 4096, 64),
    Shape(16, 32, 8, 1, 8192, 128, "none", "bfloat16"),
)
TORCH = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
PLAIN = "torch MATH"  # its error is the unit of the others' errors
CACHE = 256 << 20  # bytes written before each call, more than any L2 cache holds
FLUSHES = 16  # writes per call: a millisecond, in which Python gets ahead of the GPU
MATRIX = 8192  # side of the matrices whose product measures the GPU's arithmetic
STREAM = 1 << 30  # bytes that are read to measure the GPU's memory
TINY = Shape(1, 1, 1, 16, 16, 64)  # so small that a call is only overhead
CALLS = 200  # the number of calls that measure the overhead


def against_torch(
    shapes: Sequence[Shape], seconds: float, progress: Callable[[str], None] = lambda doing: None,
    device: Backend = "cuda",
) -> Report:  # fmt: skip
    """Measure minimha and torch's scaled_dot_product_attention on ``device``.

    Other arguments are as in ``bench.cpu.against_peers``. Raises ValueError unless each mask is
    "none" or "causal", and BackendUnavailable if torch or the device is missing.
    """
    for shape in shapes:
        if shape.mask not in ("none", "causal"):
            raise ValueError(f"shape {shape}: on a GPU the mask must be none or causal")
    if not find_spec("torch"):
        raise BackendUnavailable(
            "torch, which the bench on a GPU compares with, is not installed: "
            "pip install 'minimha[bench]'"
        )
    reason = backends()[device]
    if reason:
        raise BackendUnavailable(f"backend {device!r}: {reason}")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"torch {torch.__version__}, which the bench on a GPU compares with, finds no GPU: "
            f"install one that is built for this CUDA"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = _cuda_clock if device == "cuda" else seconds_of
    progress("compiling")
    with torch.inference_mode():
        compiling = 0.0
        records: list[Record] = []
        for shape in shapes:
            progress(str(shape))
            tensors = _tensors(shape, device)
            candidates = _candidates(shape, tensors, device)
            compiling += seconds_of(candidates[OURS])
            records += _compare(shape, tensors, candidates, seconds, clock)
        overhead = _overhead(device)
    about = {
        "processor": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "system": platform.system(), "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "overhead of a call": f"{1e6 * overhead:.0f} µs",
    }  # fmt: skip
    return Report(records, compiling, about, [])


def _tensors(shape: Shape, device: str) -> Any:
    """Return q, k, v of ``shape``, in its dtype, on the device; the same numbers on every run."""
    import torch

    inputs = shape.inputs()
    dtype = getattr(torch, shape.dtype)
    return tuple(torch.from_numpy(x).to(device, dtype) for x in inputs.arrays)


def _candidates(shape: Shape, tensors: Any, device: Backend) -> dict[str, Callable[[], Any]]:
    """Return calls by name: minimha, and every backend of torch that supports the problem."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    is_causal, is_grouped = shape.mask == "causal", shape.Hkv < shape.H
    given = tensors if device == "cuda" else [x.numpy() for x in tensors]
    ours = partial(attention, *given, is_causal=is_causal, backend=device)
    default = partial(sdpa, *tensors, is_causal=is_causal, enable_gqa=is_grouped)

    def by(backend: Any) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel(backend):
                return default()

        return run

    found: dict[str, Callable[[], Any]] = {OURS: ours, "torch, its own choice": default}
    for name in TORCH:
        run = by(getattr(SDPBackend, name))
        try:
            run()
        except RuntimeError:  # the backend does not support the problem
            continue
        found[f"torch {name.removesuffix('_ATTENTION')}"] = run
    return found


def _compare(
    shape: Shape, tensors: Any, candidates: dict[str, Callable[[], Any]], seconds: float,
    clock: Callable[[Callable[[], Any]], float],
) -> list[Record]:  # fmt: skip
    """Check and time the candidates; ratios are to minimha."""
    worst = {name: _error(shape, tensors, run()) for name, run in candidates.items()}
    records = {name: Record(str(shape), name, e / worst[PLAIN]) for name, e in worst.items()}
    timed = {name: run for name, run in candidates.items() if records[name].error <= GATE}
    work, machine = _machine(shape, tensors[0].device)
    times: dict[str, list[float]] = {name: [] for name in (*timed, "machine")}
    end = time.perf_counter() + seconds
    while len(times["machine"]) < 3 or time.perf_counter() < end:
        for name, run in (*timed.items(), ("machine", machine)):
            times[name].append(clock(run))
    rate = work / float(np.median(times.pop("machine")))
    for name, found in times.items():
        records[name] = measured(records[name], shape, found, times.get(OURS), rate)
    return list(records.values())


def _error(shape: Shape, tensors: Any, output: Any) -> float:
    """Return the largest error against float64, in the last rows of the first and the last head."""
    rows = slice(max(0, shape.Lq - GATE_ROWS), shape.Lq)
    group, worst = shape.H // shape.Hkv, 0.0
    for b, h in ((0, 0), (shape.B - 1, shape.H - 1)):
        q, k, v = (
            _numbers(x[b, head])
            for x, head in zip(tensors, (h, h // group, h // group), strict=True)
        )
        exact = attention(
            q[rows], k, v, is_causal=shape.mask == "causal", q_offset=rows.start, backend="dense"
        )
        worst = float(np.maximum(worst, abs(_numbers(output[b, h])[rows] - exact).max()))
    return worst if np.isfinite(worst) else float("inf")


def _numbers(x: Any) -> NDArray[np.float64]:
    return np.asarray(x.double().cpu() if hasattr(x, "cpu") else x, np.float64)


def _machine(shape: Shape, device: Any) -> tuple[float, Callable[[], Any]]:
    """Return a reference call and its work: bytes read, or FLOPs of a matrix product."""
    import torch

    size = 1 if device.type == "cuda" else 32  # a CPU gets a smaller one
    if shape.is_decode:
        numbers = torch.ones(STREAM // 4 // size, device=device)
        return 4.0 * len(numbers), lambda: numbers.sum()
    side = MATRIX // size
    matrix = torch.randn(side, side, device=device, dtype=getattr(torch, shape.dtype))
    return 2.0 * side**3, lambda: matrix @ matrix


def _overhead(device: Backend) -> float:
    """Return the seconds that Python takes for one call, without waiting for the GPU."""
    tensors = _tensors(TINY, device)
    run = _candidates(TINY, tensors, device)[OURS]
    run()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - start) / CALLS


def _cuda_clock(run: Callable[[], Any]) -> float:
    """Return the seconds between two events around the call, with the call's inputs not in L2.

    The GPU is still flushing its cache when Python has queued the call and both events. So Python's
    time is not included unless it exceeds the flush; ``_overhead`` measures it.
    """
    import torch

    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    for _ in range(FLUSHES):
        cache.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
