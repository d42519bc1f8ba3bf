"""Machine code on disk: found only by what it was compiled from, read only if nobody else wrote it.

numba's own cache knows a kernel by the date of the one file that it is in, and so runs old code
after an upgrade. Here a file's name has a digest of everything that machine code depends on: all
sources of the kernels, the versions of what compiles them, their settings and the processor. Its
first bytes are a checksum of the rest, so that a truncated file is not found either.

Whoever writes a file decides what runs. Files and folders that another user could write (root
excepted) are not read; see SECURITY.md.
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
WAIT = 120  # seconds for another process that compiles; then this one does it too
KEPT = 8  # versions of one kernel in a folder: of CPUs that share it, and of settings


class File:
    """The machine code of one function, in the first folder that has it.

    ``name`` is what the log and the disk call it, and ``kept`` how many files of that name stay in
    a folder. Its machine code depends on ``facts`` alone: another text is another file.
    """

    def __init__(self, name: str, facts: str, kept: int = KEPT) -> None:
        self.name, self.kept = name, kept
        digest = hashlib.sha256(facts.encode()).hexdigest()
        self.file = f"minimha-{name}-{digest[:32]}.code"
        self._locked = int(digest[:7], 16)  # the byte of the lock file that stands for this file

    def read(self, refused: bytes | None = None) -> bytes | None:
        """The machine code, or None if no folder has it whole, or has but what is ``refused``."""
        return next((code for _, code in self._found() if code != refused), None)

    def content(self, make: Callable[[], bytes], refused: bytes | None = None) -> bytes:
        """The machine code, from disk or, for the first process that asks, from ``make``.

        ``refused`` is machine code that turned out to be of no use: it is passed over.
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
        """Which file has the machine code, if any."""
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
        """Store the machine code; where that fails, say so in the log and go on."""
        folder = _writable_folder()
        if folder is None:
            _warn_once("no folder for compiled kernels can be written: every process compiles anew")
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
            self._prune(folder)
        except OSError as error:
            _warn_once(f"compiled kernels cannot be stored in {folder}: {error.strerror}")

    def _prune(self, folder: Path) -> None:
        """Delete the oldest versions of this function."""
        found = sorted(folder.glob(f"minimha-{self.name}-*.code"), key=lambda x: x.stat().st_mtime)
        for old in found[: -self.kept]:
            old.unlink()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """While one process is in here, others wait, though not for ever.

        They do not wait for another version of the function, which they may have to compile too.
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
        with lock:  # closing it releases the lock, and so does the end of the process
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
    """Where compiled kernels may be: NUMBA_CACHE_DIR, beside the sources, the user's cache."""
    found = [Path(numba.config.CACHE_DIR) / "minimha"] if numba.config.CACHE_DIR else []
    user = _user_cache()  # relative for a user who has no home, as in some containers
    return [*found, Path(__file__).parent / "__pycache__", *([user] if user.is_absolute() else [])]


def is_trusted(path: Path) -> bool:
    """Whether only this user or root can have written it; an OSError if it does not exist."""
    status = path.stat()
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def digest(facts: list[Any], sources: Iterable[Path]) -> str:
    """A digest of ``facts``, by how they print, and of the contents of ``sources``."""
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
    """The first folder that can be written and that nobody else can write."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_trusted(folder) and os.access(folder, os.W_OK):
                return folder
    return None


@cache
def _warn_once(sentence: str) -> None:
    LOG.warning("minimha: %s", sentence)
