import numpy as np


def attention(q, k, v, kv_lengths=None, sinks=None, return_lse=False):
    """Padded keys are hidden, and each head has a sink: a score without a value."""
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    lengths = np.full(B, Lk) if kv_lengths is None else kv_lengths
    output = np.zeros((B, H, Lq, v.shape[-1]), q.dtype)
    lse = np.full((B, H, Lq), -np.inf, q.dtype)
    for b, h, i in np.ndindex(B, H, Lq):
        filled = slice(0, min(Lk, lengths[b] + 1))
        scores = k[b, h, filled] @ q[b, h, i] / np.sqrt(D)
        if sinks is None:
            maximum = scores.max()
            total = np.exp(scores - maximum).sum()
        else:
            sink = sinks[h] / np.sqrt(D)
            maximum = max(scores.max(), sink)
            total = np.exp(scores - maximum).sum() + np.exp(sink - maximum)
        output[b, h, i] = np.exp(scores - maximum) @ v[b, h, filled] / total
        lse[b, h, i] = maximum + np.log(total)
    return (output, lse) if return_lse else output
