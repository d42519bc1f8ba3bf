"""The same picture in Chromium and librsvg: labels stand over their columns in both, dark or light.

Both draw the picture once without and once with one label; the pixels that differ are the label's.
"""

import base64
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest
from pictures import of, shapes, words

from minimha.examples import EXAMPLES
from minimha.explain import figures
from minimha.explain.chart import Axis, Lines
from minimha.explain.figures import charts

NS = "{http://www.w3.org/2000/svg}"
ET.register_namespace("", NS[1:-1])
CAT = EXAMPLES["the-cat-sat"].trace().selected(["weights"])
PICTURE = figures.svg(CAT, 3)
LABELS = ("The", "cat", "sat", "0.269", "0.576")
# The left, right, top and bottom of what differs between two pictures of the same size.
DIFFERENCE = """async ([one, other]) => {
  const pixels = await Promise.all([one, other].map(async (source) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  }));
  const [{data: a, width}, {data: b}] = pixels;
  let [left, right, top, bottom] = [1e9, 0, 1e9, 0];
  for (let p = 0; p < a.length; p += 4)
    if (Math.abs(a[p] - b[p]) > 40) {
      const x = p / 4 % width, y = Math.floor(p / 4 / width);
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
    }
  return [left, right, top, bottom];
}"""


def without(picture, label):
    """The picture without the first text that says ``label``, and that text."""
    root = ET.fromstring(picture)
    for parent in root.iter():
        for child in parent:
            if child.tag == f"{NS}text" and words(child) == label:
                parent.remove(child)
                return ET.tostring(root, encoding="unicode")
    raise AssertionError(label)


def by_librsvg(picture, path):
    command = shutil.which("rsvg-convert")
    if command is None:
        pytest.skip("rsvg-convert is not installed (Debian's librsvg2-bin)")
    done = subprocess.run([command], input=picture.encode(), capture_output=True, check=True)
    path.write_bytes(done.stdout)


def by_chromium(browser, picture, path, scheme):
    with browser.new_context(color_scheme=scheme) as context:
        shown = context.new_page()
        shown.set_content(f"<body style='margin:0'>{picture}")
        shown.locator("svg").screenshot(path=path)


def differing(browser, one, other):
    with browser.new_context() as context:
        urls = [
            f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            for path in (one, other)
        ]
        return context.new_page().evaluate(DIFFERENCE, urls)


RENDERERS = "librsvg", "chromium light", "chromium dark"
PLACES = 256, 4096, 65536
CHART = charts.chart(
    Lines(
        "growth", Axis("n", 2, str), Axis("value"), PLACES, {"fast": (0, 1, 2), "slow": (0, 1, 1)}
    )
).svg("")


def seen(browser, tmp_path, renderer, picture, label):
    """The left, right, top and bottom of a label, as it is rendered."""
    paths = [tmp_path / "with.png", tmp_path / "without.png"]
    for one, path in zip((picture, without(picture, label)), paths, strict=True):
        if renderer == "librsvg":
            by_librsvg(one, path)
        else:
            by_chromium(browser, one, path, renderer.split()[1])
    return differing(browser, *paths)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_labels_and_numbers_are_seen_in_the_middle_of_their_columns(browser, tmp_path, renderer):
    cells = [cell for cell in of(shapes(PICTURE), "rect", "cell") if cell.get("height") == "24"]
    columns = sorted({(float(c.get("x")), float(c.get("width"))) for c in cells})
    for label, n in zip(LABELS, (0, 1, 2, 0, 2), strict=True):
        left, right, top, bottom = seen(browser, tmp_path, renderer, PICTURE, label)
        x, width = columns[n]
        assert abs((left + right) / 2 - (x + width / 2)) <= 1.5, (label, renderer)
        assert 5 <= bottom - top <= 14


@pytest.mark.parametrize("renderer", RENDERERS)
def test_numbers_are_seen_under_what_a_chart_draws_over_them(browser, tmp_path, renderer):
    marks = of(shapes(CHART), "rect", "tip-one")[1:]  # the first is the legend's
    for place, mark in zip(PLACES, marks, strict=True):
        left, right, top, bottom = seen(browser, tmp_path, renderer, CHART, str(place))
        assert abs((left + right) / 2 - (float(mark.get("x")) + 3)) <= 1.5
        assert 5 <= bottom - top <= 14
