"""The site: built without a warning, whole, in its tracks, and from files without a network."""

import fcntl
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from minimha.examples import DOCUMENTS, EXAMPLES
from minimha.labs import EXPERIMENTS

ROOT = Path(__file__).parents[1]
EXTENSIONS = ("sphinx", "myst_parser", "pydata_sphinx_theme", "numpydoc", "sphinx_design", "dask")
PAGES = [
    "index", "learn", "1-one-head-by-hand", "4-tiles", "gallery", "labs", "reference/conventions",
    "reference/attention",
]  # fmt: skip


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of a site that was built once, also for several workers."""
    for name in EXTENSIONS:
        pytest.importorskip(name, reason=f"{name} is not installed (pip install '.[docs]')")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base
    folder = base / "site"
    with open(base / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "index.html").exists():
            build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "walkthroughs"]
            built = subprocess.run(
                [*build, folder], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
            )
            assert built.returncode == 0, built.stderr
    return folder


class Links(HTMLParser):
    """The addresses that a page leads to, those that it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.leads, self.loads, self.anchors = [], [], {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("index", "search", "prev", "next"):
            self.loads.append(given["href"])
        elif given.get("src"):
            self.loads.append(given["src"])


@pytest.fixture(scope="session")
def pages(site):
    return {path: Links(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_link_within_the_site_leads_somewhere(site, pages):
    wrong = []
    for path, page in pages.items():
        for link in page.leads + page.loads:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {parts.fragment}
            is_made = target.parent.name == "gallery"  # a page whose script finds its fragments
            if not target.is_file() or not (is_made or unquote(parts.fragment) in anchors):
                wrong.append((path.name, link))
    assert wrong == []


def test_no_page_loads_anything_from_elsewhere(site, pages):
    assert [x for page in pages.values() for x in page.loads if urlsplit(x).netloc] == []
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", text) == []


def test_the_gallery_has_every_example_and_every_experiment(site):
    made = {path.stem for path in (site / "gallery").glob("*.html")}
    assert made == {*EXAMPLES, "flash", "next"} - set(DOCUMENTS)
    figures = {path.stem for path in (site / "gallery").glob("*.svg")}
    labs = {f"lab-{name}" for name in EXPERIMENTS}
    assert made | labs - {"lab-pytorch"} <= figures <= made | labs  # that one needs torch
    shown = (site / "gallery.html").read_text(encoding="utf-8")
    assert [name for name in made if f"gallery/{name}.html" not in shown] == []


def test_formulas_are_mathml(site):
    shown = (site / "4-tiles.html").read_text(encoding="utf-8")
    assert shown.count("<math") > 40
    assert "MathJax" not in shown


def test_next_stays_within_a_track(site, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "walkthroughs")
    from building.tracks import tracks

    learn, build = ([path.stem for path in paths] for paths in tracks().values())
    files = {path.stem for path in (ROOT / "walkthroughs").glob("[0-9]*-*.md")}
    assert files <= {*learn, *build}
    assert learn[3:5] == ["4-tiles", "6-heads-at-work"]
    for names in (learn, build):
        for name, after in zip(names, [*names[1:], None], strict=True):
            shown = (site / f"{name}.html").read_text(encoding="utf-8")
            button = shown.partition('class="right-next"')[2].partition(">")[0]
            assert (f'href="{after}.html"' if after else "") in button
            assert bool(button) == bool(after)
            text = (ROOT / "walkthroughs" / f"{name}.md").read_text(encoding="utf-8")
            line = text.partition("\nNext: ")[2]
            assert f"({after}.md)" in line or not after or "deployment" in after


@pytest.fixture
def opened(site, browser):
    """Opens pages of the site offline; at the end nothing was asked of a network or failed."""
    wrong, contexts = [], []

    def look(request):
        if not request.url.startswith((site.as_uri(), "data:")):
            wrong.append(f"asked for {request.url}")

    def hear(message):
        if message.type == "error":
            wrong.append(message.text)

    def open_page(name, **settings):
        context = browser.new_context(offline=True, **settings)
        contexts.append(context)
        shown = context.new_page()
        shown.on("request", look)
        shown.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        shown.on("console", hear)
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        name, _, query = name.partition("?")
        shown.goto(f"{(site / name).as_uri()}.html{query and '?'}{query}")
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_from_files_and_fit_a_narrow_screen(opened, name, scheme):
    shown = opened(name, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.evaluate("document.documentElement.dataset.theme") == scheme
    pictures = "[...document.images].map((i) => (i.loading = 'eager', i.decode()))"
    shown.evaluate(f"Promise.all({pictures})")


def test_search_finds_without_a_server(opened):
    shown = opened("search?q=softcap")
    shown.wait_for_selector("#search-results li a")


def test_a_page_of_the_gallery_answers(opened):
    shown = opened("gallery", viewport={"width": 1280, "height": 900})
    shown.click("a[href='gallery/the-cat-sat.html']")
    shown.wait_for_selector("body[data-ready]", state="attached")
    assert "The cat sat" in shown.title() + shown.text_content("body")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "1-one-head-by-hand", "reference/conventions"])
def test_nothing_stands_in_the_way_of_anybody(opened, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    shown = opened(name, color_scheme=scheme, viewport={"width": 1280, "height": 900})
    found = axe.run(shown, options={"preload": False}).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []
