"""One token's sublayers in compiled code give what the layer computes step by step."""

import copy
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import minimha
from minimha.equations.stored import FORMATS, Stored
from minimha.layers import decoding
from minimha.layers.cache import KVCache
from minimha.layers.feed_forward import ACTIVATIONS, FeedForward
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm, RMSNorm
from minimha.layers.rope import RoPE
from minimha.models.layer import Layer

pytestmark = pytest.mark.usefixtures("compiled_decoding")
E, H, HKV, D, F = 256, 8, 2, 32, 512  # widths that every format's blocks divide


def rows(rng, n, columns, name="bfloat16"):
    """Return a random matrix (columns, n), stored by rows."""
    size, nbytes, _ = FORMATS[name]
    if name == "bfloat16":
        bits = rng.standard_normal((n, columns), np.float32).view(np.uint32) >> 16
        return Stored.of_rows(name, bits.astype(np.uint16).view(np.uint8)).T
    data = rng.integers(0, 256, (n, columns // size, nbytes), np.uint8)
    for at in {"Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[name]:  # float16 between 2^-7 and 2^-6
        data[..., at + 1] = 0x20
    return Stored.of_rows(name, data.reshape(n, -1)).T


def row(rng, n):
    return rng.standard_normal(n).astype(np.float32)


def norm(rng, kind, n=E):
    if kind == "rms":
        return RMSNorm(row(rng, n), 1e-6)
    return None if kind is None else LayerNorm(row(rng, n), row(rng, n), 1e-5)


def layer(rng, *, kind="rms", format="bfloat16", bias=False, qk_norm=None, rope=None,
          activation="silu", is_gated=True, output_norm=None, **options):  # fmt: skip
    matrices = {"W_q": (H * D, E), "W_k": (HKV * D, E), "W_v": (HKV * D, E), "W_o": (E, H * D)}
    parameters = {name: rows(rng, *shape, format) for name, shape in matrices.items()}
    if bias:
        sizes = {"b_q": H * D, "b_k": HKV * D, "b_v": HKV * D, "b_o": E}
        parameters |= {name: row(rng, n) for name, n in sizes.items()}
    if qk_norm is not None:
        q, k = (D, D) if qk_norm == "head" else (H * D, HKV * D)
        parameters |= {"g_q": row(rng, q), "g_k": row(rng, k)}
        if qk_norm == "layer":
            parameters |= {"s_q": row(rng, q), "s_k": row(rng, k)}
    attention = MultiHeadAttention(
        E, H, HKV, D, bias=bias, qk_norm=qk_norm, rope=rope, parameters=parameters
    )
    feed_forward = FeedForward(
        rows(rng, F, E, format), rows(rng, E, F, format), activation,
        b_in=row(rng, F) if bias else None, b_out=row(rng, E) if bias else None,
        W_gate=rows(rng, F, E, format) if is_gated else None,
        b_gate=row(rng, F) if bias and is_gated else None,
    )  # fmt: skip
    return Layer(
        norm(rng, kind), attention, norm(rng, kind), feed_forward,
        attention_output_norm=norm(rng, output_norm),
        feed_forward_output_norm=norm(rng, output_norm), **options,
    )  # fmt: skip


VARIANTS = {
    "plain": {},
    "layer norms and biases": {"kind": "layer", "bias": True, "activation": "gelu_tanh"},
    "no norm first": {"kind": None, "output_norm": "rms"},
    "norms on both sides": {"output_norm": "layer"},
    "heads normalised": {"qk_norm": "head", "rope": RoPE(D)},
    "all heads normalised": {"qk_norm": "full", "rope": RoPE(D, interleaved=True)},
    "heads layer-normalised": {"qk_norm": "layer", "rope": RoPE(D, rotary_dim=16)},
    "window": {"window": 5, "rope": RoPE(D)},
    "scores": {"scale": 0.05, "softcap": 2.0, "sinks": np.linspace(-2, 2, H).astype(np.float32)},
    "parallel": {"is_parallel": True, "kind": "layer"},
    "Q8_0": {"format": "Q8_0"}, "Q4_K": {"format": "Q4_K"}, "Q6_K": {"format": "Q6_K"},
}  # fmt: skip


def run(layer, x, cache):
    return np.concatenate([layer(token[None], cache=cache) for token in x], axis=1)


def step_by_step(layer, x, cache, monkeypatch):
    with monkeypatch.context() as patched:
        for name in ("attended", "fed"):
            patched.setattr(decoding, name, lambda *_, **__: None)
        return run(layer, x, cache)


def attend(layer, x, cache, backend="auto"):
    return decoding.attended(layer.attention, (layer.attention_norm, None), x, cache, backend)


def calls(monkeypatch, expected):
    """Check that from now on both functions return arrays (``expected``), or None."""
    for name in ("attended", "fed"):
        function = getattr(decoding, name)

        def checked(*given, function=function, **options):
            y = function(*given, **options)
            assert (y is not None) == expected
            return y

        monkeypatch.setattr(decoding, name, checked)


@pytest.mark.parametrize("name", VARIANTS)
def test_sublayers_of_each_kind(name, monkeypatch):
    rng = np.random.default_rng(0)
    made = layer(rng, **VARIANTS[name])
    x = rng.standard_normal((12, 1, E), np.float32)
    caches = [made.new_cache(1, 16) for _ in range(2)]
    want = step_by_step(made, x, caches[0], monkeypatch)
    calls(monkeypatch, expected=True)
    got = run(made, x, caches[1])
    np.testing.assert_allclose(got, want, atol=2e-5 * abs(want).max())
    for own, other in zip(caches[1].arrays, caches[0].arrays, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5 * abs(other).max())
    np.testing.assert_array_equal(caches[1].lengths, caches[0].lengths)
    np.testing.assert_array_equal(caches[1].key_positions, caches[0].key_positions)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_activations(activation, is_gated, monkeypatch):
    rng = np.random.default_rng(1)
    made = layer(rng, activation=activation, is_gated=is_gated, bias=True, kind=None)
    for size in (1e-3, 1.0, 30.0):
        x = size * rng.standard_normal((1, 1, E)).astype(np.float32)
        want, got = (made.feed(x, tap=lambda name, value: value), made.feed(x))
        np.testing.assert_allclose(got, want, atol=3e-5 * abs(want).max())
    x[0, 0, 3] = np.nan
    with np.errstate(all="ignore"):
        assert np.isnan(
            decoding.fed(made.feed_forward, (made.feed_forward_norm, None), x, None)
        ).all()


def test_matrices_stored_for_x_w(monkeypatch):
    rng = np.random.default_rng(2)
    made = layer(rng)
    f = made.feed_forward
    by_rows = (rows(rng, *W.shape).T for W in (f.W_in, f.W_out))
    made = replace(made, feed_forward=FeedForward(*by_rows, "relu"))
    x = rng.standard_normal((1, 1, E), np.float32)
    want = made.feed(x, tap=lambda name, value: value)
    np.testing.assert_allclose(
        decoding.fed(made.feed_forward, (made.feed_forward_norm, None), x, None),
        want,
        atol=2e-5 * abs(want).max(),
    )


def test_a_cache_goes_on_after_a_prompt_and_an_undo(monkeypatch):
    rng = np.random.default_rng(3)
    made = layer(rng, rope=RoPE(D))
    prompt, x = (
        rng.standard_normal((1, 7, E), np.float32),
        rng.standard_normal((6, 1, E), np.float32),
    )
    caches = [made.new_cache(1, 32) for _ in range(2)]
    for cache in caches:
        made(prompt, cache=cache)
    want = step_by_step(made, x, caches[0], monkeypatch)
    run(made, x[:1], caches[1])
    made(x[None, 2], cache=caches[1])  # not what follows
    caches[1].undo()
    got = run(made, x[1:], caches[1])
    np.testing.assert_allclose(got, want[:, 1:], atol=2e-5 * abs(want).max())


def begun(seed):
    """Return a layer, four tokens (4, 1, E), and a cache with the first two."""
    rng = np.random.default_rng(seed)
    made = layer(rng, rope=RoPE(D))
    x = rng.standard_normal((4, 1, E), np.float32)
    cache = made.new_cache(1, 16)
    run(made, x[:2], cache)
    return made, x, cache


def test_copies_of_a_cache_are_independent():
    made, x, cache = begun(4)
    others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    want = run(made, x[2:], cache)
    for other in others:
        np.testing.assert_array_equal(run(made, x[2:], other), want)
    twin = copy.deepcopy(made)
    twin.attention.W_o = made.attention.W_o
    np.testing.assert_array_equal(run(twin, x, made.new_cache(1, 16))[:, 2:], want)


def test_new_weights_and_thread_counts_have_effect():
    rng = np.random.default_rng(5)
    made = layer(rng, bias=True)
    x = rng.standard_normal((1, 1, E), np.float32)
    before = made.attend(x, cache=made.new_cache(1, 4))
    cache = made.new_cache(1, 4)
    made.attend(x, cache=cache)
    made.attention.b_o[:] += 1  # in place
    changed = made.attend(x, cache=cache)
    np.testing.assert_allclose(changed, before + 1, atol=1e-4)
    made.attention.b_o = made.attention.b_o - 1
    np.testing.assert_allclose(made.attend(x, cache=cache), before, atol=1e-4)
    threads = minimha.get_num_threads()
    try:
        minimha.set_num_threads(1)
        np.testing.assert_allclose(made.attend(x, cache=cache), before, atol=1e-4)
    finally:
        minimha.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads, which is the point
def test_a_forked_child_goes_on():
    made, x, cache = begun(9)
    want = run(made, x[2:], copy.deepcopy(cache))
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            np.testing.assert_array_equal(run(made, x[2:], cache), want)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(run(made, x[2:], cache), want)


def test_threads_decode_with_one_layer():
    rng = np.random.default_rng(10)
    made = layer(rng, rope=RoPE(D))
    x = rng.standard_normal((30, 1, E), np.float32)
    want = run(made, x, made.new_cache(1, 32))
    with ThreadPoolExecutor(4) as pool:
        caches = [made.new_cache(1, 32) for _ in range(4)]
        found = list(pool.map(lambda cache: run(made, x, cache), caches))
    for got in found:
        np.testing.assert_array_equal(got, want)


def test_values_that_overflow_are_computed_again():
    rng = np.random.default_rng(6)
    made = layer(rng, kind=None)
    cache = made.new_cache(1, 8)
    x = rng.standard_normal((3, 1, E), np.float32)
    run(made, x[:2], cache)
    cache.arrays[0][..., :2, :] = 0  # equal weights: a sum of values overflows, not their mean
    cache.arrays[1][..., :2, :] = 3e38
    assert attend(made, x[2:], cache) is None
    np.testing.assert_array_equal(cache.lengths, [2])
    heads = {}
    made.attend(x[2:], cache=copy.deepcopy(cache), tap=lambda n, y: heads.setdefault(n, y))
    assert np.isfinite(heads["concat"]).all()
    with np.errstate(all="ignore"):
        made.attend(x[2:], cache=cache)
    np.testing.assert_array_equal(cache.lengths, [3])


def test_a_full_cache_says_so_and_stays_usable():
    rng = np.random.default_rng(7)
    made = layer(rng)
    x = rng.standard_normal((3, 1, E), np.float32)
    cache = made.new_cache(1, 2)
    run(made, x[:2], cache)
    with pytest.raises(ValueError, match="k has 1 tokens for batch entry 0, which holds 2"):
        made.attend(x[2:], cache=cache)
    np.testing.assert_array_equal(cache.lengths, [2])
    cache.undo()
    made.attend(x[2:], cache=cache)


@pytest.mark.parametrize(
    "options",
    [{"format": "small"}, {"clip": 1.0}, {"batch": 2}, {"dtype": "int8"},
     {"backend": "dense"}],
    ids=str,
)  # fmt: skip
def test_what_compiled_code_does_not_take_is_computed_step_by_step(options, monkeypatch):
    rng = np.random.default_rng(8)
    made = layer(rng)
    if "clip" in options:
        made.attention.clip = 1.0
    if "format" in options:
        made.attention.W_o = rng.standard_normal((E, E)).astype(np.float32)[:, ::-1]
    batch = options.get("batch", 1)
    cache = KVCache(batch, HKV, 8, D, dtype=options.get("dtype", "float32"))
    x = rng.standard_normal((batch, 1, E)).astype(np.float32)
    assert attend(made, x, cache, options.get("backend", "auto")) is None
    made.attend(x, cache=cache, backend=options.get("backend", "auto"))
    np.testing.assert_array_equal(cache.lengths, [1] * batch)


@pytest.mark.parametrize("what", ["x", "cache", "bias", "norm"])
def test_shapes_that_do_not_fit_are_errors_and_not_read_beyond(what):
    rng = np.random.default_rng(11)
    made = layer(rng, bias=True)
    x = rng.standard_normal((1, 1, E + (what == "x")), np.float32)
    cache = KVCache(1, HKV, 8, D + (what == "cache"))
    if what == "bias":
        made = replace(made, feed_forward=replace(made.feed_forward, b_in=row(rng, F + 1)))
    if what == "norm":
        made = replace(made, feed_forward_norm=norm(rng, "rms", E + 1))
    assert decoding.fed(made.feed_forward, (made.feed_forward_norm, None), x, None) is None or (
        what == "cache"
    )
    if what in ("x", "cache"):
        assert attend(made, x, cache) is None
    with pytest.raises(ValueError, match=r"expected|shape"):
        made(x, cache=cache)


def test_programs_are_made_once(monkeypatch):
    made, x, cache = begun(12)
    rng, width = np.random.default_rng(12), 512  # Python shares integers up to 256
    wide = FeedForward(rows(rng, width, width), rows(rng, width, width), "relu")
    token = np.ones((1, 1, width), np.float32)
    decoding.fed(wide, (None, None), token, None)
    made_anew = []
    for name in ("_attending", "_feeding"):
        monkeypatch.setattr(decoding, name, lambda *given: made_anew.append(given))
    run(made, x[2:], cache)
    decoding.fed(wide, (None, None), token, None)
    assert made_anew == []
