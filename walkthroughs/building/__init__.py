"""What the site adds to Sphinx: tracks, mathematics, pages that minimha makes, public names."""

from building import api, made, mathematics, tracks


def setup(app):
    """Register every part."""
    for part in (api, made, mathematics, tracks):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
