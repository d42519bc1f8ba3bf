"""A trace of every step, what each name means, and ways to show it.

record → steps (entries, labels) → origins → written → render, page, spreadsheet, figures, export.
``Trace`` gives access to the first four; ``selection`` chooses which steps are shown.
"""

from html import escape

from minimha.explain.trace import Step, Trace

__all__ = ["Step", "Trace"]


def _repr_html_(trace: Trace) -> str:
    """The page of a trace for a notebook, in a frame that may run the page's own script."""
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
