"""Scratch files for offloading: created empty for each run, with their disk space allocated at once."""

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from gristmill.errors import OutputError, wrap_write_errors


def make_scratch_folder(folder: Path) -> int:
    """Make an empty folder, removing what a killed run left in it; return the descriptor of its lock.

    Raises OutputError where another process uses it: two runs would read and remove each other's files.
    """
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(_lock_path(folder))
        if lock is None:
            raise OutputError(
                f"{folder} is in use by another training run; give each run its own folder with --memory.folder"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return lock


def remove_scratch_folder(folder: Path, lock: int, files: Iterable[int] = ()) -> None:
    """Remove a folder of `make_scratch_folder`, and give its lock back; closes the descriptors `files` before."""
    for file in files:
        os.close(file)
    shutil.rmtree(folder, ignore_errors=True)
    _lock_path(folder).unlink(missing_ok=True)
    os.close(lock)


def open_scratch_file(path: Path, size: int) -> int:
    """Create a file of `size` zero bytes and return its descriptor.

    Raises OutputError if the disk is full: without this check, writing to a memory-mapped file would end in SIGBUS.
    """
    with wrap_write_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            os.truncate(file, size)
        except OSError:
            os.close(file)
            raise
    return file


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock(path: Path) -> int | None:
    """Return the descriptor of a locked file, which the kernel frees with the process.

    None where another process has it.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return None
            raise
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # the run that held it has just removed it
