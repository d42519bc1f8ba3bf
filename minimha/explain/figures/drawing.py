"""Draw rectangles, lines and text as SVG, at explicit positions.

Each text has a position and an anchor, so a figure has the same layout in every font. Colours are
CSS classes with a light and a dark scheme.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from unicodedata import east_asian_width

SIZE = 13  # of text, in pixels
# Approximate widths of characters as multiples of the size, in a wide font such as DejaVu Sans.
ADVANCE, CAPITAL, WIDE, FULL = 0.6, 0.75, 1.0, 1.2
MARGIN = 16  # around a picture
BASELINE = 0.35  # from a text's middle to its baseline, as a multiple of the size
STYLE = """\
text{font-family:system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#1a1a1a}
.ground{fill:#fff}.muted{fill:#595959}.bold{font-weight:bold}
.number{font-family:ui-monospace,"DejaVu Sans Mono",monospace}
.heat{fill:#08306b}.ink{fill:#000}.on{fill:#fff}.bar{fill:#2171b5}
.box{fill:#f3f6fa;stroke:#8aa0b8}.cell{fill:none;stroke:#c4ccd4}.skipped{fill:#e4e4e4;stroke:#9a9a9a}
.line{fill:none;stroke:#595959}.one{fill:none;stroke:#2171b5;stroke-width:2.5}
.two{fill:none;stroke:#b5520a;stroke-width:2.5}
.three{fill:none;stroke:#217346;stroke-width:2.5;stroke-dasharray:7 3}
.four{fill:none;stroke:#8a3ea8;stroke-width:2.5;stroke-dasharray:2 3}
.faint{fill:none;stroke:#9a9a9a;stroke-dasharray:4 3}
.tip{fill:#595959}.tip-one{fill:#2171b5}.tip-two{fill:#b5520a}
.tip-three{fill:#217346}.tip-four{fill:#8a3ea8}
@media (prefers-color-scheme:dark){
text{fill:#ececec}.ground{fill:#15171a}.muted{fill:#a9b4b4}
.heat{fill:#6eaaf0}.ink{fill:#fff}.on{fill:#000}.bar{fill:#6aaef0}
.box{fill:#20262d;stroke:#5b6b7c}.cell{stroke:#3a4450}.skipped{fill:#2b2f34;stroke:#70777f}
.line{stroke:#a9b4b4}.one{stroke:#6aaef0}.two{stroke:#f0a060}.faint{stroke:#70777f}
.three{stroke:#5fc98c}.four{stroke:#cf9aeb}.tip-three{fill:#5fc98c}.tip-four{fill:#cf9aeb}
.tip{fill:#a9b4b4}.tip-one{fill:#6aaef0}.tip-two{fill:#f0a060}
}"""


def breadth(words: str, size: float = SIZE) -> float:
    """Return the approximate width of ``words``, in pixels.

    >>> breadth("cat", 10) < breadth("mmm", 10) < breadth("猫猫猫", 10)
    True
    """
    return size * sum(map(_advance, words))


def _advance(character: str) -> float:
    if east_asian_width(character) in "WF":
        return FULL
    if character in "mwMW@%…—":
        return WIDE
    return CAPITAL if character.isupper() else ADVANCE


def short(words: str, longest: int) -> str:
    """Return ``words``, shortened to ``longest`` characters with an ellipsis if necessary.

    >>> short("understanding", 8)
    'underst…'
    """
    return words if len(words) <= longest else words[: longest - 1] + "…"


def in_lines(words: str, longest: int) -> list[str]:
    """Return ``words`` as one line, or as two lines if they exceed ``longest`` characters.

    The break is a space for which both lines fit, if there is one. Of such spaces, one after a
    comma or colon is preferred, then one near the middle.

    >>> in_lines("A = softmax(S), row by row: A_ij = P_ij / l_i", 40)
    ['A = softmax(S), row by row:', 'A_ij = P_ij / l_i']
    """
    breaks = [n for n, character in enumerate(words) if character == " "]
    if len(words) <= longest or not breaks:
        return [words]

    def unevenness(n: int) -> tuple[bool, bool, int]:
        length = max(n, len(words) - n - 1)
        return length > longest, words[n - 1] not in ",:", length

    at = min(breaks, key=unevenness)
    return [words[:at], words[at + 1 :]]


@dataclass
class Drawing:
    """An SVG drawing: its shapes, and the width and height that they need, in pixels.

    x grows to the right, and y downwards.
    """

    width: float = 0
    height: float = 0
    shapes: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str,
        *, opacity: float | None = None, title: str = "",
    ) -> None:  # fmt: skip
        """Draw a rectangle of the CSS class ``kind``, with ``title`` as its tooltip.

        By default, the CSS class decides the ``opacity``.
        """
        shade = "" if opacity is None else f' fill-opacity="{_plain(opacity)}"'
        inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self._draw(
            f'<rect class="{kind}" x="{_plain(x)}" y="{_plain(y)}" width="{_plain(width)}" '
            f'height="{_plain(height)}"{shade}{inside}',
            x + width, y + height,
        )  # fmt: skip

    def text(
        self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start",
        size: float = SIZE, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Write ``words`` so that their ``anchor`` ("start", "middle" or "end") is at (x, y).

        ``kind`` is a CSS class. Text of more than ``longest`` characters is cut, and its tooltip is
        the whole text.
        """
        title, words = words, words if longest is None else short(words, longest)
        name = f' class="{kind}"' if kind else ""
        hint = f"<title>{escape(title)}</title>" if title != words else ""
        reach = breadth(words, size) * {"start": 1, "middle": 0.5, "end": 0}[anchor]
        self._draw(
            f'<text{name} x="{_plain(x)}" y="{_plain(y + BASELINE * size)}" '
            f'font-size="{_plain(size)}" text-anchor="{anchor}">{hint}{escape(words)}</text>',
            x + reach, y + size / 2,
        )  # fmt: skip

    def line(self, *points: tuple[float, float], kind: str = "line", tip: str = "") -> None:
        """Draw a line of the CSS class ``kind`` through ``points``.

        If ``tip`` is given, the line ends in an arrowhead of the CSS class ``tip``.
        """
        path = " ".join(f"{_plain(x)},{_plain(y)}" for x, y in points)
        far = max(x for x, _ in points), max(y for _, y in points)
        self._draw(f'<polyline class="{kind}" points="{path}"/>', *far)
        if tip:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5 or 1
            dx, dy = 8 * (x - x0) / length, 8 * (y - y0) / length
            back, aside = (x - dx, y - dy), (dy / 2, -dx / 2)
            corners = (x, y), (back[0] - aside[0], back[1] - aside[1]), (
                back[0] + aside[0], back[1] + aside[1]
            )  # fmt: skip
            path = " ".join(f"{_plain(a)},{_plain(b)}" for a, b in corners)
            self._draw(f'<polygon class="{tip}" points="{path}"/>', *far)

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Add the drawing ``other``, with its top left corner at (x, y)."""
        self._draw(f'<g transform="translate({_plain(x)} {_plain(y)})">', 0, 0)
        self.shapes += other.shapes
        self._draw("</g>", x + other.width, y + other.height)

    def _draw(self, shape: str, right: float, bottom: float) -> None:
        self.shapes.append(shape)
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def svg(self, title: str) -> str:
        """Return the drawing as a complete SVG file, with style and background."""
        size = 'width="{}" height="{}"'.format(*self._size())
        ground = f'<style>{STYLE}</style>\n<rect class="ground" {size}/>\n'
        return self._picture(title, ' xmlns="http://www.w3.org/2000/svg"', ground)

    def inline(self, title: str) -> str:
        """Return the drawing as an SVG element for an HTML page that includes ``STYLE``."""
        return self._picture(title, "", "")

    def _size(self) -> tuple[int, int]:
        return round(self.width + 2 * MARGIN), round(self.height + 2 * MARGIN)

    def _picture(self, title: str, namespace: str, ground: str) -> str:
        width, height = self._size()
        return (
            f'<svg{namespace} width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}</title>\n{ground}'
            + "\n".join([f'<g transform="translate({MARGIN} {MARGIN})">', *self.shapes])
            + "\n</g>\n</svg>\n"
        )


def stacked(parts: list[Drawing], gap: float) -> Drawing:
    """Return a drawing with ``parts`` one below the other, ``gap`` pixels apart."""
    whole = Drawing()
    for part in parts:
        whole.place(part, 0, whole.height + gap if whole.shapes else 0)
    return whole


def in_rows(parts: list[Drawing], widest: float, gap: float) -> Drawing:
    """Return a drawing with ``parts`` in rows of at most ``widest`` pixels.

    Parts and rows are ``gap`` pixels apart. A part wider than ``widest`` has a row to itself.
    """
    whole = Drawing()
    x = y = bottom = 0.0
    for part in parts:
        if x and x + part.width > widest:
            x, y = 0.0, bottom + gap
        whole.place(part, x, y)
        x, bottom = x + part.width + gap, max(bottom, y + part.height)
    return whole


def _plain(number: float) -> str:
    """Return ``number`` with at most two decimals, without trailing zeros."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
