"""Local files: atomic writes, flushes to disk, hashes, locks among the processes of a machine."""

import ctypes
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from gristmill.errors import wrap_write_errors
from gristmill.paths import scheme_of

PARTIAL = ".partial"  # suffix of temporary files; the next attempt removes one left by an interrupted write
_SMALL_BYTES = 64 << 10  # of a file that is hashed without a buffer, whose allocation would take longer
_FEW = 8  # files that are flushed one by one
_IS_FLUSHED_LATER: ContextVar[bool] = ContextVar("is_flushed_later", default=False)


def partial_path(path: Path) -> Path:
    """Return the temporary name of `path`, in the same folder, so that the rename is atomic."""
    return path.with_name(path.name + PARTIAL)


def unique_partial_path(path: Path) -> Path:
    """Return the temporary name of `path`, unique to this call, as the worker of a killed run may still be writing."""
    return Path(f"{path}.{secrets.token_hex(4)}{PARTIAL}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; rename it to `path` on success, remove it on an error.

    Its bytes are on disk before the rename, unless in `flush_later`. Raises OutputError if `path` cannot be written.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic_write(target) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> target.read_text()
    'all of it'
    """
    assert not scheme_of(path), f"{path} is remote"
    temporary = unique_partial_path(path)
    with wrap_write_errors(path):
        if not path.parent.is_dir():  # mkdir takes a lock of the file system for which other processes wait
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if not _IS_FLUSHED_LATER.get():
                flush_to_disk(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which becomes `path` as atomic_write says."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        yield file


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def concatenate(pieces: Iterable[Path], target: Path) -> None:
    """Write the concatenation of files to `target` atomically."""
    with open_atomically(target) as joined:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        start = file.read(_SMALL_BYTES)
        if len(start) < _SMALL_BYTES and not file.read(1):
            return hashlib.sha256(start).hexdigest()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Fsync a file. Call it before a rename, so that a power cut cannot leave an empty file under the final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def flush_later() -> Iterator[None]:
    """Context in which atomic_write leaves it to the caller to flush the files to disk: many at once are cheaper."""
    token = _IS_FLUSHED_LATER.set(True)
    try:
        yield
    finally:
        _IS_FLUSHED_LATER.reset(token)


def flush_all(paths: Sequence[Path]) -> None:
    """Flush files to disk: each of a few, or for many their file system, which takes about as long as one."""
    if len(paths) <= _FEW:
        for path in paths:
            flush_to_disk(path)
        return
    descriptor = os.open(paths[0], os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            os.sync()
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context: hold an exclusive lock on `path` among the processes of this machine.

    The operating system releases it when the process ends.
    """
    assert not scheme_of(path), f"{path} is remote"
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")  # not "w": to truncate even an empty file may wait for the disk
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
