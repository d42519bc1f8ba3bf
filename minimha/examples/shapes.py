"""The example of document 001: shapes of multi-head attention, and the sizes of known models."""

import numpy as np

from minimha.equations.tap import Tap
from minimha.examples.example import Example
from minimha.explain.printed import PrintedMatrix, Status
from minimha.layers.multihead import MultiHeadAttention

CODE = "section 'PyTorch Implementation'"
TABLE = "section 'Typical Configurations'"
PICTURE = "section 'Visualization of Multi-Head Outputs'"

MODELS = ("BERT-Base", "BERT-Large", "GPT-2 Small", "GPT-2 Large", "GPT-3")
D_MODEL = np.array([768, 1024, 768, 1280, 12288])
NUM_HEADS = np.array([12, 16, 12, 20, 96])

PRINTED = (
    PrintedMatrix("head_width", ("64",), "section 'Step-by-Step Process'"),
    PrintedMatrix("output_shape", ("2 10 512",), CODE),
    PrintedMatrix("weights_shape", ("2 8 10 10",), CODE),
    PrintedMatrix("d_k", ("64 64 64 64 128",), TABLE),
    PrintedMatrix(
        "illustration", ("0.2 0.8", "0.1 0.5", "0.3 0.2", "0.0 0.9"), PICTURE,
        Status.ILLUSTRATIVE, has_inputs=False,
    ),
)  # fmt: skip


def run(tap: Tap, is_causal: bool, is_scaled: bool) -> None:
    """Run 8 heads on x (2, 10, 512) and record shapes; compute the head widths of five models."""
    d_model, num_heads = 512, 8
    head_width = int(tap("head_width", np.array(d_model // num_heads)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 10, d_model))
    W_q, W_k, W_v = rng.standard_normal((3, num_heads, d_model, head_width)) / np.sqrt(d_model)
    W_o = rng.standard_normal((d_model, d_model)) / np.sqrt(d_model)
    shapes = {}

    def measure(name: str, value: np.ndarray) -> np.ndarray:
        shapes[name] = np.array(np.shape(value))
        return value

    MultiHeadAttention.from_heads(W_q, W_k, W_v, W_o)(x, tap=measure)
    for name in ("x", "q", "weights", "concat", "output"):
        tap(f"{name}_shape", shapes[name])
    tap("d_model", D_MODEL)
    tap("num_heads", NUM_HEADS)
    tap("d_k", D_MODEL // NUM_HEADS)
    tap("illustration", PRINTED[-1].values)


EXAMPLE = Example(
    name="shapes", document="001", title="the shapes of eight heads, and the sizes of known models",
    source=f"document 001, {CODE} and {TABLE}", sentence="The quick brown fox jumps", run=run,
    left_out="the vectors of 'quick' in its picture, which no inputs are given for",
    labels={"model": MODELS}, is_adjustable=False, printed=PRINTED,
    notes={
        "weights_shape": "In the document's code a mask entry equal to 0 is blocked and any other "
        "may be attended; here a mask is boolean and True may be attended.",
        "illustration": "The vectors drawn for the token 'The', one row per head; like the "
        "document's shaded heatmaps they show no computation.",
    },
)  # fmt: skip
