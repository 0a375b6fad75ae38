"""Names of files: absolute paths without `..`, which after a link leads to the parent of what the link leads to."""

import os
from functools import lru_cache
from pathlib import Path

from gristmill.urls import is_remote

_UP = "/../"


def name_of(path: Path | str) -> str:
    """The absolute path of a file, by which it is compared with others; links are kept, except before a `..`.

    >>> name_of("/a/./b.txt"), name_of("/s3:/bucket/a/../b.txt")
    ('/a/b.txt', '/s3:/bucket/b.txt')
    """
    text = os.fspath(path)
    if ".." in text and not is_remote(text):
        before, up, after = f"{Path(text).absolute()}/".rpartition(_UP)
        if up:
            text = os.path.join(_without_links(before + _UP), after)
    return os.path.abspath(text)


def absolute(path: Path) -> Path:
    """The same as a Path; one that is absolute and has no `..` is returned as it is."""
    return path if path.is_absolute() and ".." not in path.parts else Path(name_of(path))


def forget_links() -> None:
    """Follow links anew: called when a stage starts."""
    _without_links.cache_clear()


@lru_cache(maxsize=1024)
def _without_links(folder: str) -> str:
    return os.path.realpath(folder)
