"""Read files of a checkpoint; raise ValueError if they are too large or not regular files."""

from __future__ import annotations

import json
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

LARGEST_JSON = 2**22  # bytes


def check_file(path: Path) -> None:
    """Raise ValueError if ``path`` is missing or not a regular file."""
    if not path.is_file():
        raise ValueError(f"{path} is {'no regular file' if path.exists() else 'missing'}")


def read_bytes(path: Path, largest: int) -> bytes:
    """Return a file's bytes; raise ValueError if it is missing or longer than ``largest`` bytes."""
    check_file(path)
    if path.stat().st_size > largest:
        raise ValueError(f"{path} is too long: expected at most {largest:,} bytes")
    return path.read_bytes()


def advise_large_pages(data: Any) -> None:
    """Ask Linux to read the file of a ``np.memmap`` in pages of 2 MB, from now on.

    Every token reads all weights, and finding where each page of 4 kB lies takes a third of that
    time. Pages that are in the system's cache stay as they are.
    """
    mapped, advice = getattr(data, "_mmap", None), getattr(mmap, "MADV_HUGEPAGE", None)
    if isinstance(mapped, mmap.mmap) and advice is not None:
        with suppress(OSError):  # a system without such pages
            mapped.madvise(advice)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file as a dict; raise ValueError for any other content."""
    text = read_bytes(path, LARGEST_JSON)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}: expected an object")
    return value
