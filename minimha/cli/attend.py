"""Show every matrix of attention for numbers from the user's files: the command ``attend``."""

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minimha.api import TAPPED, attention, check_backend
from minimha.cli.arguments import check_step, integer, number, real
from minimha.cli.output import add_steps, deliver
from minimha.equations import tiled
from minimha.explain import render
from minimha.explain.trace import Trace, token_labels

RESULTS = ("output", "lse")  # the only arrays of a run without a trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``attend`` to its parser."""
    parser.description = (
        "Attention over your own numbers: a problem file, or one CSV file each for "
        "q, k and v; or what was exported as JSON or npz, shown again. A problem's keys are q, k, "
        "v and the options of minimha.attention: is_causal, q_offset, window_size, attn_mask, "
        "attn_bias, key_indices, kv_lengths, alibi_slopes, scale, softcap, sinks, cu_seqlens_q, "
        "cu_seqlens_k, block_table, k_scale, v_scale, return_lse, backend. A flag takes precedence "
        "over the file. A store of zarr, whose arrays and attributes have these names, is read a "
        "block of keys at a time and may be larger than memory. In CSV # begins a comment, and "
        "semicolons may separate numbers with decimal commas."
    )
    parser.add_argument("problem", nargs="?", help="problem.json, .npz or .zarr")
    for name in ("q", "k", "v"):
        parser.add_argument(f"--{name}", metavar="CSV", help=f"{name}, one row per token")
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--causal", dest="is_causal", action=flag, help="hide the keys after each query")
    add("--q-offset", type=_integers, metavar="N", help="position of query 0 among the keys")
    sides = "visible keys on each side; none = all"
    add("--window", dest="window_size", type=_window, metavar="LEFT,RIGHT", help=sides)
    add("--attn-mask", metavar="CSV", help="1 = may attend, 0 = may not")
    add("--attn-bias", metavar="CSV", help="added to the scores")
    add("--key-indices", metavar="CSV", help="the keys that each query picks; -1 is none")
    add("--kv-lengths", type=_integers, metavar="N,…", help="number of filled keys")
    add("--alibi-slopes", type=_numbers, metavar="X,…", help="one slope per head")
    add("--scale", type=real, metavar="X", help="scale of the scores, instead of 1/√D")
    add("--softcap", type=real, metavar="C", help="cap the scores at ±C")
    add("--sinks", type=_numbers, metavar="X,…", help="one extra score per head")
    for side, rows in (("q", "queries"), ("k", "keys")):
        add(f"--cu-seqlens-{side}", type=_integers, metavar="0,N,…", help=f"packed: ends of {rows}")
    add("--return-lse", action=flag, help="show the log-sum-exp too")
    add("--backend", metavar="NAME", help="auto, dense, tiled; cpu shows the output only")
    add("--cluster", metavar="tcp://…", help="dask cluster that computes a .zarr store")
    add("--labels", metavar="WORDS", help="one word per token, separated by spaces")
    add_steps(parser)


def run(args: argparse.Namespace) -> int:
    """Show attention over numbers from files, or an exported trace; return the exit status."""
    problem, source = _problem(args)
    if isinstance(problem, Trace):
        return deliver(args, problem)
    trace = Trace(
        example="attention over your own numbers",
        source=source,
        labels=_labels(args.labels, problem),
        blocks=(tiled.BLOCK_ROWS, tiled.BLOCK_COLUMNS),
    )
    backend, is_stored = problem.get("backend", "auto"), _is_store(args.problem)
    check_backend(backend)
    is_traced = not is_stored and backend in ("auto", *TAPPED)
    _check_sizes(problem, is_traced)
    if is_traced:
        attention(**problem, tap=trace)
    else:
        without_steps = "a store" if is_stored else f"backend {backend!r}"
        if not set(args.only) <= set(RESULTS):
            raise ValueError(
                f"{without_steps} keeps no steps, so --only can name only "
                f"{' and '.join(RESULTS)}: {' and '.join(TAPPED)} keep every step"
            )
        output, lse = _computed(args, problem)
        trace("output", output)
        if problem.get("return_lse"):
            trace("lse", lse)
    return deliver(args, trace)


def _computed(args: argparse.Namespace, problem: dict[str, Any]) -> tuple[Any, Any]:
    """Return output and log-sum-exp, computed without a trace."""
    if args.cluster is not None:
        from minimha.cli.stores import on_cluster

        return on_cluster(args.cluster, problem)
    doing = "preparing the kernel, which is compiled once per machine"
    if _is_store(args.problem):
        doing = "reading keys and values, a block at a time"
    with render.busy(sys.stderr, doing):
        output, lse = attention(**{**problem, "return_lse": True})
    return output, lse


def _problem(args: argparse.Namespace) -> tuple[dict[str, Any] | Trace, str]:
    """Return the arguments of ``attention`` from the problem file, the CSV files and the flags."""
    from minimha.cli import inputs

    matrices = {name: getattr(args, name) for name in ("q", "k", "v")}
    missing = [f"--{name}" for name, path in matrices.items() if path is None]
    if args.cluster is not None and not _is_store(args.problem):
        raise ValueError("--cluster computes over a store of zarr: expected a problem.zarr")
    if args.problem is None and missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"attend needs a problem file, or --q, --k and --v; "
            f"{' and '.join(missing)} {verb} missing"
        )
    if args.problem is not None and len(missing) < 3:
        quoted = "" if args.labels is None else " (--labels takes several words in quotes)"
        raise ValueError(
            f"attend takes a problem file or --q, --k and --v, but both were given{quoted}"
        )
    problem = {} if args.problem is None else _read(args.problem)
    if isinstance(problem, Trace):
        _check_unchanged(args, inputs.KEYS)
        return problem, args.problem
    for name in inputs.KEYS:
        value = getattr(args, name, None)  # a page table can only be in a file
        if isinstance(value, str) and name != "backend":
            value = inputs.read_matrix(value)
            if name == "attn_mask":
                value = inputs.as_mask("--attn-mask", value)
            if name == "key_indices":
                value = inputs.as_whole("--key-indices", value)
        if value is not None:
            problem[name] = value
    if args.problem is not None:
        return problem, args.problem
    shapes = {name: " × ".join(map(str, problem[name].shape)) for name in "qkv"}
    return problem, ", ".join(f"{matrices[name]} ({shape})" for name, shape in shapes.items())


def _is_store(name: str | None) -> bool:
    """Return whether a problem's name is the name of a zarr store."""
    return name is not None and Path(name).suffix == ".zarr"


def _read(name: str) -> dict[str, Any] | Trace:
    """Return a problem, or an exported trace."""
    if _is_store(name):
        from minimha.cli.stores import open_problem

        return open_problem(name)
    from minimha.cli.inputs import read_problem

    return read_problem(name)


def _check_unchanged(args: argparse.Namespace, keys: Iterable[str]) -> None:
    """Raise ValueError for an option that would change the numbers of an exported trace."""
    for name in (*keys, "labels"):
        if getattr(args, name, None) is not None:
            flags = {"is_causal": "causal", "window_size": "window"}
            raise ValueError(
                f"{args.problem} is an exported trace, shown as it was computed: "
                f"--{flags.get(name, name).replace('_', '-')} cannot change it"
            )


def _check_sizes(problem: dict[str, Any], is_traced: bool) -> None:
    """Raise ValueError for a problem with too many scores: two files of 1 MB may have 10¹⁰."""
    from minimha.cli.inputs import LARGEST_INPUT

    q, k, v = (np.shape(problem[name]) for name in ("q", "k", "v"))
    if min(len(q), len(k), len(v)) < 2:
        return  # ``attention`` refuses it
    *heads, Lq, D = q
    if not is_traced:
        check_step("output", *heads, Lq, v[-1], largest=LARGEST_INPUT)
        return
    for name, shape in {
        "q": (Lq, D), "k": (k[-2], D), "v": v[-2:], "scores": (Lq, k[-2]), "output": (Lq, v[-1])
    }.items():  # fmt: skip
        check_step(name, *heads, *shape)


def _labels(words: str | None, problem: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return labels of the keys and of queries at the same positions, or of the queries alone."""
    if words is None:
        return {}
    labels = tuple(words.split())
    Lq, Lk = (np.shape(problem[name])[-2] if np.ndim(problem[name]) > 1 else 0 for name in "qk")
    if len(labels) == Lk:
        offset = problem.get("q_offset", 0)
        start = 0 if offset is None else offset if isinstance(offset, int) else -1
        is_aligned = 0 <= start <= Lk - Lq
        found = token_labels(labels[start : start + Lq] if is_aligned else (), labels)
    elif len(labels) == Lq:
        found = token_labels(labels, ())
    else:
        raise ValueError(
            f"--labels has {len(labels)} words: expected one for each key ({Lk}) or query ({Lq})"
        )
    return found | _labels_of_sequences(found, problem)


def _labels_of_sequences(
    labels: dict[str, tuple[str, ...]], problem: dict[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the labels of each packed sequence's rows; ``attention`` checks where rows end."""
    starts: dict[str, Any] = {"Lq": problem.get("cu_seqlens_q")}
    starts["Lk"] = problem.get("cu_seqlens_k", starts["Lq"])
    return {
        f"{axis}[sequence {s}]": labels[axis][start:stop]
        for axis, ends in starts.items()
        if np.ndim(ends) == 1
        for s, (start, stop) in enumerate(pairwise(ends))
    }


def _listed(text: str, convert: Callable[[str], Any], what: str) -> list[Any]:
    try:
        return [convert(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None


def _numbers(text: str) -> list[float]:
    return _listed(text, number, "numbers separated by commas")


def _integers(text: str) -> int | list[int]:
    found = _listed(text, integer, "whole numbers separated by commas")
    return found[0] if len(found) == 1 else found


def _window(text: str) -> tuple[int | None, int | None]:
    def side(part: str) -> int | None:
        return None if part.strip().lower() == "none" else integer(part)

    what = "LEFT,RIGHT, two whole numbers or none"
    sides = _listed(text, side, what)
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return sides[0], sides[1]
