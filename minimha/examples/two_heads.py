"""The example of document 000: one token and two heads of width 2, each of which outputs V."""

import numpy as np

from minimha.equations.tap import Tap
from minimha.examples.example import Example, matrix
from minimha.explain.printed import PrintedMatrix, Status
from minimha.explain.trace import token_labels
from minimha.layers.multihead import MultiHeadAttention

SOURCE = "document 000, section 'Mini Numerical Example (2 Heads)'"

X = matrix("1 2 3 4")
W_Q = np.stack([matrix("1 0", "0 1", "0 0", "1 0"), matrix("0 1", "1 0", "1 0", "0 1")])
W_K = np.stack([matrix("1 1", "0 1", "1 0", "0 1"), matrix("0 1", "1 1", "0 0", "1 0")])
W_V = np.stack([matrix("1 0", "0 2", "1 1", "0 1"), matrix("0 1", "1 1", "0 2", "1 0")])
# The document leaves W_O open ("some matrix"). This one is easy to follow by eye: its first two
# columns add the heads, its last two subtract head 1 from head 0.
W_O = matrix("1 0 1 0", "0 1 0 1", "1 0 -1 0", "0 1 0 -1")

ASSUMED = (
    PrintedMatrix(
        "head_output", ("0.5 1.2",), "'Head 1 projection matrices'", Status.ASSUMED, head=0,
        says="Assume: head1_output = [0.5, 1.2]",
    ),
    PrintedMatrix(
        "head_output", ("−0.4 2.3",), "'Head 2 projection matrices'", Status.ASSUMED, head=1,
        says="Assume: head2_output = [−0.4, 2.3]",
    ),
    PrintedMatrix(
        "concat", ("0.5 1.2 −0.4 2.3",), "'Concatenate heads'", Status.ASSUMED,
        says="Assume: head1_output = [0.5, 1.2]. Assume: head2_output = [−0.4, 2.3]",
    ),
)  # fmt: skip


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run two heads, then multiply the head outputs that the document assumes by W_o.

    The assumed outputs differ from those of the two heads.
    """
    scale = None if is_scaled else 1.0
    layer = MultiHeadAttention.from_heads(W_Q, W_K, W_V, W_O)
    layer(X, tap=tap, is_causal=is_causal, scale=scale)
    concat = tap("concat[assumed]", ASSUMED[2].values)
    tap("output[assumed]", concat @ W_O)


EXAMPLE = Example(
    name="two-heads", document="000", title="one token, two heads", source=SOURCE,
    sentence="X = [1, 2, 3, 4]", run=run, labels=token_labels(["X"]), printed=ASSUMED,
    given=("concat[assumed]",),
    notes={
        "q": "(The document counts heads from 1: its head 1 is head 0 here.)",
        "weights": "There is only one key, so it gets the whole share: the weight is "
        "1, whatever Q and K are.",
        "head_output": "With weight 1 the head's output is its V. The outputs that the document "
        "assumes cannot come from its matrices.",
        "W_o": "The document gives none ('some matrix'); this one is chosen here: columns 0 and 1 "
        "add the heads, columns 2 and 3 subtract head 1 from head 0.",
        "concat[assumed]": "For comparison: the outputs that the document assumes.",
        "output[assumed]": "The assumed outputs through the same W_o.",
    },
)  # fmt: skip
