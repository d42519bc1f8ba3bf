"""Record the intermediate arrays of a run, explain each of them, and show them in many formats.

A ``Trace`` records the arrays, which are called *steps*. Imports between the modules go downwards
in this order: ``record`` first, then ``steps`` (with ``entries`` and ``labels``), ``origins`` and
``written``, and last ``render``, ``page``, ``spreadsheet``, ``figures`` and ``export``.
"""

from html import escape

from minimha.explain.trace import Step, Trace

__all__ = ["Step", "Trace"]


def _repr_html_(trace: Trace) -> str:
    """Return the interactive page of ``trace`` for a notebook, in a sandboxed frame."""
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
