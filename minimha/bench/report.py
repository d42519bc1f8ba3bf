"""Record measurements, and compute the fastest libraries, mean ratios, and rows of a table."""

import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from minimha.bench.shapes import Shape

OURS = "minimha"
GATE = 5  # a candidate with more than this times plain NumPy's error is wrong
GATE_ROWS = 24  # queries that are checked at the beginning, in the middle and at the end each
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Record:
    """The measurements of one candidate, such as a library, on one shape.

    Measurements are NaN if the candidate's results are wrong. ``error`` is the largest error
    against float64 in the checked rows. Its unit is the error of plain NumPy in float32 or, on a
    GPU, of torch's backend MATH. ``rate`` is operations per second or, for a single query, bytes of
    K and V per second. ``of_machine`` is ``rate`` divided by the rate of a matrix product or, for a
    single query, of reading memory, in the same run.
    """

    shape: str
    candidate: str
    error: float
    median: float = math.nan  # seconds per call, with its quartiles
    low: float = math.nan
    high: float = math.nan
    runs: int = 0  # timed calls
    rate: float = math.nan
    of_machine: float = math.nan
    ratio: float = math.nan  # median / minimha's median: above 1 minimha is faster
    extra_memory: int | None = None  # peak bytes besides inputs and output; only on Linux


@dataclass(frozen=True)
class Report:
    """The results of a benchmark: records, compile time, machine, and libraries not installed."""

    records: list[Record]
    compile_seconds: float
    machine: dict[str, str | int]
    missing: list[str]


def measured(
    record: Record, shape: Shape, times: Sequence[float], ours: Sequence[float] | None,
    machine_rate: float,
) -> Record:  # fmt: skip
    """Return ``record`` with the statistics of ``times``, in seconds, and two ratios.

    ``ratio`` is the median of ``times`` divided by the median of ``ours``, or NaN if that is None.
    ``of_machine`` is the rate divided by ``machine_rate``, in the same unit.
    """
    low, median, high = (float(np.quantile(times, part)) for part in (0.25, 0.5, 0.75))
    rate = (shape.bytes_read if shape.is_decode else shape.operations) / median
    return replace(
        record, median=median, low=low, high=high, runs=len(times), rate=rate,
        of_machine=rate / machine_rate,
        ratio=math.nan if ours is None else float(median / np.median(ours)),
    )  # fmt: skip


def machine(threads: int) -> dict[str, str | int]:
    """Describe this machine: processor, system, versions and date."""
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
    """Yield minimha's record and that of the fastest other library, for each shape with both."""
    for _, group in groupby(records, lambda record: record.shape):
        timed = [record for record in group if record.runs]
        ours = [record for record in timed if record.candidate == OURS]
        others = [record for record in timed if record.candidate != OURS]
        if ours and others:
            yield ours[0], min(others, key=lambda record: record.median)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ``ratios``, or NaN if there are none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def as_json(report: Report) -> dict[str, Any]:
    """Convert ``report`` to JSON's types, with null for missing measurements."""

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{key: finite(x) for key, x in asdict(record).items()} for record in report.records]
    return {
        "machine": report.machine, "compile_seconds": report.compile_seconds,
        "missing": report.missing, "records": rows,
    }  # fmt: skip


def machine_line(report: Report) -> str:
    """Return a sentence on the machine and on the time that compiling took."""
    where = ", ".join(
        str(value) if name in ("processor", "system", "date") else f"{name} {value}"
        for name, value in report.machine.items()
    )
    return (
        f"{where}; compiling or loading the kernels took {report.compile_seconds:.1f} s, "
        f"included in none of these times"
    )


def as_rows(records: Iterable[Record]) -> list[dict[str, str]]:
    """Convert the records to rows of text, in milliseconds, GFLOP/s or GB/s, and MiB."""
    return [
        {
            "candidate": r.candidate,
            "ms": digits(1e3 * r.median),
            "quartiles": f"{digits(1e3 * r.low)}–{digits(1e3 * r.high)}" if r.runs else "",
            "G/s": digits(r.rate / 1e9),
            "of machine": digits(r.of_machine, 2),
            "ratio": digits(r.ratio, 2),
            "MiB": "" if r.extra_memory is None else f"{r.extra_memory / 2**20:.1f}",
            "error": digits(r.error, 1) if r.runs else f"{r.error:.1f}: refused",
        }
        for r in records
    ]


def digits(number: float, most: int = 4) -> str:
    """Format ``number`` with three significant digits and at most ``most`` decimals; "" for NaN."""
    if math.isnan(number):
        return ""
    decimals = min(max(0, 2 - math.floor(math.log10(number))), most) if number else 0
    return f"{number:.{decimals}f}"
