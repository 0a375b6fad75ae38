"""Files that appear whole or not at all: write to a temporary name, rename when complete."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import writing

PARTIAL = ".partial"  # what an interrupted write leaves behind; never read, overwritten by the next attempt


def partial_path(path: Path) -> Path:
    """The temporary name beside `path`: on the same file system, so that the rename is atomic."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success it becomes `path`, on failure it is removed.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with whole_file(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    temporary = partial_path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            _flush(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def walk(folder: Path) -> Iterator[Path]:
    """Every file below `folder` in name order, links followed, hidden folders and files left out."""
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def rejects_path(output: Path) -> Path:
    """Where the malformed records met while writing `output` are kept."""
    return output.with_name(output.name + ".malformed")


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bytes reach the disk before the name does, so that a power cut cannot leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among processes of this machine; released when the process ends, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
