"""Whole layers: classes of one's own, minimha's and torch's, right and wrong."""

import numpy as np
import pytest

import minimha
from minimha.check.calling import arguments_of
from minimha.check.calling_layers import LayerCaller
from minimha.check.page import as_text
from minimha.check.problems import layer_problems
from minimha.cli import main
from minimha.layers import MultiHeadAttention


class Layer:
    """A multi-head layer in NumPy, with a cache, and with places where things go wrong."""

    bug = ""

    def __init__(self, W_q, W_k, W_v, W_o, num_heads, num_kv_heads=None, b_q=0, b_k=0, b_v=0, b_o=0,
                 rope_base=None, rope_interleaved=False):  # fmt: skip
        self.W, self.b = (W_q, W_k, W_v, W_o), (b_q, b_k, b_v, b_o)
        self.H, self.Hkv = num_heads, num_kv_heads or num_heads
        self.base, self.is_interleaved = rope_base, rope_interleaved

    def __call__(self, x, is_causal=False, attn_mask=None, cache=None):
        cache = {} if cache is None else cache
        start = cache.get("length", 0)
        B, L, _ = x.shape
        counts = (self.H, self.Hkv, self.Hkv)
        q, k, v = (
            (x @ W + b).reshape(B, L, n, -1).swapaxes(1, 2)
            for W, b, n in zip(self.W, self.b, counts, strict=False)
        )
        q, k = self.rotated(q, start), self.rotated(k, start)
        if start:
            k, v = (np.concatenate([cache[n], y], 2) for n, y in (("k", k), ("v", v)))
        cache.update(k=k, v=v, length=start + L)
        group = self.H // self.Hkv
        k, v = (
            np.tile(y, (1, group, 1, 1)) if self.bug == "tile" else y.repeat(group, 1)
            for y in (k, v)
        )
        scores = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1] ** 0.5)
        if is_causal:
            scores = np.where(np.tri(L, start + L, start, dtype=bool), scores, -np.inf)
        if attn_mask is not None:
            scores = np.where(attn_mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = weights / weights.sum(-1, keepdims=True) @ v
        rows = heads if self.bug == "not moved back" else heads.swapaxes(1, 2)
        rows = rows.reshape(B, L, -1)
        W_o = self.W[3].T if self.bug == "W_o" else self.W[3]
        return (rows @ W_o + self.b[3] + (x if self.bug == "residual" else 0)).astype(x.dtype)

    def rotated(self, x, start):
        if self.base is None:
            return x
        D = x.shape[-1]
        at = np.arange(x.shape[2])[:, None] + (0 if self.bug == "offset" else start)
        angles = at / self.base ** (2 * np.arange(D // 2) / D)
        if self.is_interleaved and self.bug != "half":
            one, two = x[..., ::2], x[..., 1::2]
        else:
            one, two = x[..., : D // 2], x[..., D // 2 :]
        c, s = np.cos(angles), np.sin(angles)
        turned = one * c - two * s, one * s + two * c
        if self.is_interleaved and self.bug != "half":
            return np.stack(turned, -1).reshape(x.shape).astype(x.dtype)
        return np.concatenate(turned, -1).astype(x.dtype)


def with_bug(name):
    return type("Layer", (Layer,), {"bug": name})


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (Layer, "float32"),
        (MultiHeadAttention, "float32"),
        (MultiHeadAttention, "float16"),
        (MultiHeadAttention, "bfloat16"),
    ],
)
def test_right_layers_are_right_in_everything(layer, dtype):
    report = minimha.check(layer, dtype=dtype, is_layer=True)
    assert report.verdict == "right"
    assert not report.refused


@pytest.mark.parametrize(
    ("bug", "identifier"),
    [
        ("tile", "kv_heads_tiled"),
        ("W_o", "w_o_transposed"),
        ("not moved back", "heads_not_moved_back"),
        ("residual", "residual_added"),
        ("half", "rope_half"),
        ("offset", "rope_ignores_offset"),
    ],
)
def test_bugs_of_a_layer_are_named(bug, identifier):
    report = minimha.check(with_bug(bug), is_layer=True)
    assert report.deviations == (identifier,)
    assert report.explains[0] >= report.explains[1] - 2  # heads are mixed call by call in a cache
    text = as_text(report)
    assert "num_heads=" in text
    assert "expected" in text


def test_torchs_module_is_right():
    torch = pytest.importorskip("torch", reason="torch, whose module is checked, is not installed")
    report = minimha.check(torch.nn.MultiheadAttention, "torch", is_layer=True)
    assert report.verdict == "right"
    assert {"rope_base", "num_kv_heads", "cache"} <= set(report.refused)


def test_matrices_are_compared_before_and_after():
    class Writes(Layer):
        def __init__(self, W_q, **more):
            super().__init__(W_q.copy(), **more)
            W_q *= 2

    problem = layer_problems()[0]
    answer = LayerCaller(Writes, "minimha", "float32").answer(arguments_of(problem))
    assert answer.faults == ("writes_into_inputs",)


def test_a_layer_of_the_wrong_shape_is_told_so():
    class Narrow(Layer):
        def __call__(self, x, **options):
            return super().__call__(x, **options)[..., :-1]

    answer = LayerCaller(Narrow, "minimha", "float32").answer(arguments_of(layer_problems()[0]))
    assert "wrong_shape" in answer.faults
    assert answer.note == "its output has shape (1, 6, 5): expected (B, L, E) = (1, 6, 6)"


def test_the_command_line(capsys, tmp_path):
    assert main(["check", "--layer", "minimha.layers:MultiHeadAttention"]) == 0
    assert "rotary positions" in capsys.readouterr().out
    assert main(["check", "--layer", "minimha.layers:MultiHeadAttention", "--speaks", "jax"]) == 2
    expected = "expected one of ('minimha', 'torch', 'lightning_indexer'), for"
    assert expected in capsys.readouterr().err
