"""Scratch files for offloading: created empty for each run, with their disk space allocated at once."""

import os
import shutil
from pathlib import Path

from gristmill.errors import wrap_write_errors


def make_scratch_folder(folder: Path) -> None:
    """Make an empty folder, removing what a killed run left in it."""
    with wrap_write_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def open_scratch_file(path: Path, size: int) -> int:
    """Create a file of `size` zero bytes and return its descriptor.

    Raises OutputError if the disk is full: without this check, writing to a memory-mapped file would end in SIGBUS.
    """
    with wrap_write_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        os.truncate(file, size)
    return file
