"""Write problems as files for any language, and read answers that were computed elsewhere.

Each problem is an npz file with q, k, v and options; ``problems.json`` lists all files. An answer
is an array ``output``, and an array ``lse`` if the problem asks for it. Answers are in one file
``NAME.out.npz`` per problem, or are arrays ``NAME.output`` and ``NAME.lse`` in one npz file. To
refuse a problem, answer with an array ``refused``, a single True.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minimha.check.answer import MISSING, Answer
from minimha.check.problems import Graded

Array = NDArray[Any]

MANIFEST = "problems.json"
ANSWER = ".out.npz"  # the suffix of a problem's name
PARTS = ("output", "lse")
REFUSED = "refused"


def names_of(problems: Sequence[Graded]) -> list[str]:
    """Return the problems' file names without extension, such as ``01_one_head``."""
    return [
        f"{n:02}_{re.sub('[^a-z0-9]+', '_', problem.name.lower()).strip('_')}"
        for n, problem in enumerate(problems, 1)
    ]


def files_of(problems: Sequence[Graded], dtype: str) -> dict[str, str | bytes]:
    """Map file names to contents: each problem as an npz file, and ``problems.json``."""
    files: dict[str, str | bytes] = {}
    listed = []
    for name, problem in zip(names_of(problems), problems, strict=True):
        arrays = _arrays(problem, dtype)
        np.savez(stream := io.BytesIO(), **arrays)  # type: ignore[arg-type]
        files[f"{name}.npz"] = stream.getvalue()
        *rows, _ = problem.arguments["q"].shape
        asks = bool(problem.arguments.get("return_lse"))
        listed.append(
            {
                "file": f"{name}.npz",
                "answer": f"{name}{ANSWER}",
                "name": problem.name,
                "shows": problem.shows,
                "options": sorted(set(arrays) - {"q", "k", "v"}),
                "output": [*rows, problem.arguments["v"].shape[-1]],
                "lse": rows if asks else None,
            }
        )
    manifest = {"dtype": dtype, "digest": digest(problems), "problems": listed}
    return files | {MANIFEST: json.dumps(manifest, indent=1) + "\n"}


def digest(problems: Sequence[Graded]) -> str:
    """Return a hash of the problems, as 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, problem in zip(names_of(problems), problems, strict=True):
        found.update(name.encode())
        for key, value in sorted(_arrays(problem, "float32").items()):
            found.update(key.encode() + value.tobytes())
    return found.hexdigest()[:16]


def check_names(found: Iterable[str], problems: Sequence[Graded], where: str) -> None:
    """Raise ValueError if ``found`` has a name that is not that of an answer to a problem.

    ``where`` is the source of the names, for the message.
    """
    names = names_of(problems)
    expected = {f"{name}.{part}" for name in names for part in (*PARTS, REFUSED)}
    for name in found:
        if name not in expected:
            raise ValueError(
                f"{where} has the array {name!r}, which is the answer to none of these problems: "
                f"expected names such as {names[0]}.output"
            )


def answers_of(
    arrays: Mapping[str, Array], problems: Sequence[Graded], where: str, dtype: str
) -> list[Answer]:
    """Convert arrays ``NAME.output`` and ``NAME.lse`` to one answer per problem."""
    names = names_of(problems)
    if not arrays:
        raise ValueError(f"{where} holds no answers: expected arrays such as {names[0]}.output")
    return [
        _answer(arrays, name, problem, dtype) for name, problem in zip(names, problems, strict=True)
    ]


def check_manifest(text: str, problems: Sequence[Graded], where: str, dtype: str) -> None:
    """Raise ValueError if ``text``, a ``problems.json``, lists other problems or another dtype."""
    try:
        manifest = json.loads(text)
        other, found = manifest["dtype"], manifest["digest"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{where} is not the list that --write-problems wrote") from None
    if other != dtype:
        raise ValueError(f"{where} lists problems in {other}, not in {dtype}: add --dtype {other}")
    if found != digest(problems):
        raise ValueError(
            f"{where} lists the problems of another version: the answers there belong to those"
        )


def _answer(arrays: Mapping[str, Array], name: str, problem: Graded, dtype: str) -> Answer:
    output, lse = (arrays.get(f"{name}.{part}") for part in PARTS)
    if output is None:
        is_refused = np.any(arrays.get(f"{name}.{REFUSED}", False))
        return Answer(refusal="its answer says so" if is_refused else MISSING)
    for part, array in zip(PARTS, (output, lse), strict=True):
        if array is not None and array.dtype.kind not in "biuf":
            note = f"{name}.{part} has dtype {array.dtype}: expected numbers"
            return Answer(faults=("not_an_array",), note=note)
    *rows, _ = problem.arguments["q"].shape
    sizes = (*rows, problem.arguments["v"].shape[-1])
    faults: tuple[str, ...] = ()
    note = ""
    if output.shape != sizes:
        faults = ("wrong_shape",)
        note = f"{name}.output has shape {output.shape}: expected (B, H, Lq, Dv) = {sizes}"
    elif lse is not None and lse.shape != tuple(rows):
        faults = ("wrong_shape",)
        note = f"{name}.lse has shape {lse.shape}: expected (B, H, Lq) = {tuple(rows)}"
    is_low = output.dtype == np.float32 and dtype != "float32"  # bfloat16, which npz lacks
    name_of_dtype = dtype if is_low else output.dtype.name
    wide = output.astype(np.float64)
    return Answer(
        wide, None if lse is None else lse.astype(np.float64), None, faults, name_of_dtype, note
    )


def _arrays(problem: Graded, dtype: str) -> dict[str, Array]:
    """Convert the arguments to arrays: None in a window to -1, and bfloat16 to float32."""
    found = {}
    for name, value in problem.arguments.items():
        if value is None:
            continue
        if name == "window_size":
            value = [-1 if side is None else side for side in value]
        array = np.asarray(value)
        if name in ("q", "k", "v") and dtype == "float16":
            array = array.astype(np.float16)
        found[name] = array
    return found
