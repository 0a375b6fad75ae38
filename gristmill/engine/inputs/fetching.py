"""Fetching: copies of the objects that a task reads, as the driver saw them and the stage that wrote them recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.engine.lineage import writer_of
from gristmill.engine.task import FileSet, parts_of
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.documents import WHOLE, Ranges, ReadInParts, merge_ranges
from gristmill.storage.files import FileInfo
from gristmill.storage.local import sha256_file
from gristmill.storage.objects import download
from gristmill.urls import is_remote


def fetch(path: Path, target: Path, ranges: Ranges, seen: FileInfo | None, sha256: str | None) -> None:
    """Copy ranges of an object to the same offsets of the local file `target`.

    `seen` is what the driver knows of the object, `sha256` the hash of its bytes if a stage wrote it. Raises InputError
    if it is gone or another one; of an object that is read in parts its version says so.
    """
    target.touch()
    found = {_download(path, target, start, end, seen, sha256) for start, end in ranges}
    is_same = seen is None or found <= {seen}
    if sha256 and ranges == WHOLE:  # a copy of the object has its bytes and another version
        if sha256_file(target) != sha256:
            raise _is_damaged(path) if is_same else _is_other(path)
    elif not is_same:
        raise _is_other(path) if sha256 else _was_changed(path)


def _download(
    path: Path, target: Path, start: int, end: int | None, seen: FileInfo | None, sha256: str | None
) -> FileInfo:
    try:
        with wrap_read_errors(path):
            return download(path, target, start, end)
    except InputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if sha256:
            stage = _writer(path)
            raise InputError(
                f"{path}, which {stage} wrote, is missing. Run {stage} again, which writes it anew, and then the same "
                "command"
            ) from error
        if seen:
            what = f"{path} was removed while it was read: run the same command again"
        else:
            what = f"cannot read {path}: there is no such object. Check the path, or run the stage that writes it"
        slash = f"(A key that ends in a slash, {path.name}/, is no file's name: rename such an object.)"
        raise InputError(f"{what}. {slash}") from error


def _is_damaged(path: Path) -> InputError:
    stage = _writer(path)
    return InputError(
        f"{path} is damaged: it has the recorded size and version, and its bytes are not those that {stage} wrote. "
        f"Remove it and run {stage} again, which writes it anew"
    )


def _is_other(path: Path) -> InputError:
    stage = _writer(path)
    return InputError(
        f"{path} is not what {stage} wrote: it was changed or damaged since. Run {stage} again, which writes it anew, "
        "and then the same command"
    )


def _was_changed(path: Path) -> InputError:
    return InputError(f"{path} was changed while it was read: run the same command again")


def _writer(path: Path) -> str:
    return writer_of(path) or "the stage before"


def remote_ranges(value: Any, outputs: set[Path]) -> Iterator[tuple[Path, Ranges]]:
    """Every remote path in a value that is no output, with the bytes of it that are read, once each."""
    found: dict[Path, Ranges] = {}
    for path, ranges in _ranges(value, WHOLE):
        if path not in outputs and is_remote(path):
            found[path] = found.get(path, ()) + ranges
    yield from ((path, merge_ranges(ranges)) for path, ranges in found.items())


def _ranges(value: Any, ranges: Ranges) -> Iterator[tuple[Path, Ranges]]:
    """Every path in a value with the bytes that are read: those that its holder reads, or the whole."""
    if isinstance(value, Path | FileSet):
        for path in value.paths if isinstance(value, FileSet) else (value,):
            yield path, ranges
    else:
        for item in parts_of(value):
            yield from _ranges(item, value.ranges if isinstance(value, ReadInParts) else ranges)
