"""The layers of gpt-oss, DeepSeek-V3.2 and Qwen3-Next, computed again in loops over numbers.

Of the traces, only embeddings, weights and sinks are used.
"""

from math import cos, exp, inf, log, sin, sqrt

import numpy as np
import pytest

from minimha.examples import EXAMPLES
from minimha.explain.written import cell

TRACES = {name: EXAMPLES[name].trace() for name in ("gpt-oss", "deepseek-v3.2", "qwen3-next")}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def times(row, W, b=None):
    y = [dot(row, column) for column in np.asarray(W).T.tolist()]
    return y if b is None else plus(y, b.tolist())


def rms(row, gain, epsilon):
    size = sqrt(sum(x * x for x in row) / len(row) + epsilon)
    return [g * x / size for x, g in zip(row, gain, strict=True)]


def layer_norm(row, gain, bias, epsilon):
    mean = sum(row) / len(row)
    size = sqrt(sum((x - mean) ** 2 for x in row) / len(row) + epsilon)
    return [g * (x - mean) / size + b for x, g, b in zip(row, gain, bias, strict=True)]


def turned(pair, position):
    a, b = pair
    return [
        a * cos(position) - b * sin(position), b * cos(position) + a * sin(position)
    ]  # fmt: skip


def sigmoid(x):
    return 1 / (1 + exp(-x))


def read(scores, values, sink=-inf):
    """The mean of ``values`` (a dict by key) with the softmax of ``scores`` (by key too)."""
    total = exp(sink) + sum(exp(s) for s in scores.values())
    width = len(next(iter(values.values())))
    return [sum(exp(s) / total * values[j][d] for j, s in scores.items()) for d in range(width)]


def assert_rows(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_gpt_oss():
    t = TRACES["gpt-oss"]
    x, wanted = t["x"].tolist(), []
    normed = [rms(row, t["norm_gain"], 1e-5) for row in x]
    keys = [turned(times(row, t["W_k"], t["b_k"]), j) for j, row in enumerate(normed)]
    values = dict(enumerate(times(row, t["W_v"], t["b_v"]) for row in normed))
    for i, row in enumerate(normed):
        heads = []
        for h, sink in enumerate((0.0, 1.0)):
            q = turned(times(row, t["W_q"][h], t["b_q"][h]), i)
            seen = range(max(0, i - 2), i + 1)
            heads += read({j: dot(q, keys[j]) / sqrt(2) for j in seen}, values, sink)
        z = plus(x[i], times(heads, t["W_o"], t["b_o"]))
        inner = rms(z, t["added_norm_gain"], 1e-5)
        gates = [min(g, 3) for g in times(inner, t["W_gate"], t["b_gate"])]
        wide = [max(-3, min(u, 3)) + 1 for u in times(inner, t["W_in"], t["b_in"])]
        through = [g * sigmoid(1.702 * g) * u for g, u in zip(gates, wide, strict=True)]
        wanted.append(plus(z, times(through, t["W_out"], t["b_out"])))
    assert_rows(t["residual"], wanted)


def test_gpt_oss_shows_a_window_sinks_and_numbers_that_are_clipped():
    t = TRACES["gpt-oss"]
    seen = [[i - 2 <= j <= i for j in range(5)] for i in range(5)]
    np.testing.assert_array_equal(np.isfinite(t["masked"]), [seen, seen])
    assert (t["weights"].sum(axis=-1) < 1).all()
    assert (t["gate_input"] > 3).any()
    assert (t["gate_limited"] < -3).any()
    assert (abs(t["expanded"]) > 3).any()


def deepseek_picks(t, normed, latents):
    """For each query, the two keys with the largest index scores."""
    keys = []
    for j, row in enumerate(normed):
        k = layer_norm(times(row, t["W_ik"]), t["index_down_norm_gain"], [0, 0, 0], 1e-6)
        keys.append([*turned(k[:2], j), k[2]])
    for i, (row, c) in enumerate(zip(normed, latents, strict=True)):
        scores = dict.fromkeys(range(i + 1), 0.0)
        for W, w in zip(t["W_iq"], times(row, t["W_iw"]), strict=True):
            q = times(c, W)
            q = [*turned(q[:2], i), q[2]]
            for j in scores:
                scores[j] += w / sqrt(2) * max(dot(q, keys[j]) / sqrt(3), 0)
        yield scores, sorted(sorted(scores), key=lambda j: -scores[j])[:2]


def test_deepseek():
    t = TRACES["deepseek-v3.2"]
    x, wanted = t["x"].tolist(), []
    normed = [rms(row, t["norm_gain"], 1e-5) for row in x]
    latents = [rms(times(row, t["W_dq"]), [1, 1], 1e-6) for row in normed]
    kept = [rms(times(row, t["W_dkv"]), [1, 1], 1e-6) for row in normed]
    shared = [turned(times(row, t["W_kr"]), j) for j, row in enumerate(normed)]
    for i, (scores, picks) in enumerate(deepseek_picks(t, normed, latents)):
        assert_rows(t["index_visible"].reshape(5, 5)[i, : i + 1], list(scores.values()))
        assert t["key_indices"].reshape(5, 2)[i].tolist() == (picks if i else [0, -1])
        heads = []
        for h in (0, 1):
            q = times(latents[i], t["W_uq"][h])
            q = [*q[:2], *turned(q[2:], i)]
            by_key = {j: dot(q, times(kept[j], t["W_uk"][h]) + shared[j]) / 2 for j in picks}
            heads += read(by_key, {j: times(kept[j], t["W_uv"][h]) for j in picks})
        z = plus(x[i], times(heads, t["W_o"]))
        inner = rms(z, t["added_norm_gain"], 1e-5)
        gates, wide = times(inner, t["W_gate"]), times(inner, t["W_in"])
        through = [g * sigmoid(g) * u for g, u in zip(gates, wide, strict=True)]
        wanted.append(plus(z, times(through, t["W_out"])))
    assert_rows(t["residual"], wanted)


def test_deepseek_picks_a_key_farther_away_than_the_last_two_and_settles_a_tie():
    t = TRACES["deepseek-v3.2"]
    scores, picks = t["index_visible"].reshape(5, 5), t["key_indices"].reshape(5, 2)
    assert picks[2].tolist() == [2, 0]
    assert scores[4].tolist().count(0) == 3
    assert picks[4].tolist() == [1, 3]
    assert (t["index_weights"] < 0).any()


def test_qwen3_next_remembers_token_by_token():
    t = TRACES["qwen3-next"]
    x, wanted = t["x"].tolist(), []
    memory = np.zeros((2, 2, 2)).tolist()  # a matrix for each head: row d, column of a value
    before = [0.0] * 8
    for n, row in enumerate(rms(row, t["norm_gain"], 1e-5) for row in x):
        now, gated = times(row, t["W_qkv"]), []
        mixed = [a * w[0] + b * w[1] for a, b, w in zip(before, now, t["conv"], strict=True)]
        mixed, before = [a * sigmoid(a) for a in mixed], now
        q, k = ([a / sqrt(dot(y, y) + 1e-6) for a in y] for y in (mixed[:2], mixed[2:4]))
        z = times(row, t["W_z"])
        for h in (0, 1):
            rate = log(1 + exp(dot(row, t["W_a"][:, h]) + t["dt_bias"][h]))
            alpha = exp(-exp(t["A_log"][h]) * rate)
            beta = sigmoid(dot(row, t["W_b"][h][:, 0]))
            S, v = [[alpha * s for s in line] for line in memory[h]], mixed[4 + 2 * h : 6 + 2 * h]
            u = [beta * (v[e] - sum(S[d][e] * k[d] for d in (0, 1))) for e in (0, 1)]
            memory[h] = S = [[S[d][e] + k[d] * u[e] for e in (0, 1)] for d in (0, 1)]
            assert_rows(t[f"correction[t={n}]"].reshape(2, 2)[h], u)
            assert_rows(t[f"state[t={n}]"].reshape(2, 2, 2)[h], S)
            o = [sum(S[d][e] * q[d] for d in (0, 1)) / sqrt(2) for e in (0, 1)]
            gates = [a * sigmoid(a) for a in z[2 * h : 2 * h + 2]]
            gated += [a * b for a, b in zip(rms(o, t["g_o"], 1e-6), gates, strict=True)]
        wanted.append(plus(x[n], times(gated, t["W_o"])))
    assert_rows(t["added"], wanted)


def test_qwen3_next_gates_its_full_attention():
    t = TRACES["qwen3-next"]
    own = {n.partition("[")[0]: t[n] for n in t if n.endswith("[full attention]")}
    x, wanted = t["added"].tolist(), []
    normed = [rms(row, own["norm_gain"], 1e-5) for row in x]
    W_q, W_k, W_v = (own[name].reshape(4, 2) for name in ("W_q", "W_k", "W_v"))
    keys = [turned(rms(times(row, W_k), [1, 1], 0), j) for j, row in enumerate(normed)]
    values = {j: times(row, W_v) for j, row in enumerate(normed)}
    for i, row in enumerate(normed):
        q = turned(rms(times(row, W_q), [1, 1], 0), i)
        head = read({j: dot(q, keys[j]) / sqrt(2) for j in range(i + 1)}, values)
        gated = [a * sigmoid(z) for a, z in zip(head, times(row, own["W_g"]), strict=True)]
        wanted.append(plus(x[i], times(gated, own["W_o"])))
    assert_rows(own["added"], wanted)


def test_a_step_that_only_its_formula_describes_is_computed_and_a_weight_given():
    t = TRACES["deepseek-v3.2"]
    texts = [cell(t, t.by_name[name][0], (3, 1)).text for name in ("index_scores", "W_iw")]
    assert [text.rpartition(", ")[2] for text in texts] == ["computed", "given"]


@pytest.mark.parametrize("name", TRACES)
def test_without_a_mask_later_tokens_are_seen(name):
    free = EXAMPLES[name].trace(is_causal=False)
    weights = next(step for step in free if step.startswith("weights"))
    assert np.triu(free[weights].reshape(-1, *free[weights].shape[-2:])[0], 1).any()
