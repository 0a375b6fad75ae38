"""What a user's function changes in its process, beside the documents: it is put back after each call."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def keep_folder() -> Iterator[None]:
    """Context: the working folder is the same after it."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def keep_settings() -> Iterator[None]:
    """Context: working folder, file mode mask and timers are the same after it; modules that were removed are back.

    Ends the process if all its files were closed meanwhile, as os.closerange does: it cannot say so any more.
    """
    file, mask = os.open(os.devnull, os.O_RDONLY), os.umask(0)
    os.umask(mask)
    found, modules = os.fstat(file), sys.modules.copy()
    try:
        with keep_folder():
            yield
    finally:
        sys.modules.update(modules)
        os.umask(mask)
        signal.setitimer(signal.ITIMER_REAL, 0)  # also that of signal.alarm
        if not _is_open(file, found):
            os._exit(1)
        os.close(file)


def _is_open(file: int, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(file), found)
    except OSError:
        return False
