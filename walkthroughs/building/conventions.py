"""The page of conventions, from the facts that the tests compare with the dialects."""

import numpy as np

from minimha.dialects.conventions import BY_FUNCTION

QUESTIONS = {
    "causal": (
        "Where does a causal mask begin?",
        "With two queries and three keys, a causal mask may align the first query with the first "
        "key (top left), or the last query with the last key (bottom right).",
    ),
    "true": ("What does True mean in a mask?", ""),
    "numbers": (
        "May a mask hold numbers?",
        "Where they are added to the scores, 0 hides nothing and −∞ hides a key.",
    ),
    "empty_row": ("What does a query get that sees no key?", ""),
    "window": ("What does the size of a window count?", "To the left of a query."),
    "shared_heads": (
        "How do query heads share key heads?",
        "Grouped-query attention (GQA): fewer heads of keys and values than of queries.",
    ),
    "scale": ("What are scores multiplied by, if nothing is given?", ""),
    "lse": (
        "Is the log-sum-exp among the results?",
        "A natural logarithm, and −∞ for a query that sees no key.",
    ),
}
HEADS = {"arrays": "queries", "true": "True", "empty_row": "sees no key", "shared_heads": "heads"}


def tables():
    """Return each question with its answers, then all facts of each function."""
    parts = [_question(field, *words) for field, words in QUESTIONS.items()]
    fields = next(iter(BY_FUNCTION.values()))._fields
    rows = [["function", *(HEADS.get(field, field.replace("_", " ")) for field in fields)]]
    rows += [[f"`{name}`", *facts] for name, facts in BY_FUNCTION.items()]
    return "\n".join([*parts, "## At a glance\n", _table(rows)])


def _question(field, title, about):
    answers = {}
    for name, facts in BY_FUNCTION.items():
        answers.setdefault(getattr(facts, field), []).append(_link(name))
    lines = [f"- **{each}**: {', '.join(who)}\n" for each, who in answers.items()]
    picture = _alignments() if field == "causal" else ""
    return f"## {title}\n\n{about}\n\n{picture}\n\n{''.join(lines)}"


def _link(name):
    """A function's name, linked to the reference."""
    full = name if name.startswith("minimha.") else f"minimha.dialects.{name}"
    page = "attention" if name.startswith("minimha.") else "dialects"
    return f'<a href="{page}.html#{full}"><code>{name}</code></a>'


def _alignments():
    """Both causal masks of two queries and three keys; the tests have the same pictures."""
    masks = {"top left": np.tri(2, 3), "bottom right": np.tri(2, 3, k=1)}
    figures = []
    for name, mask in masks.items():
        rows = "".join(
            "<tr>" + "".join(f"<td>{'●' if sees else '·'}</td>" for sees in row) + "</tr>"
            for row in mask
        )
        label = f"{name}: " + "; ".join(
            f"query {i} sees {int(row.sum())} of 3 keys" for i, row in enumerate(mask)
        )
        figures.append(
            f'<figure><div role="img" aria-label="{label}"><table aria-hidden="true">{rows}</table>'
            f"</div><figcaption>{name}</figcaption></figure>"
        )
    return f'<div class="alignments">{"".join(figures)}</div>'


def _table(rows):
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]]) + "\n"
