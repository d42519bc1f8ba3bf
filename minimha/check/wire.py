"""Records with arrays on a pipe: JSON, then the arrays' bytes; nothing is unpickled."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

HEADER = struct.Struct("<4sIQQ")  # the mark, a checksum and two sizes
MARK = b"mha:"
LARGEST, PART = 2**32, 2**20  # bytes of a record's halves, and of what is read at once


def send(stream: IO[bytes], record: Mapping[str, Any]) -> None:
    """Write a record: a flat mapping of arrays, and of what JSON has."""
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in record.items() if name not in arrays}
    bodies = {name: np.ascontiguousarray(_known(array)) for name, array in arrays.items()}
    axes = {name: (body.dtype.str, body.shape) for name, body in bodies.items()}
    head = json.dumps({"plain": plain, "arrays": axes}, default=_scalar).encode()
    body = b"".join(array.tobytes() for array in bodies.values())
    checksum = zlib.crc32(body, zlib.crc32(head))
    stream.write(HEADER.pack(MARK, checksum, len(head), len(body)) + head + body)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next record; None where the stream ends, also in the middle of one.

    Raises
    ------
    ValueError
        What comes is not what ``send`` wrote: something else wrote to the stream, too.
    """
    header = _read(stream, HEADER.size)
    if len(header) < HEADER.size:
        return None
    mark, checksum, head_size, body_size = HEADER.unpack(header)
    if mark != MARK or max(head_size, body_size) > LARGEST:
        raise ValueError(f"expected a record of at most {LARGEST:,} bytes, got {header!r}")
    head, body = _read(stream, head_size), _read(stream, body_size)
    if len(head) < head_size or len(body) < body_size:
        return None
    if zlib.crc32(body, zlib.crc32(head)) != checksum:
        raise ValueError("something was written into the middle of a record")
    described = json.loads(head)
    record: dict[str, Any] = described["plain"]
    start = 0
    for name, (dtype, shape) in described["arrays"].items():
        count = int(np.prod(shape))
        array = np.frombuffer(body, dtype, count, start).reshape(shape)
        record[name] = array
        start += array.nbytes
    return record


def _read(stream: IO[bytes], size: int) -> bytes:
    """``size`` bytes, or fewer where the stream ends."""
    found = bytearray()
    while len(found) < size and (part := stream.read(min(PART, size - len(found)))):
        found += part
    return bytes(found)


def _known(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bfloat16 as float32, which every reader knows, losing nothing."""
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _scalar(value: Any) -> Any:
    return value.item()
