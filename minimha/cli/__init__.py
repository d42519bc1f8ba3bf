"""The command line: arguments and dispatch. The only room that prints.

``export`` and ``files`` are imported where they are used: the common command, an example on the
terminal, should start as fast as numpy and rich do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import numpy as np

from minimha import BackendUnavailable, __version__, attention, backends, examples
from minimha.api import TAPPED
from minimha.equations import tiled
from minimha.examples import Example, blocks, sentences, translation
from minimha.explain import render
from minimha.explain.trace import Trace, token_labels

FORMATS = ("text", "json", "markdown", "latex", "csv", "npz", "svg", "html")
SUFFIXES = {
    "": "text",
    ".txt": "text", ".json": "json", ".md": "markdown", ".tex": "latex", ".npz": "npz",
    ".svg": "svg", ".html": "html",
}  # fmt: skip
FOR_READERS = ("text", "markdown", "latex", "svg", "html")
LARGEST_MATRIX = 32 * 32  # numbers; more in one matrix cannot be read, only processed
LARGEST_RUN = 16 * LARGEST_MATRIX
MAX_TOKENS = max(sentences.SENTENCES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 after a sentence on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ∞ shows ? instead of failing
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.run is None:
            parser.print_help()
        else:
            args.run(args)
        if sys.stdout is not None:  # it may have been closed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        return _refuse("the problem does not fit into memory: take fewer tokens or heads")
    except OSError as error:
        return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
    except (ValueError, TypeError, BackendUnavailable) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _refuse(sentence: str) -> int:
    print("minimha:", " ".join(sentence.split()), file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence and never a page of usage."""

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            message += " (one that begins with a minus sign is joined on: --option=-1,0)"
        raise ValueError(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; ``args.run`` is the command's function."""
    parser = Parser(prog="minimha", description="Every number of attention, step by step.")
    parser.add_argument("--version", action="version", version=f"minimha {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(prog="minimha", metavar="command", title="commands")
    for add in (
        _add_examples, _add_example, _add_attend, _add_flash, _add_sizes, _add_bench,
        _add_kernels, _add_backends,
    ):  # fmt: skip
        add(commands)
    return parser


def _add_examples(commands: Any) -> None:
    parser = commands.add_parser("examples", help="list the documents' worked examples")
    parser.set_defaults(run=run_examples)
    _add_output(parser)


def _add_example(commands: Any) -> None:
    parser = commands.add_parser(
        "example",
        help="show every matrix of a worked example",
        description="Show every matrix of a worked example: one by name, as 'examples' lists them "
        "(a document's own stands beside the numbers that it prints), or a sentence through a "
        "multi-head attention with small weights.",
    )
    parser.set_defaults(run=run_example)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("name", nargs="?", help="an example's name, as translation")
    _add_sentence(which, "1 is document 000, 3 document 003, the others a sentence of that length")
    which.add_argument(
        "--document",
        type=lambda number: number.zfill(3) if number.isdigit() else number,
        choices=tuple(examples.DOCUMENTS),
        help="a document's example",
    )
    parser.add_argument("--heads", type=_count, metavar="H", help="query heads (2)")
    parser.add_argument("--kv-heads", type=_count, metavar="H", help="key/value heads (as --heads)")
    parser.add_argument("--d-model", type=_count, metavar="E", help="model width (4)")
    parser.add_argument("--rope", action="store_true", help="turn queries and keys by position")
    parser.add_argument(
        "--cross",
        nargs="?",
        const=" ".join(translation.ENGLISH),
        metavar="WORDS",
        help="attend to another sentence (cross-attention); French to English, if none is given",
    )
    _add_changes(parser)
    _add_steps(parser)
    _add_output(parser)


def _add_flash(commands: Any) -> None:
    parser = commands.add_parser(
        "flash",
        help="naive attention against FlashAttention, block by block",
        description="One head over a sentence: first with whole matrices, then in blocks, with "
        "what is loaded and what m, l and O are after each.",
    )
    parser.set_defaults(run=run_flash)
    _add_sentence(parser.add_mutually_exclusive_group(), "a sentence of that length (6)")
    parser.add_argument("--block-queries", type=_count, metavar="B_r", default=2, help="(2)")
    parser.add_argument("--block-keys", type=_count, metavar="B_c", default=2, help="(2)")
    parser.add_argument("--d-model", type=_count, metavar="E", default=4, help="model width (4)")
    _add_changes(parser)
    _add_steps(parser)
    _add_output(parser)


def _add_attend(commands: Any) -> None:
    parser = commands.add_parser(
        "attend",
        help="show every matrix of attention over your own numbers",
        description="Attention over your own numbers: a problem file, or a CSV file each for q, k "
        "and v. The file's keys are q, k, v and the options of minimha.attention: is_causal, "
        "q_offset, window_size, attn_mask, attn_bias, kv_lengths, alibi_slopes, scale, softcap, "
        "sinks, return_lse, backend. A flag wins over the file.",
    )
    parser.set_defaults(run=run_attend)
    parser.add_argument("problem", nargs="?", help="problem.json or problem.npz")
    for name in ("q", "k", "v"):
        parser.add_argument(f"--{name}", metavar="CSV", help=f"{name}, a row a token")
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--causal", dest="is_causal", action=flag, help="hide the keys after each query")
    add("--q-offset", type=_integers, metavar="N", help="position of query 0 among the keys")
    add(
        "--window",
        dest="window_size",
        type=_window,
        metavar="LEFT,RIGHT",
        help="keys seen to each side; none = all",
    )
    add("--attn-mask", metavar="CSV", help="1 = may attend, 0 = may not")
    add("--attn-bias", metavar="CSV", help="added to the scores")
    add("--kv-lengths", type=_integers, metavar="N,…", help="number of filled keys")
    add("--alibi-slopes", type=_numbers, metavar="X,…", help="one slope a head")
    add("--scale", type=float, metavar="X", help="instead of 1/√D")
    add("--softcap", type=float, metavar="C", help="cap the scores at ±C")
    add("--sinks", type=_numbers, metavar="X,…", help="one extra score a head")
    add("--return-lse", action=flag, help="show the log-sum-exp too")
    add("--backend", metavar="NAME", help="auto, dense, tiled; cpu: the output alone")
    add("--labels", metavar="WORDS", help="a word for each token, separated by spaces")
    _add_steps(parser)
    _add_output(parser)


def _add_sizes(commands: Any) -> None:
    parser = commands.add_parser(
        "sizes",
        help="parameters, FLOPs and KV cache of known models",
        description="Parameters, FLOPs (a multiplication and an addition are two) and KV-cache "
        "bytes of known models, and what grouped heads save. Exact numbers: --format json.",
    )
    parser.set_defaults(run=run_sizes)
    parser.add_argument("--preset", metavar="NAME", help="one model, as gpt3 (a table of all)")
    parser.add_argument("--length", type=_count, metavar="N", help="tokens (the most it takes)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float16", help="(float16)"
    )
    _add_output(parser)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="how fast the CPU kernels are, beside other libraries",
        description="Time minimha's CPU kernels beside NumPy and, where they are installed "
        "(pip install 'minimha[bench]'), torch and onnxruntime. What computes wrong numbers is "
        "not timed. ratio is a candidate's time / minimha's, error its largest error as a "
        "multiple of plain NumPy's, of machine its rate as a part of what this machine's matrix "
        "product (decode: reading memory) reaches in the same run.",
    )
    parser.set_defaults(run=run_bench)
    parser.add_argument(
        "--shape",
        action="append",
        type=_shape,
        default=[],
        metavar="B,H,Hkv,Lq,Lk,D[,MASK[,DTYPE]]",
        help="sizes, and none, causal, window or mask (may be repeated; 16 shapes); on a GPU a "
        "dtype may follow: causal,bfloat16",
    )
    parser.add_argument(
        "--backend", choices=("cpu", "cuda"), default="cpu", help="cuda: on a GPU, beside torch"
    )
    parser.add_argument("--ladder", action="store_true", help="time every rung instead of peers")
    parser.add_argument(
        "--seconds", type=_seconds, default=4.0, metavar="S", help="of timed calls a shape (4)"
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="of everyone (all)")
    _add_output(parser)


def _add_kernels(commands: Any) -> None:
    parser = commands.add_parser(
        "kernels",
        help="list the kernels, rung by rung",
        description="Every rung of the two ladders: its idea, what it takes, what was measured.",
    )
    parser.set_defaults(run=run_kernels)
    parser.add_argument(
        "--ptx",
        action="store_true",
        help="compile the CUDA rungs, without a GPU, and report what ptxas says",
    )
    parser.add_argument(
        "--rung", action="append", default=[], metavar="NAME", help="this rung (may be repeated)"
    )
    _add_output(parser)


def _add_backends(commands: Any) -> None:
    parser = commands.add_parser("backends", help="say which backends can run here")
    parser.set_defaults(run=run_backends)
    _add_output(parser)


def _add_sentence(group: Any, which: str) -> None:
    group.add_argument("--tokens", type=_tokens, metavar="N", help=f"1 to {MAX_TOKENS}: {which}")
    group.add_argument("--sentence", metavar="WORDS", help="a sentence of your own")


def _add_changes(parser: argparse.ArgumentParser) -> None:
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--causal", action=flag, help="hide later tokens, or not")
    parser.add_argument("--scale", action=flag, help="divide the scores by √d_k, or not")
    parser.add_argument("--seed", type=_natural, metavar="N", help="of embeddings and weights (1)")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STEP",
        help="show this step only (may be repeated)",
    )
    parser.add_argument("--decimals", type=_decimals, default=3, metavar="N", help="(3)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="(text, or by the ending of --output)")
    parser.add_argument(
        "--output", metavar="PATH", help="write a file; csv writes a folder of steps"
    )
    parser.add_argument("--force", action="store_true", help="replace what --output names")


def run_examples(args: argparse.Namespace) -> None:
    """List the worked examples."""
    deliver_table(
        args,
        "worked examples",
        [
            {"name": e.name, "title": e.title, "sentence": e.sentence, "source": e.source}
            for e in examples.EXAMPLES.values()
        ],
    )


def run_backends(args: argparse.Namespace) -> None:
    """List the backends."""
    deliver_table(
        args,
        "backends",
        [
            {"backend": name, "runs": "no" if reason else "yes", "why not": reason or ""}
            for name, reason in backends().items()
        ],
    )


def run_kernels(args: argparse.Namespace) -> None:
    """List the rungs, or what ptxas says of the CUDA rungs."""
    from minimha.kernels.ladder import CUDA_LADDER, LADDER

    known = CUDA_LADDER if args.ptx else LADDER | CUDA_LADDER
    for name in args.rung:
        if name not in known:
            raise ValueError(f"no rung {name!r} here: there are {', '.join(known)}")
    rungs = args.rung or list(known)
    if not args.ptx:
        deliver_table(args, "kernels", [{"rung": name} | known[name]._asdict() for name in rungs])
        return
    if not find_spec("numba_cuda"):
        raise BackendUnavailable(
            "numba-cuda, which compiles the CUDA rungs, is not installed: "
            "pip install 'minimha[cuda]'"
        )
    from minimha.kernels.cuda import ptxas

    if ptxas.ptxas() is None:
        print(
            "minimha: ptxas is not found, so registers, stack and spill are not known; it comes "
            "with the CUDA toolkit",
            file=sys.stderr,
        )
    with render.busy(sys.stderr, "compiling the CUDA rungs"):
        found = [record._asdict() for record in ptxas.assembled(tuple(rungs))]
    rows = [
        {name: "-" if value is None else str(value) for name, value in record.items()}
        for record in found
    ]
    deliver_numbers(args, found, {"CUDA rungs, assembled": rows}, "kernels", rows)


def run_sizes(args: argparse.Namespace) -> None:
    """Show a table of all presets, or of one preset's quantities."""
    from minimha.models import sizes

    kind = _format(args, only_to_disk=("npz",))
    in_units = _in_units if kind in FOR_READERS else lambda number, unit: str(number)
    if args.preset is not None:
        preset = sizes.find(args.preset)
        if args.length is not None:
            sizes.check_length(preset, args.length)
        content: Any = _size_record(preset, args.length, args.dtype)
        title, rows = f"{preset.name}: {preset.source}", _size_quantities(content, in_units)
    else:
        known = list(sizes.PRESETS.values())
        longest = max(preset.max_length for preset in known)
        if args.length is not None and args.length > longest:
            raise ValueError(
                f"--length is {args.length} but no preset was made for more than {longest} tokens"
            )
        content = [_size_record(preset, args.length, args.dtype) for preset in known]
        where = f"at {args.length} tokens" if args.length else "each at its longest"
        title = f"{where}, in {args.dtype}; saved: part of the cache, by grouped heads"
        rows = [_size_row(record, in_units) for record in content]
    deliver_numbers(args, content, {title: rows}, title, rows)


def _size_record(preset: Any, length: int | None, dtype: str) -> dict[str, Any]:
    """One preset in exact numbers; None for what it does not have: beyond its length, no cache."""
    from dataclasses import asdict

    from minimha.models import sizes

    def parts(count: Any) -> dict[str, int]:
        return asdict(count) | {"total": count.total}

    length = length or preset.max_length
    takes = length <= preset.max_length
    writes = takes and preset.is_causal
    return asdict(preset) | {
        "length": length if takes else None,
        "dtype": dtype,
        "parameters": parts(sizes.parameters(preset)),
        "weight_bytes": sizes.weight_bytes(preset, dtype),
        "prefill_flops": parts(sizes.prefill_flops(preset, length)) if takes else None,
        "decode_flops": parts(sizes.decode_flops(preset, length)) if writes else None,
        "kv_cache_bytes": sizes.kv_cache_bytes(preset, length, dtype) if writes else None,
        "saved_by_groups": (
            asdict(sizes.saved_by_groups(preset, length, dtype)) if writes else None
        ),
    }


def _size_row(record: dict[str, Any], in_units: Callable[[int, str], str]) -> dict[str, str]:
    """One preset in the table of all."""
    prefill, decode = record["prefill_flops"], record["decode_flops"]
    cache, saved = record["kv_cache_bytes"], record["saved_by_groups"]
    part = 100 * saved["kv_cache_bytes"] / (saved["kv_cache_bytes"] + cache) if saved else None
    return {
        "model": record["name"],
        "parameters": in_units(record["parameters"]["total"], ""),
        "H/Hkv": f"{record['num_heads']}/{record['num_kv_heads']}",
        "length": str(record["length"] or f"≤ {record['max_length']}"),
        "prefill": in_units(prefill["total"], "FLOP") if prefill else "-",
        "decode": in_units(decode["total"], "FLOP") if decode else "-",
        "KV cache": in_units(cache, "B") if decode else "-",
        "saved": "-" if part is None else f"{part:.3g} %",
    }


def _size_quantities(
    record: dict[str, Any], in_units: Callable[[int, str], str]
) -> list[dict[str, str]]:
    """One preset, a row a quantity."""
    said = {True: "yes", False: "no"}
    sizes = list(record)[1 : list(record).index("length")]  # the preset's own, but for its name
    found = {
        name: said[value] if isinstance(value, bool) else str(value)
        for name in sizes
        if name != "source" and (value := record[name]) is not None
    }
    length, dtype = record["length"], record["dtype"]
    counts = {
        "parameters": (record["parameters"], ""),
        f"prefill of {length} tokens": (record["prefill_flops"], "FLOP"),
        f"decode step at {length} tokens": (record["decode_flops"] or {}, "FLOP"),
    }
    for title, (parts, unit) in counts.items():
        for part, number in sorted(parts.items(), key=lambda item: item[0] != "total"):
            name = "" if part == "total" else f": {part.replace('_', '-')}"
            found[title + name] = in_units(number, unit)
    found[f"weights in {dtype}"] = in_units(record["weight_bytes"], "B")
    if record["kv_cache_bytes"] is not None:
        found[f"KV cache of {length} tokens in {dtype}"] = in_units(record["kv_cache_bytes"], "B")
        saved = record["saved_by_groups"]
        units = {"parameters": "", "prefill_flops": "FLOP", "decode_flops": "FLOP"}
        for name, number in saved.items():
            what = "KV cache" if name == "kv_cache_bytes" else name.replace("_flops", " FLOPs")
            found[f"grouped heads save: {what}"] = in_units(number, units.get(name, "B"))
    return [{"quantity": quantity, "value": value} for quantity, value in found.items()]


def _in_units(number: int, unit: str) -> str:
    """Three digits and a unit: 124 M, 1.21 GiB (bytes in powers of 1024), 722 TFLOP."""
    base = 1024 if unit == "B" else 1000
    signs = {"": ("K", "M", "B", "T"), "B": ("Ki", "Mi", "Gi", "Ti")}.get(
        unit, ("K", "M", "G", "T", "P", "E")
    )
    scaled, sign = float(number), ""
    for larger in signs:
        if round(scaled) < base:
            break
        scaled, sign = scaled / base, larger
    digits = f"{scaled:#.3g}".rstrip(".") if sign and scaled < 999.5 else f"{scaled:.0f}"
    return f"{digits} {sign}{unit}".rstrip()


def run_bench(args: argparse.Namespace) -> None:
    """Measure, and show one table a shape."""
    from minimha.bench import cpu as bench
    from minimha.bench import shapes as known
    from minimha.bench.report import as_json, as_rows
    from minimha.cli import files

    kind = _format(args, only_to_disk=("npz",))
    if args.output and kind != "csv":
        files.check_free(args.output, force=args.force)
    if args.backend == "cuda":
        report = _bench_on_gpu(args)
    else:
        shapes = args.shape or [known.LADDER_SHAPE] if args.ladder else args.shape or known.SHAPES
        measure = bench.ladder if args.ladder else bench.against_peers
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
    rows = [{"shape": r.shape} | row for r, row in zip(
        report.records, as_rows(report.records), strict=True
    )]  # fmt: skip
    deliver_numbers(args, as_json(report), _bench_tables(report, rows), "bench", rows)


def _bench_on_gpu(args: argparse.Namespace) -> Any:
    from minimha.bench import gpu

    if args.ladder or args.threads:
        raise ValueError("--ladder and --threads are of the CPU: --backend cuda takes neither")
    shapes = args.shape or gpu.SHAPES
    with render.progress(sys.stderr, 1 + len(shapes)) as progress:
        return gpu.against_torch(shapes, args.seconds, progress)


def _bench_tables(report: Any, rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    from minimha.bench.report import best_peers, geometric_mean

    machine = report.machine
    titled: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        titled.setdefault(row["shape"], []).append(
            {name: value for name, value in row.items() if name != "shape"}
        )
    pairs = list(best_peers(report.records))
    fastest = [
        {"shape": ours.shape, "fastest peer": peer.candidate, "ratio": f"{peer.ratio:.2f}"}
        for ours, peer in pairs
    ]
    if fastest:
        mean = geometric_mean([peer.ratio for _, peer in pairs])
        titled["how many times minimha's time the fastest peer takes"] = [
            *fastest, {"shape": "geometric mean", "fastest peer": "", "ratio": f"{mean:.2f}"}
        ]  # fmt: skip
    where = ", ".join(
        str(value) if name in ("processor", "system", "date") else f"{name} {value}"
        for name, value in machine.items()
    )
    machine_line = (
        f"{where}; compiling or loading the kernels took {report.compile_seconds:.1f} s, which no "
        f"time here includes"
    )
    return titled | {machine_line: []}


def run_example(args: argparse.Namespace) -> None:
    """Show one worked example."""
    deliver(args, _example(args).trace(args.causal, args.scale))


def run_flash(args: argparse.Namespace) -> None:
    """Show naive and tiled attention over one sentence."""
    settings = {
        "B_r": args.block_queries, "B_c": args.block_keys, "d_model": args.d_model,
        "seed": sentences.DEFAULT_SEED if args.seed is None else args.seed,
    }  # fmt: skip
    if args.sentence is None:
        example = blocks.of_length(args.tokens or 6, **settings)
    else:
        example = blocks.block_by_block(args.sentence.split(), **settings)
    deliver(args, example.trace(args.causal, args.scale))


def run_attend(args: argparse.Namespace) -> None:
    """Show attention over the reader's own numbers."""
    problem, source = _problem(args)
    trace = Trace(
        example="attention over your own numbers",
        source=source,
        labels=_labels(args.labels, problem),
        blocks=(tiled.BLOCK_ROWS, tiled.BLOCK_COLUMNS),
    )
    if problem.get("backend", "auto") in ("auto", *TAPPED):
        attention(**problem, tap=trace)
    else:  # a kernel keeps no steps; its results can be shown beside the others' all the same
        backend, results = problem["backend"], ("output", "lse")
        if not set(args.only) <= set(results):
            raise ValueError(
                f"backend {backend!r} keeps no steps, so --only can name {' and '.join(results)} "
                f"alone: {' and '.join(TAPPED)} keep every step"
            )
        with render.busy(sys.stderr, "preparing the kernel, which is compiled once on a machine"):
            output, lse = attention(**{**problem, "return_lse": True})
        trace("output", output)
        if problem.get("return_lse"):
            trace("lse", lse)
    deliver(args, trace)


def deliver(args: argparse.Namespace, trace: Trace) -> None:
    """Print ``trace`` in the asked format, or write it to ``--output``."""
    trace.only = args.only
    kind = _format(args, only_to_disk=("csv", "npz"))
    if kind in FOR_READERS:
        _check_readable(trace)
    if kind == "text":
        _show(args, lambda *how: render.text(trace, args.decimals, *how))
        return
    from minimha.explain import export

    _put(args, export.trace_as(kind, trace, args.decimals))


def deliver_table(args: argparse.Namespace, title: str, records: list[dict[str, str]]) -> None:
    """Print a list of records in the asked format, or write it to ``--output``."""
    kind = _format(args, only_to_disk=("npz",))
    if kind == "text":
        _show(args, lambda *how: render.table(records))
        return
    from minimha.explain import export

    _put(args, export.table_as(kind, title, records))


def deliver_numbers(
    args: argparse.Namespace,
    exact: Any,
    tables: dict[str, list[dict[str, str]]],
    title: str,
    records: list[dict[str, str]],
) -> None:
    """``exact`` as JSON, ``tables`` as text, ``records`` in any other format."""
    kind = _format(args, only_to_disk=("npz",))
    if kind == "json":
        import json

        _put(args, json.dumps(exact, ensure_ascii=False, indent=1) + "\n")
    elif kind == "text":
        _show(args, lambda *how: render.tables(tables, how[0]))
    else:
        deliver_table(args, title, records)


def _format(args: argparse.Namespace, only_to_disk: Sequence[str]) -> str:
    ending = os.path.splitext(args.output or "")[1].lower()
    kind: str | None = args.format or SUFFIXES.get(ending)
    if kind is None and ending == ".csv" and "csv" not in only_to_disk:
        kind = "csv"
    if kind is None:
        raise ValueError(
            f"--output {args.output} ends in {ending!r}, which names no format: add --format, one "
            f"of {', '.join(FORMATS)} (csv writes a folder of steps)"
        )
    if kind in only_to_disk and args.output is None:
        what = "a folder" if kind == "csv" else "a file"
        raise ValueError(f"--format {kind} needs --output: the name of {what} to write")
    return kind


def _show(args: argparse.Namespace, as_text: Callable[[int | None, bool], Any]) -> None:
    """Text fits a terminal's width and colours; elsewhere it has neither."""
    console = render.console_for(sys.stdout)
    if args.output is None and console.is_terminal:
        in_color = console.color_system in ("256", "truecolor") and not console.no_color
        console.print(as_text(console.width, in_color), soft_wrap=True)
    else:
        _put(args, render.plain(as_text(None, False)))


def _put(args: argparse.Namespace, content: str | bytes | dict[str, str]) -> None:
    """Print the content or write it where ``--output`` says; a dictionary is a folder's files."""
    if args.output is None:
        print(content, end="")
        return
    from minimha.cli import files

    if isinstance(content, dict):
        files.write_folder(args.output, content, force=args.force)
    else:
        encoded = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        files.write_file(args.output, encoded, force=args.force)


def _check_readable(trace: Trace) -> None:
    """Refuse to print what nobody can read, and say what to do instead."""
    steps = trace.steps
    instead = (
        "export it with --format json, npz or csv and --output PATH, or choose a smaller step "
        "with --only"
    )
    for step in steps:
        if step.value.size > LARGEST_MATRIX:
            size = " × ".join(str(n) for n in step.value.shape)
            raise ValueError(
                f"{step.name} is too large to print, {size} = {step.value.size:,} numbers where "
                f"{LARGEST_MATRIX:,} can be read: {instead}"
            )
    total = sum(step.value.size for step in steps)
    if total > LARGEST_RUN:
        raise ValueError(
            f"all steps together are too large to print, {total:,} numbers where {LARGEST_RUN:,} "
            f"can be read: {instead}"
        )


def _example(args: argparse.Namespace) -> Example:
    settings = {
        "num_heads": args.heads, "num_kv_heads": args.kv_heads, "d_model": args.d_model,
        "seed": args.seed, "rope": args.rope or None,
        "context": None if args.cross is None else args.cross.split(),
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    if args.sentence is not None:
        return sentences.sentence(args.sentence.split(), **given)
    own = {1: "000", 3: "003", None: "003"}.get(args.tokens) if not given else None
    name = args.name or args.document or own
    if name is None and args.tokens is None and "context" in given:
        return sentences.sentence(translation.FRENCH, source="document 000", **given)
    if name is None:
        return sentences.of_length(args.tokens or 3, **given)
    if name == "002" and given:  # a sentence without numbers
        return sentences.of_length(6, **given)
    if name not in examples.EXAMPLES:
        raise ValueError(f"no example {name!r}: there are {', '.join(examples.EXAMPLES)}")
    if given:
        first = next(iter(given))
        flags = {"num_heads": "heads", "num_kv_heads": "kv-heads", "d_model": "d-model"}
        flag = flags.get(first, "cross" if first == "context" else first)
        raise ValueError(
            f"--{flag} cannot change example {name}, whose numbers are its own: use it with "
            f"--tokens N or --sentence"
        )
    return examples.EXAMPLES[name]


def _problem(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The arguments of ``attention``, from the problem file, the CSV files and the flags."""
    from minimha.cli import files

    matrices = {name: getattr(args, name) for name in ("q", "k", "v")}
    missing = [f"--{name}" for name, path in matrices.items() if path is None]
    if args.problem is None and missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"attend needs a problem file, or --q, --k and --v; "
            f"{' and '.join(missing)} {verb} missing"
        )
    if args.problem is not None and len(missing) < 3:
        raise ValueError("attend takes a problem file or --q, --k and --v, and both were given")
    problem = {} if args.problem is None else files.read_problem(args.problem)
    for name in files.KEYS:
        value = getattr(args, name)
        if isinstance(value, str) and name != "backend":
            value = files.read_matrix(value)
            if name == "attn_mask":
                value = files.as_mask("--attn-mask", value)
        if value is not None:
            problem[name] = value
    paths = [args.problem] if args.problem else list(matrices.values())
    return problem, ", ".join(str(path) for path in paths)


def _labels(words: str | None, problem: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Labels for the keys, and for those queries that stand at a key's position; or for queries."""
    if words is None:
        return {}
    labels = tuple(words.split())
    Lq, Lk = (np.shape(problem[name])[-2] if np.ndim(problem[name]) > 1 else 0 for name in "qk")
    if len(labels) == Lk:
        offset = problem.get("q_offset", 0)
        start = 0 if offset is None else offset if isinstance(offset, int) else -1
        is_aligned = 0 <= start <= Lk - Lq
        return token_labels(labels[start : start + Lq] if is_aligned else (), labels)
    if len(labels) == Lq:
        return token_labels(labels, ())
    raise ValueError(
        f"--labels has {len(labels)} words: expected one for each key ({Lk}) or query ({Lq})"
    )


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A converter for argparse: a whole number from ``low`` on, up to ``high``."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, came {text!r}")
        return number

    return convert


_tokens = _whole(1, MAX_TOKENS)
_count = _whole(1)
_natural = _whole(0)
_decimals = _whole(0, 17)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, came {text!r}")
    return seconds


def _shape(text: str) -> Any:
    from minimha.bench.shapes import Shape

    sizes, kind = text.split(",")[:6], text.split(",")[6:]
    try:
        B, H, Hkv, Lq, Lk, D = (_count(size) for size in sizes)
        return Shape(B, H, Hkv, Lq, Lk, D, *kind)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected B,H,Hkv,Lq,Lk,D and perhaps a mask, came {text!r} ({error})"
        ) from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, came {text!r}"
        ) from None


def _integers(text: str) -> int | list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, came {text!r}"
        ) from None
    return found[0] if len(found) == 1 else found


def _window(text: str) -> tuple[int | None, int | None]:
    sides = text.split(",")
    try:
        left, right = (None if side.strip().lower() == "none" else int(side) for side in sides)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected LEFT,RIGHT, two whole numbers or none, came {text!r}"
        ) from None
    return left, right
