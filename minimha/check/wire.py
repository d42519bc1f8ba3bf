"""Records with arrays on a pipe: JSON, then the arrays' bytes; nothing is unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

LENGTHS = struct.Struct("<QQ")


def send(stream: IO[bytes], record: Mapping[str, Any]) -> None:
    """Write a record: a flat mapping of arrays, and of what JSON has."""
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in record.items() if name not in arrays}
    bodies = {name: np.ascontiguousarray(_known(array)) for name, array in arrays.items()}
    axes = {name: (body.dtype.str, body.shape) for name, body in bodies.items()}
    head = json.dumps({"plain": plain, "arrays": axes}, default=_scalar).encode()
    body = b"".join(array.tobytes() for array in bodies.values())
    stream.write(LENGTHS.pack(len(head), len(body)) + head + body)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next record; None where the stream ends, also in the middle of one."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head_size, body_size = LENGTHS.unpack(lengths)
    head, body = stream.read(head_size), stream.read(body_size)
    if len(head) < head_size or len(body) < body_size:
        return None
    described = json.loads(head)
    record: dict[str, Any] = described["plain"]
    start = 0
    for name, (dtype, shape) in described["arrays"].items():
        count = int(np.prod(shape))
        array = np.frombuffer(body, dtype, count, start).reshape(shape)
        record[name] = array
        start += array.nbytes
    return record


def _known(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bfloat16 as float32, which every reader knows, losing nothing."""
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _scalar(value: Any) -> Any:
    return value.item()
