"""Name the bugs of an attention function or a layer: the command ``check``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from minimha.cli.arguments import natural, real, whole
from minimha.cli.output import REPORT_FORMATS, add_output, check_output, format_of, put
from minimha.explain import render
from minimha.explain.trace import printable

NOTHING_WRONG, WRONG = 0, 1
MODES = ("function", "layer", "write_problems", "compare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``check`` to its parser."""
    parser.description = (
        "Run a function on graded problems, in a separate process, and name what it "
        "computes wrong. Exit status: 0 right or only different, 1 wrong, 2 it cannot be checked."
    )
    add = parser.add_argument
    add("function", nargs="?", metavar="FUNCTION",
        help="mykernel.py:attention or package.module:attention")  # fmt: skip
    add("--layer", metavar="CLASS",
        help="module:Class of whole layers, Class(W_q=…, …, num_heads=H)(x)")  # fmt: skip
    add("--speaks", metavar="DIALECT", default="minimha",
        help="minimha (default), torch, flex_attention, flash_attention, flash_attention_varlen, "
        "flash_attention_paged, transformers, jax, keras, onnx, gated_delta_rule, fla; "
        "of layers lightning_indexer")  # fmt: skip
    add("--dtype", metavar="DTYPE",
        help="float32, float16 or bfloat16, of q, k and v (default: the first that it takes)",
    )  # fmt: skip
    add("--layout", metavar="AXES", default="BHLD",
        help="order of the axes of q, k, v and output, such as BLHD (default BHLD)")  # fmt: skip
    add("--arrays", metavar="LIBRARY", help="arrays that it takes: numpy, torch, jax or cupy")
    add("--device", metavar="NAME", help="where torch's arrays are, such as cuda")
    add("--timeout", type=real, metavar="S", default=20.0,
        help="seconds for one problem (default 20), three times that for the first")  # fmt: skip
    add("--write-problems", metavar="FOLDER", help="write the problems as npz, for any language")
    add("--compare", metavar="PATH",
        help="answers to those problems, computed elsewhere: out.npz or a folder")  # fmt: skip
    add("--strict", action="store_true",
        help="exit with 1 also if it only differs, for example leaks a hidden NaN")  # fmt: skip
    add("--seed", type=natural, metavar="N", help="repeat the problems of an earlier report")
    add("--head-dims", type=whole(1), nargs="+", default=(), metavar="D",
        help="widths of heads that the function takes")  # fmt: skip
    add("--multiple-of", type=whole(1), default=1, metavar="N",
        help="a number that divides the lengths that it takes")  # fmt: skip
    add("--max-heads", type=whole(1), metavar="H", help="the most query heads that it takes")
    add("--square", action="store_true", help="it takes only as many queries as keys")
    add_output(parser, REPORT_FORMATS)


def run(args: argparse.Namespace) -> int:
    """Check a function, a layer or files of answers, or write problems; return the exit status."""
    modes = [name for name in MODES if getattr(args, name) is not None]
    if len(modes) != 1:
        raise ValueError(
            "check takes one of: a function such as mykernel.py:attention, --layer module:Class, "
            "--write-problems FOLDER and --compare PATH"
        )
    check_output(args)
    if modes == ["write_problems"]:
        return _write(args)
    report = _compared(args) if modes == ["compare"] else _checked(args)
    if report.failure is None or args.format == "json":
        put(args, _written(report, format_of(args)))
    if report.failure is not None:
        raise ValueError(report.failure)
    return NOTHING_WRONG if report.passes(strict=args.strict) else WRONG


def _checked(args: argparse.Namespace) -> Any:
    from minimha.check import check

    is_layer = args.layer is not None
    with render.progress(sys.stderr, None) as progress:
        return check(
            args.layer if is_layer else args.function, args.speaks, args.dtype, is_layer=is_layer,
            arrays=args.arrays, device=args.device, timeout=args.timeout, seed=args.seed,
            head_dims=args.head_dims, multiple_of=args.multiple_of, max_heads=args.max_heads,
            is_square=args.square, layout=args.layout, progress=progress,
        )  # fmt: skip


def _written(report: Any, kind: str) -> str:
    from minimha.check import page

    makers = {"text": page.as_text, "markdown": page.as_markdown, "html": page.as_html}
    return str(report.to_json() if kind == "json" else makers[kind](report))


def _write(args: argparse.Namespace) -> int:
    from minimha.check.asking import exchanged
    from minimha.check.exchange import files_of
    from minimha.check.problems import graded
    from minimha.cli.output import write_folder

    dtype = args.dtype or "float32"
    problems = exchanged(graded(dtype), args.seed or 0)
    try:
        write_folder(args.write_problems, files_of(problems, dtype), force=args.force)
    except ValueError as error:
        raise ValueError(str(error).replace("--output", "--write-problems", 1)) from None
    where = printable(args.write_problems)
    print(f"{len(problems)} problems are in {where}, listed in problems.json")
    return NOTHING_WRONG


def _compared(args: argparse.Namespace) -> Any:
    from minimha.check import judged
    from minimha.check.asking import exchanged
    from minimha.check.exchange import MANIFEST, answers_of, check_manifest
    from minimha.check.problems import graded
    from minimha.cli.inputs import read_text

    seed, dtype = args.seed or 0, args.dtype or "float32"
    problems, path = exchanged(graded(dtype), seed), Path(args.compare)
    manifest = path / MANIFEST
    if path.is_dir() and manifest.exists():
        check_manifest(read_text(manifest), problems, str(manifest), dtype)
    arrays = _folder(path, problems) if path.is_dir() else _answers(path, problems, "")
    answers = answers_of(arrays, problems, args.compare, dtype)
    return judged(problems, answers, args.compare, "minimha", dtype, seed=seed)


def _folder(path: Path, problems: Any) -> dict[str, Any]:
    """Return the arrays of all answers in a folder."""
    from minimha.check.exchange import ANSWER, names_of

    arrays: dict[str, Any] = {}
    for name in names_of(problems):
        if (path / f"{name}{ANSWER}").exists():
            arrays |= _answers(path / f"{name}{ANSWER}", problems, f"{name}.")
    return arrays


def _answers(path: Path, problems: Any, prefix: str) -> dict[str, Any]:
    """Return the arrays of one file, under their names with ``prefix``."""
    from minimha.check.exchange import check_names
    from minimha.cli.inputs import read_arrays

    def check(names: list[str]) -> None:
        check_names([prefix + name for name in names], problems, str(path))

    return {prefix + name: array for name, array in read_arrays(path, check).items()}
