"""The shapes of a drawn picture, each at its place on the whole picture."""

import re
import xml.etree.ElementTree as ET

NS = "{http://www.w3.org/2000/svg}"


def shapes(svg):
    """Every rectangle, line and text; what its groups move it by is added to its coordinates."""
    return list(_moved(ET.fromstring(svg), 0.0, 0.0))


def _moved(element, x, y):
    dx, dy = map(float, re.findall(r"[-\d.]+", element.get("transform", "0 0")))
    for child in element:
        if child.tag == f"{NS}g":
            yield from _moved(child, x + dx, y + dy)
        elif child.tag in (f"{NS}rect", f"{NS}text"):
            child.set("x", str(x + dx + float(child.get("x", 0))))
            child.set("y", str(y + dy + float(child.get("y", 0))))
            yield child
        elif child.get("points"):
            pairs = (map(float, point.split(",")) for point in child.get("points").split())
            child.set("points", " ".join(f"{x + dx + a},{y + dy + b}" for a, b in pairs))
            yield child


def of(found, tag, kind):
    """The shapes of one tag and class."""
    return [shape for shape in found if shape.tag == NS + tag and shape.get("class") == kind]


def words(text):
    """What a text says, without what is shown where it is pointed at."""
    return "".join([text.text or "", *(child.tail or "" for child in text)])


def corners(shape):
    return [tuple(map(float, point.split(","))) for point in shape.get("points").split()]
