"""What minimha's own commands write while the site is built: pages, figures, the labs' numbers."""

import json
import re
from contextlib import redirect_stdout
from functools import cache
from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from building import conventions
from minimha.cli import main
from minimha.explain.export import result_as
from minimha.labs import EXPERIMENTS, run

HERE = Path(__file__).parents[1]
NEXT = "the cat sat on the"
CARD = """<li class="{kind}"><a href="{page}"><img src="{figure}" alt="" loading="lazy">
<span>{title}</span></a>
<p>{foot}</p></li>
"""


def command(*words):
    """Return what a command of minimha prints."""
    with redirect_stdout(StringIO()) as printed:
        status = main(list(words))
    if status:
        raise ValueError(f"minimha {' '.join(words)} ended with status {status}")
    return printed.getvalue()


def capital(title):
    """A title as a heading begins."""
    return title[0].upper() + title[1:]


@cache
def examples():
    """Every worked example."""
    return json.loads(command("examples", "--format", "json"))


@cache
def labs():
    """Every experiment's result."""
    has_torch = find_spec("torch") is not None
    return {name: run(name) for name in EXPERIMENTS if has_torch or name != "pytorch"}


def pages():
    """The command of each page of the gallery, its title and the sentence that it computes."""
    found = {
        each["name"]: (["example", each["name"]], each["title"], each["document"])
        for each in examples()
    }
    found["flash"] = (["flash"], "FlashAttention, block by block", None)
    found["next"] = (
        ["next", NEXT, "--trace"],
        f"“{NEXT} …”: every number of a language model",
        None,
    )
    return found


def write(app):
    """Write the gallery's pages and the charts beside the site's own pages."""
    folder = Path(app.outdir, "gallery")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (words, _, _) in pages().items():
        command(*words, "--output", str(folder / f"{name}.html"), "--force")
        only = [] if name == "shapes" else ["--only", "heatmap"]  # of which it has none
        command(*words, *only, "--output", str(folder / f"{name}.svg"), "--force")
    for name, result in labs().items():
        (folder / f"lab-{name}.svg").write_text(result_as("svg", result), encoding="utf-8")


@cache
def gallery():
    """Return the cards: the documents' examples, the others, and the labs."""
    groups = {"The documents' examples": [], "More examples": [], "Experiments": []}
    for name, (words, title, document) in pages().items():
        typed = " ".join(f'"{word}"' if " " in word else word for word in words)
        foot = [f"<code>{escape(typed)}</code>", *_walkthrough(name, document)]
        card = CARD.format(
            kind="example", page=f"gallery/{name}.html", figure=f"gallery/{name}.svg",
            title=escape(capital(title)), foot=" · ".join(foot),
        )  # fmt: skip
        groups["The documents' examples" if document else "More examples"].append(card)
    for name, result in labs().items():
        groups["Experiments"].append(
            CARD.format(
                kind="lab", page=f"labs.html#{name}", figure=f"gallery/lab-{name}.svg",
                title=escape(capital(result.title)), foot=f"<code>lab {name}</code>",
            )
        )  # fmt: skip
    return "\n".join(
        f'## {title}\n\n<ul class="cards">\n{"".join(cards)}</ul>\n'
        for title, cards in groups.items()
    )


def _walkthrough(name, document):
    """A link to the first walkthrough that shows an example."""
    words = [rf"example {name}\b", rf"cli.py {name}\b"]
    words += [rf"--document {document}\b", rf"[Dd]ocument {document}\b"] if document else []
    files = sorted(HERE.glob("[0-9]*-*.md"), key=lambda path: int(path.name.split("-")[0]))
    for path in files:
        text = path.read_text(encoding="utf-8").partition("\nNext: ")[0]
        if any(re.search(word, text) for word in words):
            return [f'<a href="{path.stem}.html">walkthrough {path.name.split("-")[0]}</a>']
    return []


@cache
def experiments():
    """Return each lab: what is asked and found, its chart, its numbers."""
    parts = []
    for name, result in labs().items():
        heading, about, *tables, found = result_as("markdown", result).strip().split("\n\n")
        title = heading.removeprefix("# ")
        typed = f"python cli.py lab {name}"
        alt = escape(result.title, quote=True)
        chart = f'<img class="chart" src="gallery/lab-{name}.svg" alt="Chart: {alt}">'
        numbers = "\n\n".join(tables)
        parts.append(
            f"({name})=\n## {capital(title)}\n\n{about}\n\n    {typed}\n\n"
            f"{found}\n\n{chart}\n\n<details><summary>The numbers</summary>\n\n{numbers}\n\n"
            f"</details>\n"
        )
    return "\n".join(parts)


ADDED = {"gallery": gallery, "labs": experiments, "reference/conventions": conventions.tables}


def add(app, name, source):
    """Add what was made to the page that is about it."""
    if name in ADDED:
        source[0] += "\n" + ADDED[name]()


def setup(app):
    """Connect what is made to the build."""
    app.connect("builder-inited", write)
    app.connect("source-read", add)
    app.connect("env-get-outdated", lambda *_: [*ADDED, "index", "learn", "build"])
