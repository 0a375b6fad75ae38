"""Listings of folders of objects: sizes and versions by sorted name, and a raw corpus that is listed once for all."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gristmill.paths import ObjectName, is_remote, object_name


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


class _Kept:
    """The tree of a folder, once it was listed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"{object_name(folder).url}/"
        self.tree: Tree | None = None


@contextmanager
def listed_once(folder: Path) -> Iterator[None]:
    """Context: a folder in a bucket is listed once, whoever asks; what is written there in the meantime is not seen."""
    kept = _KEPT.get()
    is_kept = not is_remote(folder) or (kept and f"{object_name(folder).url}/".startswith(kept.url))
    token = _KEPT.set(kept if is_kept else _Kept(folder))
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_tree(name: ObjectName, list_all: Callable[[Path], Iterable[tuple[str, FileInfo]]]) -> tuple[Tree, str] | None:
    """The listing that is kept here with a folder in it, and the folder's name in it; None if there is none.

    `list_all` lists the files below the kept folder when it is first asked for.
    """
    kept = _KEPT.get()
    if kept is None or not f"{name.url}/".startswith(kept.url):
        return None
    if kept.tree is None:
        kept.tree = Tree(list_all(kept.folder))
    return kept.tree, name.url[len(kept.url) :]


def list_kept_again() -> None:
    """List anew the folder whose listing is kept here, if there is one: its objects may have changed since."""
    if kept := _KEPT.get():
        kept.tree = None


_KEPT: ContextVar[_Kept | None] = ContextVar("kept", default=None)
