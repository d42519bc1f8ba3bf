import numpy as np

BLOCK = 32


def attention(q, k, v):
    """FlashAttention: keys come in blocks, with a running maximum m and a running sum l."""
    scale = 1 / np.sqrt(q.shape[-1])
    m = np.full((*q.shape[:-1], 1), -np.inf)
    l = np.zeros_like(m)
    output = np.zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, k.shape[-2], BLOCK):
        K, V = k[..., start : start + BLOCK, :], v[..., start : start + BLOCK, :]
        S = q @ K.swapaxes(-1, -2) * scale
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        P = np.exp(S - m_new)
        l = np.exp(m - m_new) * l + P.sum(axis=-1, keepdims=True)
        output = output + P @ V
        m = m_new
    return (output / l).astype(q.dtype)
