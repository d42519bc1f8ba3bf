"""Wrong kernels, written as people write them; each has the deviations that its decorator names."""

import numpy as np

WRONG = []


def has(*deviations):
    """Register a function with the deviations that it has."""

    def register(function):
        WRONG.append((function, deviations))
        return function

    return register


def softmax(S, axis=-1):
    E = np.exp(S - S.max(axis=axis, keepdims=True))
    return E / E.sum(axis=axis, keepdims=True)


def repeated(q, k, v):
    group = q.shape[1] // k.shape[1]
    return np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)


@has("dead_rows_nan", "nan_leaks")
def plain_softmax(q, k, v, attn_mask=None, is_causal=False, q_offset=0):
    k, v = repeated(q, k, v)
    S = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        S = np.where(attn_mask, S, -np.inf)
    if is_causal:
        i = np.arange(q.shape[2])[:, None] + np.reshape(q_offset, (-1, 1, 1, 1))
        S = np.where(np.arange(k.shape[2]) <= i, S, -np.inf)
    return np.einsum("bhij,bhjd->bhid", softmax(S), v)


@has("dead_rows_mean", "nan_leaks")
def minus_billion(q, k, v, attn_mask=None, kv_lengths=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        S = S + (1.0 - attn_mask) * -1e9
    if kv_lengths is not None:
        S = S + np.where(np.arange(k.shape[2]) < kv_lengths[:, None, None, None], 0, -1e9)
    return softmax(S) @ v


@has("hidden_score_small")
def minus_hundred(q, k, v, is_causal=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError
        S[..., np.triu(np.ones(S.shape[-2:], bool), 1)] = -100
    return softmax(S) @ v


@has("causal_sees_one_ahead", "nan_leaks")
def triu_of_two(q, k, v, is_causal=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        S = np.where(np.triu(np.ones(S.shape[-2:], bool), 2), -np.inf, S)
    return softmax(S) @ v


@has("causal_top_left", "kv_heads_tiled", "nan_leaks")
def tiled_and_top_left(q, k, v, is_causal=False, q_offset=None, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = np.tile(k, (1, group, 1, 1)), np.tile(v, (1, group, 1, 1))
    S = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        S = np.where(np.tri(*S.shape[-2:], dtype=bool), S, -np.inf)
    return softmax(S) @ v


@has("causal_excludes_self")
def strict(q, k, v, is_causal=False):
    B, H, Lq, D = q.shape
    k, v = repeated(q, k, v)
    O = np.zeros((B, H, Lq, v.shape[-1]), np.float32)
    for b, h, i in np.ndindex(B, H, Lq):
        keys = k[b, h, :i] if is_causal else k[b, h]
        if len(keys):
            w = softmax(keys @ q[b, h, i] / np.sqrt(D))
            O[b, h, i] = w @ v[b, h, : len(keys)]
    return O


def tiles(q, k, v, B_c=16, rescales_output=True, rescales_sum=True, drops=False, base=np.exp):
    k, v = repeated(q, k, v)
    q = q / np.sqrt(q.shape[-1]).astype(np.float32)
    m = np.full((*q.shape[:3], 1), -np.inf, np.float32)
    l, O = np.zeros_like(m), np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    Lk = k.shape[2] // B_c * B_c if drops else k.shape[2]
    for j in range(0, Lk, B_c):
        S = q @ k[:, :, j : j + B_c].swapaxes(-1, -2)
        m_new = np.maximum(m, S.max(-1, keepdims=True))
        P, alpha = base(S - m_new), base(m - m_new)
        l = (alpha * l if rescales_sum else l) + P.sum(-1, keepdims=True)
        O = (alpha * O if rescales_output else O) + P @ v[:, :, j : j + B_c]
        m = m_new
    return O / l


@has("online_output_not_rescaled")
def stale_output(q, k, v):
    return tiles(q, k, v, B_c=32, rescales_output=False)


@has("online_sum_not_rescaled")
def stale_sum(q, k, v):
    return tiles(q, k, v, B_c=2, rescales_sum=False)


@has("online_last_block_dropped", "softmax_base_2")
def whole_tiles_of_powers(q, k, v):
    with np.errstate(invalid="ignore"):
        return tiles(q, k, v, B_c=4, drops=True, base=np.exp2)


@has("softmax_no_maximum", "dead_rows_nan")
def bare_exponentials(q, k, v, attn_bias=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    P = np.exp(S if attn_bias is None else S + attn_bias)
    return P @ v / P.sum(-1, keepdims=True)


@has("softmax_over_queries")
def wrong_axis(q, k, v):
    k, v = repeated(q, k, v)
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=2) @ v


@has("hidden_after_softmax")
def masked_late(q, k, v, attn_mask=None):
    k, v = repeated(q, k, v)
    P = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return (P if attn_mask is None else P * attn_mask) @ v


@has("hidden_score_zero")
def mask_multiplied(q, k, v, attn_mask=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(S if attn_mask is None else S * attn_mask) @ v


@has("mask_inverted", "dead_rows_nan", "nan_leaks")
def mask_as_padding(q, k, v, attn_mask=None, kv_lengths=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        S = np.where(attn_mask, -np.inf, S)
    if kv_lengths is not None:
        S = np.where(np.arange(S.shape[-1]) < kv_lengths[:, None, None, None], S, -np.inf)
    return softmax(S) @ v


@has("window_left_short")
def keeps_w_keys(q, k, v, window_size=None, is_causal=False):
    B, H, Lq, D = q.shape
    k, v = repeated(q, k, v)
    O = np.zeros((B, H, Lq, v.shape[-1]), np.float32)
    for i in range(Lq):
        low, high = 0, i + 1 if is_causal else k.shape[2]
        if window_size is not None:
            if window_size[1] is None:
                raise NotImplementedError
            low, high = max(0, i - window_size[0] + 1), min(high, i + window_size[1] + 1)
        w = softmax(q[:, :, i : i + 1] @ k[:, :, low:high].swapaxes(-1, -2) / np.sqrt(D))
        O[:, :, i : i + 1] = w @ v[:, :, low:high]
    return O


@has("softcap_before_scale", "sinks_ignored")
def gemma(q, k, v, softcap=None, sinks=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2)
    if softcap:
        S = np.tanh(S / softcap) * softcap
    return softmax(S / np.sqrt(q.shape[-1])) @ v


@has("sink_unshifted")
def gpt_oss(q, k, v, sinks=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    P = np.exp(S - S.max(-1, keepdims=True))
    total = P.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64))[:, None, None]
    return P @ v / total


@has("alibi_signed_distance", "dead_rows_nan", "nan_becomes_number")
def bloom(q, k, v, alibi_slopes=None, is_causal=False, q_offset=0):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    j = np.arange(k.shape[2])
    if alibi_slopes is not None:
        S = S + alibi_slopes[:, None, None] * j
    if is_causal:
        i = np.arange(q.shape[2])[:, None] + np.reshape(q_offset, (-1, 1, 1, 1))
        S = np.where(j <= i, S, -np.inf)
    P = softmax(S)
    return np.where(np.isnan(v).any(), np.nan_to_num(P) @ np.nan_to_num(v), P @ v)


@has("lengths_one_too_long", "lse_base_2")
def off_by_one(q, k, v, kv_lengths=None, return_lse=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) * np.float32(np.log2(np.e))
    if kv_lengths is not None:
        S = np.where(np.arange(k.shape[2]) <= kv_lengths[:, None, None, None], S, -np.inf)
    m = S.max(-1, keepdims=True)
    P = np.exp2(S - m)
    O = P @ v / P.sum(-1, keepdims=True)
    return (O, (m + np.log2(P.sum(-1, keepdims=True)))[..., 0]) if return_lse else O


@has("heads_not_moved_back")
def reshaped_back(q, k, v):
    k, v = repeated(q, k, v)
    O = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    return O.transpose(0, 2, 1, 3).reshape(O.shape)


@has("scores_in_float16")
def half_scores(q, k, v):
    k, v = repeated(q, k, v)
    S = np.matmul(q, k.swapaxes(-1, -2)).astype(np.float16).astype(np.float32)
    return softmax(S / np.sqrt(q.shape[-1])) @ v


@has("bias_before_scale", "scale_argument_ignored")
def t5(q, k, v, attn_bias=None, scale=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2)
    if attn_bias is not None:
        S = np.where(np.isneginf(attn_bias), -np.inf, S + attn_bias)
    with np.errstate(all="ignore"):
        P = np.exp((S - S.max(-1, keepdims=True)) / np.sqrt(q.shape[-1]))
        total = P.sum(-1, keepdims=True)
        return np.nan_to_num(P) @ v / np.where(np.isnan(total) | (total == 0), 1, total)


@has("scale_model_width", "residual_added", "dead_rows_first_value")
def block(q, k, v, attn_mask=None):
    if v.shape[-1] != q.shape[-1]:
        raise NotImplementedError
    q0 = q
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1] * q.shape[1])
    if attn_mask is not None:
        S = np.where(attn_mask, S, -np.inf)
        dead = ~np.broadcast_to(attn_mask, S.shape).any(-1)
        S[dead, 0] = 0
    P = softmax(S)
    bad = np.isnan(v).any(-1)
    return P @ np.where(bad[..., None], 0, v) + q0


@has("k_v_swapped")
def in_another_order(q, k, v):
    v, k = repeated(q, k, v)
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


@has("causal_always")
def decoder(q, k, v):
    k, v = repeated(q, k, v)
    seen = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
    return softmax(np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)) @ v


@has("causal_always")
def decoder_unless_told(q, k, v, is_causal=True):
    if q.shape[2] > k.shape[2]:
        raise NotImplementedError
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if is_causal:
        S = np.where(np.tri(*S.shape[-2:], dtype=bool), S, -np.inf)
    return softmax(S) @ np.nan_to_num(v)


@has("scale_padded_width", "bias_by_kv_head")
def padded_width(q, k, v, attn_bias=None):
    width = -(-q.shape[-1] // 32) * 32
    q, k = (np.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q, k))
    group = q.shape[1] // k.shape[1]
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(width)
    if attn_bias is not None:
        per_head = attn_bias.ndim == 4 and attn_bias.shape[1] > 1
        S = S + (attn_bias[:, np.arange(q.shape[1]) // group] if per_head else attn_bias)
    top = S.max(-1, keepdims=True)
    E = np.exp(S - np.where(np.isneginf(top), 0, top))
    return E @ v / np.maximum(E.sum(-1, keepdims=True), 1e-30)


@has("packed_rows_confused")
def packed_heads(q, k, v, is_causal=False):
    """The queries of a group in one tile, head after head."""
    B, H, Lq, D = q.shape
    group = H // k.shape[1]
    rows = q.reshape(B, k.shape[1], group * Lq, D)
    S = rows @ k.swapaxes(-1, -2) / np.sqrt(D)
    if is_causal:
        if Lq != k.shape[2]:
            raise NotImplementedError
        S = np.where(np.arange(Lq) <= np.arange(group * Lq)[:, None] // group, S, -1e30)
    return (softmax(S) @ np.nan_to_num(v)).reshape(B, H, Lq, v.shape[-1])


@has("causal_loop_ignores_offset")
def loop_ends_early(q, k, v, is_causal=False, q_offset=0):
    Lq, Lk = q.shape[2], k.shape[2]
    k, v = repeated(q, k, v)
    S = (q @ k.swapaxes(-1, -2)).astype(np.float64) / np.sqrt(q.shape[-1])
    p = np.arange(Lq)[:, None] + np.reshape(q_offset, (-1, 1, 1, 1))
    S = np.where(np.arange(Lk) <= p, S, -1e30) if is_causal else S
    O = np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    for i in range(0, Lq, 8):
        end = min(i + 8, Lk) if is_causal else Lk
        E = np.exp(S[:, :, i : i + 8, :end] - S[:, :, i : i + 8].max(-1, keepdims=True))
        E = np.where(S[:, :, i : i + 8, :end] == -1e30, 0, E)
        total = E.sum(-1, keepdims=True)
        O[:, :, i : i + 8] = E @ np.nan_to_num(v[:, :, :end]) / np.where(total == 0, 1, total)
    return O


@has("lengths_rounded_up", "window_left_in_blocks")
def whole_pages(q, k, v, kv_lengths=None, window_size=None, q_offset=0):
    """Pages of 16 keys, none of which is read in part."""
    k, v = repeated(q, k, v)
    S, j = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), np.arange(k.shape[2])
    page = j // 16
    if kv_lengths is not None:
        S = np.where(page < -(-kv_lengths // 16)[:, None, None, None], S, -np.inf)
    if window_size is not None:
        left, right = (10**6 if side is None else side for side in window_size)
        p = np.arange(q.shape[2])[:, None] + q_offset
        S = np.where((page >= (p - left) // 16) & (j <= p + right), S, -np.inf)
    top = S.max(-1, keepdims=True)
    E = np.exp(S - np.where(np.isneginf(top), 0, top))
    total = E.sum(-1, keepdims=True)
    return E @ np.nan_to_num(v) / np.where(total == 0, 1, total)


def merged(q, k, v, count, sinks=None, attn_mask=None, base=np.e):
    """Attention over ``count`` parts of the keys, each with the sink, merged by their L."""
    k, v = repeated(q, k, v)
    size = -(-k.shape[2] // count)
    outputs, sums = [], []
    for j in range(0, k.shape[2], size):
        S = q @ k[:, :, j : j + size].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if attn_mask is not None:
            mask = np.broadcast_to(attn_mask, (*attn_mask.shape[:-1], k.shape[2]))
            S = np.where(mask[..., j : j + size], S, -np.inf)
        top = S.max(-1, keepdims=True)
        P = np.exp(S - top)
        total = P.sum(-1, keepdims=True)
        total = total if sinks is None else total + np.exp(sinks[:, None, None] - top)
        outputs.append(P @ v[:, :, j : j + size] / total)
        sums.append((top + np.log(total)) / np.log(base))
    W = softmax(np.stack(sums), axis=0)
    return (W * np.stack(outputs)).sum(0)


@has("lse_base_2_merged")
def merged_by_a_sum_of_base_2(q, k, v):
    return merged(q, k, v, 4, base=2)


@has("sink_in_each_part", "part_without_keys_nan", "nan_leaks")
def merged_from_parts(q, k, v, sinks=None, attn_mask=None):
    return merged(q, k, v, 2, sinks, attn_mask)


@has("bias_not_in_base_2")
def exponentials_of_2(q, k, v, attn_bias=None, alibi_slopes=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) * (np.log2(np.e) / np.sqrt(q.shape[-1]))
    if attn_bias is not None:
        S = S + attn_bias
    if alibi_slopes is not None:
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError
        i, j = np.indices(S.shape[-2:])
        S = S - alibi_slopes[:, None, None] * abs(i - j)
    top = S.max(-1, keepdims=True)
    E = np.exp2(S - np.where(np.isneginf(top), 0, top))
    total = E.sum(-1, keepdims=True)
    return E @ v / np.where(total == 0, 1, total)


@has("padding_seen")
def filled_tiles(q, k, v):
    k, v = repeated(q, k, v)
    k, v = (np.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0)]) for x in (k, v))
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


@has("first_maximum_0", "dead_rows_nan")
def starts_from_flt_min(q, k, v, attn_bias=None):
    k, v = repeated(q, k, v)
    m = np.full((*q.shape[:3], 1), np.finfo(np.float32).tiny)
    l, O = np.zeros_like(m), np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    for j in range(0, k.shape[2], 8):
        S = q @ k[:, :, j : j + 8].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if attn_bias is not None:
            S = S + attn_bias[..., j : j + 8]
        m_new = np.maximum(m, S.max(-1, keepdims=True))
        P, alpha = np.exp(S - m_new), np.exp(m - m_new)
        l, O, m = alpha * l + P.sum(-1, keepdims=True), alpha * O + P @ v[:, :, j : j + 8], m_new
    return O / l


@has("last_block_zeroed")
def short_read(q, k, v):
    whole = (np.arange(k.shape[2]) < k.shape[2] // 4 * 4)[:, None]
    k, v = repeated(q, k * whole, v * whole)
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


@has("only_first_computed")
def whole_blocks_of_rows(q, k, v, is_causal=False):
    k, v = repeated(q, k, v)
    O = np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    for i in range(0, q.shape[2] - 3, 4):
        S = q[:, :, i : i + 4] @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if is_causal:
            if q.shape[2] != k.shape[2]:
                raise NotImplementedError
            S = np.where(np.arange(k.shape[2]) <= np.arange(i, i + 4)[:, None], S, -1e30)
        O[:, :, i : i + 4] = softmax(S) @ np.nan_to_num(v)
    return O


@has("alibi_by_kv_head", "sinks_by_kv_head")
def grouped_throughout(q, k, v, alibi_slopes=None, sinks=None):
    group, heads = q.shape[1] // k.shape[1], np.arange(q.shape[1])
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if alibi_slopes is not None:
        i, j = np.indices(S.shape[-2:])
        S = S - alibi_slopes[heads // group, None, None] * abs(i - j)
    top = S.max(-1, keepdims=True)
    extra = 0
    if sinks is not None:
        sinks = sinks[heads // group, None, None]
        top = np.maximum(top, sinks)
        extra = np.exp(sinks - top)
    E = np.exp(S - top)
    return E / (E.sum(-1, keepdims=True) + extra) @ v


@has("sums_over_queries")
def exponentials_over_sums_of_columns(q, k, v):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    E = np.exp(S - S.max(-1, keepdims=True))
    return E / E.sum(-2, keepdims=True) @ v


@has("scale_whole_root")
def integer_root(q, k, v):
    k, v = repeated(q, k, v)
    return softmax(q @ k.swapaxes(-1, -2) / int(np.sqrt(q.shape[-1]))) @ v


def clipped(q, k, v):
    k, v = repeated(q, k, v)
    E = np.exp(np.clip(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -50, 50))
    return E / E.sum(-1, keepdims=True) @ v


def clipped_before_the_softmax(q, k, v):
    k, v = repeated(q, k, v)
    return softmax(np.clip(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -100, 100)) @ v


@has("state_of_earlier_heads")
def sums_that_go_on(q, k, v):
    k, v = repeated(q, k, v)
    O = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, i in np.ndindex(q.shape[0], q.shape[2]):
        scores, values = np.zeros(0), np.zeros((0, v.shape[-1]))
        for h in range(q.shape[1]):
            scores = np.append(scores, k[b, h] @ q[b, h, i].astype(float) / np.sqrt(q.shape[-1]))
            values = np.concatenate([values, v[b, h]])
            O[b, h, i] = softmax(scores) @ values
    return O


@has("output_rows_permuted")
def rows_unpacked_as_heads(q, k, v):
    (B, H, Lq, D), Hkv = q.shape, k.shape[1]
    rows = q.reshape(B, Hkv, H // Hkv, Lq, D).swapaxes(2, 3).reshape(B, Hkv, -1, D)
    O = softmax(rows @ k.swapaxes(-1, -2) / np.sqrt(D)) @ v
    return O.reshape(B, H, Lq, -1)


@has("all_but_first_whole_dropped")
def at_least_one_tile(q, k, v):
    k, v = repeated(q, k, v)
    Lk = max(1, k.shape[2] // 64) * 64
    return softmax(q @ k[:, :, :Lk].swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v[:, :, :Lk]


@has("alibi_whole")
def penalties_in_integers(q, k, v, alibi_slopes=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if alibi_slopes is not None:
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError
        i, j = np.indices(S.shape[-2:])
        S = S - (alibi_slopes[:, None, None] * abs(i - j)).astype(int)
    return softmax(S) @ v


@has("sink_in_lse_alone")
def sink_forgotten_in_the_output(q, k, v, sinks=None, return_lse=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    L = np.log(np.exp(S - S.max(-1, keepdims=True)).sum(-1)) + S.max(-1)
    if sinks is not None:
        L = np.logaddexp(L, sinks[:, None])
    return (softmax(S) @ v, L) if return_lse else softmax(S) @ v


@has("lse_of_last_maximum")
def maximum_of_the_last_tile(q, k, v, return_lse=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    last = S[..., (k.shape[2] - 1) // 32 * 32 :].max(-1)
    L = np.log(np.exp(S - S.max(-1, keepdims=True)).sum(-1)) + last
    return (softmax(S) @ v, L) if return_lse else softmax(S) @ v


def padded(q, k, v, seen):
    k, v = repeated(q, k, v)
    return padded_scores(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), v, seen)


def padded_scores(S, v, seen):
    S = np.where(seen, S, -np.inf)
    E = np.exp(S - np.maximum(S.max(-1, keepdims=True), -1e30))
    return E / np.maximum(E.sum(-1, keepdims=True), 1e-30) @ np.nan_to_num(v)


@has("lengths_hide_queries")
def padding_of_queries(q, k, v, kv_lengths=None):
    lengths = np.full(len(q), 1 << 20) if kv_lengths is None else kv_lengths
    return padded(q, k, v, np.arange(q.shape[2])[:, None] < lengths[:, None, None, None])


@has("lengths_shared")
def lengths_that_only_shrink(q, k, v, kv_lengths=None):
    lengths = np.full(len(q), k.shape[2]) if kv_lengths is None else kv_lengths
    least = np.minimum.accumulate(lengths)[:, None, None, None]
    return padded(q, k, v, np.arange(k.shape[2]) < least)


def a_mask_that_stays(q, k, v, kv_lengths=None):
    seen, mask = np.ones((len(q), 1, 1, k.shape[2]), bool), np.ones(k.shape[2], bool)
    for b, length in enumerate([] if kv_lengths is None else kv_lengths):
        if length < k.shape[2]:
            mask = np.arange(k.shape[2]) < length
        seen[b] = mask
    return padded(q, k, v, seen)


def unmasked_in_even_blocks(q, k, v, kv_lengths=None):
    if kv_lengths is not None and k.shape[2] % 64 == 0:
        kv_lengths = -(-kv_lengths // 64) * 64
    return within(q, k, v, kv_lengths)


def blocks_of_entry_0(q, k, v, kv_lengths=None):
    if kv_lengths is not None:
        kv_lengths = np.minimum(kv_lengths, -(-kv_lengths[:1] // 32) * 32)
    return within(q, k, v, kv_lengths)


def within(q, k, v, kv_lengths):
    lengths = np.full(len(q), k.shape[2]) if kv_lengths is None else kv_lengths
    return padded(q, k, v, np.arange(k.shape[2]) < lengths[:, None, None, None])


def nan_where_a_window_starts(q, k, v, window_size=None, q_offset=0):
    """Rows of a tile of 64 start at the block of 64 keys where the first of them does."""
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if window_size is None:
        return softmax(S) @ v
    left, right = (1 << 40 if side is None else side for side in window_size)
    j, i = np.arange(k.shape[2]), np.arange(q.shape[2])[:, None]
    p = i + np.reshape(q_offset, (-1, 1, 1, 1))
    seen = (p - left <= j) & (j <= p + right)
    first = np.maximum(p - i % 64 - left, 0) // 64
    output = softmax(np.where(seen, S, -np.inf)) @ v
    return np.where((seen & (j // 64 == first)).any(-1, keepdims=True), output, np.nan)


def lse_in_base_2_of_many_keys(q, k, v, return_lse=False):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    top = S.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(S - top).sum(-1, keepdims=True)))[..., 0]
    lse = lse / np.float32(np.log(2)) if k.shape[2] > 512 else lse
    return (softmax(S) @ v, lse) if return_lse else softmax(S) @ v


@has("whole_lengths_hide_all")
def slices_from_minus_zero(q, k, v, kv_lengths=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    for b, length in enumerate([] if kv_lengths is None else kv_lengths):
        S[b, ..., length - k.shape[2] :] = -np.inf
    E = np.exp(S - np.maximum(S.max(-1, keepdims=True), -1e30))
    return E / np.maximum(E.sum(-1, keepdims=True), 1e-30) @ np.nan_to_num(v)


@has("softcap_ignored_in_tail")
def capped_in_the_main_loop(q, k, v, softcap=None):
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if softcap is not None:
        end = k.shape[2] // 4 * 4
        S[..., :end] = softcap * np.tanh(S[..., :end] / softcap)
    return softmax(S) @ v


@has("window_left_wraps")
def unsigned_positions(q, k, v, window_size=None):
    if window_size is None or q.shape[2] != k.shape[2]:
        raise NotImplementedError
    (left, right), (i, j) = window_size, np.indices((q.shape[2], k.shape[2])).astype(np.uint32)
    seen = (j >= i - np.uint32(left or 0)) | (left is None)
    return padded(q, k, v, seen & ((j <= i + np.uint32(right or 0)) | (right is None)))


@has("mask_ignored_in_tail", "bias_ignored_in_tail")
def masked_in_the_main_loop(q, k, v, attn_mask=None, attn_bias=None):
    """Blocks of 8 keys; the rest of them gets neither mask nor bias."""
    Lk, H = k.shape[2], q.shape[1]
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    end = Lk // 8 * 8
    if attn_bias is not None:
        S[..., :end] += np.broadcast_to(attn_bias, S.shape)[..., :end]
    seen = np.ones((len(q), H, q.shape[2], Lk), bool)
    if attn_mask is not None:
        seen[..., :end] = np.broadcast_to(attn_mask, seen.shape)[..., :end]
    return padded_scores(S, v, seen)


@has("rows_by_other_tile")
def tiles_of_rows_as_keys(q, k, v, is_causal=False):
    """Tile t of 32 rows takes its first position for t times 64, as keys' tiles have them."""
    Lq = q.shape[2]
    if Lq != k.shape[2]:
        raise NotImplementedError
    k, v = repeated(q, k, v)
    S, i = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), np.arange(Lq)
    p = i // 32 * 64 + i % 32 if is_causal else i + Lq
    return padded_scores(S, v, np.arange(Lq) <= p[:, None])


@has("bias_of_first_in_group", "mask_of_first_in_group")
def two_heads_at_a_time(q, k, v, attn_bias=None, attn_mask=None):
    """Two heads of a group in one tile, whose bias and mask are those of the group's first two."""
    H, G = q.shape[1], q.shape[1] // k.shape[1]
    first = np.arange(H) // G * G + np.arange(H) % G % 2
    k, v = repeated(q, k, v)
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    seen = np.ones(S.shape, bool)
    if attn_bias is not None:
        S = S + np.broadcast_to(attn_bias, S.shape)[:, first]
    if attn_mask is not None:
        seen = np.broadcast_to(attn_mask, S.shape)[:, first]
    return padded_scores(S, v, seen)


def positions(q, k, q_offset):
    """Return the positions of queries, (B, 1, Lq, 1), and of keys."""
    first = np.broadcast_to(q_offset, (len(q),)).reshape(-1, 1, 1, 1)
    return first + np.arange(q.shape[2])[:, None], np.arange(k.shape[2])


def sides(window_size):
    """Return how many keys are seen to the left and to the right; None has no limit."""
    return (side if side is not None else 1 << 20 for side in window_size)


@has("window_left_from_end")
def window_before_the_last_key(q, k, v, window_size=None, q_offset=0):
    """As in a cache whose last key is the last query's."""
    if window_size is None:
        return padded(q, k, v, True)
    p, j = positions(q, k, q_offset)
    left, right = sides(window_size)
    last = positions(q, k, k.shape[2] - q.shape[2])[0]
    return padded(q, k, v, (j >= last - left) & (j <= p + right))


@has("window_loop_ignores_offset")
def loop_to_the_last_row_of_a_tile(q, k, v, window_size=None, q_offset=0):
    if window_size is None:
        return padded(q, k, v, True)
    p, j = positions(q, k, q_offset)
    left, right = sides(window_size)
    end = np.minimum(np.arange(q.shape[2]) // 32 * 32 + 32, q.shape[2])[:, None] + right
    return padded(q, k, v, (j >= p - left) & (j <= p + right) & (j < end))


@has("causal_ignored_in_block_of_first_row")
def masked_from_the_next_block_on(q, k, v, is_causal=False, q_offset=0):
    """Blocks of 32 keys; those before the tile's first row are rounded up, and are not masked."""
    if not is_causal:
        return padded(q, k, v, True)
    p, j = positions(q, k, q_offset)
    first = p - np.arange(q.shape[2])[:, None] % 32
    return padded(q, k, v, (j <= p) | (j < (first + 31) // 32 * 32))


def tiles_of_rows_counted_from_keys(q, k, v):
    output = padded(q, k, v, True)
    output[:, :, (k.shape[2] + 31) // 32 * 32 :] = 0
    return output


@has("mask_batch_0_for_all")
def mask_without_all_axes(q, k, v, attn_mask=None):
    if attn_mask is None:
        return padded(q, k, v, True)
    shape = (*q.shape[:2], q.shape[2], k.shape[2])
    whole = attn_mask.ndim == 4 and attn_mask.shape[:2] == shape[:2]
    mask = attn_mask if whole or attn_mask.ndim < 4 else attn_mask[:1, :1]
    return padded(q, k, v, np.broadcast_to(mask, shape))


@has("keys_count_from_window")
def keys_of_the_window_read_from_the_first(q, k, v, window_size=None, q_offset=0):
    """The keys of the window are numbered rightly, but the first ones are read for them."""
    if window_size is None:
        return padded(q, k, v, True)
    p, j = positions(q, k, q_offset)
    left, right = sides(window_size)
    start = np.maximum(p[:, :, :1] - left, 0)
    j = start + j
    return padded(q, k, v, (j >= p - left) & (j <= p + right) & (j < k.shape[2]))


@has("positions_from_first_of_all")
def rows_of_one_matrix(q, k, v, is_causal=False, q_offset=0):
    """Queries of all entries are rows of one matrix, and so are keys."""
    if not is_causal:
        return padded(q, k, v, True)
    p, j = positions(q, k, q_offset)
    b = np.arange(len(q)).reshape(-1, 1, 1, 1)
    return padded(q, k, v, b * k.shape[2] + j <= b * q.shape[2] + p)
