"""Worked examples of attention: those of five teaching documents, and further ones.

The documents by number:

- 000, "Multi-Head Attention": one token through two heads, then self-attention and cross-attention
  in a translation.
- 001, "Multi-Head Attention": shapes, what heads learn, sizes of known models, code for PyTorch.
- 002, "Multi-Head Attention": the idea in words and formulas, without numbers.
- 003, "A Deep Dive into the Multi-Head Attention Mechanism": three tokens through one causal head,
  grouped-query attention.
- 004, "Multi-head Attention": Q, K and V given, scores against cosines, FlashAttention.

``EXAMPLES`` maps a name to an ``Example``, whose module is imported on first access.
``DOCUMENTS`` maps a document's number to the name of the example that reproduces the document.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from minimha.examples.example import Example

DOCUMENTS = {
    "000": "two-heads", "001": "shapes", "002": "bank-drawn", "003": "the-cat-sat",
    "004": "given-qkv",
}  # fmt: skip
PLACES = {  # module.attribute
    "two-heads": "two_heads.EXAMPLE",
    "shapes": "shapes.EXAMPLE",
    "bank-drawn": "sentences.BANK",
    "the-cat-sat": "the_cat_sat.EXAMPLE",
    "given-qkv": "given_qkv.EXAMPLE",
    "heads-000": "roles.ADOPTED",
    "heads-001": "roles.RAN_AWAY",
    "heads-002": "roles.BANK",
    "coreference": "roles.PRONOUN",
    "bank": "bank.EXAMPLE",
    "padding": "padding.EXAMPLE",
    "translation": "translation.EXAMPLE",
    "gpt2": "language_models.GPT2",
    "llama": "language_models.LLAMA",
    "bert": "language_models.BERT",
    "gpt-oss": "recent_models.GPT_OSS",
    "deepseek-v3.2": "recent_models.DEEPSEEK",
    "qwen3-next": "recent_models.QWEN3_NEXT",
    "cosine": "other_scores.COSINE",
    "additive": "other_scores.ADDITIVE",
}


class Examples(Mapping[str, Example]):
    """A mapping from names to examples, each imported on first access."""

    def __getitem__(self, name: str) -> Example:
        module, attribute = PLACES[name].split(".")
        example: Example = getattr(import_module(f"minimha.examples.{module}"), attribute)
        return example

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


EXAMPLES = Examples()

__all__ = ["DOCUMENTS", "EXAMPLES", "Example"]
