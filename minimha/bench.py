"""How fast: correctness gate → warm-up → interleaved measurement → records.

A candidate whose numbers are wrong is never timed. All candidates of a shape take turns in one
run, so that what the machine does besides meets them alike. Before each turn the threads of the one
before must have fallen asleep (OpenBLAS's wait actively for a tenth of a second, and take a core
from whoever comes next), and an untimed call wakes its own. Times are medians, with the quartiles
as spread.
"""

from __future__ import annotations

import io
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha import attention
from minimha.equations.problem import Problem
from minimha.kernels.ladder import FEW_QUERIES, LADDER
from minimha.peers import Inputs, Peer, load, peers

OURS = "minimha"
MASKS = ("none", "causal", "window", "mask")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
WINDOW = (511, 0)
TURN = 0.02  # seconds of timed calls in one turn
WAIT, BUSY = 0.01, 0.002  # quiet is a wait in which the process computes for less than BUSY
MATRIX = 2048  # of the sgemm beside which attention is measured
STREAM = 1 << 25  # float32 numbers that are read to measure the memory
GATE = 5  # times the error of plain NumPy: beyond, a candidate is wrong
GATE_ROWS = 24  # queries at the beginning, in the middle and at the end are checked
CPUINFO = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Shape:
    """Sizes and mask of a problem: ``mask`` is none, causal, window (511, 0) or a random mask.

    ``dtype`` is float32 on a CPU, float16 and bfloat16 as well on a GPU.
    """

    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    mask: str = "none"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r}: expected one of {', '.join(MASKS)}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(ITEMSIZE)}")
        if self.H % self.Hkv:
            raise ValueError(f"H={self.H} is not a multiple of Hkv={self.Hkv}")
        if self.mask in ("causal", "window") and self.Lq != self.Lk:
            raise ValueError(f"mask {self.mask} needs Lq = Lk, not {self.Lq} and {self.Lk}")

    def __str__(self) -> str:
        sizes = ",".join(str(n) for n in (self.B, self.H, self.Hkv, self.Lq, self.Lk, self.D))
        unsaid = {"none", "float32"}
        return " ".join([sizes, *(x for x in (self.mask, self.dtype) if x not in unsaid)])

    @property
    def operations(self) -> float:
        """4 · D for each visible pair of query and key; a random mask counts all."""
        pairs: float = self.Lq * self.Lk
        if self.mask == "causal":
            pairs = self.Lq * self.Lk / 2
        elif self.mask == "window":
            pairs = sum(min(i, WINDOW[0]) + 1 for i in range(self.Lq))
        return 4.0 * self.B * self.H * pairs * self.D

    @property
    def bytes_read(self) -> float:
        """Of K and V, once."""
        return 2.0 * ITEMSIZE[self.dtype] * self.B * self.Hkv * self.Lk * self.D

    @property
    def is_decode(self) -> bool:
        """One query a head: reading is the work."""
        return self.Lq == 1

    def inputs(self, seed: int = 0) -> Inputs:
        """Random arrays of these sizes, float32; a GPU's are rounded to its dtype there."""
        rng = np.random.default_rng(seed)
        sizes = ((self.H, self.Lq), (self.Hkv, self.Lk), (self.Hkv, self.Lk))
        q, k, v = (
            rng.standard_normal((self.B, heads, length, self.D), np.float32)
            for heads, length in sizes
        )
        mask = None
        if self.mask == "mask":
            mask = rng.random((self.B, 1, self.Lq, self.Lk)) < 0.8
        return Inputs(
            q, k, v, self.mask == "causal", WINDOW if self.mask == "window" else None, mask
        )


SHAPES = (
    Shape(1, 8, 8, 128, 128, 64),
    Shape(1, 8, 8, 1024, 1024, 64),
    Shape(4, 12, 12, 512, 512, 64),
    Shape(1, 8, 8, 4096, 4096, 64),
    Shape(1, 8, 8, 4096, 4096, 128),
    Shape(1, 8, 8, 1024, 1024, 64, "causal"),
    Shape(8, 12, 12, 512, 512, 64, "causal"),
    Shape(1, 8, 8, 4096, 4096, 64, "causal"),
    Shape(1, 32, 8, 2048, 2048, 128, "causal"),
    Shape(1, 8, 8, 4096, 4096, 64, "window"),
    Shape(4, 16, 16, 128, 1024, 64),
    Shape(1, 8, 8, 777, 777, 80),
    Shape(2, 8, 8, 1024, 1024, 64, "mask"),
    Shape(1, 32, 8, 1, 4096, 128),
    Shape(8, 32, 8, 1, 2048, 128),
    Shape(1, 8, 8, 1, 65536, 64),
)
LADDER_SHAPE = Shape(1, 4, 4, 512, 512, 64)
LADDER_NORM = "cpu.rung4_parallel"  # the rung that the others' ratios are to


@dataclass(frozen=True)
class Record:
    """What was measured of one candidate on one shape.

    Attributes
    ----------
    shape, candidate : str
    error : float
        Largest error against float64 on the rows that the gate checks, as a multiple of plain
        NumPy's in float32.
    median, low, high : float
        Seconds of a call: median and quartiles; NaN if the gate was not passed.
    runs : int
        Timed calls.
    rate : float
        Operations a second, for a decode shape bytes of K and V a second.
    of_machine : float
        ``rate`` as a fraction of this machine's sgemm, or of its memory's reading, in the same run.
    ratio : float
        ``median`` / minimha's median: above 1 minimha is faster.
    extra_memory : int or None
        Bytes at the peak beyond inputs and output, where the system tells (Linux).
    """

    shape: str
    candidate: str
    error: float
    median: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    runs: int = 0
    rate: float = float("nan")
    of_machine: float = float("nan")
    ratio: float = float("nan")
    extra_memory: int | None = None


@dataclass(frozen=True)
class Report:
    """All records of a run, with the machine and the seconds that compiling took.

    ``missing`` names the libraries that were not there to be compared with.
    """

    records: list[Record]
    compile_seconds: float
    machine: dict[str, str | int]
    missing: list[str]


def against_peers(
    shapes: Sequence[Shape], seconds: float, threads: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:  # fmt: skip
    """Measure minimha's CPU backend beside every peer that is installed.

    Parameters
    ----------
    shapes : sequence of Shape
    seconds : float
        For the timed calls of a shape.
    threads : int or None
        For everyone; None is all that numba may use.
    progress : callable
        Is told what comes next, once for compiling and once a shape.
    """
    for shape in shapes:
        if shape.dtype != "float32":
            raise ValueError(f"shape {shape}: dtypes of 16 bits are measured on a GPU alone")
    missing = load()
    with _workers(threads) as number:
        progress("compiling")
        compiling = sum(compile_seconds(shape) for shape in _kinds(shapes))
        records: list[Record] = []
        for shape in shapes:
            progress(str(shape))
            inputs = shape.inputs()
            candidates = {OURS: _ours(inputs)} | peers(inputs, number)
            records += compare(shape, inputs, candidates, seconds, OURS)
        return Report(records, compiling, machine(number), missing)


def ladder(
    shapes: Sequence[Shape], seconds: float, threads: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:  # fmt: skip
    """Measure every rung, and the equations before them; the ratio is to ``LADDER_NORM``."""
    modules = {name: import_module(f"minimha.equations.{name}") for name in ("dense", "tiled")}
    modules |= {name: import_module(f"minimha.kernels.{name}") for name in LADDER}
    with _workers(threads) as number:
        progress("compiling")
        tiny = _problem(Shape(1, 1, 1, 16, 16, 16).inputs())
        compiling = sum(seconds_of(partial(m.forward, tiny)) for m in modules.values())
        records: list[Record] = []
        for shape in shapes:
            progress(str(shape))
            inputs = shape.inputs()
            problem = _problem(inputs)
            rungs = {
                name: Peer(partial(module.forward, problem), lambda both: np.asarray(both[0]))
                for name, module in modules.items()
            }
            records += compare(shape, inputs, rungs, seconds, LADDER_NORM)
        return Report(records, compiling, machine(number), [])


def compare(
    shape: Shape, inputs: Inputs, candidates: dict[str, Peer], seconds: float, ours: str
) -> list[Record]:
    """Check, warm up and time ``candidates``; ratios are to the candidate ``ours``."""
    records = {name: Record(str(shape), name, _error(inputs, c)) for name, c in candidates.items()}
    timed = {name: c.run for name, c in candidates.items() if records[name].error <= GATE}
    memory = {name: extra_memory(run) for name, run in timed.items()}
    machine = _machine(shape)
    times = interleaved({**timed, "machine": machine}, seconds)
    machine_work = 4.0 * STREAM if shape.is_decode else 2.0 * MATRIX**3
    machine_rate = machine_work / float(np.median(times.pop("machine")))
    for name, taken in times.items():
        record = measured(records[name], shape, taken, times.get(ours), machine_rate)
        records[name] = replace(record, extra_memory=memory[name])
    return list(records.values())


def measured(
    record: Record,
    shape: Shape,
    times: Sequence[float],
    ours: Sequence[float] | None,
    machine_rate: float,
) -> Record:
    """``record`` with what its ``times`` say, beside minimha's and the machine's rate."""
    low, median, high = (float(np.quantile(times, part)) for part in (0.25, 0.5, 0.75))
    rate = (shape.bytes_read if shape.is_decode else shape.operations) / median
    return replace(
        record, median=median, low=low, high=high, runs=len(times), rate=rate,
        of_machine=rate / machine_rate,
        ratio=float("nan") if ours is None else float(median / np.median(ours)),
    )  # fmt: skip


def interleaved(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of the calls of each: turns of a few calls, until ``seconds`` have passed."""
    calls = {}
    for name, run in runs.items():
        _wait_for_quiet()  # who shares a core with another's threads would get too short a turn
        run()
        calls[name] = max(1, int(TURN / min(seconds_of(run) for _ in range(3))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for name, run in runs.items():
            _wait_for_quiet()
            run()
            times[name] += [seconds_of(run) for _ in range(calls[name])]
        rounds += 1
    return times


def extra_memory(run: Callable[[], Any]) -> int | None:
    """Peak of the process's memory during a call beyond what it held before and the output."""
    if not (os.access(CLEAR, os.W_OK) and STATUS.exists()):
        return None
    CLEAR.write_text("5")  # the peak begins anew at what is held now
    before = _status("VmRSS")
    output = run()
    peak = _status("VmHWM")
    held = output[0] if isinstance(output, (list, tuple)) else output
    return max(0, peak - before - int(held.nbytes))


def compile_seconds(shape: Shape) -> float:
    """Seconds until the kernel for such a shape is ready: compiled, or loaded from the cache."""
    inputs = replace(shape, B=1, H=1, Hkv=1, Lq=min(shape.Lq, 16), Lk=16, mask="none").inputs()
    return seconds_of(_ours(inputs).run)


def machine(threads: int) -> dict[str, str | int]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    if CPUINFO.exists():
        lines = CPUINFO.read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        model = next(names, model)
    return {
        "processor": model, "threads": threads, "system": platform.system(),
        "python": platform.python_version(), "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def best_peers(records: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    """minimha's record and the fastest peer's for each shape that has both."""
    for _, group in groupby(records, lambda record: record.shape):
        timed = [record for record in group if record.runs]
        ours = [record for record in timed if record.candidate == OURS]
        others = [record for record in timed if record.candidate != OURS]
        if ours and others:
            yield ours[0], min(others, key=lambda record: record.median)


def geometric_mean(ratios: Sequence[float]) -> float:
    """The factor that all ratios have on average; NaN of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON's own types; what was not measured is null."""
    rows = [
        {key: value if _is_json(value) else None for key, value in asdict(record).items()}
        for record in report.records
    ]
    return {
        "machine": report.machine, "compile_seconds": report.compile_seconds,
        "missing": report.missing, "records": rows,
    }  # fmt: skip


def as_rows(records: Iterable[Record]) -> list[dict[str, str]]:
    """The records as a reader wants them: milliseconds, GFLOP/s or GB/s, MiB."""
    return [
        {
            "candidate": r.candidate,
            "ms": _digits(1e3 * r.median),
            "quartiles": f"{_digits(1e3 * r.low)}–{_digits(1e3 * r.high)}" if r.runs else "",
            "G/s": _digits(r.rate / 1e9),
            "of machine": _digits(r.of_machine, 2),
            "ratio": _digits(r.ratio, 2),
            "MiB": "" if r.extra_memory is None else f"{r.extra_memory / 2**20:.1f}",
            "error": _digits(r.error, 1) if r.runs else f"{r.error:.1f}: refused",
        }
        for r in records
    ]


def picture(records: Sequence[Record]) -> bytes:
    """Draw for each shape how many times minimha's time each candidate takes: an SVG.

    Raises
    ------
    ImportError
        matplotlib, of the extra ``bench``, is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(record.shape for record in records))
    names = list(dict.fromkeys(r.candidate for r in records if r.runs and r.ratio != 1))
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(shapes) + 1.4), layout="constrained")
    for marker, name in zip("osD^vPX*<>", names, strict=False):
        points = [(r.ratio, shapes.index(r.shape)) for r in records if r.candidate == name]
        axes.scatter(*zip(*points, strict=True), marker=marker, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(shapes)), shapes)
    axes.invert_yaxis()
    axes.grid(axis="x", color="lightgray")
    axes.set_xlabel("time / minimha's time (right of the line minimha is faster)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.12), ncols=2, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return drawn.getvalue()


@contextmanager
def _workers(threads: int | None) -> Iterator[int]:
    """Let the kernels use so many threads meanwhile."""
    from minimha.kernels.cpu.threads import num_workers, set_workers

    before = num_workers()
    set_workers(threads or before)
    try:
        yield num_workers()
    finally:
        set_workers(before)


def _kinds(shapes: Sequence[Shape]) -> list[Shape]:
    """A shape for each kernel that ``shapes`` need."""
    return list({shape.Lq <= FEW_QUERIES: shape for shape in shapes}.values())


def _ours(inputs: Inputs) -> Peer:
    return Peer(lambda: attention(*_arrays(inputs), **_options(inputs), backend="cpu"), _same)


def _problem(inputs: Inputs) -> Problem:
    return Problem.of(*_arrays(inputs), **_options(inputs))


def _machine(shape: Shape) -> Callable[[], Any]:
    """What the machine is measured by: reading memory for a decode shape, else a product."""
    if shape.is_decode:
        from minimha.kernels.cpu.rates import read

        numbers = np.ones(STREAM, np.float32)
        return lambda: read(numbers)
    matrix = np.random.default_rng(0).standard_normal((MATRIX, MATRIX), np.float32)
    return lambda: matrix @ matrix


def _error(inputs: Inputs, candidate: Peer) -> float:
    """Largest error on some rows, as a multiple of plain NumPy's in the same dtype."""
    output = candidate.as_array(candidate.run())
    q, k, v = _arrays(inputs)
    worst, plain = 0.0, 0.0
    for start in sorted({0, q.shape[2] // 2, max(0, q.shape[2] - GATE_ROWS)}):
        rows = slice(start, start + GATE_ROWS)
        options: dict[str, Any] = dict(_options(inputs), backend="dense")
        if inputs.mask is not None:
            options["attn_mask"] = inputs.mask[:, :, rows]
        if inputs.is_causal or inputs.window:
            options["q_offset"] = start
        exact = attention(*(x.astype(np.float64) for x in (q[:, :, rows], k, v)), **options)
        worst = float(np.maximum(worst, abs(output[:, :, rows] - exact).max()))  # NaN wins
        plain = max(plain, float(abs(attention(q[:, :, rows], k, v, **options) - exact).max()))
    return worst / plain if np.isfinite(worst) else float("inf")


def _arrays(inputs: Inputs) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    return inputs.q, inputs.k, inputs.v


def _options(inputs: Inputs) -> dict[str, Any]:
    return {
        "is_causal": inputs.is_causal, "window_size": inputs.window, "attn_mask": inputs.mask
    }  # fmt: skip


def _same(output: Any) -> NDArray[Any]:
    return np.asarray(output)


def _digits(number: float, decimals: int | None = None) -> str:
    """Three digits that count, or so many decimals; nothing for NaN."""
    if math.isnan(number):
        return ""
    if decimals is None:
        decimals = max(0, 2 - math.floor(math.log10(number))) if number else 0
    return f"{number:.{decimals}f}"


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _wait_for_quiet() -> None:
    while True:
        before = time.process_time()
        time.sleep(WAIT)
        if time.process_time() - before < BUSY:
            return


def _status(key: str) -> int:
    """Bytes that the system says of this process under ``key``."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
