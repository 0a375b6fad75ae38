"""Fetching: copies of the objects that a task reads, as the driver saw them and the stage that wrote them recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.engine.lineage import changed_input, missing_input
from gristmill.engine.task import FileSet, parts_of
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.documents import WHOLE, Ranges, ReadInParts, merge_ranges
from gristmill.storage.files import FileInfo
from gristmill.storage.local import sha256_file
from gristmill.storage.objects import ChangedWhileRead, download
from gristmill.urls import is_remote


def fetch(path: Path, target: Path, ranges: Ranges, seen: FileInfo | None, sha256: str | None) -> None:
    """Copy ranges of an object to the same offsets of the local file `target`.

    `seen` is what the driver knows of the object, `sha256` the hash of its bytes if a stage wrote it. Raises InputError
    if it is gone or another one; of an object that is read in parts its version says so.
    """
    target.touch()
    try:
        with wrap_read_errors(path):
            found = {download(path, target, start, end) for start, end in ranges}
    except InputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise (missing_input(path) if sha256 else _no_object(path, seen)) from error
    is_same = seen is None or found <= {seen}
    if sha256 and ranges == WHOLE:  # a copy of the object has its bytes and another version
        is_same = sha256_file(target) == sha256
    if not is_same:
        raise changed_input(path) if sha256 else ChangedWhileRead(path)


def _no_object(path: Path, seen: FileInfo | None) -> InputError:
    if seen:
        what = f"{path} was removed while it was read: run the same command again"
    else:
        what = f"cannot read {path}: there is no such object. Check the path, or run the stage that writes it"
    return InputError(f"{what}. (A key that ends in a slash, {path.name}/, is no file's name: rename such an object.)")


def remote_ranges(value: Any, outputs: set[Path]) -> Iterator[tuple[Path, Ranges]]:
    """Every remote path in a value that is no output, with the bytes of it that are read, once each."""
    found: dict[Path, Ranges] = {}
    for path, ranges in _ranges(value, WHOLE):
        if path not in outputs and is_remote(path):
            found[path] = found.get(path, ()) + ranges
    yield from ((path, merge_ranges(ranges)) for path, ranges in found.items())


def _ranges(value: Any, ranges: Ranges) -> Iterator[tuple[Path, Ranges]]:
    """Every path in a value with the bytes that are read: those that the value around it reads, or all."""
    if isinstance(value, Path | FileSet):
        for path in value.paths if isinstance(value, FileSet) else (value,):
            yield path, ranges
    else:
        for item in parts_of(value):
            yield from _ranges(item, value.ranges if isinstance(value, ReadInParts) else ranges)
