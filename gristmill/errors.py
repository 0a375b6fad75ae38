"""Errors that users see.

    GristmillError
    ├── UsageError          invalid option, path or configuration
    ├── InputError          damaged input: truncated, corrupt, unreadable; names file and line
    │   ├── DamagedFile       a file cannot be read to its end: stages that read a raw corpus leave it out
    │   └── TooManyMalformed  more malformed records or damaged files than --max_malformed allows
    ├── OutputError         output cannot be written: disk full, no permission, folder in use
    ├── StorageError        an object store fails for longer than requests are repeated
    ├── WorkerDied          a worker process was killed, most often as the machine ran out of memory
    ├── FinishedElsewhere   no error: the process that this one helped has finished the work
    ├── AlarmError          a run with --strict made counts that look wrong
    └── ConservationError   documents were lost: incoming and outgoing counts differ

A message says what was expected, what was given and what to try. Command lines print it without a
traceback, and end with exit code 2 for a UsageError: what was typed or configured cannot be, also where that shows only
in the first records; with 1 for another: the command was right, and data, disk, memory or a store did not allow it.
Violated invariants of the code are AssertionErrors, with a traceback.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.paths import spell_urls


class GristmillError(Exception):
    """Base class of errors whose message is written for users; `exit_code` is the exit code of a command line."""

    exit_code = 1

    def __str__(self) -> str:
        return spell_urls(super().__str__())


class UsageError(GristmillError, ValueError):
    """An option, a path or a configuration is invalid."""

    exit_code = 2


class InputError(GristmillError, ValueError):
    """Input is truncated, corrupt or unreadable."""


class DamagedFile(InputError):
    """A corpus file cannot be read to its end. `fault` says why in a few words, `detail` in sentences."""

    def __init__(self, path: Path, fault: str, detail: str) -> None:
        super().__init__(path, fault, detail)
        self.path = path
        self.fault = fault
        self.detail = detail

    def __str__(self) -> str:
        return spell_urls(f"{self.path}: {self.detail}")


class TooManyMalformed(InputError):
    """More records are malformed, or more bytes are in damaged files, than `--max_malformed` allows."""


class OutputError(GristmillError, OSError):
    """The output cannot be written."""


class TakenOver(OutputError):
    """Another process has the lock of the work by now, as this one seemed to be dead."""


class StorageError(GristmillError):
    """An object store does not answer, or fails, for longer than requests are repeated; worth another try."""


class WorkerDied(GristmillError):
    """A worker process was killed, most often because the machine ran out of memory."""


class FinishedElsewhere(GristmillError):
    """The process that this one helped has finished the work: there is nothing left to do here, and no result."""

    exit_code = 0


class AlarmError(GristmillError):
    """The counts of a run look wrong, and --strict allows no alarm."""

    exit_code = 3


class ConservationError(GristmillError):
    """Documents were lost: the number read differs from the sum of documents written and dropped."""


def require(condition: bool, message: str) -> None:
    """Raise UsageError with `message` unless `condition` is true."""
    if not condition:
        raise UsageError(message)


LIMIT_HINTS = {  # of errors for which no file is to blame
    errno.EMFILE: "the limit of open files is reached: raise it (ulimit -n 4096), or give fewer --workers",
    errno.ENFILE: "this machine has reached its limit of open files: stop other programs, or give fewer --workers",
}
_WRITE_HINTS = LIMIT_HINTS | {
    errno.ENOSPC: "the disk is full: free some space and run the same command again to resume",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again to resume",
    errno.EFBIG: "the limit of file sizes is reached: raise it (ulimit -f unlimited), or choose a folder on "
    "another file system",
    errno.EACCES: "no permission to write there: choose another folder or change its permissions",
    errno.EPERM: "no permission to write there: choose another folder or change its permissions",
    errno.EROFS: "that file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of that path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name exists where a folder is expected: choose another folder",
    errno.EISDIR: "a folder of that name exists: choose another folder or remove it",
    errno.ENAMETOOLONG: "that file name is too long for the file system: rename the input file",
}


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Context: convert an OSError to an OutputError that names `path` and suggests a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, OutputError):
            raise
        link = _dangling_link(path) if error.errno in (errno.EEXIST, errno.ENOTDIR) else ""
        hint = link or _WRITE_HINTS.get(error.errno, f"{error.strerror}. Choose another folder")
        raise OutputError(f"cannot write {path}: {hint}") from error


def _dangling_link(path: Path) -> str:
    """Return what is wrong with a dangling link on the way to `path`; '' if there is none."""
    for folder in (path, *path.parents):
        if folder.is_symlink() and not folder.exists():
            return (
                f"{folder} is a link to {folder.readlink()}, which does not exist: create that folder, or remove the "
                "link"
            )
    return ""


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Context: convert an OSError to an InputError that names `path`, also inside `wrap_write_errors`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, OutputError):
            raise
        hint = LIMIT_HINTS.get(error.errno, f"{error.strerror}. Check that it exists and may be read, or remove it")
        raise InputError(f"cannot read {path}: {hint}") from error
