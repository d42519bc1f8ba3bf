"""Export a worksheet or its solution as HTML to print, with a box for each number to find."""

import html
from collections.abc import Collection, Iterator

from minimha.explain import wording
from minimha.explain.mathml import mathml
from minimha.explain.trace import Step, Trace

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
@page {{ margin: 15mm }}
:root {{ color-scheme: light }}
body {{ color: #111; background: #fff; font: 10pt/1.35 system-ui, sans-serif; margin: 1em }}
h1 {{ font-size: 1.3em }}
h2 {{ font-size: 1em; margin: 0 }}
p {{ margin: .3em 0 }}
.note {{ max-width: 17em }}
section {{ break-inside: avoid; display: inline-block; margin: .6em 1.6em .6em 0;
  overflow-x: auto; max-width: 100%; vertical-align: top }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th {{ color: #555; font-weight: normal; padding: .1em .5em; text-align: right }}
td {{ border: 1px solid #999; padding: .15em .5em; text-align: right }}
.blank td {{ border: 1.5px solid #111; height: 1.8em; min-width: 3.6em }}
.answer td {{ font-weight: bold; border: 1.5px solid #111 }}
td.corner {{ border: 0 }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
CORNER = '<td class="corner"></td>'


def worksheet(trace: Trace, decimals: int, answers: Collection[str]) -> str:
    """Return ``trace`` as static HTML to print, with a bold frame around each step to find.

    ``answers`` names these steps. A blank step is a table of empty boxes. The page has no script
    and sends no requests.
    """
    intro = [f"<p>{html.escape(words)}</p>" for words in (trace.source, wording.legend(trace))]
    sections = [
        f"<section>\n{''.join(_section(step, is_new, decimals, answers))}</section>"
        for step, is_new in wording.news(trace.shown)
    ]
    return PAGE.format(title=html.escape(trace.example), body="\n".join(intro + sections))


def _section(step: Step, is_new: bool, decimals: int, answers: Collection[str]) -> Iterator[str]:
    """Yield the HTML of a step: its heading, its numbers, and its formula and note if new."""
    yield f"<h2>{html.escape(step.title)}</h2>\n"
    if is_new:
        has_formula = step.formula not in (step.symbol, step.name)
        yield f"<p>{mathml(step.tex)}</p>\n" if has_formula else ""
        yield f'<p class="note">{html.escape(step.note)}</p>\n' if step.note else ""
    kind = "blank" if step.is_blank else "answer" if step.names & set(answers) else ""
    yield f'<table class="{kind}" aria-label="{html.escape(step.title)}">\n'
    body = wording.numbers(step, decimals)
    if step.columns:
        heads = "".join(f'<th scope="col">{html.escape(label)}</th>' for label in step.columns)
        yield f"<tr>{CORNER if step.rows else ''}{heads}</tr>\n"
    for n, row in enumerate(body):
        label = f'<th scope="row">{html.escape(step.rows[n])}</th>' if step.rows else ""
        cells = "".join(f"<td>{'' if step.is_blank else number}</td>" for number in row)
        yield f"<tr>{label}{cells}</tr>\n"
    yield "</table>\n"
