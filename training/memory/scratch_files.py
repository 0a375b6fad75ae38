"""Scratch files that a process has memory in: begun anew, their room taken at once."""

import os
import shutil
from pathlib import Path

from gristmill.errors import writing


def scratch_folder(folder: Path) -> None:
    """Make an empty folder, without what a run that was killed left there."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def scratch_file(path: Path, size: int) -> int:
    """The descriptor of a new file of `size` zero bytes.

    Raises OutputError where there is no room: later, a mapping would meet a full disk as a signal that kills.
    """
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        os.truncate(file, size)
    return file
