"""Arrays of torch and JAX on the CPU: read in place, and returned as they came."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import minimha.dialects
from minimha import attention
from minimha.equations.arguments import as_floating, rectangular
from minimha.equations.problem import Problem
from minimha.kernels.cpu.kernel import Plan
from minimha.layers import (
    KVCache,
    MultiHeadAttention,
    RoPE,
    additive_attention,
    attention_weights,
    cosine_attention,
    rotate_by_table,
)

DTYPES = {np.dtype(t).name: np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, "f4", "f8")}
FAST = ("dense", "tiled", "cpu")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch, whose tensors are given, is not installed")


@pytest.fixture
def jax():
    """JAX with float64, which it does not have unless it is told to."""
    jax = pytest.importorskip("jax", reason="jax, whose arrays are given, is not installed")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def standin(monkeypatch):
    """What minimha asks of torch, where that is not installed."""

    class Tensor:
        requires_grad = is_cuda = False

        def __init__(self, array):
            self.shape, self.dtype, self._array = array.shape, array.dtype, array

        def __array__(self, dtype=None, copy=None):
            if self.dtype == ml_dtypes.bfloat16:
                raise TypeError("Got unsupported ScalarType BFloat16")
            return self._array

        def numpy(self):
            return np.asarray(self)

        def view(self, dtype):
            return Tensor(self._array.view(dtype))

        def detach(self):
            return self

        def item(self):
            return self._array.item()

        def data_ptr(self):
            return self._array.ctypes.data

    Tensor.__module__ = "torch"
    types = {"int16": np.int16, "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    module = SimpleNamespace(Tensor=Tensor, from_numpy=Tensor, **types)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture(params=["torch", "jax", "standin"])
def library(request):
    """What the tests need to know of a library: its arrays' type, and how to make and read one."""
    module = request.getfixturevalue(request.param)
    if request.param == "standin":
        return SimpleNamespace(
            type=module.Tensor,
            make=lambda array: module.Tensor(np.array(array)),
            address=lambda array: array.data_ptr(),
            numbers=lambda array: array._array.astype(np.float64),
        )
    if request.param == "jax":
        return SimpleNamespace(
            type=module.Array,
            make=module.numpy.array,
            address=lambda array: array.unsafe_buffer_pointer(),
            numbers=np.array,
        )

    def make(array):
        wide = module.from_numpy(array.astype(np.float64))  # torch reads no bfloat16 of NumPy's
        return wide.to(getattr(module, array.dtype.name))

    return SimpleNamespace(
        type=module.Tensor,
        make=make,
        address=lambda array: array.data_ptr(),
        numbers=lambda array: array.to(module.float64).numpy(),
    )


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_same(library, found, expected):
    """``found`` is an array of the library, with the dtype and the numbers of ``expected``."""
    assert isinstance(found, library.type)
    assert str(found.dtype).removeprefix("torch.") == expected.dtype.name
    np.testing.assert_array_equal(library.numbers(found), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_they_are_read_in_place(library, dtype):
    given = random(3, 4, dtype=dtype)
    there = library.make(given)
    found = as_floating("q", there)
    assert found.dtype == dtype
    assert found.ctypes.data == library.address(there)
    np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_views_of_a_tensor_are_read_in_place(torch, dtype):
    whole = torch.arange(24.0).to(getattr(torch, dtype.name)).reshape(2, 3, 4)
    view = whole.transpose(0, 2)[1:, ::2, :1]
    found = as_floating("q", view)
    assert found.ctypes.data == view.data_ptr()
    assert found.tolist() == view.tolist()
    assert as_floating("q", whole[0, 0, 1]).shape == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cpu_backend_gets_16_bits_in_their_own_memory(library, dtype, monkeypatch):
    q, k, v = (library.make(random(1, 2, 4, 8, dtype=DTYPES[dtype], seed=i)) for i in range(3))
    got = []

    run = Plan.run
    monkeypatch.setattr(
        Plan, "run", lambda self, *given: (got.extend(given[:3]), run(self, *given))[1]
    )
    attention(q, k, v, backend="cpu")
    for given, read in zip((q, k, v), got, strict=True):
        assert read.dtype == DTYPES[dtype]
        assert read.ctypes.data == library.address(given)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_problem_that_was_seen_before_is_not_planned_again(library, dtype, monkeypatch):
    q, k, v = (library.make(random(1, 2, 4, 8, dtype=dtype, seed=i)) for i in range(3))
    O, L = attention(q, k, v, backend="cpu", return_lse=True)
    monkeypatch.delattr(Problem, "of")
    for found, expected in zip(
        (attention(q, k, v, backend="cpu"), *attention(q, k, v, backend="cpu", return_lse=True)),
        (O, O, L),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        assert_same(library, found, as_floating("O", expected))


def test_beside_a_mask_on_a_gpu_they_stay_as_they_came(library, monkeypatch):
    """The backend, which refuses them, names the type that it was given."""
    module = SimpleNamespace(attend=lambda given, *options: given, functions=None)
    monkeypatch.setattr("minimha.api._device_module", lambda *arguments: module)
    q, k, v = (library.make(random(1, 2, 4, 8, seed=i)) for i in range(3))
    given = attention(q, k, v, attn_mask=SimpleNamespace(__cuda_array_interface__={}))
    assert all(given[name] is x for name, x in zip("qkv", (q, k, v), strict=True))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attention_returns_them_as_they_came(library, dtype, backend):
    given = [random(2, 3, 4, 5, dtype=dtype, seed=i) for i in range(3)]
    there = [library.make(x) for x in given]
    options = {"is_causal": True, "backend": backend}
    expected = attention(*given, **options, return_lse=True)
    assert_same(library, attention(*there, **options), expected[0])
    for found, wanted in zip(attention(*there, **options, return_lse=True), expected, strict=True):
        assert_same(library, found, wanted)


def test_options_may_be_of_a_library_too(library):
    q, k, v = (random(2, 2, 4, 4, seed=i) for i in range(3))
    options = {
        "attn_mask": np.tri(4, dtype=bool),
        "attn_bias": random(4, 4, dtype=ml_dtypes.bfloat16),
        "kv_lengths": np.array([4, 2]),
        "q_offset": np.array([0, 1]),
        "alibi_slopes": np.array([0.5, 0.25]),
        "sinks": random(2),
    }
    there = {name: library.make(value) for name, value in options.items()}
    found = attention(q, library.make(k), v, **there)
    assert type(found) is np.ndarray  # as q
    np.testing.assert_array_equal(found, attention(q, k, v, **options))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_one_number_may_be_an_array(library, option, backend):
    q, number = random(1, 2, 3, 4), np.array(0.5, ml_dtypes.bfloat16)
    expected = attention(q, q, q, backend=backend, **{option: 0.5})
    for given in (number, number[()], np.array(0.5), np.float16(0.5), library.make(number)):
        found = attention(q, q, q, backend=backend, **{option: given})
        np.testing.assert_array_equal(found, expected)


def test_a_scale_that_requires_grad_is_refused(torch):
    with pytest.raises(TypeError, match=r"scale requires grad, .*: give scale.detach\(\)"):
        attention([[1.0]], [[1.0]], [[1.0]], scale=torch.tensor(0.5, requires_grad=True))


def test_integers_are_computed_in_float64(library):
    ones = np.ones((2, 2), np.int64)
    assert_same(library, attention(*[library.make(ones)] * 3), np.ones((2, 2)))


def test_the_output_is_the_callers_own(torch):
    q = torch.ones(3, 4)
    output = attention(q, q, q)
    output[:] = 7
    assert q.tolist() == torch.ones(3, 4).tolist()
    assert output.requires_grad is False


def test_jax_keeps_its_own_widths(jax):
    jax.config.update("jax_enable_x64", False)  # as a user finds it
    ones = jax.numpy.ones((2, 2), "int32")
    assert attention(ones, ones, ones).dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_return_them_as_they_came(library, dtype):
    dtype = DTYPES[dtype]
    layer = MultiHeadAttention(8, 2, rope=RoPE(4), dtype=dtype)
    weights = {name: library.make(getattr(layer, name)) for name in layer.shapes}
    same = MultiHeadAttention(8, 2, rope=RoPE(4), parameters=weights)
    x, q = random(2, 3, 8, dtype=dtype), random(1, 2, 3, 4, dtype=dtype)
    W, w = random(4, 6, dtype=dtype), random(6, dtype=dtype)
    for call in (
        lambda to: same(to(x)) if to is library.make else layer(x),
        lambda to: layer(to(x), to(x), return_weights=True)[0],
        lambda to: layer(to(x), return_weights=True)[1],
        lambda to: layer(to(x), cache=KVCache(2, 2, 3, 4, dtype=dtype)),
        lambda to: attention_weights(to(q), q),
        lambda to: cosine_attention(to(q), q, q),
        lambda to: cosine_attention(to(q), q, to(q), return_lse=True)[1],
        lambda to: additive_attention(to(q), q, q, W, to(W), w),
        lambda to: additive_attention(to(q), q, q, W, W, w, return_lse=True)[1],
        lambda to: RoPE(4).rotate(to(q), to(np.arange(3))),
        lambda to: rotate_by_table(to(q), to(W[:3, :2]), W[:3, :2]),
    ):
        assert_same(library, call(library.make), call(lambda array: array))


def test_a_cache_takes_and_returns_them(library):
    q, k, v = (random(1, 2, 3, 4, dtype=ml_dtypes.bfloat16, seed=i) for i in range(3))
    here, there = (KVCache(1, 2, 3, 4, dtype=ml_dtypes.bfloat16) for _ in range(2))
    here.append(k, v)
    there.append(library.make(k), library.make(v))
    assert_same(library, there.attend(library.make(q)), here.attend(q))


D = minimha.dialects
H, E, F = 2, 4, 8  # heads, their width, a model's
MODULES = {
    "torch": {"in_proj_weight": (3 * F, F), "in_proj_bias": (3 * F,), "out_proj.weight": (F, F)},
    "keras": {f"{name}/kernel": (F, H, E) for name in ("query", "key", "value")}
    | {"attention_output/kernel": (H, E, F)},
    "t5": {f"{name}.weight": (F, F) for name in "qkvo"}
    | {"relative_attention_bias.weight": (8, H)},
    "bloom": {"query_key_value.weight": (3 * F, F), "dense.weight": (F, F)},
}
T5 = {"num_heads": H, "relative_attention_num_buckets": 8}
MASK, KEPT, ROWS = np.tri(3, dtype=bool), np.array([[True, True, False]]), np.arange(3)[None]


def module_of(name, to):
    """The arrays of a module, in float32."""
    return {path: to(random(*shape, seed=1)) for path, shape in MODULES[name].items()}


def kv_cache(x, to, *shape):
    """What flash-attention returns, and what it has then written."""
    caches, new = [to(np.zeros(shape, x.dtype)) for _ in range(2)], [to(x)] * 3
    found = D.flash_attention.flash_attn_with_kvcache(
        new[0], *caches, *new[1:], to(x[0, 0, :, :2]), to(x[0, 0, :, :2]), to(np.array([1])),
        return_softmax_lse=True, causal=True,
    )  # fmt: skip
    return (*found, *caches)


DIALECTS = {
    "sdpa": lambda x, to: D.torch.scaled_dot_product_attention(
        query=to(x), key=to(x), value=to(x), attn_mask=to(MASK)
    ),
    "sdpa, added": lambda x, to: D.torch.scaled_dot_product_attention(
        to(x), to(x), to(x), to(x[0, :1, :, :3])
    ),
    "flex": lambda x, to: D.torch.flex_attention(to(x), to(x), to(x), return_lse=True),
    "torch's module": lambda x, to: D.torch.multihead_attention(
        module_of("torch", to), *[to(x.reshape(1, 3, F))] * 3, num_heads=H, batch_first=True,
        attn_mask=to(~MASK), key_padding_mask=to(~KEPT),
    ),
    "jax": lambda x, to: D.jax.dot_product_attention(
        *[to(x)] * 3, to(x[:, :1, :2, :2]), to(MASK[:2, :2]), query_seq_lengths=to(np.array([2])),
        key_value_seq_lengths=to(np.array([1])),
    ),
    "keras": lambda x, to: D.keras.multi_head_attention(
        module_of("keras", to), *[to(x.reshape(1, 3, F))] * 3, num_heads=H, key_dim=E,
        use_bias=False, return_attention_scores=True, attention_mask=to(MASK),
        query_mask=to(KEPT), key_mask=to(KEPT), value_mask=to(KEPT),
    ),
    "keras, grouped": lambda x, to: D.keras.grouped_query_attention(
        module_of("keras", to), to(x.reshape(1, 3, F)), to(x.reshape(1, 3, F)), use_bias=False,
        head_dim=E, num_query_heads=H, num_key_value_heads=H,
    ),
    "onnx": lambda x, to: D.onnx.attention(
        *[to(x)] * 3, to(x[0, :1, :, :1]), to(x), to(x), is_causal=1, return_qk_matmul_output=True
    ),
    "onnx, lengths": lambda x, to: D.onnx.attention(
        *[to(x)] * 3, to(MASK), nonpad_kv_seqlen=to(np.array([2]))
    ),
    "onnx's rotation": lambda x, to: D.onnx.rotary_embedding(
        to(x), to(x[0, 0, :, :2]), to(x[0, 0, :, :2]), to(ROWS)
    ),
    "onnx's scatter": lambda x, to: D.onnx.tensor_scatter(
        past_cache=to(x), update=to(x[:, :, :1]), write_indices=to(np.array([1]))
    ),
    "flash": lambda x, to: D.flash_attention.flash_attn_func(
        *[to(x)] * 3, alibi_slopes=to(x[0, 0, 0, :3]), learnable_sink=to(x[0, 0, 1, :3]),
        query_padding_mask=to(KEPT[:, 1:]), key_padding_mask=to(KEPT[:, 1:]),
        key_leftpad=to(np.array([0])),
    ),
    "flash, packed": lambda x, to: D.flash_attention.flash_attn_varlen_func(
        *[to(x[0])] * 3, to(np.array([0, 1, 2])), to(np.array([0, 1, 2]))
    ),
    "flash, paged": lambda x, to: D.flash_attention.flash_attn_varlen_func(
        to(x[0]), to(x), to(x), to(np.array([0, 2])), to(np.array([0, 2])),
        block_table=to(np.array([[0]])), alibi_slopes=to(np.ones((1, 3), np.float32)),
    ),
    "flash, cached": lambda x, to: kv_cache(x, to, 1, 4, 3, E),
    "T5": lambda x, to: D.transformers.AttentionModule("T5Attention", module_of("t5", to), T5)(
        to(x.reshape(1, 3, F)), mask=to(x[:, :1, :, :3]), output_attentions=True
    ),
    "T5's bias": lambda x, to: D.transformers.AttentionModule(
        "T5Attention", module_of("t5", to), T5
    ).compute_bias(2, 3),
    "BLOOM's bias": lambda x, to: D.transformers.AttentionModule(
        "BloomAttention", module_of("bloom", to), {"n_head": H}
    ).compute_alibi(attention_mask=to(KEPT)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("call", DIALECTS.values(), ids=DIALECTS)
def test_dialects_return_them_as_they_came(library, call, dtype):
    if call is DIALECTS["flash, cached"] and library.type.__module__.startswith("jax"):
        pytest.skip("nothing can be written into an array of JAX")
    x = random(1, 2, 3, 4, dtype=DTYPES[dtype])
    found, expected = call(x, library.make), call(x, lambda array: array.copy())
    if not isinstance(expected, tuple):
        found, expected = (found,), (expected,)
    assert type(found) is type(expected)
    for ours, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert ours is None
        else:
            assert_same(library, ours, wanted)


def test_a_dialects_results_are_of_the_querys_library(library):
    q = random(1, 2, 3, 4)
    found = D.torch.scaled_dot_product_attention(q, library.make(q), library.make(q))
    assert type(found) is np.ndarray


def test_a_module_of_bfloat16_is_computed_from_its_state_dict(torch):
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 3, 8).to(torch.bfloat16)
    with torch.no_grad():
        expected, _ = module(x, x, x)
    output, _ = minimha.dialects.torch.multihead_attention(
        module.state_dict(), x, x, x, num_heads=2, batch_first=True
    )
    assert output.dtype == torch.bfloat16
    np.testing.assert_allclose(output.float(), expected.float(), atol=0.02)


def test_a_tensor_that_requires_grad_is_refused(torch):
    q = torch.ones(2, 2)
    sentence = "v requires grad, but minimha computes no gradients: give v.detach()"
    with pytest.raises(TypeError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        attention(q, q, q.clone().requires_grad_())
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="in_proj_weight requires grad"):
        minimha.dialects.torch.multihead_attention(
            {"in_proj_weight": layer.weight}, q, q, q, num_heads=1
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda torch: torch.ones(2, 2).to_sparse(), "Sparse layout"),
        (lambda torch: torch.ones(2, 2, device="meta"), "meta device"),
        (lambda torch: torch.ones(2, 2, device="meta", dtype=torch.bfloat16), "meta device"),
        (lambda torch: torch.ones(2, 2).to(torch.float8_e5m2), "Float8_e5m2"),
    ],
    ids=["sparse", "meta", "meta, bfloat16", "float8"],
)
def test_what_numpy_cannot_read_is_refused_with_torchs_reason(torch, make, reason):
    with pytest.raises(
        TypeError, match=f"q is an array of torch that NumPy cannot read: .*{reason}"
    ):
        attention(make(torch), [[1.0]], [[1.0]])


def test_a_traced_array_is_refused(jax):
    sentence = "q is an array of jax that NumPy cannot read: .*traced array with shape float32"
    with pytest.raises(TypeError, match=sentence):
        jax.jit(lambda q: attention(q, q, q))(jax.numpy.ones((2, 2), "float32"))


def test_bfloat16_needs_ml_dtypes(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    q = torch.ones(2, 2, dtype=torch.bfloat16)
    sentence = "q is bfloat16, which NumPy knows only through ml_dtypes: pip install ml_dtypes"
    with pytest.raises(TypeError, match=sentence):
        attention(q, q, q)


def test_ragged_lists_are_still_no_array_of_a_library():
    with pytest.raises(ValueError, match="mask is not a rectangular array of numbers"):
        rectangular("mask", [[1, 2], [3]])
