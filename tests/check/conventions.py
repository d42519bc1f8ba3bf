"""Which conventions other libraries' attentions have, and what each gets wrong, as a table.

``python -m tests.check.conventions`` runs ``check`` on every library that is installed, and prints
Markdown; ``--json FILE`` writes the reports too. ``--seed`` repeats a run.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests import each other from there

from check import libraries

import minimha
from minimha.check.catalogue import DEVIATIONS
from minimha.check.report import DEAD, LEAK, Report, features


class Row(NamedTuple):
    """A function of a library, and the dialect in which ``check`` calls it."""

    library: str
    name: str
    load: Callable[[], Callable[..., Any]]
    speaks: str = "minimha"


def attribute(path: str) -> Callable[[], Any]:
    """What loads the attribute ``path``, written as module:name."""
    module, _, name = path.partition(":")
    return lambda: getattr(import_module(module), name)


def sdpa(backend: str) -> Callable[..., Any]:
    """torch's function with one of its backends."""

    def load():
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def function(
            query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
            enable_gqa=False,
        ):  # fmt: skip
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                    enable_gqa=enable_gqa,
                )  # fmt: skip

        return function

    return load


def ours(name: str) -> Callable[[], Any]:
    """A function of ``libraries``, which raises ImportError here if its library is missing."""
    package = {"onnxruntime": "onnxruntime", "onnx": "onnx", "keras": "keras", "torch": "torch"}

    def load():
        import_module(package[name.split("_")[0]])
        return getattr(libraries, name)

    return load


HUGGING_FACE = "transformers.models.llama.modeling_llama:eager_attention_forward"
ROWS = (
    Row("minimha", "attention", lambda: minimha.attention),
    Row("torch", "SDPA, math", sdpa("MATH"), "torch"),
    Row("torch", "SDPA, flash", sdpa("FLASH_ATTENTION"), "torch"),
    Row("torch", "MultiheadAttention", ours("torch_multi_head_attention")),
    Row("torch", "flex_attention", attribute("torch.nn.attention.flex_attention:flex_attention"),
        "flex_attention"),
    Row("jax", "nn.dot_product_attention", attribute("jax.nn:dot_product_attention"), "jax"),
    Row("keras", "ops.dot_product_attention",
        attribute("keras.ops:dot_product_attention"), "keras"),
    Row("keras", "MultiHeadAttention", ours("keras_multi_head_attention")),
    Row("keras", "GroupQueryAttention", ours("keras_grouped_query_attention")),
    Row("onnx", "Attention, reference", ours("onnx_reference_attention"), "onnx"),
    Row("onnxruntime", "Attention", ours("onnxruntime_attention"), "onnx"),
    Row("onnxruntime", "MultiHeadAttention", ours("onnxruntime_multi_head_attention")),
    Row("onnxruntime", "GroupQueryAttention", ours("onnxruntime_grouped_query_attention")),
    Row("transformers", "eager (LLaMA)", attribute(HUGGING_FACE), "transformers"),
    Row("transformers", "sdpa",
        attribute("transformers.integrations.sdpa_attention:sdpa_attention_forward"),
        "transformers"),
)  # fmt: skip
CAUSAL_OPTIONS = ("is_causal", "q_offset")
FIRST = "from the first key"
CAUSAL = {
    "causal_top_left": FIRST,
    "causal_bottom_right": "to the last key",
    "causal_by_length": "to the last key",
    "causal_always": "always",
}
DEAD_ROWS = {
    "dead_rows_mean": "mean",
    "dead_rows_nan": "NaN",
    "dead_rows_first_value": "the first",
}
MASKS = {"mask_inverted": "hidden"}
OWN = {*CAUSAL, *DEAD_ROWS, *MASKS, "nan_leaks"}  # these have columns
HEAD = ("function", "causal", "mask True", "sees no key", "hidden NaN", "not taken",
        "apart from that")  # fmt: skip


def negated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with True for False in its mask."""

    @wraps(function)
    def with_other_mask(q, k, v, attn_mask=None):
        return function(q, k, v, None if attn_mask is None else ~attn_mask)

    return with_other_mask


def cells(row: Row, report: Report, by_mask: Report) -> list[str]:
    """The row of the table for a report; ``by_mask`` is one with masks as the function has them."""
    records = report.conformance()
    not_taken = [record["option"] for record in records if record[""] == "refused"]

    def told(report: Report, names: dict[str, str], otherwise: str, *options: str) -> str:
        named = [text for name, text in names.items() if name in report.deviations]
        alone = [
            r.is_right or r.only_differs
            for r in report.findings.results
            if not (r.problem.family or r.is_refused)
            and options[0] in features(r)
            and set(features(r)) <= set(options)
        ]
        is_known = all(alone) or report.explains[0] == report.explains[1]
        return " or ".join(named) or ("–" if not alone else otherwise if is_known else "?")

    others = [DEVIATIONS[n].wrong.rstrip(".") for n in report.deviations if n not in OWN]
    if report.verdict == "wrong" and report.explains[0] < report.explains[1]:
        others.append(unexplained(report))
    usual = FIRST if "q_offset" in not_taken else "any offset"
    return [
        f"{row.library}: {row.name}",
        told(report, CAUSAL, usual, *CAUSAL_OPTIONS),
        told(report, MASKS, "visible", "attn_mask"),
        told(by_mask, DEAD_ROWS, "0", DEAD, "attn_mask", *CAUSAL_OPTIONS),
        told(by_mask, {"nan_leaks": "leaks"}, "ignored", LEAK, "attn_mask", *CAUSAL_OPTIONS),
        ", ".join(name for name in not_taken if name not in (DEAD, LEAK, "is_causal", "attn_mask")),
        "; ".join(others) or "right",
    ]  # fmt: skip


def unexplained(report: Report) -> str:
    """A clause on the problems that no deviation explains."""
    smallest = report.smallest
    assert smallest is not None  # a wrong function has a wrong problem
    left = report.explains[1] - report.explains[0]
    return f"{left} of {report.explains[1]} problems unexplained, such as “{smallest.problem.name}”"


def version(library: str) -> str:
    return minimha.__version__ if library == "minimha" else metadata.version(library)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the reports, too")
    parser.add_argument("--seed", type=int, help="of the problems (default: a new one)")
    parser.add_argument("--only", metavar="LIBRARY", help="run one library's functions")
    args = parser.parse_args(arguments)
    records, table, versions, missing = [], [], {}, []
    for row in ROWS:
        if args.only not in (None, row.library):
            continue
        try:
            function = row.load()
        except (ImportError, AttributeError):
            missing.append(f"{row.library}: {row.name}")
            continue
        versions[row.library] = version(row.library)
        sys.stderr.write(f"{row.library}: {row.name}\n")
        report = minimha.check(function, row.speaks, seed=args.seed)
        by_mask = report
        if "mask_inverted" in report.deviations:
            by_mask = minimha.check(negated(function), row.speaks, seed=args.seed)
        table.append(cells(row, report, by_mask))
        records.append({"library": row.library, "name": row.name, **json.loads(report.to_json())})
    lines = [f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *table)]
    lines += ["", ", ".join(f"{name} {number}" for name, number in versions.items())]
    lines += [f"not installed: {'; '.join(missing)}"] if missing else []
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"versions": versions, "rows": records}, ensure_ascii=False, indent=1),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
