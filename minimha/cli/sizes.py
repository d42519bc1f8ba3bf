"""Show parameters, FLOPs and KV cache of known models: the command ``sizes``."""

import argparse
from collections.abc import Callable
from typing import Any

from minimha.cli.arguments import count
from minimha.cli.output import FOR_READERS, TABLE_FORMATS, add_output, deliver_table, format_of
from minimha.explain.numbers import in_units

SHOWN = "is_gated", "has_biases", "is_tied", "is_causal"  # flags that are shown if False, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``sizes`` to its parser."""
    parser.description = (
        "Parameters, FLOPs (a multiplication and an addition are two) and KV-cache "
        "bytes of known models, and what grouped heads save. Exact numbers and the source of each: "
        "--format json."
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", help="one model, such as gpt3 (default all, in a table)")
    add("--facts", action="store_true", help="how each model computes attention, in place of sizes")
    add("--length", type=count, metavar="N", help="number of tokens (default: the model's most)")
    dtypes = "float32", "float16", "bfloat16"
    add("--dtype", choices=dtypes, default="float16", help="default float16")
    add_output(parser, TABLE_FORMATS)


def run(args: argparse.Namespace) -> None:
    """Show one known model's sizes in detail, or a table of all models' sizes or attention."""
    from minimha.models import sizes

    kind = format_of(args)
    written = in_units if kind in FOR_READERS else lambda number, unit: str(number)
    if args.preset is not None:
        preset = sizes.find(args.preset)
        if args.length is not None:
            sizes.check_length(preset, args.length)
        content: Any = _record(preset, args.length, args.dtype)
        title, rows = f"{preset.name}: {preset.source}", _quantities(content, written)
    else:
        known = list(sizes.PRESETS.values())
        longest = max(preset.max_length for preset in known)
        if args.length is not None and args.length > longest:
            raise ValueError(
                f"--length is {args.length} but no preset takes more than {longest} tokens"
            )
        content = [_record(preset, args.length, args.dtype) for preset in known]
        if args.facts:
            title = f"how models attend; cache: bytes of one more token in {args.dtype}"
            rows = [_facts(*pair, written) for pair in zip(known, content, strict=True)]
        else:
            where = f"at {args.length} tokens" if args.length else "each at its longest"
            title = f"{where}, in {args.dtype}; saved: share of the cache, by grouped heads"
            rows = [_row(record, written) for record in content]
    deliver_table(args, rows, {title: rows}, content)


def _record(preset: Any, length: int | None, dtype: str) -> dict[str, Any]:
    """Return one preset in exact numbers; None if a model has no such number at this length."""
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
        "cache_bytes_per_token": sizes.cache_bytes_per_token(preset, dtype)
        if preset.is_causal
        else None,
        "saved_by_groups": asdict(sizes.saved_by_groups(preset, length, dtype)) if writes else None,
    }


def _facts(
    preset: Any, record: dict[str, Any], written: Callable[[int, str], str]
) -> dict[str, str]:
    """Return the row of a preset in the table of architectures."""
    sees = "all" if preset.is_causal else "all, both sides"
    if preset.window:
        sees = f"{preset.window}"
        sees += f", all in 1 of {preset.global_every} layers" if preset.global_every else ""
    if preset.indexer:
        sees = f"{preset.indexer.keys} that an indexer chooses"
    norms = "LayerNorm" if preset.has_biases else "RMSNorm"
    norms += ", outputs too" if preset.norms_per_layer == 4 else ""
    norms += {None: "", "head": "; q, k by head", "full": "; q, k"}[preset.qk_norm]
    more = {
        "latent": preset.latent, "sinks": preset.has_sinks, "gate": preset.has_gate,
        f"cap {preset.softcap}": preset.softcap,
        f"logits' cap {preset.logit_softcap}": preset.logit_softcap,
    }  # fmt: skip
    if preset.delta:
        every = preset.delta.every
        more[f"delta rule in {every - 1} of {every} layers"] = True
    if mixture := preset.mixture:
        more[f"{mixture.chosen} of {mixture.experts} experts"] = True
    cache = record["cache_bytes_per_token"]
    return {
        "model": preset.name, "year": str(preset.year), "positions": preset.positions,
        "keys seen": sees, "norms": norms,
        "also": ", ".join(name for name, has in more.items() if has) or "-",
        "cache": "-" if cache is None else written(cache, "B"),
    }  # fmt: skip


def _row(record: dict[str, Any], written: Callable[[int, str], str]) -> dict[str, str]:
    """Return the row of a preset in the table of all presets."""
    prefill, decode = record["prefill_flops"], record["decode_flops"]
    cache, saved = record["kv_cache_bytes"], record["saved_by_groups"]
    part = 100 * saved["kv_cache_bytes"] / (saved["kv_cache_bytes"] + cache) if saved else None
    return {
        "model": record["name"],
        "weights": written(record["parameters"]["total"], ""),
        "H/Hkv": f"{record['num_heads']}/{'-' if record['latent'] else record['num_kv_heads']}",
        "length": str(record["length"] or f"≤ {record['max_length']}"),
        "prefill": written(prefill["total"], "FLOP") if prefill else "-",
        "decode": written(decode["total"], "FLOP") if decode else "-",
        "KV cache": written(cache, "B") if decode else "-",
        "saved": "-" if part is None or record["latent"] else f"{part:.3g} %",
    }


def _quantities(record: dict[str, Any], written: Callable[[int, str], str]) -> list[dict[str, str]]:
    """Return one row per quantity of a preset, without quantities that are zero."""
    words = {True: "yes", False: "no"}
    sizes = list(record)[1 : list(record).index("length")]  # the preset's own, but for its name
    found = {}
    for name in sizes:
        value = record[name]
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            if name != "source" and (number or (number is False and not part and name in SHOWN)):
                what = f"{name}: {part}" if part else name
                found[what] = words[number] if isinstance(number, bool) else str(number)
    length, dtype = record["length"], record["dtype"]
    counts = {
        "parameters": (record["parameters"], ""),
        f"prefill of {length} tokens": (record["prefill_flops"], "FLOP"),
        f"decode step at {length} tokens": (record["decode_flops"] or {}, "FLOP"),
    }
    for title, (parts, unit) in counts.items():
        for part, number in sorted(parts.items(), key=lambda item: item[0] != "total"):
            name = "" if part == "total" else f": {part.replace('_', '-')}"
            if number:
                found[title + name] = written(number, unit)
    found[f"weights in {dtype}"] = written(record["weight_bytes"], "B")
    if record["kv_cache_bytes"] is not None:
        found[f"KV cache of {length} tokens in {dtype}"] = written(record["kv_cache_bytes"], "B")
        saved = record["saved_by_groups"]
        units = {"parameters": "", "prefill_flops": "FLOP", "decode_flops": "FLOP"}
        for name, number in saved.items():
            what = "KV cache" if name == "kv_cache_bytes" else name.replace("_flops", " FLOPs")
            if number:
                found[f"grouped heads save: {what}"] = written(number, units.get(name, "B"))
    return [{"quantity": quantity, "value": value} for quantity, value in found.items()]
