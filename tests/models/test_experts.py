"""Mixtures of experts, token by token in Python's loops, and what a trace shows of them."""

import json
import math

import numpy as np
import pytest
from models import plain

from minimha.explain import Trace
from minimha.layers.feed_forward import FeedForward
from minimha.models.checkpoints import from_tensors, load
from minimha.models.checkpoints.tensors import Tensors
from minimha.models.experts import Experts, Groups

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


@pytest.mark.parametrize(("best", "is_biased"), [(1, False), (2, True)])
def test_experts_are_chosen_in_the_best_groups(best, is_biased):
    W, bias = drawn((E, 6), (6,))
    experts = mixture(top_k=1).experts[:1] * 6
    layer = Experts(
        W, experts, 2, scoring="sigmoid", b_choice=bias if is_biased else None,
        groups=Groups(3, 1, best), scale=2.5,
    )  # fmt: skip
    trace = Trace()
    layer(trace("added", X), trace)
    for t, row in enumerate(X[0]):
        p = [1 / (1 + math.exp(-z)) for z in row @ W]
        c = [p[e] + bias[e] * is_biased for e in range(6)]
        groups = [sorted(c[2 * g : 2 * g + 2])[-best:] for g in range(3)]
        kept = max(range(3), key=lambda g: sum(groups[g]))
        assert trace["groups_kept"][t].tolist() == [float(g == kept) for g in range(3)]
        chosen = {e: p[e] for e in (2 * kept, 2 * kept + 1)}
        shares = [2.5 * chosen.get(e, 0) / sum(chosen.values()) for e in range(6)]
        np.testing.assert_allclose(trace["expert_shares"][t], shares, rtol=1e-12)
    assert ("choice_scores" in trace) == is_biased
    for step in trace.steps:
        assert step.note, step.title
        assert step.name == "added" or not step.made or trace.origins[step], step.title


DEEPSEEK = plain.LLAMA | {
    "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 4, "q_lora_rank": 4, "num_key_value_heads": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topk_group": 5}, "topk_group is 5: expected at most 4"),
        ({"topk_group": 1}, "topk_group, 1, are kept: groups of 2 experts are too small for num_e"),
        ({"n_group": 8}, "groups of 1 experts are too small"),
        ({"n_group": 3}, "n_routed_experts is 8 and its n_group 3: the first must be a multiple"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy': only 'noaux_tc' is implemented"),
        ({"scoring_func": "softmax"}, "only 'sigmoid' is implemented"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1: only None or"),
        ({"model_type": "glm_moe_dsa"}, "an indexer for some layers .the nearest that works is "),
        (
            {"model_type": "deepseek_v32", "mlp_layer_types": ["odd"]},
            "mlp_layer_types is .'odd'.: expected dense or sparse for each of",
        ),
        ({"model_type": "deepseek_v32", "layer_types": ["odd"]}, "layer_types is .'odd'.: only"),
    ],
)
def test_a_deepseek_of_another_kind_is_refused_from_its_config(changes, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | changes))
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path)


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


OSS = {
    "model_type": "gpt_oss", "vocab_size": 23, "max_position_embeddings": 12, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
MXFP4 = OSS | {"quantization_config": {"quant_method": "mxfp4"}}
PACKED = {"gate_up_proj": (3, 128, 1, 16), "down_proj": (3, 32, 2, 16)}  # experts, columns, rows


def oss_tensors(rng):
    """A gpt-oss as it is released: experts in MXFP4."""
    shapes = {"lm_head": (23, 32), "model.embed_tokens": (23, 32), "model.norm": (32,)}
    at = "model.layers.0"
    shapes |= {f"{at}.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    shapes |= {f"{at}.mlp.router": (3, 32)}
    for letter, rows, columns in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):
        shapes[f"{at}.self_attn.{letter}_proj"] = rows, columns
    held = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    linear = [name for name in shapes if "_proj" in name or "router" in name]
    held |= {f"{name}.bias": rng.normal(size=shapes[name][:1]) for name in linear}
    held[f"{at}.self_attn.sinks"] = rng.normal(size=4)
    for name, shape in PACKED.items():
        held[f"{at}.mlp.experts.{name}_bias"] = rng.normal(size=shape[:2])
    held = {name: array.astype(np.float32) for name, array in held.items()}
    for name, shape in PACKED.items():
        held[f"{at}.mlp.experts.{name}_blocks"] = rng.integers(0, 256, shape, np.uint8)
        held[f"{at}.mlp.experts.{name}_scales"] = rng.integers(122, 127, shape[:3], np.uint8)
    return held


def widened(blocks, scales):
    """The numbers of MXFP4, one after the other, from the words of its specification."""
    result = np.empty((*scales.shape, 32), np.float32)
    for at in np.ndindex(*result.shape):
        byte = int(blocks[(*at[:3], at[3] // 2)])
        four = byte >> 4 if at[3] % 2 else byte & 15
        exponent, mantissa = four >> 1 & 3, four & 1
        size = 2 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        result[at] = (-size if four & 8 else size) * 2.0 ** (int(scales[at[:3]]) - 127)
    return result.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def test_gpt_oss_in_mxfp4_is_the_model_with_its_numbers_widened(tmp_path):
    held = oss_tensors(np.random.default_rng(3))
    wide = dict(held)
    for name in PACKED:
        at = f"model.layers.0.mlp.experts.{name}"
        wide[at] = widened(wide.pop(f"{at}_blocks"), wide.pop(f"{at}_scales"))
    expected = from_tensors(OSS, wide).logits([1, 2, 3])
    assert np.isfinite(expected).all()
    got = load(plain.write(tmp_path, MXFP4, held)).logits([1, 2, 3])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order
    with pytest.raises(ValueError, match=r"quant_method.*: only None is implemented"):
        from_tensors(MXFP4 | {"quantization_config": {"quant_method": "gptq"}}, held)
    with pytest.raises(
        ValueError, match=r"quantization_config is \{'quant_method': 'mxfp4'\}: only"
    ):
        from_tensors(MXFP4 | {"model_type": "mixtral"}, held)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    with pytest.raises(ValueError, match=r"_scales has shape \(3, 32, 1\) and uint8: expected"):
        from_tensors(MXFP4, held | {name: held[name][..., :1]})


def test_mxfp4_is_read_as_transformers_reads_it():
    reason = "transformers, to compare with, is not installed"
    theirs = pytest.importorskip("transformers.integrations.mxfp4", reason=reason)
    torch = pytest.importorskip("torch", reason="torch, which transformers needs, is missing")
    held = oss_tensors(np.random.default_rng(4))
    at = "model.layers.0.mlp.experts.down_proj"
    packed = [held[f"{at}_{part}"] for part in ("blocks", "scales")]
    wanted = theirs.convert_moe_packed_tensors(*map(torch.from_numpy, packed), dtype=torch.float32)
    matrices = Tensors(held).take_mxfp4(at, 3, 32, 64)
    got = np.stack([np.asarray(W.T) for W in matrices])
    np.testing.assert_array_equal(got, wanted.numpy())
