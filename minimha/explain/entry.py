"""Define ``Entry``, the catalogue's description of a step, and functions that make entries."""

from typing import NamedTuple

FORMULA = ("formula",)  # ``made`` of a step that no operation computes


class Entry(NamedTuple):
    """The symbol, axes, formula, explanation, source and operation of a traced array.

    ``tex_symbol`` and ``tex`` are symbol and formula in TeX. ``sentence`` is the explanation,
    ``source`` the publication, and ``made`` the operation and its operands, as in ``catalogue``.
    """

    symbol: str
    tex_symbol: str
    axes: tuple[str, ...]
    formula: str
    tex: str
    sentence: str
    source: str
    made: tuple[str, ...] = ()


def formula(
    symbol: str, axes: tuple[str, ...], formula: str, sentence: str, source: str = "",
    made: tuple[str, ...] = (), tex_symbol: str = "", tex: str = "",
) -> Entry:  # fmt: skip
    """Return an entry; ``tex_symbol`` and ``tex`` default to ``symbol`` and ``formula``."""
    tex_symbol, tex = tex_symbol or symbol, tex or formula
    return Entry(symbol, tex_symbol, axes, formula, tex, sentence, source, made)


def symbol(
    symbol: str, axes: tuple[str, ...], sentence: str, source: str = "",
    made: tuple[str, ...] = (), tex_symbol: str = "",
) -> Entry:  # fmt: skip
    """Return an entry whose formula is only its symbol."""
    return formula(symbol, axes, symbol, sentence, source, made, tex_symbol, tex_symbol or symbol)
