"""Store machine code on disk, in files named by a digest of everything it depends on.

numba's cache checks only the date of a kernel's source file, and so runs old code after an upgrade.
Here a file's name contains a digest of everything that determines the machine code: all sources of
the kernels, the compilers' versions and settings, and the processor. A file begins with a checksum
of the rest, so that a truncated file is ignored.

Files and folders that another user (except root) could write are not read, since their content
would be executed; see SECURITY.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOG = logging.getLogger("minimha")
PACKAGE = Path(__file__).resolve().parents[1]
WAIT = 120  # seconds to wait for another process that compiles, before this one compiles too
KEPT = 8  # versions of one kernel in a folder: for several CPUs and settings


class File:
    """A file that stores the machine code of one function, in one of ``folders()``.

    ``name`` is the function's name in the log and on disk; a folder keeps at most ``kept`` files of
    that name. ``facts`` is a text that determines the machine code; each text has a separate file.
    """

    def __init__(self, name: str, facts: str, kept: int = KEPT) -> None:
        self.name, self.kept = name, kept
        digest = hashlib.sha256(facts.encode()).hexdigest()
        self.file = f"minimha-{name}-{digest[:32]}.code"
        self._locked = int(digest[:7], 16)  # the byte of the lock file that locks this file

    def read(self, refused: bytes | None = None) -> bytes | None:
        """Return the machine code on disk, or None if there is none.

        Code that equals ``refused`` counts as missing.
        """
        return next((code for _, code in self._found() if code != refused), None)

    def content(self, make: Callable[[], bytes], refused: bytes | None = None) -> bytes:
        """Return the machine code on disk; if there is none, store and return ``make()``.

        Machine code on disk that equals ``refused`` is ignored.
        """
        code = self.read(refused)
        if code is None:
            with self.exclusive():
                code = self.read(refused)
                if code is None:
                    code = make()
                    self.write(code)
        return code

    def path(self) -> Path | None:
        """Return the path of the stored file, or None if no folder has a valid one."""
        return next((path for path, _ in self._found()), None)

    def _found(self) -> Iterator[tuple[Path, bytes]]:
        for folder in folders():
            path = folder / self.file
            with suppress(OSError):
                if is_trusted(folder) and is_trusted(path):
                    content = path.read_bytes()
                    if content[32:] and hashlib.sha256(content[32:]).digest() == content[:32]:
                        yield path, content[32:]

    def write(self, code: bytes) -> None:
        """Write ``code`` to disk and delete old versions; log a warning if that fails."""
        folder = _writable_folder()
        if folder is None:
            _warn_once("no folder for compiled kernels can be written: every process compiles them")
            return
        try:
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".minimha-", suffix=".tmp")
            try:
                with open(descriptor, "wb") as stream:
                    stream.write(hashlib.sha256(code).digest() + code)
                os.chmod(temporary, 0o644)
                os.replace(temporary, folder / self.file)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            versions = folder.glob(f"minimha-{self.name}-*.code")
            for old in sorted(versions, key=lambda x: x.stat().st_mtime)[: -self.kept]:
                old.unlink()
        except OSError as error:
            _warn_once(f"compiled kernels cannot be stored in {folder}: {error.strerror}")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock this file in a ``with`` block.

        If the lock cannot be had within ``WAIT`` seconds, or at all, the block runs without it.
        """
        folder = _writable_folder()
        if folder is None or fcntl is None:
            yield
            return
        try:
            lock = open(folder / f"minimha-{self.name}.lock", "ab")  # noqa: SIM115
        except OSError:
            yield
            return
        with lock:  # closing the file, or the end of the process, releases the lock
            start = time.monotonic()
            while time.monotonic() - start < WAIT:
                try:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._locked)
                    break
                except (BlockingIOError, PermissionError):
                    time.sleep(0.05)
                except OSError:  # a file system without locks
                    break
            yield


def folders() -> list[Path]:
    """Return the folders that may hold machine code, such as NUMBA_CACHE_DIR, in search order."""
    found = [Path(numba.config.CACHE_DIR) / "minimha"] if numba.config.CACHE_DIR else []
    user = _user_cache()  # relative if the user has no home, as in some containers
    return [*found, Path(__file__).parent / "__pycache__", *([user] if user.is_absolute() else [])]


def is_trusted(path: Path) -> bool:
    """Return whether only this user and root can write ``path``; raise OSError if it is missing.

    On Windows the result is always True.
    """
    status = path.stat()
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def digest(facts: list[Any], sources: Iterable[Path]) -> str:
    """Return a SHA-256 digest of the ``repr`` of ``facts`` and of the files ``sources``."""
    whole = hashlib.sha256(repr(facts).encode())
    for path in sources:
        whole.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


def _user_cache() -> Path:
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    elif sys.platform == "darwin":
        base = os.path.join(home, "Library", "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return Path(base) / "minimha"


def _writable_folder() -> Path | None:
    """Return the first folder that only this user and root can write, or None."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_trusted(folder) and os.access(folder, os.W_OK):
                return folder
    return None


@cache
def _warn_once(sentence: str) -> None:
    LOG.warning("minimha: %s", sentence)
