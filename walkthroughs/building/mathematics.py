"""Formulas as MathML, which a browser sets without fetching anything."""

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(node, as_block):
    """Return a formula as MathML; a command that docutils does not know is a warning."""
    try:  # \\mathrel only widens the space around a sign
        return tex2mathml(node.astext().replace(r"\mathrel", ""), as_block=as_block)
    except MathError as error:
        logger.warning("no MathML for %r: %s", node.astext(), error, location=node)
        return ""


def inline(self, node):
    """Write a formula within a sentence."""
    self.body.append(mathml(node, as_block=False))
    raise SkipNode


def block(self, node):
    """Write a formula on a line of its own, which scrolls where it is too wide."""
    self.body.append(f'<div class="formula" tabindex="0">{mathml(node, as_block=True)}</div>')
    raise SkipNode


def setup(app):
    """Register the renderer that ``html_math_renderer`` names."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
