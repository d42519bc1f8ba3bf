import numpy as np


def attention(q, k, v, is_causal=False, q_offset=0):
    """Query i stands at key position i + q_offset: after a cache, q_offset is its length."""
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    visible = np.ones((Lq, Lk), bool)
    if is_causal:
        visible = np.tril(visible)
    output = np.zeros((B, H, Lq, v.shape[-1]), q.dtype)
    for i in range(Lq):
        seen = visible[i]
        scores = np.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, seen]) / np.sqrt(D)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[:, :, i] = np.einsum("bhj,bhjd->bhd", weights, v[:, :, seen])
    return output
