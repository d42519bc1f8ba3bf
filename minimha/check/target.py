"""Import a function or class by its location, such as ``mykernel.py:attention``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def split(target: str) -> tuple[str, str]:
    """Split ``target`` into a file or module, and a name in it.

    Raises ValueError if ``target`` has another form or the file does not exist.

    >>> split("torch.nn.functional:scaled_dot_product_attention")
    ('torch.nn.functional', 'scaled_dot_product_attention')
    """
    where, _, name = target.rpartition(":")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{target!r} names no function: expected mykernel.py:attention or "
            f"package.module:attention"
        )
    if where.endswith(".py") or os.sep in where:
        if not Path(where).is_file():
            raise ValueError(f"{where} cannot be read: no such file")
    elif not all(part.isidentifier() for part in where.split(".")):
        raise ValueError(f"{where!r} is no module's name: expected a file.py or package.module")
    return where, name


def load(target: str) -> Any:
    """Import a function or class by its location; raise ValueError if that fails."""
    where, name = split(target)
    try:
        module = _file(Path(where)) if where.endswith(".py") or os.sep in where else _module(where)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where} cannot be imported: {_place(error, where)}") from None
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, dir(found), 1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has no {part!r}{meant}") from None
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{target} is of type {kind}: expected a function that can be called")
    return found


def _module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))  # it may import its neighbours
    name = path.stem if path.stem.isidentifier() else "kernel"
    if name in sys.modules:  # do not shadow a library of that name
        name = f"checked_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _place(error: BaseException, where: str) -> str:
    """Return the error as text, with the line of the file ``where`` that raised it, if any."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(where)]
    return f"{words} (line {lines[-1]})" if lines else words
