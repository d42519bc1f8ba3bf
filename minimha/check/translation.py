"""Translate a problem into another library's call: its layout, argument names and masks.

An option that the library lacks is refused. An option that has another meaning there is passed
anyway, as an unsuspecting user would do, and the report describes the effect. ``minimha.dialects``
translates in the other direction; the tests of this module call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check import adapted
from minimha.check.problems import is_given
from minimha.check.rounding import FORMATS
from minimha.equations.problem import Problem

Array = NDArray[Any]
Options = dict[str, Any]


class Refused(Exception):  # noqa: N818
    """Raised if a library lacks an option that a problem needs."""


@dataclass(frozen=True)
class Dialect:
    """The calling conventions of the attention function of one library."""

    arrays: str  # the library whose arrays it usually takes
    heads_first: bool  # (B, H, L, D) rather than (B, L, H, D)
    # (q, k, v, options) -> keyword arguments. It removes from ``options`` what it translates; an
    # option that is left is refused.
    keywords: Callable[[Array, Array, Array, Options], Options]
    lse: str = ""  # the argument that asks for the log-sum-exp, "" if there is none
    lse_heads_first: bool = True  # (B, H, Lq) rather than (B, Lq, H)
    # Deviations from minimha that the library chose, each as a clause for the report.
    conventions: Mapping[str, str] = field(default_factory=dict)
    inconsistent: tuple[str, ...] = ()  # problems in which it breaks its own convention
    # Makes the library's function one that takes these arguments and returns arrays (B, …).
    adapted: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    kind: str = "attention"  # of the problems that its functions get, as in ``Graded.kind``


def translated(
    speaks: str, arguments: Mapping[str, Any], *, wants_lse: bool
) -> tuple[list[Array], Options]:
    """Return the positional and the keyword arguments of a call, in the dialect ``speaks``.

    ``arguments`` are q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) and options of
    ``minimha.attention``. The log-sum-exp is requested if ``wants_lse`` is true, ``return_lse`` is
    among the arguments and true, and the dialect can return it. Raises ``Refused``, with the names
    of options that the dialect lacks.

    >>> x = np.zeros((1, 1, 2, 3))
    >>> translated("jax", {"q": x, "k": x, "v": x, "is_causal": True}, wants_lse=False)[1]
    {'is_causal': True}
    >>> translated("torch", {"q": x, "k": x, "v": x, "softcap": 2.0}, wants_lse=False)
    Traceback (most recent call last):
    minimha.check.translation.Refused: torch has no softcap
    """
    dialect = DIALECTS[speaks]
    options = {
        name: value
        for name, value in arguments.items()
        if name not in ("q", "k", "v", "return_lse") and is_given(name, value)
    }
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    keywords = dialect.keywords(q, k, v, options)
    if options:
        raise Refused(f"{speaks} has no {' and no '.join(options)}")
    if wants_lse and dialect.lse and arguments.get("return_lse"):
        keywords[dialect.lse] = True
    k, v = keywords.pop("K", k), keywords.pop("V", v)  # without the past's keys and values
    if not dialect.heads_first:
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    return [q, k, v], keywords


def expected_shapes(
    speaks: str, q: Array, v: Array
) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    """Return the axes and the shape of the output and of the log-sum-exp in the dialect ``speaks``.

    Each is a pair such as ("(B, Lq, H, Dv)", (1, 5, 2, 4)).
    """
    dialect = DIALECTS[speaks]
    (B, _, Lq, _), H, Dv = q.shape, max(q.shape[1], v.shape[1]), v.shape[-1]
    output = (
        ("(B, H, Lq, Dv)", (B, H, Lq, Dv))
        if dialect.heads_first
        else ("(B, Lq, H, Dv)", (B, Lq, H, Dv))
    )
    lse = ("(B, H, Lq)", (B, H, Lq)) if dialect.lse_heads_first else ("(B, Lq, H)", (B, Lq, H))
    return output, lse


def heads_first(speaks: str, output: Array, lse: Array | None) -> tuple[Array, Array | None]:
    """Move the axes of a dialect's output and log-sum-exp to minimha's order, (B, H, Lq, Dv).

    Arrays with other numbers of axes are returned unchanged.
    """
    dialect = DIALECTS[speaks]
    if not dialect.heads_first and output.ndim == 4:
        output = output.swapaxes(1, 2)
    if not dialect.lse_heads_first and lse is not None and lse.ndim == 3:
        lse = lse.swapaxes(1, 2)
    return output, lse


def _minimha(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords = dict(options)
    options.clear()
    return keywords


def _torch(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords = _causal(options) | _moved(options, scale="scale")
    mask, bias = options.pop("attn_mask", None), options.pop("attn_bias", None)
    if bias is not None:  # torch has one argument for both
        keywords["attn_mask"] = bias if mask is None else _hidden(bias, mask)
    elif mask is not None:
        keywords["attn_mask"] = mask
    if k.shape[1] != q.shape[1]:
        keywords["enable_gqa"] = True
    return keywords


def _jax(q: Array, k: Array, v: Array, options: Options) -> Options:
    _refuse_offset(options, 0, "window_size")
    keywords = _causal(options)
    keywords |= _moved(options, scale="scale", kv_lengths="key_value_seq_lengths")
    over_scores = _moved(options, attn_mask="mask", attn_bias="bias")
    keywords |= {name: x[(None,) * (4 - x.ndim)] for name, x in over_scores.items()}
    if "window_size" in options:
        everything = q.shape[2] + k.shape[2]
        sides = options.pop("window_size")
        keywords["local_window_size"] = tuple(everything if s is None else s for s in sides)
    return keywords


def _keras(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords = _causal(options)
    keywords |= _moved(options, scale="scale", softcap="attn_logits_soft_cap")
    scores = (*q.shape[:3], k.shape[2])
    for name, word in (("attn_mask", "mask"), ("attn_bias", "bias")):
        if name in options:  # not every backend of Keras broadcasts
            keywords[word] = np.broadcast_to(options.pop(name), scores).copy()
    return keywords


def _flash_attention(q: Array, k: Array, v: Array, options: Options) -> Options:
    last = k.shape[2] - q.shape[2]
    _refuse_offset(options, last, "window_size", "alibi_slopes")
    if "kv_lengths" in options:  # the lengths also place the last query
        if {"is_causal", "window_size", "alibi_slopes"} & set(options):
            raise Refused("flash_attention counts positions from the last key before the padding")
        lengths = options.pop("kv_lengths")
        options["key_padding_mask"] = np.arange(k.shape[2]) < np.asarray(lengths)[:, None]
    return _flash_words(options) | _moved(
        options, sinks="learnable_sink", key_padding_mask="key_padding_mask"
    )


def _flash_words(options: Options) -> Options:
    """Return the arguments that all functions of flash-attention share."""
    keywords: Options = {"causal": True} if _causal(options) else {}
    if "window_size" in options:
        keywords["window_size"] = tuple(-1 if s is None else s for s in options.pop("window_size"))
    return keywords | _moved(
        options, scale="softmax_scale", softcap="softcap", alibi_slopes="alibi_slopes"
    )


def _flash_lengths(q: Array, k: Array, options: Options) -> Array:
    """Return each batch entry's number of keys; its last query must be at its last key."""
    is_given = "kv_lengths" in options
    lengths = np.broadcast_to(options.pop("kv_lengths", k.shape[2]), len(q)).astype(np.int32)
    placed = {"window_size", "alibi_slopes", *(["is_causal"] if is_given else [])}
    offset = np.broadcast_to(options.get("q_offset", 0), len(q))
    if np.array_equal(offset, lengths - q.shape[2]):
        options.pop("q_offset", None)
    elif placed & set(options):
        raise Refused("flash_attention counts positions from the last key")
    return lengths


def _flash_varlen(q: Array, k: Array, v: Array, options: Options) -> Options:
    lengths, Lq = _flash_lengths(q, k, options), q.shape[2]
    rows = np.arange(k.shape[2]) < lengths[:, None]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return _flash_words(options) | {
        "K": k.swapaxes(1, 2)[rows].swapaxes(0, 1)[None],
        "V": v.swapaxes(1, 2)[rows].swapaxes(0, 1)[None],
        "cu_seqlens_q": np.arange(len(q) + 1, dtype=np.int32) * np.int32(Lq),
        "cu_seqlens_k": starts, "max_seqlen_q": Lq, "max_seqlen_k": int(lengths.max()),
    }  # fmt: skip


def _flash_paged(q: Array, k: Array, v: Array, options: Options) -> Options:
    lengths = _flash_lengths(q, k, options)
    pages = -(-k.shape[2] // PAGE)
    table = np.arange(len(q) * pages, dtype=np.int32)[::-1].reshape(len(q), pages)

    def in_pages(x: Array) -> Array:
        padded = np.pad(x, ((0, 0), (0, 0), (0, pages * PAGE - x.shape[2]), (0, 0)))
        parts = padded.reshape(*x.shape[:2], pages, PAGE, x.shape[3]).swapaxes(1, 2)
        return np.asarray(parts.reshape(-1, *parts.shape[2:])[::-1])

    return _flash_words(options) | {
        "K": in_pages(k), "V": in_pages(v), "cache_seqlens": lengths, "block_table": table.copy(),
    }  # fmt: skip


def _flex(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords = {n: options.pop(n) for n in [*options] if n != "sinks"}
    return keywords | ({"enable_gqa": True} if k.shape[1] != q.shape[1] else {})


def _transformers(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords: Options = {"scaling": q.shape[3] ** -0.5}
    keywords |= _moved(options, scale="scaling", softcap="softcap", sinks="s_aux")
    bias = options.pop("attn_bias", None)
    hiding = ("is_causal", "q_offset", "window_size", "kv_lengths", "attn_mask")
    given = {name: options.pop(name) for name in hiding if name in options}
    if bias is None and set(given) <= {"q_offset"}:
        return keywords
    problem = Problem.of(q, k, v, **given)
    visible = problem.visible(slice(0, q.shape[2]), slice(0, k.shape[2]))
    bits, exponent = FORMATS.get(q.dtype.name, (24, 128))
    lowest = -(2 - 2.0 ** (1 - bits)) * 2.0 ** (exponent - 1)
    added = np.where(visible, 0 if bias is None else bias, lowest)
    return keywords | {"attention_mask": added[(None,) * (4 - added.ndim)].astype(q.dtype)}


def _onnx(q: Array, k: Array, v: Array, options: Options) -> Options:
    keywords: Options = {}
    offset = options.pop("q_offset", 0)
    if "kv_lengths" in options:
        lengths = np.asarray(options.pop("kv_lengths"))
        is_placed = {"is_causal", "window_size"} & set(options)
        if is_placed and not np.array_equal(
            np.broadcast_to(offset, lengths.shape), lengths - q.shape[2]
        ):
            raise Refused("onnx counts positions from nonpad_kv_seqlen - Lq")
        keywords["nonpad_kv_seqlen"] = lengths
    elif np.ndim(offset) or not 0 <= offset <= k.shape[2]:
        raise Refused("onnx has no such q_offset: a past has one length, from 0 to Lk")
    elif offset:
        keywords |= {"past_key": k[:, :, :offset].copy(), "past_value": v[:, :, :offset].copy()}
        keywords |= {"K": k[:, :, offset:].copy(), "V": v[:, :, offset:].copy()}
    if options.pop("is_causal", False):
        keywords["is_causal"] = 1
    if "window_size" in options:
        sides = (-1 if s is None else s for s in options.pop("window_size"))
        keywords |= dict(zip(("left_window_size", "right_window_size"), sides, strict=True))
    if "attn_mask" in options and "attn_bias" in options:
        options["attn_bias"] = _hidden(options["attn_bias"], options.pop("attn_mask"))
    return keywords | _moved(
        options, scale="scale", softcap="softcap", attn_mask="attn_mask", attn_bias="attn_mask"
    )


def _fla(q: Array, k: Array, v: Array, options: Options) -> Options:
    """Return the arguments of a gated delta rule in flash-linear-attention and transformers."""
    over_tokens = {name: options.pop(name).swapaxes(1, 2).copy() for name in ("g", "beta")}
    norm = {"use_qk_l2norm_in_kernel": True} if options.pop("normalize", True) else {}
    return {**over_tokens, **norm} | _moved(
        options, scale="scale", initial_state="initial_state", cu_seqlens="cu_seqlens",
        chunks="chunks",
    )  # fmt: skip


def _hidden(bias: Array, mask: Array) -> Array:
    """Return ``bias`` with -inf where the mask is False."""
    return np.where(mask, bias, bias.dtype.type(-np.inf))


def _moved(options: Options, **theirs: str) -> Options:
    """Remove options from ``options`` and return them under the library's names."""
    return {word: options.pop(name) for name, word in theirs.items() if name in options}


def _causal(options: Options) -> Options:
    """Move ``is_causal`` and drop ``q_offset``: the library aligns the diagonal by convention."""
    if not options.pop("is_causal", False):
        return {}
    if np.ndim(options.get("q_offset", 0)):
        raise Refused("there is no q_offset per batch entry")
    options.pop("q_offset", None)
    return {"is_causal": True}


def _refuse_offset(options: Options, aligned: int, *names: str) -> None:
    """Refuse a ``q_offset`` other than ``aligned`` if one of the options ``names`` is given."""
    if not set(names) & set(options):
        return
    offset = options.get("q_offset", 0)
    if not np.array_equal(np.unique(offset), [aligned]):
        raise Refused(f"there is no q_offset other than {aligned} here")
    options.pop("q_offset", None)


PAGE = 256  # keys; flash-attention's pages are a multiple of this
TOP_LEFT = {"causal_top_left": "causal is aligned top-left, as {} does"}
LEAKS = {"nan_leaks": "a NaN in a hidden value reaches the output, as {} lets it"}
BOTTOM_RIGHT = {"causal_bottom_right": "causal is aligned bottom-right, as {} does"}
BY_LENGTH = {"causal_by_length": "causal is aligned to each sequence's last key, as {} does"}
MEAN = {"dead_rows_mean": "a query that sees no key gets the mean of all values, as {} gives it"}
FROM_SUMS = {
    "delta_scale_ignored": "scale is ignored, as functions of transformers do",
    "delta_nan_leaks": "a NaN reaches its whole chunk, as {} lets it",
    "delta_clearing_is_nan": "g = -inf gives NaN, as in {}",
}
UNREAD = {
    "softcap_ignored": "softcap is ignored, as functions of {} may do",
    "sinks_ignored": "sinks are ignored, as functions of {} may do",
}


def _as(library: str, *clauses: Mapping[str, str]) -> dict[str, str]:
    return {name: clause.format(library) for part in clauses for name, clause in part.items()}


DIALECTS = {
    "minimha": Dialect("numpy", True, _minimha, lse="return_lse"),
    "torch": Dialect("torch", True, _torch, conventions=_as("torch", TOP_LEFT, LEAKS)),
    "flash_attention": Dialect(
        "torch", False, _flash_attention, lse="return_attn_probs",
        conventions=_as("flash-attention", BOTTOM_RIGHT, LEAKS),
    ),
    "flash_attention_varlen": Dialect(
        "torch", False, _flash_varlen, lse="return_attn_probs", adapted=adapted.packed,
        conventions=_as("flash-attention", BOTTOM_RIGHT, BY_LENGTH, LEAKS),
    ),
    "flash_attention_paged": Dialect(
        "torch", False, _flash_paged, lse="return_softmax_lse",
        conventions=_as("flash-attention", BOTTOM_RIGHT, BY_LENGTH, LEAKS),
    ),
    "flex_attention": Dialect(
        "torch", True, _flex, lse="return_lse", adapted=adapted.flexible,
        conventions=_as("flex_attention", LEAKS),
    ),
    "transformers": Dialect(
        "torch", True, _transformers, adapted=adapted.hooked,
        conventions=_as("transformers", MEAN, LEAKS, UNREAD),
        inconsistent=("bias that hides rows",),  # as for JAX
    ),
    "jax": Dialect(
        "jax", False, _jax, lse="return_residual", lse_heads_first=False,
        conventions=_as("JAX", TOP_LEFT, MEAN, LEAKS),
        inconsistent=("bias that hides rows",),  # NaN where a bias of -inf hides every key
    ),
    "keras": Dialect("numpy", False, _keras, conventions=_as("Keras", TOP_LEFT, MEAN, LEAKS)),
    "onnx": Dialect("numpy", True, _onnx, conventions=_as("onnxruntime", LEAKS)),
    "gated_delta_rule": Dialect(
        "numpy", True, _minimha, adapted=adapted.called_in_turn("return_state"), kind="delta rule"
    ),
    "lightning_indexer": Dialect("numpy", True, _minimha, kind="indexer"),
    "fla": Dialect(
        "torch", False, _fla, adapted=adapted.called_in_turn("output_final_state", axis=1),
        conventions=_as("flash-linear-attention", FROM_SUMS), kind="delta rule",
    ),
}  # fmt: skip
