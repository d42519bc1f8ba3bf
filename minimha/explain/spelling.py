"""Replace mathematical signs by letters, for output encodings that lack the signs."""

SPELLINGS = {
    "∞": "inf", "−": "-", "·": "*", "×": "x", "√": "sqrt ", "²": "^2", "ᵀ": "^T", "Σ": "sum",
    "∑": "sum", "±": "+-", "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "←": "<-", "→": "->",
    "↔": "<->", "…": "...", "–": "-", "—": "-", "α": "alpha", "δ": "delta", "ε": "epsilon",
    "θ": "theta", "π": "pi", "σ": "sigma", "τ": "tau", "µ": "u", "μ": "u", "ℓ": "l",
    "°": " degrees", "½": "1/2",
}  # fmt: skip


def as_written(text: str, encoding: str) -> str:
    """Return ``text`` with the signs that ``encoding`` lacks replaced by letters.

    >>> as_written("√d_k ≤ 2", "ascii")
    'sqrt d_k <= 2'
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        signs, end = spelled(error)
        return text[: error.start] + signs + as_written(text[end:], encoding)
    return text


def spelled(error: UnicodeError) -> tuple[str, int]:
    """Replace unencodable characters by letters, or by ``?``: an error handler for ``codecs``.

    Return the replacement and the index after the characters.

    >>> import codecs
    >>> codecs.register_error("spelled", spelled)
    >>> "-∞ · 2 → 猫".encode("cp1252", "spelled")
    b'-inf \\xb7 2 -> ?'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(SPELLINGS.get(character, "?") for character in missing), error.end
