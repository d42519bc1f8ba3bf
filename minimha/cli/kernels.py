"""List the kernels, compile them, or show the report of ptxas: the command ``kernels``."""

import argparse
import sys
from importlib.util import find_spec

from minimha.api import DTYPES, ON_CPU, BackendUnavailable
from minimha.api import compile as compile_ahead
from minimha.cli.output import TABLE_FORMATS, add_output, deliver_table, grouped
from minimha.explain import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``kernels`` to its parser."""
    parser.description = (
        "Every rung of the two ladders: its idea, the problems it takes, and what was measured."
    )
    add = parser.add_argument
    compile_only = "compile the CUDA rungs, without a GPU, and show what ptxas reports"
    add("--ptx", action="store_true", help=compile_only)
    ahead = "compile a backend's kernels ahead of their first use, and keep them on disk"
    add("--compile", action="store_true", help=ahead)
    add("--backend", choices=("cpu", "cuda"), help="with --compile: cpu (the default), or cuda, "
        "for the GPU of this machine and common widths of heads")  # fmt: skip
    add("--dtype", action="append", choices=ON_CPU, default=[],
        help="with --compile: this dtype (may be repeated; default float32)")  # fmt: skip
    add("--rung", action="append", default=[], metavar="NAME", help="this rung (may be repeated)")
    add_output(parser, TABLE_FORMATS)


def _compile(args: argparse.Namespace) -> None:
    if args.ptx or args.rung:
        raise ValueError("--compile compiles the kernels of a backend: give no --ptx and no --rung")
    dtypes = args.dtype or DTYPES[:1]
    steps = None if args.backend == "cuda" else 2 * len(dtypes)
    with render.progress(sys.stderr, steps) as progress:
        kept = compile_ahead(dtypes, progress, backend=args.backend or "cpu")
    rows = [
        {"kernel": name, "kept in": str(path or "memory: no folder can be written")}
        for name, path in kept.items()
    ]
    deliver_table(args, rows)


def run(args: argparse.Namespace) -> None:
    """List the kernels, compile them, or show the report of ptxas, NVIDIA's assembler."""
    from minimha.kernels.ladder import CUDA_LADDER, LADDER, measured

    if args.compile:
        _compile(args)
        return
    for name in ("dtype", "backend"):
        if getattr(args, name):
            raise ValueError(f"--{name} is an option of --compile: add --compile")
    known = CUDA_LADDER if args.ptx else LADDER | CUDA_LADDER
    for name in args.rung:
        if name not in known:
            raise ValueError(f"no rung {name!r} here: there are {', '.join(known)}")
    rungs = args.rung or list(known)
    if not args.ptx:
        rows = [
            {"rung": name} | known[name]._asdict() | {"measured": measured(name)} for name in rungs
        ]
        deliver_table(args, rows)
        return
    if not find_spec("numba_cuda"):
        raise BackendUnavailable(
            "numba-cuda, which compiles the CUDA rungs, is not installed: "
            "pip install 'minimha[cuda]'"
        )
    from minimha.kernels.cuda import ptxas

    if ptxas.nvdisasm() is None:
        unknown = f"so {', '.join(ptxas.IN_CODE)} are unknown; it comes with the CUDA toolkit"
        print("minimha: nvdisasm is not found,", unknown, file=sys.stderr)
    with render.busy(sys.stderr, "compiling the CUDA rungs"):
        found = [record._asdict() for record in ptxas.assembled(tuple(rungs))]
    rows = [
        {name: "-" if value is None else str(value) for name, value in record.items()}
        for record in found
    ]
    deliver_table(args, rows, grouped(rows, "rung"), found)
