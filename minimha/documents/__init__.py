"""The worked examples of the five documents, and the example that they promise for any sentence."""

from dataclasses import replace

from minimha.documents import given_qkv, sentences, shapes, the_cat_sat, two_heads
from minimha.documents.example import Example

EXAMPLES: dict[str, Example] = {
    "000": two_heads.EXAMPLE,
    "001": shapes.EXAMPLE,
    "002": replace(sentences.of_length(6), name="002"),
    "003": the_cat_sat.EXAMPLE,
    "004": given_qkv.EXAMPLE,
}

__all__ = ["EXAMPLES", "Example"]
