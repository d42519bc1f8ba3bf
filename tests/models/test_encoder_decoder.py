"""The original transformer beside torch's, and its behaviour with drawn weights."""

import math

import numpy as np
import pytest

from minimha.layers.feed_forward import FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm
from minimha.models.config import Config
from minimha.models.embeddings import Embeddings
from minimha.models.encoder_decoder import EncoderDecoder, original
from minimha.models.layer import Layer

E, H, F, V, P, N = 16, 4, 24, 31, 20, 2
CONFIG = Config(
    "original", V, N, E, H, H, E // H, F, P, 1e-5, "relu", True, (None,) * N, (None,) * N
)
IDS, TARGET = [3, 17, 30, 8, 0, 5], [1, 4, 4, 29, 12]


@pytest.fixture(scope="module")
def model():
    return original(CONFIG, seed=1)


def test_with_torchs_weights_it_is_torchs_transformer():
    torch = pytest.importorskip("torch", reason="torch, which is compared with, is missing")
    torch.manual_seed(0)
    theirs = torch.nn.Transformer(E, H, N, N, F, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            if tensor.ndim == 1:  # gains and biases begin as ones and zeros
                tensor += 0.3 * torch.randn(tensor.shape)
    wte = torch.randn(V, E)
    angles = torch.arange(P)[:, None] * torch.exp(-math.log(10000) * torch.arange(0, E, 2) / E)
    wpe = torch.stack([angles.sin(), angles.cos()], -1).reshape(P, E)

    def embedded(ids):
        return (math.sqrt(E) * wte[ids] + wpe[: len(ids)])[None]

    causal = torch.nn.Transformer.generate_square_subsequent_mask(len(TARGET))
    with torch.no_grad():
        wanted = theirs(embedded(IDS), embedded(TARGET), tgt_mask=causal) @ wte.T
    tokens = wte.numpy()
    embeddings = Embeddings(tokens, wpe.numpy(), scale=math.sqrt(E))
    model = EncoderDecoder(
        CONFIG, embeddings, embeddings,
        [layer_of(layer, layer.norm2) for layer in theirs.encoder.layers],
        [
            layer_of(layer, layer.norm3, heads_of(layer.multihead_attn), norm_of(layer.norm2))
            for layer in theirs.decoder.layers
        ],
        tokens.T, norm_of(theirs.encoder.norm), norm_of(theirs.decoder.norm),
    )  # fmt: skip
    got = model.logits(model.memory(IDS), TARGET)
    assert close(got, wanted[0].numpy())


def numbers(tensor):
    return tensor.detach().numpy()


def norm_of(norm):
    return LayerNorm(numbers(norm.weight), numbers(norm.bias), norm.eps)


def heads_of(layer):
    W = np.split(numbers(layer.in_proj_weight).T, 3, axis=1)
    b = dict(zip(("b_q", "b_k", "b_v"), np.split(numbers(layer.in_proj_bias), 3), strict=True))
    out = layer.out_proj
    return MultiHeadAttention.from_combined(
        *W, numbers(out.weight).T, num_heads=H, **b, b_o=numbers(out.bias)
    )


def layer_of(layer, last_norm, cross=None, cross_norm=None):
    feed_forward = FeedForward(
        numbers(layer.linear1.weight).T, numbers(layer.linear2.weight).T, "relu",
        b_in=numbers(layer.linear1.bias), b_out=numbers(layer.linear2.bias),
    )  # fmt: skip
    return Layer(
        norm_of(layer.norm1), heads_of(layer.self_attn), norm_of(last_norm), feed_forward,
        norm_first=False, cross=cross, cross_norm=cross_norm,
    )  # fmt: skip


def close(got, wanted):
    return np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_cache_gives_the_same_logits_token_by_token_and_in_chunks(model):
    memory = model.memory(IDS)
    wanted = model.logits(memory, TARGET)
    for sizes in ([1] * 5, [2, 1, 2]):
        cache = model.new_cache(memory)
        chunks = np.split(np.array(TARGET), np.cumsum(sizes)[:-1])
        got = np.concatenate([model.logits(memory, chunk, cache=cache) for chunk in chunks])
        assert close(got, wanted), sizes


def test_the_decoder_sees_nothing_after_a_token_and_all_of_the_source(model):
    memory, wanted = model.memory(IDS), model.logits(model.memory(IDS), TARGET)
    changed = model.logits(memory, [*TARGET[:3], 7, 7])
    np.testing.assert_allclose(changed[:3], wanted[:3], rtol=1e-5, atol=1e-5)
    assert np.abs(changed[3:] - wanted[3:]).max() > 0.1
    other = model.logits(model.memory([*IDS[:-1], 6]), TARGET)
    assert (np.abs(other - wanted).max(axis=1) > 1e-3).all()


def test_what_does_not_fit_is_refused(model):
    memory = model.memory(IDS)
    with pytest.raises(ValueError, match="ids is text, but the model has no tokenizer"):
        model.memory("the cat")
    with pytest.raises(ValueError, match="target has 21 tokens: the model has only 20 positions"):
        model.logits(memory, [1] * 21)
    with pytest.raises(ValueError, match="num_tokens is 21: the model has only 20"):
        model.generate(IDS, 21)
    with pytest.raises(ValueError, match="temperature is 0: expected a positive number"):
        model.generate(IDS, 2, temperature=0)
    assert len(list(model.generate(IDS, 20, seed=3))) == 20
