"""The worked examples of the five documents, and the examples that they promise or describe.

``DOCUMENTS`` and ``EXAMPLES`` map a name to its example, which is imported when it is asked for:
one example on the terminal should not wait for all the others.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from minimha.examples.example import Example


class Examples(Mapping[str, Example]):
    """Examples by name, each given as ``module.attribute`` of this package."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Example:
        module, attribute = self._places[name].split(".")
        example: Example = getattr(import_module(f"minimha.examples.{module}"), attribute)
        return example

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


PLACES = {
    "000": "two_heads.EXAMPLE",
    "001": "shapes.EXAMPLE",
    "002": "sentences.BANK",
    "003": "the_cat_sat.EXAMPLE",
    "004": "given_qkv.EXAMPLE",
}
DOCUMENTS = Examples(PLACES)
EXAMPLES = Examples(
    PLACES
    | {
        "heads-000": "roles.ADOPTED",
        "heads-001": "roles.RAN_AWAY",
        "heads-002": "roles.BANK",
        "translation": "translation.EXAMPLE",
        "gpt2": "language_models.GPT2",
        "llama": "language_models.LLAMA",
        "cosine": "other_scores.COSINE",
        "additive": "other_scores.ADDITIVE",
    }
)

__all__ = ["DOCUMENTS", "EXAMPLES", "Example"]
