"""Listings of folders of objects: sizes and versions by sorted name, and folders that are listed once for all."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gristmill.paths import ObjectName, object_name


class FileInfo(NamedTuple):
    """Size in bytes, and what changes with the content: nanoseconds of a local file's modification, or an ETag."""

    size: int
    mtime_ns: int = 0
    e_tag: str = ""


Level = tuple[list[str], dict[str, FileInfo]]  # names of folders, and files, directly in a folder


class Tree:
    """All files below a folder, by name relative to it, sorted."""

    def __init__(self, files: Iterable[tuple[str, FileInfo]]) -> None:
        self.files = dict(sorted(files))
        self._names = list(self.files)

    def below(self, folder: str) -> Iterator[tuple[str, FileInfo]]:
        """Yield the files below a folder in it ('': itself), by name relative to that."""
        top = f"{folder}/" if folder else ""
        for name in islice(self._names, bisect_left(self._names, top), None):
            if not name.startswith(top):
                return
            yield name[len(top) :], self.files[name]

    def level(self, folder: str) -> Level:
        """Return the folders and the files directly in a folder in it."""
        top = f"{folder}/" if folder else ""
        folders = list[str]()
        files = dict[str, FileInfo]()
        at = bisect_left(self._names, top)
        while at < len(self._names) and self._names[at].startswith(top):
            name, slash, _ = self._names[at][len(top) :].partition("/")
            if slash:
                folders.append(name)
                at = bisect_left(self._names, f"{top}{name}0")  # the character after a slash
            else:
                files[name] = self.files[self._names[at]]
                at += 1
        return folders, files


class _Kept:
    """The tree of a folder, once it was listed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"{object_name(folder).url}/"
        self.tree: Tree | None = None


@contextmanager
def keep_listing(folder: Path) -> Iterator[None]:
    """Context: a folder in a bucket is listed once, whoever asks; what is written there in the meantime is not seen.

    `list_kept_again` has it listed once more.
    """
    is_kept = _kept_above(object_name(folder)) is not None
    token = _KEPT.set(_KEPT.get() if is_kept else (*_KEPT.get(), _Kept(folder)))
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_tree(name: ObjectName, list_all: Callable[[Path], Iterable[tuple[str, FileInfo]]]) -> tuple[Tree, str] | None:
    """Return the listing that is kept here with a folder in it, and the folder's name in it; None if there is none.

    `list_all` lists the files below the kept folder when it is first asked for.
    """
    kept = _kept_above(name)
    if kept is None:
        return None
    if kept.tree is None:
        kept.tree = Tree(list_all(kept.folder))
    return kept.tree, name.url[len(kept.url) :]


def list_kept_again() -> None:
    """List anew the folders whose listings are kept here: their objects may have changed since."""
    for kept in _KEPT.get():
        kept.tree = None


def _kept_above(name: ObjectName) -> _Kept | None:
    for kept in _KEPT.get():
        if f"{name.url}/".startswith(kept.url):
            return kept
    return None


_KEPT: ContextVar[tuple[_Kept, ...]] = ContextVar("kept", default=())
