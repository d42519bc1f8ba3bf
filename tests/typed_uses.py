"""How the types are meant: mypy checks this file, pytest does not run it.

Every wrong use has a ``type: ignore``, and mypy (strict) and pyright (which also reads these
comments) complain about one that is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import minimha
from minimha import attention
from minimha.check import Report, assert_attention
from minimha.layers import KVCache, MultiHeadAttention, RoPE, additive_attention, cosine_attention

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Tensor(Protocol):
    """An array of another library, as type checkers see it."""

    def __array__(self, dtype: Any = None) -> NDArray[Any]: ...
    def __dlpack__(self, *, stream: int | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


def right(x: NDArray[np.float32], t: Tensor, wants: bool, layer: MultiHeadAttention) -> None:
    """What comes out is of the kind that went in, and a pair if a pair is asked for."""
    assert_type(attention(x, x, x), NDArray[Any])
    assert_type(attention([[1.0]], [[1.0]], x, return_lse=False), NDArray[Any])
    assert_type(attention(x, t, x, return_lse=True), tuple[NDArray[Any], NDArray[Any]])
    assert_type(attention(t, t, x, attn_mask=t, backend="cpu"), Tensor)
    assert_type(attention(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(x, x, x, return_lse=wants), Any)
    assert_type(layer(x, is_causal=True, positions=range(4)), NDArray[Any])
    assert_type(layer(t, cache=KVCache(1, 2, 3, 4), softcap=2.0), Tensor)
    assert_type(layer(t, return_weights=True), tuple[Tensor, Tensor])
    assert_type(RoPE(4).rotate(x, [0]), NDArray[Any])
    assert_type(minimha.dialects.torch.scaled_dot_product_attention(t, t, t), Any)
    MultiHeadAttention.from_combined(x, t, x, x, num_heads=2, gate="headwise", W_g=x, rope=RoPE(4))
    cosine_attention(x, x, x, window_size=(None, 0), return_lse=True)
    additive_attention(x, x, x, x, x, x, sinks=[0.0])
    assert_type(minimha.check(attention, speaks="minimha", dtype="bfloat16"), Report)
    assert_type(
        minimha.check("kernel.py:attention").verdict,
        Literal["right", "differs", "wrong", "cannot tell"],
    )
    assert_type(minimha.merge([(x, x)]), tuple[NDArray[np.float32], NDArray[np.float32]])
    assert_type(minimha.merge([attention(t, t, t, return_lse=True)] * 2), tuple[Tensor, Tensor])
    minimha.distributed.striped([x], 2)
    minimha.compile("float32")
    minimha.compile([np.float32, np.dtype("float64"), "bfloat16"])
    attention(x, x, x, scale=np.float32(0.5), softcap=np.array(3.0))
    assert_type(attention(x, x, x, k_scale=1.0, v_scale=[0.5, 0.25]), NDArray[Any])
    assert_attention(attention, timeout=5.0)
    minimha.explain.Trace()
    model = minimha.models.load("folder")
    assert isinstance(model, minimha.models.Transformer)
    assert_type(model.logits([1, 2], cache=model.new_cache(), backend="cpu"), NDArray[Any])
    assert_type(list(model.generate("the cat", 3, top_p=0.9)), list[int])
    minimha.layers.alibi_slopes(2)


def wrong(x: NDArray[np.float32], layer: MultiHeadAttention) -> None:
    """Misspelt options, unknown choices, and options that do not exist where they are given."""
    attention(x, x, x, is_causl=True)  # type: ignore[call-overload]
    attention(x, x, x, backend="gpu")  # type: ignore[call-overload]
    attention(x, x, x, window_size=3)  # type: ignore[call-overload]
    layer(x, is_causl=True)  # type: ignore[call-overload]
    layer(x, return_lse=True)  # type: ignore[call-overload]
    layer(x, backend="numba")  # type: ignore[call-overload]
    MultiHeadAttention(8, 2, qk_norm="heads")  # type: ignore[arg-type]
    MultiHeadAttention.from_heads(x, x, x, x, bq=x)  # type: ignore[call-arg]
    cosine_attention(x, x, x, scales=2.0)  # type: ignore[call-arg]
    additive_attention(x, x, x, x, x, x, softcap=2.0)  # type: ignore[call-arg]
    KVCache(1, 1, 1, 1).attend(x, is_causal=True)  # type: ignore[call-arg]
    minimha.merge([x])  # type: ignore[arg-type]
    minimha.check(x)  # type: ignore[arg-type]
    minimha.check(attention, dialect="torch")  # type: ignore[call-arg]
    minimha.models.world.load().logits([1], backend="gpu")  # type: ignore[call-overload]
    minimha.atention(x, x, x)  # type: ignore[attr-defined]
