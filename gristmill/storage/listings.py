"""Listings of folders of objects: sizes and versions by sorted name, and a raw corpus that is listed once for all."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gristmill.urls import ObjectName, is_remote, object_name


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
        """The files below a folder in it ('': itself), by name relative to that."""
        top = f"{folder}/" if folder else ""
        for name in islice(self._names, bisect_left(self._names, top), None):
            if not name.startswith(top):
                return
            yield name[len(top) :], self.files[name]

    def level(self, folder: str) -> Level:
        """The folders and the files directly in a folder in it."""
        top, folders, files = f"{folder}/" if folder else "", list[str](), dict[str, FileInfo]()
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


class KeptListing:
    """The tree of a folder, listed when it is first asked for; what is written there later is not seen."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, object_name(folder)
        self.tree: Tree | None = None

    def tree_of(self, name: ObjectName, list_all: Callable[[Path], Iterable[tuple[str, FileInfo]]]) -> Tree | None:
        """The tree of this folder if it is or holds `name`, else None."""
        if not f"{name.url}/".startswith(f"{self.name.url}/"):
            return None
        if self.tree is None:
            self.tree = Tree(list_all(self.folder))
        return self.tree

    def key(self, name: ObjectName) -> str:
        """A folder that this one holds, relative to it."""
        return name.url[len(self.name.url) + 1 :]


@contextmanager
def listed_once(folder: Path) -> Iterator[None]:
    """Context: a folder in a bucket is listed once, whoever asks; what is written there in the meantime is not seen."""
    token = _KEPT.set(KeptListing(folder) if is_remote(folder) else None)
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_listing() -> KeptListing | None:
    """The listing of the folder that is listed once here, if there is one."""
    return _KEPT.get()


_KEPT: ContextVar[KeptListing | None] = ContextVar("kept_listing", default=None)
