"""The example of document 003: "The cat sat", causal, with and without division by √d_k."""

import numpy as np

from minimha.api import attention
from minimha.equations.tap import Tap
from minimha.examples.example import Example, Note, matrix
from minimha.explain.printed import PrintedMatrix, Status
from minimha.explain.trace import token_labels

SOURCE = "document 003, section 'Worked Example: 3-Token Self-Attention from Scratch'"

X = matrix("1 0", "0 1", "1 1")
I = np.eye(2)
V = matrix("1 2", "3 0", "0 1")

PRINTED = (
    PrintedMatrix(
        "v", ("1 2", "3 0", "0 1"), "section 'Input Embeddings'", Status.WRONG,
        but={(0, 0): Status.EXACT, (2, 1): Status.EXACT},
        exact=X @ I, exactly="X W_v gives", origin="the W_v = I given just before",
    ),
    PrintedMatrix("scores", ("1 0 1", "0 1 1", "1 1 2"), "'Step 1: Raw Attention Scores'"),
    PrintedMatrix("masked", ("1 −∞ −∞", "0 1 −∞", "1 1 2"), "'Step 2: Causal Masking'"),
    PrintedMatrix(
        "weights", ("1 0 0", "0.268 0.731 0", "0.211 0.211 0.576"),
        "'Step 3: Softmax Normalization'",
        but={(1, 0): Status.TRUNCATED, (2, 0): Status.TRUNCATED, (2, 1): Status.TRUNCATED},
    ),
)  # fmt: skip


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run one head and, if ``is_scaled`` is False, run it again with division by √d_k."""
    x = tap("x", X)
    q, k = x @ tap("W_q", I), x @ tap("W_k", I)
    tap("W_v", I)
    attention(q, k, V, is_causal=is_causal, scale=None if is_scaled else 1.0, tap=tap)
    if not is_scaled:
        attention(q, k, V, is_causal=is_causal, tap=divided(tap))


def divided(tap: Tap) -> Tap:
    """Return a tap for the head's second run, in which scores are divided by √d_k.

    It passes to ``tap`` only the steps that differ from the first run, under names such as
    ``scaled[divided]``.
    """
    changed = {"scaled", "masked", "row_max", "exponentials", "row_sum", "weights", "output"}
    return lambda name, value: tap(f"{name}[divided]", value) if name in changed else value


EXAMPLE = Example(
    name="the-cat-sat", document="003", title="The cat sat, one causal head", source=SOURCE,
    sentence="The cat sat", run=run, labels=token_labels(["The", "cat", "sat"]), is_causal=True,
    is_scaled=False, printed=PRINTED, given=("v",),
    left_out="the embeddings [0.1, 0.9, 0.2, ...] of its introduction, whose ends it leaves open",
    notes={
        "v": "The document gives this V, although X W_v, with its W_v = I, would be X. "
        "The steps below use the V that it gives.",
        "weights": Note(
            "The document's formula divides by √d_k first; its example does not.", is_scaled=False
        ),
        "output": Note("The document leaves this product to the reader.", is_causal=True),
        "scaled[divided]": "From here on: the same once more, with the division in the "
        "document's formula.",
    },
)  # fmt: skip
