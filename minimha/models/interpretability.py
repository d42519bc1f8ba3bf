"""Analyse a transformer: ablation of heads, the logit lens, and attention patterns of heads.

Axes: ``L`` tokens, ``H`` heads, ``Dv`` width of a value, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.equations.arguments import as_integers, name_of
from minimha.equations.tap import Steps, replacing
from minimha.layers.multihead import MultiHeadAttention
from minimha.models.config import Config
from minimha.models.transformer import Transformer

Array = NDArray[Any]
Ids = NDArray[np.int64]
Pattern = Callable[[Ids], NDArray[np.bool_]]  # from tokens (L,) to the wanted keys, (L, L)
Prompt = str | Sequence[int] | Ids


class Head(NamedTuple):
    """An attention head, given by its layer and its index there, both from 0; printed as L1H0."""

    layer: int
    number: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.number}"

    @classmethod
    def parse(cls, text: str, config: Config) -> Head:
        """Return the head that ``text`` names, like "L1H0" or "1.0".

        Raise ValueError if a model with this ``config`` has no such head.
        """
        parts = text.upper().removeprefix("L").replace("H", ".").split(".")
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
            head = cls(*(int(part[:9]) for part in parts))
            if head.layer < config.num_layers and head.number < config.num_heads:
                return head
        last = cls(config.num_layers - 1, config.num_heads - 1)
        raise ValueError(f"no head {text!r}: expected layer and head, from {cls(0, 0)} to {last}")


def without_heads(
    model: Transformer, heads: Iterable[Head], means: Array | None = None
) -> Transformer:
    """Return a copy of a model without the given heads: their rows of W_o are set to 0.

    Parameters
    ----------
    model : Transformer
        The model, which is not changed; the copy shares its other weights.
    heads : iterable of Head
    means : ndarray of shape (layers, H, Dv), optional
        Constant outputs that replace those of the removed heads, as ``mean_outputs`` returns them.
        They enter the bias b_o. Default is 0.

    References
    ----------
    Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?", 2019, section 2.2 (zeros);
    Wang et al., "Interpretability in the Wild", 2022, section 2.1 (means).
    """
    removed = sorted(set(heads))
    blocks = list(model.blocks)
    for layer in sorted({head.layer for head in removed}):
        numbers = [head.number for head in removed if head.layer == layer]
        given = None if means is None else means[layer]
        attention = _without(attention_of(model, layer), numbers, given)
        blocks[layer] = replace(blocks[layer], attention=attention)
    return replace(model, blocks=tuple(blocks))


def attention_of(model: Transformer, layer: int) -> MultiHeadAttention:
    """Return a layer's attention; raise ValueError unless it is a ``MultiHeadAttention``."""
    found = model.blocks[layer].attention
    if not isinstance(found, MultiHeadAttention):
        raise ValueError(
            f"layer {layer} of this {model.config.architecture} is a {type(found).__name__}: "
            f"expected a MultiHeadAttention, whose heads can be taken apart"
        )
    return found


def _without(
    whole: MultiHeadAttention, numbers: Sequence[int], means: Array | None
) -> MultiHeadAttention:
    """Return a copy of ``whole`` without the heads ``numbers``; b_o includes their ``means``."""
    less = copy.copy(whole)
    W_o = whole.W_o.reshape(whole.num_heads, whole.value_dim, -1).copy()
    if means is not None:
        added = np.einsum("hd,hde->e", means[numbers], W_o[numbers]).astype(W_o.dtype)
        if not whole.bias:
            less.bias = True
            for name, shape in less.shapes.items():
                if name[0] == "b":
                    setattr(less, name, np.zeros(shape, whole.dtype))
        less.b_o = less.b_o + added
    W_o[numbers] = 0
    less.W_o = W_o.reshape(whole.W_o.shape)
    return less


def mean_outputs(model: Transformer, prompts: Iterable[Prompt]) -> NDArray[np.float64]:
    """Return the mean output of each head over all tokens of the prompts, (layers, H, Dv).

    Without prompts, it is 0.
    """
    config = model.config
    attention: Any = model.blocks[0].attention
    sums = np.zeros((config.num_layers, config.num_heads, attention.value_dim))
    count = 0
    for prompt in prompts:
        outputs = every_layer(model, prompt, "head_output")
        sums += np.stack([output[0].sum(axis=1) for output in outputs])
        count += outputs[0].shape[-2]
    return sums / max(count, 1)


def lens(
    model: Transformer, ids: str | ArrayLike, positions: ArrayLike = -1,
    layers: ArrayLike | None = None, *, replace: Steps = None,
) -> Array:  # fmt: skip
    """Compute the logit lens: the logits from the residual stream after each layer.

    Parameters
    ----------
    model : Transformer
    ids : str, or array_like of shape (L,), int
    positions : int or array_like of int, default -1
        The positions of n tokens; negative numbers count from the end.
    layers : int or array_like of int, optional
        The m places in the stream: n is after the n-th layer, 0 is the embeddings, and -1 is after
        the last layer. Default is all.
    replace : mapping of str to array_like, optional
        As in ``model.logits``, but only for arrays before the final norm.

    Returns
    -------
    ndarray of shape (m, n, V), float32
        Logits after the last layer are those of ``model.logits``.

    Raises
    ------
    TypeError, ValueError
        As in ``model.logits``, or a position or layer is out of range.

    References
    ----------
    nostalgebraist, "Interpreting GPT: the logit lens", 2020.
    """
    tokens, depth = model.encode(ids), 1 + model.config.num_layers
    rows = places("positions", positions, len(tokens))
    kept = places("layers", range(depth) if layers is None else layers, depth)
    found = run_steps(model, tokens, "embedded", "residual", replace=replace)
    stream = [x.reshape(-1, x.shape[-1])[rows] for x in found.values()]
    return np.stack([model.unembed(stream[n]) for n in kept])


def places(name: str, given: ArrayLike, count: int) -> Ids:
    """Return ``given``, one index or several, as an array (n,).

    Raise ValueError unless all are from ``-count`` to ``count - 1``. ``name`` is the argument's
    name in errors.
    """
    found = np.atleast_1d(as_integers(name, given))
    if (found < -count).any() or (found >= count).any():
        raise ValueError(f"{name_of(name)} is {given!r}: expected {-count} to {count - 1}")
    return found


def previous(ids: Ids) -> NDArray[np.bool_]:
    """Return the mask (L, L) that is True for query i and key i - 1 (Clark et al. 2019)."""
    return np.eye(len(ids), k=-1, dtype=bool)


def first(ids: Ids) -> NDArray[np.bool_]:
    """Return the mask (L, L) that is True for key 0 and queries i > 0 (attention sinks).

    Clark et al. 2019; Xiao et al. 2024.
    """
    i = np.arange(len(ids))
    return np.asarray((i[:, None] > 0) & (i == 0))


def itself(ids: Ids) -> NDArray[np.bool_]:
    """Return the mask (L, L) that is True for query i and key i, for i > 0.

    Query 0 is left out, since it sees no other key.
    """
    found = np.eye(len(ids), dtype=bool)
    found[:1] = False
    return found


def matching(ids: Ids) -> NDArray[np.bool_]:
    """Return the mask (L, L) that is True at earlier keys whose token is the query's token.

    Wang et al. 2022: duplicate token heads.
    """
    found: NDArray[np.bool_] = np.tril(ids[:, None] == ids, k=-1)
    return found


def induction(ids: Ids) -> NDArray[np.bool_]:
    """Return the mask (L, L) that is True at keys right after an earlier copy of the query's token.

    Elhage et al. 2021, "Induction Heads"; Olsson et al. 2022 ("prefix matching").
    """
    found = np.zeros((len(ids), len(ids)), bool)
    found[:, 1:] = matching(ids)[:, :-1]
    return found


PATTERNS: dict[str, Pattern] = {
    "previous": previous, "first": first, "itself": itself, "matching": matching,
    "induction": induction,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Behaviours:
    """The mean attention of each head to the keys of each pattern, such as the previous token.

    Attributes
    ----------
    names : tuple of str
        The names of the n patterns that mark a key in at least one prompt.
    scores : ndarray of shape (layers, H, n)
        The total weight of the marked keys, averaged over the queries that have a marked key.
    uniform : ndarray of shape (n,)
        The scores of a head that would give equal weights to all keys up to the query's own.
    counts : ndarray of shape (n,), int
        The number of queries that have a marked key.
    """

    names: tuple[str, ...]
    scores: NDArray[np.float64]
    uniform: NDArray[np.float64]
    counts: NDArray[np.int64]


def behaviours(
    model: Transformer, prompts: Iterable[Prompt], patterns: Mapping[str, Pattern] = PATTERNS
) -> Behaviours:
    """Measure the mean attention weight of each head on the keys of each pattern.

    Parameters
    ----------
    model : Transformer
    prompts : iterable of str or of sequence of int
    patterns : mapping of str to function, optional
        Functions from token ids (L,) to a mask (L, L): True marks a key (column) of a query (row).

    Raises
    ------
    TypeError, ValueError
        As in ``model.logits``, or a layer has no attention weights (``every_layer``).

    References
    ----------
    Clark et al., "What Does BERT Look At?", 2019; Elhage et al., "A Mathematical Framework for
    Transformer Circuits", 2021; Olsson et al., "In-context Learning and Induction Heads", 2022;
    Wang et al., "Interpretability in the Wild", 2022; Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", 2024.
    """
    config, n = model.config, len(patterns)
    scores = np.zeros((config.num_layers, config.num_heads, n))
    uniform, counts = np.zeros(n), np.zeros(n, np.int64)
    for prompt in prompts:
        ids = model.encode(prompt)
        weights = np.stack([A[0] for A in every_layer(model, ids, "weights")])
        alike = np.tri(len(ids)) / np.arange(1, len(ids) + 1)[:, None]
        for p, pattern in enumerate(patterns.values()):
            marked = pattern(ids)
            scores[..., p] += (weights * marked).sum(axis=(-2, -1))
            uniform[p] += (alike * marked).sum()
            counts[p] += marked.any(axis=-1).sum()
    shown = np.flatnonzero(counts)
    return Behaviours(
        tuple(name for name, count in zip(patterns, counts, strict=True) if count),
        scores[..., shown] / counts[shown],
        uniform[shown] / counts[shown],
        counts[shown],
    )


def every_layer(model: Transformer, prompt: str | ArrayLike, step: str) -> list[Array]:
    """Run a model and return the intermediate array ``step`` of each layer.

    Raise ValueError if a layer does not compute it.
    """
    found = run_steps(model, prompt, step)
    for n in range(model.config.num_layers):
        if f"{step}[layer {n}]" not in found:
            raise ValueError(
                f"layer {n} of this {model.config.architecture} has no step {step!r}: its "
                f"{type(model.blocks[n].attention).__name__} does not compute it"
            )
    return list(found.values())


def run_steps(
    model: Transformer, prompt: str | ArrayLike, *steps: str, replace: Steps = None
) -> dict[str, Array]:
    """Run a model and return the intermediate arrays ``steps`` of all layers.

    The keys are full names, such as "weights[layer 0]". ``replace`` is as in ``model.logits``.
    """
    found: dict[str, Array] = {}

    def receive(name: str, value: Any) -> Any:
        if name.partition("[")[0] in steps:
            found[name] = value
        return value

    with replacing(receive, replace) as tap:
        model.residual(prompt, backend="dense", tap=tap)
    return found
