"""An example with the word "bank": one embedding gets different outputs in two contexts."""

from typing import Any

from minimha.equations.tap import Tap
from minimha.examples.example import Example, Note, matrix
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

SENTENCES = {
    "loan": ("The", "bank", "approved", "the", "loan", "yesterday"),
    "river": ("The", "bank", "of", "the", "river", "flooded"),
}
COLUMNS = ("bank", "money", "water", "other")
EMBEDDINGS = {"bank": "1 0.5 0.5 0", "loan": "0 1 0 0", "river": "0 0 1 0"}  # else "other"
GAIN = 16.0  # factor of every query, so that one matching column decides
W_Q = GAIN * matrix("1 -1", "0 1", "0 1", "0 1")  # "bank" asks for a meaning, others for none
W_K = matrix("-1 0", "1 0", "1 0", "0 1")  # "bank" itself has two meanings and offers neither
W_V = matrix("0", "1", "-1", "0")
W_O = matrix("0 0.5 -0.5 0")


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run an attention layer with a residual connection on two sentences with the word "bank"."""
    layer = MultiHeadAttention.from_heads([W_Q], [W_K], [W_V], W_O)
    for context, words in SENTENCES.items():
        staged_tap = _staged(tap, context)
        x = matrix(*(EMBEDDINGS.get(word, "0 0 0 1") for word in words))
        found = layer(x, is_causal=is_causal, scale=None if is_scaled else 1.0, tap=staged_tap)
        staged_tap("added", x + found)


def _staged(tap: Tap, context: str) -> Tap:
    """Return a tap that appends ``[context]`` to names, and passes the weights on only once."""

    def receive(name: str, value: Any) -> Any:
        if not name.startswith("W_"):
            return tap(f"{name}[{context}]", value)
        return tap(name, value) if context == next(iter(SENTENCES)) else value

    return receive


def _labels(context: str) -> dict[str, tuple[str, ...]]:
    return {f"{axis}[{context}]": words for axis, words in token_labels(SENTENCES[context]).items()}


def _found(word: str, meaning: str) -> dict[str, Note]:
    return {
        f"weights[{word}]": Note(f"'bank' reads '{word}'.", is_causal=False),
        f"added[{word}]": Note(
            f"'bank' was half money and half water; beside '{word}' it is {meaning} alone.",
            is_causal=False,
        ),
    }


EXAMPLE = Example(
    name="bank",
    title="the bank of a loan and the bank of a river: one embedding, two outputs",
    source="document 000, section 3, and the sentence of document 002; weights set by hand",
    sentence=" / ".join(" ".join(words) for words in SENTENCES.values()), run=run,
    labels=_labels("loan") | _labels("river") | {"E": COLUMNS},
    notes={
        "x[loan]": "Columns: is the word 'bank', means money, means water, means neither. By "
        "itself 'bank' may mean either: ½ and ½.",
        "x[river]": "The row of 'bank' is the same here: an embedding knows no context.",
        "W_q": "'bank' asks for a word with a meaning, any other word for those without.",
        "W_k": "'bank', which has both meanings, offers neither: ½ + ½ - 1 = 0.",
        "W_v": "Money passes on 1, water -1, and W_o adds half of that to money and takes "
        "it from water.",
        **_found("loan", "money"), **_found("river", "water"),
    },
)  # fmt: skip
