"""Attention one number at a time: the oracle that the NumPy implementations are checked against.

Everything here is a Python float in a nested list, every sum is a `math.fsum`, and a key that a
query does not see is skipped instead of being multiplied by zero. It is slow, and meant to be read.

Infinities of both signs meeting in one sum raise ValueError, as `math.fsum` does.
"""

from math import exp, fsum, inf, log, nan, sqrt, tanh


def sees(p, j, *, is_causal, window, length, mask, bias):
    """Tell whether the query at key position `p` may attend to key `j`.

    `mask` and `bias` are this query's rows; None, here and below, stands for "no such limit".
    """
    left, right = window
    return (
        (not is_causal or j <= p)
        and (left is None or p - left <= j)
        and (right is None or j <= p + right)
        and (length is None or j < length)
        and (mask is None or mask[j])
        and (bias is None or bias[j] != -inf)
    )


def score(query, key, *, distance, scale, softcap, bias, slope, modify):
    """Return the score of one query and one key: scaled, capped, biased and modified."""
    if scale is None:
        scale = 1 / sqrt(len(query))
    s = scale * fsum(a * b for a, b in zip(query, key, strict=True))
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    if bias is not None:
        s += bias
    if slope is not None:
        s -= slope * distance
    return s if modify is None else modify(s)


def row(scores, values, width, sink=-inf):
    """Return the softmax-weighted mean of `values`, a list of `width`, and the log-sum-exp.

    The sink takes part in the softmax but brings no value. A score of -inf has no part in either,
    so its value is left out; where nothing remains, the output is zeros and the log-sum-exp -inf.
    """
    terms = [(s, value) for s, value in zip(scores, values, strict=True) if s != -inf]
    if not terms and sink == -inf:
        return [0.0] * width, -inf
    top = max([sink, *(s for s, _ in terms)])
    total = fsum([exp(sink - top), *(exp(s - top) for s, _ in terms)])
    weighted = [(exp(s - top) / total, value) for s, value in terms]
    output = [fsum(weight * value[d] for weight, value in weighted) for d in range(width)]
    return output, top + log(total)


def attention(
    q,
    k,
    v,
    *,
    is_causal=False,
    q_offset=None,
    window_size=None,
    attn_mask=None,
    attn_bias=None,
    kv_lengths=None,
    key_indices=None,
    alibi_slopes=None,
    scale=None,
    softcap=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    value_width=None,
    k_scale=None,
    v_scale=None,
):
    """Return scaled dot-product attention and its log-sum-exp, `(output, lse)`.

    Parameters
    ----------
    q, k, v
        Queries (B, H, Lq, D), keys (B, Hkv, Lk, D) and values (B, Hkv, Lk, Dv). Query head `h` uses
        key/value head `h // (H // Hkv)`.
    is_causal
        Hide every key after the query's own position.
    q_offset
        Query `i` is at key position `i + q_offset`: one int, or one for each of the B items.
    window_size
        `(left, right)`: how far a query sees to each side, inclusive; None means no limit.
    attn_mask, attn_bias
        Full (B, H, Lq, Lk). True may attend; a bias is added to the score, and -inf hides the key.
    kv_lengths
        For each of the B items, the number of leading keys that exist.
    key_indices
        Full (B, Hkv, Lq, K): the keys that each query picks, in any order; -1 is none.
    alibi_slopes
        For each of the H heads, what each step of distance subtracts from the score.
    scale, softcap
        The factor on the dot product (None is 1 / sqrt(D)), and the bound `c` in `c * tanh(s / c)`.
    sinks
        For each of the H heads, the score of a key without a value.
    score_mod, mask_mod
        `score_mod(score, b, h, p, j)` returns the new score, `mask_mod(b, h, p, j)` tells whether
        the query at key position `p` may attend to key `j`.
    value_width
        Dv, needed only where Lk is 0 and no value is there to show it.
    k_scale, v_scale
        What the numbers of a key or value are multiplied by: a number, one for each of the Hkv
        heads, or (B, Hkv, Lk).

    Returns
    -------
    output, lse
        Nested lists, (B, H, Lq, Dv) and (B, H, Lq).
    """

    def attend(b, h, i):
        group = len(q[b]) // len(k[b])
        query = q[b][h][i]
        keys, values = scaled(k, k_scale, b, h // group), scaled(v, v_scale, b, h // group)
        p = i + (q_offset[b] if isinstance(q_offset, list) else q_offset or 0)
        mask, bias = at(attn_mask, b, h, i), at(attn_bias, b, h, i)
        limits = {
            "is_causal": is_causal,
            "window": window_size or (None, None),
            "length": at(kv_lengths, b),
            "mask": mask,
            "bias": bias,
        }
        seen = [j for j in range(len(keys)) if sees(p, j, **limits)]
        picked = at(key_indices, b, h // group, i)
        seen = [j for j in seen if picked is None or j in picked]
        seen = [j for j in seen if mask_mod is None or mask_mod(b, h, p, j)]
        scores = [
            score(
                query,
                keys[j],
                distance=abs(p - j),
                scale=scale,
                softcap=softcap,
                bias=at(bias, j),
                slope=at(alibi_slopes, h),
                modify=score_mod and (lambda s, j=j: score_mod(s, b, h, p, j)),
            )
            for j in seen
        ]
        width = len(values[0]) if values else value_width
        sink = -inf if sinks is None else sinks[h]
        return row(scores, [values[j] for j in seen], width, sink)

    return for_each_query(q, attend)


def merge(parts):
    """Return the `(output, lse)` over all keys from those over disjoint sets of them.

    A part counts as one key: its log-sum-exp is the score, its output the value. A sink must have
    been given to one part only.
    """

    def attend(b, h, i):
        outputs = [output[b][h][i] for output, _ in parts]
        return row([lse[b][h][i] for _, lse in parts], outputs, len(outputs[0]))

    return for_each_query(parts[0][0], attend)


def scaled(x, scale, b, h):
    """Return the keys or values of one head, each number multiplied by its scale."""
    if scale is None:
        return x[b][h]
    of_token = scale
    if isinstance(scale, list):
        of_token = scale[b][h] if isinstance(scale[0], list) else scale[h]
    if not isinstance(of_token, list):
        of_token = [of_token] * len(x[b][h])
    return [[s * number for number in row] for s, row in zip(of_token, x[b][h], strict=True)]


def float8(bits):
    """Return the number of a float8_e4m3fn: 1 bit for the sign, 4 for the exponent, 3 digits."""
    exponent, digits = bits >> 3 & 15, bits & 7
    if exponent == 15 and digits == 7:
        return nan
    size = (1 + digits / 8) * 2.0 ** (exponent - 7) if exponent else digits / 8 * 2.0**-6
    return -size if bits >> 7 else size


def for_each_query(q, attend):
    """Collect the pairs `attend(b, h, i)`, one for each query in `q`, into two nested lists."""
    pairs = [
        [[attend(b, h, i) for i in range(len(q[b][h]))] for h in range(len(q[b]))]
        for b in range(len(q))
    ]
    output, lse = ([[[pair[n] for pair in x] for x in head] for head in pairs] for n in (0, 1))
    return output, lse


def at(table, *index):
    """Return `table[i][j]...`, or None where there is no table."""
    for i in index:
        table = None if table is None else table[i]
    return table
