"""Convert SVG to PNG, with a rasteriser that is installed on this machine."""

import importlib.util
import shutil
import subprocess

ZOOM = 2  # pixels of the picture per pixel of the figure


def png(svg: str) -> bytes:
    """Return an SVG picture as PNG, converted by rsvg-convert or the package ``cairosvg``.

    Raise ValueError if neither is installed, or if rsvg-convert fails.
    """
    command = shutil.which("rsvg-convert")
    if command is not None:
        done = subprocess.run(
            [command, "--format", "png", "--zoom", str(ZOOM)], input=svg.encode(),
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode or not done.stdout:
            why = " ".join(done.stderr.decode(errors="replace").split())
            raise ValueError(f"rsvg-convert cannot draw this picture: {why}; export it as svg")
        return done.stdout
    if importlib.util.find_spec("cairosvg") is not None:
        cairosvg = importlib.import_module("cairosvg")
        return bytes(cairosvg.svg2png(bytestring=svg.encode(), scale=ZOOM))
    raise ValueError(
        "--format png needs a rasteriser: install rsvg-convert (Debian's librsvg2-bin) or the "
        "Python package cairosvg, or export svg, which every browser shows"
    )
