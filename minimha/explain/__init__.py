"""A trace of every step of a computation, the meaning of each name, and ways to show a trace.

The modules, in the order in which they use each other: ``record``, ``steps`` (with ``entries`` and
``labels``), ``origins``, ``written``, then ``render``, ``page``, ``spreadsheet``, ``figures`` and
``export``. ``Trace`` gives access to the first three; ``selection`` chooses which steps are shown.
"""

from html import escape

from minimha.explain.trace import Step, Trace

__all__ = ["Step", "Trace"]


def _repr_html_(trace: Trace) -> str:
    """Return the page of ``trace`` for a notebook, in a frame with the page's script alone."""
    from minimha.explain.page import page

    try:
        text = page(trace, 3)
    except ValueError as error:
        return f"<p>{escape(str(error))}</p>"
    return (
        f'<iframe sandbox="allow-scripts" title="{escape(trace.example)}" '
        f'style="width:100%;height:44em;border:0" srcdoc="{escape(text)}"></iframe>'
    )


Trace._repr_html_ = _repr_html_
