"""Measure the speed of minimha and other libraries on a CPU, in turns.

A candidate whose numbers are wrong is never timed. All candidates of a shape take turns in one run,
so that other work of the machine affects them equally. Before each turn the threads of the previous
candidate must be asleep: those of OpenBLAS spin for a tenth of a second, on a core that the next
candidate needs. Then an untimed call wakes the candidate's threads. Times are medians, with the
quartiles as spread.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from minimha.api import attention
from minimha.bench.bandwidth import yardstick
from minimha.bench.peers import Peer, load, peers
from minimha.bench.report import GATE, GATE_ROWS, OURS, Record, Report, machine, measured
from minimha.bench.shapes import Inputs, Shape
from minimha.equations.problem import Problem
from minimha.kernels.ladder import FEW_QUERIES, LADDER

TURN = 0.02  # seconds of timed calls in one turn
WAIT, BUSY = 0.01, 0.002  # seconds; quiet: the process computes for less than BUSY in a WAIT
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
LADDER_NORM = "cpu.rung4_parallel"  # ratios are to this rung


def against_peers(
    shapes: Sequence[Shape], seconds: float, threads: int | None = None,
    progress: Callable[[str], None] = lambda doing: None, *, is_crowded: bool = False,
) -> Report:  # fmt: skip
    """Measure minimha's CPU backend and every other library that is installed, in float32.

    For each shape, the timed calls take ``seconds`` in all. Every candidate uses ``threads``
    threads, by default ``minimha.get_num_threads()``. ``progress`` is called with the next task:
    once for compiling and once per shape. If ``is_crowded``, single calls take turns in random
    order. Raises ValueError for a shape in a 16-bit dtype.
    """
    for shape in shapes:
        if shape.dtype != "float32":
            raise ValueError(f"shape {shape}: 16-bit dtypes are measured only on a GPU")
    missing = load()
    with _workers(threads) as number:
        progress("compiling")
        one_per_kernel = {shape.Lq <= FEW_QUERIES: shape for shape in shapes}.values()
        compiling = sum(map(compile_seconds, one_per_kernel))
        records: list[Record] = []
        for shape in shapes:
            progress(str(shape))
            inputs = shape.inputs()
            candidates = {OURS: _ours(inputs)} | peers(inputs, number)
            records += compare(shape, inputs, candidates, seconds, OURS, is_crowded)
        return Report(records, compiling, machine(number), missing)


def ladder(
    shapes: Sequence[Shape], seconds: float, threads: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:  # fmt: skip
    """Measure the NumPy backends and all CPU kernels, with times relative to CPU rung 4.

    The parameters are those of ``against_peers``.
    """
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
    shape: Shape, inputs: Inputs, candidates: dict[str, Peer], seconds: float, ours: str,
    is_crowded: bool = False,
) -> list[Record]:  # fmt: skip
    """Check the results of ``candidates`` and time them; return one record for each.

    A candidate whose error exceeds ``GATE`` is not timed. The timed calls take ``seconds`` in all.
    Ratios are to the time of the candidate named ``ours``. If ``is_crowded``, single calls take
    turns in random order, while idle threads of other candidates may still keep cores busy.
    """
    records = {name: Record(str(shape), name, _error(inputs, c)) for name, c in candidates.items()}
    timed = {name: c.run for name, c in candidates.items() if records[name].error <= GATE}
    memory = {name: extra_memory(run) for name, run in timed.items()}
    work, run = yardstick(shape)
    if is_crowded:
        times = crowded(timed, seconds) | interleaved({"machine": run}, 0)
    else:
        times = interleaved({**timed, "machine": run}, seconds)
    machine_rate = work / float(np.median(times.pop("machine")))
    for name, found in times.items():
        record = measured(records[name], shape, found, times.get(ours), machine_rate)
        records[name] = replace(record, extra_memory=memory[name])
    return list(records.values())


def interleaved(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Run the candidates in turns of about ``TURN`` seconds; return the seconds of each call.

    This goes on for ``seconds``, and for at least three rounds.
    """
    calls = {}
    for name, run in runs.items():
        _wait_for_quiet()  # a core shared with other threads would make the turn too short
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


def crowded(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Run single calls of the candidates in random order; return the seconds of each call.

    This goes on for ``seconds``, and for at least ten rounds. Idle threads of other candidates may
    keep cores busy, as in programs that use several libraries.
    """
    order = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 10 or time.perf_counter() < end:
        for name in order.permutation(list(runs)):
            times[name].append(seconds_of(runs[name]))
        rounds += 1
    return times


def extra_memory(run: Callable[[], Any]) -> int | None:
    """Return the peak memory of ``run()`` in bytes, without inputs and output; None if unknown."""
    if not (os.access(CLEAR, os.W_OK) and STATUS.exists()):
        return None
    CLEAR.write_text("5")  # resets the peak to the current memory
    before = _status("VmRSS")
    output = run()
    peak = _status("VmHWM")
    held = output[0] if isinstance(output, (list, tuple)) else output
    return max(0, peak - before - int(held.nbytes))


def compile_seconds(shape: Shape) -> float:
    """Return the seconds of a short call that compiles or loads the kernel for ``shape``."""
    inputs = replace(shape, B=1, H=1, Hkv=1, Lq=min(shape.Lq, 16), Lk=16, mask="none").inputs()
    return seconds_of(_ours(inputs).run)


@contextmanager
def _workers(threads: int | None) -> Iterator[int]:
    """Set the number of threads of the kernels inside the ``with`` block, and yield it."""
    from minimha.kernels.cpu.threads import get_num_threads, set_num_threads

    before = get_num_threads()
    set_num_threads(threads or before)
    try:
        yield get_num_threads()
    finally:
        set_num_threads(before)


def _ours(inputs: Inputs) -> Peer:
    return Peer(lambda: attention(*inputs.arrays, **inputs.options, backend="cpu"), np.asarray)


def _problem(inputs: Inputs) -> Problem:
    return Problem.of(*inputs.arrays, **inputs.options)


def _error(inputs: Inputs, candidate: Peer) -> float:
    """Return the largest error on some rows, as a multiple of plain NumPy's in the same dtype."""
    output = candidate.as_array(candidate.run())
    q, k, v = inputs.arrays
    worst, plain = 0.0, 0.0
    for start in sorted({0, q.shape[2] // 2, max(0, q.shape[2] - GATE_ROWS)}):
        rows = slice(start, start + GATE_ROWS)
        options = inputs.options | {"backend": "dense"}
        if inputs.mask is not None:
            options["attn_mask"] = inputs.mask[:, :, rows]
        if inputs.is_causal or inputs.window:
            options["q_offset"] = start
        exact = attention(*(x.astype(np.float64) for x in (q[:, :, rows], k, v)), **options)
        worst = float(np.maximum(worst, abs(output[:, :, rows] - exact).max()))  # keeps NaN
        plain = max(plain, float(abs(attention(q[:, :, rows], k, v, **options) - exact).max()))
    return worst / plain if np.isfinite(worst) else float("inf")


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds that one call of ``run`` takes."""
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
    """Return the bytes that the system reports for this process as ``key``."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
