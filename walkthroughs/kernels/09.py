import numpy as np


def attention(q, k, v, softcap=None, attn_bias=None, scale=None):
    """A soft cap keeps scores between -c and c; the bias moves them."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores * scale
    if attn_bias is not None:
        scores = scores + attn_bias
    maximum = scores.max(axis=-1, keepdims=True)
    maximum[np.isneginf(maximum)] = 0
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    return (weights / total @ v).astype(q.dtype)
