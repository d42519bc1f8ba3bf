import numpy as np


def attention(q, k, v, attn_mask=None, return_lse=False):
    """Hidden keys get weight 0, so nothing of them reaches the output."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    maximum = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - maximum)
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = exponentials / total
    if attn_mask is not None:
        weights = weights * attn_mask
    output = weights @ v
    return (output, (maximum + np.log(total))[..., 0]) if return_lse else output
