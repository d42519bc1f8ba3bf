"""Send records with arrays through a pipe: JSON, then the arrays' bytes, without pickle."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from minimha.equations.arrays import FLOAT8, extension

HEADER = struct.Struct("<4sIQQ")  # the mark, a checksum and two sizes
MARK = b"mha:"
LARGEST = 2**32  # the most bytes of either half of a record


def send(stream: IO[bytes], record: Mapping[str, Any]) -> None:
    """Write a record, a dict of arrays and JSON values, to a stream."""
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in record.items() if name not in arrays}
    bodies = {name: np.ascontiguousarray(_known(array)) for name, array in arrays.items()}
    axes = {
        name: (FLOAT8 if arrays[name].dtype.name == FLOAT8 else body.dtype.str, body.shape)
        for name, body in bodies.items()
    }
    head = json.dumps({"plain": plain, "arrays": axes}, default=_scalar).encode()
    body = b"".join(array.tobytes() for array in bodies.values())
    checksum = zlib.crc32(body, zlib.crc32(head))
    stream.write(HEADER.pack(MARK, checksum, len(head), len(body)) + head + body)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read the next record; return None if the stream ends, even in the middle of a record.

    Raises ValueError if the stream holds anything that ``send`` did not write.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    mark, checksum, *sizes = HEADER.unpack(header)
    if mark != MARK or max(sizes) > LARGEST:
        raise ValueError("no record begins here")
    head, body = (stream.read(size) for size in sizes)
    if [len(head), len(body)] != sizes:
        return None
    if zlib.crc32(body, zlib.crc32(head)) != checksum:
        raise ValueError("the record is damaged")
    described = json.loads(head)
    record: dict[str, Any] = described["plain"]
    start = 0
    for name, (dtype, shape) in described["arrays"].items():
        count = int(np.prod(shape))
        known = extension(name, FLOAT8) if dtype == FLOAT8 else dtype
        array = np.frombuffer(body, known, count, start).reshape(shape)
        record[name] = array
        start += array.nbytes
    return record


def _known(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert bfloat16 to float32, which loses nothing, and float8 to its bytes."""
    if array.dtype.name == FLOAT8:
        return array.view(np.uint8)
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _scalar(value: Any) -> Any:
    """Convert a NumPy scalar to a number, and one of the problems' functions to its name."""
    return value.__name__ if callable(value) else value.item()
