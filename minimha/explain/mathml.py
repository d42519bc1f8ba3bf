"""Convert the catalogue's TeX formulas to MathML, which browsers display without a library."""

import re
from collections.abc import Iterator
from html import escape

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+|.", re.DOTALL)
OPERATORS = {
    "leftarrow": "←", "cdot": "·", "odot": "⊙", "ldots": "…", "infty": "∞", "top": "⊤",
    "|": "‖", "sum": "∑", "times": "×", "to": "→", "in": "∈", "le": "≤", "ge": "≥", "mid": "|",
}  # fmt: skip
LETTERS = {
    "alpha": "α", "beta": "β", "ell": "ℓ", "sigma": "σ", "theta": "θ", "mu": "μ", "epsilon": "ε",
    "varepsilon": "ε", "varphi": "φ", "Phi": "Φ",
}  # fmt: skip
NAMES = ("arccos", "cos", "exp", "log", "max", "min", "sin", "tanh")
SPACES = {";": "0.28em", ",": "0.17em", " ": "0.25em", "quad": "1em"}


def mathml(tex: str) -> str:
    r"""Return the TeX formula ``tex`` as MathML; raise ValueError for an unknown command.

    >>> mathml(r"S = Q K^\top")[45:-14]
    '<mi>S</mi><mo>=</mo><mi>Q</mi><msup><mi>K</mi><mo>⊤</mo></msup>'
    """
    tokens = Tokens(TOKEN.findall(tex))
    inside = _row(tokens, "")
    return f'<math display="inline" class="formula"><mrow>{inside}</mrow></math>'


class Tokens:
    """An iterator over the tokens of a TeX formula that can look one token ahead."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    def __iter__(self) -> Iterator[str]:
        while self._tokens:
            yield self._tokens.pop()

    def peek(self) -> str:
        """Return the next token without removing it, or an empty string at the end."""
        return self._tokens[-1] if self._tokens else ""

    def take(self) -> str:
        """Remove the next token and return it."""
        return self._tokens.pop()


def _row(tokens: Tokens, end: str) -> str:
    parts = []
    for token in tokens:
        if token == end:
            break
        if token.isspace():
            continue
        part = _element(token, tokens)
        scripts = {}
        while tokens.peek() in ("_", "^"):
            mark = tokens.take()
            scripts[mark] = _argument(tokens)
        parts.append(_scripted(part, scripts))
    return "".join(parts)


def _scripted(base: str, scripts: dict[str, str]) -> str:
    marks = [mark for mark in "_^" if mark in scripts]
    if not marks:
        return base
    kind = {"_": "msub", "^": "msup", "_^": "msubsup"}["".join(marks)]
    return f"<{kind}>{base}{''.join(scripts[mark] for mark in marks)}</{kind}>"


def _argument(tokens: Tokens) -> str:
    """Return the MathML of a command's argument: a group in braces, or the next token."""
    while tokens.peek().isspace():
        tokens.take()
    return _element(tokens.take(), tokens)


def _element(token: str, tokens: Tokens) -> str:
    if token == "{":
        return f"<mrow>{_row(tokens, '}')}</mrow>"
    if not token.startswith("\\"):
        if token in "()[]|":
            return f'<mo stretchy="false">{token}</mo>'
        kind = "mn" if token.isdigit() else "mi" if token.isalpha() else "mo"
        return f"<{kind}>{escape(token.replace('-', '−'))}</{kind}>"
    return _command(token[1:], tokens)


def _command(name: str, tokens: Tokens) -> str:
    if name in OPERATORS:
        return f"<mo>{OPERATORS[name]}</mo>"
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name in NAMES:
        return f"<mi>{name}</mi><mo>&#x2061;</mo>"  # of its argument
    if name in SPACES:
        return f'<mspace width="{SPACES[name]}"/>'
    if name in ("text", "mathrm"):
        return _words(name, tokens)
    if name == "sqrt":
        return f"<msqrt>{_argument(tokens)}</msqrt>"
    if name == "frac":
        return f"<mfrac>{_argument(tokens)}{_argument(tokens)}</mfrac>"
    raise ValueError(f"\\{name} has no MathML here: add it to mathml.py, or leave it out")


def _words(name: str, tokens: Tokens) -> str:
    """Return upright words as MathML; spaces count only in ``text``."""
    found = ""
    tokens.take()  # the brace that opens
    for token in tokens:
        if token == "}":
            break
        found += token
    if name == "mathrm":
        return f'<mi mathvariant="normal">{escape(found)}</mi>'
    edges = found.replace(" ", "\N{NO-BREAK SPACE}")
    return f"<mtext>{escape(edges)}</mtext>"
