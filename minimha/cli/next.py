"""Show the most probable next words of a text, and how they are computed: the command ``next``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minimha.cli import models, output
from minimha.cli.arguments import LARGEST_COUNT, count, natural, real
from minimha.equations.arguments import argument_names
from minimha.explain import render
from minimha.explain.trace import Trace, printable, token_labels

if TYPE_CHECKING:
    from minimha.models.transformer import Transformer

SHOWN = 0.0005  # from here on, a probability does not print as 0.000
WINDOW = 24  # positions of a text that --all shows on a terminal
FEW = 5  # words for each of several positions or layers
LARGEST_TRACE = 2**25  # numbers of all steps together
# Weights, and matrices of all heads, which are also shown head by head.
LEFT_OUT = re.compile(r"(W|b|g)_|\w*norm_(gain|bias)|[qkv]_combined")
STEPS = "layer", "head", "query", "cell", "only", "hide", "answer"  # options that imply --trace
UNSET: tuple[object, ...] = (None, "", [])
Probabilities = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of ``next`` to its parser."""
    parser.description = (
        "Show the most probable next words of a text, as a model on this machine "
        "predicts them: the small one that ships, or one of your own. --trace shows every number "
        "in between, and so does any option about steps."
    )
    add = parser.add_argument
    add("text", metavar="TEXT", help='the beginning, in quotes: "the cat sat on the"')
    models.add_model(parser)
    add("--top", type=count, metavar="N", default=10, help="how many words (default 10)")
    add("--chat", action="store_true", help="TEXT is a message: the model's chat template makes "
        "what the model reads of it, and --generate writes the answer")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="show the next words after every word")
    what.add_argument("--generate", type=count, metavar="N", help="write N words")
    what.add_argument("--lens", action="store_true", help="show what each layer would predict")
    what.add_argument("--trace", action="store_true", help="show every matrix, as example does")
    add("--layer", type=natural, metavar="N", help="show the matrices of this layer, from 0 on")
    add("--temperature", type=real, metavar="T", default=1.0, help="of the softmax (default 1)")
    add("--top-k", type=int, metavar="K", help="keep the K most probable words")
    add("--top-p", type=real, metavar="P", help="keep the fewest whose probabilities reach P")
    add("--seed", type=natural, metavar="N", default=0, help="seed of --generate (default 0)")
    add("--without-head", action="append", default=[], metavar="LxHy", help="remove head y of "
        "layer x, both counted from 0, and show what that changes (may be repeated)")  # fmt: skip
    add("--ablation", choices=("zero", "mean"), default="zero", help="what a removed head gives: "
        "zeros, or its mean output over --sentences (default zero)")  # fmt: skip
    models.add_sentences(parser)
    output.add_steps(parser)


def run(args: argparse.Namespace) -> int:
    """Show the next words that a model predicts, or every step; return the exit status."""
    is_traced = args.trace or any(getattr(args, name) not in UNSET for name in STEPS)
    _check(args, is_traced)
    model = models.load(args)
    with argument_names(ids="the text", num_tokens="--generate", temperature="--temperature",
                        top_k="--top-k", top_p="--top-p", logits="the model's logits"):  # fmt: skip
        less, args.ids = _without(args, model), _tokens(args, model)
        if is_traced:
            return output.deliver(args, _trace(args, less))
        if args.generate is not None:
            _generate(args, less)
        elif args.all:
            _every_position(args, less)
        elif args.lens:
            _lens(args, less)
        else:
            _words(args, model, less)
    return 0


def _check(args: argparse.Namespace, is_traced: bool) -> None:
    """Raise ValueError for options that exclude each other, and for a format that does not fit."""
    if not args.text.strip():
        raise ValueError("TEXT is empty: expected at least one word")
    kind = output.asked_format(args)
    if is_traced:
        for other in ("all", "lens", "generate"):
            if getattr(args, other):
                step = next(name for name in STEPS if getattr(args, name) not in UNSET)
                raise ValueError(f"--{other} shows words and no steps: leave out --{step}")
        if args.temperature != 1 or args.top_k is not None or args.top_p is not None:
            raise ValueError("--temperature, --top-k and --top-p change no step: leave them out")
        return
    args.formats = output.RESULT_FORMATS
    if kind in set(output.TRACE_FORMATS) - set(output.RESULT_FORMATS):
        raise ValueError(f"{kind} holds the steps and not the words alone: add --trace")
    if (args.all or args.generate) and kind in ("svg", "png"):
        what = "--all" if args.all else "--generate"
        raise ValueError(f"{what} has no picture: expected text, json, markdown or csv")


def _tokens(args: argparse.Namespace, model: Transformer) -> NDArray[np.int64]:
    """Return the tokens of the text, or of the conversation that begins with it."""
    if not args.chat:
        return model.encode(args.text)
    from minimha.models.tokens import SubwordTokenizer

    tokenizer = model.tokenizer
    if not isinstance(tokenizer, SubwordTokenizer):
        raise ValueError("--chat needs a model with a chat template: a model that ships has none")
    return model.encode(tokenizer.encode(tokenizer.chat(args.text), add_special_tokens=False))


def _without(args: argparse.Namespace, model: Transformer) -> Transformer:
    """Return the model without the removed heads."""
    if not args.without_head:
        if args.ablation != "zero" or args.sentences is not None:
            raise ValueError("--ablation and --sentences need removed heads: add --without-head")
        return model
    from minimha.models import interpretability as heads

    removed = [heads.Head.parse(text, model.config) for text in args.without_head]
    args.without_head = list(map(str, removed))
    if args.ablation == "zero":
        if args.sentences is not None:
            raise ValueError("--sentences are averaged by --ablation mean: add it")
        return heads.without_heads(model, removed)
    with render.busy(sys.stderr, "mean outputs"):
        means = heads.mean_outputs(model, models.sentences(args))
    return heads.without_heads(model, removed, means)


def _words(args: argparse.Namespace, model: Transformer, less: Transformer) -> None:
    """Show the next words of the text, with and without the removed heads."""
    [*_, p] = _probabilities(args, model)
    columns = {"probability": p}
    if less is not model:
        [*_, columns["without"]] = _probabilities(args, less)
    largest = np.max(list(columns.values()), axis=0)
    shown = np.argsort(-largest, kind="stable")[: args.top]
    kept = sorted(shown.tolist(), key=lambda n: -p[n])
    words = models.labels(model, kept)
    exact: list[dict[str, Any]] = [
        {"word": word} | {name: float(found[n]) for name, found in columns.items()}
        for word, n in zip(words, kept, strict=True)
    ]
    content: dict[str, Any] = {"text": args.text, "words": exact}
    if less is not model:
        content |= {"without_heads": args.without_head, "ablation": args.ablation}
    if output.format_of(args) in ("text", "svg", "png"):
        _bars(args, [row for n, row in zip(kept, exact, strict=True)
                     if row is exact[0] or largest[n] >= SHOWN], len(p))  # fmt: skip
        return
    written = [{key: str(value) for key, value in row.items()} for row in exact]
    output.deliver_table(args, written, exact=content)


def _bars(args: argparse.Namespace, rows: list[dict[str, Any]], num_words: int) -> None:
    """Show bars for the words, and the sum of the other words."""
    from minimha.explain.chart import Bars
    from minimha.explain.result import Result

    series = {
        name: tuple(row[key] for row in rows)
        for key, name in (("probability", "probability"), ("without", _removed(args)))
        if key in rows[0]
    }
    rest = num_words - len(rows)
    shares = " and ".join(f"{max(0.0, 1 - sum(values)):.3f}" for values in series.values())
    others = f"The other {rest:,} have {shares} together." if rest else ""
    words = tuple(printable(row["word"]) for row in rows)
    figure = Bars("probability of the next word", words, series, "{:.3f}".format)
    output.deliver_result(args, Result("next", _title(args), "", args.seed, (), (figure,), others))


def _title(args: argparse.Namespace) -> str:
    """Return the text, and the settings that change its probabilities."""
    changed = [f"temperature {args.temperature:g}"] if args.temperature != 1 else []
    changed += [f"top-k {args.top_k}"] if args.top_k is not None else []
    changed += [f"top-p {args.top_p:g}"] if args.top_p is not None else []
    return printable(", ".join([f"{args.text} ___", *changed]))


def _removed(args: argparse.Namespace) -> str:
    """Return a phrase about the outputs of the removed heads, or "" if none is removed."""
    if not args.without_head:
        return ""
    one = len(args.without_head) == 1
    gives = {"zero": "zeros", "mean": f"{'its' if one else 'their'} mean output"}[args.ablation]
    names = ", ".join(args.without_head)
    return f"head {names} gives {gives}" if one else f"heads {names} give {gives}"


def _every_position(args: argparse.Namespace, model: Transformer) -> None:
    """Show which word follows each word of the text, and which are the most probable."""
    found = _probabilities(args, model)
    ids = args.ids.tolist()
    words = models.labels(model, ids)
    exact: list[dict[str, Any]] = [
        {"word": word, "words": _likeliest(model, p, args.top)}
        for word, p in zip(words, found, strict=True)
    ]
    for row, word, p, id in zip(exact, words[1:], found, ids[1:], strict=False):
        row |= {"next": word, "probability": float(p[id])}
    came = [f"{printable(r['next'])} {r['probability']:.3f}" if "next" in r else "" for r in exact]
    rows = [
        {"after": printable(row["word"]), "came": text,
         "expected": _listed(row["words"][: min(FEW, args.top)])}
        for row, text in zip(exact, came, strict=True)
    ]  # fmt: skip
    if output.format_of(args) == "text" and len(rows) > WINDOW:
        left = f"… {len(rows) - WINDOW} earlier tokens"
        rows = [{"after": left, "came": "", "expected": ""}, *rows[-WINDOW:]]
    content = {"text": args.text, "positions": exact, "words": exact[-1]["words"]}
    output.deliver_table(args, rows, exact=content)


def _lens(args: argparse.Namespace, model: Transformer) -> None:
    """Show the predictions after the embeddings and after each layer."""
    from minimha.explain.chart import Grid
    from minimha.explain.result import Result
    from minimha.models.interpretability import lens
    from minimha.models.sampling import probabilities

    settings = args.temperature, args.top_k, args.top_p
    found = probabilities(lens(model, args.ids)[:, 0], *settings)
    places = ["embeddings", *(f"layer {n}" for n in range(len(found) - 1))]
    words = [_likeliest(model, p, args.top) for p in found]
    exact: list[dict[str, Any]] = [
        {"after": place, "words": w} for place, w in zip(places, words, strict=True)
    ]
    if output.format_of(args) in ("json", "markdown", "csv"):
        records = [{"after": row["after"], "words": _listed(row["words"])} for row in exact]
        content = {"text": args.text, "layers": exact, "words": words[-1]}
        output.deliver_table(args, records, exact=content)
        return
    tops = [row["words"][0]["word"] for row in exact]
    last = np.argsort(-found[-1], kind="stable")[: min(FEW, args.top)]
    final = [n for n in last.tolist() if found[-1, n] >= SHOWN]
    kept = list(dict.fromkeys([*final, *found.argmax(axis=-1)[::-1].tolist()]))[: 2 * FEW]
    rows = tuple(f"{row['after']}: {printable(row['words'][0]['word'])}" for row in exact)
    columns = tuple(map(printable, models.labels(model, kept)))
    values = tuple(map(tuple, found[:, kept].tolist()))
    title = "after each layer: the most probable word, and the probabilities of words"
    grid = Grid(title, rows, columns, values, "{:.3f}".format)
    output.deliver_result(args, Result("lens", _title(args), _removed(args), args.seed, (), (grid,),
                                _settled(places, tops)))  # fmt: skip


def _settled(places: list[str], tops: list[str]) -> str:
    """Return a sentence on the layer from which the most probable word is the final word."""
    since = len(tops) - 1
    while since and tops[since - 1] == tops[-1]:
        since -= 1
    return f"{printable(repr(tops[-1]))} is the most probable word from here on: {places[since]}."


def _generate(args: argparse.Namespace, model: Transformer) -> None:
    """Show the text and the words drawn after it; as text, each word when it is drawn."""
    if args.generate > LARGEST_COUNT:
        raise ValueError(f"--generate is {args.generate}: expected at most {LARGEST_COUNT:,}")
    start = args.ids.tolist()
    drawn = model.generate(
        start, args.generate, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        seed=args.seed,
    )  # fmt: skip
    if output.format_of(args) == "text" and args.output is None:
        if not args.chat:
            print(printable(args.text), end="", flush=True)
        for piece in _pieces(model, start, drawn):
            print(piece, end="", flush=True)
        print()
        return
    ids = list(drawn)
    assert model.tokenizer is not None
    text = model.tokenizer.decode([*start, *ids])
    words = models.labels(model, ids)
    if output.format_of(args) == "text":
        output.deliver_table(args, [{"text": printable(text)}])
        return
    rows = [{"word": word} for word in words]
    content = {"text": text, "seed": args.seed, "generated": list(words)}
    output.deliver_table(args, rows, exact=content)


def _pieces(model: Transformer, start: list[int], drawn: Iterator[int]) -> Iterator[str]:
    """Yield the text that each token adds; part of a character waits for the rest."""
    assert model.tokenizer is not None
    ids, before = list(start), model.tokenizer.decode(start)
    for id in drawn:
        ids.append(id)
        text = model.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield "\n".join(map(printable, text[len(before) :].split("\n")))
            before = text


def _trace(args: argparse.Namespace, model: Transformer) -> Trace:
    """Trace every step, or those of one layer; as text, without steps too large to read."""
    ids, config = args.ids.tolist(), model.config
    if args.layer is not None and args.layer >= config.num_layers:
        raise ValueError(f"no layer {args.layer} here: the layers are 0 to {config.num_layers - 1}")
    if args.head is not None and args.head >= config.num_heads:
        raise ValueError(f"no head {args.head} here: the heads are 0 to {config.num_heads - 1}")
    names = token_labels(models.labels(model, ids))
    names["V"] = models.labels(model, list(range(config.vocabulary)))
    trace = Trace(f"next: {args.text}", _removed(args), names)
    kept = 0

    def tap(name: str, value: Any) -> Any:
        nonlocal kept
        if args.layer is None or name.endswith(f"[layer {args.layer}]"):
            kept += np.size(value)
            if kept > LARGEST_TRACE:
                raise ValueError(
                    f"all steps hold more than {LARGEST_TRACE:,} numbers: choose one layer with "
                    f"--layer, 0 to {config.num_layers - 1}"
                )
            trace(name, value)
        return value

    logits = model.logits(ids, backend="dense", tap=tap)
    if args.layer is None:
        from minimha.models.sampling import probabilities

        trace("probabilities", probabilities(logits)[None])
    if output.format_of(args) in ("text", "markdown", "latex") and not (args.only or args.cell):
        _leave_out(args, trace)
    return trace


def _leave_out(args: argparse.Namespace, trace: Trace) -> None:
    """Choose the steps that are small enough to read, and name the others."""
    shown = trace.selected(head=args.head, query=args.query).shown
    large = {step.name for step in shown if step.value.size > output.LARGEST_MATRIX}
    left = [name for name in trace if name in large or LEFT_OUT.match(name)]
    args.only = [name for name in trace if name not in left]
    total = sum(step.value.size for step in shown if step.name not in left)
    if total > output.LARGEST_RUN and args.layer is None:
        raise ValueError(
            f"the steps of all layers are too large to print, {total:,} numbers where "
            f"{output.LARGEST_RUN:,} can be read: choose one layer with --layer, one word with "
            f"--query, or export them with --format json"
        )
    bases = ", ".join(dict.fromkeys(name.partition("[")[0] for name in left))
    words = f"Left out here: {bases}. --only shows one, --format json has all."
    trace.source = f"{trace.source}{'. ' * bool(trace.source)}{words}"


def _probabilities(args: argparse.Namespace, model: Transformer) -> Probabilities:
    """Return the probabilities of the next word after every word of the text, (L, V)."""
    from minimha.models.sampling import probabilities

    logits = model.logits(args.ids, backend="dense")
    return probabilities(logits, args.temperature, args.top_k, args.top_p)


def _likeliest(model: Transformer, p: Probabilities, number: int) -> list[dict[str, Any]]:
    """Return the most probable words, as JSON shows them."""
    kept = [int(n) for n in np.argsort(-p, kind="stable")[:number] if p[n] > 0]
    words = models.labels(model, kept)
    return [{"word": word, "probability": float(p[n])} for word, n in zip(words, kept, strict=True)]


def _listed(words: list[dict[str, Any]]) -> str:
    """Return words and their probabilities in one line, without those that print as 0.000."""
    shown = [w for n, w in enumerate(words) if n == 0 or w["probability"] >= SHOWN]
    return ", ".join(f"{printable(w['word'])} {w['probability']:.3f}" for w in shown)
