"""The example of document 004: given Q, K and V without a mask; four printed outputs are wrong."""

import numpy as np

from minimha.api import attention
from minimha.equations.tap import Tap
from minimha.examples.example import Example, Note, matrix
from minimha.explain.printed import PrintedMatrix, Status

TOY = "section 6, 'A concrete numeric toy example'"
FLOW = "the 'Example Setup' after it"

Q = matrix("1 0", "0 1", "1 1")
K = matrix("1 0", "1 1", "0 1")
V = matrix("1 0", "0 2", "3 1")

SCORES = ("1 1 0", "0 1 1", "1 2 1")
WEIGHTS = PrintedMatrix(
    "weights", ("0.401 0.401 0.198", "0.198 0.401 0.401", "0.248 0.503 0.248"), f"{FLOW}, step 3"
)
PRINTED = (
    PrintedMatrix("scores", SCORES, f"{TOY}, 1"),
    PrintedMatrix("scores", SCORES, f"{FLOW}, step 1"),
    PrintedMatrix("sqrt_d_k", ("1.4142",), f"{TOY}, 2"),
    PrintedMatrix("sqrt_d_k", ("1.414",), f"{FLOW}, step 2"),
    PrintedMatrix(
        "scaled", ("0.7071 0.7071 0.0000", "0.0000 0.7071 0.7071", "0.7071 1.4142 0.7071"),
        f"{TOY}, 2",
    ),
    PrintedMatrix(
        "scaled", ("0.71 0.71 0.00", "0.00 0.71 0.71", "0.71 1.41 0.71"), f"{FLOW}, step 2"
    ),
    PrintedMatrix(
        "weights", ("0.4011 0.4011 0.1978", "0.1978 0.4011 0.4011", "0.2483 0.5035 0.2483"),
        f"{TOY}, 3",
    ),
    WEIGHTS,
    PrintedMatrix(
        "output", ("0.995 1.198", "1.401 1.604", "1.997 2.005"),
        f"{FLOW}, step 4, and again in step 5", Status.WRONG,
        but={(0, 0): Status.FROM_ROUNDED, (1, 0): Status.EXACT},
        rounded=WEIGHTS.values @ V, origin="the printed weights and V",
    ),
)  # fmt: skip


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run one head on the given Q, K and V, then compute the cosines of queries and keys."""
    scale = None if is_scaled else 1.0
    attention(Q, K, V, is_causal=is_causal, scale=scale, tap=with_root(tap))
    lengths = np.linalg.norm(Q, axis=1)[:, None] * np.linalg.norm(K, axis=1)
    tap("cosine", Q @ K.T / lengths)


def with_root(tap: Tap) -> Tap:
    """Return a tap that passes every array to ``tap``, and √d_k before the scaled scores.

    √d_k has the name "sqrt_d_k".
    """

    def receive(name: str, value: np.ndarray) -> np.ndarray:
        if name == "scaled":
            tap("sqrt_d_k", np.sqrt(Q.shape[1]))
        given: np.ndarray = tap(name, value)
        return given

    return receive


EXAMPLE = Example(
    name="given-qkv", document="004",
    title="Q, K and V given, and the outputs that do not follow from them",
    source=f"document 004, {TOY}, and {FLOW}", sentence="three tokens without words", run=run,
    printed=PRINTED,
    left_out="'about 40 %, 20 %, 50 %, 25 %', its weights in words",
    notes={
        "output": Note(
            "Each output is an average of the values with positive weights that sum to 1, so no "
            "entry of column 1 can exceed 2, the largest there: 2.005 cannot be right.",
            is_causal=False, is_scaled=True,
        ),
        "cosine": "The document offers this comparison and leaves it out. Query 2 and key 1, both "
        "[1, 1], have cosine 1 like query 0 and key 0, but twice their dot product: longer vectors "
        "score higher.",
    },
)  # fmt: skip
