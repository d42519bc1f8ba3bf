"""Read problems and matrices from files that may be broken or malicious.

Every size is checked against a limit before anything of that size is read.
"""

from __future__ import annotations

import csv
import difflib
import inspect
import io
import json
import math
import os
import re
import stat
import warnings
import zipfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.api import attention
from minimha.cli.arguments import number
from minimha.equations.arguments import counted
from minimha.explain.trace import Trace

MAX_DEPTH = 8  # of nested lists; no array of this library is deeper
LARGEST_TEXT = 2**25  # bytes of a CSV or JSON file, whose numbers take some 50 each in memory
LARGEST_INPUT = 2**27  # numbers in all arrays of an npz file: 1 GiB in float64
LARGEST_PIECE = 2**20  # bytes that are read of an archive at once
LONGEST_HEADER = 2**16  # bytes, of an array
FUNCTIONS = ("score_mod", "mask_mod", "tap")  # which no file can hold
KEYS = tuple(name for name in inspect.signature(attention).parameters if name not in FUNCTIONS)


def read_problem(name: str) -> dict[str, Any] | Trace:
    """Read a JSON or npz file; return the arguments of ``attention``, or an exported trace.

    A file with the key ``steps`` (JSON) or ``trace`` (npz) is a trace. In JSON, null is read as
    None, and the texts "-inf", "inf" and "nan" as numbers. Nothing in an npz file is unpickled.
    """
    path = Path(name)
    readers = {".json": _read_json, ".npz": _read_npz}
    if path.suffix not in readers:
        raise ValueError(f"{path} ends in {path.suffix!r}: expected a .json, .npz or .zarr file")
    return readers[path.suffix](path)


def read_matrix(name: str) -> NDArray[np.float64]:
    """Return the numbers of a CSV file without a header, shape (rows, columns), float64."""
    numbers, first, width = array("d"), 0, 0
    for line, fields in read_rows(name):
        first, width = first or line, width or len(fields)
        if len(fields) != width:
            came = counted(len(fields), "number")
            raise ValueError(f"{name} is ragged: line {line} has {came}, line {first} has {width}")
        numbers.extend(_field(name, line, n, text) for n, text in enumerate(fields, 1))
    return np.array(numbers).reshape(-1, width)


def read_rows(name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each row of a CSV file, without blank lines.

    A ``#`` begins a comment. If semicolons separate the fields, commas are decimal commas, which
    become points.
    """
    path = Path(name)
    text = re.sub(r"#[^\r\n]*", "", read_text(path))
    has_semicolons = ";" in text
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=";" if has_semicolons else ",")
    is_empty = True
    try:
        for fields in rows:
            if any(field.strip() for field in fields) or len(fields) > 1:
                is_empty = False
                yield rows.line_num, [f.replace(",", ".") if has_semicolons else f for f in fields]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    if is_empty:
        raise ValueError(f"{path} is empty: expected rows of numbers separated by commas")


def as_mask(name: str, numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Convert 0 and 1 to a boolean mask, where 1 means "may attend".

    Raise ValueError for other numbers.
    """
    if numbers.dtype.kind not in "biuf" or not (legal := np.isin(numbers, (0, 1))).all():
        came = numbers.dtype if numbers.dtype.kind not in "biuf" else f"{numbers[~legal][0]:g}"
        raise ValueError(f"{name} holds {came}: expected 1 (may attend) and 0 (may not)")
    return numbers.astype(np.bool_)


def as_whole(name: str, numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Convert a file's numbers to integers; raise ValueError for a number that is not whole."""
    is_wrong = ~(np.isfinite(numbers) & (numbers == np.round(numbers)) & (abs(numbers) < 1 << 53))
    if is_wrong.any():
        raise ValueError(f"{name} holds {numbers[is_wrong][0]:g}: expected whole numbers")
    return numbers.astype(np.int64)


class _InPieces(io.FileIO):
    """A file that refuses to read much at once, which a forged zip archive may ask for."""

    def read(self, size: int | None = -1, /) -> bytes | Any:
        if size is not None and size > LARGEST_PIECE:
            raise ValueError(f"its table of contents has {size:,} bytes")
        return super().read(size)


def _open(path: Path) -> _InPieces:
    """Open a file or a pipe; raise ValueError for a device or socket, which may never end."""
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise ValueError(f"{path} is a device or a socket, which may never end: expected a file")

    def at_once(name: str, flags: int) -> int:  # without waiting for a pipe's first writer
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    file = _InPieces(path, opener=at_once)
    if stat.S_ISFIFO(mode):
        os.set_blocking(file.fileno(), True)
    return file


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; raise ValueError if it cannot be read or is too long."""
    try:
        with io.BufferedReader(_open(path)) as file:
            content = file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_TEXT:
        raise ValueError(
            f"{path} is too long: expected at most {LARGEST_TEXT:,} bytes of text; larger arrays "
            f"can be in an npz file"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: expected UTF-8") from None


def check_keys(path: Path, keys: Sequence[str]) -> None:
    """Raise ValueError if a key is no argument of ``attention``, or if q, k or v is missing."""
    for key in keys:
        if key not in KEYS:
            near = difflib.get_close_matches(key[:40].lower(), KEYS, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{path} has the key {key!r}: {meant}expected {', '.join(KEYS)}")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{path} has a key twice: which one counts?")
    for key in ("q", "k", "v"):
        if key not in keys:
            raise ValueError(f"{path} lacks the key {key!r}: q, k and v are needed")


def _field(name: str, line: int, n: int, text: str) -> float:
    """Return one number of a CSV file; refuse NaN, because it often marks a missing number."""
    try:
        found = number(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise ValueError(
            f"{name}, line {line}, field {n} is {text.strip()!r}: expected {_expected(text)}"
        )
    return found


def _expected(text: str) -> str:
    """Return a phrase for what is expected instead of a field's ``text``."""
    if re.fullmatch(r"\s*[-−+]?\d+,\d+\s*", text):
        return "a decimal point, or semicolons between numbers with decimal commas"
    if re.fullmatch(r"\s*[-−+]?[\d.]+[eE]\+?\d+\s*", text):
        return "at most 1.8e308, the largest float64"
    if text.strip().lower() == "nan":
        return "a number (a NaN that is meant can be in a JSON or npz file)"
    return "a number (rows of numbers separated by commas, no header)"


def _read_json(path: Path) -> dict[str, Any] | Trace:
    try:
        found = json.loads(
            read_text(path), object_pairs_hook=_without_duplicates, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: expected matrices, 2 to 4 deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}: expected an object with q, k and v")
    if "steps" in found:
        return _trace(path, found)
    check_keys(path, list(found))
    return {key: _from_json(key, value) for key, value in found.items()}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} occurs twice in one JSON object: which one counts?")
        found[name] = value
    return found


def _finite(text: str) -> float:
    """Return the finite number ``text`` of a JSON file, where infinity is a string."""
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:40]} is too large: expected at most 1.8e308, the largest float64")
    return found


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(f"{name} is an object, {{…}}: expected rows of numbers, [[1, 2], [3, 4]]")
    if not isinstance(value, list) or name == "window_size":
        return value
    array = np.array(_numbers(name, value, depth=0))
    return as_mask(name, array) if name == "attn_mask" else array


def _numbers(name: str, value: list[Any], depth: int) -> list[Any]:
    """Return a nested list, checked to be rectangular and to hold only numbers."""
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


def _read_npz(path: Path) -> dict[str, Any] | Trace:
    def check(keys: list[str]) -> None:
        if "trace" not in keys:
            check_keys(path, keys)

    arrays = read_arrays(path, check)
    if "trace" in arrays:
        with _refusing(path):
            record = json.loads(str(arrays.pop("trace")))
        return _trace(path, record, arrays)
    return {key: _from_npz(key, array) for key, array in arrays.items()}


def read_arrays(
    path: Path, check_keys: Callable[[list[str]], None] = lambda keys: None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file by name.

    ``check_keys`` is called with all names before any array is read, and may raise an error.
    """
    try:
        file = _open(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        with _refusing(path):
            archive = zipfile.ZipFile(file)
            members = {info: info.filename.removesuffix(".npy") for info in archive.infolist()}
        check_keys(list(members.values()))
        with _refusing(path):
            total = sum(_size(archive, info) for info in members)
        if total > LARGEST_INPUT:
            raise ValueError(
                f"{path} holds {total:,} numbers: expected at most {LARGEST_INPUT:,} in all arrays"
            )
        with _refusing(path):
            return {key: _array(archive, info) for info, key in members.items()}


def _trace(
    path: Path, record: dict[str, Any], arrays: dict[str, NDArray[Any]] | None = None
) -> Trace:
    """Return the trace that was exported as ``record``."""
    from minimha.explain.reading import trace_from

    try:
        return trace_from(record, arrays)
    except ValueError as error:
        raise ValueError(f"{path} has steps, but {error}") from None


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Convert any error from a broken archive (zlib, zipfile, NumPy, …) to one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about arrays that Python 2 wrote, which are read correctly
            yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is refused: expected an npz archive of plain arrays; objects and pickles are "
            f"never loaded ({error})"
        ) from None


def _size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Return the size of an array in float64 numbers, from its header alone."""
    with archive.open(info) as member:
        start = io.BytesIO(member.read(LONGEST_HEADER))
    version = np.lib.format.read_magic(start)
    read_header = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read_header = np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(start)
    return math.prod(map(abs, shape)) * max(1, dtype.itemsize // 8)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _from_npz(name: str, array: NDArray[Any]) -> Any:
    if array.ndim == 0:
        return array.item()
    if name == "window_size":
        return array.tolist()
    return as_mask(name, array) if name == "attn_mask" else array
