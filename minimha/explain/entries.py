"""Adapt the catalogue's formula of a traced array to the run that computed the array."""

from collections.abc import Callable

from minimha.explain.catalogue import base_of, beside, entry
from minimha.explain.entry import Entry
from minimha.explain.record import Record

# Step → a symbol of its formula, and the normalised step that replaces it if present.
NORMALISED = {
    "q": ("X", "normed"), "k": ("X", "normed"), "v": ("X", "normed"), "gate": ("X", "normed"),
    "qkv": ("X", "normed"), "g": ("X", "normed"), "delta_gate": ("X", "normed"),
    "index_weights": ("X", "normed"), "added": ("Y", "output_normed"),
    "residual": ("F", "feed_forward_normed"),
}  # fmt: skip
LATENT = {"q_rotated": "latent_q", "k_rotated": "latent_k", "v": "latent_v"}  # of latent attention
Has = Callable[[str], bool]  # whether the run has a step of this name in the same stage
LETTERS = {"q": "q", "k": "k", "v": "v", "output": "o", "gate": "g"}  # in W_q, b_q


def entry_of(record: Record, name: str) -> Entry:
    """Return the catalogue's entry of the traced array ``name``, adapted to the run ``record``.

    If the array is an input of this run, its formula is only its symbol.
    """
    base = base_of(name)

    def has(other: str) -> bool:
        return record.has(beside(name, other))

    known = _variation(name, has, is_embedded=record.has("embedded"))
    if name in record.given or (base in ("q", "k", "v") and not has("x")):
        return known._replace(formula=known.symbol, tex=known.tex_symbol, made=())
    for old, (plain, tex) in _replacements(base, has).items():
        known = known._replace(
            formula=known.formula.replace(old, plain), tex=known.tex.replace(old, tex)
        )
    return known


def _variation(name: str, has: Has, *, is_embedded: bool) -> Entry:
    """Return the catalogue's entry of ``name``, or of the variant that this run computes."""
    base = base_of(name)
    if base == "output" and has("delta_gated"):
        return entry("delta_output")
    if base == "output" and has("concat"):  # the heads' results, projected
        return entry("projected")
    if base == "output" and (not has("weights") or name == "output[tiled]"):
        return entry("normalised")
    if base == "x" and has("wpe") and not is_embedded:
        return entry("x")._replace(made=entry("embedded").made)
    prefix = base.removesuffix("normed")
    if prefix != base and has(f"{prefix}mean_square"):
        return entry(f"{prefix}rms_normed")
    if base == "feed_forward" and has("expert_shares"):
        return entry("mixed")
    if base in LATENT and has("latents_and_key"):
        return entry(LATENT[base])
    if base == "logits" and has("uncapped_logits"):
        return entry("capped_logits")
    return entry(name)


def _replacements(base: str, has: Has) -> dict[str, tuple[str, str]]:
    """Map symbols in the catalogue's formula to their replacements in plain text and in TeX."""
    base = base.removesuffix("_combined")
    changes = {}
    if base == "row_sum" and has("sinks"):
        changes["Σ_j P_ij"] = changes[r"\sum_j P_{ij}"] = (
            "Σ_j P_ij + exp(sink - m_i)", r"\sum_j P_{ij} + e^{\mathrm{sink} - m_i}"
        )  # fmt: skip
    if base in ("k", "v") and has("context"):
        context = entry("context")
        changes["X"] = context.symbol, context.tex_symbol
    elif base in NORMALISED and has(NORMALISED[base][1]):
        symbol, normed = NORMALISED[base]
        changes[symbol] = entry(normed).symbol, entry(normed).tex_symbol
    if base == "logits" and not has("final_normed"):
        changes["X'"] = "X", "X"
    letter = LETTERS.get(base)
    if letter and has(f"b_{letter}"):
        added = f"W_{letter} + b_{letter}"
        changes[f"W_{letter}"] = added, added
    return changes
