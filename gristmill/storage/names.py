"""Names of files: absolute paths without `..`, by which files are compared, and paths relative to a folder."""

import os
import re
from functools import lru_cache
from pathlib import Path

from gristmill.urls import is_remote

_ODD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")  # an empty part of a path, `.` or `..`


def name_of(path: Path | str) -> str:
    """The absolute path of a file, by which it is compared with others.

    >>> name_of("/a/./b.txt"), name_of("/s3:/bucket/a/../b.txt")
    ('/a/b.txt', '/s3:/bucket/b.txt')
    """
    text = str(path)
    is_absolute = text[:1] == "/"
    if not _ODD_PART.search(text, is_absolute):  # as most are, of the many that a large corpus has
        return text if is_absolute else f"{os.getcwd().rstrip('/')}/{text}"  # noqa: PTH109
    if ".." in text and not is_remote(text):  # after a link, `..` is the parent of what the link leads to
        return os.path.realpath(text)
    return os.path.abspath(text)


def absolute(path: Path) -> Path:
    """The same as a Path; one that is absolute and has no `..` is returned as it is."""
    name = name_of(path)
    return path if name == str(path) else Path(name)


def join(folder: str, relative: str) -> str:
    """The absolute path of a file, given relative to a folder of such a name.

    >>> join("/a/b", "c.txt"), join("/a/b", "../c.txt"), join("/", "c.txt")
    ('/a/b/c.txt', '/a/c.txt', '/c.txt')
    """
    while relative.startswith("../"):
        folder, relative = folder.rpartition("/")[0] or "/", relative[3:]
    if folder != "/" and not _ODD_PART.search(relative):
        return f"{folder}/{relative}"
    return os.path.normpath(os.path.join(folder, relative))


def relative_to(folder: str, name: str) -> str:
    """The other way round: the path of a file relative to a folder, both given as absolute paths.

    >>> relative_to("/a/b", "/a/b/c.txt"), relative_to("/a/b", "/a/c.txt")
    ('c.txt', '../c.txt')
    """
    if name.startswith(f"{folder}/"):
        return name[len(folder) + 1 :]
    if folder == "/" or f"{folder}/".startswith(f"{name.rstrip('/')}/"):
        return os.path.relpath(name, folder)
    above, slash, file = name.rpartition("/")
    return f"{_folder_relative_to(folder, above or slash)}/{file}"


@lru_cache(maxsize=1024)
def _folder_relative_to(folder: str, other: str) -> str:
    return os.path.relpath(other, folder)
