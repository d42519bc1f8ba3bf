"""What functions capture of torch and NumPy: the same on every backend, or refused alike."""

import types

import numpy as np
import pytest

from minimha import attention, block_mask

try:
    import torch
except ModuleNotFoundError:
    torch = types.SimpleNamespace(linspace=lambda *a, **_: np.linspace(*a), float64=None, tanh=None)

needs_torch = pytest.mark.skipif(not hasattr(torch, "Tensor"), reason="torch is not installed")
X = np.random.default_rng(0).normal(size=(1, 2, 20, 4))
S = X @ X.swapaxes(-1, -2) / 2
H, I, J = np.ogrid[:2, :20, :20]
BACKENDS = ("dense", "tiled", "cpu")
TABLE = torch.linspace(-1, 1, 20, dtype=torch.float64)
SETTINGS = types.ModuleType("settings")
SETTINGS.table = TABLE
SETTINGS.more = types.ModuleType("settings.more")
SETTINGS.more.table = 2 * TABLE
tanh = torch.tanh

OF_NUMPY = {
    "clip": (lambda s, b, h, i, j: np.clip(s, -0.5, 0.5), lambda: np.clip(S, -0.5, 0.5)),
    "np.where": (lambda s, b, h, i, j: np.where(i > j, s, 0), lambda: np.where(I > J, S, 0)),
    "logic of NumPy": (lambda s, b, h, i, j: np.where(np.logical_or(i == j, h == 1), s, s / 2),
                       lambda: np.where((I == J) | (H == 1), S, S / 2)),
    "many of NumPy": (lambda s, b, h, i, j: np.tanh(s) + np.exp2(np.minimum(s, 0)) * np.floor(s),
                      lambda: np.tanh(S) + 2 ** np.minimum(S, 0) * np.floor(S)),
}  # fmt: skip
OF_TORCH = {
    "where": (lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
              lambda: np.where(I >= J, S, -np.inf)),
    "softcap": (lambda s, b, h, i, j: 2 * torch.tanh(s / 2), lambda: 2 * np.tanh(S / 2)),
    "by its name": (lambda s, b, h, i, j: tanh(s), lambda: np.tanh(S)),
    "table": (lambda s, b, h, i, j: s + TABLE[j], lambda: S + TABLE.numpy()[J]),
    "of a module": (lambda s, b, h, i, j: s + SETTINGS.table[j], lambda: S + TABLE.numpy()[J]),
    "clamp": (lambda s, b, h, i, j: torch.clamp(s, min=-0.5), lambda: np.maximum(S, -0.5)),
    "an if": (lambda s, b, h, i, j: torch.where(i > j, s, 0) if h else np.where(i > j, 0, s),
              lambda: np.where((I > J) == (H > 0), S, 0)),
    "sigmoid": (lambda s, b, h, i, j: torch.sigmoid(s) + torch.rsqrt(1.0 + j),
                lambda: 1 / (1 + np.exp(-S)) + 1 / np.sqrt(1 + J)),
    "logic": (lambda s, b, h, i, j: torch.where(torch.logical_or(i == j, h == 1), s, s / 2),
              lambda: np.where((I == J) | (H == 1), S, S / 2)),
    "many": (lambda s, b, h, i, j: torch.log1p(torch.abs(s)) + torch.sign(s) * torch.floor(s)
             + torch.minimum(s, j * torch.pi), lambda: np.log1p(abs(S)) + np.sign(S) * np.floor(S)
             + np.minimum(S, J * np.pi)),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", [*OF_NUMPY, *(pytest.param(name, marks=needs_torch) for name in OF_TORCH)]
)
def test_elementwise_functions_and_tables(name, backend):
    function, expected = (OF_NUMPY | OF_TORCH)[name]
    expected = np.broadcast_to(expected(), S.shape)
    got = attention(X, X, X, score_mod=function, backend=backend)
    np.testing.assert_allclose(got, attention(X, X, X, scale=0, attn_bias=expected), rtol=1e-9)


@needs_torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_modules_in_modules_and_of_defaults(backend):
    alias = SETTINGS

    def score_mod(s, b, h, i, j=0, *, by=TABLE, factor=2.0):
        return s * factor + SETTINGS.more.table[j] + by[i] + alias.table[j]

    expected = 2 * S + 3 * TABLE.numpy()[J] + TABLE.numpy()[I]
    got = attention(X, X, X, score_mod=score_mod, backend=backend)
    np.testing.assert_allclose(got, attention(X, X, X, scale=0, attn_bias=expected), rtol=1e-9)


@needs_torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_mods_and_block_masks_take_them_too(backend):
    document = torch.arange(20) // 7

    def mask_mod(b, h, i, j):
        return torch.logical_and(document[i] == document[j], i >= j)

    seen = (np.arange(20)[:, None] // 7 == np.arange(20) // 7) & (np.tri(20) > 0)
    expected = attention(X, X, X, attn_mask=seen)
    for given in (mask_mod, block_mask(mask_mod, 20, 20)):
        got = attention(X, X, X, mask_mod=given, backend=backend)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@needs_torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_is_written_to_counts(backend):
    slope = torch.zeros(2, dtype=torch.float64)
    for value in (1.0, 2.0):
        slope[1] = value
        got = attention(X, X, X, score_mod=lambda s, b, h, i, j: s * slope[h], backend=backend)
        factor = np.array([0, value])[:, None, None]
        expected = attention(X, X, X, scale=0, attn_bias=S * factor)
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@needs_torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_stand_in_is_named(backend):
    requiring, softmax = torch.ones(2, requires_grad=True), torch.softmax
    for function, sentence in (
        (lambda s, b, h, i, j: torch.softmax(s, -1), "torch.softmax is unknown to minimha"),
        (lambda s, b, h, i, j: softmax(s, -1), "torch.softmax is unknown to minimha"),
        (lambda s, b, h, i, j: s * requiring[h], "requiring requires grad, but minimha"),
    ):
        with pytest.raises(TypeError, match=sentence):
            attention(X, X, X, score_mod=function, backend=backend)
    with pytest.raises(TypeError, match=r"torch\.softmax is unknown"):
        block_mask(lambda b, h, i, j: torch.softmax(i, -1), 20, 20)
