"""The lightning indexer against loops, and sparse latent attention against transformers."""

import math

import numpy as np
import pytest

from minimha import attention
from minimha.explain import Trace
from minimha.layers.indexer import LightningIndexer, largest
from minimha.layers.latent import LatentAttention, LatentCache
from minimha.layers.rope import RoPE

RNG = np.random.default_rng(0)
E, CQ, HI, DI, R, TOP = 12, 7, 3, 6, 4, 4
WEIGHTS = {
    "W_iq": RNG.normal(size=(CQ, HI * DI)), "W_ik": RNG.normal(size=(E, DI)),
    "g_ik": RNG.normal(size=DI), "b_ik": RNG.normal(size=DI), "W_iw": RNG.normal(size=(E, HI)),
}  # fmt: skip
X, LATENTS = RNG.normal(size=(2, 9, E)), RNG.normal(size=(2, 9, CQ))


def indexer(top_k=TOP, **changes):
    rope = RoPE(DI, rotary_dim=R, **changes)
    return LightningIndexer(WEIGHTS, num_heads=HI, top_k=top_k, rope=rope)


def turned(vector, position, interleaved):
    """The first R numbers, as R / 2 complex numbers, turned by the angles of a position."""
    y = [float(x) for x in vector]
    for n in range(R // 2):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + R // 2)
        angle = position * 10000.0 ** (-2 * n / R)
        z = complex(y[a], y[b]) * complex(math.cos(angle), math.sin(angle))
        y[a], y[b] = z.real, z.imag
    return y


def scores_by_loops(x, latents, interleaved=False):
    """Equation 1 of the paper, for each pair of tokens."""
    W, keys, I = WEIGHTS, [], []
    for t, token in enumerate(x):
        y = token @ W["W_ik"]
        y = (y - y.mean()) / math.sqrt(((y - y.mean()) ** 2).mean() + 1e-6)
        keys.append(turned(W["g_ik"] * y + W["b_ik"], t, interleaved))
    for t, token in enumerate(x):
        q = (latents[t] @ W["W_iq"]).reshape(HI, DI)
        w = token @ W["W_iw"] / math.sqrt(HI)
        heads = [turned(q[h], t, interleaved) for h in range(HI)]
        dots = [[math.fsum(np.multiply(head, k)) / math.sqrt(DI) for head in heads] for k in keys]
        I.append([math.fsum(w[h] * max(0.0, dot[h]) for h in range(HI)) for dot in dots])
    return np.array(I)


def best(scores, visible, top_k):
    """The visible keys of one query, best first, the earlier of equals first; -1 is none."""
    seen = sorted((j for j in range(len(scores)) if visible[j]), key=lambda j: (-scores[j], j))
    return (seen + [-1] * top_k)[: min(top_k, len(scores))]


@pytest.mark.parametrize("interleaved", [False, True])
def test_an_index_score_is_the_papers_equation(interleaved):
    trace = Trace()
    found = indexer(interleaved=interleaved)(X, LATENTS, is_causal=True, tap=trace)
    assert found.shape == (2, 1, 9, TOP)
    assert found.dtype == np.int32
    for b in range(2):
        exact = scores_by_loops(X[b], LATENTS[b], interleaved)
        np.testing.assert_allclose(trace["index_scores"][b], exact, rtol=1e-9, atol=1e-12)
        wanted = [best(trace["index_scores"][b, i], np.arange(9) <= i, TOP) for i in range(9)]
        np.testing.assert_array_equal(found[b, 0], wanted)


HIDING = {
    "window": ({"window_size": (2, 1)}, lambda i, j: i - 2 <= j <= i + 1),
    "offset": ({"is_causal": True, "q_offset": -2}, lambda i, j: j <= i - 2),
    "lengths": ({"kv_lengths": 3}, lambda i, j: j < 3),
    "mask": ({"attn_mask": np.eye(9, dtype=bool)}, lambda i, j: i == j),
    "bias": ({"attn_bias": np.where(np.eye(9), -np.inf, 5.0)}, lambda i, j: i != j),
    "function": ({"mask_mod": lambda b, h, i, j: (i + j) % 2 == 0}, lambda i, j: (i + j) % 2 == 0),
}


@pytest.mark.parametrize(("options", "sees"), HIDING.values(), ids=HIDING)
def test_no_key_is_picked_that_a_query_may_not_see(options, sees):
    trace = Trace()
    found = indexer()(X[0], LATENTS[0], tap=trace, **options)
    for i in range(9):
        visible = [sees(i, j) for j in range(9)]
        assert found[0, 0, i].tolist() == best(trace["index_scores"][i], visible, TOP)


def test_of_equal_scores_the_earlier_key_is_picked():
    I, seen = np.array([[0.0, 1.0, 0.0, -0.0, 1.0, 0.0]]), np.ones((1, 6), bool)
    assert largest(I, seen, 4).tolist() == [[1, 4, 0, 2]]
    seen[0, 0] = False
    assert largest(I, seen, 5).tolist() == [[1, 4, 2, 3, 5]]
    assert largest(
        np.array([[-np.inf, np.nan, 2.0, np.inf]]), np.ones((1, 4), bool), 9
    ).tolist() == [[1, 3, 2, 0]]


def test_a_query_that_sees_few_keys_picks_no_others():
    found = indexer(top_k=20)(X, LATENTS, is_causal=True)
    assert found.shape == (2, 1, 9, 9)
    assert ((found >= 0).sum(axis=-1) == np.arange(1, 10)).all()


REFUSED = [
    ({"W_iw": None}, {}, "W_iw is missing"),
    ({"W_other": np.ones(1)}, {}, "W_other is no weight of this layer, which has W_iq, W_ik"),
    ({"W_iw": np.ones((E, 2))}, {}, "W_iw has shape (12, 2): expected (12, 3) with Hi=3, Di=6"),
    ({}, {"attn_mask": np.ones((2, 3, 9, 9), bool)}, "attn_mask has shape (2, 3, 9, 9): expected"),
    ({}, {"mask_mod": lambda b, h, i, j: h < j}, "mask_mod uses h, but an indexer picks the same"),
]


@pytest.mark.parametrize(("weights", "options", "sentence"), REFUSED)
def test_refused_in_a_sentence(weights, options, sentence):
    given = {name: x for name, x in (WEIGHTS | weights).items() if x is not None}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the sentence is compared below)
        LightningIndexer(given, num_heads=HI, top_k=2, rope=RoPE(DI))(X, LATENTS, **options)
    assert sentence in str(caught.value)


def sparse(weights, config, interleaved):
    """The layer with the weights of one of transformers', by their names."""
    w = {name: x.detach().numpy().astype(np.float64) for name, x in weights.items()}
    names = {
        "W_dq": "q_a_proj", "W_uq": "q_b_proj", "W_dkv": "kv_a_proj_with_mqa",
        "W_ukv": "kv_b_proj", "W_o": "o_proj",
    }  # fmt: skip
    parameters = {name: w[f"{theirs}.weight"].T for name, theirs in names.items()}
    parameters |= {"g_q": w["q_a_layernorm.weight"], "g_kv": w["kv_a_layernorm.weight"]}
    index = {"W_iq": "wq_b", "W_ik": "wk", "W_iw": "weights_proj"}
    picking = None
    if "indexer.wk.weight" in w:
        given = {name: w[f"indexer.{theirs}.weight"].T for name, theirs in index.items()}
        given |= {"g_ik": w["indexer.k_norm.weight"], "b_ik": w["indexer.k_norm.bias"]}
        rope = RoPE(
            config.index_head_dim, rotary_dim=config.qk_rope_head_dim, interleaved=interleaved
        )
        picking = LightningIndexer(
            given, num_heads=config.index_n_heads, top_k=config.index_topk, rope=rope
        )
    rope = RoPE(config.qk_rope_head_dim, interleaved=True)
    return LatentAttention(
        parameters, num_heads=config.num_attention_heads, rope=rope, indexer=picking
    )


SIZES = {
    "vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": 10, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "qk_nope_head_dim": 6, "index_topk": 5, "index_head_dim": 8,
    "index_n_heads": 40,  # with few heads many scores are 0, and torch breaks ties otherwise
    "max_position_embeddings": 64, "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["deepseek_v32", "glm_moe_dsa"])
def test_sparse_latent_attention_is_that_of_transformers(interleaved):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    name, kind = ("glm_moe_dsa", "GlmMoeDsa") if interleaved else ("deepseek_v32", "DeepseekV32")
    theirs = pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}", reason=f"transformers has no {name}"
    )
    types = {"indexer_types": ["full", "shared"]} if interleaved else {}
    config = getattr(theirs, f"{kind}Config")(**SIZES, **types)
    torch.manual_seed(0)
    modules = [getattr(theirs, f"{kind}Attention")(config, n).double() for n in range(2)]
    rotary = getattr(theirs, f"{kind}RotaryEmbedding")(config)
    x, L = torch.randn(2, 17, 16, dtype=torch.float64), 17
    positions = torch.arange(L)[None]
    tables = rotary(x, positions)
    hidden = (
        torch.full((L, L), -math.inf, dtype=torch.float64).triu(1)[None, None].expand(2, 1, L, L)
    )
    picks = {}
    for n, module in enumerate(modules):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        layer = sparse(module.state_dict(), config, interleaved)
        shared = picks if interleaved and n else {}
        given = {}
        if shared:  # a later key, which a query does not see, stands for none
            indices = shared["key_indices"][:, 0]
            given = {"prev_topk_indices": torch.tensor(np.where(indices < 0, L - 1, indices))}
        with torch.no_grad():
            expected = module(x, tables, hidden, position_ids=positions, **given)[0].numpy()
        output, indices = layer(x.numpy(), is_causal=True, return_key_indices=True, **shared)
        atol = 1e-6 * abs(expected).max()  # theirs has scores and softmax in float32
        np.testing.assert_allclose(output, expected, rtol=0, atol=atol)
        picks = {"key_indices": indices}
        cache = LatentCache(2, L, layer.cached_width, np.float64)
        parts = [(slice(0, 9), True), (slice(9, 10), True), (slice(10, L), False)]
        for now, is_absorbed in parts:
            few = {"key_indices": shared["key_indices"][:, :, now]} if shared else {}
            part = layer(x.numpy()[:, now], cache=cache, is_absorbed=is_absorbed, **few)
            np.testing.assert_allclose(part, expected[:, now], rtol=0, atol=atol)
        dense = LatentAttention(layer.weights, num_heads=4, rope=layer.rope)
        assert abs(dense(x.numpy(), is_causal=True) - expected).max() > 0.01  # it matters


def test_every_step_of_picking_is_traced_and_explained():
    rng = np.random.default_rng(1)
    shapes = {"W_dq": (E, CQ), "g_q": (CQ,), "W_uq": (CQ, 2 * 6), "W_dkv": (E, 5 + 2), "g_kv": (5,),
              "W_ukv": (5, 2 * 8), "W_o": (2 * 4, E)}  # fmt: skip
    layer = LatentAttention(
        {name: rng.normal(size=shape) for name, shape in shapes.items()}, num_heads=2,
        rope=RoPE(2, interleaved=True), indexer=indexer(),
    )  # fmt: skip
    trace = Trace()
    output = layer(X, is_causal=True, tap=trace)
    np.testing.assert_array_equal(output, layer(X, is_causal=True))
    steps = {step.base: step for step in trace.steps}
    for name in ("index_queries", "index_keys", "index_weights", "index_products", "index_relu",
                 "index_scores", "index_visible", "key_indices", "picked"):  # fmt: skip
        assert steps[name].note, name
    picked = np.zeros((2, 9, 9))
    for b, i, j in np.ndindex(2, 9, 9):
        picked[b, i, j] = j in trace["key_indices"][b, i]
    np.testing.assert_array_equal(trace["picked"], picked)
    np.testing.assert_array_equal(trace["weights"][:, 0] > 0, picked > 0)
    short = {"W_dq": np.ones((E, 5)), "g_q": np.ones(5), "W_uq": np.ones((5, 12))}
    with pytest.raises(ValueError, match="the indexer's W_iq has 7 rows: expected 5"):
        LatentAttention(layer.weights | short, num_heads=2, rope=layer.rope, indexer=layer.indexer)


def test_picked_keys_may_be_given_to_attention():
    q, k, v = RNG.normal(size=(3, 2, 4, 9, 8))
    picks = indexer()(X, LATENTS, is_causal=True)
    mask = np.zeros((2, 1, 9, 9), bool)
    for b, _, i, x in np.ndindex(picks.shape):
        mask[b, 0, i, picks[b, 0, i, x]] |= picks[b, 0, i, x] >= 0
    for backend in ("dense", "tiled", "cpu"):
        expected = attention(q, k, v, attn_mask=mask, backend=backend)
        found = attention(q, k, v, key_indices=picks, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
