"""Mixtures of experts, token by token in Python's loops, and what a trace shows of them."""

import math

import numpy as np
import pytest
from models import plain

from minimha.explain import Trace
from minimha.layers.feed_forward import FeedForward
from minimha.models.checkpoints import from_tensors
from minimha.models.experts import Experts

E, F, N = 4, 6, 5
RNG = np.random.default_rng(5)
X = RNG.normal(size=(1, 7, E))


def mixture(**options):
    def gated(width):
        return FeedForward(*drawn((E, width), (width, E)), "silu", W_gate=drawn((E, width))[0])

    W_router, b_router, W_shared = drawn((E, N), (N,), (E, 1))
    if options.pop("is_shared", False):
        options |= {"shared": gated(3), "W_shared": W_shared, "b_router": b_router}
    return Experts(W_router, [gated(F) for _ in range(N)], **options)


def drawn(*shapes):
    return [RNG.normal(size=shape) for shape in shapes]


def by_loop(layer, x):
    """One token after the other, one expert after the other, in float64."""
    result = []
    for row in x[0]:
        logits = row @ layer.W_router + (0 if layer.b_router is None else layer.b_router)
        p = [math.exp(z) for z in logits]
        p = [one / sum(p) for one in p]
        best = sorted(range(N), key=lambda e: -p[e])[: layer.top_k]
        total = sum(p[e] for e in best) if layer.is_normalised else 1.0
        out = sum(p[e] / total * one_expert(layer.experts[e], row) for e in best)
        if layer.shared is not None:
            gate = 1 / (1 + math.exp(-(row @ layer.W_shared)[0]))
            out = out + gate * one_expert(layer.shared, row)
        result.append(out)
    return np.array([result])


def one_expert(w, row):
    gate = row @ w.W_gate
    return (gate / (1 + np.exp(-gate)) * (row @ w.W_in)) @ w.W_out


@pytest.mark.parametrize("top_k", [1, 2, N])
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_each_token_goes_to_its_best_experts(top_k, is_normalised, is_shared):
    layer = mixture(top_k=top_k, is_normalised=is_normalised, is_shared=is_shared)
    np.testing.assert_allclose(layer(X), by_loop(layer, X), rtol=1e-12)


def test_a_trace_shows_where_each_token_goes():
    layer = mixture(top_k=2, is_shared=True)
    trace = Trace()
    output = layer(trace("added", X), trace)
    np.testing.assert_array_equal(output, layer(X))
    shares = trace["expert_shares"]
    assert ((shares > 0).sum(axis=1) == 2).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    for e in range(N):
        here = np.flatnonzero(shares[:, e])
        assert (f"expert_input[expert {e}]" in trace) == bool(len(here))
        if len(here):
            np.testing.assert_array_equal(trace[f"expert_input[expert {e}]"], X[0, here])
    for step in trace.steps:
        assert step.note, step.title
        assert step.name == "added" or not step.made or trace.origins[step], step.title
    notes = {step.name: step.note for step in trace.steps}
    assert notes["feed_forward"] == "What the experts make of each token, each by its share."


def test_replaced_shares_send_a_token_elsewhere():
    layer = mixture(top_k=1)
    sent = np.zeros((1, 7, N))
    sent[..., 3] = 1

    def tap(name, value):
        return sent if name == "expert_shares" else value

    expected = [one_expert(layer.experts[3], row) for row in X[0]]
    np.testing.assert_allclose(layer(X, tap)[0], expected, rtol=1e-12)


def test_a_token_goes_to_one_expert_at_least_and_to_each_at_most_once():
    for top_k in (0, N + 1):
        with pytest.raises(ValueError, match=f"top_k is {top_k}: expected 1 to 5, the number of"):
            mixture(top_k=top_k)


MIXTRAL = plain.LLAMA | {"model_type": "mixtral", "num_local_experts": 3}
AT = "model.layers.{}.block_sparse_moe.experts"


@pytest.fixture
def tensors():
    """A Mixtral of random numbers, as it is published: one tensor per matrix and expert."""
    rng = np.random.default_rng(0)
    held = {name: W for name, W in plain.llama_tensors(rng).items() if ".mlp." not in name}
    for n in range(2):
        held[f"model.layers.{n}.block_sparse_moe.gate.weight"] = rng.normal(size=(3, 8))
        for e in range(3):
            for name, shape in (("w1", (12, 8)), ("w2", (8, 12)), ("w3", (12, 8))):
                held[f"{AT.format(n)}.{e}.{name}.weight"] = rng.normal(size=shape)
    return held


def test_all_experts_in_one_tensor_are_the_same_model(tensors):
    fused = {name: W for name, W in tensors.items() if ".experts." not in name}
    for n in range(2):
        at = AT.format(n)
        w1, w2, w3 = (
            np.stack([tensors[f"{at}.{e}.{name}.weight"] for e in range(3)])
            for name in ("w1", "w2", "w3")
        )
        fused[f"{at}.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        fused[f"{at}.down_proj"] = w2
    expected = from_tensors(MIXTRAL, tensors).logits([1, 2, 3])
    np.testing.assert_array_equal(from_tensors(MIXTRAL, fused).logits([1, 2, 3]), expected)
    fused[f"{AT.format(1)}.down_proj"] = np.ones((2, 8, 12))
    with pytest.raises(ValueError, match=r"down_proj has shape \(2, 8, 12\): expected one matrix"):
        from_tensors(MIXTRAL, fused)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_local_experts": None}, "config.json's num_experts is missing"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4: expected at most 3"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000: expected at most 4096"),
        (
            {"num_local_experts": 4},
            r"block_sparse_moe.gate.weight has shape \(3, 8\): expected \(4, 8\)",
        ),
        (
            {"model_type": "qwen2_moe", "qkv_bias": False, "mlp_only_layers": 1},
            "mlp_only_layers is 1",
        ),
    ],
)
def test_hostile_mixtures_end_in_a_sentence(changes, sentence, tensors):
    with pytest.raises(ValueError, match=sentence):
        from_tensors(MIXTRAL | changes, tensors)
