"""Reading a problem, or one matrix of it, from files."""

from __future__ import annotations

import csv
import difflib
import inspect
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention

MAX_DEPTH = 8  # of nested lists; no array of this library is deeper
KEYS = tuple(name for name in inspect.signature(attention).parameters if name != "tap")


def read_problem(name: str) -> dict[str, Any]:
    """Return the arguments of ``attention`` that a JSON or npz file holds.

    Keys are ``q``, ``k``, ``v`` and any option of ``attention``; in JSON null is None and "-inf",
    "inf" and "nan" are numbers. An npz is read without unpickling anything.

    Raises
    ------
    ValueError
        The file is missing or broken, holds another key, or lacks q, k or v.
    """
    path = Path(name)
    readers = {".json": (_read_json, _from_json), ".npz": (_read_npz, _from_npz)}
    if path.suffix not in readers:
        raise ValueError(f"{path} ends in {path.suffix!r}: expected a .json or .npz file")
    read, convert = readers[path.suffix]
    found = read(path)
    for key in found:
        if key not in KEYS:
            near = difflib.get_close_matches(key.lower(), KEYS, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{path} has the key {key!r}: {meant}expected {', '.join(KEYS)}")
    for key in ("q", "k", "v"):
        if key not in found:
            raise ValueError(f"{path} lacks the key {key!r}: q, k and v are needed")
    return {key: convert(key, value) for key, value in found.items()}


def read_matrix(name: str) -> NDArray[np.float64]:
    """Return the numbers of a CSV file without a header, shape (rows, columns), float64.

    Raises
    ------
    ValueError
        The file is missing or empty, a row is shorter or longer than the first, or something in it
        is not a number.
    """
    path = Path(name)
    try:
        lines = list(csv.reader(_read_text(path).splitlines()))
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    numbered = [(n, cells) for n, cells in enumerate(lines, 1) if cells]
    if not numbered:
        raise ValueError(f"{path} is empty: expected rows of numbers separated by commas")
    first, width = numbered[0][0], len(numbered[0][1])
    for n, cells in numbered:
        if len(cells) != width:
            raise ValueError(
                f"{path} is ragged: row {n} has {len(cells)} numbers, row {first} has {width}"
            )
    return np.array(
        [[_cell(path, n, c, cell) for c, cell in enumerate(cells, 1)] for n, cells in numbered]
    )


def as_mask(name: str, numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a boolean mask from a file's 0 and 1, 1 = may attend.

    Raises
    ------
    ValueError
        Some entry is neither 0 nor 1.
    """
    if numbers.dtype.kind not in "biuf" or not (legal := np.isin(numbers, (0, 1))).all():
        came = numbers.dtype if numbers.dtype.kind not in "biuf" else f"{numbers[~legal][0]:g}"
        raise ValueError(f"{name} holds {came}: expected 1 (may attend) and 0 (may not)")
    return numbers.astype(np.bool_)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: expected UTF-8") from None


def _cell(path: Path, row: int, column: int, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{path}, row {row}, column {column} is {cell.strip()!r}: expected a number (rows of "
            f"numbers separated by commas, no header)"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: expected matrices, 2 to 4 deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}: expected an object with q, k and v")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one JSON object: which one counts?")
    return found


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, list) or name == "window_size":
        return value
    array = np.array(_numbers(name, value, depth=0))
    return as_mask(name, array) if name == "attn_mask" else array


def _numbers(name: str, value: list[Any], depth: int) -> list[Any]:
    """A rectangular nested list of numbers; ValueError says what is there instead."""
    if depth == MAX_DEPTH:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} deep: expected a matrix")
    lengths = {len(part) if isinstance(part, list) else -1 for part in value}
    if len(lengths) > 1:
        raise ValueError(f"{name} is ragged: rows of one matrix must have equal lengths")
    return [
        _numbers(name, part, depth + 1) if isinstance(part, list) else _item(name, part)
        for part in value
    ]


def _item(name: str, value: Any) -> Any:
    if isinstance(value, (int, float)) and (name == "attn_mask" or not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value in ("-inf", "inf", "nan"):
        return float(value)
    raise ValueError(f"{name} holds {value!r}: expected a number")


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        content = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        if not zipfile.is_zipfile(content):
            raise ValueError("this is not a zip archive")
        archive = np.load(content, allow_pickle=False)
        return {name: archive[name] for name in archive.files}
    except MemoryError:
        raise
    except Exception as error:  # a broken archive fails in zlib, zipfile, tokenize, NumPy, ...
        raise ValueError(
            f"{path} is refused: expected an npz archive of plain arrays; objects and pickles are "
            f"never loaded ({error})"
        ) from None


def _from_npz(name: str, array: NDArray[Any]) -> Any:
    if array.ndim == 0:
        return array.item()
    if name == "window_size":
        return array.tolist()
    return as_mask(name, array) if name == "attn_mask" else array
