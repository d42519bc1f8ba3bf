"""Additive attention: a small neural network computes the score of each query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minimha.api import attention
from minimha.equations.arguments import as_floating, common_dtype
from minimha.equations.arrays import like
from minimha.equations.dense import for_query_heads
from minimha.equations.option_types import Masks, Positions
from minimha.equations.problem import Problem
from minimha.equations.tap import Tap, no_tap, safe_tap

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]


class AdditiveOptions(Masks, Positions, total=False):
    """Types of the options that ``additive_attention`` passes to ``minimha.attention``."""

    return_lse: bool


def additive_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    W_q: ArrayLike,
    W_k: ArrayLike,
    w: ArrayLike,
    *,
    b: ArrayLike | None = None,
    attn_bias: ArrayLike | None = None,
    tap: Tap = no_tap,
    **options: Unpack[AdditiveOptions],
) -> Any:
    """Return Bahdanau's attention softmax(S) V with scores S_ij = w · tanh(q_i W_q + k_j W_k + b).

    Axes: ``B`` batch, ``H`` query heads, ``Hkv`` key/value heads, ``Lq`` queries, ``Lk`` keys,
    ``Dq``, ``Dk``, ``Dv`` widths of a query, a key and a value, ``A`` hidden width. 2-D and 3-D
    arrays may be used as in ``minimha.attention``.

    Scores are not scaled, since every score is between -Σ|w| and Σ|w|. The function stores
    B · H · Lq · Lk · A hidden numbers. ``minimha.attention`` then applies masks and softmax and
    computes the output: it receives the scores as ``attn_bias``, and queries and keys that are 0.

    The paper writes S_ij = v_aᵀ tanh(W_a s_i + U_a h_j) with columns s_i and h_j: W_q is W_aᵀ, W_k
    is U_aᵀ and w is v_a. Luong's "concat" score is the same; its one matrix is W_q above W_k.

    Parameters
    ----------
    q : array_like of shape (B, H, Lq, Dq)
        Integers are computed in float64; float16 and bfloat16 are computed in float32.
    k : array_like of shape (B, Hkv, Lk, Dk)
        Query head h reads key/value head h // (H // Hkv).
    v : array_like of shape (B, Hkv, Lk, Dv)
    W_q : array_like of shape (Dq, A)
    W_k : array_like of shape (Dk, A)
    w : array_like of shape (A,)
    b : array_like of shape (A,), optional
        Default is 0.
    attn_bias : array_like of shape (Lq, Lk) or 4-D broadcastable to (B, H, Lq, Lk), optional
        Added to the scores; -inf hides a key.
    tap : callable ``tap(name, value) -> value``, optional
        Receives q, k, the weights, q_hidden, k_hidden, hidden and energies (the scores), then the
        intermediates of the attention.
    **options
        The options of ``minimha.attention`` except scale and softcap: causality, windows, masks,
        ALiBi, sinks, return_lse, backend.

    Returns
    -------
    output : array of shape (B, H, Lq, Dv), the common dtype of all arrays but ``attn_bias``
    lse : array of shape (B, H, Lq), if ``return_lse``

    Raises
    ------
    TypeError, ValueError
        Shapes or dtypes do not fit each other, or an option such as scale is not supported.
    BackendUnavailable
        As in ``minimha.attention``.

    References
    ----------
    Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015, section 3.1 and appendix A.1.2; Luong, Pham and Manning, "Effective Approaches
    to Attention-based Neural Machine Translation", 2015, section 3.1.

    Examples
    --------
    The scores are 2 tanh(0) and 2 tanh(1), so the second weight is 1 / (1 + exp(-2 tanh(1))).

    >>> additive_attention([[0]], [[0], [1]], [[0], [1]], W_q=[[1]], W_k=[[1]], w=[2]).round(4)
    array([[0.821]])
    """
    for name in ("scale", "softcap"):
        if name in options:
            raise TypeError(
                f"{name} is no option of additive_attention: w scales the scores, which stay "
                f"within ±Σ|w|"
            )
    given = {"q": q, "k": k, "v": v, "W_q": W_q, "W_k": W_k, "w": w}
    if b is not None:
        given["b"] = b
    arrays = {name: as_floating(name, value) for name, value in given.items()}
    _check_widths(**arrays)
    dtype = common_dtype({name: array.dtype for name, array in arrays.items()})
    zeros = [np.zeros((*arrays[name].shape[:-1], 1), dtype) for name in "qk"]
    v = arrays["v"].astype(dtype, copy=False)
    problem = Problem.of(zeros[0], zeros[1], v, attn_bias=attn_bias)
    tap = safe_tap(tap)
    S = _energies(problem, arrays, tap)
    if problem.attn_bias is not None:  # -inf hides a key even if its energy is NaN
        hides = np.isneginf(problem.attn_bias)
        with np.errstate(all="ignore"):
            S = np.where(hides, problem.attn_bias, S + problem.attn_bias)
    is_biased = problem.attn_bias is not None or options.get("alibi_slopes") is not None
    leading = (0,) * (4 - problem.rank)
    qkv = (x[leading] for x in (problem.q, problem.k, problem.v))
    result = attention(*qkv, attn_bias=S, tap=_after_energies(tap, is_biased), **options)
    return tuple(like(q, x) for x in result) if isinstance(result, tuple) else like(q, result)


def _check_widths(
    q: Array, k: Array, v: Array, W_q: Array, W_k: Array, w: Array, b: Array | None = None
) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim not in (2, 3, 4) or array.ndim != q.ndim:
            raise ValueError(
                f"{name} has shape {array.shape}, q {q.shape}: q, k and v must all be (L, D), all "
                f"(H, L, D) or all (B, H, L, D)"
            )
    Dq, Dk = q.shape[-1], k.shape[-1]
    hint = "; it looks transposed, weights are applied as x @ W"
    if W_q.ndim != 2 or W_q.shape[0] != Dq:
        is_transposed = W_q.ndim == 2 and W_q.shape[1] == Dq
        raise ValueError(
            f"W_q has shape {W_q.shape}: expected (Dq, A) with q's width Dq={Dq}"
            f"{hint if is_transposed else ''}"
        )
    A = W_q.shape[1]
    for name, given, letters, shape in (
        ("W_k", W_k, "(Dk, A)", (Dk, A)),
        ("w", w, "(A,)", (A,)),
        ("b", b, "(A,)", (A,)),
    ):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} has shape {given.shape}: expected {letters} = {shape}, with A={A} columns "
                f"as W_q has{hint if given.ndim == 2 and given.shape == shape[::-1] else ''}"
            )


def _energies(problem: Problem, arrays: dict[str, Array], tap: Tap) -> Array:
    """Return S_ij = w · tanh(q_i W_q + k_j W_k + b), (B, H, Lq, Lk), in the compute dtype."""
    (B, H, Lq, _), Lk = problem.q.shape, problem.k.shape[2]
    wide = {name: array.astype(problem.compute, copy=False) for name, array in arrays.items()}
    promoted = (None,) * (4 - problem.rank)
    q, k = tap("q", wide["q"][promoted]), tap("k", wide["k"][promoted])
    with np.errstate(all="ignore"):
        q_hidden = tap("q_hidden", q @ tap("W_q_hidden", wide["W_q"]))
        k_hidden = tap("k_hidden", k @ tap("W_k_hidden", wide["W_k"]))
        total = q_hidden[..., None, :] + for_query_heads(H, k_hidden)[..., None, :, :]
        if "b" in wide:
            total = total + tap("b_hidden", wide["b"])
        hidden = tap("hidden", np.tanh(total).reshape(B, H, Lq * Lk, total.shape[-1]))
        S = (hidden @ tap("w", wide["w"])).reshape(B, H, Lq, Lk)
    return np.asarray(tap("energies", S))


def _after_energies(tap: Tap, is_biased: bool) -> Tap:
    """Return a tap without the zero queries and keys, their products, and the bias."""
    if tap is no_tap:
        return no_tap
    silent = {"q", "k", "Q", "K", "scores", "bias", "attn_bias", "slopes", "distances"}
    silent |= set() if is_biased else {"biased"}

    def receive(name: str, value: Any) -> Any:
        base, _, block = name.partition("[")
        if base in silent:
            return value
        return tap(f"energies_ij[{block}" if base == "S" else name, value)

    return receive
