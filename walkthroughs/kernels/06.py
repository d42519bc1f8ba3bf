import numpy as np


def attention(q, k, v, is_causal=False, window_size=(None, None)):
    """A window (left, right) leaves each query its own key, left before it and right after it."""
    B, H, Lq, D = q.shape
    Lk = k.shape[2]
    left, right = window_size
    output = np.zeros((B, H, Lq, v.shape[-1]), q.dtype)
    for i in range(Lq):
        first = 0 if left is None else max(0, i - left + 1)
        stop = Lk if right is None else i + right + 1
        stop = min(stop, i + 1) if is_causal else stop
        scores = np.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, first:stop]) / np.sqrt(D)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[:, :, i] = np.einsum("bhj,bhjd->bhd", weights, v[:, :, first:stop])
    return output
