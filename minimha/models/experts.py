"""Compute a mixture of experts: a router sends each token to a few of many feed-forward networks.

tokens → router logits → scores → groups, if any → shares → the chosen experts → weighted sum

Axes: ``L`` tokens, ``E`` model width, ``N`` experts, ``n`` tokens that one expert receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, no_tap, renamed, safe_tap, staged
from minimha.layers.feed_forward import FeedForward
from minimha.layers.linear import product

Array = NDArray[Any]


@dataclass(frozen=True)
class Groups:
    """Groups of neighbouring experts: each token may use only experts of its best groups.

    Parameters
    ----------
    number : int
        The number of groups, a divisor of N.
    kept : int
        The number of best groups, from which a token's experts are chosen.
    best : int
        The number of experts whose scores are summed to a group's score: those with the largest.
    """

    number: int
    kept: int
    best: int


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture-of-experts layer: the sum Σ_e share_e · expert_e(x) over each token's top experts.

    The scores of a token are softmax(x W_router + b_router). Each of its ``top_k`` experts with the
    largest scores has its score as share; other experts have share 0 and compute nothing for the
    token. As in DeepSeek, scores may be sigmoids. ``groups`` and ``b_choice`` change which experts
    are chosen, but shares are still scores without ``b_choice``.

    Parameters
    ----------
    W_router : ndarray of shape (E, N)
    experts : sequence of N FeedForward
    top_k : int
        The number of experts per token, from 1 to N.
    is_normalised : bool, default True
        Whether a token's shares are divided by their sum.
    b_router : ndarray of shape (N,), optional
        Default is 0.
    shared : FeedForward, optional
        An additional expert that receives every token. Default is none.
    W_shared : ndarray of shape (E, 1), optional
        The gate of ``shared``: its output is multiplied by sigmoid(x W_shared). Default is none.
    scoring : {"softmax", "sigmoid"}, default "softmax"
        The function that turns router logits into scores. With "sigmoid", the score of an expert
        does not depend on the other experts.
    b_choice : ndarray of shape (N,), optional
        Added to the scores when experts are chosen, but not to the shares. Default is 0.
    groups : Groups, optional
        Restricts the experts of a token to its best groups. Default is no groups.
    scale : float, default 1.0
        The factor of the shares, applied last.

    References
    ----------
    Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2; Jiang et al., "Mixtral of
    Experts", 2024, section 2.1; Qwen Team, "Qwen1.5-MoE", 2024 (a shared expert with a gate);
    DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2 (sigmoid, bias), and "DeepSeek-V2", 2024,
    section 2.2.2 (groups, there called devices).

    Examples
    --------
    >>> I = np.eye(2)
    >>> mixture = Experts(100 * I, [FeedForward(I, n * I, "relu") for n in (3, 5)], top_k=1)
    >>> mixture(np.array([[[1.0, 0.0], [0.0, 1.0]]]))
    array([[[3., 0.],
            [0., 5.]]])
    """

    W_router: Array
    experts: Sequence[FeedForward]
    top_k: int
    is_normalised: bool = True
    b_router: Array | None = None
    shared: FeedForward | None = None
    W_shared: Array | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    b_choice: Array | None = None
    groups: Groups | None = None
    scale: float = 1.0

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the output (..., L, E) for the tokens ``x`` (..., L, E).

        ``tap`` receives W_router, b_router, router_logits, router_probabilities (for sigmoids
        router_scores), b_choice and choice_scores, group_scores and groups_kept (..., L, groups),
        expert_shares (..., L, N) and feed_forward. It also receives the steps of each expert that
        computes a token, from expert_input (1, n, E) to expert_output. Those of expert 3 have names
        like expanded[expert 3], those of the shared expert like expanded[shared expert]. If
        expert_shares are replaced, each token goes to the experts whose new share is not 0.
        """
        tap = safe_tap(tap)
        shares = self._shares(x, tap)
        rows, shares = x.reshape(-1, x.shape[-1]), shares.reshape(-1, shares.shape[-1])
        total: Array = np.zeros_like(rows)
        for e in map(int, np.flatnonzero((shares != 0).any(axis=0))):
            chosen = np.flatnonzero(shares[:, e])
            output = _output(self.experts[e], rows[chosen][None], staged(tap, f"expert {e}"))
            total[chosen] += shares[chosen, e, None] * output[0]
        total = total.reshape(x.shape)
        if self.shared is not None:
            gate = np.ones((), x.dtype)
            if self.W_shared is not None:
                gate = tap("shared_gate", _sigmoid(product(x, tap("W_shared", self.W_shared))))
            total = total + gate * _output(self.shared, x, staged(tap, "shared expert"))
        return np.asarray(tap("feed_forward", total))

    def _shares(self, x: Array, tap: Tap) -> Array:
        """Return each expert's share of each token, (..., L, N); experts not chosen have 0."""
        logits = product(x, tap("W_router", self.W_router))
        if self.b_router is not None:
            logits = logits + tap("b_router", self.b_router)
        logits = tap("router_logits", logits)
        if self.scoring == "sigmoid":
            p = tap("router_scores", _sigmoid(logits))
        else:
            exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
            p = exponentials / exponentials.sum(axis=-1, keepdims=True)
            p = tap("router_probabilities", p)
        choice = p
        if self.b_choice is not None:
            choice = tap("choice_scores", p + tap("b_choice", self.b_choice))
        if self.groups is not None:
            choice = _in_best_groups(choice, self.groups, tap)
        shares = p * _best(choice, self.top_k)
        if self.is_normalised:
            shares /= shares.sum(axis=-1, keepdims=True)
        return np.asarray(tap("expert_shares", shares * shares.dtype.type(self.scale)))


def _in_best_groups(scores: Array, groups: Groups, tap: Tap) -> Array:
    """Return the scores (..., L, N), -∞ for experts outside of a token's best groups."""
    parts = scores.reshape(*scores.shape[:-1], groups.number, -1)
    best = -np.sort(-parts, axis=-1)[..., : groups.best]
    kept = tap("groups_kept", _best(tap("group_scores", best.sum(axis=-1)), groups.kept))
    return np.where(kept[..., None] > 0, parts, -np.inf).astype(scores.dtype).reshape(scores.shape)


def _best(scores: Array, count: int) -> Array:
    """Return 1 at the ``count`` largest numbers of each row, of equal ones the first, else 0."""
    marks = np.zeros_like(scores)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(marks, chosen, 1, axis=-1)
    return marks


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))  # without overflow


def _output(expert: FeedForward, x: Array, tap: Tap) -> Array:
    return expert(tap("expert_input", x), renamed(tap, feed_forward="expert_output"))
