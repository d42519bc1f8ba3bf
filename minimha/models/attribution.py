"""Attribute outputs to parts of a model: logit attribution, activation patching, rollout.

Axes: ``L`` tokens, ``H`` heads, ``E`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import counted, integer, name_of
from minimha.equations.tap import replacing
from minimha.layers.norms import LayerNorm
from minimha.models.interpretability import Head, attention_of, every_layer, places, run_steps
from minimha.models.transformer import Transformer

Array = NDArray[Any]
Floats = NDArray[np.float64]
Text = str | ArrayLike


@dataclass(frozen=True, eq=False)
class Attribution:
    """The contributions of a model's parts to a logit, or to the difference of two logits.

    They sum to that logit or difference.

    Attributes
    ----------
    names : tuple of str
        The n parts. The first is "embedded". Then follow, for each layer, its heads ("L0H0", …),
        "L0 biases" (the rest of the attention's output) and "L0 feed-forward". The last is "final
        norm", if that norm has a bias.
    values : ndarray of shape (n,), float64
    """

    names: tuple[str, ...]
    values: Floats

    def largest(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the ``count`` contributions of largest magnitude, as pairs (name, value)."""
        order = np.argsort(-np.abs(self.values), kind="stable")[: integer("count", count)]
        return [(self.names[n], float(self.values[n])) for n in order]


def attribution(
    model: Transformer, ids: Text, token: int | str, against: int | str | None = None,
    position: int = -1,
) -> Attribution:  # fmt: skip
    """Compute how much each head and each feed-forward contributes to the logit of ``token``.

    This is direct logit attribution. The residual stream is the sum of the parts' outputs. The
    final norm divides each row by a number. With this number held fixed, norm and unembedding are
    linear, so the logit is a sum over the parts. If a layer normalises the output of attention or
    feed-forward, that norm's divisor is held fixed too.

    Parameters
    ----------
    model : Transformer
    ids : str, or array_like of shape (L,), int
    token : int or str
        The id or the text of the token whose logit is attributed.
    against : int or str, optional
        A second token. If given, the logit of ``token`` minus that of ``against`` is attributed.
    position : int, default -1
        The position after which ``token`` is predicted. Negative numbers count from the end.

    Returns
    -------
    Attribution
        The contributions to the logit before ``logit_softcap``.

    Raises
    ------
    TypeError, ValueError
        As in ``model.logits``, or ``token`` or ``against`` is a text of several tokens, or
        ``position`` is out of range.

    References
    ----------
    Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; nostalgebraist, 2020.
    """
    tokens = model.encode(ids)
    [row] = places("position", position, len(tokens))
    W_vocab, wanted = model.unembedding(), [_token(model, "token", token)]
    if against is not None:
        wanted.append(_token(model, "against", against))
    steps = run_steps(model, tokens, "embedded", "concat", "gated", "added", "residual")
    stream = {
        name: rows.reshape(-1, rows.shape[-1])[row].astype(float) for name, rows in steps.items()
    }
    names, parts = zip(*_parts(model, stream), strict=True)
    last = np.sum(parts, axis=0)
    shares = model.final_norm.shares(last, np.array(parts))
    if isinstance(model.final_norm, LayerNorm):
        names, shares = (*names, "final norm"), np.vstack([shares, model.final_norm.bias])
    logits = shares @ W_vocab[:, wanted].astype(float)
    return Attribution(names, logits[:, 0] - logits[:, 1:].sum(axis=1))


def _parts(model: Transformer, stream: dict[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """Yield the name and row (E,) of each part that is added to one token's residual stream."""
    x = stream["embedded"]
    yield "embedded", x
    for n, layer in enumerate(model.blocks):
        at, attention = f"[layer {n}]", attention_of(model, n)
        heads = stream[f"concat{at}" if attention.gate is None else f"gated{at}"]
        W_o = attention.W_o.astype(float).reshape(attention.num_heads, -1, model.config.d_model)
        outputs = np.einsum("hd,hde->he", heads.reshape(W_o.shape[:2]), W_o)
        added = stream[f"added{at}"]
        if layer.attention_output_norm is not None:
            whole = outputs.sum(axis=0) + (attention.b_o if attention.bias else 0)
            outputs = layer.attention_output_norm.shares(whole, outputs)
        yield from ((str(Head(n, h)), output) for h, output in enumerate(outputs))
        yield f"L{n} biases", added - x - outputs.sum(axis=0)
        x = stream[f"residual{at}"]
        yield f"L{n} feed-forward", x - added


def _token(model: Transformer, name: str, token: int | str) -> int:
    """Return the id of one token, given by its id or its text."""
    found = model.encode(token if isinstance(token, str) else [token])
    if len(found) != 1:
        raise ValueError(
            f"{name_of(name)} is {token!r}, which is {counted(len(found), 'token')}: expected one"
        )
    return int(found[0])


def patch(
    model: Transformer, clean: Text, corrupted: Text, score: Callable[[Array], SupportsFloat],
    step: str = "residual",
) -> Floats:  # fmt: skip
    """Compute activation patching: scores of a corrupted text with one activation restored.

    Entry (n, p) is the score of a run on ``corrupted`` with one change: the activation ``step`` of
    layer n at position p has its value from the run on ``clean``. The runs form one batch.

    Parameters
    ----------
    model : Transformer
    clean, corrupted : str, or array_like of shape (L,), int
        Two texts with the same number of tokens.
    score : callable ``score(logits) -> float``
        Maps the logits (V,) of the next token to a score.
    step : str, default "residual"
        The activation: an array of every layer with a row per token, such as "residual" (after the
        layer), "output" (of attention), "feed_forward", or "head_output" (of all heads).

    Returns
    -------
    ndarray of shape (layers, L), float64

    Raises
    ------
    TypeError, ValueError
        As in ``model.logits``, or the texts differ in number of tokens, or a layer has no array
        ``step`` with a row per token.

    References
    ----------
    Meng et al., "Locating and Editing Factual Associations in GPT", 2022, section 2.1 (causal
    tracing); Wang et al., "Interpretability in the Wild", 2022.
    """
    right, wrong = model.encode(clean), model.encode(corrupted)
    if len(right) != len(wrong):
        raise ValueError(
            f"{name_of('corrupted')} has {counted(len(wrong), 'token')} but {name_of('clean')} has "
            f"{len(right)}: expected equally many"
        )
    kept = run_steps(model, right, step)
    layers, L = model.config.num_layers, len(right)
    for n in range(layers):
        rows = kept.get(f"{step}[layer {n}]", np.zeros(0))
        if rows.ndim < 2 or rows.shape[-2] != L:
            raise ValueError(
                f"{name_of('step')} is {step!r}, of which layer {n} has shape {rows.shape}: "
                f"expected a step with {L} rows in every layer, such as 'residual'"
            )
    place = np.arange(L)

    def mend(name: str, value: Any) -> Any:
        if name in kept:
            n = int(name.rpartition(" ")[2][:-1])
            value = value.copy()
            value[n * L + place, ..., place, :] = np.moveaxis(kept[name][0], -2, 0)
        return value

    with replacing(mend, None) as tap:
        x = model.residual(np.tile(wrong, (layers * L, 1)), backend="dense", tap=tap)
    logits = model.unembed(x[:, -1])
    return np.array([float(score(row)) for row in logits]).reshape(layers, L)


def rollout(model: Transformer, ids: Text) -> Floats:
    """Compute attention rollout: how much each input token contributes to each token's row.

    The shares of a layer are (A + identity) / 2. A is the mean of its heads' attention weights, and
    the identity stands for the residual. Entry n of the result is the matrix product of the shares
    of layers n, …, 0.

    Returns
    -------
    ndarray of shape (layers, L, L), float64
        Rows belong to each layer's tokens, columns to input tokens. Each row sums to 1.

    References
    ----------
    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.

    Examples
    --------
    >>> from minimha.models import world
    >>> rollout(world.load(), "the cat sat")[-1].round(1)
    array([[1. , 0. , 0. ],
           [0.7, 0.3, 0. ],
           [0.3, 0. , 0.7]])
    """
    found, total = [], np.eye(len(model.encode(ids)))
    for weights in every_layer(model, ids, "weights"):
        A = weights[0].mean(axis=0, dtype=float)
        A = (A / A.sum(axis=-1, keepdims=True) + np.eye(len(A))) / 2  # with sinks rows sum to less
        total = A @ total
        found.append(total)
    return np.array(found)
