"""Every error a user can meet.

    GristmillError
    ├── UsageError          what was asked cannot be done: an option, a path, a configuration
    ├── InputError          the data is damaged: truncated, corrupt, unreadable; names file and line
    │   └── TooManyMalformed  more malformed records than --max_malformed allows
    ├── OutputError         the result cannot be written: disk full, no permission, a folder in use
    └── ConservationError   documents went missing between two counts

A message says what was given, what was wanted and what to try. Command lines print it without a
traceback; broken invariants of our own are `assert`s, and those do print one.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class GristmillError(Exception):
    """An error to be read by a person; `exit_code` is what a command line returns for it."""

    exit_code = 1


class UsageError(GristmillError, ValueError):
    """What was asked cannot be done."""

    exit_code = 2


class InputError(GristmillError, ValueError):
    """The data given is damaged, and how much is lost cannot be known."""


class TooManyMalformed(InputError):
    """More malformed records than `--max_malformed` allows."""


class OutputError(GristmillError, OSError):
    """The result cannot be written."""


class ConservationError(GristmillError):
    """Documents read and documents accounted for differ."""


def require(condition: bool, message: str) -> None:
    """Raise UsageError with `message` unless `condition` holds."""
    if not condition:
        raise UsageError(message)


_WRITE_HINTS = {
    errno.ENOSPC: "the disk is full: free some space and run the same command again, it goes on from here",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again",
    errno.EACCES: "no permission to write there: choose another folder or change its permissions",
    errno.EPERM: "no permission to write there: choose another folder or change its permissions",
    errno.EROFS: "that file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of that path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name stands where a folder is wanted: choose another folder",
    errno.EISDIR: "a folder of that name stands in the way: choose another folder or remove it",
    errno.ENAMETOOLONG: "that file name is too long for the file system: rename the input file",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into an OutputError that says what to try."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, OutputError):
            raise
        hint = _WRITE_HINTS.get(error.errno, f"{error.strerror}. Choose another folder")
        raise OutputError(f"cannot write {path}: {hint}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to read `path` into an InputError: within `writing`, they were its own."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, OutputError):
            raise
        raise InputError(
            f"cannot read {path}: {error.strerror}. Check that it is there and may be read, or remove it to go on"
        ) from error
