"""Read safetensors files: 8 bytes with the header's length, a JSON header, and the tensors' data.

Files are memory-mapped, so float32 weights take no memory besides the system's page cache. No
package is needed.

The format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.models.checkpoints.tensors import BFLOAT16
from minimha.models.files import advise_large_pages, check_file, read_bytes

Array = NDArray[Any]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
LARGEST_INDEX = 2**25
DTYPES: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": BFLOAT16, "U8": "u1"}


def check_no_pickle(path: Path) -> None:
    """Raise ValueError for a pickle, or for a folder that has weights only in pickles."""
    names = [path] if path.is_file() else sorted(path.glob("*"))
    pickles = [name for name in names if name.suffix in PICKLES]
    if pickles and not any(name.suffix == ".safetensors" for name in names):
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run any code when it is opened: convert it where "
            f"you trust it, with transformers' AutoModelForCausalLM.from_pretrained(folder)"
            f".save_pretrained(new_folder)"
        )


def read_folder(folder: Path) -> dict[str, Array]:
    """Return all tensors of a folder by name, from one file or from all files of its index.

    Raise ValueError if the files are missing or damaged.
    """
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return read(folder / WHOLE)
    text = read_bytes(folder / INDEX, LARGEST_INDEX)
    try:
        index = json.loads(text)
        shards = set(index["weight_map"].values())
        is_valid = all(Path(shard).name == shard for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{folder / INDEX} is damaged: expected a weight_map from tensors to files beside it"
        )
    tensors: dict[str, Array] = {}
    for shard in sorted(shards):
        tensors |= read(folder / shard)
    return tensors


def read(path: Path) -> dict[str, Array]:
    """Return the tensors of a file by name, as views of the memory-mapped file."""
    check_file(path)
    if path.stat().st_size < 8:
        raise ValueError(f"{path} is damaged: it ends before its header")
    mapped = np.memmap(path, np.uint8, mode="r")
    advise_large_pages(mapped)
    data = np.asarray(mapped)
    length = int(data[:8].view("<u8")[0])
    if length > min(LARGEST_HEADER, data.size - 8):
        raise ValueError(f"{path} is damaged: its header would have {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        rest = data[8 + length :]
        tensors = {name: _tensor(name, rest, **entry) for name, entry in header.items()}
        spans = sorted(entry["data_offsets"] for entry in header.values())
        if [*(begin for begin, _ in spans), rest.size] != [0, *(end for _, end in spans)]:
            raise ValueError("its tensors overlap, or leave gaps")
        return tensors
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _tensor(
    name: str, data: NDArray[np.uint8], dtype: str, shape: list[int], data_offsets: list[int]
) -> Array:
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} is {dtype}, expected one of {', '.join(DTYPES)}")
    begin, end = data_offsets
    expected = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if not 0 <= begin <= end <= data.size or end - begin != expected:
        raise ValueError(
            f"tensor {name} of shape {shape} in {dtype} should have {expected} bytes, but has "
            f"{begin} to {end} of {data.size}"
        )
    array: Array = data[begin:end].view(DTYPES[dtype]).reshape(shape)
    return array
