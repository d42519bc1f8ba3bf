"""Reading a problem from files, and writing results whole or not at all."""

from __future__ import annotations

import csv
import difflib
import inspect
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention

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
    lines = csv.reader(_read_text(path).splitlines())
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


def write_file(name: str, content: bytes, *, force: bool) -> None:
    """Write ``content`` under a temporary name, then rename it to ``name``.

    Raises
    ------
    ValueError
        The folder does not exist, ``name`` is a folder, or it exists and ``force`` is False.
    """
    path = Path(name)
    _check_folder(path)
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder: expected the name of a file")
    if path.exists() and not force:
        raise ValueError(f"--output {path} exists already: add --force to replace it")
    _replace({path: content})


def write_folder(name: str, files: Mapping[str, str], *, force: bool) -> None:
    """Write every file into the folder ``name``, which is made if its parent exists.

    Other files in the folder stay as they are.

    Raises
    ------
    ValueError
        The parent does not exist, ``name`` is a file, or the folder holds something already and
        ``force`` is False.
    """
    path = Path(name)
    _check_folder(path)
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"--output {path} is a file: expected a folder, one file a step goes in it"
        )
    if path.is_dir() and any(path.iterdir()) and not force:
        raise ValueError(f"--output {path} is not empty: add --force to write into it")
    path.mkdir(exist_ok=True)
    _replace({path / name: text.encode() for name, text in files.items()})


def _check_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--output {path}: the folder {path.parent} does not exist, make it first")


def _replace(contents: Mapping[Path, bytes]) -> None:
    """Give every file its content, or, if one cannot be written, none."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, content in contents.items():
            with open(temporary[path], "xb") as stream:
                stream.write(content)
        for path, name in temporary.items():
            os.replace(name, path)
    finally:
        for name in temporary.values():
            name.unlink(missing_ok=True)


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
        found = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}: expected an object with q, k and v")
    return found


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, list) or name == "window_size":
        return value
    try:
        array = np.array(_numbers(name, value))
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(f"{name} is ragged: rows of one matrix must have equal lengths") from None
    return as_mask(name, array) if name == "attn_mask" else array


def _numbers(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(name, part) for part in value]
    if isinstance(value, (bool, int, float)):
        return value
    if value in ("-inf", "inf", "nan"):
        return float(value)
    raise ValueError(f"{name} holds {value!r}: expected a number")


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        content = io.BytesIO(path.read_bytes())
        if not zipfile.is_zipfile(content):
            raise ValueError("this is no zip archive")
        archive = np.load(content, allow_pickle=False)
        found = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is refused: expected an npz archive of plain arrays; objects and pickles are "
            f"never loaded ({error})"
        ) from None
    return found


def _from_npz(name: str, array: NDArray[Any]) -> Any:
    if array.ndim == 0:
        return array.item()
    if name == "window_size":
        return array.tolist()
    return as_mask(name, array) if name == "attn_mask" else array
