"""`check` of lightning indexers: ours, transformers' and wrong ones."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from check.mutants import answers

from minimha.check import check, page
from minimha.check.catalogue import DEVIATIONS
from minimha.check.catalogue_indexer import OF_INDEXERS, TIES
from minimha.check.problems_indexer import indexer_problems
from minimha.check.search import NONE, known
from minimha.check.verdict import judge
from minimha.layers import LightningIndexer, RoPE
from minimha.layers.indexer import largest

SPEAKS = "lightning_indexer"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ours_is_right(dtype):
    report = check(LightningIndexer, SPEAKS, dtype, is_layer=True)
    assert report.verdict == "right", report
    assert report.refused == ()


@pytest.mark.parametrize("seed", range(5))
def test_rounding_decides_hardly_any_pick(seed):
    for problem in indexer_problems(seed):
        assert known(problem, "float32").predicted(NONE).is_free.mean() < 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(one.identifier, "float32") for one in OF_INDEXERS]
    + [(one.identifier, "bfloat16") for one in OF_INDEXERS if one.identifier != "index_in_float8"],
)
def test_one_deviation_is_named(name, dtype):
    """In bfloat16, what rounding to float8_e4m3fn changes is rounding."""
    problems, deviations = indexer_problems(3), {name: DEVIATIONS[name].values[0]}
    found = judge(problems, answers(problems, deviations, dtype), dtype=dtype)
    assert found.deviations == (name,)
    assert found.alternatives == ()
    assert found.verdict == ("differs" if name in TIES else "wrong")


def test_two_deviations_are_named():
    problems = indexer_problems(3)
    both = {"index_relu_missing": 1, "index_rope_on_last": 1}
    assert set(judge(problems, answers(problems, both)).deviations) == set(both)


class Plain:
    """A port of one head at a time; ``is_early`` picks before it hides."""

    is_early = False

    def __init__(self, **given):
        self.given = given
        self.rope = RoPE(
            given["W_ik"].shape[1], given["rope_base"], rotary_dim=given["rope_dim"],
            interleaved=given["rope_interleaved"],
        )  # fmt: skip

    def __call__(self, x, latents, is_causal=False):
        g, (B, L, _) = self.given, x.shape
        k = x @ g["W_ik"]
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = self.rope.rotate(k * g["g_ik"] + g["b_ik"], np.arange(L))
        scores, w = np.zeros((B, L, L)), x @ g["W_iw"]
        for h in range(g["num_heads"]):
            D = k.shape[-1]
            q = self.rope.rotate((latents @ g["W_iq"])[..., h * D : (h + 1) * D], np.arange(L))
            scores += w[..., h, None] * np.maximum(q @ k.swapaxes(1, 2), 0)
        hidden = np.triu(np.full((L, L), is_causal), 1)
        if not self.is_early:
            scores[:, hidden] = -np.inf
        picks = np.argsort(-scores, axis=-1, kind="stable")[..., : g["top_k"]]
        return np.where(np.take_along_axis(hidden[None], picks, -1), -1, picks)


class Early(Plain):
    is_early = True


class OfParts(Plain):
    """A port with another norm, rotation or causality; see its keywords."""

    def __init__(
        self, *, norm=slice(None), by_width=False, by_row=False, block=1, select=largest, **given
    ):
        super().__init__(**given)
        self.norm, self.by_width, self.by_row, self.block = norm, by_width, by_row, block
        self.select = select

    def __call__(self, x, latents, is_causal=False):
        g, L = self.given, x.shape[1]
        H, R, Di = g["num_heads"], g["rope_dim"], g["W_ik"].shape[1]
        base = g["rope_base"] ** (R / Di if self.by_width else 1)
        rope = RoPE(Di, base, interleaved=g["rope_interleaved"], rotary_dim=R)
        k = x @ g["W_ik"]
        some = k[..., self.norm]
        centred = some - some.mean(-1, keepdims=True)
        spread = np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6)
        k[..., self.norm] = centred / spread * g["g_ik"][self.norm] + g["b_ik"][self.norm]
        k = rope.rotate(k[:, None], np.arange(L))[:, 0]
        I = 0
        for h in range(H):
            at = np.arange(L) * H + h if self.by_row else np.arange(L)
            q = rope.rotate((latents @ g["W_iq"][:, h * Di : (h + 1) * Di])[:, None], at)[:, 0]
            w = (x @ g["W_iw"][:, h])[..., None]
            I = I + w * np.maximum(q @ k.swapaxes(-1, -2), 0)
        block = np.arange(L) // self.block
        seen = np.broadcast_to(block <= block[:, None] if is_causal else True, I.shape)
        return self.select(I, seen, g["top_k"])[:, None]


def by_a_threshold(I, seen, top_k):
    """The first keys that reach the last picked score, though others exceed it."""
    scores = np.where(seen, I, -np.inf)
    last = np.sort(scores, -1)[..., ::-1][..., min(top_k, I.shape[-1]) - 1, None]
    return largest(np.zeros_like(I), seen & (scores >= last), top_k)


def with_zeros(I, seen, top_k):
    """Hidden keys have the score 0, and are dropped after they were picked."""
    picks = largest(np.where(seen, I, 0), np.ones_like(seen), top_k)
    return np.where(np.take_along_axis(seen, np.maximum(picks, 0), -1), picks, -1)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, ()),
        ({"norm": slice(4, None)}, ("index_norm_of_part",)),
        ({"norm": slice(0, 4)}, ("index_norm_of_part",)),
        ({"by_width": True}, ("index_rope_by_width",)),
        ({"by_row": True}, ("index_rope_by_row",)),
        ({"block": 64}, ("index_causal_in_blocks",)),
        ({"select": by_a_threshold}, ("index_threshold_fills_early",)),
        ({"select": with_zeros}, ("index_hidden_score_0",)),
    ],
)
def test_ports_of_parts_are_named(how, named):
    report = check(lambda **given: OfParts(**how, **given), SPEAKS, is_layer=True)
    assert report.deviations == named, str(report)


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Rounding(Plain):
    """All that a port in bfloat16 stores is rounded, and its sums are float32."""

    def __init__(self, **given):
        super().__init__(**{n: np.float32(x) if np.ndim(x) else x for n, x in given.items()})
        exact = self.rope.rotate
        self.rope = SimpleNamespace(rotate=lambda x, at: rounded(exact(rounded(x), at)))

    def __call__(self, x, latents, is_causal=False):
        return super().__call__(np.float32(x), np.float32(latents), is_causal)


@pytest.mark.parametrize("seed", range(5))
def test_a_port_that_rounds_to_bfloat16_is_right(seed):
    report = check(Rounding, SPEAKS, "bfloat16", is_layer=True, seed=seed)
    assert report.verdict == "right", report


def test_a_port_is_right_and_one_that_hides_too_late_is_named():
    assert check(Plain, SPEAKS, is_layer=True).verdict == "right"
    report = check(Early, SPEAKS, is_layer=True)
    assert report.deviations == ("index_picked_before_hidden",)
    assert "Hide keys, then pick." in page.as_text(report)


def of_transformers(module):
    """A class that is called as ours are, around transformers' module for DeepSeek-V3.2."""
    import torch

    class Adapted:
        def __init__(self, *, num_heads, top_k, rope_base, rope_dim, rope_interleaved, **weights):
            if rope_interleaved:
                raise NotImplementedError("DeepSeek-V3.2 rotates halves")
            Cq, E, D = len(weights["W_iq"]), len(weights["W_ik"]), weights["W_ik"].shape[1]
            config = module.DeepseekV32Config(
                hidden_size=E, index_n_heads=num_heads, index_head_dim=D, index_topk=top_k,
                qk_rope_head_dim=rope_dim, q_lora_rank=Cq,
            )  # fmt: skip
            self.layer = module.DeepseekV32Indexer(config, 0)
            names = {"W_iq": "wq_b", "W_ik": "wk", "W_iw": "weights_proj"}
            state = {f"{n}.weight": torch.tensor(weights[w].T) for w, n in names.items()}
            state["k_norm.weight"] = torch.tensor(weights["g_ik"])
            state["k_norm.bias"] = torch.tensor(weights["b_ik"])
            self.layer.load_state_dict(state)
            self.theta = rope_base ** -(np.arange(0, rope_dim, 2) / rope_dim)

        def __call__(self, x, latents, is_causal=False):
            L = x.shape[1]
            angles = np.tile(np.arange(L)[:, None] * self.theta, 2)[None]
            turns = [torch.tensor(f(angles), dtype=torch.float32) for f in (np.cos, np.sin)]
            hidden = torch.full((L, L), is_causal).triu(1)
            x, latents = torch.tensor(x), torch.tensor(latents)
            picks = self.layer(x, latents, turns, ~hidden[None], None).long()
            rows = hidden[None].expand(len(x), L, L)
            return torch.where(rows.gather(-1, picks), -1, picks).numpy()

    return Adapted


def test_transformers_indexer_breaks_ties_otherwise_at_most():
    pytest.importorskip("torch", reason="torch is not installed")
    name = "transformers.models.deepseek_v32.modeling_deepseek_v32"
    module = pytest.importorskip(name, reason="this transformers has no DeepSeek-V3.2")
    report = check(of_transformers(module), SPEAKS, is_layer=True)
    assert set(report.deviations) <= set(TIES), report
    assert report.verdict in ("right", "differs")


def test_what_is_no_indexer_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="describes a class of layers: give is_layer=True"):
        check(LightningIndexer, SPEAKS)

    class Scores(Plain):
        def __call__(self, x, latents, is_causal=False):
            return np.zeros((*x.shape[:2], x.shape[1]))

    report = check(Scores, SPEAKS, is_layer=True)
    assert "expected integers (B, L, K)" in str(report)
