"""The worked examples of the five documents, and the example that they promise for any sentence."""

from dataclasses import replace

from minimha.documents import (
    alternatives,
    given_qkv,
    models,
    roles,
    sentences,
    shapes,
    the_cat_sat,
    translation,
    two_heads,
)
from minimha.documents.example import Example

DOCUMENTS: dict[str, Example] = {
    "000": two_heads.EXAMPLE,
    "001": shapes.EXAMPLE,
    "002": replace(sentences.of_length(6), name="002"),
    "003": the_cat_sat.EXAMPLE,
    "004": given_qkv.EXAMPLE,
}
EXAMPLES: dict[str, Example] = DOCUMENTS | {
    example.name: example
    for example in (
        *roles.EXAMPLES,
        translation.EXAMPLE,
        models.GPT2,
        models.LLAMA,
        alternatives.COSINE,
        alternatives.ADDITIVE,
    )
}

__all__ = ["DOCUMENTS", "EXAMPLES", "Example"]
