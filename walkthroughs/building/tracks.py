"""Two ways through the walkthroughs, with reading times."""

import re
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.addnodes import toctree
from sphinx.util.docutils import SphinxDirective

from building import made

HERE = Path(__file__).parents[1]
LEARN = (1, 2, 3, 4, 6, 10, 11)  # every other walkthrough is for those who build
WORDS_PER_MINUTE = 200
CODE_LINES_PER_MINUTE = 20


class Walkthrough(NamedTuple):
    """A page of a track."""

    name: str
    number: str
    title: str
    lead: str
    minutes: int


@cache
def tracks():
    """The files of each track, in its order."""
    files = {int(path.name.split("-")[0]): path for path in HERE.glob("[0-9]*-*.md")}
    build = [files[number] for number in sorted(files) if number not in LEARN]
    learn = [files[number] for number in LEARN]
    deployment = [path for path in [HERE / "deployment.md"] if path.exists()]
    return {
        "learn": [*learn, HERE / "labs.md"],
        "build": [*build, *deployment],
    }


@cache
def read(path):
    """A walkthrough's title, its first sentence, and how long it takes."""
    text = path.read_text(encoding="utf-8")
    if path.stem in made.ADDED:
        text += made.ADDED[path.stem]()
    heading, rest = text.removeprefix("# ").split("\n", 1)
    number, _, title = heading.rpartition(". ") if heading[0].isdigit() else ("", "", heading)
    first = next(part for part in rest.split("\n\n") if part.strip())
    lead = re.match(r".{50,}?[.](?=\s|$)|.+", " ".join(first.strip("*\n ").split())).group()
    code = [line for line in text.splitlines() if line.startswith(("    ", ">>>", "..."))]
    words = len(re.sub(r"(?ms)^```.*?^```|^    .*?$", "", text).split())
    minutes = ceil(words / WORDS_PER_MINUTE + len(code) / CODE_LINES_PER_MINUTE)
    return Walkthrough(path.stem, number, title, lead.replace("*", ""), minutes)


class Track(SphinxDirective):
    """A track's stations as a list, and as a toctree on the page that has the track's name."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        stations = nodes.enumerated_list(classes=["track", f"track-{name}"])
        pages = [read(path) for path in tracks()[name]]
        for page in pages:
            stations += self._station(page)
        if self.env.docname != name:
            minutes = sum(page.minutes for page in pages)
            link = nodes.reference("", name.title(), refuri=f"{name}.html", internal=True)
            return [
                nodes.paragraph("", "", link, nodes.Text(f" · {minutes} minutes"), classes=["way"]),
                stations,
            ]
        names = [page.name for page in pages]
        tree = toctree(
            parent=name, entries=[(None, name) for name in names], includefiles=names, maxdepth=1,
            caption=None, glob=False, hidden=True, includehidden=False, numbered=0, titlesonly=True,
            rawentries=[], rawcaption="",
        )  # fmt: skip
        return [stations, nodes.compound("", tree, classes=["toctree-wrapper"])]

    def _station(self, page):
        link = nodes.reference("", page.title, refuri=f"{page.name}.html", internal=True)
        head = nodes.paragraph("", "", link, classes=["station"])
        head += nodes.inline("", f"{page.minutes} min", classes=["minutes"])
        sign = nodes.inline("", page.number or "·", classes=["sign"])
        head.insert(0, sign)
        lead, _ = self.parse_inline(page.lead)
        return nodes.list_item("", head, nodes.paragraph("", "", *lead))


def without_next(app, name, source):
    """Drop the last line, which leads on where there are no buttons."""
    if name == "kernels/README":
        shown = "\n\n## {0}\n\n```{{literalinclude}} {0}\n:language: python\n```\n"
        kernels = sorted(path.name for path in (HERE / "kernels").glob("*.py"))
        source[0] += "".join(map(shown.format, kernels))
    source[0] = re.sub(r"\nNext: [^\n]*(\n[^\n]+)*\n*\Z", "\n", source[0])


def at_the_head(app, doctree):
    """Write under a walkthrough's title where it stands and how long it takes."""
    if app.env.docname == "kernels/README":  # which walkthrough 9 leads to
        app.env.metadata[app.env.docname]["orphan"] = True
    for track, paths in tracks().items():
        for count, path in enumerate(paths, 1):
            if path.stem == app.env.docname:
                text = f"{count} of {len(paths)} · {read(path).minutes} minutes"
                link = nodes.reference("", track.title(), refuri=f"{track}.html", internal=True)
                line = nodes.paragraph("", "", link, nodes.Text(f" · {text}"), classes=["place"])
                doctree.next_node(nodes.title).parent.insert(1, line)


def within_the_track(app, name, template, context, doctree):
    """Let previous and next stay within a track, and lead into it from its own page alone."""
    own = {path.stem: track for track, paths in tracks().items() for path in paths}
    own |= {track: track for track in tracks()}
    for way in ("prev", "next"):
        other = (context.get(way) or {}).get("link", "").rpartition(".")[0]
        if own.get(name) != own.get(other) and name != "index":
            context[way] = None


def setup(app):
    app.add_directive("track", Track)
    app.connect("source-read", without_next)
    app.connect("doctree-read", at_the_head)
    app.connect("html-page-context", within_the_track)
