"""Find the files below a folder, local or in a bucket; links are followed, but not into a circle."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import wrap_read_errors
from gristmill.storage.listings import FileInfo
from gristmill.storage.objects import list_objects, refresh
from gristmill.urls import is_remote

HIDDEN = "hidden"  # reasons why a file cannot be read
LOOP = "link to a parent folder"
DANGLING = "dangling link"
SPECIAL = "not a regular file"


class Found(NamedTuple):
    """A file, its size in bytes, and '' or the reason why it cannot be read; a hidden folder counts as one file."""

    path: Path
    size: int
    reason: str = ""


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, by name within a folder; follow links, skip hidden files and folders."""
    if is_remote(folder):
        refresh(folder)
        yield from (found.path for found in _found_objects(folder, "", list_objects(folder)) if not found.reason)
        return
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not is_link_to_parent(Path(directory, name))
        )
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def walk_all(folder: Path, skipped: str) -> Iterator[Found]:
    """Yield every file below a folder, those that cannot be read included, except in folders called `skipped`."""
    if is_remote(folder):
        yield from _found_objects(folder, skipped, list_objects(folder))
        return
    with wrap_read_errors(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = folder / entry.name
        if entry.name == skipped:
            continue
        with wrap_read_errors(path):
            found = _look_at(entry, path)
        if found:
            yield found
        else:
            yield from walk_all(path, skipped)


def _look_at(entry: os.DirEntry[str], path: Path) -> Found | None:
    """What an entry of a folder is; None for a folder that is walked."""
    if entry.name.startswith("."):
        return _unread(path, HIDDEN)
    if entry.is_symlink() and not path.exists():  # entry.is_dir() raises an OSError for a link to itself
        return _unread(path, DANGLING)
    if not entry.is_dir():
        return Found(path, entry.stat().st_size) if entry.is_file() else _unread(path, SPECIAL)
    return _unread(path, LOOP) if is_link_to_parent(path) else None


def is_link_to_parent(folder: Path) -> bool:
    """Whether a folder is a link to one of its own parents, which would be walked forever."""
    return folder.is_symlink() and folder.resolve() in (parent.resolve() for parent in folder.absolute().parents)


def _found_objects(folder: Path, skipped: str, listed: Iterable[tuple[str, FileInfo]]) -> Iterator[Found]:
    for name, info in listed:
        parts = name.split("/")
        if skipped in parts[:-1] or not name:
            continue
        hidden = any(part.startswith(".") for part in parts)
        if not name.endswith("/"):  # an empty object of this name marks a folder
            yield Found(folder / name, info.size, HIDDEN if hidden else "")


def _unread(path: Path, reason: str) -> Found:
    return Found(path, path.lstat().st_size, reason)
