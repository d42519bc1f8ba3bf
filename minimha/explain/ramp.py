"""Colour and character ramps for heatmaps on a terminal.

Each colour depth of terminals has a ramp of shades for dark and one for light backgrounds. Two more
ramps consist of characters. Along a ramp, shades become lighter, or darker on a light background,
so that colour-blind readers can tell them apart.
"""

from itertools import pairwise
from typing import NamedTuple

Color = tuple[int, int, int]
BLACK, WHITE = (0, 0, 0), (255, 255, 255)
# Seven of the 256 colours, with lightness (CIE L*) 8, 20, 38, 52, 68, 82, 94. Even the last is
# visible on white.
ANCHORS = {
    17: (0, 0, 95), 19: (0, 0, 175), 24: (0, 95, 135), 31: (0, 135, 175), 74: (95, 175, 215),
    117: (135, 215, 255), 123: (135, 255, 255),
}  # fmt: skip
BETWEEN = 8  # shades from one anchor to the next in true colour
# A terminal's numbers for black, blue, cyan and bright cyan → the colour of text on each.
SIXTEEN = {0: 15, 4: 15, 6: 0, 14: 0}


class Ramp(NamedTuple):
    """The shades of a heatmap, lowest first, and signs for hidden cells, bars and infinity.

    A shade is a character and a style, which is "" if the shades are characters.
    """

    shades: tuple[tuple[str, str], ...]
    hidden: str = "×"
    bar: str = "█"
    infinity: str = "∞"

    @property
    def in_color(self) -> bool:
        """True if the shades are background colours, False if they are characters."""
        return bool(self.shades[0][1])

    def shade(self, level: float) -> tuple[str, str]:
        """Return the shade for ``level``, a number from 0 to 1, as a character and a style.

        >>> [RAMPS["blocks"].shade(level)[0] for level in (0.001, 0.249, 0.5, 1)]
        [' ', '░', '▒', '█']
        """
        return self.shades[round(level * (len(self.shades) - 1))]


def luminance(color: Color) -> float:
    """Return the relative luminance of an sRGB colour, from 0 (black) to 1 (white), as in WCAG 2.2.

    >>> luminance(BLACK), luminance(WHITE)
    (0.0, 1.0)
    """
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (channel / 255 for channel in color)
    ]
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def ink_on(color: Color) -> Color:
    """Return black or white, whichever has more contrast on ``color``; the contrast is above 4.5.

    >>> ink_on((0, 0, 95)), ink_on((135, 255, 255))
    ((255, 255, 255), (0, 0, 0))
    """
    return BLACK if luminance(color) > 0.179 else WHITE


def _mixed(low: Color, high: Color, part: float) -> Color:
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _truecolor() -> tuple[tuple[str, str], ...]:
    pairs = pairwise(ANCHORS.values())
    colors = [_mixed(*pair, n / BETWEEN) for pair in pairs for n in range(BETWEEN)]
    colors.append(list(ANCHORS.values())[-1])
    return tuple((" ", f"rgb{ink_on(c)} on rgb{c}".replace(", ", ",")) for c in colors)


RAMPS = {
    "truecolor": Ramp(_truecolor()),
    "256": Ramp(
        tuple(
            (" ", f"color({16 if ink_on(color) == BLACK else 231}) on color({number})")
            for number, color in ANCHORS.items()
        )
    ),
    "standard": Ramp(
        tuple((" ", f"color({ink}) on color({ground})") for ground, ink in SIXTEEN.items())
    ),
    "blocks": Ramp(tuple((shade, "") for shade in " ░▒▓█")),
    "ascii": Ramp(tuple((shade, "") for shade in " .:+#"), "x", "#", "inf"),
}  # fmt: skip
RAMPS |= {
    f"{name} on light": ramp._replace(shades=ramp.shades[::-1])
    for name, ramp in RAMPS.items()
    if ramp.in_color
}
