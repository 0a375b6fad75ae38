"""Atomic writes, locks, listing and hashing of files, and marks of unfinished stages.

A stage that writes a folder of files, such as NORM/, marks it before it writes the first file and removes the
mark after the last; no stage reads a folder that is marked. A mark is a file `.gristmill/STAGE.unfinished` in the
folder; it holds the reason.
"""

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

from gristmill.errors import InputError, wrap_write_errors

STATE_DIR = ".gristmill"  # folder in a stage's output folder, for its ledger and intermediate files
_MARK_SUFFIX = ".unfinished"
INTERRUPTED = "was interrupted"
_IS_FLUSHED_LATER: ContextVar[bool] = ContextVar("is_flushed_later", default=False)
_FEW = 8  # files that are flushed one by one
PARTIAL = ".partial"  # suffix of temporary files; the next attempt removes one left by an interrupted write


def partial_path(path: Path) -> Path:
    """Temporary name of `path`, in the same folder, so that the rename is atomic."""
    return path.with_name(path.name + PARTIAL)


def unique_partial_path(path: Path) -> Path:
    """Temporary name of `path`, unique to this call, as the worker of a killed run may still be writing."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def remove_partial_files(paths: Iterable[Path]) -> None:
    """Remove the temporary files of interrupted attempts to write `paths`."""
    targets = set(paths)
    for folder in {path.parent for path in targets}:
        for found in folder.glob(f"*{PARTIAL}"):
            if found.with_name(found.name.rsplit(".", 2)[0]) in targets:
                found.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; rename it to `path` on success, remove it on an error.

    Its bytes are on disk before the rename, unless in `flush_later`. Raises OutputError if `path` cannot be written.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic_write(target) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    temporary = unique_partial_path(path)
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            if not _IS_FLUSHED_LATER.get():
                flush_to_disk(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, by name within a folder; follow links, skip hidden files and folders."""
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not is_link_to_parent(Path(directory, name))
        )
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def is_link_to_parent(folder: Path) -> bool:
    """Whether a folder is a link to one of its own parents, which would be walked forever."""
    return folder.is_symlink() and folder.resolve() in (parent.resolve() for parent in folder.absolute().parents)


def rejects_path(output: Path) -> Path:
    """Path of the file for malformed records found while writing `output`."""
    return output.with_name(output.name + ".malformed")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def concatenate(pieces: Iterable[Path], target: Path) -> None:
    """Write the concatenation of files to `target` atomically."""
    with atomic_write(target) as temporary, temporary.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
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
    """Flush files to disk: each of a few, or for many the whole file system, which takes about as long as one."""
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
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def mark_unfinished(folder: Path, stage: str, reason: str = INTERRUPTED) -> None:
    """Mark the output of a stage in `folder` as unfinished."""
    atomic_write_bytes(_mark_path(folder, stage), reason.encode())


def mark_finished(folder: Path, stage: str) -> None:
    """Remove the stage's mark from `folder`, if there is one."""
    _mark_path(folder, stage).unlink(missing_ok=True)


def clear_marks(folder: Path, stage: str) -> None:
    """Remove the marks of all runs of a stage, of the whole or of parts of its work, from `folder`."""
    for mark in (
        *folder.glob(f"{STATE_DIR}/{stage}{_MARK_SUFFIX}"),
        *folder.glob(f"{STATE_DIR}/{stage}-*{_MARK_SUFFIX}"),
    ):
        mark.unlink(missing_ok=True)


def is_unfinished(folder: Path, stage: str) -> bool:
    """Whether `folder` has the stage's mark."""
    return _mark_path(folder, stage).exists()


def marked_stages(folder: Path, reason: str) -> list[str]:
    """The stages that have a mark with this reason in `folder`."""
    marks = (folder / STATE_DIR).glob(f"*{_MARK_SUFFIX}")
    return [mark.name.removesuffix(_MARK_SUFFIX) for mark in marks if mark.read_text(encoding="utf-8") == reason]


def reject_unfinished(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing `folder`, a parent of it, or a folder below it."""
    for root in dict.fromkeys((*folder.absolute().parents, *folder.resolve().parents)):
        _reject_marks(folder, root)
    for directory, folders, _ in os.walk(folder, followlinks=True):
        if STATE_DIR in folders:
            _reject_marks(folder, Path(directory))
        folders[:] = [name for name in folders if name[0] != "." and not is_link_to_parent(Path(directory, name))]


def _reject_marks(folder: Path, root: Path) -> None:
    for mark in sorted(root.glob(f"{STATE_DIR}/*{_MARK_SUFFIX}")):
        stage = mark.name.removesuffix(_MARK_SUFFIX)
        reason = mark.read_text(encoding="utf-8", errors="replace") or INTERRUPTED
        raise InputError(
            f"{folder} is not complete: {stage}, which writes {root}, {reason}. Run {stage.partition('-')[0]} again to "
            f"its end, with the same options. (If {root} is complete in spite of that, remove {mark}.)"
        )


def _mark_path(folder: Path, stage: str) -> Path:
    return folder / STATE_DIR / f"{stage}{_MARK_SUFFIX}"
