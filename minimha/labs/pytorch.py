"""Compare the PyTorch class of document 001, a text on attention, with minimha."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.explain.chart import Bars
from minimha.explain.result import Result, Table
from minimha.layers.multihead import MultiHeadAttention

BATCH, LENGTH, WIDTH, HEADS = 2, 10, 512, 8  # as in the document's example of its use
PADDED = 7  # the length of the second sequence, where there is padding
TITLE = "the PyTorch class of document 001 beside minimha"
ABOUT = (
    f"A module as document 001 describes it: four linear layers with biases, d_model = {WIDTH}, "
    f"{HEADS} heads, and a mask in which 0 hides a key. x has {BATCH} sequences of {LENGTH} "
    f"tokens, in float32; the second one has {PADDED} where there is padding. minimha "
    f"has the transposes of the same matrices, as a linear layer computes x Wᵀ + b."
)
Weights = dict[str, NDArray[Any]]


def run(seed: int, progress: Callable[[str], None]) -> Result:
    """Run the experiment: compare outputs and attention weights for three kinds of mask."""
    rng = np.random.default_rng(seed)
    W: Weights = {n: rng.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5 for n in "qkvo"}
    b: Weights = {n: rng.standard_normal(WIDTH, np.float32) for n in "qkvo"}
    biases: dict[str, Any] = {f"b_{n}": vector for n, vector in b.items()}
    ours = MultiHeadAttention.from_combined(*W.values(), num_heads=HEADS, **biases)
    theirs = module(W, b)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH), np.float32)
    is_there = np.arange(LENGTH) < np.array([LENGTH, PADDED])[:, None]
    masks = {"none": None, "causal": np.tri(LENGTH, dtype=bool)[None, None],
             "padding": is_there[:, None, None]}  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for name, mask in masks.items():
        wanted, found = ours(x, attn_mask=mask, return_weights=True), theirs(x, mask)
        shapes = (" × ".join(map(str, array.shape)) for array in found)
        apart = (float(abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        rows.append((name, *shapes, float(abs(wanted[0]).max()), *apart))
    small: Callable[[Any], str] = "{:.1e}".format
    columns: dict[str, Callable[[Any], str]] = {
        "mask": str, "output": str, "weights": str, "largest": "{:.2f}".format,
        "output differs": small, "weights differ": small,
    }  # fmt: skip
    series = {name: tuple(row[n] for row in rows) for n, name in ((4, "output"), (5, "weights"))}
    table = Table("shapes, and the largest difference of any number", columns, tuple(rows))
    figure = Bars("largest difference", tuple(masks), series, small)
    return Result("pytorch", TITLE, ABOUT, seed, (table,), (figure,), conclude(rows))


def conclude(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a sentence on the largest differences between PyTorch's and minimha's results.

    The results are outputs and attention weights.
    """
    largest, output, weights = (max(row[n] for row in rows) for n in (3, 4, 5))
    return (
        f"With {len(rows)} kinds of mask outputs differ by {output:.1e} at most "
        f"({output / np.spacing(np.float32(largest)):.1f} units in the last place of the largest "
        f"one) and weights by {weights:.1e}."
    )


def module(W: Weights, b: Weights) -> Callable[..., list[NDArray[Any]]]:
    """Return document 001's PyTorch module as a function of NumPy arrays.

    ``W`` and ``b`` are its matrices and biases. Raise ValueError if torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"the experiment pytorch needs torch: pip install 'minimha[peers]' ({error})"
        ) from None

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for n in "qkvo":
                setattr(self, f"W_{n}", torch.nn.Linear(WIDTH, WIDTH))

        def forward(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
            split = (len(query), -1, HEADS, WIDTH // HEADS)
            pairs = (self.W_q, query), (self.W_k, key), (self.W_v, value)
            q, k, v = (layer(x).view(split).transpose(1, 2) for layer, x in pairs)
            scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -torch.inf)
            weights = scores.softmax(dim=-1)
            heads = (weights @ v).transpose(1, 2).reshape(len(query), -1, WIDTH)
            return self.W_o(heads), weights

    made = Module().requires_grad_(False)
    given = {f"W_{n}.weight": torch.from_numpy(W[n].T.copy()) for n in W}
    made.load_state_dict(given | {f"W_{n}.bias": torch.from_numpy(b[n]) for n in b})

    def call(x: NDArray[Any], mask: NDArray[Any] | None) -> list[NDArray[Any]]:
        X, M = torch.from_numpy(x), None if mask is None else torch.from_numpy(mask)
        return [found.numpy() for found in made(X, X, X, M)]

    return call
