import numpy as np


def attention(q, k, v, is_causal=False, window_size=None, q_offset=0):
    """Prefill with a window; a single query, which decodes, needs no mask of positions."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    i, j = np.indices(scores.shape[-2:])
    i = i + np.reshape(q_offset, (-1, 1, 1, 1))
    visible = j <= i if is_causal else np.full(i.shape, True)
    if window_size is not None and q.shape[2] > 1:
        left, right = (len(j.T) if side is None else side for side in window_size)
        visible = visible & (j >= i - left) & (j <= i + right)
    scores = np.where(visible, scores, -np.inf)
    top = np.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v
