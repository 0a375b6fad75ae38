"""Files that appear whole or not at all: write to a temporary name, rename when complete."""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.errors import writing

PARTIAL = ".partial"  # what an interrupted write leaves behind; never read, removed by the next attempt


def partial_path(path: Path) -> Path:
    """The temporary name beside `path`: on the same file system, so that the rename is atomic."""
    return path.with_name(path.name + PARTIAL)


def unique_partial_path(path: Path) -> Path:
    """Such a name that no other process has: one that outlives its killed parent for a moment writes another file."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def remove_partial_files(paths: Iterable[Path]) -> None:
    """Remove what interrupted attempts to write `paths` left behind."""
    wanted = set(paths)
    for folder in {path.parent for path in wanted}:
        for found in folder.glob(f"*{PARTIAL}"):
            if found.with_name(found.name.rsplit(".", 2)[0]) in wanted:
                found.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success it becomes `path`, on failure it is removed.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic_write(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    temporary = unique_partial_path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            flush_to_disk(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def walk(folder: Path) -> Iterator[Path]:
    """Every file below `folder` in name order, links followed, hidden folders and files left out."""
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not _leads_back(Path(directory, name))
        )
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def _leads_back(folder: Path) -> bool:
    """Whether a link leads to a folder that it stands in: following it would find the same files without end."""
    return folder.is_symlink() and folder.resolve() in (parent.resolve() for parent in folder.absolute().parents)


def rejects_path(output: Path) -> Path:
    """Where the malformed records met while writing `output` are kept."""
    return output.with_name(output.name + ".malformed")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Bytes reach the disk before the name does, so that a power cut cannot leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among processes of this machine; released when the process ends, too."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
