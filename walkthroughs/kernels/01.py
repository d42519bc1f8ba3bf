import numpy as np


def attention(q, k, v):
    """q (B, H, Lq, D), k (B, H, Lk, D), v (B, H, Lk, Dv) → (B, H, Lq, Dv)."""
    scores = q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v
