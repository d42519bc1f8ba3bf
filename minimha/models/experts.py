"""A mixture of experts: a router sends each token to a few of many feed-forward networks.

tokens → router logits → probabilities → shares → the chosen experts → their sum

Axes: ``L`` tokens, ``E`` model width, ``N`` experts, ``n`` tokens that one expert receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.equations.tap import Tap, no_tap, renamed, safe_tap, staged
from minimha.layers.feed_forward import FeedForward
from minimha.layers.linear import product

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts: Σ_e share_e · expert_e(x), over the top experts of each token.

    A token's shares are the ``top_k`` largest of softmax(x W_router + b_router). All other shares
    are 0, and their experts compute nothing for the token.

    Parameters
    ----------
    W_router : ndarray of shape (E, N)
    experts : sequence of N FeedForward
    top_k : int
        How many experts a token goes to, from 1 to N.
    is_normalised : bool, default True
        Whether a token's shares are divided by their sum.
    b_router : ndarray of shape (N,), optional
    shared : FeedForward, optional
        One more expert, for every token.
    W_shared : ndarray of shape (E, 1), optional
        The gate of ``shared``: its output is multiplied by sigmoid(x W_shared).

    References
    ----------
    Shazeer et al., "Outrageously Large Neural Networks", 2017, section 2; Jiang et al., "Mixtral of
    Experts", 2024, section 2.1; Qwen Team, "Qwen1.5-MoE", 2024 (a shared expert with a gate).

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

    def __call__(self, x: Array, tap: Tap = no_tap) -> Array:
        """Return the output (..., L, E) for the tokens ``x`` (..., L, E).

        ``tap`` receives W_router, b_router, router_logits, router_probabilities, expert_shares
        (..., L, N) and feed_forward. Of expert 3 it receives the steps of a feed-forward with names
        like expanded[expert 3], from expert_input (1, n, E) to expert_output; of the shared expert,
        names like expanded[shared expert]. Replaced expert_shares send tokens elsewhere.
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
            gate = 0.5 + 0.5 * np.tanh(0.5 * product(x, tap("W_shared", self.W_shared)))
            output = _output(self.shared, x, staged(tap, "shared expert"))
            total = total + tap("shared_gate", gate) * output
        return np.asarray(tap("feed_forward", total))

    def _shares(self, x: Array, tap: Tap) -> Array:
        """Return each expert's share of each token, (..., L, N), 0 where it is not chosen."""
        logits = product(x, tap("W_router", self.W_router))
        if self.b_router is not None:
            logits = logits + tap("b_router", self.b_router)
        logits = tap("router_logits", logits)
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p = exponentials / exponentials.sum(axis=-1, keepdims=True)
        p = tap("router_probabilities", p)
        chosen = np.argsort(-p, axis=-1, kind="stable")[..., : self.top_k]
        shares = np.zeros_like(p)
        np.put_along_axis(shares, chosen, np.take_along_axis(p, chosen, axis=-1), axis=-1)
        if self.is_normalised:
            shares /= shares.sum(axis=-1, keepdims=True)
        return np.asarray(tap("expert_shares", shares))


def _output(expert: FeedForward, x: Array, tap: Tap) -> Array:
    return expert(tap("expert_input", x), renamed(tap, feed_forward="expert_output"))
