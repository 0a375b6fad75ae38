"""Listings of folders in buckets that are kept for a while: a raw corpus is listed once for all that asks for it."""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from operator import itemgetter
from pathlib import Path

from gristmill.storage.info import FileInfo
from gristmill.urls import is_remote, object_name

Entries = list[tuple[str, FileInfo]]
Level = tuple[list[str], dict[str, FileInfo]]


class KeptListing:
    """Every object below a folder, once it was listed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, object_name(folder).url
        self.entries: Entries | None = None
        self._levels: dict[str, Level] = {}  # by folder, relative to this one; '' for itself

    def keep(self, entries: Iterable[tuple[str, FileInfo]]) -> Entries:
        """Keep what the folder holds now: sorted names relative to it."""
        self.entries, self._levels = list(entries), {}
        for name, info in self.entries:
            folder, file = os.path.split(name)
            self._level(folder)[1][file] = info
        return self.entries

    def level(self, folder: Path) -> Level | None:
        """The names of the folders, and the objects, directly in a folder; None if that is not known."""
        name = self._name(folder)
        return None if name is None else self._levels.get(name, ([], {}))

    def below(self, folder: Path) -> Entries | None:
        """The objects below a folder, by names relative to it; None if they are not known."""
        name = self._name(folder)
        if name is None:
            return None
        top = f"{name}/" if name else ""
        start, found = bisect_left(self.entries or [], top, key=itemgetter(0)), Entries()
        for path, info in islice(self.entries or [], start, None):
            if not path.startswith(top):
                break
            found.append((path[len(top) :], info))
        return found

    def _name(self, folder: Path) -> str | None:
        """The name of a folder relative to this one; None if it is another, or this one was not listed yet."""
        url = f"{object_name(folder).url}/"
        return url[len(self.url) + 1 : -1] if self.entries is not None and url.startswith(f"{self.url}/") else None

    def _level(self, folder: str) -> Level:
        if folder not in self._levels:
            self._levels[folder] = [], {}
            if folder:
                above, name = os.path.split(folder)
                self._level(above)[0].append(name)
        return self._levels[folder]


@contextmanager
def listed_once(folder: Path) -> Iterator[None]:
    """Context: a folder in a bucket is listed once, whoever asks; what is written there meanwhile is not seen."""
    token = _KEPT.set(KeptListing(folder) if is_remote(folder) else None)
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_listing() -> KeptListing | None:
    """The listing of the folder that is listed once here, if there is one."""
    return _KEPT.get()


_KEPT: ContextVar[KeptListing | None] = ContextVar("kept_listing", default=None)
