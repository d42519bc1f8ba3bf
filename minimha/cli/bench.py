"""Measure how fast the kernels are, compared with other libraries: the command ``bench``."""

import argparse
import sys
from functools import partial
from itertools import groupby
from typing import Any

from minimha.cli.arguments import count, number
from minimha.cli.output import (
    RESULT_FORMATS,
    add_output,
    check_output,
    deliver_result,
    deliver_table,
    format_of,
    grouped,
)
from minimha.explain import render
from minimha.explain.chart import Bars
from minimha.explain.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``bench`` to its parser."""
    parser.description = (
        "Time minimha's CPU kernels beside NumPy and, where they are installed "
        "(pip install 'minimha[bench]'), torch and onnxruntime. A candidate whose numbers are "
        "wrong is not timed. ratio: a candidate's time / minimha's. error: its largest error as a "
        "multiple of plain NumPy's. of machine: its rate as a fraction of what this machine's "
        "matrix product (decode: reading memory) reaches in the same run."
    )
    add = parser.add_argument
    add("--shape", action="append", type=_shape, default=[],
        metavar="B,H,Hkv,Lq,Lk,D[,MASK[,DTYPE]]",
        help="sizes, and none, causal, window or mask (may be repeated; default 16 shapes); on a "
        "GPU also a dtype: causal,bfloat16")  # fmt: skip
    add("--backend", choices=("cpu", "cuda"), default="cpu", help="cuda: on a GPU, beside torch")
    add("--ladder", action="store_true", help="time every rung instead of peers")
    crowd = "single calls in random order, while the other candidates' idle threads still spin"
    add("--crowded", action="store_true", help=crowd)
    calls = "time for the calls of one shape (default 4)"
    add("--seconds", type=_seconds, default=4.0, metavar="S", help=calls)
    add("--threads", type=count, metavar="N", help="threads of every candidate (default all)")
    add_output(parser, RESULT_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Measure the speed of attention for each problem size, and show a table per size."""
    from minimha.bench import cpu as bench
    from minimha.bench import shapes as known
    from minimha.bench.report import as_json, as_rows

    check_output(args)
    if args.backend == "cuda":
        report = _on_gpu(args)
    else:
        shapes = args.shape or [known.LADDER_SHAPE] if args.ladder else args.shape or known.SHAPES
        if args.ladder and args.crowded:
            raise ValueError("--ladder and --crowded: expected one of them; rungs have no threads")
        peers = partial(bench.against_peers, is_crowded=args.crowded)
        measure = bench.ladder if args.ladder else peers
        with render.progress(sys.stderr, 1 + len(shapes)) as progress:
            report = measure(shapes, args.seconds, args.threads, progress)
    if report.missing:
        names = " and ".join(report.missing)
        verb = "is" if len(report.missing) == 1 else "are"
        print(
            f"minimha: {names} {verb} not installed, so there are fewer to compare with: "
            f"pip install 'minimha[bench]'",
            file=sys.stderr,
        )
    if format_of(args) in ("svg", "png"):
        deliver_result(args, as_result(report))
        return
    rows = [{"shape": r.shape} | row for r, row in zip(
        report.records, as_rows(report.records), strict=True
    )]  # fmt: skip
    deliver_table(args, rows, _tables(report, rows), as_json(report))


def _on_gpu(args: argparse.Namespace) -> Any:
    from minimha.bench import gpu

    if args.ladder or args.threads or args.crowded:
        raise ValueError(
            "--ladder, --crowded and --threads are for the CPU: --backend cuda accepts none of them"
        )
    shapes = args.shape or gpu.SHAPES
    with render.progress(sys.stderr, 1 + len(shapes)) as progress:
        return gpu.against_torch(shapes, args.seconds, progress)


def _tables(report: Any, rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    from minimha.bench.report import best_peers, geometric_mean, machine_line

    titled = grouped(rows, "shape")
    pairs = list(best_peers(report.records))
    fastest = [
        {"shape": ours.shape, "fastest peer": peer.candidate, "ratio": f"{peer.ratio:.2f}"}
        for ours, peer in pairs
    ]
    if fastest:
        mean = geometric_mean([peer.ratio for _, peer in pairs])
        titled["the fastest peer's time as a multiple of minimha's"] = [
            *fastest, {"shape": "geometric mean", "fastest peer": "", "ratio": f"{mean:.2f}"}
        ]  # fmt: skip
    return titled | {machine_line(report): []}


def as_result(report: Any) -> Result:
    """Convert a report to bar charts.

    There is one chart with a bar for each shape: the time of the fastest other library, divided by
    minimha's time. If no other library was timed, there is a chart for each shape, with a bar for
    the speed of each candidate.
    """
    from minimha.bench.report import best_peers, digits, geometric_mean, machine_line

    timed = [record for record in report.records if record.runs]
    pairs = list(best_peers(timed))
    if pairs:
        title = "time of the fastest other library / time of minimha"
        names = tuple(f"{ours.shape}: {peer.candidate}" for ours, peer in pairs)
        ratios = tuple(peer.ratio for _, peer in pairs)
        bars = [Bars(title, names, {title: ratios}, "{:.2f}".format)]
        mean = geometric_mean(ratios)
        conclusion = f"Above 1 minimha is faster; the geometric mean is {mean:.2f}."
    else:
        conclusion, bars = "A longer bar is faster.", []
        for shape, group in groupby(timed, lambda record: record.shape):
            rates = {record.candidate: record.rate / 1e9 for record in group}
            title = f"{shape}: G/s"
            bars.append(Bars(title, tuple(rates), {title: tuple(rates.values())}, digits))
    return Result("bench", "Speed", machine_line(report), 0, (), tuple(bars), conclusion)


def _seconds(text: str) -> float:
    try:
        seconds = number(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return seconds


def _shape(text: str) -> Any:
    from minimha.bench.shapes import Shape

    sizes, kind = text.split(",")[:6], text.split(",")[6:]
    try:
        B, H, Hkv, Lq, Lk, D = (count(size) for size in sizes)
        return Shape(B, H, Hkv, Lq, Lk, D, *kind)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected B,H,Hkv,Lq,Lk,D and perhaps a mask, got {text!r} ({error})"
        ) from None
