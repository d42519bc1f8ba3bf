"""Call other libraries' attention on the same arrays, for comparison in ``minimha.bench``.

Each library is imported where it is used, so that none is required. The extra ``bench`` installs
them.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.bench.shapes import Inputs

LIBRARIES = ("torch", "onnxruntime", "onnx")


class Peer(NamedTuple):
    """A function to time: ``run`` calls it, and ``as_array`` converts its result to NumPy."""

    run: Callable[[], Any]
    as_array: Callable[[Any], NDArray[Any]]


def load() -> list[str]:
    """Import the libraries to compare with, and return the names of those not installed."""
    absent = [name for name in LIBRARIES if find_spec(name) is None]
    for name in LIBRARIES:
        if name not in absent:
            import_module(name)
    return absent


def peers(inputs: Inputs, threads: int) -> dict[str, Peer]:
    """Return the installed libraries' functions that support the problem, by name.

    Each library uses ``threads`` threads, except NumPy, which is left out if its scores do not fit
    into memory.
    """
    found = numpy_peers(inputs) if _scores_fit(inputs) else {}
    if find_spec("torch"):
        found |= torch_peers(inputs, threads)
    if find_spec("onnxruntime") and find_spec("onnx"):
        found |= onnxruntime_peers(inputs, threads)
    return found


def numpy_peers(inputs: Inputs) -> dict[str, Peer]:
    """Return NumPy's softmax(Q Kᵀ / √D) V in float32, as the candidate "NumPy"."""
    run = partial(attention, *inputs.arrays, **inputs.options, backend="dense")
    return {"NumPy": Peer(run, np.asarray)}


def _scores_fit(inputs: Inputs) -> bool:
    """Return whether there is memory for NumPy's three arrays of the size of the scores."""
    (B, H, Lq, _), Lk = inputs.q.shape, inputs.k.shape[2]
    pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 0
    return not pages or 3 * 4 * B * H * Lq * Lk < pages * os.sysconf("SC_PAGE_SIZE")


def torch_peers(inputs: Inputs, threads: int) -> dict[str, Peer]:
    """Return calls of ``torch.nn.functional.scaled_dot_product_attention``, by name.

    If H = Hkv, there is one call, "torch SDPA". If query heads share keys, the call "torch SDPA
    GQA" passes ``enable_gqa=True``. If there is also only one query and no mask, a second call is
    "torch SDPA folded", in which query heads that share keys become queries of one head.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(array) for array in inputs.arrays)
    B, H, Lq, D = q.shape
    Hkv = k.shape[1]
    mask = None if inputs.whole_mask is None else torch.from_numpy(inputs.whole_mask)
    options = {"is_causal": inputs.is_causal and mask is None, "attn_mask": mask}

    def as_array(output: Any) -> NDArray[Any]:
        return np.asarray(output.numpy().reshape(B, H, Lq, -1))

    if Hkv == H:
        return {"torch SDPA": Peer(lambda: sdpa(q, k, v, **options), as_array)}
    found = {"torch SDPA GQA": Peer(lambda: sdpa(q, k, v, **options, enable_gqa=True), as_array)}
    if Lq == 1 and mask is None and not inputs.is_causal:
        folded = q.reshape(B, Hkv, H // Hkv, D)
        found["torch SDPA folded"] = Peer(lambda: sdpa(folded, k, v), as_array)
    return found


def onnxruntime_peers(inputs: Inputs, threads: int) -> dict[str, Peer]:
    """Return calls of onnxruntime's attention operators that support the problem, by name.

    "ORT Attention-23" supports every problem, and "ORT MHA" problems with H = Hkv. "ORT GQA" needs
    Lq = Lk and a causal mask or a window to the left.
    """
    B, H, Lq, _ = inputs.q.shape
    Hkv, Lk = inputs.k.shape[1:3]
    mask = inputs.whole_mask
    is_causal = inputs.is_causal and mask is None

    def whole(outputs: list[Any]) -> NDArray[Any]:
        return np.asarray(outputs[0])

    def packed(outputs: list[Any]) -> NDArray[Any]:
        return np.asarray(outputs[0].reshape(B, Lq, H, -1).swapaxes(1, 2))

    feeds: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if mask is not None:
        feeds["mask"] = np.broadcast_to(mask, (B, 1, Lq, Lk))
    run = _session("Attention", "", feeds, threads, is_causal=int(is_causal))
    found = {"ORT Attention-23": Peer(run, whole)}
    rows = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, array.shape[2], -1)
        for name, array in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    if Hkv == H:
        feeds = {**rows}
        if mask is not None:
            lowest = np.finfo(np.float32).min
            bias = np.where(mask, np.float32(0), lowest)
            feeds |= {"": None, " ": None, "bias": np.broadcast_to(bias, (B, 1, Lq, Lk))}
        run = _session(
            "MultiHeadAttention", "com.microsoft", feeds, threads,
            num_heads=H, unidirectional=int(is_causal),
        )  # fmt: skip
        found["ORT MHA"] = Peer(run, packed)
    is_left_window = inputs.window is not None and inputs.window[1] == 0
    if Lq == Lk and inputs.mask is None and (inputs.is_causal or is_left_window):
        lengths = {"s": np.full(B, Lk - 1, np.int32), "t": np.array(Lk, np.int32)}
        window = inputs.window[0] + 1 if inputs.window else -1
        run = _session(
            "GroupQueryAttention", "com.microsoft", {**rows, "": None, " ": None, **lengths},
            threads,
            outputs=("o", "present_k", "present_v"),
            num_heads=H, kv_num_heads=Hkv, local_window_size=window,
        )  # fmt: skip
        found["ORT GQA"] = Peer(run, packed)
    return found


def _session(
    operator: str, domain: str, feeds: dict[str, Any], threads: int,
    outputs: tuple[str, ...] = ("o",), **attributes: Any,
) -> Callable[[], Any]:  # fmt: skip
    """Prepare a call of a one-operator model on ``feeds``, where None is an absent input."""
    import onnxruntime
    from onnx import TensorProto, helper

    given = {name: array for name, array in feeds.items() if array is not None}
    names = [name if array is not None else "" for name, array in feeds.items()]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in given.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    node = helper.make_node(operator, names, list(outputs), domain=domain, **attributes)
    model = helper.make_model(
        helper.make_graph([node], operator, inputs, results),
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
    return lambda: session.run(["o"], arrays)
