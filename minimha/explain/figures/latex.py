"""Convert a figure to a LaTeX picture, with the packages pict2e and xcolor."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator

from minimha.explain.figures.drawing import STYLE, Drawing

POINT = 0.5  # points per pixel of a figure, or fewer if the page is too small
HIGHEST = 280.0  # points
HEAT = (8, 48, 107)
Escape = Callable[[str], str]


def shade(level: float) -> str:
    """Return the heatmap colour of ``level``, from 0 to 1, as six hexadecimal digits.

    >>> shade(0), shade(1)
    ('FFFFFF', '08306B')
    """
    return "".join(f"{round(255 + (part - 255) * level):02X}" for part in HEAT)


def picture(drawing: Drawing, escape: Escape) -> str:
    """Return ``drawing`` as LaTeX, at most as wide as a line of the document.

    ``escape`` converts words to TeX.
    """
    point = min(POINT, HIGHEST / max(drawing.height, 1))
    lines = list(
        _shapes(ET.fromstring(drawing.svg("")), 0.0, 0.0, drawing.height + 32, escape, point)
    )
    size = f"({drawing.width + 32:.0f},{drawing.height + 32:.0f})"
    return (
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" + "\n"
        rf"\setlength{{\unitlength}}{{{point:.3f}pt}}\begin{{picture}}{size}" + "\n"
        + "\n".join(lines) + "\n\\end{picture}}"
    )  # fmt: skip


def _shapes(
    element: ET.Element, x: float, y: float, height: float, escape: Escape, point: float
) -> Iterator[str]:
    """Yield the shapes of a group at their positions; in a picture y grows upwards."""
    dx, dy = map(float, re.findall(r"[-\d.]+", element.get("transform", "0 0")))
    x, y = x + dx, y + dy
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "g":
            yield from _shapes(child, x, y, height, escape, point)
        elif tag == "rect" and child.get("x"):
            yield _rect(child, x, height - y)
        elif tag == "text":
            yield _text(child, x, height - y, escape, point)
        elif tag in ("polyline", "polygon"):
            pairs = (map(float, pair.split(",")) for pair in child.get("points", "").split())
            path = "".join(f"({x + a:.1f},{height - y - b:.1f})" for a, b in pairs)
            kind = child.get("class", "")
            color = _style(kind, "stroke") or _style(kind, "fill") or "000000"
            yield f"\\color[HTML]{{{color}}}\\{tag}{'*' * (tag == 'polygon')}{path}"


def _rect(rect: ET.Element, x: float, top: float) -> str:
    left, down, width, height = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
    corner = f"({x + left:.1f},{top - down - height:.1f})"
    sides = f"{{{width:.1f}\\unitlength}}{{{height:.1f}\\unitlength}}"
    kind = rect.get("class", "")
    filled, edge = _style(kind, "fill"), _style(kind, "stroke")
    color = shade(float(rect.get("fill-opacity", 1))) if kind == "heat" else filled
    parts = [rf"\put{corner}{{\color[HTML]{{{color}}}\rule{sides}}}"] if color else []
    if edge:
        box = rf"\framebox({width:.1f},{height:.1f}){{}}"
        parts.append(rf"\put{corner}{{\color[HTML]{{{edge}}}{box}}}")
    return "".join(parts)


def _text(text: ET.Element, x: float, top: float, escape: Escape, point: float) -> str:
    at = f"({x + float(text.get('x', 0)):.1f},{top - float(text.get('y', 0)):.1f})"
    side = {"start": "[lb]", "middle": "[b]", "end": "[rb]"}[text.get("text-anchor", "start")]
    size = float(text.get("font-size", 13)) * point
    kinds = text.get("class", "").split()
    weight = r"\bfseries" if "bold" in kinds else ""
    words = escape("".join([text.text or "", *(child.tail or "" for child in text)]))
    color = "FFFFFF" if "on" in kinds else "595959" if "muted" in kinds else "000000"
    font = rf"\fontsize{{{size:.1f}}}{{{size:.1f}}}\selectfont\sffamily{weight}"
    return rf"\put{at}{{\makebox(0,0){side}{{{font}\color[HTML]{{{color}}}{words}}}}}"


def _style(kind: str, name: str) -> str:
    """Return the colour of a CSS class in the light style, for xcolor, or "" if it has none."""
    light = STYLE.partition("@media")[0]
    found = re.search(rf"\.{re.escape(kind)}\{{[^}}]*\b{name}:#([0-9a-f]+)", light)
    digits = found[1].upper() if found else ""
    return "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
