"""``gated_delta_rule``: its forms against an oracle and transformers, and where others fail."""

import ml_dtypes
import numpy as np
import pytest
from delta import INF, by_rows, drawn, error, naive

import minimha
from minimha import BackendUnavailable, gated_delta_rule
from minimha.explain import Trace

BACKENDS = ("recurrent", "chunked", "cpu")
nan = np.nan


def run(q, k, v, g, beta, state=None, **options):
    return gated_delta_rule(q, k, v, g, beta, initial_state=state, return_state=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, {"L": 1}, {"L": 16, "D": 3, "Dv": 17}, {"L": 65, "B": 1, "Hk": 1, "H": 3, "D": 1}],
)
def test_every_form_is_the_rule(backend, channels, shape):
    given = drawn(1, **shape, channels=channels)
    for options in ({}, {"scale": -0.3, "normalize": False}):
        given[1] *= 1 if options.get("normalize", True) else 0.3  # keys longer than √2 would grow
        exact = naive(*given, **options)
        for got, right in zip(run(*given, **options, backend=backend), exact, strict=True):
            assert error(got, right) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 16, 20, 21, 22, 1000])
def test_a_chunk_may_have_any_size(size):
    given = drawn(2)
    for got, right in zip(run(*given, chunk_size=size), naive(*given), strict=True):
        assert error(got, right) < 1e-12


QWEN, KIMI = "qwen3_next.modeling_qwen3_next", "kimi_linear.modeling_kimi_linear"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        (QWEN, "torch_recurrent_gated_delta_rule"),
        (QWEN, "torch_chunk_gated_delta_rule"),
        (KIMI, "recurrent_kimi_delta_attention"),
        (KIMI, "chunk_kimi_delta_attention"),
    ],
)
def test_transformers_computes_the_same(backend, name, form):
    torch = pytest.importorskip("torch", reason="transformers computes with torch")
    module = pytest.importorskip(f"transformers.models.{name}", reason=f"transformers lacks {name}")
    heads = {"Hk": 4, "channels": True} if name == KIMI else {}  # Kimi has no grouped heads
    given = drawn(3, L=150, D=32, Dv=24, dtype=np.float32, **heads)
    O, S = run(*given, backend=backend)
    function = getattr(module, form)
    *tokens, state = (torch.from_numpy(x) for x in given)
    theirs, last = getattr(function, "__wrapped__", function)(
        *(x.transpose(1, 2) for x in tokens), initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    np.testing.assert_allclose(O, theirs.transpose(1, 2), rtol=0, atol=1e-6)
    np.testing.assert_allclose(S, last, rtol=0, atol=1e-6)


HARD = {
    "usual": {},
    "-50 at every other token": {"g": [0, -50.0]},
    "-1e4 now and then": {"g": [-0.1, -1e4, 0, -0.001]},
    "-inf now and then": {"g": [-0.1, -INF, 0, -0.001]},
    "nothing forgotten": {"g": [0.0]},
    "twice the error": {"beta": [2.0]},
    "keys of norm 1e-3": {"key": 1e-3 / 4},
    "keys of 0": {"key": 0.0, "g": [0.0, -0.5, 0.0, 0.0, 0.0, 0.0]},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("case", HARD)
def test_large_decays_and_small_keys_lose_no_digits(backend, channels, case):
    q, k, v, g, beta, state = drawn(4, B=1, L=300, D=16, Dv=8, channels=channels)
    hard = HARD[case]
    k = k * hard.get("key", 1.0)
    if "g" in hard:
        g = np.resize(hard["g"], g.size).reshape(g.shape)
    beta = np.full_like(beta, hard["beta"][0]) if "beta" in hard else beta
    given = [x.astype(np.float32) for x in (q, k, v, g, beta, state)]
    for got, right in zip(run(*given, backend=backend), by_rows(*given), strict=True):
        assert error(got, right) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("constant", [None, -8e-4])
def test_many_tokens_lose_no_digits(backend, constant):
    given = drawn(5, B=1, Hk=1, H=1, L=16_384, D=64, Dv=8, dtype=np.float32)
    given[3] = given[3] * np.float32(0.01) if constant is None else given[3] * 0 + constant
    for got, right in zip(run(*given, backend=backend), by_rows(*given), strict=True):
        assert error(got, right) < 2e-6


def test_the_two_oracles_agree():
    for channels in (False, True):
        given = drawn(6, channels=channels)
        for fast, slow in zip(by_rows(*given), naive(*given), strict=True):
            assert error(fast, slow) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_nan_reaches_what_comes_later_and_nothing_else(backend, name):
    given = drawn(7, B=1, Hk=4, H=4, L=100)
    clean, last = run(*given, backend=backend)
    at = ["q", "k", "v", "g", "beta"].index(name)
    spoilt = [np.array(x) for x in given]
    spoilt[at][(0, 1, 70, 2)[: spoilt[at].ndim]] = nan
    O, S = run(*spoilt, backend=backend)
    reached, reached_S = np.zeros(O.shape, bool), np.zeros(S.shape, bool)
    columns = 2 if name == "v" else slice(None)
    reached[0, 1, 70 : 71 if name == "q" else None, columns] = True
    reached_S[0, 1, :, columns] = name != "q"
    np.testing.assert_array_equal(np.isnan(O), reached)
    np.testing.assert_array_equal(np.isnan(S), reached_S)
    np.testing.assert_allclose(O[~reached], clean[~reached], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(S[~reached_S], last[~reached_S], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [False, True])
def test_packed_sequences_are_sequences_alone(backend, channels):
    q, k, v, g, beta, _ = drawn(8, B=1, L=30, channels=channels)
    starts, states = [0, 7, 7, 20, 30], drawn(9, B=4)[-1]
    for lengths in (None, [5, 0, 13, 1]):
        O, S = run(q, k, v, g, beta, states, cu_seqlens=starts, kv_lengths=lengths, backend=backend)
        for s in range(4):
            first, stop = starts[s], starts[s + 1]
            end = stop if lengths is None else first + lengths[s]
            alone = (x[:, :, first:end] for x in (q, k, v, g, beta))
            exact = naive(*alone, states[s : s + 1])
            np.testing.assert_allclose(O[:, :, first:end], exact[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(S[s], exact[1][0], rtol=0, atol=1e-12)
            assert not O[:, :, end:stop].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_beyond_a_length_do_not_exist(backend):
    given = drawn(10, B=3)
    spoilt = [np.array(x) for x in given]
    for x in spoilt[:5]:
        x[1, :, 8:], x[2] = nan, nan
    O, S = run(*spoilt, kv_lengths=[21, 8, 0], backend=backend)
    for b, length in enumerate([21, 8, 0]):
        exact = naive(*(x[b : b + 1, :, :length] for x in given[:5]), given[5][b : b + 1])
        np.testing.assert_allclose(O[b, :, :length], exact[0][0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(S[b], exact[1][0], rtol=0, atol=1e-12)
        assert not O[b, :, length:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_carries_on(backend):
    *tokens, state = drawn(11, L=50)
    whole, last = run(*tokens, state, backend=backend)
    parts = []
    for now in (slice(0, 33), slice(33, 34), slice(34, 50)):
        O, state = run(*(x[:, :, now] for x in tokens), state, backend=backend)
        parts.append(O)
    np.testing.assert_allclose(np.concatenate(parts, axis=2), whole, rtol=0, atol=1e-13)
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_computed_in_float32_and_rounded_once(backend, dtype):
    *tokens, state = drawn(12, dtype=dtype)
    wide = [x.astype(np.float32) for x in tokens]
    O, S = run(*tokens, state, backend=backend)
    exact, last = run(*wide, state.astype(np.float32), backend=backend)
    assert (O.dtype, S.dtype) == (dtype, np.float32)
    np.testing.assert_array_equal(O, exact.astype(dtype))
    np.testing.assert_array_equal(S, last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_may_lack_a_batch_and_heads_and_have_any_strides(backend):
    given = drawn(13, B=1, Hk=1, H=1)
    exact = naive(*given)
    for drop in (1, 2):
        index = (0,) * drop
        for got, right in zip(run(*(x[index] for x in given), backend=backend), exact, strict=True):
            np.testing.assert_allclose(got, right[index], rtol=0, atol=1e-12)
        alone = gated_delta_rule(*(x[index] for x in given[:5]), backend=backend)
        np.testing.assert_allclose(alone, naive(*given[:5])[0][index], rtol=0, atol=1e-12)
    turned = [np.asfortranarray(x) for x in given]
    twisted = [np.repeat(x[:, :, ::-1], 2, axis=-1)[:, :, ::-1, ..., ::2] for x in given[:3]]
    for strided in (turned, [*twisted, *turned[3:]]):
        for got, right in zip(run(*strided, backend=backend), exact, strict=True):
            np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_may_be_no_tokens_no_columns_and_no_batch(backend):
    for shape in ({"L": 0}, {"B": 0}, {"Dv": 0}):
        given = drawn(14, **shape)
        O, S = run(*given, backend=backend)
        assert (O.shape, S.shape) == (given[2].shape, given[5].shape)
        if shape == {"L": 0}:
            np.testing.assert_array_equal(S, given[5])
    assert not run(*given[:5], backend=backend)[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_stay_as_they_are_and_torch_gets_torch(backend):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = drawn(15, dtype=np.float32)
    before = [x.copy() for x in given]
    O, S = run(*map(torch.from_numpy, given), backend=backend)
    assert isinstance(O, torch.Tensor)
    assert isinstance(S, torch.Tensor)
    for got, right in zip((O, S), run(*given, backend=backend), strict=True):
        np.testing.assert_array_equal(got.numpy(), right)
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_tap_gets_every_step_and_may_change_it():
    given = drawn(16, L=2)
    trace = Trace()
    got = run(*given, tap=trace)
    own = ["decayed", "correction", "state"]
    assert list(trace) == [
        "q", "k", "v", "beta", "decay", *(f"{x}[t={t}]" for t in (0, 1) for x in own), "output",
    ]  # fmt: skip
    np.testing.assert_array_equal(trace["state[t=1]"], got[1])
    trace = Trace()
    run(*given, chunk_size=1, tap=trace)
    own = ["decays", "triangle", "corrections", "state"]
    assert list(trace)[5:] == [*(f"{x}[c={c}]" for c in (0, 1) for x in own), "output"]
    trace = Trace()
    run(*given, kv_lengths=[2, 1], tap=trace)
    assert [name for name in trace if "state" in name] == [
        "state[t=0][sequence 0]", "state[t=1][sequence 0]", "state[t=0][sequence 1]",
    ]  # fmt: skip

    def forgets(name, value):
        return value * 0 if name == "beta" else value

    assert not gated_delta_rule(*given[:5], tap=forgets).any()


REFUSED = [
    ({"k": np.ones((1, 2, 3, 5))}, "k has D=5 but q has D=4: each token has a query, a key"),
    ({"v": np.ones((1, 2, 4, 4))}, "v has L=4 but q has L=3: each token has a query, a key"),
    ({"v": np.ones((1, 3, 3, 4))}, "v has 3 heads but q has 2: H must be a multiple of Hk"),
    ({"v": np.ones((2, 3, 4))}, r"v has 3 dimensions, .* but q has 4: q, k and v must all be"),
    ({"g": np.ones((1, 2, 4))}, r"g has shape \(1, 2, 4\): expected \(B, H, L\) = \(1, 2, 3\) or "
                                r"\(B, H, L, D\) = \(1, 2, 3, 4\)"),
    ({"beta": 1.0}, r"beta has shape \(\): expected \(B, H, L\) = \(1, 2, 3\)"),
    ({"initial_state": np.ones((1, 2, 4, 5))}, r"expected \(B, H, D, Dv\) = \(1, 2, 4, 4\)"),
    ({"scale": nan}, "scale is nan: expected a finite number"),
    ({"chunk_size": 0}, "chunk_size is 0: expected an integer of at least 1"),
    ({"chunk_size": 4, "backend": "recurrent"}, "with backend 'recurrent', which has no chunks"),
    ({"kv_lengths": 4}, "kv_lengths is 4: expected integers from 0 to 3"),
    ({"cu_seqlens": [0, 2]}, "cu_seqlens ends with 2 but q has Lq=3"),
    ({"cu_seqlens": [0, 2, 3], "kv_lengths": [2, 2]}, "kv_lengths is 2 for sequence 1"),
    ({"backend": "dense"}, "backend is 'dense': expected one of 'auto', 'recurrent'"),
    ({"q": np.ones((1, 2, 3, 0)), "k": np.ones((1, 2, 3, 0))}, "q has D=0"),
]  # fmt: skip
WRONG_TYPES = [
    ({"g": np.ones((1, 2, 3), bool)}, "g has dtype bool: expected integers, float16, bfloat16"),
    ({"q": np.ones((1, 2, 3, 4), complex)}, "q has dtype complex128: expected integers, float16"),
    ({"v": np.ones((1, 2, 3, 4), ml_dtypes.float8_e4m3fn)}, "v has dtype float8_e4m3fn: expected"),
    ({"normalize": 1}, "normalize is 1: expected True or False"),
    ({"return_state": None}, "return_state is None: expected True or False"),
    ({"chunk_size": 2.0}, "chunk_size is 2.0: expected an integer"),
    ({"tap": 1}, "tap is 1: expected a callable"),
]
FITTING = {name: np.ones((1, 2, 3, 4)) for name in "qkv"}
FITTING |= {"g": np.zeros((1, 2, 3)), "beta": np.ones((1, 2, 3))}


@pytest.mark.parametrize(
    ("given", "message", "kind"),
    [*((*x, ValueError) for x in REFUSED), *((*x, TypeError) for x in WRONG_TYPES)],
)
def test_errors_are_sentences_that_name_the_argument(given, message, kind):
    with pytest.raises(kind, match=message):
        gated_delta_rule(**FITTING | given)


def test_packed_sequences_have_all_axes():
    arrays = {name: x[0] for name, x in FITTING.items()}
    with pytest.raises(ValueError, match="cu_seqlens is given with q of 3 dimensions: expected 4"):
        gated_delta_rule(**arrays, cu_seqlens=[0, 3])


def test_an_array_on_a_gpu_is_refused():
    class OnGpu:
        __cuda_array_interface__ = {}  # noqa: RUF012

    with pytest.raises(BackendUnavailable, match="beta is on a GPU, which gated_delta_rule does"):
        gated_delta_rule(**FITTING | {"beta": OnGpu()})


def test_it_is_loaded_when_it_is_first_used():
    assert minimha.gated_delta_rule is gated_delta_rule
