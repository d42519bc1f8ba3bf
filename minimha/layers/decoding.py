"""Compute a sublayer for one token, r + f(norm(x)), by compiled code without Python's steps.

``attended`` and ``fed`` return what a transformer's layer computes step by step, up to rounding,
with f attention or a feed-forward. They return None for sublayers, caches and tokens that the
compiled code does not take, and as long as preparing that code is not worth it.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from minimha.equations.problem import Problem
from minimha.kernels import auto
from minimha.layers.cache import KVCache
from minimha.layers.feed_forward import FeedForward
from minimha.layers.linear import Joined
from minimha.layers.multihead import MultiHeadAttention
from minimha.layers.norms import LayerNorm, Norm
from minimha.layers.rope import RoPE

Array = NDArray[Any]
Norms = tuple[Norm | None, Norm | None]  # of f's input, and of its output
KERNEL, ATTENTION = "minimha.kernels.cpu.sublayer", "minimha.kernels.cpu.backend"
SAVED, COMPILING = 2e-4, 2.0  # seconds per call, and once
FLOAT32, ONE, NO_ANGLES = np.dtype(np.float32), np.ones(1, np.int64), (np.empty(0), np.empty(0))


class Attending(NamedTuple):
    """A program for attention to the keys of one cache.

    ``parts`` are what it was made for: attributes of the attention, norms and options.
    """

    program: Any
    ready: Any
    parts: tuple[Any, ...]


# A program serves one thread at a time, which removes it meanwhile. Copies of caches and layers
# have no programs, because these hold addresses.
_of_caches: WeakKeyDictionary[KVCache, Attending] = WeakKeyDictionary()
_of_feed_forwards: WeakKeyDictionary[FeedForward, list[Any]] = WeakKeyDictionary()
_refused: WeakSet[Any] = WeakSet()  # attention and feed-forwards without a program


def attended(
    attention: Any, norms: Norms, x: Array, cache: Any, backend: str, **options: Any
) -> Array | None:
    """Return x + attention(x) of one token x (1, 1, E), and append it to ``cache``, or return None.

    ``norms`` are applied to the attention's input and output. ``options`` are scale, softcap and
    sinks, as in ``minimha.attention``. Raises ValueError if the cache is full.
    """
    if type(cache) is not KVCache or attention in _refused:
        return None
    if not _is_one_token(x, attention.d_model):
        return None
    if backend not in ("auto", "cpu") or not _has_attention():
        return None
    parts = (*vars(attention).values(), *norms, *options.values())
    found = _of_caches.pop(cache, None)
    if found is None or not found.program.is_current() or not _are(parts, found.parts):
        found = _attending(attention, norms, cache, parts, options)
        if found is None:
            return None
    program, ready = found.program, found.ready
    position, slot = int(cache.lengths[0]), int(cache.make_room(ONE)[0])
    ready.q_offset[0], ready.kv_lengths[0] = slot, slot + 1
    angles = NO_ANGLES if attention.rope is None else _angles(attention.rope, position)
    keys, values = (array[:, :, slot] for array in cache.arrays)
    y = np.empty_like(x)
    is_finite = program.run(x, x, y, *angles, keys, values)
    _of_caches[cache] = found
    if not is_finite:  # values may have overflowed, which attention computes in another way
        return None
    cache.count(ONE, 1)
    return y


def fed(feed_forward: Any, norms: Norms, x: Array, source: Array | None) -> Array | None:
    """Return x + feed_forward(source) of one token x (1, 1, E), or None.

    ``source`` is by default x. ``norms`` are applied to the feed-forward's input and output.
    """
    if feed_forward in _refused:
        return None
    E = x.shape[-1]
    if not _is_one_token(x, E) or not _is_one_token(x if source is None else source, E):
        return None
    free = _of_feed_forwards.setdefault(feed_forward, [])
    program, made_for, width = free.pop() if free else (None, (), E)
    if width != E or program is None or not program.is_current() or not _are(norms, made_for):
        program = _feeding(feed_forward, norms, E)
        if program is None:
            return None
    y = np.empty_like(x)
    program.run(x if source is None else source, x, y)
    free.append((program, norms, E))
    return y


def _attending(
    attention: Any, norms: Norms, cache: KVCache, parts: tuple[Any, ...], options: dict[str, Any]
) -> Attending | None:
    """Return the program of attention to the keys of ``cache``, or None if there is none."""
    kernel = _kernel()
    if kernel is None:
        return None
    if not _takes_attention(attention, norms):
        _refused.add(attention)
        return None
    keys, values = cache.arrays[:2]
    widths = [(1, attention.num_kv_heads, n) for n in (attention.head_dim, attention.value_dim)]
    if keys.dtype != FLOAT32 or [(*x.shape[:2], x.shape[3]) for x in (keys, values)] != widths:
        return None
    joined = attention.joined, Joined(attention.W_o)
    if not _have_kernels(attention, joined):
        return None
    H, Hkv, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    program = kernel.Program()
    x = _normed(program, kernel.X, norms[0], attention.d_model)
    q, k, v = program.products(x, joined[0].groups)
    if attention.bias:
        for row, bias in ((q, attention.b_q), (k, attention.b_k), (v, attention.b_v)):
            program.add(row, bias)
    q, k = (_normed_heads(program, attention, *each) for each in (("q", q, H), ("k", k, Hkv)))
    rope = attention.rope
    if rope is not None:
        for row, heads in ((q, H), (k, Hkv)):
            program.rotate(row, heads, rope.width // 2, rope.interleaved)
    program.store(k, kernel.KEY, Hkv, D, keys.strides[1])
    program.store(v, kernel.VALUE, Hkv, attention.value_dim, values.strides[1])
    window = None if cache.window is None else (cache.window - 1, 0)
    problem = Problem.of(
        q.reshape(1, H, 1, D), keys, values, is_causal=True, q_offset=[0], kv_lengths=[1],
        window_size=window, **options,
    )  # fmt: skip
    ready = sys.modules[ATTENTION].plan(problem).ready(problem.q, keys, values)
    (output,) = program.products(program.attention(ready), joined[1].groups)
    if attention.bias:
        program.add(output, attention.b_o)
    _finish(program, kernel, output, norms[1])
    return Attending(program, ready, parts)


def _feeding(f: Any, norms: Norms, E: int) -> Any:
    """Return the program of a feed-forward, or None if there is none."""
    kernel = _kernel()
    if kernel is None:
        return None
    if not _takes_feed_forward(f, norms, E):
        _refused.add(f)
        return None
    first = Joined(f.W_in) if f.W_gate is None else f.joined
    joined = first, Joined(f.W_out)
    if not _have_kernels(f, joined):
        return None
    program = kernel.Program()
    x = _normed(program, kernel.X, norms[0], E)
    *gate, factor = program.products(x, first.groups)
    if f.b_in is not None:
        program.add(factor, f.b_in)
    if gate and f.b_gate is not None:
        program.add(gate[0], f.b_gate)
    operands = (gate[0], factor) if gate else (factor, None)
    hidden = program.activated(f.activation, *operands)
    (output,) = program.products(hidden, joined[1].groups)
    if f.b_out is not None:
        program.add(output, f.b_out)
    _finish(program, kernel, output, norms[1])
    return program


def _takes_attention(attention: Any, norms: Norms) -> bool:
    """Return whether a program can compute this attention."""
    if type(attention) is not MultiHeadAttention:
        return False
    if attention.clip is not None or attention.gate is not None:
        return False
    E, rope = attention.d_model, attention.rope
    if {attention.context_dim, attention.value_source_dim, attention.output_dim} != {E}:
        return False
    if rope is not None and (type(rope) is not RoPE or rope.is_dynamic):
        return False
    named = ("b_q", "b_k", "b_v", "b_o", "g_q", "g_k", "s_q", "s_k")
    rows = (getattr(attention, name, None) for name in named)
    return all(row is None or _is_read(row, row.size) for row in rows) and _are_read(norms, E)


def _takes_feed_forward(f: Any, norms: Norms, E: int) -> bool:
    """Return whether a program can compute this feed-forward for tokens of width E."""
    if type(f) is not FeedForward or f.limit is not None:
        return False
    F, W_gate = f.W_in.shape[1], f.W_in if f.W_gate is None else f.W_gate
    if {f.W_in.shape, W_gate.shape, f.W_out.shape[::-1]} != {(E, F)}:
        return False
    rows = (f.b_in, F), (f.b_gate, F), (f.b_out, E)
    return all(row is None or _is_read(row, n) for row, n in rows) and _are_read(norms, E)


def _kernel() -> Any:
    """Return the compiled code, or None as long as preparing it is not worth it."""
    kernel: Any = auto.worthwhile(KERNEL, None, SAVED, compiling=COMPILING, kind="sublayer")
    if kernel is None:
        auto.spent(SAVED, "sublayer")
        return None
    if not kernel.IS_POSSIBLE:
        return None
    try:
        kernel.compile()
    except kernel.CompilationFailed as error:
        auto.give_up(error)
        return None
    return kernel


def _have_kernels(part: Any, joined: tuple[Joined, ...]) -> bool:
    """Return whether kernels multiply by all matrices of ``part``, and refuse it if never."""
    found = [each.has_kernels() for each in joined]
    if None in found:
        _refused.add(part)
    return all(found)


def _has_attention() -> bool:
    """Return whether an earlier call has loaded the kernel for one query in float32."""
    backend = sys.modules.get(ATTENTION)
    return backend is not None and FLOAT32 in backend.rungs(FLOAT32)[1].KERNEL.compiled


def _normed(program: Any, x: int, norm: Norm | None, E: int) -> Array:
    if norm is None:
        return np.asarray(program.copied(x, E))
    return _by_norm(program, x, norm, E)


def _by_norm(program: Any, x: Any, norm: Norm, E: int) -> Array:
    shift = norm.bias if isinstance(norm, LayerNorm) else None
    return np.asarray(program.norm(x, E, norm.gain, shift, norm.epsilon))


def _normed_heads(
    program: Any, attention: MultiHeadAttention, name: str, x: Array, heads: int
) -> Array:
    """Append the norm of queries or keys; see ``MultiHeadAttention``."""
    if attention.qk_norm is None:
        return x
    gain, shift = getattr(attention, f"g_{name}"), getattr(attention, f"s_{name}", None)
    rows = 1 if attention.qk_norm == "full" else heads
    return np.asarray(program.norm(x, x.size // rows, gain, shift, attention.epsilon, rows))


def _finish(program: Any, kernel: Any, output: Array, norm: Norm | None) -> None:
    """Append y = r + output, with the output normalised if there is a norm."""
    if norm is not None:
        output = _by_norm(program, output, norm, output.size)
    program.add(kernel.R, output, kernel.Y)


def _are(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(parts) == len(others) and all(map(is_, parts, others))


def _is_one_token(x: Array, E: int) -> bool:
    return x.shape == (1, 1, E) and x.dtype == FLOAT32 and bool(x.flags.c_contiguous)


def _is_read(row: Array, n: int) -> bool:
    """Return whether the program can read a bias or gain of n numbers in place."""
    is_row = row.dtype == FLOAT32 and row.size == n
    return bool(is_row and row.flags.c_contiguous and row.flags.aligned)


def _are_read(norms: Norms, E: int) -> bool:
    found = [norm for norm in norms if norm is not None]
    rows = [norm.gain for norm in found] + [n.bias for n in found if isinstance(n, LayerNorm)]
    return all(_is_read(row, E) for row in rows)


@lru_cache(4)
def _angles(rope: RoPE, position: int) -> tuple[Array, Array]:
    """Return cos and sin (R/2,) of a token's angles, float64, for all layers."""
    cos, sin = rope.tables([position])
    return np.ascontiguousarray(cos[0]), np.ascontiguousarray(sin[0])
