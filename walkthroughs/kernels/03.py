import numpy as np


def attention(q, k, v, attn_mask=None):
    """Where attn_mask is True, the score is replaced by minus infinity."""
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    mask = np.zeros((Lq, Lk), bool) if attn_mask is None else attn_mask
    mask = np.broadcast_to(mask, (B, H, Lq, Lk))
    output = np.zeros((B, H, Lq, v.shape[-1]), q.dtype)
    for b, h, i in np.ndindex(B, H, Lq):
        kept = ~mask[b, h, i]
        if kept.any():
            scores = k[b, h, kept] @ q[b, h, i] / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            output[b, h, i] = weights / weights.sum() @ v[b, h, kept]
    return output
