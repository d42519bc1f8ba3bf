"""Right kernels, each in another way: what `check` must not complain about."""

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 then)
import numpy as np
from problems import visible


def random_kernel(rng, dtype="float32"):
    """A right kernel: its blocks, their order, its base, where it rounds and how it merges."""
    choices = {
        "block": int(rng.choice([1, 2, 3, 5, 8, 16, 32, 64, 128, 1000])),
        "is_reversed": bool(rng.integers(2)),
        "base": rng.choice(["e", "2"]),
        "parts": int(rng.integers(1, 4)),
        "compute": "float64" if rng.random() < 0.25 else "float32",
        "scales_queries": bool(rng.integers(2)),
        "rounds_weights": bool(rng.integers(2)),
        "rounds_scores": bool(rng.integers(2)),
        "transposed": bool(rng.integers(2)),
        "moves_mean": rng.random() < 0.25,
    }
    return (lambda **arguments: attend(choices, dtype, **arguments)), choices


def attend(how, dtype, q, k, v, return_lse=False, **o):
    """Attention over keys in blocks, in the way that ``how`` says."""
    if {"cu_seqlens_q", "block_table", "score_mod", "mask_mod"} & set(o):
        raise NotImplementedError("neither packed sequences nor pages nor functions")
    c = np.dtype(how["compute"])
    narrow = np.dtype(dtype)
    group = q.shape[1] // k.shape[1]
    seen = visible(q, k, o)
    q, k, v = (x.astype(c) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1)))
    parts = np.array_split(np.arange(k.shape[2]), how["parts"])
    done = [part(how, c, narrow, q, k, v, seen, keys, o) for keys in parts if len(keys)]
    m = np.max([m for m, _, _ in done], axis=0)
    if o.get("sinks") is not None:
        m = np.maximum(m, o["sinks"].astype(c)[:, None])
    m = np.where(np.isneginf(m), c.type(0), m)
    factors = [np.exp(part_m - m) for part_m, _, _ in done]
    l = sum(f * part_l for f, (_, part_l, _) in zip(factors, done, strict=True))
    if o.get("sinks") is not None:
        l = l + np.exp(o["sinks"].astype(c)[:, None] - m)
    O = sum(f[..., None] * part_O for f, (_, _, part_O) in zip(factors, done, strict=True))
    with np.errstate(all="ignore"):
        O = np.where(l[..., None] == 0, 0, O / l[..., None]).astype(narrow)
        L = m + np.log(l)
    return (O, L) if return_lse else O


def part(how, c, narrow, q, k, v, seen, keys, o):
    """Maximum, sum and output of some keys, block after block."""
    m = np.full(q.shape[:3], -np.inf, c)
    l, O = np.zeros_like(m), np.zeros((*q.shape[:3], v.shape[3]), c)
    blocks = [keys[i : i + how["block"]] for i in range(0, len(keys), how["block"])]
    for j in blocks[::-1] if how["is_reversed"] else blocks:
        S = scores(how, c, narrow, q, k, j, o)
        S = np.where(seen[..., j], S, -np.inf)
        m_new = np.maximum(m, S.max(-1))
        shift = np.where(np.isneginf(m_new), 0, m_new)
        if how["base"] == "2":
            P = np.exp2(S * c.type(np.log2(np.e)) - shift[..., None] * c.type(np.log2(np.e)))
        else:
            P = np.exp(S - shift[..., None])
        alpha = np.exp(m - shift)
        l = alpha * l + P.sum(-1)
        if how["rounds_weights"]:
            P = P.astype(narrow).astype(c)
        V = np.where(seen[..., j].any((1, 2))[:, None, :, None], v[:, :, j], 0)
        for bad in np.flatnonzero(~np.isfinite(V).all((0, 1, 3))):
            rows = seen[..., j[bad]]
            O = np.where(rows[..., None], np.nan, O)
            V = V.copy()
            V[:, :, bad] = 0
        if how["moves_mean"]:
            share = P.sum(-1) / np.where(l == 0, 1, l)
            mean = P @ V / np.where(share == 0, 1, P.sum(-1))[..., None]
            O = O + (mean - O) * share[..., None]
        else:
            O = alpha[..., None] * O + P @ V
        m = m_new
    return m, l, O * l[..., None] if how["moves_mean"] else O


def scores(how, c, narrow, q, k, j, o):
    D, Lq = q.shape[3], q.shape[2]
    scale = c.type(1 / np.sqrt(D) if o.get("scale") is None else o["scale"])
    k = k[:, :, j]
    if how["scales_queries"]:
        q = q * scale
    S = (k @ q.swapaxes(-1, -2)).swapaxes(-1, -2) if how["transposed"] else q @ k.swapaxes(-1, -2)
    if not how["scales_queries"]:
        S = S * scale
    if how["rounds_scores"]:
        S = S.astype(narrow).astype(c)
    if o.get("softcap") is not None:
        S = o["softcap"] * np.tanh(S / o["softcap"])
    if o.get("attn_bias") is not None:
        S = (
            S
            + np.broadcast_to(o["attn_bias"], (*S.shape[:2], Lq, o["attn_bias"].shape[-1]))[..., j]
        )
    if o.get("alibi_slopes") is not None:
        p = np.arange(Lq)[:, None] + np.reshape(o.get("q_offset", 0), (-1, 1, 1, 1))
        S = S - o["alibi_slopes"][:, None, None] * abs(p - j)
    return S.astype(c)
